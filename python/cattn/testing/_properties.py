"""Checks that need no formula: properties of attention, and of dropout."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ._formulas import AXES, CAUSAL, FULL, GIVEN, METHODS, PADDING, Wrong, matches
from ._function import RefusedError, is_module
from ._report import Mistake

if TYPE_CHECKING:
    from ._function import Probe


Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Found = tuple[Wrong, Floats, Floats, Floats | None]

BATCH = Wrong(
    "batch_mixed",
    "The entries of a batch are mixed: what stands in one entry changes the result of another.",
    "Keep the batch axis apart: reshape and softmax must not join it with the tokens.",
)
ROW_SUMS = Wrong("rows_not_one", "Rows of weights do not sum to 1: equal tokens, or values of 1, do not come back.")
_FUTURE = CAUSAL["none"]._replace(
    text="A token sees the tokens after it: there is no causal mask, it has no effect, or a second softmax undoes it."
)
_UNSEEN = Wrong("hides_too_much", "A token does not see all the tokens that it should see.")
SOME = Wrong("wrong_mask", "Tokens see other tokens than they should.")


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


def influence(call: Callable[..., Floats], tolerance: float, *inputs: Floats) -> Bools:
    """Return which key and value, or token of one array (column), changes which result (row) of the last sequence."""
    T = inputs[0].shape[-2]
    found = np.zeros((T, T), np.bool_)
    rng = np.random.default_rng(6)
    before = call(*inputs)
    for j in range(T):
        for _ in range(2):
            changed = tuple(array.copy() for array in inputs)
            for array in changed[-2:]:
                array[..., j, :] += 3 * rng.standard_normal(array.shape[-1])
            rows = differs(call(*changed), before, tolerance)
            found[:, j] |= rows if rows.ndim == 1 else rows[-1].reshape(-1, T).any(axis=0)
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
    return _FUTURE if seen[~lower].all() else SOME


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
    return ROW_SUMS, equal, got, np.array(right)


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
    wrong = _pattern(influence(call, tolerance, x), causal)
    if wrong is None:
        return found

    def of_part(part: Floats) -> Found | None:
        seen = influence(call, tolerance, part)
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
    seen = influence(call, tolerance, x[:1] if x.ndim == 3 else x) | np.eye(T, dtype=np.bool_)
    given = masks["mask"]
    base = np.tri(T, dtype=np.bool_) if causal else np.ones((T, T), np.bool_)
    if not (seen & ~(given & base)).any():
        return None
    others = {"inverted": ~given, "transposed": given.T, "none": np.ones_like(given)}
    for name, mask in others.items():  # the first and last rows may see nothing, and then anything
        if np.array_equal(seen[1:-1], ((mask & base) | np.eye(T, dtype=np.bool_))[1:-1]):
            return GIVEN[name], x, call(x)
    return SOME, x, call(x)


_SAMPLES = 1600  # results from which the mean of dropout is estimated
_BATCH = 200  # of them in one call
_P, _SMALL = 0.2, 0.001  # p and 1 - p must differ
_NAMES = ("p", "dropout_p", "dropout", "dropout_rate", "drop_prob", "attn_dropout", "attention_dropout", "p_dropout")
_KEPT = "Keep a weight where a random number in [0, 1) is at least p."
_AFTER = "Drop weights, after the softmax, and divide the kept ones by 1 - p."


class Dropout:
    """The checks for one subject: a function with an argument for the probability, or a module in training mode."""

    def __init__(self, probe: Any, ndim: int) -> None:
        self.probe: Probe = probe
        self.owner = probe
        self.function = probe.subject.function
        self.argument: str | None = probe.subject.masks.dropout
        self.trains = self.argument is None and hasattr(self.function, "train") and hasattr(self.function, "eval")
        depth = None if probe.width else 2 * probe.num_heads if probe.splits else 2
        self.inputs = tuple(np.round(a, 1) for a in probe.draw(probe.shape(ndim, T=3, lead=1, depth=depth), 4))
        self.rest = probe.shape(ndim, lead=1)

    def without(self) -> Mistake | None:
        """Return the mistake if the probability 0 drops everything, or divides by 0."""
        if self.argument is None:
            return None
        try:
            got = self.probe.call(self.inputs, dropout_p=0.0)
            most = self.probe.call(self.inputs, dropout_p=1 - _SMALL**2)
        except RefusedError:
            return None
        named = self.probe.named(self.inputs)
        if not got.any() and np.isfinite(most).all() and most.any():
            text = f"Weights are kept with probability {self.argument} and not dropped with it: 0 drops all."
            return Mistake("dropout_keeps_p", text, _KEPT, named, got)
        if not np.isfinite(got).all() and np.isfinite(most).all():
            text = f"{self.argument}=0 gives NaN or infinity."
            return Mistake("dropout_mean", text, "Divide kept weights by 1 - p, not by p.", named, got)
        return None

    def check(self) -> None:
        """Add the mistake of dropout, if there is one."""
        if self.argument is None and not self.trains:
            return
        try:
            right = self.probe.call(self.inputs)
        except RefusedError:  # it takes one number of tokens only
            self.inputs = self.probe.draw(self.rest, 4)
            right = self.probe.call(self.inputs)
        own = [p for _, _, p in _owners(self.function)]
        known, used = self.argument is not None or bool(own), self.argument is not None or any(own)
        with self.training():
            if known and not used and np.array_equal(self.probe.call(self.inputs), right):  # it is turned off
                return
            wrong, got = self.find(right, known, used)
        if wrong is not None:
            shown = right if wrong.name.startswith("dropout") else None
            named = self.probe.named(self.inputs)
            self.owner.mistakes.append(Mistake(wrong.name, wrong.text, wrong.cure, named, got, shown))

    def find(self, right: Floats, known: bool, used: bool) -> tuple[Wrong | None, Floats]:
        """Return the mistake and the result that shows it."""
        rows = np.ones(right.shape[:-1], np.bool_)
        with self.probability(_P):
            first, second = self.call(self.inputs), self.call(self.inputs)
            if np.array_equal(first, second) and matches(first, right, rows, 1e-6):
                what = f"{self.argument}={_P}" if self.argument else "In training mode dropout"
                wrong = Wrong("no_dropout", f"{what} has no effect.", "Apply it to the weights, after the softmax.")
                return (wrong if used else None), first
        self.owner.has_checked("the mean over dropout")
        if known and (found := self.keeps(right)) is not None:
            return found
        if (found := self.before_softmax()) is not None:
            return found
        with self.probability(_P):
            if self.argument is not None and (found := self.single_elements(right)) is not None:
                return found
            if not self.probe.is_only_attention():
                self.owner.not_checked.append("the mean over dropout, because other layers follow it")
                return None, first
            return self.mean(right, _P if known else None)

    # ---- the probability ----
    @contextlib.contextmanager
    def training(self) -> Iterator[None]:
        """Put a module into training mode; and back at the end."""
        if self.trains:
            self.function.train()
        try:
            yield
        finally:
            if self.trains:
                self.function.eval()

    @contextlib.contextmanager
    def probability(self, p: float) -> Iterator[None]:
        """Drop with probability p: by the argument, or by the attributes of the module, which come back at the end."""
        self.p = p
        changed = []
        try:
            for owner, name, before in [] if self.argument else _owners(self.function):
                with contextlib.suppress(AttributeError):
                    setattr(owner, name, p)
                    changed.append((owner, name, before))
            yield
        finally:
            for owner, name, before in changed:
                setattr(owner, name, before)

    def call(self, inputs: tuple[Floats, ...]) -> Floats:
        """Return a result of dropout."""
        return self.probe.call(inputs, **({} if self.argument is None else {"dropout_p": self.p}))

    # ---- the checks ----
    def keeps(self, right: Floats) -> tuple[Wrong, Floats] | None:
        """Return the mistake if a small probability changes nearly everything."""
        rows = np.ones(right.shape[:-1], np.bool_)
        with self.probability(_SMALL):
            results = [self.call(self.inputs) for _ in range(40)]
        if any(matches(got, right, rows, max(0.02, self.probe.subject.tolerance)) for got in results):
            return None
        text = f"Weights are kept with probability p and not dropped with it: p = {_SMALL} leaves nearly nothing."
        return Wrong("dropout_keeps_p", text, _KEPT), results[0]

    def before_softmax(self) -> tuple[Wrong, Floats] | None:
        """Return the mistake if rows of weights sum to 1 in spite of dropout, so that equal values stay as they are."""
        one = np.s_[..., :1, :]
        equal = tuple(
            np.ascontiguousarray(np.broadcast_to(array[one], array.shape)) if array is self.inputs[-1] else array
            for array in self.inputs
        )
        with self.probability(_P):
            results = [self.call(equal) for _ in range(8)]
        rows = np.ones(results[0].shape[:-1], np.bool_)
        if not all(matches(got, results[0], rows, self.probe.subject.tolerance) for got in results):
            return None
        text = "Rows of weights sum to 1 after dropout, because it acts before the softmax or they are divided again."
        return Wrong("dropout_before_softmax", text, _AFTER), results[0]

    def single_elements(self, right: Floats) -> tuple[Wrong, Floats] | None:
        """Return the mistake if dropout sets single elements of the result to 0, and not whole weights."""
        if right.shape[-1] == 1 or not right.all():
            return None
        for _ in range(20):
            got = self.call(self.inputs)
            zeros = (got == 0).sum(axis=-1)
            if ((zeros > 0) & (zeros < got.shape[-1])).any():
                text = "Dropout acts on elements of the values or of the result, not on the weights."
                return Wrong("dropout_place", text, _AFTER), got
        return None

    def mean(self, right: Floats, p: float | None) -> tuple[Wrong | None, Floats]:
        """Return the mistake if the mean over dropout is not the result without it."""
        samples = self.samples()
        mean, error = samples.mean(axis=0), samples.std(axis=0) / len(samples) ** 0.5
        floor = self.probe.subject.tolerance * np.abs(right).max()
        if (np.abs(mean - right) <= 8 * error + floor).all():
            return None, mean
        centred = right - right.mean(axis=-2, keepdims=True)
        ratio = float(((mean - mean.mean(axis=-2, keepdims=True)) * centred).sum() / (centred**2).sum())
        said = f"In training the mean of the result is {ratio:.2f} times the result without dropout"
        if p is not None and abs(ratio - (1 - p)) < 0.15 * p:
            text, cure = f"{said}: kept weights are not divided by 1 - p.", "Divide kept weights by 1 - p."
            return Wrong("dropout_not_rescaled", text, cure), mean
        if p is None and ratio < 1:
            return Wrong("dropout_not_rescaled", f"{said}.", "Divide kept weights by 1 - p."), mean
        return Wrong("dropout_mean", f"{said}, and dropout must not change the mean.", _AFTER), mean

    def samples(self) -> Floats:
        """Return many results of dropout for one input: from the entries of a batch if each has its own draw."""
        inputs = self.inputs
        if inputs[0].ndim > 2:
            many = tuple(np.repeat(array, _BATCH, axis=0) for array in inputs)
            drawn = self.call(many)
            if not np.array_equal(drawn[0], drawn[1]):
                results = [drawn, *(self.call(many) for _ in range(_SAMPLES // _BATCH - 1))]
                return np.concatenate(results)[:, None]
        return np.stack([self.call(inputs) for _ in range(_SAMPLES)])


def _owners(function: Any) -> list[tuple[Any, str, float]]:
    """Return the objects of a module with an attribute for the probability, and its value."""
    inside = function.modules() if is_module(function) else [function, *getattr(function, "__dict__", {}).values()]
    found = []
    for owner in inside:
        for name in _NAMES:
            p = getattr(owner, name, None)
            if isinstance(p, (int, float)) and not isinstance(p, bool) and 0 <= p < 1:
                found.append((owner, name, p))
    return found
