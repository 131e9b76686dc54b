"""merge_attention: results of parts of the keys merge to the result of all keys; an empty part changes no bit."""

import itertools
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import cattn
from support import assert_same_bits


def attend(*arrays: np.ndarray, **options: Any) -> cattn.AttentionOutput:
    return cattn.scaled_dot_product_attention(*arrays, return_lse=True, **options)


def inputs(dtype: type, T_k: int = 90) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(0)
    return tuple(rng.standard_normal((2, 3, n, 8)).astype(dtype) * 2 for n in (20, T_k, T_k))


def merge(parts: list[cattn.AttentionOutput]) -> tuple[np.ndarray, np.ndarray]:
    return cattn.merge_attention([p.out for p in parts], [p.lse for p in parts])


@pytest.mark.promise("merging")
@pytest.mark.parametrize("cuts", [[], [40], [1, 2, 3], [30, 60, 89]])
def test_merged_parts_are_the_result_of_all_keys(cuts: list[int], dtype: type) -> None:
    query, key, value = inputs(dtype)
    edges = [0, *cuts, 90]
    parts = [attend(query, key[..., a:b, :], value[..., a:b, :]) for a, b in itertools.pairwise(edges)]
    out, lse = merge(parts)
    whole = attend(query, key, value)
    assert out.dtype == lse.dtype == dtype
    np.testing.assert_allclose(out, whole.out, rtol=0, atol=30 * np.finfo(dtype).eps * np.abs(value).max())
    np.testing.assert_allclose(lse, whole.lse, rtol=4 * np.finfo(dtype).eps)


def test_causal_parts_merge_with_their_offsets(dtype: type) -> None:
    """Each part of a causal call has its own query_offset. Some rows see no key of some parts."""
    query, key, value = inputs(dtype, 20)
    parts = [
        attend(query, key[..., a:b, :], value[..., a:b, :], is_causal=True, query_offset=-a)
        for a, b in ((0, 7), (7, 16), (16, 20))
    ]
    assert np.isneginf(parts[2].lse[..., :16]).all()
    out, lse = merge(parts)
    whole = attend(query, key, value, is_causal=True)
    np.testing.assert_allclose(out, whole.out, rtol=0, atol=30 * np.finfo(dtype).eps * np.abs(value).max())
    np.testing.assert_allclose(lse, whole.lse, rtol=4 * np.finfo(dtype).eps)


@pytest.mark.parametrize("where", [0, 1])
def test_an_empty_part_changes_no_bit(where: int, dtype: type) -> None:
    query, key, value = inputs(dtype)
    some = attend(query, key, value, sinks=np.array([0.5, 1.0, -3.0]))
    nothing = attend(query, key[..., :0, :], value[..., :0, :])
    nothing.out[...] = np.nan  # its numbers do not count
    parts = [some]
    parts.insert(where, nothing)
    out, lse = merge(parts)
    assert_same_bits(out, some.out)
    assert_same_bits(lse, some.lse)
    assert_same_bits(merge([some])[0], some.out)


def test_only_empty_parts_give_zero_and_minus_infinity(dtype: type) -> None:
    query, key, value = inputs(dtype)
    nothing = attend(query, key[..., :0, :], value[..., :0, :])
    out, lse = merge([nothing, nothing])
    assert not out.any()
    assert np.isneginf(lse).all()


@pytest.mark.parametrize("sinks", [None, [0.5, -np.inf, 1.0]])
def test_scores_of_minus_infinity_merge_to_what_one_call_gives(sinks: Any, dtype: type) -> None:
    """Row 0 has scores of -inf only, row 1 in its first part only, row 2 sees no key, row 3 none of the first part."""
    query, key, value = inputs(dtype)
    top = np.finfo(dtype).max
    query[..., :2] = 0
    query[..., 0, 0] = query[..., 1, 1] = 8
    key[..., 0] = -top
    key[..., :40, 1] = -top
    mask = np.ones((20, 90), bool)
    mask[2], mask[3, :40] = False, False
    with np.errstate(all="ignore"):
        whole = attend(query, key, value, attn_mask=mask, sinks=sinks)
        parts = [
            attend(query, key[..., a:b, :], value[..., a:b, :], attn_mask=mask[:, a:b], sinks=None if a else sinks)
            for a, b in ((0, 40), (40, 60), (60, 90))
        ]
    heads = slice(None) if sinks is None else [1]  # the others have a finite sink
    assert np.isnan(whole.out[:, heads, 0]).all()
    assert not np.isnan(whole.out[:, :, 1:]).any()
    assert not whole.out[:, :, 2].any()
    for merged in (cattn.merge_attention(parts), cattn.merge_attention([cattn.merge_attention(parts[:2]), parts[2]])):
        np.testing.assert_allclose(merged.out, whole.out, rtol=0, atol=30 * np.finfo(dtype).eps * np.abs(value).max())
        np.testing.assert_allclose(merged.lse, whole.lse, rtol=4 * np.finfo(dtype).eps)


def test_log_sum_exps_may_be_far_apart_or_nan(dtype: type) -> None:
    out, lse = cattn.merge_attention(np.array([[[1.0]], [[2.0]]], dtype), np.array([[-1e30], [1e30]], dtype))
    assert (out.item(), lse.item()) == (2.0, dtype(1e30))
    out, lse = cattn.merge_attention(np.array([[[1.0]], [[2.0]]], dtype), np.array([[np.nan], [0.0]], dtype))
    assert np.isnan(out).all()
    assert np.isnan(lse).all()


def test_float32_and_float64_give_float64() -> None:
    out, lse = cattn.merge_attention([np.ones((2, 3), np.float32), np.ones((2, 3))], [np.zeros(2, np.float32)] * 2)
    assert out.dtype == lse.dtype == np.float64


def peak(call: Callable[[], object]) -> int:
    """Return the peak memory of Python and NumPy during the call, its result included."""
    call()
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_merging_needs_one_array_beside_its_result() -> None:
    """Beside the output: one more array of its size, and one number for each row of each part."""
    outs, lses = np.ones((5, 3000, 64), np.float32), np.ones((5, 3000), np.float32)
    assert peak(lambda: cattn.merge_attention(list(outs), list(lses))) < 2 * outs[0].nbytes + 2 * lses.nbytes + 2**14


def test_parts_in_one_array_are_not_split_into_a_list() -> None:
    """Memory stays small with 65536 parts, and shapes that do not match are refused before any work."""
    many, more = (np.broadcast_to(np.float32(1), n) for n in (2**16, 2**16 + 1))
    out, lse = cattn.merge_attention(many[:, None], many)
    assert (out.item(), lse.item()) == (1.0, pytest.approx(1 + np.log(2**16)))
    assert peak(lambda: cattn.merge_attention(many[:, None], many)) < 2 * many.nbytes

    def refused() -> None:
        with pytest.raises(ValueError, match="as many, at least 1, got 65536 and 65537"):
            cattn.merge_attention(many[:, None], more)

    assert peak(refused) < 2**16


@pytest.mark.parametrize(
    ("outs", "lses", "error", "message"),
    [
        ([], [], ValueError, "at least 1, got 0 and 0"),
        ([np.ones((2, 3))], [], ValueError, "as many, at least 1, got 1 and 0"),
        ([np.ones((2, 3)), np.ones((2, 4))], [np.ones(2)] * 2, ValueError, r"outs\[1\] has shape \(2, 4\), outs\[0\]"),
        ([np.ones((2, 3))], [np.ones(3)], ValueError, r"lses\[0\] has shape \(3,\), its output wants \(2,\)"),
        ([np.ones((2, 3), complex)], [np.ones(2)], TypeError, r"outs\[0\] has dtype complex"),
    ],
)
def test_wrong_arguments_are_refused(outs: Any, lses: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        cattn.merge_attention(outs, lses)


def test_the_most_dimensions_that_numpy_has() -> None:
    rng = np.random.default_rng(0)
    outs, lses = rng.standard_normal((2, 3, 4)), rng.standard_normal((2, 3))
    out, lse = cattn.merge_attention(list(outs), list(lses))
    ones = (1,) * 62
    deep = cattn.merge_attention([x.reshape(*ones, 3, 4) for x in outs], [x.reshape(*ones, 3) for x in lses])
    assert_same_bits(deep[0].reshape(3, 4), out)
    assert_same_bits(deep[1].reshape(3), lse)


# ---- results and gradients -----------------------------------------------------------------------------------------
def test_results_merge_in_chains(dtype: type) -> None:
    """A merge gives what a merge takes, with the bits of the merge of arrays."""
    query, key, value = inputs(dtype)
    parts = [attend(query, key[..., a : a + 30, :], value[..., a : a + 30, :]) for a in (0, 30, 60)]
    pair = cattn.merge_attention(parts[:2])
    assert isinstance(pair, cattn.AttentionOutput)
    assert pair.weights is pair.dropout_mask is pair.dropout_seed is None
    out, lse = merge(parts[:2])
    assert_same_bits(pair.out, out)
    assert_same_bits(pair.lse, lse)
    chain, whole = cattn.merge_attention(iter([pair, parts[2]])), attend(query, key, value)
    np.testing.assert_allclose(chain.out, whole.out, rtol=0, atol=30 * np.finfo(dtype).eps * np.abs(value).max())
    np.testing.assert_allclose(chain.lse, whole.lse, rtol=4 * np.finfo(dtype).eps)


@pytest.mark.parametrize(("results", "error", "message"), [
    ([], ValueError, "at least 1, got 0 and 0"),
    ([np.ones((2, 3))], TypeError, r"^outs\[0\] must be an AttentionOutput if lses is not given, got ndarray"),
    ([cattn.AttentionOutput(np.ones((2, 3)))], ValueError, r"^outs\[0\] has no lse: attend with return_lse=True"),
    (3, TypeError, "^outs must be a sequence of AttentionOutput, got int"),
])  # fmt: skip
def test_wrong_results_are_refused(results: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        cattn.merge_attention(results)


def test_gradients_of_a_merge_are_those_of_all_keys() -> None:
    """By the chain rule through each part's results, and from the merged results alone. A part may see nothing."""
    query, key, value = inputs(np.float64)
    rng = np.random.default_rng(1)
    mask, sinks = rng.random((20, 90)) < 0.5, np.array([0.5, 1.0, -3.0])
    mask[3, :30] = False
    cuts = [slice(0, 30), slice(30, 31), slice(31, 90)]
    options = [{"attn_mask": mask[:, cut]} | ({"sinks": sinks} if cut.start == 30 else {}) for cut in cuts]
    arrays = [(query, key[..., cut, :], value[..., cut, :]) for cut in cuts]
    parts = [attend(*a, **o) for a, o in zip(arrays, options, strict=True)]
    merged = cattn.merge_attention(parts)
    grad_out, grad_lse = rng.standard_normal(merged.out.shape), rng.standard_normal(merged.lse.shape)
    whole = attend(query, key, value, attn_mask=mask, sinks=sinks)
    right = cattn.attention_backward(
        grad_out, query, key, value, whole.out, whole.lse, grad_lse=grad_lse, attn_mask=mask, sinks=sinks
    )
    ways = []
    for a, o, part in zip(arrays, options, parts, strict=True):
        w = np.exp(part.lse - merged.lse)
        of_lse = w * (grad_lse + (grad_out * (part.out - merged.out)).sum(axis=-1))
        ways.append((
            cattn.attention_backward(w[..., None] * grad_out, *a, part.out, part.lse, grad_lse=of_lse, **o),
            cattn.attention_backward(grad_out, *a, merged.out, merged.lse, grad_lse=grad_lse, merged=True, **o),
        ))  # fmt: skip
    np.testing.assert_allclose(ways[1][0].sinks, right.sinks, rtol=1e-11, atol=1e-12)
    for grads in zip(*ways, strict=True):
        np.testing.assert_allclose(sum(g.query for g in grads), right.query, rtol=1e-11, atol=1e-12)
        for name in ("key", "value"):
            actual = np.concatenate([getattr(g, name) for g in grads], axis=-2)
            np.testing.assert_allclose(actual, getattr(right, name), rtol=1e-11, atol=1e-12)
