"""The chapter's classes as PyTorch modules: the numbers and state dicts of the NumPy classes, trained by autograd."""

from typing import Any

import numpy as np
import pytest

import cattn

torch = pytest.importorskip("torch")

from cattn.integrations.torch import nn  # noqa: E402

CLASSES: dict[str, tuple[str, tuple[Any, ...], dict[str, Any]]] = {
    "SelfAttention_v1": ("SelfAttention_v1", (6, 4), {}),
    "SelfAttention_v2": ("SelfAttention_v2", (6, 4), {"qkv_bias": True}),
    "CausalAttention": ("CausalAttention", (6, 4, 8, 0.0), {}),
    "wrapper": ("MultiHeadAttentionWrapper", (6, 4, 8, 0.0, 3), {"qkv_bias": True}),
    "a window": ("CausalAttention", (6, 4, 8, 0.0), {"window_size": (1, 0)}),
    "windows of heads": ("MultiHeadAttentionWrapper", (6, 4, 8, 0.0, 3), {"window_size": (2, 0)}),
    "a window, no bias": ("MultiHeadAttention", (6, 8, 8, 0.0, 4), {"window_size": (1, 0), "out_bias": False}),
    "many heads": ("MultiHeadAttention", (6, 8, 8, 0.0, 4), {}),
    "grouped heads": ("MultiHeadAttention", (6, 8, 8, 0.0, 4), {"num_kv_groups": 2, "qkv_bias": True}),
}


def twins(name: str, dtype: str = "float32") -> tuple[Any, Any]:
    """Return the module and the NumPy class, drawn from the same seed."""
    cls, args, options = CLASSES[name]
    torch.manual_seed(123)
    ours = getattr(nn, cls)(*args, **options, dtype=getattr(torch, dtype))
    cattn.manual_seed(123)
    return ours, getattr(cattn, cls)(*args, **options, dtype=dtype)


def test_there_is_a_twin_of_every_attention_class() -> None:
    assert set(nn.__all__) == set(cattn.nn.__all__) - {"Linear", "Dropout"}
    assert {cls for cls, _, _ in CLASSES.values()} == set(nn.__all__)


@pytest.mark.parametrize("name", CLASSES)
def test_the_same_seed_gives_the_same_parameters(name: str) -> None:
    ours, theirs = twins(name)
    state = theirs.state_dict()
    assert set(ours.state_dict()) == set(state)
    for key, tensor in ours.state_dict().items():
        np.testing.assert_array_equal(tensor, state[key])


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("shape", [(5, 6), (2, 5, 6)])
def test_values_weights_and_gradients_agree_with_the_numpy_class(name: str, shape: tuple[int, ...]) -> None:
    ours, theirs = twins(name, "float64")
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    context, weights = ours(x, return_weights=True)
    right, right_weights = theirs(x.detach().numpy(), return_weights=True)
    assert weights.shape == right_weights.shape
    np.testing.assert_allclose(context.detach(), right, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(weights.detach(), right_weights, rtol=1e-12, atol=1e-12)
    assert torch.equal(ours(x), context)
    grad = torch.randn(context.shape, dtype=torch.float64)
    context.backward(grad)
    grad_x = theirs.backward(grad.numpy())
    np.testing.assert_allclose(x.grad, grad_x, rtol=1e-10, atol=1e-11)
    for key, parameter in ours.named_parameters():
        np.testing.assert_allclose(parameter.grad, theirs.grads[key], rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("name", CLASSES)
def test_state_dicts_go_both_ways(name: str) -> None:
    ours, theirs = twins(name)
    other, numpy_other = twins(name)
    for parameter in other.parameters():
        parameter.data.zero_()
    assert other.load_state_dict(theirs.state_dict()) == ([], [])
    for key, tensor in other.state_dict().items():
        assert torch.equal(tensor, ours.state_dict()[key])
    assert numpy_other.load_state_dict(other.state_dict()) == ([], [])


def test_state_dicts_of_others_and_errors() -> None:
    theirs = torch.nn.MultiheadAttention(8, 4, batch_first=True)
    ours = nn.MultiHeadAttention(8, 8, 16, 0.0, 4, qkv_bias=True)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 5, 8)
    hidden = torch.ones(5, 5, dtype=torch.bool).triu(1)
    torch.testing.assert_close(ours(x), theirs(x, x, x, attn_mask=hidden, need_weights=False)[0])
    half = nn.MultiHeadAttention(8, 8, 16, 0.0, 4, qkv_bias=True, dtype=torch.bfloat16)
    half.load_state_dict(ours.state_dict())
    assert half.W_query.weight.dtype is torch.bfloat16
    assert torch.equal(half.W_query.weight, ours.W_query.weight.bfloat16())
    state = ours.state_dict()
    before = {key: value.clone() for key, value in state.items()}
    del state["W_key.weight"]
    with pytest.raises(ValueError, match=r"cannot load into MultiHeadAttention\((.|\n)*missing: W_key\.weight"):
        ours.load_state_dict(state)
    assert ours.load_state_dict({"other": x}, strict=False).unexpected_keys == ["other"]
    assert all(torch.equal(value, before[key]) for key, value in ours.state_dict().items())
    # Inside another module PyTorch loads by name.
    model = torch.nn.Sequential(ours, torch.nn.Linear(8, 8))
    model.load_state_dict(model.state_dict())


def test_dropout_is_active_in_training_alone() -> None:
    torch.manual_seed(0)
    ours = nn.MultiHeadAttention(8, 8, 16, 0.5, 2)
    x = torch.randn(6, 8)
    assert not torch.equal(ours(x), ours(x))
    ours.eval()
    assert torch.equal(ours(x), ours(x))
    wrapper = nn.MultiHeadAttentionWrapper(8, 4, 16, 0.5, 2)
    assert not torch.equal(wrapper(x), wrapper(x))


def test_wrong_inputs_are_refused_by_name() -> None:
    ours = nn.MultiHeadAttention(8, 8, 4, 0.0, 2)
    with pytest.raises(ValueError, match="x has 5 tokens, context_length is 4"):
        ours(torch.ones(5, 8))
    with pytest.raises(ValueError, match=r"x has shape \(5, 7\), wanted \(T, 8\) or \(B, T, 8\)"):
        ours(torch.ones(5, 7))
    with pytest.raises(TypeError, match=r"x must be a torch\.Tensor, got ndarray"):
        ours(np.ones((5, 8)))
    with pytest.raises(ValueError, match="d_out must be a multiple of num_heads, got 8 and 3"):
        nn.MultiHeadAttention(8, 8, 4, 0.0, 3)
    with pytest.raises(ValueError, match="num_heads must be a multiple of num_kv_groups, got 4 and 3"):
        nn.MultiHeadAttention(8, 8, 4, 0.0, 4, num_kv_groups=3)
    with pytest.raises(ValueError, match="context_length must be at least 1, got 0"):
        nn.CausalAttention(8, 8, 0, 0.0)


def test_a_module_compiles_and_trains() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(nn.MultiHeadAttention(8, 8, 16, 0.1, 2), torch.nn.Linear(8, 1))
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-2)
    x, y = torch.randn(16, 6, 8), torch.randn(16, 6, 1)
    losses = []
    for _ in range(12):
        loss = (compiled(x) - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.parametrize("name", CLASSES)
def test_a_module_is_traced_by_fx(name: str) -> None:
    ours, _ = twins(name)
    traced = torch.fx.symbolic_trace(ours)
    for x in (torch.randn(5, 6), torch.randn(2, 5, 6)):
        assert torch.equal(traced(x), ours(x))
        for found, right in zip(traced(x, return_weights=True), ours(x, return_weights=True), strict=True):
            assert torch.equal(found, right)


@pytest.mark.parametrize("name", CLASSES)
def test_a_loss_on_the_weights_trains(name: str) -> None:
    """The gradients of the weights follow the formula: the gradients of the output for the unit matrix as value."""
    ours, _ = twins(name, "float64")
    x = torch.randn(2, 5, 6, dtype=torch.float64)
    parameters = [p for key, p in ours.named_parameters() if "W_query.weight" in key or key == "W_query"]
    assert torch.autograd.gradcheck(lambda *_: ours(x, return_weights=True)[1], parameters, fast_mode=True)
    grads = torch.autograd.grad(ours(x, return_weights=True)[1].square().sum(), parameters)
    assert all(grad.any() for grad in grads)
    with torch.no_grad():
        assert not ours(x, return_weights=True)[1].requires_grad
