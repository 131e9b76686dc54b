"""cattn.BlockMask: the reference, what is skipped, blocks larger than the call, errors."""

from typing import Any

import numpy as np
import pytest
from table import BLOCK_MASK, Call, of_pairs

import cattn
from support import assert_same_bits


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
