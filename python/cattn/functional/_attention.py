"""Attention in one call, causal or not, and its weights: signatures, documentation, and two helpers that C calls."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Unpack, overload

from numpy.typing import ArrayLike, NDArray

from .._input.objects import Stored
from .._input.types import Alignment, AttentionOutput, LseDType, Stage
from ._options import AttentionOptions, ExtraOptions, implemented_in_c

if TYPE_CHECKING:
    from ..cache import KVCache

__all__ = ["attention_weights", "causal_attention", "scaled_dot_product_attention"]


class _Plain(AttentionOptions, total=False):
    """Options of a call that returns an array."""

    return_weights: Literal[False]
    return_lse: Literal[False]
    return_dropout_mask: Literal[False]


class _WithWeights(AttentionOptions, total=False):
    """Options besides return_weights, which the next two lack in the same way."""

    return_lse: bool | LseDType
    return_dropout_mask: bool


class _WithLse(AttentionOptions, total=False):
    return_weights: bool
    return_dropout_mask: bool


class _WithDropoutMask(AttentionOptions, total=False):
    return_weights: bool
    return_lse: bool | LseDType


@overload
def scaled_dot_product_attention(
    query: ArrayLike,
    key: Stored,
    value: Stored,
    attn_mask: ArrayLike | None = ...,
    dropout_p: float = ...,
    is_causal: Alignment = ...,
    *,
    out: NDArray[Any] | None = ...,
    **options: Unpack[_Plain],
) -> NDArray[Any]: ...
@overload
def scaled_dot_product_attention(
    query: ArrayLike,
    key: Stored,
    value: Stored,
    attn_mask: ArrayLike | None = ...,
    dropout_p: float = ...,
    is_causal: Alignment = ...,
    *,
    return_weights: Literal[True],
    out: NDArray[Any] | AttentionOutput | None = ...,
    **options: Unpack[_WithWeights],
) -> AttentionOutput: ...
@overload
def scaled_dot_product_attention(
    query: ArrayLike,
    key: Stored,
    value: Stored,
    attn_mask: ArrayLike | None = ...,
    dropout_p: float = ...,
    is_causal: Alignment = ...,
    *,
    return_lse: Literal[True] | LseDType,
    out: NDArray[Any] | AttentionOutput | None = ...,
    **options: Unpack[_WithLse],
) -> AttentionOutput: ...
@overload
def scaled_dot_product_attention(
    query: ArrayLike,
    key: Stored,
    value: Stored,
    attn_mask: ArrayLike | None = ...,
    dropout_p: float = ...,
    is_causal: Alignment = ...,
    *,
    return_dropout_mask: Literal[True],
    out: NDArray[Any] | AttentionOutput | None = ...,
    **options: Unpack[_WithDropoutMask],
) -> AttentionOutput: ...
@overload
def scaled_dot_product_attention(
    query: ArrayLike,
    key: Stored,
    value: Stored,
    attn_mask: ArrayLike | None = ...,
    dropout_p: float = ...,
    is_causal: Alignment = ...,
    *,
    out: AttentionOutput,
    **options: Unpack[ExtraOptions],
) -> AttentionOutput: ...
@overload
def scaled_dot_product_attention(
    query: ArrayLike,
    key: Stored,
    value: Stored,
    attn_mask: ArrayLike | None = ...,
    dropout_p: float = ...,
    is_causal: Alignment = ...,
    *,
    out: NDArray[Any] | None = ...,
    **options: Unpack[ExtraOptions],
) -> Any: ...
@implemented_in_c
def scaled_dot_product_attention(
    query: ArrayLike,
    key: Stored,
    value: Stored,
    attn_mask: ArrayLike | None = None,
    dropout_p: float = 0.0,
    is_causal: Alignment = False,
    *,
    out: NDArray[Any] | AttentionOutput | None = None,
    **options: Unpack[ExtraOptions],
) -> Any:
    r"""Return softmax(softcap(scale * query @ key.T) + bias) @ value, over the keys that each query may see.

    >>> import numpy as np
    >>> import cattn
    >>> x = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    >>> cattn.scaled_dot_product_attention(x, x, x, is_causal=True).round(2)
    array([[1.  , 0.  ],
           [0.33, 0.67],
           [0.75, 0.75]])

    Most calls need query, key, value, and is_causal or attn_mask; ``return_weights=True`` adds the weights. Up to
    `enable_gqa` the signature is the one of ``torch.nn.functional.scaled_dot_product_attention``. The matrix of scores
    is never held as a whole.

    Parameters
    ----------
    query : array_like, shape (..., T_q, head_dim)
        float16, bfloat16 (of ``ml_dtypes``), float32 or float64, as key and value. Mixed dtypes are converted to the
        widest; booleans and integers to float64. Halves are computed in float32 and the result is rounded once. Leading
        dimensions of the three arrays broadcast. Two dimensions are (T, head_dim), three are (B, T, head_dim), and four
        are (B, H, T, head_dim): with four or more, axis -3 counts heads and axis -2 tokens. Arrays of
        (B, T, H, head_dim), as JAX, Keras and FlashAttention take them, need ``layout="bthd"``: without it they give
        wrong numbers without an error.
    key : array_like or Quantized, shape (..., T_k, head_dim)
        A key-value head may serve several query heads: with H_q a multiple of H_kv, query head h reads head
        ``h // (H_q // H_kv)``. A `Quantized` has int8 or float8_e4m3fn numbers and their scales, as `quantize` and
        `KVCache` make them: the result has the bits of a call with the array of float32 products, which is not made.
    value : array_like or Quantized, shape (..., T_k, d_v)
        d_v may differ from head_dim. It may be a `Quantized`, too.
    attn_mask : array_like, optional
        Boolean: True where the key is visible. Float: added to the scores; -inf hides. Broadcasts to (..., T_q, T_k):
        a mask of padding (B, T_k) is ``mask[:, None, None, :]`` for four dimensions, or key_value_seq_lengths for
        padding on the right, key_value_seq_starts for padding on the left.
    dropout_p : float
        Probability that a weight is dropped, in [0, 1]. The others are divided by 1 - dropout_p. Dropout is
        always applied: pass 0 outside of training.
    is_causal : bool or {"upper_left", "lower_right"}
        Query i sees the keys j <= i ("upper_left", the meaning of True) or j <= i + T_k - T_q ("lower_right": the last
        query sees every key), intersected with attn_mask.

    Returns
    -------
    ndarray, shape (..., T_q, d_v), or AttentionOutput
        The output; with an extra, or with an AttentionOutput as `out`, an `AttentionOutput` whose other fields are
        None. A query that sees no key gets output 0, weights 0 and lse -inf; with sinks, its lse is the sink.

    Other Parameters
    ----------------
    scale : float, optional
        Factor of the scores; finite, may be negative. Default 1 / sqrt(head_dim).
    enable_gqa : bool, optional
        None infers grouped heads from the shapes, False forbids them, True also makes axis -3 of three-dimensional
        arrays the heads.
    layout : {"bhtd", "bthd"}
        Order of heads and tokens in query, key, value and the output. "bthd" is (..., T, H, head_dim), of three or more
        dimensions, of which axis -2 counts heads. Masks, weights and lse always have the heads before the queries.
    bias : array_like of float, optional
        Added to the scaled scores, besides attn_mask; -inf hides. Broadcasts to (..., T_q, T_k).
    query_offset : int or array_like of int, optional
        Position of the first query: with is_causal, query i sees the keys j <= i + query_offset. An array broadcasts to
        the leading dimensions before the heads.
    query_seq_lengths : int or array_like of int, optional
        Number of valid queries, from 0 to T_q; those after them see no key. An array broadcasts to the leading
        dimensions before the heads.
    key_value_seq_lengths : int or array_like of int, optional
        Number of valid keys, from 0 to T_k, in the same way; those after them are never read. "lower_right" then
        aligns the last valid query with the last valid key.
    key_value_seq_starts : int or array_like of int, optional
        Index of the first valid key, from 0 to T_k, in the same way: padding on the left. The keys before it are
        hidden, whatever they hold, and cost no time; a sequence has the bits of the call without them. The other
        arguments still count from key 0: the keys ``start <= j < length`` are valid, none if start >= length.
    window_size : (int, int)
        (left, right): the query at position p sees the keys from p - left to p + right. -1 or None sets no bound on
        that side. Query i has position i + query_offset, with "lower_right" i + T_k - T_q. Other masks apply too.
    softcap : float, optional
        Scaled scores become ``softcap * tanh(score / softcap)``, before masks and bias. None or 0 leaves them
        unchanged.
    alibi_slopes : array_like of float, shape (H,) or (..., H), optional
        ALiBi: ``slope * abs(p - j)`` is subtracted from the score of the query at position p with key j, one slope for
        each query head; see `get_alibi_slopes`.
    sinks : array_like of float, shape (H,) or (..., H), optional
        One extra logit for each query head, neither scaled nor capped. It enters the softmax denominator only, so that
        rows of weights sum to less than 1.
    block_mask : BlockMask, optional
        ``BlockMask(blocks, size)``: which blocks of size queries by size keys are visible. The blocks broadcast to
        (..., ceil(T_q / size), ceil(T_k / size)). Same result, bit for bit, as repeating each size times along both
        axes for attn_mask, together with all other masks; but hidden blocks take neither time nor memory.
    key_indices : array_like of int, shape (..., T_q, n) or (..., 1, n), optional
        The keys that each query sees, in this order; -1 is no key. Broadcasts to (..., T_q, n), over heads too. A query
        has the bits of its call on ``key[indices]`` and ``value[indices]``, without the entries of -1: a repeated index
        counts twice, and keys that no query names are never read. All other arguments count keys by their place in
        `key`: attn_mask, bias and block_mask are gathered along, and a key outside of causality, window or lengths is
        left out like -1. Weights have the shape (..., T_q, n), 0 where an entry has no key. Not with dropout_p or
        alibi_slopes.
    gate : array_like of float, optional
        Multiplies the output by its sigmoid, before halves are rounded. Broadcasts to the output, in whose layout and
        dtype it is read; (..., T_q, 1) has one number for each query and head. Weights and log-sum-exp are those before
        it.
    compute_dtype : {None, "bfloat16", "bfloat16_tiles"}
        "bfloat16" rounds query, key, value and the weights to bfloat16 for the two products, which are summed in
        float32. That is faster where the processor has the instruction (AVX512_BF16, on AMD), and the bits are the same
        everywhere. "bfloat16_tiles" does the same with sums in another order, for which processors with AMX have an
        instruction; its bits are the same everywhere, too, and differ from the other ones. The inputs are float32 or
        bfloat16, also `Quantized`, and the result has their dtype. None computes in float32, and float64 inputs in
        float64.
    rng : None, int, TorchGenerator, numpy.random.Generator or what numpy.random.default_rng takes
        The source of dropout's random bits. None draws fresh entropy. An int, 0 <= rng < 2**64, is the seed itself: the
        same int drops the same weights. From a generator one seed is drawn, after all other checks. A `TorchGenerator`
        drops what PyTorch drops, one draw for every element of (..., T_q, T_k) in row-major order.
    return_weights : bool
        Also return the weights, shape (..., T_q, T_k) or the shape of key_indices, before dropout. The result is an
        `AttentionOutput` of five fields then: take ``result.out`` and ``result.weights``, or unpack
        ``out, weights, *_ = result``.
    return_lse : bool, np.float32 or np.float64
        Also return the logarithm of each row's sum of exponentials, shape (..., T_q), as ``result.lse``. float64 has
        the digits that float32 has no room for; True means the dtype of the computation.
    return_dropout_mask : bool
        Also return the dropout mask, True where a weight was kept, bool of shape (..., T_q, T_k), as
        ``result.dropout_mask``.
    out : ndarray or AttentionOutput, optional
        Takes the result: exact shape and dtype, any strides. If it overlaps an input, the result is computed in a
        temporary array. An AttentionOutput takes the extras as well; its lse may be float64 whatever the dtype.

    Raises
    ------
    TypeError
        An argument has a type or dtype that is not supported: integer masks, complex numbers, ``numpy.ma`` arrays and
        others.
    ValueError
        Shapes do not fit, a number is out of range, out is read-only, or "lower_right" comes with query_offset.

    Warns
    -----
    CausalAlignmentWarning
        is_causal=True, or a window without is_causal, with T_q != T_k and no query_offset.
    UserWarning
        A float attn_mask holds only 0 and 1.

    See Also
    --------
    causal_attention : The same with a causal mask, also where keys are cached.
    attention_weights : The weights alone, or the scores of one step.
    varlen_attention : Sequences that are packed without padding.
    attention_backward : The gradients.
    explain : How a call would be computed.
    KVCache : Decoding token by token.
    cattn.reference.scaled_dot_product_attention : The same in plain NumPy.

    Notes
    -----
    For the keys :math:`V_i` that query i sees, with :math:`p_i` the position of the query:

    .. math::

       s_{ij} &= \operatorname{softcap}(\text{scale} \cdot q_i \cdot k_j) \\
       &\quad - \text{slope} \cdot |p_i - j| + \text{mask}_{ij} + \text{bias}_{ij} \\
       w_{ij} &= \frac{e^{s_{ij}}}{\sum_{k \in V_i} e^{s_{ik}}} \\
       \text{out}_i &= \sum_{j \in V_i} w_{ij} v_j

    A key that a query may not see cannot change one bit of its result, whatever key, value and bias hold there. The
    result of a row has the same bits for every number of threads, batch, stride and instruction set with FMA.

    The sums follow online softmax (Milakov and Gimelshein, 2018; Dao et al., 2022). Dropout compares the bits of
    Philox4x32-10 (Salmon et al., 2011), counted by batch, head, query position and key. softcap comes from Gemma 2
    (2024), alibi_slopes from Press et al. (2022), sinks from GPT-OSS (2025).

    Examples
    --------
    >>> import numpy as np
    >>> import cattn
    >>> query = np.array([[0.0, 0.0]])
    >>> key = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    >>> value = np.array([[3.0], [6.0], [9.0]])
    >>> cattn.scaled_dot_product_attention(query, key, value)
    array([[6.]])
    >>> cattn.scaled_dot_product_attention(query, key, value, attn_mask=[True, True, False])
    array([[4.5]])
    >>> result = cattn.scaled_dot_product_attention(query, key, value, return_weights=True)
    >>> result.weights.round(3)
    array([[0.333, 0.333, 0.333]])

    Each query sees its own key and the one before it. The second batch entry has two tokens only:

    >>> x = np.zeros((2, 4, 1))
    >>> value = np.array([1.0, 2.0, 3.0, 4.0]).reshape(4, 1)
    >>> out = cattn.scaled_dot_product_attention(
    ...     x, x, value, is_causal=True, window_size=(1, 0), query_seq_lengths=[4, 2], key_value_seq_lengths=[4, 2])
    >>> out[..., 0]
    array([[1. , 1.5, 2.5, 3.5],
           [1. , 1.5, 0. , 0. ]])

    The second batch entry is padded on the left by two tokens:

    >>> cattn.scaled_dot_product_attention(x, x, value, is_causal=True, key_value_seq_starts=[0, 2])[..., 0]
    array([[1. , 1.5, 2. , 2.5],
           [0. , 0. , 3. , 3.5]])
    """


@overload
def causal_attention(
    query: ArrayLike,
    key: Stored | KVCache,
    value: Stored | None = ...,
    attn_mask: ArrayLike | None = ...,
    dropout_p: float = ...,
    *,
    out: NDArray[Any] | None = ...,
    **options: Unpack[_Plain],
) -> NDArray[Any]: ...
@overload
def causal_attention(
    query: ArrayLike,
    key: Stored | KVCache,
    value: Stored | None = ...,
    attn_mask: ArrayLike | None = ...,
    dropout_p: float = ...,
    *,
    return_weights: Literal[True],
    out: NDArray[Any] | AttentionOutput | None = ...,
    **options: Unpack[_WithWeights],
) -> AttentionOutput: ...
@overload
def causal_attention(
    query: ArrayLike,
    key: Stored | KVCache,
    value: Stored | None = ...,
    attn_mask: ArrayLike | None = ...,
    dropout_p: float = ...,
    *,
    return_lse: Literal[True] | LseDType,
    out: NDArray[Any] | AttentionOutput | None = ...,
    **options: Unpack[_WithLse],
) -> AttentionOutput: ...
@overload
def causal_attention(
    query: ArrayLike,
    key: Stored | KVCache,
    value: Stored | None = ...,
    attn_mask: ArrayLike | None = ...,
    dropout_p: float = ...,
    *,
    return_dropout_mask: Literal[True],
    out: NDArray[Any] | AttentionOutput | None = ...,
    **options: Unpack[_WithDropoutMask],
) -> AttentionOutput: ...
@overload
def causal_attention(
    query: ArrayLike,
    key: Stored | KVCache,
    value: Stored | None = ...,
    attn_mask: ArrayLike | None = ...,
    dropout_p: float = ...,
    *,
    out: AttentionOutput,
    **options: Unpack[ExtraOptions],
) -> AttentionOutput: ...
@overload
def causal_attention(
    query: ArrayLike,
    key: Stored | KVCache,
    value: Stored | None = ...,
    attn_mask: ArrayLike | None = ...,
    dropout_p: float = ...,
    *,
    out: NDArray[Any] | None = ...,
    **options: Unpack[ExtraOptions],
) -> Any: ...
@implemented_in_c
def causal_attention(
    query: ArrayLike,
    key: Stored | KVCache,
    value: Stored | None = None,
    attn_mask: ArrayLike | None = None,
    dropout_p: float = 0.0,
    *,
    out: NDArray[Any] | AttentionOutput | None = None,
    **options: Unpack[ExtraOptions],
) -> Any:
    """Return attention where no query sees a later key.

    >>> import numpy as np
    >>> import cattn
    >>> x = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    >>> result = cattn.causal_attention(x, x, x, return_weights=True)
    >>> result.weights.round(2)
    array([[1.  , 0.  , 0.  ],
           [0.33, 0.67, 0.  ],
           [0.25, 0.25, 0.5 ]])

    `scaled_dot_product_attention` with ``is_causal="lower_right"``: the last query sees every key, so that it is right
    with a cache too, where T_q < T_k. With query_offset, query i sees the keys j <= i + query_offset instead.

    Parameters
    ----------
    query : array_like, shape (..., T_q, head_dim)
        This and every other argument are the same as in `scaled_dot_product_attention`.
    key : array_like or Quantized, shape (..., T_k, head_dim), or KVCache
        Keys. A cache holds the values, too: the queries belong to its last tokens. Not with layout "bthd".
    value : array_like or Quantized, shape (..., T_k, d_v)
        Values; left out with a cache.
    attn_mask : array_like, optional
        Boolean (True where the key is visible) or float (added); intersected with causality.

    Returns
    -------
    ndarray, shape (..., T_q, d_v), or AttentionOutput
        As for `scaled_dot_product_attention`.

    Other Parameters
    ----------------
    query_offset : int or array_like of int, optional
        Position of the first query. Default T_k - T_q.
    query_seq_lengths, key_value_seq_lengths : int or array_like of int, optional
        Numbers of valid queries and keys. The default offset is their difference, for each batch entry.
    window_size : (int, int)
        Number of keys that a query sees before its own position; the second number has no effect here.
    return_weights : bool
        Also return the weights: the result is an `AttentionOutput` then.
    return_lse : bool, np.float32 or np.float64
        Also return the log-sum-exp, in this dtype.
    return_dropout_mask : bool
        Also return the dropout mask.
    out : ndarray or AttentionOutput, optional
        Takes the result.

    Raises
    ------
    TypeError, ValueError
        As for `scaled_dot_product_attention`.

    See Also
    --------
    scaled_dot_product_attention : Attention with any mask, or none.
    KVCache : Decoding token by token.
    causal_mask : The mask as an array.
    CausalAttention : A layer with weights.
    cattn.reference.causal_attention : The same in plain NumPy.

    Examples
    --------
    >>> import numpy as np
    >>> import cattn
    >>> x = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    >>> full = cattn.causal_attention(x, x, x)
    >>> last = cattn.causal_attention(x[2:], x, x)  # one new query, all keys so far
    >>> bool((full[2:] == last).all())
    True
    """


@implemented_in_c
def attention_weights(  # type: ignore[empty-body]
    query: ArrayLike,
    key: Stored,
    attn_mask: ArrayLike | None = None,
    is_causal: Alignment = False,
    *,
    dropout_p: float = 0.0,
    stage: Stage = "softmax",
    out: NDArray[Any] | None = None,
    **options: Unpack[AttentionOptions],
) -> NDArray[Any]:
    """Return the attention weights, or the scores of one of the steps before them.

    >>> import numpy as np
    >>> import cattn
    >>> x = np.zeros((3, 2))
    >>> cattn.attention_weights(x, x, is_causal=True).round(3)
    array([[1.   , 0.   , 0.   ],
           [0.5  , 0.5  , 0.   ],
           [0.333, 0.333, 0.333]])

    The fused functions never hold this matrix. This one is for inspection, plots and checks of single steps.

    Parameters
    ----------
    query : array_like, shape (..., T_q, head_dim)
        This and every other argument but stage are the same as in `scaled_dot_product_attention`.

    Returns
    -------
    ndarray, shape (..., T_q, T_k), with key_indices (..., T_q, n)
        Scores, or weights. Rows of weights sum to 1, with sinks to less; a query that sees no key has a row of 0.

    Other Parameters
    ----------------
    layout : {"bhtd", "bthd"}
        Order of heads and tokens in query and key.
    dropout_p : float
        Probability that a weight is dropped, for stage "dropout".
    stage : {"qk", "softcap", "bias", "mask", "softmax", "dropout"}
        The step after which to stop: "qk" is ``scale * query @ key.T``, "softcap" bounds it, "bias" adds slopes, bias
        and a float attn_mask, "mask" sets hidden scores to -inf, "softmax" gives the attention weights, and
        "dropout" the weights that multiply the values.
    out : ndarray, optional
        Takes the result: exact shape and dtype, any strides.

    Raises
    ------
    TypeError, ValueError
        As for `scaled_dot_product_attention`; another stage is a ValueError.

    Warns
    -----
    UserWarning
        The result takes more than half of the memory of this machine.

    See Also
    --------
    scaled_dot_product_attention : Output and weights of one call, with ``return_weights=True``.
    attention_statistics : Statistics of the weights, without the matrix.
    plot_attention : The weights as heat maps.
    view_attention : The weights to look at with the pointer.
    masked_softmax : The weights from scores that exist already.
    cattn.reference.attention_weights : The same in plain NumPy.

    Examples
    --------
    >>> cattn.attention_weights(x, x, is_causal=True, stage="mask")
    array([[  0., -inf, -inf],
           [  0.,   0., -inf],
           [  0.,   0.,   0.]])
    """
