"""Calls that take many seconds, for tests of Ctrl-C and of the end of the process."""

from collections.abc import Callable

import numpy as np

import cattn


def long_calls() -> dict[str, Callable[[], object]]:
    """Return calls that take many seconds. Zero strides make their arrays long without memory."""
    one = np.ones((1, 16), np.float32)
    long = np.broadcast_to(one, (1 << 19, 16))
    few = np.broadcast_to(one, (1 << 31, 16))
    scores = np.broadcast_to(np.float32(1), (1 << 10, 1 << 22))
    out = np.empty((1 << 18, 16), np.float32)
    sums = np.broadcast_to(np.float32(1), (2, 1 << 34))
    stored = cattn.Quantized(np.broadcast_to(np.int8(1), (1 << 21, 64)), np.float32(1))
    return {
        "linear": lambda: cattn.functional.linear(sums, sums),
        "dequantize": lambda: cattn.dequantize(stored),
        "tile": lambda: cattn.scaled_dot_product_attention(long[: 1 << 18], long, long, out=out),
        "rows": lambda: cattn.scaled_dot_product_attention(one, few, few),
        "dropout": lambda: cattn.scaled_dot_product_attention(
            long[: 1 << 18], long, long, dropout_p=0.5, rng=cattn.TorchGenerator(1), out=out
        ),
        "softmax": lambda: cattn.softmax(scores[:, : 1 << 20], axis=-1),
        "gradients": lambda: cattn.attention_backward(
            long[: 1 << 18], long[: 1 << 18], long, long, out, np.zeros(1 << 18, np.float32)
        ),
        "gradients, drawn": lambda: cattn.attention_backward(
            long[: 1 << 18], long[: 1 << 18], long, long, out, np.zeros(1 << 18, np.float32), dropout_p=0.5,
            rng=cattn.TorchGenerator(1),
        ),
    }  # fmt: skip
