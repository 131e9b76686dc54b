"""What can be said of a result that no listed formula explains: the mask that it has, and a number that fits it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from ._formulas import CAUSAL, FULL, METHODS, Choices, Problem, Wrong, compute

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

_GRID = np.geomspace(1e-3, 1e5, 81)
_FINER = 7  # times that the grid becomes ten times as fine
_LARGE = 100.0  # a number whose exponential is far beyond all others


def mask_mistake(seen: Bools, wanted: Bools) -> Wrong:
    """Return the mistake of a mask that hides other keys than it should."""
    T = len(seen)
    distance = np.subtract.outer(np.arange(T), np.arange(T))  # of the key before the query
    before, after = (int((sign * distance)[seen].max(initial=-T)) for sign in (1, -1))
    if np.array_equal(seen, (distance <= before) & (distance >= -after)):
        if before == T - 1:
            known = {T - 1: CAUSAL["none"], 1: CAUSAL["next"], 0: FULL["causal"], -1: CAUSAL["strict"]}
            text = f"The mask is off: a token sees up to {abs(after)} tokens {'after' if after > 0 else 'before'} it."
            return known.get(after, CAUSAL["next"]._replace(text=text))
        parts = [f"{n} token{'s' * (n > 1)} {side} it" for n, side in ((before, "before"), (after, "after")) if n > 0]
        text = f"The mask is a window: a token sees {' and '.join(['itself', *parts])}, and no other."
        return Wrong("window", text, "If it is meant, compare with cattn.causal_attention(..., window_size=...).")
    if np.array_equal(seen, wanted[:, ::-1]) or np.array_equal(seen, wanted[::-1]):
        return Wrong("mirrored_mask", "The mask is mirrored, left to right or upside down.", CAUSAL["none"].cure)
    return Wrong("wrong_mask", "The mask hides other keys than it should.", CAUSAL["none"].cure)


def possible_masks(seen: Bools, wanted: Bools, of_one_array: bool) -> list[Bools]:
    """Return the masks that show as `seen`: in a function of one array, a token changes its own result in any case."""
    own = np.eye(len(seen), dtype=np.bool_)
    others = [seen & ~own, wanted[:, ::-1], wanted[::-1]] if of_one_array else []
    return [seen, *(mask for mask in others if np.array_equal(mask | own, seen | own))]


def fits(problem: Problem, got: Floats) -> list[tuple[Choices, Wrong]]:
    """Return formulas with the number that fits a result best: a scale, or what hidden scores are set to."""
    d = problem.query.shape[-1] // (problem.num_heads or 1)
    scale = _best(lambda number: _distance(problem, {"scale": number}, got))
    found: list[tuple[Choices, Wrong]] = [({"scale": scale}, _scale_mistake(scale, d))]
    if problem.linear or problem.seen is not None:
        return found
    for way, verb in (("fill", "set to"), ("added", "changed by")):
        number = _best(lambda number, way=way: _distance(problem, {"method": (way, number)}, got))  # type: ignore[misc]
        what = f"{number:.3g}, which is not small enough" if number < _LARGE else "a large number with the wrong sign"
        text = f"Hidden tokens have weight: their scores are {verb} {what}."
        found.append(({"method": (way, number)}, Wrong("hidden_has_weight", text, METHODS["infinite"].cure)))
    return found


def _scale_mistake(scale: float, d: int) -> Wrong:
    """Return the mistake of a factor of the scores that is none of the usual ones."""
    text = f"The scores are multiplied by {scale:.4g} and not by 1 / √d = {d**-0.5:.4g}."
    if abs(scale) < 1e-5:
        text = "The scores have no effect: all visible keys have the same weight."
    elif scale > 10 * _LARGE:
        text = "There is no softmax: the largest score of a row gets all the weight."
    return Wrong("other_scale", text, "It is softmax(query @ key.T / √d) @ value, with d = query.shape[-1].")


def _distance(problem: Problem, chosen: Choices, got: Floats) -> float:
    """Return how far a formula is from a result, infinite where it has no number."""
    out, rows = compute(problem, chosen)
    if out.shape != got.shape or not rows.any():
        return np.inf
    return float(np.nan_to_num(np.abs(out - got)[rows].max(), nan=np.inf))


def _best(distance: Callable[[float], float]) -> float:
    """Return the number with the smallest distance: of a wide grid, and then of ever finer ones around the best."""
    grid = np.concatenate([-_GRID[::-1], [0.0], _GRID])
    for _ in range(_FINER):
        best = len(grid) - 1 - int(np.argmin([distance(float(number)) for number in grid[::-1]]))  # the last of equals
        around = grid[max(best - 1, 0)], grid[min(best + 1, len(grid) - 1)]
        grid = np.linspace(*around, 21)
    return float(grid[len(grid) // 2])
