"""cattn inside PyTorch: tensor subclasses, modes of torch functions, TorchScript, and inputs left to PyTorch."""

import warnings
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from test_torch_integration import attention, operator_arguments, tensors, theirs  # noqa: E402

from cattn.integrations import torch as bridge  # noqa: E402
from cattn.integrations.torch import _swap  # noqa: E402


def causal_bias(which: str, *sizes: int) -> Any:
    from torch.nn.attention import bias

    with warnings.catch_warnings(action="ignore"):  # PyTorch warns of NaN with more queries than keys
        return getattr(bias, f"causal_{which}")(*sizes)


@pytest.mark.parametrize("which", ["lower_right", "upper_left"])
@pytest.mark.parametrize("sizes", [(7, 7), (5, 9), (9, 5), (1, 6)])
@pytest.mark.parametrize("way", ["operator", "swapped", "compiled", "compiled inside"])
def test_causal_biases_as_masks(which: str, sizes: tuple[int, int], way: str) -> None:
    """The data of such a tensor is uninitialised: what counts is the class and its sizes."""
    T_q, T_k = sizes
    inputs = tensors((2, 3, T_q, 8), (2, 3, T_k, 8), (2, 3, T_k, 6))
    rows, columns = torch.arange(T_q)[:, None], torch.arange(T_k)
    dense = columns <= rows + (T_k - T_q if which == "lower_right" else 0)
    right = theirs(*inputs, dense)

    def inside(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, causal_bias(which, T_q, T_k))

    def swapped(*args: Any) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(*args)

    with bridge.use_cattn():
        if way == "compiled inside":
            ours = torch.compile(inside, backend="aot_eager")(*inputs)
        else:
            compiled = torch.compile(swapped, backend="aot_eager", fullgraph=True) if way == "compiled" else swapped
            function = attention if way == "operator" else compiled
            ours = function(*inputs, causal_bias(which, T_q, T_k))
    torch.testing.assert_close(ours, right, rtol=1e-12, atol=1e-12)
    grad = torch.randn(ours.shape, dtype=ours.dtype)
    for a, b in zip(torch.autograd.grad(ours, inputs, grad), torch.autograd.grad(right, inputs, grad), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


def test_the_sizes_of_a_causal_bias_count_as_in_pytorch() -> None:
    inputs = tensors((2, 5, 8), (2, 9, 8), (2, 9, 6))
    for args in (("upper_left", 2, 3), ("lower_right", 4, 4), ("lower_right", 1, 9), ("lower_right", 5, 1)):
        bias = causal_bias(*args)
        right = theirs(*inputs, bias)
        with bridge.use_cattn():
            ours = torch.nn.functional.scaled_dot_product_attention(*inputs, bias)
        torch.testing.assert_close(ours, right, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(attention(*inputs, bias), right, rtol=1e-12, atol=1e-12)
    with pytest.raises(ValueError, match=r"attn_mask has shape \(3, 4\)"):
        attention(*inputs, causal_bias("lower_right", 3, 4))
    with pytest.raises(ValueError, match="attn_mask is a CausalBias: is_causal must be False"):
        attention(*inputs, causal_bias("lower_right", 5, 9), is_causal=True)


def test_a_causal_bias_with_tensors_that_pytorch_computes() -> None:
    q, k = torch.ones(1, 2, 5, 4, device="meta"), torch.ones(1, 2, 9, 4, device="meta")
    x = torch.arange(45).reshape(5, 9)
    with bridge.use_cattn():
        out = torch.nn.functional.scaled_dot_product_attention(q, k, k, causal_bias("upper_left", 5, 9))
        with pytest.raises(ValueError, match="to have the same dtype"):
            torch.nn.functional.scaled_dot_product_attention(x, x, x.double(), causal_bias("lower_right", 5, 9))
    assert out.shape == (1, 2, 5, 4)


class Uninitialised(torch.Tensor):
    """A mask of zeros whose memory holds something else."""

    seen: list[Any] = []  # noqa: RUF012

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.seen.append(func)
        if func is torch.nn.functional.scaled_dot_product_attention:
            return theirs(*args[:3])
        return super().__torch_function__(func, types, args, kwargs)


def test_other_subclasses_as_masks() -> None:
    """The operator refuses them; inside the swap the class itself sees PyTorch's function."""
    q, k, v = tensors(*[(2, 5, 8)] * 3)
    mask = torch.randn(5, 5, dtype=torch.float64).as_subclass(Uninitialised)
    with pytest.raises(TypeError, match=r"attn_mask must be a plain torch\.Tensor, got Uninitialised"):
        attention(q, k, v, mask)
    for bias in (mask, causal_bias("lower_right", 5, 5)):
        with pytest.raises(TypeError, match=r"attn_mask must be a plain torch\.Tensor, got"):
            torch.ops.cattn.attention(*operator_arguments([q.detach(), k.detach(), v.detach()], bias))
    with bridge.use_cattn():
        assert torch.equal(torch.nn.functional.scaled_dot_product_attention(q, k, v, mask), theirs(q, k, v))
        plain = mask.as_subclass(type("Plain", (torch.Tensor,), {}))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, plain)
    assert torch.equal(out.as_subclass(torch.Tensor), theirs(q, k, v, mask.as_subclass(torch.Tensor)))
    table = {theirs: 1}
    assert any(func in table for func in Uninitialised.seen)


def test_a_mode_sees_the_function_and_cattn_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, calls = [], []

    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.nn.functional.scaled_dot_product_attention and func in {theirs: None}:
                seen.append(len(args))
            return func(*args, **(kwargs or {}))

    def noting(*args: Any, **options: Any) -> torch.Tensor:
        calls.append(args)
        return attention(*args, **options)

    monkeypatch.setattr(_swap, "scaled_dot_product_attention", noting)
    q, k, v = tensors(*[(2, 5, 8)] * 3)
    with bridge.use_cattn(), Mode():
        for mask in (None, torch.zeros(5, 5), causal_bias("lower_right", 5, 5)):
            torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, scale=0.5)
    assert len(seen) == len(calls) == 3
    with bridge.use_cattn(), torch.device("cpu"):  # this context is a mode
        torch.nn.functional.scaled_dot_product_attention(q, k, v)
    assert len(calls) == 4


def test_one_dimensional_inputs_go_to_pytorch() -> None:
    x, v = torch.ones(5, 4), torch.ones(4)
    with bridge.use_cattn():
        for inputs in ((v, x, x), (x, v, x), (x, x, v), (v, v, v), (v[0], x, x)):
            with pytest.raises(RuntimeError, match="Expected query, key, and value to all be"):
                torch.nn.functional.scaled_dot_product_attention(*inputs)


def test_jagged_tensors_go_to_pytorch() -> None:
    with warnings.catch_warnings(action="ignore"):
        parts = [torch.randn(n, 2, 8) for n in (3, 5)]
        nested = torch.nested.nested_tensor(parts, layout=torch.jagged).transpose(1, 2)
        right = theirs(nested, nested, nested)
        with bridge.use_cattn():
            ours = torch.nn.functional.scaled_dot_product_attention(nested, nested, nested)
    torch.testing.assert_close(ours.values(), right.values())


def test_dropout_p_as_a_tensor() -> None:
    x = torch.randn(2, 5, 4)
    with bridge.use_cattn():
        out = torch.nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=torch.tensor(0.0))
        assert torch.equal(out, attention(x, x, x))
        with pytest.raises(RuntimeError, match=r"dropout probability has to be between 0 and 1"):
            torch.nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=torch.tensor(2.0))


@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")
def test_scripting_a_module_inside_the_swap() -> None:
    module = torch.nn.MultiheadAttention(8, 2, batch_first=True)
    x = torch.randn(2, 5, 8)
    right, _ = module(x, x, x, need_weights=False)
    with bridge.use_cattn():
        scripted = torch.jit.script(module)
        inside, _ = scripted(x, x, x, need_weights=False)
    outside, _ = scripted(x, x, x, need_weights=False)
    torch.testing.assert_close(inside, right)
    assert torch.equal(inside, outside)
