"""Lets each allocation of each call of public_calls.py fail in turn. test_faults.py runs it under its preloaded shim.

The shim fails one allocation that the extension requests, directly or through Python and NumPy. The call must raise
MemoryError or give the right bits (a thread that cannot start is no error). It must leave inputs and generators as they
were and `out` either untouched or complete, leak nothing, and the next call must be right. The script prints how often
each function failed.

With the argument `leak`, `write` or `lie` it makes a call with that fault, which it must find.
"""

from __future__ import annotations

import collections
import ctypes
import gc
import json
import sys
import warnings
from typing import Any

import numpy as np

import cattn
from cattn import _cattn
from support.public_calls import CALLS, INPUTS, OUT, Call, contents

_shim = ctypes.CDLL(None)
fail_in = ctypes.c_int.in_dll(_shim, "fail_in")
failed = ctypes.c_char_p.in_dll(_shim, "failed")
live = ctypes.c_long.in_dll(_shim, "live")
UNTOUCHED = 7.0
UNTOUCHED_BITS = np.full_like(OUT, UNTOUCHED).tobytes()
GENERATOR = cattn.TorchGenerator(1)
STATE = GENERATOR.get_state()
INPUT_BITS = contents(INPUTS)
failures: collections.Counter[str] = collections.Counter()


def settle() -> None:
    """Restore the state before the first call."""
    assert _cattn._release()
    gc.collect()
    OUT[...] = UNTOUCHED
    GENERATOR.set_state(STATE)


def failing(call: Call, n: int) -> tuple[bool, object]:
    """Make the call with its n-th allocation failing. Return whether it has n, and its result or None (MemoryError)."""
    settle()
    failed.value = None
    try:
        fail_in.value = n
        result = call()
    except MemoryError:
        result = None
    enough = fail_in.value == 0
    fail_in.value = 0
    return enough, result


def leaks(call: Call, n: int) -> bool:
    """Return whether ten failures in a row leak blocks. One may be a cache of Python or NumPy that grows."""
    for _ in range(10):
        settle()
        before = live.value
        assert failing(call, n)[0]
        settle()
        if live.value <= before:
            return False
    return True


def sweep(name: str, call: Call) -> None:
    settle()
    right, out = contents(call()), OUT.tobytes()
    n = 1
    while True:
        enough, result = failing(call, n)
        what = f"{name}, allocation {n}, {failed.value!r}"
        if result is None:
            assert enough, f"{what}: no memory, but nothing failed"
            assert OUT.tobytes() in (UNTOUCHED_BITS, out), f"{what}: out was written in part"
            assert (GENERATOR.get_state() == STATE).all(), f"{what}: the generator has moved"
        else:
            assert contents(result) == right, f"{what}: another result"
        assert contents(INPUTS) == INPUT_BITS, f"{what}: an input was written"
        del result
        if not enough:
            return
        failures[failed.value.decode()] += 1
        assert not leaks(call, n), f"{what}: blocks leak"
        settle()
        assert contents(call()) == right, f"{what}: the next call gives another result"
        n += 1


Q, HALF, SCORES = INPUTS["QUERY"], INPUTS["HALF"], INPUTS["SCORES"]
WIDE = np.broadcast_to(Q, (2, *Q.shape))  # gradients of Q are summed after the core has computed them
LSE = np.zeros(WIDE.shape[:-1], np.float32)
DRAWN: dict[str, Any] = {"dropout_p": 0.5, "rng": GENERATOR}
ONE_GENERATOR: dict[str, Call] = {  # the calls that go on after they have drawn
    "attention": lambda: cattn.causal_attention(Q, Q, Q, return_dropout_mask=True, **DRAWN),
    "weights": lambda: cattn.attention_weights(Q, Q, stage="dropout", **DRAWN),
    "weights of halves": lambda: cattn.attention_weights(HALF, HALF, stage="dropout", **DRAWN),
    "gradients": lambda: cattn.attention_backward(WIDE, Q, Q, WIDE, WIDE, LSE, merged=True, **DRAWN),
    "dropout": lambda: cattn.dropout(SCORES, rng=GENERATOR, return_mask=True),
}


def with_a_fault(kind: str) -> object:
    leaked = with_a_fault.__dict__.setdefault("leaked", [])
    try:
        return CALLS["rows, threads"]()
    except MemoryError:
        if kind == "leak":
            leaked.append(np.empty(5000))
        elif kind == "write":
            INPUTS["QUERY"][0, 0, 0, 0] += 1
        elif kind == "lie":
            return 0
        raise


if __name__ == "__main__":
    warnings.simplefilter("error")
    calls: dict[str, Call] = {**CALLS, **{f"one generator, {name}": call for name, call in ONE_GENERATOR.items()}}
    if len(sys.argv) > 1:
        calls = {sys.argv[1]: lambda: with_a_fault(sys.argv[1])}
    for call in calls.values():
        call()  # fills caches
    gc.collect()
    gc.freeze()  # makes the many later collections short
    for name, call in calls.items():
        sweep(name, call)
    print(json.dumps(failures))
