"""The contestants: cattn and its peers, those that are installed.

To add a peer of attention, write a function that prepares its call and put it into PEERS. Tables, pictures and versions
follow.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

import cattn

Array = NDArray[Any]
Calls = dict[str, Callable[[], object]]
TOLERANCE = 2e-5  # of float32 outputs of order 1: they add up thousands of products in different orders


def textbook(query: Array, key: Array, value: Array, causal: bool = True) -> Array:
    """Compute attention as a NumPy user writes it: scores, mask, softmax, product."""
    scores = query @ key.swapaxes(-1, -2)
    scores *= query.dtype.type(1 / np.sqrt(query.shape[-1]))
    if causal:
        scores[..., ~np.tri(*scores.shape[-2:], dtype=bool)] = -np.inf
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return weights @ value


def torch_or_none() -> Any:
    """Return torch with one thread, or None."""
    try:
        import torch
    except ImportError:
        return None
    torch.set_num_threads(1)
    return torch


def jax_or_none() -> Any:
    """Return jax with one thread, or None. Call it before anything else imports jax."""
    flags = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
    os.environ.setdefault("XLA_FLAGS", flags)
    os.environ.setdefault("NPROC", "1")
    try:
        import jax
    except ImportError:
        return None
    jax.config.update("jax_enable_x64", True)
    return jax


def as_tensor(torch: Any, array: Array) -> Any:
    """Return a tensor on the array's memory; NumPy and PyTorch exchange bfloat16 as integers."""
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def as_floats(result: Any) -> Array:
    """Return any contestant's result as an array of float64."""
    if getattr(result, "is_cpu", False):  # a tensor, possibly of bfloat16
        result = result.double().numpy()
    return np.asarray(result).astype(np.float64)


# ---- attention -----------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Peer:
    """One peer of attention."""

    title: str  # in tables and pictures
    package: str  # the distribution whose version is kept with the results
    # From query, key, value and `causal`: the call to time, or None if the peer is not installed or cannot compute it.
    prepare: Callable[[Array, Array, Array, bool], Callable[[], object] | None]
    keeps_scores: bool = False  # holds the whole matrix of scores: left out where sequences are long


def torch_call(query: Array, key: Array, value: Array, causal: bool) -> Callable[[], object] | None:
    """Prepare PyTorch's fused function on tensors that share the arrays' memory."""
    torch = torch_or_none()
    if torch is None:
        return None
    tensors = [as_tensor(torch, array) for array in (query, key, value)]
    fused, grouped = torch.nn.functional.scaled_dot_product_attention, is_grouped(query, key)
    return lambda: fused(*tensors, is_causal=causal, enable_gqa=grouped)


def numpy_call(query: Array, key: Array, value: Array, causal: bool) -> Callable[[], object] | None:
    """Prepare the textbook's formula."""
    return None if is_grouped(query, key) else lambda: textbook(query, key, value, causal)


def jax_call(query: Array, key: Array, value: Array, causal: bool) -> Callable[[], object] | None:
    """Prepare JAX's function, compiled, on JAX arrays in JAX's order of axes."""
    jax = jax_or_none() if query.ndim == 4 else None
    if jax is None or query.dtype.itemsize == 2:  # JAX refuses float16 on a CPU
        return None
    given = [jax.numpy.asarray(array.swapaxes(1, 2)) for array in (query, key, value)]
    compiled = jax.jit(functools.partial(jax.nn.dot_product_attention, is_causal=causal))

    class Result:  # converted to an array only where results are compared
        def __init__(self, out: Any) -> None:
            self.out = out.block_until_ready()

        def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
            return np.asarray(self.out).swapaxes(1, 2)

    return lambda: Result(compiled(*given))


def onnxruntime_call(query: Array, key: Array, value: Array, causal: bool) -> Callable[[], object] | None:
    """Prepare ONNX's operator Attention in onnxruntime, with one thread that does not spin."""
    try:
        import onnx
        import onnxruntime as ort
    except ImportError:
        return None
    if query.ndim != 4 or query.dtype != np.float32:
        return None
    shapes = zip("QKV", (query.shape, key.shape, value.shape), strict=True)
    kinds = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape) for name, shape in shapes]
    node = onnx.helper.make_node("Attention", ["Q", "K", "V"], ["Y"], is_causal=int(causal))
    result = onnx.helper.make_tensor_value_info("Y", onnx.TensorProto.FLOAT, None)
    graph = onnx.helper.make_graph([node], "attention", kinds, [result])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 23)], ir_version=10)
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.log_severity_level = 3
    try:
        session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    except Exception:  # an older onnxruntime does not have the operator
        return None
    feed = {"Q": query, "K": key, "V": value}
    return lambda: session.run(None, feed)[0]


PEERS = {
    "torch": Peer("PyTorch SDPA", "torch", torch_call),
    "numpy": Peer("NumPy textbook", "numpy", numpy_call, keeps_scores=True),
    "onnxruntime": Peer("onnxruntime", "onnxruntime", onnxruntime_call),
    "jax": Peer("JAX", "jax", jax_call, keeps_scores=True),
}


def is_grouped(query: Array, key: Array) -> bool:
    """Return whether several query heads share a key head."""
    return query.ndim > 2 and query.shape[-3] != key.shape[-3]


def attention_calls(query: Array, key: Array, value: Array, *, matrix: bool = True, causal: bool = True) -> Calls:
    """Return attention, causal or over all keys, by cattn and by every peer that can compute it.

    Without `matrix`, peers that keep the whole matrix of scores are left out.
    """
    out = np.empty((*query.shape[:-1], value.shape[-1]), query.dtype)
    attend, alignment = cattn.scaled_dot_product_attention, "upper_left" if causal else False
    calls: Calls = {"cattn": lambda: attend(query, key, value, is_causal=alignment, out=out)}
    for name, peer in PEERS.items():
        if matrix or not peer.keeps_scores:
            call = peer.prepare(query, key, value, causal)
            if call is not None:
                calls[name] = call
    return agreeing(calls)


def agreeing(calls: Calls) -> Calls:
    """Return the calls, after comparing their results with cattn's."""
    ours = calls["cattn"]()
    right = as_floats(ours)
    half = 2.0 ** (-10 if np.asarray(ours).dtype == np.float16 else -7)  # the dtype's spacing at 1
    tolerance = (TOLERANCE if np.asarray(ours).itemsize > 2 else 2 * half) * max(1.0, np.abs(right).max())
    for name, call in calls.items():
        np.testing.assert_allclose(as_floats(call()), right, rtol=0, atol=tolerance, err_msg=name)
    return calls


# ---- others --------------------------------------------------------------------------------------------------------
def numpy_dropout(x: Array, p: float) -> Callable[[], Array]:
    """Prepare the fastest dropout in NumPy: every step writes into an existing array."""
    rng = np.random.default_rng(0)
    noise, out = np.empty_like(x), np.empty_like(x)
    keep = x.dtype.type(1 - p)

    def call() -> Array:
        rng.random(out=noise, dtype=x.dtype)
        np.multiply(x, 1 / keep, out=out)
        np.multiply(out, noise < keep, out=out)
        return out

    return call


def book_module(torch: Any, d: int, context_length: int, num_heads: int, fused: bool) -> Any:
    """Return multi-head attention as textbooks write it in PyTorch, or with PyTorch's fused function inside."""
    nn = torch.nn

    class MultiHeadAttention(nn.Module):  # type: ignore[misc, name-defined, unused-ignore]
        def __init__(self) -> None:
            super().__init__()
            self.W_query, self.W_key, self.W_value = (nn.Linear(d, d, bias=False) for _ in range(3))
            self.out_proj, self.dropout = nn.Linear(d, d), nn.Dropout(0.1)
            self.register_buffer("mask", torch.triu(torch.ones(context_length, context_length), diagonal=1))

        def forward(self, x: Any) -> Any:
            batch, tokens, _ = x.shape
            q, k, v = (
                layer(x).view(batch, tokens, num_heads, d // num_heads).transpose(1, 2)
                for layer in (self.W_query, self.W_key, self.W_value)
            )
            if fused:
                context = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            else:
                scores = q @ k.transpose(2, 3)
                scores.masked_fill_(self.mask.bool()[:tokens, :tokens], -torch.inf)
                context = self.dropout(torch.softmax(scores / k.shape[-1] ** 0.5, dim=-1)) @ v
            return self.out_proj(context.transpose(1, 2).reshape(batch, tokens, d))

    return MultiHeadAttention().eval()
