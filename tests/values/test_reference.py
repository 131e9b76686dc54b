"""The reference itself: compared with plain Python loops, published random numbers and the documented rules."""

import doctest
import importlib
import inspect
import itertools
import math
import pkgutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cattn
from cattn import reference
from cattn._input.types import AttentionOutput, CausalAlignmentWarning
from support import find

INF, NAN = math.inf, math.nan


def loop_attention(q, k, v, *, mask=None, added=None, scale=1.0, offset=None):
    """Compute one head by the definition, number by number. Return out, weights and lse as lists."""
    outs, rows, lses = [], [], []
    for i, query in enumerate(q.tolist()):
        scores = {}
        for j, key in enumerate(k.tolist()):
            extra = [] if added is None else [added[i][j]]
            hidden = (mask is not None and not mask[i][j]) or -INF in extra or (offset is not None and j > i + offset)
            if not hidden:
                scores[j] = scale * math.fsum(a * b for a, b in zip(query, key, strict=True)) + sum(extra)
        top = max(scores.values(), default=0.0)
        total = math.fsum(math.exp(s - top) for s in scores.values())
        row = [math.exp(scores[j] - top) / total if j in scores else 0.0 for j in range(len(k))]
        outs.append([math.fsum(row[j] * v[j, d] for j in scores) for d in range(v.shape[1])])
        rows.append(row)
        lses.append(top + math.log(total) if scores else -INF)
    return outs, rows, lses


def test_the_examples_of_the_reference_run() -> None:
    parts = [importlib.import_module(f"cattn.reference.{m.name}") for m in pkgutil.iter_modules(reference.__path__)]
    failed, run = (sum(counts) for counts in zip(*map(doctest.testmod, parts), strict=True))
    assert run > 10
    assert failed == 0


FUNCTIONS = [name for name in {**vars(cattn), **vars(cattn.functional)} if name in reference.__all__]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_signatures_are_those_of_the_package(name: str) -> None:
    def arguments(function: Callable[..., Any]) -> dict:
        parameters = inspect.signature(function).parameters.values()
        return {p.name: (p.kind, p.default) for p in parameters if p.kind is not p.VAR_KEYWORD}

    ours, theirs = arguments(getattr(reference, name)), arguments(find(name))
    if "attention" in name and name != "scaled_dot_product_attention":  # these pass the other options on
        theirs = {key: theirs[key] for key in ours}
    assert ours == theirs


def test_the_reference_does_not_use_the_kernels() -> None:
    """Otherwise it could not judge them."""
    parts = list(Path(reference.__file__).parent.glob("*.py"))
    assert len(parts) > 3
    for part in parts:
        assert "_cattn" not in part.read_text("utf-8").replace("from cattn._input.types", "")


# ---- softmax -------------------------------------------------------------------------------------------------------
def test_softmax_agrees_with_plain_python() -> None:
    x = [0.3, -1.0, 2.5]
    expected = [math.exp(2 * a) / math.fsum(math.exp(2 * b) for b in x) for a in x]
    np.testing.assert_allclose(reference.softmax(x, scale=2.0), expected, rtol=1e-15)


def test_softmax_takes_any_axes() -> None:
    x = np.arange(24.0).reshape(2, 3, 4) % 7
    np.testing.assert_allclose(reference.softmax(x, axis=None).sum(), 1.0)
    np.testing.assert_allclose(reference.softmax(x, axis=(0, 2)).sum(axis=(0, 2)), np.ones(3))
    np.testing.assert_array_equal(reference.softmax(x, axis=0), reference.softmax(x.T, axis=-1).T)
    assert reference.softmax(3.0) == 1.0


def test_softmax_follows_the_rules_for_nan_infinity_and_hidden_rows() -> None:
    np.testing.assert_array_equal(reference.softmax([-INF, -INF]), [NAN, NAN])
    np.testing.assert_array_equal(reference.softmax([1.0, 2.0], where=False), [0, 0])
    np.testing.assert_array_equal(reference.softmax([INF, 2.0, NAN], where=[True, True, False]), [NAN, 0 * NAN, 0])
    np.testing.assert_array_equal(reference.softmax([1e308, -1e308]), [1, 0])
    assert reference.softmax(np.zeros((3, 0))).shape == (3, 0)


def test_out_is_filled_and_returned() -> None:
    out = np.empty((2, 3))
    assert reference.softmax(np.ones((2, 3)), out=out) is out
    assert reference.masked_softmax(np.ones((2, 3)), out=out) is out
    assert reference.dropout(np.ones((2, 3)), rng=1, out=out) is out
    one = np.ones((3, 4))
    given_arrays = AttentionOutput(np.empty((3, 4)), lse=np.empty(3))
    result = reference.scaled_dot_product_attention(one, one, one, return_lse=True, out=given_arrays)
    assert result.out is given_arrays.out
    assert result.lse is given_arrays.lse
    np.testing.assert_array_equal(result.out, one)


# ---- the two masking methods ---------------------------------------------------------------------------------------
@given(st.integers(0, 2**32 - 1), st.integers(1, 8), st.integers(1, 8), st.sampled_from([1.0, 30.0, 1e4]))
def test_both_methods_agree(seed: int, T_q: int, T_k: int, spread: float) -> None:
    rng = np.random.default_rng(seed)
    scores, mask = rng.normal(0, spread, (2, T_q, T_k)), rng.random((T_q, T_k)) < 0.6
    first = reference.masked_softmax(scores, mask)
    second = reference.masked_softmax(scores, mask, method="renormalize")
    np.testing.assert_allclose(second, first, rtol=1e-12, atol=1e-300)
    assert np.all(first[:, ~mask] == 0)
    np.testing.assert_allclose(first.sum(-1), np.broadcast_to(mask.any(-1), (2, T_q)), atol=1e-12)


@pytest.mark.parametrize("method", ["neg_inf", "renormalize"])
def test_masked_softmax_follows_the_rules_for_nan_infinity_and_hidden_rows(method: str) -> None:
    def rows(scores: list, mask: list) -> np.ndarray:
        return reference.masked_softmax(scores, mask, method=method)

    np.testing.assert_array_equal(rows([1.0, 2.0], [False, False]), [0, 0])
    np.testing.assert_array_equal(rows([1.0, NAN, 1.0], [True, False, True]), [0.5, 0, 0.5])
    np.testing.assert_array_equal(rows([1.0, INF, 1.0], [True, False, True]), [0.5, 0, 0.5])
    np.testing.assert_array_equal(rows([0.0, 0.0, 700.0], [True, True, False]), [0.5, 0.5, 0])
    np.testing.assert_array_equal(rows([-INF, -INF, 700.0], [True, True, False]), [NAN, NAN, 0])
    np.testing.assert_array_equal(rows([1.0, NAN, 1.0], [True, True, False]), [NAN, NAN, 0])


def test_the_textbook_pipelines_agree_except_where_they_break_down() -> None:
    scores, mask = np.array([[0.0, 100.0], [3.0, 3.0]]), np.tri(2, dtype=bool)
    for method in ("neg_inf", "renormalize"):
        np.testing.assert_allclose(reference.textbook_masked_softmax(scores, mask, method), [[1, 0], [0.5, 0.5]])
    hopeless = np.array([[0.0, 800.0]])
    assert np.isnan(reference.textbook_masked_softmax(hopeless, [True, False], "renormalize")).all()
    np.testing.assert_array_equal(reference.masked_softmax(hopeless, [True, False], method="renormalize"), [[1, 0]])
    assert np.isnan(reference.textbook_masked_softmax([1.0, 1.0], [False, False])).all()


def test_masked_softmax_refuses_wrong_arguments() -> None:
    with pytest.raises(ValueError, match='"neg_inf" or "renormalize"'):
        reference.masked_softmax(np.ones((2, 2)), method="other")
    with pytest.raises(ValueError, match='"neg_inf" or "renormalize", got \'other\''):
        reference.textbook_masked_softmax([1.0, 2.0], [True, False], "other")
    with pytest.raises(TypeError, match=r"mask.astype\(bool\)"):
        reference.masked_softmax(np.ones((2, 2)), np.ones((2, 2), int))


# ---- random bits ---------------------------------------------------------------------------------------------------
@pytest.mark.promise("Philox")
@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),  # digits of pi
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_published_numbers(counter: tuple, key: tuple, words: tuple) -> None:
    """The test vectors of Random123 for philox4x32 with ten rounds."""
    seed = key[0] | key[1] << 32
    assert tuple(reference.philox4x32(counter, seed).tolist()) == words
    grid = np.broadcast_to(np.array(counter, np.uint64)[:, None, None], (4, 2, 3))
    np.testing.assert_array_equal(
        reference.philox4x32(tuple(grid), seed),
        np.broadcast_to(np.array(words, np.uint64)[:, None, None], (4, 2, 3)),
    )


def one_bit(p: float, seed: int, batch: int, head: int, position: int, key: int) -> bool:
    """Return a single bit of the mask by the definition: whether the weight is not dropped."""
    threshold = round((1 - p) * 2**32)
    d = (key >> 3) & 7

    def digit(draw: int) -> int:
        words = reference.philox4x32((8 * (key >> 6) + (key & 7), position % 2**32, head, 2 * batch + draw), seed)
        return (int(words[d >> 1]) >> (16 if d % 2 else 0)) & 0xFFFF

    if digit(0) != threshold >> 16:
        return digit(0) < threshold >> 16
    return digit(1) < threshold & 0xFFFF


def test_the_dropout_mask_follows_the_definition() -> None:
    p, seed = 0.3, 0x0123456789ABCDEF
    batch, head, position = np.array([0, 1])[:, None, None], np.array([0, 3])[:, None], np.array([-2, 0, 70])
    bits = reference.dropout_keep(p, seed, batch, head, position, 131)
    assert bits.shape == (2, 2, 3, 131)
    for (b, batch_index), (h, head_index), (i, row) in itertools.product(
        enumerate([0, 1]), enumerate([0, 3]), enumerate([-2, 0, 70])
    ):
        expected = [one_bit(p, seed, batch_index, head_index, row, key) for key in range(131)]
        assert bits[b, h, i].tolist() == expected


def test_a_second_draw_decides_ties() -> None:
    """With p = 2**-17 only the digit 0xFFFF ties, and the second draw drops it with probability 1/2."""
    p, seed, T_k = 2.0**-17, 5, 1 << 17
    bits = reference.dropout_keep(p, seed, 0, 0, np.arange(16), T_k)
    dropped = np.argwhere(~bits)
    assert 3 <= len(dropped) <= 45  # 16 expected
    assert all(not one_bit(p, seed, 0, 0, i, j) for i, j in dropped.tolist())


def test_dropout_drops_the_share_p() -> None:
    x = np.arange(1.0, 40001.0)
    np.testing.assert_array_equal(reference.dropout(x, 0.0), x)
    np.testing.assert_array_equal(reference.dropout(x, 1.0, rng=1), 0 * x)
    np.testing.assert_array_equal(reference.dropout(x, 0.9, training=False), x)
    out, drop_mask = reference.dropout(x, 0.25, rng=3, return_mask=True)
    assert abs(drop_mask.mean() - 0.75) < 0.01
    np.testing.assert_array_equal(out, np.where(drop_mask, x * (1 / 0.75), 0))
    assert not np.signbit(reference.dropout(-x, 1.0)).any()
    bits = [one_bit(0.25, 3, 0, 0xD0D0, 0, n) for n in range(200)]
    np.testing.assert_array_equal(drop_mask[:200], bits)
    np.testing.assert_array_equal(reference.dropout(x.reshape(200, 200), 0.25, rng=3).ravel(), out)
    for p in (-0.1, 1.5, NAN):
        with pytest.raises(ValueError, match="between 0 and 1"):
            reference.dropout(x, p)


# ---- masks ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("T_q", "T_k"), [(0, 0), (1, 5), (5, 1), (4, 4), (3, 6), (6, 3)])
def test_causal_mask_is_the_definition(T_q: int, T_k: int) -> None:
    i, j = np.arange(T_q)[:, None], np.arange(T_k)
    np.testing.assert_array_equal(reference.causal_mask(T_q, T_k, is_causal="upper_left"), j <= i)
    np.testing.assert_array_equal(reference.causal_mask(T_q, T_k), j <= i + T_k - T_q)
    np.testing.assert_array_equal(reference.causal_mask(T_q, T_k, is_causal=True, query_offset=2), j <= i + 2)
    assert reference.causal_mask(T_q, T_k, is_causal=False).all()


def test_different_lengths_warn_unless_the_alignment_is_named() -> None:
    x = np.ones((3, 2))
    with pytest.warns(CausalAlignmentWarning, match="lower_right"):
        reference.scaled_dot_product_attention(x[:2], x, x, is_causal=True)
    with pytest.raises(ValueError, match="query_offset"):
        reference.scaled_dot_product_attention(x, x, x, is_causal="lower_right", query_offset=0)
    with pytest.raises(ValueError, match="middle"):
        reference.scaled_dot_product_attention(x, x, x, is_causal="middle")
    with pytest.raises(TypeError, match="integers"):
        reference.scaled_dot_product_attention(x, x, x, query_offset=0.5)


# ---- attention -----------------------------------------------------------------------------------------------------
@pytest.mark.promise("formula")
@given(st.data())
def test_attention_agrees_with_plain_loops(data: st.DataObject) -> None:
    draw = data.draw
    T_q, T_k, D, D_v = (draw(st.integers(low, high)) for low, high in ((0, 5), (0, 6), (0, 3), (1, 3)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    q, k, v = rng.normal(size=(T_q, D)), rng.normal(size=(T_k, D)), rng.normal(size=(T_k, D_v))
    mask = rng.random((T_q, T_k)) < 0.7 if draw(st.booleans()) else None
    added = rng.normal(size=(T_q, T_k)) if draw(st.booleans()) else None
    if added is not None:
        added[rng.random((T_q, T_k)) < 0.2] = -INF
    offset = draw(st.sampled_from([None, -1, 0, 2]))
    result = reference.scaled_dot_product_attention(
        q, k, v, mask, is_causal=offset is not None, scale=0.7, bias=added, query_offset=offset,
        return_weights=True, return_lse=True,
    )  # fmt: skip
    out, weights, lse = loop_attention(q, k, v, mask=mask, added=added, scale=0.7, offset=offset)
    np.testing.assert_allclose(result.out, np.reshape(out, (T_q, D_v)), rtol=1e-12, atol=1e-13)
    np.testing.assert_allclose(result.weights, np.reshape(weights, (T_q, T_k)), rtol=1e-12)
    np.testing.assert_allclose(result.lse, lse, rtol=1e-12, atol=1e-13)
    assert result.dropout_mask is None
    assert result.dropout_seed is None


def test_batch_dimensions_broadcast_and_heads_are_grouped(rng: np.random.Generator) -> None:
    sdpa = reference.scaled_dot_product_attention
    q, k, v = rng.normal(size=(2, 6, 4, 3)), rng.normal(size=(2, 2, 5, 3)), rng.normal(size=(1, 1, 5, 7))
    out = sdpa(q, k, v)
    assert out.shape == (2, 6, 4, 7)
    for b, h in itertools.product(range(2), range(6)):
        np.testing.assert_allclose(out[b, h], sdpa(q[b, h], k[b, h // 3], v[0, 0]), rtol=1e-13)
    np.testing.assert_allclose(sdpa(q[0], k[0], v[0], enable_gqa=True), out[0], rtol=1e-13)
    assert sdpa(q[:, 0], k[:, 0], v[0]).shape == (2, 4, 7)
    assert sdpa(q[0, 0], k, v).shape == (2, 2, 4, 7)
    with pytest.raises(ValueError, match="6 heads"):
        sdpa(q, k, v, enable_gqa=False)
    with pytest.raises(ValueError, match="4 heads"):
        sdpa(q[:, :4], np.ones((2, 3, 5, 3)), v)
    with pytest.raises(ValueError, match="value has 4 rows, key has 5"):
        sdpa(q, k, v[..., :4, :])


def test_batch_entries_have_their_own_offsets_and_masks(rng: np.random.Generator) -> None:
    x = rng.normal(size=(3, 4, 2))
    offset, mask = np.array([0, 2, -1]), rng.random((3, 4, 4)) < 0.8
    out = reference.scaled_dot_product_attention(x, x, x, mask, is_causal=True, query_offset=offset)
    for b in range(3):
        alone = reference.scaled_dot_product_attention(
            x[b], x[b], x[b], mask[b] & reference.causal_mask(4, is_causal=True, query_offset=int(offset[b]))
        )
        np.testing.assert_allclose(out[b], alone, rtol=1e-13)


def test_causal_attention_aligns_the_last_query_with_the_last_key(rng: np.random.Generator) -> None:
    q, k, v = rng.normal(size=(3, 2, 9, 4))
    full = reference.causal_attention(q, k, v)
    np.testing.assert_allclose(reference.causal_attention(q[:, 6:], k, v), full[:, 6:], rtol=1e-13)
    np.testing.assert_allclose(reference.causal_attention(q[:, 2:5], k, v, query_offset=2), full[:, 2:5], rtol=1e-13)
    np.testing.assert_allclose(
        reference.attention_weights(q, k, is_causal=True) @ v, reference.causal_attention(q, k, v), rtol=1e-13
    )


def test_lower_right_aligns_the_last_query_with_the_last_key_of_each_length(rng: np.random.Generator) -> None:
    """Each entry gives the result of its own queries and keys alone. Rows past its number of queries are zero."""
    q, k, v = rng.normal(size=(4, 5, 3)), rng.normal(size=(4, 7, 3)), rng.normal(size=(4, 7, 2))
    lengths_q, lengths_k = [5, 5, 3, 1], [7, 4, 6, 2]
    for m, n in ((None, lengths_k), (lengths_q, None), (lengths_q, lengths_k)):
        out = reference.scaled_dot_product_attention(
            q, k, v, is_causal="lower_right", query_seq_lengths=m, key_value_seq_lengths=n
        )
        for b, (queries, keys) in enumerate(zip(m or [5] * 4, n or [7] * 4, strict=True)):
            expected, _, _ = loop_attention(
                q[b, :queries], k[b, :keys], v[b, :keys], scale=3**-0.5, offset=keys - queries
            )
            np.testing.assert_allclose(out[b, :queries], expected, rtol=1e-13, atol=1e-14)
            assert not out[b, queries:].any()


def test_keys_before_the_start_are_left_out(rng: np.random.Generator) -> None:
    """Each entry gives the result of its own keys alone, with the positions of the whole array."""
    q, k, v = rng.normal(size=(3, 5, 3)), rng.normal(size=(3, 7, 3)), rng.normal(size=(3, 7, 2))
    starts, ends = [0, 4, 6], [7, 6, 3]
    for lengths in (None, ends):
        out = reference.scaled_dot_product_attention(
            q, k, v, is_causal="lower_right", key_value_seq_starts=starts, key_value_seq_lengths=lengths
        )
        for b, (start, end) in enumerate(zip(starts, lengths or [7] * 3, strict=True)):
            expected, _, _ = loop_attention(
                q[b], k[b, start:end], v[b, start:end], scale=3**-0.5, offset=end - 5 - start
            )
            np.testing.assert_allclose(out[b], expected, rtol=1e-13, atol=1e-14)


def test_hidden_keys_have_no_influence(rng: np.random.Generator) -> None:
    q, k, v = rng.normal(size=(3, 2, 5, 4))
    mask = rng.random((2, 5, 5)) < 0.5
    mask[:, 0], mask[..., 3] = False, False
    clean = reference.scaled_dot_product_attention(q, k, v, mask, return_weights=True, return_lse=True)
    for poison in (NAN, INF, -INF, 1e300):
        k[:, 3], v[:, 3] = poison, poison
        dirty = reference.scaled_dot_product_attention(q, k, v, mask, return_weights=True, return_lse=True)
        for name in ("out", "weights", "lse"):
            np.testing.assert_array_equal(getattr(dirty, name), getattr(clean, name))
    assert np.all(clean.out[:, 0] == 0)
    assert np.all(clean.lse[:, 0] == -INF)


@pytest.mark.promise("visible NaN")
def test_visible_nan_and_infinity_change_only_rows_that_see_them() -> None:
    q = k = np.zeros((4, 2))
    v = np.ones((4, 2))
    v[1] = [NAN, INF]
    out = reference.causal_attention(q, k, v)
    np.testing.assert_array_equal(out[0], [1, 1])
    np.testing.assert_array_equal(out[1:], [[NAN, INF]] * 3)
    v[2, 1] = -INF
    np.testing.assert_array_equal(reference.causal_attention(q, k, v)[2:, 1], [NAN, NAN])

    bias = np.zeros((4, 4))
    bias[1, 0], bias[2, 1] = INF, NAN
    all_hidden_by_score = np.full((4, 2), -INF)
    result = reference.causal_attention(q, k, np.ones((4, 2)), bias=bias, return_weights=True, return_lse=True)
    np.testing.assert_array_equal(np.isnan(result.weights).any(-1), [False, True, True, False])
    assert np.all(result.weights[~reference.causal_mask(4)] == 0)
    result = reference.scaled_dot_product_attention(
        np.ones((1, 2)), all_hidden_by_score, np.ones((4, 2)), return_weights=True, return_lse=True
    )
    assert np.isnan(result.out).all()
    assert np.isnan(result.weights).all()
    assert np.all(result.lse == -INF)


def test_attention_without_keys_is_zero() -> None:
    result = reference.scaled_dot_product_attention(
        np.ones((2, 3)), np.ones((0, 3)), np.ones((0, 4)), return_weights=True, return_lse=True
    )
    np.testing.assert_array_equal(result.out, np.zeros((2, 4)))
    np.testing.assert_array_equal(result.lse, [-INF, -INF])
    assert result.weights.shape == (2, 0)


def test_attention_drops_weights_by_position_and_seed(rng: np.random.Generator) -> None:
    q, k, v = rng.normal(size=(3, 2, 3, 5, 4))
    sdpa = reference.scaled_dot_product_attention
    extras = {"return_weights": True, "return_lse": True, "return_dropout_mask": True}
    plain, noisy = sdpa(q, k, v, **extras), sdpa(q, k, v, dropout_p=0.4, rng=11, **extras)
    assert plain.dropout_mask.all()
    assert (plain.dropout_seed, noisy.dropout_seed) == (None, 11)
    np.testing.assert_array_equal(noisy.weights, plain.weights)
    np.testing.assert_array_equal(noisy.lse, plain.lse)
    np.testing.assert_allclose(noisy.out, (noisy.weights * noisy.dropout_mask / 0.6) @ v, rtol=1e-12, atol=1e-15)
    expected = reference.dropout_keep(0.4, 11, np.arange(2)[:, None, None], np.arange(3)[:, None], np.arange(5), 5)
    np.testing.assert_array_equal(noisy.dropout_mask, expected)
    part = sdpa(q[..., 2:4, :], k, v, dropout_p=0.4, rng=11, query_offset=2, return_dropout_mask=True)
    np.testing.assert_array_equal(part.dropout_mask, noisy.dropout_mask[..., 2:4, :])
    assert np.all(sdpa(q, k, v, dropout_p=1.0) == 0)
    fresh = sdpa(q, k, v, dropout_p=0.4, return_dropout_mask=True)
    again = sdpa(q, k, v, dropout_p=0.4, rng=fresh.dropout_seed, return_dropout_mask=True)
    np.testing.assert_array_equal(again.out, fresh.out)


def test_a_dropped_weight_does_not_hide_a_nan_value() -> None:
    v = np.array([[1.0], [NAN]])
    q = k = np.zeros((2, 1))
    assert np.isnan(reference.scaled_dot_product_attention(q, k, v, dropout_p=1.0)).all()


def test_wrong_arguments_are_refused() -> None:
    x = np.ones((2, 2))
    with pytest.raises(TypeError, match="astype"):
        reference.scaled_dot_product_attention(x, x, x, np.ones((2, 2), int))
    with pytest.raises(TypeError, match="attn_mask"):
        reference.scaled_dot_product_attention(x, x, x, bias=np.ones((2, 2), bool))
    with pytest.raises(ValueError, match="softmax"):
        reference.attention_weights(x, x, stage="lse")
    for name, counts in itertools.product(("key_value_seq_lengths", "key_value_seq_starts"), (3, -1, [2, 3])):
        with pytest.raises(ValueError, match=f"{name} must be between 0 and 2"):
            reference.scaled_dot_product_attention(x, x, x, **{name: counts})
    for kind in (np.float32, np.int64, list):
        converted = x.tolist() if kind is list else x.astype(kind)
        assert reference.causal_attention(converted, x, x).dtype == np.float64


def test_inputs_are_not_modified(rng: np.random.Generator) -> None:
    arrays = [rng.normal(size=(4, 4)) for _ in range(4)]
    copies = [a.copy() for a in arrays]
    for a in arrays:
        a.flags.writeable = False
    reference.scaled_dot_product_attention(*arrays, dropout_p=0.5, is_causal=True, rng=0)
    reference.masked_softmax(arrays[0], is_causal=True, method="renormalize")
    reference.dropout(arrays[0], rng=0)
    for a, b in zip(arrays, copies, strict=True):
        np.testing.assert_array_equal(a, b)


def test_nan_and_infinity_raise_no_warning() -> None:
    """They are valid results, so NumPy's warnings must not reach the user."""
    code = (
        "import numpy as np; from cattn import reference as r; x = np.full((3, 3), np.inf); x[0] = np.nan;"
        "r.causal_attention(x, x, x, return_lse=True); r.masked_softmax(x, method='renormalize'); r.dropout(x, 1.0)"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)


def test_the_reference_is_imported_on_first_use() -> None:
    code = (
        "import sys, cattn\n"
        "assert 'cattn.reference' not in sys.modules and 'reference' in dir(cattn)\n"
        "assert cattn.reference.softmax([0.0]) == 1 and 'cattn.reference' in sys.modules\n"
        "from cattn import *\n"
        "assert reference is cattn.reference and not hasattr(cattn, 'nothing')\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
