"""Weights that a user assigns to a layer: other dtypes, wrong shapes; and backward passes without tokens."""

from typing import Any

import numpy as np
import pytest

import cattn

MODULES: dict[str, Any] = {
    "Linear": lambda: cattn.Linear(3, 4, rng=1),
    "SelfAttention_v1": lambda: cattn.SelfAttention_v1(3, 4, rng=1),
    "SelfAttention_v2": lambda: cattn.SelfAttention_v2(3, 4, rng=1),
    "CausalAttention": lambda: cattn.CausalAttention(3, 4, 8, 0.1, rng=1),
    "MultiHeadAttentionWrapper": lambda: cattn.MultiHeadAttentionWrapper(3, 4, 8, 0.1, 2, rng=1),
    "MultiHeadAttention": lambda: cattn.MultiHeadAttention(3, 4, 8, 0.1, 2, rng=1),
}


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("shape", [(0, 5, 3), (2, 0, 3), (0, 3)])
def test_backward_without_tokens_gives_zero_gradients(name: str, shape: tuple[int, ...]) -> None:
    module = MODULES[name]()
    x = np.zeros(shape, np.float32)
    assert module.backward(module(x)).shape == shape
    assert all((gradient == 0).all() for gradient in module.grads.values())
    assert module.grads.keys() == dict(module.named_parameters()).keys()


def test_integer_weights_have_gradients_in_float64() -> None:
    x, grad = np.array([[1.0, 2.0]]), np.array([[0.5, 0.25]])
    layer, bare = cattn.Linear(2, 2, rng=1), cattn.SelfAttention_v1(2, 2, rng=1)
    layer.weight, layer.bias = np.eye(2, dtype=int), np.array([1, 2])
    np.testing.assert_array_equal(layer(x), [[2.0, 4.0]])
    for _ in range(2):  # gradients accumulate
        layer.backward(grad)
    np.testing.assert_array_equal(layer.grads["weight"], 2 * grad.T @ x)
    np.testing.assert_array_equal(layer.grads["bias"], 2 * grad[0])
    bare.W_value = np.eye(2, dtype=int)
    bare(x)
    bare.backward(grad)
    np.testing.assert_array_equal(bare.grads["W_value"], x.T @ grad)
    assert {gradient.dtype for gradient in layer.grads.values()} == {np.dtype(float)}


@pytest.mark.promise("parameters")
@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        (np.ones((3, 4)), ValueError, r"has shape \(3, 4\), wanted \(4, 3\)"),
        (np.float32(2), ValueError, r"has shape \(\), wanted \(4, 3\)"),
        (None, TypeError, "must be an array of real numbers, got NoneType"),
        ("text", TypeError, "has dtype <U4"),
    ],
)
def test_a_weight_of_the_wrong_kind_is_named(wrong: Any, error: type[Exception], message: str) -> None:
    for module in (cattn.Linear(3, 4, rng=1), cattn.MultiHeadAttention(3, 4, 8, 0.1, 2, rng=1)):
        layer = module if isinstance(module, cattn.Linear) else module.W_key
        layer.weight = wrong
        with pytest.raises(error, match=f"Linear.weight {message}"):
            module(np.ones((2, 3), np.float32))


def test_a_bias_or_a_bare_matrix_of_the_wrong_shape_is_named() -> None:
    layer, bare = cattn.Linear(3, 4, rng=1), cattn.SelfAttention_v1(3, 4, rng=1)
    layer.bias = np.float32(2)  # type: ignore[assignment]
    with pytest.raises(ValueError, match=r"Linear.bias has shape \(\), wanted \(4,\)"):
        layer(np.ones((2, 3)))
    bare.W_key = np.ones((4, 3))
    with pytest.raises(ValueError, match=r"SelfAttention_v1.W_key has shape \(4, 3\), wanted \(3, 4\)"):
        bare(np.ones((2, 3)))


def test_a_parameter_of_pytorch_is_refused_by_name() -> None:
    torch = pytest.importorskip("torch")
    layer = cattn.Linear(3, 4, rng=1)
    layer.weight = torch.nn.Parameter(torch.zeros(4, 3))
    with pytest.raises(TypeError, match=r"Linear\.weight is a tensor that requires grad"):
        layer(np.ones((2, 3)))
