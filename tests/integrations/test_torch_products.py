"""PyTorch's products by cattn, and batch_invariant(): the same bits for any batch, padding, size, stride and thread."""

from __future__ import annotations

import copy
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from cattn import functional  # noqa: E402
from cattn.integrations.torch import (  # noqa: E402
    Seen,
    batch_invariant,
    scaled_dot_product_attention,
    use_cattn,
)
from support import assert_same_bits  # noqa: E402

F = torch.nn.functional
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
T, K, N = 33, 200, 150


def randn(*shape: int, dtype: Any = torch.float32) -> Any:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64).to(dtype)


X, W, BIAS = randn(T, K), randn(N, K), randn(N)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes_have_the_bits_of_linear(dtype: Any) -> None:
    x, weight, bias = (a.to(dtype) for a in (X, W, BIAS))
    with use_cattn(linear=True) as seen:
        y = F.linear(x, weight, bias)
    assert seen.products == 1
    wide = [a.float().numpy() if a.itemsize == 2 else a.numpy() for a in (x, weight, bias)]
    assert_same_bits(
        y.to(dtype).double().numpy(), torch.from_numpy(functional.linear(*wide)).to(dtype).double().numpy()
    )


@pytest.mark.parametrize("compute_dtype", ["bfloat16", "bfloat16_tiles"])
@pytest.mark.parametrize("block", [lambda **options: use_cattn(linear=True, **options), batch_invariant])
def test_bfloat16_tensors_are_multiplied_as_the_context_says(block: Any, compute_dtype: Any) -> None:
    halves, query = [a.bfloat16() for a in (X, W, BIAS)], randn(2, 3, 40, 64, dtype=torch.bfloat16)
    numbers = [a.float().numpy() for a in halves]
    exact = torch.from_numpy(functional.linear(*numbers)).bfloat16()
    rounded = torch.from_numpy(functional.linear(*numbers, compute_dtype=compute_dtype)).bfloat16()
    wide = torch.from_numpy(functional.linear(*numbers[:2], compute_dtype=compute_dtype))
    attention = scaled_dot_product_attention(query, query, query, compute_dtype=compute_dtype)
    x = halves[0].clone().requires_grad_()
    with block(compute_dtype=compute_dtype) as seen:
        assert torch.equal(F.linear(*halves), rounded)
        assert torch.equal(F.linear(*halves[:2]), wide.bfloat16())
        assert torch.equal(
            torch.addmm(halves[2], *(halves[0], halves[1].T), alpha=2), (wide * 2 + BIAS.bfloat16()).bfloat16()
        )
        assert torch.equal(torch.mv(halves[1], halves[0][0]), wide[0].bfloat16())
        assert torch.equal(F.scaled_dot_product_attention(query, query, query), attention)
        (grad,) = torch.autograd.grad(F.linear(x, halves[1]).sum(), x)
        assert torch.equal(F.linear(X, W), torch.from_numpy(functional.linear(X.numpy(), W.numpy())))
        with use_cattn():
            assert torch.equal(F.linear(*halves), exact)
        assert torch.equal(F.linear(*halves), rounded)
    assert seen.products_passed_on == seen.passed_on == 0
    torch.testing.assert_close(grad, halves[1].float().sum(0).bfloat16().expand(T, K), rtol=1e-2, atol=1e-2)
    with pytest.raises(ValueError, match="compute_dtype must be"), block(compute_dtype=torch.float16):
        pass


@pytest.mark.promise("projections' bits")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_has_the_same_bits_in_every_batch(dtype: Any) -> None:
    layer = torch.nn.Linear(K, N).to(dtype)
    x = randn(40, K, dtype=dtype).requires_grad_()
    with use_cattn(linear=True):
        y = layer(x)
        (grad,) = torch.autograd.grad(y.sum(), x)
        for rows in (slice(0, 1), slice(3, 9), slice(5, 30)):
            part = x.detach()[rows].requires_grad_()
            z = layer(part)
            assert torch.equal(z, y[rows])
            assert torch.equal(torch.autograd.grad(z.sum(), part)[0], grad[rows])


def test_gradients_are_those_of_pytorch() -> None:
    ours = torch.nn.Sequential(torch.nn.Linear(K, N), torch.nn.GELU(), torch.nn.Linear(N, K)).double()
    theirs = copy.deepcopy(ours)
    x = randn(4, 30, K, dtype=torch.float64)
    with use_cattn(linear=True) as seen:
        ours(x).square().sum().backward()
    assert (seen.products, seen.products_passed_on) == (5, 0)
    theirs(x).square().sum().backward()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def test_every_way_leads_to_the_kernels() -> None:
    layer = torch.nn.Linear(K, N)
    with batch_invariant() as seen:
        with torch.inference_mode():
            assert torch.equal(layer(X), F.linear(X, layer.weight, layer.bias))
        with torch.autocast("cpu", torch.bfloat16):
            assert layer(X).dtype is torch.bfloat16
        vmapped = torch.vmap(layer)(X.reshape(3, 11, K))
        assert torch.equal(vmapped, layer(X).reshape(3, 11, N))
        torch.func.grad(lambda w: F.linear(X, w).sum())(W)
        assert torch.equal(torch.dot(X[0], X[1]), (X[:1] @ X[1:2].T)[0, 0])
        results: list[Any] = []
        thread = threading.Thread(target=lambda: results.append(layer(X)))
        thread.start()
        thread.join()
        assert torch.equal(results[0], layer(X))
    assert seen.products_passed_on == 0


def test_what_is_passed_on() -> None:
    small, integers, sparse = randn(4, 3), torch.ones(200, 200, dtype=torch.int64), torch.eye(200).to_sparse()
    mixed = torch.empty(200, 200, dtype=torch.complex64)
    with use_cattn(linear=True) as seen:
        for call in (lambda: small.T @ small, lambda: integers @ integers, lambda: mixed @ mixed):
            call()
        assert (seen.products, seen.products_passed_on) == (0, 3)
        assert torch.equal(sparse @ torch.ones(200, 200), torch.ones(200, 200))
    with batch_invariant() as seen:  # small ones, too
        small.T @ small
    assert (seen.products, seen.products_passed_on) == (1, 0)


def test_contexts_may_overlap_and_end_in_any_order() -> None:
    own = F.linear(X, W)
    with use_cattn() as outer, batch_invariant() as middle:
        inner = use_cattn(linear=True)
        seen = inner.__enter__()
        y = F.linear(X, W)
        inner.__exit__(None, None, None)
        assert torch.equal(F.linear(X, W), y)
    assert [s.products for s in (outer, middle, seen)] == [0, 2, 1]
    assert torch.equal(F.linear(X, W), own)
    with pytest.raises(ZeroDivisionError), use_cattn(linear=True):
        _ = 1 / 0
    assert torch.equal(F.linear(X, W), own)


def test_an_older_pytorch_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.library, "get_kernel")
    with pytest.raises(RuntimeError, match=r"from PyTorch 2\.9 on; this is PyTorch"), use_cattn(linear=True):
        pass
    assert Seen() == Seen(0, 0, 0, 0)


@pytest.mark.parametrize("name", ["addmm", "addmv", "baddbmm"])
def test_factors_of_a_sum_follow_their_rule(name: str) -> None:
    function = getattr(torch, name)
    added, a, b = randn(3, 3), randn(3, 4), randn(4, 3)
    if name == "addmv":
        added, b = added[0], b[:, 0]
    elif name == "baddbmm":
        added, a, b = added[None], a[None], b[None]
    nothing = (added, a[..., :0], b[:, :0] if name == "baddbmm" else b[:0])
    cases = [(added, a, b), (added, a * torch.nan, b), (added * torch.nan, a, b), nothing]
    scalars = [(alpha, beta) for alpha in (0, 1, True, 2.5, torch.inf) for beta in (0, 1, 2.5)]
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        tolerance = 1e-6 if dtype is torch.float32 else 0.01
        for tensors in cases:
            given = [x.to(dtype) for x in tensors]
            for alpha, beta in scalars:
                with batch_invariant():
                    ours = function(*given, alpha=alpha, beta=beta)
                # A factor of 0 leaves out its term; processors differ in what PyTorch makes of inf and NaN.
                first, *factors = (x.double() for x in given)
                right = torch.matmul(*factors) * alpha if alpha and factors[0].shape[-1] else 0.0
                right = right + (first * beta if beta else torch.zeros_like(first))
                torch.testing.assert_close(ours, right.to(dtype), equal_nan=True, rtol=tolerance, atol=tolerance)
                if torch.isfinite(right).all() and all(torch.isfinite(x).all() for x in given):
                    theirs = function(*given, alpha=alpha, beta=beta)
                    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
    for options in ({"alpha": 1j}, {"beta": 1j}):
        with batch_invariant(), pytest.raises(RuntimeError, match="cannot be converted to type float"):
            function(added, a, b, **options)
    x, y, bias = (randn(*shape, dtype=torch.bfloat16) for shape in ((40, 50), (50, 60), (40, 60)))
    with batch_invariant():
        once = torch.addmm(bias, x, y, alpha=0.75, beta=1.5)
        assert torch.equal(once, torch.addmm(bias.float(), x.float(), y.float(), alpha=0.75, beta=1.5).bfloat16())


def test_kernels_are_made_once_but_serve_a_kernel_that_somebody_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    integers, calls = torch.ones(3, 3, dtype=torch.int64), []
    with batch_invariant():
        own = F.linear(X, W)
    library = torch.library.Library("aten", "IMPL")
    library.impl("mm", lambda a, b: calls.append(1) or a, "CPU", allow_override=True)
    try:
        with batch_invariant():
            integers @ integers  # passed on
            assert torch.equal(F.linear(X, W), own)
    finally:
        library._destroy()
    assert calls == [1]
    monkeypatch.setattr(torch.library, "get_kernel", None)
    with batch_invariant():
        assert torch.equal(F.linear(X, W), own)
        assert (integers @ integers).tolist() == [[3] * 3] * 3


# ---- batch_invariant -----------------------------------------------------------------------------------------------
@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning", "ignore:The PyTorch API of nested tensors")
@pytest.mark.promise("projections' bits")
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_fused_layers_are_computed_by_their_parts(activation: str, norm_first: bool) -> None:
    """They call no operator for their products, and TorchScript calls them whether the fast path is on or off."""
    options = {"dropout": 0.0, "batch_first": True, "activation": activation, "norm_first": norm_first}
    layer = torch.nn.TransformerEncoderLayer(32, 4, 64, **options).eval()
    model = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=not norm_first).eval()
    x, lengths = randn(3, 9, 32), (9, 6, 4)
    padding = torch.arange(9) >= torch.tensor(lengths)[:, None]
    hidden = torch.ones(9, 9, dtype=torch.bool).triu(1)
    nested = torch.nested.as_nested_tensor([x[i, :n] for i, n in enumerate(lengths)])
    attention = layer.self_attn
    calls = {
        "layer": lambda: layer(x),
        "padding": lambda: layer(x, src_key_padding_mask=padding),
        "mask": lambda: layer(x, src_mask=hidden),
        "both": lambda: layer(x, src_mask=hidden, src_key_padding_mask=padding),
        "nested": lambda: layer(nested),
        "model": lambda: model(x, src_key_padding_mask=padding),
        "attention": lambda: attention(x, x, x)[0],
        "weights": lambda: attention(x, x, x)[1],
        "weights of heads": lambda: attention(x, x, x, average_attn_weights=False)[1],
        "nested attention": lambda: attention(nested, nested, nested, need_weights=False)[0],
    }
    if activation == "relu" and norm_first:  # its compilation takes seconds
        scripted = torch.jit.script(model)
        calls |= {
            "scripted": lambda: scripted(x),
            "scripted, padding": lambda: scripted(x, src_key_padding_mask=padding),
        }
    with torch.inference_mode():
        for name, call in calls.items():
            right = call()
            with batch_invariant():
                found = call()
            parts = zip(found.unbind(), right.unbind(), strict=True)
            for a, b in parts:
                torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5, msg=name)
        assert attention(x, x, x, need_weights=False)[1] is None
        with batch_invariant() as seen:
            assert attention(x, x, x, need_weights=False)[1] is None
            batch, alone = (
                model(x, src_key_padding_mask=padding),
                [model(x[i : i + 1, :n]) for i, n in enumerate(lengths)],
            )
            for row, part, own, n in zip(batch, layer(nested).unbind(), alone, lengths, strict=True):
                assert torch.equal(row[:n], own[0])
                assert part.shape == (n, 32)
            other = model(x[[2, 0, 2]], src_key_padding_mask=padding[[2, 0, 2]])
            assert all(torch.equal(other[i, :n], batch[j, :n]) for i, j, n in ((0, 2, 4), (1, 0, 9), (2, 2, 4)))
            assert (seen.calls > 0, seen.products_passed_on) == (True, 0)
            with pytest.raises(NotImplementedError, match=r"batch_invariant\(\) have no kernel for a nested"):
                torch._native_multi_head_attention(
                    nested, nested, nested, 32, 4, attention.in_proj_weight, attention.in_proj_bias,
                    attention.out_proj.weight, attention.out_proj.bias, hidden, False,
                )  # fmt: skip


def test_operators_whose_rows_depend_on_the_batch_are_refused_by_name() -> None:
    with batch_invariant():
        with pytest.raises(NotImplementedError, match=r"torch\.ops\.aten\.convolution: the bits of a row may depend"):
            F.conv1d(torch.ones(1, 3, 9), torch.ones(2, 3, 3))
        nested = torch.ones(2, 3, 4, 8, dtype=torch.float32)
        assert F.scaled_dot_product_attention(nested, nested, nested).shape == nested.shape
    assert F.conv1d(torch.ones(1, 3, 9), torch.ones(2, 3, 3)).shape == (1, 2, 7)


# ---- functions, sums and variances -----------------------------------------------------------------------------------
Function = Callable[..., Any]


@pytest.fixture(autouse=True)
def own_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def spread(*shape: int, dtype: Any = torch.float32) -> Any:
    return (3 * torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)), dtype=torch.float64)).to(dtype)


def gradient(function: Function) -> Function:
    """Return the function that gives the gradient of another one."""

    def differentiate(x: Any) -> Any:
        x = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
        y = function(x)
        return torch.autograd.grad(y, x, torch.full_like(y, 0.7))[0]

    return differentiate


ACTIVATIONS: dict[str, Function] = {
    **{name: getattr(F, name) for name in ("silu", "gelu", "selu", "celu", "mish", "softplus")},
    **{name: getattr(torch, name) for name in ("sigmoid", "exp2", "cosh", "sinh")},
    "gelu, tanh": lambda x: F.gelu(x, approximate="tanh"),
    "elu": lambda x: F.elu(x, 0.7),
    "pow, a number": lambda x: x.abs().pow(1.7),
    "pow of a number": lambda x: torch.pow(2.0, x),
}
FUNCTIONS: dict[str, Function] = {
    **ACTIVATIONS,
    **{f"gradient of {name}": gradient(function) for name, function in ACTIVATIONS.items()},
    "glu": lambda x: F.glu(x[:, :30]),
    "gradient of glu": gradient(lambda x: F.glu(x[:, :30])),
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
        x = spread(1100, 31, dtype=dtype)  # more than one thread gets, and no whole number of vectors
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
def test_forms_in_place_have_the_bits_of_the_first(dtype: Any) -> None:
    x = spread(700, 47, dtype=dtype).abs()  # no whole number of vectors
    with batch_invariant():
        for name in ("silu", "gelu", "elu", "mish", "sigmoid", "exp2", "rsqrt", "sinh"):
            first, in_place = getattr(torch.ops.aten, name), getattr(torch.ops.aten, f"{name}_")
            assert torch.equal(in_place(x.clone()), first(x)), name


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
        lambda: empty.mean(0) if dtype.is_floating_point else empty,
        lambda: F.silu(empty) if dtype.is_floating_point else empty,
    ]
    for call in calls:
        right = call()
        with batch_invariant():
            found = call()
        assert (found.shape, found.dtype) == (right.shape, right.dtype)
        torch.testing.assert_close(found, right, rtol=0, atol=0, equal_nan=True)
    with batch_invariant(), pytest.warns(UserWarning, match="degrees of freedom is <= 0"):
        assert spread(1, 5).var(0).isnan().all()


def test_wrong_calls_raise_pytorchs_errors() -> None:
    x = torch.ones(3, 4)
    calls: list[Callable[[], Any]] = [
        lambda: X @ W,
        lambda: torch.mm(X, W.T.double()),
        lambda: torch.addmm(randn(N + 1), X, W.T),
        lambda: torch.bmm(randn(2, T, K), randn(3, K, N)),
        lambda: torch.mm(X, W.T, out=torch.empty(T, N, dtype=torch.float64)),
        lambda: torch.mm(X[0], W.T),
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
        x = spread(3, length, 2, dtype=dtype)
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
    x = spread(700, 60, dtype=dtype)
    for name, call in calls.items():
        exact, theirs = call(x.double()), call(x).double()
        with batch_invariant():
            ours = call(x).double()
        error = (ours - exact).abs().max()
        assert error <= 2 * (theirs - exact).abs().max() + 1e-12, (name, float(error))


def test_padding_changes_no_bit_of_a_loss() -> None:
    x, labels = spread(9, 5), torch.tensor([0, 1, 2, 3, 4, -100, 2, 2, 0])
    weight, padded = torch.tensor([1.0, 2, 0, 3, 0.5]), F.pad(x, (0, 0, 4, 3))
    with batch_invariant():
        loss = F.cross_entropy(x, labels, weight)
        assert torch.equal(F.cross_entropy(padded, F.pad(labels, (4, 3), value=-100), weight), loss)
        assert F.nll_loss(x, torch.full((9,), -100)).isnan()
        assert F.nll_loss(x[:0], labels[:0], reduction="sum") == 0
        with pytest.raises(IndexError, match="out of bounds"):
            F.nll_loss(x, labels.clamp(0) + 5)


def test_a_softmax_of_padding_on_the_left_warns_once() -> None:
    scores = spread(2, 4, 6, 6)
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
