"""exp, tanh and log as the kernels compute them, through public calls that leave nothing else to round.

Each takes a 1-d array and returns the function of every element, in its dtype and with the kernels' own bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

import cattn

Array = NDArray[Any]


def exp_full(x: Array) -> Array:
    """Return exp of x <= 0 as softmax computes it.

    Beside a 0, a column far below is exp itself, for the sum is 1. Nearer to 0 a third column brings the sum to 2, and
    the result to exactly half of exp: columns 1 and 5 are added first. The weight of column 0 tells that it did.
    """
    rows = np.full((x.size, 6), -np.inf, x.dtype)
    rows[:, 0], rows[:, 1] = 0, x
    near = x > np.log(np.finfo(x.dtype).eps) - 4
    with np.errstate(divide="ignore"):
        rows[near, 5] = np.log(-np.expm1(x[near].astype(np.float64)))
    weights = cattn.softmax(rows)
    assert (weights[:, 0] == np.where(near, 0.5, 1)).all(), "the sum is no power of two"
    result: Array = weights[:, 1] / weights[:, 0]
    return result


def exp_lean(x: Array) -> Array:
    """Return exp of x <= 0 as attention computes it: the weights of the gradients are exp(score - lse), undivided."""
    one, keys = np.ones((1, 1), x.dtype), x[:, None]
    value, lse = np.zeros_like(keys), np.zeros(1, x.dtype)
    return cattn.attention_backward(one, one, keys, value, one, lse, scale=1.0).value[:, 0]


def tanh(x: Array) -> Array:
    """Return tanh of x: scores under a softcap of 1."""
    one = np.ones((1, 1), x.dtype)
    return cattn.attention_weights(x[:, None], one, scale=1.0, softcap=1.0, stage="softcap")[:, 0]


def log(x: Array) -> Array:
    """Return log of whole numbers, each below 100000: the log-sum-exp of as many scores of 0."""
    most = int(x.max())
    query, key = np.zeros((x.size, 1, 1), x.dtype), np.zeros((1, most, 1), x.dtype)
    lengths = x.astype(np.int64)
    result = cattn.scaled_dot_product_attention(
        query, np.broadcast_to(key, (x.size, most, 1)), np.broadcast_to(key, (x.size, most, 1)),
        key_value_seq_lengths=lengths, return_lse=True,
    )  # fmt: skip
    assert result.lse is not None
    return result.lse[:, 0]
