"""Try other libraries where cattn makes a promise: the first rows of the README's table.

Each library computes attention of (2, 4, 300, 64) float32 numbers on the CPU: causal, of a part of the tokens, and with
NaN in a key or value that a mask hides. Libraries that are not installed are left out. Run it by

    python examples/others.py
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

import cattn

Array = np.ndarray[Any, np.dtype[Any]]
Attention = Callable[[Array, Array, Array, Array | None], Array]  # a mask of None: causal


def with_cattn(q: Array, k: Array, v: Array, mask: Array | None) -> Array:
    """Compute attention with cattn."""
    return cattn.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)


def with_torch(q: Array, k: Array, v: Array, mask: Array | None) -> Array:
    """Compute attention with PyTorch."""
    import torch

    tensors = [torch.from_numpy(array) for array in (q, k, v)]
    given = None if mask is None else torch.from_numpy(mask)
    out = torch.nn.functional.scaled_dot_product_attention(*tensors, attn_mask=given, is_causal=mask is None)
    return np.asarray(out)


def with_jax(q: Array, k: Array, v: Array, mask: Array | None) -> Array:
    """Compute attention with JAX, whose heads are the third axis."""
    import jax

    arrays = [jax.numpy.asarray(array.swapaxes(1, 2)) for array in (q, k, v)]
    given = None if mask is None else jax.numpy.asarray(mask[None, None])
    return np.asarray(jax.nn.dot_product_attention(*arrays, mask=given, is_causal=mask is None)).swapaxes(1, 2)


def with_onnxruntime(q: Array, k: Array, v: Array, mask: Array | None) -> Array:
    """Compute attention with onnxruntime: a model of one node."""
    import onnxruntime as ort
    from onnx import helper

    given = {"Q": q, "K": k, "V": v} | ({} if mask is None else {"mask": mask})
    kind = helper.np_dtype_to_tensor_dtype
    values = [helper.make_tensor_value_info(name, kind(array.dtype), array.shape) for name, array in given.items()]
    node = helper.make_node("Attention", list(given), ["Y"], is_causal=int(mask is None))
    graph = helper.make_graph([node], "attention", values, [helper.make_tensor_value_info("Y", kind(q.dtype), None)])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, given)[0])


def with_numpy(q: Array, k: Array, v: Array, mask: Array | None) -> Array:
    """Compute attention as textbooks write it."""
    scores = q @ k.swapaxes(-1, -2) / np.float32(np.sqrt(q.shape[-1]))
    mask = np.tri(*scores.shape[-2:], dtype=bool) if mask is None else mask
    scores = np.where(mask, scores, -np.inf)
    with np.errstate(invalid="ignore"):
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        return weights / weights.sum(-1, keepdims=True) @ v


LIBRARIES: dict[str, Attention] = {
    "cattn": with_cattn,
    "PyTorch": with_torch,
    "JAX": with_jax,
    "onnxruntime": with_onnxruntime,
    "NumPy": with_numpy,
}


def answers(attend: Attention) -> dict[str, bool]:
    """Say for each row of the table whether it holds."""
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 2, 4, 300, 64), dtype=np.float32)
    full = attend(q, k, v, None)
    prefix = attend(*(array[:, :, :100].copy() for array in (q, k, v)), None)
    last = attend(q[:, :, -1:].copy(), k, v, np.ones((1, 300), dtype=bool))
    mask = np.ones((300, 300), dtype=bool)
    mask[:, 7] = mask[3] = False
    hidden_key, hidden_value = k.copy(), v.copy()
    hidden_key[:, :, 7] = hidden_value[:, :, 7] = np.nan
    masked = attend(q, k, v, mask)
    return {
        "a prefix of the tokens has the same bits": np.array_equal(full[:, :, :100], prefix),
        "the last token alone has the same bits": np.array_equal(full[:, :, -1:], last),
        "a hidden key may be NaN": np.array_equal(masked, attend(q, hidden_key, v, mask), equal_nan=True),
        "a hidden value may be NaN": np.array_equal(masked, attend(q, k, hidden_value, mask), equal_nan=True),
        "a query that sees no key gives 0": bool((masked[:, :, 3] == 0).all()),
    }


def main() -> None:
    """Print the table."""
    found = {}
    for name, attend in LIBRARIES.items():
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found[name] = answers(attend)
        except ImportError as error:
            print(f"{name} is left out: {error}")
    print(" " * 44 + "".join(f"{name:>13}" for name in found))
    for question in found["cattn"]:
        print(f"{question:44}" + "".join(f"{'yes' if rows[question] else 'no':>13}" for rows in found.values()))


if __name__ == "__main__":
    main()
