"""The keyword-only options that the functions of attention share: the type, the default and a text of each, once.

A function takes them by ``**options: Unpack[...]``, and `implemented_in_c` writes them into its signature and
documentation: the options of the table in C that are neither refused by `cattn._input.doors` nor parameters of its own.
Where one means something else, the function's own documentation has another text for it.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias, TypedDict

from numpy.typing import ArrayLike

from .._input.objects import BlockMask
from .._input.types import RNG, ComputeDType, Layout, Window

Corner: TypeAlias = Literal["upper_left", "lower_right"]


class ScoreOptions(TypedDict, total=False):
    """Options of every function of attention."""

    scale: float | None
    window_size: Window
    softcap: float | None
    alibi_slopes: ArrayLike | None
    sinks: ArrayLike | None


class DenseOptions(ScoreOptions, total=False):
    """Options of functions whose sequences are entries of a batch."""

    enable_gqa: bool | None
    layout: Layout
    bias: ArrayLike | None
    query_offset: ArrayLike | None
    query_seq_lengths: ArrayLike | None
    key_value_seq_lengths: ArrayLike | None
    key_value_seq_starts: ArrayLike | None
    block_mask: BlockMask | None


class AttentionOptions(DenseOptions, total=False):
    """Options of a forward pass and its gradients."""

    key_indices: ArrayLike | None
    compute_dtype: ComputeDType
    rng: RNG


class TangentOptions(DenseOptions, total=False):
    """Options of derivatives in a direction."""

    rng: RNG


class PackedOptions(ScoreOptions, total=False):
    """Options of functions of packed sequences."""

    max_seqlen_q: int | None
    max_seqlen_k: int | None
    alignment: Corner | None


class PackedAttentionOptions(PackedOptions, total=False):
    """Options of a forward pass of packed sequences and its gradients."""

    dropout_p: float
    compute_dtype: ComputeDType
    rng: RNG


# All others are None.
DEFAULTS: dict[str, Any] = {"dropout_p": 0.0, "layout": "bhtd", "window_size": (-1, -1)}

# An entry of the section "Other Parameters". Its first line may name several options.
TEXTS = """
max_seqlen_q, max_seqlen_k : int, optional
    An upper bound of the lengths.
alignment : {"upper_left", "lower_right"}, optional
    The position of a query without causality.
dropout_p : float
    Probability that a weight is dropped.
scale : float, optional
    Default 1 / sqrt(head_dim).
enable_gqa : bool, optional
    None infers grouped heads, False forbids them.
layout : {"bhtd", "bthd"}
    Order of heads and tokens in query, key, value and the output.
bias : array_like of float, optional
    Added to the scaled scores.
query_offset : int or array_like of int, optional
    Position of the first query.
query_seq_lengths, key_value_seq_lengths : int or array_like of int, optional
    Numbers of valid queries and keys.
key_value_seq_starts : int or array_like of int, optional
    Index of the first valid key: padding on the left.
window_size : (int, int)
    Number of keys seen before and after a query's position; -1 sets no bound.
softcap : float, optional
    Bound of the scaled scores.
alibi_slopes, sinks : array_like of float, shape (H,) or (..., H), optional
    One number for each query head: the slope of ALiBi, and one extra logit.
block_mask : BlockMask, optional
    Which blocks of queries and keys are visible.
key_indices : array_like of int, shape (..., T_q, n) or (..., 1, n), optional
    The keys that each query sees, -1 for none.
compute_dtype : {None, "bfloat16", "bfloat16_tiles"}
    As in scaled_dot_product_attention.
rng : None, int, TorchGenerator, numpy.random.Generator or what numpy.random.default_rng takes
    The source of dropout's random bits.
"""
