"""Attention with mistakes, in plain NumPy: every formula that `diagnose` compares a function with.

A formula is the right one with some of its choices replaced, such as the scale or the axis of the softmax.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..functional import get_alibi_slopes

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
    "input": Wrong(
        "scaled_by_input", "The scores are divided by the root of the width of the input instead of √d.",
        "d is the width of one head after the projection: query.shape[-1].",
    ),
    "value": Wrong(
        "scaled_by_value", "The scores are divided by the root of the width of the values instead of √d.",
        "d is query.shape[-1].",
    ),
    "heads": Wrong(
        "scaled_by_heads", "The scores are divided by the root of the number of heads instead of √d.",
        "d is query.shape[-1].",
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
_TWICE = Wrong(
    "softmax_twice",
    "The softmax is taken twice, so that the weights are nearly equal.",
    "Take it once: weights that are softmaxes of softmaxes lie between 1 / (e * T) and e / T.",
)
_KEEPDIMS = Wrong(
    "keepdims_missing",
    "The maximum or the sum of a row of scores is taken for a column: keepdims=True is missing.",
    "Write scores.max(axis=-1, keepdims=True) and weights.sum(axis=-1, keepdims=True).",
)
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
    "heads_keys": Wrong(
        "softmax_axis", "One softmax is taken over the heads and the keys together, so that they share a sum of 1.",
        "Take it over the last axis of the scores: axis=-1.",
    ),
    "sum": Wrong(
        "no_exponential", "The scores are divided by the sum of their row: there is no exponential, and no softmax.",
        "Divide np.exp(scores) by its sum.",
    ),
    "none": Wrong(
        "no_softmax", "There is no softmax: the scores themselves multiply the values.",
        'Take it over the last axis of the scores. If linear attention is meant, call diagnose with kind="linear".',
    ),
    "twice": _TWICE,
    "twice_between": _TWICE,
    "twice_masked": _TWICE,
    "sigmoid": Wrong(
        "sigmoid", "The weights are sigmoids of the scores, so that rows do not sum to 1.",
        "Use the softmax over the last axis.",
    ),
    "exp": Wrong(
        "not_normalized", "The weights are exp(scores), and are not divided by the sum of their row.",
        "Divide: weights / weights.sum(axis=-1, keepdims=True).",
    ),
    "log": Wrong(
        "log_softmax", "The weights are the logarithm of the softmax.", "Use softmax in the place of log_softmax."
    ),
    "sums": _KEEPDIMS,
    "sums_only": _KEEPDIMS,
    "maxima": _KEEPDIMS,
    "both": _KEEPDIMS,
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
    "upper_left": Wrong(
        "upper_left", "The first query sees the first key only, so that the last one does not see the last key.",
        "Align the last query with the last key: np.tri(T_q, T_k, k=T_k - T_q, dtype=bool). "
        'If alignment to the upper left is meant, as in PyTorch, pass alignment="upper_left".',
    ),
    "lower_right": Wrong(
        "lower_right", "The last query sees the last key, and so the first one sees several keys.",
        "Align the first query with the first key: np.tri(T_q, T_k, dtype=bool).",
    ),
}  # fmt: skip
FULL = {
    "causal": Wrong(
        "sees_no_future", "A token does not see the tokens after it, as under a causal mask.",
        'Leave the causal mask out, or call diagnose with kind="causal" if the mask is meant.',
    ),
}  # fmt: skip
# Linear attention: no softmax, and a state instead of a mask.
LINEAR = {
    "softmax": Wrong(
        "softmax", "There is a softmax over the keys, which linear attention has none of.",
        'Multiply the values by the scores themselves, or call diagnose with kind="causal" if the softmax is meant.',
    ),
}  # fmt: skip
STATE = {
    "none": Wrong(
        "sees_future", "A token sees the tokens after it, as if it read the state after the last one.",
        "Read the state after token t, before token t + 1 is added; as matrices: np.tril(query @ key.T) @ value.",
    ),
    "strict": Wrong(
        "mask_off_by_one", "A token does not see itself: it reads the state from before it.",
        "Add the outer product of its key and value first, then multiply the state by its query.",
    ),
    "next": Wrong(
        "mask_off_by_one", "A token sees the next token: it reads the state from after that.",
        "Multiply the state by the query of the token that was added last.",
    ),
    "inverted_inclusive": Wrong(
        "inverted_mask", "A token sees itself and those after it: the state goes from the last token to the first.",
        "Add the tokens in their order; as matrices it is np.tril, not np.triu.",
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
_ADDED = Wrong(
    "mask_added",
    "The boolean mask is added to the scores as 0 and 1, and hides nothing.",
    "Set hidden scores to -inf before the softmax.",
)
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
    "added": _ADDED,
    "added_hidden": _ADDED,
    "inf_after": Wrong(
        "masked_after_softmax", "Hidden weights are set to -inf after the softmax.",
        "Set hidden scores to -inf before the softmax.",
    ),
    "times_inf": Wrong(
        "mask_times_inf", "All numbers are NaN, as by a mask of 0 and 1 that is multiplied by -inf: 0 * -inf is NaN.",
        "Use np.where(visible, scores, -np.inf), or masked_fill.",
    ),
    "infinite": Wrong(
        "mask_times_inf", "Hidden scores are +inf or NaN, so that each row that hides a key is NaN.",
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
HEADS: dict[Any, Wrong] = {
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
for _how, _several in (("view", (1, 2)), ("interleaved", (1,))):  # of one or two of query, key and value
    for _roles in itertools.chain.from_iterable(itertools.combinations(range(3), n) for n in _several):
        _whose, _is = " and the ".join(_ROLE[i] for i in _roles), "is" if len(_roles) == 1 else "are"
        _why = HEADS[_how].text.partition(": ")[2]
        _text = f"The {_whose} {_is} split into heads in the wrong order: {_why}"
        HEADS[_how, _roles] = HEADS[_how]._replace(text=_text)
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
_SUM = "Join them: out.swapaxes(1, 2).reshape(B, T, num_heads * head_dim)."
MERGES |= {
    "mean": Wrong("heads_averaged", "The result is the mean over the heads.", _SUM),
    "sum": Wrong("heads_averaged", "The result is the sum over the heads.", _SUM),
}
_GROUPS = "Repeat with np.repeat(key, n, axis=1), or key.repeat_interleave(n, dim=1), n = num_heads // num_kv_heads."
GROUPS = {
    what: Wrong(
        "groups_order",
        f"The heads of {name} are repeated in the order 0, 1, 0, 1 and not 0, 0, 1, 1, so that a query head gets the "
        "key head of another group.",
        _GROUPS,
    )
    for what, name in (("tiled", "key and value"), ("key", "key"), ("value", "value"))
}
TRANSPOSES = {
    "reshape": Wrong(
        "key_reshaped", "The key is reshaped to (head_dim, T) and not transposed, which mixes its tokens.",
        "Swap its last two axes: key.swapaxes(-1, -2), or key.transpose(-2, -1) in PyTorch.",
    ),
}  # fmt: skip
WEIGHTS = {
    "transposed": Wrong(
        "weights_transposed", "The weights are transposed before they multiply the values.",
        "It is weights @ value: rows of the weights are queries, columns are keys.",
    ),
    "mean": Wrong(
        "heads_averaged", "The weights are averaged over the heads before they multiply the values.",
        "Each head multiplies its values by its own weights.",
    ),
}  # fmt: skip
OUTPUT = {
    "unused": Wrong(
        "no_output_projection", "The output projection has no effect.", "Return out_proj of the joined heads."
    ),
    "residual": Wrong(
        "residual_inside", "The input is added to the result.",
        "A residual connection belongs to the block around attention.",
    ),
}  # fmt: skip
UNPROJECTED = {
    _ROLE[i]: Wrong(
        "not_projected", f"The {_ROLE[i]} is the input itself: its projection has no effect.",
        f"Use W_{_ROLE[i]}(x) as {_ROLE[i]}.",
    )
    for i in range(3)
}  # fmt: skip
ROTARY = {
    "value": Wrong("wrong_rotary", "The values are rotated, too.", "Rotate query and key only."),
    "query": Wrong("wrong_rotary", "The query is rotated, and the key is not.", "Rotate both."),
    "key": Wrong("wrong_rotary", "The key is rotated, and the query is not.", "Rotate both."),
    "heads": Wrong(
        "wrong_rotary", "Positions are counted along the heads, not along the tokens.",
        "Rotate arrays of (B, num_heads, T, head_dim), or let positions follow the axis of the tokens.",
    ),
    "width": Wrong(
        "wrong_rotary", "The rotation takes all columns of all heads for one head.",
        "Split the heads before the rotation: frequencies depend on head_dim.",
    ),
}  # fmt: skip
LAYOUT = {
    "across": Wrong(
        "other_layout", "The tokens are taken from the second axis, so that it attends across heads.",
        "If your arrays are (B, T, H, D), swap two axes before and after, or call diagnose with a function that does.",
    ),
}  # fmt: skip


_TABLES: dict[str, Mapping[Any, Wrong]] = {
    "mask": CAUSAL | FULL, "method": METHODS, "given": GIVEN, "padding": PADDING, "axis": AXES | LINEAR,
    "state": STATE, "scale": SCALES, "roles": ROLES, "heads": HEADS, "merge": MERGES, "groups": GROUPS,
    "layout": LAYOUT, "transpose": TRANSPOSES, "weights": WEIGHTS, "unprojected": UNPROJECTED, "output": OUTPUT,
    "rotary": ROTARY,
}  # fmt: skip


class Positions(NamedTuple):
    """How scores depend on positions: by rotation, or by the slopes of ALiBi."""

    name: str
    interleaved: bool = False
    theta: float = 0.0

    def __str__(self) -> str:
        if self.name != "rotary":
            return f"{self.name} with the usual slopes"
        return f"cattn.rope(x, theta={self.theta:g}{', interleaved=True' * self.interleaved}) of query and key"


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
    same: bool = False  # query, key and value are one array
    flat: bool = False  # the user's arrays have no axis for the batch
    inputs: tuple[Floats, ...] = ()  # what the function got: query, key and value before their projections
    positions: Positions | None = None
    alignment: str = "lower_right"
    linear: bool = False
    seen: NDArray[np.bool_] | None = None  # (T, T), what was measured; it takes the place of all masks


Choices = Mapping[str, Any]


def choices(problem: Problem) -> dict[str, Mapping[Any, Wrong]]:
    """Return the wrong choices that make sense for a problem."""
    q, k, v = (x.shape for x in (problem.query, problem.key, problem.value))
    ndim, square = len(q), q[-2] == k[-2]
    heads = problem.num_heads if problem.num_heads is not None else q[1] if ndim == 4 else 1
    many = problem.num_heads is not None and problem.num_heads > 1
    grouped = k[-1] < q[-1] if problem.num_heads is not None else k[:-2] != q[:-2]
    hides = problem.causal or problem.mask is not None or problem.padding is not None
    masks = dict(CAUSAL if problem.causal else FULL)
    for corner in ("upper_left", "lower_right"):
        if square or corner == problem.alignment:
            masks.pop(corner, None)
    found: dict[str, Mapping[Any, Wrong]] = {"mask": masks, "method": METHODS if hides else {}}
    if problem.mask is not None:
        found["given"] = GIVEN
    if problem.padding is not None:
        found["padding"] = PADDING
    leave = {"batch": ndim == 2, "heads": ndim < 4 and not many, "heads_keys": ndim < 4 and not many}
    leave |= dict.fromkeys(("sums", "sums_only", "maxima", "both"), not square or (ndim > 2 and not problem.flat))
    leave |= dict.fromkeys(("twice_between", "twice_masked"), not hides)
    found["axis"] = {name: wrong for name, wrong in AXES.items() if not leave.get(name, False)}
    if problem.linear:
        found |= {"mask": {}, "method": {}, "axis": LINEAR, "state": STATE}
    d = q[-1] if problem.num_heads is None else q[-1] // heads
    factors = _scales(problem, d)
    first = {factor: name for name, factor in reversed(factors.items())}  # each number once, without the right one
    found["scale"] = {
        name: wrong for name, wrong in SCALES.items()
        if (name == "after" and not problem.linear) or (first[factors[name]] == name and factors[name] != d**-0.5)
    }  # fmt: skip
    found["roles"] = {} if problem.same else {order: wrong for order, wrong in ROLES.items() if _fit(order, q, k, v)}
    if many:
        found["heads"] = {name: wrong for name, wrong in HEADS.items() if not grouped or "view" in (name, name[0])}
        found["merge"] = MERGES
    if grouped:
        found["groups"] = GROUPS
    if ndim == 4 and problem.mask is None and problem.padding is None and not grouped and square:
        found["layout"] = LAYOUT
    if q[-2] > 1 and k[-1] > 1:
        found["transpose"] = TRANSPOSES
    found["weights"] = {name: w for name, w in WEIGHTS.items() if (square if name == "transposed" else heads > 1)}
    if problem.inputs:
        width = problem.inputs[0].shape
        unprojected = problem.inputs[0] is not problem.query
        widths = (q, k, v)
        found["unprojected"] = {
            _ROLE[i]: UNPROJECTED[_ROLE[i]] for i in range(3) if unprojected and problem.inputs[i].shape == widths[i]
        }
        wide = (*v[:-1], q[-1]) if grouped and problem.num_heads is not None else (*q[:-1], v[-1])
        out = problem.finish(np.zeros(wide)).shape if problem.finish is not None else wide
        fits = {"unused": problem.finish is not None and out == wide, "residual": out == width}
        found["output"] = {name: wrong for name, wrong in OUTPUT.items() if fits[name]}
    if problem.seen is not None:
        found |= {"mask": {}, "state": {}, "layout": {}}
    if problem.positions is not None and problem.positions.name == "rotary":
        found["rotary"] = {name: wrong for name, wrong in ROTARY.items() if many or name not in ("heads", "width")}
    return found


def _fit(order: tuple[int, ...], *shapes: tuple[int, ...]) -> bool:
    """Return whether query, key and value have the same shapes in another order."""
    return all(shapes[order[i]] == shapes[i] for i in range(3))


def _scales(problem: Problem, d: int) -> dict[str, float]:
    """Return the factors of wrong scales for heads of d columns."""
    width, T = problem.query.shape[-1], problem.query.shape[-2]
    heads = problem.num_heads or (problem.query.shape[1] if problem.query.ndim == 4 else 1)
    d_in = problem.inputs[0].shape[-1] if problem.inputs else d
    d_v = problem.value.shape[-1] * d // problem.key.shape[-1]
    return {
        "none": 1.0, "d": 1 / d, "times": d**0.5, "model": width**-0.5, "input": d_in**-0.5, "value": d_v**-0.5,
        "heads": heads**-0.5, "tokens": T**-0.5, "after": 1.0,
    }  # fmt: skip


_OFTEN = {"mask", "state", "method", "given", "padding", "axis", "scale", "roles", "heads", "merge", "layout"}
_SELDOM: dict[str, set[Any]] = {  # choices that are not tried together with two others
    "method": {"added_hidden", "inf_after", "times_inf", "infinite"},
    "axis": {*AXES} - {"queries", "heads", "batch", "all", "none"},
    "scale": {"input", "value", "heads"},
    "heads": {name for name in HEADS if isinstance(name, tuple)},
    "merge": {"mean", "sum"},
}


def formulas(problem: Problem, most: int) -> Iterator[dict[str, Any]]:
    """Yield every choice with up to `most` mistakes, few mistakes first: the first is the right formula."""
    found = {step: list(wrongs) for step, wrongs in choices(problem).items() if wrongs}
    for number in range(most + 1):
        if number > 2:
            found = {
                step: [name for name in wrongs if name not in _SELDOM.get(step, ())]
                for step, wrongs in found.items() if step in _OFTEN
            }  # fmt: skip
        for steps in itertools.combinations(found, number):
            if number > 1 and "roles" in steps:
                few = dict(found, roles=[order for order in found["roles"] if len(set(order)) == 3])
            else:
                few = found
            for picked in itertools.product(*(few[step] for step in steps)):
                if number > 1 and ("times_inf" in picked or "infinite" in picked):  # what comes after does not show
                    continue
                yield dict(zip(steps, picked, strict=True))


def mistakes_of(chosen: Choices) -> list[Wrong]:
    """Return the mistakes of a formula."""
    if chosen.get("axis") in ("heads", "batch") and chosen.get("method") == "zero":
        # Over this axis the hidden scores of a key are equal, whatever the number is that hides them.
        chosen = {step: picked for step, picked in chosen.items() if step != "method"}
    return [_TABLES[step][picked] for step, picked in chosen.items()]


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
    if how in ("mean", "sum"):
        return np.asarray(getattr(x, how)(axis=1))
    return x.swapaxes(1, 2).reshape(B, T, -1)


def visible_keys(problem: Problem, chosen: Choices, T_q: int, T_k: int) -> NDArray[np.bool_]:
    """Return the visible keys of a formula, (T_q, T_k) or (B, 1, T_q, T_k)."""
    if problem.seen is not None:
        return problem.seen
    mask = chosen.get("mask", chosen.get("state"))
    visible = np.ones((T_q, T_k), np.bool_)
    if problem.causal or mask == "causal":
        corner = mask if mask in ("upper_left", "lower_right") else problem.alignment
        last = T_k - T_q if corner == "lower_right" else 0
        lower = {"strict": -1, "next": 1}.get(mask or "", 0)
        visible = np.tri(T_q, T_k, k=last + lower, dtype=np.bool_)
        if mask == "none":
            visible = np.ones_like(visible)
        elif mask in ("inverted", "inverted_inclusive"):
            visible = ~np.tri(T_q, T_k, k=last - (mask == "inverted_inclusive"), dtype=np.bool_)
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


def _softmax(scores: Floats, axis: int | tuple[int, ...] = -1) -> Floats:
    e = np.exp(scores - scores.max(axis=axis, keepdims=True))
    return np.asarray(e / e.sum(axis=axis, keepdims=True))


def _weigh(scores: Floats, visible: NDArray[np.bool_], axis: str | None) -> Floats:
    """Return the weights: the softmax, or what stands in its place."""
    over: dict[Any, int | tuple[int, ...]] = {
        "queries": -2, "heads": 1, "batch": 0, "all": (-1, -2), "heads_keys": (1, -1)
    }  # fmt: skip
    if axis == "sum":
        finite = np.where(np.isfinite(scores), scores, 0.0)
        return np.asarray(finite / finite.sum(axis=-1, keepdims=True))
    if axis == "none":
        return np.where(np.isfinite(scores), scores, 0.0)
    if axis == "sigmoid":
        return np.asarray(1 / (1 + np.exp(-scores)))
    if axis == "exp":
        return np.exp(scores)
    if axis == "log":
        return np.log(_softmax(scores))
    if axis == "twice":
        return _softmax(_softmax(scores))
    if axis == "twice_masked":
        return _softmax(np.where(visible, _softmax(scores), -np.inf))
    if axis in ("sums", "sums_only", "maxima", "both"):
        maxima = np.zeros((1, 1)) if axis == "sums_only" else scores.max(axis=-1, keepdims=True)
        e = np.exp(scores - (maxima.swapaxes(-1, -2) if axis in ("maxima", "both") else maxima))
        sums = e.sum(axis=-1, keepdims=True)
        return np.asarray(e / (sums if axis == "maxima" else sums.swapaxes(-1, -2)))
    return _softmax(scores, over.get(axis, -1))


def _rotate(x: Floats, positions: Positions, wrong: str | None) -> Floats:
    """Return (B, H, T, d) after the rotation by positions."""
    if wrong == "heads":
        return _rotate(x.swapaxes(1, 2), positions, None).swapaxes(1, 2)
    if wrong == "width":
        B, H, T, d = x.shape
        whole = x.swapaxes(1, 2).reshape(B, 1, T, H * d)
        return _rotate(whole, positions, None).reshape(B, T, H, d).swapaxes(1, 2)
    d = x.shape[-1]
    angles = np.arange(x.shape[-2])[:, None] * positions.theta ** (-2 * np.arange(d // 2) / d)
    cos, sin = np.cos(angles), np.sin(angles)
    out = np.empty_like(x)
    first, second = (np.s_[..., ::2], np.s_[..., 1::2]) if positions.interleaved else (
        np.s_[..., : d // 2], np.s_[..., d // 2 :]
    )  # fmt: skip
    out[first] = x[first] * cos - x[second] * sin
    out[second] = x[second] * cos + x[first] * sin
    return out


def _repeat(x: Floats, heads: int, tiled: bool) -> Floats:
    """Return (B, heads, T, d) of fewer heads."""
    n = heads // x.shape[1]
    return np.tile(x, (1, n, 1, 1)) if tiled else np.repeat(x, n, axis=1)


def _heads_of(problem: Problem, chosen: Choices) -> tuple[Floats, Floats, Floats]:
    """Return query, key and value of a formula, (B, H, T, d)."""
    given = [problem.query, problem.key, problem.value]
    if (name := chosen.get("unprojected")) is not None:
        given[_ROLE.index(name)] = problem.inputs[_ROLE.index(name)]
    q, k, v = (given[i] for i in chosen.get("roles", (0, 1, 2)))
    n, how, ndim = problem.num_heads, chosen.get("heads"), problem.query.ndim
    if n is not None:
        kv = max(1, k.shape[-1] * n // q.shape[-1])
        ways = [how] * 3 if not isinstance(how, tuple) else [how[0] if i in how[1] else None for i in range(3)]
        q, k, v = (_split(x, heads, way) for x, heads, way in zip((q, k, v), (n, kv, kv), ways, strict=True))
    elif ndim < 4:
        q, k, v = (x[None, None] if ndim == 2 else x[:, None] for x in (q, k, v))
    elif chosen.get("layout") == "across":
        q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    rotary = chosen.get("rotary")
    if problem.positions is not None and problem.positions.name == "rotary":
        q = q if rotary == "key" else _rotate(q, problem.positions, rotary)
        k = k if rotary == "query" else _rotate(k, problem.positions, rotary)
        v = _rotate(v, problem.positions, None) if rotary == "value" else v
    if k.shape[1] < q.shape[1]:
        tiled = chosen.get("groups")
        k = _repeat(k, q.shape[1], tiled in ("tiled", "key"))
        v = _repeat(v, q.shape[1], tiled in ("tiled", "value"))
    return q, k, v


def _score(problem: Problem, chosen: Choices, q: Floats, k: Floats) -> Floats:
    """Return the scaled scores of a formula, with the bias of positions."""
    T_k, d = k.shape[-2:]
    transposed = np.ascontiguousarray(k).reshape(*k.shape[:-2], d, T_k) if "transpose" in chosen else k.swapaxes(-1, -2)
    picked = chosen.get("scale")
    fitted = d**-0.5 if picked is None else picked
    factor = fitted if isinstance(fitted, float) else _scales(problem, d)[fitted]
    scores = q @ transposed * factor
    if problem.positions is not None and problem.positions.name == "ALiBi":
        distance = np.arange(T_k) - np.arange(T_k - q.shape[-2], T_k)[:, None]
        scores = scores + get_alibi_slopes(q.shape[1])[:, None, None] * -np.abs(distance)
    return np.asarray(scores)


def scores_of(problem: Problem) -> Floats:
    """Return the scores of the right formula, of all pairs of tokens."""
    q, k, _ = _heads_of(problem, {})
    return _score(problem, {}, q, k)


@np.errstate(all="ignore")
def compute(problem: Problem, chosen: Choices) -> tuple[Floats, NDArray[np.bool_]]:
    """Return the output of a formula, and for each of its rows whether the formula gives it a meaning."""
    q, k, v = _heads_of(problem, chosen)
    ndim, heads, n = problem.query.ndim, chosen.get("heads"), problem.num_heads
    scores = _score(problem, chosen, q, k)
    T_q, T_k = scores.shape[-2:]
    if heads == "across" and any(mask is not None for mask in (problem.mask, problem.padding, problem.seen)):
        visible = np.ones((T_q, T_k), np.bool_)
    else:
        visible = visible_keys(problem, chosen, T_q, T_k)
    method, axis = chosen.get("method"), chosen.get("axis", "none" if problem.linear else None)
    if method == "zero":
        scores = scores * visible
    elif method == "added":
        scores = scores + visible
    elif method == "added_hidden":
        scores = scores + ~visible
    elif method == "times_inf":
        scores = np.full_like(scores, np.nan)
    elif method == "infinite":
        scores = np.where(visible, scores, np.inf)
    elif isinstance(method, tuple):  # a number that takes the place of hidden scores, or is added to them
        scores = np.where(visible, scores, method[1] + (scores if method[0] == "added" else 0.0))
    elif method is None:
        scores = np.where(visible, _softmax(scores) if axis == "twice_between" else scores, -np.inf)
    weights = _weigh(scores, visible, axis)
    if method == "after":
        weights = weights * visible
    elif method == "inf_after":
        weights = np.where(visible, weights, -np.inf)
    if chosen.get("scale") == "after":
        weights = weights * q.shape[-1] ** -0.5
    if chosen.get("weights") == "mean":
        weights = np.broadcast_to(weights.mean(axis=1, keepdims=True), weights.shape)
    elif chosen.get("weights") == "transposed":
        weights = weights.swapaxes(-1, -2)
    out = weights @ v
    rows = np.broadcast_to(visible.any(axis=-1), out.shape[:-1])
    if problem.padding is not None:
        rows = rows & ~problem.padding[:, None, :]
    if n is not None:
        every: Any = rows.all(axis=(1, 2))
        meant = every[:, None] if heads in ("view", "across") or isinstance(heads, tuple) else rows[:, 0]
        out = _merge(out, chosen.get("merge"), heads)
        rows = np.broadcast_to(meant, out.shape[:-1])
        if chosen.get("merge") == "view":
            rows = np.broadcast_to(rows.all(axis=-1, keepdims=True), rows.shape)
    elif ndim < 4:
        out, rows = (out[0, 0], rows[0, 0]) if ndim == 2 else (out[:, 0], rows[:, 0])
    elif chosen.get("layout") == "across":
        out, rows = out.swapaxes(1, 2), rows.swapaxes(1, 2)
    last = chosen.get("output")
    if problem.finish is not None and last != "unused":
        out = problem.finish(out)
    if last == "residual":
        added = problem.inputs[0][..., : out.shape[-1]]
        out = out + added if added.shape == out.shape else out
    return (out[0], rows[0]) if problem.flat else (out, rows)


@np.errstate(all="ignore")
def matches(got: Array, wanted: Floats, rows: NDArray[np.bool_], tolerance: float) -> bool:
    """Return whether a result is the output of a formula, in the rows to which that gives a meaning."""
    if got.shape != wanted.shape or 5 * rows.sum() < rows.size:
        return False
    got, wanted = got[rows], wanted[rows]
    if np.isfinite(wanted).all():
        allowed = tolerance * max(np.abs(wanted).max(initial=0.0), 1e-30)
        return bool((np.abs(got - wanted) <= allowed).all())  # NaN is not
    largest = np.abs(wanted, where=np.isfinite(wanted), out=np.zeros_like(wanted)).max(initial=0.0)
    return bool(np.allclose(got, wanted, rtol=0, atol=tolerance * max(largest, 1e-30), equal_nan=True))
