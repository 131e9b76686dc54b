"""What is known about the weights: attention_statistics and attention_weights(stage=), by reference and formulas."""

import functools
import itertools
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cattn
from support import (
    INF,
    NAN,
    assert_same_bits,
    bit_cases,
    examples,
    in_contract,
    looped,
    table,
    widened,
)
from support.calls import calls, drawn, statistics_options
from support.laws import NOT_OF_STATISTICS, check_statistics, without

ROWS = ["lse", "max_score", "entropy", "max_weight", "sink_weight", "distance"]
COLUMNS = ["received", "received_max"]
FIELDS = cattn.AttentionStatistics._fields


def statistics(call: dict[str, Any], **more: Any) -> cattn.AttentionStatistics:
    return cattn.attention_statistics(**without(call, *NOT_OF_STATISTICS), **more)


def assert_equal_bits(actual: Any, wanted: Any, what: str = "") -> None:
    for name, a, b in zip(FIELDS, actual, wanted, strict=True):
        assert (a is None) == (b is None), name
        if a is not None:
            assert_same_bits(a, b, f"{name}: {what}")


def in_numpy(call: dict[str, Any], dtype: Any) -> dict[str, np.ndarray]:
    """The statistics of plain scores as NumPy computes them in one dtype, with full matrices."""
    q, k = call["query"].astype(dtype), call["key"].astype(dtype)
    scores = (q @ k.swapaxes(-1, -2)) * dtype(1 / np.sqrt(q.shape[-1]))
    top = scores.max(-1, keepdims=True)
    e = np.exp(scores - top)
    total = e.sum(-1, keepdims=True)
    w = e / total
    away = np.abs(np.arange(q.shape[-2])[:, None] - np.arange(k.shape[-2])).astype(dtype)
    return {
        "lse": (top + np.log(total))[..., 0],
        "max_score": top[..., 0],
        "entropy": -(w * np.log(w)).sum(-1),
        "max_weight": w.max(-1),
        "distance": (w * away).sum(-1),
        "received": w.sum(-2),
        "received_max": w.max(-2),
    }


# ---- values ----------------------------------------------------------------------------------------------------------
@examples(120, long=5000)
@given(st.data())
def test_every_field_is_that_of_the_reference(data: st.DataObject) -> None:
    call, _ = data.draw(calls())
    options = data.draw(drawn(statistics_options, call["key"].shape[-2]))
    check_statistics(statistics(call, **options), widened(call), options)


@pytest.mark.parametrize("T", [64, 700])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_errors_are_within_twice_those_of_numpy(dtype: Any, T: int) -> None:
    rng = np.random.default_rng(T)
    call = {name: rng.standard_normal((3, T, 64)).astype(dtype) for name in ("query", "key")}
    exact, numpy = in_numpy(call, np.longdouble), in_numpy(call, dtype)
    actual = statistics(call)
    for name, right in exact.items():
        own, theirs = (np.abs(a - right).max() for a in (getattr(actual, name), numpy[name]))
        # where NumPy is nearly exact: some roundings of the largest number that takes part. In float64 lse is rounded
        # before the weights are computed from it, which shifts the logarithms of a row by as much.
        floor = (4 if dtype == np.float32 else 8) * np.finfo(dtype).eps * np.abs(right).max()
        assert own <= max(2 * theirs, floor), (name, own, theirs)


def test_top_keys_are_sorted_and_ties_go_to_the_lower_key() -> None:
    query, key = np.ones((1, 1)), np.array([[1.0], [3.0], [2.0], [3.0], [2.0], [3.0]])
    result = cattn.attention_statistics(query, key, top_k=6, scale=1.0)
    assert result.top_keys.tolist() == [[1, 3, 5, 2, 4, 0]]
    np.testing.assert_allclose(
        result.top_weights, cattn.attention_weights(query, key, scale=1.0)[:, [1, 3, 5, 2, 4, 0]]
    )
    for k in range(1, 6):
        assert cattn.attention_statistics(query, key, top_k=k).top_keys.tolist() == [[1, 3, 5, 2, 4, 0][:k]]


def test_only_what_was_asked_for_is_given() -> None:
    x = np.zeros((4, 2))
    result = cattn.attention_statistics(x, x, statistics=["entropy", "received"])
    assert [name for name in FIELDS if getattr(result, name) is not None] == ["entropy", "received"]
    assert cattn.attention_statistics(x, x, statistics="lse", top_k=2).top_keys.shape == (4, 2)
    everything = cattn.attention_statistics(x, x)
    assert [name for name in FIELDS if getattr(everything, name) is None] == ["top_keys", "top_weights"]
    for name in (*ROWS, *COLUMNS):
        alone = cattn.attention_statistics(x, x, statistics=(name,))
        assert_same_bits(getattr(alone, name), getattr(everything, name), name)


# ---- formulas of others ----------------------------------------------------------------------------------------------
def test_observation_window_gives_the_votes_of_snapkv() -> None:
    """Li et al. (2024): the softmax of the last queries against all keys, causal among themselves, summed over them."""
    rng = np.random.default_rng(5)
    q, k = rng.standard_normal((2, 4, 150, 16)), rng.standard_normal((2, 4, 150, 16))
    window = 32
    logits = np.einsum("bhqd,bhkd->bhqk", q[:, :, -window:], k) / 4
    logits[..., -window:] += np.triu(np.full((window, window), -INF), 1)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    votes = weights.sum(-2)
    result = cattn.attention_statistics(q, k, is_causal=True, observation_window=window)
    np.testing.assert_allclose(result.received, votes, rtol=1e-12)
    alone = cattn.attention_statistics(q[:, :, -window:], k, is_causal="lower_right", statistics="received")
    np.testing.assert_allclose(alone.received, votes, rtol=1e-12)


# ---- bits ------------------------------------------------------------------------------------------------------------
@functools.cache
def yardstick_of(name: str, dtype: type) -> cattn.AttentionStatistics:
    with table("scalar"), cattn.num_threads(1):
        return statistics(bit_cases.build(name, dtype), **options_of(name))


def options_of(name: str) -> dict[str, Any]:
    call = bit_cases.build(name, np.float32)
    return {"top_k": min(3, call["key"].shape[-2]), "observation_window": 40 if len(name) % 2 else None}


@pytest.mark.promise("statistics' bits")
@looped("name", bit_cases.CASES)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_tables_and_threads_give_the_same_bits(isa: str, dtype: type, name: str) -> None:
    call = bit_cases.build(name, dtype)
    wanted = yardstick_of(name, dtype) if in_contract(isa) else None
    for threads in (1, 3):
        with cattn.num_threads(threads):
            result = statistics(call, **options_of(name))
        wanted = result if wanted is None else wanted
        assert_equal_bits(result, wanted, f"{threads} threads")


@pytest.mark.promise("statistics' bits")
@pytest.mark.parametrize("heads", [1, 3, 12])
def test_blocks_and_whole_heads_as_tasks_give_the_same_bits(heads: int) -> None:
    """Few heads are cut into blocks of queries, whose column sums wait for their tickets; many are whole tasks."""
    rng = np.random.default_rng(heads)
    q, k = (rng.standard_normal((heads, 500, 32)).astype(np.float32) for _ in range(2))
    results = []
    for threads in (1, 2, 4):
        with cattn.num_threads(threads):
            results.append(cattn.attention_statistics(q, k, is_causal=True, enable_gqa=True, top_k=4))
    for head in range(heads):
        results.append(cattn.attention_statistics(q[head], k[head], is_causal=True, top_k=4))
    for result in results[1:3]:
        assert_equal_bits(result, results[0])
    for head, result in enumerate(results[3:]):
        own = cattn.AttentionStatistics(*(None if a is None else a[head] for a in results[0]))
        assert_equal_bits(result, own, f"head {head} alone")


@pytest.mark.promise("statistics' bits")
def test_a_row_does_not_depend_on_its_neighbours() -> None:
    rng = np.random.default_rng(2)
    q, k = (rng.standard_normal((230, 24)).astype(np.float32) for _ in range(2))
    whole = cattn.attention_statistics(q, k, is_causal=True, top_k=3)
    for first, last in ((0, 1), (3, 40), (95, 97), (100, 230)):
        part = cattn.attention_statistics(q[first:last], k, is_causal=True, query_offset=first, top_k=3)
        for name in [*ROWS, "top_keys", "top_weights"]:
            assert_same_bits(getattr(part, name), getattr(whole, name)[first:last], f"{name} {first}:{last}")


# ---- hidden keys, and rows without weights ---------------------------------------------------------------------------


def test_a_query_that_sees_nothing() -> None:
    x = np.ones((3, 2))
    result = cattn.attention_statistics(x, x, np.array([[True] * 3, [False] * 3, [True] * 3]), top_k=2)
    for name, value in {"lse": -INF, "max_score": -INF}.items():
        assert getattr(result, name)[1] == value
    for name in ("entropy", "max_weight", "sink_weight", "distance"):
        assert getattr(result, name)[1] == 0
        assert not np.signbit(getattr(result, name)[1])
    assert result.top_keys[1].tolist() == [-1, -1]
    assert result.top_weights[1].tolist() == [0, 0]
    with_sink = cattn.attention_statistics(x, x, np.zeros((3, 3), np.bool_), sinks=[2.5])
    assert with_sink.lse.tolist() == [2.5] * 3
    assert with_sink.sink_weight.tolist() == [1.0] * 3


def test_nan_in_a_visible_score_spoils_its_row_and_the_sums_of_the_keys_it_sees() -> None:
    rng = np.random.default_rng(8)
    q, k = rng.standard_normal((120, 4)), rng.standard_normal((120, 4))
    clean = cattn.attention_statistics(q, k, is_causal=True, top_k=2)
    q[50, 1] = NAN
    result = cattn.attention_statistics(q, k, is_causal=True, top_k=2)
    others = np.arange(120) != 50
    for name in ROWS:
        assert np.isnan(getattr(result, name)[50]), name
        assert_same_bits(getattr(result, name)[others], getattr(clean, name)[others], name)
    assert result.top_keys[50].tolist() == [-1, -1]
    assert np.isnan(result.top_weights[50]).all()
    for name in COLUMNS:
        assert np.isnan(getattr(result, name)[:51]).all()
        assert_same_bits(getattr(result, name)[51:], getattr(clean, name)[51:], name)


@pytest.mark.parametrize(("T_q", "T_k"), [(0, 3), (3, 0), (0, 0)])
def test_empty_axes(T_q: int, T_k: int) -> None:
    result = cattn.attention_statistics(np.ones((2, T_q, 4)), np.ones((2, T_k, 4)))
    for name in ROWS:
        assert getattr(result, name).shape == (2, T_q)
    for name in COLUMNS:
        assert getattr(result, name).tolist() == [[0.0] * T_k] * 2
    assert (result.lse == -INF).all()


# ---- errors ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"statistics": "entropie"}, ValueError, "statistics must hold names of 'lse'.* got 'entropie'"),
        ({"statistics": ["lse", 3]}, ValueError, "statistics must hold names of .* got 3"),
        ({"statistics": ["top_keys"]}, ValueError, "got 'top_keys': pass top_k for the top keys"),
        ({"statistics": 7}, TypeError, "statistics must be None, a name or a sequence of names, got int"),
        ({"top_k": -1}, ValueError, "top_k must be at least 0, got -1"),
        ({"top_k": 6}, ValueError, "top_k must be at most 5, got 6"),
        ({"top_k": 2.0}, TypeError, "top_k must be an int, got float"),
        ({"observation_window": 0}, ValueError, "observation_window must be at least 1, got 0"),
        ({"observation_window": "all"}, TypeError, "observation_window must be an int, got str"),
        ({"dropout_p": 0.1}, TypeError, "dropout_p"),
    ],
)
def test_a_wrong_argument_is_named(options: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        cattn.attention_statistics(np.ones((4, 2)), np.ones((5, 2)), **options)


# ---- heads -----------------------------------------------------------------------------------------------------------
def pattern_weights(ids: list[int], head: str) -> np.ndarray:
    """The weights of a head that does nothing else; where it finds no such key, it looks at token 0."""
    weights = np.zeros((len(ids), len(ids)))
    for i, token in enumerate(ids):
        earlier = [j for j in range(i) if ids[j] == token]
        keys = {
            "previous": [i - 1] if i else [],
            "duplicate": earlier,
            "induction": [j + 1 for j in earlier],
        }[head]
        for j in keys or [0]:
            weights[i, j] += 1 / max(len(keys), 1)
    return weights


@pytest.mark.parametrize("batch", [(), (2,)])
def test_head_scores_find_the_heads(batch: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    ids = [*rng.permutation(40), *rng.permutation(40)] if not batch else [*range(30), *range(30)]
    heads = np.stack([pattern_weights(list(ids), name) for name in ("previous", "duplicate", "induction")])
    weights = np.broadcast_to(heads, (*batch, *heads.shape))
    scores = cattn.head_scores(weights, np.broadcast_to(ids, (*batch, len(ids))))
    found = np.stack(scores, axis=-1)
    assert found.shape == (*batch, 3, 3)
    np.testing.assert_allclose(np.diagonal(found, axis1=-2, axis2=-1), 1.0)
    off = found[..., ~np.eye(3, dtype=bool)]
    assert (off < (1.01 if batch else 0.3)).all()  # in a text that repeats with one period they are different, too


def test_head_scores_of_top_keys_are_those_of_the_matrix() -> None:
    rng = np.random.default_rng(1)
    ids = rng.integers(0, 9, 60)
    q, k = rng.standard_normal((2, 4, 60, 8)), rng.standard_normal((2, 4, 60, 8))
    matrix = cattn.head_scores(cattn.attention_weights(q, k, is_causal=True), ids)
    top = cattn.head_scores(cattn.attention_statistics(q, k, is_causal=True, top_k=60), ids)
    last = cattn.head_scores(cattn.attention_weights(q[:, :, 20:], k, is_causal="lower_right"), ids)
    for a, b in zip(matrix, top, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12)
    assert last.induction.shape == (2, 4)
    slow = np.zeros((2, 4))
    weights = cattn.attention_weights(q, k, is_causal=True)
    counts = [i for i in range(60) if ids[i] in ids[:i]]
    for i, j in itertools.product(counts, range(1, 60)):
        if j <= i and ids[j - 1] == ids[i]:
            slow += weights[..., i, j] / len(counts)
    np.testing.assert_allclose(matrix.induction, slow, rtol=1e-12)


def test_padding_does_not_count_in_head_scores() -> None:
    rng = np.random.default_rng(3)
    ids = np.concatenate([rng.integers(0, 5, 20), np.zeros(12, int)])
    q, k = rng.standard_normal((1, 2, 32, 8)), rng.standard_normal((1, 2, 32, 8))
    options = {"query_seq_lengths": 20, "key_value_seq_lengths": 20}
    padded = cattn.head_scores(cattn.attention_statistics(q, k, top_k=32, **options), ids)
    alone = cattn.head_scores(cattn.attention_weights(q[:, :, :20], k[:, :, :20]), ids[:20])
    for a, b in zip(padded, alone, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12)


def test_head_scores_without_such_keys_are_nan() -> None:
    scores = cattn.head_scores(np.ones((1, 1, 1)), [4])
    assert np.isnan(scores).all()


@pytest.mark.parametrize(
    ("weights", "ids", "error", "text"),
    [
        (np.ones((2, 3)), [1, 2], ValueError, r"weights must have shape \(..., T_q, T_k\) .* T_k = 2.*got \(2, 3\)"),
        (np.ones((3, 3)), [0.5, 1, 2], TypeError, "token_ids must .*int"),
        (np.ones((3, 3)), 3, ValueError, r"token_ids must have shape"),
        (cattn.AttentionStatistics(), [1], ValueError, "weights has no top_keys: pass top_k"),
        (np.ones((2, 1, 3, 3)), np.ones((3, 3), int), ValueError, "leading axes must be those before the heads"),
    ],
)
def test_head_scores_name_a_wrong_argument(weights: Any, ids: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        cattn.head_scores(weights, ids)


def test_rollout_is_the_product_of_the_mixed_layers() -> None:
    rng = np.random.default_rng(2)
    weights = rng.random((3, 2, 4, 5, 5))
    weights /= weights.sum(-1, keepdims=True)
    mixed = [0.5 * layer.mean(-3) + 0.5 * np.eye(5) for layer in weights]
    np.testing.assert_allclose(cattn.attention_rollout(weights), mixed[2] @ mixed[1] @ mixed[0], rtol=1e-12)
    np.testing.assert_allclose(cattn.attention_rollout(weights, residual=1), np.broadcast_to(np.eye(5), (2, 5, 5)))
    assert cattn.attention_rollout(weights.astype(np.float16)).dtype == np.float32
    with pytest.raises(ValueError, match=r"weights must have shape \(L, ..., H, T, T\)"):
        cattn.attention_rollout(weights[0, 0, 0])
    with pytest.raises(ValueError, match="residual"):
        cattn.attention_rollout(weights, residual=1.5)


# ---- stages ----------------------------------------------------------------------------------------------------------
STAGES = ("qk", "softcap", "bias", "mask", "softmax", "dropout")


def options(batch: tuple[int, ...], T_q: int, T_k: int) -> dict[str, Any]:
    """Return all options at once, so that each stage differs from the one before."""
    rng = np.random.default_rng(len(batch))
    heads = batch[1] if len(batch) == 2 else 1
    return {
        "is_causal": "lower_right",
        "window_size": (T_k // 2, 0),
        "key_value_seq_lengths": T_k - 3,
        "key_value_seq_starts": 2,
        "softcap": 2.0,
        "alibi_slopes": rng.random(heads) / 8,
        "sinks": rng.random(heads),
        "attn_mask": rng.random((T_q, T_k)) < 0.8,
        "bias": np.where(rng.random((T_q, T_k)) < 0.1, -np.inf, rng.standard_normal((T_q, T_k))),
        "dropout_p": 0.3,
        "rng": 5,
    }


def inputs(batch: tuple[int, ...], T_q: int, T_k: int, dtype: Any) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(1)
    kv_batch = (batch[0], batch[1] // 2) if len(batch) == 2 else batch
    shapes = (*batch, T_q, 8), (*kv_batch, T_k, 8)
    query, key = (rng.standard_normal(shape).astype(dtype) for shape in shapes)
    return query, key


@pytest.mark.promise("stages")
def test_every_stage_differs_from_the_one_before() -> None:
    query, key = inputs((2, 4), 9, 40, np.float64)
    results = [cattn.attention_weights(query, key, stage=stage, **options((2, 4), 9, 40)) for stage in STAGES]
    for one, other in itertools.pairwise(results):
        assert not np.array_equal(one, other)


def test_p_of_0_drops_no_weight_and_p_of_1_all() -> None:
    x = np.ones((3, 2))
    assert not cattn.attention_weights(x, x, dropout_p=1.0, stage="dropout").any()
    same = cattn.attention_weights(x, x, dropout_p=0.0, stage="dropout")
    np.testing.assert_array_equal(same, cattn.attention_weights(x, x))


def test_a_dropped_nan_is_zero() -> None:
    x = np.ones((2, 2))
    key = np.array([[np.nan, 0.0], [1.0, 1.0]])
    weights = cattn.attention_weights(x, key, dropout_p=0.5, rng=1, stage="dropout")
    assert (np.isnan(weights) | (weights == 0)).all()
    assert (weights == 0).any()


def test_only_the_dropout_stage_draws_from_the_generator() -> None:
    x = np.ones((3, 2))
    generator = np.random.default_rng(0)
    before = generator.bit_generator.state
    cattn.attention_weights(x, x, dropout_p=0.5, rng=generator, stage="softmax")
    assert generator.bit_generator.state == before
    cattn.attention_weights(x, x, dropout_p=0.5, rng=generator, stage="dropout")
    assert generator.bit_generator.state != before


@pytest.mark.parametrize("stage", STAGES)
def test_every_stage_fills_out(stage: Any, dtype: type) -> None:
    query, key = inputs((3,), 5, 40, dtype)
    call = options((3,), 5, 40)
    out = np.full((3, 40, 5), np.nan, dtype).swapaxes(1, 2)
    assert cattn.attention_weights(query, key, stage=stage, out=out, **call) is out
    assert_same_bits(np.ascontiguousarray(out), cattn.attention_weights(query, key, stage=stage, **call))


@pytest.mark.parametrize("stage", STAGES)
def test_a_hidden_key_changes_no_bit_of_the_stages_from_mask_on(stage: Any, dtype: type) -> None:
    query, key = inputs((), 20, 40, dtype)
    dirty = key.copy()
    dirty[30:] = np.nan
    mask = np.arange(40) < 30
    results = [cattn.attention_weights(query, k, mask, stage=stage, dropout_p=0.1, rng=1) for k in (key, dirty)]
    if STAGES.index(stage) >= STAGES.index("mask"):
        assert_same_bits(results[1], results[0])
    else:
        assert np.isnan(results[1][:, 30:]).all(), "earlier stages show the scores of hidden keys"


def test_the_smallest_and_the_largest_softcap_are_accepted(isa: str, dtype: type, path: str) -> None:
    """With the smallest cap of the dtype, nonzero scores become the cap; with the largest they stay as they are."""
    smallest, largest = np.finfo(dtype).smallest_subnormal, np.finfo(dtype).max
    query, key = np.array([[1.0]], dtype), np.array([[0.0], [3.0], [-2.0]], dtype)
    small = cattn.attention_weights(query, key, softcap=float(smallest), stage="softcap")
    np.testing.assert_array_equal(small, np.array([[0, smallest, -smallest]], dtype))
    large = cattn.attention_weights(query, key, softcap=float(largest), stage="softcap")
    np.testing.assert_allclose(large, key.T, rtol=1e-5)  # a score divided by the largest number is subnormal


@pytest.mark.parametrize("kind", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_a_softcap_that_rounds_to_zero_is_refused(kind: type) -> None:
    """2**-150 is the tie between 0 and the smallest float32 and rounds to 0; the next float64 rounds up."""
    x = np.ones((1, 1), kind)
    with pytest.raises(ValueError, match="softcap must round to a positive finite float32"):
        cattn.attention_weights(x, x, softcap=2.0**-150)
    capped = cattn.attention_weights(x.astype(np.float32), x.astype(np.float32), softcap=2.0**-150 * (1 + 2.0**-52),
                                     stage="softcap")  # fmt: skip
    np.testing.assert_array_equal(capped, np.finfo(np.float32).smallest_subnormal)


@pytest.mark.parametrize("head_dim", [1, 8, 16, 20, 64])
def test_scores_that_underflow_are_minus_zero_on_every_path(isa: str, dtype: type, head_dim: int) -> None:
    """Each product underflows to -0 and so does the sum; an empty chain more in the sum would give +0."""
    tiny = np.finfo(dtype).tiny
    query, key = np.full((40, head_dim), tiny, dtype), np.full((30, head_dim), -tiny, dtype)
    tile, row = (cattn.attention_weights(query[:n], key, scale=1.0, stage="qk") for n in (40, 1))
    assert_same_bits(tile, np.broadcast_to(row, tile.shape))
