"""Python code that runs within a call may change the shapes of the call's arrays; the call stays inside their memory.

A number's __float__, an array's __array__ or a hook for warnings may set the shape of an array that the call has
checked already. The result is then that of the arrays as they were, or the call raises ValueError.
"""

from __future__ import annotations

import subprocess
import sys
import textwrap
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import cattn
from support import assert_same_bits

F = np.float32
T = 512


class ShapeChanger:
    """A number or an array that sets the shape of another array when it is converted."""

    def __init__(self, value: Any, array: np.ndarray, *shape: int) -> None:
        self.value, self.array, self.shape = value, array, shape

    def set_shape(self, *_: object, **__: object) -> Any:
        """Set the shape."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            self.array.shape = self.shape
        return self.value

    __float__ = __index__ = __array__ = set_shape


@pytest.fixture
def square(rng: np.random.Generator) -> np.ndarray:
    """With the shape (T * T // 2, 2) and the old strides, its rows would lie far past its end."""
    return rng.standard_normal((T, T), dtype=F)


@pytest.fixture
def attended(rng: np.random.Generator) -> Iterator[np.ndarray]:
    """Query, key and value."""
    return iter(rng.standard_normal((3, T, 8), dtype=F))


@pytest.mark.promise("shapes that change")
def test_dropout_of_an_array_that_changes_its_shape(square: np.ndarray) -> None:
    right, mask = cattn.dropout(square, 0.5, rng=5, return_mask=True)
    for call in (
        lambda: cattn.dropout(square, 0.5, rng=ShapeChanger(5, square, T * T // 2, 2), return_mask=True),
        lambda: cattn.dropout(square, ShapeChanger(0.5, square, T * T), rng=5, return_mask=True),
    ):
        square.shape = T, T
        result = call()
        assert_same_bits(result[0], right)
        assert_same_bits(result[1], mask)
    square.shape = T, T
    out = np.empty_like(square)
    assert cattn.dropout(square, 0.5, rng=ShapeChanger(5, out, T * T // 2, 2), out=out) is out
    assert_same_bits(out.reshape(T, T), right)


@pytest.mark.promise("shapes that change")
def test_softmax_of_an_array_that_changes_its_shape(square: np.ndarray) -> None:
    right = cattn.softmax(square, scale=0.5)
    assert_same_bits(cattn.softmax(square, scale=ShapeChanger(0.5, square, T, 2, T // 2)), right)
    square.shape = T, T
    assert_same_bits(cattn.masked_softmax(square, scale=ShapeChanger(0.5, square, T * T)), right)
    square.shape = T, T
    with pytest.raises(ValueError, match="out has shape"):
        cattn.softmax(square, scale=ShapeChanger(0.5, square, T * T), out=square)


@pytest.mark.promise("shapes that change")
def test_softmax_backward_of_an_array_that_changes_its_shape(square: np.ndarray) -> None:
    weights = cattn.softmax(square)
    right = cattn.softmax_backward(square, weights, scale=0.5)
    for array in (square, weights):
        result = cattn.softmax_backward(square, weights, scale=ShapeChanger(0.5, array, T * T // 2, 2))
        array.shape = T, T
        assert_same_bits(result, right)


@pytest.mark.promise("shapes that change")
def test_rope_and_rms_norm_of_an_array_that_changes_its_shape(square: np.ndarray) -> None:
    right = cattn.rope(square, theta=500.0)
    assert_same_bits(cattn.rope(square, theta=ShapeChanger(500.0, square, T * T // 2, 2)), right)
    square.shape = T, T
    positions = ShapeChanger(np.arange(T), square, T * T // 2, 2)
    assert_same_bits(cattn.rope(square, positions, theta=500.0), right)
    square.shape = T, T
    with pytest.raises(ValueError, match="out has shape"):
        cattn.rope(square, theta=ShapeChanger(500.0, square, T * T), out=square)
    square.shape = T, T
    with pytest.raises(ValueError, match=r"^weight must have .*, shape \(2,\), got shape \(512,\)"):
        cattn.rms_norm(square, ShapeChanger(np.ones(T, F), square, T * T // 2, 2))
    square.shape = T, T
    other = square.copy()
    with pytest.raises(ValueError, match="grad_out has shape"):
        cattn._cattn.rms_norm_backward(square, other, ShapeChanger(np.ones(T, F), square, T * T // 2, 2), 1e-6)


@pytest.mark.promise("shapes that change")
def test_linear_of_arrays_that_change_their_shape(square: np.ndarray) -> None:
    other = square.copy()
    with pytest.raises(ValueError, match=r"weight must have as many columns as x, 2, got"):
        cattn.functional.linear(square, ShapeChanger(other, square, T * T // 2, 2))
    square.shape = T, T
    with pytest.raises(ValueError, match=r"weight must have as many columns as x"):
        cattn.functional.linear(other, square, ShapeChanger(np.ones(T, F), square, T * T // 2, 2))


@pytest.mark.promise("shapes that change")
def test_layer_norm_and_activations_of_an_array_that_changes_its_shape(square: np.ndarray) -> None:
    functional, other = cattn.functional, square.copy()
    with pytest.raises(ValueError, match=r"^weight must have .*, shape \(2,\), got shape \(512,\)"):
        functional.layer_norm(square, np.ones(T, F), ShapeChanger(np.ones(T, F), square, T * T // 2, 2))
    square.shape = T, T
    with pytest.raises(ValueError, match="grad_out has shape"):
        functional.gelu_backward(square, ShapeChanger(other, square, T * T // 2, 2))
    square.shape = T, T
    right = functional.silu(other)
    assert_same_bits(functional.silu(square, out=square), right)


@pytest.mark.promise("shapes that change")
@pytest.mark.parametrize("name", ["attn_mask", "bias"])
def test_attention_of_arrays_that_change_their_shapes(
    attended: Iterator[np.ndarray], square: np.ndarray, name: str
) -> None:
    query, key, value = attended
    options = {name: square, "dropout_p": 0.5}
    right = cattn.scaled_dot_product_attention(query, key, value, **options, rng=5)
    for array, shape in ((query, (4, T * 2)), (key, (T * 4, 2)), (square, (T * T // 2, 2))):
        before = array.shape
        options["dropout_p"] = ShapeChanger(0.5, array, *shape)
        out = np.empty_like(right)
        rng = ShapeChanger(5, out, T * 4, 2)
        assert cattn.scaled_dot_product_attention(query, key, value, **options, rng=rng, out=out) is out
        array.shape = before
        assert_same_bits(out.reshape(right.shape), right)


def test_an_array_that_loses_its_axes_is_refused() -> None:
    query, key, value = np.ones((3, 1, 1), F)
    with pytest.raises(ValueError, match="query must have at least 2 dimensions"):
        cattn.scaled_dot_product_attention(query, ShapeChanger(key, query), value)


@pytest.mark.promise("shapes that change")
def test_a_mask_that_a_warning_hook_changes(
    attended: Iterator[np.ndarray], square: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    query, key, value = attended
    square[:] = square > 0
    right = cattn.scaled_dot_product_attention(query, key, value, bias=square)
    monkeypatch.setattr(warnings, "showwarning", ShapeChanger(None, square, 2, T * T // 2).set_shape)
    with warnings.catch_warnings():
        warnings.simplefilter("always", UserWarning)
        result = cattn.scaled_dot_product_attention(query, key, value, attn_mask=square)
    assert square.shape == (2, T * T // 2)
    assert_same_bits(result, right)


@pytest.mark.promise("shapes that change")
def test_attention_backward_of_a_bias_that_changes_its_shape(
    attended: Iterator[np.ndarray], square: np.ndarray
) -> None:
    query, key, value = attended
    result = cattn.scaled_dot_product_attention(query, key, value, bias=square, return_lse=True)
    given = query, key, value, result.out, result.lse
    with pytest.raises(ValueError, match="cannot reshape"):  # the gradient has the old shape, bias the new one
        cattn.attention_backward(ShapeChanger(value, square, 2, T * T // 2), *given, bias=square)


def test_unregistered_dtypes_are_refused() -> None:
    """Unregistered dtypes have type number -1, and so has bfloat16 in a process that has not used it yet."""
    source = """
        import numpy as np
        import pytest
        import cattn

        x = np.zeros((8, 8)).view(np._core._multiarray_umath._get_sfloat_dtype()(1.0))
        for call in (
            lambda: cattn.softmax(x),
            lambda: cattn.softmax(x, out=x),
            lambda: cattn.softmax(np.zeros((8, 8)), out=x),
            lambda: cattn.masked_softmax(x),
            lambda: cattn.dropout(x),
            lambda: cattn.scaled_dot_product_attention(x, x, x),
            lambda: cattn.explain(x, x, x),
        ):
            with pytest.raises(TypeError, match="dtype"):
                call()
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(source)], check=True)
