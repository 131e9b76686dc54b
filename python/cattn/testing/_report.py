"""The report of `diagnose`: mistakes, each with a sentence, a cure and the smallest failing input."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .._input.types import html_table
from ..functional import show_mask

Array = NDArray[Any]


@dataclass(frozen=True, eq=False)
class Mistake:
    """A mistake that `cattn.testing.diagnose` found.

    Attributes
    ----------
    name : str
        A short name for programs, such as ``"sees_future"``; the page "Tests of your attention" lists them all.
    text : str
        The mistake in one sentence.
    cure : str
        What to do, or an empty string.
    inputs : dict of str to ndarray
        The smallest input that was found to fail, by the names of the arguments. Empty if the function raised.
    got : ndarray or None
        What the function returned for it.
    right : ndarray or None
        The right result, or None where the mistake shows without one.
    seen : ndarray of bool or None
        Who sees whom: which key, a column, changes the result of which query, a row. In a function of one array a token
        changes its own. None where it is right, or was not looked at.
    visible : ndarray of bool or None
        Who should see whom.
    """

    name: str
    text: str
    cure: str = ""
    inputs: Mapping[str, Array] = field(default_factory=dict)
    got: Array | None = None
    right: Array | None = None
    seen: Array | None = None
    visible: Array | None = None

    def __str__(self) -> str:
        return f"{self.name}: {self.text}" + (f" {self.cure}" if self.cure else "")

    def __repr__(self) -> str:
        return f"<Mistake {self}>"

    def _arrays(self) -> dict[str, Array]:
        """Return the arrays to show, with their labels."""
        results = {"returned": self.got, "right": self.right}
        return {**self.inputs, **{name: array for name, array in results.items() if array is not None}}

    def _who_sees_whom(self) -> list[str]:
        """Return the lines of both matrices side by side, as `cattn.show_mask` prints them."""
        if self.seen is None or self.visible is None:
            return []
        T = len(self.seen)
        left, right = (show_mask(T, attn_mask=mask).splitlines() for mask in (self.seen, self.visible))
        width = max(len(left[0]), len("who sees whom")) + 4
        return [f"{a:<{width}}{b}" for a, b in zip(["who sees whom", *left], ["who should", *right], strict=True)]

    def _same_input(self, other: Mistake | None) -> bool:
        return other is not None and self.inputs is other.inputs and self.got is other.got


@dataclass(frozen=True, eq=False)
class Report:
    """The result of `cattn.testing.diagnose`. An interpreter and a notebook show it as text.

    Attributes
    ----------
    mistakes : tuple of Mistake
        What is wrong, or an empty tuple.
    notes : tuple of str
        What is worth knowing, but no mistake.
    checked : tuple of str
        What was checked.
    not_checked : tuple of str
        What could not be checked, and the reason.
    subject : str
        What was tested.
    """

    mistakes: tuple[Mistake, ...]
    notes: tuple[str, ...] = ()
    checked: tuple[str, ...] = ()
    not_checked: tuple[str, ...] = ()
    subject: str = "attention"

    @property
    def ok(self) -> bool:
        """Whether no mistake was found."""
        return not self.mistakes

    def raise_if_wrong(self) -> None:
        """Raise an AssertionError with the whole report if there is a mistake."""
        if self.mistakes:
            raise AssertionError(str(self))

    def __str__(self) -> str:
        n = len(self.mistakes)
        found = f"{n} mistake{'s' * (n != 1)}" if n else "no mistake found"
        lines = [f"{self.subject}: {found}"]
        before: Mistake | None = None
        for mistake in self.mistakes:
            lines += ["", f"{mistake.name}: {mistake.text}"]
            lines += [f"    {mistake.cure}"] * bool(mistake.cure)
            if mistake._same_input(before):
                lines.append("    It fails for the same input.")
            elif mistake.inputs:
                lines.append("    The smallest input found that fails:")
                lines += [_shown(name, array) for name, array in mistake._arrays().items()]
            lines += ["        " + line for line in mistake._who_sees_whom() if not mistake._same_input(before)]
            before = mistake
        lines += [""] * bool(n)
        lines += [f"note: {note}" for note in self.notes]
        lines += [f"checked: {', '.join(self.checked)}"] * bool(self.checked)
        lines += [f"not checked: {text}" for text in self.not_checked]
        return "\n".join(lines).rstrip()

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        rows: list[tuple[str, str]] = []
        before: Mistake | None = None
        for mistake in self.mistakes:
            rows.append((mistake.name, f"{mistake.text} {mistake.cure}".strip()))
            if mistake.inputs and not mistake._same_input(before):
                rows += [(name, _numbers(array)) for name, array in mistake._arrays().items()]
                rows += [("", "\n".join(lines))] if (lines := mistake._who_sees_whom()) else []
            before = mistake
        rows += [("note", note) for note in self.notes]
        rows += [("checked", ", ".join(self.checked))] * bool(self.checked)
        rows += [("not checked", text) for text in self.not_checked]
        title = f"{self.subject}: {'no mistake found' if self.ok else 'mistakes found'}"
        return html_table(title, rows)


def _numbers(array: Array) -> str:
    return np.array2string(array, precision=4, suppress_small=True, separator=", ", threshold=60)


def _shown(name: str, array: Array) -> str:
    """Return an array with its name, indented; rows after the first stand below it."""
    head = f"        {name:<9} "
    return head + _numbers(array).replace("\n", "\n" + " " * len(head))
