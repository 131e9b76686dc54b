"""batch_invariant(): element-wise functions, sums and variances have the same bits for any size, stride and thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
if not hasattr(torch.library, "get_kernel"):
    pytest.skip("batch_invariant needs PyTorch 2.9", allow_module_level=True)

from cattn.integrations.torch import batch_invariant  # noqa: E402

F = torch.nn.functional
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
Function = Callable[..., Any]


@pytest.fixture(autouse=True)
def own_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def randn(*shape: int, dtype: Any = torch.float32) -> Any:
    return (3 * torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)), dtype=torch.float64)).to(dtype)


def gradient(function: Function) -> Function:
    """Return the function that gives the gradient of another one."""

    def differentiate(x: Any) -> Any:
        x = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
        y = function(x)
        return torch.autograd.grad(y, x, torch.full_like(y, 0.7))[0]

    return differentiate


ACTIVATIONS: dict[str, Function] = {
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
    "gelu": F.gelu,
    "gelu, tanh": lambda x: F.gelu(x, approximate="tanh"),
    "elu": lambda x: F.elu(x, 0.7),
    "selu": F.selu,
    "celu": F.celu,
    "mish": F.mish,
    "softplus": F.softplus,
    "exp2": torch.exp2,
    "cosh": torch.cosh,
    "sinh": torch.sinh,
    "pow, a number": lambda x: x.abs().pow(1.7),
    "pow of a number": lambda x: torch.pow(2.0, x),
}
FUNCTIONS: dict[str, Function] = {
    **ACTIVATIONS,
    **{f"gradient of {name}": gradient(function) for name, function in ACTIVATIONS.items()},
    "rsqrt": lambda x: torch.rsqrt(x.abs()),
    "atanh": lambda x: torch.atanh(x / 20),
    "logit": lambda x: torch.logit(x, 0.1),
    "i0e": torch.special.i0e,
    "pow": lambda x: x.abs().pow(x),
    "atan2": lambda x: torch.atan2(x, x.flip(-1)) if x.shape[-1] == 31 else torch.atan2(x, x * x),
    "logaddexp": lambda x: torch.logaddexp(x, 1 - x),
    "logaddexp2": lambda x: torch.logaddexp2(x, 1 - x),
    "hypot": lambda x: torch.hypot(x, 1 - x),
    "SwiGLU": lambda x: F.silu(x) * x,
    "HF's RMSNorm": lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6),
    "rms_norm": lambda x: F.rms_norm(x, x.shape[-1:]),
    "layer_norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "softmax": lambda x: F.softmax(x, -1),
    "log_softmax": lambda x: F.log_softmax(x, -1),
    "normalize": lambda x: F.normalize(x, dim=-1),
    "logsumexp": lambda x: x.logsumexp(-1),
    "var": lambda x: x.var(-1),
    "std": lambda x: x.std(-1, correction=0, keepdim=True),
    "var_mean": lambda x: torch.stack(torch.var_mean(x, -1)),
    "prod": lambda x: (x / 3).prod(-1, keepdim=True),
    "nansum": lambda x: x.nansum(-1, keepdim=True),
}
HALVES_TOO = {
    "silu",
    "gelu",
    "gelu, tanh",
    "sigmoid",
    "rsqrt",
    "i0e",
    "HF's RMSNorm",
    "gradient of gelu",
    "var",
    "SwiGLU",
}


@pytest.mark.promise("projections' bits")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_row_has_the_same_bits_for_any_size_stride_and_number_of_threads(name: str) -> None:
    function = FUNCTIONS[name]
    rows_at = 1 if name == "var_mean" else 0
    for dtype in DTYPES if name in HALVES_TOO else DTYPES[:2]:
        x = randn(1100, 31, dtype=dtype)  # more than one thread gets, and no whole number of vectors
        views = [x.T.contiguous().T, torch.stack([x, x], -1)[..., 0], x[:, None].expand(1100, 2, 31)[:, 1]]
        torch.set_num_threads(1)
        theirs = function(x)
        with batch_invariant():
            whole = function(x)
            assert whole.dtype is theirs.dtype
            torch.testing.assert_close(whole, theirs, rtol=2e-2 if dtype.itemsize == 2 else 1e-5, atol=1e-5)
            torch.set_num_threads(4)
            for start, end in ((0, 1100), (0, 1), (7, 8), (5, 9), (1000, 1033)):
                part = whole.narrow(rows_at, start, end - start)
                assert torch.equal(function(x[start:end].clone()), part), (dtype, start, end)
            for view in views:
                assert torch.equal(function(view), whole), dtype
                assert function(view).stride() == whole.stride() or not view.is_contiguous()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_form_of_an_operator_has_the_bits_of_the_first(dtype: Any) -> None:
    x, wide = randn(700, 48, dtype=dtype), torch.empty(0, dtype=dtype)
    strided = torch.stack([x, x], -1)[..., 0]
    with batch_invariant():
        for name in ("silu", "gelu", "elu", "mish", "softplus"):
            function: Function = getattr(F, name)
            assert torch.equal(function(strided), function(x))
            if name != "softplus":
                assert torch.equal(getattr(torch.ops.aten, f"{name}_")(strided.clone()), function(x))
        for name in ("sigmoid", "exp2", "rsqrt", "sinh"):
            positive = x.abs()
            right = getattr(torch, name)(positive)
            assert torch.equal(getattr(torch, name)(positive, out=wide), right)
            assert torch.equal(getattr(positive.clone(), f"{name}_")(), right)
        for exponent in (1.7, torch.tensor(1.7), x[0].abs()):
            right = torch.pow(x.abs(), exponent)
            assert right.dtype is dtype
            assert torch.equal(x.abs().pow_(exponent), right)
            assert torch.equal(torch.pow(x.abs(), exponent, out=wide), right)
        assert torch.sigmoid(torch.arange(5)).dtype is torch.float32
        assert torch.arange(5).pow(2).tolist() == [0, 1, 4, 9, 16]
        assert torch.pow(torch.arange(3), x[:1, :3].abs()).dtype is dtype
        assert F.silu(torch.tensor(2.0, dtype=dtype)).shape == ()
        assert F.silu(x[:0]).shape == (0, 48)
        transposed = F.silu(x.T)
        assert transposed.stride() == x.T.stride()
        assert torch.equal(transposed.T, F.silu(x))


def test_wrong_calls_raise_pytorchs_errors() -> None:
    x = torch.ones(3, 4)
    calls: list[Callable[[], Any]] = [
        lambda: torch.pow(x, torch.ones(3)),
        lambda: torch.arange(3).sigmoid_(),
        lambda: torch.sigmoid(x, out=torch.empty(3, 4, dtype=torch.int64)),
        lambda: torch.ones(4).pow_(x),
        lambda: F.gelu(x, approximate="none at all"),
        lambda: x.var(7),
        lambda: x.sum(-3),
        lambda: x.mean((0, 0)),
    ]
    for call in calls:
        with pytest.raises((RuntimeError, IndexError)) as theirs:
            call()
        with batch_invariant(), pytest.raises(type(theirs.value)) as ours:
            call()
        assert str(ours.value) == str(theirs.value)


def test_variances_take_every_form_of_the_call() -> None:
    x = randn(6, 7, 5)
    calls: list[Callable[[], Any]] = [
        lambda: x.var(),
        lambda: x.std(1),
        lambda: x.var((0, 2), correction=2, keepdim=True),
        lambda: torch.std(x, 1, out=torch.empty(0)),
        lambda: torch.var_mean(x, (1, 2), keepdim=True)[1],
        lambda: torch.std_mean(x, 0)[0],
        lambda: torch.tensor(2.0).var(correction=0),
        lambda: torch.complex(x, x).var(0),
    ]
    theirs = [call() for call in calls]
    with batch_invariant():
        ours = [call() for call in calls]
        with pytest.warns(UserWarning, match="degrees of freedom is <= 0"):
            assert x[:1].var(0).isnan().all()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, equal_nan=True)


def test_dot_is_a_product() -> None:
    x, y = randn(301), randn(301)
    with batch_invariant() as seen:
        found = torch.dot(x, y)
        assert torch.equal(found, (x[None] @ y[:, None])[0, 0])
        assert torch.dot(torch.arange(3), torch.arange(3)) == 5
    assert (seen.products, seen.products_passed_on) == (2, 1)
    torch.testing.assert_close(found, torch.dot(x, y))
