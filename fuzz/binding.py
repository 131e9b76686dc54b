"""Fuzz target of the binding: calls of every public function with any arguments.

Bytes become a call that works. Then up to three arguments are replaced by anything: wrong types, odd strides, swapped
bytes, subclasses, objects whose methods raise, sizes beyond memory, outputs that overlap inputs or are read-only. The
call must return, or raise a documented exception whose message names an argument. A call that raises must not have
written to its output or drawn random numbers. Anything else is a finding.

    python fuzz/binding.py [libFuzzer's options] [corpus]   with atheris, as tools/fuzz does
    from binding import run; run(data)                      one input without atheris: tests/project/test_fuzz.py
"""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
from arguments import Bytes, Ours, any_thing
from calls import CALLS, MORE_CALLS, Finding, cattn, list_keys, more_options, quantize

from cattn._input.types import AttentionOutput

MOST_MEMORY = 2 << 30
ALLOWED = (TypeError, ValueError, MemoryError, OverflowError)

# Messages may name the arguments of the call, and these.
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
# Messages that Python words: about keywords, positions and objects whose methods fail.
FOREIGN = re.compile(
    r"nonsense|Hostile|non-string|returned non-|__\w+__|unhashable|NotImplemented|cannot be interpreted as an integer"
    r"|unexpected keyword|required positional|positional argument|takes no arguments"
)


# ---- one input -----------------------------------------------------------------------------------------------------
def memory_of(arguments: dict[str, Any]) -> list[tuple[np.ndarray, bytes]]:
    """Return copies of the outputs before the call."""
    out = arguments.get("out")
    fields = out if isinstance(out, AttentionOutput) else (out,)
    return [(a, a.tobytes()) for a in fields if isinstance(a, np.ndarray) and a.nbytes < 1 << 20 and a.dtype != object]


def overlapping(data: Bytes, arguments: dict[str, Any]) -> Any:
    """Return an output that is an input, a view of one, or read-only."""
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
    """Raise Finding unless the documentation promises this exception and its message names an argument."""
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
    """Make the call of these bytes; raise Finding if it misbehaves."""
    data = Bytes(raw_bytes)
    first = data.below(256)
    replaced = [(data.below(32), data.below(4)) for _ in range(first % 4)]
    function, make = data.pick(MORE_CALLS if first >= 192 else CALLS)
    arguments = make(data)
    names = list(arguments)
    for index, _ in replaced:
        name = names[index % len(names)]
        arguments[name] = overlapping(data, arguments) if name == "out" and data.chance(2) else any_thing(data)
    if data.chance(16):
        arguments["out"] = overlapping(data, arguments) if "out" in names else arguments.get("out")
        arguments = {name: arguments[name] for name in arguments if name in names}
    quantize(data, function, arguments)
    list_keys(data, function, arguments)
    more_options(data, function, arguments)
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
    """Let allocations of gigabytes fail, and ignore warnings of NumPy."""
    import resource  # Windows has none, and runs the stored inputs

    warnings.simplefilter("ignore")
    np.seterr(all="ignore")
    resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY, resource.RLIM_INFINITY))


if __name__ == "__main__":
    import atheris

    bounded()
    atheris.Setup(sys.argv, run)
    atheris.Fuzz()
