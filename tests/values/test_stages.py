"""attention_weights(stage=...): each step of the computation against the reference, on every path."""

import itertools
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cattn
from cattn import reference
from support import assert_same_bits, every_way

STAGES = ("qk", "softcap", "bias", "mask", "softmax", "dropout")
BATCHES: list[tuple[int, ...]] = [(), (3,), (2, 4)]


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
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize(("T_q", "T_k"), [(7, 30), (120, 300), (1, 500)])
def test_every_stage_agrees_with_the_reference(
    stage: Any, batch: tuple[int, ...], T_q: int, T_k: int, isa: str, dtype: type
) -> None:
    query, key = inputs(batch, T_q, T_k, dtype)
    call = options(batch, T_q, T_k)
    expected = reference.attention_weights(query, key, stage=stage, **call)
    # A score is a sum of at most 8 products, capped, plus a bias and a slope times a distance, at most T_k / 8.
    tolerance = 16 * np.finfo(dtype).eps * max(1.0, np.abs(expected[np.isfinite(expected)]).max())
    first = None
    for way, result in every_way(lambda: cattn.attention_weights(query, key, stage=stage, **call), tiny=False):
        assert result.dtype == dtype
        np.testing.assert_array_equal(np.isneginf(result), np.isneginf(expected), err_msg=way)
        visible = np.isfinite(expected)
        np.testing.assert_allclose(result[visible], expected[visible], rtol=0, atol=tolerance, err_msg=way)
        first = result if first is None else first
        assert_same_bits(result, first, way)


@pytest.mark.promise("stages")
def test_every_stage_differs_from_the_one_before() -> None:
    query, key = inputs((2, 4), 9, 40, np.float64)
    results = [cattn.attention_weights(query, key, stage=stage, **options((2, 4), 9, 40)) for stage in STAGES]
    for one, other in itertools.pairwise(results):
        assert not np.array_equal(one, other)


@pytest.mark.parametrize("rng", [7, "torch"])
def test_weights_after_dropout_times_the_values_are_the_output(rng: Any, dtype: type) -> None:
    query, key = inputs((3,), 20, 50, dtype)
    value = np.random.default_rng(2).standard_normal((3, 50, 4)).astype(dtype)

    def fresh() -> Any:
        return cattn.TorchGenerator(3) if rng == "torch" else rng

    weights = cattn.attention_weights(query, key, is_causal="lower_right", dropout_p=0.4, rng=fresh(), stage="dropout")
    assert 0.1 < (weights == 0).mean() < 0.9
    fused = cattn.causal_attention(query, key, value, dropout_p=0.4, rng=fresh())
    np.testing.assert_allclose(weights @ value, fused, rtol=0, atol=50 * np.finfo(dtype).eps * np.abs(value).max())


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


@pytest.mark.parametrize("give_out", [False, True])
@pytest.mark.parametrize("kind", [np.float16, ml_dtypes.bfloat16])
def test_halves_are_rounded_once_after_dropout(kind: type, give_out: bool, rng: np.random.Generator) -> None:
    x, y = rng.standard_normal((2, 16, 4)).astype(kind)
    options: dict[str, Any] = {"stage": "dropout", "dropout_p": 0.9, "rng": 0}
    wide = cattn.attention_weights(x.astype(np.float32), y.astype(np.float32), **options)
    out = np.empty((16, 16), kind) if give_out else None
    result = cattn.attention_weights(x, y, out=out, **options)
    assert result is out or not give_out
    assert_same_bits(result, wide.astype(kind))


@pytest.mark.parametrize("head_dim", [1, 8, 16, 20, 64])
def test_scores_that_underflow_are_minus_zero_on_every_path(isa: str, dtype: type, head_dim: int) -> None:
    """Each product underflows to -0 and so does the sum; an empty chain more in the sum would give +0."""
    tiny = np.finfo(dtype).tiny
    query, key = np.full((40, head_dim), tiny, dtype), np.full((30, head_dim), -tiny, dtype)
    tile, row = (cattn.attention_weights(query[:n], key, scale=1.0, stage="qk") for n in (40, 1))
    assert_same_bits(tile, np.broadcast_to(row, tile.shape))
