"""Every function, option and source is in each net: fuzzers, soak, bits on other machines, mutants; or a list says why.

A net that has a list of its own falls behind without a word, and what it misses is where a wrong number stays unseen.
"""

from __future__ import annotations

import collections
import inspect
import re
import runpy
from typing import Any

import numpy as np
import pytest

import cattn
import cattn.functional
import cattn.nn
import cattn.testing
from cattn import _cattn
from support import ROOT
from support.calls import KINDS, NOT_OF_LISTS, REALS, SMALL, WAYS, from_rng
from support.functions import BY_BLAS, FUNCTIONS, OF_THE_PROCESS, Work, work

CSRC = ROOT / "csrc"
if not (ROOT / "fuzz").exists() or not (ROOT / "tools").exists():
    pytest.skip("the source distribution has no nets", allow_module_level=True)


def text_of(*patterns: str) -> str:
    paths = [path for pattern in patterns for path in sorted(ROOT.glob(pattern))]
    assert len(paths) >= len(patterns), "a net has no source"
    return "\n".join(re.sub(r"/\*.*?\*/", "", path.read_text("utf-8"), flags=re.DOTALL) for path in paths)


def missing(subjects: set[str], net: str, exceptions: dict[str, str], start: str = r"\b") -> set[str]:
    """Return the subjects that the text of a net does not name, and the exceptions that need no exception."""
    named = {name for name in subjects if re.search(rf"{start}{name}\b", net)}
    return (subjects - named) ^ (exceptions.keys() & subjects) | (exceptions.keys() - subjects)


# ---- functions of the core -------------------------------------------------------------------------------------------
DECLARATION = re.compile(r"^(?:CATTN_EXPORT )?(?:enum |struct |unsigned |const )?\w+ \**(cattn_\w+)\(", re.MULTILINE)
OF_THE_CORE = {
    name for file in ("cattn.h", "torch_random.h") for name in DECLARATION.findall((CSRC / file).read_text())
}
SETTINGS = dict.fromkeys(
    [
        *["cattn_get_num_threads", "cattn_is_thread_count", "cattn_set_num_threads", "cattn_override_num_threads"],
        *["cattn_fork_count", "cattn_sleep_ns", "cattn_isa_keeps_arithmetic"],
        *["cattn_isa_wastes_fma", "cattn_isa_has_tiles", "cattn_block_keys", "cattn_chunk_keys"],
    ],
    "a setting or a constant, which reads no array",
)
CLEARED = {
    f"cattn_clear_{name}": "the binding's way to begin; the nets write whole structs"
    for name in re.findall(r"\bcattn_clear_(\w+)", (CSRC / "cattn.h").read_text())
}
COUNTS = {
    "cattn_set_dropout": "the problems compute threshold and scale themselves",
    "cattn_attention_counts_fit": "the arrays are small",
}
NOT_IN_C_FUZZER = {**SETTINGS, **CLEARED, **COUNTS}
NOT_IN_BITS = {
    **SETTINGS,
    **CLEARED,
    **COUNTS,
    "cattn_attention_explain": "it returns counts; tests/api/test_explain.py checks them on each table",
    "cattn_isa_current": "the table is an argument",
    "cattn_release": "memory and threads, not bits",
}


def test_every_function_of_the_core_is_fuzzed_and_compared_across_machines() -> None:
    assert len(OF_THE_CORE) > 40
    assert missing(OF_THE_CORE, text_of("fuzz/core/*.[ch]", "tests/core/*.[ch]"), NOT_IN_C_FUZZER) == set()
    assert missing(OF_THE_CORE, text_of("tests/core/*.[ch]"), NOT_IN_BITS) == set()


# ---- options ---------------------------------------------------------------------------------------------------------
# What the core never sees by this name: Python turns it into something else.
NOT_OF_THE_CORE = {
    "enable_gqa": "the number of heads says it",
    "layout": "it is a matter of strides",
    "rng": "it is a part of dropout_p: a seed or a generator",
    "block_size": "it is a part of block_mask",
}


def test_every_option_is_in_the_stored_bits() -> None:
    """The problems of fuzzer and bits.c read the rows of operands; a line names the options of its problem."""
    rows = {row[0] for row in [*_cattn._operands(), *_cattn._numbers()]}
    lines = (ROOT / "tests" / "data" / "bits.txt").read_text("utf-8")
    assert len(rows) > 20
    assert missing(rows, lines, NOT_OF_THE_CORE) == set()
    kinds = re.findall(r'\{"(\w+)", choose_\w+\}', (ROOT / "tests" / "core" / "functions.c").read_text("utf-8"))
    assert len(kinds) > 15
    assert {line.split()[0] for line in lines.splitlines()} == set(kinds)
    assert len(lines.splitlines()) >= 48


# ---- sources ---------------------------------------------------------------------------------------------------------
SOURCES = {path.relative_to(ROOT).as_posix() for path in [*CSRC.rglob("*.c"), *CSRC.rglob("*.inc.h")]}


def test_every_source_has_mutants() -> None:
    mutate = runpy.run_path(str(ROOT / "tools" / "mutate"))
    assert len(SOURCES) > 80
    assert set(mutate["FILES"]) | set(mutate["LEFT_OUT"]) == SOURCES
    assert not set(mutate["FILES"]) & set(mutate["LEFT_OUT"])
    for tests in mutate["FILES"].values():
        assert tests
        for name in tests:
            assert mutate["find_tests"](name)


def test_the_counted_survivors_exist() -> None:
    """Otherwise tools/mutate refuses to run."""
    pytest.importorskip("tree_sitter_c")
    mutate = runpy.run_path(str(ROOT / "tools" / "mutate"))
    every = [mutant for file in mutate["FILES"] for mutant in mutate["mutants_of"](file)]
    assert len(every) > 10_000
    mutate["check_survivors"](mutate["known_survivors"](), collections.Counter(mutant.pair for mutant in every))


def test_the_c_fuzzer_compiles_every_source_of_the_core() -> None:
    """Kernels by table; the sources of the core, of the table of options and of the fuzzer by pattern."""
    text = (ROOT / "tools" / "fuzz").read_text("utf-8")
    for pattern in ("csrc/{core,call}/*.c", "fuzz/core/*.c", "csrc/kernels/kernels_table.c"):
        assert pattern in text


# ---- public functions ------------------------------------------------------------------------------------------------
MODULES = [cattn, cattn.functional, cattn.nn, cattn.testing]
PUBLIC = {name for module in MODULES for name in module.__all__ if callable(getattr(module, name))}
NOT_DRAWN = {
    **{
        name: "a class of results or warnings, which other functions make"
        for name in PUBLIC
        if isinstance(getattr(cattn, name, None), type) and issubclass(getattr(cattn, name), (tuple, Warning))
        if name not in FUNCTIONS
    },
    **dict.fromkeys(["plot_attention", "view_attention"], "it draws; tests/view and tests/cli compare the pictures"),
    **dict.fromkeys(["AttentionView", "show_config"], "it returns text of this machine"),
    **dict.fromkeys(["Mistake", "Report", "assert_attention_close", "diagnose"], "tests/api/test_testing.py"),
    **dict.fromkeys(["manual_seed", "num_threads", "get_num_threads"], "a setting; set_num_threads stands for them"),
}


def test_every_public_function_is_drawn() -> None:
    """The fuzzer of the binding draws from FUNCTIONS, the soak from those whose bits depend on nothing else."""
    assert len(PUBLIC) > 60
    drawn = {name.partition(".")[0] for name in FUNCTIONS}
    assert drawn <= PUBLIC
    assert PUBLIC - drawn == NOT_DRAWN.keys()
    chosen = {work(from_rng(np.random.default_rng(seed)), limits=SMALL).name for seed in range(1500)}
    assert FUNCTIONS.keys() - chosen == BY_BLAS | OF_THE_PROCESS


def rows_of(call: dict[str, Any]) -> set[str]:
    """Return the rows of csrc/call/operands.h that a call has, with those of the parts of its arguments."""
    found = {name for name, x in call.items() if x is not None}
    found |= {f"{name}_scale" for name, x in call.items() if isinstance(x, cattn.Quantized)}
    return found | {"block_size" for x in call.values() if isinstance(x, cattn.BlockMask)}


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if hasattr(cattn.functional, name)])
def test_every_parameter_is_drawn(name: str) -> None:
    """A new row of csrc/call/operands.h is a parameter, or a part of one."""
    function, make = FUNCTIONS[name]
    wanted = set(inspect.signature(function).parameters)
    if not wanted & {"query_tangent", "decay"}:  # these take no quantized keys
        wanted |= {f"{name}_scale" for name in ("key", "value") if name in wanted}
    wanted |= {"block_size"} if "block_mask" in wanted else set()
    drawn = set[str]()
    for seed in range(150):
        call = make(from_rng(np.random.default_rng(seed)), SMALL)
        drawn |= rows_of(call)
        if seed < 20:
            Work(name, function, call).run()
    assert wanted == drawn


def test_the_generator_names_no_row_that_is_gone() -> None:
    rows = {row[0] for row in [*_cattn._operands(), *_cattn._numbers()]}
    assert {*WAYS, *NOT_OF_LISTS} <= rows
    assert REALS.keys() <= {kind for _, kind in _cattn._numbers()}
    assert {row[2] for row in _cattn._operands()} - {"SCALES"} == KINDS.keys()
