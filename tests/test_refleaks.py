"""References: calls and their errors, repeated, leave no object behind and hold no argument longer.

Counted are the blocks of Python's allocator, and references to the arguments and to objects that always exist. A debug
build of Python checks more (`tools/sanitize references`), but its total of references is of no use beside a NumPy that
does not take part in it: an array counts when it is made and not when it goes.
"""

from __future__ import annotations

import ctypes
import gc
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import cattn
from every_call import CALLS, INPUTS, OUT, Call, fresh
from support import UNDER_SANITIZER
from wrong_calls import CASES, WORKING

REPEATS = 40  # a leak shows as so many
# immortal since Python 3.12: there these count nothing
EVERLASTING = [None, True, False, Ellipsis, 0, 1, np.dtype("f4"), np.dtype("f8"), np.dtype("?"), np.float32]
EVERLASTING += [cattn.AttentionOutput, cattn.TorchGenerator, cattn.CausalAlignmentWarning]


# Python remembers which attributes its types have, and with them strings that NumPy makes anew at each `dtype.name`:
# up to 4096 of them, which repeats take up slowly. Forgotten by the first name since 3.13, by the other before.
forget_attributes: Callable[[], None] = getattr(sys, "_clear_internal_caches", None) or sys._clear_type_cache


def counts(arguments: list[object]) -> list[int]:
    forget_attributes()
    gc.collect()
    known = [sys.getrefcount(x) for x in (*EVERLASTING, *arguments)]
    return [sys.getallocatedblocks(), *known]


def growth(call: Call, arguments: list[object]) -> int:
    """What repeating the call adds to one of the counts, the worst of them."""

    def repeat() -> None:
        for _ in range(REPEATS):
            call()

    gc.collect()
    gc.freeze()  # collections are short from now on
    worst = REPEATS
    for _ in range(8):  # what a cache takes up is not taken up again, a leak comes each time
        before = counts(arguments)
        repeat()
        worst = min(worst, max(b - a for a, b in zip(before, counts(arguments), strict=True)))
        if worst < REPEATS // 2:
            break
    gc.unfreeze()
    return worst


def assert_level(call: Call, arguments: list[object]) -> None:
    """What grows after thousands of tests may be another's doing: then a process of its own decides."""
    found = growth(call, arguments)
    if found >= REPEATS // 2 and "CATTN_TEST_ALONE" not in os.environ:
        test = os.environ["PYTEST_CURRENT_TEST"].rpartition(" ")[0].rpartition("::")[2]
        command = [sys.executable, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", f"{__file__}::{test}"]
        done = subprocess.run(command, env={**os.environ, "CATTN_TEST_ALONE": "1"}, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout
        return
    assert found < REPEATS // 2


X = np.zeros((3, 3))
ARGUMENTS: list[object] = [*INPUTS.values(), OUT]


@pytest.mark.parametrize("name", CALLS)
def test_calls(name: str) -> None:
    assert_level(lambda: fresh(name), ARGUMENTS)


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
        assert_level(fail, [value for keywords in arguments for value in keywords.values()])


OTHER_ERRORS: dict[str, tuple[type[Exception], Call]] = {
    "gradients": (ValueError, lambda: cattn.attention_backward(X, X, X, X, X, X)),
    "softmax's": (ValueError, lambda: cattn.softmax_backward(X, X[1:])),
    "dropout's": (ValueError, lambda: cattn.dropout_backward(X, 0.5)),
    "packed": (ValueError, lambda: cattn.varlen_attention(X, X, X, [0, 3], [0, 4])),
    "merged": (TypeError, lambda: cattn.merge_attention(object(), [X])),  # type: ignore[arg-type]
    "explained": (ValueError, lambda: cattn.explain(X, X[:, 1:], X)),
    "generator": (ValueError, lambda: cattn.TorchGenerator(2**65)),
    "its state": (ValueError, lambda: cattn.TorchGenerator(1).set_state(np.zeros(3, np.uint8))),
    "its shape": (TypeError, lambda: cattn.TorchGenerator(1).rand("2")),  # type: ignore[arg-type]
    "cache": (ValueError, lambda: cattn.KVCache((), 1, 2, 3).append(X, X)),
    "layer": (ValueError, lambda: cattn.Linear(2, 3, rng=1)(X)),
}


@pytest.mark.parametrize("name", OTHER_ERRORS)
def test_other_errors(name: str) -> None:
    error, call = OTHER_ERRORS[name]

    def fail() -> None:
        with pytest.raises(error):
            call()

    assert_level(fail, [X])


def leak_an_object() -> None:
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(object()))


def leak_a_reference() -> None:
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(X))


def leak_an_old_reference() -> None:
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(cattn.AttentionOutput))


own_blocks = pytest.mark.skipif(UNDER_SANITIZER, reason="Python counts the blocks of its own allocator")


@pytest.mark.parametrize(
    "leak", [pytest.param(leak_an_object, marks=own_blocks), leak_a_reference, leak_an_old_reference]
)
def test_leaks_would_show(leak: Callable[[], Any]) -> None:
    assert growth(leak, [X]) >= REPEATS
