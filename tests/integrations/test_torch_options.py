"""cattn inside PyTorch: the options that PyTorch's function does not have, by every way, and under torch.vmap."""

from typing import Any

import numpy as np
import pytest

import cattn

torch = pytest.importorskip("torch")

from test_torch_integration import attention, operator_arguments, tensors, theirs  # noqa: E402
from torch.autograd import forward_ad  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from cattn.integrations import torch as bridge  # noqa: E402

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


@pytest.mark.parametrize("name", OPTIONS)
def test_gradients_are_derivatives(name: str) -> None:
    inputs, options, leaves = case(name)
    names = [option for option in ("bias", "attn_mask", "sinks") if option in options]
    names = [option for option in names if options[option].is_floating_point()]
    order = [*inputs, *(options[option] for option in names)]
    assert len(order) == len(leaves)

    def call(query: Any, key: Any, value: Any, *extras: Any) -> Any:
        return attention(query, key, value, **options | dict(zip(names, extras, strict=True)))

    assert torch.autograd.gradcheck(call, order, fast_mode=True)


# ---- the gradient of the log-sum-exp -------------------------------------------------------------------------------
def plain_formula(q: Any, k: Any, v: Any, bias: Any, sinks: Any, visible: Any) -> tuple[Any, Any, Any]:
    """Attention, its log-sum-exp and its weights in PyTorch's own operations."""
    scores = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5 + bias).masked_fill(~visible, -torch.inf)
    sink = sinks[:, None, None].expand(*scores.shape[:-1], 1)
    lse = torch.cat([scores, sink], dim=-1).logsumexp(-1)
    weights = (scores - lse[..., None]).exp()
    return weights @ v, lse, weights


def z_loss(out: Any, lse: Any, weights: Any, uses: str) -> Any:
    terms = {"lse": lse.square().mean() + lse.sin().sum(), "out": out.cos().sum(), "weights": weights.square().sum()}
    return sum(terms[name] for name in uses.split(" and "))


WAYS = {
    "autograd.Function": lambda function: function,
    "operator": lambda function: torch.compile(function, backend="aot_eager", fullgraph=True),
    "vmap": lambda function: lambda *x: tuple(y[0] for y in torch.vmap(function)(*(t[None] for t in x))),
}


@pytest.mark.promise("gradients")
@pytest.mark.parametrize("uses", ["lse", "out and lse", "weights", "out and lse and weights"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_lse_and_weights_have_the_gradients_of_the_plain_formula(way: str, uses: str, dtype: Any) -> None:
    shapes = ((B, H, T_q, D), (B, H, T_k, D), (B, H, T_k, 5), (H, T_q, T_k), (H,))
    leaves = [tensor(*shape, seed=i).to(dtype).requires_grad_() for i, shape in enumerate(shapes)]
    visible = tensor(B, 1, T_q, T_k, seed=9) > -1

    def ours(q: Any, k: Any, v: Any, bias: Any, sinks: Any) -> tuple[Any, Any, Any]:
        result: Any = attention(q, k, v, visible, bias=bias, sinks=sinks, return_lse=True, return_weights=True)
        return result.out, result.lse, result.weights

    torch.compiler.reset()
    out, lse, weights = WAYS[way](ours)(*leaves)
    assert out.dtype is dtype
    assert lse.dtype is (torch.float64 if dtype is torch.float64 else torch.float32)
    found = torch.autograd.grad(z_loss(out, lse, weights, uses), leaves, allow_unused=True)
    exact = [x.detach().double().requires_grad_() for x in leaves]
    expected = torch.autograd.grad(z_loss(*plain_formula(*exact, visible), uses), exact, allow_unused=True)
    # A rounding of each result, here of numbers up to about 3; of bfloat16 also the rounding of the output.
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.05}[dtype]
    for a, b in zip(found, expected, strict=True):
        right = torch.zeros_like(exact[2]) if b is None else b  # lse and weights do not depend on the values
        torch.testing.assert_close(torch.zeros_like(right) if a is None else a.double(), right, rtol=0, atol=tolerance)


@pytest.mark.parametrize("name", [name for name in OPTIONS if "dropout" not in name])
def test_gradients_of_lse_and_weights_are_derivatives(name: str) -> None:
    inputs, options, leaves = case(name)
    names = [option for option in WITH_GRADIENT if option in options and options[option].is_floating_point()]
    order = [*inputs, *(options[option] for option in names)]
    assert len(order) == len(leaves)

    def call(query: Any, key: Any, value: Any, *extras: Any) -> Any:
        given = options | dict(zip(names, extras, strict=True))
        result: Any = attention(query, key, value, **given, return_lse=True, return_weights=True)
        return result.out, result.lse.nan_to_num(neginf=0.0), result.weights  # differences of -inf are NaN

    assert torch.autograd.gradcheck(call, order, fast_mode=True)


def test_several_gradients_of_the_log_sum_exp_at_once() -> None:
    q, k, v = tensors(*[(B, H, T_q, D)] * 3)
    lse = attention(q, k, v, is_causal=True, return_lse=True).lse
    grads = tensor(3, *lse.shape, seed=2)
    batched = torch.autograd.grad(lse, (q, k), grads, is_grads_batched=True, retain_graph=True)
    each = [torch.autograd.grad(lse, (q, k), grad, retain_graph=True) for grad in grads]
    for i, found in enumerate(batched):
        torch.testing.assert_close(found, torch.stack([grad[i] for grad in each]), rtol=1e-12, atol=1e-12)


def test_a_row_without_keys_has_no_gradient_by_its_log_sum_exp() -> None:
    """Its log-sum-exp is -inf: the square has the gradient -inf, which does not count."""
    q, k, v = tensors(*[(2, 3, 9, 8)] * 3)
    lse = attention(q, k, v, query_seq_lengths=torch.tensor([9, 4]), return_lse=True).lse
    assert torch.isneginf(lse[1, :, 4:]).all()
    for grad in torch.autograd.grad(lse.square().sum(), (q, k)):
        assert torch.isfinite(grad).all()


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


# ---- second derivatives --------------------------------------------------------------------------------------------
NO_SECOND = r"cattn's attention \(torch\.ops\.cattn\.attention\) has no second derivatives of its weights: use .*MATH\)"


def by_swap(q: Any, k: Any, v: Any, **options: Any) -> Any:
    with bridge.use_cattn():
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, **options)


def by_checkpoint(q: Any, k: Any, v: Any) -> Any:
    return checkpoint(lambda: attention(q, k, v), use_reentrant=False)


FIRST: dict[str, Any] = {
    "out": attention,
    "use_cattn": by_swap,
    "the operator": lambda q, k, v: torch.ops.cattn.attention(*operator_arguments([q, k, v]))[0],
    "lse": lambda q, k, v: attention(q, k, v, return_lse=True).lse,
    "weights": lambda q, k, v: attention(q, k, v, return_weights=True).weights,
    "mask": lambda q, k, v: attention(q, k, v, (q @ k.mT).detach().requires_grad_()),
    "vmap": torch.vmap(attention),
    "checkpoint": by_checkpoint,
}
# Each takes a loss and x, on which the loss depends by a second way too: an unused graph is PyTorch's error.
SECOND: dict[str, Any] = {
    "hessian": lambda loss, x: torch.autograd.functional.hessian(loss, x),
    "vectorised": lambda loss, x: torch.autograd.functional.hessian(loss, x, vectorize=True),
    "hvp": lambda loss, x: torch.autograd.functional.hvp(loss, x, torch.ones_like(x)),
    "jvp by two backward passes": lambda loss, x: torch.autograd.functional.jvp(loss, x, torch.ones_like(x)),
    "create_graph": lambda loss, x: torch.autograd.grad(loss(x), x, create_graph=True)[0].square().sum().backward(),
}


def by_pytorch(q: Any, k: Any, v: Any, mask: Any = None) -> Any:
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, mask)


RIGHT: dict[str, Any] = {
    "lse": lambda q, k, v: torch.logsumexp(q @ k.mT / q.shape[-1] ** 0.5, -1),
    "mask": lambda q, k, v: by_pytorch(q, k, v, (q @ k.mT).detach()),
}


@pytest.mark.promise("gradients")
@pytest.mark.parametrize("first", FIRST)
@pytest.mark.parametrize("second", SECOND)
def test_second_derivatives_are_right(first: str, second: str) -> None:
    (x,) = tensors((1, 2, 4, 3))

    def loss(function: Any) -> Any:
        return lambda y: function(y, y, y).square().sum() + (y**3).sum()

    if first == "weights":
        error = RuntimeError if second == "jvp by two backward passes" else NotImplementedError
        with pytest.raises(error):
            SECOND[second](loss(FIRST[first]), x)
        return
    found = SECOND[second](loss(FIRST[first]), x)
    if second == "create_graph":
        found, x.grad = x.grad, None
    right = SECOND[second](loss(RIGHT.get(first, by_pytorch)), x)
    torch.testing.assert_close(found, x.grad if second == "create_graph" else right)


def test_second_derivatives_of_the_weights_are_an_error() -> None:
    (x,) = tensors((1, 2, 4, 3))
    loss = attention(x, x, x, return_weights=True).weights.square().sum()
    (grad,) = torch.autograd.grad(loss, x, create_graph=True)
    with pytest.raises(NotImplementedError, match=NO_SECOND):
        grad.sum().backward()


@pytest.mark.parametrize("first", ["out", "use_cattn", "the operator", "lse", "vmap"])
def test_third_derivatives_are_an_error_that_names_the_operator(first: str) -> None:
    (x,) = tensors((1, 2, 4, 3))
    (grad,) = torch.autograd.grad(FIRST[first](x, x, x).square().sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(grad.square().sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match=r"cattn's attention \(torch\.ops\.cattn.* has no third derivatives"):
        second.square().sum().backward()


@pytest.mark.parametrize("name", ["key_indices", "a quantized key", "compute_dtype"])
def test_second_derivatives_that_are_not_there_are_an_error(name: str) -> None:
    (x,) = tensors((1, 2, 4, 3))
    options: dict[str, Any] = {"key_indices": torch.zeros(4, 2, dtype=torch.int64)}
    key, value = x, x
    if name == "a quantized key":
        key, options = (torch.ones(1, 2, 4, 3, dtype=torch.int8), torch.ones(1)), {}
        x, value = (tensor(1, 2, 4, 3).float().requires_grad_() for _ in range(2))
    elif name == "compute_dtype":
        x = key = value = tensor(1, 2, 4, 3).float().requires_grad_()
        options = {"compute_dtype": "bfloat16"}
    out = attention(x, key, value, **options)
    (grad,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match=rf"has no second derivatives and no forward mode with {name}"):
        grad.square().sum().backward()


@pytest.mark.parametrize("first", FIRST)
def test_a_graph_of_first_derivatives_may_be_made(first: str) -> None:
    """The error belongs to the second derivative. The gradients have the bits of those without a graph."""
    (x,) = tensors((1, 2, 4, 3))
    right, graph = (
        torch.autograd.grad(FIRST[first](x, x, x).square().sum(), x, create_graph=create)[0]
        for create in (False, True)
    )  # fmt: skip
    assert torch.equal(right, graph)
    assert graph.requires_grad
    y = x.detach().requires_grad_()
    (penalty,) = torch.autograd.grad(graph.detach().square().sum() + (y**3).sum(), y, create_graph=True)
    penalty.sum().backward()  # does not pass through attention
    assert torch.equal(y.grad, 6 * x.detach())


def test_a_tangent_of_a_gradient_is_an_error() -> None:
    """Attention itself had none, so that its backward pass is no function of the tangent."""
    (x,) = tensors((1, 2, 4, 3))
    out = attention(x, x, x)
    with forward_ad.dual_level():
        tangent = forward_ad.make_dual(torch.ones_like(out), torch.ones_like(out))
        with pytest.raises(NotImplementedError, match=r"grad_out has a tangent, .*torch\.ops\.cattn\.attention"):
            out.backward(tangent)


@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")
def test_use_cattn_computes_forward_mode_of_a_batch() -> None:
    x = tensor(3, 5, 4)

    def call(y: Any) -> Any:
        return torch.nn.functional.scaled_dot_product_attention(y, y, y)

    right = torch.func.jvp(torch.vmap(call), (x,), (x,))
    with bridge.use_cattn() as seen:
        ours = torch.func.jvp(torch.vmap(call), (x,), (x,))
    assert seen.passed_on == 0
    for a, b in zip(ours, right, strict=True):
        torch.testing.assert_close(a, b)


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


# ---- use_cattn -----------------------------------------------------------------------------------------------------
@pytest.mark.promise("use_cattn")
def test_use_cattn_counts_its_calls() -> None:
    x = torch.randn(2, 5, 16)
    module = torch.nn.MultiheadAttention(16, 4, batch_first=True).train()
    compiled = torch.compile(torch.nn.functional.scaled_dot_product_attention, backend="aot_eager")
    with bridge.use_cattn() as outer:
        module(x, x, x, need_weights=False)
        module(x, x, x, need_weights=True)  # PyTorch computes the weights without the function
        with bridge.use_cattn() as inner:
            torch.nn.functional.scaled_dot_product_attention(x, x, x)
            with pytest.raises(RuntimeError):
                torch.nn.functional.scaled_dot_product_attention(x[0, 0], x[0], x[0])
        compiled(x, x, x)
    assert (inner.calls, inner.passed_on) == (1, 1)
    assert (outer.calls, outer.passed_on) == (2, 1)
    theirs(x, x, x)
    assert outer == bridge.Seen(2, 1)


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
