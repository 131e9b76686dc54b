"""Layers of the C code include each other in one direction only; files and functions stay short."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CSRC = ROOT / "csrc"
C_FILES = sorted(path for path in CSRC.rglob("*") if path.suffix in (".c", ".h"))
FILES = [*C_FILES, *sorted((ROOT / "python").rglob("*.py")), *sorted((ROOT / "tests").glob("*.py"))]


def includes(path: Path) -> list[str]:
    return re.findall(r'^\s*#\s*include\s+[<"]([^>"]+)[>"]', path.read_text(), re.MULTILINE)


def layer_of(path: Path) -> str:
    return path.relative_to(CSRC).parts[0]


def test_every_layer_has_files() -> None:
    assert {layer_of(path) for path in C_FILES} >= {"binding", "core", "kernels", "cattn.h"}


@pytest.mark.parametrize("path", C_FILES, ids=lambda path: str(path.relative_to(CSRC)))
def test_a_layer_includes_only_the_layers_below_it(path: Path) -> None:
    names = includes(path)
    layer = layer_of(path)
    if layer != "binding":
        assert not [name for name in names if re.search(r"Python\.h|numpy/", name)], "Python belongs to binding/"
        assert "PyObject" not in path.read_text()
        assert not [name for name in names if "binding/" in name], "nothing includes the binding"
    if layer != "kernels":
        assert not [name for name in names if name.endswith("intrin.h")], "intrinsics belong to kernels/"
    if layer == "kernels":
        assert not [name for name in names if "core/" in name or "cattn.h" in name], "kernels use no core"
    if layer == "cattn.h":
        assert not [name for name in names if "/" in name], "the core's C API includes nothing of ours"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_are_short_and_begin_with_their_purpose(path: Path) -> None:
    text = path.read_text()
    assert sum(not line.startswith("@pytest.mark.promise(") for line in text.splitlines()) <= 500
    if path in C_FILES:
        assert text.startswith(f"/* {path.name} -- "), "the first line names the file and its purpose"
    elif text.strip():
        assert text.startswith('"""')


def functions(text: str) -> list[tuple[str, int]]:
    """Return the first line and the length of each function of a C file that clang-format has formatted."""
    found = []
    lines = text.splitlines()
    head = None
    for number, line in enumerate(lines):
        if re.match(r"[A-Za-z].*\($|[A-Za-z].*[,)]$|[A-Za-z].*\) \{$", line) and not line.startswith("#"):
            head = number if head is None else head
        if line == "}" and head is not None:
            found.append((lines[head], number - head + 1))
        if line in ("}", "") or line.endswith(";"):
            head = None if line == "}" or line == "" else head
    return found


@pytest.mark.parametrize("path", C_FILES, ids=lambda path: str(path.relative_to(CSRC)))
def test_functions_are_short(path: Path) -> None:
    assert [name for name, length in functions(path.read_text()) if length > 80] == []


def test_the_parser_finds_functions() -> None:
    names = [name for name, _ in functions((CSRC / "core" / "attention.c").read_text())]
    assert any("cattn_attention(" in name for name in names)
    assert len(names) > 10


def test_no_compiler_flag_changes_arithmetic() -> None:
    text = (ROOT / "setup.py").read_text()
    assert "-ffp-contract=off" in text
    for flag in ("-ffast-math", "-Ofast", "-march=native", "-funsafe-math", "-ffp-contract=fast"):
        assert flag not in text
