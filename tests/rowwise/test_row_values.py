"""Functions of rows of numbers: values, gradients, PyTorch, empty arrays, other dtypes, special numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from row_table import BY_NAME, TABLE, WIDTH, Arrays, Row, as_list, each_row

from support import HALVES, INF, NAN, assert_same_bits, looped

# Numbers of columns around vectors of 4 to 16 lanes, 8 chains of a sum, and runs of 512 columns.
COLUMNS = [1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 23, 24, 25, 31, 32, 33, 63, 64, 65, 511, 512, 513, 519, 520, 1024, 1100]


def check(row: Row, arrays: Arrays, dtype: Any) -> None:
    """Compare with the reference, within the bound of the row."""
    right = as_list(row.right(**arrays))
    for actual, expected in zip(row.results(arrays), right, strict=True):
        assert actual.dtype == dtype
        assert actual.shape == expected.shape
        apart = np.abs(actual - expected)
        assert (apart <= row.bound(arrays, expected, np.finfo(dtype).eps)).all(), f"{apart.max()}"


@each_row()
@looped("n", COLUMNS)
def test_results_agree_with_the_reference(isa: str, dtype: type, row: Row, n: int, rng: np.random.Generator) -> None:
    check(row, row.arrays(rng, (2, 5, n), dtype), dtype)


@each_row()
def test_empty_arrays_keep_their_shape(row: Row, rng: np.random.Generator) -> None:
    for shape in ((0, 4), (3, 0), (0, 0), (2, 0, 4), *([(0,)] if row.alone else [])):
        arrays = row.arrays(rng, shape)
        results = row.results(arrays)
        if row.of and not row.has_out:  # of each array of the forward function
            assert [a.shape for a in results] == [a.shape for a in BY_NAME[row.of].arrays(rng, shape).values()]
            assert row.of == "linear" or not any(gradient.any() for gradient in results)
        else:
            assert results[0].shape == (shape if row.name != "linear" else (*shape[:-1], WIDTH))
            assert np.isfinite(results[0]).all()


@each_row(keep=lambda row: row.alone)
def test_one_row_and_one_number_are_taken(row: Row, rng: np.random.Generator) -> None:
    for shape in ((1,), (7,)):
        check(row, row.arrays(rng, shape), np.float64)


@each_row()
def test_numbers_are_promoted_as_numpy_does(row: Row, rng: np.random.Generator) -> None:
    arrays = row.arrays(rng, (4, 6))
    floats = [name for name, a in arrays.items() if a.dtype != bool]
    integers = arrays | {name: rng.integers(-3, 4, arrays[name].shape) for name in floats}
    lists = {name: a.tolist() for name, a in integers.items()}
    wide = {name: a if a.dtype == bool else a.astype(np.float64) for name, a in integers.items()}
    for actual, right in zip(row.results(lists), row.results(wide), strict=True):
        assert_same_bits(actual, right)
    if len(floats) < 2:
        return
    for half in HALVES:
        mixed = arrays | {name: arrays[name].astype(np.float32) for name in floats[1:]}
        mixed[floats[0]] = arrays[floats[0]].astype(half)
        wide = mixed | {floats[0]: mixed[floats[0]].astype(np.float32)}
        for actual, right in zip(row.results(mixed), row.results(wide), strict=True):
            assert_same_bits(actual, right)


@each_row()
def test_special_numbers_go_as_in_the_reference(isa: str, dtype: type, row: Row, rng: np.random.Generator) -> None:
    for special in (NAN, INF, -INF, 0.0, -0.0):
        arrays = row.arrays(rng, (4, 9), dtype)
        for name in row.moving():
            arrays[name][1, 3] = arrays[name][2] = special
        with np.errstate(all="ignore"):
            right = as_list(row.right(**arrays))
        for actual, expected in zip(row.results(arrays), right, strict=True):
            np.testing.assert_array_equal(np.isfinite(actual), np.isfinite(expected))
            np.testing.assert_array_equal(np.isnan(actual), np.isnan(expected))
            finite = np.isfinite(expected)
            arrays = {name: np.nan_to_num(a, posinf=0, neginf=0) for name, a in arrays.items()}
            bound = row.bound(arrays, np.where(finite, expected, 0), np.finfo(dtype).eps)
            assert (np.abs(np.subtract(actual, expected, where=finite, out=np.zeros_like(expected))) <= bound).all()


# ---- gradients -------------------------------------------------------------------------------------------------------
def gradients(row: Row, arrays: Arrays, result: np.ndarray, grad: np.ndarray) -> list[np.ndarray]:
    """Return the gradients of the arrays of the function whose gradient the row has."""
    given = {"grad_out": grad, "weights": result} | arrays
    return row.results({name: given[name] for name in row.takes})


@pytest.mark.promise("gradients")
@each_row(keep=lambda row: bool(row.of))
def test_gradients_agree_with_finite_differences(row: Row, rng: np.random.Generator) -> None:
    forward, h = BY_NAME[row.of], 1e-5
    arrays, directions = forward.arrays(rng, (4, 9)), forward.arrays(rng, (4, 9))
    (result,) = forward.results(arrays)
    grad = rng.standard_normal(result.shape)
    ends = [forward.results({name: a + s * h * directions[name] for name, a in arrays.items()})[0] for s in (-1, 1)]
    found = gradients(row, arrays, result, grad)
    assert len(found) == len(arrays)
    slope = sum((g * directions[name]).sum() for name, g in zip(arrays, found, strict=True))
    np.testing.assert_allclose(slope, ((ends[1] - ends[0]) / (2 * h) * grad).sum(), rtol=1e-6)


@each_row(keep=lambda row: row.torch is not None)
def test_torch_computes_the_same(row: Row, rng: np.random.Generator) -> None:
    torch = pytest.importorskip("torch")
    assert row.torch is not None
    arrays = row.arrays(rng, (3, 4, 33))
    tensors = [torch.tensor(a, requires_grad=True) for a in arrays.values()]
    y = row.torch(torch)(*tensors)
    grad = rng.standard_normal(y.shape)
    y.backward(torch.tensor(grad))
    (result,) = row.results(arrays)
    np.testing.assert_allclose(result, y.detach().numpy(), rtol=1e-12, atol=1e-14)
    (backward,) = (other for other in TABLE if other.of == row.name)
    for actual, tensor in zip(gradients(backward, arrays, result, grad), tensors, strict=True):
        np.testing.assert_allclose(actual, tensor.grad.numpy(), rtol=1e-12, atol=1e-13)
