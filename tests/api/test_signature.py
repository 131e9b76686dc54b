"""Signatures: builtins bind as the documented functions would, each door has each option or refuses it, types."""

from __future__ import annotations

import argparse
import importlib
import inspect
import os
import pickle
import re
import sys
import types
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cattn
from cattn import _cattn
from cattn._cli import attend
from cattn._input.doors import DOORS, Door
from cattn.functional._options import AttentionOptions
from support import ROOT, find, looped
from support.processes import run_command
from support.public_calls import contents

X = np.random.default_rng(0).standard_normal((3, 4, 5), dtype=np.float32)
SQUARE = X[:, :, :4]
ARGUMENTS: dict[str, dict[str, Any]] = {
    "scaled_dot_product_attention": {"query": X, "key": X, "value": X, "attn_mask": None, "dropout_p": 0.5, "rng": 1},
    "causal_attention": {"query": X, "key": X, "value": X, "query_offset": 1, "return_weights": True, "scale": 0.5},
    "attention_weights": {"query": X, "key": X, "bias": SQUARE[0], "stage": "dropout", "dropout_p": 0.5, "rng": 1},
    "varlen_attention": {
        "query": X, "key": X, "value": X, "cu_seqlens_q": [0, 1, 3], "cu_seqlens_k": [0, 2, 3],
        "is_causal": "lower_right", "return_lse": True,
    },
    "attention_backward": {
        "grad_out": X, "query": X, "key": X, "value": X, "out": X, "lse": X[..., 0], "is_causal": True,
        "scale": 0.5, "merged": True,
    },
    "varlen_attention_backward": {
        "grad_out": X, "query": X, "key": X, "value": X, "out": X, "lse": X[..., 0].T, "cu_seqlens_q": [0, 1, 3],
        "cu_seqlens_k": [0, 2, 3], "is_causal": "lower_right", "merged": True, "alignment": "lower_right",
    },
    "attention_statistics": {"query": X, "key": X, "statistics": ["lse"], "top_k": 2, "is_causal": True},
    "varlen_attention_statistics": {
        "query": X, "key": X, "cu_seqlens_q": [0, 1, 3], "cu_seqlens_k": [0, 2, 3], "observation_window": 1,
    },
    "choose_keys": {"query": X, "key": X, "count": 2, "block_size": 2, "last": 1, "return_scores": True},
    "explain": {"query": X, "key": X, "value": X, "window_size": (1, 0), "query_offset": 0},
    "softmax": {"x": X, "axis": 1, "where": X < 0, "scale": 2.0},
    "masked_softmax": {"scores": SQUARE, "mask": SQUARE < 0, "axis": 1, "method": "renormalize", "scale": 2.0},
    "dropout": {"x": X, "p": 0.25, "rng": 3, "return_mask": True},
    "causal_mask": {"T_q": 3, "T_k": 5, "window_size": (1, 0)},
    "rope": {"x": X, "positions": [3, 4, 5, 6], "theta": 500.0, "rotary_dim": 4, "interleaved": True},
    "rms_norm": {"x": X, "weight": X[0, 0], "eps": 0.5},
    "layer_norm": {"x": X, "weight": X[0, 0], "bias": X[0, 1], "eps": 0.5},
    "gelu": {"x": X, "approximate": "tanh"},
    "gelu_backward": {"grad_out": X, "x": X, "approximate": "tanh"},
    "silu": {"x": X},
    "silu_backward": {"grad_out": X, "x": X},
}  # fmt: skip
NAMES = list(ARGUMENTS)
DROPPED = cattn.dropout(X, 0.5, rng=1)


def python_function(name: str) -> Callable[..., Any]:
    """A function of Python with the same name and signature, which returns what it was given."""
    place: dict[str, Any] = {}
    exec(f"def {name}{inspect.signature(find(name))}: return locals()", place)
    function: Callable[..., Any] = place[name]
    return function


def put_together(arguments: dict[str, Any]) -> dict[str, Any]:
    """The same names, other strings in memory."""
    return {"".join(list(name)): value for name, value in arguments.items()}


@pytest.mark.parametrize("name", NAMES)
def test_it_looks_like_a_function(name: str) -> None:
    function = find(name)
    assert isinstance(function, types.BuiltinFunctionType)
    assert function is getattr(cattn.functional, name)
    assert function.__name__ == function.__qualname__ == name
    assert function.__module__ == ("cattn" if name in cattn.__all__ else "cattn.functional")
    assert pickle.loads(pickle.dumps(function)) is function
    assert inspect.getdoc(function)


def test_signatures_are_those_of_the_source() -> None:
    """Defaults too: to leave out an argument is to pass its default."""
    attention = inspect.signature(cattn.scaled_dot_product_attention)
    assert str(attention) == (
        "(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, *, scale=None, enable_gqa=None, "
        "layout='bhtd', bias=None, query_offset=None, query_seq_lengths=None, key_value_seq_lengths=None, "
        "key_value_seq_starts=None, window_size=(-1, -1), softcap=None, alibi_slopes=None, sinks=None, "
        "block_mask=None, key_indices=None, gate=None, compute_dtype=None, rng=None, return_weights=False, "
        "return_lse=False, return_dropout_mask=False, out=None)"
    )
    causal = inspect.signature(cattn.causal_attention)
    assert list(causal.parameters) == [p for p in attention.parameters if p != "is_causal"]
    assert causal.parameters["value"].default is None  # of a call with a cache
    others = [p for p in causal.parameters if p != "value"]
    assert all(causal.parameters[p].default == attention.parameters[p].default for p in others)
    assert str(inspect.signature(cattn.masked_softmax)) == (
        "(scores, mask=None, *, axis=-1, is_causal=False, query_offset=None, scale=1.0, method='neg_inf', out=None)"
    )
    assert str(inspect.signature(cattn.dropout)) == (
        "(x, p=0.5, *, training=True, rng=None, return_mask=False, out=None)"
    )
    assert str(inspect.signature(cattn.softmax)) == "(x, axis=-1, *, where=None, scale=1.0, out=None)"
    assert str(inspect.signature(cattn.attention_weights)) == (
        "(query, key, attn_mask=None, is_causal=False, *, dropout_p=0.0, scale=None, enable_gqa=None, layout='bhtd', "
        "bias=None, query_offset=None, query_seq_lengths=None, key_value_seq_lengths=None, key_value_seq_starts=None, "
        "window_size=(-1, -1), softcap=None, alibi_slopes=None, sinks=None, block_mask=None, "
        "key_indices=None, compute_dtype=None, rng=None, out=None, stage='softmax')"
    )
    assert str(inspect.signature(cattn.varlen_attention)) == (
        "(query, key, value, cu_seqlens_q, cu_seqlens_k, *, dropout_p=0.0, is_causal=False, scale=None, "
        "window_size=(-1, -1), softcap=None, alibi_slopes=None, sinks=None, gate=None, compute_dtype=None, "
        "rng=None, return_lse=False, out=None, max_seqlen_q=None, max_seqlen_k=None, alignment=None)"
    )
    assert str(inspect.signature(cattn.attention_backward)) == (
        "(grad_out, query, key, value, out, lse, *, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, "
        "enable_gqa=None, layout='bhtd', bias=None, query_offset=None, query_seq_lengths=None, "
        "key_value_seq_lengths=None, key_value_seq_starts=None, window_size=(-1, -1), softcap=None, "
        "alibi_slopes=None, sinks=None, block_mask=None, key_indices=None, gate=None, compute_dtype=None, rng=None, "
        "grad_lse=None, merged=False)"
    )
    explained = inspect.signature(cattn.explain).parameters
    assert list(explained) == [p for p in attention.parameters if p not in ("key_indices", "out")]
    assert all(parameter.default == attention.parameters[name].default for name, parameter in explained.items())
    assert str(inspect.signature(cattn.causal_mask)) == (
        "(T_q, T_k=None, *, is_causal='lower_right', query_offset=None, window_size=(-1, -1))"
    )
    assert str(inspect.signature(cattn.rope)) == (
        "(x, positions=None, *, theta=10000.0, rotary_dim=None, interleaved=False, scaling=None, inverse=False, "
        "out=None)"
    )
    assert str(inspect.signature(cattn.rms_norm)) == "(x, weight=None, eps=1e-06, *, out=None)"
    for name, text in {
        "layer_norm": "(x, weight=None, bias=None, eps=1e-05, *, out=None)",
        "gelu": "(x, approximate='none', *, out=None)",
        "gelu_backward": "(grad_out, x, approximate='none', *, out=None)",
        "silu": "(x, *, out=None)",
        "silu_backward": "(grad_out, x, *, out=None)",
    }.items():
        assert str(inspect.signature(find(name))) == text


def test_one_table_of_attention_arguments() -> None:
    """Its names are documented, and the names of options are in the types of the overloads."""
    names = list(_cattn._arguments("scaled_dot_product_attention"))
    page = (ROOT / "docs/semantics.md").read_text("utf-8")
    assert [name for name in names if not re.search(rf"`{name}\b", page)] == []
    first, last = names.index("scale"), names.index("rng")
    assert AttentionOptions.__optional_keys__ == set(names[first : last + 1])


@pytest.mark.parametrize("name", ["causal_attention", "attention_weights", "attention_backward"])
def test_every_form_of_attention_has_every_option(name: str) -> None:
    parameters = inspect.signature(find(name)).parameters
    attention = inspect.signature(cattn.scaled_dot_product_attention).parameters
    refused = DOORS[name].refused if name in DOORS else {}
    for option in sorted(AttentionOptions.__optional_keys__ - refused.keys()):
        assert parameters[option].default == attention[option].default


@pytest.mark.parametrize("name", NAMES)
def test_every_way_to_pass_arguments_gives_the_same_bits(name: str) -> None:
    function, arguments = find(name), ARGUMENTS[name]
    bound = inspect.signature(function).bind(**arguments)
    want = function(*bound.args, **bound.kwargs)
    bound.apply_defaults()
    first, *rest = arguments.items()
    for args, keywords in (
        ((), arguments),
        ((), dict(reversed(arguments.items()))),
        ((first[1],), dict(rest)),
        ((), put_together(arguments)),
        ((first[1],), put_together(dict(rest))),
        (bound.args, bound.kwargs),
        ((), python_function(name)(**arguments)),
    ):
        assert contents(function(*args, **keywords)) == contents(want)


BAD: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
    ((), {}),
    ((), {"nonsense": 1}),
    ((X,), {"nonsense": 1}),
    ((X,) * 30, {}),
    ((X,) * 7, {"rng": 1, "out": None}),
    ((), {"out": None}),
    ((X, X, X), {"query": X, "scores": X, "x": X}),
    ((X, X, X, None), {"".join(("que", "ry")): X, "".join(("sco", "res")): X, "".join(("x", "")): X}),
]


@looped("name", NAMES)
@pytest.mark.parametrize("call", range(len(BAD)))
def test_errors_are_those_of_python(name: str, call: int) -> None:
    args, keywords = BAD[call]
    with pytest.raises(TypeError) as expected:
        python_function(name)(*args, **keywords)
    with pytest.raises(TypeError) as raised:
        find(name)(*args, **keywords)
    text = str(expected.value)
    refused = DOORS[name].refused if name in DOORS else {}
    reasons = {f"{text}: {refused[o]}" for o in refused if f"argument '{o}'" in text}
    assert str(raised.value) in (reasons or {text})


WARNS = {
    "scaled_dot_product_attention": ("attend(X, X[:, :2], X[:, :2], is_causal=True)", cattn.CausalAlignmentWarning),
    "causal_attention": ("attend(X, X, X, np.eye(4))", UserWarning),
    "attention_weights": ("attend(X, X[:, :2], is_causal=True, stage='dropout')", cattn.CausalAlignmentWarning),
    "varlen_attention": ("attend(X, X, X, [0, 1, 3], [0, 2, 3], is_causal=True)", cattn.CausalAlignmentWarning),
    "attention_backward": ("attend(X, X, X, X, X, X[..., 0], attn_mask=np.eye(4), merged=True)", UserWarning),
    "explain": ("attend(X, X[:, :2], X[:, :2], is_causal=True)", cattn.CausalAlignmentWarning),
    "masked_softmax": ("attend(X, is_causal=True)", cattn.CausalAlignmentWarning),
    "causal_mask": ("attend(2, 3, is_causal=True)", cattn.CausalAlignmentWarning),
}


@pytest.mark.parametrize("name", WARNS)
def test_warnings_point_to_the_caller(name: str) -> None:
    source, category = WARNS[name]
    code = compile(f"\n\n{source}", "the caller", "exec")
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        exec(code, {"attend": find(name), "X": X, "np": np})
    assert [(w.category, w.filename, w.lineno) for w in warned] == [(category, "the caller", 3)]


def named(name: str) -> Callable[..., Any]:
    def function() -> None: ...

    function.__name__ = name
    return function


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((print, "", (), (), 0), "no body in C for a function print"),
        ((named("dropout"), "", tuple("abc"), (1,) * 7, 3), "dropout: 3 parameters do not fit 7 defaults"),
        ((named("dropout"), "", ("x", "p"), (1,), 0), "1 defaults and 0 positional"),
        ((named("dropout"), "", ("x", "p"), (1,), 3), "3 positional"),
        ((named("dropout"), "", ("x", "q"), (1,), 1), "dropout has a parameter q that its table in C lacks"),
        ((named("softmax"), "", tuple(map(str, range(41))), (), 41), "softmax: 41 parameters"),
    ],
)
def test_a_signature_that_does_not_fit_is_refused(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _cattn._register(*arguments)
    assert contents(cattn.dropout(X, 0.5, rng=1)) == contents(DROPPED), "the registered one stays"


def test_a_signature_has_names() -> None:
    with pytest.raises(AttributeError, match="__name__"):
        _cattn._register(3, "", (), (), 0)  # type: ignore[type-var]
    with pytest.raises(TypeError):
        _cattn._register(named("dropout"), "", ["x"], (), 0)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="names must be str"):
        _cattn._register(named("dropout"), "", (3,), (), 1)  # type: ignore[arg-type]


def test_helpers_are_registered_by_name() -> None:
    for helpers in ({}, {"cast": print}, {f"x{i}": print for i in range(100)}):
        with pytest.raises(TypeError, match="_register_helpers"):
            _cattn._register_helpers(**helpers)
    assert contents(cattn.dropout(X.astype(int), 0.5, rng=1)) == contents(
        cattn.dropout(X.astype(int) * 1.0, 0.5, rng=1)
    )


BY_ITSELF = """
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_file_location
path = {path!r}
spec = spec_from_file_location("_cattn", path, loader=ExtensionFileLoader("cattn._cattn", path))
module = module_from_spec(spec)
spec.loader.exec_module(module)
def softmax(x, axis=-1): ...
softmax = module._register(softmax, "", ("x", "axis"), (-1,), 2)
for call in (lambda: softmax([1.0]), lambda: softmax(), lambda: module._store(1, 2),
             lambda: module._product(1, 2, None, True)):
    try:
        call()
    except RuntimeError as error:
        print(error)
import cattn
print(cattn.softmax([0.0, 0.0]))
"""


def test_a_call_before_the_helpers_are_registered_is_an_error() -> None:
    code = BY_ITSELF.format(path=_cattn.__file__)
    done = run_command([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    early = "cattn is called before its import is complete, or after its end"
    assert done.stdout.splitlines() == [early] * 4 + ["[0.5 0.5]"]


@pytest.mark.parametrize("first", ["cattn._cattn", "cattn._input.arrays", "cattn.functional", "cattn.random"])
def test_any_part_may_be_imported_first(first: str) -> None:
    code = f"import {first}, cattn; print(cattn.softmax([0, 0]), cattn.dropout([1], 0.0))"
    done = run_command([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "[0.5 0.5] [1.]\n")


# ---- every door has each option of attention, or refuses it with a reason --------------------------------------------
OPTIONS = _cattn._arguments("scaled_dot_product_attention")
INTEGRATIONS = {
    "torch": "scaled_dot_product_attention",
    "jax": "dot_product_attention",
    "dask": "attention",
    "keras": "_attention",
    "onnx": "attention",
}
ONES = np.ones((2, 3, 4))


def of_the_command_line() -> list[str]:
    parser = argparse.ArgumentParser()
    attend.add_arguments(parser)
    return [action.dest for action in parser._actions]


def parameters(door: str) -> list[str]:
    """The names of what a function, or the command, can be given."""
    if door == "attend":
        return of_the_command_line()
    if door not in INTEGRATIONS:
        return list(inspect.signature(find(door)).parameters)
    if door == "keras":
        os.environ.setdefault("KERAS_BACKEND", "numpy")
        pytest.importorskip("jax")  # the NumPy backend of Keras imports it
    pytest.importorskip(door)
    function = getattr(importlib.import_module(f"cattn.integrations.{door}"), INTEGRATIONS[door])
    return list(inspect.signature(function).parameters)


def differences(options: Iterable[str], given: Iterable[str], door: Door) -> dict[str, list[str]]:
    """What is wrong with a door; nothing if each option is one parameter or one refusal, and nothing else is."""
    parameters, own = set(given), set(door.own.split())
    spelled = {name: door.spelled.get(name, name) for name in options}
    lists = {
        "neither a parameter nor refused": [
            o for o, p in spelled.items() if p not in parameters and o not in door.refused and not door.otherwise
        ],
        "a parameter, and refused": [
            option for option in spelled.keys() & door.refused if (spelled[option] in parameters) != door.has_refused
        ],
        "refused, but no option": [o for o in door.refused if o not in spelled],
        "spelled, but no option": [o for o in door.spelled if o not in spelled],
        "an option, and the door's own": sorted(own & spelled.keys()),
        "the door's own, but no parameter": sorted(own - parameters),
        "neither an option nor the door's own": sorted(parameters - own - set(spelled.values())),
        "refused without a reason": [o for o, reason in door.refused.items() if not reason.strip()],
    }
    return {what: names for what, names in lists.items() if names}


def test_the_public_functions_are_the_table_in_c() -> None:
    """scaled_dot_product_attention has all of it, in its order, and so has the reference."""
    for module in (cattn, cattn.reference):
        assert list(OPTIONS) == list(inspect.signature(module.scaled_dot_product_attention).parameters)
    with pytest.raises(ValueError, match="no body in C for a function nothing"):
        _cattn._arguments("nothing")


@pytest.mark.parametrize("door", DOORS)
def test_every_option_is_a_parameter_or_refused(door: str) -> None:
    assert differences(OPTIONS, parameters(door), DOORS[door]) == {}


@pytest.mark.parametrize("door", [name for name in DOORS if hasattr(cattn, name) and name != "linear_attention"])
def test_the_parameters_of_a_door_are_in_its_table_in_c(door: str) -> None:
    table = _cattn._arguments(door)
    assert table[: len(OPTIONS)] == OPTIONS
    assert set(table[len(OPTIONS) :]) == set(DOORS[door].own.split())


@pytest.mark.parametrize(
    ("call", "door"),
    {
        "DENSE": "scaled_dot_product_attention", "PACKED": "varlen_attention", "STATISTICS": "attention_statistics",
        "XLA": "jax",
    }.items(),
)  # fmt: skip
def test_a_kind_of_call_has_the_arrays_that_its_door_takes(call: str, door: str) -> None:
    given = parameters(door)
    spelled = DOORS[door].spelled if door in DOORS else {}
    rows = [(name, calls) for name, _, kind, _, calls in _cattn._operands() if kind != "SCALES"]
    assert {name: spelled.get(name, name) in given for name, _ in rows} == {name: call in calls for name, calls in rows}


def test_scales_are_in_the_calls_of_their_arrays() -> None:
    calls = {name: calls for name, *_, calls in _cattn._operands()}
    assert {f"{name}_scale": calls[name] for name in ("key", "value")} == {
        name: calls[name] for name, _, kind, *_ in _cattn._operands() if kind == "SCALES"
    }


def test_the_table_of_options_has_every_argument_of_attention() -> None:
    rows = [row[0] for row in (*_cattn._operands(), *_cattn._numbers())]
    assert set(OPTIONS) - set(rows) == {"return_weights", "return_lse", "return_dropout_mask", "out"}
    assert len(rows) == len(set(rows))


@pytest.mark.parametrize("door", DOORS)
def test_a_new_option_of_one_door_only_is_found(door: str) -> None:
    given, new = parameters(door), "score_shift"
    missing = {} if DOORS[door].otherwise else {"neither a parameter nor refused": [new]}
    assert differences([*OPTIONS, new], given, DOORS[door]) == missing
    assert differences(OPTIONS, [*given, new], DOORS[door]) == {"neither an option nor the door's own": [new]}
    assert differences([*OPTIONS, new], [*given, new], DOORS[door]) == {}


def test_there_is_no_other_door() -> None:
    """Functions of cattn that take a query, but the viewer, which multiplies it only; and integrations that have a
    function for it."""
    public = {name for name in cattn.__all__ if callable(find(name)) and not isinstance(find(name), type)}
    takes_queries = {name for name in public if "query" in inspect.signature(find(name)).parameters} - {
        "view_attention"
    }
    assert takes_queries == {name for name in DOORS if name in public} | {"scaled_dot_product_attention"}
    assert DOORS.keys() - public == {*INTEGRATIONS, "attend"}


@pytest.mark.parametrize("door", [name for name in DOORS if hasattr(cattn, name)] + ["jax", "torch"])
def test_the_error_for_a_refused_option_says_why(door: str) -> None:
    function: Any
    if door in INTEGRATIONS:
        pytest.importorskip(door)
        function = getattr(importlib.import_module(f"cattn.integrations.{door}"), INTEGRATIONS[door])
    else:
        function = find(door)
    required = [p.name for p in inspect.signature(function).parameters.values() if p.default is p.empty]
    reasons = {name: DOORS[door].why_refused(name) for name in OPTIONS if name not in parameters(door)}
    for option, reason in reasons.items():
        if reason is None:
            assert option in DOORS[door].spelled
            continue
        with pytest.raises(TypeError) as error:
            function(**dict.fromkeys(required, ONES), **{option: ONES})
        assert str(error.value).endswith(f"an unexpected keyword argument '{option}': {reason}")


# ---- the types that a checker sees -----------------------------------------------------------------------------------
PROGRAM = """
from typing import Any, assert_type

import numpy as np
from numpy.typing import NDArray

import cattn

x = np.zeros((2, 3))
flag = bool(x.any())
edges = [0, 2]
Array = NDArray[Any]

assert_type(cattn.scaled_dot_product_attention(x, x, x), Array)
assert_type(cattn.scaled_dot_product_attention(x, x, x, None, 0.0, True, scale=2.0, out=x), Array)
assert_type(cattn.scaled_dot_product_attention(x, x, x, return_weights=False), Array)
assert_type(cattn.scaled_dot_product_attention(x, x, x, return_weights=True), cattn.AttentionOutput)
assert_type(cattn.scaled_dot_product_attention(x, x, x, return_lse=True, softcap=1.0), cattn.AttentionOutput)
assert_type(cattn.scaled_dot_product_attention(x, x, x, return_dropout_mask=True), cattn.AttentionOutput)
assert_type(cattn.scaled_dot_product_attention(x, x, x, out=cattn.AttentionOutput(x)), cattn.AttentionOutput)
assert_type(cattn.scaled_dot_product_attention(x, x, x, return_weights=flag), Any)
assert_type(cattn.causal_attention(x, x, x), Array)
assert_type(cattn.causal_attention(x, x, x, return_weights=True, return_lse=flag), cattn.AttentionOutput)
assert_type(cattn.causal_attention(x, x, x, return_lse=True), cattn.AttentionOutput)
assert_type(cattn.varlen_attention(x, x, x, edges, edges), Array)
assert_type(cattn.varlen_attention(x, x, x, edges, edges, return_lse=True), cattn.AttentionOutput)
assert_type(cattn.varlen_attention(x, x, x, edges, edges, return_lse=np.float64), cattn.AttentionOutput)
assert_type(cattn.scaled_dot_product_attention(x, x, x, return_lse=np.float64), cattn.AttentionOutput)
assert_type(cattn.varlen_attention_backward(x, x, x, x, x, x, edges, edges), cattn.AttentionGradients)
assert_type(cattn.attention_statistics(x, x), cattn.AttentionStatistics)
assert_type(cattn.varlen_attention_statistics(x, x, edges, edges), cattn.AttentionStatistics)
assert_type(cattn.show_mask(3), str)
assert_type(cattn.masked_softmax(x, axis=(0, 1)), Array)

for layer in (cattn.CausalAttention(3, 2, 4, 0.0), cattn.MultiHeadAttention(4, 4, 4, 0.0, 2)):
    assert_type(layer(x), Array)
    assert_type(layer(x, return_weights=True), tuple[Array, Array])
    assert_type(layer(x, cache=None, return_weights=flag), Array | tuple[Array, Array])
assert_type(cattn.SelfAttention_v2(3, 2)(x), Array)
assert_type(cattn.SelfAttention_v1(3, 2)(x, return_weights=True), tuple[Array, Array])

cattn.sliding_window(widow=3)  # type: ignore[call-arg]
cattn.CausalAttention(3, 2, 4, droput=0.0)  # type: ignore[call-arg]
cattn.causal_attention(x, x, x, is_causal=True)  # type: ignore[call-overload]
cattn.MultiHeadAttention(4, 4, 4, 0.0, 2)(x, need_weights=True)  # type: ignore[call-overload]
"""


def test_a_type_checker_sees_precise_results(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    # the project's settings, and its cache if there is one
    command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"), str(program)]
    done = run_command(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
