"""What is no equivalence of block_mask, layout and key_value_seq_starts: what is skipped, memory, sums, errors."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from table import (
    BLOCK,
    BLOCK_MASK,
    CHUNK,
    ORDERED,
    Call,
    assert_same_fields,
    before_the_starts,
    of_pairs,
    padded,
    swapped,
)

import cattn
from cattn import reference
from support import NAN, assert_same_bits, every_way, everything
from support.calls import tokens_first


def test_the_reference_agrees() -> None:
    for name in ("blocks of 50", "documents, causal", "masks and dropout", "one row of blocks for all"):
        call = BLOCK_MASK.cases[name](np.float64)
        found = cattn.scaled_dot_product_attention(**call)
        np.testing.assert_allclose(found, cattn.reference.scaled_dot_product_attention(**call), atol=1e-12)


def test_causal_attention_takes_it() -> None:
    call = BLOCK_MASK.cases["blocks of 64"](np.float32)
    assert_same_bits(cattn.causal_attention(**call), cattn.causal_attention(**of_pairs(call)), "causal_attention")


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


# ---- layout ----------------------------------------------------------------------------------------------------------
def assert_same_results(found: Any, right: Any, what: str) -> None:
    """Compare all fields; found has tokens before heads."""
    fields = {name: swapped(x) if name in ORDERED and x is not None else x for name, x in found._asdict().items()}
    assert_same_fields(type(found)(**fields), right, what)


def some_call(rank: int = 4) -> Call:
    rng = np.random.default_rng(1)
    batch = (2, 3)[: rank - 3]
    query, key, value = (rng.standard_normal((*batch, h, t, d)) for h, t, d in ((4, 5, 8), (2, 7, 8), (2, 7, 3)))
    bias = rng.standard_normal((4, 5, 7))
    return {"query": query, "key": key, "value": value, "bias": bias, "sinks": rng.standard_normal(4)}


def attention_of(call: Call) -> Any:
    return reference.scaled_dot_product_attention(**call, return_lse=True, return_weights=True)


def gradients_of(call: Call) -> Any:
    result = attention_of(call)
    return reference.attention_backward(result.out, **call, out=result.out, lse=result.lse)


def derivative_of(call: Call) -> Any:
    return reference.attention_jvp(**call, **tangents_of(call), return_lse=True)


def second_derivative_of(call: Call) -> Any:
    result = derivative_of(call)
    return reference.attention_jvp_backward(result.out, **call, **tangents_of(call), **result._asdict())


def tangents_of(call: Call) -> Call:
    """Return tangents that do not depend on the layout."""
    return {f"{name}_tangent": np.cos(3 * call[name]) for name in ("query", "key", "value")}


@pytest.mark.parametrize("rank", [3, 4, 5])
@pytest.mark.parametrize("function", [attention_of, gradients_of, derivative_of, second_derivative_of])
def test_the_reference_has_the_layout(function: Callable[[Call], Any], rank: int) -> None:
    """Three dimensions are (T, H, head_dim), whose heads need no other word."""
    call = some_call(rank)
    right = function(call | ({"enable_gqa": True} if rank == 3 else {}))
    assert_same_results(function(tokens_first(call)), right, function.__name__)


def test_three_dimensions_are_tokens_heads_and_columns() -> None:
    call = some_call(3)
    right = cattn.scaled_dot_product_attention(**call, enable_gqa=True)
    found = cattn.scaled_dot_product_attention(**tokens_first(call))
    assert found.shape == (5, 4, 3)
    assert_same_bits(swapped(found), right, "output")
    assert cattn.explain(**{n: x for n, x in tokens_first(call).items() if n != "sinks"}).visible_pairs == 4 * 5 * 7
    with pytest.raises(ValueError, match="query has 4 heads \\(axis -2\\), key and value have 2, and enable_gqa=False"):
        cattn.scaled_dot_product_attention(**tokens_first(call), enable_gqa=False)


def test_the_output_has_the_order_of_the_query_in_memory() -> None:
    call = {name: np.ascontiguousarray(x) for name, x in tokens_first(some_call()).items() if name != "layout"}
    out = cattn.scaled_dot_product_attention(**call, layout="bthd")
    assert out.shape == (2, 5, 4, 3)
    assert out.flags.c_contiguous


def test_cached_keys_have_an_order_of_their_own() -> None:
    cache = cattn.KVCache(2, num_kv_heads=2, max_len=4, head_dim=8, dtype=np.float64)
    cache.append(np.ones((2, 2, 3, 8)), np.ones((2, 2, 3, 8)))
    with pytest.raises(ValueError, match=r"layout='bthd' and a cattn\.KVCache do not go together.*swapaxes"):
        cattn.causal_attention(np.ones((2, 1, 2, 8)), cache, layout="bthd")


# ---- key_value_seq_starts --------------------------------------------------------------------------------------------
def attend_padded(T_q: int, T_k: int, starts: Any, dtype: Any, **options: Any) -> Call:
    return padded(T_q, T_k, starts, **options)(dtype)


def gradients(call: Call, grad_out: np.ndarray, grad_lse: np.ndarray) -> cattn.AttentionGradients:
    result = cattn.scaled_dot_product_attention(**call, return_lse=np.float64)
    return cattn.attention_backward(grad_out, out=result.out, lse=result.lse, grad_lse=grad_lse, **call)


def test_causal_attention_counts_from_key_0(dtype: Any, path: str) -> None:
    """The default offset is the difference of the lengths, with or without starts."""
    call = attend_padded(2, 30, [0, 29], dtype, heads=2, is_causal="lower_right")
    right = cattn.scaled_dot_product_attention(**call)
    del call["is_causal"]
    assert_same_bits(cattn.causal_attention(**call), right)


@pytest.mark.promise("padding on the left")
@pytest.mark.parametrize("n_padding", [0, 1, 15, 17, 100, BLOCK - 1, BLOCK + 1, CHUNK - 1, CHUNK, CHUNK + 3])
def test_padding_is_skipped_and_changes_nothing(n_padding: int, isa: str, dtype: Any, normal: Any) -> None:
    T = 220
    x = [normal(1, 2, T, 8, dtype=dtype) for _ in range(3)]
    padded = [np.concatenate([np.full((1, 2, n_padding, 8), NAN, dtype), a], axis=2) for a in x]
    out = cattn.causal_attention(*padded, key_value_seq_starts=n_padding)
    assert not out[:, :, :n_padding].any()
    assert_same_bits(out[:, :, n_padding:].copy(), cattn.causal_attention(*x))
    plan = cattn.explain(*padded, is_causal="lower_right", key_value_seq_starts=n_padding)
    assert plan.visible_pairs == 2 * T * (T + 1) // 2
    step = cattn.explain(padded[0][:, :, -1:], *padded[1:], key_value_seq_starts=n_padding)
    assert step.key_blocks_visited == 2 * -(-T // BLOCK)
    blocks_of_all = -(-(T + n_padding) // BLOCK)
    assert step.key_blocks_visited + step.key_blocks_skipped == 2 * blocks_of_all


def test_steps_with_a_cache_have_the_bits_of_the_whole_sequence(dtype: Any, normal: Any) -> None:
    """The prompt stands at the end of a batch; each step of decoding sees one more key."""
    q, k, v = (normal(2, 4, 230, 16, dtype=dtype) for _ in range(3))
    starts, prompt, cache = np.array([33, 7]), 210, cattn.KVCache(2, 4, 230, 16, dtype=dtype)
    poisoned = before_the_starts({"query": q, "key": k, "value": v, "key_value_seq_starts": starts}, NAN)
    cache.append(poisoned["key"][:, :, :prompt], v[:, :, :prompt])
    for t in range(prompt, 230):
        cache.append(k[:, :, t : t + 1], v[:, :, t : t + 1])
        step = cattn.causal_attention(q[:, :, t : t + 1], cache.k, cache.v, key_value_seq_starts=starts)
        for b, start in enumerate(starts):
            part = np.s_[b : b + 1, :, start : t + 1]
            right = cattn.causal_attention(q[part], k[part], v[part])[:, :, -1:]
            assert_same_bits(step[b : b + 1], right.copy(), f"token {t}")


@pytest.mark.promise("gradients' bits")
@pytest.mark.parametrize("shape", [(1, 4, 130, 420), (1, 1, 130, 420), (2, 1, 130, 420)], ids=str)
def test_the_gradient_of_a_shared_bias_is_added_in_order(shape: tuple[int, ...], isa: str, dtype: Any) -> None:
    """Key blocks of the batch entries start in different columns of the bias: its parts must not mix."""
    rng = np.random.default_rng(3)
    bias = rng.standard_normal(shape)
    call = attend_padded(130, 420, [201, 77], dtype, bias=bias, is_causal="lower_right", softcap=4.0)
    grad_out, grad_lse = rng.standard_normal((2, 4, 130, 19)).astype(dtype), np.zeros((2, 4, 130))
    each = gradients(call | {"bias": np.broadcast_to(bias, (2, 4, 130, 420)).copy()}, grad_out, grad_lse).bias
    right = np.zeros(shape, dtype)
    for b, h in np.ndindex(2, 4):
        right[b % shape[0], h % shape[1]] += each[b, h]
    for threads in (1, 2, 3):
        with cattn.num_threads(threads):
            for _ in range(3):
                assert_same_bits(gradients(call, grad_out, grad_lse).bias, right, f"{threads} threads")


def test_the_bits_of_a_torch_generator_belong_to_the_whole_array(dtype: Any, normal: Any) -> None:
    """It draws in sequence, also for padding, so that starts change no decision."""
    call = attend_padded(100, 300, [201, 77], dtype, is_causal="lower_right", dropout_p=0.4)
    finite = {name: np.nan_to_num(call[name]) for name in ("key", "value")}
    without = {name: x for name, x in (call | finite).items() if name != "key_value_seq_starts"}

    def attention(call: Call) -> cattn.AttentionOutput:
        extras = {"return_weights": True, "return_lse": True, "return_dropout_mask": True}
        return cattn.scaled_dot_product_attention(**call, **extras, rng=cattn.TorchGenerator(3))

    mask = attention(without).dropout_mask
    for way, result in every_way(lambda: attention(call), tiny=False):
        assert (result.dropout_mask == mask).all(), way
        values = np.repeat(finite["value"], 2, axis=1)
        np.testing.assert_allclose(result.out, (result.weights * mask / 0.6) @ values, rtol=0, atol=1e-5)
    grad_out = normal(2, 4, 100, 19, dtype=dtype)
    lse = result.lse.astype(np.float64)
    found = cattn.attention_backward(grad_out, out=result.out, lse=lse, **call, rng=cattn.TorchGenerator(3))
    right = np.swapaxes(result.weights * mask / 0.6, -1, -2) @ grad_out
    np.testing.assert_allclose(found.value, right[:, ::2] + right[:, 1::2], rtol=0, atol=1e-4)


def test_a_start_of_0_changes_nothing(dtype: Any, path: str) -> None:
    call = attend_padded(5, 90, [0, 0], dtype, heads=2, dropout_p=0.3, rng=4, query_offset=80, is_causal=True)
    without = {name: x for name, x in call.items() if name != "key_value_seq_starts"}
    assert_same_bits(everything(**call), everything(**without))
