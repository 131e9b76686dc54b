"""cattn's functions inside PyTorch: a row for each operator, and the questions that each of its samples is asked."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest

import cattn
from cattn import functional

torch = pytest.importorskip("torch")
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from cattn.integrations import torch as bridge  # noqa: E402
from cattn.integrations.torch._tensors import as_array, as_tensor  # noqa: E402
from support import as_tuple, calls, paired  # noqa: E402
from support.torch_calls import (  # noqa: E402
    INPUTS,
    Call,
    attention,
    given,
    in_words,
    operator_arguments,
    tensor,
    tensors,
    theirs,
)

HALVES = (torch.float16, torch.bfloat16)


# ---- the samples of attention ----------------------------------------------------------------------------------------
B, H, T_q, T_k, D = 2, 4, 6, 9, 8
LISTS = torch.arange(B * T_q * 4).reshape(B, T_q, 4) % T_k - 1
HEADS = ((B, H, T_q, D), (B, H, T_k, D), (B, H, T_k, 5))
GROUPS = ((B, H, T_q, D), (B, 2, T_k, D), (B, 2, T_k, 5))

OPTIONS: dict[str, Call] = {
    "plain": {},
    "causal": {"is_causal": True},
    "float mask": {"attn_mask": tensor(H, 1, T_k)},
    "boolean mask": {"attn_mask": tensor(T_q, T_k) > 0},
    "bias": {"bias": tensor(H, T_q, T_k)},
    "bias and a boolean mask": {"bias": tensor(T_k), "attn_mask": tensor(T_q, T_k) > -1},
    "bias and a float mask": {"bias": tensor(B, 1, T_q, T_k), "attn_mask": tensor(H, 1, T_k, seed=2)},
    "softcap and scale": {"softcap": 0.7, "scale": -0.9},
    "window": {"window_size": (2, 1), "query_offset": 3},
    "causal with an offset for each batch entry": {"is_causal": True, "query_offset": torch.tensor([3, 0])},
    "aligned to the lower right": {"is_causal": "lower_right"},
    "lengths": {"query_seq_lengths": torch.tensor([6, 4]), "key_value_seq_lengths": torch.tensor([5, 9])},
    "starts": {"key_value_seq_starts": torch.tensor([0, 5]), "is_causal": "lower_right"},
    "starts and lengths": {"key_value_seq_starts": 2, "key_value_seq_lengths": torch.tensor([1, 8])},
    "one length for all": {"key_value_seq_lengths": 7, "query_seq_lengths": 5},
    "slopes": {"alibi_slopes": torch.from_numpy(cattn.get_alibi_slopes(H)), "query_offset": 3},
    "sinks": {"sinks": tensor(H)},
    "a list of keys for each query": {"key_indices": LISTS[:, None], "is_causal": "lower_right", "bias": tensor(T_k)},
    "a list of keys for all": {"key_indices": torch.tensor([3, -1, 0, 3], dtype=torch.int32), "sinks": tensor(H)},
    "blocks of each head": {"block_mask": tensor(H, 3, 5) > -0.5, "block_size": 2, "is_causal": "lower_right"},
    "blocks for all": {"block_mask": tensor(2, 1) < 0.5, "block_size": 5, "bias": tensor(T_q, T_k)},
    "blocks and lists": {"block_mask": tensor(B, 1, 2, 3) > -1, "block_size": 4, "key_indices": LISTS[:, None]},
    "one block": {"block_mask": torch.tensor([[True]]), "block_size": 2**63 - 1, "sinks": tensor(H)},
    "dropout from a seed": {"dropout_p": 0.4, "rng": 2**64 - 3},
}


def in_bytes(key: Any, value: Any, quantized: Any = torch.int8, shapes: Any = GROUPS, **options: Any) -> Call:
    """Return a call with keys and values of one byte and scales of these shapes, where they are not None."""
    call = given(*shapes, **options)
    for name, shape in (("key", key), ("value", value)):
        if shape is not None:
            scale = torch.rand(shape, generator=torch.Generator().manual_seed(1)) / 20 + 0.01
            call |= {name: (call[name] * 40).to(quantized), f"{name}_scale": scale}
    return call


SCALED: Call = {"softcap": 5.0, "key_value_seq_lengths": torch.tensor([9, 5]), "bias": tensor(H, T_q, T_k),
                "sinks": tensor(H), "enable_gqa": True}  # fmt: skip
FIRST = {"layout": "bthd", "is_causal": "lower_right", "sinks": tensor(4)}  # tokens before heads
QUERIES, KEYS = (B, T_q, H, D), (B, T_k, H, D)
ATTENTION: dict[str, Call] = {
    **{name: given(*HEADS, **options) for name, options in OPTIONS.items()},
    # forms of the inputs
    "two dimensions": given((T_q, D), (T_k, D), (T_k, 5), is_causal="lower_right", sinks=tensor(1)),
    "three dimensions": given(
        (B, T_q, D), (B, T_k, D), (B, T_k, 5), key_value_seq_lengths=torch.tensor([4, 9]),
        attn_mask=tensor(B, T_q, T_k), sinks=tensor(B, 1),
    ),
    "three dimensions, blocks": given(
        (B, T_q, D), (B, T_k, D), (B, T_k, 5), block_mask=tensor(B, 2, 3) > -1, block_size=4,
    ),
    "three dimensions, lists": given((B, T_q, D), (B, T_k, D), (B, T_k, 5), key_indices=LISTS),
    "three dimensions with heads": given(
        (4, T_q, D), (2, T_k, D), (2, T_k, 5), enable_gqa=True, sinks=tensor(4), bias=tensor(4, 1, T_k),
    ),
    "all options of scores": given(
        *HEADS, query_offset=torch.tensor([3, 1]), is_causal=True, bias=tensor(H, T_q, T_k), softcap=2.0,
        alibi_slopes=tensor(H).abs(),
    ),
    "lists of each head": given(*HEADS, key_indices=LISTS[0, :H, None]),
    "other numbers of dimensions": given((B, H, T_q, D), (T_k, D), (H, T_k, 5), attn_mask=tensor(T_k) > 0),
    "five dimensions": given(
        (3, B, H, T_q, D), (B, H, T_k, D), (B, H, T_k, 5), key_value_seq_lengths=8,
        key_value_seq_starts=torch.tensor([[1, 4]]),
    ),
    "groups": given(*GROUPS, enable_gqa=True, scale=0.3),
    "groups inferred, sinks for each batch entry": given(*GROUPS, enable_gqa=None, sinks=tensor(B, H)),
    "one query head for all": given((B, 1, 5, 8), (B, H, 5, 8), (B, H, 5, 8), enable_gqa=True),
    "transposed": {name: x.transpose(1, 2) for name, x in given(QUERIES, KEYS, KEYS).items()},
    "tokens before heads": given(QUERIES, KEYS, KEYS, enable_gqa=False, **FIRST),
    "tokens before heads, one batch entry": given((5, 4, 8), (7, 2, 8), (7, 2, 6), enable_gqa=True, **FIRST),
    "tokens before heads, five dimensions": given(
        (3, 2, 5, 4, 8), (3, 2, 7, 2, 8), (3, 2, 7, 2, 6), enable_gqa=None, **FIRST
    ),
    **{f"size 0 of axis {i}": given(tuple(np.where(np.arange(4) == i, 0, (2, 3, 4, 5)).tolist())) for i in range(4)},
    "no queries": given((2, 3, 0, 5), (2, 3, 4, 5), (2, 3, 4, 5)),
    "size 0, transposed": {name: x.transpose(1, 2) for name, x in given((2, 0, 4, 5)).items()},
    # other products
    **{
        f"products of {word}": {name: x.float() for name, x in given((2, 3, 50, 16)).items()} | {"compute_dtype": word}
        for word in ("bfloat16", "bfloat16_tiles", torch.bfloat16)
    },
    **{
        f"{quantized}, scales of {name}": in_bytes(key, value, quantized, **SCALED)
        for quantized in (torch.int8, torch.float8_e4m3fn)
        for name, key, value in (
            ("tokens", (B, 2, T_k, 1), (B, 2, T_k, 1)), ("columns", (2, 1, D), (5,)),
            ("elements", (B, 2, T_k, D), (B, 2, T_k, 5)), ("all", (), (1, 1)),
            ("keys alone", (T_k, 1), None), ("values alone", None, (B, 1, T_k, 1)),
        )
    },
    "scales of two dimensions": in_bytes((T_k, 1), (), shapes=((T_q, D), (T_k, D), (T_k, 5)), is_causal=True),
    "scales, tokens before heads": in_bytes((2, 1), (), shapes=(QUERIES, (B, T_k, 2, D), (B, T_k, 2, 5)),
                                            layout="bthd", enable_gqa=None),
}  # fmt: skip


def drawn(seed: int) -> Call:
    """Return a random call with any mix of the options, of float64."""
    choose = calls.from_rng(np.random.default_rng(seed))
    sizes = calls.Limits(*[(1, 2, 3, 5, 8)] * 3)
    arrays, _ = calls.attention(
        lambda options: np.float64 if options is calls.STORED else choose(options), limits=sizes,
        without=("key_scale", "compute_dtype"),
    )  # fmt: skip
    if "block_mask" in arrays:
        arrays["block_mask"], arrays["block_size"] = arrays["block_mask"]
    found = {name: torch.from_numpy(np.array(x)) if isinstance(x, np.ndarray) else x for name, x in arrays.items()}
    return {"enable_gqa": None} | found


# ---- the samples of the other functions ------------------------------------------------------------------------------
def delta_rule(n_queries: int = 4, n_keys: int = 1, by_row: bool = False, **options: Any) -> Call:
    """Return a call of the gated delta rule."""
    shapes = ((2, n_queries, 5, 3), (2, n_keys, 5, 3), (2, 2, 5, 2))
    decay, beta = -tensor(2, 2, 5, 3).abs(), tensor(2, 2, 5).sigmoid()
    call = given(*shapes, decay=decay if by_row else decay[..., 0], beta=beta, state=tensor(2, 2, 3, 2))
    if options.get("layout") == "bthd":
        call = {name: x if name == "state" else x.transpose(1, 2).contiguous() for name, x in call.items()}
    return call | options


def packed(call: Call) -> Call:
    """Return a call of the first batch entry, whose tokens are those of two sequences."""
    found = {name: x[0] if isinstance(x, torch.Tensor) and name != "state" else x for name, x in call.items()}
    return found | {"cu_seqlens": torch.tensor([0, 2, 5])}


LINEAR: dict[str, Call] = {
    "plain": given((2, 2, 5, 3)),
    "two dimensions": given((5, 3), (5, 3), (5, 2), decay=-tensor(5).abs()),
    "the delta rule": delta_rule(),
    "decay of each row": delta_rule(by_row=True),
    "equal heads": delta_rule(2, 2, scale=0.7),
    "lengths": delta_rule(seq_lengths=torch.tensor([4, 5]), scale=0.7),
    "one length": delta_rule(seq_lengths=3),
    "tokens before heads": delta_rule(layout="bthd"),
    "tokens before heads, by row": delta_rule(layout="bthd", by_row=True, seq_lengths=torch.tensor([4, 5])),
    "packed": packed(delta_rule()),
    "packed, by row": packed(delta_rule(by_row=True)),
    "no tokens": given((2, 2, 0, 3)),
}
CONVOLUTION: Call = {"x": tensor(2, 5, 3), "weight": tensor(3, 4, seed=2)}
CONV: dict[str, Call] = {
    "plain": CONVOLUTION,
    "two dimensions": {"x": tensor(5, 3), "weight": tensor(3, 2)},
    "all arguments": CONVOLUTION | {"bias": tensor(3), "state": tensor(2, 3, 3, seed=3)},
    "silu": CONVOLUTION | {"bias": tensor(3), "state": tensor(2, 3, 3, seed=3), "activation": "silu"},
}


# ---- the rows --------------------------------------------------------------------------------------------------------
def attend(call: Call) -> Call:
    result = attention(**paired(call, as_tuple, as_tuple), return_weights=True, return_lse=True)
    return {"out": result.out, "lse": result.lse, "weights": result.weights}


def attend_arrays(arrays: Call) -> Call:
    result = cattn.scaled_dot_product_attention(**paired(in_words(arrays)), return_weights=True, return_lse=True)
    return {"out": result.out, "lse": result.lse, "weights": result.weights}


def attention_gradients(arrays: Call, grads: Call) -> Call:
    """Return cattn's gradients. A float mask has the bias's, and where both are there each has that of their sum."""
    call = paired(in_words(arrays))
    mask = call.get("attn_mask")
    added = mask is not None and mask.dtype != bool
    if added:
        mask = call.pop("attn_mask")
        call["bias"] = mask.astype(max(mask.dtype, np.dtype(np.float32))) + call.get("bias", 0)
    result = cattn.scaled_dot_product_attention(**call, return_lse=np.float64)
    found = cattn.attention_backward(
        grads["out"], out=result.out, lse=result.lse, grad_lse=grads["lse"], **call
    )._asdict()
    return found | ({"attn_mask": found["bias"]} if added else {})


def with_state(function: Callable[..., Any], call: Call) -> Call:
    return dict(function(**call, return_state=True)._asdict())


def gradients_with_state(function: Callable[..., Any], names: tuple[str, ...], arrays: Call, grads: Call) -> Call:
    return dict(zip(names, function(grads["out"], **arrays, grad_state=grads["state"]), strict=True))


def in_order(names: tuple[str, ...], defaults: Call, **call: Any) -> tuple[Any, ...]:
    call = defaults | {name: torch.as_tensor(x) if name == "seq_lengths" else x for name, x in call.items()}
    return tuple(call.get(name) for name in names)


class Operator(NamedTuple):
    """A function of tensors: its results, and those of cattn's function of arrays, by their names."""

    samples: dict[str, Call]
    leaves: tuple[str, ...]  # the arguments that have gradients
    results: tuple[str, ...]  # those that have gradients in the operator of the backward pass
    call: Callable[[Call], Call]
    arrays: Callable[[Call], Call]
    gradients: Callable[[Call, Call], Call]  # given the gradients of the results
    arguments: Callable[..., tuple[Any, ...]]  # of torch.ops.cattn
    lowered: tuple[str, ...]  # what autocast casts
    twice: bool  # has second derivatives and forward mode, and one call for a batch of torch.vmap


DELTA_RULE, CONVOLVED = (*INPUTS, "decay", "beta", "state"), ("x", "weight", "bias", "state")
OPERATORS: dict[str, Operator] = {
    "attention": Operator(
        ATTENTION, (*INPUTS, "attn_mask", "bias", "sinks", "gate"), ("out", "lse"), attend, attend_arrays,
        attention_gradients, operator_arguments, (*INPUTS, "attn_mask", "bias"), twice=True,
    ),
    "linear_attention": Operator(
        LINEAR, DELTA_RULE, ("out", "state"), partial(with_state, bridge.linear_attention),
        partial(with_state, cattn.linear_attention),
        partial(gradients_with_state, functional.linear_attention_backward, DELTA_RULE),
        partial(in_order, (*DELTA_RULE, "seq_lengths", "cu_seqlens", "scale", "layout"), {"layout": "bhtd"}),
        INPUTS, twice=False,
    ),
    "causal_conv": Operator(
        CONV, CONVOLVED, ("out", "state"), partial(with_state, bridge.causal_conv),
        partial(with_state, functional.causal_conv),
        partial(gradients_with_state, functional.causal_conv_backward, CONVOLVED),
        partial(in_order, (*CONVOLVED, "activation"), {}), (), twice=False,
    ),
}  # fmt: skip
EACH = [(operator, name) for operator, row in OPERATORS.items() for name in row.samples]
each_sample = pytest.mark.parametrize(("operator", "name"), EACH, ids=map(" of ".join, ((n, o) for o, n in EACH)))
each_operator = pytest.mark.parametrize("operator", OPERATORS)
NARROW = ("compute_dtype", "key_scale", "value_scale")  # options whose products are float32's


def mapped(function: Callable[[Any], Any], call: Call) -> Call:
    return {name: function(x) if isinstance(x, torch.Tensor) else x for name, x in call.items()}


def sample(operator: str, name: str, dtype: Any = None) -> tuple[Operator, Call, Call]:
    """Return a row, a call with its tensors in a dtype, and those among them that have gradients."""
    row = OPERATORS[operator]
    call = row.samples[name] if name in row.samples else drawn(int(name))
    if dtype is not None:
        if "compute_dtype" in call and dtype is not torch.float32:
            pytest.skip("the products are those of float32 numbers")
        own = {"sinks": torch.float32} if dtype in HALVES else {}  # may be wider
        call = call | {n: x.to(own.get(n, dtype)) for n, x in call.items() if is_leaf(row, n, x)}
    leaves = {n: x.detach().clone().requires_grad_() if x.is_contiguous() else x.detach().requires_grad_()
              for n, x in call.items() if is_leaf(row, n, x)}  # fmt: skip
    return row, call | leaves, leaves


def is_leaf(row: Operator, name: str, x: Any) -> bool:
    return name in row.leaves and isinstance(x, torch.Tensor) and x.is_floating_point() and x.itemsize > 1


def arrays_of(call: Call) -> Call:
    return mapped(lambda x: as_array(x.detach()), call)


def compile_call(row: Operator, call: Call, leaves: Call) -> Any:
    """Return the results under the compiler; each call compiles anew."""
    torch.compiler.reset()
    function = torch.compile(lambda given: row.call(call | given), backend="aot_eager", fullgraph=True)
    return function(leaves)


@contextlib.contextmanager
def other_defaults() -> Iterator[None]:
    """Make others the device and the dtype of tensors that do not say theirs. "meta" takes the place of "cuda"."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float16)
    try:
        with torch.device("meta"):
            yield
    finally:
        torch.set_default_dtype(before)


def cotangents(results: Call, names: tuple[str, ...]) -> Call:
    return {n: tensor(*results[n].shape, seed=5).to(results[n].dtype) for n in names}


def gradients(results: Call, leaves: Call, grads: Call) -> tuple[Any, ...]:
    outputs, inputs = [results[name] for name in grads], [*leaves.values()]
    with other_defaults():
        found: tuple[Any, ...] = torch.autograd.grad(
            outputs, inputs, [*grads.values()], retain_graph=True, allow_unused=True
        )
    return found


# ---- the questions ---------------------------------------------------------------------------------------------------
@pytest.mark.promise("PyTorch's function", "torch.compile", "gradients")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, *HALVES])
@each_sample
def test_each_way_gives_the_bits_and_gradients_of_arrays(operator: str, name: str, dtype: Any) -> None:
    check_bits(operator, name, dtype)


@pytest.mark.parametrize("seed", range(40))
def test_random_calls_give_the_bits_and_gradients_of_arrays(seed: int) -> None:
    check_bits("attention", str(seed), torch.float64)


def check_bits(operator: str, name: str, dtype: Any) -> None:
    """At once, by autograd, under the compiler, and where the tensors' defaults are others."""
    row, call, leaves = sample(operator, name, dtype)
    wide = dtype in HALVES and not is_float64(call)  # beside bytes halves are computed in float32
    arrays = arrays_of(call | {n: x.float() for n, x in leaves.items()} if wide else call)
    wanted = {n: as_tensor(x, dtype if x.dtype.itemsize == 2 else None) for n, x in row.arrays(arrays).items()}
    wanted = {n: x.to(dtype) if wide and n != "lse" else x for n, x in wanted.items()}
    with torch.no_grad():
        at_once = row.call(call)
    followed = row.call(call)
    with other_defaults():
        elsewhere = row.call(call)
    compiles = name in row.samples and dtype is (torch.float64 if is_float64(call) else torch.float32)
    ways = [followed, elsewhere, *([compile_call(row, call, leaves)] if compiles else [])]
    for found in (at_once, *ways):
        for n, right in wanted.items():
            assert found[n].dtype is right.dtype
            assert torch.equal(found[n], right), n
            assert found[n].requires_grad != (found is at_once)
    grads = cotangents(followed, row.results)
    right_gradients = row.gradients(arrays, {n: as_array(x.float() if wide else x) for n, x in grads.items()})
    each = [gradients(found, leaves, grads) for found in ways]
    for n, leaf, first, *others in zip(leaves, leaves.values(), *each, strict=True):
        assert first.dtype is leaf.dtype
        assert all(torch.equal(other, first) for other in others), n
        right = torch.from_numpy(np.asarray(right_gradients[n], np.float64)).sum_to_size(leaf.shape)
        # a mask and a bias share one gradient, whose sums have another order
        rounding = 4 * torch.finfo(leaf.dtype).eps if operator == "attention" and n not in INPUTS else 0.0
        torch.testing.assert_close(first.double(), right.to(leaf.dtype).double(), rtol=rounding, atol=rounding)
    every = cotangents(followed, tuple(followed))
    each = [gradients(found, leaves, every) for found in ways]
    assert all(torch.equal(a, b) for other in each[1:] for a, b in zip(each[0], other, strict=True))
    for n in every if dtype is torch.float64 else ():  # a loss may depend on one result, and on the others
        alone, rest = {n: every[n]}, {m: x for m, x in every.items() if m != n}
        parts = [gradients(followed, leaves, chosen) for chosen in (alone, rest)]
        for whole, *both in zip(each[0], *parts, strict=True):
            total = sum(x for x in both if x is not None)
            torch.testing.assert_close(whole, total, rtol=1e-11, atol=1e-11)


@each_sample
def test_tensors_without_numbers_have_the_shapes_and_strides_of_the_results(operator: str, name: str) -> None:
    row, call, _ = sample(operator, name)
    mode = FakeTensorMode()
    call_of_none = mapped(lambda x: mode.from_tensor(x.detach()), call)
    with mode:
        fake = row.call(call_of_none)
    for n, real in row.call(call).items():
        expected = (fake[n].shape, fake[n].stride())
        assert (real.shape, real.stride()) == expected, n


@pytest.mark.promise("torch.compile")
@pytest.mark.parametrize(
    "checks",
    [("test_schema", "test_autograd_registration", "test_faketensor"),
     pytest.param(("test_aot_dispatch_dynamic",), marks=pytest.mark.long)],
    ids=["", "dynamic"],
)  # fmt: skip
@each_sample
def test_the_operators_fulfil_the_contract_of_torch_library(operator: str, name: str, checks: tuple[str, ...]) -> None:
    row, call, leaves = sample(operator, name)
    if operator == "attention" and "layout" in call:
        pytest.skip("the operator has one layout")
    if any(x.dtype is torch.float8_e4m3fn for x in call.values() if isinstance(x, torch.Tensor)):
        checks = tuple(check for check in checks if "auto" in check or "fake" in check)  # the others multiply tensors
    if {"attn_mask", "bias"} <= leaves.keys():  # the function adds the two before the operator
        call["attn_mask"] = call["attn_mask"].detach()
    args = row.arguments(**call)
    for options in ((), (True,)) if operator == "attention" else ((),):
        given = (*args[: len(args) - len(options)], *options)
        torch.library.opcheck(getattr(torch.ops.cattn, operator).default, given, test_utils=checks)
    still = [x.detach() if isinstance(x, torch.Tensor) else x for x in args]
    out, other, *_ = getattr(torch.ops.cattn, operator)(*still)
    results = (None, out, other, *still[:-1]) if operator == "attention" else still
    backward = (torch.ones_like(out), torch.ones_like(other), *results)
    torch.library.opcheck(getattr(torch.ops.cattn, f"{operator}_backward").default, backward, test_utils=checks)


@pytest.mark.promise("torch.compile")
@each_operator
def test_a_compiled_function_takes_other_numbers_of_tokens(operator: str) -> None:
    """With one graph, which draws the seed of a dropout, too."""
    row, call, _ = sample(operator, "plain")
    call = call | ({"dropout_p": 0.2} if operator == "attention" else {})
    function = torch.compile(lambda given: row.call(call | given), backend="aot_eager", fullgraph=True, dynamic=True)
    for repeats in (1, 2, 5):
        axis = -2 if operator != "causal_conv" else 1
        leaves = {
            n: x.detach().repeat_interleave(repeats, axis).requires_grad_()
            for n, x in call.items()
            if n in (*INPUTS, "x")
        }
        each = []
        for way in (function, lambda given: row.call(call | given)):
            torch.manual_seed(0)
            found = way(leaves)
            loss = sum(found[n].sum() for n in row.results)
            each.append([found["out"], *torch.autograd.grad(loss, [*leaves.values()])])
        assert all(map(torch.equal, *each))


def is_float64(call: Call) -> bool:
    """Return whether finite differences of this call have enough digits."""
    return not any(name in call for name in NARROW)


@pytest.mark.promise("gradients")
@each_sample
def test_derivatives_pass_the_checks_of_pytorch(operator: str, name: str) -> None:
    check_derivatives(operator, name)


@pytest.mark.parametrize("seed", range(60))
def test_derivatives_of_random_calls_pass_the_checks_of_pytorch(seed: int) -> None:
    check_derivatives("attention", str(seed))


def check_derivatives(operator: str, name: str) -> None:
    """In random directions: those of first order, forward mode and those of second order, where there are some."""
    row, call, leaves = sample(operator, name)
    if not is_float64(call) or not all(x.numel() for x in leaves.values()):
        pytest.skip("no differences of float64")
    if name not in row.samples and "attn_mask" in leaves:  # some numbers are -inf
        del leaves["attn_mask"]
        call["attn_mask"] = call["attn_mask"].detach()

    def function(names: tuple[str, ...], *given: Any) -> tuple[Any, ...]:
        found = row.call(call | dict(zip(leaves, given, strict=True)))
        return tuple(found[n].where(found[n].isfinite(), 0) for n in names)  # lse of no keys is -inf

    twice = row.twice and not {"key_indices", "gate"} & call.keys()
    first, second = (
        partial(function, ("out", "lse", "weights") if row.twice else row.results),
        partial(function, row.results),
    )
    assert torch.autograd.gradcheck(first, [*leaves.values()], check_forward_ad=twice, fast_mode=True)
    if twice:
        assert torch.autograd.gradgradcheck(second, [*leaves.values()], check_fwd_over_rev=True, fast_mode=True)


@each_operator
def test_transforms_of_an_operator_are_right_or_refused_by_name(operator: str) -> None:
    row, call, leaves = sample(operator, "plain")
    names, values = [*leaves], tuple(x.detach() for x in leaves.values())

    def total(*given: Any) -> Any:
        loss: Any = row.call(call | dict(zip(names, given, strict=True)))["out"].square().sum()
        return loss

    def by_operator(x: Any) -> Any:
        return getattr(torch.ops.cattn, operator)(*row.arguments(**call | {names[0]: x}))[0].sum()

    right = torch.autograd.grad(total(*leaves.values()), [*leaves.values()], create_graph=True)
    found = torch.func.grad(total, argnums=tuple(range(len(values))))(*values)
    assert all(map(torch.equal, found, right))
    named = rf"\(torch.ops.cattn.{operator}\)"
    instead = {"attention": "scaled_dot_product_attention"}.get(operator, operator)
    with pytest.raises(NotImplementedError, match=rf"{named} does not support: call .*torch.{instead}, not compiled"):
        torch.func.grad(by_operator)(values[0])
    if not row.twice:
        with pytest.raises(NotImplementedError, match=f"{named} has no second derivatives"):
            right[0].sum().backward()
        with pytest.raises(NotImplementedError, match=f"{named} has no forward mode"):
            torch.func.jvp(total, values, values)


@pytest.mark.parametrize("dims", [(0, 0), (None, 1), (1, None)], ids=str)
@each_sample
def test_vmap_is_a_loop_in_one_call(operator: str, name: str, dims: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over every other argument, or all of them; with the gradients."""
    row, call, leaves = sample(operator, name)
    if {"attn_mask", "bias"} <= leaves.keys():
        call["attn_mask"] = leaves.pop("attn_mask").detach()
    names = [n for n in call if n in row.leaves or n.endswith("_scale") if isinstance(call[n], torch.Tensor)]
    at = {n: d if d is None else min(d, call[n].ndim) for n, d in zip(names, dims * len(names), strict=False)}
    if all(d is None for d in at.values()):
        pytest.skip("there is no batch")
    full = {n: call[n].detach() if d is None else stacked(call[n].detach(), d) for n, d in at.items()}
    full = {n: x.requires_grad_() if n in leaves else x for n, x in full.items()}
    counted: list[Any] = []
    forward = cattn.scaled_dot_product_attention
    monkeypatch.setattr(
        cattn, "scaled_dot_product_attention", lambda *args, **more: (counted.append(args), forward(*args, **more))[1]
    )

    def function(given: Call) -> Call:
        return row.call(call | given)

    with warnings.catch_warnings(), other_defaults():
        warnings.simplefilter("error")  # PyTorch warns where it falls back to a loop
        found = torch.vmap(function, (at,))(full)
    assert not row.twice or len(counted) == (3 if "dropout_p" in call else 1)
    parts = [function({n: x if at[n] is None else x.select(at[n], i) for n, x in full.items()}) for i in range(3)]
    right = {n: torch.stack([part[n] for part in parts]) for n in found}
    assert all(torch.equal(found[n], right[n]) for n in found)
    wanted = {n: x for n, x in full.items() if n in leaves}
    each = [gradients(results, wanted, cotangents(found, row.results)) for results in (found, right)]
    close = 1e-12 if is_float64(call) and "compute_dtype" not in call else 1e-5
    for a, b in zip(*each, strict=True):
        torch.testing.assert_close(a, b, rtol=close, atol=close)


def stacked(x: Any, dim: int) -> Any:
    """Return a batch of three tensors: one, and the same numbers in other orders."""
    if x.dtype is torch.float8_e4m3fn:
        return stacked(x.view(torch.int8), dim).view(x.dtype)
    return torch.stack([x.flatten().roll(i).reshape(x.shape) for i in range(3)], dim)


@each_sample
def test_several_gradients_at_once_are_those_one_by_one(operator: str, name: str) -> None:
    """vmap over the backward pass."""
    row, call, leaves = sample(operator, name)
    found = row.call(call)
    outputs, inputs = [found[n] for n in row.results], [*leaves.values()]
    grads = [tensor(3, *x.shape, seed=2).to(x.dtype) for x in outputs]
    options = {"retain_graph": True, "allow_unused": True}
    with other_defaults():
        ours = torch.autograd.grad(outputs, inputs, grads, is_grads_batched=True, **options)
    parts = [torch.autograd.grad(outputs, inputs, [g[i] for g in grads], **options) for i in range(3)]
    close = 1e-12 if is_float64(call) and "compute_dtype" not in call else 1e-5
    for a, b in zip(ours, map(torch.stack, zip(*parts, strict=True)), strict=True):
        torch.testing.assert_close(a, b, rtol=close, atol=close)


@pytest.mark.parametrize("lowered", HALVES)
@each_sample
def test_autocast_casts_what_it_casts_for_pytorchs_function(operator: str, name: str, lowered: Any) -> None:
    row, call, _ = sample(operator, name, torch.float32)
    if "compute_dtype" in call and lowered is torch.float16:
        pytest.skip("the products are those of float32 numbers and of bfloat16")
    right = row.call(call | {n: x.to(lowered) for n, x in call.items() if n in row.lowered and is_leaf(row, n, x)})
    with torch.autocast("cpu", lowered):
        found = row.call(call)
    for n, x in right.items():
        assert found[n].dtype is x.dtype
        assert torch.equal(found[n], x), n


@each_operator
def test_a_profiler_shows_the_operators(operator: str) -> None:
    row, call, leaves = sample(operator, "plain")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        found = row.call(call)
        gradients(found, leaves, cotangents(found, row.results))
        with torch.no_grad():
            row.call(call)
            getattr(torch.ops.cattn, operator)(*row.arguments(**call))
    names = [event.name for event in profile.events()]
    inside = not row.twice  # the function inside of the operator is shown, too
    assert names.count(f"cattn::{operator}") == 3 + inside
    assert names.count(f"cattn::{operator}_backward") == 1


# ---- random numbers and memory ---------------------------------------------------------------------------------------
def test_dropout_follows_the_seed_of_pytorch() -> None:
    q, k, v = tensors(*[(2, 3, 40, 16)] * 3)

    def call() -> torch.Tensor:
        with other_defaults():
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


def test_dropout_of_a_generator() -> None:
    q, k, v = tensors(*[(2, 3, 9, 8)] * 3)
    a = attention(q, k, v, dropout_p=0.5, rng=torch.Generator().manual_seed(4))
    state = torch.get_rng_state()
    b = attention(q, k, v, dropout_p=0.5, rng=torch.Generator().manual_seed(4))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(a, b)
    assert not torch.equal(a, attention(q, k, v, dropout_p=0.5, rng=torch.Generator().manual_seed(5)))


def test_lengths_may_change_between_the_passes() -> None:
    """A decoding loop counts its lengths up in place."""
    q, k, v = tensors(*[(2, 3, 9, 8)] * 3)
    lengths = torch.tensor([4, 9])
    (right,) = torch.autograd.grad(attention(q, k, v, key_value_seq_lengths=lengths).sum(), k)
    out = attention(q, k, v, key_value_seq_lengths=lengths)
    lengths += 1
    (ours,) = torch.autograd.grad(out.sum(), k)
    assert torch.equal(ours, right)


def test_an_output_lies_in_memory_as_its_query() -> None:
    """As PyTorch's does: models join the heads of a token without a copy, or take them for contiguous."""
    k, compiled = tensor(2, 3, 7, 8), torch.compile(attention, backend="aot_eager")
    for q in (tensor(2, 7, 3, 8).transpose(1, 2), tensor(2, 3, 7, 8)):
        right = theirs(q, k, k).stride()
        for out in (attention(q, k, k), compiled(q, k, k), attention(q, k, k, return_lse=True).out):
            assert out.stride() == right
        assert attention(q, k.clone().requires_grad_(), k).stride() == right


def test_arrays_with_scales_stand_beside_tensors() -> None:
    """A scale with fewer axes than its values has the same layout."""
    query, values = tensor(2, 5, 2, 8).float(), tensor(2, 7, 2, 8).float()
    quantized = cattn.quantize(values.numpy(), dtype="int8")
    for scale in (quantized.scale, np.array([[0.1], [0.2]], np.float32), np.float32(0.1)):
        pair = cattn.Quantized(quantized.values, scale)
        wanted = cattn.scaled_dot_product_attention(query.numpy(), pair, values.numpy(), layout="bthd")
        np.testing.assert_array_equal(attention(query, pair, values, layout="bthd").numpy(), wanted)


# ---- errors ----------------------------------------------------------------------------------------------------------
@each_sample
def test_arguments_without_numbers_are_refused_by_name(operator: str, name: str) -> None:
    row, call, _ = sample(operator, name)
    for own, x in call.items():
        if not isinstance(x, torch.Tensor) or own.startswith(("query_", "key_value_")):  # positions may be arrays
            continue
        sparse = torch.empty(x.shape, dtype=x.dtype, layout=torch.sparse_coo)
        for kind, wrong, text in (
            (TypeError, as_array(x.detach()), "must be a torch.Tensor, got ndarray"),
            (ValueError, x.detach().to("meta"), "is on meta, cattn computes on the CPU"),
            *([(TypeError, sparse, "is torch.sparse_coo, cattn wants dense tensors")] if own in (*INPUTS, "x") else []),
        ):
            if own == "block_mask" and kind is TypeError:  # of arrays, as a cattn.BlockMask has them
                continue
            with pytest.raises(kind, match=rf"^{own.replace('_scale', '.scale')} {text}"):
                row.call(call | {own: wrong})


X = torch.ones(2, 3, 4)
I8, F8, BLOCKS = X.to(torch.int8), X.to(torch.float8_e4m3fn), torch.ones(1, 1, dtype=torch.bool)


def by(*arrays: Any, **options: Any) -> Callable[[], Any]:
    return lambda: attention(*arrays, **options)


def by_others(function: str, *arrays: Any, **options: Any) -> Callable[[], Any]:
    return lambda: getattr(bridge, function)(*arrays, **options)


def by_scales(*arrays: Any, **scales: Any) -> Callable[[], Any]:
    return lambda: attention(**paired(dict(zip(INPUTS, arrays, strict=True)) | scales, as_tuple))


WRONG: list[tuple[type[Exception], str, Callable[[], Any]]] = [
    (TypeError, r"query has dtype torch\.int64; float16, bfloat16, float32 or float64", by(X.long(), X, X)),
    (TypeError, r"value has dtype torch\.float64; query has torch\.float32", by(X, X, X.double())),
    (TypeError, r"key has dtype torch\.bfloat16; query has torch\.float32",
     by_others("linear_attention", X, X.bfloat16(), X)),
    (TypeError, r"weight has dtype torch\.float64; x has torch\.float32",
     by_others("causal_conv", X, X[0].T.double())),
    (TypeError, r"beta must be a torch\.Tensor, got float", by_others("linear_attention", X, X, X, beta=0.5)),
    # shapes: the message of cattn's own functions
    (ValueError, "key has head_dim 3, query has 4", by(X, X[..., :3], X)),
    (ValueError, "axis -4 query has size 2, key has 4", by(X[:, None], *[torch.ones(4, 1, 3, 4)] * 2)),
    (ValueError, r"value has heads \(axis -3\): 3, key has 4",
     by(torch.ones(2, 1, 5, 4), torch.ones(2, 4, 5, 4), torch.ones(2, 3, 5, 4), enable_gqa=True)),
    (ValueError, "query has 6 heads", by(torch.ones(2, 6, 5, 4), *[torch.ones(2, 4, 5, 4)] * 2, enable_gqa=True)),
    (ValueError, "query must have at least 2 dimensions", by(X[0, 0], X[0], X[0])),
    (ValueError, r"key must have at least 3 dimensions \(\.\.\., T_k, heads, head_dim\) for",
     by(X, X[0], X, layout="bthd")),
    (ValueError, "sinks has shape", by(X, X, X, sinks=torch.ones(7))),
    # flags and numbers
    (TypeError, "dropout_p must be a real number, got str", by(X, X, X, dropout_p="x")),
    (ValueError, r"dropout_p must be in \[0, 1\], got 1.5", by(X, X, X, dropout_p=1.5)),
    (TypeError, r"rng must be None, an int or a torch\.Generator, got str", by(X, X, X, dropout_p=0.5, rng="x")),
    (ValueError, r"rng must be in \[0, 2\*\*64\), got -1", by(X, X, X, dropout_p=0.5, rng=-1)),
    (ValueError, "softcap", by(X, X, X, softcap=-1.0)),
    (TypeError, "key_value_seq_lengths", by(X, X, X, key_value_seq_lengths=torch.tensor([0.5, 1.0]))),
    (TypeError, "window_size", by(X, X, X, window_size=3)),
    *((TypeError, f'is_causal must be a bool, "upper_left" or "lower_right", got {wrong!r}',
       by(X, X, X, is_causal=wrong)) for wrong in ("lower", 2, None)),
    *((ValueError, r"layout must be 'bhtd' or 'bthd', got", by(X, X, X, layout=wrong)) for wrong in ("thd", 5, True)),
    *((ValueError, r"compute_dtype must be None, 'bfloat16', 'bfloat16_tiles' or torch\.bfloat16, got",
       by(X, X, X, compute_dtype=wrong)) for wrong in (torch.float32, "float32", torch.float16, np.float32, 1)),
    (NotImplementedError, r"alibi_slopes requires grad.*alibi_slopes\.detach\(\)",
     by(X, X, X, alibi_slopes=torch.ones(1, requires_grad=True))),
    # blocks
    (TypeError, r"block_mask must be a torch\.Tensor, got list", by(X, X, X, block_mask=([True], 2))),
    (TypeError, "block_mask has dtype float32", by(X, X, X, block_mask=(BLOCKS.float(), 3))),
    *((error, text, lambda call=call, given=given: call(X, X, X, block_mask=given))
      for call in (attention, torch.vmap(lambda *x, **options: attention(*x, **options), (0, 0, 0)))
      for error, text, given in (
          (TypeError, r"block_mask must be a cattn.BlockMask or a pair \(blocks, size\), got Tensor", BLOCKS),
          *((error, r"(block_mask\.)?size must be", (BLOCKS, size)) for size, error in (
              (0, ValueError), (2**63, ValueError), (1.5, TypeError), (True, TypeError))))),
    # keys and values of one byte
    (TypeError, "key has dtype torch.float32 and a scale; scales belong to int8", by_scales(X, X, X, key_scale=X)),
    (TypeError, "value has dtype torch.int16 and a scale", by_scales(X, X, X.short(), value_scale=X)),
    (TypeError, r"value has dtype torch.int8 and no scale: pass the pair \(value, scale\)",
     by_scales(X, I8, I8, key_scale=X)),
    (TypeError, "query has dtype torch.int8 and no scale", by_scales(I8, I8, X, key_scale=X)),
    (TypeError, "value has dtype torch.float64; query has torch.float32", by_scales(X, I8, X.double(), key_scale=X)),
    (TypeError, "key must be a torch.Tensor, got int", by_scales(X, 1, X, key_scale=X)),
    (TypeError, r"key\.scale has dtype torch.bool; it must hold real numbers", by_scales(X, I8, X, key_scale=X > 0)),
    (ValueError, r"key\.scale has shape \(3,\), which does not broadcast to the shape of key \(2, 3, 4\)",
     by_scales(X, I8, X, key_scale=torch.ones(3))),
    (ValueError, r"key\.scale must be positive and finite, .* got 0.0", by_scales(X, I8, X, key_scale=X * 0)),
    (NotImplementedError, r"key\.scale requires grad, but has no gradient: pass key\.scale\.detach",
     by_scales(X, I8, X, key_scale=X.clone().requires_grad_())),
    (NotImplementedError, r"key requires grad, but has no gradient: pass key.detach",
     by_scales(X, F8.clone().requires_grad_(), X, key_scale=X)),
]  # fmt: skip


@pytest.mark.parametrize("i", range(len(WRONG)))
def test_wrong_calls_are_refused_by_name(i: int) -> None:
    kind, text, call = WRONG[i]
    with pytest.raises(kind, match=text):
        call()


def test_other_forms_of_right_arguments() -> None:
    right = attention(X, X, X)
    assert torch.equal(attention(X, X, X, block_mask=(BLOCKS, np.int32(5))), right)
    assert torch.equal(attention(X, X, X, layout=None), right)
