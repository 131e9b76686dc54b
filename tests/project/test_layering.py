"""Layers point one way, modules form no circle, and files and functions stay short."""

from __future__ import annotations

import ast
import re
from collections import Counter
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from cattn import _cattn
from support import ROOT

CSRC = ROOT / "csrc"
C_FILES = sorted(path for path in CSRC.rglob("*") if path.suffix in (".c", ".h"))
FOLDERS = ["python", "tests", "fuzz"]
FILES = [*C_FILES, *(path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py")))]


def includes(path: Path) -> list[str]:
    return re.findall(r'^\s*#\s*include\s+[<"]([^>"]+)[>"]', path.read_text("utf-8"), re.MULTILINE)


def layer_of(path: Path) -> str:
    return path.relative_to(CSRC).parts[0]


def code_of(path: Path) -> str:
    """Return a C file without its comments."""
    return re.sub(r"/\*.*?\*/", "", path.read_text("utf-8"), flags=re.DOTALL)


def test_every_layer_has_files() -> None:
    assert {layer_of(path) for path in C_FILES} >= {"binding", "call", "core", "kernels", "xla", "cattn.h"}
    found = Counter(path.relative_to(ROOT).parts[0] for path in FILES)
    assert found["csrc"] > 90
    assert found["python"] > 75
    assert found["tests"] > 80, "the tests are in folders"


def a_layer_includes_only_the_layers_below_it(path: Path) -> None:
    names = includes(path)
    layer = layer_of(path)
    if layer != "binding":
        assert not [name for name in names if re.search(r"Python\.h|numpy/", name)], "Python belongs to binding/"
        assert "PyObject" not in path.read_text("utf-8")
        assert not [name for name in names if "binding/" in name], "nothing includes the binding"
    if layer in ("binding", "call", "live", "xla"):
        assert not [name for name in names if "core/" in name], "the callers know the core by its C API alone"
    if layer != "xla":
        hands_on = path.name == "module.c"  # hands the addresses to Python
        assert bool([name for name in names if "xla/" in name]) == hands_on
    if layer not in ("binding", "call", "live", "xla"):
        assert not [name for name in names if "call/" in name], "the table is for the callers of the core"
    if layer == "kernels":
        assert not [name for name in names if "core/" in name or "cattn.h" in name], "kernels use no core"
    if path.parent == CSRC:
        assert not [name for name in names if "/" in name], "the core's C API includes nothing of ours"


def one_instruction_set_is_meant_in_kernels_only(path: Path) -> None:
    if layer_of(path) == "kernels" or path.name in ("fp_mode.h", "cpu_features.c"):
        return
    hints = r"\w*intrin\.h|__attribute__\(\(.*\btarget\(|__builtin_(?:ia32|cpu)\w*|__(?:AVX|SSE|ARM|aarch|x86)\w*"
    assert re.findall(hints, code_of(path)) == []


# ISO C, and what compilers bring along for their own extensions.
PORTABLE_HEADERS = (
    r"(?:assert|fenv|float|inttypes|limits|math|stdarg|stdatomic|stdbool|stddef|stdint|stdio|stdlib|string)\.h|"
    r"(?:arm_neon|cpuid|immintrin|sanitizer/asan_interface)\.h"
)
# Names of operating systems, and functions that ISO C headers declare on some of them only.
SYSTEM = (
    r"\b(?:_WIN32|_WIN64|__MINGW\w*|__CYGWIN__|__linux\w*|__APPLE__|__GLIBC\w*|__wasm\w*|__unix\w*|_GNU_SOURCE|_POSIX_C_SOURCE|"
    r"_DARWIN_C_SOURCE|pthread_\w+|posix_memalign|aligned_alloc|_aligned_\w+|getline|strtok_r|timespec|environ)\b"
)


def the_operating_system_is_known_to_its_layer_only(path: Path) -> None:
    """A port to another system then concerns core/os.h and one source."""
    if path.parent.name == "core" and re.fullmatch(r"os(_\w+)?\.[ch]", path.name):
        assert re.search(SYSTEM, code_of(path))
        return
    own = {other.name for other in C_FILES}
    foreign = [name for name in includes(path) if Path(name).name not in own]
    known = rf"{PORTABLE_HEADERS}|Python\.h|numpy/\w+\.h"
    assert [name for name in foreign if not re.fullmatch(known, name)] == []
    # libraries whose fma() is right; a machine without floating-point modes, and what it exports
    expected = {"fma.h": ["__GLIBC__", "__APPLE__"], "fp_mode.h": ["__wasm__"], "live.c": ["__wasm__"]}
    assert re.findall(SYSTEM, code_of(path)) == expected.get(path.name, [])


# ---- circles ---------------------------------------------------------------------------------------------------------
def circle(graph: dict[str, set[str]]) -> list[str]:
    """Return a circle of the graph, or an empty list."""
    try:
        TopologicalSorter({name: uses - {name} for name, uses in graph.items()}).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def c_modules(files: list[Path]) -> dict[str, set[str]]:
    """Return which files use which: by includes, and by names of functions that another one defines.

    A declaration is no use: a header declares functions of several sources. Neither is a macro of a header: the file
    that expands it uses it. Neither is a call in an inline function of a header: the file that calls that one uses it.
    """
    definition = re.compile(r"^(?:static inline )?[a-z_][\w ]*?[ *]+(\w+)\([^;{}]*\)\s*\{", re.MULTILINE)
    declaration = re.compile(r"^(?:CATTN_EXPORT )?[a-z_][\w ]*?[ *]+\w+\([^;{}]*\);", re.MULTILINE)
    macro = re.compile(r"^#define (?:.*\\\n)*.*$", re.MULTILINE)
    name_of = {path: path.relative_to(CSRC).as_posix() for path in files}
    code = {
        path: declaration.sub("", macro.sub("", code_of(path)) if path.suffix == ".h" else code_of(path))
        for path in files
    }
    owner = {}
    for path, text in code.items():
        for match in definition.finditer(text):
            if not match[0].startswith("static ") or match[0].startswith("static inline "):
                owner[match[1]] = name_of[path]
    graph = {}
    for path, text in code.items():
        words = re.findall(r"(?<!struct )(?<!enum )\b\w+", text)
        graph[name_of[path]] = {owner[word] for word in words if word in owner and path.suffix == ".c"}
        for include in includes(path):
            target = (path.parent / include).resolve()
            target = target if target.exists() else CSRC / include
            if target in files:
                graph[name_of[path]].add(name_of[target])
    return graph


def python_modules() -> dict[str, set[str]]:
    """Return which modules of the package import which, wherever the import stands; and what the extension imports."""
    package = ROOT / "python"
    files = {}
    for path in package.rglob("*.py"):
        parts = path.relative_to(package).with_suffix("").parts
        files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    graph: dict[str, set[str]] = {"cattn._cattn": set()}
    for path in (CSRC / "binding").glob("*.c"):
        graph["cattn._cattn"] |= set(re.findall(r'PyImport_ImportModule\("(cattn[\w.]*)"', path.read_text("utf-8")))
    for name, path in files.items():
        graph[name] = set()
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Import):
                graph[name] |= {alias.name for alias in node.names if alias.name.split(".")[0] == "cattn"}
            if isinstance(node, ast.ImportFrom):
                parts = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
                parts = parts[: len(parts) + 1 - node.level] if node.level else []
                base = ".".join([*parts, *filter(None, [node.module])])
                for alias in node.names if base.split(".")[0] == "cattn" else ():
                    full = f"{base}.{alias.name}"
                    graph[name].add(full if full in files or full in graph else base)
    return graph


def test_modules_of_the_c_tree_form_no_circle() -> None:
    graph = c_modules([path for path in C_FILES if not path.name.endswith(".inc.h")])
    assert graph["core/attention.c"] >= {"core/plan.c", "core/parallel.c", "core/attention.h", "fp_mode.h"}
    assert circle(graph) == []


def test_modules_of_the_package_form_no_circle() -> None:
    graph = python_modules()
    assert "cattn._cattn" in graph["cattn.random"]
    assert circle(graph) == []


# ---- lists of options ------------------------------------------------------------------------------------------------
def words(node: ast.AST) -> list[object]:
    """Return the names that a signature, a call, a class of types or a literal lists."""
    if isinstance(node, ast.arguments):
        return [argument.arg for argument in (*node.posonlyargs, *node.args, *node.kwonlyargs)]
    if isinstance(node, ast.Call):
        return [keyword.arg for keyword in node.keywords]
    if isinstance(node, ast.ClassDef):
        return [getattr(field.target, "id", None) for field in node.body if isinstance(field, ast.AnnAssign)]
    listed = node.keys if isinstance(node, ast.Dict) else getattr(node, "elts", [])
    return [getattr(each, "value", getattr(each, "id", None)) for each in listed]


def test_the_options_of_attention_are_listed_in_few_places() -> None:
    """A function takes them by `**options: Unpack[...]`; a new option must not need a word in each. The law does."""
    options = {*_cattn._arguments("scaled_dot_product_attention"), *_cattn._arguments("varlen_attention")}
    options -= {"query", "key", "value", "out"}
    nodes = [node for path in FILES if path.suffix == ".py" and path.is_relative_to(ROOT / "python")
             for node in ast.walk(ast.parse(path.read_text("utf-8")))]  # fmt: skip
    assert sum(len(options.intersection(filter(None, words(node)))) >= 6 for node in nodes) <= 16


# ---- size ------------------------------------------------------------------------------------------------------------
CEILING = 800


def lines_of_code(path: Path) -> int:
    """Return the number of lines; of a long Python file without its docstrings and markers of promises."""
    lines = path.read_text("utf-8").splitlines()
    if path in C_FILES or len(lines) <= CEILING:
        return len(lines)
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    nodes = [node for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, documented)]
    docstrings = [node.body[0] for node in nodes if ast.get_docstring(node) is not None]
    left_out = sum((node.end_lineno or node.lineno) - node.lineno + 1 for node in docstrings)
    return len(lines) - left_out - sum(line.startswith("@pytest.mark.promise(") for line in lines)


def files_are_short_and_begin_with_their_purpose(path: Path) -> None:
    text = path.read_text("utf-8")
    assert lines_of_code(path) <= CEILING
    if path in C_FILES:
        assert text.startswith(f"/* {path.name} -- "), "the first line names the file and its purpose"
    elif text.strip():
        assert text.removeprefix("#!/usr/bin/env python\n").startswith('"""')


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
        inside = "".join(lines[number + 1 : number + 2]).startswith(" ")  # a blank line may stand in a function
        if line == "}" or (line == "" and not inside):
            head = None
    return found


def lines_of_function(node: ast.FunctionDef) -> int:
    """Return the number of lines of a function of Python, without its documentation."""
    parts = [node, *(node.body[:1] if ast.get_docstring(node) is not None else [])]
    whole, *document = ((part.end_lineno or part.lineno) - part.lineno + 1 for part in parts)
    return whole - sum(document)


def functions_are_short(path: Path) -> None:
    text = path.read_text("utf-8")
    found = functions(text) if path in C_FILES else [
        (node.name, lines_of_function(node)) for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)
    ]  # fmt: skip
    assert [name for name, length in found if length > 80] == []


def test_the_parser_finds_functions() -> None:
    names = [name for name, _ in functions((CSRC / "core" / "attention.c").read_text("utf-8"))]
    assert any("cattn_attention(" in name for name in names)
    assert len(names) > 10


# Files of less than 40 lines, and why they are no part of another one.
SHORT = {
    "python/cattn/_version.py": "setup.py reads it without importing the package",
    "csrc/call/operands.c": "the rows are in its header, which several sources expand",
    "csrc/call/numbers.c": "plain C that the binding and XLA share",
    "csrc/core/rowwise.c": "what the sources of row-wise functions share",
    "fuzz/core/visible.h": "what the sources of the fuzzer share",
}


def files_have_a_size_of_their_own(path: Path) -> None:
    name = path.relative_to(ROOT).as_posix()
    is_table = re.fullmatch(r"csrc/kernels/kernels_\w+\.c", name)  # constants, and one object of the build
    if path.name != "__init__.py" and name not in SHORT and not is_table:
        assert len(path.read_text("utf-8").splitlines()) >= 40


C_LAWS = [
    a_layer_includes_only_the_layers_below_it,
    one_instruction_set_is_meant_in_kernels_only,
    the_operating_system_is_known_to_its_layer_only,
]


def test_every_file_keeps_the_laws(subtests: pytest.Subtests) -> None:
    for path in FILES:
        with subtests.test(path.relative_to(ROOT).as_posix()):
            files_are_short_and_begin_with_their_purpose(path)
            files_have_a_size_of_their_own(path)
            functions_are_short(path)
            for law in C_LAWS if path in C_FILES else ():
                law(path)
