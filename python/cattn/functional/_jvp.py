"""Forward mode of attention and its gradients: signatures and documentation of the C functions."""

from __future__ import annotations

from typing import Unpack

from numpy.typing import ArrayLike

from .._input.types import Alignment, AttentionGradients, AttentionTangents, LseDType
from ._options import TangentOptions
from ._signature import implemented_in_c

__all__ = ["attention_jvp", "attention_jvp_backward"]


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
    attn_mask : array_like, optional
        Boolean (True where the key is visible) or float (added).
    dropout_p : float
        Probability that a weight is dropped. Then rng must be an int.
    is_causal : bool or {"upper_left", "lower_right"}
        Which keys a query sees.

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
    key : array_like, shape (..., T_k, head_dim)
        Keys.
    value : array_like, shape (..., T_k, d_v)
        Values.
    out : array_like, shape (..., T_q, d_v)
        This and the next three are the results of `attention_jvp` with ``return_lse=True``.
    lse : array_like, shape (..., T_q)
        The log-sum-exp. float64 makes the gradients of float32 and halves more exact.
    out_tangent : array_like, shape (..., T_q, d_v)
        The derivative of the output.
    lse_tangent : array_like, shape (..., T_q)
        The derivative of the log-sum-exp.
    query_tangent, key_tangent, value_tangent : array_like, optional
        The direction. None is 0, and costs nothing.
    attn_mask : array_like, optional
        Boolean (True where the key is visible) or float (added).
    dropout_p : float
        Probability that a weight is dropped. Then rng must be an int.
    is_causal : bool or {"upper_left", "lower_right"}
        Which keys a query sees.

    Returns
    -------
    AttentionGradients
        Gradients of query, key, value, bias and sinks; see `attention_backward`.

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
