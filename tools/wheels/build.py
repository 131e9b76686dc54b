"""Builds the wheels: the source distribution first, then from its files one wheel for each target and Python.

setup.py runs as in any installation. What it would find out about the building machine comes from the target: the
variables of sysconfig and the platform (as in CPython's own cross builds), the compiler, and the headers of Python and
NumPy.
"""

import functools
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tarfile
import threading
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy

ROOT = Path(__file__).resolve().parents[2]
CORE = "python/cattn/_view/core.wasm"  # of live views
_LOCK = threading.Lock()
ABI = (3, 11)  # of the abi3 wheels, as in setup.py


# ---- the platforms that get a wheel ----------------------------------------------------------------------------------
@dataclass(frozen=True)
class Target:
    """A platform: its names in the words of wheels, zig, Python and pip, and how its programs run here."""

    name: str
    tag: str  # the wheel's platform tag
    zig: str  # the compiler's target; its version names the oldest glibc or macOS
    platform: str  # sysconfig.get_platform() of the target's Python
    numpy: tuple[str, ...]  # platform tags of NumPy's wheels that have the right headers
    emulator: tuple[str, ...] | None  # runs its programs; None: this machine cannot

    @property
    def machine(self) -> str:
        """x86_64 or aarch64."""
        return self.zig.partition("-")[0]

    @property
    def system(self) -> str:
        """Linux, macos or windows."""
        return self.zig.split("-")[1].partition(".")[0]


def _linux(machine: str, libc: str, emulator: tuple[str, ...]) -> Target:
    tag, zig = {"gnu": ("manylinux_2_17", "gnu.2.17"), "musl": ("musllinux_1_2", "musl")}[libc]
    return Target(
        name=f"{tag.partition('_')[0]}_{machine}",
        tag=f"{tag}_{machine}",
        zig=f"{machine}-linux-{zig}",
        platform=f"linux-{machine}",
        numpy=(f"manylinux_2_28_{machine}", f"manylinux2014_{machine}")
        if libc == "gnu"
        else (f"musllinux_1_2_{machine}",),
        emulator=emulator,
    )


def _macos(machine: str, zig: str, version: str) -> Target:
    return Target(
        name=f"macos_{machine}",
        tag=f"macosx_{version.replace('.', '_')}_{machine}",
        zig=f"{zig}-macos.{version}",
        platform=f"macosx-{version}-{machine}",
        numpy=(f"macosx_14_0_{machine}",),
        emulator=None,
    )


def _windows(machine: str, zig: str, emulator: tuple[str, ...] | None) -> Target:
    return Target(
        name=f"windows_{machine}",
        tag=f"win_{machine}",
        zig=f"{zig}-windows-gnu",
        platform=f"win-{machine}",
        numpy=(f"win_{machine}",),
        emulator=emulator,
    )


TARGETS = [
    _linux("x86_64", "gnu", ()),
    _linux("x86_64", "musl", ()),
    _linux("aarch64", "gnu", ("qemu-aarch64", "-L", "/usr/aarch64-linux-gnu")),
    _linux("aarch64", "musl", ("qemu-aarch64",)),
    _macos("arm64", "aarch64", "11.0"),
    _macos("x86_64", "x86_64", "10.13"),
    _windows("amd64", "x86_64", ("wine64",)),
    _windows("arm64", "aarch64", None),
]


# ---- building --------------------------------------------------------------------------------------------------------
class WheelError(Exception):
    """A step failed, or a wheel is not as it should be; the message says which."""


def run(
    *command: str | Path, cwd: Path = ROOT, env: dict[str, str | None] | None = None, errors_too: bool = True
) -> str:
    """Run a command and return its output, by default with standard error; fail if the exit code is not 0.

    A variable that is None in `env` is removed from the environment.
    """
    words = [str(word) for word in command]
    done = subprocess.run(
        words,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT if errors_too else subprocess.PIPE,
        text=True,
        errors="replace",
        cwd=cwd,
        env={name: value for name, value in {**os.environ, **(env or {})}.items() if value is not None},
    )
    if done.returncode != 0:
        said = done.stdout + (done.stderr or "")
        raise WheelError(f"{' '.join(words)} failed with exit code {done.returncode}:\n{said}")
    return done.stdout


def epoch() -> str:
    """Return SOURCE_DATE_EPOCH of the environment, or the date of the last commit."""
    return os.environ.get("SOURCE_DATE_EPOCH") or run("git", "log", "-1", "--format=%ct").strip()


# ---- Pythons ---------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Python:
    """A Python that runs setup.py."""

    executable: Path
    include: str  # the directory of its headers
    variables: dict[str, str | int]  # of sysconfig

    @property
    def free_threaded(self) -> bool:
        """Whether it is built without the GIL. Then there is no stable ABI, and the wheel is for this version."""
        return bool(self.variables.get("Py_GIL_DISABLED"))


def describe(executable: str | Path) -> Python:
    """Return what setup.py would ask this Python."""
    code = "import json, sysconfig as s; print(json.dumps([s.get_path('include'), s.get_config_vars()]))"
    include, variables = json.loads(run(executable, "-c", code))
    return Python(Path(executable), include, variables)


def pythons(work: Path) -> Iterable[Python]:
    """Yield this Python, then the free-threaded one if there is any, with the packages that setup.py needs."""
    yield describe(sys.executable)
    found = shutil.which("python3.14t")
    if not found:
        print("no cp314t wheels: there is no python3.14t here, hence no headers of a free-threaded Python")
        return
    run(found, "-m", "venv", work / "free_threaded")
    executable = work / "free_threaded" / "bin" / "python"
    run(executable, "-m", "pip", "install", "-q", "setuptools>=77", f"numpy=={numpy.__version__}")
    yield describe(executable)


# ---- a target's compiler and headers ---------------------------------------------------------------------------------
@functools.cache
def zig() -> Path:
    """Return the program of the package ziglang."""
    spec = importlib.util.find_spec("ziglang")
    if not spec or not spec.origin:
        raise WheelError("the package ziglang is missing: pip install --group wheels")
    return Path(spec.origin).with_name("zig")


def numpy_headers(target: Target, work: Path) -> Path:
    """Return the headers of NumPy's wheel for the target: the sizes of C types differ."""
    with _LOCK:  # wheels are built side by side
        return _numpy_headers(target, work / "numpy" / target.name)


def _numpy_headers(target: Target, place: Path) -> Path:
    if not place.exists():
        platforms = [word for platform in target.numpy for word in ("--platform", platform)]
        options = ["-q", "--no-deps", "--only-binary=:all:", "-d", place]
        run(sys.executable, "-m", "pip", "download", *options, *platforms, f"numpy=={numpy.__version__}")
        (wheel,) = place.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(place, [name for name in archive.namelist() if "/include/" in name])
        wheel.unlink()
    return place / "numpy" / "_core" / "include"


def python_headers(target: Target, python: Python, place: Path) -> Path:
    """Return the headers of a Python for the target: only pyconfig.h depends on it."""
    shutil.copytree(python.include, place, dirs_exist_ok=True)
    shutil.copy(Path(__file__).with_name("pyconfig.h"), place)
    return place


def import_library(target: Target, place: Path) -> None:
    """Make python3.lib for Windows from the names of the stable ABI."""
    import abi3info  # the tests read TARGETS without the group "wheels"

    names = [f.symbol.name for f in abi3info.FUNCTIONS.values() if f.added <= abi3info.models.PyVersion(*ABI)]
    data = [d.symbol.name for d in abi3info.DATAS.values() if d.added <= abi3info.models.PyVersion(*ABI)]
    lines = ["LIBRARY python3.dll", "EXPORTS", *names, *(f"{name} DATA" for name in data)]
    (place / "python3.def").write_text("\n".join(lines) + "\n")
    machine = {"x86_64": "i386:x86-64", "aarch64": "arm64"}[target.machine]
    run(zig(), "dlltool", "-m", machine, "-D", "python3.dll", "-d", "python3.def", "-l", "python3.lib", cwd=place)


def musl_library(target: Target, place: Path) -> Path:
    """Make a library with the names of musl under the file name that musl's distributions use, to link to.

    zig calls it libc.so. To musl's loader both names mean itself, but auditwheel wants this one.
    """
    library = place / f"libc.musl-{target.machine}.so.1"
    family = {"x86_64": "x86", "aarch64": "aarch64"}[target.machine]
    defines = ["-DPTR64", f"-DARCH_{target.machine}", f"-DFAMILY_{family}"]
    flags = ["-target", target.zig, "-nostdlib", "-shared", *defines, f"-Wl,-soname,{library.name}"]
    run(zig(), "cc", *flags, zig().with_name("lib") / "libc" / "musl" / "libc.S", "-o", library)
    return library


def write_compiler(target: Target, python: Python, work: Path, place: Path) -> Path:
    """Write a script that calls zig for this target, and return its path. Headers of Python and NumPy are in it."""
    # -I, so that they come before the headers of the building Python, which setuptools adds by -I
    headers = [f"-I{python_headers(target, python, place / 'include')}", f"-isystem{numpy_headers(target, work)}"]
    words = [zig(), "cc", "-target", target.zig, *headers]
    if python.free_threaded:
        words.append("-DPy_GIL_DISABLED=1")
    script = place / "cc"
    script.write_text(f'#!/bin/sh\nexec {" ".join(map(str, words))} "$@"\n')
    script.chmod(0o755)
    return script


def link_flags(target: Target) -> str:
    """Return what links a module for Python; -s: without a symbol table."""
    if target.system == "macos":
        return "-shared -Wl,-undefined,dynamic_lookup -Wl,-install_name,@rpath/_cattn.so -Wl,-x -Wl,-S"
    return "-shared -s"


# ---- wheels ----------------------------------------------------------------------------------------------------------
@dataclass
class Wheel:
    """A built wheel, and what is needed to check it."""

    path: Path
    target: Target
    python: Python
    compiler: Path
    objects: list[Path]  # of csrc/core and csrc/kernels
    tree: Path

    @property
    def size(self) -> int:
        """Bytes."""
        return self.path.stat().st_size

    @functools.cached_property
    def module(self) -> Path:
        """The extension module, unpacked."""
        with zipfile.ZipFile(self.path) as archive:
            (name,) = [name for name in archive.namelist() if name.startswith("cattn/_cattn.") and name[-4:] != ".pyi"]
            return Path(archive.extract(name, self.compiler.parent / "unpacked"))


def make_sdist(dist: Path) -> Path:
    """Write the source distribution and return its path. Wheels also have the core of live views, which is compiled."""
    run(sys.executable, "tools/live")
    run(sys.executable, "setup.py", "-q", "sdist", "--dist-dir", dist)
    (path,) = dist.glob("*.tar.gz")
    return path


def unpack(sdist: Path, place: Path) -> Path:
    """Return the only folder of the source distribution, unpacked."""
    with tarfile.open(sdist) as archive:
        archive.extractall(place, filter="data")
    (tree,) = place.iterdir()
    return tree


def build_wheel(target: Target, python: Python, sdist: Path, dist: Path, work: Path) -> Wheel:
    """Build one wheel, in a folder of its own."""
    place = work / f"{target.name}-{'t' if python.free_threaded else 'abi3'}-{dist.name}"
    tree = unpack(sdist, place / "tree")
    shutil.copy(ROOT / CORE, tree / CORE)
    compiler = write_compiler(target, python, work, place)
    linker = f"{compiler} {link_flags(target)}"
    if target.zig.endswith("musl"):
        linker += f" {musl_library(target, place)}"
    libraries = ""
    if target.system == "windows":
        import_library(target, place)
        libraries = f"libraries = python3\nlibrary_dirs = {place}\n"
    variables = {
        **python.variables,
        "CC": str(compiler),
        "CXX": str(compiler),
        # zig would add frame pointers and checks of the stack, which cost the kernels up to 4 %
        "CFLAGS": "-DNDEBUG -fwrapv -fno-stack-protector -fomit-frame-pointer",
        "CCSHARED": "" if target.system == "windows" else "-fPIC",
        "LDSHARED": linker,
        "LDCXXSHARED": linker,
        "Py_ENABLE_SHARED": 0,  # else the directory of this Python is searched for libraries
        "EXT_SUFFIX": ".cp3-win.pyd" if target.system == "windows" else ".cpython-3.so",
    }
    (place / "_sysconfigdata_target.py").write_text(f"build_time_vars = {variables!r}\n")
    (place / "setup.cfg").write_text(
        f"[build]\nbuild_base = {place}/build\n[build_ext]\n{libraries}"
        f"[bdist_wheel]\nplat_name = {target.tag}\ndist_dir = {place}/dist\n"
    )
    environment: dict[str, str | None] = dict.fromkeys(["CC", "CFLAGS", "CPPFLAGS", "LDFLAGS", "LDSHARED"])
    environment |= {name: None for name in os.environ if name.startswith("CATTN_")}
    environment |= {
        "CATTN_TABLES": "all",
        "DIST_EXTRA_CONFIG": str(place / "setup.cfg"),
        "PYTHONPATH": str(place),
        "PYTHONDONTWRITEBYTECODE": "1",
        "SOURCE_DATE_EPOCH": epoch(),
        "ZIG_LOCAL_CACHE_DIR": str(place / "cache"),  # not shared: the second build must not copy the first
        "_PYTHON_HOST_PLATFORM": target.platform,
        "_PYTHON_SYSCONFIGDATA_NAME": "_sysconfigdata_target",
    }
    run(python.executable, "setup.py", "-q", "bdist_wheel", cwd=tree, env=environment)
    dist.mkdir(exist_ok=True)
    (path,) = (place / "dist").glob("*.whl")
    path = shutil.move(path, dist / path.name)
    objects = sorted(file for layer in ("core", "kernels") for file in place.glob(f"build/**/csrc/{layer}/*.o*"))
    return Wheel(path, target, python, compiler, objects, tree)
