"""The house: layers point one way, files and functions stay readable, the module exports what it must and no more."""

from __future__ import annotations

import re
import struct
from pathlib import Path

import pytest

from cattn import _cattn

ROOT = Path(__file__).parent.parent
CSRC = ROOT / "csrc"
C_FILES = sorted(path for path in CSRC.rglob("*") if path.suffix in (".c", ".h"))
FILES = [*C_FILES, *sorted((ROOT / "python").rglob("*.py")), *sorted((ROOT / "tests").glob("*.py"))]


def includes(path: Path) -> list[str]:
    return re.findall(r'^\s*#\s*include\s+[<"]([^>"]+)[>"]', path.read_text(), re.MULTILINE)


def layer_of(path: Path) -> str:
    return path.relative_to(CSRC).parts[0]


def test_the_files_are_found() -> None:
    assert {layer_of(path) for path in C_FILES} >= {"binding", "core", "kernels", "cattn.h"}


@pytest.mark.parametrize("path", C_FILES, ids=lambda path: str(path.relative_to(CSRC)))
def test_layers_point_one_way(path: Path) -> None:
    names = includes(path)
    layer = layer_of(path)
    if layer != "binding":
        assert not [name for name in names if re.search(r"Python\.h|numpy/", name)], "Python belongs to binding/"
        assert "PyObject" not in path.read_text()
        assert not [name for name in names if "binding/" in name], "nothing includes the binding"
    if layer != "kernels":
        assert not [name for name in names if name.endswith("intrin.h")], "intrinsics belong to kernels/"
    if layer == "kernels":
        assert not [name for name in names if "core/" in name or "cattn.h" in name], "kernels know no driver"
    if layer == "cattn.h":
        assert not [name for name in names if "/" in name], "the core's C API stands alone"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_stay_short_and_say_what_they_are_for(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= 500 or path.parent.name == "tests"
    if path in C_FILES:
        assert text.startswith(f"/* {path.name} -- "), "the first line names the file and its purpose"
    elif text.strip():
        assert text.startswith('"""')


def functions(text: str) -> list[tuple[str, int]]:
    """Return names and lengths of the functions of a C file in the house's format."""
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
def test_functions_stay_short(path: Path) -> None:
    assert [name for name, length in functions(path.read_text()) if length > 80] == []


def test_functions_are_found() -> None:
    names = [name for name, _ in functions((CSRC / "core" / "attention.c").read_text())]
    assert any("cattn_attention(" in name for name in names)
    assert len(names) > 10


def test_no_flag_that_changes_arithmetic() -> None:
    text = (ROOT / "setup.py").read_text()
    assert "-ffp-contract=off" in text
    for flag in ("-ffast-math", "-Ofast", "-march=native", "-funsafe-math", "-ffp-contract=fast"):
        assert flag not in text


def exported_symbols(path: Path) -> set[str]:
    """Return the functions that a 64-bit ELF file defines for others, read from its dynamic symbol table."""
    data = path.read_bytes()
    assert data[:5] == b"\x7fELF\x02", "a 64-bit ELF file"
    (offset,) = struct.unpack_from("<Q", data, 40)
    size, count = struct.unpack_from("<HH", data, 58)
    sections = [struct.unpack_from("<IIQQQQIIQQ", data, offset + i * size) for i in range(count)]
    symbols = next(section for section in sections if section[1] == 11)  # SHT_DYNSYM
    names = sections[symbols[6]]
    found = set()
    for at in range(symbols[4], symbols[4] + symbols[5], 24):
        name, info, other, section = struct.unpack_from("<IBBH", data, at)
        if section != 0 and info >> 4 in (1, 2) and other & 3 == 0:  # defined, global or weak, default visibility
            start = names[4] + name
            found.add(data[start : data.index(b"\0", start)].decode())
    return found - {"_init", "_fini", "_edata", "_end", "__bss_start"}


def test_the_module_exports_three_functions() -> None:
    module = Path(_cattn.__file__)
    if module.read_bytes()[:4] != b"\x7fELF":
        assert module.suffix in (".so", ".pyd"), "other formats: the linker's export list decides"
        return
    assert exported_symbols(module) == {"PyInit__cattn", "cattn_get_num_threads", "cattn_set_num_threads"}
