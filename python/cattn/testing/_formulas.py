"""Attention with mistakes, in plain NumPy: every formula that `diagnose` compares a function with.

A formula is the right one with some of its choices replaced, such as the scale or the axis of the softmax.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Floats = NDArray[np.float64]


class Wrong(NamedTuple):
    """A wrong choice: the name and sentence of its mistake."""

    name: str
    text: str
    cure: str = ""


_HIDE = "Set the hidden scores to -inf before the softmax: np.where(np.tri(T, dtype=bool), scores, -np.inf)."
_SPLIT = "Split with x.reshape(B, T, num_heads, head_dim).swapaxes(1, 2)"

# The wrong choices of each step. A choice that is not listed is the right one.
SCALES = {
    "none": Wrong("no_scale", "The scores are not divided by √d.", "Divide query @ key.T by √d, d = query.shape[-1]."),
    "d": Wrong("scaled_by_d", "The scores are divided by d instead of √d (or twice by √d).", "Divide once by √d."),
    "times": Wrong("scaled_up", "The scores are multiplied by √d instead of divided.", "Divide by √d."),
    "model": Wrong(
        "scaled_by_model", "The scores are divided by the root of the width of all heads together.",
        "d is the width of one head: head_dim, not num_heads * head_dim.",
    ),
    "tokens": Wrong(
        "scaled_by_tokens", "The scores are divided by the root of the number of tokens instead of √d.",
        "d is query.shape[-1].",
    ),
    "after": Wrong(
        "scaled_after_softmax", "The weights are divided by √d after the softmax, and the scores are not.",
        "Divide the scores, before the softmax.",
    ),
}  # fmt: skip
AXES = {
    "queries": Wrong(
        "softmax_axis", "The softmax is taken over the queries, so that columns of weights sum to 1 and rows do not.",
        "Take it over the last axis of the scores, the keys: axis=-1.",
    ),
    "heads": Wrong(
        "softmax_axis", "The softmax is taken over the heads.", "Take it over the last axis of the scores: axis=-1."
    ),
    "batch": Wrong(
        "softmax_axis", "The softmax is taken over the batch.", "Take it over the last axis of the scores: axis=-1."
    ),
    "all": Wrong(
        "softmax_axis", "One softmax is taken over all scores of a matrix, so that the whole matrix sums to 1.",
        "Take it over the last axis of the scores: axis=-1.",
    ),
    "none": Wrong("no_softmax", "There is no softmax: the scores themselves multiply the values."),
}  # fmt: skip
CAUSAL = {
    "none": Wrong(
        "sees_future", "A token sees the tokens after it: there is no causal mask, or it has no effect.", _HIDE
    ),
    "inverted": Wrong(
        "inverted_mask", "The mask is inverted: a token sees the tokens after it, and not those before it.",
        "Hide the keys with j > i, above the diagonal.",
    ),
    "inverted_inclusive": Wrong(
        "inverted_mask", "The mask is inverted: a token sees itself and the tokens after it, and not those before it.",
        "Hide the keys with j > i, above the diagonal.",
    ),
    "strict": Wrong(
        "mask_off_by_one", "The mask is off by one: a token does not see itself.",
        "Hide j > i only: the diagonal is visible, as in np.tril(...) or np.triu(..., k=1).",
    ),
    "next": Wrong(
        "mask_off_by_one", "The mask is off by one: a token sees the next token.",
        "Hide all j > i, as in np.tril(...) or np.triu(..., k=1).",
    ),
}  # fmt: skip
FULL = {
    "causal": Wrong(
        "sees_no_future", "A token does not see the tokens after it, as under a causal mask.",
        'Leave the causal mask out, or call diagnose with kind="causal" if the mask is meant.',
    ),
}  # fmt: skip
GIVEN = {
    "none": Wrong("mask_ignored", "The mask has no effect: hidden keys are seen."),
    "inverted": Wrong("inverted_mask", "The mask is inverted: hidden keys are seen, and visible keys are hidden."),
    "transposed": Wrong("transposed_mask", "The mask is transposed: its rows are taken as keys."),
}
PADDING = {
    "none": Wrong("padding_visible", "Padding is visible: tokens see the padding at the end of a shorter sequence."),
    "inverted": Wrong("inverted_mask", "The padding mask is inverted: tokens see the padding and nothing else."),
    "transposed": Wrong(
        "padding_visible", "The padding mask hides rows of queries instead of columns of keys: padding is visible.",
        "Give the mask an axis for the queries: (B, T) becomes (B, 1, T).",
    ),
}  # fmt: skip
METHODS = {
    "after": Wrong(
        "masked_after_softmax",
        "Hidden weights are set to 0 after the softmax and the others are not divided by their sum again, "
        "so that rows sum to less than 1.",
        "Set hidden scores to -inf before the softmax, or divide each row of weights by its sum.",
    ),
    "zero": Wrong(
        "masked_with_zero", "Hidden scores are set to 0 instead of -inf, and a score of 0 has the weight exp(0) = 1.",
        "Set hidden scores to -inf before the softmax.",
    ),
    "added": Wrong(
        "mask_added", "The boolean mask is added to the scores as 0 and 1, and hides nothing.",
        "Set hidden scores to -inf before the softmax.",
    ),
}  # fmt: skip
_ROLE = ("query", "key", "value")


def _role(order: tuple[int, ...]) -> Wrong:
    q, k, v = (_ROLE[i] for i in order)
    swapped: dict[tuple[int, ...], Wrong] = {
        (0, 2, 1): Wrong("key_value_swapped", "Key and value are swapped.", "Weights come from query and key."),
        (1, 0, 2): Wrong("query_key_swapped", "Query and key are swapped: rows of the scores are keys."),
    }
    text = f"The scores are the products of {q} and {k}, and the weights multiply {v}."
    return swapped.get(order, Wrong("wrong_operands", text, "It is softmax(query @ key.T / √d) @ value."))


ROLES = {order: _role(order) for order in itertools.product(range(3), repeat=3) if order != (0, 1, 2)}
HEADS = {
    "view": Wrong(
        "heads_order",
        "The heads are split in the wrong order: the reshape to (B, num_heads, T, head_dim) gives a head parts of "
        "several tokens.",
        f"{_SPLIT}, so that a head has its columns of every token.",
    ),
    "interleaved": Wrong(
        "heads_order",
        "The heads are split in the wrong order: a head has every num_heads-th column, not neighbouring columns.",
        f"{_SPLIT}: the axis of heads comes before head_dim.",
    ),
    "one": Wrong("one_head", "The heads are not split: all columns are one head.", f"{_SPLIT}."),
    "across": Wrong(
        "attends_across_heads", "Each token attends among its own heads, not among the tokens.",
        f"{_SPLIT}: tokens are on the second axis from the right before query @ key.T.",
    ),
}  # fmt: skip
MERGES = {
    "view": Wrong(
        "heads_merged",
        "The heads are put together in the wrong order: (B, num_heads, T, head_dim) is reshaped without swapping the "
        "axes back.",
        "Swap first: out.swapaxes(1, 2).reshape(B, T, num_heads * head_dim).",
    ),
    "interleaved": Wrong(
        "heads_merged", "The heads are put together in the wrong order: their columns alternate.",
        "Join with out.swapaxes(1, 2).reshape(B, T, num_heads * head_dim).",
    ),
}  # fmt: skip
LAYOUT = {
    "across": Wrong(
        "other_layout", "The tokens are taken from the second axis, so that it attends across heads.",
        "If your arrays are (B, T, H, D), swap two axes before and after, or call diagnose with a function that does.",
    ),
}  # fmt: skip


class Problem(NamedTuple):
    """Query, key and value, and which keys are visible."""

    query: Floats  # (T, D), (B, T, D), (B, H, T, D), or (B, T, num_heads * D) if num_heads is given
    key: Floats
    value: Floats
    causal: bool
    mask: NDArray[np.bool_] | None = None  # (T, T), True where the key is visible
    padding: NDArray[np.bool_] | None = None  # (B, T), True where the token is none
    num_heads: int | None = None
    finish: Callable[[Floats], Floats] | None = None  # the output projection
    same: bool = False  # query, key and value are one array, or cannot be swapped because their widths differ
    flat: bool = False  # the user's arrays have no axis for the batch


Choices = Mapping[str, Any]


def choices(problem: Problem) -> dict[str, Mapping[Any, Wrong]]:
    """Return the wrong choices that make sense for a problem."""
    masks = CAUSAL if problem.causal else FULL
    hides = problem.causal or problem.mask is not None or problem.padding is not None
    found: dict[str, Mapping[Any, Wrong]] = {"mask": masks, "method": METHODS if hides else {}}
    if problem.mask is not None:
        found["given"] = GIVEN
    if problem.padding is not None:
        found["padding"] = PADDING
    ndim = problem.query.ndim
    axes = {name for name in AXES if not (name == "batch" and ndim == 2)}
    many = problem.num_heads is not None and problem.num_heads > 1
    found["axis"] = {name: AXES[name] for name in AXES if name in axes and (name != "heads" or ndim == 4 or many)}
    found["scale"] = {name: wrong for name, wrong in SCALES.items() if name != "model" or many}
    found["roles"] = {} if problem.same else ROLES
    if many:
        found["heads"] = HEADS
        found["merge"] = MERGES
    if ndim == 4 and problem.mask is None and problem.padding is None:
        found["layout"] = LAYOUT
    return found


def formulas(problem: Problem, most: int) -> Iterator[dict[str, Any]]:
    """Yield every choice with up to `most` mistakes, those with few mistakes first. The first is the right formula."""
    found = {step: list(wrongs) for step, wrongs in choices(problem).items() if wrongs}
    for number in range(most + 1):
        for steps in itertools.combinations(found, number):
            if number > 1 and "roles" in steps:
                few = dict(found, roles=[order for order in found["roles"] if len(set(order)) == 3])
            else:
                few = found
            for picked in itertools.product(*(few[step] for step in steps)):
                yield dict(zip(steps, picked, strict=True))


def mistakes_of(problem: Problem, chosen: Choices) -> list[Wrong]:
    """Return the mistakes of a formula."""
    tables = choices(problem)
    if chosen.get("axis") in ("heads", "batch") and chosen.get("method") == "zero":
        # Over this axis the hidden scores of a key are equal, whatever the number is that hides them.
        chosen = {step: picked for step, picked in chosen.items() if step != "method"}
    return [tables[step][picked] for step, picked in chosen.items()]


def _split(x: Floats, num_heads: int, how: str | None) -> Floats:
    B, T, width = x.shape
    head_dim = width // num_heads
    if how == "view":
        return x.reshape(B, num_heads, T, head_dim)
    if how == "interleaved":
        return x.reshape(B, T, head_dim, num_heads).transpose(0, 3, 1, 2)
    if how == "one":
        return x[:, None]
    if how == "across":
        return x.reshape(B, T, num_heads, head_dim)
    return x.reshape(B, T, num_heads, head_dim).swapaxes(1, 2)


def _merge(x: Floats, how: str | None, heads: str | None) -> Floats:
    B, T = x.shape[0], x.shape[2]
    if heads == "across":  # tokens are before heads
        return x.reshape(B, x.shape[1], -1)
    if how == "view":
        return x.reshape(B, T, -1)
    if how == "interleaved":
        return x.transpose(0, 2, 3, 1).reshape(B, T, -1)
    return x.swapaxes(1, 2).reshape(B, T, -1)


def visible_keys(problem: Problem, chosen: Choices, T: int) -> NDArray[np.bool_]:
    """Return the visible keys of a formula, (T, T) or (B, 1, T, T)."""
    visible = np.tri(T, dtype=np.bool_) if chosen.get("mask") == "causal" else np.ones((T, T), np.bool_)
    if problem.causal:
        lower = {"strict": -1, "next": 1}
        mask = chosen.get("mask")
        visible = np.tri(T, k=lower.get(mask, 0), dtype=np.bool_)  # type: ignore[arg-type]
        visible = {"none": np.ones_like(visible), "inverted": ~visible, "inverted_inclusive": visible.T}.get(
            mask, visible  # type: ignore[arg-type]
        )  # fmt: skip
    for step, given in (("given", problem.mask), ("padding", problem.padding)):
        if given is None:
            continue
        keep = given if step == "given" else ~given[:, None, None, :]
        if chosen.get(step) == "inverted":
            keep = ~keep
        elif chosen.get(step) == "transposed":
            keep = keep.swapaxes(-1, -2)
        elif chosen.get(step) == "none":
            keep = np.ones_like(keep)
        visible = visible & keep
    return visible


def _softmax(scores: Floats, axis: int | tuple[int, ...]) -> Floats:
    e = np.exp(scores - scores.max(axis=axis, keepdims=True))
    return np.asarray(e / e.sum(axis=axis, keepdims=True))


def compute(problem: Problem, chosen: Choices) -> tuple[Floats, NDArray[np.bool_]]:
    """Return the output of a formula, and for each of its rows whether the formula gives it a meaning."""
    inputs = (problem.query, problem.key, problem.value)
    q, k, v = (inputs[i] for i in chosen.get("roles", (0, 1, 2)))
    ndim, heads, n = q.ndim, chosen.get("heads"), problem.num_heads
    width = q.shape[-1]
    across = chosen.get("layout") == "across"
    if n is not None:
        q, k, v = (_split(x, n, heads) for x in (q, k, v))
    elif ndim < 4:
        q, k, v = (x[None, None] if ndim == 2 else x[:, None] for x in (q, k, v))
    elif across:
        q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    T, d = q.shape[-2:]
    scale = {"none": 1.0, "d": 1 / d, "times": d**0.5, "model": width**-0.5, "tokens": T**-0.5, "after": 1.0}
    picked = chosen.get("scale")
    scores = q @ k.swapaxes(-1, -2) * (d**-0.5 if picked is None else scale[picked])
    if heads == "across" and (problem.mask is not None or problem.padding is not None):
        visible = np.ones((T, T), np.bool_)
    else:
        visible = visible_keys(problem, chosen, T)
    method = chosen.get("method")
    if method == "zero":
        scores = scores * visible
    elif method == "added":
        scores = scores + visible
    elif method is None:
        scores = np.where(visible, scores, -np.inf)
    over: dict[Any, int | tuple[int, ...]] = {"queries": -2, "heads": 1, "batch": 0, "all": (-1, -2)}
    with np.errstate(all="ignore"):
        if chosen.get("axis") == "none":
            weights = np.where(np.isfinite(scores), scores, 0.0)
        else:
            weights = _softmax(scores, over.get(chosen.get("axis"), -1))
        if method == "after":
            weights = weights * visible
        if picked == "after":
            weights = weights * d**-0.5
        out = weights @ v
    rows = np.broadcast_to(visible.any(axis=-1), out.shape[:-1])
    if problem.padding is not None:
        rows = rows & ~problem.padding[:, None, :]
    if n is not None:
        every: Any = rows.all(axis=(1, 2))
        meant = every[:, None] if heads in ("view", "across") else rows[:, 0]
        out = _merge(out, chosen.get("merge"), heads)
        rows = np.broadcast_to(meant, out.shape[:-1])
        if chosen.get("merge") == "view":
            rows = np.broadcast_to(rows.all(axis=-1, keepdims=True), rows.shape)
    elif ndim < 4:
        out, rows = (out[0, 0], rows[0, 0]) if ndim == 2 else (out[:, 0], rows[:, 0])
    elif across:
        out, rows = out.swapaxes(1, 2), rows.swapaxes(1, 2)
    out = out if problem.finish is None else problem.finish(out)
    return (out[0], rows[0]) if problem.flat else (out, rows)


def matches(got: Array, wanted: Floats, rows: NDArray[np.bool_], tolerance: float) -> bool:
    """Return whether a result is the output of a formula, in the rows to which that gives a meaning."""
    if got.shape != wanted.shape or 5 * rows.sum() < rows.size:
        return False
    wanted = wanted[rows]
    largest = np.abs(wanted, where=np.isfinite(wanted), out=np.zeros_like(wanted)).max(initial=0.0)
    return bool(np.allclose(got[rows], wanted, rtol=0, atol=tolerance * max(largest, 1e-30), equal_nan=True))
