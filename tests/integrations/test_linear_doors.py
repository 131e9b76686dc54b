"""Linear attention through PyTorch, ONNX and dask: the numbers and gradients of cattn's functions, and refusals."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import numpy as np
import pytest

import cattn
from cattn._input.doors import LINEAR_ATTENTION

B, N, T, D, E = 2, 2, 5, 3, 2


def arrays(dtype: Any = np.float64, *, by_row: bool = False, n_queries: int = 4, n_keys: int = 1) -> dict[str, Any]:
    """Return query, key, value and the options of the gated delta rule."""
    rng = np.random.default_rng(3)
    shapes = {"query": (B, n_queries, T, D), "key": (B, n_keys, T, D), "value": (B, N, T, E), "state": (B, N, D, E)}
    made = {name: rng.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}
    made["decay"] = -rng.random((B, N, T, D) if by_row else (B, N, T)).astype(dtype)
    made["beta"] = rng.random((B, N, T)).astype(dtype)
    return made


@pytest.mark.parametrize("door", LINEAR_ATTENTION)
def test_each_option_is_a_parameter_or_refused_by_name(door: str) -> None:
    module, name = door.split(".")
    pytest.importorskip(module)
    function = getattr(importlib.import_module(f"cattn.integrations.{module}"), name)
    options = inspect.signature(getattr(cattn.functional, name)).parameters
    refused = LINEAR_ATTENTION[door]
    lacks = [name for name in options if name not in inspect.signature(function).parameters]
    assert sorted(lacks) == sorted(refused)
    x = np.ones((1, 2, 2))
    for name, reason in refused.items():
        with pytest.raises(TypeError) as caught:
            function(x, x, x, **{name: None})
        assert str(caught.value).endswith(f"unexpected keyword argument '{name}': {reason}")


# ---- PyTorch ---------------------------------------------------------------------------------------------------------
def tensors(given: dict[str, Any], requires_grad: bool = True) -> dict[str, Any]:
    torch = pytest.importorskip("torch")
    return {name: torch.from_numpy(x.copy()).requires_grad_(requires_grad) for name, x in given.items()}


def ours(**options: Any) -> Any:
    from cattn.integrations.torch import linear_attention

    return linear_attention(options.pop("query"), options.pop("key"), options.pop("value"), **options)


@pytest.mark.parametrize("by_row", [False, True])
@pytest.mark.parametrize("layout", ["bhtd", "bthd"])
def test_tensors_give_the_bits_and_gradients_of_arrays(layout: Any, by_row: bool) -> None:
    torch = pytest.importorskip("torch")
    given = arrays(np.float32, by_row=by_row)
    if layout == "bthd":
        given = {name: x if name == "state" else np.ascontiguousarray(x.swapaxes(1, 2)) for name, x in given.items()}
    options = {"layout": layout, "seq_lengths": [4, T], "scale": 0.7}
    want = cattn.linear_attention(**given, **options, return_state=True)
    x = tensors(given)
    options["seq_lengths"] = torch.tensor([4, T])
    with torch.no_grad():
        np.testing.assert_array_equal(ours(**x, **options), want.out)
    found = ours(**x, **options, return_state=True)
    for a, b in zip(found, want, strict=True):
        np.testing.assert_array_equal(a.detach(), b)
    (found.out.sum() + 2 * found.state.sum()).backward()
    ones, twos = np.ones_like(want.out), np.full_like(want.state, 2)
    options["seq_lengths"] = [4, T]
    grads = cattn.functional.linear_attention_backward(ones, **given, **options, grad_state=twos)
    for name, grad in grads._asdict().items():
        np.testing.assert_array_equal(x[name].grad, grad)


def test_halves_mixed_dtypes_and_autocast() -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("ml_dtypes")
    x = {name: a.to(torch.bfloat16) for name, a in tensors(arrays(np.float32), False).items()}
    out, state = ours(**x, return_state=True)
    assert (out.dtype, state.dtype) == (torch.bfloat16, torch.float32)
    wide = ours(**{name: a.float() for name, a in x.items()}, return_state=True)
    assert torch.equal(out, wide.out.to(torch.bfloat16))
    assert torch.equal(state, wide.state)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(ours(**{name: a.float() for name, a in x.items()}), out)
    with pytest.raises(TypeError, match=r"key has dtype torch\.bfloat16; query has torch\.float32"):
        ours(**x | {"query": x["query"].float()})
    with pytest.raises(TypeError, match=r"beta must be a torch\.Tensor, got float"):
        ours(**x | {"beta": 0.5})


@pytest.mark.parametrize("by_row", [False, True])
def test_autograd_of_tensors_and_packed_sequences(by_row: bool) -> None:
    torch = pytest.importorskip("torch")
    x = tensors(arrays(by_row=by_row))
    assert torch.autograd.gradcheck(
        lambda *a: tuple(ours(**dict(zip(x, a, strict=True)), return_state=True)), (*x.values(),)
    )
    packed = {name: a[0] for name, a in x.items() if name != "state"} | {"state": x["state"]}
    bounds = torch.tensor([0, 2, T])
    assert torch.autograd.gradcheck(
        lambda *a: ours(**dict(zip(packed, a, strict=True)), cu_seqlens=bounds), (*packed.values(),)
    )


def test_transforms_are_right_or_refused_by_name() -> None:
    torch = pytest.importorskip("torch")
    x = tensors(arrays(), False)
    fixed = {name: x[name] for name in ("key", "value", "decay")}

    def total(query: Any) -> Any:
        return ours(query=query, **fixed).square().sum()

    query = x["query"].clone().requires_grad_()
    (want,) = torch.autograd.grad(total(query), query, create_graph=True)
    torch.testing.assert_close(torch.func.grad(total)(x["query"]), want)
    q = x["query"]
    each = torch.vmap(lambda q, beta: ours(query=q, key=q, value=q, beta=beta), in_dims=(1, None), out_dims=1)
    assert torch.equal(each(q, x["beta"][:, 0]), ours(query=q, key=q, value=q, beta=x["beta"][:, :1]))
    message = r"cattn's linear attention \(torch.ops.cattn.linear_attention\)"
    with pytest.raises(NotImplementedError, match=message + " has no second derivatives"):
        want.sum().backward()
    with pytest.raises(NotImplementedError, match=message + " has no forward mode"):
        torch.func.jvp(total, (x["query"],), (x["query"],))
    operator = torch.ops.cattn.linear_attention
    with pytest.raises(NotImplementedError, match=message + " does not support: call .*torch.linear_attention"):
        torch.func.grad(lambda q: operator(q, q, q, *[None] * 6, "bhtd")[0].sum())(x["query"])


@pytest.mark.parametrize("layout", [pytest.param("bhtd", marks=pytest.mark.long), "bthd"])
def test_the_compiler_keeps_one_graph_and_the_bits(layout: Any) -> None:
    torch = pytest.importorskip("torch")
    x = tensors(arrays(np.float32, n_queries=N, n_keys=N))
    if layout == "bthd":
        x = {name: a if name == "state" else a.detach().transpose(1, 2).requires_grad_() for name, a in x.items()}

    def call(function: Any) -> list[Any]:
        out, state = function(**x)
        return [out, state, *torch.autograd.grad(out.sum() + state.sum(), [*x.values()])]

    def model(**given: Any) -> Any:
        found = ours(**given, layout=layout, return_state=True)
        return 2 * found.out, found.state

    torch.compiler.reset()
    compiled = call(torch.compile(model, fullgraph=True, backend="aot_eager"))
    for a, b in zip(compiled, call(model), strict=True):
        assert torch.equal(a, b)
    plain = [a.detach() for a in x.values()]
    order = ("query", "key", "value", "decay", "beta", "state")
    arguments = (*(plain[list(x).index(name)] for name in order), None, None, None, layout)
    torch.library.opcheck(torch.ops.cattn.linear_attention.default, arguments)


@pytest.mark.parametrize("activation", [None, "silu"])
def test_the_short_convolution_of_tensors(activation: Any) -> None:
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(1)
    shapes = {"x": (2, 5, 3), "weight": (3, 4), "bias": (3,), "state": (2, 3, 3)}
    given = {name: rng.standard_normal(shape) for name, shape in shapes.items()}
    want = cattn.functional.causal_conv(**given, activation=activation, return_state=True)
    x = tensors(given)
    from cattn.integrations.torch import causal_conv

    def convolve(*arguments: Any) -> tuple[Any, ...]:
        named = dict(zip(given, arguments, strict=True))
        return tuple(causal_conv(**named, activation=activation, return_state=True))

    for a, b in zip(convolve(*x.values()), want, strict=True):
        np.testing.assert_array_equal(a.detach(), b)
    assert torch.autograd.gradcheck(convolve, (*x.values(),))
    plain = [a.detach() for a in x.values()]
    torch.compiler.reset()
    assert torch.equal(torch.compile(convolve, fullgraph=True, backend="aot_eager")(*plain)[0], convolve(*plain)[0])
    torch.library.opcheck(torch.ops.cattn.causal_conv.default, (*plain, activation))
    with pytest.raises(TypeError, match=r"weight has dtype torch\.float32; x has torch\.float64"):
        causal_conv(x["x"], x["weight"].float())


# ---- dask ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("n_queries", "n_keys", "n_values"), [(4, 4, 4), (2, 2, 4), (8, 2, 4), (1, 4, 1), (4, 1, 1)])
def test_chunks_of_batch_and_heads_give_the_bits_of_one_call(n_queries: int, n_keys: int, n_values: int) -> None:
    da = pytest.importorskip("dask.array")
    from cattn.integrations.dask import linear_attention

    rng = np.random.default_rng(2)
    n = max(n_keys, n_values)
    shapes = {"query": (3, n_queries, T, D), "key": (3, n_keys, T, D), "value": (3, n_values, T, E)}
    shapes |= {"decay": (n, 1), "beta": (3, n, T), "state": (n, D, E)}
    given = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    given["decay"] = -abs(given["decay"])
    want = cattn.linear_attention(**given, seq_lengths=[1, T, 3], return_state=True)
    chunked = {
        name: da.from_array(x, chunks=tuple(1 if i == 0 else 2 if i == 1 else -1 for i in range(x.ndim)))
        if name in ("query", "key", "value")
        else x
        for name, x in given.items()
    }
    found = linear_attention(**chunked, seq_lengths=[1, T, 3], return_state=True)
    for a, b in zip(found, want, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        np.testing.assert_array_equal(a.compute(scheduler="sync"), b)
    assert found.out.npartitions >= 3
    np.testing.assert_array_equal(linear_attention(**chunked).compute(), cattn.linear_attention(**given))


def test_dask_names_chunks_of_tokens_and_shapes_that_do_not_fit() -> None:
    da = pytest.importorskip("dask.array")
    from cattn.integrations.dask import linear_attention

    x = da.ones((2, 2, 6, 3), chunks=(1, 1, 2, 3))
    whole = x.rechunk({2: -1})
    with pytest.raises(ValueError, match=r"key has 3 chunks of tokens, .* pass key\.rechunk\(\{2: -1\}\)"):
        linear_attention(whole, x, whole)
    with pytest.raises(ValueError, match="beta has 4 tokens, query has 6"):
        linear_attention(whole, whole, whole, beta=np.ones((2, 2, 4)))
    with pytest.raises(ValueError, match="key has d_k 2, query has 3"):
        linear_attention(whole, whole[..., :2], whole)
    assert linear_attention(whole[:0], whole[:0], whole[:0]).compute().shape == (0, 2, 6, 3)


def test_jax_says_what_to_call_instead() -> None:
    pytest.importorskip("jax")
    door: Any = importlib.import_module("cattn.integrations.jax")
    with pytest.raises(
        AttributeError, match=r"'linear_attention': call cattn\.linear_attention on arrays, under jit by"
    ):
        _ = door.linear_attention
    with pytest.raises(AttributeError, match=r"has no attribute 'nothing'$"):
        _ = door.nothing
