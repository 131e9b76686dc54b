"""Gradients of attention, with full matrices."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from cattn._input.objects import Stored
from cattn._input.types import AttentionGradients, Layout

from ._attention import Problem, _dropout_bits, _weighted_sum, pad, padded_options, reordered, score, unpad
from ._dropout import apply_dropout, dropout
from ._masks import Causal
from ._shared import Floats, boolean, deliver, numbers, probability, quiet


@quiet
def attention_backward(
    grad_out: ArrayLike,
    query: ArrayLike,
    key: Stored,
    value: Stored,
    out: ArrayLike,
    lse: ArrayLike,
    *,
    attn_mask: ArrayLike | None = None,
    dropout_p: float = 0.0,
    is_causal: Causal = False,
    sinks: ArrayLike | None = None,
    rng: int | None = None,
    grad_lse: ArrayLike | None = None,
    merged: bool = False,
    **options: Any,
) -> AttentionGradients:
    """Return the gradients of `scaled_dot_product_attention`'s arguments, given the gradients of its output and LSE.

    With weights P, dropout Z (1/(1-p) where it keeps a weight, else 0), the gradient dO of the output O and the
    gradient dL of the LSE (0 if `grad_lse` is None)::

        dV = (P * Z).T @ dO        dP = Z * (dO @ V.T)        delta = sum(dO * O, axis=-1) - dL
        dS = P * (dP - delta)      d bias = dS                dQ = scale * dS @ K        dK = scale * dS.T @ Q
        d sink = -sum(P_sink * delta), where delta of a query that sees no key is -dL

    where dS of a capped score t = tanh(s / softcap) is multiplied by 1 - t**2 for dQ and dK, and each gradient is
    summed over the axes along which its argument was broadcast. Options are the same as in the forward pass, and `out`
    and `lse` are its results; they are not checked, so `merged` changes nothing. Hidden pairs have no influence, even
    if they are NaN.

    Examples
    --------
    >>> x = np.eye(2)
    >>> attention_backward(x, x, x, x, out=0.5 * np.ones((2, 2)), lse=np.log([2.0, 2.0]), scale=0.0).value
    array([[0.5, 0.5],
           [0.5, 0.5]])
    """
    p, layout = probability(dropout_p, "dropout_p"), options.get("layout", "bhtd")
    inputs = (query, key, value)
    problem = score(inputs, attn_mask, is_causal, **options)
    q, k, v, visible = problem.query, problem.key, problem.value, problem.visible
    grads_out, outs = (reordered(numbers(a, name), layout) for a, name in ((grad_out, "grad_out"), (out, "out")))
    row_lse = numbers(lse, "lse")
    if problem.one_head:
        grads_out, outs, row_lse = grads_out[..., None, :, :], outs[..., None, :, :], row_lse[..., None, :]

    visible_mass = visible & (problem.scores != -np.inf)  # a score of -inf has weight 0 and gradient 0
    weights = np.where(visible_mass, np.exp(problem.scores - row_lse[..., None]), 0.0)
    factor = np.zeros(visible.shape)
    if p < 1:
        factor[_dropout_bits(p, 0 if rng is None else rng, problem) if p > 0 else ...] = 1 / (1 - p)
    grads_lse = np.zeros(row_lse.shape)
    if grad_lse is not None:
        grads_lse = numbers(grad_lse, "grad_lse").reshape(row_lse.shape)
    delta = (grads_out * outs).sum(axis=-1) - grads_lse
    products = problem.of_listed_keys(grads_out @ np.swapaxes(v, -1, -2))
    dP = np.where(factor != 0, factor * products, 0.0)
    dS = np.where(visible_mass, weights * (dP - delta[..., None]), 0.0)
    dS_scaled = dS * problem.scale
    if softcap := options.get("softcap"):
        dS_scaled = np.where(dS != 0, dS_scaled * (1 - (problem.capped / softcap) ** 2), 0.0)

    dropped = np.where(factor != 0, weights * factor, 0.0)
    dS, dS_scaled, dropped, visible = map(problem.of_all_keys, (dS, dS_scaled, dropped, visible))
    grad_q = _weighted_sum(dS_scaled, k, visible)
    transposed = np.swapaxes(visible, -1, -2)
    grad_k = _weighted_sum(np.swapaxes(dS_scaled, -1, -2), q, transposed)
    grad_v = _weighted_sum(np.swapaxes(dropped, -1, -2), grads_out, transposed)
    grad_bias, grad_sinks = None, None
    additive = attn_mask if options.get("bias") is None else options["bias"]
    if additive is not None and np.asarray(additive).dtype.kind == "f":
        grad_bias = _sum_to(dS[..., 0, :, :] if problem.one_head else dS, np.shape(additive))
    if sinks is not None:
        sink = numbers(sinks, "sinks")[..., None]
        sink_delta = np.where(visible.any(axis=-1), delta, -grads_lse)
        sink_mass = (sink != -np.inf) & (visible.any(axis=-1) | (grad_lse is not None))
        mass = np.where(sink_mass, np.exp(sink - row_lse) * sink_delta, 0.0)
        grad_sinks = _sum_to(-mass.sum(axis=-1), np.shape(sinks))
    grads = sum_inputs(problem, (grad_q, grad_k, grad_v), inputs, layout)
    return AttentionGradients(*grads, grad_bias, grad_sinks)


def varlen_attention_backward(
    grad_out: ArrayLike,
    query: ArrayLike,
    key: Stored,
    value: Stored,
    out: ArrayLike,
    lse: ArrayLike,
    cu_seqlens_q: ArrayLike,
    cu_seqlens_k: ArrayLike,
    *,
    alignment: str | None = None,
    grad_lse: ArrayLike | None = None,
    **options: Any,
) -> AttentionGradients:
    """Return the gradients of `varlen_attention`, computed on the sequences padded to a batch with lengths.

    Examples
    --------
    >>> x, lse = np.ones((3, 1, 1)), np.log([[2.0, 2.0, 1.0]])
    >>> varlen_attention_backward(x, x, x, x, x, lse, [0, 2, 3], [0, 2, 3], scale=0.0).value[:, 0, 0]
    array([1., 1., 1.])
    """
    edges_q, edges_k = np.asarray(cu_seqlens_q), np.asarray(cu_seqlens_k)

    def pad_lse(rows: ArrayLike) -> Floats:  # (H, total)
        return pad(np.asarray(rows).T[..., None], edges_q, "lse")[..., 0]

    grads = attention_backward(
        pad(grad_out, edges_q, "grad_out"), pad(query, edges_q, "query"), pad(key, edges_k, "key"),
        pad(value, edges_k, "value"), pad(out, edges_q, "out"),
        pad_lse(lse), grad_lse=None if grad_lse is None else pad_lse(grad_lse),
        **padded_options(edges_q, edges_k, alignment, options),
    )  # fmt: skip
    query_grad, key_grad, value_grad = (
        unpad(g, edges) for g, edges in zip(grads[:3], (edges_q, edges_k, edges_k), strict=True)
    )
    return AttentionGradients(query_grad, key_grad, value_grad, sinks=grads.sinks)


@quiet
def softmax_backward(
    grad_out: ArrayLike, weights: ArrayLike, axis: int = -1, *, scale: float = 1.0, out: Floats | None = None
) -> Floats:
    """Return the gradient of the scores, given the gradient of their softmax: ``scale * P * (dP - sum(P * dP))``.

    The formula holds for `masked_softmax`, too. Elements of weight 0 have no influence.

    Examples
    --------
    >>> softmax_backward([1.0, 3.0, np.nan], [0.5, 0.5, 0.0])
    array([-0.5,  0.5,  0. ])
    """
    P, dP = numbers(weights, "weights"), numbers(grad_out, "grad_out")
    total = np.where(P == 0, 0.0, P * dP).sum(axis=axis, keepdims=True)
    return deliver(np.where(P == 0, 0.0, scale * P * (dP - total)), out)


@quiet
def dropout_backward(
    grad_out: ArrayLike,
    p: float = 0.5,
    *,
    mask: ArrayLike | None = None,
    rng: int | None = None,
    out: Floats | None = None,
) -> Floats:
    """Return the gradient of the input of `dropout`, given the gradient of its output.

    `mask` is True for kept elements, or `rng` is the seed that draws the mask again.

    Examples
    --------
    >>> dropout_backward([1.0, 2.0], 0.5, mask=[True, False])
    array([2., 0.])
    """
    if mask is None:
        result = dropout(grad_out, p, rng=rng)
        assert not isinstance(result, tuple)
    else:
        result = apply_dropout(numbers(grad_out, "grad_out"), boolean(mask, "mask"), probability(p, "p"))
    return deliver(result, out)


def sum_inputs(
    problem: Problem, gradients: tuple[Floats, Floats, Floats], inputs: tuple[Any, Any, Any], layout: Layout
) -> tuple[Any, Any, Any]:
    """Return the gradients of query, key and value in the shapes and the layout of the inputs."""
    shapes = [reordered(np.broadcast_to(0.0, np.shape(x)), layout).shape for x in inputs]
    query, key, value = (
        reordered(_sum_groups(gradient[..., 0, :, :] if problem.one_head else gradient, shape), layout)
        for gradient, shape in zip(gradients, shapes, strict=True)
    )
    return query, key, value


def _sum_groups(grad: Floats, shape: tuple[int, ...]) -> Any:
    """Sum over the query heads that share a key-value head, then over broadcast axes."""
    heads, own = (grad.shape[-3], shape[-3]) if len(shape) > 2 and grad.ndim > 2 else (1, 1)
    if own > 1 and heads != own:
        grad = grad.reshape(*grad.shape[:-3], own, heads // own, *grad.shape[-2:]).sum(axis=-3)
    return _sum_to(grad, shape)


def _sum_to(grad: Floats, shape: tuple[int, ...]) -> Any:
    missing = grad.ndim - len(shape)
    axes = [i for i in range(grad.ndim) if i < missing or shape[i - missing] != grad.shape[i]]
    return grad.sum(axis=tuple(axes)).reshape(shape)
