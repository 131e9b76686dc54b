"""choose_keys: the choice beside the reference, its bits whatever surrounds a row, and what it leads attention to."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cattn
from cattn import reference
from support import assert_same_bits
from support.calls import LIMITS, SMALL, Call, again, from_rng, lay_out
from support.functions import FUNCTIONS

rng = np.random.default_rng(0)


def drawn(seed: int) -> Call:
    """Return a random call; its results are two arrays."""
    draw = np.random.default_rng(seed)
    call = FUNCTIONS["choose_keys"][1](from_rng(draw), SMALL if seed % 4 else LIMITS)
    call.pop("out", None)
    return call | {"return_scores": True}


def in_float64(call: Call) -> Call:
    return {name: x.astype(np.float64) if isinstance(x, np.ndarray) and x.dtype.kind not in "bi" else x
            for name, x in call.items()}  # fmt: skip


def widened(x: Any) -> Any:
    if isinstance(x, cattn.Quantized):
        return cattn.dequantize(x).astype(np.float64)
    return x


@pytest.mark.parametrize("part", range(4))
def test_it_chooses_what_the_reference_chooses(part: int) -> None:
    """Among scores that differ by more than rounding; with equal ones, the lower key."""
    for seed in range(part * 60, part * 60 + 60):
        call = in_float64({name: widened(x) for name, x in drawn(seed).items()})
        call["query"], call["key"] = (np.round(call[name] * 2) for name in ("query", "key"))  # many equal scores
        if "weights" in call:
            call["weights"] = np.round(call["weights"] * 2)
        call["scale"] = 0.5
        got, wanted = cattn.choose_keys(**call), reference.choose_keys(**call)
        exact = np.isin(call.get("bias", 0), (0, -np.inf)).all()
        if exact:
            np.testing.assert_array_equal(got[0], wanted[0], str(seed), strict=True)
        np.testing.assert_allclose(got[1], wanted[1], rtol=1e-12, atol=1e-12, err_msg=str(seed), strict=True)


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_the_chosen_scores_are_the_largest(dtype: Any) -> None:
    """To rounding, with random numbers."""
    query, key = rng.standard_normal((2, 4, 50, 64)).astype(dtype), rng.standard_normal((2, 1, 300, 64)).astype(dtype)
    weights = rng.random((2, 4, 50), np.float32)
    keys, scores = cattn.choose_keys(query, key, 40, weights=weights, activation="relu", return_scores=True)
    products = np.maximum(query.astype(float) @ key.astype(float).mT / 8, 0)
    exact = (weights[..., None] * products).sum(1, keepdims=True)
    own = np.take_along_axis(exact, keys.astype(np.int64), -1)
    np.testing.assert_allclose(scores, own, rtol=1e-5, atol=1e-5)
    others = exact.copy()
    np.put_along_axis(others, keys.astype(np.int64), -np.inf, -1)
    assert (others.max(-1) <= own.min(-1) + 1e-5).all()
    assert (np.diff(keys) > 0).all()


def assert_same(got: Any, wanted: Any) -> None:
    for a, b in zip(got, wanted, strict=True):
        assert a.shape == b.shape
        assert a.tobytes() == b.tobytes()


@given(st.integers(0, 10_000))
def test_a_choice_has_the_same_bits_whatever_surrounds_it(seed: int) -> None:
    """Threads, layouts, single entries of the batch, single queries, and what is hidden."""
    call = drawn(seed)
    whole = cattn.choose_keys(**call)
    for threads in (2, 3):
        with cattn.num_threads(threads):
            assert_same(cattn.choose_keys(**call), whole)
    choose = from_rng(np.random.default_rng(seed))
    moved = {name: lay_out(choose, x) if isinstance(x, np.ndarray) and x.size and x.ndim else x
             for name, x in again(call).items()}  # fmt: skip
    assert_same(cattn.choose_keys(**moved), whole)


def alone(call: Call, i: int, T: int) -> Call:
    """Return the call of query i."""
    one = call | {"query": call["query"][..., i : i + 1, :], "query_offset": i}
    for name in ("attn_mask", "bias"):
        if name in one:
            one[name] = one[name][..., i : i + 1, :]
    return one | {"weights": call["weights"][..., i : i + 1]}


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("options", [{}, {"block_size": 3, "first": 1, "last": 1}, {"block_size": 4, "pooled": True}],
                         ids=str)  # fmt: skip
def test_a_query_alone_a_prefix_and_a_cache_choose_the_same(dtype: Any, options: Call) -> None:
    T, b = 120, options["block_size"] if options.get("pooled") else 1
    query, key = rng.standard_normal((2, 3, T, 24)).astype(dtype), rng.standard_normal((2, 1, T // b, 24)).astype(dtype)
    call = {"query": query, "key": key, "count": 7, "weights": rng.standard_normal((2, 3, T)).astype(np.float32),
            "activation": "relu", "is_causal": True, "query_offset": 0, **options}  # fmt: skip
    whole = cattn.choose_keys(**call)
    for i in (0, 1, 11, 63, T - 1):
        np.testing.assert_array_equal(cattn.choose_keys(**alone(call, i, T)), whole[..., i : i + 1, :])
        n = max(1, (i + 1) // b)
        shorter = alone(call, i, T) | {"key": key[..., :n, :]}
        if b > 1:
            shorter["key_value_seq_lengths"] = min(i + 1, n * b + b - 1)
        cached = cattn.choose_keys(**shorter)
        np.testing.assert_array_equal(cached, whole[..., i : i + 1, : cached.shape[-1]])
        assert (whole[..., i, cached.shape[-1] :] == -1).all()
    np.testing.assert_array_equal(
        cattn.choose_keys(
            **call | {"query": query[1], "key": key[1], "weights": call["weights"][1], "enable_gqa": True}
        ),
        whole[1],
    )


@pytest.mark.parametrize("size", [1, 4])
def test_padding_on_the_left_moves_no_block(size: int) -> None:
    """And what lies in the padding, or after the valid keys, is not read into a choice."""
    query, key = rng.standard_normal((3, 40, 16), np.float32), rng.standard_normal((1, 40, 16), np.float32)
    options: Call = {"count": 5, "block_size": size, "enable_gqa": True, "return_scores": True}
    plain, scores = cattn.choose_keys(query, key, is_causal=True, **options)
    dirty = np.full((1, 60, 16), np.nan, np.float32)
    dirty[:, 13:53] = key
    padded, padded_scores = cattn.choose_keys(
        query, dirty, is_causal=True, query_offset=13, key_value_seq_starts=13, key_value_seq_lengths=53, **options
    )
    n = plain.shape[-1]
    np.testing.assert_array_equal(np.where(padded < 0, -1, padded - 13)[..., :n], plain)
    assert padded_scores[..., :n].tobytes() == scores.tobytes()


def test_hidden_keys_are_never_chosen_and_never_read() -> None:
    query, key = rng.standard_normal((2, 30, 16), np.float32), rng.standard_normal((2, 70, 16), np.float32)
    mask = rng.random((30, 70)) < 0.5
    mask[:, ::7] = False
    options: Call = {"count": 50, "attn_mask": mask, "enable_gqa": True, "return_scores": True}
    keys, scores = cattn.choose_keys(query, key, **options)
    for i, row in enumerate(keys[0]):
        np.testing.assert_array_equal(row[row >= 0], np.flatnonzero(mask[i])[: (row >= 0).sum()])
    for spoiled in (np.nan, np.inf, -np.inf):
        dirty = key.copy()
        dirty[:, ::7] = spoiled
        assert_same(cattn.choose_keys(query, dirty, **options), (keys, scores))


def test_nan_loses_and_infinity_wins() -> None:
    key = np.array([[np.nan], [1.0], [-np.inf], [np.inf], [2.0]])
    query = np.ones((1, 1))
    order = [3, 4, 1, 2, 0]
    for count in range(1, 6):
        keys, scores = cattn.choose_keys(query, key, count, return_scores=True)
        assert keys[0].tolist() == sorted(order[:count])
        np.testing.assert_array_equal(scores[0], key[sorted(order[:count]), 0])
    assert cattn.choose_keys(query, key, 1, block_size=2).tolist() == [[2, 3]]
    assert cattn.choose_keys(query, np.zeros((600, 1)), 3).tolist() == [[0, 1, 2]]
    assert cattn.choose_keys(query, np.array([[0.0], [-0.0], [0.0]]), 2).tolist() == [[0, 1]]


@pytest.mark.parametrize("n", [600, 5000])
def test_many_candidates(n: int) -> None:
    """More keys than there is room for: ascending, descending, equal and all NaN."""
    query = np.ones((1, 1))
    for key in (np.arange(n), -np.arange(n), np.arange(n) // 7, np.zeros(n), np.full(n, np.nan), np.arange(n) % 5):
        x = np.asarray(key, float)[:, None]
        for count in (1, 10, 300, n):
            expected = np.sort(np.argsort(-x[:, 0], kind="stable")[:count])
            np.testing.assert_array_equal(cattn.choose_keys(query, x, count)[0], expected)


def test_attention_reads_the_chosen_keys() -> None:
    """As with a boolean mask of them, and under causality."""
    query, key, value = rng.standard_normal((3, 2, 4, 60, 8))
    keys = cattn.choose_keys(query, key[:, :1], 9, is_causal=True)
    assert keys.shape == (2, 1, 60, 9)
    out = cattn.scaled_dot_product_attention(query, key, value, key_indices=keys)
    mask = np.zeros((2, 1, 60, 61), np.bool_)
    np.put_along_axis(mask, keys.astype(np.int64), True, -1)  # -1 is the last column
    np.testing.assert_allclose(out, cattn.scaled_dot_product_attention(query, key, value, mask[..., :60]), atol=1e-14)


@pytest.mark.parametrize(("dtype", "limit"), [(np.float64, 1e-12), (np.float32, 3e-4)])
def test_latent_attention_of_chosen_keys_has_the_values_of_its_heads(dtype: type, limit: float) -> None:
    """The absorbed form of multi-head latent attention beside the heads' own keys and values."""
    heads, T_q, T_k, latent, rotated, size = 128, 5, 90, 512, 64, 128
    query, rotated_query = (rng.standard_normal((2, heads, T_q, n)) for n in (size, rotated))
    key = rng.standard_normal((2, 1, T_k, latent + rotated))
    up_key, up_value = rng.standard_normal((2, heads, size, latent)) / latent**0.5
    lists = cattn.choose_keys(rotated_query, key[..., latent:], 30, is_causal="lower_right", enable_gqa=True)
    options: dict[str, Any] = {"key_indices": lists, "scale": (size + rotated) ** -0.5}
    own_key = key[..., :latent] @ up_key.swapaxes(-1, -2)
    own_key = np.concatenate([own_key, np.broadcast_to(key[..., latent:], (2, heads, T_k, rotated))], -1)
    own_value = key[..., :latent] @ up_value.swapaxes(-1, -2)
    own_query = np.concatenate([query, rotated_query], -1)
    right = reference.scaled_dot_product_attention(own_query, own_key, own_value, **options)

    absorbed, key = (x.astype(dtype) for x in (np.concatenate([query @ up_key, rotated_query], -1), key))
    values = key[..., :latent]
    out = cattn.scaled_dot_product_attention(absorbed, key, values, enable_gqa=True, **options)
    np.testing.assert_allclose(out @ up_value.swapaxes(-1, -2), right, rtol=0, atol=limit)
    copied = cattn.scaled_dot_product_attention(absorbed, key, values.copy(), enable_gqa=True, **options)
    assert_same_bits(out, copied)


def test_memory_grows_with_the_choice_alone() -> None:
    """In a new process, whose peak no earlier test has raised."""
    program = """
import resource, numpy as np, cattn
rng = np.random.default_rng(0)
query, key = rng.standard_normal((2, 256, 16), np.float32), rng.standard_normal((1, 200_000, 16), np.float32)
cattn.choose_keys(query[:, :1], key[:, :300], 64, enable_gqa=True)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
keys = cattn.choose_keys(query, key, 64, enable_gqa=True)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""
    pytest.importorskip("resource")
    grown = int(subprocess.check_output([sys.executable, "-c", program]))
    assert grown < 20, f"{grown} MiB; the scores of all pairs are 195"


MASK = np.ones((2, 6, 9), np.bool_)
WRONG: dict[str, tuple[Call, type[Exception], str]] = {
    "no count": ({"count": 0}, ValueError, "count must be"),
    "a real count": ({"count": 2.0}, TypeError, "count must be"),
    "no block": ({"block_size": 0}, ValueError, "block_size must be"),
    "too many ends": ({"first": 3, "last": 3}, ValueError, r"first \+ last must be at most count, 5, got 3 \+ 3"),
    "a number as a flag": ({"pooled": 1}, TypeError, "pooled must be"),
    "no heads": (
        {"query": np.ones((0, 6, 4)), "key": np.ones((0, 9, 4))},
        ValueError,
        "query must have at least one head",
    ),
    "another function": ({"activation": "gelu"}, ValueError, "activation must be None or 'relu', got 'gelu'"),
    "weights of keys": ({"weights": np.ones((3, 4))}, ValueError, "weights"),
    "a mask of heads": ({"attn_mask": MASK}, ValueError, "attn_mask must be the same for all heads"),
    "a bias of heads": ({"bias": MASK.astype(float)}, ValueError, "bias must be the same for all heads"),
    "softcap": ({"softcap": 3.0}, TypeError, "softcap"),
    "int64": ({"out": np.zeros((1, 6, 5), np.int64)}, TypeError, "out has dtype int64"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_argument_is_named(name: str) -> None:
    change, error, message = WRONG[name]
    with pytest.raises(error, match=message):
        cattn.choose_keys(
            **{"query": np.ones((2, 6, 4)), "key": np.ones((2, 9, 4)), "count": 5, "enable_gqa": True} | change
        )
