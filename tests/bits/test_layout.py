"""layout="bthd": every function gives the bits of the call on arrays with the heads first."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cattn
from cattn import reference
from support import assert_same_bits
from support.calls import calls, chooser, drawn, gathered_calls, lay_out, quantize, statistics_options, tokens_first
from support.derivatives import direction

Call = dict[str, Any]
EXTRAS = {"return_weights": True, "return_lse": np.float64}
# Arguments and results with tokens and heads; all others have the heads before the queries in both layouts.
ORDERED = {
    "query", "key", "value", "out", "grad_out", "out_tangent", "grad_out_tangent",
    "query_tangent", "key_tangent", "value_tangent",
}  # fmt: skip


def swapped(x: Any) -> Any:
    return np.swapaxes(x, -3, -2)


def assert_same_results(found: Any, right: Any, what: str) -> None:
    """Compare all fields; found has tokens before heads."""
    for name, a in right._asdict().items():
        b = getattr(found, name)
        assert (a is None) == (b is None), name
        if a is not None and name != "dropout_seed":
            assert_same_bits(swapped(b) if name in ORDERED else b, a, f"{name} of {what}")


def given_of(call: Call, result: Any, seed: int = 5) -> Call:
    rng = np.random.default_rng(seed)
    grad_out = rng.standard_normal(result.out.shape).astype(result.out.dtype)
    return call | {"grad_out": grad_out, "out": result.out, "lse": result.lse}


@st.composite
def with_heads(draw: st.DrawFn) -> Call:
    """Draw a call of arrays with heads, in any of the ways that a call can be."""
    call, dtype = draw(st.one_of(calls(with_heads=True), gathered_calls(with_heads=True)))
    if dtype == np.float32 and "key_indices" not in call and draw(st.integers(0, 3)) == 0:
        call = quantize(chooser(draw), call)
    return call


@pytest.mark.promise("layouts")
@given(with_heads(), st.data())
def test_any_call(call: Call, data: st.DataObject) -> None:
    """Output, weights, lse, gradients and statistics, of arrays with strides of their own."""
    other = tokens_first(call)
    right = cattn.scaled_dot_product_attention(**call, **EXTRAS)
    assert_same_results(cattn.scaled_dot_product_attention(**other, **EXTRAS), right, "attention")
    out = lay_out(chooser(data.draw), np.zeros(swapped(right.out).shape, right.out.dtype))
    assert cattn.scaled_dot_product_attention(**other, out=out) is out
    assert_same_bits(swapped(out), right.out, "out=")
    given = given_of(call, right)
    assert_same_results(
        cattn.attention_backward(**tokens_first(given)), cattn.attention_backward(**given), "attention_backward"
    )
    without_values = {name: x for name, x in call.items() if name not in ("value", "dropout_p", "rng")}
    weights = cattn.attention_weights(**tokens_first(without_values))
    assert_same_bits(weights, cattn.attention_weights(**without_values), "attention_weights")
    if "key_indices" not in call:
        options = data.draw(drawn(statistics_options, call["key"].shape[-2]))
        found = cattn.attention_statistics(**tokens_first(without_values), **options)
        assert_same_results(found, cattn.attention_statistics(**without_values, **options), "attention_statistics")


@pytest.mark.promise("layouts")
@given(calls(with_heads=True))
def test_any_derivative(drawn: tuple[Call, type]) -> None:
    call = drawn[0] | direction(drawn[0])
    right = cattn.attention_jvp(**call, return_lse=np.float64)
    assert_same_results(cattn.attention_jvp(**tokens_first(call), return_lse=np.float64), right, "attention_jvp")
    second = call | right._asdict() | {"grad_out_tangent": right.out}
    assert_same_results(
        cattn.attention_jvp_backward(**tokens_first(second)), cattn.attention_jvp_backward(**second), "second"
    )


def some_call(rank: int = 4) -> Call:
    rng = np.random.default_rng(1)
    batch = (2, 3)[: rank - 3]
    query, key, value = (rng.standard_normal((*batch, h, t, d)) for h, t, d in ((4, 5, 8), (2, 7, 8), (2, 7, 3)))
    bias = rng.standard_normal((4, 5, 7))
    return {"query": query, "key": key, "value": value, "bias": bias, "sinks": rng.standard_normal(4)}


def attention_of(call: Call) -> Any:
    return reference.scaled_dot_product_attention(**call, return_lse=True, return_weights=True)


def gradients_of(call: Call) -> Any:
    result = attention_of(call)
    return reference.attention_backward(result.out, **call, out=result.out, lse=result.lse)


def derivative_of(call: Call) -> Any:
    return reference.attention_jvp(**call, **tangents_of(call), return_lse=True)


def second_derivative_of(call: Call) -> Any:
    result = derivative_of(call)
    return reference.attention_jvp_backward(result.out, **call, **tangents_of(call), **result._asdict())


def tangents_of(call: Call) -> Call:
    """Return tangents that do not depend on the layout."""
    return {f"{name}_tangent": np.cos(3 * call[name]) for name in ("query", "key", "value")}


@pytest.mark.parametrize("rank", [3, 4, 5])
@pytest.mark.parametrize("function", [attention_of, gradients_of, derivative_of, second_derivative_of])
def test_the_reference_has_it(function: Callable[[Call], Any], rank: int) -> None:
    """Three dimensions are (T, H, head_dim), whose heads need no other word."""
    call = some_call(rank)
    right = function(call | ({"enable_gqa": True} if rank == 3 else {}))
    assert_same_results(function(tokens_first(call)), right, function.__name__)


def test_three_dimensions_are_tokens_heads_and_columns() -> None:
    call = some_call(3)
    right = cattn.scaled_dot_product_attention(**call, enable_gqa=True)
    found = cattn.scaled_dot_product_attention(**tokens_first(call))
    assert found.shape == (5, 4, 3)
    assert_same_bits(swapped(found), right, "output")
    assert cattn.explain(**{n: x for n, x in tokens_first(call).items() if n != "sinks"}).visible_pairs == 4 * 5 * 7
    with pytest.raises(ValueError, match="query has 4 heads \\(axis -2\\), key and value have 2, and enable_gqa=False"):
        cattn.scaled_dot_product_attention(**tokens_first(call), enable_gqa=False)


def test_the_output_has_the_order_of_the_query_in_memory() -> None:
    call = {name: np.ascontiguousarray(x) for name, x in tokens_first(some_call()).items() if name != "layout"}
    out = cattn.scaled_dot_product_attention(**call, layout="bthd")
    assert out.shape == (2, 5, 4, 3)
    assert out.flags.c_contiguous


def test_cached_keys_have_an_order_of_their_own() -> None:
    cache = cattn.KVCache(2, num_kv_heads=2, max_len=4, head_dim=8, dtype=np.float64)
    cache.append(np.ones((2, 2, 3, 8)), np.ones((2, 2, 3, 8)))
    with pytest.raises(ValueError, match=r"layout='bthd' and a cattn\.KVCache do not go together.*swapaxes"):
        cattn.causal_attention(np.ones((2, 1, 2, 8)), cache, layout="bthd")
