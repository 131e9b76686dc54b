"""setup.py: which compiler it takes on Windows, and which kernel tables it compiles for a machine."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from setuptools import Distribution
from setuptools.errors import CompileError

ROOT = Path(__file__).parent.parent


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


def test_a_macs_compiler_for_two_machines_gets_flags_for_one(setup: dict[str, Any]) -> None:
    words = ["clang", "-arch", "arm64", "-arch", "x86_64"]
    tables = command(setup, SimpleNamespace(compiler_type="unix", compiler_so=words)).table_flags()
    assert tables["avx2"] == ["-Xarch_x86_64", "-mavx2", "-Xarch_x86_64", "-mfma", "-Xarch_x86_64", "-mf16c"]
    assert tables["gnu128"] == []
    assert tables.keys() == setup["TABLES"].keys()


@pytest.mark.parametrize("is_x86", [True, False])
def test_the_compiler_says_for_which_machine_it_compiles(setup: dict[str, Any], is_x86: bool) -> None:
    def compile_probe(sources: list[str], directory: str, extra_postargs: list[str]) -> None:
        assert "__x86_64__" in Path(sources[0]).read_text()
        if not is_x86:
            raise CompileError("#error not x86-64")

    compiler = SimpleNamespace(compiler_type="unix", compiler_so=["cc"], compile=compile_probe)
    tables = command(setup, compiler).table_flags()
    assert tables.keys() == (setup["TABLES"] if is_x86 else setup["PORTABLE"]).keys()


def test_wheels_have_no_table_for_tests(setup: dict[str, Any]) -> None:
    build = command(setup, SimpleNamespace(compiler_type="unix", compiler_so=["cc"], compile=lambda *_, **__: []))
    build.for_tests = False
    assert setup["TABLES"].keys() - build.table_flags().keys() == {"gnu512"}
