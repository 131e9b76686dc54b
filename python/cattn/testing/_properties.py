"""Properties of attention that need no formula, for functions of x whose projections are not known."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ._formulas import AXES, CAUSAL, FULL, GIVEN, METHODS, PADDING, Wrong
from ._subject import RefusedError

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Found = tuple[Wrong, Floats, Floats, Floats | None]

BATCH = Wrong(
    "batch_mixed",
    "The entries of a batch are mixed: what stands in one entry changes the result of another.",
    "Keep the batch axis apart: reshape and softmax must not join it with the tokens.",
)
_ROW_SUMS = Wrong("rows_not_one", "Rows of weights do not sum to 1: equal tokens do not give the result of one token.")
_FUTURE = CAUSAL["none"]._replace(
    text="A token sees the tokens after it: there is no causal mask, it has no effect, or a second softmax undoes it."
)
_UNSEEN = Wrong("hides_too_much", "A token does not see all the tokens that it should see.")
_SOME = Wrong("wrong_mask", "Tokens see other tokens than they should.")


def differs(a: Floats, b: Floats, tolerance: float) -> Bools:
    """Return for each row whether two results differ by more than the tolerance."""
    largest = np.abs(b, where=np.isfinite(b), out=np.zeros_like(b)).max(initial=0.0)
    close = np.isclose(a, b, rtol=0, atol=0.1 * tolerance * max(largest, 1e-30), equal_nan=True)
    return np.asarray(~close.all(axis=-1))


def mixes_batch(call: Callable[..., Floats], inputs: tuple[Floats, ...], tolerance: float) -> bool:
    """Return whether the first batch entry changes with the others."""
    if inputs[0].ndim == 2:
        return False
    before, rng = call(*inputs), np.random.default_rng(5)
    for one, others in ((0, slice(1, None)), (-1, slice(-1))):
        changed = tuple(array.copy() for array in inputs)
        for array in changed:
            array[others] = rng.standard_normal(array[others].shape) * 3
        if differs(call(*changed)[one], before[one], tolerance).any():
            return True
    return False


def influence(call: Callable[[Floats], Floats], x: Floats, tolerance: float) -> Bools:
    """Return which token (column) changes the result of which token (row) of the first sequence."""
    T = x.shape[-2]
    found = np.zeros((T, T), np.bool_)
    rng = np.random.default_rng(6)
    before = call(x)
    for j in range(T):
        for _ in range(2):
            changed = x.copy()
            changed[..., j, :] += 3 * rng.standard_normal(x.shape[-1])
            rows = differs(call(changed), before, tolerance)
            found[:, j] |= rows if rows.ndim == 1 else rows[0]
    return found


def _pattern(seen: Bools, causal: bool) -> Wrong | None:
    """Return the mistake that a matrix of influence shows. A token always changes its own query."""
    T = len(seen)
    if not causal:
        if seen.all():
            return None
        return FULL["causal"] if np.array_equal(seen, np.tri(T, dtype=np.bool_)) else _UNSEEN
    lower = np.tri(T, dtype=np.bool_)[1:-1]
    seen = seen[1:-1]  # the first and last rows may see nothing, and then anything
    if not (seen & ~lower).any():
        # The second token sees the first only: one key has weight 1 for every query.
        return CAUSAL["strict"] if not seen[0, 1] else _UNSEEN if (~seen & lower).any() else None
    if not (seen & np.tri(T, k=-1, dtype=np.bool_)[1:-1]).any():
        return CAUSAL["inverted"]
    if not (seen & ~np.tri(T, k=1, dtype=np.bool_)[1:-1]).any():
        return CAUSAL["next"]
    return _FUTURE if seen[~lower].all() else _SOME


def _equal_tokens(call: Callable[[Floats], Floats], x: Floats, causal: bool, tolerance: float) -> Found | None:
    """Return a mistake if equal tokens do not give the result of one of them."""
    equal = np.ascontiguousarray(np.broadcast_to(x[..., :1, :], x.shape))
    try:
        one = call(np.ascontiguousarray(x[..., :1, :]))
    except RefusedError:
        return None
    got = call(equal)
    right = np.broadcast_to(one, got.shape)
    if not np.isfinite(got).all() or not differs(got, right, tolerance).any():
        return None
    T = x.shape[-2]
    i = np.arange(T)
    axis_sums = np.cumsum(1 / (T - i)) if causal else np.ones(T)
    moved = (got - right).reshape(-1, T, got.shape[-1])[0]
    for wrong, sums in ((METHODS["after"], (i + 1) / T), (AXES["queries"], axis_sums)):
        pattern = sums - 1
        if not pattern.any():
            continue
        direction = pattern @ moved / (pattern @ pattern)
        if np.allclose(np.outer(pattern, direction), moved, rtol=0, atol=10 * tolerance * np.abs(moved).max()):
            return wrong, equal, got, np.array(right)
    return _ROW_SUMS, equal, got, np.array(right)


def _columns_sum(call: Callable[[Floats], Floats], x: Floats, tolerance: float) -> Found | None:
    """Return the mistake of a softmax over the queries: two tokens together give the results of each alone."""
    pair = np.ascontiguousarray(x[..., :2, :])
    try:
        got = call(pair)
        first, second = (call(np.ascontiguousarray(pair[..., i : i + 1, :])) for i in (0, 1))
    except RefusedError:
        return None
    together, alone = got.sum(axis=-2), (first + second)[..., 0, :]
    if differs(together, alone, tolerance).any() or not differs(got[..., 0, :], first[..., 0, :], tolerance).any():
        return None
    return AXES["queries"], pair, got, None


def check(call: Callable[[Floats], Floats], shape: tuple[int, ...], causal: bool, tolerance: float) -> list[Found]:
    """Return the mistakes that properties show, each with the smallest failing input."""
    rng = np.random.default_rng(7)
    x = 3 * rng.standard_normal(shape)
    found: list[Found] = []
    if mixes_batch(call, (x,), tolerance):
        two = np.round(x[:2])
        found.append((BATCH, two, call(two), None))
    x = x[:1] if x.ndim == 3 else x
    if (sums := _smallest(lambda part: _equal_tokens(call, part, causal, tolerance), x, 1)) is not None:
        return [*found, sums]
    if not causal and (sums := _columns_sum(call, x, tolerance)) is not None:
        return [*found, sums]
    wrong = _pattern(influence(call, x, tolerance), causal)
    if wrong is None:
        return found

    def of_part(part: Floats) -> Found | None:
        seen = influence(call, part, tolerance)
        return (wrong, part, call(part), None) if _pattern(seen, causal) == wrong else None

    return [*found, _smallest(of_part, x, 3) or (wrong, x, call(x), None)]


def _smallest(test: Callable[[Floats], Found | None], x: Floats, least: int) -> Found | None:
    """If the test fails on x, return its finding on the shortest prefix of x that still fails."""
    if (whole := test(np.round(x))) is None:
        return None
    for T in range(least, x.shape[-2]):
        try:
            found = test(np.ascontiguousarray(np.round(x[..., :T, :])))
        except RefusedError:
            continue
        if found is not None and found[0] == whole[0]:
            return found
    return whole


def check_hidden(
    call: Callable[[Floats], Floats], shape: tuple[int, ...], masks: dict[str, Any], causal: bool, tolerance: float
) -> tuple[Wrong, Floats, Floats] | None:
    """Return the mistake if hidden tokens change others, or visible ones do not; for a mask given by an argument."""
    x = 3 * np.random.default_rng(8).standard_normal(shape)
    T = shape[-2]
    if "padding" in masks:
        text = np.flatnonzero(~masks["padding"][-1])
        before = call(x)
        moved = []
        for tokens in (np.flatnonzero(masks["padding"][-1]), text[:1]):
            changed = x.copy()
            changed[-1, tokens] += 2
            moved.append(differs(call(changed), before, tolerance)[-1, text[1:]].any())
        if moved[0]:
            return (PADDING["none"] if moved[1] else PADDING["inverted"]), x, before
        return None
    seen = influence(call, x[:1] if x.ndim == 3 else x, tolerance) | np.eye(T, dtype=np.bool_)
    given = masks["mask"]
    base = np.tri(T, dtype=np.bool_) if causal else np.ones((T, T), np.bool_)
    if not (seen & ~(given & base)).any():
        return None
    others = {"inverted": ~given, "transposed": given.T, "none": np.ones_like(given)}
    for name, mask in others.items():  # the first and last rows may see nothing, and then anything
        if np.array_equal(seen[1:-1], ((mask & base) | np.eye(T, dtype=np.bool_))[1:-1]):
            return GIVEN[name], x, call(x)
    return _SOME, x, call(x)
