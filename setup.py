"""Builds the extension module cattn._cattn: kernels once for each instruction set and element type, other files once.

A build is for the processor of this machine: it has the table of kernels that this processor prefers; an editable
install has `scalar`, too, with which the tests compare. On a processor that cannot run them the import fails and says
what to type. CATTN_TABLES=all is for what is given to others.

Needs GCC or Clang, whose vector extensions the kernels use. On Windows that is clang-cl, which comes with Visual Studio
as an option and is found there, or MinGW-w64 (build_ext --compiler=mingw32). The compiler itself is asked which machine
it compiles for, so that cross compilers work; tools/wheels uses zig.

Switches of the environment:
  CATTN_LIMITED_API=0   build for this Python only (default: one abi3 module for 3.11 and later)
  CATTN_WERROR=1        warnings are errors
  CATTN_DEBUG=1         no optimisation, debug information, assertions
  CATTN_SANITIZE=...    address,undefined or thread
  CATTN_TABLES=...      tables to compile besides scalar, separated by commas, or "all": for wheels and packages, and
                        with an editable install the table for tests, too (default: what this machine runs)
  CATTN_COVERAGE=1      gcov counters
"""

import contextlib
import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Collection, Iterator, Sequence
from itertools import pairwise
from multiprocessing.pool import ThreadPool
from pathlib import Path

import numpy
from setuptools import Extension, setup
from setuptools.command.build import build
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError, LinkError, PlatformError

CSRC = Path("csrc")
HEADERS = sorted(map(str, CSRC.rglob("*.h")))
PLATFORM = sysconfig.get_platform()  # of the target: a cross build sets _PYTHON_HOST_PLATFORM
ELF = PLATFORM.startswith("linux")
WINDOWS = PLATFORM.startswith(("win", "mingw"))
AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX512 = ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma"]
PORTABLE: dict[str, list[str]] = {"scalar": [], "gnu128": []}
# The kernel tables and their flags. Those outside PORTABLE are for x86-64.
# a table for tests: at -O3 its vectors, which no processor has, take minutes to compile
GNU512 = ["-mavx2", "-mfma", "-Wno-psabi", "-O1"]
# the products of bfloat16 by an instruction, beside the other kernels of both AVX-512 tables
AVX512_BF16, AVX512_BF16_FLAG = "avx512_bf16", "-mavx512bf16"
# the same by tiles
AMX, AMX_FLAGS = "amx", [AVX512_BF16_FLAG, "-mamx-tile", "-mamx-bf16"]
# What kernels_table.c is compiled for: numbers of 32 and 64 bits, products of bfloat16 by pairs (16) and in tiles (17),
# and the functions of rows.
KINDS = {bits: [("REAL_BITS", bits)] for bits in ("16", "17", "32", "64")}
KINDS |= {f"rows{bits}": [("REAL_BITS", bits), ("ROW_KERNELS", "1")] for bits in ("32", "64")}
ONE_KIND = {AVX512_BF16: ("16",), AMX: ("17",)}
TABLES = PORTABLE | {"gnu512": GNU512, "avx2_4x2": AVX2, "avx2": AVX2, "avx512_256": AVX512, "avx512": AVX512}
# The kinds of a table that are another table's, as core/dispatch.c has it.
SHARED = {
    narrow: dict.fromkeys(["16", "17", "rows32", "rows64"], wide)
    for narrow, wide in {"avx2_4x2": "avx2", "avx512_256": "avx512"}.items()
}
# Prints the tables that this machine's processor prefers, by the rules of csrc/core/dispatch.c.
PROBE = """\
#include <stdio.h>
#include "core/cpu_features.c"
void cattn_run_once(cattn_once *once, void (*function)(void)) { (void)once, function(); }
int main(void) {
    const unsigned cpu = cattn_cpu();
    puts(cpu & CATTN_CPU_AVX512 ? cpu & CATTN_CPU_AMD_25 ? "avx512_256" : "avx512"
         : cpu & CATTN_CPU_AVX2 ? cpu & CATTN_CPU_AMD_25 ? "avx2_4x2" : "avx2" : "gnu128");
    if (cpu & CATTN_CPU_AVX512_BF16) puts("avx512_bf16");
    if (cpu & CATTN_CPU_AMX) puts("amx");
    return 0;
}
"""
# Used if the compiler knows it. Not -fstack-clash-protection: it probes 96 KiB of stack in every call of the tiny path.
HARDENING = ["-fcf-protection"] if ELF else []
# Taken back, where the compiler knows it: what flags of users or distributions change in arithmetic, so that values are
# wrong or the bits are not those of other builds. -fno-fast-math also sets errno again, so our other flags come later.
# To Clang before version 19, NO_UNSAFE also says that exceptions count, and then it leaves vectors in pieces.
NO_UNSAFE = "-fno-unsafe-math-optimizations"
EXACT = ["-fno-fast-math", NO_UNSAFE, "-fno-finite-math-only", "-fno-associative-math"]
EXACT += ["-fno-reciprocal-math", "-fsigned-zeros", "-fno-single-precision-constant", "-fexcess-precision=fast"]
EXACT += ["-mfpmath=sse", "-fno-approx-func", "-fdenormal-fp-math=ieee", "-fdenormal-fp-math-f32=ieee"]
# In the place of -O3: GCC compiles the kernels in half of the time, into two thirds of the size, and they are as quick.
# Other compilers do not know all of these.
OPTIMIZED = ["-O2", "-ftree-vectorize", "-fvect-cost-model=dynamic", "-funswitch-loops", "-fpeel-loops"]
# At -O1 GCC needs this to clear the upper halves of registers when a kernel returns. While they are in use, each change
# from code without AVX to code with it waits: the table scalar, which calls fma(), takes seventy times as long.
CLEARED = ["-fexpensive-optimizations"]
# The linker is called without -Ofast, -ffast-math and the like if these come last. They would add a start-up file that
# switches off subnormal numbers in the whole process.
EXACT_LINK = ["-O3", "-fno-fast-math", "-fno-unsafe-math-optimizations", "-mno-daz-ftz"]
HARDENED_LINK = ["-Wl,-z,relro,-z,now,-z,noexecstack,--as-needed"] if ELF else []
# GCC aligns the stack of 64-bit Windows to 16 bytes, yet spills wider vectors by aligned moves (its bug 54412).
UNALIGNED_SPILLS = ["-Wa,-muse-unaligned-vector-move"] if WINDOWS else []
MSVC_TARGETS = {"win-amd64": "x86_64-pc-windows-msvc", "win-arm64": "aarch64-pc-windows-msvc"}
CLANG_CL = ["-std=gnu11", "-O3", "-fno-fast-math", "-ffp-contract=off", "-fno-math-errno", "-Wextra"]
CLANG_CL = [f"/clang:{flag}" for flag in CLANG_CL]  # they come last, after /fp:fast of the variables CL and _CL_
NO_CLANG_CL = """\
cattn does not compile with MSVC's cl, which lacks vector extensions: in the Visual Studio Installer add the component \
"C++ Clang Compiler for Windows", or set CC to the path of another clang-cl"""

INEXACT_LINK = """\
the linker would add {}, which changes the floating-point mode of every process that imports cattn: remove \
-mdaz-ftz, -mpc32, -mpc64, -ffast-math, -Ofast and the like from CC, CFLAGS, LDFLAGS and the compiler's configuration"""


def switch(name: str) -> str:
    """Return the value of a switch; "0" counts as unset."""
    value = os.environ.get(f"CATTN_{name}", "")
    return "" if value == "0" else value


unlimited = sysconfig.get_config_var("Py_GIL_DISABLED") or sysconfig.get_config_var("Py_DEBUG")
LIMITED = os.environ.get("CATTN_LIMITED_API", "1") != "0" and not unlimited


def compile_flags(exact: Sequence[str] = ()) -> list[str]:
    """Return the flags of every object (GCC and Clang), among them the flags `exact`, which take back a user's.

    gnu11: under c11, GCC computes float in double on s390x. -isystem: warnings are for our own code.
    """
    flags = ["-std=gnu11", "-fvisibility=hidden", *exact, "-ffp-contract=off", "-fno-math-errno"]
    flags += ["-pthread"] * (not WINDOWS)  # there it would add a library that cattn does not use
    flags += ["-Wall", "-Wextra", "-Wshadow", "-Wconversion"]
    flags += [f"-isystem{path}" for path in (numpy.get_include(), sysconfig.get_path("include"))]
    flags += (
        ["-O0", "-g", "-UNDEBUG"] if switch("DEBUG") else ["-O1" if switch("SANITIZE") or switch("COVERAGE") else "-O3"]
    )
    flags += ["-Werror"] * bool(switch("WERROR")) + ["--coverage"] * bool(switch("COVERAGE"))
    if sanitizers := switch("SANITIZE"):
        flags += [f"-fsanitize={sanitizers}", "-g1", "-fno-omit-frame-pointer", "-U_FORTIFY_SOURCE"]
        flags += ["-fno-sanitize-recover=undefined"] * ("undefined" in sanitizers)
    elif not switch("DEBUG"):
        flags += ["-g0"]  # many Pythons pass -g on, which makes the module ten times as large
        flags += ["-fstack-protector-strong", "-U_FORTIFY_SOURCE", "-D_FORTIFY_SOURCE=3"]
    return flags


def kernel_objects(
    tables: dict[str, list[str]], quick: Collection[str] = ()
) -> dict[str, tuple[list[tuple[str, str]], list[str]]]:
    """Return macros and flags for each object of kernels_table.c that these tables, with their flags, consist of.

    The kinds `quick` have -O1.
    """
    objects = {}
    for table, flags in tables.items():
        for kind in ONE_KIND.get(table, tuple(KINDS)):
            name = SHARED.get(table, {}).get(kind, table)
            macros = [(f"TABLE_{name.upper()}", "1"), *KINDS[kind]]
            objects[f"{name}_{kind}"] = (macros, [*tables.get(name, flags), *["-O1"] * (kind in quick)])
    return objects


def n_cpus() -> int:
    """Return how many compilers run at a time."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def dependencies(target: Path) -> list[str]:
    """Return the files that the compiler read for an object, by its option -MMD; all headers without a list."""
    try:
        rule = target.with_suffix(".d").read_text(encoding="utf-8", errors="surrogateescape")
    except FileNotFoundError:
        return HEADERS
    names = rule.partition(": ")[2].replace("\\\n", " ")
    return [name.replace("$$", "$") for name in shlex.split(names)]


def is_outdated(target: Path, source: Path) -> bool:
    """Return whether an object is missing, or older than a file that it was made from."""
    try:
        age = os.path.getmtime(target)
        return age <= max(os.path.getmtime(path) for path in [source, *dependencies(target)])
    except FileNotFoundError:  # also a header that is no longer there
        return True


NO_COMPILER = (
    "cattn needs a C compiler and Python's headers ({}): install them by `apt install gcc libc6-dev python3-dev` on "
    "Debian and Ubuntu, `dnf install gcc python3-devel` on Fedora, `xcode-select --install` on macOS, or the Build "
    "Tools for Visual Studio with 'Desktop development with C++' on Windows"
)


class CompileFirst(build):
    """Compiles before it copies files, so that the error for a missing compiler has nothing before it."""

    sub_commands = sorted(build.sub_commands, key=lambda command: command[0] != "build_ext")


def find_clang_cl(cl: Path) -> str | None:
    """Return clang-cl: that of the variable CC, or of the Visual Studio that cl.exe belongs to, or of the path."""
    if "clang-cl" in Path(os.environ.get("CC", "")).name:
        return os.environ["CC"]
    # cl.exe is VC/Tools/MSVC/<version>/bin/<host>/<target>/cl.exe
    for tools in cl.parents[5:6]:
        for host in ("ARM64", "x64") if "arm64" in cl.parts[-3].lower() else ("x64",):
            if (found := tools / "Llvm" / host / "bin" / "clang-cl.exe").exists():
                return str(found)
    return shutil.which("clang-cl")


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """Drop what a compiler prints meanwhile: it calls a flag an error that it does not know."""
    sys.stdout.flush()
    sys.stderr.flush()
    with open(os.devnull, "wb") as nothing:
        kept = [(number, os.dup(number)) for number in (1, 2)]
        try:
            for number, _ in kept:
                os.dup2(nothing.fileno(), number)
            yield
        finally:
            for number, copy in kept:
                os.dup2(copy, number)
                os.close(copy)


class BuildTables(build_ext):
    """Compiles all objects in parallel, kernels with the flags of their instruction set."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.for_tests = bool(self.inplace)  # run() clears inplace while it builds

    def get_libraries(self, ext: Extension) -> list[str]:
        """With MinGW, setuptools links to the library of one Python version."""
        libraries: list[str] = super().get_libraries(ext)
        return ["python3" if LIMITED and name.startswith("python3") else name for name in libraries]

    def check_compiler(self) -> None:
        """Stop at once, with a cure, where nothing can be compiled."""
        with tempfile.TemporaryDirectory() as work:
            probe = Path(work, "probe.c")
            probe.write_text("#include <Python.h>\n")
            try:
                self.compiler.compile([str(probe)], work)
            except (CompileError, PlatformError) as error:
                raise CompileError(NO_COMPILER.format(error)) from error

    def use_clang_cl(self) -> None:
        """Replace cl, after setuptools has found it: setuptools does not read the variable CC on Windows."""
        if not self.compiler.initialized:
            self.compiler.initialize(self.plat_name)
        found = find_clang_cl(Path(self.compiler.cc))
        if not found:
            raise CompileError(NO_CLANG_CL)
        self.compiler.cc = found
        self.compiler.compile_options = [flag for flag in self.compiler.compile_options if flag != "/GL"]

    def accepts(self, flags: list[str], code: str = "extern int probe;") -> bool:
        """Return whether this compiler accepts the flags and the code for its target."""
        with tempfile.TemporaryDirectory() as work, contextlib.suppress(CompileError), silence():
            probe = Path(work, "probe.c")
            probe.write_text(f"{code}\n")
            error = "/WX" if self.compiler.compiler_type == "msvc" else "-Werror"
            self.compiler.compile([str(probe)], work, extra_postargs=[error, *flags])
            return True
        return False

    def preferred_tables(self) -> set[str]:
        """Return the tables that this machine's processor prefers; none where programs for the target cannot run."""
        with tempfile.TemporaryDirectory() as work, contextlib.suppress(CompileError, LinkError, OSError), silence():
            source, program = Path(work, "probe.c"), Path(work, "probe")
            source.write_text(PROBE)
            objects = self.compiler.compile([str(source)], work, include_dirs=[str(CSRC)])
            self.compiler.link_executable(objects, str(program))
            return set(subprocess.run([program], capture_output=True, check=False, text=True).stdout.split())
        return set()

    def table_flags(self) -> dict[str, list[str]]:
        """Return the tables of this build and the flags of their objects.

        A Python for both kinds of Macs compiles every file for both machines. Then the flags are for one of them, and
        the objects are empty for the other.
        """
        machines = {after for flag, after in pairwise(getattr(self.compiler, "compiler_so", [])) if flag == "-arch"}
        tables = dict(PORTABLE)
        if len(machines) > 1:
            words = {name: [word for flag in isa for word in ("-Xarch_x86_64", flag)] for name, isa in TABLES.items()}
            tables = words if "x86_64" in machines else tables
        elif self.accepts([], "#ifndef __x86_64__\n#error not x86-64\n#endif\nextern int probe;"):
            tables = dict(TABLES)
        isa = tables.get("avx512", [])
        for name, flags in {AVX512_BF16: [AVX512_BF16_FLAG], AMX: AMX_FLAGS}.items():
            if isa and self.accepts(flags):
                words = ["-Xarch_x86_64"] * ("-Xarch_x86_64" in isa)
                tables[name] = [*isa, *(word for flag in flags for word in (*words, flag))]
        wanted = switch("TABLES")
        preferred = self.preferred_tables() if wanted in ("", "all") and len(machines) < 2 else set()
        if wanted not in ("", "all"):
            names = {"scalar", *wanted.split(",")}
            if unknown := names - {*TABLES, *ONE_KIND}:
                raise CompileError(f"CATTN_TABLES={wanted}: no table {min(unknown)!r}, only all or {', '.join(TABLES)}")
            names |= ONE_KIND.keys() if names & {"avx512", "avx512_256"} else set()
        elif not wanted and preferred:
            names = preferred | ({"scalar"} if self.for_tests or self.editable_mode else set())
        elif self.for_tests or self.editable_mode:
            names = set(tables)
        else:
            names, preferred = tables.keys() - {"gnu512"}, set()
        tables = {name: isa for name, isa in tables.items() if name in names}
        # -O1 takes half the time, for tables that this machine does not prefer
        quick = {"scalar"} | (names - preferred if preferred else set())
        return {name: isa + ["-O1"] * (name in quick and not switch("DEBUG")) for name, isa in tables.items()}

    def quick_kinds(self, tables: Collection[str]) -> set[str]:
        """Return the kinds whose instruction this machine lacks, in a build for it: -O1 takes half the time."""
        native = not switch("TABLES") and self.preferred_tables()
        return {kind for name, (kind,) in ONE_KIND.items() if native and name not in tables and not switch("DEBUG")}

    def flags(self) -> list[str]:
        """Return the flags of every object."""
        if self.compiler.compiler_type == "msvc":
            target = f"--target={MSVC_TARGETS.get(self.plat_name, self.plat_name)}"
            return [*CLANG_CL, target, *["/WX"] * bool(switch("WERROR"))]
        exact = [flag for flag in EXACT if self.accepts([flag])]
        if "-fno-approx-func" in exact:
            exact.remove(NO_UNSAFE)  # Clang has taken it back by its parts
        flags = compile_flags(exact)
        if "-O3" in flags and self.accepts(OPTIMIZED):
            flags[flags.index("-O3") : flags.index("-O3") + 1] = OPTIMIZED
        return flags + [flag for flag in HARDENING + UNALIGNED_SPILLS + CLEARED if self.accepts([flag])]

    def link_flags(self) -> list[str]:
        """Return the flags of the link (GCC and Clang)."""
        return [*HARDENED_LINK, "-lm", *(flag for flag in EXACT_LINK if self.accepts([flag]))]

    def check_link(self, flags: list[str]) -> None:
        """Stop if the linker would add a start-up file that changes the floating-point mode of the process."""
        with tempfile.TemporaryDirectory() as work, contextlib.suppress(OSError):
            probe = Path(work, "probe.c")
            probe.write_text("extern int probe;\n")
            shown = subprocess.run(
                [*self.compiler.linker_so, probe, "-o", Path(work, "probe"), *flags, "-###"], check=False,
                capture_output=True, text=True, errors="replace",
            )  # fmt: skip
            if shown.returncode == 0 and (found := re.search(r"crt(fastmath|prec\d+)", shown.stdout + shown.stderr)):
                raise LinkError(INEXACT_LINK.format(found[0]))

    def build_extension(self, ext: Extension) -> None:
        msvc = self.compiler.compiler_type == "msvc"
        if msvc:
            self.use_clang_cl()
        self.check_compiler()
        flags = self.flags()
        switches = [flag for flag in flags if flag.startswith(("-fsanitize", "--coverage", "-pthread"))]
        ext.extra_link_args = [] if msvc else [*self.link_flags(), *switches]
        if not msvc:  # many Pythons pass on the directory of their own libraries; the module must not search there
            self.compiler.linker_so = [arg for arg in self.compiler.linker_so if not arg.startswith("-Wl,-rpath")]
            self.check_link(ext.extra_link_args)
        tables = self.table_flags()
        have = [(f"CATTN_HAVE_{name.upper()}", "1") for name in tables]
        jobs = [(source, have * source.endswith("dispatch.c"), flags) for source in ext.sources]
        kernels = str(CSRC / "kernels" / "kernels_table.c")
        plain = [flag for flag in flags if flag not in OPTIMIZED]  # for tables that have -O1
        jobs += [
            (kernels, macros, (plain if "-O1" in isa else flags) + isa)
            for macros, isa in kernel_objects(tables, self.quick_kinds(tables)).values()
        ]
        jobs.reverse()  # the kernels take longest and begin first
        include_dirs = [str(CSRC), *([numpy.get_include()] if msvc else []), *self.compiler.include_dirs]
        # A compiler for two kinds of Macs would overwrite the list of one machine by that of the other.
        lists = ["-MMD"] * (not msvc and not WINDOWS and "-arch" not in self.compiler.compiler_so)
        lists = lists if self.accepts(lists) else []
        command = [getattr(self.compiler, name, None) for name in ("compiler_so", "cc", "compile_options")]
        place_of_objects = self.build_temp
        if self.editable_mode:  # setuptools gives it a temporary directory, where no later build finds the objects
            place_of_objects = os.path.join("build", f"temp.{self.plat_name}-{sys.implementation.cache_tag}")

        def build(job: tuple[str, list[tuple[str, str]], list[str]]) -> str:
            source, macros, postargs = job
            macros = [*ext.define_macros, *macros]
            words = repr((command, macros, include_dirs, postargs, sys.version, numpy.__version__))
            for place in (numpy.get_include(), sys.exec_prefix):  # pip builds in an environment that it deletes
                words = words.replace(place, "")
            key = hashlib.sha256(words.encode()).hexdigest()[:12]
            output = os.path.join(place_of_objects, key)
            (target,) = self.compiler.object_filenames([source], output_dir=output)
            if self.force or is_outdated(Path(target), Path(source)):
                Path(target).unlink(missing_ok=True)  # an interrupted compiler must not leave it with a new list
                self.compiler.compile([source], output, macros, include_dirs, extra_postargs=[*postargs, *lists])
            return target

        with ThreadPool(n_cpus()) as pool:
            ext.extra_objects = pool.map(build, jobs, chunksize=1)
        ext.sources, self.force = [], True  # the link remains
        super().build_extension(ext)


macros = [("NPY_TARGET_VERSION", "NPY_2_0_API_VERSION"), ("NPY_NO_DEPRECATED_API", "NPY_2_0_API_VERSION")]
macros += [("Py_LIMITED_API", "0x030B0000")] if LIMITED else []
sources = sorted(str(path) for layer in ("binding", "call", "core", "xla") for path in (CSRC / layer).glob("*.c"))
module = Extension("cattn._cattn", sources, define_macros=macros, depends=HEADERS, py_limited_api=LIMITED)
tag = {"py_limited_api": "cp311" if LIMITED else False}
setup(ext_modules=[module], cmdclass={"build": CompileFirst, "build_ext": BuildTables}, options={"bdist_wheel": tag})
