"""The memory of tensors in every door: which arguments a call writes, and tensors whose memory is not what they say."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import pytest

import cattn

torch = pytest.importorskip("torch")
if not hasattr(torch.library, "get_kernel"):
    pytest.skip("batch_invariant needs PyTorch 2.9", allow_module_level=True)

from cattn import testing  # noqa: E402
from cattn.integrations import torch as bridge  # noqa: E402
from cattn.integrations.torch import nn  # noqa: E402
from cattn.integrations.torch._operator import write_options  # noqa: E402

F = torch.nn.functional
Tensors = dict[str, Any]
B, H, T, D = 2, 2, 5, 4


class Door(NamedTuple):
    """A function of tensors, which it gets by their names."""

    function: Callable[..., Any]
    shapes: dict[str, tuple[int, ...]]
    writes: str | None = None  # the argument that the call writes
    differentiable: bool = False
    names: dict[str, str] = {}  # of arguments in an error, where they have others  # noqa: RUF012


def within(context: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(**tensors: Any) -> Any:
        with context():
            return function(**tensors)

    return call


def operate(query: Any, key: Any, value: Any, bias: Any, sinks: Any) -> Any:
    options = write_options({"dropout_p": 0.0, "is_causal": False})
    return torch.ops.cattn.attention(query, key, value, None, bias, sinks, None, *options, False)[0]


def operate_linear(**x: Any) -> Any:
    options = (None, None, None, "bhtd")
    return torch.ops.cattn.linear_attention(*x.values(), *options)


def operate_conv(**x: Any) -> Any:
    return torch.ops.cattn.causal_conv(*x.values(), None)


def autocast(**tensors: Any) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        return bridge.scaled_dot_product_attention(**tensors)


def load(**arrays: Any) -> Any:
    layer = cattn.SelfAttention_v1(D, D, rng=0)
    layer.load_state_dict(arrays, strict=False)
    return layer.W_query


HEADS = dict.fromkeys(("query", "key", "value"), (B, H, T, D))
EXTRAS = {"attn_mask": (T, T), "bias": (H, T, T), "sinks": (H,)}
DECAY = {"decay": (B, H, T), "beta": (B, H, T), "state": (B, H, D, D)}
CONV = {"x": (B, T, D), "weight": (D, 3), "bias": (D,), "state": (B, 2, D)}
FACTORS = {"input": "the first factor", "mat2": "the second factor", "self": "the first factor"}
SUMMANDS = {"mat1": "input", "mat2": "weight", "input": "bias"}
DOORS = {
    "attention": Door(bridge.scaled_dot_product_attention, HEADS | EXTRAS, differentiable=True),
    "attention of heads": Door(bridge.scaled_dot_product_attention, HEADS),
    "attention with slopes": Door(bridge.scaled_dot_product_attention, HEADS | {"alibi_slopes": (H,)}),
    "attention, autocast": Door(autocast, HEADS | EXTRAS),
    "torch.ops.cattn.attention": Door(operate, HEADS | {"bias": (T, T), "sinks": (H,)}, differentiable=True),
    "use_cattn": Door(
        within(bridge.use_cattn, F.scaled_dot_product_attention), HEADS | {"attn_mask": (T, T)}, differentiable=True
    ),
    "linear_attention": Door(
        lambda **x: tuple(bridge.linear_attention(**x, return_state=True)), HEADS | DECAY, differentiable=True
    ),
    "causal_conv": Door(
        lambda **x: tuple(bridge.causal_conv(**x, return_state=True)), CONV, differentiable=True
    ),
    "torch.ops.cattn.linear_attention": Door(operate_linear, HEADS | DECAY, differentiable=True),
    "torch.ops.cattn.causal_conv": Door(operate_conv, CONV, differentiable=True),
    "mm": Door(within(bridge.batch_invariant, torch.mm), {"input": (T, D), "mat2": (D, T)}, names=FACTORS),
    "bmm": Door(within(bridge.batch_invariant, torch.bmm), {"input": (B, T, D), "mat2": (B, D, T)}, names=FACTORS),
    "addmm": Door(
        within(bridge.batch_invariant, torch.addmm), {"input": (D,), "mat1": (T, D), "mat2": (D, D)}, names=SUMMANDS
    ),
    "linear": Door(
        within(bridge.batch_invariant, F.linear), {"input": (T, D), "weight": (D, D), "bias": (D,)},
        differentiable=True,
    ),
    "mm, out": Door(
        within(bridge.batch_invariant, torch.mm), {"input": (T, D), "mat2": (D, D), "out": (T, D)}, "out",
        names=FACTORS,
    ),
    "NumPy's": Door(cattn.causal_attention, HEADS | {"bias": (H, T, T)}),
    "NumPy's linear_attention": Door(cattn.linear_attention, HEADS | DECAY),
    "NumPy's class": Door(cattn.MultiHeadAttention(D, D, T, 0.0, 2, rng=0), {"x": (B, T, D)}),
    "the class": Door(nn.MultiHeadAttention(D, D, T, 0.0, 2), {"x": (B, T, D)}),
    "NumPy's list": Door(lambda x: cattn.softmax([[x, x]]), {"x": (T, D)}),
    "NumPy's state dict": Door(load, {"W_query": (D, D)}),
    "NumPy's diagnose": Door(lambda result: str(testing.diagnose(lambda x: result)) and 0, {"result": (T, D)}),
    "assert_attention_close": Door(
        within(lambda: suppress(AssertionError), testing.assert_attention_close), {"out": (B, H, T, D), **HEADS}
    ),
}  # fmt: skip


def of_transformers() -> dict[str, Door]:
    """Return the doors that transformers has: its attention function, and what the contexts replace."""
    try:
        importlib.import_module("transformers")
    except ImportError:
        return {}
    from cattn.integrations.transformers import _attend

    module = importlib.import_module("transformers.models.qwen3_5.modeling_qwen3_5")
    kimi = importlib.import_module("transformers.models.kimi_linear.modeling_kimi_linear")
    heads = dict.fromkeys(("query", "key", "value"), (B, T, H, D)) | {"g": (B, T, H), "beta": (B, T, H)}
    state = {"initial_state": (B, H, D, D)}
    step = {name: (B, 1, *shape[2:]) for name, shape in heads.items()}
    token, kept = {"hidden_states": (B, D, 1)}, {"weight": (D, 3), "bias": (D,)}

    def replaced(owner: Any, name: str) -> Callable[..., Any]:
        return within(bridge.use_cattn, lambda **x: getattr(owner, name)(**x))

    def rule(owner: Any, name: str, shapes: Any) -> Door:
        call = replaced(owner, name)
        return Door(lambda **x: call(**x, output_final_state=True), shapes | state, differentiable=True)

    def attend(query: Any, key: Any, value: Any, attention_mask: Any) -> Any:
        return _attend(torch.nn.Identity().eval(), query, key, value, attention_mask)[0]

    return {
        "transformers' attention": Door(
            attend, HEADS | {"attention_mask": (B, 1, T, T)}, names={"attention_mask": "attn_mask"}
        ),
        "chunk": rule(module, "torch_chunk_gated_delta_rule", heads),
        "step": rule(module, "torch_recurrent_gated_delta_rule", step),
        "kimi's step": rule(kimi, "recurrent_kimi_delta_attention", step | {"g": (B, 1, H, D)}),
        "conv": Door(replaced(module, "causal_conv1d_fn"), {"hidden_states": (B, D, T)} | kept, differentiable=True),
        "update": Door(
            replaced(module, "causal_conv1d_update"), token | {"conv_state": (B, D, 3)} | kept, "conv_state"
        ),
    }


def of_jax() -> dict[str, Door]:
    try:
        jax: Any = importlib.import_module("cattn.integrations.jax")
    except ImportError:
        return {}
    return {"NumPy's, of JAX": Door(lambda **x: np.array(jax.dot_product_attention(**x)), HEADS)}


DOORS |= of_transformers() | of_jax()
each_door = pytest.mark.parametrize("name", DOORS)


def make(door: Door, dtype: Any = torch.float32) -> Tensors:
    generator = torch.Generator().manual_seed(0)
    made = {name: torch.rand(shape, generator=generator).to(dtype) for name, shape in door.shapes.items()}
    return {name: -x if name in ("decay", "g") else x for name, x in made.items()}


def results_of(door: Door, tensors: Tensors, gradients: bool = False) -> list[Any]:
    """Return the results of a call, or their gradients in all arguments."""
    if not gradients:
        with torch.no_grad():
            found = door.function(**tensors)
        return [torch.as_tensor(x) for x in (found if isinstance(found, tuple) else (found,)) if x is not None]
    followed = {name: x.detach().requires_grad_() for name, x in tensors.items()}
    found = door.function(**followed)
    losses = [x.square().sum() for x in (found if isinstance(found, tuple) else (found,)) if x.requires_grad]
    return list(torch.autograd.grad(sum(losses), [*followed.values()]))


# ---- arguments -------------------------------------------------------------------------------------------------------
def in_inference(x: Any) -> Any:
    with torch.inference_mode():
        return x.clone()


class Inherits(torch.Tensor):
    """A subclass that changes nothing."""


class Watches(torch.Tensor):
    """A subclass with a function of its own, whose memory need not hold its numbers."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs)


KINDS = {
    "plain": lambda x: x.clone(),
    "transposed": lambda x: x.mT.contiguous().mT if x.ndim > 1 else x.repeat_interleave(2)[::2],
    "expanded": lambda x: x[:1].expand(x.shape),
    "negative": lambda x: torch._neg_view(-x),
    "of inference": in_inference,
    "of a subclass": lambda x: x.clone().as_subclass(Inherits),
}


@pytest.mark.parametrize("kind", KINDS)
@each_door
def test_arguments_are_as_before_and_what_is_written_moves_its_version(name: str, kind: str) -> None:
    door = DOORS[name]
    if name.startswith(("NumPy's", "assert")) and kind == "negative":
        pytest.skip("NumPy's functions refuse it")
    plain = make(door)
    for own in plain:
        tensors = {n: x.clone() for n, x in plain.items()}
        tensors[own] = KINDS[kind](plain[own])
        before = {n: (x, x.clone(), 0 if x.is_inference() else x._version) for n, x in tensors.items()}
        if own == door.writes and kind in ("expanded", "of inference"):
            with pytest.raises(RuntimeError):  # PyTorch's own
                results_of(door, tensors)
            continue
        equal = plain | {own: tensors[own].clone().resolve_neg()}
        want = results_of(door, {n: x.clone() for n, x in equal.items()})
        found = results_of(door, tensors)
        assert all(map(torch.equal, found, want)), own
        for n, (x, numbers, version) in before.items():
            written = n == door.writes
            assert written or torch.equal(x, numbers), (own, n)
            assert x.is_inference() or (x._version > version if written else x._version == version), (own, n)
        if door.differentiable and kind != "of inference":
            want = results_of(door, {n: x.clone() for n, x in equal.items()}, gradients=True)
            found = results_of(door, tensors, gradients=True)
            assert all(map(torch.equal, found, want)), own
            assert all(torch.equal(x, numbers) and x._version == v for x, numbers, v in before.values()), own


CHECKED = [name for name in DOORS if name.startswith(("attention", "linear_a", "causal", "torch.ops"))]


@pytest.mark.parametrize("name", CHECKED)
def test_a_subclass_with_a_function_of_its_own_is_refused_as_any_argument(name: str) -> None:
    door = DOORS[name]
    for own in door.shapes:
        tensors = make(door)
        tensors[own] = tensors[own].as_subclass(Watches)
        message = rf"^{own} must be a plain torch\.Tensor, got Watches: pass {own}\.as_subclass\(torch\.Tensor\)"
        with pytest.raises(TypeError, match=message):
            results_of(door, tensors)


# ---- memory that is not there ----------------------------------------------------------------------------------------
def shortened(x: Any, size: int, first: int = 0) -> Any:
    """Return a tensor like x, from an element of its storage on, whose storage is then cut to so many bytes."""
    memory = torch.cat([x.new_ones(first), x.flatten()])
    made = memory[first:].view(x.shape)
    memory.untyped_storage().resize_(size)
    return made


LIES = {
    "freed": lambda x: shortened(x, 0),
    "freed, a view": lambda x: shortened(x, 0, 3),
    "of one element": lambda x: shortened(x, x.itemsize),
    "without its last element": lambda x: shortened(x, (x.numel() + 2) * x.itemsize, 3),
}
# PyTorch's own errors, where one of its functions comes first
THEIRS = r"requiring a storage size of|its data is not allocated yet"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@each_door
def test_a_tensor_without_its_memory_is_refused_by_name(name: str, dtype: Any) -> None:
    door = DOORS[name]
    if name in ("assert_attention_close", "NumPy's, of JAX") and dtype is torch.bfloat16:
        pytest.skip("it takes no bfloat16 tensors")
    for own in door.shapes:
        for make_lie in LIES.values():
            for gradients in {False, door.differentiable}:
                tensors = make(door, dtype)
                tensors[own] = make_lie(tensors[own])
                named = rf"^{door.names.get(own, own)} has a storage of \d+ bytes, which was (freed|shortened): "
                with pytest.raises(RuntimeError, match=f"{named}|{THEIRS}"):
                    results_of(door, tensors, gradients)


# For tensors on "meta" PyTorch calls kernels of its own, which may return memory that is not set, also outside a block.
OWN = [name for name in DOORS if name not in ("use_cattn", "mm", "bmm", "addmm", "linear", "mm, out", "conv", "update")]


@pytest.mark.parametrize("name", OWN)
def test_a_tensor_without_numbers_is_refused_or_gives_one(name: str) -> None:
    door = DOORS[name]
    for own in door.shapes:
        tensors = make(door)
        tensors[own] = tensors[own].to("meta")
        with suppress(RuntimeError, TypeError, ValueError):
            assert all(x.is_meta for x in results_of(door, tensors)), own
