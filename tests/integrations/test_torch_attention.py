"""cattn inside PyTorch: the function and its operator, with every option, keys of one byte, and errors."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import cattn

torch = pytest.importorskip("torch")
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from cattn.integrations import torch as bridge  # noqa: E402
from support import as_tuple, paired  # noqa: E402

attention = bridge.scaled_dot_product_attention
theirs = torch.nn.functional.scaled_dot_product_attention


def tensors(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float64, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=dtype, requires_grad=True) for shape in shapes]


CASES: dict[str, Callable[[], tuple[list[Any], dict[str, Any]]]] = {
    "plain": lambda: (tensors((2, 4, 50, 8), (2, 4, 60, 8), (2, 4, 60, 5)), {}),
    "causal": lambda: (tensors(*[(3, 2, 40, 8)] * 3), {"is_causal": True}),
    "groups": lambda: (tensors((2, 4, 50, 8), (2, 2, 60, 8), (2, 2, 60, 5)), {"enable_gqa": True, "scale": 0.3}),
    "two dimensions": lambda: (tensors((7, 3), (9, 3), (9, 4)), {}),
    "three dimensions": lambda: (tensors((2, 7, 3), (2, 9, 3), (2, 9, 4)), {"scale": -0.5}),
    "float mask": lambda: (tensors(*[(2, 3, 20, 8)] * 3, (20, 20)), {}),
    "mask for each head": lambda: (tensors(*[(2, 3, 20, 8)] * 3, (3, 1, 20)), {}),
    "boolean mask": lambda: ([*tensors(*[(2, 3, 20, 8)] * 3), torch.ones(20, 20).tril(3) > 0], {}),
    "transposed": lambda: ([t.transpose(1, 2) for t in tensors(*[(2, 20, 3, 8)] * 3)], {"is_causal": True}),
}


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_agree_with_pytorch(name: str) -> None:
    """In float64, up to rounding."""
    inputs, options = CASES[name]()
    ours, right = attention(*inputs, **options), theirs(*inputs, **options)
    torch.testing.assert_close(ours, right, rtol=1e-12, atol=1e-12)
    grad = torch.randn(ours.shape, dtype=ours.dtype, generator=torch.Generator().manual_seed(1))
    wanted = [t for t in inputs if t.requires_grad]
    for a, b in zip(torch.autograd.grad(ours, wanted, grad), torch.autograd.grad(right, wanted, grad), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


def operator_arguments(inputs: list[Any], mask: Any = None, **options: Any) -> tuple[Any, ...]:
    """Return the arguments of ``torch.ops.cattn.attention``, in their order."""
    if "block_mask" in options:
        options["block_mask"], options["block_size"] = options["block_mask"]
    seed = torch.tensor(-5) if options.get("dropout_p") else None
    names = ("query_offset", "query_seq_lengths", "key_value_seq_lengths", "key_value_seq_starts", "alibi_slopes")
    arrays = [options.get(name) for name in (*names, "block_mask", "key_indices", "key_scale", "value_scale")]
    causal = "upper_left" if options.get("is_causal") else ""
    numbers = (options.get("dropout_p", 0.0), causal, options.get("scale"), options.get("enable_gqa", False))
    numbers += (*options.get("window_size", (-1, -1)), options.get("softcap"))
    numbers += (options.get("compute_dtype"), options.get("block_size"))
    operands = (*inputs, mask, options.get("bias"), options.get("sinks"))
    return (*operands, *arrays, seed, *numbers, options.get("return_weights", False))


@pytest.mark.long
@pytest.mark.promise("torch.compile")
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dropout_p", [0.0, 0.4])
def test_the_operator_fulfils_the_contract_of_torch_library(name: str, dropout_p: float) -> None:
    inputs, options = CASES[name]()
    inputs = [t.detach().requires_grad_(t.requires_grad) for t in inputs]  # leaf tensors with the same strides
    mask = inputs[3] if len(inputs) > 3 else None
    args = operator_arguments(inputs[:3], mask, dropout_p=dropout_p, **options)
    torch.library.opcheck(torch.ops.cattn.attention.default, args)
    with torch.no_grad():
        out, lse, _ = torch.ops.cattn.attention(*args)
        still = [t.detach() if isinstance(t, torch.Tensor) else t for t in args[:-1]]
    backward = (torch.ones_like(out), torch.ones_like(lse), None, out, lse, *still)
    torch.library.opcheck(torch.ops.cattn.attention_backward.default, backward)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_other_dtypes_agree_with_pytorch_in_float64(dtype: torch.dtype) -> None:
    inputs = tensors(*[(2, 3, 40, 16)] * 3, dtype=dtype)
    out = attention(*inputs, is_causal=True)
    grads = torch.autograd.grad(out.sum(), inputs)
    assert {out.dtype, *(grad.dtype for grad in grads)} == {dtype}
    wide = [t.detach().double().requires_grad_() for t in inputs]
    right = theirs(*wide, is_causal=True)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(out.double(), right, rtol=2 * eps, atol=2 * eps)
    for a, b in zip(grads, torch.autograd.grad(right.sum(), wide), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=8 * eps, atol=8 * eps)


# ---- random numbers ------------------------------------------------------------------------------------------------
def test_dropout_follows_the_seed_of_pytorch() -> None:
    q, k, v = tensors(*[(2, 3, 40, 16)] * 3)

    def call() -> torch.Tensor:
        return attention(q, k, v, dropout_p=0.5)

    torch.manual_seed(1)
    first, second = call(), call()
    torch.manual_seed(1)
    assert torch.equal(call(), first)
    assert not torch.equal(first, second)
    torch.manual_seed(2)
    assert not torch.equal(call(), first)


def test_checkpointing_draws_the_same_mask() -> None:
    x = torch.randn(1, 2, 30, 8, requires_grad=True)

    def loss(x: torch.Tensor) -> torch.Tensor:
        return attention(x, x, x, dropout_p=0.4).square().sum()

    torch.manual_seed(7)
    (plain,) = torch.autograd.grad(loss(x), x)
    torch.manual_seed(7)
    (again,) = torch.autograd.grad(checkpoint(loss, x, use_reentrant=False), x)
    assert torch.equal(plain, again)


# ---- compilation ---------------------------------------------------------------------------------------------------
@pytest.mark.promise("torch.compile")
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_without_a_graph_break(dynamic: bool) -> None:
    def loss(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return attention(q * 2, k, v, dropout_p=0.2, is_causal=True).square().sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for tokens in (20, 33):
        inputs = tensors(*[(1, 2, tokens, 8)] * 3)
        torch.manual_seed(0)
        right = loss(*inputs)
        torch.manual_seed(0)
        ours = compiled(*inputs)
        assert torch.equal(ours, right)
        for a, b in zip(torch.autograd.grad(ours, inputs), torch.autograd.grad(right, inputs), strict=True):
            assert torch.equal(a, b)


# ---- what surrounds a call -----------------------------------------------------------------------------------------
def test_a_profiler_shows_attention_and_its_gradients() -> None:
    (x,) = tensors((1, 2, 5, 8))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        attention(x.detach(), x.detach(), x.detach())
        attention(x, x, x).sum().backward()
        torch.ops.cattn.attention(*operator_arguments([x.detach()] * 3))
    counts = {
        name: sum(event.name == f"cattn::{name}" for event in profile.events())
        for name in ("attention", "attention_backward")
    }
    assert counts == {"attention": 3, "attention_backward": 1}


def everything(x: torch.Tensor) -> list[torch.Tensor]:
    """Results and gradients of calls for which the integration makes tensors."""
    lengths = torch.tensor([5, 4], device="cpu")
    slopes = torch.tensor([0.5, 0.25], dtype=torch.float64, device="cpu")
    calls: list[Any] = [
        lambda y: attention(y, y, y, dropout_p=0.5, rng=3),
        lambda y: attention(y, y, y, dropout_p=0.5),
        lambda y: attention(y, y, y, key_value_seq_lengths=4, alibi_slopes=slopes, return_weights=True).weights,
        lambda y: attention(y, y, y, key_value_seq_lengths=lengths, dropout_p=0.5, rng=1, return_lse=True).lse,
        lambda y: torch.vmap(lambda z: attention(z, z, z, is_causal=True, query_offset=0), 1, 1)(y),
        torch.compile(lambda y: attention(y, y, y, dropout_p=0.5, key_value_seq_lengths=4), backend="aot_eager"),
        lambda y: torch.nn.functional.scaled_dot_product_attention(y, y, y, dropout_p=0.5),
    ]
    found = []
    for call in calls:
        torch.manual_seed(5)
        out = call(x)
        found += [out, *torch.autograd.grad(out.sum(), x, create_graph=True)]
        torch.manual_seed(5)
        found += torch.autograd.grad(call(x).sum(), x)
    with torch.no_grad():
        found.append(attention(x, x, x, dropout_p=0.5, rng=3, query_seq_lengths=3))
    return found


def test_the_default_device_and_dtype_do_not_count() -> None:
    """The tensors of a call have theirs. "meta" takes the place of "cuda"."""
    (x,) = tensors((2, 2, 5, 8))
    with bridge.use_cattn():
        torch.compiler.reset()
        right = everything(x)
        for device, dtype in (("meta", torch.float32), ("cpu", torch.float64), ("cpu", torch.float16)):
            torch.compiler.reset()
            before = torch.get_default_dtype()
            try:
                torch.set_default_dtype(dtype)
                with torch.device(device):
                    found = everything(x)
            finally:
                torch.set_default_dtype(before)
            for ours, wanted in zip(found, right, strict=True):
                assert torch.equal(ours, wanted)


@pytest.mark.parametrize("shape", [(2, 0, 4, 5), (0, 3, 4, 5), (2, 3, 0, 5), (2, 3, 4, 0)])
@pytest.mark.parametrize("swapped", [False, True])
def test_empty_tensors_have_the_strides_that_the_compiler_expects(shape: tuple[int, ...], swapped: bool) -> None:
    x = torch.randn(shape)
    x = x.transpose(1, 2).contiguous().transpose(1, 2) if swapped else x
    args = operator_arguments([x.requires_grad_()] * 3, return_weights=True)
    torch.library.opcheck(torch.ops.cattn.attention.default, args, test_utils=("test_faketensor",))
    for options in ({}, {"return_weights": True, "return_lse": True}):
        result: Any = attention(x, x, x, **options)
        still = x.detach()
        with FakeTensorMode() as mode:
            fake: Any = attention(*[mode.from_tensor(still)] * 3, **options)
        results = [(result, fake)] if not options else zip(result[:3], fake[:3], strict=True)
        assert all(real.stride() == expected.stride() for real, expected in results)


# ---- errors --------------------------------------------------------------------------------------------------------
def test_wrong_tensors_are_refused_by_name() -> None:
    x = torch.ones(2, 3, 4)
    with pytest.raises(ValueError, match="key is on meta, cattn computes on the CPU"):
        attention(x, x.to("meta"), x)
    with pytest.raises(TypeError, match=r"query has dtype torch\.int64; float16, bfloat16, float32 or float64"):
        attention(x.long(), x, x)
    with pytest.raises(TypeError, match=r"value has dtype torch\.float64; query has torch\.float32"):
        attention(x, x, x.double())
    with pytest.raises(ValueError, match="key has head_dim 3, query has 4"):
        attention(x, x[..., :3], x)
    with pytest.raises(ValueError, match="attn_mask is on meta, cattn computes on the CPU"):
        attention(x, x, x, torch.ones(3, 3, dtype=torch.bool, device="meta"))
    array: Any = x.numpy()
    with pytest.raises(TypeError, match=r"query must be a torch\.Tensor, got ndarray"):
        attention(array, x, x)
    with pytest.raises(TypeError, match=r"attn_mask must be a torch\.Tensor, got ndarray"):
        attention(x, x, x, array)


@pytest.mark.parametrize(
    ("shapes", "options", "message"),
    [
        (((2, 3, 5, 4), (4, 3, 5, 4), (4, 3, 5, 4)), {}, "axis -4 query has size 2, key has 4"),
        (
            ((2, 1, 5, 4), (2, 4, 5, 4), (2, 3, 5, 4)),
            {"enable_gqa": True},
            r"value has heads \(axis -3\): 3, key has 4",
        ),
        (((2, 6, 5, 4), (2, 4, 5, 4), (2, 4, 5, 4)), {"enable_gqa": True}, "query has 6 heads"),
        (((4,), (5, 4), (5, 4)), {}, "query must have at least 2 dimensions"),
    ],
)
def test_wrong_shapes_are_refused_by_name(shapes: Any, options: dict[str, Any], message: str) -> None:
    """With the message of cattn's own functions."""
    with pytest.raises(ValueError, match=message):
        attention(*map(torch.ones, shapes), **options)


def test_wrong_flags_and_numbers_are_refused_by_name() -> None:
    x: Any = torch.ones(2, 3, 4)
    with pytest.raises(TypeError, match="dropout_p must be a real number, got str"):
        attention(x, x, x, dropout_p="x")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"dropout_p must be in \[0, 1\], got 1.5"):
        attention(x, x, x, dropout_p=1.5)
    for wrong in ("lower", 2, None):
        with pytest.raises(TypeError, match=f'is_causal must be a bool, "upper_left" or "lower_right", got {wrong!r}'):
            attention(x, x, x, is_causal=wrong)  # type: ignore[call-overload]


def test_one_query_head_is_broadcast() -> None:
    query, key = torch.randn(2, 1, 5, 8), torch.randn(2, 4, 5, 8)
    torch.library.opcheck(
        torch.ops.cattn.attention.default,
        operator_arguments([query, key, key], enable_gqa=True),
        test_utils="test_faketensor",
    )
    expected = theirs(query.expand(2, 4, 5, 8), key, key)
    torch.testing.assert_close(attention(query, key, key, enable_gqa=True), expected)


def test_a_negative_view_is_read() -> None:
    """PyTorch leaves the sign of such a tensor to the reader."""
    z = torch.randn(2, 5, 4, dtype=torch.complex64)
    x = torch.randn(2, 5, 4)
    negative = z.conj().imag
    assert negative.is_neg()
    assert torch.equal(attention(negative, x, x), attention(-z.imag, x, x))


# ---- options that PyTorch's function does not have -------------------------------------------------------------------
B, H, T_q, T_k, D = 2, 4, 6, 9, 8
LISTS = torch.arange(B * T_q * 4).reshape(B, T_q, 4) % T_k - 1


def tensor(*shape: int, seed: int = 1) -> Any:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


OPTIONS: dict[str, dict[str, Any]] = {
    "bias": {"bias": tensor(H, T_q, T_k)},
    "bias and a boolean mask": {"bias": tensor(T_k), "attn_mask": tensor(T_q, T_k) > -1},
    "bias and a float mask": {"bias": tensor(B, 1, T_q, T_k), "attn_mask": tensor(H, 1, T_k, seed=2)},
    "softcap and scale": {"softcap": 0.7, "scale": 0.9},
    "window": {"window_size": (2, 1), "query_offset": 3},
    "causal with an offset for each batch entry": {"is_causal": True, "query_offset": torch.tensor([3, 0])},
    "aligned to the lower right": {"is_causal": "lower_right"},
    "lengths": {"query_seq_lengths": torch.tensor([6, 4]), "key_value_seq_lengths": torch.tensor([5, 9])},
    "starts": {"key_value_seq_starts": torch.tensor([0, 5]), "is_causal": "lower_right"},
    "starts and lengths": {"key_value_seq_starts": 2, "key_value_seq_lengths": torch.tensor([1, 8])},
    "one length for all": {"key_value_seq_lengths": 7, "query_seq_lengths": 5},
    "slopes": {"alibi_slopes": torch.from_numpy(cattn.get_alibi_slopes(H)), "query_offset": 3},
    "sinks": {"sinks": tensor(H)},
    "sinks for each batch entry, groups inferred": {"sinks": tensor(B, H), "enable_gqa": None},
    "a list of keys for each query": {"key_indices": LISTS[:, None], "is_causal": "lower_right", "bias": tensor(T_k)},
    "a list of keys for all": {"key_indices": torch.tensor([3, -1, 0, 3], dtype=torch.int32), "sinks": tensor(H)},
    "blocks of each head": {"block_mask": (tensor(H, 3, 5) > -0.5, 2), "is_causal": "lower_right"},
    "blocks for all": {"block_mask": (tensor(2, 1) < 0.5, 5), "bias": tensor(T_q, T_k)},
    "blocks and lists": {"block_mask": (tensor(B, 1, 2, 3) > -1, 4), "key_indices": LISTS[:, None]},
    "one block": {"block_mask": (torch.tensor([[True]]), 2**63 - 1), "sinks": tensor(H)},
    "dropout from a seed": {"dropout_p": 0.4, "rng": 2**64 - 3},
}
WITH_GRADIENT = ("attn_mask", "bias", "sinks")


def case(name: str) -> tuple[list[Any], dict[str, Any], list[Any]]:
    """Return query, key and value; the options; and all tensors that have a gradient."""
    options = dict(OPTIONS[name])
    heads = 2 if "enable_gqa" in options else H
    inputs = tensors((B, H, T_q, D), (B, heads, T_k, D), (B, heads, T_k, 5))
    leaves = list(inputs)
    for option in WITH_GRADIENT:
        if option in options and options[option].is_floating_point():
            options[option] = options[option].clone().requires_grad_()
            leaves.append(options[option])
    return inputs, options, leaves


def as_arrays(options: dict[str, Any]) -> dict[str, Any]:
    arrays = {name: x.detach().numpy() if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    if arrays.get("is_causal") is True:
        arrays["is_causal"] = "upper_left"
    if "block_mask" in arrays:
        arrays["block_mask"] = cattn.BlockMask(*arrays["block_mask"])
    return arrays


def compiled(**options: Any) -> Any:
    """Return attention under the compiler; each call compiles anew."""
    torch.compiler.reset()
    return torch.compile(lambda q, k, v: attention(q, k, v, **options), backend="aot_eager", fullgraph=True)


@pytest.mark.parametrize("by_lse", [False, True], ids=["", "by lse"])
@pytest.mark.parametrize("name", OPTIONS)
def test_every_way_gives_the_bits_and_gradients_of_the_numpy_function(name: str, by_lse: bool) -> None:
    inputs, options, leaves = case(name)
    arrays = [x.detach().numpy() for x in inputs]
    wanted = cattn.scaled_dot_product_attention(*arrays, return_weights=True, return_lse=True, **as_arrays(options))
    with torch.no_grad():
        at_once = attention(*inputs, **options, return_weights=True, return_lse=True)
    with_gradients = attention(*inputs, **options, return_weights=True, return_lse=True)
    operator = compiled(**options, return_weights=True, return_lse=True)(*inputs)
    for result in (at_once, with_gradients, operator):
        for field in ("out", "weights", "lse"):
            np.testing.assert_array_equal(getattr(result, field).detach().numpy(), getattr(wanted, field))
    assert not at_once.out.requires_grad
    assert not at_once.weights.requires_grad

    grad = tensor(*wanted.out.shape, seed=5)
    kwargs = as_arrays(options)
    if name == "bias and a float mask":  # attention_backward gives the gradient of one of them, in its shape
        kwargs["bias"] = kwargs["bias"] + kwargs.pop("attn_mask")
    grad_lse = tensor(*wanted.lse.shape, seed=6) if by_lse else None
    grads = cattn.attention_backward(
        grad.numpy(), *arrays, wanted.out, wanted.lse, grad_lse=None if grad_lse is None else grad_lse.numpy(), **kwargs
    )
    found, also = (
        torch.autograd.grad((x.out, x.lse), leaves, (grad, grad_lse)) if by_lse
        else torch.autograd.grad(x.out, leaves, grad)
        for x in (with_gradients, operator)
    )  # fmt: skip
    for ours, other, right in zip(found, also, grads[:3], strict=False):
        np.testing.assert_array_equal(ours, right)
        assert torch.equal(ours, other)
    extras = [x for x in grads[3:] if x is not None]
    assert len(leaves) > 3 or not extras
    for ours, other in zip(found[3:], also[3:], strict=True):
        assert torch.equal(ours, other)
        right = torch.from_numpy(extras[0])
        np.testing.assert_allclose(ours, right.sum_to_size(ours.shape), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("compute_dtype", ["bfloat16", "bfloat16_tiles", torch.bfloat16])
def test_products_of_bfloat16_have_the_bits_and_gradients_of_the_numpy_function(compute_dtype: Any) -> None:
    leaves = [tensor(2, 3, 50, 16, seed=i).float().requires_grad_() for i in range(3)]
    arrays = [x.detach().numpy() for x in leaves]
    word: Any = compute_dtype if isinstance(compute_dtype, str) else "bfloat16"
    wanted = cattn.scaled_dot_product_attention(*arrays, return_lse=np.float64, compute_dtype=word)
    with torch.no_grad():
        at_once = attention(*leaves, compute_dtype=compute_dtype)
    with_gradients = attention(*leaves, compute_dtype=compute_dtype)
    operator = compiled(compute_dtype=compute_dtype)(*leaves)
    grads = cattn.attention_backward(np.ones_like(wanted.out), *arrays, wanted.out, wanted.lse, compute_dtype=word)
    for out in (at_once, with_gradients, operator):
        np.testing.assert_array_equal(out.detach().numpy(), wanted.out)
    for out in (with_gradients, operator):
        for ours, right in zip(torch.autograd.grad(out.sum(), leaves), grads[:3], strict=True):
            np.testing.assert_array_equal(ours.numpy(), right)


@pytest.mark.parametrize("wrong", [torch.float32, "float32", torch.float16, np.float32, 1])
def test_a_wrong_compute_dtype_is_named(wrong: Any) -> None:
    x = tensor(1, 2, 4, 3).float()
    with pytest.raises(
        ValueError, match=r"compute_dtype must be None, 'bfloat16', 'bfloat16_tiles' or torch\.bfloat16, got"
    ):
        attention(x, x, x, compute_dtype=wrong)


@pytest.mark.long
@pytest.mark.promise("torch.compile")
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("return_weights", [False, True])
def test_the_operator_fulfils_its_contract_with_every_option(name: str, return_weights: bool) -> None:
    inputs, options, _ = case(name)
    counts = ("offset", "lengths", "starts")
    options = {k: torch.as_tensor(v) if k.endswith(counts) else v for k, v in options.items()}
    mask = options.pop("attn_mask", None)
    mask = None if mask is None else mask.detach()  # with a bias the function adds the two before the operator
    args = operator_arguments([t.detach().requires_grad_() for t in inputs], mask, return_weights=return_weights,
                              **options)  # fmt: skip
    torch.library.opcheck(torch.ops.cattn.attention.default, args)


def test_options_of_halves() -> None:
    """Gradients of bias and sinks have the dtypes of their tensors, not float32."""
    for dtype in (torch.float16, torch.bfloat16):
        q, k, v, bias = tensors(*[(2, 3, 7, 8)] * 3, (7, 7), dtype=dtype)
        sinks = torch.zeros(3, dtype=torch.float32, requires_grad=True)
        result = attention(q, k, v, bias=bias, sinks=sinks, return_lse=True)
        assert result.out.dtype is dtype
        assert result.lse.dtype is torch.float32
        result.out.sum().backward()
        assert bias.grad is not None
        assert bias.grad.dtype is dtype
        assert sinks.grad is not None
        assert sinks.grad.dtype is torch.float32


def test_an_output_lies_in_memory_as_its_query() -> None:
    """As PyTorch's does: models join the heads of a token without a copy, or take them for contiguous."""
    k = tensor(2, 3, 7, 8)
    for q in (tensor(2, 7, 3, 8).transpose(1, 2), tensor(2, 3, 7, 8)):
        right = theirs(q, k, k).stride()
        for out in (attention(q, k, k), compiled()(q, k, k), attention(q, k, k, return_lse=True).out):
            assert out.stride() == right
        assert attention(q, k.clone().requires_grad_(), k).stride() == right


def test_dropout_of_a_generator() -> None:
    q, k, v = tensors(*[(2, 3, 9, 8)] * 3)
    a = attention(q, k, v, dropout_p=0.5, rng=torch.Generator().manual_seed(4))
    state = torch.get_rng_state()
    b = attention(q, k, v, dropout_p=0.5, rng=torch.Generator().manual_seed(4))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(a, b)
    assert not torch.equal(a, attention(q, k, v, dropout_p=0.5, rng=torch.Generator().manual_seed(5)))
    with pytest.raises(TypeError, match=r"rng must be None, an int or a torch\.Generator, got str"):
        attention(q, k, v, dropout_p=0.5, rng="x")  # type: ignore[call-overload]
    with pytest.raises(ValueError, match=r"rng must be in \[0, 2\*\*64\), got -1"):
        attention(q, k, v, dropout_p=0.5, rng=-1)


def test_lengths_may_change_between_the_passes() -> None:
    """A decoding loop counts its lengths up in place."""
    q, k, v = tensors(*[(2, 3, 9, 8)] * 3)
    lengths = torch.tensor([4, 9])
    (right,) = torch.autograd.grad(attention(q, k, v, key_value_seq_lengths=lengths).sum(), k)
    out = attention(q, k, v, key_value_seq_lengths=lengths)
    lengths += 1
    (ours,) = torch.autograd.grad(out.sum(), k)
    assert torch.equal(ours, right)


def test_wrong_options_are_refused_by_name() -> None:
    x = torch.ones(2, 3, 4)
    array: Any = np.ones(3)
    for name in ("bias", "sinks", "alibi_slopes", "attn_mask", "block_mask", "key_indices"):
        with pytest.raises(TypeError, match=rf"{name} must be a torch\.Tensor, got (ndarray|list)"):
            attention(x, x, x, **{name: ([True], 2) if name == "block_mask" else array})
        meta: Any = torch.ones(3, device="meta")
        with pytest.raises(ValueError, match=f"{name} is on meta, cattn computes on the CPU"):
            attention(x, x, x, **{name: (meta, 2) if name == "block_mask" else meta})
    with pytest.raises(ValueError, match="sinks has shape"):
        attention(x, x, x, sinks=torch.ones(7))
    with pytest.raises(ValueError, match="softcap"):
        attention(x, x, x, softcap=-1.0)
    with pytest.raises(TypeError, match="key_value_seq_lengths"):
        attention(x, x, x, key_value_seq_lengths=torch.tensor([0.5, 1.0]))
    blocks = torch.ones(1, 1, dtype=torch.bool)
    assert torch.equal(attention(x, x, x, block_mask=(blocks, np.int32(5))), attention(x, x, x))
    for call in (attention, torch.vmap(lambda *given, **options: attention(*given, **options), (0, 0, 0))):
        with pytest.raises(
            TypeError, match=r"block_mask must be a cattn.BlockMask or a pair \(blocks, size\), got Tensor"
        ):
            call(x, x, x, block_mask=blocks)
        for size, error in ((0, ValueError), (2**63, ValueError), (1.5, TypeError), (True, TypeError)):
            with pytest.raises(error, match=r"(block_mask\.)?size must be"):
                call(x, x, x, block_mask=(blocks, size))
    with pytest.raises(TypeError, match="block_mask has dtype float32"):
        attention(x, x, x, block_mask=(blocks.float(), 3))
    with pytest.raises(TypeError, match="window_size"):
        attention(x, x, x, window_size=3)  # type: ignore[call-overload]
    with pytest.raises(NotImplementedError, match=r"alibi_slopes requires grad.*alibi_slopes\.detach\(\)"):
        attention(x, x, x, alibi_slopes=torch.ones(1, requires_grad=True))


@pytest.mark.parametrize("shape", [(2, 5, 4, 8), (5, 4, 8), (3, 2, 5, 4, 8)], ids=str)
@pytest.mark.parametrize("enable_gqa", [None, True, False])
def test_tokens_before_heads(shape: tuple[int, ...], enable_gqa: bool | None) -> None:
    """The bits are cattn's for arrays in this layout, and for swapped tensors, with gradients, vmap and a compiler."""
    kv_heads = 4 if enable_gqa is False else 2
    query = tensor(*shape)
    key, value = tensor(*shape[:-3], 7, kv_heads, 8, seed=1), tensor(*shape[:-3], 7, kv_heads, 6, seed=2)
    options = {"enable_gqa": enable_gqa, "is_causal": "lower_right"}
    leaves = [x.requires_grad_() for x in (query, key, value)]
    sinks = tensor(4)
    found = attention(*leaves, layout="bthd", sinks=sinks, return_weights=True, return_lse=True, **options)
    arrays = [x.detach().numpy() for x in leaves]
    wanted = cattn.scaled_dot_product_attention(
        *arrays, layout="bthd", sinks=sinks.numpy(), return_weights=True, return_lse=True, **options
    )
    for name in ("out", "weights", "lse"):
        np.testing.assert_array_equal(getattr(found, name).detach().numpy(), getattr(wanted, name))

    def swapped(*x: Any) -> Any:
        single = x[0].ndim == 3  # an axis before the heads, so that they are heads
        q, k, v = (y.transpose(-3, -2)[None] if single else y.transpose(-3, -2) for y in x)
        out = attention(q, k, v, sinks=sinks, **options).transpose(-3, -2)
        return out[0] if single else out

    grad = tensor(*found.out.shape, seed=5)
    ours, theirs = (torch.autograd.grad(f, leaves, grad) for f in (found.out, swapped(*leaves)))
    assert all(map(torch.equal, ours, theirs))
    still = [x.detach() for x in leaves]

    def call(*x: Any) -> Any:
        return attention(*x, layout="bthd", sinks=sinks, **options)

    torch.compiler.reset()
    assert torch.equal(torch.compile(call, backend="aot_eager", fullgraph=True)(*still), found.out)
    stacked = [torch.stack([x, 2 * x]) for x in still]
    one_by_one = torch.stack([call(*(x[i] for x in stacked)) for i in range(2)])
    assert torch.equal(torch.vmap(call)(*stacked), one_by_one)


def test_wrong_layouts_are_refused() -> None:
    x = tensor(2, 5, 4)
    for layout in ("thd", 5, True):
        with pytest.raises(ValueError, match=r"layout must be 'bhtd' or 'bthd', got"):
            attention(x, x, x, layout=layout)
    with pytest.raises(ValueError, match=r"key must have at least 3 dimensions \(\.\.\., T_k, heads, head_dim\) for"):
        attention(x, x[0], x, layout="bthd")
    assert torch.equal(attention(x, x, x, layout=None), attention(x, x, x))


def test_a_scale_with_fewer_axes_than_its_tensor_has_the_same_layout() -> None:
    query, values = tensor(2, 5, 2, 8).float(), tensor(2, 7, 2, 8).float()
    quantized = cattn.quantize(values.numpy(), dtype="int8")
    for scale in (quantized.scale, np.array([[0.1], [0.2]], np.float32), np.float32(0.1)):
        pair = cattn.Quantized(quantized.values, scale)
        wanted = cattn.scaled_dot_product_attention(query.numpy(), pair, values.numpy(), layout="bthd")
        np.testing.assert_array_equal(attention(query, pair, values, layout="bthd").numpy(), wanted)


# ---- keys and values of one byte -------------------------------------------------------------------------------------
K, N_KEYS, WIDTH, D_V = 2, 30, 16, 8
INTEGERS, FLOATS = torch.int8, torch.float8_e4m3fn
SHAPES: dict[str, tuple[Any, Any]] = {  # of the scales of keys and of values
    "tokens": ((B, K, N_KEYS, 1), (B, K, N_KEYS, 1)),
    "columns": ((K, 1, WIDTH), (D_V,)),
    "elements": ((B, K, N_KEYS, WIDTH), (B, K, N_KEYS, D_V)),
    "one": ((), (1, 1)),
    "keys alone": ((N_KEYS, 1), None),
    "values alone": (None, (B, 1, N_KEYS, 1)),
}


def arrays_of(name: str, dtype: Any = torch.float32, quantized: Any = INTEGERS) -> tuple[Any, Any, Any, dict[str, Any]]:
    """Return query, key, value and the scales that there are."""
    random = torch.Generator().manual_seed(len(name))
    tensors = [torch.randn((B, H, T_q, WIDTH), generator=random).to(dtype)]
    scales = {}
    for which, shape, columns in zip(("key", "value"), SHAPES[name], (WIDTH, D_V), strict=True):
        numbers = torch.randn((B, K, N_KEYS, columns), generator=random)
        tensors.append(numbers.to(dtype) if shape is None else (numbers * 40).to(quantized))
        if shape is not None:
            scales[f"{which}_scale"] = torch.rand(shape, generator=random) / 20 + 0.01
    query, key, value = tensors
    return query, key, value, scales


def by_pairs(query: Any, key: Any, value: Any, **options: Any) -> Any:
    """Call the function with pairs of tensors and their scales."""
    return attention(**paired({"query": query, "key": key, "value": value, **options}, as_tuple))


def dequantized(key: Any, value: Any, scales: dict[str, Any], wide: Any) -> list[Any]:
    """Return keys and values as plain tensors: products in float32."""
    found = []
    for name, tensor in (("key", key), ("value", value)):
        scale = scales.get(f"{name}_scale")
        found.append((tensor if scale is None else tensor.to(torch.float32) * scale).to(wide))
    return found


def options_of(wide: Any) -> tuple[list[Any], dict[str, Any]]:
    """Return bias and sinks, which have gradients, and the other options."""
    random = torch.Generator().manual_seed(1)
    leaves = [torch.randn(shape, generator=random).to(wide).requires_grad_() for shape in ((H, T_q, N_KEYS), (H,))]
    return leaves, {"softcap": 5.0, "key_value_seq_lengths": torch.tensor([N_KEYS, 21]), "enable_gqa": True}


TO_CALL: dict[str, Any] = {
    "at once": lambda function: function,
    "operator": lambda function: torch.compile(function, backend="aot_eager", fullgraph=True),
    "vmap": lambda function: lambda *x: tuple(y[0] for y in torch.vmap(function)(*(t[None] for t in x))),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("quantized", [INTEGERS, FLOATS])
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("way", TO_CALL)
def test_results_and_gradients_are_those_of_the_products(way: str, name: str, quantized: Any, dtype: Any) -> None:
    """Halves are computed in float32, and their results are rounded."""
    query, key, value, scales = arrays_of(name, dtype, quantized)
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    leaves, options = options_of(wide)
    floats = [query, *(x for x in (key, value) if x.dtype is dtype)]
    leaves = [*(x.requires_grad_() for x in floats), *leaves]
    names = list(scales)

    def ours(query: Any, key: Any, value: Any, bias: Any, sinks: Any, *given: Any) -> Any:
        scaled = dict(zip(names, given, strict=True))
        result = by_pairs(query, key, value, bias=bias, sinks=sinks, **scaled, **options, return_weights=True)
        return result.out, result.weights

    torch.compiler.reset()
    out, weights = TO_CALL[way](ours)(query, key, value, *leaves[-2:], *scales.values())
    plain = [query.to(wide), *dequantized(key, value, scales, wide)]
    right = by_pairs(*plain, bias=leaves[-2], sinks=leaves[-1], **options, return_weights=True)
    assert out.dtype is dtype
    assert torch.equal(out, right.out.to(dtype))
    assert torch.equal(weights, right.weights.to(dtype))
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).to(dtype)
    found = torch.autograd.grad(out, leaves, grad)
    expected = torch.autograd.grad(right.out, leaves, grad.to(wide))
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("quantized", [INTEGERS, FLOATS])
def test_pairs_have_the_bits_of_the_function_for_numpy(quantized: Any) -> None:
    query, key, value, scales = arrays_of("tokens", quantized=quantized)
    ours = by_pairs(query, key, value, **scales, enable_gqa=True)
    call = paired({"query": query, "key": key, "value": value, **scales})
    right = cattn.scaled_dot_product_attention(**call, enable_gqa=True)
    np.testing.assert_array_equal(ours.numpy(), right)


def test_tokens_before_heads_and_other_dtypes_of_scales() -> None:
    """The output has the memory order of the query. Scales are rounded to float32."""
    query, key, value, scales = arrays_of("tokens")
    query = query.transpose(1, 2).contiguous().transpose(1, 2)
    scales = {name: scale.to(torch.bfloat16) for name, scale in scales.items()}
    out = by_pairs(query, key, value, **scales, enable_gqa=True)
    assert out.stride() == torch.empty(B, T_q, H, D_V).transpose(1, 2).stride()
    assert torch.equal(out, by_pairs(query, *dequantized(key, value, scales, torch.float32), enable_gqa=True))


def test_autocast_casts_the_other_tensors() -> None:
    query, key, value, scales = arrays_of("keys alone")
    with torch.autocast("cpu", torch.bfloat16):
        out = by_pairs(query, key, value, **scales, enable_gqa=True)
    right = by_pairs(query.bfloat16(), key, value.bfloat16(), **scales, enable_gqa=True)
    assert out.dtype is torch.bfloat16
    assert torch.equal(out, right)


@pytest.mark.parametrize("quantized", [INTEGERS, FLOATS])
def test_the_operator_fulfils_its_contract_with_pairs(quantized: Any) -> None:
    query, key, value, scales = arrays_of("tokens", quantized=quantized)
    args = operator_arguments([query.requires_grad_(), key, value], enable_gqa=True, **scales)
    checks = ["test_autograd_registration", "test_faketensor"]
    if quantized is INTEGERS:  # PyTorch's check of the schema multiplies the tensors
        checks.append("test_schema")
    torch.library.opcheck(torch.ops.cattn.attention.default, args, test_utils=checks)
    with torch.no_grad():
        out, lse, _ = torch.ops.cattn.attention(*args)
    backward = (torch.ones_like(out), torch.ones_like(lse), None, out, lse, query.detach(), *args[1:-1])
    torch.library.opcheck(torch.ops.cattn.attention_backward.default, backward, test_utils=checks)


@pytest.mark.parametrize("dims", [(0, 0, 0, 0, 0), (0, None, None, None, None), (None, 1, None, 0, None),
                                  (None, None, None, None, 2)])  # fmt: skip
@pytest.mark.parametrize("axes", [2, 3, 4])
def test_vmap_is_a_loop(dims: tuple[int | None, ...], axes: int) -> None:
    query, key, value, scales = arrays_of("tokens")
    parts = [query[:, :K], key, value, *scales.values()]
    parts = [x[(0,) * (4 - axes)] for x in parts]
    full = [
        x if d is None else torch.stack([x, x.flip(-2), x.roll(1, -2)], min(d, axes - 1))
        for x, d in zip(parts, dims, strict=True)
    ]
    at = tuple(None if d is None else min(d, axes - 1) for d in dims)

    def call(query: Any, key: Any, value: Any, key_scale: Any, value_scale: Any) -> Any:
        return by_pairs(query, key, value, key_scale=key_scale, value_scale=value_scale, is_causal=True)

    found = torch.vmap(call, at)(*full)
    for i in range(3):
        one = call(*(x if d is None else x.select(d, i) for x, d in zip(full, at, strict=True)))
        assert torch.equal(found[i], one)


# ---- errors --------------------------------------------------------------------------------------------------------
X = torch.ones(2, 3, 4)
I8 = X.to(INTEGERS)
WRONG: dict[str, tuple[type[Exception], str, tuple[Any, ...], dict[str, Any]]] = {
    "floats": (TypeError, "key has dtype torch.float32 and a scale; scales belong to int8", (X, X, X),
               {"key_scale": X}),
    "other integers": (TypeError, "value has dtype torch.int16 and a scale", (X, X, X.short()), {"value_scale": X}),
    "one scale": (TypeError, r"value has dtype torch.int8 and no scale: pass the pair \(value, scale\)", (X, I8, I8),
                  {"key_scale": X}),
    "integer queries": (TypeError, "query has dtype torch.int8 and no scale", (I8, I8, X), {"key_scale": X}),
    "dtypes": (TypeError, "value has dtype torch.float64; query has torch.float32", (X, I8, X.double()),
               {"key_scale": X}),
    "array": (TypeError, r"key\.scale must be a torch.Tensor, got ndarray", (X, I8, X), {"key_scale": np.ones(1)}),
    "no tensor": (TypeError, "key must be a torch.Tensor, got int", (X, 1, X), {"key_scale": X}),
    "boolean scale": (TypeError, r"key\.scale has dtype torch.bool; it must hold real numbers", (X, I8, X),
                      {"key_scale": X > 0}),
    "device": (ValueError, r"key\.scale is on meta", (X, I8, X), {"key_scale": X.to("meta")}),
    "shape": (ValueError, r"key\.scale has shape \(3,\), which does not broadcast to the shape of key \(2, 3, 4\)",
              (X, I8, X), {"key_scale": torch.ones(3)}),
    "zero": (ValueError, r"key\.scale must be positive and finite, .* got 0.0", (X, I8, X), {"key_scale": X * 0}),
    "gradient of a scale": (NotImplementedError,
                            r"key\.scale requires grad, but has no gradient: pass key\.scale\.detach",
                            (X, I8, X), {"key_scale": X.clone().requires_grad_()}),
    "gradient of a key": (NotImplementedError, r"key requires grad, but has no gradient: pass key.detach",
                          (X, X.to(FLOATS).requires_grad_(), X), {"key_scale": X}),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_errors_name_the_argument(name: str) -> None:
    kind, text, arguments, options = WRONG[name]
    with pytest.raises(kind, match=text):
        by_pairs(*arguments, **options)
