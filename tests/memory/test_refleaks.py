"""Reference leaks: repeated calls and errors leave no object behind and keep no reference to an argument.

The tests count the blocks of Python's allocator and the references to arguments and to objects that always exist. A
debug build of Python checks more (`tools/sanitize references`). Its total number of references is of no use with a
NumPy that is not a debug build: the total counts an array when it is made, but not when it is freed.
"""

from __future__ import annotations

import ctypes
import gc
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import cattn
from support import find, own_blocks
from support.public_calls import CALLS, INPUTS, OUT, Call, fresh
from support.wrong_calls import CASES, WORKING, arguments_of

REPEATS = 40  # a leak of one object a call adds this many
# Objects that always exist. Some are immortal since Python 3.12 and have a constant count there.
EVERLASTING = [None, True, False, Ellipsis, 0, 1, np.dtype("f4"), np.dtype("f8"), np.dtype("?"), np.float32]
EVERLASTING += [cattn.AttentionOutput, cattn.TorchGenerator, cattn.CausalAlignmentWarning]


# Python caches the attributes of types, up to 4096 of them. The cache holds strings that NumPy makes anew for each
# `dtype.name`, and so grows slowly. The function that clears it has the first name since Python 3.13.
forget_attributes: Callable[[], None] = getattr(sys, "_clear_internal_caches", None) or sys._clear_type_cache


@pytest.fixture(scope="module", autouse=True)
def short_collections() -> Iterator[None]:
    """Keep what exists before these tests, a million objects of PyTorch among it, out of their many collections."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def counts(arguments: list[object]) -> list[int]:
    forget_attributes()
    gc.collect()
    known = [sys.getrefcount(x) for x in (*EVERLASTING, *arguments)]
    return [sys.getallocatedblocks(), *known]


def growth(call: Call, arguments: list[object]) -> int:
    """Return how much repeated calls add to a count, for the count that grows most."""

    def repeat() -> None:
        for _ in range(REPEATS):
            call()

    worst = REPEATS
    for _ in range(8):  # a cache fills up once, a leak grows in every round
        before = counts(arguments)
        repeat()
        worst = min(worst, max(b - a for a, b in zip(before, counts(arguments), strict=True)))
        if worst < REPEATS // 2:
            break
    return worst


def assert_level(call: Call, arguments: list[object]) -> None:
    """Assert that no count grows. If one does, a new process repeats the test: other tests may be the cause here."""
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


@pytest.mark.promise("leaks")
@pytest.mark.parametrize("name", CALLS)
def test_repeated_calls_leak_nothing(name: str) -> None:
    assert_level(lambda: fresh(name), ARGUMENTS)


@pytest.mark.promise("leaks")
@pytest.mark.parametrize("function", WORKING)
def test_repeated_errors_leak_nothing(function: str) -> None:
    """All rows of wrong_calls.py for the function, one after the other."""
    arguments = [arguments_of(name, row) for name, row in CASES if name == function]
    errors = [row.error for name, row in CASES if name == function]

    def fail() -> None:
        for keywords, error in zip(arguments, errors, strict=True):
            try:
                find(function)(**keywords)
            except error:
                continue
            raise AssertionError("no error")

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_level(fail, [value for keywords in arguments for value in keywords.values()])


OTHER_ERRORS: dict[str, tuple[type[Exception], Call]] = {
    "attention_backward": (ValueError, lambda: cattn.attention_backward(X, X, X, X, X, X)),
    "softmax_backward": (ValueError, lambda: cattn.softmax_backward(X, X[1:])),
    "dropout_backward": (ValueError, lambda: cattn.dropout_backward(X, 0.5)),
    "varlen_attention": (ValueError, lambda: cattn.varlen_attention(X, X, X, [0, 3], [0, 4])),
    "merge_attention": (TypeError, lambda: cattn.merge_attention(object(), [X])),  # type: ignore[arg-type]
    "explain": (ValueError, lambda: cattn.explain(X, X[:, 1:], X)),
    "generator, seed": (ValueError, lambda: cattn.TorchGenerator(2**65)),
    "generator, state": (ValueError, lambda: cattn.TorchGenerator(1).set_state(np.zeros(3, np.uint8))),
    "generator, size": (TypeError, lambda: cattn.TorchGenerator(1).rand("2")),  # type: ignore[arg-type]
    "cache": (ValueError, lambda: cattn.KVCache((), 1, 2, 3).append(X, X)),
    "layer": (ValueError, lambda: cattn.Linear(2, 3, rng=1)(X)),
}


@pytest.mark.parametrize("name", OTHER_ERRORS)
def test_repeated_errors_of_other_functions_leak_nothing(name: str) -> None:
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


@pytest.mark.parametrize(
    "leak", [pytest.param(leak_an_object, marks=own_blocks), leak_a_reference, leak_an_old_reference]
)
def test_a_leak_is_found(leak: Callable[[], Any]) -> None:
    assert growth(leak, [X]) >= REPEATS
