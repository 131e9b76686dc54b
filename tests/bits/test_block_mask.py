"""block_mask has the bits of the boolean attn_mask in which each of its elements is repeated."""

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cattn
from support import INF, NAN, assert_same_bits, every_way, everything, forced
from support.calls import calls

Call = dict[str, Any]
SIZES = [1, 7, 16, 50, 64, 128, 192, 200, 500]
DTYPES = [np.float32, np.float64, np.float16, ml_dtypes.bfloat16]


def expand(blocks: np.ndarray, size: int, T_q: int, T_k: int) -> np.ndarray:
    """Return the mask of single pairs (..., T_q, T_k)."""
    wide = np.broadcast_to(blocks, (*blocks.shape[:-2], -(-T_q // size), -(-T_k // size)))
    return np.repeat(np.repeat(wide, size, axis=-2)[..., :T_q, :], size, axis=-1)[..., :T_k]


def with_mask(call: Call) -> Call:
    """Return the same call with a mask of single pairs in the place of the blocks."""
    call = dict(call)
    blocks, size = call.pop("block_mask")
    mask = expand(np.atleast_2d(blocks), size, call["query"].shape[-2], call["key"].shape[-2])
    given = call.get("attn_mask")
    if given is None or given.dtype == bool:
        return call | {"attn_mask": mask if given is None else given & mask}
    return call | {"attn_mask": np.where(mask, given, given.dtype.type(-INF))}


def attend(
    size: int, T_q: int, T_k: int, p: float = 0.3, *, heads: int = 4, dtype: Any = np.float32, **options: Any
) -> Call:
    """Return a call of grouped heads with random blocks, of which a share p is visible."""
    rng = np.random.default_rng([size, T_q, T_k])
    shapes = {"query": (2, heads, T_q, 5), "key": (2, 2, T_k, 5), "value": (2, 2, T_k, 19)}
    call: Call = {name: rng.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}
    blocks = options.pop("block_mask", rng.random((2, heads, -(-T_q // size), -(-T_k // size))) < p)
    return call | {"block_mask": cattn.BlockMask(blocks, size)} | options


def with_poison(call: Call, poison: float = NAN) -> Call:
    """Return the call with NaN in the keys and values that no query sees."""
    mask = np.broadcast_to(with_mask(call)["attn_mask"], (2, 4, call["query"].shape[2], call["key"].shape[2]))
    hidden = ~mask.reshape(2, 2, -1, mask.shape[-1]).any(axis=2)[..., None]
    return call | {name: np.where(hidden, call[name].dtype.type(poison), call[name]) for name in ("key", "value")}


def diagonal(n: int, every: int) -> np.ndarray:
    i = np.arange(n)
    return (i[:, None] + i) % every == 0


def strided_blocks() -> np.ndarray:
    """Return blocks (2, 1, 3, 6) that are neither C-contiguous nor in ascending order."""
    return np.asfortranarray(np.random.default_rng(3).random((2, 4, 3, 12)) < 0.5)[:, 1:2, :, ::-2]


CASES: dict[str, Callable[..., Call]] = {
    **{f"blocks of {size}": lambda size=size, **more: attend(size, 110, 400, **more) for size in SIZES},
    "chunks without a visible key": lambda **more: attend(64, 20, 5000, 0.02, **more),
    "a row of blocks is hidden": lambda **more: attend(
        50, 300, 200, block_mask=np.arange(6)[:, None] % 2 == np.zeros(4, int), sinks=[1, 2, 3, -INF], **more
    ),
    "nothing is visible": lambda **more: attend(64, 100, 300, -1, **more),
    "every fourth block": lambda **more: attend(16, 110, 400, block_mask=diagonal(25, 4)[:7], **more),
    "every other key": lambda **more: attend(1, 100, 400, block_mask=diagonal(400, 2)[:100], **more),
    "causal": lambda **more: attend(64, 150, 200, 0.5, is_causal="lower_right", **more),
    "documents, causal": lambda **more: attend(
        16, 230, 230, block_mask=np.arange(15)[:, None] // 4 == np.arange(15) // 4, is_causal=True, **more
    ),
    "a step of decoding": lambda **more: attend(64, 1, 2000, is_causal="lower_right", **more),
    "a few steps": lambda **more: attend(50, 6, 1700, is_causal="lower_right", **more),
    "few tokens": lambda **more: attend(7, 2, 30, heads=2, **more),
    "window, softcap, slopes, sinks": lambda **more: attend(
        16, 110, 400, 0.5, is_causal="lower_right", window_size=(150, 0), softcap=3.0,
        alibi_slopes=[0.5, 0.1, 0.02, 0.0], sinks=[0.5, -1, -INF, 2.0], **more,
    ),
    "lengths and starts": lambda **more: attend(
        50, 200, 300, 0.5, key_value_seq_lengths=[290, 130], query_seq_lengths=[200, 7],
        key_value_seq_starts=[60, 0], **more,
    ),
    "masks and dropout": lambda **more: attend(
        16, 140, 300, attn_mask=np.random.default_rng(1).random((140, 300)) < 0.8,
        bias=np.random.default_rng(2).standard_normal((4, 1, 300)), dropout_p=0.3, rng=9, **more,
    ),
    "dropout": lambda **more: attend(192, 140, 700, dropout_p=0.5, rng=3, **more),
    "broadcast, not contiguous": lambda **more: attend(50, 140, 300, block_mask=strided_blocks(), **more),
    "one row of blocks for all": lambda **more: attend(50, 140, 300, block_mask=np.arange(6) % 3 != 1, **more),
}  # fmt: skip


def build(name: str, **more: Any) -> Call:
    return CASES[name](**more)


@pytest.mark.promise("blocks")
@pytest.mark.parametrize("name", CASES)
def test_the_bits_are_those_of_the_mask(name: str, isa: str, dtype: Any) -> None:
    call = build(name, dtype=dtype)
    right = everything(**with_mask(call))
    heads = call["query"].shape[1]
    for poisoned in (with_poison(call), with_poison(call, INF)) if heads == 4 else (call,):
        for way, result in every_way(lambda of=poisoned: everything(**of), tiny=name == "few tokens"):
            assert_same_bits(result, right, way)


@pytest.mark.promise("halves")
@pytest.mark.parametrize("half", DTYPES[2:])
@pytest.mark.parametrize("name", ["blocks of 50", "every fourth block", "a few steps", "masks and dropout"])
def test_halves(name: str, half: Any, isa: str) -> None:
    call = build(name, dtype=half)
    right = everything(**with_mask(call))
    for way, result in every_way(lambda: everything(**call), tiny=False):
        assert_same_bits(result, right, way)


def gradients(call: Call, grad_out: np.ndarray, grad_lse: np.ndarray) -> cattn.AttentionGradients:
    result = cattn.scaled_dot_product_attention(**call, return_lse=np.float64)
    return cattn.attention_backward(grad_out, out=result.out, lse=result.lse, grad_lse=grad_lse, **call)


def assert_same_fields(found: Any, right: Any, label: str) -> None:
    for field in type(right)._fields:
        if getattr(right, field) is None:
            assert getattr(found, field) is None
        else:
            assert_same_bits(getattr(found, field), getattr(right, field), f"{field}, {label}")


@pytest.mark.promise("gradients' bits")
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("name", CASES)
def test_gradients_have_the_bits_of_the_mask(name: str, dtype: Any, isa: str, normal: Any) -> None:
    call = build(name, dtype=dtype)
    rows = call["query"].shape[:3]
    grad_out, grad_lse = normal(*rows, 19, dtype=dtype), normal(*rows, dtype=np.float64)
    with cattn.num_threads(1):
        right = gradients(with_mask(call), grad_out, grad_lse)
    for threads in (1, 3):
        with cattn.num_threads(threads):
            assert_same_fields(gradients(call, grad_out, grad_lse), right, f"{threads} threads")


@pytest.mark.promise("gradients' bits")
@pytest.mark.parametrize("shape", [(1, 4, 0, 0), (4, 0, 0), (2, 4, 0, 1), (2, 4, 1, 0)])
@pytest.mark.parametrize("name", ["blocks of 7", "blocks of 64", "every fourth block", "causal"])
def test_gradients_of_a_bias(name: str, shape: tuple[int, ...], isa: str, normal: Any) -> None:
    call = build(name)
    lengths = call["query"].shape[2], call["key"].shape[2]
    size = shape[:-2] + tuple(own or length for own, length in zip(shape[-2:], lengths, strict=True))
    call |= {"bias": normal(*size, dtype=np.float32), "softcap": 2.0}
    rows = call["query"].shape[:3]
    grad_out, grad_lse = normal(*rows, 19, dtype=np.float32), normal(*rows, dtype=np.float64)
    right = gradients(with_mask(call), grad_out, grad_lse)
    for threads in (1, 3):
        with cattn.num_threads(threads):
            assert_same_fields(gradients(call, grad_out, grad_lse), right, f"{threads} threads")


@pytest.mark.parametrize("name", [name for name in CASES if "dropout" not in name])
def test_statistics_and_stages_have_the_bits_of_the_mask(name: str, isa: str) -> None:
    call = build(name)
    del call["value"]
    options: Call = {"top_k": 3, "observation_window": 40}
    with cattn.num_threads(1):
        right = cattn.attention_statistics(**with_mask(call), **options)
    for threads in (1, 3):
        with cattn.num_threads(threads):
            assert_same_fields(cattn.attention_statistics(**call, **options), right, f"{threads} threads")
    for stage in ("qk", "softcap", "bias", "mask", "softmax"):
        for path in ("tile", "rows", "split"):
            with forced(path):
                found = cattn.attention_weights(**call, stage=stage)  # type: ignore[arg-type]
            right_stage = cattn.attention_weights(**with_mask(call), stage=stage)  # type: ignore[arg-type]
            assert_same_bits(found, right_stage, f"{stage}, {path}")


@pytest.mark.promise("blocks")
@settings(deadline=None, max_examples=30)
@given(calls(), st.sampled_from([1, 7, 16, 50, 64, 192]), st.integers(0, 2**32))
def test_any_call(drawn: tuple[Call, type], size: int, seed: int) -> None:
    call, _ = drawn
    T_q, T_k = call["query"].shape[-2], call["key"].shape[-2]
    blocks = np.random.default_rng(seed).random((-(-T_q // size), -(-T_k // size))) < 0.4
    call |= {"block_mask": cattn.BlockMask(blocks, size)}
    right = everything(**with_mask(call))
    for way, result in every_way(lambda: everything(**call), tiny=False):
        assert_same_bits(result, right, way)


def test_the_reference_agrees() -> None:
    for name in ("blocks of 50", "documents, causal", "masks and dropout", "one row of blocks for all"):
        call = build(name, dtype=np.float64)
        found = cattn.scaled_dot_product_attention(**call)
        np.testing.assert_allclose(found, cattn.reference.scaled_dot_product_attention(**call), atol=1e-12)


def test_causal_attention_takes_it() -> None:
    call = build("blocks of 64")
    assert_same_bits(cattn.causal_attention(**call), cattn.causal_attention(**with_mask(call)), "causal_attention")


def test_hidden_blocks_are_skipped() -> None:
    x = np.zeros((1, 2, 192 * 20, 8), np.float32)
    blocks = np.eye(20, dtype=bool)
    plan = cattn.explain(x, x, x, block_mask=cattn.BlockMask(blocks, 192))
    assert (plan.key_blocks_visited, plan.key_blocks_skipped) == (2 * 40, 2 * 40 * 19)
    assert plan.visible_pairs == 2 * 20 * 192**2
    causal = cattn.explain(x, x, x, block_mask=cattn.BlockMask(blocks, 192), is_causal=True)
    assert (causal.key_blocks_visited, causal.visible_pairs) == (2 * 40, 2 * 20 * 192 * 193 // 2)
    step = cattn.explain(x[:, :, :1], x, x, block_mask=cattn.BlockMask(blocks[-1:], 192))
    assert (step.path, step.visible_pairs) == ("rows", 2 * 192)
    assert step.key_blocks_visited == step.tasks


def test_larger_blocks_than_the_call() -> None:
    x = np.random.default_rng(0).standard_normal((2, 30, 8)).astype(np.float32)
    right = cattn.scaled_dot_product_attention(x, x, x)
    for size in (30, 31, 2**62, np.int64(2**62)):
        shown, hidden = cattn.BlockMask([[True]], int(size)), cattn.BlockMask(False, int(size))
        assert_same_bits(cattn.scaled_dot_product_attention(x, x, x, block_mask=shown), right, "")
        assert not cattn.scaled_dot_product_attention(x, x, x, block_mask=hidden).any()


@pytest.mark.parametrize(
    ("block_mask", "error", "message"),
    [
        ([[True]], TypeError, r"block_mask must be a cattn.BlockMask\(blocks, size\) or None, got list"),
        (([[True]], 64), TypeError, "got tuple"),
        (cattn.BlockMask(np.ones((4, 4), bool), 64), ValueError,
         r"block_mask has shape \(4, 4\), which does not broadcast to the blocks of size=64 for T_q=300 and "
         r"T_k=300, \(5, 5\)"),
        (cattn.BlockMask(np.ones((1, 1, 5, 5), bool), 64), ValueError, "does not broadcast"),
    ],
)  # fmt: skip
def test_errors(block_mask: Any, error: type[Exception], message: str) -> None:
    options: Call = {"block_mask": block_mask}
    x = np.zeros((300, 8), np.float32)
    for call in (
        lambda: cattn.scaled_dot_product_attention(x, x, x, **options),
        lambda: cattn.causal_attention(x, x, x, **options),
        lambda: cattn.attention_weights(x, x, **options),
        lambda: cattn.attention_statistics(x, x, **options),
        lambda: cattn.attention_backward(x, x, x, x, x, x[:, 0], **options),
        lambda: cattn.explain(x, x, x, **options),
    ):
        with pytest.raises(error, match=message):
            call()


@pytest.mark.parametrize(
    ("blocks", "size", "error", "message"),
    [
        (np.ones((5, 5)), 64, TypeError, "blocks has dtype float64; True = keep: it must be boolean"),
        (np.ones((5, 5), int), 64, TypeError, r"pass blocks.astype\(bool\)"),
        ([[True]], 0, ValueError, "size must be at least 1, got 0"),
        ([[True]], -3, ValueError, "size must be at least 1, got -3"),
        ([[True]], 2**63, ValueError, "size must be at most 9223372036854775807"),
        ([[True]], True, TypeError, "size must be an int, got bool"),
        ([[True]], 64.0, TypeError, "size must be an int, got float"),
        ([[True]], (64, 64), TypeError, "size must be an int, got tuple"),
        ("x", 64, TypeError, "blocks has dtype <U1"),
    ],
)
def test_what_is_no_block_mask(blocks: Any, size: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        cattn.BlockMask(blocks, size)


def test_packed_sequences_have_no_blocks() -> None:
    x = np.zeros((3, 1, 8), np.float32)
    with pytest.raises(TypeError, match="block_mask"):
        cattn.varlen_attention(x, x, x, [0, 3], [0, 3], block_mask=None)  # type: ignore[call-arg]
