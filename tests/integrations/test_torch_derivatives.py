"""cattn inside PyTorch: derivatives of both orders, tangents, transforms and vmap; right, or an error with a name."""

from __future__ import annotations

from typing import Any

import pytest

from support import looped

torch = pytest.importorskip("torch")
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode  # noqa: E402
from torch.autograd import forward_ad  # noqa: E402
from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from cattn.integrations import torch as bridge  # noqa: E402
from support.torch_calls import attention, operator_arguments, tensor, tensors  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")  # PyTorch's own, in forward mode


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
    "the operator": lambda q, k, v: torch.ops.cattn.attention(*operator_arguments(query=q, key=k, value=v))[0],
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
def along(f: Any, x: Any, t: Any) -> Any:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(f(forward_ad.make_dual(x, t))).tangent


def square(f: Any) -> Any:
    return lambda y: f(y).square().sum()


# Each takes a function of a tensor, the tensor, and a tangent.
TRANSFORMS: dict[str, Any] = {
    "dual": along,
    "dual of vmap": lambda f, x, t: along(torch.vmap(f), x, t),
    "jvp": lambda f, x, t: torch.func.jvp(f, (x,), (t,))[1],
    "jvp of vmap": lambda f, x, t: torch.func.jvp(torch.vmap(f), (x,), (t,))[1],
    "vmap of jvp": lambda f, x, t: torch.vmap(lambda y, u: torch.func.jvp(f, (y,), (u,))[1])(x, t),
    "vmap": lambda f, x, t: torch.vmap(f)(x) * t,
    "autograd": lambda f, x, t: torch.autograd.grad(f(y := x.detach().requires_grad_()), y, t)[0],
    "vjp": lambda f, x, t: torch.func.vjp(f, x)[1](t)[0],
    "grad": lambda f, x, t: torch.func.grad(square(f))(x),
    "grad of grad": lambda f, x, t: torch.func.grad(lambda y: torch.func.grad(square(f))(y).sum())(x),
    "jacfwd": lambda f, x, t: torch.func.jacfwd(f)(x),
    "jacrev": lambda f, x, t: torch.func.jacrev(f)(x),
    "jacrev of jacrev": lambda f, x, t: torch.func.jacrev(torch.func.jacrev(square(f)))(x),
    "jacrev of jacfwd": lambda f, x, t: torch.func.jacrev(torch.func.jacfwd(square(f)))(x),
    "hessian": lambda f, x, t: torch.func.hessian(square(f))(x),
    "vmap of hessian": lambda f, x, t: torch.vmap(torch.func.hessian(square(f)))(x),
    "hessian of vmap": lambda f, x, t: torch.func.hessian(square(torch.vmap(f)))(x),
    "jvp of grad": lambda f, x, t: torch.func.jvp(torch.func.grad(square(f)), (x,), (t,))[1],
    "grad of jvp": lambda f, x, t: torch.func.grad(square(lambda y: torch.func.jvp(f, (y,), (y * t,))[1]))(x),
}
REFUSED = ("jvp", "jvp of vmap", "vmap of jvp", "jacfwd", "hessian", "grad", "grad of grad")


@pytest.mark.parametrize("backend", [None, "eager", "aot_eager"])
@pytest.mark.parametrize("transform", REFUSED)
def test_the_operator_itself_refuses_transforms(transform: str, backend: str | None) -> None:
    """The compiler with the backend "eager" leaves the transform to Python and compiles the functions inside."""
    x = tensor(1, 2, 4, 3)

    def function(y: Any) -> Any:
        return TRANSFORMS[transform](lambda y: FIRST["the operator"](y, y, y), y, y)

    torch.compiler.reset()
    with pytest.raises(NotImplementedError, match=r"query .*cattn's attention \(torch\.ops\.cattn.*MATH\)"):
        (function if backend is None else torch.compile(function, backend=backend))(x)


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.promise("use_cattn")
@pytest.mark.parametrize("shape", [(2, 2, 4, 3), (2, 4, 3)])
@pytest.mark.parametrize("way", ["function", "use_cattn"])
def test_transforms_are_right(way: str, shape: tuple[int, ...], transform: str) -> None:
    x = tensor(*shape)

    def ours(y: Any) -> Any:
        if way == "function":
            return attention(y, 2 * y, y + 1, is_causal=True)
        return torch.nn.functional.scaled_dot_product_attention(y, 2 * y, y + 1, is_causal=True)

    right = TRANSFORMS[transform](lambda y: by_pytorch(y, 2 * y, y + 1, is_causal=True), x, x + 1)
    with bridge.use_cattn() as seen:
        found = TRANSFORMS[transform](ours, x, x + 1)
    assert (seen.calls > 0, seen.passed_on) == (way == "use_cattn", 0)
    torch.testing.assert_close(found, right, rtol=1e-10, atol=1e-10)


THIRD: dict[str, Any] = {
    "three gradients": lambda f, x: torch.func.grad(lambda y: TRANSFORMS["grad of grad"](f, y, y).sum())(x),
    "jacfwd of hessian": lambda f, x: torch.func.jacfwd(torch.func.hessian(square(f)))(x),
    "jacrev of hessian": lambda f, x: torch.func.jacrev(torch.func.hessian(square(f)))(x),
    "jacfwd of jacfwd": lambda f, x: torch.func.jacfwd(torch.func.jacfwd(square(f)))(x),
}


@pytest.mark.parametrize("transform", THIRD)
def test_what_is_not_there_is_an_error_that_names_the_operator(transform: str) -> None:
    text = (
        r"cattn's attention \(torch\.ops\.cattn.attention\) has no (third derivatives|forward mode over forward mode)"
    )
    with pytest.raises(NotImplementedError, match=text):
        THIRD[transform](lambda x: attention(x, 2 * x, x + 1), tensor(1, 2, 4, 3))


def test_operands_without_derivatives_are_an_error() -> None:
    x = tensor(1, 2, 4, 3)
    with pytest.raises(NotImplementedError, match="alibi_slopes"):
        torch.func.grad(lambda slopes: attention(x, x, x, alibi_slopes=slopes).sum())(tensor(2))


def derivatives(function: Any, inputs: Any, directions: Any, **options: Any) -> dict[str, Any]:
    """Return the derivative of attention in a direction, and the product of a loss's Hessian and the direction."""

    def value(*x: Any) -> Any:
        return function(*x, **options)

    gradient = torch.func.grad(lambda *x: value(*x).sin().sum(), argnums=(0, 1, 2))
    products = torch.func.jvp(gradient, inputs, directions)[1]
    names = (f"product, {name}" for name in ("query", "key", "value"))
    return {"tangent": torch.func.jvp(value, inputs, directions)[1], **dict(zip(names, products, strict=True))}


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"scale": 0.7}], ids=["plain", "causal", "scale"])
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((2, 3, 130, 16), torch.float32), ((1, 2, 300, 64), torch.float32), ((1, 2, 40, 8), torch.bfloat16),
     ((1, 2, 40, 8), torch.float16)],
    ids=str,
)  # fmt: skip
def test_errors_are_at_most_twice_the_errors_of_pytorch(shape: Any, dtype: Any, options: dict[str, Any]) -> None:
    """The largest error and the RMS error, against PyTorch in float64.

    The output and its tangent are rounded to halves between the passes; PyTorch keeps the weights.
    """
    most = 2 if dtype is torch.float32 else 5
    exact = [tensor(*shape, seed=seed).to(dtype).double() for seed in range(6)]
    low = [x.to(dtype) for x in exact]
    right = derivatives(by_pytorch, tuple(exact[:3]), tuple(exact[3:]), **options)
    ours = derivatives(attention, tuple(low[:3]), tuple(low[3:]), **options)
    theirs = derivatives(by_pytorch, tuple(low[:3]), tuple(low[3:]), **options)
    for name, expected in right.items():
        assert ours[name].dtype is dtype
        for size in (lambda x: x.abs().max(), lambda x: x.square().mean().sqrt()):
            error, limit = (size(found[name].double() - expected) for found in (ours, theirs))
            assert error <= most * limit, (name, float(error), float(limit))


def test_weights_have_derivatives_of_both_orders() -> None:
    x = tensor(1, 2, 4, 3)

    def weights(y: Any) -> Any:
        return torch.softmax(y @ (2 * y).mT / 3**0.5, -1).square().sum()

    def ours(y: Any) -> Any:
        return attention(y, 2 * y, y, return_weights=True).weights.square().sum()

    torch.testing.assert_close(torch.func.hessian(ours)(x), torch.func.hessian(weights)(x))


RECORDED = (
    "jvp",
    "jvp of vmap",
    "vmap of jvp",
    "dual",
    "dual of vmap",
    "vjp",
    "vmap",
    "jacfwd",
    "hessian",
    "jvp of grad",
)
LAYER = torch.nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True, dtype=torch.float64)
CALLS: dict[str, Any] = {
    "function": lambda y: attention(y, 2 * y, y + 1),
    "use_cattn": lambda y: torch.nn.functional.scaled_dot_product_attention(y, 2 * y, y + 1),
    "layer": LAYER,
    "module": bridge.nn.MultiHeadAttention(4, 4, context_length=8, dropout=0.0, num_heads=2).double(),
}


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("name", RECORDED)
@pytest.mark.parametrize("call", CALLS)
def test_a_trace_of_derivatives_holds_them(call: str, name: str) -> None:
    """Traces of other numbers held constants, or uninitialised memory."""
    x, t = tensor(2, 3, 4), tensor(2, 3, 4, seed=1)

    def function(a: Any, b: Any) -> Any:
        return TRANSFORMS[name](lambda y: CALLS[call](y) if y.ndim > 2 else CALLS[call](y[None])[0], a, b)

    with bridge.use_cattn():
        found = function(x, t)
        torch.testing.assert_close(make_fx(function)(t + 1, x + 1)(x, t), found, rtol=1e-9, atol=1e-9)
        if call == "function" and name in ("jvp", "dual", "vjp", "jvp of grad"):
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
                fake = TRANSFORMS[name](CALLS[way], mode.from_tensor(x), mode.from_tensor(t))
                assert isinstance(fake, FakeTensor)
                assert fake.shape == x.shape


def test_a_tensor_that_is_its_own_tangent_is_an_error_in_a_trace() -> None:
    x, t = tensor(2, 3, 4), tensor(2, 3, 4, seed=1)
    with pytest.raises(NotImplementedError, match=r"query and its tangent are the same tensor.*torch\.ops\.cattn"):
        make_fx(lambda b: torch.func.jvp(CALLS["function"], (x,), (b,))[1])(x)
    graph = make_fx(lambda b: torch.func.jvp(CALLS["function"], (x,), (b,))[1])(t)
    torch.testing.assert_close(graph(x + t), torch.func.jvp(CALLS["function"], (x,), (x + t,))[1])


COMPILED = ("dual", "autograd", "vjp", "jvp", "vmap", "jacfwd", "hessian", "vmap of jvp", "jvp of grad")
CONTEXTS: dict[str, Any] = {
    "use_cattn": bridge.use_cattn,
    "linear": lambda: bridge.use_cattn(linear=True),
    "batch_invariant": bridge.batch_invariant,
}
WHEN = {"eager": ("before", "inside"), "aot_eager": ("inside",)}  # graphs of the latter keep PyTorch's kernels
MADE = [(name, backend, made) for name in COMPILED for backend, times in WHEN.items() for made in times]
CASES = [(*case, list(CONTEXTS)[(i + i // 3) % 3]) for i, case in enumerate(MADE)]


@pytest.mark.filterwarnings("ignore::UserWarning")  # the compiler's, of what it leaves to Python
@looped("name, backend, made, context", CASES)
def test_compiled_derivatives_inside_a_context_are_right_or_an_error(
    name: str, backend: str, made: str, context: str
) -> None:
    """They were none or 0 with the backend "eager", where compiled code enters forward mode by itself."""
    x, t, weight, bias = tensor(2, 3, 4), tensor(2, 3, 4), tensor(4, 4), tensor(4)

    def attend(y: Any) -> Any:
        z = torch.nn.functional.linear(y, weight, bias)
        return torch.nn.functional.scaled_dot_product_attention(z, y.sin(), z, is_causal=True)

    with sdpa_kernel(SDPBackend.MATH):
        right = TRANSFORMS[name](attend, x, t)
    torch.compiler.reset()
    compiled = torch.compile(lambda x, t: TRANSFORMS[name](attend, x, t), backend=backend)
    if made == "before":
        compiled(x, t)
    with CONTEXTS[context]():
        if name == "jvp of grad" and made == "inside":
            with pytest.raises(RuntimeError):  # the compiler's own, of fake tensors
                compiled(x, t)
            return
        found = compiled(x, t)
    torch.testing.assert_close(found, right)


@pytest.mark.parametrize(
    ("transform", "backend"), [("jvp", "aot_eager"), ("jvp", "eager"), ("jacfwd", "eager"), ("grad", "eager")]
)
def test_a_compiled_transform_is_right_or_an_error(transform: str, backend: str) -> None:
    """Where the compiler leaves the transform to Python it is right, and an error where it traces it."""
    x = tensor(1, 2, 4, 3)

    def call(function: Any, y: Any) -> Any:
        return TRANSFORMS[transform](lambda z: function(z, z, z), y, y)

    torch.compiler.reset()
    try:
        found = torch.compile(lambda y: call(attention, y), backend=backend)(x)
    except NotImplementedError as error:
        assert "torch.ops.cattn" in str(error)  # noqa: PT017
    else:
        torch.testing.assert_close(found, call(by_pytorch, x))


@pytest.mark.parametrize("context", CONTEXTS)
def test_a_compiled_tangent_of_linear_attention_is_an_error(context: str) -> None:
    x, t = tensor(1, 2, 4, 3), tensor(1, 2, 4, 3)
    torch.compiler.reset()
    compiled = torch.compile(lambda x, t: along(lambda y: bridge.linear_attention(y, y, y), x, t), backend="eager")
    with CONTEXTS[context](), pytest.raises(NotImplementedError, match="linear_attention"):
        compiled(x, t)


# ---- vmap ------------------------------------------------------------------------------------------------------------
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
