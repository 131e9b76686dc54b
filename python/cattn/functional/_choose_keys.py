"""The choice of the keys that sparse attention reads."""

from __future__ import annotations

from typing import Any, Literal, Unpack

from numpy.typing import ArrayLike, NDArray

from .._input.objects import Stored
from .._input.types import Alignment
from ._options import DenseOptions, implemented_in_c

__all__ = ["choose_keys"]


@implemented_in_c
def choose_keys(
    query: ArrayLike,
    key: Stored,
    count: int,
    *,
    weights: ArrayLike | None = None,
    activation: Literal["relu"] | None = None,
    block_size: int = 1,
    pooled: bool = False,
    first: int = 0,
    last: int = 0,
    attn_mask: ArrayLike | None = None,
    is_causal: Alignment = False,
    return_scores: bool = False,
    out: NDArray[Any] | None = None,
    **options: Unpack[DenseOptions],
) -> Any:
    r"""Return the keys with the largest scores for each query: the ``key_indices`` of sparse attention.

    This is the indexer of DeepSeek Sparse Attention, of Qwen's and MiniMax's. A row's choice does not depend on the
    rest of the batch, on padding, threads, the processor, or how a cache was filled.

    >>> import numpy as np
    >>> import cattn
    >>> key = np.array([[3.0], [1.0], [2.0], [5.0]])
    >>> cattn.choose_keys(np.ones((4, 1)), key, 2, is_causal=True)
    array([[ 0, -1],
           [ 0,  1],
           [ 0,  2],
           [ 0,  3]], dtype=int32)

    Parameters
    ----------
    query : array_like, shape (..., H, T_q, head_dim) or (T_q, head_dim)
        Queries of the indexer. Their heads choose together: see the notes.
    key : array_like or Quantized, shape (..., H_kv, T_k, head_dim) or (T_k, head_dim)
        Keys of the indexer, of one head, of as many heads as query, or of groups of them.
    count : int
        The number of blocks that a query chooses at most, at least 1. A block is a key unless block_size says more.
    attn_mask : array_like, optional
        As in `scaled_dot_product_attention`, the same for all heads. Numbers are added to the sum over the heads.

    Returns
    -------
    ndarray of int32, shape (..., 1, T_q, n) or (T_q, n)
        The chosen keys in ascending order, then -1. n is count * block_size, but no more than T_k.
        `scaled_dot_product_attention` takes it as key_indices. With return_scores, a tuple of this array and the scores
        of the chosen keys, in the dtype of the computation: -inf beside -1.

    Other Parameters
    ----------------
    weights : array_like of float, shape (..., H, T_q), optional
        Weights of the heads of each query; None means 1. Its heads come before its tokens whatever layout is.
    activation : {None, "relu"}
        What is applied to the scores of each head.
    block_size : int
        Keys of a block. Blocks are counted from the first valid key, so padding on the left does not move them.
    pooled : bool
        If False, the score of a block is the largest one among its keys that the query sees. If True, `key`, attn_mask
        and bias have one row or column for each whole block of keys; a block is chosen only if the query sees all its
        keys, and the visible keys of blocks that are not whole are chosen besides, with the score NaN. T_k is then the
        number of rows of key times block_size, unless key_value_seq_lengths says more.
    first, last : int
        So many first and last blocks that a query sees are chosen in any case; they count as chosen.
    bias : array_like of float, optional
        Added to the sum over the heads.
    return_scores : bool
        Return the scores, too. There are no gradients through the choice; to train an indexer, compute the scores of
        the chosen keys from them.
    out : ndarray of int32, optional
        Where the keys are written to.

    Raises
    ------
    TypeError, ValueError
        As for `scaled_dot_product_attention`; also if count, block_size, first or last is out of range, or if a mask
        has several heads.

    See Also
    --------
    scaled_dot_product_attention : Takes the result as key_indices.
    cattn.reference.choose_keys : The same in plain NumPy.

    Notes
    -----
    The score of key s for query t is

    .. math:: I_{ts} = \sum_h w_{ht} \, f(\text{scale} \cdot q_{ht} \cdot k_s) + \text{bias}_{ts}

    with f the activation, as in DeepSeek-V3.2 (2025). Equal scores go to the lower key, NaN loses to every other score,
    and a hidden key is never chosen. MiniMax-M3 takes the largest score of a block (pooled=False, last=1); Qwen4 scores
    the pooled keys of blocks (pooled=True). To choose for each head alone, make the heads a batch:
    ``query[..., None, :, :]``.

    Memory grows with T_q * n, and not with T_q * T_k.

    Examples
    --------
    Two heads choose one key together, in blocks of two:

    >>> query = np.array([[[1.0, 0.0]], [[0.0, 1.0]]])
    >>> key = np.array([[[0.0, 1.0], [4.0, 0.0], [1.0, 1.0], [2.0, 1.0]]])
    >>> cattn.choose_keys(query, key, 1, weights=[[1.0], [0.5]], block_size=2, scale=1.0, enable_gqa=True)
    array([[[0, 1]]], dtype=int32)
    """
