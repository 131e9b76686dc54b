"""The contestants of accuracy: the kernels' exp, tanh and log, and attention with its gradients by cattn and the peers.

exp, tanh and log are reached through public calls that round nothing else. Each takes a 1-d array and returns the
function of every element, in the array's dtype and with the kernels' bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import cattn

from .. import contestants as peers
from ..contestants import as_tensor
from . import oracle
from .oracle import Array

Results = dict[str, Any]  # quantity: array
Call = Callable[..., Results]


# ---- functions of one number ---------------------------------------------------------------------------------------
def exp(x: Array) -> Array:
    """Return exp of x <= 0. The gradients' weights are exp(score - lse), without a division."""
    one, keys = np.ones((1, 1), x.dtype), x[:, None]
    value, lse = np.zeros_like(keys), np.zeros(1, x.dtype)
    return cattn.attention_backward(one, one, keys, value, one, lse, scale=1.0, merged=True).value[:, 0]


def tanh(x: Array) -> Array:
    """Return tanh of x: scores with a softcap of 1."""
    one = np.ones((1, 1), x.dtype)
    return cattn.attention_weights(x[:, None], one, scale=1.0, softcap=1.0, stage="softcap")[:, 0]


def log(x: Array) -> Array:
    """Return log of whole numbers below 100000: the log-sum-exp of that many scores of 0."""
    most = int(x.max())
    query, key = np.zeros((x.size, 1, 1), x.dtype), np.zeros((1, most, 1), x.dtype)
    lengths = x.astype(np.int64)
    result = cattn.scaled_dot_product_attention(
        query, np.broadcast_to(key, (x.size, most, 1)), np.broadcast_to(key, (x.size, most, 1)),
        key_value_seq_lengths=lengths, return_lse=True,
    )  # fmt: skip
    assert result.lse is not None
    return result.lse[:, 0]


# ---- attention -----------------------------------------------------------------------------------------------------
def by_cattn(
    query: Array, key: Array, value: Array, grad_out: Array, bias: Array | None = None, *,
    causal: bool = False, softcap: float | None = None, double_lse: bool = True,
) -> Results:  # fmt: skip
    """Compute attention by cattn, and its gradients, by default from a float64 log-sum-exp."""
    options: dict[str, Any] = {"is_causal": "upper_left" if causal else False, "softcap": softcap, "bias": bias}
    result = cattn.scaled_dot_product_attention(query, key, value, return_weights=True, return_lse=True, **options)
    exact = cattn.AttentionOutput(lse=np.empty(query.shape[:-1]))
    cattn.scaled_dot_product_attention(query, key, value, return_lse=True, out=exact, **options)
    lse = exact.lse if double_lse else result.lse
    grads = cattn.attention_backward(grad_out, query, key, value, result.out, lse, **options)
    found = {"out": result.out, "weights": result.weights, "lse": result.lse}
    found |= {"dQ": grads.query, "dK": grads.key, "dV": grads.value}
    return found if bias is None else found | {"dbias": grads.bias}


def by_torch(
    query: Array, key: Array, value: Array, grad_out: Array, bias: Array | None = None, *,
    causal: bool = False, softcap: float | None = None,
) -> Results:  # fmt: skip
    """Compute attention by PyTorch's fused function; softcap, weights and log-sum-exp by tensor operations."""
    torch = peers.torch_or_none()
    arrays = {"dQ": query, "dK": key, "dV": value} | ({} if bias is None else {"dbias": bias})
    leaves = {name: as_tensor(torch, a.copy()).requires_grad_() for name, a in arrays.items()}
    q, k, v = (leaves[name] for name in ("dQ", "dK", "dV"))
    scores = (q @ k.mT) * q.shape[-1] ** -0.5
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + leaves["dbias"]
    if causal:
        scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), -torch.inf)
    weights = torch.softmax(scores, -1)
    found = {"weights": weights.detach(), "lse": torch.logsumexp(scores, -1).detach()}
    if softcap:
        out = weights @ v
    else:
        fused = torch.nn.functional.scaled_dot_product_attention
        out = fused(q, k, v, leaves.get("dbias"), is_causal=causal)
    out.backward(as_tensor(torch, grad_out))
    return {"out": out.detach()} | found | {name: leaf.grad for name, leaf in leaves.items()}


def by_jax(
    query: Array, key: Array, value: Array, grad_out: Array, bias: Array | None = None, *,
    causal: bool = False, softcap: float | None = None,
) -> Results:  # fmt: skip
    """Compute attention by jax.nn.dot_product_attention, which returns no weights and no log-sum-exp."""
    jax = peers.jax_or_none()
    np_ = jax.numpy

    def capped(q: Any, k: Any, v: Any, *_: Any) -> Any:
        scores = softcap * np_.tanh((q @ k.swapaxes(-1, -2)) * q.shape[-1] ** -0.5 / softcap)
        visible = np_.tri(*scores.shape[-2:], dtype=bool) if causal else True
        return jax.nn.softmax(np_.where(visible, scores, -np_.inf), axis=-1) @ v

    def fused(q: Any, k: Any, v: Any, *bias: Any) -> Any:
        heads_inside = (np_.moveaxis(a, -2, -3) for a in (q, k, v))
        out = jax.nn.dot_product_attention(*heads_inside, bias=bias[0] if bias else None, is_causal=causal)
        return np_.moveaxis(out, -3, -2)

    arrays = [query, key, value] + ([] if bias is None else [bias])
    out, backward = jax.vjp(capped if softcap else fused, *map(np_.asarray, arrays))
    grads = backward(np_.asarray(grad_out))
    return {"out": out} | dict(zip(("dQ", "dK", "dV", "dbias"), grads, strict=False))


def attention_calls() -> dict[str, Call]:
    """Return attention by cattn and the peers that are installed."""
    calls: dict[str, Call] = {"cattn": by_cattn, "numpy": oracle.attention}
    if peers.torch_or_none():
        calls["torch"] = by_torch
    if peers.jax_or_none():
        calls["jax"] = by_jax
    return calls
