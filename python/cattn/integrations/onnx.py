"""ONNX's operators of attention: as functions, and for its reference evaluator (extra "onnx").

They are ``Attention`` (opsets 23 to 25), and ``LinearAttention`` and ``CausalConvWithState`` (opset 27).

>>> import onnx.reference  # doctest: +SKIP
>>> from cattn.integrations.onnx import Attention
>>> session = onnx.reference.ReferenceEvaluator(model, new_ops=[Attention])  # doctest: +SKIP
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

import cattn
from cattn import attention_weights, functional, scaled_dot_product_attention
from cattn._input.arrays import is_bfloat16, refuse_masked
from cattn._input.names import no_name, public_names, with_hints

try:
    from onnx import TensorProto
    from onnx.reference.op_run import OpRun
except ImportError as error:
    raise ImportError("cattn.integrations.onnx needs onnx: pip install 'cattn[onnx]'") from error

__all__ = [
    "Attention",
    "AttentionOutputs",
    "CausalConvWithState",
    "LinearAttention",
    "attention",
    "causal_conv_with_state",
    "linear_attention",
]
__dir__ = public_names(globals())
__getattr__ = no_name(globals())

Array = NDArray[Any]
STAGES: tuple[Literal["qk", "softcap", "mask", "softmax"], ...] = ("qk", "softcap", "mask", "softmax")


class AttentionOutputs(NamedTuple):
    """The four outputs of the operator. The last one is None if it was not requested.

    Attributes
    ----------
    Y : ndarray, shape (B, H, T_q, d_v) or (B, T_q, H * d_v)
        The attention output, with as many dimensions as Q.
    present_key, present_value : ndarray, shape (B, H_kv, T_k, head_dim) and (B, H_kv, T_k, d_v)
        Past and new keys and values, in the dtypes of Q and V. Without a past they are K and V, or views of them.
    qk_matmul_output : ndarray, shape (B, H, T_q, T_k), or None
        Scores or weights after the step that ``qk_matmul_output_mode`` names.
    """

    Y: Array
    present_key: Array
    present_value: Array
    qk_matmul_output: Array | None = None


def attention(
    Q: ArrayLike,
    K: ArrayLike,
    V: ArrayLike,
    attn_mask: ArrayLike | None = None,
    past_key: ArrayLike | None = None,
    past_value: ArrayLike | None = None,
    nonpad_kv_seqlen: ArrayLike | None = None,
    *,
    is_causal: int = 0,
    q_num_heads: int | None = None,
    kv_num_heads: int | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    softmax_precision: int | None = None,
    qk_matmul_output_mode: int = 0,
    left_window_size: int = -1,
    right_window_size: int = -1,
    return_qk: bool = False,
) -> AttentionOutputs:
    """Compute ONNX's ``Attention`` on arrays.

    Parameters
    ----------
    Q : array_like, shape (B, H, T_q, head_dim) or (B, T_q, H * head_dim)
        Queries, of float16, bfloat16 (``ml_dtypes``), float32 or float64.
    K, V : array_like, shape (B, H_kv, T, head_dim) or (B, T, H_kv * head_dim)
        The new keys and values. The rows of V may have another length.
    attn_mask : array_like, optional
        Boolean (True: visible) or float (added). Broadcasts to (B, H, T_q, T_k), except that a
        shorter last axis, also of length 1, hides the keys after its end.
    past_key, past_value : array_like, shape (B, H_kv, T_past, head_dim), optional
        The keys and values before K and V. Give both or none.
    nonpad_kv_seqlen : array_like of int, shape (B,), optional
        Number of keys that exist in each batch entry, if K and V are a whole cache.
    is_causal : int
        1: query i sees the keys j <= i + offset. The offset is T_past, or nonpad_kv_seqlen - T_q, or 0.
    q_num_heads, kv_num_heads : int, optional
        Needed for inputs of three dimensions.
    scale : float, optional
        Default 1 / sqrt(head_dim).
    softcap : float
        Bound of the scaled scores. 0: no bound.
    softmax_precision : int, optional
        A ``TensorProto`` type. DOUBLE computes in float64. Inputs narrower than float32 are computed in float32.
    qk_matmul_output_mode : {0, 1, 2, 3}
        The stage of ``qk_matmul_output``: scaled scores, scores after the cap, scores with all masks, or weights.
    left_window_size, right_window_size : int
        Keys seen before and after a query's position, -1: no bound.
    return_qk : bool
        Whether to return ``qk_matmul_output``.

    Returns
    -------
    AttentionOutputs
        In the dtype of Q, and present_value in the dtype of V.

    Raises
    ------
    TypeError, ValueError
        As `cattn.scaled_dot_product_attention`; also for past_key without past_value or the reverse, for both together
        with nonpad_kv_seqlen, and for inputs that do not have three or four dimensions.

    Notes
    -----
    A query that sees no key gets 0 in Y and in the weights, as the specification requires. Mode 0 gives scores before
    the cap, as in the specification and in onnxruntime; the reference implementation of onnx gives them after the cap.

    Examples
    --------
    >>> import numpy as np
    >>> from cattn.integrations.onnx import attention
    >>> x = np.zeros((1, 3, 8), np.float32)
    >>> attention(x, x, x, q_num_heads=4, kv_num_heads=2, is_causal=1).Y.shape
    Traceback (most recent call last):
        ...
    ValueError: key has head_dim 4, query has 2
    >>> attention(x, x[..., :4], x[..., :4], q_num_heads=4, kv_num_heads=2, is_causal=1).Y.shape
    (1, 3, 8)
    """
    if qk_matmul_output_mode not in range(len(STAGES)):
        raise ValueError(f"qk_matmul_output_mode must be 0, 1, 2 or 3, got {qk_matmul_output_mode}")
    dtype, value_dtype = np.asarray(Q).dtype, np.asarray(V).dtype
    q, k, v = (_computable(a, name, softmax_precision) for a, name in ((Q, "Q"), (K, "K"), (V, "V")))
    joined = q.ndim == 3
    q = _split_heads(q, q_num_heads, "Q", "q_num_heads")
    k, v = (_split_heads(a, kv_num_heads, name, "kv_num_heads") for a, name in ((k, "K"), (v, "V")))
    offset: Any = 0
    if (past_key is None) != (past_value is None):
        raise ValueError("past_key and past_value must be given together")
    if past_key is not None and past_value is not None:
        if nonpad_kv_seqlen is not None:
            raise ValueError("nonpad_kv_seqlen must not be given together with past_key and past_value")
        offset = -k.shape[2]
        k = _append_to_past(past_key, k, "past_key", softmax_precision)
        v = _append_to_past(past_value, v, "past_value", softmax_precision)
        offset += k.shape[2]
    elif nonpad_kv_seqlen is not None:
        lengths = np.asarray(nonpad_kv_seqlen)
        if lengths.dtype.kind not in "iu":
            raise TypeError(f"nonpad_kv_seqlen must hold integers, got dtype {lengths.dtype}")
        offset = lengths.astype(np.int64) - q.shape[2]

    options: dict[str, Any] = {
        "attn_mask": _whole_mask(attn_mask, k.shape[2]),
        "is_causal": "upper_left" if is_causal else False,
        "scale": scale,
        "softcap": softcap,
        "query_offset": offset,
        "key_value_seq_lengths": nonpad_kv_seqlen,
        "window_size": (left_window_size, right_window_size),
    }
    y = scaled_dot_product_attention(q, k, v, **options)
    if joined:
        y = y.swapaxes(1, 2).reshape(y.shape[0], y.shape[2], y.shape[1] * y.shape[3])
    qk = None
    if return_qk:
        qk = attention_weights(q, k, stage=STAGES[qk_matmul_output_mode], **options).astype(dtype)
    present_key, present_value = k.astype(dtype, copy=False), v.astype(value_dtype, copy=False)
    return AttentionOutputs(y.astype(dtype), present_key, present_value, qk)


def _computable(array: ArrayLike, name: str, softmax_precision: int | None) -> Array:
    """Return the array, in float64 if softmax_precision is DOUBLE."""
    refuse_masked(array, name)
    given = np.asarray(array)
    if given.dtype not in (np.float16, np.float32, np.float64) and not is_bfloat16(given.dtype):
        raise TypeError(f"{name} must be float16, bfloat16, float32 or float64, got {given.dtype}")
    return given.astype(np.float64) if softmax_precision == TensorProto.DOUBLE else given


def _split_heads(array: Array, num_heads: int | None, name: str, argument: str) -> Array:
    """Return (B, T, H * D) as (B, H, T, D)."""
    if array.ndim == 4:
        return array
    if array.ndim != 3:
        raise ValueError(f"{name} must have 3 or 4 dimensions, got {array.ndim}")
    if num_heads is None or not hasattr(num_heads, "__index__") or num_heads < 1 or array.shape[2] % num_heads:
        raise ValueError(f"{argument} must divide the last axis of {name}, {array.shape[2]}, got {num_heads}")
    return array.reshape(*array.shape[:2], num_heads, array.shape[2] // num_heads).swapaxes(1, 2)


def _append_to_past(past: ArrayLike, new: Array, name: str, softmax_precision: int | None) -> Array:
    """Return the keys or values of the past, followed by the new ones."""
    given = _computable(past, name, softmax_precision)
    wanted = (*new.shape[:2], "T_past", new.shape[3])
    if given.ndim != 4 or (*given.shape[:2], "T_past", given.shape[3]) != wanted:
        raise ValueError(f"{name} must have shape ({', '.join(map(str, wanted))}), got {given.shape}")
    return np.concatenate([given, new], axis=2)


def _whole_mask(mask: ArrayLike | None, seqlen_k: int) -> Array | None:
    """Return the mask with a last axis of all keys. Keys after the end of the mask are hidden."""
    if mask is None:
        return None
    refuse_masked(mask, "attn_mask")
    given = np.asarray(mask)
    missing = seqlen_k - given.shape[-1] if given.ndim else 0
    if missing <= 0 or given.dtype.kind in "iu":  # attention raises the error for integers
        return given
    hidden = False if given.dtype == np.bool_ else -np.inf
    return np.pad(given, [(0, 0)] * (given.ndim - 1) + [(0, missing)], constant_values=hidden)


class Attention(OpRun):  # type: ignore[misc, unused-ignore]
    """The operator for ``onnx.reference.ReferenceEvaluator(model, new_ops=[Attention])``, in place of its own."""

    op_domain = ""

    def _run(self, Q: Array, K: Array, V: Array, *optional: Array | None, **attributes: Any) -> tuple[Any, ...]:
        names = self.onnx_node.output
        wanted = len(names) > 3 and bool(names[3])
        mask, past_key, *rest = (*optional, None, None)[: max(len(optional), 2)]
        if mask is not None and mask.ndim and mask.shape[-1] == 1 and self.run_params["opsets"].get("", 25) < 24:
            # opset 23 broadcasts such a mask; from opset 24 on, the keys after its end are hidden
            seqlen_k = K.shape[-2] + (0 if past_key is None else past_key.shape[-2])
            mask = np.broadcast_to(mask, (*mask.shape[:-1], seqlen_k))
        outputs = attention(Q, K, V, mask, past_key, *rest, **attributes, return_qk=wanted)
        # the evaluator needs an array for each output, also for one without a name
        return tuple(np.empty(0, Q.dtype) if output is None else output for output in outputs[: len(names)])


# ---- linear attention ------------------------------------------------------------------------------------------------
# The rules of the operator, and whether they have decay and beta.
_RULES = {"linear": (False, False), "gated": (True, False), "delta": (False, True), "gated_delta": (True, True)}


@with_hints
def linear_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    past_state: ArrayLike | None = None,
    decay: ArrayLike | None = None,
    beta: ArrayLike | None = None,
    *,
    q_num_heads: int,
    kv_num_heads: int,
    scale: float | None = None,
    update_rule: str = "gated_delta",
    chunk_size: int = 64,
) -> tuple[Array, Array]:
    """Compute ONNX's ``LinearAttention`` on arrays.

    Parameters
    ----------
    query : array_like, shape (B, T, q_num_heads * d_k)
        Queries, of float16, bfloat16 (``ml_dtypes``), float32 or float64.
    key, value : array_like, shape (B, T, kv_num_heads * d_k) and (B, T, kv_num_heads * d_v)
        Keys and values.
    past_state : array_like, shape (B, kv_num_heads, d_k, d_v), optional
        The state before the first token; the default is 0.
    decay : array_like, shape (B, T, kv_num_heads) or (B, T, kv_num_heads * d_k), optional
        The logarithm of the factor of the state, for the rules "gated" and "gated_delta".
    beta : array_like, shape (B, T, kv_num_heads) or (B, T, 1), optional
        The rate of the update, for the rules "delta" and "gated_delta".
    q_num_heads, kv_num_heads : int
        The numbers of heads; the first is a multiple of the second.
    scale : float, optional
        None and 0 are 1 / sqrt(d_k).
    update_rule : {"linear", "gated", "delta", "gated_delta"}
        Which of decay and beta are there.
    chunk_size : int
        Ignored: tokens are computed one after the other.

    Returns
    -------
    output : ndarray, shape (B, T, q_num_heads * d_v)
        In the dtype of query.
    present_state : ndarray, shape (B, kv_num_heads, d_k, d_v)
        In the dtype of past_state, or of query without it.

    Raises
    ------
    TypeError, ValueError
        As `cattn.linear_attention`; also for arrays that the rule forbids or lacks, and for other shapes.

    Examples
    --------
    >>> import numpy as np
    >>> from cattn.integrations.onnx import linear_attention
    >>> x = np.ones((1, 3, 8), np.float32)
    >>> output, state = linear_attention(x, x, x, q_num_heads=4, kv_num_heads=4, update_rule="linear")
    >>> output.shape, state.shape
    ((1, 3, 8), (1, 4, 2, 2))
    """
    if update_rule not in _RULES:
        raise ValueError(f"update_rule must be one of {', '.join(map(repr, _RULES))}, got {update_rule!r}")
    for name, array, wanted in zip(("decay", "beta"), (decay, beta), _RULES[update_rule], strict=True):
        if (array is not None) != wanted:
            raise ValueError(f"update_rule {update_rule!r} {'needs' if wanted else 'forbids'} {name}")
    q = _with_heads(query, q_num_heads, "query", "q_num_heads")
    k, v = (_with_heads(a, kv_num_heads, name, "kv_num_heads") for a, name in ((key, "key"), (value, "value")))
    if q_num_heads % kv_num_heads:
        raise ValueError(f"q_num_heads, {q_num_heads}, must be a multiple of kv_num_heads, {kv_num_heads}")
    tokens, d_k, d_v = q.shape[:2], k.shape[-1], v.shape[-1]
    for name, array in (("key", k), ("value", v)):
        if array.shape[:2] != tokens:
            raise ValueError(f"{name} must have the batch and the tokens of query, {tokens}, got {array.shape[:2]}")
    state = _of_shape(past_state, "past_state", (len(q), kv_num_heads, d_k, d_v))
    factors = _of_shape(decay, "decay", (*tokens, kv_num_heads), (*tokens, kv_num_heads * d_k))
    if factors is not None and factors.shape[2] != kv_num_heads:  # a number for each row of the state
        factors = factors.reshape(*tokens, kv_num_heads, d_k)
    rates = _of_shape(beta, "beta", (*tokens, kv_num_heads), (*tokens, 1))
    out, last = cattn.linear_attention(
        q, k, v, decay=factors, beta=rates, state=state, scale=scale or None, layout="bthd", return_state=True
    )
    return out.reshape(*tokens, q_num_heads * d_v).astype(q.dtype, copy=False), last.astype(
        q.dtype if state is None else state.dtype
    )


def _of_shape(array: ArrayLike | None, name: str, *shapes: tuple[int, ...]) -> Array | None:
    """Return an optional array, which must have one of these shapes: the operators do not broadcast them."""
    given = None if array is None else _computable(array, name, None)
    if given is not None and given.shape not in shapes:
        raise ValueError(f"{name} must have shape {' or '.join(map(str, dict.fromkeys(shapes)))}, got {given.shape}")
    return given


def _with_heads(array: ArrayLike, num_heads: int, name: str, argument: str) -> Array:
    """Return (B, T, H * D) as (B, T, H, D)."""
    given = _computable(array, name, None)
    if given.ndim != 3:
        raise ValueError(f"{name} must have 3 dimensions, got {given.ndim}")
    return _split_heads(given, num_heads, name, argument).swapaxes(1, 2)


class LinearAttention(OpRun):  # type: ignore[misc, unused-ignore]
    """The operator for ``onnx.reference.ReferenceEvaluator(model, new_ops=[LinearAttention])``."""

    op_domain = ""

    def _run(self, *inputs: Array | None, **attributes: Any) -> tuple[Array, Array]:
        return linear_attention(*inputs, **attributes)  # type: ignore[arg-type]


# ---- the short convolution -------------------------------------------------------------------------------------------
def causal_conv_with_state(
    input: ArrayLike,  # noqa: A002 - ONNX's name
    weight: ArrayLike,
    bias: ArrayLike | None = None,
    past_state: ArrayLike | None = None,
    *,
    activation: str = "none",
) -> tuple[Array, Array]:
    """Compute ONNX's ``CausalConvWithState`` on arrays.

    Parameters
    ----------
    input : array_like, shape (B, C, T)
        T tokens of C channels, of float16, bfloat16 (``ml_dtypes``), float32 or float64.
    weight : array_like, shape (C, 1, K)
        The factors of the last K tokens.
    bias : array_like, shape (C,), optional
        Added to the sum.
    past_state : array_like, shape (B, C, K - 1), optional
        The tokens before the first one.
    activation : {"none", "silu", "swish"}
        A function of the result.

    Returns
    -------
    output : ndarray, shape (B, C, T)
        In the dtype of input.
    present_state : ndarray, shape (B, C, K - 1)
        The last K - 1 tokens.

    Raises
    ------
    TypeError, ValueError
        As `cattn.functional.causal_conv`; also for other activations and shapes.

    Examples
    --------
    >>> from cattn.integrations.onnx import causal_conv_with_state
    >>> output, state = causal_conv_with_state([[[1.0, 2.0, 3.0]]], [[[10.0, 1.0]]])
    >>> output, state
    (array([[[ 1., 12., 23.]]]), array([[[3.]]]))
    """
    if activation not in ("none", "silu", "swish"):
        raise ValueError(f"activation must be 'none', 'silu' or 'swish', got {activation!r}")
    named = {"input": input, "weight": weight, "bias": bias, "past_state": past_state}
    x, factors, added, past = (None if a is None else _computable(a, name, None) for name, a in named.items())
    assert x is not None and factors is not None  # noqa: PT018
    for name, array, shape in (("input", x, "B, C, T"), ("weight", factors, "C, 1, K")):
        if array.ndim != 3 or (name == "weight" and array.shape[1] != 1):
            raise ValueError(f"{name} must have shape ({shape}), got {array.shape}")
    _of_shape(past_state, "past_state", (len(x), x.shape[1], factors.shape[2] - 1))
    out, last = functional.causal_conv(
        x.swapaxes(1, 2), factors[:, 0], added, state=None if past is None else past.swapaxes(1, 2),
        activation=None if activation == "none" else "silu", return_state=True,
    )  # fmt: skip
    output, present = (np.ascontiguousarray(y.swapaxes(1, 2)).astype(x.dtype, copy=False) for y in (out, last))
    return output, present


class CausalConvWithState(OpRun):  # type: ignore[misc, unused-ignore]
    """The operator for ``onnx.reference.ReferenceEvaluator(model, new_ops=[CausalConvWithState])``."""

    op_domain = ""

    def _run(self, *inputs: Array | None, **attributes: Any) -> tuple[Array, Array]:
        return causal_conv_with_state(*inputs, **attributes)  # type: ignore[arg-type]
