"""PyTorch's matrix products by cattn: values, every way to them, bits of batches and padding, what is passed on."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
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
PRODUCTS: dict[str, Callable[[], Any]] = {
    "mm": lambda: torch.mm(X, W.T),
    "mm, out": lambda: torch.mm(X, W.T, out=torch.empty(0)),
    "mm, transposed": lambda: torch.mm(X.T.contiguous().T, W.T.contiguous()),
    "@ of three axes": lambda: X.expand(3, T, K) @ W.T,
    "@ of a vector": lambda: X[0] @ W.T,
    "mv": lambda: torch.mv(W, X[0]),
    "linear": lambda: F.linear(X, W),
    "linear, bias": lambda: F.linear(X, W, BIAS),
    "linear of a vector": lambda: F.linear(X[0], W, BIAS),
    "linear of four axes": lambda: F.linear(X.reshape(3, 1, 11, K), W, BIAS),
    "addmm": lambda: torch.addmm(randn(T, N), X, W.T, beta=2, alpha=0.5),
    "addmm, beta 0": lambda: torch.addmm(torch.full((T, N), torch.nan), X, W.T, beta=0),
    "addmm, a column": lambda: torch.addmm(randn(T, 1), X, W.T),
    "addmm, out": lambda: torch.addmm(BIAS, X, W.T, out=torch.empty(T, N)),
    "addmm in place": lambda: randn(T, N).addmm_(X, W.T),
    "addmv": lambda: torch.addmv(BIAS, W, X[0], alpha=3),
    "bmm": lambda: torch.bmm(randn(4, T, K), randn(4, K, N)),
    "baddbmm": lambda: torch.baddbmm(randn(4, 1, N), randn(4, T, K), randn(4, K, N), beta=0.5),
    "baddbmm in place": lambda: randn(4, T, N).baddbmm_(randn(4, T, K), randn(4, K, N)),
    "einsum": lambda: torch.einsum("btk,nk->btn", X.expand(2, T, K), W),
    "matmul with an axis that broadcasts": lambda: randn(2, 1, T, K) @ randn(1, 3, K, N),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_every_product_has_pytorchs_values(name: str) -> None:
    expected = PRODUCTS[name]()
    with use_cattn(linear=True) as seen:
        actual = PRODUCTS[name]()
    assert (seen.products, seen.products_passed_on) == (1, 0)
    assert actual.shape == expected.shape
    assert actual.dtype == expected.dtype
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-4)
    assert torch.equal(PRODUCTS[name](), expected)  # PyTorch's own kernels are back


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
    with batch_invariant():
        operands = [randn(3, 20, dtype=torch.float64).requires_grad_(), ours[0].weight[:5, :20]]
        assert torch.autograd.gradcheck(F.linear, operands)


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


def test_wrong_calls_raise_pytorchs_errors() -> None:
    calls: list[Callable[[], Any]] = [
        lambda: X @ W,
        lambda: torch.mm(X, W.T.double()),
        lambda: torch.addmm(randn(N + 1), X, W.T),
        lambda: torch.bmm(randn(2, T, K), randn(3, K, N)),
        lambda: torch.mm(X, W.T, out=torch.empty(T, N, dtype=torch.float64)),
        lambda: torch.mm(X[0], W.T),
    ]
    for call in calls:
        with pytest.raises(RuntimeError) as theirs:
            call()
        with use_cattn(linear=True), pytest.raises(RuntimeError) as ours:
            call()
        assert str(ours.value) == str(theirs.value)


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
def test_factors_of_a_sum_are_taken_as_pytorch_takes_them(name: str) -> None:
    function = getattr(torch, name)
    added, a, b = randn(3, 3), randn(3, 4), randn(4, 3)
    if name == "addmv":
        added, b = added[0], b[:, 0]
    elif name == "baddbmm":
        added, a, b = added[None], a[None], b[None]
    nothing = (added, a[..., :0], b[:, :0] if name == "baddbmm" else b[:0])
    cases = [(added, a * torch.nan, b), (added * torch.nan, a, b), nothing]
    scalars = [(alpha, beta) for alpha in (0, 1, True, 2.5, torch.inf) for beta in (0, 1, 2.5)]
    for dtype in (torch.float32, torch.bfloat16):
        for tensors in cases:
            given = [x.to(dtype) for x in tensors]
            for alpha, beta in scalars:
                theirs = function(*given, alpha=alpha, beta=beta)
                with batch_invariant():
                    ours = function(*given, alpha=alpha, beta=beta)
                tolerance = 1e-6 if dtype is torch.float32 else 0.01
                torch.testing.assert_close(ours, theirs, equal_nan=True, rtol=tolerance, atol=tolerance)
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
def encoder() -> Any:
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(48, 4, 96, batch_first=True, dropout=0.0)
    return torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


@pytest.mark.promise("projections' bits")
def test_a_text_alone_has_the_bits_of_any_batch() -> None:
    """Texts of different lengths, padded on the right, pooled by their mean."""
    model, lengths = encoder(), [5, 17, 40, 1, 23]
    texts = [randn(n, 48) for n in lengths]

    def embed(batch: list[int]) -> Any:
        most = max(lengths[i] for i in batch)
        x = torch.zeros(len(batch), most, 48)
        padding = torch.ones(len(batch), most, dtype=torch.bool)
        for row, i in enumerate(batch):
            x[row, : lengths[i]], padding[row, : lengths[i]] = texts[i], False
        out = model(x, src_key_padding_mask=padding)
        return (out * ~padding[..., None]).sum(1) / (~padding).sum(1, keepdim=True)

    with batch_invariant() as seen, torch.no_grad():
        model.eval()
        alone = [embed([i])[0] for i in range(5)]
        for batch in ([0, 1, 2, 3, 4], [4, 2], [3, 0, 1], [2, 2, 2, 1]):
            for i, row in zip(batch, embed(batch), strict=True):
                assert torch.equal(row, alone[i])
    assert seen.products_passed_on == 0
    assert seen.calls > 0
    assert torch.backends.mha.get_fastpath_enabled()


@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning", "ignore:The PyTorch API of nested tensors")
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
    scripted, attention = torch.jit.script(model), layer.self_attn
    calls = {
        "layer": lambda: layer(x),
        "padding": lambda: layer(x, src_key_padding_mask=padding),
        "mask": lambda: layer(x, src_mask=hidden),
        "both": lambda: layer(x, src_mask=hidden, src_key_padding_mask=padding),
        "nested": lambda: layer(nested),
        "model": lambda: model(x, src_key_padding_mask=padding),
        "scripted": lambda: scripted(x),
        "scripted, padding": lambda: scripted(x, src_key_padding_mask=padding),
        "attention": lambda: attention(x, x, x)[0],
        "weights": lambda: attention(x, x, x)[1],
        "weights of heads": lambda: attention(x, x, x, average_attn_weights=False)[1],
        "nested attention": lambda: attention(nested, nested, nested, need_weights=False)[0],
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
        with batch_invariant():
            assert attention(x, x, x, need_weights=False)[1] is None
            batch, alone = (
                model(x, src_key_padding_mask=padding),
                [model(x[i : i + 1, :n]) for i, n in enumerate(lengths)],
            )
            for row, part, own, n in zip(batch, layer(nested).unbind(), alone, lengths, strict=True):
                assert torch.equal(row[:n], own[0])
                assert part.shape == (n, 32)
            with pytest.raises(NotImplementedError, match=r"batch_invariant\(\) has no kernel for a nested"):
                torch._native_multi_head_attention(
                    nested, nested, nested, 32, 4, attention.in_proj_weight, attention.in_proj_bias,
                    attention.out_proj.weight, attention.out_proj.bias, hidden, False,
                )  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("axes", [(0,), (1,), (-2, -1), (0, 1, 2)], ids=str)
def test_sums_are_in_order(dtype: Any, axes: tuple[int, ...]) -> None:
    x = randn(9, 70, 5, dtype=dtype)
    padded = F.pad(x, (0, 0, 11, 30))
    with batch_invariant():
        for keepdim in (False, True):
            total, mean = x.sum(axes, keepdim=keepdim), x.mean(axes, keepdim=keepdim)
            assert total.dtype is dtype
            torch.testing.assert_close(total, x.double().sum(axes, keepdim=keepdim).to(dtype), rtol=2e-3, atol=2e-2)
            torch.testing.assert_close(mean, x.double().mean(axes, keepdim=keepdim).to(dtype), rtol=2e-3, atol=2e-2)
            if 1 in axes or -2 in axes:
                assert torch.equal(padded.sum(axes, keepdim=keepdim), total)
    assert x.sum(axes, dtype=torch.float64).dtype is torch.float64


def test_sums_take_every_form_of_the_call() -> None:
    x = randn(4, 6)
    expected = [x.sum(0), x.sum(), x.sum((0,), dtype=torch.float64), torch.sum(x, 0, out=torch.empty(6)), x.mean()]
    with batch_invariant():
        actual = [x.sum(0), x.sum(), x.sum((0,), dtype=torch.float64), torch.sum(x, 0, out=torch.empty(6)), x.mean()]
        assert torch.arange(6).reshape(2, 3).sum(0).tolist() == [3, 5, 7]
        assert torch.empty(0, 3).sum(0).tolist() == [0, 0, 0]
        assert np.isnan(torch.empty(0, 3).mean(0).tolist()).all()
        assert torch.tensor(3.0).sum(()) == 3
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b)


def test_operators_whose_rows_depend_on_the_batch_are_refused_by_name() -> None:
    with batch_invariant():
        with pytest.raises(NotImplementedError, match=r"torch\.ops\.aten\.convolution: the bits of a row may depend"):
            F.conv1d(torch.ones(1, 3, 9), torch.ones(2, 3, 3))
        nested = torch.ones(2, 3, 4, 8, dtype=torch.float32)
        assert F.scaled_dot_product_attention(nested, nested, nested).shape == nested.shape
    assert F.conv1d(torch.ones(1, 3, 9), torch.ones(2, 3, 3)).shape == (1, 2, 7)
