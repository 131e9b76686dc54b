"""cattn in place of PyTorch's attention: use_cattn(), every way to a call, subclasses and modes."""

import contextlib
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch.nn import functional as F  # noqa: E402, N812
from torch.testing._internal.two_tensor import TwoTensor  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from cattn.integrations import torch as bridge  # noqa: E402
from support.torch_calls import attention, operator_arguments, tensors, theirs  # noqa: E402


# ---- use_cattn -----------------------------------------------------------------------------------------------------
@pytest.mark.promise("use_cattn")
def test_use_cattn_replaces_the_function_counts_its_calls_and_restores_it() -> None:
    x = torch.randn(2, 5, 16)
    module = torch.nn.MultiheadAttention(16, 4, batch_first=True).train()
    compiled = torch.compile(torch.nn.functional.scaled_dot_product_attention, backend="aot_eager", fullgraph=True)
    right, _ = module(x, x, x, need_weights=False)
    with bridge.use_cattn() as outer:
        ours, _ = module(x, x, x, need_weights=False)
        module(x, x, x, need_weights=True)  # PyTorch computes the weights without the function
        with bridge.use_cattn() as inner:
            assert torch.equal(torch.nn.functional.scaled_dot_product_attention(x, x, x), attention(x, x, x))
            with pytest.raises(RuntimeError):
                torch.nn.functional.scaled_dot_product_attention(x[0, 0], x[0], x[0])
        assert torch.equal(compiled(x, x, x), attention(x, x, x))
    assert (inner.calls, inner.passed_on) == (1, 1)
    assert (outer.calls, outer.passed_on) == (2, 1)
    torch.testing.assert_close(ours, right)
    with pytest.raises(ZeroDivisionError), bridge.use_cattn() as failed:
        raise ZeroDivisionError
    theirs(x, x, x)
    assert (outer, failed) == (bridge.Seen(2, 1), bridge.Seen(0, 0))
    meta = torch.empty(2, 5, 16, device="meta")
    with bridge.use_cattn():
        assert theirs(meta, meta, meta).shape == (2, 5, 16)


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


@pytest.mark.promise("use_cattn")
def test_use_cattn_leaves_unsupported_calls_to_pytorch() -> None:
    with warnings.catch_warnings(action="ignore"):  # PyTorch warns that they are a prototype
        nested = torch.nested.nested_tensor([torch.randn(2, 3, 4), torch.randn(2, 5, 4)])
    with bridge.use_cattn():
        swapped = torch.nn.functional.scaled_dot_product_attention(nested, nested, nested)
    for part, wanted in zip(swapped.unbind(), theirs(nested, nested, nested).unbind(), strict=True):
        torch.testing.assert_close(part, wanted)
    with pytest.raises(TypeError, match="query is nested, cattn wants dense tensors"):
        attention(nested, nested, nested)


@pytest.mark.parametrize("lowered", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtypes", [(torch.float32,) * 4, (torch.bfloat16, torch.float32, torch.float16, torch.float32),
                                    (torch.float32,) * 3 + (torch.bool,), (torch.float64,) * 4])  # fmt: skip
def test_autocast_converts_as_for_the_function_of_pytorch(
    dtypes: tuple[torch.dtype, ...], lowered: torch.dtype
) -> None:
    shapes = [(1, 2, 5, 8)] * 3 + [(5, 5)]
    torch.manual_seed(0)
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


# ---- a CausalBias ----------------------------------------------------------------------------------------------------
def causal_bias(which: str, *sizes: int) -> Any:
    from torch.nn.attention import bias

    with warnings.catch_warnings(action="ignore"):  # PyTorch warns of NaN with more queries than keys
        return getattr(bias, f"causal_{which}")(*sizes)


@pytest.mark.parametrize("which", ["lower_right", "upper_left"])
@pytest.mark.parametrize("sizes", [(7, 7), (5, 9), (9, 5), (1, 6)])
@pytest.mark.parametrize("way", ["operator", "swapped", "compiled", "compiled inside"])
def test_causal_biases_as_masks(which: str, sizes: tuple[int, int], way: str) -> None:
    """The data of such a tensor is uninitialised: what counts is the class and its sizes."""
    T_q, T_k = sizes
    inputs = tensors((2, 3, T_q, 8), (2, 3, T_k, 8), (2, 3, T_k, 6))
    rows, columns = torch.arange(T_q)[:, None], torch.arange(T_k)
    dense = columns <= rows + (T_k - T_q if which == "lower_right" else 0)
    right = theirs(*inputs, dense)

    def inside(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, causal_bias(which, T_q, T_k))

    def swapped(*args: Any) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(*args)

    with bridge.use_cattn():
        if way == "compiled inside":
            ours = torch.compile(inside, backend="aot_eager")(*inputs)
        else:
            compiled = torch.compile(swapped, backend="aot_eager", fullgraph=True) if way == "compiled" else swapped
            function = attention if way == "operator" else compiled
            ours = function(*inputs, causal_bias(which, T_q, T_k))
    torch.testing.assert_close(ours, right, rtol=1e-12, atol=1e-12)
    grad = torch.randn(ours.shape, dtype=ours.dtype)
    for a, b in zip(torch.autograd.grad(ours, inputs, grad), torch.autograd.grad(right, inputs, grad), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


def test_the_sizes_of_a_causal_bias_count_as_in_pytorch() -> None:
    inputs = tensors((2, 5, 8), (2, 9, 8), (2, 9, 6))
    for args in (("upper_left", 2, 3), ("lower_right", 4, 4), ("lower_right", 1, 9), ("lower_right", 5, 1)):
        bias = causal_bias(*args)
        right = theirs(*inputs, bias)
        with bridge.use_cattn():
            ours = torch.nn.functional.scaled_dot_product_attention(*inputs, bias)
        torch.testing.assert_close(ours, right, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(attention(*inputs, bias), right, rtol=1e-12, atol=1e-12)
    with pytest.raises(ValueError, match=r"attn_mask has shape \(3, 4\)"):
        attention(*inputs, causal_bias("lower_right", 3, 4))
    with pytest.raises(ValueError, match="attn_mask is a CausalBias: is_causal must be False"):
        attention(*inputs, causal_bias("lower_right", 5, 9), is_causal=True)


def test_a_causal_bias_with_tensors_that_pytorch_computes() -> None:
    q, k = torch.ones(1, 2, 5, 4, device="meta"), torch.ones(1, 2, 9, 4, device="meta")
    x = torch.arange(45).reshape(5, 9)
    with bridge.use_cattn():
        out = torch.nn.functional.scaled_dot_product_attention(q, k, k, causal_bias("upper_left", 5, 9))
        with pytest.raises(ValueError, match="to have the same dtype"):
            torch.nn.functional.scaled_dot_product_attention(x, x, x.double(), causal_bias("lower_right", 5, 9))
    assert out.shape == (1, 2, 5, 4)


# ---- ways x tensors x blocks -----------------------------------------------------------------------------------------
BLOCKS: dict[str, Any] = {
    "use_cattn": bridge.use_cattn,
    "linear": lambda: bridge.use_cattn(linear=True),
    "batch_invariant": bridge.batch_invariant,
}


class Plain(torch.Tensor):
    """A subclass that changes nothing."""


class AnyFunction(torch.overrides.TorchFunctionMode):
    seen: Any = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        AnyFunction.seen = func
        return func(*args, **(kwargs or {}))


class AnyOperator(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def compiled(backend: str) -> Callable[..., Any]:
    def make(*args: Any) -> Any:
        return torch.compile(lambda *x: theirs(*x), backend=backend, fullgraph=True)

    return make


def scripted(*args: Any) -> Any:
    def without(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v)

    def masked(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, m)

    return torch.jit.script(without if len(args) == 3 else masked)


class Module(torch.nn.Module):
    def forward(self, *args: Any) -> Any:
        return F.scaled_dot_product_attention(*args)


# Each returns a function of the tensors, given them.
WAYS: dict[str, Callable[..., Any]] = {
    "imported by name": lambda *args: theirs,
    "under its name": lambda *args: lambda *x: F.scaled_dot_product_attention(*x),
    "torch._C._nn": lambda *args: torch._C._nn.scaled_dot_product_attention,
    "torch.ops": lambda *args: torch.ops.aten.scaled_dot_product_attention,
    "torch.ops, default": lambda *args: torch.ops.aten.scaled_dot_product_attention.default,
    "script": scripted,
    "trace": lambda *args: torch.jit.trace(lambda *x: theirs(*x), args, check_trace=False),
    "export": lambda *args: torch.export.export(Module(), args).module(),
    "compile, eager": compiled("eager"),
    "compile, aot_eager": compiled("aot_eager"),
    "compile, inductor": compiled("inductor"),
}
TENSORS: dict[str, Callable[..., Any]] = {
    "plain": lambda *x: x,
    "gradients": lambda *x: tuple(t.clone().requires_grad_() for t in x),
    "parameters": lambda *x: tuple(map(torch.nn.Parameter, x)),
    "bfloat16": lambda *x: tuple(t.bfloat16() for t in x),
    "boolean mask": lambda q, k, v: (q, k, v, torch.ones(7, 9, dtype=torch.bool).tril(2)),
    "float mask": lambda q, k, v: (q, k, v, torch.linspace(-1, 1, 63).reshape(7, 9)),
    "CausalBias": lambda q, k, v: (q, k, v, causal_bias("lower_right", 7, 9)),
    "subclass": lambda *x: tuple(t.as_subclass(Plain) for t in x),
    "subclass as mask": lambda q, k, v: (q, k, v, torch.linspace(-1, 1, 63).reshape(7, 9).as_subclass(Plain)),
    "wrapper": lambda *x: tuple(TwoTensor(t, t.clone()) for t in x),
}
MODES: dict[str, Any] = {
    "": contextlib.nullcontext,
    "autocast": lambda: torch.autocast("cpu"),
    "inference": torch.inference_mode,
    "function mode": AnyFunction,
    "dispatch mode": AnyOperator,
    "device": lambda: torch.device("cpu"),
}
MADE_WAYS = ("script", "trace", "export", "compile, eager", "compile, aot_eager", "compile, inductor")


def by_formula(q: Any, k: Any, v: Any, mask: Any = None) -> torch.Tensor:
    q, k, v = ((x.a if isinstance(x, TwoTensor) else x.as_subclass(torch.Tensor)).detach().double() for x in (q, k, v))
    scores = q @ k.mT / q.shape[-1] ** 0.5
    if type(mask).__name__ == "CausalBias":
        mask = mask._materialize()
    if mask is not None and mask.dtype is torch.bool:
        scores = scores.masked_fill(~mask, -torch.inf)
    elif mask is not None:
        scores = scores + mask.as_subclass(torch.Tensor).double()
    return scores.softmax(-1) @ v


def check_way(way: str, made: str, kind: str, mode: str, block: str) -> None:
    """One call: the right numbers, or an error that PyTorch raises too, or that names batch_invariant()."""
    torch.compiler.reset()
    generator = torch.Generator().manual_seed(3)
    inputs = [torch.randn(2, 3, n, 16, generator=generator) for n in (7, 9, 9)]
    args = TENSORS[kind](*inputs)

    def run(context: Any) -> Any:
        with contextlib.nullcontext() if made == "before" else context():
            function = WAYS[way](*args)
            if made == "before" and "compile" in way:
                with MODES[mode]():
                    function(*args)
        with context() as seen, MODES[mode]():
            return function(*args), seen

    try:
        run(contextlib.nullcontext)
    except Exception as theirs_too:
        refused: Any = type(theirs_too)
    else:
        refused = ()
    torch.compiler.reset()  # functions of the same code share compiled graphs
    by_pytorch = made == "before" and way in ("compile, aot_eager", "compile, inductor")
    try:
        out, seen = run(BLOCKS[block])
    except RuntimeError as error:  # a NotImplementedError, of which TorchScript makes one of its own
        if "batch_invariant() has no kernel" not in str(error):
            if refused and isinstance(error, refused):
                return
            raise
        assert block == "batch_invariant"
        assert kind == "wrapper" or by_pytorch
        return
    except refused:
        return
    if mode == "function mode" and "name" in way:
        assert AnyFunction.seen in {F.scaled_dot_product_attention: None}
    found = out.a if isinstance(out, TwoTensor) else out.detach().as_subclass(torch.Tensor)
    limit = 3e-2 if mode == "autocast" or kind == "bfloat16" else 1e-5
    torch.testing.assert_close(found.double(), by_formula(*args), rtol=limit, atol=limit)
    if kind != "wrapper" and way not in ("compile, aot_eager", "compile, inductor"):
        assert (seen.calls, seen.passed_on) == (1, 0)
    if kind == "gradients" and mode != "inference":
        torch.autograd.grad(out.sum(), args)


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", TENSORS)
def test_every_way_to_call_attention_is_right(kind: str, mode: str, block: str) -> None:
    for way in WAYS.keys() - set(MADE_WAYS):
        check_way(way, "before", kind, mode, block)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
@pytest.mark.promise("use_cattn")
@pytest.mark.parametrize("way", MADE_WAYS)
@pytest.mark.parametrize("made", ["before", "inside"])
@pytest.mark.parametrize("block", ["use_cattn", "batch_invariant"])
def test_functions_made_before_and_inside_a_block_are_right(block: str, made: str, way: str) -> None:
    for kind in ("plain", "gradients", "float mask") if way == "compile, inductor" else TENSORS:
        for mode in ("", "inference", "autocast")[: 2 if "compile" in way else 1]:
            check_way(way, made, kind, mode, block)


def test_nothing_is_left_after_a_block() -> None:
    operator: Any = torch.ops.aten.scaled_dot_product_attention.default
    x = torch.randn(2, 3, 7, 16)
    name = "aten::scaled_dot_product_attention"
    before, right = torch._C._dispatch_dump_table(name), theirs(x, x, x)
    tag = torch.compiler.config.cache_key_tag
    for context in BLOCKS.values():
        with context():
            assert torch.compiler.config.cache_key_tag != tag
            assert theirs is F.scaled_dot_product_attention
            assert torch._C._dispatch_dump_table(name) != before
        assert torch._C._dispatch_dump_table(name) == before
        assert not operator.py_kernels
        assert torch.compiler.config.cache_key_tag == tag
        assert torch.equal(theirs(x, x, x), right)


# ---- subclasses and modes --------------------------------------------------------------------------------------------
class Uninitialised(torch.Tensor):
    """A mask of zeros whose memory holds something else."""

    seen: list[Any] = []  # noqa: RUF012

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.seen.append(func)
        if func is torch.nn.functional.scaled_dot_product_attention:
            return theirs(*args[:3])
        return super().__torch_function__(func, types, args, kwargs)


def test_other_subclasses_as_masks() -> None:
    """The operator refuses them; inside the swap the class itself sees PyTorch's function."""
    q, k, v = tensors(*[(2, 5, 8)] * 3)
    mask = torch.randn(5, 5, dtype=torch.float64).as_subclass(Uninitialised)
    with pytest.raises(TypeError, match=r"attn_mask must be a plain torch\.Tensor, got Uninitialised"):
        attention(q, k, v, mask)
    for bias in (mask, causal_bias("lower_right", 5, 5)):
        with pytest.raises(TypeError, match=r"attn_mask must be a plain torch\.Tensor, got"):
            torch.ops.cattn.attention(
                *operator_arguments(query=q.detach(), key=k.detach(), value=v.detach(), attn_mask=bias)
            )
    with bridge.use_cattn():
        assert torch.equal(torch.nn.functional.scaled_dot_product_attention(q, k, v, mask), theirs(q, k, v))
        plain = mask.as_subclass(type("Plain", (torch.Tensor,), {}))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, plain)
    assert torch.equal(out.as_subclass(torch.Tensor), attention(q, k, v, mask.as_subclass(torch.Tensor)))
    assert any(func is theirs for func in Uninitialised.seen)


def test_one_dimensional_inputs_go_to_pytorch() -> None:
    x, v = torch.ones(5, 4), torch.ones(4)
    with bridge.use_cattn():
        for inputs in ((v, x, x), (x, v, x), (x, x, v), (v, v, v), (v[0], x, x)):
            with pytest.raises(RuntimeError, match="Expected query, key, and value to all be"):
                torch.nn.functional.scaled_dot_product_attention(*inputs)


def test_jagged_tensors_go_to_pytorch() -> None:
    with warnings.catch_warnings(action="ignore"):
        parts = [torch.randn(n, 2, 8) for n in (3, 5)]
        nested = torch.nested.nested_tensor(parts, layout=torch.jagged).transpose(1, 2)
        right = theirs(nested, nested, nested)
        with bridge.use_cattn():
            ours = torch.nn.functional.scaled_dot_product_attention(nested, nested, nested)
    torch.testing.assert_close(ours.values(), right.values())


def test_dropout_p_as_a_tensor() -> None:
    x = torch.randn(2, 5, 4)
    with bridge.use_cattn():
        out = torch.nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=torch.tensor(0.0))
        assert torch.equal(out, attention(x, x, x))
        with pytest.raises(RuntimeError, match=r"dropout probability has to be between 0 and 1"):
            torch.nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=torch.tensor(2.0))
