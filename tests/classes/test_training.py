"""The backward pass of layers: gradients against PyTorch, what a layer keeps of the forward pass, errors."""

from __future__ import annotations

import copy
import gc
import pickle
import tracemalloc
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from test_nn import ALL_OURS, CAUSAL, MODELS, numpy_rng

import cattn
from support import assert_same_bits

torch = pytest.importorskip("torch")

Array = np.ndarray
Normal = Callable[..., np.ndarray]
EXACT: dict[str, Any] = {"rtol": 1e-9, "atol": 1e-13}


class TorchV1(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name in ("W_query", "W_key", "W_value"):
            setattr(self, name, torch.nn.Parameter(torch.rand(6, 5)))

    def forward(self, x: Any) -> Any:
        q, k, v = x @ self.W_query, x @ self.W_key, x @ self.W_value
        return torch.softmax(q @ k.transpose(-2, -1) / k.shape[-1] ** 0.5, dim=-1) @ v


PAIRS = MODELS | {
    "v1": (ALL_OURS["v1"], TorchV1),
    "linear": (lambda **k: cattn.Linear(6, 5, **k), lambda: torch.nn.Linear(6, 5)),
    "linear, no bias": (lambda **k: cattn.Linear(6, 5, False, **k), lambda: torch.nn.Linear(6, 5, bias=False)),
    "wrapper, bias": (
        lambda **k: cattn.MultiHeadAttentionWrapper(6, 5, 64, 0.3, 3, True, **k),
        lambda: MODELS["wrapper"][1]().__class__(3, 6, 5, dropout=0.3, bias=True),
    ),
}


def pair(name: str, **keywords: Any) -> tuple[Any, Any]:
    """Return our module and PyTorch's with the same weights, in float64 by default."""
    torch.manual_seed(0)
    theirs = PAIRS[name][1]().double()
    ours = PAIRS[name][0](**{"dtype": np.float64} | keywords)
    ours.load_state_dict({key: value for key, value in theirs.state_dict().items() if not key.endswith("mask")})
    return ours, theirs


def loss_weights(shape: tuple[int, ...]) -> Array:
    return np.random.default_rng(9).standard_normal(shape)


def backward_both(ours: Any, theirs: Any, x: Array, seed: int = 7) -> tuple[Array, Array]:
    """Run the forward and backward pass in both; return both gradients of x."""
    cattn.manual_seed(seed)
    torch.manual_seed(seed)
    y = ours(x)
    tensor = torch.from_numpy(x).requires_grad_()
    result = theirs(tensor if x.ndim == 3 else tensor[None]).reshape(y.shape)
    np.testing.assert_allclose(y, result.detach().numpy(), **EXACT)
    grad_out = loss_weights(y.shape)
    result.backward(torch.from_numpy(grad_out))
    return ours.backward(grad_out), tensor.grad.numpy()


def assert_grads(ours: Any, theirs: Any) -> None:
    expected = {name: parameter.grad.numpy() for name, parameter in theirs.named_parameters()}
    assert ours.grads.keys() == expected.keys() == dict(ours.named_parameters()).keys()
    for name, grad in ours.grads.items():
        np.testing.assert_allclose(grad, expected[name], **EXACT, err_msg=name)


# ---- values ----------------------------------------------------------------------------------------------------------
@pytest.mark.promise("training")
@pytest.mark.parametrize("shape", [(1, 6), (9, 6), (3, 17, 6), (2, 64, 6)], ids=str)
@pytest.mark.parametrize("name", PAIRS)
def test_gradients_agree_with_pytorch_with_the_same_dropout(name: str, shape: tuple[int, ...], normal: Normal) -> None:
    ours, theirs = pair(name)
    x = normal(*shape).astype(np.float64)
    for seed in (7, 8):  # gradients accumulate
        grad_x, expected = backward_both(ours, theirs, x, seed)
        np.testing.assert_allclose(grad_x, expected, **EXACT)
        assert_grads(ours, theirs)
    ours.zero_grad()
    theirs.zero_grad()
    assert ours.grads == {}
    backward_both(ours, theirs, x)
    assert_grads(ours, theirs)


def set_dropout(ours: Any, p: float, rng: Any = None) -> None:
    for module in [ours, *getattr(ours, "heads", [])]:
        if isinstance(getattr(module, "dropout", None), cattn.Dropout):
            module.dropout.p, module.dropout.rng = p, rng


@pytest.mark.parametrize("p", [0.0, 1.0])
@pytest.mark.parametrize("name", CAUSAL)
def test_gradients_agree_with_pytorch_for_p_of_0_and_1(name: str, p: float, normal: Normal) -> None:
    ours, theirs = pair(name)
    set_dropout(ours, p)
    for module in theirs.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = p
    grad_x, expected = backward_both(ours, theirs, normal(2, 5, 6).astype(np.float64))
    np.testing.assert_allclose(grad_x, expected, **EXACT)
    assert_grads(ours, theirs)


def differences(f: Callable[[], float], array: Array, step: float = 1e-5) -> Array:
    """Central differences of f by each element of array."""
    result = np.empty_like(array)
    for i in np.ndindex(array.shape):
        value = array[i]
        array[i] = value + step
        above = f()
        array[i] = value - step
        result[i] = (above - f()) / (2 * step)
        array[i] = value
    return result


@pytest.mark.parametrize("kind", [numpy_rng, cattn.TorchGenerator], ids=["numpy", "torch"])
@pytest.mark.parametrize("name", ["causal", "wrapper", "groups"])
def test_gradients_agree_with_finite_differences_under_dropout(name: str, kind: Any, normal: Normal) -> None:
    ours, _ = pair(name)
    x = normal(2, 4, 6).astype(np.float64)

    def forward() -> Array:
        set_dropout(ours, 0.4, kind(3))  # the same numbers in each call; here each head gets its own generator
        result: Array = ours(x)
        return result

    weights = loss_weights(forward().shape)
    grad_x = ours.backward(weights)
    grads = ours.grads

    def loss() -> float:
        return float((forward() * weights).sum())

    np.testing.assert_allclose(grad_x, differences(loss, x), rtol=1e-6, atol=1e-8)
    for key, parameter in ours.named_parameters():
        np.testing.assert_allclose(grads[key], differences(loss, parameter), rtol=1e-6, atol=1e-8, err_msg=key)


@pytest.mark.parametrize("name", PAIRS)
def test_float32_gradients_agree_with_float64(name: str, normal: Normal) -> None:
    single, _ = pair(name, dtype=np.float32)
    double, _ = pair(name)
    double.load_state_dict(single.state_dict())
    x = normal(2, 33, 6)
    grads = []
    for module, array in ((single, x), (double, x.astype(np.float64))):
        cattn.manual_seed(1)
        y = module(array)
        grads.append({"x": module.backward(loss_weights(y.shape))} | module.grads)
    largest = max(np.abs(grad).max() for grad in grads[1].values())  # not of each: key biases have 0, plus noise
    for key, grad in grads[0].items():
        assert grad.dtype == np.float32
        np.testing.assert_allclose(grad, grads[1][key], rtol=1e-4, atol=1e-5 * largest, err_msg=key)


def test_the_bias_gradient_of_many_rows_is_accurate(normal: Normal) -> None:
    layer = cattn.Linear(1, 3, rng=numpy_rng())
    grad_out = 1 + normal(100_000, 3)
    layer(normal(100_000, 1))
    layer.backward(grad_out)
    np.testing.assert_allclose(layer.grads["bias"], grad_out.sum(axis=0, dtype=np.float64), rtol=1e-7)


@pytest.mark.parametrize("p", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("kind", [numpy_rng, cattn.TorchGenerator], ids=["numpy", "torch"])
def test_the_backward_pass_of_dropout_repeats_its_mask(kind: Any, p: float, dtype: Any) -> None:
    layer = cattn.Dropout(p, rng=kind(3))
    for _ in range(2):
        x = np.ones((5, 7), dtype)
        y = layer(x)
        for _ in range(2):  # backward does not advance the generator
            assert_same_bits(layer.backward(np.ones((5, 7))), y)
    assert layer.grads == {}


# ---- parameters and gradients ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", PAIRS)
def test_an_optimiser_may_change_parameters_in_place(name: str, normal: Normal) -> None:
    ours, _ = pair(name)
    x = normal(2, 5, 6).astype(np.float64)
    before = {key: value.copy() for key, value in ours.state_dict().items()}
    losses = []
    parameters = dict(ours.named_parameters())
    set_dropout(ours, 0.0)
    for _ in range(3):
        y = ours(x)
        losses.append(float((y**2).sum()))
        ours.zero_grad()
        ours.backward(2 * y)
        for key, grad in ours.grads.items():
            assert grad.shape == parameters[key].shape
            parameters[key] -= 1e-3 * grad
    assert losses[0] > losses[1] > losses[2]
    assert any((before[key] != value).any() for key, value in ours.state_dict().items())


def tie(module: Any, how: str) -> None:
    """Make queries and keys share their projection."""
    if how == "weights":
        module.W_key.weight = module.W_query.weight
    else:
        module.W_key = module.W_query


TIES = [("heads", "layers"), ("heads", "weights"), ("v1", "arrays")]


@pytest.mark.parametrize(("name", "how"), TIES)
def test_tied_weights_are_one_parameter(name: str, how: str, normal: Normal) -> None:
    """As in PyTorch: it has the first of its names, its gradient is the sum, and an optimiser steps it once."""
    ours, theirs = pair(name)
    set_dropout(ours, 0.0)
    for module in theirs.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    tie(ours, how)
    tie(theirs, how)
    names = [key for key, _ in theirs.named_parameters()]
    assert sorted(dict(ours.named_parameters())) == sorted(names)
    assert ours.state_dict().keys() == {key for key in theirs.state_dict() if not key.endswith("mask")}
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.01, momentum=0.9)
    parameters = dict(ours.named_parameters())
    momenta = {key: np.zeros_like(value) for key, value in parameters.items()}
    for _ in range(3):
        ours.zero_grad()
        optimizer.zero_grad()
        for _ in range(2):  # gradients accumulate, also after .grads was read
            grad_x, expected = backward_both(ours, theirs, normal(2, 5, 6).astype(np.float64))
            np.testing.assert_allclose(grad_x, expected, **EXACT)
            assert_grads(ours, theirs)
        optimizer.step()
        for key, grad in ours.grads.items():
            momenta[key] = 0.9 * momenta[key] + grad
            parameters[key] -= 0.01 * momenta[key]
    for key, value in theirs.state_dict().items():
        if not key.endswith("mask"):
            np.testing.assert_allclose(ours.state_dict()[key], value.numpy(), **EXACT, err_msg=key)


@pytest.mark.parametrize(("name", "how"), TIES)
def test_tied_weights_stay_tied_after_loading_and_copying(name: str, how: str) -> None:
    ours, theirs = pair(name)
    tie(ours, how)
    tie(theirs, how)
    once = list(dict(ours.named_parameters()))
    state = {key: np.full(value.shape, i, np.float64) for i, (key, value) in enumerate(ours.state_dict().items())}
    assert ours.load_state_dict(state) == ([], [])
    theirs.load_state_dict({key: torch.from_numpy(value) for key, value in state.items()}, strict=False)  # its mask
    for module in (ours, copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert list(dict(module.named_parameters())) == once
        for key, value in module.state_dict().items():
            assert_same_bits(value, theirs.state_dict()[key].numpy())


class Computed(cattn.Linear):
    """A layer whose weight property returns a new array each time."""

    @property
    def weight(self) -> Any:
        return np.ones((5, 6), np.float32)

    @weight.setter
    def weight(self, value: Any) -> None:
        pass


def test_weights_made_anew_on_each_access_are_not_tied() -> None:
    ours = cattn.CausalAttention(6, 5, 64, 0.0)
    ours.W_query, ours.W_key = Computed(6, 5, False), Computed(6, 5, False)
    assert list(dict(ours.named_parameters())) == ["W_query.weight", "W_key.weight", "W_value.weight"]


def test_a_parameter_may_be_a_list() -> None:
    layer = cattn.Linear(2, 1, bias=False)
    layer.weight = [[1.0, 2.0]]  # type: ignore[assignment]
    dict(layer.named_parameters())["weight"] += 1
    assert_same_bits(layer([1.0, 1.0]), np.array([5.0]))


def test_zero_grad_does_not_change_gradients_taken_out_before() -> None:
    layer = cattn.Linear(2, 1)
    layer([1.0, 2.0])
    layer.backward([1.0])
    taken = layer.grads
    layer.zero_grad()
    layer.backward([3.0])
    assert_same_bits(taken["weight"], np.array([[1, 2]], np.float32))
    assert_same_bits(layer.grads["weight"], np.array([[3, 6]], np.float32))


def test_parameters_are_counted_as_in_pytorch() -> None:
    layer = cattn.MultiHeadAttention(6, 4, 8, 0.0, 2, rng=1)
    layer.W_key.weight = layer.W_query.weight  # one parameter
    arrays = list(layer.parameters())
    assert sum(p.size for p in layer.parameters()) == 24 * 2 + 4 * 4 + 4
    assert all(a is b for a, (_, b) in zip(arrays, layer.named_parameters(), strict=True))
    for parameter in layer.parameters():
        parameter *= 0
    assert not layer.out_proj.weight.any()


def test_gradients_have_the_dtype_of_the_parameters(normal: Normal) -> None:
    ours = cattn.MultiHeadAttention(6, 8, 64, 0.0, 4)
    y = ours(normal(5, 6).astype(np.float64))
    assert y.dtype == ours.backward(y).dtype == np.float64
    assert {grad.dtype for grad in ours.grads.values()} == {np.dtype(np.float32)}


# ---- what a layer keeps of the forward pass -------------------------------------------------------------------------
@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("single", [False, True])
def test_training_and_evaluation_give_the_same_bits_without_dropout(name: str, single: bool, normal: Normal) -> None:
    ours = PAIRS[name][0](rng=numpy_rng())
    set_dropout(ours, 0.0)
    x = normal(6) if single and name.startswith("linear") else normal(*(() if single else (3,)), 40, 6)
    training = ours(x)
    assert_same_bits(ours.eval()(x), training)


@pytest.mark.parametrize("name", CAUSAL)
def test_returning_weights_changes_no_gradient(name: str, normal: Normal) -> None:
    ours, _ = pair(name)
    x = normal(2, 9, 6).astype(np.float64)
    grads = []
    for return_weights in (False, True):
        cattn.manual_seed(1)
        y = ours(x, return_weights=return_weights)
        grads.append(ours.backward(loss_weights((y[0] if return_weights else y).shape)))
    assert_same_bits(*grads)


@pytest.mark.parametrize("name", PAIRS)
def test_later_changes_of_inputs_and_outputs_change_no_gradient(name: str, normal: Normal) -> None:
    ours, _ = pair(name)
    x = normal(2, 5, 6).astype(np.float64)
    cattn.manual_seed(1)
    y = ours(x)
    weights = loss_weights(y.shape)
    right = ours.backward(weights)
    x += 1  # as in x += layer(x)
    y += 1
    assert_same_bits(ours.backward(weights), right)
    assert ours.grads.keys() == dict(ours.named_parameters()).keys()


def test_a_call_of_a_sublayer_in_between_changes_no_gradient(normal: Normal) -> None:
    ours, _ = pair("heads")
    x = normal(2, 5, 6).astype(np.float64)
    cattn.manual_seed(1)
    y = ours(x)
    right = ours.backward(y)
    ours.W_query(x + 1)
    assert_same_bits(ours.backward(y), right)


class Scaled(cattn.Linear):
    """A user's layer."""

    def __call__(self, x: Any) -> Any:
        return 2 * super().__call__(x)

    def backward(self, grad_out: Any) -> Any:
        return super().backward(2 * np.asarray(grad_out))


def test_layers_of_users_have_gradients(normal: Normal) -> None:
    ours, theirs = pair("heads")
    for name, layer in (("W_query", ours.W_query), ("out_proj", ours.out_proj)):
        other = Scaled(layer.d_in, layer.d_out, layer.bias is not None, dtype=np.float64)
        other.weight, other.bias = layer.weight / 2, None if layer.bias is None else layer.bias / 2
        setattr(ours, name, other)
    grad_x, expected = backward_both(ours, theirs, normal(2, 5, 6).astype(np.float64))
    np.testing.assert_allclose(grad_x, expected, **EXACT)
    np.testing.assert_allclose(ours.grads["W_query.weight"], 2 * theirs.W_query.weight.grad.numpy(), **EXACT)


def test_no_matrix_of_weights_is_kept(normal: Normal) -> None:
    ours = cattn.MultiHeadAttention(16, 16, 2048, 0.1, 2, rng=numpy_rng())
    x = normal(2048, 16)
    y = ours(x)
    tracemalloc.start()
    try:
        for _ in range(2):
            y = ours(x)
        kept, _ = tracemalloc.get_traced_memory()
        grad_x = ours.backward(y)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert grad_x.shape == x.shape
    assert kept < 8 * x.nbytes
    assert peak < 24 * x.nbytes  # a boolean matrix would take 32 * x.nbytes


@pytest.mark.parametrize("name", ALL_OURS)
def test_evaluation_keeps_nothing_of_the_forward_pass(name: str, normal: Normal) -> None:
    ours = ALL_OURS[name](rng=numpy_rng())
    x = normal(5, 6)
    ours(x)
    alive = weakref.ref(ours._kept.attended.q.base if ours._kept.attended.q.base is not None else ours._kept.attended.q)
    ours.eval()
    gc.collect()
    assert alive() is None
    assert ours._kept is None
    y = ours(x)
    with pytest.raises(RuntimeError, match=r"call train\(\) and the module first"):
        ours.backward(y)
    ours.train()
    with pytest.raises(RuntimeError, match=r"call train\(\)"):
        ours.backward(y)


@pytest.mark.parametrize("name", ALL_OURS)
def test_copies_keep_gradients_but_not_the_forward_pass(name: str, normal: Normal) -> None:
    ours = ALL_OURS[name](rng=numpy_rng())
    y = ours(normal(5, 6))
    ours.backward(y)
    for other in (copy.deepcopy(ours), copy.copy(ours), pickle.loads(pickle.dumps(ours))):
        assert other.training
        for key, grad in ours.grads.items():
            assert_same_bits(other.grads[key], grad)
        with pytest.raises(RuntimeError, match="none"):
            other.backward(y)
    ours.backward(y)


# ---- errors ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "make", [*ALL_OURS.values(), lambda **k: cattn.Linear(6, 5, **k), lambda **k: cattn.Dropout(**k)]
)
def test_a_wrong_backward_is_refused(make: Any, normal: Normal) -> None:
    ours = make(rng=numpy_rng())
    with pytest.raises(RuntimeError, match=r"call train\(\) and the module first"):
        ours.backward(np.ones((5, 6)))
    y = ours(normal(5, 6))
    for shape in ((), (1, *y.shape), (4, y.shape[1]), (5, 1)):
        with pytest.raises(ValueError, match=r"grad_out has shape .*, wanted \(5, "):
            ours.backward(np.ones(shape))
    with pytest.raises(TypeError, match="grad_out"):
        ours.backward(y * 1j)
    assert ours.grads == {}
    with pytest.raises((ValueError, TypeError)):
        ours(np.ones((5, 7)) * 1j)
    with pytest.raises(RuntimeError, match="none"):
        ours.backward(y)


@pytest.mark.parametrize("name", CAUSAL)
def test_backward_is_refused_after_a_call_with_a_cache(name: str, normal: Normal) -> None:
    ours = ALL_OURS[name](rng=numpy_rng())
    cache = cattn.KVCache((), ours._kv_heads, 10, ours._head_dim)
    y = ours(normal(5, 6), cache=cache)
    with pytest.raises(RuntimeError, match="does not go through a cache"):
        ours.backward(y)
    ours.eval()(normal(5, 6), cache=cache)
    with pytest.raises(RuntimeError, match=r"call train\(\)"):
        ours.backward(y)
