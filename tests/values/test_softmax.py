"""softmax and masked_softmax: values, errors in ULP, both masking methods, axes, hidden scores, gradients."""

import itertools
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import cattn
from cattn import reference
from support import (
    ACCURACY_DTYPES,
    HALVES,
    INF,
    NAN,
    assert_same_bits,
    benchmarks_importable,
    examples,
    in_contract,
    looped,
    table,
)

with benchmarks_importable():
    from benchmarks.accuracy import BOUNDS

Normal = Callable[..., np.ndarray]
METHODS = ["neg_inf", "renormalize"]
# Numbers of columns around vectors of 4 to 16 lanes, 8 chains of a sum, and runs of 512 columns.
COLUMNS = [1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 23, 24, 25, 31, 32, 33, 63, 64, 65, 511, 512, 513, 519, 520, 1024, 1100]


def assert_close(actual: np.ndarray, right: np.ndarray, dtype: Any) -> None:
    """Compare rows of a few hundred columns. The bounds in ULPS below are far tighter than this one."""
    assert actual.dtype == dtype
    np.testing.assert_allclose(actual, right, rtol=100 * np.finfo(dtype).eps, atol=1e-37)


def yardstick(isa: str, call: Callable[[], np.ndarray]) -> np.ndarray:
    """Make the call with the scalar kernel table (a table outside the bit contract: with itself) on one thread."""
    with table("scalar" if in_contract(isa) else isa), cattn.num_threads(1):
        return call()


# ---- values --------------------------------------------------------------------------------------------------------
AXES: list[tuple[tuple[int, ...], Any]] = [
    ((7,), -1),
    ((7,), 0),
    ((7,), None),
    ((), -1),
    ((), None),
    ((3, 40), -1),
    ((3, 40), 0),
    ((3, 40), -2),
    ((3, 40), None),
    ((3, 40), (1,)),
    ((3, 40), (0, 1)),
    ((3, 40), (-1, 0)),
    ((2, 3, 4, 5), 1),
    ((2, 3, 4, 5), -3),
    ((2, 3, 4, 5), (1, 3)),
    ((2, 3, 4, 5), (0, 2)),
    ((2, 3, 4, 5), (2, -1)),
    ((2, 3, 4, 5), (3, 0, 1)),
    ((2, 3, 4, 5), None),
    ((2, 1, 3, 1, 2, 4, 2), (4, 2)),
    ((3, 0), -1),
    ((3, 0), 0),
    ((0, 3), -1),
    ((0, 3), None),
]


@pytest.mark.parametrize(("shape", "axis"), AXES, ids=str)
def test_softmax_over_any_axes_agrees_with_the_reference(
    isa: str, dtype: type, normal: Normal, rng: np.random.Generator, shape: tuple[int, ...], axis: Any
) -> None:
    x = normal(*shape, dtype=dtype)
    where = rng.random(shape) < 0.6
    assert_close(cattn.softmax(x, axis), reference.softmax(x, axis), dtype)
    assert_close(cattn.softmax(x, axis=axis, scale=-2.5), reference.softmax(x, axis, scale=-2.5), dtype)
    assert_close(cattn.softmax(x, axis, where=where), reference.softmax(x, axis, where=where), dtype)
    out = np.full(shape, NAN, dtype)
    assert cattn.softmax(x, axis, where=where, out=out) is out
    assert_close(out, reference.softmax(x, axis, where=where), dtype)
    if x.size:  # every slice is 0, or sums to 1
        sums = cattn.softmax(x, axis, where=where).sum(axis)
        assert np.isclose(sums, where.any(axis)).all()


def test_softmax_has_known_values(isa: str) -> None:
    np.testing.assert_allclose(cattn.softmax([0, np.log(3)]), [0.25, 0.75], rtol=1e-15)
    np.testing.assert_allclose(cattn.softmax([1000.0, 1000.0, -1000.0]), [0.5, 0.5, 0], rtol=0)
    assert cattn.softmax(3.0) == 1
    assert cattn.softmax([[-5e300]]) == 1
    assert cattn.softmax([1, 1]).tolist() == [0.5, 0.5]
    assert cattn.softmax([True, False]).dtype == np.float64


# ---- accuracy ------------------------------------------------------------------------------------------------------
def ulps(actual: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Return the distance in units in the last place of the right value, 0 where that is nearly subnormal."""
    dtype = actual.dtype
    normal = right >= 4 * np.finfo(dtype).tiny
    apart = np.abs(actual - right) / np.spacing(right.astype(dtype))
    return np.where(normal, apart, 0).astype(np.float64)


@pytest.mark.parametrize("n", [1, 2, 8, 64, 513, 20_000, 200_000])
@pytest.mark.parametrize("kind", ACCURACY_DTYPES)
def test_the_error_in_ulp_stays_below_its_bound(isa: str, kind: type, rng: np.random.Generator, n: int) -> None:
    """If x - max is exact, the bound holds as it is. Otherwise its rounding adds one ULP for each unit of max - x."""
    rows = {int(name.split()[-2]): most for name, (most, *_) in BOUNDS.items() if name.startswith("softmax of")}
    bound = next(most for columns, most in rows.items() if columns >= n)
    wide = np.float64 if kind == np.float32 else np.longdouble
    largest = 0.0
    for spread in (0.1, 1, 5, 20, 80):
        x = spread * rng.standard_normal((max(1, 3000 // n), n))
        for exact in (True, False):
            row = (np.round(256 * x) / 256 if exact else x).astype(kind)
            shifted = row.astype(wide) - row.max(axis=-1, keepdims=True)
            e = np.exp(shifted)
            error = ulps(cattn.softmax(row), e / e.sum(axis=-1, keepdims=True))
            assert (error <= bound * (1 if exact else 1 - shifted)).all()
            largest = max(largest, float(error.max()))
    assert n == 1 or largest > 0.1, "an error of nearly zero: was anything compared?"


def test_weights_that_underflow_become_zero_and_stay_zero(isa: str, dtype: type) -> None:
    """Weights fall monotonically. Below the smallest normal number they are +0."""
    x = np.linspace(-800, -60, 50_001).astype(dtype)
    weights = cattn.softmax(np.stack([np.zeros_like(x), x], axis=-1))[:, 1]
    assert (np.diff(weights) >= 0).all()
    assert weights[0] == 0
    assert not np.signbit(weights).any()
    least = np.finfo(dtype).tiny
    assert ((weights == 0) | (weights >= least)).all()
    assert (weights[np.exp(x.astype(np.float64)) > 1.001 * least] > 0).all()


# ---- masks ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("method", METHODS)
def test_every_causal_form_agrees_with_the_reference(isa: str, dtype: type, normal: Normal, method: str) -> None:
    for T_q, T_k in ((9, 9), (5, 40), (40, 5), (1, 33), (33, 1), (17, 530)):
        scores = normal(2, 3, T_q, T_k, dtype=dtype)
        forms: list[dict[str, Any]] = [
            {"is_causal": "upper_left"},
            {"is_causal": "lower_right"},
            {"is_causal": True, "query_offset": 3},
            {"is_causal": True, "query_offset": -T_q + 1},
            {"is_causal": True, "query_offset": 10**15},
            {"is_causal": True, "query_offset": -(10**15)},
            {"is_causal": True, "query_offset": np.array([[0], [T_k - 2]])},
            {"is_causal": True, "query_offset": np.array([-1, 0, 7])},
            {"is_causal": False, "query_offset": 3},
        ]
        mask = np.arange(T_k) % 3 != 1
        for form, given_mask in itertools.product(forms, (None, mask)):
            options = {**form, "scale": 0.7, "method": method}
            weights = cattn.masked_softmax(scores, given_mask, **options)
            right = reference.masked_softmax(scores, given_mask, **options | {"method": "neg_inf"})
            assert_close(weights, right, dtype)
            assert ((weights == 0) == (right == 0)).all()


def methods_apart(scores: np.ndarray, mask: np.ndarray, neg_inf: np.ndarray, renormalized: np.ndarray) -> None:
    """Assert that both methods agree within 24 (1 + d) ULP, plus the loss of "renormalize" by underflow.

    d is the distance of a score to the largest visible score of its row, plus the distance of that to the largest of
    all scores: rounding a difference costs one ULP for each unit. Both sums of hundreds of columns round differently.
    Measured: 14 (1 + d) ULP.
    "renormalize" computes exp(s - max) with the maximum of all scores, and is used if at least 2**-100 of the sum is
    visible. A weight that underflows there may be up to 2**100 times as large after the division by the visible sum.
    """
    visible = np.where(mask, scores, -INF).astype(np.float64)
    d = np.where(mask, visible.max(-1, keepdims=True) - visible, 0)
    d = d + scores.max(-1, keepdims=True) - visible.max(-1, keepdims=True)
    lost = np.finfo(scores.dtype).tiny * 2.0**100
    apart = np.abs(neg_inf.astype(np.float64) - renormalized)
    assert (apart <= 24 * (1 + d) * np.spacing(neg_inf) + lost).all()


@pytest.mark.promise("masked softmax")
def test_renormalize_has_the_bits_of_its_steps(isa: str, dtype: type, normal: Normal) -> None:
    """The steps: softmax of all scores, zeros for hidden ones, division by the sum of the rest."""
    scores = 3 * normal(6, 8, dtype=dtype)
    mask = np.tril(np.ones((6, 8), bool))
    rest = cattn.softmax(scores) * mask
    # eight columns: one number in each chain, added in the order of the tree
    s = rest.T
    total = ((s[0] + s[4]) + (s[2] + s[6])) + ((s[1] + s[5]) + (s[3] + s[7]))
    assert_same_bits(cattn.masked_softmax(scores, mask, method="renormalize"), rest / total[:, None])


def test_renormalize_uses_the_first_method_if_the_visible_sum_vanishes(isa: str, dtype: type, normal: Normal) -> None:
    """Such rows, in which a hidden score is far larger than all visible ones, have the bits of "neg_inf"."""
    for masked_score in (2000.0, 1e30, INF, NAN):
        scores = normal(10, 30, dtype=dtype)
        scores[::2, 4] = masked_score
        mask = np.ones((10, 30), bool)
        mask[:, 4] = False
        first, second = (cattn.masked_softmax(scores, mask, method=method) for method in METHODS)
        assert np.isfinite(second).all()
        assert_same_bits(second[::2].copy(), first[::2].copy(), f"rows with {masked_score}")
        methods_apart(np.where(mask, scores, 0), mask, first, second)
    # just on either side of 2**-100 = exp(-69.3)
    for gap in (69, 69.6):
        scores = np.array([[0, -1, gap]], dtype)
        second = cattn.masked_softmax(scores, [True, True, False], method="renormalize")
        np.testing.assert_allclose(second[0], [1 / (1 + np.exp(-1)), 1 / (1 + np.exp(1)), 0], rtol=3e-5)


@pytest.mark.parametrize("method", METHODS)
def test_masked_softmax_of_hidden_rows_is_zero_and_of_visible_nan_is_nan(
    isa: str, dtype: type, normal: Normal, method: str
) -> None:
    for n in (1, 7, 8, 40, 600):
        scores = normal(9, n, dtype=dtype)
        mask = np.ones((9, n), bool)
        mask[0] = False  # nothing visible
        scores[1] = -INF  # only -inf
        scores[2, n // 2] = NAN
        scores[3, n // 2] = INF
        scores[4, n // 2] = -INF
        scores[5], mask[5] = NAN, False  # nothing visible, all scores NaN
        scores[6, 0], mask[6, 0] = NAN, False
        scores[7, 0], mask[7, 0] = INF, False
        weights = cattn.masked_softmax(scores, mask, method=method)
        right = reference.masked_softmax(scores, mask)
        np.testing.assert_allclose(weights, right, rtol=100 * np.finfo(dtype).eps, atol=1e-37)
        assert (weights[[0, 5]] == 0).all()
        assert np.isnan(weights[[1, 2, 3]]).all()
        assert np.isfinite(weights[[6, 7, 8]]).all()
        assert_same_bits(weights[[1, 2, 3]], np.full((3, n), NAN, dtype), "every NaN in a result is the canonical one")
        if n > 1:
            np.testing.assert_allclose(weights[[4, 6, 7, 8]].sum(axis=-1), 1, rtol=1e-5)


# ---- bits ----------------------------------------------------------------------------------------------------------
def poisons(dtype: Any) -> np.ndarray:
    return np.array(
        [NAN, INF, -INF, np.finfo(dtype).max, np.finfo(dtype).min, np.finfo(dtype).smallest_subnormal], dtype
    )


@pytest.mark.promise("masked softmax")
@pytest.mark.parametrize("n", [5, 16, 40, 513, 1100])
def test_hidden_scores_change_no_bit(isa: str, dtype: type, normal: Normal, rng: np.random.Generator, n: int) -> None:
    """With "neg_inf" and where=. "renormalize" reads hidden scores, but their NaN does not reach the result."""
    scores = normal(2, 6, n, dtype=dtype)
    mask = rng.random((6, n)) < 0.5
    offset = n - 4
    options: dict[str, Any] = {"is_causal": True, "query_offset": offset}
    visible = mask & reference.causal_mask(6, n, query_offset=offset)
    right = cattn.masked_softmax(scores, mask, **options)
    for poison in poisons(dtype):
        poisoned = np.where(visible, scores, poison)
        assert_same_bits(cattn.masked_softmax(poisoned, mask, **options), right, str(poison))
        assert_same_bits(cattn.softmax(poisoned, where=visible), right, str(poison))
        second = cattn.masked_softmax(poisoned, mask, method="renormalize", **options)
        np.testing.assert_allclose(second, right, rtol=1e-4 if dtype == np.float32 else 1e-12, atol=1e-7)


@looped("n", COLUMNS)
def test_columns_after_the_last_visible_one_change_no_bit(isa: str, dtype: type, normal: Normal, n: int) -> None:
    """Whether these columns hold scores or do not exist."""
    scores = normal(3, n + 70, dtype=dtype)
    short = cattn.softmax(scores[:, :n])
    mask = np.arange(n + 70) < n
    assert_same_bits(cattn.masked_softmax(scores, mask)[:, :n].copy(), short, "mask")
    assert_same_bits(cattn.softmax(scores, where=mask)[:, :n].copy(), short, "where")
    causal = cattn.masked_softmax(scores, is_causal=True, query_offset=n - 3)
    for i, visible in enumerate((n - 2, n - 1, n)):
        assert not causal[i, max(visible, 0) :].any()
        if visible > 0:
            assert_same_bits(causal[i, :visible].copy(), cattn.softmax(scores[i, :visible]), f"causal, row {i}")


# ---- random calls --------------------------------------------------------------------------------------------------
@given(st.data())
@examples(60)
def test_random_calls_agree_with_the_reference_and_the_yardstick(isa: str, data: st.DataObject) -> None:
    """Any shape and any numbers, including NaN and infinity: values of the reference, bits of the yardstick."""
    dtype = data.draw(st.sampled_from([np.float32, np.float64]))
    shape = data.draw(hnp.array_shapes(max_dims=4, max_side=20))
    width = 32 if dtype == np.float32 else 64
    numbers = st.floats(-100, 100, width=width) | st.sampled_from([0.0, -0.0, INF, -INF, NAN])
    x = data.draw(hnp.arrays(dtype, shape, elements=numbers))
    mask = data.draw(st.none() | hnp.arrays(bool, shape))
    axis = data.draw(st.none() | st.integers(-len(shape), len(shape) - 1))
    result = cattn.softmax(x, axis, where=mask)
    right = reference.softmax(x, axis, where=mask)
    eps = 300 * np.finfo(dtype).eps  # scores differ by up to 200, which adds to the bounds in ULPS
    np.testing.assert_allclose(result, right, rtol=eps, atol=1e-37)
    assert_same_bits(result, yardstick(isa, lambda: cattn.softmax(x, axis, where=mask)))
    for method in METHODS:

        def masked(method: str = method) -> np.ndarray:
            return cattn.masked_softmax(x, mask, method=method)

        assert_same_bits(masked(), yardstick(isa, masked))
        np.testing.assert_allclose(masked(), reference.masked_softmax(x, mask), rtol=eps, atol=2e-8)


# ---- any axis of masked_softmax --------------------------------------------------------------------------------------
FOUR = (2, 3, 37, 5)
MASKED_AXES: list[tuple[tuple[int, ...], Any]] = [
    ((7,), -1),
    ((7,), 0),
    ((7,), None),
    ((7,), (0,)),
    ((30, 40), 0),
    ((30, 40), -2),
    ((30, 40), None),
    ((30, 40), (0, 1)),
    (FOUR, 0),
    (FOUR, 1),
    (FOUR, 2),
    (FOUR, np.int64(-2)),
    (FOUR, np.array(3)),
    (FOUR, (1,)),
    (FOUR, (-1, 1)),
    (FOUR, (0, 2)),
    (FOUR, (3, 0, 1)),
    (FOUR, None),
    ((2, 3, 1100), 1),
    ((3, 0), 0),
    ((0, 3), 0),
    ((2, 0, 3), (0, 1)),
    ((3, 1, 4), 1),
]


def tuple_of(axis: Any, ndim: int) -> tuple[int, ...]:
    axes = range(ndim) if axis is None else axis if isinstance(axis, tuple) else (int(axis),)
    return tuple(sorted(i % ndim for i in axes))


def keys_last(a: np.ndarray, axis: Any) -> np.ndarray:
    """Return a contiguous array whose last axis has the keys of all axes."""
    axes = tuple_of(axis, a.ndim)
    others = [i for i in range(a.ndim) if i not in axes]
    sizes = [a.shape[i] for i in others]
    return np.ascontiguousarray(a.transpose(*others, *axes)).reshape(*sizes, a.size // max(int(np.prod(sizes)), 1))


def options_for(ndim: int, axis: Any) -> list[dict[str, Any]]:
    """Return combinations of options; those with positions need an axis for the queries."""
    options: list[dict[str, Any]] = [{}, {"scale": -2.5}]
    queries = ndim - len(tuple_of(axis, ndim))
    if queries:
        options += [{"is_causal": "upper_left"}, {"is_causal": "lower_right", "scale": 0.5}]
        options += [{"is_causal": True, "query_offset": 3}, {"is_causal": True, "query_offset": -2}]
    return options


@pytest.mark.parametrize("method", METHODS)
@looped("shape, axis", MASKED_AXES, ids=str)
def test_any_axes_agree_with_the_reference_and_have_the_bits_of_the_last_axis(
    isa: str, dtype: type, normal: Normal, rng: np.random.Generator, shape: tuple[int, ...], axis: Any, method: str
) -> None:
    scores, mask = 3 * normal(*shape, dtype=dtype), rng.random(shape) < 0.7
    for keywords in options_for(len(shape), axis):
        for shown in (None, mask):
            call: dict[str, Any] = {**keywords, "method": method}
            weights = cattn.masked_softmax(scores, shown, axis=axis, **call)
            assert weights.dtype == dtype
            right = reference.masked_softmax(scores, shown, axis=axis, **call)
            np.testing.assert_allclose(weights, right, rtol=100 * np.finfo(dtype).eps, atol=1e-37)
            moved_mask = None if shown is None else keys_last(shown, axis)
            last = cattn.masked_softmax(keys_last(scores, axis), moved_mask, **call)
            assert_same_bits(keys_last(weights, axis), last)
            out = np.full(shape, NAN, dtype)
            assert cattn.masked_softmax(scores, shown, axis=axis, out=out, **call) is out
            assert_same_bits(out, weights)


def test_queries_are_on_the_last_of_the_other_axes(dtype: type, normal: Normal) -> None:
    """Their offsets, one for each batch entry, belong to the axes before them."""
    scores, offsets = normal(3, 20, 5, dtype=dtype), np.array([0, 4, 11])
    for axis, order in ((1, (0, 2, 1)), (2, (0, 1, 2))):
        weights = cattn.masked_softmax(scores, axis=axis, is_causal=True, query_offset=offsets)
        visible = np.arange(scores.shape[axis]) <= np.arange(scores.shape[3 - axis])[:, None] + offsets[:, None, None]
        assert ((weights.transpose(order) > 0) == visible).all()
    first = cattn.masked_softmax(scores, axis=0, is_causal=True, query_offset=np.arange(20))
    assert_same_bits(
        first,
        cattn.masked_softmax(np.moveaxis(scores, 0, -1), is_causal=True, query_offset=np.arange(20)).transpose(2, 0, 1),
    )
    with pytest.raises(ValueError, match=r"query_offset has shape \(3,\), which does not broadcast .*\(20,\)"):
        cattn.masked_softmax(scores, axis=0, is_causal=True, query_offset=offsets)


def test_masks_broadcast_in_the_layout_of_the_scores(dtype: type, normal: Normal, rng: np.random.Generator) -> None:
    scores = normal(2, 3, 20, dtype=dtype)
    for shape in ((20,), (3, 1), (2, 1, 20), (1, 1, 1), ()):
        mask = np.asarray(rng.random(shape) < 0.5)  # a single number is taken for a flag
        for axis in (-1, 1, 0, (0, 2), None):
            assert_same_bits(
                cattn.masked_softmax(scores, mask, axis=axis),
                cattn.masked_softmax(scores, np.broadcast_to(mask, scores.shape).copy(), axis=axis),
            )


def test_an_axis_that_leaves_no_queries_cannot_be_causal() -> None:
    for scores, axis in ((np.ones(3), 0), (np.ones((2, 3)), None), (np.ones((2, 3)), (0, 1))):
        with pytest.raises(ValueError, match=r"scores must have at least 2 dimensions .* with is_causal, got 1"):
            cattn.masked_softmax(scores, axis=axis, is_causal="upper_left")
    with pytest.raises(ValueError, match="scores must have at least 1 dimension"):
        cattn.masked_softmax(3.0, axis=None)
    with pytest.raises(ValueError, match=r"mask has shape \(5,\), which does not broadcast to the scores' shape"):
        cattn.masked_softmax(np.ones((2, 3)), np.ones(5, bool), axis=(0, 1))


def test_an_ambiguous_alignment_warns_along_any_axis() -> None:
    square, wide = np.ones((3, 4, 4)), np.ones((3, 4, 5))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cattn.masked_softmax(square, axis=1, is_causal=True)
    for axis in (1, 0):
        with pytest.warns(cattn.CausalAlignmentWarning) as warned:
            cattn.masked_softmax(wide, axis=axis, is_causal=True)
        assert warned[0].filename == __file__


# ---- gradients -------------------------------------------------------------------------------------------------------
def test_softmax_backward_refuses_wrong_shapes() -> None:
    with pytest.raises(ValueError, match=r"grad_out has shape \(2, 3\), weights has \(3, 2\)"):
        cattn.softmax_backward(np.ones((2, 3)), np.ones((3, 2)))
    with pytest.raises(ValueError, match="at least 1 dimension"):
        cattn.softmax_backward(1.0, 1.0)
    assert cattn.softmax_backward(np.ones((0, 3)), np.ones((0, 3))).shape == (0, 3)


@pytest.mark.parametrize("shape", [(5, 9), (4, 5, 6), (2, 3, 4, 5), (2, 1, 3, 2, 4)], ids=str)
@pytest.mark.parametrize("half", HALVES, ids=str)
def test_softmax_backward_of_halves_goes_along_any_axis(
    half: np.dtype, shape: tuple[int, ...], rng: np.random.Generator
) -> None:
    """In any number of dimensions: the bits of the float32 call with the axis moved to the end, rounded once."""
    for axis in range(-len(shape), len(shape)):
        grad_out = rng.standard_normal(shape).astype(half)
        weights = cattn.softmax(rng.standard_normal(shape), axis).astype(half)
        last = [np.ascontiguousarray(np.moveaxis(a.astype(np.float32), axis, -1)) for a in (grad_out, weights)]
        expected = np.ascontiguousarray(np.moveaxis(cattn.softmax_backward(*last, scale=0.7), -1, axis)).astype(half)
        assert_same_bits(cattn.softmax_backward(grad_out, weights, axis, scale=0.7), expected, f"axis {axis}")
        out = np.empty_like(grad_out)
        assert cattn.softmax_backward(grad_out, weights, axis, scale=0.7, out=out) is out
        assert_same_bits(out, expected, f"axis {axis}, out")
        reference = cattn.reference.softmax_backward(*last, scale=0.7)
        np.testing.assert_allclose(
            np.moveaxis(expected, axis, -1).astype(np.float64), reference, rtol=2**-7, atol=2**-7
        )


@pytest.mark.parametrize("method", METHODS)
def test_hidden_weights_have_no_gradient(method: Any, dtype: Any, isa: str, rng: np.random.Generator) -> None:
    scores, grad_out = (rng.standard_normal((3, 7, 1300)).astype(dtype) for _ in range(2))
    mask = rng.random((7, 1300)) < 0.5
    mask[2] = False
    weights = cattn.masked_softmax(scores, mask, scale=0.7, method=method)
    grad = cattn.softmax_backward(grad_out, weights, scale=0.7)
    poisoned = np.where(mask, grad_out, np.asarray(NAN, dtype))
    assert_same_bits(cattn.softmax_backward(poisoned, weights, scale=0.7), grad)
    assert (grad[:, ~mask] == 0).all()
