"""Gradients and directional derivatives of attention, softmax and dropout."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from cattn._input.objects import Quantized, Stored
from cattn._input.types import AttentionGradients, AttentionTangents, Layout

from ._attention import (
    Problem,
    _dropout_bits,
    _weighted_sum,
    normalize,
    of_output,
    pad,
    pad_gate,
    padded_options,
    reordered,
    score,
    unpad,
)
from ._dropout import apply_dropout, dropout
from ._masks import Causal
from ._shared import Bools, Floats, boolean, deliver, logistic, numbers, probability, quiet


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
    summed over the axes along which its argument was broadcast. With the logistic function G of a gate, d gate =
    dO * O * (1 - G), and dO * G takes the place of dO everywhere but in delta. Options are the same as in the forward
    pass, and `out` and `lse` are its results; they are not checked, so `merged` changes nothing. Hidden pairs have no
    influence, even if they are NaN.
    """
    p, layout = probability(dropout_p, "dropout_p"), options.get("layout", "bhtd")
    inputs, gate = (query, key, value), options.pop("gate", None)
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
    grad_gate = None
    if gate is not None:
        gates = of_output(gate, "gate", problem, layout)
        per_element = np.where(visible.any(axis=-1, keepdims=True), grads_out * outs * logistic(-gates), 0.0) + 0.0
        of_gate = reordered(per_element[..., 0, :, :] if problem.one_head else per_element, layout)
        grad_gate = _sum_to(of_gate, np.shape(gate))
        grads_out = grads_out * logistic(gates)
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
    return AttentionGradients(*grads, grad_bias, grad_sinks, grad_gate)


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
    gate: ArrayLike | None = None,
    grad_lse: ArrayLike | None = None,
    **options: Any,
) -> AttentionGradients:
    """Return the gradients of `varlen_attention`, computed on the sequences padded to a batch with lengths."""
    edges_q, edges_k = np.asarray(cu_seqlens_q), np.asarray(cu_seqlens_k)

    def pad_lse(rows: ArrayLike) -> Floats:  # (H, total)
        return pad(np.asarray(rows).T[..., None], edges_q, "lse")[..., 0]

    grads = attention_backward(
        pad(grad_out, edges_q, "grad_out"), pad(query, edges_q, "query"), pad(key, edges_k, "key"),
        pad(value, edges_k, "value"), pad(out, edges_q, "out"),
        pad_lse(lse), grad_lse=None if grad_lse is None else pad_lse(grad_lse),
        gate=pad_gate(gate, query, value, edges_q),
        **padded_options(edges_q, edges_k, alignment, options),
    )  # fmt: skip
    query_grad, key_grad, value_grad = (
        unpad(g, edges) for g, edges in zip(grads[:3], (edges_q, edges_k, edges_k), strict=True)
    )
    of_gate = None if gate is None else _sum_to(unpad(grads.gate, edges_q), np.shape(gate))
    return AttentionGradients(query_grad, key_grad, value_grad, sinks=grads.sinks, gate=of_gate)


@quiet
def softmax_backward(
    grad_out: ArrayLike, weights: ArrayLike, axis: int = -1, *, scale: float = 1.0, out: Floats | None = None
) -> Floats:
    """Return the gradient of the scores, given the gradient of their softmax: ``scale * P * (dP - sum(P * dP))``.

    The formula holds for `masked_softmax`, too. Elements of weight 0 have no influence.
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


Inputs = tuple[ArrayLike, ArrayLike, ArrayLike]


class _Linearized(NamedTuple):
    """Attention at one point: what its derivatives need."""

    problem: Problem
    weights: Floats
    lse: Floats
    factor: Floats  # of the dropout: 0, or 1 / (1 - p)
    visible: Bools  # without scores of -inf
    raw: Floats  # tangents of the scaled products
    slope: Floats  # derivative of the softcap
    curvature: Floats  # its second derivative
    tangent: Floats  # of the scores
    mean: Floats  # of the tangents: the tangent of the LSE
    value_tangent: Floats | None


def _products(problem: Problem, inputs: Inputs, options: dict[str, Any]) -> Problem:
    """Return the problem of tangents, with the scale of `problem`."""
    kept = {name: options[name] for name in ("enable_gqa", "layout", "key_indices") if name in options}
    return score(inputs, scale=problem.scale, **kept)


def _refuse_quantized(**arrays: Any) -> None:
    for name, array in arrays.items():
        if isinstance(array, Quantized):
            what = "is quantized and has no tangent" if name in ("key", "value") else "must be an array of real numbers"
            raise TypeError(f"{name} {what}: pass cattn.dequantize({name})")


def _sink_weights(sinks: ArrayLike, lse: Floats) -> Floats:
    """Return the weight of the sink in each row."""
    sink = numbers(sinks, "sinks")[..., None]
    return np.where(sink == -np.inf, 0.0, np.exp(sink - lse))


def _linearize(
    inputs: Inputs,
    tangents: tuple[ArrayLike | None, ArrayLike | None, ArrayLike | None],
    attn_mask: ArrayLike | None,
    dropout_p: float,
    is_causal: Causal,
    sinks: ArrayLike | None,
    rng: int | None,
    bias_tangent: ArrayLike | None,
    sinks_tangent: ArrayLike | None,
    options: dict[str, Any],
) -> _Linearized:
    p = probability(dropout_p, "dropout_p")
    query, key, value = inputs
    query_tangent, key_tangent, value_tangent = tangents
    _refuse_quantized(
        query=query, key=key, value=value, query_tangent=query_tangent, key_tangent=key_tangent,
        value_tangent=value_tangent, bias_tangent=bias_tangent, sinks_tangent=sinks_tangent,
    )  # fmt: skip
    problem = score(inputs, attn_mask, is_causal, **options)
    weights, lse = normalize(problem.scores, problem.visible, sinks)
    factor = np.zeros(weights.shape)
    if p < 1:
        factor[_dropout_bits(p, 0 if rng is None else rng, problem) if p > 0 else ...] = 1 / (1 - p)

    raw = np.zeros(weights.shape)
    if query_tangent is not None:
        raw = raw + _products(problem, (query_tangent, key, value), options).products
    if key_tangent is not None:
        raw = raw + _products(problem, (query, key_tangent, value), options).products
    slope, curvature = np.ones(weights.shape), np.zeros(weights.shape)
    if softcap := options.get("softcap"):
        t = problem.capped / softcap
        slope, curvature = 1 - t**2, -2 * t * (1 - t**2) / softcap
    tangent = raw * slope
    if bias_tangent is not None:
        term = numbers(bias_tangent, "bias_tangent")
        if problem.one_head and term.ndim > 2:
            term = np.expand_dims(term, -3)
        tangent = tangent + problem.of_listed_keys(np.broadcast_to(term, (*weights.shape[:-1], problem.key.shape[-2])))
    visible = problem.visible & (problem.scores != -np.inf)  # a score of -inf has weight 0, and keeps it
    tangent = np.where(visible, tangent, 0.0)
    mean = np.where(visible, weights * tangent, 0.0).sum(axis=-1)
    if sinks is not None and sinks_tangent is not None:
        mean = mean + _sink_weights(sinks, lse) * numbers(sinks_tangent, "sinks_tangent")[..., None]
    moved = None if value_tangent is None else _products(problem, (query, key, value_tangent), options).value
    return _Linearized(problem, weights, lse, factor, visible, raw, slope, curvature, tangent, mean, moved)


@quiet
def attention_jvp(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    query_tangent: ArrayLike | None = None,
    key_tangent: ArrayLike | None = None,
    value_tangent: ArrayLike | None = None,
    *,
    attn_mask: ArrayLike | None = None,
    dropout_p: float = 0.0,
    is_causal: Causal = False,
    sinks: ArrayLike | None = None,
    rng: int | None = None,
    bias_tangent: ArrayLike | None = None,
    sinks_tangent: ArrayLike | None = None,
    return_lse: bool = False,
    **options: Any,
) -> AttentionTangents:
    """Return attention and its derivative in the direction of the tangents: forward mode.

    A tangent has the shape of its argument; None is a direction of zeros. `bias_tangent` belongs to the bias or, where
    there is none, to a float attn_mask. With weights P, dropout Z (1/(1-p) where it keeps a weight, else 0), and the
    dot for tangents::

        S' = scale * (Q' @ K.T + Q @ K'.T) + bias'      mu = sum(P * S', axis=-1)
        O' = (P * Z * S') @ V + (P * Z) @ V' - mu * O   lse' = mu

    where the first term of S' is multiplied by the derivative of the softcap, and a sink is one more term of mu.
    Hidden pairs have no influence, even if they are NaN.
    """
    at = _linearize(
        (query, key, value), (query_tangent, key_tangent, value_tangent), attn_mask, dropout_p, is_causal, sinks, rng,
        bias_tangent, sinks_tangent, options,
    )  # fmt: skip
    problem = at.problem
    dropped = np.where(at.factor != 0, at.weights * at.factor, 0.0)
    moved = np.where(at.visible & (dropped != 0), dropped * at.tangent, 0.0)
    dropped, moved, visible = map(problem.of_all_keys, (dropped, moved, problem.visible))
    out = _weighted_sum(dropped, problem.value, visible, is_mean=dropout_p == 0)
    out_tangent = _weighted_sum(moved, problem.value, visible) - at.mean[..., None] * out
    if at.value_tangent is not None:
        out_tangent = out_tangent + _weighted_sum(dropped, at.value_tangent, visible)
    lse, mean = at.lse, at.mean
    if problem.one_head:
        out, out_tangent = out[..., 0, :, :], out_tangent[..., 0, :, :]
        lse, mean = lse[..., 0, :], mean[..., 0, :]
    layout = options.get("layout", "bhtd")
    out, out_tangent = reordered(out, layout), reordered(out_tangent, layout)
    return AttentionTangents(out, out_tangent, lse if return_lse else None, mean if return_lse else None)


@quiet
def attention_jvp_backward(
    grad_out_tangent: ArrayLike,
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    out: ArrayLike,
    lse: ArrayLike,
    out_tangent: ArrayLike,
    lse_tangent: ArrayLike,
    query_tangent: ArrayLike | None = None,
    key_tangent: ArrayLike | None = None,
    value_tangent: ArrayLike | None = None,
    *,
    attn_mask: ArrayLike | None = None,
    dropout_p: float = 0.0,
    is_causal: Causal = False,
    sinks: ArrayLike | None = None,
    rng: int | None = None,
    bias_tangent: ArrayLike | None = None,
    sinks_tangent: ArrayLike | None = None,
    grad_lse_tangent: ArrayLike | None = None,
    **options: Any,
) -> AttentionGradients:
    """Return the gradients of `attention_jvp`'s arguments, given the gradients of its two tangents.

    The gradients of the tangents themselves are `attention_backward` with the same gradients. `out` and the three after
    it are the results of `attention_jvp`; they are not checked. With its notation, the gradient dO' of O' and the
    gradient dL' of lse'::

        w = Z * (dO' @ V.T)      w' = Z * (dO' @ V'.T)      delta = sum(dO' * O, axis=-1) - dL'
        delta' = sum(dO' * O', axis=-1)                     dS' = P * (w - delta)
        dS = P * ((S' - mu) * (w - delta) + w' - delta')    d bias = dS
        dQ = scale * (dS @ K + dS' @ K')                    dK = scale * (dS.T @ Q + dS'.T @ Q')
        dV = (P * Z * (S' - mu)).T @ dO'

    where softcap multiplies dS' by its derivative, and adds its second derivative to the first term of dQ and dK.
    """
    inputs = (query, key, value)
    at = _linearize(
        inputs, (query_tangent, key_tangent, value_tangent), attn_mask, dropout_p, is_causal, sinks, rng, bias_tangent,
        sinks_tangent, options,
    )  # fmt: skip
    problem, visible = at.problem, at.problem.visible
    layout = options.get("layout", "bhtd")
    grads, outs, outs_tangent = (
        reordered(numbers(a, name), layout)
        for a, name in ((grad_out_tangent, "grad_out_tangent"), (out, "out"), (out_tangent, "out_tangent"))
    )
    row_lse, mean = numbers(lse, "lse"), numbers(lse_tangent, "lse_tangent")
    if problem.one_head:
        grads, outs, outs_tangent = (a[..., None, :, :] for a in (grads, outs, outs_tangent))
        row_lse, mean = row_lse[..., None, :], mean[..., None, :]
    weights = np.where(at.visible, np.exp(problem.scores - row_lse[..., None]), 0.0)
    delta, delta_tangent = (grads * outs).sum(axis=-1), (grads * outs_tangent).sum(axis=-1)
    if grad_lse_tangent is not None:
        delta = delta - numbers(grad_lse_tangent, "grad_lse_tangent").reshape(delta.shape)
    kept = at.factor != 0
    w = np.where(kept, at.factor * problem.of_listed_keys(grads @ np.swapaxes(problem.value, -1, -2)), 0.0)
    w_tangent = np.zeros(w.shape)
    if at.value_tangent is not None:
        moved = problem.of_listed_keys(grads @ np.swapaxes(at.value_tangent, -1, -2))
        w_tangent = np.where(kept, at.factor * moved, 0.0)
    centred = at.tangent - mean[..., None]
    d_tangent = np.where(at.visible, weights * (w - delta[..., None]), 0.0)
    d_score = centred * (w - delta[..., None]) + w_tangent - delta_tangent[..., None]
    d_score = np.where(at.visible, weights * d_score, 0.0)
    d_raw = np.where(at.visible, d_score * at.slope + d_tangent * at.raw * at.curvature, 0.0) * problem.scale
    d_raw_tangent = np.where(at.visible, d_tangent * at.slope, 0.0) * problem.scale
    of_value = np.where(at.visible & kept, weights * at.factor * centred, 0.0)

    d_score, d_raw, d_raw_tangent, of_value, visible = map(
        problem.of_all_keys, (d_score, d_raw, d_raw_tangent, of_value, visible)
    )
    columns = np.swapaxes(visible, -1, -2)
    of_query = _weighted_sum(d_raw, problem.key, visible)
    of_key = _weighted_sum(np.swapaxes(d_raw, -1, -2), problem.query, columns)
    if key_tangent is not None:
        moved = _products(problem, (query, key_tangent, value), options).key
        of_query = of_query + _weighted_sum(d_raw_tangent, moved, visible)
    if query_tangent is not None:
        moved = _products(problem, (query_tangent, key, value), options).query
        of_key = of_key + _weighted_sum(np.swapaxes(d_raw_tangent, -1, -2), moved, columns)
    gradients = (of_query, of_key, _weighted_sum(np.swapaxes(of_value, -1, -2), grads, columns))

    of_bias, of_sinks = None, None
    additive = attn_mask if options.get("bias") is None else options["bias"]
    if additive is not None and np.asarray(additive).dtype.kind == "f":
        of_bias = _sum_to(d_score[..., 0, :, :] if problem.one_head else d_score, np.shape(additive))
    if sinks is not None:
        moved = np.zeros(1) if sinks_tangent is None else numbers(sinks_tangent, "sinks_tangent")[..., None]
        of_sinks = _gradient_of_sinks(sinks, row_lse, (moved - mean) * delta + delta_tangent, problem)
    return AttentionGradients(*sum_inputs(problem, gradients, inputs, layout), of_bias, of_sinks)


def _gradient_of_sinks(sinks: ArrayLike, lse: Floats, per_weight: Floats, problem: Problem) -> Any:
    """Return the gradient of sinks, whose score takes from each row its weight times a number."""
    weight = _sink_weights(sinks, lse)
    per_row = np.where((weight != 0) & problem.visible.any(axis=-1), weight * per_weight, 0.0)
    return _sum_to(-per_row.sum(axis=-1), np.shape(sinks))
