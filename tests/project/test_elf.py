"""The built module as an ELF file: its exported functions, and the protections that SECURITY.md promises."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import NamedTuple

import pytest

from cattn import _cattn

MODULE = Path(_cattn.__file__)
PT_LOAD, PT_GNU_STACK, PT_GNU_RELRO = 1, 0x6474E551, 0x6474E552
EXECUTABLE, WRITABLE = 1, 2
SHT_DYNAMIC, SHT_DYNSYM = 6, 11
DT_RPATH, DT_TEXTREL, DT_RUNPATH, DT_FLAGS, DT_FLAGS_1 = 15, 22, 29, 30, 0x6FFFFFFB
DF_TEXTREL, DF_BIND_NOW, DF_1_NOW = 4, 8, 1


class Section(NamedTuple):
    name: int
    kind: int
    flags: int
    address: int
    offset: int
    size: int
    link: int
    info: int
    alignment: int
    entry_size: int


class Elf:
    """The parts of a 64-bit little-endian ELF file that these tests read."""

    def __init__(self, data: bytes) -> None:
        assert data[:6] == b"\x7fELF\x02\x01"
        self.data = data
        programs, sections = struct.unpack_from("<QQ", data, 32)
        program_size, n_programs, section_size, n_sections = struct.unpack_from("<HHHH", data, 54)
        self.segments = [struct.unpack_from("<II", data, programs + i * program_size) for i in range(n_programs)]
        self.sections = [
            Section(*struct.unpack_from("<IIQQQQIIQQ", data, sections + i * section_size)) for i in range(n_sections)
        ]

    def section(self, kind: int) -> Section:
        return next(section for section in self.sections if section.kind == kind)

    def dynamic(self) -> dict[int, int]:
        """Return the tags of the dynamic section. A tag that occurs twice has its last value."""
        at = self.section(SHT_DYNAMIC)
        return dict(struct.iter_unpack("<QQ", self.data[at.offset : at.offset + at.size // 16 * 16]))

    def exported(self) -> set[str]:
        """Return the exported names: symbols that are defined here, global or weak, with default visibility."""
        symbols = self.section(SHT_DYNSYM)
        strings = self.sections[symbols.link].offset
        found = set()
        for at in range(symbols.offset, symbols.offset + symbols.size, 24):
            name, info, other, section = struct.unpack_from("<IBBH", self.data, at)
            if section != 0 and info >> 4 in (1, 2) and other & 3 == 0:
                start = strings + name
                found.add(self.data[start : self.data.index(b"\0", start)].decode())
        return found - {"_init", "_fini", "_edata", "_end", "__bss_start"}


@pytest.fixture(scope="module")
def module() -> Elf:
    data = MODULE.read_bytes()
    if data[:4] != b"\x7fELF":
        assert MODULE.suffix in (".so", ".pyd"), "in other formats the linker's export list decides"
        pytest.skip("not an ELF file")
    return Elf(data)


@pytest.mark.promise("hardened module")
def test_the_module_exports_three_functions(module: Elf) -> None:
    assert module.exported() == {"PyInit__cattn", "cattn_get_num_threads", "cattn_set_num_threads"}


@pytest.mark.promise("hardened module")
def test_no_segment_is_writable_and_executable(module: Elf) -> None:
    loaded = [flags for kind, flags in module.segments if kind == PT_LOAD]
    assert any(flags & EXECUTABLE for flags in loaded)
    assert any(flags & WRITABLE for flags in loaded)
    assert not any(flags & EXECUTABLE and flags & WRITABLE for flags in loaded)
    assert [flags & EXECUTABLE for kind, flags in module.segments if kind == PT_GNU_STACK] == [0]


@pytest.mark.promise("hardened module")
def test_relocation_tables_are_read_only_after_loading(module: Elf) -> None:
    """Full RELRO: the loader binds every symbol at once, then write-protects the tables."""
    dynamic = module.dynamic()
    assert PT_GNU_RELRO in [kind for kind, _ in module.segments]
    assert dynamic.get(DT_FLAGS, 0) & DF_BIND_NOW or dynamic.get(DT_FLAGS_1, 0) & DF_1_NOW
    assert DT_TEXTREL not in dynamic
    assert not dynamic.get(DT_FLAGS, 0) & DF_TEXTREL


@pytest.mark.promise("hardened module")
def test_the_module_has_no_library_search_path(module: Elf) -> None:
    assert not {DT_RPATH, DT_RUNPATH} & set(module.dynamic())
