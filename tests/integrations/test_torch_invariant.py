"""batch_invariant(): element-wise functions, sums and variances have the same bits for any size, stride and thread."""

from __future__ import annotations

import warnings
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
    "batch_norm": lambda x: F.batch_norm(x, *torch.linspace(0.5, 2, 4 * 31, dtype=x.dtype).reshape(4, 31)),
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


@pytest.mark.parametrize("dtype", [*DTYPES, torch.int64], ids=str)
def test_empty_tensors_and_numbers_are_those_of_pytorch(dtype: Any) -> None:
    empty = torch.empty(0, 3, dtype=dtype)
    calls: list[Callable[[], Any]] = [
        lambda: torch.ldexp(empty, torch.tensor(2)),
        lambda: torch.ldexp(empty, empty),
        lambda: torch.pow(torch.tensor(2.0), empty),
        lambda: torch.pow(2, empty),
        lambda: torch.pow(empty, 2.5),
        lambda: torch.atan2(empty, torch.tensor(2.0)),
        lambda: empty.softmax(0) if dtype.is_floating_point else empty,
        lambda: empty.sum(0),
        lambda: empty.prod(),
    ]
    for call in calls:
        right = call()
        with batch_invariant():
            found = call()
        assert (found.shape, found.dtype) == (right.shape, right.dtype)


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
        lambda: torch.mean(x, 0, out=torch.empty(4, dtype=torch.int64)),
        lambda: torch.sum(x, 0, out=torch.empty(4, dtype=torch.complex64), dtype=torch.float32),
        lambda: torch.ops.aten.softplus.out(x, out=torch.empty(3, 4, dtype=torch.float64)),
        lambda: torch.arange(3).mean(),
        lambda: x.softmax(2),
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


# ---- reductions ------------------------------------------------------------------------------------------------------
def test_sums_and_means_are_rounded_once() -> None:
    with batch_invariant():
        for shape, axes in (((1000, 2), (0,)), ((2, 1000), (1,)), ((10, 100), ())):
            full = torch.full(shape, 100.0, dtype=torch.float16)
            assert (full.mean(axes) == 100).all()
            assert torch.mean(full, axes, dtype=torch.float32).dtype is torch.float32
        ones = torch.ones(1).expand(5000, 5000)
        assert ones.mean() == 1
        assert ones.sum() == 25e6
        assert torch.nn.functional.mse_loss(ones, torch.zeros(1).expand_as(ones)) == 1
        assert ones.norm() == 5000
        # exact sums, which no order of float64 would give
        wide = torch.tensor([1e308, 1e308, 5e-324, 1.0, -1e308, -1e308, -1.0], dtype=torch.float64)
        assert wide.sum() == 5e-324
        assert wide.to(torch.complex128).sum() == 5e-324
        assert torch.tensor([1e308, 1e308, -torch.inf], dtype=torch.float64).sum() == -torch.inf
        assert torch.tensor([1e308, 1e308], dtype=torch.float64).sum() == torch.inf
        assert torch.tensor([1.0, torch.nan], dtype=torch.float64).sum().isnan()
        assert torch.tensor([1.0, 2.0**-53, 2.0**-80], dtype=torch.float64).sum() == 1 + 2.0**-52
        assert torch.full((3,), 1e30).prod(dtype=torch.float64) == pytest.approx(1e90)
        assert torch.tensor([1e30, 1e30, 1e-30, 1e-30]).prod() == pytest.approx(1)


REDUCTIONS: dict[str, Function] = {
    "sum": lambda x: x.sum(1),
    "sum, float64": lambda x: x.sum(1, dtype=torch.float64),
    "sum of squares": lambda x: (x * x).sum((0, 1)),
    "nansum": lambda x: x.nansum(1),
    "norm": lambda x: torch.linalg.vector_norm(x, dim=1),
    "norm 3": lambda x: torch.linalg.vector_norm(x, 3, dim=(0, 1)),
    "norm 1": lambda x: x.norm(1, dim=1),
    "norm 0": lambda x: torch.linalg.vector_norm(x, 0, dim=1),
    "sum of complex numbers": lambda x: torch.view_as_real(torch.complex(x.double(), 1 - x.double() * 0).sum(1))[
        ..., 0
    ],
}
MASKED: dict[str, Function] = {
    "softmax": lambda x: x.softmax(1)[:, SHOWN],
    "log_softmax": lambda x: x.log_softmax(1)[:, SHOWN],
    "logsumexp": lambda x: x.logsumexp(1),
    "gradient of softmax": lambda x: gradient(lambda y: y.softmax(1) * OUT)(x)[:, SHOWN],
    "gradient of log_softmax": lambda x: gradient(lambda y: y.log_softmax(1).clamp(-99))(x)[:, SHOWN],
}
SHOWN: Any = slice(None)
OUT: Any = 1.0


@pytest.mark.promise("projections' bits")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", [*REDUCTIONS, *MASKED])
def test_padding_changes_no_bit_of_a_reduction_of_any_length(name: str, dtype: Any, monkeypatch: Any) -> None:
    function, filled = (REDUCTIONS[name], 0.0) if name in REDUCTIONS else (MASKED[name], -torch.inf)
    if dtype.itemsize == 2 and name == "sum of complex numbers":
        pytest.skip("PyTorch makes complex numbers of float32 and float64 only")
    for length in (1, 3, 15, 16, 40):
        x = randn(3, length, 2, dtype=dtype)
        at = {
            "right": list(range(length)),
            "left": list(range(9, 9 + length)),
            "between": list(range(0, 3 * length, 3)),
        }
        with batch_invariant():
            monkeypatch.setitem(globals(), "SHOWN", slice(None))
            monkeypatch.setitem(globals(), "OUT", torch.linspace(-1, 1, length).to(dtype)[:, None])
            alone = function(x)
            right = alone.double()
            for places in at.values():
                padded = torch.full((3, 3 * length + 9, 2), filled, dtype=dtype)
                padded[:, places] = x
                factor = torch.zeros(3 * length + 9, 1, dtype=dtype)
                factor[places] = torch.linspace(-1, 1, length).to(dtype)[:, None]
                monkeypatch.setitem(globals(), "SHOWN", places)
                monkeypatch.setitem(globals(), "OUT", factor)
                for threads in (1, 4):
                    torch.set_num_threads(threads)
                    assert torch.equal(function(padded), alone), (length, places)
        monkeypatch.setitem(globals(), "SHOWN", slice(None))
        monkeypatch.setitem(globals(), "OUT", torch.linspace(-1, 1, length).to(dtype)[:, None])
        tolerance = 0.04 if dtype.itemsize == 2 else 1e-5
        torch.testing.assert_close(right, function(x).double(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES[2:] + DTYPES[:1], ids=str)
def test_reductions_are_as_exact_as_pytorchs(dtype: Any) -> None:
    labels = torch.arange(700) * 7 % 60
    calls: dict[str, Function] = {
        "sum": lambda x: x.sum(0),
        "mean": lambda x: x.mean(),
        "mean of rows": lambda x: x.mean(-1),
        "var": lambda x: x.var(0),
        "std": lambda x: (x + 9).std(),
        "norm": lambda x: x.norm(dim=0),
        "norm 3": lambda x: x.norm(3),
        "prod": lambda x: (1 + x / 64).prod(1),
        "softmax": lambda x: x.softmax(0),
        "log_softmax": lambda x: x.log_softmax(-1),
        "logsumexp": lambda x: x.logsumexp((0, 1)),
        "mse": lambda x: F.mse_loss(x, x.flip(0)),
        "cross entropy": lambda x: F.cross_entropy(x, labels),
        "gradient of a bias": lambda x: gradient(lambda b: (b + x) * x)(x[:1]),
        "gradient of softmax": gradient(lambda x: x.softmax(-1)),
        "gradient of a norm's weight": lambda x: gradient(lambda w: F.layer_norm(x, w.shape, w) * x)(x[0]),
    }
    x = randn(700, 60, dtype=dtype)
    for name, call in calls.items():
        exact, theirs = call(x.double()), call(x).double()
        with batch_invariant():
            ours = call(x).double()
        error = (ours - exact).abs().max()
        assert error <= 2 * (theirs - exact).abs().max() + 1e-12, (name, float(error))


def test_losses_take_every_form_of_the_call() -> None:
    x, images = randn(9, 5), randn(2, 5, 3, 4)
    labels, weight = torch.tensor([0, 1, 2, 3, 4, -100, 2, 2, 0]), torch.tensor([1.0, 2, 0, 3, 0.5])
    calls: list[Callable[[], Any]] = [
        *(lambda r=r: F.cross_entropy(x, labels, reduction=r) for r in ("none", "mean", "sum")),
        *(lambda r=r: F.cross_entropy(x, labels, weight, reduction=r) for r in ("none", "mean", "sum")),
        lambda: F.cross_entropy(images, images.argmin(1), weight, ignore_index=3, label_smoothing=0.1),
        lambda: F.cross_entropy(x[0], labels[1]),
        lambda: F.nll_loss(x, torch.full((9,), -100)),
        lambda: F.nll_loss(x[:0], labels[:0], reduction="sum"),
        lambda: gradient(lambda y: F.cross_entropy(y, labels, weight))(x),
    ]
    theirs = [call() for call in calls]
    with batch_invariant():
        for call, right in zip(calls, theirs, strict=True):
            torch.testing.assert_close(call(), right, equal_nan=True)
        padded = F.pad(x, (0, 0, 4, 3))
        assert torch.equal(F.cross_entropy(padded, F.pad(labels, (4, 3), value=-100), weight), calls[4]())
        with pytest.raises(IndexError, match="out of bounds"):
            F.nll_loss(x, labels.clamp(0) + 5)


def test_a_softmax_of_padding_on_the_left_warns_once() -> None:
    scores = randn(2, 4, 6, 6)
    right, left = scores.clone(), scores.clone()
    right[1, ..., 4:], left[1, ..., :2] = -torch.inf, torch.finfo(torch.float32).min
    with batch_invariant():
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            right.softmax(-1)
            left.transpose(-1, -2).softmax(-2)
            scores.masked_fill(~torch.ones(6, 6, dtype=torch.bool).tril(), -torch.inf).softmax(-1)
        with pytest.warns(UserWarning, match="padding on the left") as given:
            assert left.softmax(-1).equal(left.softmax(-1))
    assert len(given) == 1
