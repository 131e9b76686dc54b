"""layout="bthd" in the reference, of three dimensions, in the memory of results, and with a cache."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from table import ORDERED, Call, assert_same_fields, swapped

import cattn
from cattn import reference
from support import assert_same_bits
from support.calls import tokens_first


def assert_same_results(found: Any, right: Any, what: str) -> None:
    """Compare all fields; found has tokens before heads."""
    fields = {name: swapped(x) if name in ORDERED and x is not None else x for name, x in found._asdict().items()}
    assert_same_fields(type(found)(**fields), right, what)


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
