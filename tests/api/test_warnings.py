"""Which calls warn and which do not: ambiguous causal masks, and float masks that look boolean."""

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import cattn

INF, NAN = np.inf, np.nan


@pytest.fixture
def caught() -> Iterator[list[warnings.WarningMessage]]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        yield found


CAUSAL_CALLS: dict[str, Callable[..., Any]] = {
    "attention": lambda q, k, **c: cattn.scaled_dot_product_attention(np.ones((q, 2)), *[np.ones((k, 2))] * 2, **c),
    "weights": lambda q, k, **c: cattn.attention_weights(np.ones((q, 2)), np.ones((k, 2)), **c),
    "masked_softmax": lambda q, k, **c: cattn.masked_softmax(np.ones((q, k)), **c),
    "causal_mask": lambda q, k, **c: cattn.causal_mask(q, k, **c),
}


@pytest.mark.parametrize("name", CAUSAL_CALLS)
def test_is_causal_true_warns_if_the_lengths_differ(name: str, caught: list[warnings.WarningMessage]) -> None:
    call = CAUSAL_CALLS[name]
    for is_causal in (False, np.False_, "upper_left", "lower_right"):
        call(2, 3, is_causal=is_causal)
    call(3, 3, is_causal=True)
    call(2, 3, is_causal=True, query_offset=0)
    call(2, 3, is_causal=True, query_offset=1)
    assert caught == []
    for n, is_causal in enumerate((True, np.True_), 1):
        call(2, 3, is_causal=is_causal)
        call(3, 2, is_causal=is_causal)
        assert [w.category for w in caught] == [cattn.CausalAlignmentWarning] * 2 * n
    assert all(word in str(caught[0].message) for word in ("2 queries", "3 keys", "upper_left", "lower_right"))
    assert {w.filename for w in caught} == {__file__}, "the warning points to the caller's line"


def test_causal_attention_warns_of_queries_without_keys(caught: list[warnings.WarningMessage]) -> None:
    for q, k in ((2, 3), (3, 2), (3, 3), (1, 0)):
        if q <= k:
            cattn.causal_attention(np.ones((q, 2)), np.ones((k, 2)), np.ones((k, 2)))
        cattn.causal_attention(np.ones((q, 2)), np.ones((k, 2)), np.ones((k, 2)), query_offset=1)
    long, short = np.ones((3, 2)), np.ones((2, 2))
    cattn.causal_attention(long, short, short, query_seq_lengths=2)
    cattn.scaled_dot_product_attention(long, short, short, is_causal="lower_right")
    assert caught == []
    out = cattn.causal_attention(long, short, short)
    assert not out[0].any()
    assert "with 3 queries and 2 keys" in str(caught[0].message)
    assert "the first 1 queries see no key" in str(caught[0].message)
    assert "query_offset=-1" in str(caught[0].message)
    assert not cattn.causal_attention(long, long[:0], long[:0]).any()
    assert "there are 3 queries and no keys" in str(caught[1].message)
    assert caught[0].filename == __file__


def test_a_float_mask_of_zeros_and_ones_warns(dtype: Any, caught: list[warnings.WarningMessage]) -> None:
    q = np.ones((3, 4), dtype)
    zeros, one = np.zeros((3, 3), dtype), np.zeros((3, 3), dtype)
    one[2, 2] = 1
    two, half = one + one, one / 2
    for mask in (zeros, two, half, -one, one * NAN, np.where(one, -INF, zeros), one > 0):
        cattn.scaled_dot_product_attention(q, q, q, mask)
        cattn.scaled_dot_product_attention(q, q, q, bias=one)  # a bias is meant to be added
    cattn.scaled_dot_product_attention(q[:0], q, q, np.ones((0, 3), dtype))
    assert caught == []
    binary = [one, np.ones((3, 3), dtype), np.ones(1, dtype), np.float64(1), one.astype(np.float16), one[::-1, ::-1]]
    binary += [one.T, np.broadcast_to(one[2], (3, 3)), [[1.0, 0.0, -0.0]], np.asfortranarray(one)]
    for n, mask in enumerate(binary, 1):
        cattn.scaled_dot_product_attention(q, q, q, mask)
        assert len(caught) == n, mask
    cattn.attention_weights(q, q, one)
    cattn.causal_attention(q, q, q, one)
    assert len(caught) == len(binary) + 2
    assert {w.category for w in caught} == {UserWarning}
    assert all("attn_mask" in str(w.message) and "additive" in str(w.message) for w in caught)
    assert {w.filename for w in caught} == {__file__}, "the warning points to the caller's line"


def test_one_element_decides_whether_a_float_mask_is_binary(caught: list[warnings.WarningMessage]) -> None:
    """At every place of five dimensions: a 1 among zeros makes the mask binary, a 2 makes it an ordinary one."""
    x = np.ones((2, 3, 2, 3, 1))
    for place in np.ndindex(2, 3, 2, 3, 3):
        mask = np.zeros((2, 3, 2, 3, 3))
        mask[place] = 1
        for layout in (mask, np.asfortranarray(mask), mask[:, ::-1]):
            caught.clear()
            cattn.scaled_dot_product_attention(x, x, x, layout)
            assert len(caught) == 1
        other = 1 - mask
        other[place] = 2
        caught.clear()
        cattn.scaled_dot_product_attention(x, x, x, other)
        assert caught == []


def test_large_binary_masks_warn_too(caught: list[warnings.WarningMessage]) -> None:
    """Both ways through the search: a mask with ones is searched to its end; a mask of zeros alone does not warn."""
    mask = np.tri(1500, dtype=np.float32)
    x = np.ones((1500, 1), np.float32)
    cattn.scaled_dot_product_attention(x, x, x, mask)
    assert len(caught) == 1
    cattn.scaled_dot_product_attention(x, x, x, 0 * mask)
    assert len(caught) == 1
