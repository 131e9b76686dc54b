"""What `diagnose` checks of dropout: how much is dropped, where, and that the mean stays."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ._formulas import Wrong, matches
from ._report import Mistake
from ._subject import RefusedError, is_module

if TYPE_CHECKING:
    from ._probe import Probe

Floats = NDArray[np.float64]
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
            results = [self.call(self.inputs) for _ in range(12)]
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
