"""cattn inside PyTorch: the operator's contract, gradients, compilation, random numbers, and use_cattn()."""

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import cattn

torch = pytest.importorskip("torch")
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.autograd import forward_ad  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from cattn.integrations import torch as bridge  # noqa: E402
from cattn.integrations.torch import _swap, _tensors  # noqa: E402

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


def test_gradcheck_passes_with_dropout() -> None:
    def call(*inputs: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(3)
        return attention(*inputs, dropout_p=0.3, is_causal=True)

    assert torch.autograd.gradcheck(call, tensors((2, 5, 3), (2, 5, 3), (2, 5, 2)))


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


def test_tensors_and_arrays_share_memory() -> None:
    x = torch.randn(1, 2, 8, 4)
    assert _tensors.as_array(x).ctypes.data == x.data_ptr()
    array = np.ones((3, 4), np.float32)
    assert _tensors.as_tensor(array, torch.float32).data_ptr() == array.ctypes.data
    half = torch.randn(3, 4, dtype=torch.bfloat16)
    assert _tensors.as_array(half).ctypes.data == half.data_ptr()


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


# ---- use_cattn -----------------------------------------------------------------------------------------------------
def test_use_cattn_replaces_the_function_and_restores_it(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[torch.dtype] = []

    def noting(query: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        calls.append(query.dtype)
        return attention(query, *args, **options)

    monkeypatch.setattr(_swap, "scaled_dot_product_attention", noting)
    monkeypatch.setattr(_swap, "attend_at_once", lambda *_: None)
    x = torch.randn(2, 5, 16)
    module = torch.nn.MultiheadAttention(16, 4, batch_first=True)
    right, _ = module(x, x, x, need_weights=False)
    with bridge.use_cattn():
        ours, _ = module(x, x, x, need_weights=False)
        assert calls == [torch.float32]
        meta = torch.empty(2, 5, 16, device="meta")
        assert torch.nn.functional.scaled_dot_product_attention(meta, meta, meta).shape == (2, 5, 16)
        with bridge.use_cattn():
            torch.nn.functional.scaled_dot_product_attention(x.double(), x.double(), x.double())
        assert calls == [torch.float32, torch.float64]
    torch.testing.assert_close(ours, right)
    with pytest.raises(ZeroDivisionError), bridge.use_cattn():
        raise ZeroDivisionError
    module(x, x, x, need_weights=False)
    assert len(calls) == 2


def test_overlapping_uses_of_use_cattn_restore_the_function() -> None:
    """The first to begin is the first to end, which happens with threads."""
    x = torch.randn(2, 5, 16)
    a, b = bridge.use_cattn(), bridge.use_cattn()
    seen = a.__enter__(), b.__enter__()
    theirs(x, x, x)
    a.__exit__(None, None, None)
    theirs(x, x, x)
    b.__exit__(None, None, None)
    theirs(x, x, x)
    assert [each.calls for each in seen] == [1, 2]


@pytest.mark.parametrize("context", [bridge.use_cattn, bridge.batch_invariant])
def test_one_object_is_entered_again_and_inside_itself(context: Any) -> None:
    x = torch.randn(2, 5, 16)
    block = context()
    for _ in range(2):
        with block as outer:
            theirs(x, x, x)
            with block as inner:
                theirs(x, x, x)
            theirs(x, x, x)
        assert (outer.calls, inner.calls) == (3, 1)
    theirs(x, x, x)
    assert outer.calls == 3
    with pytest.raises(RuntimeError, match=rf"{context.__name__}\(\) was not entered"):
        block.__exit__(None, None, None)


def test_the_replaced_function_compiles() -> None:
    def call(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)

    x = torch.randn(1, 2, 16, 8)
    with bridge.use_cattn():
        assert torch.equal(
            torch.compile(call, fullgraph=True, backend="aot_eager")(x), attention(x, x, x, is_causal=True)
        )


def test_a_wrong_call_inside_raises_the_error_of_pytorch() -> None:
    """Programs catch its type. The error of cattn, which names the argument, is the context."""
    x = torch.randn(2, 4, 5, 8)
    calls: list[tuple[Any, dict[str, Any], str]] = [
        ((x, x[:, :3], x[:, :3]), {"enable_gqa": True}, "query has 4 heads"),
        ((x, x, x, torch.ones(5, 5, dtype=torch.int32)), {}, "attn_mask has dtype int32"),
        ((x, x, x), {"dropout_p": 1.5}, "dropout_p must be in"),
        ((x, x[..., :3], x), {}, "key has head_dim 3"),
    ]
    for args, options, named in calls:
        with pytest.raises((RuntimeError, TypeError)) as right:
            theirs(*args, **options)
        with bridge.use_cattn() as seen, pytest.raises(right.type) as ours:
            torch.nn.functional.scaled_dot_product_attention(*args, **options)
        assert named in str(ours.value.__context__)
        assert seen == bridge.Seen(calls=0, passed_on=1)


def test_numbers_that_only_pytorch_takes() -> None:
    x = torch.randn(2, 4, 5, 8)
    zero = torch._efficientzerotensor((1, 2, 5, 8))
    with bridge.use_cattn() as seen:
        assert not torch.nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=True).any()
        for dtype in (torch.float32, torch.bfloat16):
            out = torch.nn.functional.scaled_dot_product_attention(*[zero.to(dtype)] * 3)
            assert torch.equal(out, torch.zeros(1, 2, 5, 8, dtype=dtype))
    assert seen == bridge.Seen(calls=3, passed_on=0)


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


@pytest.mark.promise("use_cattn")
def test_use_cattn_leaves_unsupported_calls_to_pytorch() -> None:
    x = torch.randn(2, 5, 4)
    with warnings.catch_warnings(action="ignore"):  # PyTorch warns that they are a prototype
        nested = torch.nested.nested_tensor([torch.randn(2, 3, 4), torch.randn(2, 5, 4)])

    def loss(a: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(a, x, x).sum()

    functions = (torch.func.grad(loss), torch.func.vmap(torch.func.grad(loss)), torch.func.jacrev(loss))
    expected = [function(x[None]) for function in functions]
    with bridge.use_cattn():
        for function, wanted in zip(functions, expected, strict=True):
            torch.testing.assert_close(function(x[None]), wanted)
        swapped = torch.nn.functional.scaled_dot_product_attention(nested, nested, nested)
        batched = torch.func.vmap(torch.nn.functional.scaled_dot_product_attention)(x, x, x)
    for part, wanted in zip(swapped.unbind(), theirs(nested, nested, nested).unbind(), strict=True):
        torch.testing.assert_close(part, wanted)
    torch.testing.assert_close(batched, theirs(x, x, x))
    torch.testing.assert_close(torch.func.grad(lambda a: attention(a, x, x).sum())(x), torch.func.grad(loss)(x))
    with pytest.raises(TypeError, match="query is nested, cattn wants dense tensors"):
        attention(nested, nested, nested)
    with pytest.raises(TypeError, match=r"key is torch\.sparse_coo, cattn wants dense tensors"):
        attention(x, x.to_sparse(), x)


@pytest.mark.promise("use_cattn")
@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")  # a warning from PyTorch's own code
@pytest.mark.parametrize("i", range(4))
def test_forward_mode_agrees_with_differences(i: int) -> None:
    inputs = [t.detach() for t in tensors(*[(1, 2, 5, 4)] * 3, (5, 5))]

    def along(x: torch.Tensor) -> list[torch.Tensor]:
        return [*inputs[:i], x, *inputs[i + 1 :]]

    with forward_ad.dual_level():
        dual = along(forward_ad.make_dual(inputs[i], torch.ones_like(inputs[i])))
        tangent = forward_ad.unpack_dual(attention(*dual)).tangent
        with bridge.use_cattn() as seen:
            swapped = forward_ad.unpack_dual(torch.nn.functional.scaled_dot_product_attention(*dual)).tangent
        assert seen.passed_on == 0
        assert torch.equal(tangent, swapped)
    h = 1e-6
    right = (attention(*along(inputs[i] + h)) - attention(*along(inputs[i] - h))) / (2 * h)
    torch.testing.assert_close(tangent, right, atol=1e-8, rtol=0)  # 1e-16 / h of rounding, and h**2


@pytest.mark.parametrize("lowered", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtypes", [(torch.float32,) * 4, (torch.bfloat16, torch.float32, torch.float16, torch.float32),
                                    (torch.float32,) * 3 + (torch.bool,), (torch.float64,) * 4])  # fmt: skip
def test_autocast_converts_as_for_the_function_of_pytorch(
    dtypes: tuple[torch.dtype, ...], lowered: torch.dtype
) -> None:
    shapes = [(1, 2, 5, 8)] * 3 + [(5, 5)]
    inputs = [torch.randn(shape).tril().to(dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
    floats = [tensor.requires_grad_() for tensor in inputs if tensor.is_floating_point()]
    with torch.autocast("cpu", dtype=lowered):
        theirs = torch.nn.functional.scaled_dot_product_attention(*inputs)
        with bridge.use_cattn():
            ours = torch.nn.functional.scaled_dot_product_attention(*inputs)
        compiled = torch.compile(attention, backend="aot_eager", fullgraph=True)(*inputs)
    assert ours.dtype == theirs.dtype == compiled.dtype
    tolerance = 2 * torch.finfo(theirs.dtype).eps * theirs.abs().max().item()  # PyTorch's may be rounded twice
    torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=0)
    assert torch.equal(ours, compiled)
    ours.sum().backward()
    for tensor in floats:
        assert tensor.grad is not None
        assert tensor.grad.dtype is tensor.dtype


@pytest.mark.long
@pytest.mark.promise("training")
def test_training_a_small_model_gives_the_losses_of_pytorch() -> None:
    """Two layers, eight steps, without dropout; equal up to rounding."""

    def losses() -> list[float]:
        torch.manual_seed(0)
        layer = torch.nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        model = torch.nn.Sequential(
            torch.nn.Embedding(20, 32), torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False),
            torch.nn.Linear(32, 20),
        )  # fmt: skip
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        tokens = torch.randint(0, 20, (4, 17))
        found = []
        for _ in range(8):
            loss = torch.nn.functional.cross_entropy(model(tokens[:, :-1]).transpose(1, 2), tokens[:, 1:])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        return found

    right = losses()
    with bridge.use_cattn():
        ours = losses()
    assert right[-1] < 0.7 * right[0]
    np.testing.assert_allclose(ours, right, rtol=1e-3)


def test_the_number_of_threads_changes_no_bit() -> None:
    q, k, v = tensors(*[(1, 2, 300, 16)] * 3, dtype=torch.float32)
    results = []
    for n in (1, 3):
        with cattn.num_threads(n):
            out = attention(q, k, v, is_causal=True)
            results.append([out, *torch.autograd.grad(out.sum(), (q, k, v))])
    assert all(map(torch.equal, *results))


def test_a_negative_view_is_read() -> None:
    """PyTorch leaves the sign of such a tensor to the reader."""
    z = torch.randn(2, 5, 4, dtype=torch.complex64)
    x = torch.randn(2, 5, 4)
    negative = z.conj().imag
    assert negative.is_neg()
    assert torch.equal(attention(negative, x, x), attention(-z.imag, x, x))


@pytest.mark.parametrize("context", [bridge.use_cattn, bridge.batch_invariant])
def test_a_context_without_with_says_so(context: Any) -> None:
    with pytest.warns(
        RuntimeWarning, match=rf"{context.__name__}\(\) has no effect.*with {context.__name__}"
    ) as caught:
        context()
    assert caught[0].filename == __file__

    x = torch.randn(2, 5, 16)

    @context()
    def decorated() -> torch.Tensor:
        return theirs(x, x, x)

    assert torch.equal(decorated(), attention(x, x, x))
    del decorated  # which warns of nothing
