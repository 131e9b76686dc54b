"""Checks of a built wheel without running it. Each returns a word for the table or raises WheelError."""

import json
import re
import sys
import tempfile
import zipfile
from dataclasses import dataclass, field
from pathlib import Path

import pefile
from build import Wheel, WheelError, run
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
        modules = [name for name in archive.namelist() if name.endswith((".so", ".pyd", ".dll", ".dylib"))]
    if len(modules) != 1:
        raise WheelError(f"{wheel.path.name} has the libraries {modules}")
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
