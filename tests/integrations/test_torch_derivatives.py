"""cattn inside PyTorch: derivatives of both orders, tangents, transforms and vmap; right, or an error with a name."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import cattn
from support import looped

torch = pytest.importorskip("torch")
from test_torch_attention import (  # noqa: E402
    LISTS,
    OPTIONS,
    TO_CALL,
    WITH_GRADIENT,
    B,
    D,
    H,
    T_k,
    T_q,
    attention,
    case,
    operator_arguments,
    tensor,
    tensors,
)
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode  # noqa: E402
from torch.autograd import forward_ad  # noqa: E402
from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from cattn.integrations import torch as bridge  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")  # PyTorch's own, in forward mode


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


@pytest.mark.promise("gradients")
@pytest.mark.parametrize("uses", ["lse", "out and lse", "weights", "out and lse and weights"])
@pytest.mark.parametrize("way", TO_CALL)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_lse_and_weights_have_the_gradients_of_the_plain_formula(way: str, uses: str, dtype: Any) -> None:
    shapes = ((B, H, T_q, D), (B, H, T_k, D), (B, H, T_k, 5), (H, T_q, T_k), (H,))
    leaves = [tensor(*shape, seed=i).to(dtype).requires_grad_() for i, shape in enumerate(shapes)]
    visible = tensor(B, 1, T_q, T_k, seed=9) > -1

    def ours(q: Any, k: Any, v: Any, bias: Any, sinks: Any) -> tuple[Any, Any, Any]:
        result: Any = attention(q, k, v, visible, bias=bias, sinks=sinks, return_lse=True, return_weights=True)
        return result.out, result.lse, result.weights

    torch.compiler.reset()
    out, lse, weights = TO_CALL[way](ours)(*leaves)
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


def by_pytorch(q: Any, k: Any, v: Any, mask: Any = None, **options: Any) -> Any:
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, **options)


EXACT: dict[str, Any] = {
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
        with pytest.raises(error, match=NO_SECOND if second == "create_graph" else None):
            SECOND[second](loss(FIRST[first]), x)
        return
    found = SECOND[second](loss(FIRST[first]), x)
    if second == "create_graph":
        found, x.grad = x.grad, None
    right = SECOND[second](loss(EXACT.get(first, by_pytorch)), x)
    torch.testing.assert_close(found, x.grad if second == "create_graph" else right)


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


# ---- transforms ------------------------------------------------------------------------------------------------------
TRANSFORMS: dict[str, Any] = {
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (x,)),
    "jvp of vmap": lambda f, x: torch.func.jvp(torch.vmap(f), (x,), (x,)),
    "vmap of jvp": lambda f, x: torch.vmap(lambda y: torch.func.jvp(f, (y,), (y,)))(x),
    "jacfwd": lambda f, x: torch.func.jacfwd(f)(x),
    "hessian": lambda f, x: torch.func.hessian(lambda y: f(y).sum())(x),
    "grad of grad": lambda f, x: torch.func.grad(lambda y: torch.func.grad(lambda z: f(z).sum())(y).sum())(x),
    "compiled jvp": lambda f, x: torch.compile(lambda y: torch.func.jvp(f, (y,), (y,)), backend="aot_eager")(x),
    # here the compiler leaves the transform to Python and compiles the functions inside
    "jvp, backend eager": lambda f, x: torch.compile(lambda y: torch.func.jvp(f, (y,), (y,)), backend="eager")(x),
    "jacfwd, backend eager": lambda f, x: torch.compile(lambda y: torch.func.jacfwd(f)(y), backend="eager")(x),
    "grad, backend eager": lambda f, x: torch.compile(
        lambda y: torch.func.grad(lambda z: f(z).sum())(y), backend="eager"
    )(x),
}


COMPILED = [name for name in TRANSFORMS if "compiled" in name or "backend" in name]


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_the_operator_itself_refuses_transforms(transform: str) -> None:
    x = tensor(1, 2, 4, 3)
    torch.compiler.reset()
    with pytest.raises(NotImplementedError, match=r"query .*cattn's attention \(torch\.ops\.cattn.*MATH\)"):
        TRANSFORMS[transform](lambda y: FIRST["the operator"](y, y, y), x)


@pytest.mark.parametrize("transform", COMPILED)
def test_a_compiled_transform_is_right_or_an_error(transform: str) -> None:
    """Where the compiler leaves the transform to Python it is right, and an error where it traces it."""
    x = tensor(1, 2, 4, 3)
    torch.compiler.reset()
    right = (
        TRANSFORMS[transform.removeprefix("compiled ").partition(",")[0]](lambda y: by_pytorch(y, y, y), x)
        if transform != "grad, backend eager"
        else torch.func.grad(lambda z: by_pytorch(z, z, z).sum())(x)
    )
    try:
        found = TRANSFORMS[transform](lambda y: attention(y, y, y), x)
    except NotImplementedError as error:
        assert "torch.ops.cattn" in str(error)  # noqa: PT017
    else:
        torch.testing.assert_close(found, right)


def loss(function: Any, **options: Any) -> Any:
    return lambda x: function(x, 2 * x, x + 1, **options).square().sum()


RIGHT: dict[str, Any] = {name: TRANSFORMS[name] for name in TRANSFORMS if name not in COMPILED} | {
    "grad": lambda f, x: torch.func.grad(lambda y: f(y).square().sum())(x),
    "vjp": lambda f, x: torch.func.vjp(f, x)[1](torch.ones_like(x)),
    "jacrev": lambda f, x: torch.func.jacrev(f)(x),
    "jacrev of jacrev": lambda f, x: torch.func.jacrev(torch.func.jacrev(lambda y: f(y).square().sum()))(x),
    "jacrev of jacfwd": lambda f, x: torch.func.jacrev(torch.func.jacfwd(lambda y: f(y).square().sum()))(x),
    "vmap of hessian": lambda f, x: torch.vmap(torch.func.hessian(lambda y: f(y).square().sum()))(x),
    "hessian of vmap": lambda f, x: torch.func.hessian(lambda y: torch.vmap(f)(y).square().sum())(x),
    "product of Hessian and vector": lambda f, x: torch.func.jvp(
        torch.func.grad(lambda y: f(y).square().sum()), (x,), (x + 1,)
    ),
    "jvp of a gradient in forward mode": lambda f, x: torch.func.grad(
        lambda y: torch.func.jvp(f, (y,), (x * y,))[1].square().sum()
    )(x),
}


@pytest.mark.parametrize("transform", RIGHT)
@pytest.mark.promise("use_cattn")
@pytest.mark.parametrize("shape", [(2, 2, 4, 3), (2, 4, 3)])
@pytest.mark.parametrize("way", ["function", "use_cattn"])
def test_transforms_are_right(way: str, shape: tuple[int, ...], transform: str) -> None:
    x = tensor(*shape)

    def ours(y: Any) -> Any:
        if way == "function":
            return attention(y, 2 * y, y + 1, is_causal=True)
        return torch.nn.functional.scaled_dot_product_attention(y, 2 * y, y + 1, is_causal=True)

    right = RIGHT[transform](lambda y: by_pytorch(y, 2 * y, y + 1, is_causal=True), x)
    if way == "use_cattn":
        with bridge.use_cattn() as seen:
            found = RIGHT[transform](ours, x)
        assert seen.passed_on == 0
    else:
        found = RIGHT[transform](ours, x)
    torch.testing.assert_close(found, right, rtol=1e-10, atol=1e-10)


THIRD: dict[str, Any] = {
    "three gradients": lambda f, x: torch.func.grad(
        lambda y: torch.func.grad(lambda z: torch.func.grad(f)(z).square().sum())(y).sum()
    )(x),
    "jacfwd of hessian": lambda f, x: torch.func.jacfwd(torch.func.hessian(f))(x),
    "jacrev of hessian": lambda f, x: torch.func.jacrev(torch.func.hessian(f))(x),
    "jacfwd of jacfwd": lambda f, x: torch.func.jacfwd(torch.func.jacfwd(f))(x),
}


@pytest.mark.parametrize("transform", THIRD)
def test_what_is_not_there_is_an_error_that_names_the_operator(transform: str) -> None:
    text = (
        r"cattn's attention \(torch\.ops\.cattn.attention\) has no (third derivatives|forward mode over forward mode)"
    )
    with pytest.raises(NotImplementedError, match=text):
        THIRD[transform](loss(attention), tensor(1, 2, 4, 3))


def test_operands_without_derivatives_are_an_error() -> None:
    x = tensor(1, 2, 4, 3)
    with pytest.raises(NotImplementedError, match="alibi_slopes"):
        torch.func.grad(lambda slopes: attention(x, x, x, alibi_slopes=slopes).sum())(tensor(2))


GRADIENTS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "plain": ({}, ()),
    "causal, window, softcap": ({"is_causal": "lower_right", "window_size": (3, 1), "softcap": 2.0}, ()),
    "bias and sinks": ({"bias": tensor(2, 5, 6), "sinks": tensor(2)}, ("bias", "sinks")),
    "bias of keys": ({"bias": tensor(1, 6), "is_causal": True}, ("bias",)),
    "mask": ({"attn_mask": tensor(5, 6)}, ("attn_mask",)),
    "mask and bias": ({"attn_mask": tensor(5, 6), "bias": tensor(2, 1, 6)}, ("attn_mask", "bias")),
    "boolean mask, slopes": ({"attn_mask": tensor(5, 6) > 0, "alibi_slopes": tensor(2).abs()}, ()),
    "dropout": ({"dropout_p": 0.3, "rng": 7}, ()),
    "lengths": ({"key_value_seq_lengths": torch.tensor([4]), "key_value_seq_starts": torch.tensor([1])}, ()),
    "blocks": ({"block_mask": (tensor(3, 3) > 0, 2), "sinks": tensor(2)}, ("sinks",)),
}


@pytest.mark.promise("gradients")
@pytest.mark.parametrize("name", GRADIENTS)
def test_derivatives_of_both_orders_pass_the_checks_of_pytorch(name: str) -> None:
    options, names = GRADIENTS[name]
    inputs = [tensor(1, 2, 5, 3, seed=1), tensor(1, 1, 6, 3, seed=2), tensor(1, 1, 6, 4, seed=3)]
    inputs += [options[each] for each in names]
    inputs = [x.clone().requires_grad_() for x in inputs]

    def function(*given: Any) -> Any:
        more = options | dict(zip(names, given[3:], strict=True))
        result = attention(*given[:3], return_lse=True, enable_gqa=True, **more)
        return result.out, result.lse.where(result.lse.isfinite(), 0)

    assert torch.autograd.gradcheck(function, inputs, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(function, inputs, check_fwd_over_rev=True)


def combination(seed: int) -> tuple[dict[str, Any], list[str]]:
    """Return some of the options at once, and which of them have derivatives; for 5 queries and 6 keys."""
    random = np.random.default_rng(seed)
    each: dict[str, Any] = {
        "is_causal": ["upper_left", "lower_right"][seed % 2],
        "window_size": (int(random.integers(1, 4)), int(random.integers(0, 3))),
        "softcap": 1.5,
        "scale": -0.4,
        "bias": tensor(*[(2, 5, 6), (1, 6), (2, 1, 1), (5, 1)][int(random.integers(4))], seed=seed),
        "attn_mask": tensor(5, 6, seed=seed + 1),
        "sinks": tensor(2, seed=seed + 2),
        "alibi_slopes": tensor(2, seed=seed + 3).abs(),
        "key_value_seq_lengths": torch.tensor([4, 6]),
        "key_value_seq_starts": torch.tensor([1, 0]),
        "dropout_p": 0.3,
    }
    found = {name: option for name, option in each.items() if random.random() < 0.35}
    if seed % 3 == 0 and "attn_mask" in found:
        found["attn_mask"] = found["attn_mask"] > -0.5
    if "dropout_p" in found:
        found["rng"] = seed
    if "is_causal" not in found:
        found["query_offset"] = 1
    moving = [name for name in ("bias", "attn_mask", "sinks") if name in found and found[name].is_floating_point()]
    return found, moving


@pytest.mark.parametrize("seed", range(60))
def test_derivatives_of_combined_options_pass_the_checks_of_pytorch(seed: int) -> None:
    """In random directions."""
    options, names = combination(seed)
    inputs = [tensor(2, 2, 5, 3, seed=1), tensor(2, 1, 6, 3, seed=2), tensor(2, 1, 6, 2, seed=3)]
    inputs = [x.clone().requires_grad_() for x in (*inputs, *(options[name] for name in names))]

    def function(*given: Any) -> Any:
        more = options | dict(zip(names, given[3:], strict=True))
        result = attention(*given[:3], return_lse=True, enable_gqa=True, **more)
        return result.out, result.lse.where(result.lse.isfinite(), 0)

    assert torch.autograd.gradcheck(function, inputs, check_forward_ad=True, fast_mode=True)
    assert torch.autograd.gradgradcheck(function, inputs, check_fwd_over_rev=True, fast_mode=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_other_dtypes(dtype: Any) -> None:
    low = tensor(1, 2, 40, 8).to(dtype)

    def product(function: Any, x: Any) -> Any:
        gradient = torch.func.grad(lambda y: function(y, y, y, is_causal=True).sin().sum())
        return torch.func.jvp(gradient, (x,), (low.sin().to(x.dtype),))[1]

    right, found = product(by_pytorch, low.double()), product(attention, low)
    assert found.dtype is dtype
    error, theirs = ((a.double() - right).abs().max() for a in (found, product(by_pytorch, low)))
    # the output and its tangent are rounded to halves between the passes; PyTorch keeps the weights
    assert error <= (2 if dtype is torch.float32 else 4) * theirs, (error, theirs)


def derivatives(function: Any, inputs: Any, directions: Any, **options: Any) -> dict[str, Any]:
    """Return the derivative of attention in a direction, and the product of a loss's Hessian and the direction."""

    def value(*x: Any) -> Any:
        return function(*x, **options)

    gradient = torch.func.grad(lambda *x: value(*x).sin().sum(), argnums=(0, 1, 2))
    products = torch.func.jvp(gradient, inputs, directions)[1]
    names = (f"product, {name}" for name in ("query", "key", "value"))
    return {"tangent": torch.func.jvp(value, inputs, directions)[1], **dict(zip(names, products, strict=True))}


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"scale": 0.7}], ids=["plain", "causal", "scale"])
@pytest.mark.parametrize("shape", [(2, 3, 130, 16), (1, 2, 300, 64)], ids=str)
def test_errors_in_float32_are_at_most_twice_the_errors_of_pytorch(
    shape: tuple[int, ...], options: dict[str, Any]
) -> None:
    """The largest error and the RMS error, against PyTorch in float64."""
    exact = [tensor(*shape, seed=seed).float().double() for seed in range(6)]
    low = [x.float() for x in exact]
    right = derivatives(by_pytorch, tuple(exact[:3]), tuple(exact[3:]), **options)
    ours = derivatives(attention, tuple(low[:3]), tuple(low[3:]), **options)
    theirs = derivatives(by_pytorch, tuple(low[:3]), tuple(low[3:]), **options)
    for name, expected in right.items():
        assert ours[name].dtype is torch.float32
        for size in (lambda x: x.abs().max(), lambda x: x.square().mean().sqrt()):
            error, limit = (size(found[name].double() - expected) for found in (ours, theirs))
            assert error <= 2 * limit, (name, float(error), float(limit))


def test_weights_have_derivatives_of_both_orders() -> None:
    x = tensor(1, 2, 4, 3)

    def weights(y: Any) -> Any:
        return torch.softmax(y @ (2 * y).mT / 3**0.5, -1).square().sum()

    def ours(y: Any) -> Any:
        return attention(y, 2 * y, y, return_weights=True).weights.square().sum()

    torch.testing.assert_close(torch.func.hessian(ours)(x), torch.func.hessian(weights)(x))


def along(f: Any, x: Any, t: Any) -> Any:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(f(forward_ad.make_dual(x, t))).tangent


DIRECTED: dict[str, Any] = {
    "jvp": lambda f, x, t: torch.func.jvp(f, (x,), (t,))[1],
    "jvp of vmap": lambda f, x, t: torch.func.jvp(torch.vmap(f), (x,), (t,))[1],
    "vmap of jvp": lambda f, x, t: torch.vmap(lambda y, u: torch.func.jvp(f, (y,), (u,))[1])(x, t),
    "dual": along,
    "dual of vmap": lambda f, x, t: along(torch.vmap(f), x, t),
    "vjp": lambda f, x, t: torch.func.vjp(f, x)[1](t)[0],
    "jacfwd": lambda f, x, t: torch.func.jacfwd(f)(x),
    "hessian": lambda f, x, t: torch.func.hessian(lambda y: f(y).square().sum())(x),
    "product": lambda f, x, t: torch.func.jvp(torch.func.grad(lambda y: f(y).square().sum()), (x,), (t,))[1],
    "vmap": lambda f, x, t: torch.vmap(f)(x) * t,
}


LAYER = torch.nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True, dtype=torch.float64)
CALLS: dict[str, Any] = {
    "function": lambda y: attention(y, 2 * y, y + 1),
    "use_cattn": lambda y: torch.nn.functional.scaled_dot_product_attention(y, 2 * y, y + 1),
    "layer": LAYER,
    "module": bridge.nn.MultiHeadAttention(4, 4, context_length=8, dropout=0.0, num_heads=2).double(),
}


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("name", DIRECTED)
@pytest.mark.parametrize("call", CALLS)
def test_a_trace_of_derivatives_holds_them(call: str, name: str) -> None:
    """Traces of other numbers held constants, or uninitialised memory."""
    x, t = tensor(2, 3, 4), tensor(2, 3, 4, seed=1)

    def function(a: Any, b: Any) -> Any:
        return DIRECTED[name](lambda y: CALLS[call](y) if y.ndim > 2 else CALLS[call](y[None])[0], a, b)

    with bridge.use_cattn():
        found = function(x, t)
        torch.testing.assert_close(make_fx(function)(t + 1, x + 1)(x, t), found, rtol=1e-9, atol=1e-9)
        if call == "function" and name in ("jvp", "dual", "vjp", "product"):
            with pytest.raises(NotImplementedError, match=r"torch\.jit\.trace records no derivatives of cattn's"):
                torch.jit.trace(function, (x, t), check_trace=False)
    if call != "module":
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH), pytest.MonkeyPatch.context() as patch:
            patch.setitem(CALLS, "function", CALLS["use_cattn"])
            torch.testing.assert_close(found, function(x, t), rtol=1e-9, atol=1e-9)


@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node:UserWarning")  # PyTorch's own
@pytest.mark.parametrize("way", ["function", "use_cattn"])
def test_a_linearization_is_right_and_fake_tensors_stay_fake(way: str) -> None:
    x, t = tensor(2, 5, 6, 4), tensor(2, 5, 6, 4, seed=1)
    right = torch.func.jvp(lambda y: by_pytorch(y, 2 * y, y + 1), (x,), (t,))[1]
    with bridge.use_cattn():
        torch.testing.assert_close(torch.func.linearize(CALLS[way], x)[1](t), right)
        with FakeTensorMode() as mode:
            for name in ("jvp", "dual", "vjp", "vmap of jvp"):
                fake = DIRECTED[name](CALLS[way], mode.from_tensor(x), mode.from_tensor(t))
                assert isinstance(fake, FakeTensor)
                assert fake.shape == x.shape


def test_a_tensor_that_is_its_own_tangent_is_an_error_in_a_trace() -> None:
    x, t = tensor(2, 3, 4), tensor(2, 3, 4, seed=1)
    with pytest.raises(NotImplementedError, match=r"query and its tangent are the same tensor.*torch\.ops\.cattn"):
        make_fx(lambda b: torch.func.jvp(CALLS["function"], (x,), (b,))[1])(x)
    graph = make_fx(lambda b: torch.func.jvp(CALLS["function"], (x,), (b,))[1])(t)
    torch.testing.assert_close(graph(x + t), torch.func.jvp(CALLS["function"], (x,), (x + t,))[1])


# Each takes a function of a tensor, the tensor, and a tangent.
DERIVATIVES: dict[str, Callable[..., Any]] = {
    "a dual number": lambda f, x, t: tangent_of(f, x, t),
    "autograd": lambda f, x, t: torch.autograd.grad(f(y := x.detach().requires_grad_()), y, t)[0],
    "vjp": lambda f, x, t: torch.func.vjp(f, x)[1](t)[0],
    "jvp": lambda f, x, t: torch.func.jvp(f, (x,), (t,))[1],
    "vmap": lambda f, x, t: torch.vmap(f)(x),
    "jacfwd": lambda f, x, t: torch.func.jacfwd(f)(x),
    "hessian": lambda f, x, t: torch.func.hessian(lambda y: (f(y) * t).sum())(x),
    "vmap of jvp": lambda f, x, t: torch.vmap(lambda y, s: torch.func.jvp(f, (y,), (s,))[1])(x, t),
    "jvp of grad": lambda f, x, t: torch.func.jvp(torch.func.grad(lambda y: f(y).square().sum()), (x,), (t,))[1],
}
CONTEXTS: dict[str, Any] = {
    "use_cattn": bridge.use_cattn,
    "linear": lambda: bridge.use_cattn(linear=True),
    "batch_invariant": bridge.batch_invariant,
}


def tangent_of(f: Any, x: Any, t: Any) -> Any:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(f(forward_ad.make_dual(x, t))).tangent


WHEN = {"eager": ("before", "inside"), "aot_eager": ("inside",)}  # graphs of the latter keep PyTorch's kernels
MADE = [(name, backend, made) for name in DERIVATIVES for backend, times in WHEN.items() for made in times]


@pytest.mark.filterwarnings("ignore::UserWarning")  # the compiler's, of what it leaves to Python
@looped("name, backend, made, context", [(*case, list(CONTEXTS)[(i + i // 3) % 3]) for i, case in enumerate(MADE)])
def test_compiled_derivatives_inside_a_context_are_right_or_an_error(
    name: str, backend: str, made: str, context: str
) -> None:
    """They were none or 0 with the backend "eager", where compiled code enters forward mode by itself."""
    x, t, weight, bias = tensor(2, 3, 4), tensor(2, 3, 4), tensor(4, 4), tensor(4)

    def attend(y: Any) -> Any:
        z = torch.nn.functional.linear(y, weight, bias)
        return torch.nn.functional.scaled_dot_product_attention(z, y.sin(), z, is_causal=True)

    with sdpa_kernel(SDPBackend.MATH):
        right = DERIVATIVES[name](attend, x, t)
    torch.compiler.reset()
    compiled = torch.compile(lambda x, t: DERIVATIVES[name](attend, x, t), backend=backend)
    if made == "before":
        compiled(x, t)
    with CONTEXTS[context]():
        if name == "jvp of grad" and made == "inside":
            with pytest.raises(RuntimeError):  # the compiler's own, of fake tensors
                compiled(x, t)
            return
        found = compiled(x, t)
    torch.testing.assert_close(found, right)


@pytest.mark.parametrize("context", CONTEXTS)
def test_a_compiled_tangent_of_linear_attention_is_an_error(context: str) -> None:
    x, t = tensor(1, 2, 4, 3), tensor(1, 2, 4, 3)
    torch.compiler.reset()
    compiled = torch.compile(lambda x, t: tangent_of(lambda y: bridge.linear_attention(y, y, y), x, t), backend="eager")
    with CONTEXTS[context](), pytest.raises(NotImplementedError, match="linear_attention"):
        compiled(x, t)


# ---- vmap ------------------------------------------------------------------------------------------------------------
LOGICAL: dict[str, tuple[list[tuple[int, ...]], dict[str, Any]]] = {
    "two dimensions": ([(T_q, D), (T_k, D), (T_k, 5)], {"is_causal": "lower_right", "sinks": tensor(1)}),
    "three dimensions": (
        [(B, T_q, D), (B, T_k, D), (B, T_k, 5)],
        {"key_value_seq_lengths": torch.tensor([4, 9]), "attn_mask": tensor(B, T_q, T_k), "sinks": tensor(B, 1)},
    ),
    "three dimensions with heads": (
        [(4, T_q, D), (2, T_k, D), (2, T_k, 5)],
        {"enable_gqa": True, "sinks": tensor(4), "bias": tensor(4, 1, T_k)},
    ),
    "four dimensions": (
        [(B, H, T_q, D), (B, H, T_k, D), (B, H, T_k, 5)],
        {"query_offset": torch.tensor([3, 1]), "is_causal": True, "bias": tensor(H, T_q, T_k), "softcap": 2.0,
         "alibi_slopes": tensor(H)},
    ),
    "other numbers of dimensions": ([(B, H, T_q, D), (T_k, D), (H, T_k, 5)], {"attn_mask": tensor(T_k) > 0}),
    "blocks": ([(B, T_q, D), (B, T_k, D), (B, T_k, 5)], {"block_mask": (tensor(B, 2, 3) > -1, 4)}),
    "blocks of each head": (
        [(B, H, T_q, D), (B, H, T_k, D), (B, H, T_k, 5)],
        {"block_mask": (tensor(H, 2, 3) > -1, 4)},
    ),
    "lists of keys": ([(B, T_q, D), (B, T_k, D), (B, T_k, 5)], {"key_indices": LISTS}),
    "lists of each head": ([(B, H, T_q, D), (B, H, T_k, D), (B, H, T_k, 5)], {"key_indices": LISTS[0, :H, None]}),
    "five dimensions": ([(3, B, H, T_q, D), (B, H, T_k, D), (B, H, T_k, 5)],
        {"key_value_seq_lengths": 8, "key_value_seq_starts": torch.tensor([[1, 4]])}),
}  # fmt: skip


@pytest.mark.parametrize("name", LOGICAL)
@pytest.mark.parametrize("batched", [(0, 0, 0), (None, 1, None), (2, None, 0)])
def test_vmap_gives_what_a_loop_gives_in_one_call(name: str, batched: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes, options = LOGICAL[name]
    inputs = []
    for i, (shape, dim) in enumerate(zip(shapes, batched, strict=True)):
        full = shape if dim is None else (*shape[: min(dim, 1)], 3, *shape[min(dim, 1) :])
        inputs.append(tensor(*full, seed=i).requires_grad_())
    dims = tuple(None if dim is None else min(dim, 1) for dim in batched)
    calls = []
    forward = cattn.scaled_dot_product_attention

    def counting(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        return forward(*args, **kwargs)

    monkeypatch.setattr(cattn, "scaled_dot_product_attention", counting)

    def call(q: Any, k: Any, v: Any) -> Any:
        result = attention(q, k, v, **options, return_weights=True, return_lse=True)
        return result.out, result.weights, result.lse

    with warnings.catch_warnings():
        warnings.simplefilter("error")  # PyTorch warns where it falls back to a loop
        ours = torch.vmap(call, dims)(*inputs)
    assert len(calls) == 1
    parts = [call(*(x if d is None else x.select(d, i) for x, d in zip(inputs, dims, strict=True))) for i in range(3)]
    for found, right in zip(ours, map(torch.stack, zip(*parts, strict=True)), strict=True):
        assert torch.equal(found, right)
    grad = torch.randn(ours[0].shape, dtype=torch.float64)
    right = torch.stack([part[0] for part in parts])
    for a, b in zip(torch.autograd.grad(ours[0], inputs, grad), torch.autograd.grad(right, inputs, grad), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", LOGICAL)
def test_batched_gradients(name: str) -> None:
    """Several gradients of the output at once: vmap over the backward pass."""
    shapes, options = LOGICAL[name]
    inputs = [tensor(*shape, seed=i).requires_grad_() for i, shape in enumerate(shapes)]
    out = attention(*inputs, **options)
    grad = torch.randn(3, *out.shape, dtype=torch.float64)
    ours = torch.autograd.grad(out, inputs, grad, is_grads_batched=True, retain_graph=True)
    parts = [torch.autograd.grad(out, inputs, g, retain_graph=True) for g in grad]
    for a, b in zip(ours, map(torch.stack, zip(*parts, strict=True)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_vmap_with_dropout() -> None:
    x = torch.ones(4, 2, 9, 8)

    def call(x: Any) -> Any:
        return attention(x, x, torch.eye(9).expand(2, 9, 9), dropout_p=0.5)

    same = torch.vmap(call, randomness="same")(x)
    assert all(torch.equal(part, same[0]) for part in same)
    torch.manual_seed(3)
    different = torch.vmap(call, randomness="different")(x)
    assert not torch.equal(different[0], different[1])
    torch.manual_seed(3)
    assert torch.equal(torch.vmap(call, randomness="different")(x), different)
