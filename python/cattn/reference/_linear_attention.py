"""Linear attention with a state, token by token, its gradients, and the short convolution before it."""

import itertools
import math
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike

from cattn._input.types import Layout, LinearAttentionGradients, LinearAttentionOutput

from ._layers import silu, silu_backward
from ._shared import Floats, deliver, numbers, quiet


class _Call:
    """The arrays with all axes, (batch, heads of states, T, width), and the way back to the caller's axes."""

    def __init__(
        self,
        arrays: dict[str, ArrayLike | None],
        layout: Layout,
        cu_seqlens: ArrayLike | None,
        lengths: ArrayLike | None,
    ) -> None:
        given = {name: numbers(array, name) for name, array in arrays.items() if array is not None}
        packed = cu_seqlens is not None
        axes = max(given[name].ndim for name in ("query", "key", "value"))
        if "state" in given and not packed:
            axes = max(axes, given["state"].ndim)
        self.has_heads = axes > 3 or (axes == 3 and (layout == "bthd" or packed))
        self.by_row = "decay" in given and given["decay"].ndim == axes
        self.layout: Layout = layout
        self.full = {}
        for name, array in given.items():
            one_number = name == "beta" or (name == "decay" and not self.by_row)
            self.full[name] = self._with_heads(array, name, one_number)
        self.edges = [0, *([] if cu_seqlens is None else np.asarray(cu_seqlens)[1:].tolist())]
        sizes = [self.full[name] for name in ("query", "key", "value")]
        batch = np.broadcast_shapes(*(x.shape[:-3] for x in sizes), *self._state_batch(packed))
        self.n_states = max(self.full["key"].shape[-3], self.full["value"].shape[-3])
        self.n_queries = max(self.n_states, self.full["query"].shape[-3])
        self.tokens, self.d_k = self.full["query"].shape[-2:]
        self.d_v = self.full["value"].shape[-1]
        self.batch = (len(self.edges) - 1,) if packed else batch
        if not packed:
            counts = np.broadcast_to(self.tokens if lengths is None else np.asarray(lengths), batch)
            self.spans = [(0, int(n)) for n in counts.ravel()]
        else:
            self.spans = list(itertools.pairwise(self.edges))
        self.packed = packed

    def _state_batch(self, packed: bool) -> list[tuple[int, ...]]:
        return [self.full["state"].shape[:-3]] if "state" in self.full and not packed else []

    def _with_heads(self, array: Floats, name: str, one_number: bool) -> Floats:
        """Return an array with its heads before its tokens, and a width of 1 where there is one number for a token."""
        if name != "state" and one_number and self.layout == "bthd" and array.ndim == 1:
            array = array[:, None]
        elif name != "state" and self.layout == "bthd":
            array = np.swapaxes(array, -1, -2) if one_number else np.swapaxes(array, -2, -3)
        if one_number:
            array = np.atleast_1d(array)[..., None]
        return array if self.has_heads else array[..., None, :, :]

    def rows(self, name: str, heads: int) -> Floats | None:
        """Return an array with all batch entries and `heads` heads, (batch, heads, T or d_k, width)."""
        if name not in self.full:
            return None
        array = self.full[name]
        own = array.shape[-3]
        array = np.repeat(array, heads // own if own else 1, axis=-3) if own not in (0, heads) else array
        is_state = name in ("state", "grad_state")
        batch = self.batch if is_state or not self.packed else ()
        rows = self.d_k if is_state else self.tokens
        width = self.d_k if name == "decay" and self.by_row else array.shape[-1]
        array = np.broadcast_to(array, (*batch, heads, rows, width))
        return array.reshape(math.prod(batch), *array.shape[-3:])

    def back(self, array: Floats, one_number: bool = False, is_state: bool = False) -> Floats:
        """Return an array (entries, heads, rows, width) with the axes of the caller."""
        batch = self.batch if is_state or not self.packed else ()
        array = array.reshape(*batch, *array.shape[1:])
        if not self.has_heads:
            array = array[..., 0, :, :]
        if one_number:
            array = array[..., 0]
        if self.layout == "bthd" and not is_state and self.has_heads:
            array = np.swapaxes(array, -1, -2) if one_number else np.swapaxes(array, -2, -3)
        return array

    def summed(self, grad: Floats, name: str, given: ArrayLike) -> Floats:
        """Return a gradient in the shape of its argument: summed over repeated heads and broadcast axes."""
        shape = np.shape(given)
        full = self.full[name]
        heads = full.shape[-3]
        if heads not in (0, grad.shape[1]):
            grad = grad.reshape(grad.shape[0], heads, grad.shape[1] // heads, *grad.shape[2:]).sum(axis=2)
        one_number = name == "beta" or (name == "decay" and not self.by_row)
        result = self.back(grad, one_number, name == "state")
        if self.layout == "bthd" and one_number and len(shape) == 1:
            shape = (1, *shape)
        while result.ndim > len(shape):
            result = result.sum(axis=0)
        for axis, size in enumerate(shape):
            if size == 1 and result.shape[axis] != 1:
                result = result.sum(axis=axis, keepdims=True)
        return result.reshape(np.shape(given))


def _scale(scale: float | None, d_k: int) -> float:
    return float(scale) if scale is not None else 1 / math.sqrt(d_k) if d_k else 1.0


@quiet
def linear_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    *,
    decay: ArrayLike | None = None,
    beta: ArrayLike | None = None,
    state: ArrayLike | None = None,
    scale: float | None = None,
    seq_lengths: ArrayLike | None = None,
    cu_seqlens: ArrayLike | None = None,
    layout: Layout = "bhtd",
    return_state: bool = False,
    state_out: Floats | None = None,
    out: Floats | None = None,
) -> Any:
    """Return linear attention with a state S for each head.

    For one token after another::

        S = exp(decay) * S
        u = beta * (value - S.T @ key), or value without beta
        S = S + outer(key, u)
        out = scale * S.T @ query
    """
    arrays = {"query": query, "key": key, "value": value, "decay": decay, "beta": beta, "state": state}
    call = _Call(arrays, layout, cu_seqlens, seq_lengths)
    entries = len(call.spans)
    result = np.zeros((1 if call.packed else entries, call.n_queries, call.tokens, call.d_v))
    states = np.zeros((entries, call.n_states, call.d_k, call.d_v))
    for entry, (first, end) in enumerate(call.spans):
        row = 0 if call.packed else entry
        for t, s, _, _ in _steps(call, entry, row, first, end, states[entry]):
            q = call.rows("query", call.n_queries)[row, :, t]  # type: ignore[index]
            read = np.repeat(s, call.n_queries // call.n_states, axis=0) if call.n_states else s
            result[row, :, t] = _scale(scale, call.d_k) * np.einsum("hkv,hk->hv", read, q)
    final = call.back(states, is_state=True)
    if state_out is not None:
        final = deliver(final, state_out)
    output = deliver(call.back(result), out)
    return LinearAttentionOutput(output, final) if return_state else output


def _steps(call: _Call, entry: int, row: int, first: int, end: int, final: Floats) -> Any:
    """Yield (token, state, state after its decay, u) of one entry; writes the last state to `final`."""
    n = call.n_states
    key, value = call.rows("key", n), call.rows("value", n)
    decay, beta, state = call.rows("decay", n), call.rows("beta", n), call.rows("state", n)
    assert key is not None
    assert value is not None
    s = final.copy() if state is None else state[entry].copy()
    for t in range(first, end):
        decayed = s if decay is None else np.exp(decay[row, :, t])[..., None] * s
        u = value[row, :, t]
        if beta is not None:
            u = beta[row, :, t] * (u - np.einsum("hkv,hk->hv", decayed, key[row, :, t]))
        s = decayed + key[row, :, t][..., :, None] * u[..., None, :]
        yield t, s, decayed, u
    final[...] = s


@quiet
def linear_attention_backward(
    grad_out: ArrayLike,
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    *,
    decay: ArrayLike | None = None,
    beta: ArrayLike | None = None,
    state: ArrayLike | None = None,
    grad_state: ArrayLike | None = None,
    scale: float | None = None,
    seq_lengths: ArrayLike | None = None,
    cu_seqlens: ArrayLike | None = None,
    layout: Layout = "bhtd",
) -> LinearAttentionGradients:
    """Return the gradients of `linear_attention`, from the last token to the first."""
    given = {"query": query, "key": key, "value": value, "decay": decay, "beta": beta, "state": state}
    call = _Call({**given, "grad_state": None}, layout, cu_seqlens, seq_lengths)
    # the gradient of the result has the axes of the result
    call.full["grad_out"] = call._with_heads(numbers(grad_out, "grad_out"), "grad_out", one_number=False)
    n, entries = call.n_states, len(call.spans)
    each, factor = (call.n_queries // n if n else 1), _scale(scale, call.d_k)
    q, k, v = call.rows("query", call.n_queries), call.rows("key", n), call.rows("value", n)
    g, e, b = call.rows("grad_out", call.n_queries), call.rows("decay", n), call.rows("beta", n)
    assert q is not None
    assert k is not None
    assert v is not None
    assert g is not None
    final = np.zeros((entries, n, call.d_k, call.d_v))
    if grad_state is not None:
        final = final + numbers(grad_state, "grad_state").reshape(entries, n, call.d_k, call.d_v)
    gradients = {name: np.zeros(np.shape(array)) for name, array in (("query", q), ("key", k), ("value", v))}
    gradients |= {name: np.zeros(np.shape(x)) for name, x in (("decay", e), ("beta", b)) if x is not None}
    for entry, (first, end) in enumerate(call.spans):
        row = 0 if call.packed else entry
        steps = list(_steps(call, entry, row, first, end, np.zeros((n, call.d_k, call.d_v))))
        for t, s, decayed, u in reversed(steps):
            of_queries = g[row, :, t].reshape(n, each, call.d_v)
            by_queries = q[row, :, t].reshape(n, each, call.d_k)
            final[entry] += factor * np.einsum("hqk,hqv->hkv", by_queries, of_queries)
            gradients["query"][row, :, t] = factor * np.einsum("hkv,hqv->hqk", s, of_queries).reshape(
                call.n_queries, call.d_k
            )
            of_update = np.einsum("hkv,hk->hv", final[entry], k[row, :, t])
            of_key = np.einsum("hkv,hv->hk", final[entry], u)
            of_value, of_retrieved = of_update, None
            if b is not None:
                retrieved = np.einsum("hkv,hk->hv", decayed, k[row, :, t])
                gradients["beta"][row, :, t] = (of_update * (v[row, :, t] - retrieved)).sum(axis=-1, keepdims=True)
                of_value = b[row, :, t] * of_update
                of_retrieved = -of_value
                of_key = of_key + np.einsum("hkv,hv->hk", decayed, of_retrieved)
            gradients["key"][row, :, t] = of_key
            gradients["value"][row, :, t] = of_value
            if of_retrieved is not None:
                final[entry] += k[row, :, t][..., :, None] * of_retrieved[..., None, :]
            if e is not None:
                of_decay = (final[entry] * decayed).sum(axis=-1)
                gradients["decay"][row, :, t] = of_decay if call.by_row else of_decay.sum(axis=-1, keepdims=True)
                final[entry] *= np.exp(e[row, :, t])[..., None]
    results = {name: call.summed(grad, name, given[name]) for name, grad in gradients.items()}  # type: ignore[arg-type]
    if state is not None:
        results["state"] = call.summed(final, "state", state)
    return LinearAttentionGradients(**results)


@quiet
def causal_conv(
    x: ArrayLike,
    weight: ArrayLike,
    bias: ArrayLike | None = None,
    *,
    state: ArrayLike | None = None,
    activation: Literal["silu"] | None = None,
    seq_lengths: ArrayLike | None = None,
    cu_seqlens: ArrayLike | None = None,
    return_state: bool = False,
    state_out: Floats | None = None,
    out: Floats | None = None,
) -> Any:
    """Return for each channel the sum over the last K tokens of ``weight * x``, plus bias; x is (..., T, C)."""
    given, filters = numbers(x, "x"), numbers(weight, "weight")
    shift = np.zeros(len(filters)) if bias is None else numbers(bias, "bias")
    before = filters.shape[-1] - 1
    if cu_seqlens is not None:
        edges = np.asarray(cu_seqlens).tolist()
        spans = [((), slice(a, b)) for a, b in itertools.pairwise(edges)]
        lead: tuple[int, ...] = (len(spans),)
    else:
        lead = given.shape[:-2]
        counts = np.broadcast_to(given.shape[-2] if seq_lengths is None else np.asarray(seq_lengths), lead)
        spans = [(index, slice(0, int(counts[index]))) for index in np.ndindex(*lead)]
    states = np.zeros((*lead, before, len(filters)))
    states = (states if state is None else states + numbers(state, "state")).reshape(len(spans), *states.shape[-2:])
    result = np.zeros(given.shape)
    for own, (index, rows) in zip(states, spans, strict=True):
        padded = np.concatenate([own, given[index][rows]])
        total = np.zeros((len(padded) - before, len(filters))) + shift
        for j in range(before + 1):
            total += padded[j : j + len(total)] * filters[:, j]
        result[index][rows] = silu(total) if activation == "silu" else total
        own[...] = padded[len(total) :]
    last = states.reshape(*lead, *states.shape[-2:])
    last = last if state_out is None else deliver(last, state_out)
    result = deliver(result, out)
    return LinearAttentionOutput(result, last) if return_state else result


@quiet
def causal_conv_backward(
    grad_out: ArrayLike,
    x: ArrayLike,
    weight: ArrayLike,
    bias: ArrayLike | None = None,
    *,
    state: ArrayLike | None = None,
    activation: Literal["silu"] | None = None,
    grad_state: ArrayLike | None = None,
) -> Any:
    """Return the gradients of x, weight, bias (or None) and state (or None), given the gradients of the results."""
    given, filters, grad = numbers(x, "x"), numbers(weight, "weight"), numbers(grad_out, "grad_out")
    width, tokens = filters.shape[-1], given.shape[-2]
    if activation == "silu":
        grad = silu_backward(grad, causal_conv(given, filters, bias, state=state))
    before = np.zeros((*given.shape[:-2], width - 1, given.shape[-1]))
    padded = np.concatenate([before if state is None else before + numbers(state, "state"), given], axis=-2)
    of_padded = np.zeros(padded.shape)
    if grad_state is not None:
        of_padded[..., tokens:, :] += numbers(grad_state, "grad_state")
    of_weight, axes = np.zeros(filters.shape), tuple(range(given.ndim - 1))
    for j in range(width):
        of_padded[..., j : j + tokens, :] += grad * filters[:, j]
        of_weight[:, j] = (grad * padded[..., j : j + tokens, :]).sum(axis=axes)
    of_bias = None if bias is None else grad.sum(axis=axes)
    of_state = None if state is None else of_padded[..., : width - 1, :]
    return of_padded[..., width - 1 :, :], of_weight, of_bias, of_state
