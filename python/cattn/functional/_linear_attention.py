"""Linear attention with a state, its gradients, and the short convolution before it."""

from __future__ import annotations

from typing import Any, Literal, TypedDict, Unpack, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .. import _cattn
from .._input.arrays import _quiet, as_array, common_dtype
from .._input.contexts import in_default_mode
from .._input.types import Layout, LinearAttentionGradients, LinearAttentionOutput
from ._derivatives import sum_to
from ._layers import silu_backward
from ._options import documented, implemented_in_c

__all__ = ["causal_conv", "causal_conv_backward", "linear_attention", "linear_attention_backward"]


class _StateOptions(TypedDict, total=False):
    """What both functions with a state take; a type checker reads it."""

    state: ArrayLike | None
    seq_lengths: ArrayLike | None
    cu_seqlens: ArrayLike | None
    state_out: NDArray[Any] | None
    out: NDArray[Any] | None


class _LinearOptions(_StateOptions, total=False):
    decay: ArrayLike | None
    beta: ArrayLike | None
    scale: float | None
    layout: Layout


class _ConvOptions(_StateOptions, total=False):
    activation: Literal["silu"] | None


@overload
def linear_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    *,
    return_state: Literal[False] = ...,
    **options: Unpack[_LinearOptions],
) -> NDArray[Any]: ...
@overload
def linear_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    *,
    return_state: Literal[True],
    **options: Unpack[_LinearOptions],
) -> LinearAttentionOutput: ...
@implemented_in_c
def linear_attention(  # type: ignore[empty-body]
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    *,
    return_state: bool = False,
    **options: Unpack[_LinearOptions],
) -> NDArray[Any] | LinearAttentionOutput:
    r"""Return linear attention: each head has a state instead of the keys and values of earlier tokens.

    What is given decides the rule: nothing more is linear attention, `decay` the gated rule (RetNet, GLA, Mamba 2,
    Lightning), `beta` the delta rule, both the gated delta rule (Qwen 3.5, Kimi Linear, Olmo Hybrid).

    Parameters
    ----------
    query : array_like, shape (..., N_q, T, d_k)
        Queries of T tokens: float16, bfloat16, float32 or float64; booleans and integers are converted to float64.
        Arrays of less than four dimensions, (B, T, d_k) or (T, d_k), have no axis of heads.
    key : array_like, shape (..., N_k, T, d_k)
        Keys. Many models normalise queries and keys to length 1 before.
    value : array_like, shape (..., N_v, T, d_v)
        Values. There are N states, the larger number of N_k and N_v; each head of the other array belongs to N / N_k or
        N / N_v consecutive states. N_q divides N, or is a multiple of it: then consecutive queries read one state.
    decay : array_like, shape (..., N, T) or (..., N, T, d_k), optional
        The natural logarithm of the factor of the state before a token's update, at most 0 for a state that forgets:
        one number, or one for each row of the state if it has as many dimensions as the call. The shapes broadcast: (N,
        1) is a constant of each head.
    beta : array_like, shape (..., N, T), optional
        How much of the difference between the value and the value that the state has for the key is written: 1 replaces
        it. It broadcasts. Without it the value is added.
    state : array_like, shape (..., N, d_k, d_v), optional
        The state before the first token; the default is 0.
    scale : float, optional
        Factor of the output; the default is ``1 / sqrt(d_k)``.
    seq_lengths : int or array_like of int, optional
        The number of valid tokens of each batch entry. The rows of later tokens become 0 whatever they hold, and the
        state stays as the last valid token left it.
    cu_seqlens : array_like of int, shape (B + 1,), optional
        Packed sequences: sequence b has the tokens ``cu_seqlens[b]`` to ``cu_seqlens[b + 1] - 1``. The arrays have the
        shape (N, total, d) or (total, d), and states have one more axis at the beginning, of size B.
    layout : {"bhtd", "bthd"}
        The order of heads and tokens; "bthd" is (..., T, N, d) for query, key, value and out, (..., T, N) for decay and
        beta.
    return_state : bool
        Also return the state after the last token.
    state_out : ndarray, shape (..., N, d_k, d_v), optional
        Takes the state after the last token. It may be `state` itself: decoding in place. Ctrl-C in the call leaves it
        new in some heads and old in others, so start again from a copy, or from the first token.
    out : ndarray, shape (..., max(N, N_q), T, d_v), optional
        Takes the output, any strides.

    Returns
    -------
    ndarray or LinearAttentionOutput
        The output, in the dtype that NumPy promotes query, key and value to; with ``return_state=True`` a named tuple
        of it and the state. States, decay and beta have the dtype of the computation: float32, or float64 for float64.

    Raises
    ------
    TypeError
        A dtype is not supported, or float16 and bfloat16 are mixed.
    ValueError
        Shapes do not fit, scale is not finite, lengths lie outside 0 to T, `cu_seqlens` does not rise from 0 to the
        number of tokens, or it is given with `seq_lengths`.

    See Also
    --------
    cattn.functional.linear_attention_backward : The gradients.
    cattn.functional.causal_conv : The short convolution that these models have before it.
    causal_attention : Attention with a softmax.
    cattn.reference.linear_attention : The same in plain NumPy.

    Notes
    -----
    With the state :math:`S`, a matrix of shape (d_k, d_v), for each token:

    .. math::

       \tilde S = e^{\text{decay}} S, \quad u = \beta \, (v - \tilde S^T k), \quad S = \tilde S + k u^T, \quad
       \text{out} = \text{scale} \cdot S^T q

    The recurrence itself is the order of the sums, not a form in chunks. So a prompt at once, token by token, or cut
    anywhere gives the same bits, and so does each sequence alone, in any batch and with any number of threads: see
    :doc:`/bit_contract`. Halves are computed in float32, and the output is rounded once.

    References
    ----------
    Yang, Kautz and Hatamizadeh, "Gated delta networks: improving Mamba2 with delta rule", ICLR 2025. Katharopoulos et
    al., "Transformers are RNNs: fast autoregressive transformers with linear attention", ICML 2020. ``LinearAttention``
    of ONNX, opset 27.

    Examples
    --------
    >>> import numpy as np
    >>> import cattn
    >>> x = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]])
    >>> cattn.linear_attention(x, x, [[1.0], [2.0], [5.0]], beta=[1.0, 1.0, 1.0], scale=1.0)
    array([[1.],
           [2.],
           [5.]])

    Prompt and decoding, with the state in place:

    >>> first, state = cattn.linear_attention(x[:2], x[:2], x[:2], decay=[-0.1, -0.1], return_state=True)
    >>> last = cattn.linear_attention(x[2:], x[2:], x[2:], decay=[-0.1], state=state, state_out=state)
    >>> bool((last == cattn.linear_attention(x, x, x, decay=[-0.1] * 3)[2:]).all())
    True
    """


@documented
@_quiet
@in_default_mode
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
    r"""Return the gradients of the arguments of `cattn.linear_attention`, given the gradients of its results.

    Parameters
    ----------
    grad_out : array_like, shape (..., max(N, N_q), T, d_v)
        Gradient of the output.
    query : array_like, shape (..., N_q, T, d_k)
        The argument of the forward pass, as the next ones.
    grad_state : array_like, shape (..., N, d_k, d_v), optional
        Gradient of the last state; the default is 0.

    Returns
    -------
    LinearAttentionGradients
        Gradients in the shapes of the arguments, summed where an argument was repeated for several heads or batch
        entries. For query, key and value they have the dtype that NumPy promotes these and `grad_out` to; for
        decay, beta and state they are float32, or float64 for float64.

    Raises
    ------
    TypeError, ValueError
        As for `cattn.linear_attention`, and if `grad_out` or `grad_state` has another shape than the result.

    See Also
    --------
    cattn.linear_attention : The forward pass.
    cattn.reference.linear_attention_backward : The same in plain NumPy.

    Notes
    -----
    The states are computed again, from states that are kept every 16 tokens, for 32 rows at a time: a thread needs
    memory for one state in 64 tokens if d_k is 128. With :math:`G` the gradient of the state after a token:

    .. math::

       G \leftarrow G + \text{scale} \cdot q \, g^T, \quad \text{grad}_u = G^T k, \quad \text{grad}_v = \beta \,
       \text{grad}_u, \quad \text{grad}_\beta = \text{grad}_u \cdot (v - \tilde S^T k), \quad
       \text{grad}_k = G u - \tilde S \, \text{grad}_v, \quad \text{grad}_q = \text{scale} \cdot S g

    and then :math:`G \leftarrow e^{\text{decay}} (G - k \, \text{grad}_v^T)`; the gradient of the decay is the sum of
    the bracket times :math:`\tilde S`, over the entries that share it. The bits do not depend on the number of threads.

    Examples
    --------
    >>> import numpy as np
    >>> from cattn.functional import linear_attention_backward
    >>> x = np.eye(2)
    >>> grads = linear_attention_backward(x, x, x, x, beta=[1.0, 0.5], scale=1.0)
    >>> grads.value
    array([[1. , 0. ],
           [0. , 0.5]])
    """
    grad = as_array(grad_out, "grad_out")
    stored = [as_array(x, name) for x, name in ((query, "query"), (key, "key"), (value, "value"))]
    dtype = common_dtype([*stored, grad], "grad_out, query, key and value")
    options = (("decay", decay), ("beta", beta), ("state", state))
    given = [*stored, *(None if x is None else as_array(x, name) for name, x in options)]
    full = _cattn._linear_gradients(grad, grad_state, *given, scale, seq_lengths, cu_seqlens, layout)
    sums: list[Any] = []
    for index, (gradient, array) in enumerate(zip(full, given, strict=True)):
        if gradient is None or array is None:
            sums.append(None)
        elif index == len(full) - 1:  # the state
            sums.append(sum_to(gradient, array.shape))
        else:
            sums.append(_sum_over_heads(gradient, array.shape, gradient.ndim == full[0].ndim, layout == "bthd"))
    return LinearAttentionGradients(*(total.astype(dtype, copy=False) for total in sums[:3]), *sums[3:])


def _sum_over_heads(
    gradient: NDArray[Any], shape: tuple[int, ...], has_width: bool, tokens_first: bool
) -> NDArray[Any]:
    """Return the gradient of an argument of this shape, whose heads may be repeated, from one of all heads."""
    heads = -3 if has_width else -2
    if tokens_first:
        gradient = gradient.swapaxes(heads, heads + 1)
        heads += 1
    if -heads <= min(len(shape), gradient.ndim) and 1 < shape[heads] < gradient.shape[heads]:
        axis = gradient.ndim + heads
        parts = (shape[heads], gradient.shape[heads] // shape[heads])
        gradient = gradient.reshape(*gradient.shape[:axis], *parts, *gradient.shape[axis + 1 :]).sum(axis + 1)
    return sum_to(gradient, shape)


@overload
def causal_conv(
    x: ArrayLike,
    weight: ArrayLike,
    bias: ArrayLike | None = ...,
    *,
    return_state: Literal[False] = ...,
    **options: Unpack[_ConvOptions],
) -> NDArray[Any]: ...
@overload
def causal_conv(
    x: ArrayLike,
    weight: ArrayLike,
    bias: ArrayLike | None = ...,
    *,
    return_state: Literal[True],
    **options: Unpack[_ConvOptions],
) -> LinearAttentionOutput: ...
@implemented_in_c
def causal_conv(  # type: ignore[empty-body]
    x: ArrayLike,
    weight: ArrayLike,
    bias: ArrayLike | None = None,
    *,
    return_state: bool = False,
    **options: Unpack[_ConvOptions],
) -> NDArray[Any] | LinearAttentionOutput:
    r"""Return a short convolution of each channel over the tokens up to its own, as models have it before their state.

    Parameters
    ----------
    x : array_like, shape (..., T, C)
        T tokens of C channels: float16, bfloat16, float32 or float64; booleans and integers are converted to float64.
        Pass ``x.swapaxes(-1, -2)`` for channels before tokens, as PyTorch's ``Conv1d`` has them: any strides will do.
    weight : array_like, shape (C, K)
        The factors of the last K tokens, the oldest first: ``conv.weight[:, 0]`` of a ``Conv1d`` with C groups.
    bias : array_like, shape (C,), optional
        Added to the sum.
    state : array_like, shape (..., K - 1, C), optional
        The tokens before the first one; without it they take no part.
    activation : {None, "silu"}
        A function of the result.
    seq_lengths : int or array_like of int, optional
        The number of valid tokens of each batch entry, as in `cattn.linear_attention`.
    cu_seqlens : array_like of int, shape (B + 1,), optional
        Packed sequences: x is (total, C), and states are (B, K - 1, C).
    return_state : bool
        Also return the last K - 1 tokens.
    state_out : ndarray, shape (..., K - 1, C), optional
        Takes them; it may be `state` itself. Ctrl-C in the call may leave it new in part.
    out : ndarray, optional
        Takes the output: the shape of x, any strides.

    Returns
    -------
    ndarray or LinearAttentionOutput
        The output, in the dtype that NumPy promotes the arrays to; with ``return_state=True`` a named tuple of it and
        the state, which has the same dtype.

    Raises
    ------
    TypeError
        A dtype is not supported, or float16 and bfloat16 are mixed.
    ValueError
        Shapes do not fit, `activation` is another word, or lengths do not fit x.

    See Also
    --------
    cattn.functional.causal_conv_backward : The gradients.
    cattn.linear_attention : What follows in these models.
    cattn.reference.causal_conv : The same in plain NumPy.

    Notes
    -----
    .. math::

       \text{out}_{t,c} = f\left(\sum_{j=0}^{K-1} \text{weight}_{c,j} \, x_{t-K+1+j,c} + \text{bias}_c\right)

    The sum begins with the oldest token. So a prompt at once, token by token, or cut anywhere gives the same bits.

    References
    ----------
    ``CausalConvWithState`` of ONNX, opset 27.

    Examples
    --------
    >>> from cattn.functional import causal_conv
    >>> causal_conv([[1.0], [2.0], [3.0]], [[10.0, 1.0]])
    array([[ 1.],
           [12.],
           [23.]])
    >>> causal_conv([[4.0]], [[10.0, 1.0]], state=[[3.0]])
    array([[34.]])
    """


@documented
@_quiet
@in_default_mode
def causal_conv_backward(
    grad_out: ArrayLike,
    x: ArrayLike,
    weight: ArrayLike,
    bias: ArrayLike | None = None,
    *,
    state: ArrayLike | None = None,
    activation: Literal["silu"] | None = None,
    grad_state: ArrayLike | None = None,
) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any] | None, NDArray[Any] | None]:
    """Return the gradients of the arguments of `cattn.functional.causal_conv`, given the gradients of its results.

    Parameters
    ----------
    grad_out : array_like, shape (..., T, C)
        Gradient of the output.
    x : array_like, shape (..., T, C)
        The argument of the forward pass, as the next ones. For padded or packed sequences pass one at a time.
    grad_state : array_like, shape (..., K - 1, C), optional
        Gradient of the last tokens that were returned as state; the default is 0.

    Returns
    -------
    grad_x, grad_weight : ndarray
        Have the shapes of x and weight, and the dtype that NumPy promotes the arrays to.
    grad_bias, grad_state : ndarray or None
        The same of bias and state; None without them.

    Raises
    ------
    TypeError, ValueError
        As for `cattn.functional.causal_conv`, and if a gradient has another shape than its result.

    See Also
    --------
    cattn.functional.causal_conv : The forward pass.
    cattn.reference.causal_conv_backward : The same in plain NumPy.

    Notes
    -----
    The gradient of x is the same convolution from the last token to the first. The sums over tokens for weight and bias
    are added in float64.

    Examples
    --------
    >>> from cattn.functional import causal_conv_backward
    >>> grad_x, grad_weight, _, _ = causal_conv_backward([[1.0], [1.0]], [[1.0], [2.0]], [[10.0, 1.0]])
    >>> grad_x
    array([[11.],
           [ 1.]])
    >>> grad_weight
    array([[1., 3.]])
    """
    named = {"grad_out": grad_out, "x": x, "weight": weight, "bias": bias, "state": state, "grad_state": grad_state}
    arrays = {name: as_array(array, name) for name, array in named.items() if array is not None}
    dtype = common_dtype(arrays.values(), "grad_out, x, weight, bias, state and grad_state")
    wide = np.dtype(np.float64 if dtype == np.float64 else np.float32)
    arrays = {name: array.astype(wide, copy=False) for name, array in arrays.items()}
    grad, given, filters = arrays["grad_out"], arrays["x"], arrays["weight"]
    before = causal_conv(given, filters, arrays.get("bias"), state=arrays.get("state"))  # checks the shapes, too
    word: object = activation
    if word is not None and not (isinstance(word, str) and word == "silu"):
        raise ValueError(f"activation must be None or 'silu', got {_cattn._shown(activation)}")
    if grad.shape != given.shape:
        raise ValueError(f"grad_out has shape {grad.shape}, the result has {given.shape}")
    if activation is not None:
        grad = silu_backward(grad, before)
    width, tokens = filters.shape[1], given.shape[-2]
    rows = (*given.shape[:-2], width - 1, given.shape[-1])
    first = np.broadcast_to(arrays["state"], rows) if "state" in arrays else np.zeros(rows, wide)
    padded = np.concatenate([first, given], axis=-2)
    of_padded = np.empty(padded.shape, wide)
    of_padded[..., width - 1 :, :] = causal_conv(grad[..., ::-1, :], filters)[..., ::-1, :]
    # the rows before the first token see only the beginning
    head = np.zeros((*given.shape[:-2], max(width - 1, 0), given.shape[-1]), wide)
    head[..., : min(tokens, width - 1), :] = grad[..., : width - 1, :]
    of_padded[..., : width - 1, :] = causal_conv(head, filters[:, ::-1])
    if "grad_state" in arrays:
        last = arrays["grad_state"]
        if last.shape != rows:
            raise ValueError(f"grad_state has shape {last.shape}, the state has {rows}")
        of_padded[..., tokens:, :] += last
    axes = tuple(range(given.ndim - 1))
    parts = [(grad * padded[..., j : j + tokens, :]).sum(axis=axes, dtype=np.float64) for j in range(width)]
    results: list[Any] = [of_padded[..., width - 1 :, :], np.stack(parts, axis=-1), None, None]
    if bias is not None:
        results[2] = grad.sum(axis=axes, dtype=np.float64)
    if state is not None:
        results[3] = sum_to(of_padded[..., : width - 1, :], arrays["state"].shape)
    # through the dtype of the computation, as everywhere: the result of halves is the one of float32, rounded
    rounded = (None if x is None else x.astype(wide, copy=False).astype(dtype, copy=False) for x in results)
    of_x, of_weight, of_bias, of_state = rounded
    assert of_x is not None
    assert of_weight is not None
    return of_x, of_weight, of_bias, of_state
