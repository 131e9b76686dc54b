"""setup.py: compilers, flags, tables, what a change compiles again; the ELF file; what each extra installs."""

from __future__ import annotations

import ast
import contextlib
import json
import os
import re
import runpy
import shutil
import sys
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from sysconfig import get_path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from setuptools import Distribution, Extension
from setuptools._distutils import ccompiler, sysconfig
from setuptools.errors import CompileError, LinkError

from cattn import _cattn
from support import ROOT
from support.processes import run_command

pytest.importorskip("setuptools")


@pytest.fixture
def setup(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The names of setup.py."""
    monkeypatch.chdir(ROOT)
    for name in ("CC", "CATTN_TABLES"):
        monkeypatch.delenv(name, raising=False)
    with mock.patch("setuptools.setup"):
        return runpy.run_path("setup.py")


def command(setup: dict[str, Any], compiler: SimpleNamespace) -> Any:
    """A build_ext of setup.py with this compiler."""
    build = setup["BuildTables"](Distribution())
    build.for_tests, build.editable_mode, build.plat_name, build.compiler = True, False, "win-amd64", compiler
    return build


def visual_studio(root: Path, hosts: list[str]) -> Path:
    """Lay out a Visual Studio as its installer does; return its cl.exe."""
    tools = root / "VC" / "Tools"
    cl = tools / "MSVC" / "14.44.35207" / "bin" / "HostX86" / "x64" / "cl.exe"
    for path in [cl, *(tools / "Llvm" / host / "bin" / "clang-cl.exe" for host in hosts)]:
        path.parent.mkdir(parents=True)
        path.touch()
    return cl


def msvc(cl: str) -> SimpleNamespace:
    return SimpleNamespace(compiler_type="msvc", initialized=True, cc=cl, compile_options=["/nologo", "/GL", "/MD"])


def test_clang_cl_of_visual_studio_replaces_cl(setup: dict[str, Any], tmp_path: Path) -> None:
    cl = visual_studio(tmp_path, ["x64", "ARM64"])
    compiler = msvc(str(cl))
    command(setup, compiler).use_clang_cl()
    assert compiler.cc == str(tmp_path / "VC" / "Tools" / "Llvm" / "x64" / "bin" / "clang-cl.exe")
    assert compiler.compile_options == ["/nologo", "/MD"]


def test_cc_chooses_another_clang_cl(setup: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = msvc(str(visual_studio(tmp_path, ["x64"])))
    monkeypatch.setenv("CC", "/opt/llvm/bin/clang-cl")
    command(setup, compiler).use_clang_cl()
    assert compiler.cc == "/opt/llvm/bin/clang-cl"


@pytest.mark.parametrize("found", [True, False], ids=["cl", "cl.exe without a path"])
def test_cl_alone_is_an_error_that_names_the_component(
    setup: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, found: bool
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    cl = str(visual_studio(tmp_path, [])) if found else "cl.exe"
    with pytest.raises(CompileError, match=r'add the component "C\+\+ Clang Compiler for Windows"'):
        command(setup, msvc(cl)).use_clang_cl()


def cross_compiler(compile_probe: Callable[..., list[str]] = lambda *_, **__: [], *words: str) -> SimpleNamespace:
    """A compiler whose programs do not run on this machine."""

    def link(*_: Any, **__: Any) -> None:
        raise LinkError("no program runs here")

    return SimpleNamespace(
        compiler_type="unix", compiler_so=["cc", *words], compile=compile_probe, link_executable=link
    )


def test_a_macs_compiler_for_two_machines_gets_flags_for_one(setup: dict[str, Any]) -> None:
    compiler = cross_compiler(lambda *_, **__: [], "-arch", "arm64", "-arch", "x86_64")
    tables = command(setup, compiler).table_flags()
    assert tables["avx2"] == ["-Xarch_x86_64", "-mavx2", "-Xarch_x86_64", "-mfma", "-Xarch_x86_64", "-mf16c"]
    assert tables["gnu128"] == []
    assert tables.keys() == {*setup["TABLES"], *setup["ONE_KIND"]}


@pytest.mark.parametrize("is_x86", [True, False])
def test_the_compiler_says_for_which_machine_it_compiles(setup: dict[str, Any], is_x86: bool) -> None:
    def compile_probe(sources: list[str], directory: str, **options: Any) -> list[str]:
        if "#error not x86-64" in Path(sources[0]).read_text() and not is_x86:
            raise CompileError("#error not x86-64")
        return []

    tables = command(setup, cross_compiler(compile_probe)).table_flags()
    assert tables.keys() == ({*setup["TABLES"], *setup["ONE_KIND"]} if is_x86 else setup["PORTABLE"].keys())


def test_wheels_have_no_table_for_tests(setup: dict[str, Any]) -> None:
    build = command(setup, cross_compiler())
    build.for_tests = False
    assert setup["TABLES"].keys() - build.table_flags().keys() == {"gnu512"}


def test_a_build_is_for_this_machine(setup: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The table that is in use here is optimised; those that wait for another machine have -O1."""
    build = unix(setup, monkeypatch)
    preferred = build.preferred_tables()
    in_use = _cattn._get_isa()
    assert preferred - setup["ONE_KIND"].keys() == {in_use.partition("_bf16")[0].removesuffix("_amx")}
    assert (setup["AVX512_BF16"] in preferred) == ("bf16" in in_use or "amx" in in_use)
    assert (setup["AMX"] in preferred) == ("amx" in in_use)
    for wanted, names in {"": preferred | {"scalar"}, "all": set(setup["TABLES"])}.items():
        monkeypatch.setenv("CATTN_TABLES", wanted)
        tables = build.table_flags()
        assert tables.keys() >= names
        assert {name for name, flags in tables.items() if "-O1" not in flags} == preferred
    assert len(tables) > len(preferred) + 1


def test_an_unknown_table_is_refused(setup: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CATTN_TABLES", "avx2,avx51")
    with pytest.raises(CompileError, match=r"CATTN_TABLES=avx2,avx51: no table 'avx51', only all or scalar, gnu128"):
        unix(setup, monkeypatch).table_flags()


# ---- arithmetic ----------------------------------------------------------------------------------------------------
def unix(setup: dict[str, Any], monkeypatch: pytest.MonkeyPatch, **environment: str) -> Any:
    """A build_ext with this machine's compiler, which has read the environment."""
    program = shutil.which(os.environ.get("CC", "gcc").split()[0])
    if sys.platform == "win32" or program is None:
        pytest.skip("needs GCC or Clang")
    for name in ("CFLAGS", "CPPFLAGS", "LDFLAGS", "LDSHARED"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CC", program)
    for name, value in environment.items():
        monkeypatch.setenv(name, value.replace("$CC", program))
    build = command(setup, ccompiler.new_compiler())
    sysconfig.customize_compiler(build.compiler)
    return build


INEXACT = [
    "-ffast-math", "-Ofast", "-funsafe-math-optimizations", "-ffinite-math-only", "-freciprocal-math",
    "-fno-signed-zeros", "-fassociative-math -fno-signed-zeros -fno-trapping-math", "-fsingle-precision-constant",
    "-ffp-contract=fast -mfma", "-mfpmath=387", "-fexcess-precision=standard -mfpmath=387", "-ffp-model=fast",
    "-fapprox-func -fno-honor-nans",
]  # fmt: skip
# The compiler defines a macro for these, which is an error of the compilation; then one is made that does not.
ADMITTED = INEXACT[:8]
SILENT = [f"-U__{name}__" for name in ("FAST_MATH", "FINITE_MATH_ONLY", "ASSOCIATIVE_MATH", "RECIPROCAL_MATH")]
SILENT += ["-U__NO_SIGNED_ZEROS__"]


ARITHMETIC = """\
#ifdef VECTOR_BYTES
#include "kernels/simd_gnu.h"
#else
#include "kernels/simd_scalar.h"
#endif
#include "kernels/arithmetic.inc.h"
int main(void) { return keeps_arithmetic() ? 0 : 1; }
"""


def compile_and_run(build: Any, directory: Path, bits: str, *flags: str) -> int:
    """Compile and link a program that checks its own arithmetic; return its exit code, 0 if it is exact."""
    source = directory / "arithmetic.c"
    source.write_text(ARITHMETIC)
    flags = ("-std=gnu11", "-O2", "-Icsrc", f"-DREAL_BITS={bits}", "-Wno-unused-function", *flags)
    objects = build.compiler.compile([str(source)], str(directory), extra_postargs=list(flags))
    build.compiler.link_executable(objects, str(directory / "arithmetic"), extra_postargs=build.link_flags())
    return run_command([directory / "arithmetic"]).returncode


@pytest.mark.parametrize("words", INEXACT)
def test_flags_that_change_arithmetic_are_taken_back(
    setup: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, words: str
) -> None:
    """Before the flags of every object they change nothing; after them a table finds out, or does not compile."""
    build = unix(setup, monkeypatch)
    if not build.accepts(words.split()):
        pytest.skip("this compiler does not know the flags")
    where = {"CC": f"$CC {words}"} if words in ("-ffast-math", "-mfpmath=387") else {"CFLAGS": words}
    build = unix(setup, monkeypatch, **where)
    assert words in " ".join(build.compiler.compiler_so)
    flags = build.flags()
    assert compile_and_run(build, tmp_path, "32", *flags) == 0
    assert compile_and_run(build, tmp_path, "64", *flags, "-DVECTOR_BYTES=16") == 0
    with pytest.raises(CompileError) if words in ADMITTED else contextlib.nullcontext():
        assert compile_and_run(build, tmp_path, "32", *words.split()) == 1
    if words in ADMITTED[:-1]:
        assert compile_and_run(build, tmp_path, "32", *words.split(), *SILENT) == 1


@pytest.mark.parametrize("where", ["CFLAGS", "LDFLAGS", "CC"])
@pytest.mark.parametrize("words", ["-ffast-math", "-Ofast", "-funsafe-math-optimizations", "-mdaz-ftz", "-mpc32"])
def test_the_module_is_linked_without_a_change_of_the_floating_point_mode(
    setup: dict[str, Any], monkeypatch: pytest.MonkeyPatch, words: str, where: str
) -> None:
    """What can be taken back is; the precision of the x87 unit is refused by name."""
    if not unix(setup, monkeypatch).accepts([words]):
        pytest.skip("this compiler does not know the flag")
    build = unix(setup, monkeypatch, **{where: words if where != "CC" else f"$CC {words}"})
    assert words in build.compiler.linker_so
    if words == "-mpc32":
        with pytest.raises(LinkError, match=r"the linker would add crtprec32, .*remove -mdaz-ftz, -mpc32"):
            build.check_link(build.link_flags())
    else:
        build.check_link(build.link_flags())


def test_clang_cl_computes_exactly_after_all_other_flags(setup: dict[str, Any]) -> None:
    build = command(setup, msvc("clang-cl.exe"))
    assert {"/clang:-fno-fast-math", "/clang:-ffp-contract=off"} <= set(build.flags())


# ---- what is compiled again ----------------------------------------------------------------------------------------
def test_a_header_compiles_what_includes_it_and_flags_compile_everything(
    setup: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A project of three files, with the layers of this one."""
    files = {
        "binding/module.c": '#include "names with $ and space.h"\n#include "binding.h"\n'
        "PyMODINIT_FUNC PyInit_x(void);\nPyMODINIT_FUNC PyInit_x(void) { return NULL; }\n",
        "binding/names with $ and space.h": "",
        "binding/binding.h": "#include <Python.h>\n",
        "core/core.c": '#include "../kernels/kernels.h"\nint core = 1;\n',
        "kernels/kernels.h": "",
        "kernels/kernels_table.c": '#include "kernels.h"\n#ifdef ROW_KERNELS\n#define NAME_(b) r##b\n#else\n'
        "#define NAME_(b) k##b\n#endif\n#define NAME(b) NAME_(b)\nint NAME(REAL_BITS) = 1;\n",
    }
    for name, text in files.items():
        path = tmp_path / "csrc" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CATTN_TABLES", "scalar")

    def compiled(**environment: str) -> list[str]:
        """Build; return the names of the sources that were compiled."""
        build = unix(setup, monkeypatch, **environment)
        names: list[str] = []
        compile_one = build.compiler.compile

        def record(sources: list[str], *arguments: Any, **options: Any) -> Any:
            names.extend(Path(source).stem for source in sources if source.startswith("csrc"))
            return compile_one(sources, *arguments, **options)

        build.compiler.compile = record
        build.build_temp, build.build_lib, build.force = "temporary", "library", False
        build.include_dirs, build.library_dirs, build.libraries, build.swig_opts = [], [], [], []
        build.compiler.set_include_dirs([get_path("include")])
        extension = Extension("x", ["csrc/binding/module.c", "csrc/core/core.c"])
        extension._needs_stub = False
        build.build_extension(extension)
        return sorted(names)

    def touch(name: str) -> None:
        times.append(times[-1] + 10)
        os.utime(Path("csrc", name), (times[-1], times[-1]))
        for made in Path("temporary").rglob("*.o"):  # as if it had been made just before
            os.utime(made, (times[-1] - 5, times[-1] - 5))

    times = [time.time()]
    everything = ["core", *["kernels_table"] * len(setup["KINDS"]), "module"]
    assert compiled() == everything
    assert compiled() == []
    touch("binding/binding.h")
    assert compiled() == ["module"]
    touch("binding/names with $ and space.h")
    assert compiled() == ["module"]
    touch("kernels/kernels.h")
    assert compiled() == everything[:-1]
    touch("core/core.c")
    assert compiled() == ["core"]
    assert compiled(CFLAGS="-DOTHER") == everything


# ---- without a compiler ----------------------------------------------------------------------------------------------
CURES = {"Debian": "apt install gcc", "Fedora": "dnf install gcc", "macOS": "xcode-select", "Windows": "Visual Studio"}


@pytest.mark.skipif(sys.platform == "win32", reason="Windows does not use CC")
@pytest.mark.parametrize("missing", ["compiler", "headers"])
def test_a_build_without_a_compiler_says_how_to_get_one(missing: str, tmp_path: Path) -> None:
    compiler = tmp_path / "cc"
    if missing == "headers":
        compiler.write_text(
            "#!/bin/sh\necho 'probe.c:1: fatal error: Python.h: No such file or directory' >&2\nexit 1\n"
        )
        compiler.chmod(0o755)
    done = run_command(
        [sys.executable, "setup.py", "build", "--build-base", str(tmp_path / "build")],
        cwd=ROOT, env={**os.environ, "CC": str(compiler)}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 1
    (error,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert error.startswith("error: cattn needs a C compiler and Python's headers (")
    assert str(compiler) in error
    assert all(system in error and cure in error for system, cure in CURES.items())
    lines = (done.stdout + done.stderr).splitlines()
    assert len(lines) < 12, "the error must not drown"
    assert not any(line.startswith(("copying", "creating build")) for line in lines)
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.glob("build/lib*/**/*.py"))


# ---- the module as an ELF file ---------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def module() -> str:
    """What readelf says of the module: its segments, the dynamic section and the symbols."""
    if not Path(_cattn.__file__).read_bytes().startswith(b"\x7fELF"):
        assert Path(_cattn.__file__).suffix in (".so", ".pyd"), "in other formats the linker's export list decides"
        pytest.skip("not an ELF file")
    if (readelf := shutil.which("readelf")) is None:
        pytest.skip("readelf is not installed; it comes with GCC")
    options = ["--wide", "--segments", "--dynamic", "--dyn-syms"]
    done = run_command(
        [readelf, *options, _cattn.__file__], capture_output=True, text=True, env={**os.environ, "LC_ALL": "C"}
    )
    return str(done.stdout)


@pytest.mark.promise("hardened module")
def test_the_module_exports_three_functions(module: str) -> None:
    symbols = set(re.findall(r" (?:GLOBAL|WEAK) +DEFAULT +\d+ (\w+)", module))
    of_the_linker = {"_init", "_fini", "_edata", "_end", "__bss_start"}
    assert symbols - of_the_linker == {"PyInit__cattn", "cattn_get_num_threads", "cattn_set_num_threads"}


@pytest.mark.promise("hardened module")
def test_no_segment_is_writable_and_executable(module: str) -> None:
    segments = re.findall(r"^ +(LOAD|GNU_STACK) +(?:0x\w+ +){5}([RWE ]{3})", module, re.MULTILINE)
    assert {"LOAD", "GNU_STACK"} == {name for name, _ in segments}
    assert any("E" in flags for _, flags in segments)
    assert any("W" in flags for name, flags in segments if name == "LOAD")
    assert not any("W" in flags and "E" in flags for _, flags in segments)


@pytest.mark.promise("hardened module")
def test_relocation_tables_are_read_only_after_loading(module: str) -> None:
    """Full RELRO: the loader binds every symbol at once, then write-protects the tables."""
    assert re.search(r"^ +GNU_RELRO ", module, re.MULTILINE)
    assert re.search(r"\((?:FLAGS|FLAGS_1)\).*NOW", module)
    assert "TEXTREL" not in module


@pytest.mark.promise("hardened module")
def test_the_module_has_no_library_search_path(module: str) -> None:
    assert not re.search(r"\((?:RPATH|RUNPATH)\)", module)


# ---- the extras ------------------------------------------------------------------------------------------------------
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
EXTRAS: dict[str, list[str]] = PROJECT["project"]["optional-dependencies"]


def packages(name: str) -> set[str]:
    """Return the names of the packages of an extra, and of those that it includes, as modules."""
    found = {"numpy"}
    for requirement in EXTRAS[name]:
        if included := re.match(r"cattn\[(.*)\]", requirement):
            found.update(*map(packages, included[1].split(",")))
        else:
            found.add(re.match(r"[\w-]+", requirement)[0].replace("-", "_"))
    return found


def imports(code: str) -> set[str]:
    """Return the packages that Python code imports, besides cattn and the standard library."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names.add(node.module or "")
    return {name.partition(".")[0] for name in names} - sys.stdlib_module_names - {"cattn"}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_extra_examples_has_what_a_notebook_needs_or_the_notebook_says_so(path: Path) -> None:
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    code = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    code = re.sub(r"^%.*$", "", code, flags=re.MULTILINE)  # IPython's commands
    needed = imports(code) - packages("examples") - {script.stem for script in path.parent.glob("*.py")}
    assert needed <= {"torch", "transformers"}
    extras = "bf16,examples,transformers" if "transformers" in needed else "examples,torch"
    assert (f"'.[{extras}]'" in "".join(cells[0]["source"])) == bool(needed)


def test_the_extra_examples_does_not_bring_pytorch() -> None:
    """Its default build on Linux is for GPUs and has several gigabytes. Half of the notebooks do not use it."""
    assert "torch" not in packages("examples")
