"""Fuzz target of the binding: calls of every public function, and of the C functions behind them, with any arguments.

Bytes become a call that works, of which up to three arguments are then replaced by something of any kind: wrong types,
odd strides, swapped bytes, subclasses, objects whose methods raise, sizes beyond memory, outputs that overlap inputs or
may not be written. The call returns, or raises a documented exception whose message names an argument; a call that
raises has written nothing and drawn nothing. Anything else is a finding.

    python fuzz/binding.py [libFuzzer's options] [corpus]   needs atheris; tools/fuzz calls it so
    from binding import run; run(data)                      one input, without atheris (tests/test_fuzz.py)
"""

from __future__ import annotations

import re
import resource
import sys
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
from arguments import Bytes, Ours, any_thing
from calls import CALLS, Finding, cattn

from cattn._input.types import AttentionOutput

MOST_MEMORY = 2 << 30
ALLOWED = (TypeError, ValueError, MemoryError, OverflowError)

# Names of arguments that a message may use: those of the call, what they are called inside, and these.
WORDS = {"dtype", "max_len", "head_dim", "v_head_dim", "cache", "outs", "lses", "size", "probability", "d_in", "d_out"}
WORDS |= {
    "heads",
    "lse",
    "seed",
    "state",
    "key",
    "value",
    "weights",
    "p",
    "mask",
    "leading",
    "forced",
    "rng",
    "low",
    "weight",
}
# What is not ours to word: Python's own words for keywords, positions and objects that misbehave.
FOREIGN = re.compile(
    r"nonsense|Hostile|non-string|returned non-|__\w+__|unhashable|NotImplemented|cannot be interpreted as an integer"
    r"|unexpected keyword|required positional|positional argument|takes no arguments"
)


# ---- one input -----------------------------------------------------------------------------------------------------
def memory_of(arguments: dict[str, Any]) -> list[tuple[np.ndarray, bytes]]:
    """Outputs as they are before the call."""
    out = arguments.get("out")
    fields = out if isinstance(out, AttentionOutput) else (out,)
    return [(a, a.tobytes()) for a in fields if isinstance(a, np.ndarray) and a.nbytes < 1 << 20 and a.dtype != object]


def overlapping(data: Bytes, arguments: dict[str, Any]) -> Any:
    """An output that is an input, part of it, or may not be written."""
    inputs = [a for a in arguments.values() if isinstance(a, np.ndarray) and a.ndim and a.size < 1 << 20]
    if not inputs:
        return None
    a = data.pick(inputs)
    kind = data.below(4)
    if kind == 0:
        return a
    if kind == 1:
        return a[..., ::-1]
    if kind == 2 and a.ndim:
        return AttentionOutput(a, data.pick((None, a)), data.pick((None, a)), None)
    still = a.copy()
    still.flags.writeable = False
    return still


def check(error: Exception, function: Callable[..., Any], arguments: dict[str, Any]) -> None:
    """Is this an exception that the documentation promises, in words that help?"""
    if isinstance(error, Finding):
        raise error
    if isinstance(error, (Ours, Warning)):
        return
    message = str(error)
    if not isinstance(error, ALLOWED) and type(error).__name__ != "BufferError":
        raise Finding(f"{type(error).__name__}: {message}") from error
    if isinstance(error, MemoryError) or FOREIGN.search(message):
        return
    names = WORDS | set(arguments) | set(getattr(function, "names", ()))
    if not names & set(re.findall(r"\w+", message)):
        raise Finding(f"names no argument: {type(error).__name__}: {message}") from error


def run(raw_bytes: bytes) -> None:
    """Make the call that these bytes stand for; raise Finding for what should not be."""
    data = Bytes(raw_bytes)
    replaced = [(data.below(32), data.below(4)) for _ in range(data.below(4))]
    function, make = data.pick(CALLS)
    arguments = make(data)
    names = list(arguments)
    for index, _ in replaced:
        name = names[index % len(names)]
        arguments[name] = overlapping(data, arguments) if name == "out" and data.chance(2) else any_thing(data)
    if data.chance(16):
        arguments["out"] = overlapping(data, arguments) if "out" in names else arguments.get("out")
        arguments = {name: arguments[name] for name in arguments if name in names}
    before = memory_of(arguments)
    rng = arguments.get("rng")
    state = rng.get_state() if isinstance(rng, cattn.TorchGenerator) else None
    try:
        function(**arguments)
    except Exception as error:
        check(error, function, arguments)
        for out, bits in before:
            if out.tobytes() != bits:
                raise Finding("a call that raised has written to out") from error
        if state is not None and not np.array_equal(rng.get_state(), state):
            raise Finding("a call that raised has drawn") from error


def bounded() -> None:
    """No allocation of gigabytes may succeed, and no NumPy warning may stop a call."""
    warnings.simplefilter("ignore")
    np.seterr(all="ignore")
    resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY, resource.RLIM_INFINITY))


if __name__ == "__main__":
    import atheris

    bounded()
    atheris.Setup(sys.argv, run)
    atheris.Fuzz()
