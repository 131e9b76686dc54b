"""Dropout: each bit of the mask depends on its position and the seed alone, by the documented rule; factors, seeds."""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cattn
from cattn import reference
from support import NAN, assert_same_bits, bits, every_way, examples

Normal = Callable[..., np.ndarray]
# Sizes around vectors, the 64 elements that share counters, the 128 that are drawn at once, and pieces of long rows.
SIZES = [0, 1, 3, 7, 8, 9, 15, 16, 17, 31, 33, 63, 64, 65, 100, 127, 128, 129, 191, 193, 1000, 4099]
DOMAIN = 0xD0D0


# ---- the documented rule, in NumPy ---------------------------------------------------------------------------------
def digit(seed: int, j: np.ndarray, c1: Any, c2: Any, c3: Any) -> np.ndarray:
    """Return the 16 bits that element (or key) j draws with these counter words."""
    words = reference.philox4x32((8 * (j >> 6) + (j & 7), c1, c2, c3), seed)
    d = (j >> 3) & 7
    word = np.choose(np.broadcast_to(d >> 1, words.shape[1:]), words)
    return np.where(d & 1, word >> np.uint64(16), word & np.uint64(0xFFFF)).astype(np.int64)


def mask_by_rule(p: float, seed: int, j: np.ndarray, c1: Any, c2: Any, batch: Any) -> np.ndarray:
    hi, lo = divmod(round((1 - p) * 2**32), 2**16)
    first, second = (digit(seed, j, c1, c2, 2 * batch + draw) for draw in (0, 1))
    return np.where(first == hi, second < lo, first < hi)


def mask_of_elements(p: float, seed: int, n: int) -> np.ndarray:
    """Return the mask of dropout(x) for x of n elements."""
    return mask_by_rule(p, seed, np.arange(n), 0, DOMAIN, 0)


def mask_of_weights(p: float, seed: int, batch: int, heads: int, positions: np.ndarray, T_k: int) -> np.ndarray:
    """Return the mask of attention, (batch, heads, len(positions), T_k)."""
    b, h = np.arange(batch)[:, None, None, None], np.arange(heads)[:, None, None]
    return mask_by_rule(p, seed, np.arange(T_k), (np.asarray(positions) % 2**32)[:, None], h, b)


# ---- dropout of arrays ---------------------------------------------------------------------------------------------
@pytest.mark.promise("Philox")
@pytest.mark.parametrize("size", SIZES)
def test_the_mask_and_the_values_follow_the_rule(isa: str, dtype: type, size: int, normal: Normal) -> None:
    x = normal(size, dtype=dtype)
    for seed, p in ((0, 0.5), (123, 0.1), (2**64 - 1, 0.9), (2**32, 0.37)):
        right = mask_of_elements(p, seed, size)
        result, mask = cattn.dropout(x, p, rng=seed, return_mask=True)
        assert mask.dtype == np.bool_
        assert (mask == right).all()
        assert_same_bits(result, np.where(right, x * dtype(1 / (1 - p)), dtype(0)), f"p {p}")
        assert_same_bits(cattn.dropout(x, p, rng=seed), result, "without mask")
        assert (reference.dropout(x, p, rng=seed, return_mask=True)[1] == right).all()


def test_elements_are_counted_in_c_order(isa: str, dtype: type, normal: Normal) -> None:
    """Rows of any length start anywhere within 64 elements. Shape, strides and axes do not matter."""
    for shape in ((5, 7), (3, 65), (130, 1), (2, 3, 5, 11), (7, 63), (9, 129), (2, 0, 3), ()):
        x = normal(*shape, dtype=dtype)
        expected = mask_of_elements(0.4, 77, x.size).reshape(shape)
        right = np.where(expected, x * dtype(1 / 0.6), dtype(0))
        layouts = [x, np.repeat(x[..., None], 3, axis=-1)[..., 1]]
        if x.ndim:
            layouts += [np.asfortranarray(x), np.ascontiguousarray(x[::-1])[::-1], np.repeat(x, 2, axis=0)[::2]]
            layouts += [np.repeat(x, 2, axis=-1)[..., ::2]]
        for i, view in enumerate(layouts):
            result, mask = cattn.dropout(view, 0.4, rng=77, return_mask=True)
            assert (mask == expected).all(), f"layout {i}, {shape}"
            assert_same_bits(np.ascontiguousarray(result).reshape(shape), right, f"layout {i}, {shape}")
            assert_same_bits(cattn.dropout(view, 0.4, rng=77, out=np.empty(shape, dtype)), right, f"plain out, {i}")
            out = np.empty((*shape, 2), dtype)[..., 0]
            assert cattn.dropout(view, 0.4, rng=77, out=out) is out
            assert_same_bits(out.copy(), right, f"out, layout {i}, {shape}")
        same = np.broadcast_to(dtype(3), shape)
        assert_same_bits(cattn.dropout(same, 0.4, rng=77), np.where(expected, dtype(3) * dtype(1 / 0.6), dtype(0)))
        again = x.copy()
        assert cattn.dropout(again, 0.4, rng=77, out=again) is again
        assert_same_bits(again, right, "in place")


def test_long_rows_follow_the_rule_on_any_number_of_threads(isa: str, dtype: type, threads: int) -> None:
    """Few long rows, which are cut into pieces, and many short ones."""
    x = np.ones((3, 140_001), dtype)
    right = long_mask()
    assert (cattn.dropout(x, 0.25, rng=5, return_mask=True)[1] == right).all()
    assert (cattn.dropout(x.reshape(-1, 3), 0.25, rng=5) == np.where(right, dtype(1 / 0.75), 0).reshape(-1, 3)).all()


@functools.cache
def long_mask() -> np.ndarray:
    return mask_of_elements(0.25, 5, 3 * 140_001).reshape(3, 140_001)


def threshold_p(hi: int, lo: int) -> float:
    """Return the probability whose threshold has these halves. It is a multiple of 2**-32, so exact."""
    return 1 - (2**16 * hi + lo) / 2**32


def test_a_second_draw_decides_ties(isa: str, dtype: type) -> None:
    """If the digit equals the high half of the threshold, a second draw decides. So p is exact to 2**-32."""
    n, seed = 200_000, 31
    first, second = (digit(seed, np.arange(n), 0, DOMAIN, draw) for draw in (0, 1))
    values, counts = np.unique(first, return_counts=True)
    hi = int(values[counts.argmax()])
    tied = np.flatnonzero(first == hi)
    assert len(tied) >= 8
    order = np.sort(second[tied])
    for lo in (0, int(order[0]), int(order[0]) + 1, int(order[len(tied) // 2]), int(order[-1]), int(order[-1]) + 1):
        mask = cattn.dropout(np.ones(n, dtype), threshold_p(hi, lo), rng=seed, return_mask=True)[1]
        assert (mask[tied] == (second[tied] < lo)).all()
        assert (mask == ((first < hi) | ((first == hi) & (second < lo)))).all()
        assert mask[tied].sum() == (order < lo).sum()
    # raising the threshold by 2**-32 keeps one more element
    masks = [
        cattn.dropout(np.ones(n, dtype), threshold_p(hi, int(order[3]) + step), rng=seed, return_mask=True)[1]
        for step in (0, 1)
    ]
    assert masks[1].sum() == masks[0].sum() + (order == order[3]).sum()


def test_a_second_draw_decides_ties_in_attention(isa: str, dtype: type, path: str) -> None:
    T, seed = 190, 17
    call = {name: np.ones((2, 3, T, 4), dtype) for name in ("query", "key", "value")} | {"rng": seed}
    j, position = np.arange(T), np.arange(T)[:, None]
    heads, batch = np.arange(3)[:, None, None], np.arange(2)[:, None, None, None]
    first, second = (digit(seed, j, position, heads, 2 * batch + draw) for draw in (0, 1))
    values, counts = np.unique(first, return_counts=True)
    hi = int(values[counts.argmax()])
    lo = int(np.sort(second[first == hi])[counts.max() // 2])
    assert 0 < (second[first == hi] < lo).sum() < counts.max()
    right = (first < hi) | ((first == hi) & (second < lo))
    result = cattn.scaled_dot_product_attention(**call, dropout_p=threshold_p(hi, lo), return_dropout_mask=True)
    assert (result.dropout_mask == right).all()
    # all weights are 1/T, so the output counts the weights that are not dropped
    counted = result.out * (1 - threshold_p(hi, lo)) * T
    np.testing.assert_allclose(counted, right.sum(axis=-1)[..., None] + np.zeros(4), rtol=1e-5)


@pytest.mark.parametrize("p", [0.5, 0.1, 0.9, 0.01, 1e-4])
def test_the_share_of_dropped_elements_is_p(isa: str, p: float) -> None:
    """Within five standard deviations, for a million elements and for a million weights."""
    n = 2**20
    x, mask = cattn.dropout(np.ones(n, np.float32), p, rng=9, return_mask=True)
    deviation = np.sqrt(p * (1 - p) / n)
    assert abs(mask.mean() - (1 - p)) < 5 * deviation
    assert abs(x.mean(dtype=np.float64) - 1) < 5 * deviation / (1 - p)
    q = np.zeros((4, 4, 256, 4), np.float32)
    result = cattn.scaled_dot_product_attention(q, q, q + 1, None, p, rng=9, return_dropout_mask=True)
    assert abs(result.dropout_mask.mean() - (1 - p)) < 5 * deviation
    assert abs(result.out.mean(dtype=np.float64) - 1) < 5 * deviation / (1 - p)
    for axis in range(4):  # the share holds for each batch entry, head, row and column
        others = tuple(i for i in range(4) if i != axis)
        share = result.dropout_mask.mean(axis=others)
        assert (np.abs(share - (1 - p)) < 6 * np.sqrt(p * (1 - p) * share.size / n)).all()


def test_p_of_0_drops_nothing_and_p_of_1_everything(isa: str, dtype: type, normal: Normal) -> None:
    x = normal(5, 40, dtype=dtype)
    x[0, :4] = [NAN, np.inf, -np.inf, -0.0]
    for options in ({"p": 0}, {"p": 0.0, "rng": 4}, {"training": False}, {"p": 1.0, "training": False}):
        result, mask = cattn.dropout(x, return_mask=True, **options)
        assert_same_bits(result, x)
        assert mask.all()
        assert not np.shares_memory(result, x)
    result, mask = cattn.dropout(x, 1, rng=4, return_mask=True)
    assert_same_bits(result, np.zeros_like(x), "+0, also from NaN and infinity")
    assert not mask.any()
    # p so close to 0 or 1 that the threshold rounds to that
    assert cattn.dropout(np.ones(4000, dtype), 1e-12, rng=4, return_mask=True)[1].all()
    assert cattn.dropout(np.ones(4000, dtype), 2.0**-32, rng=4, return_mask=True)[1].all()
    assert not cattn.dropout(np.ones(4000, dtype), 1 - 2.0**-32, rng=4, return_mask=True)[1].any()
    # a dropped NaN becomes 0, another NaN stays
    x = np.full(1000, NAN, dtype)
    result, mask = cattn.dropout(x, 0.5, rng=4, return_mask=True)
    assert np.isnan(result[mask]).all()
    assert not bits(result[~mask]).any()


# ---- dropout in attention ------------------------------------------------------------------------------------------
def attend(dtype: type, batch_shape: tuple[int, ...], T_q: int, T_k: int, **options: Any) -> cattn.AttentionOutput:
    """Attend with equal keys and values of 1: the output is the share of weights not dropped, divided by 1 - p."""
    q, k = np.zeros((*batch_shape, T_q, 3), dtype), np.zeros((*batch_shape, T_k, 3), dtype)
    return cattn.scaled_dot_product_attention(q, k, k + 1, **options, return_dropout_mask=True)


def test_p_of_0_drops_nothing_and_p_of_1_everything_in_attention(
    isa: str, dtype: type, path: str, normal: Normal
) -> None:
    q, k, v = (normal(2, 2, 50, 6, dtype=dtype) for _ in range(3))
    everything = cattn.causal_attention(q, k, v, None, 1.0, return_dropout_mask=True)
    assert not bits(everything.out).any()
    assert not everything.dropout_mask.any()
    assert everything.dropout_seed is not None
    nothing = cattn.causal_attention(q, k, v, None, 0, rng=4, return_dropout_mask=True)
    assert nothing.dropout_mask.all()
    assert nothing.dropout_seed is None
    assert_same_bits(nothing.out, cattn.causal_attention(q, k, v))


# ---- seeds and generators ------------------------------------------------------------------------------------------
def draw(x: np.ndarray, rng: Any, function: str) -> tuple[np.ndarray, int | None]:
    """Return the mask, and the seed if the function returns it."""
    if function == "dropout":
        return cattn.dropout(x, 0.5, rng=rng, return_mask=True)[1], None
    result = cattn.scaled_dot_product_attention(x, x, x, None, 0.5, rng=rng, return_dropout_mask=True)
    return result.dropout_mask, result.dropout_seed


FUNCTIONS = pytest.mark.parametrize("function", ["dropout", "attention"])


@pytest.mark.promise("replay")
@FUNCTIONS
def test_the_returned_seed_repeats_the_mask(function: str) -> None:
    x = np.ones((30, 30))
    for rng in (None, np.random.default_rng(4), [1, 2, 3], 12, np.int64(12), np.uint64(2**64 - 1), 0, 2**64 - 1):
        mask, seed = draw(x, rng, function)
        if function == "attention":
            assert type(seed) is int
            assert 0 <= seed < 2**64
            assert (draw(x, seed, function)[0] == mask).all()
        if isinstance(rng, (int, np.integer)):
            assert seed in (None, int(rng))
            assert (draw(x, int(rng), function)[0] == mask).all()


@FUNCTIONS
def test_a_numpy_generator_gives_one_seed_a_call(function: str) -> None:
    x = np.ones((30, 30))
    ours, theirs = np.random.default_rng(4), np.random.default_rng(4)
    key = int(theirs.integers(0, 2**64, dtype=np.uint64))
    mask, seed = draw(x, ours, function)
    assert seed in (None, key)
    assert (draw(x, key, function)[0] == mask).all()
    assert ours.bit_generator.state == theirs.bit_generator.state, "the call draws one seed"
    assert (draw(x, ours, function)[0] != mask).any()
    # an argument of numpy.random.default_rng becomes a generator first
    for source in (np.random.SeedSequence(4), np.random.PCG64(4), [4, 5], np.random.MT19937(3)):
        same = {np.random.PCG64: lambda: np.random.PCG64(4), np.random.MT19937: lambda: np.random.MT19937(3)}
        again = same.get(type(source), lambda source=source: source)()
        key = int(np.random.default_rng(again).integers(0, 2**64, dtype=np.uint64))
        assert (draw(x, source, function)[0] == draw(x, key, function)[0]).all()


@FUNCTIONS
def test_a_call_that_drops_nothing_or_fails_leaves_the_generator_alone(function: str) -> None:
    """With p = 0, with training=False, and with wrong arguments."""
    x = np.ones((30, 30))
    rng = np.random.default_rng(4)
    before = rng.bit_generator.state
    bad = np.ones((31, 30))
    if function == "dropout":
        cattn.dropout(x, 0, rng=rng)
        cattn.dropout(x, 0.5, training=False, rng=rng)
        for wrong in ({"p": 1.5}, {"p": NAN}, {"p": -0.1}, {"p": 0.5, "out": bad}, {"p": "a"}):
            with pytest.raises((TypeError, ValueError)):
                cattn.dropout(x, rng=rng, **wrong)
    else:
        cattn.scaled_dot_product_attention(x, x, x, rng=rng)
        for wrong in ({"out": bad}, {"attn_mask": np.ones((3, 3), bool)}, {"scale": NAN}, {"is_causal": "no"}):
            with pytest.raises((TypeError, ValueError)):
                cattn.scaled_dot_product_attention(x, x, x, dropout_p=0.5, rng=rng, **wrong)
        with pytest.raises(ValueError, match="value has"):
            cattn.scaled_dot_product_attention(x, x, bad, dropout_p=0.5, rng=rng)
        with pytest.raises(ValueError, match="dropout_p"):
            cattn.scaled_dot_product_attention(x, x, x, dropout_p=1.5, rng=rng)
    assert rng.bit_generator.state == before


@FUNCTIONS
def test_without_an_rng_every_call_draws_another_mask(function: str) -> None:
    """NumPy's global random state is neither used nor changed."""
    x = np.ones((30, 30))
    np.random.seed(0)  # noqa: NPY002
    before = np.random.get_state()[1].copy()  # noqa: NPY002
    masks = {draw(x, None, function)[0].tobytes() for _ in range(5)}
    assert len(masks) == 5
    assert (np.random.get_state()[1] == before).all()  # noqa: NPY002


def test_neighbouring_seeds_and_positions_give_independent_masks() -> None:
    """Seeds that differ in one bit, neighbouring heads, batch entries and rows, both functions: half the bits agree."""
    x = np.ones((64, 64))
    base = cattn.dropout(x, 0.5, rng=0, return_mask=True)[1]
    others = [cattn.dropout(x, 0.5, rng=2**bit, return_mask=True)[1] for bit in range(64)]
    in_attention = attend(np.float64, (2, 2), 65, 64, dropout_p=0.5, rng=0).dropout_mask
    others += [in_attention[0, 0, :64]]
    pairs = [(base, other) for other in others]
    first = in_attention[0, 0, :64]
    pairs += [(first, other) for other in (in_attention[1, 0, :64], in_attention[0, 1, :64], in_attention[0, 0, 1:])]
    for a, b in pairs:
        assert abs((a == b).mean() - 0.5) < 5 * 0.5 / 64


# ---- random calls --------------------------------------------------------------------------------------------------
@given(
    size=st.integers(0, 700),
    p=st.floats(0, 1) | st.integers(0, 2**32).map(lambda n: n / 2**32),
    seed=st.integers(0, 2**64 - 1),
)
@examples(60)
def test_random_sizes_seeds_and_probabilities_follow_the_rule(isa: str, size: int, p: float, seed: int) -> None:
    result, mask = cattn.dropout(np.ones(size), p, rng=seed, return_mask=True)
    if p == 0:
        assert mask.all()
        return
    right = mask_of_elements(p, seed, size)
    assert (mask == right).all()
    assert ((result != 0) == mask).all()


@given(st.data())
@examples(60)
def test_random_attention_calls_follow_the_rule(isa: str, data: st.DataObject) -> None:
    p = data.draw(st.floats(1e-6, 1))
    seed, offset = data.draw(st.integers(0, 2**64 - 1)), data.draw(st.integers(-(2**40), 2**40))
    batch, heads, T_q = (data.draw(st.integers(1, n)) for n in (3, 3, 40))
    T_k = data.draw(st.sampled_from([1, 8, 60, 64, 130, 200]))
    right = mask_of_weights(p, seed, batch, heads, offset + np.arange(T_q), T_k)
    share = right.mean(axis=-1) / (1 - p) if p < 1 else np.zeros(right.shape[:-1])
    for way, result in every_way(
        lambda: attend(np.float64, (batch, heads), T_q, T_k, dropout_p=p, rng=seed, query_offset=offset),
        tiny=T_k <= 192,
    ):
        assert (result.dropout_mask == right).all(), way
        np.testing.assert_allclose(result.out[..., 0], share, rtol=1e-12, atol=1e-12, err_msg=way)


# ---- gradients -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float64, np.float16])
def test_dropout_backward_takes_one_number(dtype: type) -> None:
    for mask, expected in ((True, 6.0), (False, 0.0)):
        out = np.empty((), dtype)
        assert cattn.dropout_backward(np.array(3, dtype), 0.5, mask=mask, out=out) is out
        assert out == expected == cattn.dropout_backward(np.array(3, dtype), 0.5, mask=np.array(mask))


@pytest.mark.promise("errors")
def test_dropout_backward_refuses_wrong_arguments(rng: np.random.Generator) -> None:
    x = np.ones(4)
    with pytest.raises(ValueError, match="pass the mask of the forward pass"):
        cattn.dropout_backward(x, 0.5)
    with pytest.raises(ValueError, match="pass the mask of the forward pass"):
        cattn.dropout_backward(x, 0.5, rng=rng)
    with pytest.raises(ValueError, match="either mask or rng"):
        cattn.dropout_backward(x, 0.5, rng=1, mask=[True] * 4)
    for shape in ((2, 4), (3,), (0, 0), (1, 8, 0)):
        with pytest.raises(ValueError, match=r"^mask has shape \(.*, which does not broadcast to grad_out's \(4,\)"):
            cattn.dropout_backward(x, 0.5, mask=np.ones(shape, bool))
    with pytest.raises(ValueError, match=r"p must be in \[0, 1\], got 2"):
        cattn.dropout_backward(x, 2.0, mask=[True] * 4)


def test_the_gradient_of_one_number_is_an_array() -> None:
    for gradient in (cattn.dropout_backward(2.0, 0.5, mask=True), cattn.dropout_backward(2.0, 0.5, rng=1)):
        assert type(gradient) is np.ndarray
        assert gradient.shape == ()
