"""Attention of three kinds of NumPy models, before and after the change of a few lines that calls cattn.

A GPT that loops over its heads, a decoder with grouped heads and a cache, and a block that trains. Each pair of
functions gives the same numbers. The ratios of their CPU times, which other programs hardly disturb, are printed by

    OPENBLAS_NUM_THREADS=1 CATTN_NUM_THREADS=1 python examples/numpy_models.py
"""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import cattn

Array = np.ndarray[Any, np.dtype[Any]]


def softmax(x: Array) -> Array:
    """Return the softmax of the last axis."""
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


# ---- a GPT of plain functions: one sequence, a loop over the heads ----
def attend(q: Array, k: Array, v: Array, mask: Array) -> Array:
    """Attend with one head, (T, head_dim)."""
    return softmax(q @ k.T / q.shape[-1] ** 0.5 + mask) @ v


def attend_by_cattn(q: Array, k: Array, v: Array, mask: Array) -> Array:
    """Attend with one head, without the T x T matrix of scores."""
    return cattn.scaled_dot_product_attention(q, k, v, mask)


def gpt_heads(qkv: Array, n_head: int, attention: Callable[..., Array]) -> Array:
    """Return the output of all heads side by side, (T, C), from the projections (T, 3 C)."""
    mask = (1 - np.tri(len(qkv), dtype=qkv.dtype)) * -1e10
    q, k, v = (np.split(x, n_head, axis=-1) for x in np.split(qkv, 3, axis=-1))
    return np.hstack([attention(*head, mask) for head in zip(q, k, v, strict=True)])


def gpt_heads_by_cattn(qkv: Array, n_head: int) -> Array:
    """Do the same in one call: heads are an axis, and causality is not a mask."""
    q, k, v = qkv.reshape(len(qkv), 3, n_head, -1).transpose(1, 2, 0, 3)[:, None]
    out: Array = cattn.causal_attention(q, k, v)
    return out[0].swapaxes(0, 1).reshape(len(qkv), -1)


# ---- a decoder with grouped heads and a cache, (B, T, heads, head_dim) ----
def decode(q: Array, keys: Array, values: Array) -> Array:
    """Attend from new tokens to all tokens so far: repeat key-value heads, and mask if there are several queries."""
    group, (T, S) = q.shape[2] // keys.shape[2], (q.shape[1], keys.shape[1])
    keys, values = np.repeat(keys, group, axis=2), np.repeat(values, group, axis=2)
    q, keys, values = q.swapaxes(1, 2), keys.swapaxes(1, 2), values.swapaxes(1, 2)
    scores = q @ keys.swapaxes(2, 3) / q.shape[-1] ** 0.5
    if T > 1:
        scores += np.triu(np.full((T, S), -np.inf, q.dtype), S - T + 1)
    return (softmax(scores) @ values).swapaxes(1, 2)


def decode_by_cattn(q: Array, keys: Array, values: Array) -> Array:
    """Do the same: a group reads its key-value head in place, and the last query sees every key."""
    out: Array = cattn.causal_attention(q, keys, values, layout="bthd")
    return out


# ---- a block that trains: forward and backward pass, (B, H, T, head_dim) ----
def train(q: Array, k: Array, v: Array, grad_out: Array) -> tuple[Array, ...]:
    """Return the output and the gradients of q, k and v, with the weights kept in between."""
    T, scale = q.shape[-2], q.dtype.type(1 / np.sqrt(q.shape[-1]))
    scores = np.where(np.tri(T, dtype=bool), q @ k.swapaxes(-1, -2) * scale, q.dtype.type(-np.inf))
    weights = softmax(scores)
    grad_weights = grad_out @ v.swapaxes(-1, -2)
    grad_scores = weights * (grad_weights - (weights * grad_weights).sum(axis=-1, keepdims=True)) * scale
    return weights @ v, grad_scores @ k, grad_scores.swapaxes(-1, -2) @ q, weights.swapaxes(-1, -2) @ grad_out


def train_by_cattn(q: Array, k: Array, v: Array, grad_out: Array) -> tuple[Array, ...]:
    """Do the same, and keep one number for each query instead of the weights."""
    result = cattn.causal_attention(q, k, v, return_lse=True)
    grads = cattn.attention_backward(grad_out, q, k, v, result.out, result.lse, is_causal=True)
    return result.out, grads.query, grads.key, grads.value


# ---- measurement ----
class Case(NamedTuple):
    """Two functions of no arguments that give the same numbers."""

    name: str
    plain: Callable[[], Any]
    by_cattn: Callable[[], Any]


def cases(tokens: int, seed: int = 0) -> list[Case]:
    """Return the pairs at the sizes of GPT-2 (12 heads of 64) and of a small Llama (32 heads, 8 of them for keys)."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> Array:
        return rng.standard_normal(shape, dtype=np.float32)

    qkv = normal(tokens, 3 * 768)
    prompt, keys, values = normal(1, tokens, 32, 64), *normal(2, 1, tokens, 8, 64)
    inputs = normal(4, 1, 12, tokens, 64)
    return [
        Case("GPT, one line", lambda: gpt_heads(qkv, 12, attend), lambda: gpt_heads(qkv, 12, attend_by_cattn)),
        Case("GPT, one call", lambda: gpt_heads(qkv, 12, attend), lambda: gpt_heads_by_cattn(qkv, 12)),
        Case(
            "grouped heads, prompt", lambda: decode(prompt, keys, values), lambda: decode_by_cattn(prompt, keys, values)
        ),
        Case(
            "grouped heads, next token",
            lambda: decode(prompt[:, -1:], keys, values),
            lambda: decode_by_cattn(prompt[:, -1:], keys, values),
        ),
        Case("forward and backward", lambda: train(*inputs), lambda: train_by_cattn(*inputs)),
    ]


def seconds(function: Callable[[], Any]) -> float:
    """Return the CPU time of one call, of all threads."""
    start = time.process_time()
    function()
    return time.process_time() - start


def cpu_name() -> str:
    """Return the name of the CPU, from Linux if it knows one."""
    info = Path("/proc/cpuinfo")
    names = [line for line in info.read_text().splitlines() if line.startswith("model name")] if info.exists() else []
    return names[0].partition(": ")[2] if names else platform.processor() or platform.machine()


if __name__ == "__main__":
    print(
        f"{cpu_name()}, threads of cattn: {cattn.get_num_threads()}, float32, CPU time, medians of 9 alternating calls"
    )
    for tokens in (256, 1024, 2048):
        for case in cases(tokens):
            laps = [(seconds(case.plain), seconds(case.by_cattn)) for _ in range(10)][1:]  # the first warms up
            plain, ours = (statistics.median(times) for times in zip(*laps, strict=True))
            ratio = statistics.median(a / b for a, b in laps)
            print(f"{tokens:5} tokens  {case.name:26} {1e3 * plain:9.2f} ms {1e3 * ours:9.2f} ms  {ratio:5.1f} x")
