"""Gradients of attention, derivatives in a direction, and the gradients of these."""

from __future__ import annotations

from typing import Any, Unpack

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .._input.contexts import in_default_mode
from .._input.objects import Stored
from .._input.types import Alignment, AttentionGradients, AttentionTangents, LseDType
from ._options import AttentionOptions, TangentOptions, implemented_in_c

__all__ = ["attention_backward", "attention_jvp", "attention_jvp_backward"]


@in_default_mode
@np.errstate(all="ignore")
def sum_gradients(
    gradients: list[Any], shapes: list[tuple[int, ...]], dtype: np.dtype[Any], tokens_first: bool
) -> AttentionGradients:
    """Return each gradient in the shape of its argument; the gradients of query, key, value and gate in dtype.

    A gate may be one number for all tokens and heads, whose sum has the same order in both layouts.
    """
    if tokens_first and gradients[-1] is not None and gradients[-1].shape != shapes[-1]:
        # NumPy adds in the order of memory
        gradients[-1] = np.ascontiguousarray(gradients[-1].swapaxes(-3, -2)).swapaxes(-3, -2)
    pairs = zip(gradients, shapes, strict=True)
    sums = AttentionGradients(*(None if gradient is None else sum_to(gradient, shape) for gradient, shape in pairs))
    stored = {name: getattr(sums, name) for name in ("query", "key", "value", "gate")}
    return sums._replace(**{n: x if x is None else x.astype(dtype, copy=False) for n, x in stored.items()})


def sum_to(gradient: NDArray[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    """Sum over the axes along which an argument of this shape was broadcast."""
    if gradient.shape == shape:
        return gradient
    missing = gradient.ndim - len(shape)
    sizes = zip(gradient.shape[missing:], shape, strict=True)
    axes = (*range(missing), *(missing + i for i, (full, own) in enumerate(sizes) if full != own))
    return np.asarray(gradient.sum(axis=axes)).reshape(shape)


@implemented_in_c
def attention_backward(  # type: ignore[empty-body]
    grad_out: ArrayLike,
    query: ArrayLike,
    key: Stored,
    value: Stored,
    out: ArrayLike,
    lse: ArrayLike,
    *,
    attn_mask: ArrayLike | None = None,
    dropout_p: float = 0.0,
    is_causal: Alignment = False,
    grad_lse: ArrayLike | None = None,
    merged: bool = False,
    **options: Unpack[AttentionOptions],
) -> AttentionGradients:
    r"""Return the gradients of attention's inputs, given the gradients of its output and, if wanted, log-sum-exp.

    The weights are computed again, block by block, from query, key and the log-sum-exp of the forward pass; their
    matrix is never held as a whole.

    Parameters
    ----------
    grad_out : array_like, shape (..., T_q, d_v)
        Gradient of the output.
    query : array_like, shape (..., T_q, head_dim)
        This and every other argument of `scaled_dot_product_attention` must be the same as in the forward pass.
    out : array_like, shape (..., T_q, d_v)
        The output of the forward pass. For halves it may be float32, not yet rounded, which makes the gradients of
        query and key more exact: the output of the same call with float32 inputs.
    lse : array_like, shape (..., T_q)
        The log-sum-exp of the forward pass (``return_lse=True``). float64 makes the gradients of float32 and halves
        more exact: ``return_lse=np.float64``.

    Returns
    -------
    AttentionGradients
        Gradients of query, key, value, bias, sinks and gate, each in the shape of its argument: summed over broadcast
        axes, and for key-value heads over their group. The dtype is the dtype of the output; for halves, bias and sinks
        have float32. `bias` is the gradient of the argument bias if that was given, else of a float attn_mask.

    Other Parameters
    ----------------
    layout : {"bhtd", "bthd"}
        Order of heads and tokens in query, key, value, their gradients and the output.
    query_seq_lengths, key_value_seq_lengths : int or array_like of int, optional
        Numbers of valid queries and keys. Gradients of the others are 0.
    key_value_seq_starts : int or array_like of int, optional
        Index of the first valid key: padding on the left. Gradients of the keys before it are 0.
    key_indices : array_like of int, shape (..., T_q, n) or (..., 1, n), optional
        The keys that each query saw, -1 for none. The gradients of a list's keys are added up in key's and value's.
    compute_dtype : {None, "bfloat16", "bfloat16_tiles"}
        As in scaled_dot_product_attention. The gradients are computed in float32, from query, key and value rounded to
        bfloat16.
    rng : int or TorchGenerator
        Draws the mask of the forward pass again: the int that the forward pass got, its ``dropout_seed``, or a
        `TorchGenerator` in its state before the forward pass; it advances as it did there. Ignored without dropout.
    grad_lse : array_like, shape (..., T_q), optional
        Gradient of the log-sum-exp, for losses that depend on it: z-loss, and results that were merged by
        `merge_attention`. Any dtype that attention takes. None means 0.
    merged : bool
        Whether out and lse are results of `merge_attention`, which count keys of other calls, too. The weights of these
        keys then sum to less than 1, and are not checked.

    Raises
    ------
    TypeError, ValueError
        As for `scaled_dot_product_attention`; also if grad_out, grad_lse, out or lse has another shape than in the
        forward pass, if rng cannot repeat the draws of dropout, or if out and lse do not belong to the other arguments,
        because an option of the forward pass is missing.

    See Also
    --------
    scaled_dot_product_attention : The forward pass; ``return_lse=True`` returns the log-sum-exp.
    softmax_backward : The gradient of the softmax alone.
    MultiHeadAttention : A layer with a method ``backward``.
    cattn.reference.attention_backward : The same in plain NumPy.

    Notes
    -----
    With weights :math:`w`, scores :math:`s`, and the gradients :math:`g` of the output and :math:`h` of the log-sum-exp
    (0 without grad_lse):

    .. math::

       \text{grad value}_j &= \sum_i w_{ij} g_i \\
       \frac{\partial L}{\partial s_{ij}} &= w_{ij} \left(g_i \cdot v_j - g_i \cdot \text{out}_i + h_i\right) \\
       \text{grad query}_i &= \text{scale} \sum_j \frac{\partial L}{\partial s_{ij}} k_j, \qquad
       \text{grad key}_j = \text{scale} \sum_i \frac{\partial L}{\partial s_{ij}} q_i

    With a gate, out is the gated output, and so are the gradients: with its sigmoid G, :math:`g_i G_i` takes the place
    of :math:`g_i` everywhere but beside out, and the gradient of the gate is :math:`g_i \, \text{out}_i (1 - G_i)`.

    A hidden key and its value have no influence on the gradient of a query, nor has the query on their gradients,
    whatever they hold: NaN and infinity in a hidden key do not spread. A query that sees no key has gradient 0,
    whatever grad_lse holds there; with sinks, its lse is the sink, whose gradient includes its grad_lse. A score of
    -inf has weight 0 and gradient 0, whose product with an infinite query or key is NaN. The gradients have the same
    bits for every number of threads and instruction set with FMA.

    Unless they are merged, out and lse are checked as the gradients are computed: in each row the weights computed from
    the lse must sum to 1, with the weight of a sink, and :math:`w_{ij} \, g_i \cdot v_j` to :math:`g_i \cdot
    \text{out}_i`. So a forgotten option is an error. What other software has rounded to bfloat16 passes: the logarithm
    of the sum may be off by :math:`2^{-7} (1 + |\text{lse}| + \log T_k)`, and the second sum by as large a part of its
    terms. So small changes pass, too, and a forgotten dropout_p shows in rows that see few keys.

    The method is from FlashAttention-2 (Dao, 2023): one pass of five products for each pair of blocks, with weights
    computed from the log-sum-exp and ``sum(grad_out * out)`` for the sum over a row.

    Examples
    --------
    >>> import numpy as np
    >>> import cattn
    >>> query = np.array([[1.0, 0.0], [0.0, 1.0]])
    >>> key = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    >>> value = np.array([[3.0], [6.0], [9.0]])
    >>> result = cattn.scaled_dot_product_attention(query, key, value, return_lse=True)
    >>> grads = cattn.attention_backward(np.ones((2, 1)), query, key, value, result.out, result.lse)
    >>> grads.query.round(3)
    array([[0.   , 0.851],
           [0.173, 0.505]])
    """


@implemented_in_c
def attention_jvp(  # type: ignore[empty-body]
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    query_tangent: ArrayLike | None = None,
    key_tangent: ArrayLike | None = None,
    value_tangent: ArrayLike | None = None,
    *,
    attn_mask: ArrayLike | None = None,
    dropout_p: float = 0.0,
    is_causal: Alignment = False,
    bias_tangent: ArrayLike | None = None,
    sinks_tangent: ArrayLike | None = None,
    return_lse: bool | LseDType = False,
    out: ArrayLike | None = None,
    lse: ArrayLike | None = None,
    **options: Unpack[TangentOptions],
) -> AttentionTangents:
    r"""Return attention, and its derivative in the direction of the tangents: forward mode.

    Attention is computed first, then its derivative, block by block from the log-sum-exp; the matrix of weights is
    never held as a whole.

    Parameters
    ----------
    query : array_like, shape (..., T_q, head_dim)
        This and every other argument of `scaled_dot_product_attention` has the same meaning there.
    key : array_like, shape (..., T_k, head_dim)
        Keys.
    value : array_like, shape (..., T_k, d_v)
        Values.
    query_tangent, key_tangent, value_tangent : array_like, optional
        The direction: a tangent has the shape of its input, and no wider dtype. None is 0, and costs nothing.
    dropout_p : float
        Probability that a weight is dropped. Then rng must be an int.

    Returns
    -------
    AttentionTangents
        Output and its derivative in the dtype of the output, and with return_lse the log-sum-exp and its derivative.

    Other Parameters
    ----------------
    layout : {"bhtd", "bthd"}
        Order of heads and tokens in query, key, value, their tangents and the outputs.
    alibi_slopes, sinks : array_like of float, shape (H,) or (..., H), optional
        One number for each query head: the slope of ALiBi, which has no tangent, and one extra logit.
    rng : int
        Seed of the dropout mask. Ignored without dropout.
    bias_tangent : array_like, optional
        Tangent of bias or, where there is none, of a float attn_mask. None is 0.
    sinks_tangent : array_like, optional
        Tangent of sinks. None is 0.
    return_lse : bool or dtype
        Also return the log-sum-exp, in this dtype, and its derivative.
    out : array_like, optional
        The output of a forward pass with the same arguments, which is then not computed again if lse is given, too.
    lse : array_like, optional
        The log-sum-exp of that pass.

    Raises
    ------
    TypeError, ValueError
        As for `scaled_dot_product_attention`; also if a tangent has not the shape of its input, or rng is no int.

    See Also
    --------
    attention_jvp_backward : The gradients of the derivative.
    attention_backward : Reverse mode.
    cattn.reference.attention_jvp : The same in plain NumPy.

    Notes
    -----
    With weights :math:`w`, and dots for tangents:

    .. math::

       \dot s_{ij} &= \text{scale} \left(\dot q_i \cdot k_j + q_i \cdot \dot k_j\right) + \dot b_{ij} \\
       \dot{\text{lse}}_i &= \sum_j w_{ij} \dot s_{ij} \\
       \dot{\text{out}}_i &= \sum_j w_{ij} \left(\dot s_{ij} v_j + \dot v_j\right)
           - \dot{\text{lse}}_i \, \text{out}_i

    A hidden key has no influence, whatever it and its tangents hold. A row has the same bits for every number of
    threads, batch, and instruction set with FMA.

    Examples
    --------
    >>> import numpy as np
    >>> import cattn
    >>> x = np.array([[1.0, 0.0], [0.0, 1.0]])
    >>> result = cattn.attention_jvp(x, x, x, value_tangent=np.ones((2, 2)))
    >>> result.out_tangent
    array([[1., 1.],
           [1., 1.]])
    >>> small = 1e-6
    >>> moved = cattn.scaled_dot_product_attention(x + small * x, x, x)
    >>> ((moved - result.out) / small).round(4)
    array([[ 0.1564, -0.1564],
           [-0.1564,  0.1564]])
    >>> cattn.attention_jvp(x, x, x, query_tangent=x).out_tangent.round(4)
    array([[ 0.1564, -0.1564],
           [-0.1564,  0.1564]])
    """


@implemented_in_c
def attention_jvp_backward(  # type: ignore[empty-body]
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
    is_causal: Alignment = False,
    bias_tangent: ArrayLike | None = None,
    sinks_tangent: ArrayLike | None = None,
    grad_lse_tangent: ArrayLike | None = None,
    **options: Unpack[TangentOptions],
) -> AttentionGradients:
    r"""Return the gradients of attention's inputs, given the gradients of the derivatives that `attention_jvp` returns.

    These are second derivatives. Two uses of them:

    * Reverse mode over forward mode, of a function of ``out_tangent`` and ``lse_tangent``. The gradients of the
      tangents are ``attention_backward(grad_out_tangent, ..., grad_lse=grad_lse_tangent)``.
    * The derivative of `attention_backward` in the direction of the tangents, with its ``grad_out`` and ``grad_lse`` in
      the place of grad_out_tangent and grad_lse_tangent: a product of a Hessian and a vector.

    Parameters
    ----------
    grad_out_tangent : array_like, shape (..., T_q, d_v)
        Gradient of out_tangent.
    query : array_like, shape (..., T_q, head_dim)
        This and every other argument of `attention_jvp` must be the same as there.
    out : array_like, shape (..., T_q, d_v)
        This and the next three are the results of `attention_jvp` with ``return_lse=True``.
    lse : array_like, shape (..., T_q)
        The log-sum-exp. float64 makes the gradients of float32 and halves more exact.
    out_tangent : array_like, shape (..., T_q, d_v)
        The derivative of the output.
    lse_tangent : array_like, shape (..., T_q)
        The derivative of the log-sum-exp.

    Returns
    -------
    AttentionGradients
        Gradients of query, key, value, bias and sinks; see `attention_backward`.

    Other Parameters
    ----------------
    grad_lse_tangent : array_like, shape (..., T_q), optional
        Gradient of lse_tangent. None is 0.

    Raises
    ------
    TypeError, ValueError
        As for `attention_backward` and `attention_jvp`; also if out_tangent and lse_tangent are not the derivatives in
        the direction of these tangents.

    See Also
    --------
    attention_jvp : The derivatives.
    cattn.reference.attention_jvp_backward : The same in plain NumPy.

    Notes
    -----
    With weights :math:`w`, dots for tangents, and the gradients :math:`g` of the output's tangent and :math:`h` of the
    log-sum-exp's:

    .. math::

       a_{ij} &= g_i \cdot v_j - g_i \cdot \text{out}_i + h_i \\
       \frac{\partial L}{\partial \dot s_{ij}} &= w_{ij} a_{ij} \\
       \frac{\partial L}{\partial s_{ij}} &= w_{ij} \left((\dot s_{ij} - \dot{\text{lse}}_i) \, a_{ij}
           + g_i \cdot \dot v_j - g_i \cdot \dot{\text{out}}_i\right) \\
       \text{grad query}_i &= \text{scale} \sum_j \frac{\partial L}{\partial s_{ij}} k_j
           + \frac{\partial L}{\partial \dot s_{ij}} \dot k_j \\
       \text{grad value}_j &= \sum_i w_{ij} (\dot s_{ij} - \dot{\text{lse}}_i) \, g_i

    Hidden pairs, bits and the check of out and lse are as for `attention_backward`. out_tangent and lse_tangent are
    checked against the tangents of the inputs, row by row, up to 2**-6 of their terms: a forgotten tangent is an error,
    but one that changes no row by more than that is not seen.

    Examples
    --------
    The product of the Hessian of ``sum(out ** 2) / 2`` in the query and a direction, against a difference of gradients:

    >>> import numpy as np
    >>> import cattn
    >>> x, v = np.array([[1.0, 0.0], [0.0, 1.0]]), np.array([[0.0, 1.0], [1.0, 0.0]])
    >>> def gradient(q):
    ...     r = cattn.scaled_dot_product_attention(q, x, x, return_lse=True)
    ...     return cattn.attention_backward(r.out, q, x, x, r.out, r.lse).query
    >>> r = cattn.attention_jvp(x, x, x, v, return_lse=True)
    >>> second = cattn.attention_jvp_backward(r.out, x, x, x, *(r.out, r.lse, r.out_tangent, r.lse_tangent), v)
    >>> product = second.query + cattn.attention_backward(r.out_tangent, x, x, x, r.out, r.lse).query
    >>> difference = (gradient(x + 1e-4 * v) - gradient(x - 1e-4 * v)) / 2e-4
    >>> np.allclose(product, difference, atol=1e-7)
    True
    """
