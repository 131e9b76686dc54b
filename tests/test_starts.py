"""Padding on the left: key_value_seq_starts has the bits of the boolean mask that it stands for.

The keys and values before the start hold NaN in every test.
"""

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cattn
from attention_strategy import calls
from support import HALVES, INF, NAN, assert_same_bits, every_way, everything, forced, rounded, table, widened

Call = dict[str, Any]
BLOCK, CHUNK = cattn._cattn._block_keys(), cattn._cattn._chunk_keys()


def mask_of(starts: Any, T_k: int, heads: bool) -> np.ndarray:
    """Return the mask that the starts stand for; its axes are (*batch, [1 for heads], 1, T_k)."""
    keys = np.arange(T_k) >= np.asarray(starts)[..., None]
    return keys[..., None, None, :] if heads and keys.ndim > 1 else keys[..., None, :]


def with_poison(call: Call, poison: float = NAN) -> Call:
    """Return the call with NaN in all keys and values before the starts."""
    heads = call["key"].ndim > 3
    hidden = ~mask_of(call["key_value_seq_starts"], call["key"].shape[-2], heads).swapaxes(-1, -2)
    return call | {name: np.where(hidden, call[name].dtype.type(poison), call[name]) for name in ("key", "value")}


def with_mask(call: Call) -> Call:
    """Return the same call with a boolean mask in the place of the starts."""
    call = dict(call)
    mask = mask_of(call.pop("key_value_seq_starts"), call["key"].shape[-2], call["key"].ndim > 3)
    given = call.get("attn_mask")
    if given is None or given.dtype == bool:
        return call | {"attn_mask": mask if given is None else given & mask}
    return call | {"attn_mask": np.where(mask, given, given.dtype.type(-INF))}


def attend(T_q: int, T_k: int, starts: Any, *, heads: int = 4, dtype: Any = np.float32, **options: Any) -> Call:
    """Return a call of grouped heads with poison before the starts."""
    rng = np.random.default_rng([T_q, T_k])
    shapes = {"query": (2, heads, T_q, 11), "key": (2, 2, T_k, 11), "value": (2, 2, T_k, 19)}
    call = {name: rng.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}
    return with_poison(call | {"key_value_seq_starts": starts} | options)


CASES: dict[str, Callable[..., Call]] = {
    "many queries": lambda **more: attend(150, 500, [3, 401], **more),
    "causal": lambda **more: attend(150, 150, [149, 20], is_causal=True, **more),
    "a step of decoding": lambda **more: attend(1, 700, [BLOCK, 650], is_causal="lower_right", **more),
    "a few steps": lambda **more: attend(6, 2 * CHUNK + 90, [CHUNK + 5, 2 * CHUNK], is_causal="lower_right", **more),
    "few tokens": lambda **more: attend(2, 30, [0, 29], is_causal="lower_right", heads=2, **more),
    "no key is left": lambda **more: attend(100, 200, [200, 0], is_causal="lower_right", sinks=[1, 2, 3, 4.0], **more),
    "the start is after the length": lambda **more: attend(
        40, 300, [250, 10], key_value_seq_lengths=[200, 190], query_seq_lengths=[40, 7], **more
    ),
    "window, softcap, slopes, sinks": lambda **more: attend(
        99, 400, [280, 190], is_causal="lower_right", window_size=(150, 0), softcap=3.0,
        alibi_slopes=[0.5, 0.1, 0.02, 0.0], sinks=[0.5, -1, -INF, 2.0], **more,
    ),
    "masks and dropout": lambda **more: attend(
        40, 300, [250, 10], attn_mask=np.random.default_rng(1).random((40, 300)) < 0.5,
        bias=np.random.default_rng(2).standard_normal((4, 1, 300)), dropout_p=0.3, rng=9, **more,
    ),
    "one start for all": lambda **more: attend(100, 300, 97, query_offset=np.array([200, 40]), is_causal=True, **more),
}  # fmt: skip


@pytest.mark.promise("hidden keys")
@pytest.mark.parametrize("name", CASES)
def test_the_bits_are_those_of_the_mask(name: str, isa: str, dtype: Any) -> None:
    call = CASES[name](dtype=dtype)
    right = everything(**with_mask(call))
    for poisoned in (call, with_poison(call, INF)):
        for way, result in every_way(lambda of=poisoned: everything(**of), tiny=name == "few tokens"):
            assert_same_bits(result, right, way)


@pytest.mark.promise("halves")
@pytest.mark.parametrize("half", HALVES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_halves(name: str, half: np.dtype, isa: str) -> None:
    call = CASES[name](dtype=half)
    right = rounded(everything(**widened(with_mask(call))), half)
    for way, result in every_way(lambda: everything(**call), tiny=name == "few tokens"):
        assert_same_bits(result, right, way)


def gradients(call: Call, grad_out: np.ndarray, grad_lse: np.ndarray) -> cattn.AttentionGradients:
    result = cattn.scaled_dot_product_attention(**call, return_lse=np.float64)
    return cattn.attention_backward(grad_out, out=result.out, lse=result.lse, grad_lse=grad_lse, **call)


@pytest.mark.promise("gradients' bits")
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_gradients_have_the_bits_of_the_mask(name: str, dtype: Any, isa: str, normal: Any) -> None:
    call = CASES[name](dtype=dtype)
    rows = call["query"].shape[:3]
    grad_out, grad_lse = normal(*rows, 19, dtype=dtype), normal(*rows, dtype=np.float64)
    with cattn.num_threads(1):
        right = gradients(with_mask(call), grad_out, grad_lse)
    for threads in (1, 3):
        with cattn.num_threads(threads):
            found = gradients(call, grad_out, grad_lse)
        for field in cattn.AttentionGradients._fields:
            if getattr(right, field) is None:
                assert getattr(found, field) is None
            else:
                assert_same_bits(getattr(found, field), getattr(right, field), f"{field}, {threads} threads")
    hidden = ~mask_of(call["key_value_seq_starts"], call["key"].shape[2], True)[..., 0, :]
    for grad in (found.key, found.value):
        assert not grad[np.broadcast_to(hidden, grad.shape[:3])].any()


@pytest.mark.parametrize("layout", ["C", "tokens before heads", "backwards", "apart"])
def test_any_strides_of_inputs_and_results(layout: str, path: str, dtype: Any) -> None:
    """Memory between the elements of a result is not written."""
    call = CASES["few tokens"](dtype=dtype)
    right = everything(**with_mask(call))

    def lay_out(a: np.ndarray) -> np.ndarray:
        if layout == "tokens before heads":
            return np.ascontiguousarray(a.swapaxes(1, 2)).swapaxes(1, 2)
        if layout == "backwards":
            return np.ascontiguousarray(a[..., ::-1, ::-1])[..., ::-1, ::-1]
        return np.repeat(np.repeat(a, 2, axis=-1), 3, axis=-2)[..., ::3, ::2] if layout == "apart" else a

    strided = {name: lay_out(x) if name in ("query", "key", "value") else x for name, x in call.items()}
    memory = np.full((2, 4, 9, 50), 7, dtype)
    out = memory[:, ::2, 1:7:3, 48:10:-2]
    result = cattn.scaled_dot_product_attention(**strided, out=out)
    assert result is out
    assert_same_bits(out.copy(), right.out)
    out[...] = 7
    assert (memory == 7).all()
    weights = cattn.attention_weights(**{name: x for name, x in strided.items() if name != "value"})
    assert_same_bits(weights, right.weights)


@pytest.mark.parametrize("stage", ["mask", "softmax", "dropout"])
def test_stages_of_the_weights(stage: Any, isa: str, dtype: Any) -> None:
    call = CASES["window, softcap, slopes, sinks"](dtype=dtype) | {"dropout_p": 0.4, "rng": 3, "stage": stage}
    del call["value"]
    assert_same_bits(cattn.attention_weights(**call), cattn.attention_weights(**with_mask(call)))


def test_causal_attention_counts_from_key_0(dtype: Any, path: str) -> None:
    """The default offset is the difference of the lengths, with or without starts."""
    call = CASES["few tokens"](dtype=dtype)
    right = cattn.scaled_dot_product_attention(**call)
    del call["is_causal"]
    assert_same_bits(cattn.causal_attention(**call), right)


@pytest.mark.promise("hidden keys")
@pytest.mark.parametrize(
    "n_padding", [0, 1, 15, 16, 17, 95, 96, 100, 191, BLOCK, BLOCK + 1, CHUNK - 1, CHUNK, CHUNK + 3]
)
def test_padding_is_skipped_and_changes_little(n_padding: int, isa: str, dtype: Any, normal: Any) -> None:
    """Blocks are counted from key 0, so that the bits depend on the number of padded keys, but the numbers do not."""
    T = 220
    x = [normal(1, 2, T, 8, dtype=dtype) for _ in range(3)]
    padded = [np.concatenate([np.full((1, 2, n_padding, 8), NAN, dtype), a], axis=2) for a in x]
    out = cattn.causal_attention(*padded, key_value_seq_starts=n_padding)
    assert not out[:, :, :n_padding].any()
    # Another order of the sums: a few units in the last place of numbers of about 1.
    np.testing.assert_allclose(out[:, :, n_padding:], cattn.causal_attention(*x), rtol=0, atol=64 * np.finfo(dtype).eps)
    if n_padding % CHUNK == 0:
        assert_same_bits(out[:, :, n_padding:].copy(), cattn.causal_attention(*x))
    plan = cattn.explain(*padded, is_causal="lower_right", key_value_seq_starts=n_padding)
    assert plan.visible_pairs == 2 * T * (T + 1) // 2
    step = cattn.explain(padded[0][:, :, -1:], *padded[1:], key_value_seq_starts=n_padding)
    assert step.key_blocks_visited == 2 * ((T + n_padding - 1) // BLOCK - n_padding // BLOCK + 1)


@given(st.data())
@settings(max_examples=max(60, settings().max_examples))
def test_random_calls_have_the_bits_of_the_mask(isa: str, data: st.DataObject) -> None:
    """With every option, rank, stride and dtype."""
    call, _ = data.draw(calls().filter(lambda drawn: "key_value_seq_starts" in drawn[0]))
    T_k = call["key"].shape[-2]
    heads = max(call[name].ndim for name in ("query", "key", "value")) > 3
    mask = mask_of(call["key_value_seq_starts"], T_k, heads)
    masked = {name: x for name, x in call.items() if name != "key_value_seq_starts"}
    given_mask = call.get("attn_mask")
    if given_mask is None or given_mask.dtype == bool:
        masked["attn_mask"] = mask if given_mask is None else given_mask & mask
    else:
        masked["attn_mask"] = np.where(mask, given_mask, given_mask.dtype.type(-INF))
    right = everything(**masked)
    for way, result in every_way(lambda: everything(**call), tiny=False):
        assert_same_bits(result, right, way)


def test_tables_agree(dtype: Any) -> None:
    """Where another test compares with the mask, this one compares the kernels among themselves."""
    call = CASES["window, softcap, slopes, sinks"](dtype=dtype)
    with table("scalar"), forced("rows"), cattn.num_threads(1):
        right = everything(**call)
    for entry in cattn.show_config("dicts")["tables"]:
        if entry["usable"] and entry["bit_contract"]:
            with table(entry["name"]), forced("tile"), cattn.num_threads(3):
                assert_same_bits(everything(**call), right, entry["name"])
