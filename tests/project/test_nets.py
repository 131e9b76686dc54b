"""Every function, option and source is in each net: fuzzers, soak, bits on other machines, mutants; or a list says why.

A net that has a list of its own falls behind without a word, and what it misses is where a wrong number stays unseen.
"""

from __future__ import annotations

import ast
import collections
import datetime
import inspect
import re
import runpy
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cattn
import cattn.functional
import cattn.nn
import cattn.testing
from cattn import _cattn, functional
from cattn._view import _live
from equivalences.table import ROWS
from rowwise.row_table import CALLED
from support import ROOT
from support.calls import KINDS, NOT_OF_LISTS, REALS, SMALL, WAYS, from_rng
from support.functions import BY_BLAS, FUNCTIONS, OF_THE_PROCESS, Work, work
from support.rows import arrays_of
from support.wrong_calls import CASES

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
    rows = "csrc/call/functions.h"  # tests/core/functions.c makes a kind of problem of each; vectors.c is not random
    assert missing(OF_THE_CORE, text_of("fuzz/core/*.[ch]", "tests/core/[!v]*.[ch]", rows), NOT_IN_C_FUZZER) == set()
    assert missing(OF_THE_CORE, text_of("tests/core/[!v]*.[ch]", rows), NOT_IN_BITS) == set()


# ---- functions that C implements -------------------------------------------------------------------------------------
TABLE = _cattn._functions()
GRADIENTS = {f"{name}_backward" for name in TABLE if hasattr(functional, f"{name}_backward")}
IN_C = {*TABLE, *GRADIENTS}
ATTENTION = {name for name, rows in TABLE.items() if "attn_mask" in {row[0] for row in rows}}


def used_in(*patterns: str) -> set[str]:
    """Return the functions of cattn that the code of some files names, as attributes or imports."""
    found = set[str]()
    for path in [path for pattern in patterns for path in ROOT.glob(pattern)]:
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                found |= {node.attr} if node.value.id in ("cattn", "functional") else set()
            elif isinstance(node, ast.ImportFrom) and re.search(r"functional$|^cattn$", node.module or ""):
                found |= {alias.name for alias in node.names}
    return found & IN_C


# The kind of problem of tests/core/functions.c that a function is, where it has another name.
PROBLEMS = {
    **dict.fromkeys(["scaled_dot_product_attention", "causal_attention", "attention_weights"], "attention"),
    **dict.fromkeys(["varlen_attention", "varlen_attention_backward", "varlen_attention_statistics"], "packed"),
    "attention_backward": "backward",
    "attention_jvp": "jvp",
    "attention_jvp_backward": "jvp_backward",
    "attention_statistics": "statistics",
    "causal_mask": "mask",
}
XLA = {"forward": "scaled_dot_product_attention", "backward": "attention_backward", "jvp": "attention_jvp"}
XLA |= {"jvp_backward": "attention_jvp_backward"}


def kinds_of_problems() -> set[str]:
    """Return those that tests/core/functions.c names, and the rows of call/functions.h."""
    named = re.findall(r'\{"(\w+)", choose_\w+, -1\}', (ROOT / "tests" / "core" / "functions.c").read_text("utf-8"))
    rows = re.findall(r"^    F\((\w+)", (CSRC / "call" / "functions.h").read_text("utf-8"), re.MULTILINE)
    return {*named, *(set(rows) & TABLE.keys())}


def problems() -> set[str]:
    kinds = kinds_of_problems()
    forward = {name: name.removesuffix("_backward") if name in GRADIENTS - TABLE.keys() else name for name in IN_C}
    of_rows = {name: forward[name].removesuffix("_backward") for name in IN_C - ATTENTION}
    return {name for name in IN_C if PROBLEMS.get((of := (forward | of_rows)[name]), of) in kinds}


# Where each function is, or a reason stands below.
NETS = {
    "the C problems": problems(),
    "support/functions.py": IN_C & FUNCTIONS.keys(),
    "row_table.py or equivalences": (CALLED & IN_C) | used_in("tests/equivalences/*.py"),
    "support/wrong_calls.py": IN_C & {function for function, _ in CASES},
    "PyTorch": used_in("python/cattn/integrations/torch/*.py"),
    "JAX": {XLA[name] for name in _cattn._xla_targets()} | used_in("python/cattn/integrations/*jax*.py"),
    "dask": used_in("python/cattn/integrations/dask.py"),
    "ONNX": used_in("python/cattn/integrations/onnx.py"),
    "Keras": used_in("python/cattn/integrations/keras.py"),
    "the command line": used_in("python/cattn/_cli/*.py"),
}
# Functions whose arrays have the shape of the rows, or a number for each column.
_ALIKE = {name for name in IN_C if {row.axes for row in arrays_of(name).values()} <= {"*", "*D", "D"}} - {"causal_mask"}
_OF_ROWS = " ".join([*sorted(_ALIKE), "rope", "linear_backward"])
_TANGENTS = "attention_jvp attention_jvp_backward"
_PACKED = "varlen_attention varlen_attention_backward varlen_attention_statistics"
_STATES = "linear_attention_backward causal_conv_backward"
# A reason that is a file of tests must name the function.
ABSENT: dict[str, dict[str, str]] = {
    "the C problems": {"it returns counts, which are no bits": "explain"},
    "row_table.py or equivalences": {
        "tests/values/test_varlen.py": "varlen_attention_backward varlen_attention_statistics",
        "tests/values/test_masks.py": "causal_mask",
        "tests/values/test_choose_keys.py": "choose_keys",
    },
    "PyTorch": {
        "PyTorch has it, with gradients; batch_invariant computes it row by row": _OF_ROWS,
        "is_causal of scaled_dot_product_attention": "causal_attention",
        "return_weights of scaled_dot_product_attention": "attention_weights",
        "flash_attn has no twin for processors: call cattn on the arrays of the tensors": _PACKED,
        "it has no gradients: call cattn on the arrays of the tensors": "attention_statistics explain",
        "the operator of the forward function finds it by its name": "linear_attention_backward",
    },
    "JAX": {
        "XLA fuses it": f"{_OF_ROWS} linear causal_mask",
        "is_causal of dot_product_attention": "causal_attention",
        "no matrix of weights is computed": "attention_weights attention_statistics",
        "XLA has no packed sequences": _PACKED,
        "it has no gradients, and XLA has top_k: call cattn on arrays": "choose_keys",
        "a scan of JAX has it": f"linear_attention causal_conv {_STATES}",
    },
    "dask": {
        "dask.array.map_blocks runs it": f"{_OF_ROWS} linear causal_mask causal_conv choose_keys",
        "is_causal of attention": "causal_attention",
        "no task holds a whole row of weights": "attention_weights attention_statistics",
        "packed sequences have no batch to chunk": _PACKED,
        "dask trains nothing": f"attention_backward {_TANGENTS} {_STATES}",
    },
    "ONNX": {
        "the runtime has an operator for it": f"{_OF_ROWS} linear causal_mask",
        "is_causal of attention": "causal_attention",
        "the operator computes one output": "attention_statistics explain",
        "the operator has no packed sequences": _PACKED,
        "the operator has no lists of keys": "choose_keys",
        "a runtime trains nothing": f"attention_backward {_TANGENTS} {_STATES}",
    },
    "Keras": {
        "Keras's backend has it; use_cattn replaces attention alone": " ".join(IN_C - {"scaled_dot_product_attention"})
    },
    "the command line": {
        "it takes files of arrays for attention; the functions of rows are for Python": (
            " ".join([*(_ALIKE - {"masked_softmax", "dropout"}), "rope", "linear", "linear_backward"])
        ),
        "it has no packed sequences": _PACKED,
        "it trains nothing": f"attention_backward {_TANGENTS} {_STATES}",
        "it has no states": "linear_attention causal_conv",
        "lists of keys are for Python": "choose_keys",
    },
}


@pytest.mark.parametrize("net", NETS)
def test_every_function_is_in_the_net_or_a_reason_says_why_not(net: str) -> None:
    reasons = ABSENT.get(net, {})
    excused = [name for names in reasons.values() for name in names.split()]
    assert len(IN_C) > 30
    assert (IN_C - NETS[net]) ^ set(excused) == set(), "these are neither there nor excused, or both"
    assert len(excused) == len(set(excused))
    for reason, names in reasons.items():
        if reason.startswith("tests/"):
            text = (ROOT / reason).read_text("utf-8")
            assert [name for name in names.split() if not re.search(rf"\b{name}\b", text)] == [], reason


# ---- options ---------------------------------------------------------------------------------------------------------
# What the core never sees by this name: Python turns it into something else.
NOT_OF_THE_CORE = {
    "enable_gqa": "the number of heads says it",
    "layout": "it is a matter of strides",
    "rng": "it is a part of dropout_p: a seed or a generator",
    "block_size": "it is a part of block_mask",
}


OPTIONS = {row[0] for row in [*_cattn._operands(), *_cattn._numbers()]}


def test_every_option_is_in_the_stored_bits() -> None:
    """The problems of fuzzer and bits.c read the rows of operands; a line names the options of its problem."""
    lines = (ROOT / "tests" / "data" / "bits.txt").read_text("utf-8")
    assert len(OPTIONS) > 20
    assert missing(OPTIONS, lines, NOT_OF_THE_CORE) == set()
    kinds = kinds_of_problems()
    assert len(kinds) > 15
    assert {line.split()[0] for line in lines.splitlines()} == kinds
    assert len(lines.splitlines()) >= 48


# Options whose equivalence is no row of tests/equivalences: the file that has it instead, or why there is none.
NO_ROW = {
    **dict.fromkeys(["query", "key", "value"], "it is no option"),
    **dict.fromkeys(["attn_mask", "is_causal", "window_size"], "tests/bits/test_hidden_keys.py"),
    **dict.fromkeys(["query_seq_lengths", "key_value_seq_lengths", "query_offset"], "tests/values/test_masks.py"),
    **dict.fromkeys(["dropout_p", "rng"], "tests/values/test_dropout.py"),
    **dict.fromkeys(["scale", "bias", "softcap", "alibi_slopes", "sinks"], "tests/values/test_attention.py"),
    "enable_gqa": "tests/values/test_attention.py",
    **dict.fromkeys(["key_scale", "value_scale"], "a part of Quantized, which has a row"),
    "block_size": "a part of block_mask, which has a row",
}


def test_every_option_has_a_row_of_the_equivalences() -> None:
    assert OPTIONS - ROWS.keys() == NO_ROW.keys()
    for name, reason in NO_ROW.items():
        if reason.startswith("tests/"):
            assert re.search(rf"\b{name}\b", (ROOT / reason).read_text("utf-8")), f"{reason} does not name {name}"


# The names that options of attention have in core.js, and why the live page lacks the others.
LIVE = {
    "is_causal": "causal",
    "window_size": "window",
    "softcap": "softcap",
    "alibi_slopes": "slopes",
    "sinks": "sink",
    "scale": "scale",
    "attn_mask": "cells",
    "query_offset": "offset",
    "key_value_seq_starts": "first",
    "dropout_p": "dropout",
    "rng": "seed",
}
NOT_LIVE = {
    **dict.fromkeys(["query", "key", "value"], "the page has them as arrays"),
    **dict.fromkeys(["query_seq_lengths", "key_value_seq_lengths"], "the page shows no padding on the right"),
    **dict.fromkeys(["block_mask", "block_size", "key_indices", "bias", "gate"], "the page has no control for it"),
    **dict.fromkeys(["key_scale", "value_scale", "compute_dtype"], "the page computes float32"),
    **dict.fromkeys(["enable_gqa", "layout"], "each head of the page has keys of its own"),
}
OF_THE_PAGE = {"method", "temperature"}  # no options of attention
# struct live_attention beside the numbers that core.js writes into it.
SIZES = {"seqlen_q": "T_q", "seqlen_k": "T_k", "head_dim": "D", "d_v": "D_v", "left": "side", "right": "side"}
SPELLED = {"first_key": "first", "is_causal": "causal", "dropout_p": "dropout", **SIZES}


def test_every_option_is_in_the_live_page() -> None:
    """And JavaScript writes the numbers of a call in the order in which C reads them."""
    page = (ROOT / "python" / "cattn" / "_view" / "core.js").read_text("utf-8")
    options = set(re.findall(r"(\w+): ", re.search(r"^const OPTIONS = \{(.*?)^\};", page, re.M | re.S)[1]))  # type: ignore[index]
    assert LIVE.keys() | NOT_LIVE.keys() == OPTIONS
    assert set(LIVE.values()) | OF_THE_PAGE == options
    assert {*_live.OPTIONS} <= LIVE.keys()
    struct = re.search(r"^struct live_attention \{(.*?)^\};", text_of("csrc/live/live.c"), re.M | re.S)[1]  # type: ignore[index]
    members = [name for names in re.findall(r"double (.*?);", struct) for name in names.split(", ")]
    written = re.search(r"Float64Array\.of\((.*?)\);", page, re.S)[1].split(",")  # type: ignore[index]
    assert [SPELLED.get(name, name) for name in members] == [
        re.search(r"(?:options\.)?(\w+)", number)[1]
        for number in written  # type: ignore[index]
    ]
    for name in members:
        assert re.search(rf"call->{name}\b", text_of("csrc/live/live.c")), f"live.c does not read {name}"


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


def test_no_long_run_is_much_older_than_the_code() -> None:
    """nox -s nightly runs the long forms, and writes their dates."""
    runs = tomllib.loads((ROOT / "tools" / "long_runs.toml").read_text("utf-8"))
    sessions = re.findall(r"^LONG \+?= \[(.*)\]$", (ROOT / "noxfile.py").read_text("utf-8"), re.MULTILINE)
    assert {*runs["runs"], *runs["never"]} == set(re.findall(r'"(\w+)"', " ".join(sessions)))
    command = ["git", "log", "-1", "--format=%cs", "--", "csrc"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.strip()
    if not found:
        pytest.skip("there is no history")
    newest, allowed = datetime.date.fromisoformat(found), datetime.timedelta(days=runs["days"])
    late = {name: run["date"] for name, run in runs["runs"].items() if newest - run["date"] > allowed}
    assert late == {}, f"the newest C source is of {newest}: run nox -s nightly -- {' '.join(late)}"


def test_the_page_has_the_numbers_of_the_last_runs() -> None:
    """And a net that counts something has told its numbers."""
    tested = runpy.run_path(str(ROOT / "tools" / "tested"))
    assert tested["page"]() == (ROOT / "docs" / "how_tested.md").read_text("utf-8"), "tools/tested writes it again"
    runs = tomllib.loads((ROOT / "tools" / "long_runs.toml").read_text("utf-8"))["runs"]
    assert [name for name in ("tests", "coverage", "mutants", "fuzz", "soak") if not runs[name]["numbers"]] == []


def test_a_long_run_is_recorded_with_the_numbers_of_its_log(tmp_path: Path) -> None:
    tested = runpy.run_path(str(ROOT / "tools" / "tested"))
    (tmp_path / "tools").mkdir()
    file = tmp_path / "tools" / "long_runs.toml"
    file.write_text('[runs]\nfuzz = { date = 2026-01-02 }\n\n[never]\nsoak = "not yet"\n', "utf-8")
    log = "= 3 passed, 2 skipped in 5.10s =\n1 failed, 40 passed, 2 warnings in 7.00s (0:01:00)\n"
    log += 'numbers: {"calls": 5}\nnumbers: {"% of lines": 97.5}\n'
    for result in ("once", 'a "second" time'):
        tested["record"]("soak", result, log, tmp_path)
    found = tomllib.loads(file.read_text("utf-8"))
    assert found["never"] == {}
    run = found["runs"]["soak"]
    assert run["result"] == 'a "second" time'
    assert run["date"] == datetime.date.today()
    assert run["numbers"] == {"tests passed": 43, "tests skipped": 2, "tests failed": 1, "calls": 5, "% of lines": 97.5}
    assert tested["numbers_of"]("passed\nnumbers of a net: 5") == {}


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
    assert {*WAYS, *NOT_OF_LISTS} <= OPTIONS
    assert REALS.keys() <= {kind for _, kind in _cattn._numbers()}
    assert {row[2] for row in _cattn._operands()} - {"SCALES"} == KINDS.keys()
