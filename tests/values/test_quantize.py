"""quantize and dequantize: scales, error bounds, the way back and forth, errors; scores of quantized keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cattn
from support import HALVES, INF, NAN, assert_same_bits

Normal = Callable[..., np.ndarray]

FLOAT8 = np.dtype(ml_dtypes.float8_e4m3fn)
DTYPES = [np.dtype(np.int8), FLOAT8]
LARGEST = {DTYPES[0]: 127, FLOAT8: 448}
LEAST, MOST = 2.0**-100, 2.0**100  # of the scales that attention takes

both = pytest.mark.parametrize("to", DTYPES, ids=str)
axes = pytest.mark.parametrize("axis", [-1, -2, 0, (1, -1), None], ids=str)


def error_bound(x: np.ndarray, scale: np.ndarray, to: np.dtype) -> np.ndarray:
    """Return how far dequantized numbers may be from x in float64.

    Beside the bound of the docstring: x / scale and the product are rounded in float32, each by 2**-24 of a number of
    at most (1 + 2**-22) times the largest, and the scale itself is rounded; 2**-22 of the largest covers all.
    """
    x, scale = np.abs(x.astype(np.float64)), scale.astype(np.float64)
    ideal = scale / 2 if to == np.int8 else np.maximum(x / 16, scale / 1024)
    return ideal + scale * LARGEST[to] * 2.0**-22


def check(x: np.ndarray, axis: Any, to: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    values, scale = cattn.quantize(x, axis, to)
    assert values.dtype == to
    assert scale.dtype == np.float32
    assert values.shape == x.shape
    assert scale.shape == np.max(np.ones(x.shape), axis=axis, keepdims=True, initial=0).shape
    assert ((scale >= LEAST) & (scale <= MOST)).all()
    back = cattn.dequantize(values, scale)
    assert_same_bits(back, values.astype(np.float32) * scale)
    assert np.isfinite(back).all()
    assert (np.abs(values.astype(np.float32)) <= LARGEST[to]).all()
    error = np.abs(back.astype(np.float64) - x.astype(np.float64))
    assert (error <= error_bound(x, scale, to)).all()
    again, same_scale = cattn.quantize(back, axis, to)
    assert_same_bits(same_scale, scale)
    np.testing.assert_array_equal(again.astype(np.float32), values.astype(np.float32))
    return values, scale


def keys_with_outliers(normal: Normal, dtype: Any = np.float32) -> np.ndarray:
    """Return keys (H, T, D) of which two channels are 20 and 50 times larger, as in real models."""
    keys = normal(3, 40, 16, dtype=np.float64)
    keys[..., 3] *= 50
    keys[..., 11] = keys[..., 11] * 20 - 40
    return keys.astype(dtype)


# ---- the definition --------------------------------------------------------------------------------------------------
def test_int8_by_hand() -> None:
    values, scale = cattn.quantize([[127.0, 0.5, 1.5, -2.5, -127.0], [0.0, 0.0, 0.0, 0.0, 0.0], [254.0, 3, 2, 5.5, 1]])
    np.testing.assert_array_equal(scale, np.array([[1], [1], [2]], np.float32))
    np.testing.assert_array_equal(values, [[127, 0, 2, -2, -127], [0] * 5, [127, 2, 1, 3, 0]])  # ties to even


def test_float8_by_hand() -> None:
    values, scale = cattn.quantize(np.array([448, 17, 19, -1 / 512, 1 / 1024], np.float32), dtype="float8_e4m3fn")
    assert scale.tolist() == [1]
    np.testing.assert_array_equal(values.astype(np.float32), [448, 16, 20, -1 / 512, 0])  # ties to even


@both
@axes
@pytest.mark.parametrize("dtype", [np.float32, np.float64, *HALVES], ids=str)
def test_keys_with_outlier_channels(axis: Any, to: np.dtype, dtype: Any, normal: Normal) -> None:
    values, scale = check(keys_with_outliers(normal, dtype), axis, to)
    largest = np.abs(values.astype(np.float32)).max(axis=axis, keepdims=True)
    assert (largest == LARGEST[to]).all()
    assert scale.size < values.size


def test_a_scale_for_each_channel_makes_int8_more_accurate_where_channels_differ(normal: Normal) -> None:
    keys = keys_with_outliers(normal)
    errors = [np.abs(cattn.dequantize(*cattn.quantize(keys, axis)) - keys)[..., 0].mean() for axis in (-1, -2)]
    assert errors[1] < errors[0] / 5


@both
@given(data=st.data())
def test_bounds_hold_for_all_numbers(data: st.DataObject, to: np.dtype) -> None:
    width = data.draw(st.sampled_from([16, 32, 64]))
    dtype = np.dtype(f"f{width // 8}")
    shape = data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=3).map(tuple))
    limit = min(LARGEST[to] * MOST, float(np.finfo(dtype).max))
    finite = st.floats(-limit, limit, width=width)  # type: ignore[arg-type]
    scales = st.sampled_from([1.0, LEAST, LEAST / 1024, 1e-20, 2.0**-140, 2.0**-149])
    size = int(np.prod(shape))
    numbers = data.draw(st.lists(finite, min_size=size, max_size=size))
    x = (np.array(numbers, np.float64) * data.draw(scales)).astype(dtype).reshape(shape)
    check(x, data.draw(st.integers(-len(shape), len(shape) - 1)), to)


@both
@pytest.mark.parametrize("shift", range(8))
def test_quantizing_again_gives_the_same(shift: int, to: np.dtype) -> None:
    """All mantissas of a largest number, in eight parts: its scale comes back though 127 and 448 are not exact."""
    largest = np.arange(2**23 + shift, 2**24, 8).astype(np.float32)[:, None]
    values, scale = cattn.quantize(largest, -1, to)
    assert (values.astype(np.float32) == LARGEST[to]).all()
    assert_same_bits(cattn.quantize(cattn.dequantize(values, scale), -1, to).scale, scale)


@both
def test_the_ends_of_the_range(to: np.dtype) -> None:
    largest = LARGEST[to] * MOST
    ends = [largest, -largest, np.nextafter(np.float32(largest), 0), LEAST, LEAST / 2, LEAST / 1000, LEAST / 1025]
    ends += [127 * LEAST, 126.4 * LEAST, 448 * LEAST, -300 * LEAST, 2.0**-126, 2.0**-149, 0.0]
    x = np.array(ends, np.float32)
    check(x[:, None], -1, to)
    check(np.stack([x, x / 3], axis=-1), -1, to)
    check(x, None, to)
    for one in ends:
        pair = cattn.quantize([[one]], dtype=to)
        assert isinstance(cattn.Quantized(*pair), cattn.Quantized)  # the scale is one that attention takes
    with pytest.raises(ValueError, match=r"x must be finite and at most .*e\+32 to be quantized, got"):
        cattn.quantize(np.nextafter(np.float32(largest), np.float32(INF)), dtype=to)


@both
def test_zero_slices_have_scale_1(to: np.dtype) -> None:
    x = np.array([[0.0, -0.0], [3, 1], [2.0**-149, -(2.0**-149)]], np.float32)
    values, scale = check(x, -1, to)
    assert scale[[0, 2]].tolist() == [[1], [1]]
    assert not values[[0, 2]].astype(np.float32).any()


def test_float64_is_divided_in_float64() -> None:
    """A number just above a tie goes up, though float32 would round it to the tie."""
    assert cattn.quantize(np.array([127.0, 2.5, 2.5 * (1 + 1e-12)])).values.tolist() == [127, 2, 3]


@both
@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 3), (2, 0, 4)])
def test_empty_arrays(shape: tuple[int, ...], to: np.dtype) -> None:
    check(np.empty(shape, np.float32), -1, to)
    check(np.empty(shape, np.float32), 0, to)
    check(np.empty(shape), None, to)


@both
def test_a_single_number(to: np.dtype) -> None:
    values, scale = cattn.quantize(2.0, dtype=to)
    assert values.shape == scale.shape == ()
    assert_same_bits(cattn.dequantize(values, scale), np.array(2, np.float32))


@both
def test_views_and_other_containers(to: np.dtype, normal: Normal) -> None:
    x = keys_with_outliers(normal)
    right = cattn.quantize(x, -1, to)
    views = {
        "transposed": x.swapaxes(0, 1).copy().swapaxes(0, 1),
        "strided": np.repeat(x, 2, -1)[..., ::2],
        "reversed": x[:, ::-1].copy()[:, ::-1],
        "swapped bytes": x.astype(">f4"),
        "read-only": np.frombuffer(x.tobytes(), np.float32).reshape(x.shape),
        "list": x.astype(np.float64).tolist(),
    }
    for name, view in views.items():
        for found, wanted in zip(cattn.quantize(view, -1, to), right, strict=True):
            if name != "list":
                assert_same_bits(found, wanted, name)
            np.testing.assert_array_equal(found.shape, wanted.shape)
    one = x[:1]
    for found, wanted in zip(cattn.quantize(np.broadcast_to(one, x.shape), -1, to),
                             cattn.quantize(np.repeat(one, 3, 0), -1, to), strict=True):  # fmt: skip
        assert_same_bits(found, wanted)


def test_tensors(normal: Normal) -> None:
    torch = pytest.importorskip("torch")
    x = keys_with_outliers(normal)
    for to in DTYPES:
        values, scale = cattn.quantize(torch.from_numpy(x), -1, to)
        assert_same_bits(values, cattn.quantize(x, -1, to).values)
        foreign = torch.from_numpy(values.view(np.int8).copy())
        foreign = foreign.view(torch.float8_e4m3fn) if to == FLOAT8 else foreign
        back = cattn.dequantize(foreign, torch.from_numpy(scale.copy()))
        assert_same_bits(back, cattn.dequantize(values, scale))
    assert_same_bits(
        cattn.quantize(torch.from_numpy(x).bfloat16()).values, cattn.quantize(x.astype(ml_dtypes.bfloat16)).values
    )


@both
def test_the_arguments_are_unchanged(to: np.dtype, normal: Normal) -> None:
    x = keys_with_outliers(normal)
    before = x.copy()
    values, scale = cattn.quantize(x, -2, to)
    kept = values.copy(), scale.copy()
    cattn.dequantize(values, scale)
    for now, then in zip((x, values, scale), (before, *kept), strict=True):
        assert_same_bits(now, then)


# ---- scores ----------------------------------------------------------------------------------------------------------
@both
@pytest.mark.parametrize("axis", [-1, -2])
def test_scores_are_within_the_bound_of_the_docstring(axis: int, to: np.dtype, normal: Normal) -> None:
    key, query = keys_with_outliers(normal, np.float64), normal(3, 7, 16, dtype=np.float64)
    values, scale = cattn.quantize(key, axis, to)
    back = cattn.dequantize(values, scale).astype(np.float64)
    error = np.abs(query @ (back - key).swapaxes(-1, -2))
    largest = np.broadcast_to(scale, key.shape).max(axis=-1).astype(np.float64)
    bound = np.abs(query).sum(-1, keepdims=True) * largest[:, None] / 2
    if to == FLOAT8:
        bound = np.abs(query) @ np.maximum(np.abs(key) / 16, scale / 1024).swapaxes(-1, -2)
    assert (error <= bound * (1 + 2.0**-13)).all()  # the rounding of error_bound(), 448 * 2**-22 of a scale
    assert (error > bound / 1000).any()


# ---- errors ----------------------------------------------------------------------------------------------------------
X = np.ones((2, 3), np.float32)


def having(value: float, dtype: Any = np.float32) -> np.ndarray:
    x = np.ones((2, 3, 4), dtype)
    x[1, 0, 2] = value
    return x


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: cattn.quantize(having(NAN)), ValueError, r"x must be finite.*, got nan at \(1, 0, 2\)"),
        (lambda: cattn.quantize(having(INF)), ValueError, r"got inf at \(1, 0, 2\)"),
        (lambda: cattn.quantize(having(-INF, np.float16), -2), ValueError, r"got -inf at \(1, 0, 2\)"),
        (lambda: cattn.quantize(having(1e39, np.float64)), ValueError, r"at most 1.61e\+32 .*got 1e\+39 at"),
        (lambda: cattn.quantize(NAN), ValueError, "got nan$"),
        (lambda: cattn.quantize(X, 2), ValueError, "axis 2 is out of bounds for x with 2 dimensions"),
        (lambda: cattn.quantize(X, (0, 0)), ValueError, "each once"),
        (lambda: cattn.quantize(X, 1.0), TypeError, "axis must be an int"),  # type: ignore[arg-type]
        (lambda: cattn.quantize(X, dtype="int3"), TypeError, "dtype must be int8 or float8_e4m3fn, got 'int3'"),
        (lambda: cattn.quantize(X, dtype=np.uint8), TypeError, "dtype must be int8 or float8_e4m3fn, got uint8"),
        (lambda: cattn.quantize(X, dtype=ml_dtypes.float8_e5m2), TypeError, "got float8_e5m2"),
        (lambda: cattn.quantize(X, dtype=None), TypeError, "got None"),
        (lambda: cattn.quantize(X + 1j), TypeError, "x has dtype complex64"),
        (lambda: cattn.quantize(X.astype(FLOAT8)), TypeError, r"x has dtype float8_e4m3fn.*x.astype\(np.float32\)"),
        (lambda: cattn.quantize(np.ma.masked_array(X, X > 0)), TypeError, "x is a masked array"),
        (lambda: cattn.dequantize(X, 1.0), TypeError, "x has dtype float32, wanted int8 or float8_e4m3fn "),
        (lambda: cattn.dequantize(X.astype(np.int16), 1.0), TypeError, "x has dtype int16"),
        (lambda: cattn.dequantize(X.astype(np.int8), 0.0), ValueError, "scale must be positive.*, got 0.0 at"),
        (lambda: cattn.dequantize(X.astype(np.int8), [[1], [-2.0]]), ValueError, "got -2.0"),
        (lambda: cattn.dequantize(X.astype(np.int8), NAN), ValueError, "got nan"),
        (lambda: cattn.dequantize(X.astype(np.int8), 1e39), ValueError, "got inf"),
        (lambda: cattn.dequantize(X.astype(np.int8), np.ones(2)), ValueError,
         r"scale has shape \(2,\), which does not broadcast to the shape of x \(2, 3\)"),
        (lambda: cattn.dequantize(X.astype(np.int8), np.ones((4, 2, 3))), ValueError, "does not broadcast"),
        (lambda: cattn.dequantize(X.astype(np.int8), 1j), TypeError, "scale has dtype complex128"),
    ],
)  # fmt: skip
def test_errors_name_the_argument(call: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


def test_they_are_imported_at_their_first_use() -> None:
    assert {"quantize", "dequantize"} <= set(cattn.__all__) & set(dir(cattn))
    assert cattn.quantize.__module__ == "cattn"
