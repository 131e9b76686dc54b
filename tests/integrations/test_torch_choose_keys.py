"""The choice of keys of tensors: the bits of arrays at once, compiled, traced and under torch.vmap."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest

import cattn

torch = pytest.importorskip("torch")
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

from cattn.integrations.torch import choose_keys, scaled_dot_product_attention  # noqa: E402
from cattn.integrations.torch._choose_keys import _ARRAYS, _NUMBERS  # noqa: E402
from cattn.integrations.torch._operator import write_numbers  # noqa: E402
from support.torch_calls import Call, tensor  # noqa: E402

B, H, T_q, T_k, D = 2, 4, 6, 9, 8
QUERY, KEY = tensor(B, H, T_q, D), tensor(B, 1, T_k, D, seed=2)
SAMPLES: dict[str, Call] = {
    "plain": {},
    "weights and relu": {"weights": tensor(B, H, T_q), "activation": "relu", "is_causal": True, "query_offset": 3},
    "groups": {"key": tensor(B, 2, T_k, D), "enable_gqa": True, "scale": -0.3, "is_causal": "lower_right"},
    "masks": {"attn_mask": tensor(T_q, T_k) > 0, "bias": tensor(B, 1, T_q, T_k)},
    "blocks": {"block_size": 2, "first": 1, "last": 1, "count": 3, "key_value_seq_starts": torch.tensor([0, 3])},
    "pooled": {"block_size": 4, "pooled": True, "key_value_seq_lengths": torch.tensor([39, 17]), "is_causal": True,
               "query_offset": torch.tensor([30, 2])},
    "pooled, a window": {"block_size": 2, "pooled": True, "window_size": (5, 0), "query_offset": 4, "count": 1},
    "two dimensions": {"query": tensor(T_q, D), "key": tensor(T_k, D), "query_seq_lengths": 4},
    "a batch without heads": {"query": tensor(B, T_q, D), "key": tensor(B, T_k, D)},
    "other numbers of dimensions": {"query": tensor(H, T_q, D), "key": tensor(3, B, 1, T_k, D)},
    "tokens before heads": {"query": tensor(B, T_q, H, D), "key": tensor(B, T_k, 1, D), "layout": "bthd"},
    "more than there are": {"count": 20, "window_size": (2, 1), "query_offset": 1},
}  # fmt: skip
each = pytest.mark.parametrize("name", SAMPLES)


def sample(name: str) -> Call:
    return {"query": QUERY, "key": KEY, "count": 2} | SAMPLES[name]


def mapped(function: Any, call: Call) -> Call:
    return {name: function(x) if isinstance(x, torch.Tensor) else x for name, x in call.items()}


def assert_same(found: Any, wanted: Any) -> None:
    """Scores of keys that no whole block has are NaN."""
    for a, b in zip(found, wanted, strict=True):
        b = torch.as_tensor(b)
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert torch.equal(torch.nan_to_num(a, 7.0), torch.nan_to_num(b, 7.0))
        assert not a.requires_grad


@pytest.mark.promise("torch.compile")
@each
def test_each_way_has_the_bits_of_arrays(name: str) -> None:
    call = sample(name)
    wanted = cattn.choose_keys(**mapped(np.asarray, call), return_scores=True)
    assert (wanted[0] >= 0).any()
    assert_same([choose_keys(**call)], wanted[:1])
    followed = mapped(lambda x: x.clone().requires_grad_() if x.is_floating_point() else x, call)
    assert_same(choose_keys(**followed, return_scores=True), wanted)
    for dynamic in (False, True):
        torch.compiler.reset()
        compiled = torch.compile(choose_keys, backend="aot_eager", fullgraph=True, dynamic=dynamic)
        assert_same(compiled(**followed, return_scores=True), wanted)


@each
def test_tensors_without_numbers_have_the_shapes_and_strides(name: str) -> None:
    call, mode = sample(name), FakeTensorMode()
    with mode:
        fake = choose_keys(**mapped(mode.from_tensor, call), return_scores=True)
    for a, b in zip(fake, choose_keys(**call, return_scores=True), strict=True):
        assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)


@each
def test_the_operator_fulfils_the_contract_of_torch_library(name: str) -> None:
    call = {"block_size": 1, "pooled": False, "first": 0, "last": 0, "layout": "bhtd"} | sample(name)
    call |= {n: torch.tensor(x) for n, x in call.items() if type(x) is int and n in _ARRAYS}
    call["is_causal"] = {True: "upper_left"}.get(call.get("is_causal"), call.get("is_causal"))
    arguments = (*map(call.get, _ARRAYS), *write_numbers(_NUMBERS, call))
    for return_scores in (False, not call["pooled"]):  # the check does not know NaN
        torch.library.opcheck(torch.ops.cattn.choose_keys.default, (*arguments, return_scores))


@each
def test_vmap_is_a_loop(name: str) -> None:
    call = sample(name)
    queries = torch.stack([call["query"], call["query"].flip(-1), -call["query"]])
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # PyTorch warns where it falls back to a loop of its own
        found = torch.vmap(lambda x: choose_keys(**call | {"query": x}, return_scores=True))(queries)
    rows = [choose_keys(**call | {"query": x}, return_scores=True) for x in queries]
    assert_same(found, map(torch.stack, zip(*rows, strict=True)))


def test_no_gradient_passes_through_a_choice() -> None:
    def loss(query: Any) -> Any:
        keys, scores = choose_keys(query, KEY, 2, return_scores=True)
        return (scores * query.sum()).sum() + keys.sum()

    query = QUERY.clone().requires_grad_()
    (right,) = torch.autograd.grad(loss(query), query)
    constant = choose_keys(QUERY, KEY, 2, return_scores=True)[1].sum()
    torch.testing.assert_close(right, constant.expand_as(query))
    assert torch.equal(torch.func.grad(loss)(QUERY), right)


def test_attention_takes_the_keys_and_autocast_casts() -> None:
    keys = choose_keys(QUERY, KEY, 3, is_causal="lower_right")
    chosen = torch.zeros(B, 1, T_q, T_k + 1, dtype=torch.bool).scatter(-1, keys.long() % (T_k + 1), True)[..., :T_k]
    found = scaled_dot_product_attention(QUERY, KEY, KEY, key_indices=keys, enable_gqa=True)
    right = scaled_dot_product_attention(QUERY, KEY, KEY, chosen, enable_gqa=True)
    torch.testing.assert_close(found, right)
    halves = [x.to(torch.bfloat16) for x in (QUERY, KEY)]
    with torch.autocast("cpu", torch.bfloat16):
        found = choose_keys(QUERY.float(), KEY.float(), 3, return_scores=True)
    assert_same(found, choose_keys(*halves, 3, return_scores=True))


X = torch.ones(2, 3, 4)
WRONG: dict[str, tuple[type[Exception], dict[str, Any]]] = {
    r"key has dtype torch\.float64; query has torch\.float32": (TypeError, {"key": X.double()}),
    r"weights must be a torch\.Tensor, got list": (TypeError, {"weights": [1.0]}),
    r"query is on meta, cattn computes on the CPU": (ValueError, {"query": X.to("meta")}),
    r"count must be": (ValueError, {"count": 0}),
    r"layout must be 'bhtd' or 'bthd', got 'thd'": (ValueError, {"layout": "thd"}),
    r'is_causal must be a bool, "upper_left" or "lower_right", got 2': (TypeError, {"is_causal": 2}),
    r"activation must be": (ValueError, {"activation": "silu"}),
    r"unexpected keyword argument 'out': it returns a new tensor": (TypeError, {"out": X}),
}


@pytest.mark.parametrize("text", WRONG)
def test_wrong_calls_are_named(text: str) -> None:
    kind, wrong = WRONG[text]
    with pytest.raises(kind, match=text):
        choose_keys(**{"query": X, "key": X, "count": 1} | wrong)
