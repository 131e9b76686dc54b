"""The keyword-only options that the functions of attention share: the type, the default and a text of each, once.

A function takes them by ``**options: Unpack[...]``, and `implemented_in_c` writes them into its signature and
documentation: the options of the table in C that are neither refused by `cattn._input.doors` nor parameters of its own.
Where one means something else, the function's own documentation has another text for it. `document` also writes what a
gradient has in common with its forward pass.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, TypeAlias, TypedDict, TypeVar

from numpy.typing import ArrayLike

from .. import _cattn
from .._input.doors import DOORS
from .._input.names import with_hints
from .._input.objects import BlockMask
from .._input.types import RNG, ComputeDType, Layout, LseDType, Window

Corner: TypeAlias = Literal["upper_left", "lower_right"]


class ScoreOptions(TypedDict, total=False):
    """Options of every function of attention."""

    scale: float | None
    window_size: Window
    softcap: float | None
    alibi_slopes: ArrayLike | None
    sinks: ArrayLike | None


class RangeOptions(TypedDict, total=False):
    """Options of each entry of a batch: the positions of its queries, and its valid tokens."""

    query_offset: ArrayLike | None
    query_seq_lengths: ArrayLike | None
    key_value_seq_lengths: ArrayLike | None
    key_value_seq_starts: ArrayLike | None


class DenseOptions(ScoreOptions, RangeOptions, total=False):
    """Options of functions whose sequences are entries of a batch."""

    enable_gqa: bool | None
    layout: Layout
    bias: ArrayLike | None
    block_mask: BlockMask | None


class AttentionOptions(DenseOptions, total=False):
    """Options of a forward pass and its gradients."""

    key_indices: ArrayLike | None
    gate: ArrayLike | None
    compute_dtype: ComputeDType
    rng: RNG


class ExtraOptions(AttentionOptions, total=False):
    """Options of a forward pass, with what else it returns."""

    return_weights: bool
    return_lse: bool | LseDType
    return_dropout_mask: bool


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
    gate: ArrayLike | None
    compute_dtype: ComputeDType
    rng: RNG


# All others are None.
DEFAULTS: dict[str, Any] = {"dropout_p": 0.0, "layout": "bhtd", "window_size": (-1, -1)}
DEFAULTS |= dict.fromkeys(("return_weights", "return_lse", "return_dropout_mask"), False)

# Entries of the sections of parameters. The first line of one may name several.
TEXTS = """
key : array_like or Quantized, shape (..., T_k, head_dim)
    Keys.
value : array_like or Quantized, shape (..., T_k, d_v)
    Values.
attn_mask : array_like, optional
    Boolean (True where the key is visible) or float (added).
is_causal : bool or {"upper_left", "lower_right"}
    Which keys a query sees.
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
gate : array_like of float, optional
    Multiplies the output by its sigmoid. Broadcasts to the output, in whose dtype it is read.
compute_dtype : {None, "bfloat16", "bfloat16_tiles"}
    As in scaled_dot_product_attention.
rng : None, int, TorchGenerator, numpy.random.Generator or what numpy.random.default_rng takes
    The source of dropout's random bits.
"""


_F = TypeVar("_F", bound=Callable[..., Any])

_PARAMETERS, _OTHERS = "Parameters\n----------\n", "Other Parameters\n----------------\n"
_ENTRY = re.compile(r"^(\w+(?:, \w+)*) : .*\n(?:    .*\n?)+", re.MULTILINE)
_OF_GRADIENT = """\
Raises
------
TypeError, ValueError
    As for `{0}`, and if grad_out does not have the shape of its result.

See Also
--------
{0} : The forward pass.
cattn.reference.{0}_backward : The same in plain NumPy.

"""


def entries(section: str) -> dict[tuple[str, ...], str]:
    """Return the entries of a section of parameters by the names in their first lines."""
    return {tuple(entry[1].split(", ")): entry[0].rstrip("\n") for entry in _ENTRY.finditer(section)}


def text_of(name: str) -> str:
    """Return the common text of an option in one line."""
    return next(entry.partition("\n")[2] for names, entry in entries(TEXTS).items() if name in names).strip()


_COMMON = entries(TEXTS)


def _entries_of(text: str, *headings: str) -> dict[tuple[str, ...], str]:
    """Return the entries of these sections of a documentation."""
    sections = (text.partition(heading)[2].partition("\n\n")[0] for heading in headings)
    return {names: entry for section in sections for names, entry in entries(section).items()}


def _names(found: Iterable[tuple[str, ...]]) -> set[str]:
    return {name for names in found for name in names}


def _fill(text: str, heading: str, taken: dict[tuple[str, ...], str], order: Sequence[str]) -> str:
    """Return the documentation with more entries in a section, in the order of the parameters."""
    if not taken:
        return text
    both = _entries_of(text, heading) | taken
    section = "\n".join(both[names] for names in sorted(both, key=lambda names: order.index(names[0])))
    before, found, after = text.partition(heading)
    if found:
        after = after.partition("\n\n")[2]
    else:
        before, raises, after = text.partition("Raises\n------\n")
        after = raises + after
    return f"{before}{heading}{section}\n\n{after}"


def document(
    function: Callable[..., Any],
    order: Sequence[str],
    options: Iterable[str] = (),
    like: Callable[..., Any] | None = None,
    words: str = "array_like",
) -> str | None:
    """Return the documentation of a function with an entry for each of its parameters, in this order.

    An entry that the function lacks is taken from the documentation of the function `like`, or it is the common one.
    The other parameters are `options`, and those that are among the other parameters of `like`. For a gradient this is
    the forward pass, by its name, whose errors it has as well if it does not say what it raises. What is taken has the
    words in the place of "array_like".
    """
    if function.__doc__ is None:  # python -OO
        return None
    text = inspect.cleandoc(function.__doc__)
    if like is None and function.__name__.endswith("_backward"):
        forward = function.__name__.removesuffix("_backward")
        like = inspect.unwrap(function).__globals__.get(forward)
        if "Raises\n------\n" not in text:
            before, heading, after = re.split(r"^((?:Notes|Examples)\n---)", text, maxsplit=1, flags=re.MULTILINE)
            text = before + _OF_GRADIENT.format(forward) + heading + after
    of_like = inspect.getdoc(like) or "" if like else ""
    theirs, others = _entries_of(of_like, _PARAMETERS, _OTHERS), {*options, *_names(_entries_of(of_like, _OTHERS))}
    known = theirs | {names: entry for names, entry in _COMMON.items() if _names(theirs).isdisjoint(names)}
    missing = {*order} - _names(_entries_of(text, _PARAMETERS, _OTHERS))
    for heading, wanted in ((_PARAMETERS, missing - others), (_OTHERS, missing & others)):
        taken = {n: entry.replace("array_like", words) for n, entry in known.items() if wanted.issuperset(n)}
        text = _fill(text, heading, taken, order)
    return f"{text}\n"  # the closing quotes stand on a line of their own


def documented(function: _F, like: Callable[..., Any] | None = None, words: str = "array_like") -> _F:
    """Complete the documentation of a function that has a body, see `document`.

    Keyword-only parameters are among the other ones if there is a section for them.
    """
    parameters = inspect.signature(function).parameters.values()
    has_others = _OTHERS in inspect.cleandoc(function.__doc__ or "")
    others = [each.name for each in parameters if has_others and each.kind == each.KEYWORD_ONLY]
    function.__doc__ = document(function, [each.name for each in parameters], others, like, words)
    return function


# The names of all options, in order.
TABLE = _cattn._arguments("scaled_dot_product_attention")


def spelled_out(*, order: Sequence[str] = TABLE, **defaults: Any) -> Callable[[_F], _F]:
    """Return a decorator that makes keyword-only parameters of the names in a function's ``**options: Unpack[...]``.

    The function gets all of them in each call. They have this order, and these defaults beside the common ones.
    """

    def decorate(function: _F) -> _F:
        python, scope = inspect.signature(function), inspect.unwrap(function).__globals__
        *named, rest = python.parameters.values()
        types = scope[rest.annotation.removeprefix("Unpack[").removesuffix("]")].__annotations__
        for name, kind in types.items():
            default, annotation = (DEFAULTS | defaults).get(name), kind.__forward_arg__
            named.append(inspect.Parameter(name, rest.KEYWORD_ONLY, default=default, annotation=annotation))
        place_of = {name: place for place, name in enumerate(order)}
        named.sort(key=lambda x: (x.kind, x.kind == x.KEYWORD_ONLY and place_of.get(x.name, len(order))))
        plain = python.replace(parameters=[x.replace(annotation=x.empty) for x in named], return_annotation=rest.empty)
        passed = ", ".join(f"{x.name}={x.name}" if x.kind == x.KEYWORD_ONLY else x.name for x in named)
        text = f"def make(function):\n def {function.__name__}{plain}: return function({passed})\n return "
        makers: dict[str, Any] = {}
        exec(text + function.__name__, scope, makers)
        made: Any = makers["make"](function)
        made.__module__, made.__qualname__, made.__doc__ = function.__module__, function.__qualname__, function.__doc__
        made.__annotations__ = {x.name: x.annotation for x in named} | {"return": python.return_annotation}
        result: _F = made
        return result

    return decorate


def implemented_in_c(function: _F) -> _F:
    """Return the builtin that takes the place of `function`, whose body is empty.

    The builtin has the name, signature and documentation of `function`. `**options` is replaced by the options of the
    table in C that `function` neither names nor refuses. The builtin calls a function of Python only if the arguments
    do not bind, for the TypeError that Python raises then, with a hint.
    """
    python: Any = function
    code = python.__code__
    given = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    positional, keywords = given[: code.co_argcount], list(given[code.co_argcount :])
    defaults = dict(zip(reversed(positional), reversed(python.__defaults__ or ()), strict=False))
    defaults |= python.__kwdefaults__ or {}
    options: list[str] = []
    if code.co_flags & inspect.CO_VARKEYWORDS:
        table = _cattn._arguments(python.__name__)
        refused = DOORS[python.__name__].refused if python.__name__ in DOORS else {}
        options = [name for name in table if name not in (*given, *refused)]
        defaults |= {name: DEFAULTS.get(name) for name in options}
        keywords = sorted([*keywords, *options], key=table.index)
    names = (*positional, *keywords)
    listed = [f"{name}={defaults[name]!r}" if name in defaults else name for name in names]
    if keywords:
        listed.insert(len(positional), "*")
    text = f"{python.__name__}({', '.join(listed)})"
    place: dict[str, Any] = {"__name__": python.__module__}
    exec(f"def {text}: ...", place)  # a function that Python calls with the errors of this signature
    refusing: Any = with_hints(place[python.__name__])
    in_order = tuple(defaults[name] for name in names if name in defaults)
    builtin: _F = _cattn._register(
        refusing, f"{text}\n--\n\n{document(python, names, options)}", names, in_order, len(positional)
    )
    return builtin
