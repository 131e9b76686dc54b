"""Public functions that are builtins: they bind arguments like the Python functions that document them."""

from __future__ import annotations

import inspect
import pickle
import types
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import cattn
from cattn import _cattn
from public_calls import contents

X = np.random.default_rng(0).standard_normal((3, 4, 5), dtype=np.float32)
SQUARE = X[:, :, :4]
ARGUMENTS: dict[str, dict[str, Any]] = {
    "scaled_dot_product_attention": {"query": X, "key": X, "value": X, "attn_mask": None, "dropout_p": 0.5, "rng": 1},
    "causal_attention": {"query": X, "key": X, "value": X, "query_offset": 1, "need_weights": True, "scale": 0.5},
    "masked_softmax": {"scores": SQUARE, "mask": SQUARE < 0, "method": "renormalize", "scale": 2.0},
    "dropout": {"x": X, "p": 0.25, "rng": 3, "return_mask": True},
}
NAMES = list(ARGUMENTS)
DROPPED = cattn.dropout(X, 0.5, rng=1)


def python_function(name: str) -> Callable[..., Any]:
    """Return a Python function with the same name and signature, which returns its arguments."""
    place: dict[str, Any] = {}
    exec(f"def {name}{inspect.signature(getattr(cattn, name))}: return locals()", place)
    function: Callable[..., Any] = place[name]
    return function


def with_new_names(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments under names that are equal strings, but other objects."""
    return {"".join(list(name)): value for name, value in arguments.items()}


@pytest.mark.parametrize("name", NAMES)
def test_the_builtin_looks_like_a_python_function(name: str) -> None:
    function = getattr(cattn, name)
    assert isinstance(function, types.BuiltinFunctionType)
    assert function is getattr(cattn.functional, name)
    assert function.__name__ == function.__qualname__ == name
    assert function.__module__.startswith("cattn.")
    assert pickle.loads(pickle.dumps(function)) is function
    assert inspect.getdoc(function)


def test_signatures_are_those_of_the_source() -> None:
    """Names, order, kinds and defaults of all parameters."""
    attention = inspect.signature(cattn.scaled_dot_product_attention)
    assert str(attention) == (
        "(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, *, scale=None, enable_gqa=None, "
        "bias=None, query_offset=None, query_seq_lengths=None, key_value_seq_lengths=None, window_size=(-1, -1), "
        "softcap=None, alibi_slopes=None, sinks=None, rng=None, need_weights=False, return_lse=False, "
        "return_dropout_mask=False, out=None)"
    )
    causal = inspect.signature(cattn.causal_attention)
    assert list(causal.parameters) == [p for p in attention.parameters if p != "is_causal"]
    assert all(causal.parameters[p].default == attention.parameters[p].default for p in causal.parameters)
    assert str(inspect.signature(cattn.masked_softmax)) == (
        "(scores, mask=None, *, is_causal=False, query_offset=None, scale=1.0, method='neg_inf', out=None)"
    )
    assert str(inspect.signature(cattn.dropout)) == (
        "(x, p=0.5, *, training=True, rng=None, return_mask=False, out=None)"
    )


@pytest.mark.parametrize("name", NAMES)
def test_every_way_to_pass_arguments_gives_the_same_bits(name: str) -> None:
    function, arguments = getattr(cattn, name), ARGUMENTS[name]
    bound = inspect.signature(function).bind(**arguments)
    want = function(*bound.args, **bound.kwargs)
    bound.apply_defaults()
    first, *rest = arguments.items()
    for args, keywords in (
        ((), arguments),
        ((), dict(reversed(arguments.items()))),
        ((first[1],), dict(rest)),
        ((), with_new_names(arguments)),
        ((first[1],), with_new_names(dict(rest))),
        (bound.args, bound.kwargs),
        ((), python_function(name)(**arguments)),
    ):
        assert contents(function(*args, **keywords)) == contents(want)
    everything = tuple(python_function(name)(**arguments).values())
    assert contents(getattr(_cattn, name)(*everything)) == contents(want), (
        "the C function that the Python function calls"
    )


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


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("call", range(len(BAD)))
def test_errors_are_those_of_python(name: str, call: int) -> None:
    args, keywords = BAD[call]
    with pytest.raises(TypeError) as expected:
        python_function(name)(*args, **keywords)
    with pytest.raises(TypeError) as raised:
        getattr(cattn, name)(*args, **keywords)
    assert str(raised.value) == str(expected.value)


WARNS = {
    "scaled_dot_product_attention": ("attend(X, X[:, :2], X[:, :2], is_causal=True)", cattn.CausalAlignmentWarning),
    "causal_attention": ("attend(X, X, X, np.eye(4))", UserWarning),
    "masked_softmax": ("attend(X, is_causal=True)", cattn.CausalAlignmentWarning),
}


@pytest.mark.parametrize("name", WARNS)
@pytest.mark.parametrize("function", ["shortcut", "Python"])
def test_warnings_point_to_the_caller(name: str, function: str) -> None:
    """From the builtin, and from the Python function, which takes calls whose names are other string objects."""
    source, category = WARNS[name]
    if function == "Python":
        source = source.replace(")", ", **{''.join(['ou', 't']): None})", source.count(")"))
        source = source.replace("np.eye(4, **{''.join(['ou', 't']): None})", "np.eye(4)")
    code = compile(f"\n\n{source}", "the caller", "exec")
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        exec(code, {"attend": getattr(cattn, name), "X": X, "np": np})
    assert [(w.category, w.filename, w.lineno) for w in warned] == [(category, "the caller", 3)]


def refused_function() -> None: ...


refused_function.__name__ = "dropout"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((print, "", (), (), 0), "no body in C for a function print of 0 parameters"),
        ((refused_function, "", ("x",), (), 1), "dropout of 1 parameters"),
        ((refused_function, "", tuple("abcdef"), (1,) * 7, 6), "not 7 defaults"),
        ((refused_function, "", tuple("abcdef"), (1,) * 3, 2), "3 defaults and 2 by position"),
        ((refused_function, "", tuple("abcdef"), (1,) * 3, 7), "7 by position"),
    ],
)
def test_a_shortcut_without_a_body_in_c_is_refused(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _cattn._shortcut(*arguments)
    assert contents(cattn.dropout(X, 0.5, rng=1)) == contents(DROPPED), "the existing function is unchanged"


def test_a_shortcut_needs_a_named_function() -> None:
    with pytest.raises(AttributeError, match="__name__"):
        _cattn._shortcut(3, "", (), (), 0)  # type: ignore[type-var]
    with pytest.raises(TypeError):
        _cattn._shortcut(refused_function, "", ["x"], (), 0)  # type: ignore[arg-type]
