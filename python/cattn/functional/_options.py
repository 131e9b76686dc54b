"""The keyword-only options that the functions of attention share: the type, the default and a text of each, once.

A function takes them by ``**options: Unpack[...]``, and `implemented_in_c` writes them into its signature and
documentation: the options of the table in C that are neither refused by `cattn._input.doors` nor parameters of its own.
Where one means something else, the function's own documentation has another text for it.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias, TypedDict, TypeVar

from numpy.typing import ArrayLike

from .. import _cattn
from .._input.doors import why_refused
from .._input.names import with_hints
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


_F = TypeVar("_F", bound=Callable[..., Any])

_HEADING = "Other Parameters\n----------------\n"
_ENTRY = re.compile(r"^(\w+(?:, \w+)*) : .*\n(?:    .*\n?)+", re.MULTILINE)


def entries(section: str) -> dict[tuple[str, ...], str]:
    """Return the entries of a section of parameters by the names in their first lines."""
    return {tuple(entry[1].split(", ")): entry[0].rstrip("\n") for entry in _ENTRY.finditer(section)}


def text_of(name: str) -> str:
    """Return the common text of an option in one line."""
    return next(entry.partition("\n")[2] for names, entry in entries(TEXTS).items() if name in names).strip()


def _document(text: str, options: set[str], table: Sequence[str]) -> str:
    """Return the documentation with an entry for each option, in the order of the table: its own, or the common one."""
    before, heading, after = inspect.cleandoc(text).partition(_HEADING)
    section, _, after = after.partition("\n\n")
    if not heading:
        before, raises, after = before.partition("Raises\n------\n")
        after = raises + after
    own = entries(section)
    left = options.difference(*own)
    own |= {names: entry for names, entry in entries(TEXTS).items() if left.issuperset(names)}
    in_order = [own[names] for names in sorted(own, key=lambda names: table.index(names[0]))]
    return "\n".join([f"{before}{_HEADING}{in_order[0]}", *in_order[1:], "", after, ""])


def implemented_in_c(function: _F) -> _F:
    """Return the builtin that takes the place of `function`, whose body is empty.

    The builtin has the name, signature and documentation of `function`. The place of `**options` take the options of
    attention in the table in C that are no parameters, and that `function` does not refuse. The builtin calls a
    function of Python only if the arguments do not bind, for the TypeError that Python raises then, with a hint.
    """
    python: Any = function
    code, document = python.__code__, python.__doc__
    given = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    positional, keywords = given[: code.co_argcount], list(given[code.co_argcount :])
    defaults = dict(zip(reversed(positional), reversed(python.__defaults__ or ()), strict=False))
    defaults |= python.__kwdefaults__ or {}
    if code.co_flags & inspect.CO_VARKEYWORDS:
        table = _cattn._arguments(python.__name__)
        options = [name for name in table if name not in given and why_refused(function, name) is None]
        defaults |= {name: DEFAULTS.get(name) for name in options}
        keywords = sorted([*keywords, *options], key=table.index)
        document = document and _document(document, set(options), table)
    names = (*positional, *keywords)
    listed = [f"{name}={defaults[name]!r}" if name in defaults else name for name in names]
    if keywords:
        listed.insert(len(positional), "*")
    text = f"{python.__name__}({', '.join(listed)})"
    place: dict[str, Any] = {"__name__": python.__module__}
    exec(f"def {text}: ...", place)  # a function that Python calls with the errors of this signature
    refusing: Any = with_hints(place[python.__name__])
    in_order = tuple(defaults[name] for name in names if name in defaults)
    builtin: _F = _cattn._register(refusing, f"{text}\n--\n\n{document}", names, in_order, len(positional))
    return builtin
