"""Checks of a built wheel, without running it and with it. Each returns a word for the table or raises WheelError.

bits.c: tests/core/bits.c, linked to the wheel's own objects, on every target with an emulator here (QEMU for AArch64,
wine for Windows). Its lines must be the lines of GCC's scalar table. Tests: the installed wheel, with the walk of
`python -m cattn` and a part of the tests, in fresh environments with the oldest and the newest NumPy; for AArch64 with
Debian's Python under QEMU.
"""

import functools
import json
import platform
import re
import runpy
import shutil
import sys
import tempfile
import threading
import zipfile
from dataclasses import dataclass, field
from pathlib import Path

import pefile
from build import ROOT, Wheel, WheelError, run
from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile
from elftools.elf.sections import SymbolTableSection
from macholib import mach_o
from macholib.MachO import MachO
from macholib.SymbolTable import SymbolTable

MOST_BYTES = 2_000_000
EXPORTED = {"PyInit__cattn", "cattn_get_num_threads", "cattn_set_num_threads"}  # csrc/cattn.h: CATTN_EXPORT
LIBRARIES = {  # of the system, or of Python
    "manylinux": r"lib(c|m|pthread)\.so\.6|libpthread\.so\.0|ld-linux-(x86-64|aarch64)\.so\.[12]",
    "musllinux": r"libc\.so|libc\.musl-(x86_64|aarch64)\.so\.1",
    "macos": r"/usr/lib/libSystem\.B\.dylib",
    "windows": r"(?i)python3\.dll|kernel32\.dll|api-ms-win-(crt|core)-[a-z0-9-]+\.dll",
}


@dataclass
class Binary:
    """What the system's loader reads of a module."""

    machine: str  # x86_64 or aarch64
    exported: set[str] = field(default_factory=set)
    libraries: set[str] = field(default_factory=set)
    search_paths: set[str] = field(default_factory=set)
    oldest: str = ""  # of macOS, the first version
    signed: bool = False  # on macOS


def read_elf(path: Path) -> Binary:
    """Read a module for Linux."""
    with path.open("rb") as file:
        elf = ELFFile(file)
        binary = Binary({"EM_X86_64": "x86_64", "EM_AARCH64": "aarch64"}[elf["e_machine"]])
        for section in elf.iter_sections():
            if isinstance(section, DynamicSection):
                for tag in section.iter_tags():
                    if tag.entry.d_tag == "DT_NEEDED":
                        binary.libraries.add(tag.needed)
                    elif tag.entry.d_tag in ("DT_RPATH", "DT_RUNPATH"):
                        binary.search_paths.add(getattr(tag, tag.entry.d_tag[3:].lower()))
            if isinstance(section, SymbolTableSection) and section["sh_type"] == "SHT_DYNSYM":
                for symbol in section.iter_symbols():
                    visible = symbol["st_other"]["visibility"] == "STV_DEFAULT"
                    bound = symbol["st_info"]["bind"] in ("STB_GLOBAL", "STB_WEAK")
                    if symbol["st_shndx"] != "SHN_UNDEF" and visible and bound:
                        binary.exported.add(symbol.name)
    return binary


def read_macho(path: Path) -> Binary:
    """Read a module for macOS."""
    (header,) = MachO(str(path)).headers
    binary = Binary({0x01000007: "x86_64", 0x0100000C: "aarch64"}[header.header.cputype])
    for load, command, data in header.commands:
        if load.cmd in (mach_o.LC_LOAD_DYLIB, mach_o.LC_LOAD_WEAK_DYLIB, mach_o.LC_REEXPORT_DYLIB):
            binary.libraries.add(data.rstrip(b"\0").decode())
        elif load.cmd == mach_o.LC_RPATH:
            binary.search_paths.add(data.rstrip(b"\0").decode())
        elif load.cmd == mach_o.LC_CODE_SIGNATURE:
            binary.signed = True
        elif load.cmd in (mach_o.LC_BUILD_VERSION, mach_o.LC_VERSION_MIN_MACOSX):
            packed = command.minos if load.cmd == mach_o.LC_BUILD_VERSION else command.version
            binary.oldest = f"{packed >> 16}.{packed >> 8 & 255}"
    for symbol, name in SymbolTable(MachO(str(path)), header).extdefsyms:
        if symbol.n_type & mach_o.N_EXT and not symbol.n_type & mach_o.N_PEXT:
            binary.exported.add(name.decode().removeprefix("_"))
    binary.exported -= {"__dso_handle", "_mh_dylib_header"}  # zig's linker puts them into every library
    return binary


def read_pe(path: Path) -> Binary:
    """Read a module for Windows."""
    pe = pefile.PE(str(path))
    binary = Binary({0x8664: "x86_64", 0xAA64: "aarch64"}[pe.FILE_HEADER.Machine])
    binary.exported = {symbol.name.decode() for symbol in pe.DIRECTORY_ENTRY_EXPORT.symbols}
    binary.libraries = {entry.dll.decode() for entry in pe.DIRECTORY_ENTRY_IMPORT}
    return binary


READERS = {"linux": read_elf, "macos": read_macho, "windows": read_pe}


def check_name(wheel: Wheel) -> str:
    """Check that the tags are those that were meant, and the size."""
    python = "cp314-cp314t" if wheel.python.free_threaded else "cp311-abi3"
    if not wheel.path.name.endswith(f"-{python}-{wheel.target.tag}.whl"):
        raise WheelError(f"{wheel.path.name} should have the tags {python}-{wheel.target.tag}")
    if wheel.size >= MOST_BYTES:
        raise WheelError(f"{wheel.path.name} has {wheel.size} bytes, {MOST_BYTES} or more")
    return "ok"


def check_platform(wheel: Wheel) -> str:
    """Check the oldest system that the tag promises: by the versions of symbols on Linux, the header on macOS."""
    target = wheel.target
    if target.system == "linux":
        with tempfile.TemporaryDirectory() as empty:  # this machine's libraries are not the target's
            said = run(sys.executable, "-m", "auditwheel", "show", "--json", "--ldpaths", empty, wheel.path)
        found = json.loads(said[said.index("{\n") :])["overall_tag"]
        names = [re.fullmatch(r"([a-z]+)_(\d+)_(\d+)_\w+", tag) for tag in (found, target.tag)]
        if not names[0] or not names[1] or names[0][1] != names[1][1]:
            raise WheelError(f"auditwheel on {wheel.path.name}: {said}")
        versions = [tuple(map(int, name.groups()[1:])) for name in names if name]
        if versions[0] > versions[1]:
            raise WheelError(f"auditwheel calls {wheel.path.name} {found}")
        return found.removesuffix(f"_{target.machine}")
    if target.system == "macos":
        binary = read_macho(wheel.module)
        if f"macosx_{binary.oldest.replace('.', '_')}" not in target.tag:
            raise WheelError(f"{wheel.path.name} needs macOS {binary.oldest}")
        if target.machine == "aarch64" and not binary.signed:
            raise WheelError(f"{wheel.path.name} is not signed: Macs with Arm processors refuse it")
        return f"macOS {binary.oldest}"
    return "-"


def check_abi(wheel: Wheel) -> str:
    """Check that the module uses no more of Python than the stable ABI of its tag."""
    if wheel.python.free_threaded:
        return "-"
    run(sys.executable, "-m", "abi3audit", "--strict", wheel.path)
    return "ok"


def check_metadata(wheel: Wheel) -> str:
    """Check the metadata as the package index does."""
    run(sys.executable, "-m", "twine", "check", "--strict", wheel.path)
    return "ok"


def check_contents(wheel: Wheel) -> str:
    """Check that the wheel has the package and nothing else."""
    run(sys.executable, "-m", "check_wheel_contents", wheel.path)
    with zipfile.ZipFile(wheel.path) as archive:
        names = archive.namelist()
        modules = [name for name in names if name.endswith((".so", ".pyd", ".dll", ".dylib"))]
    if len(modules) != 1:
        raise WheelError(f"{wheel.path.name} has the libraries {modules}")
    if "cattn/_view/core.wasm" not in names:
        raise WheelError(f"{wheel.path.name} lacks the core of live views")
    return "ok"


def check_binary(wheel: Wheel) -> str:
    """Check the module's machine, the names that it exports and the libraries that it loads."""
    binary = READERS[wheel.target.system](wheel.module)
    name = wheel.path.name
    if binary.machine != wheel.target.machine:
        raise WheelError(f"{name} has a module for {binary.machine}")
    if binary.exported != EXPORTED:
        raise WheelError(f"{name} exports {sorted(binary.exported)} instead of {sorted(EXPORTED)}")
    pattern = LIBRARIES[wheel.target.name.partition("_")[0]]
    if stray := sorted(library for library in binary.libraries if not re.fullmatch(pattern, library)):
        raise WheelError(f"{name} loads {stray}")
    if binary.search_paths:
        raise WheelError(f"{name} searches {sorted(binary.search_paths)}")
    return f"{len(binary.exported)} names"


CHECKS = {
    "name": check_name,
    "platform": check_platform,
    "abi3audit": check_abi,
    "twine": check_metadata,
    "contents": check_contents,
    "binary": check_binary,
}


# ---- what can run here -----------------------------------------------------------------------------------------------
OLDEST_NUMPY = {11: "2.0.0", 12: "2.0.0", 13: "2.1.0", 14: "2.3.2"}  # the first with wheels for this Python 3
TEST_PACKAGES = ["hypothesis", "ml_dtypes", "pytest>=9", "pytest-xdist>=3.6"]
_LOCK = threading.Lock()
MACHINES = runpy.run_path(str(ROOT / "tools" / "machines"))  # it compares the lines of bits.c
FAST_TABLES = {"avx2_4x2", "avx2", "avx512_256", "avx512"}
FAST_TABLES |= {"avx512_256_bf16", "avx512_bf16_few", "avx512_bf16", "avx512_amx"}
# One test is about builds in place, which have one table more than wheels.
NOT_OF_WHEELS = "tests/project/test_config.py::test_every_table_is_compiled_wherever_it_can_be"
SHORT_TESTS = ["config", "bits", "masks", "varlen"]  # they need no more than TEST_PACKAGES
LONG_TESTS = [
    *SHORT_TESTS,
    "attention",
    "backward",
    "cache",
    "decoding",
    "dropout",
    "errors",
    "fp_mode",
    "outputs",
    "threads",
]


def x86_features() -> set[str]:
    """Return the features of this processor, or nothing if it is not an x86 processor of a Linux machine."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.exists() else []
    return set(next((line for line in lines if line.startswith("flags")), "").partition(":")[2].split())


def emulator(wheel: Wheel) -> list[str] | None:
    """Return the words before a program of this target, or None if it cannot run here."""
    words = wheel.target.emulator
    if words is None or platform.system() != "Linux":
        return None
    if not words:
        return [] if platform.machine() == wheel.target.machine else None
    found = shutil.which(words[0]) or shutil.which(words[0], path="/usr/lib/wine")  # Debian's is not on the path
    return [found, *words[1:]] if found else None


# ---- bits.c ----------------------------------------------------------------------------------------------------------
@functools.cache
def _right_lines(n: int) -> list[str]:
    with tempfile.TemporaryDirectory() as work:
        x86 = MACHINES["X86"]
        program = MACHINES["compile_core"](x86, ROOT, ["scalar"], Path(work, "gcc"))
        lines: list[str] = MACHINES["lines_of"](x86, program, "scalar", n)
        return lines


def right_lines(n: int) -> list[str]:
    """Return what bits.c prints for n problems with GCC and the scalar table; wheels are tried side by side."""
    with _LOCK:
        return _right_lines(n)


def compare_bits(wheel: Wheel, n: int) -> str:
    """Every table that runs and is inside the bit contract gives the right lines."""
    words = emulator(wheel)
    if words is None:
        return "not run"
    program = wheel.compiler.with_name("bits.exe")
    flags = ["-std=gnu11", "-O1", "-ffp-contract=off", "-I", ROOT / "csrc"]
    libraries = [] if wheel.target.system == "windows" else ["-pthread", "-lm"]
    sources = [ROOT / file for file in MACHINES["BITS"]]
    run(wheel.compiler, *flags, *sources, *wheel.objects, *libraries, "-o", program)
    wine = ["env", "WINEDEBUG=-all", f"WINEPREFIX={wheel.compiler.with_name('wine')}"]
    tables = MACHINES["ON_X86"] if wheel.target.machine == "x86_64" else MACHINES["PORTABLE"]
    machine = MACHINES["Machine"](wheel.target.name, (), (*wine, *words), tables)
    try:
        MACHINES["compare_tables"](machine, program, n, right_lines(n))
    except MACHINES["MachineError"] as failure:
        raise WheelError(str(failure)) from None
    return "ok"


# ---- the installed wheel ---------------------------------------------------------------------------------------------
def walk_digits(output: str) -> list[str]:
    """Return the numbers of the walk that `python -m cattn` prints, without the times that it measures at the end."""
    return re.findall(r"-?\d+\.\d+", output.partition("This machine:")[0])


def run_tests(wheel: Wheel, python: list[str | Path], env: dict[str, str | None], tests: list[str]) -> tuple[str, str]:
    """Check the table in use, run the walk and some tests; return the walk and the last line of the tests."""
    code = "import cattn, json; print(json.dumps([cattn.__file__, cattn.show_config('dicts')]))"
    with tempfile.TemporaryDirectory() as empty:
        found = run(*python, "-W", "error", "-c", code, cwd=Path(empty), env=env)
        walk = run(*python, "-m", "cattn", cwd=Path(empty), env=env)
    if str(wheel.tree) in found:
        raise WheelError(f"the tests would not test the wheel: {found}")
    table = re.search(r'"instruction_set": "(\w+)", "bit_contract": (true|false)', found)
    if not table:
        raise WheelError(f"show_config() does not name the table in use: {found}")
    wanted = FAST_TABLES if {"fma", "avx2"} <= x86_features() and wheel.target.machine == "x86_64" else {table[1]}
    if table[1] not in wanted or (table[2] == "false" and "fma" in x86_features()):
        raise WheelError(f"{wheel.path.name} takes the slow table {table[1]} on this processor")
    options = ["-q", "-n0", "-p", "no:cacheprovider", "--deselect", NOT_OF_WHEELS]
    said = run(*python, "-m", "pytest", *options, *tests, cwd=wheel.tree, env=env)
    return walk, said.splitlines()[-1].strip("= ")


def test_files(names: list[str]) -> list[str]:
    """Return the paths of tests, each of which must exist."""
    paths = {name: [str(path.relative_to(ROOT)) for path in ROOT.glob(f"tests/*/test_{name}.py")] for name in names}
    if missing := [name for name, found in paths.items() if not found]:
        raise WheelError(f"there are no tests of {', '.join(missing)}")
    return [path for found in paths.values() for path in found]


def test_native(wheel: Wheel, long: bool) -> str:
    """Test in fresh environments with the oldest and the newest NumPy."""
    walks, words = [], []
    oldest = OLDEST_NUMPY.get(sys.version_info.minor)
    for requirement in ([f"numpy=={oldest}"] if oldest else []) + ["numpy"]:
        place = wheel.compiler.with_name(f"venv-{len(words)}")
        run(wheel.python.executable, "-m", "venv", place)
        python = place / "bin" / "python"
        pip = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-compile"]
        run(*pip, "--only-binary=:all:", wheel.path, requirement, *TEST_PACKAGES)
        version = run(python, "-c", "import numpy; print(numpy.__version__)").strip()
        walk, last = run_tests(wheel, [python], {"PYTHONPATH": None}, test_files(LONG_TESTS if long else SHORT_TESTS))
        walks.append(walk_digits(walk))
        words.append(f"NumPy {version}: {last}")
    if walks[0] != walks[-1] or not walks[0]:
        raise WheelError("python -m cattn prints other digits with another NumPy")
    return "; ".join(words)


def debian_python(work: Path) -> Path | None:
    """Unpack Debian's Python for AArch64 and all that it needs into a folder; None without Debian's tools.

    APT gets folders of its own, and no list of installed packages: the machine's packages stay as they are.
    """
    root = work / "debian"
    if root.exists():
        return root
    if not shutil.which("apt-get") or not Path("/etc/apt").is_dir():
        return None
    state = work / "apt"
    for name in ("lists/partial", "archives/partial"):
        (state / name).mkdir(parents=True, exist_ok=True)
    (state / "status").touch()
    options = {
        "APT::Architecture": "arm64",
        "APT::Architectures": "arm64",
        "APT::Sandbox::User": "",
        "Dir::State": state,
        "Dir::State::Lists": state / "lists",
        "Dir::State::Status": state / "status",
        "Dir::Cache": state,
        "Dir::Cache::Archives": state / "archives",
    }
    words = [word for name, value in options.items() for word in ("-o", f"{name}={value}")]
    run("apt-get", *words, "-q", "update")
    run("apt-get", *words, "-q", "-y", "--download-only", "--no-install-recommends", "install", "python3", "libstdc++6")
    for package in sorted(state.glob("archives/*.deb")):
        run("dpkg-deb", "-x", package, root)
    return root


def test_aarch64(wheel: Wheel, long: bool, work: Path) -> str:
    """Test with Debian's Python under QEMU."""
    root = debian_python(work) if shutil.which("qemu-aarch64") else None
    if root is None:
        return "not run: needs qemu-user and Debian's packages"
    python = (root / "usr/bin/python3").resolve()
    version = python.name.removeprefix("python")
    site = work / "debian-site"
    tags = [f"manylinux_2_28_{wheel.target.machine}", f"manylinux2014_{wheel.target.machine}", wheel.target.tag]
    platforms = [word for tag in tags for word in ("--platform", tag)]
    pip = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-compile"]
    only = ["--target", site, "--only-binary=:all:", "--python-version", version, *platforms]
    run(*pip, *only, wheel.path, "numpy", *TEST_PACKAGES)
    env: dict[str, str | None] = {"PYTHONPATH": str(site), "PYTHONDONTWRITEBYTECODE": "1", "OPENBLAS_NUM_THREADS": "1"}
    env |= {"OPENBLAS_CORETYPE": None, "OPENBLAS_L2_SIZE": None}
    tests = test_files(LONG_TESTS) if long else [*test_files(["bits"]), "-k", "gnu128 and float32"]
    _, last = run_tests(wheel, ["qemu-aarch64", "-L", root, python], env, tests)
    return f"QEMU, Python {version}: {last}"


def try_wheel(wheel: Wheel, long: bool, work: Path) -> str:
    """Run the tests of a wheel if it can be installed here."""
    target = wheel.target
    if target.name == "manylinux_x86_64" and emulator(wheel) == []:
        return test_native(wheel, long)
    if target.name == "manylinux_aarch64":
        return test_aarch64(wheel, long, work)
    return "not run"
