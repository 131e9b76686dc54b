"""References: calls and their errors, repeated, leave no object behind and hold no argument longer.

Counted are the blocks of Python's allocator, and references to the arguments and to objects that always exist. In a
debug build of Python (`tools/sanitize references`) every reference counts.
"""

from __future__ import annotations

import ctypes
import gc
import sys
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import cattn
from every_call import CALLS, INPUTS, OUT, Call, fresh
from test_errors import CASES, WORKING, Row

REPEATS = 40  # a leak shows as so many
all_references: Callable[[], int] = getattr(sys, "gettotalrefcount", lambda: 0)
# immortal since Python 3.12: there these count nothing
EVERLASTING = [None, True, False, Ellipsis, 0, 1, np.dtype("f4"), np.dtype("f8"), np.dtype("?"), np.float32]
EVERLASTING += [cattn.AttentionOutput, cattn.TorchGenerator, cattn.CausalAlignmentWarning]


def counts(arguments: list[object]) -> list[int]:
    gc.collect()
    known = [sys.getrefcount(x) for x in (*EVERLASTING, *arguments)]
    return [sys.getallocatedblocks(), all_references(), *known]


def growth(call: Call, arguments: list[object]) -> int:
    """What repeating the call adds to one of the counts, the worst of them."""

    def repeat() -> None:
        for _ in range(REPEATS):
            call()

    gc.collect()
    gc.freeze()  # collections are short from now on
    worst = REPEATS
    for _ in range(4):  # what a cache takes up is not taken up again
        before = counts(arguments)
        repeat()
        worst = min(worst, max(b - a for a, b in zip(before, counts(arguments), strict=True)))
        if worst < REPEATS // 2:
            break
    gc.unfreeze()
    return worst


ARGUMENTS: list[object] = [*INPUTS.values(), OUT]


@pytest.mark.parametrize("name", CALLS)
def test_calls(name: str) -> None:
    assert growth(lambda: fresh(name), ARGUMENTS) < REPEATS // 2


@pytest.mark.parametrize("function", WORKING)
def test_errors(function: str) -> None:
    """All rows of the table of errors, one after the other."""
    arguments = [{**WORKING[function](), **row.changes} for name, row in CASES if name == function]
    errors = [row.error for name, row in CASES if name == function]

    def fail() -> None:
        for keywords, error in zip(arguments, errors, strict=True):
            try:
                getattr(cattn, function)(**keywords)
            except error:
                continue
            raise AssertionError("no error")

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert growth(fail, [value for keywords in arguments for value in keywords.values()]) < REPEATS // 2


def test_every_error_is_here() -> None:
    assert {name for name, _ in CASES} == WORKING.keys()
    assert all(isinstance(row, Row) for _, row in CASES)


def leak_an_object() -> None:
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(object()))


def leak_a_reference() -> None:
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(X))


def leak_an_old_reference() -> None:
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(cattn.AttentionOutput))


X = np.zeros(3)


@pytest.mark.parametrize("leak", [leak_an_object, leak_a_reference, leak_an_old_reference])
def test_leaks_would_show(leak: Callable[[], Any]) -> None:
    assert growth(leak, [X]) >= REPEATS
