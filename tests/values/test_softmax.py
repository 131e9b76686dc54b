"""softmax and masked_softmax: values, errors in ULP, both masking methods, axes, strides, bits, hidden scores."""

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.special
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import cattn
from cattn import reference
from support import ACCURACY_DTYPES, INF, NAN, assert_same_bits, in_contract, looped, table

Normal = Callable[..., np.ndarray]
METHODS = ["neg_inf", "renormalize"]
# Numbers of columns around vectors of 4 to 16 lanes, 8 chains of a sum, and runs of 512 columns.
COLUMNS = [1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 23, 24, 25, 31, 32, 33, 63, 64, 65, 511, 512, 513, 519, 520, 1024, 1100]
LONG = 140_003  # kernels look at a stop every 65,536 columns


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


def test_softmax_agrees_with_scipy(isa: str, dtype: type, normal: Normal) -> None:
    x = 5 * normal(3, 40, 50, dtype=dtype)
    for axis in (-1, 0, (0, 2), None):
        assert_close(cattn.softmax(x, axis), scipy.special.softmax(x.astype(np.float64), axis), dtype)


@looped("n", [*COLUMNS, LONG])
def test_every_number_of_columns_agrees_with_the_reference(
    isa: str, dtype: type, normal: Normal, rng: np.random.Generator, n: int
) -> None:
    """With every method, over rows and over columns. Nothing beside the output is written."""
    x = 3 * normal(4, n, dtype=dtype)
    mask = rng.random((4, n)) < 0.5
    memory = np.full(4 * n + 2, 7, dtype)
    out = memory[1:-1].reshape(4, n)
    assert_close(cattn.softmax(x, out=out), reference.softmax(x), dtype)
    for method in METHODS:
        assert_close(cattn.masked_softmax(x, mask, method=method, out=out), reference.masked_softmax(x, mask), dtype)
    assert (memory[[0, -1]] == 7).all()
    assert_close(cattn.softmax(x.T, axis=0), reference.softmax(x).T, dtype)


def test_where_broadcasts_to_x(isa: str, dtype: type, normal: Normal, rng: np.random.Generator) -> None:
    x = normal(2, 3, 20, dtype=dtype)
    for shape in ((20,), (3, 1), (2, 1, 20), (1, 1, 1), ()):
        where = rng.random(shape) < 0.5
        for axis in (-1, 1, (0, 2), None):
            right = reference.softmax(x, axis, where=np.broadcast_to(where, x.shape))
            assert_close(cattn.softmax(x, axis, where=where), right, dtype)


def test_softmax_has_known_values(isa: str) -> None:
    np.testing.assert_allclose(cattn.softmax([0, np.log(3)]), [0.25, 0.75], rtol=1e-15)
    np.testing.assert_allclose(cattn.softmax([1000.0, 1000.0, -1000.0]), [0.5, 0.5, 0], rtol=0)
    assert cattn.softmax(3.0) == 1
    assert cattn.softmax([[-5e300]]) == 1
    assert cattn.softmax([1, 1]).tolist() == [0.5, 0.5]
    assert cattn.softmax([True, False]).dtype == np.float64


def test_a_shift_of_whole_numbers_changes_no_bit(isa: str, dtype: type, rng: np.random.Generator) -> None:
    """Their differences to the maximum stay exact."""
    x = rng.integers(-20, 20, (5, 100)).astype(dtype)
    right = cattn.softmax(x)
    for shift in (-1e6, 1, 2.0**20):
        assert_same_bits(cattn.softmax(x + dtype(shift)), right)


# ---- accuracy ------------------------------------------------------------------------------------------------------
def ulps(actual: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Return the distance in units in the last place of the right value, 0 where that is nearly subnormal."""
    dtype = actual.dtype
    normal = right >= 4 * np.finfo(dtype).tiny
    apart = np.abs(actual - right) / np.spacing(right.astype(dtype))
    return np.where(normal, apart, 0).astype(np.float64)


# Numbers of columns and the bound of their error in ULP. Measured on all kernel tables: 0, 1.9, 3.1, 4.9, 12.2, 16.7.
# Two columns: half an ULP each of exp, the sum and the division, relative to numbers up to twice as large. With more
# columns the error of the sum grows: 8 chains of at most 64 additions, then one addition for each run of 512 columns.
ULPS = {1: 0, 2: 2.5, 8: 4, 64: 6, 513: 16, 20_000: 16, 200_000: 24}


@pytest.mark.parametrize("n", ULPS)
@pytest.mark.parametrize("kind", ACCURACY_DTYPES)
def test_the_error_in_ulp_stays_below_its_bound(isa: str, kind: type, rng: np.random.Generator, n: int) -> None:
    """If x - max is exact, the bound holds as it is. Otherwise its rounding adds one ULP for each unit of max - x."""
    wide = np.float64 if kind == np.float32 else np.longdouble
    largest = 0.0
    for spread in (0.1, 1, 5, 20, 80):
        x = spread * rng.standard_normal((max(1, 3000 // n), n))
        for exact in (True, False):
            row = (np.round(256 * x) / 256 if exact else x).astype(kind)
            shifted = row.astype(wide) - row.max(axis=-1, keepdims=True)
            e = np.exp(shifted)
            error = ulps(cattn.softmax(row), e / e.sum(axis=-1, keepdims=True))
            assert (error <= ULPS[n] * (1 if exact else 1 - shifted)).all()
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


@pytest.mark.parametrize("shape", [(20,), (5, 1), (1, 20), (3, 5, 20), (2, 1, 5, 20), (2, 3, 1, 1), ()], ids=str)
def test_masks_broadcast_to_the_scores(
    isa: str, dtype: type, normal: Normal, rng: np.random.Generator, shape: tuple[int, ...]
) -> None:
    scores = normal(2, 3, 5, 20, dtype=dtype)
    mask = np.asarray(rng.random(shape) < 0.5)
    for method in METHODS:
        weights = cattn.masked_softmax(scores, mask, method=method)
        assert_close(weights, reference.masked_softmax(scores, mask), dtype)


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
@pytest.mark.parametrize("n", [2, 8, 64, 500, 1100])
def test_both_masking_methods_agree(isa: str, dtype: type, normal: Normal, rng: np.random.Generator, n: int) -> None:
    differ = False
    for spread, share in itertools.product((0.1, 1, 5, 30), (0.1, 0.5, 0.9)):
        scores = spread * normal(50, n, dtype=dtype)
        mask = rng.random((50, n)) < share
        mask[:, 0] = True
        results = [cattn.masked_softmax(scores, mask, method=method) for method in METHODS]
        methods_apart(scores, mask, *results)
        differ |= bool((results[0] != results[1]).any())
    assert differ, "two methods cannot have the same bits everywhere"


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


def test_rows_with_visible_nan_or_infinity_are_nan(isa: str, dtype: type, normal: Normal) -> None:
    x = normal(6, 20, dtype=dtype)
    right = cattn.softmax(x)
    x[1], x[3, 4], x[5, 0] = -INF, NAN, INF
    result = cattn.softmax(x)
    assert_same_bits(result[::2].copy(), right[::2].copy())
    assert np.isnan(result[1::2]).all()
    hidden = cattn.softmax(x, where=np.arange(20) % 4 != 0)
    assert np.isfinite(hidden[[0, 2, 4, 3, 5]]).all(), "columns 0 and 4 are hidden"
    assert np.isnan(hidden[1, 1])
    assert (hidden[:, ::4] == 0).all()


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


@pytest.mark.promise("softmax and dropout")
@pytest.mark.parametrize("n", [*COLUMNS, LONG])
def test_every_table_gives_the_same_bits(
    isa: str, dtype: type, normal: Normal, rng: np.random.Generator, n: int
) -> None:
    scores = 20 * normal(5, n, dtype=dtype)
    scores[4, :: max(1, n // 3)] = np.finfo(dtype).min
    mask = rng.random((5, n)) < 0.7
    calls: list[Callable[[], np.ndarray]] = [
        lambda: cattn.softmax(scores, scale=0.3),
        lambda: cattn.softmax(scores, where=mask),
        lambda: cattn.softmax(scores, axis=0),
        lambda: cattn.masked_softmax(scores, mask, is_causal="upper_left"),
        lambda: cattn.masked_softmax(scores, mask, method="renormalize"),
        lambda: cattn.masked_softmax(scores, is_causal="lower_right", method="renormalize"),
    ]
    for i, call in enumerate(calls):
        assert_same_bits(call(), yardstick(isa, call), f"call {i}")


@pytest.mark.promise("softmax and dropout")
def test_any_number_of_threads_gives_the_same_bits(isa: str, dtype: type, threads: int, normal: Normal) -> None:
    """Enough rows for many tasks. A row alone has the bits it has among others."""
    x = normal(700, 300, dtype=dtype)
    for call in (
        lambda: cattn.softmax(x),
        lambda: cattn.softmax(x, axis=0),
        lambda: cattn.masked_softmax(x, is_causal=True, query_offset=-200),
        lambda: cattn.masked_softmax(x, x > 0, method="renormalize"),
    ):
        assert_same_bits(call(), yardstick(isa, call))
    whole = cattn.softmax(x)
    for i in (0, 1, 109, 110, 699):
        assert_same_bits(cattn.softmax(x[i]), whole[i])


def views(a: np.ndarray) -> dict[str, np.ndarray]:
    """Return the same numbers in other memory layouts, by name."""
    rows, columns = a.shape

    def around() -> np.ndarray:
        return np.full((3 * rows + 1, 2 * columns + 1), 99).astype(a.dtype)

    made = {
        "apart": around()[1::3, 1::2],
        "backwards": around()[:rows, :columns][::-1, ::-1],
        "off by one": around()[1 : 1 + rows, 1 : 1 + columns],
        "Fortran": np.empty_like(a, order="F"),
    }
    for view in made.values():
        view[...] = a
    return made


@pytest.mark.parametrize("rows", [6, 16, 37])
def test_any_strides_give_the_same_bits(
    isa: str, dtype: type, normal: Normal, rng: np.random.Generator, rows: int
) -> None:
    """Any layout of input, mask and output. The kernels compute 16 rows together if they are adjacent in memory."""
    x, mask = normal(rows, 77, dtype=dtype), rng.random((rows, 77)) < 0.5
    x[::3, 4] = 2000  # hidden, so that "renormalize" has to compute every third row twice
    mask[:, 4] = False
    calls: dict[str, Callable[..., np.ndarray]] = {
        "where": lambda x, mask, **out: cattn.softmax(x, where=mask, **out),
        "neg_inf": lambda x, mask, **out: cattn.masked_softmax(x, mask, is_causal="lower_right", **out),
        "renormalize": lambda x, mask, **out: cattn.masked_softmax(x, mask, method="renormalize", **out),
        "causal, renormalize": lambda x, mask, **out: cattn.masked_softmax(
            x, mask, is_causal=True, query_offset=30, method="renormalize", **out
        ),
    }
    for name, call in calls.items():
        right = call(x, mask)
        for (layout, view), mask_view in zip(views(x).items(), views(mask).values(), strict=True):
            assert_same_bits(np.ascontiguousarray(call(view, mask_view)), right, f"{name}, {layout}")
            out = views(np.zeros_like(x))[layout]
            assert call(x, mask, out=out) is out
            assert_same_bits(out.copy(), right, f"{name}, out {layout}")
            assert call(view, mask_view, out=out) is out
            assert_same_bits(out.copy(), right, f"{name}, both {layout}")
            if name == "where":
                along = cattn.softmax(view.T, axis=0, where=mask_view.T).T
                assert_same_bits(np.ascontiguousarray(along), right, f"axis 0, {layout}")


def test_broadcast_views_give_the_bits_of_copies(isa: str, dtype: type, normal: Normal) -> None:
    row = normal(1, 77, dtype=dtype)
    assert_same_bits(cattn.softmax(np.broadcast_to(row, (6, 77))), np.repeat(cattn.softmax(row), 6, axis=0))
    equal = cattn.softmax(np.broadcast_to(row[:, :1], (6, 64)))
    assert (equal == 1 / 64).all()


@pytest.mark.parametrize("method", METHODS)
def test_masked_softmax_may_work_in_place(isa: str, dtype: type, normal: Normal, method: str) -> None:
    """Also if a row has to be computed twice, and if out overlaps the input."""
    scores = normal(8, 40, dtype=dtype)
    mask = np.arange(40) % 5 != 2
    scores[::2, 2] = 2000  # hidden, and larger than all others
    scores[5, 7] = NAN
    right = cattn.masked_softmax(scores, mask, method=method)
    for x in (scores.copy(), np.asfortranarray(scores), np.repeat(scores, 2, axis=1)[:, ::2]):
        assert cattn.masked_softmax(x, mask, method=method, out=x) is x
        assert_same_bits(x.copy(), right, "in place")
    # overlapping, but not the same memory
    memory = np.zeros((9, 40), dtype)
    memory[:8] = scores
    cattn.masked_softmax(memory[:8], mask, method=method, out=memory[1:])
    assert_same_bits(memory[1:].copy(), right, "shifted by a row")


def test_softmax_may_work_in_place(isa: str, dtype: type, normal: Normal) -> None:
    for axis in (-1, 0, (0, 1), None):
        x = normal(8, 40, dtype=dtype)
        right = cattn.softmax(x, axis)
        assert cattn.softmax(x, axis, out=x) is x
        assert_same_bits(x, right)
        x = normal(40, 40, dtype=dtype)
        right = cattn.softmax(x, axis)
        cattn.softmax(x, axis, out=x.T)  # every element lands where another one is
        assert_same_bits(x.T.copy(), right)


# ---- random calls --------------------------------------------------------------------------------------------------
@given(st.data())
@settings(max_examples=60)
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


@pytest.mark.parametrize("step", [1, 2, 3, -1])
def test_columns_that_are_not_adjacent_give_the_same_bits(step: int, dtype: Any, rng: np.random.Generator) -> None:
    """The kernels copy adjacent columns together, which must not happen with other strides."""
    x = rng.standard_normal((5, 40)).astype(dtype)[:, ::step]
    assert_same_bits(cattn.softmax(x, axis=0), cattn.softmax(x.T.copy()).T)
    assert_same_bits(cattn.softmax(x[:, 0]), cattn.softmax(x[:, 0].copy()))
