"""Padding on the left, key_value_seq_starts: what is skipped, decoding, and sums over entries with other starts."""

from typing import Any

import numpy as np
import pytest
from table import BLOCK, CHUNK, Call, before_the_starts, padded

import cattn
from support import NAN, assert_same_bits, every_way, everything


def attend(T_q: int, T_k: int, starts: Any, dtype: Any, **options: Any) -> Call:
    return padded(T_q, T_k, starts, **options)(dtype)


def gradients(call: Call, grad_out: np.ndarray, grad_lse: np.ndarray) -> cattn.AttentionGradients:
    result = cattn.scaled_dot_product_attention(**call, return_lse=np.float64)
    return cattn.attention_backward(grad_out, out=result.out, lse=result.lse, grad_lse=grad_lse, **call)


def test_causal_attention_counts_from_key_0(dtype: Any, path: str) -> None:
    """The default offset is the difference of the lengths, with or without starts."""
    call = attend(2, 30, [0, 29], dtype, heads=2, is_causal="lower_right")
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
    call = attend(130, 420, [201, 77], dtype, bias=bias, is_causal="lower_right", softcap=4.0)
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
    call = attend(100, 300, [201, 77], dtype, is_causal="lower_right", dropout_p=0.4)
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
    call = attend(5, 90, [0, 0], dtype, heads=2, dropout_p=0.3, rng=4, query_offset=80, is_causal=True)
    without = {name: x for name, x in call.items() if name != "key_value_seq_starts"}
    assert_same_bits(everything(**call), everything(**without))
