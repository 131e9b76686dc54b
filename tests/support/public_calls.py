"""Small calls of every public function: random ones of support/functions.py, on each path and with threads, and a few
that no random call is.

For tests that do the same with all of them: count their references, fail their allocations, run them under valgrind. A
call gives the same bits whenever it is made. fresh() makes it without threads and scratch of earlier calls.

    python tests/support/public_calls.py            makes each call once with every kernel table of the build
    python tests/support/public_calls.py sweep 0    lets each allocation of every 40th call fail in turn; 0 to 39
    python tests/support/public_calls.py leak       makes a call with a fault that the sweep must find; or write, lie

test_faults.py runs the sweep under its preloaded shim, which fails one allocation that the extension requests, directly
or through Python and NumPy. The call must raise MemoryError or give the right bits (a thread that cannot start is no
error). It must leave inputs and generators as they were and `out` either untouched or complete, leak nothing, and the
next call must be right. The sweep prints how often each function failed.
"""

from __future__ import annotations

import collections
import ctypes
import functools
import gc
import json
import sys
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

import cattn
from cattn import _cattn
from support import PATHS, forced, number_of
from support.calls import Limits, from_rng
from support.functions import FUNCTIONS, Work
from support.rows import IN_C, IS_ATTENTION

Call = Callable[[], object]

# ---- what no random call is ------------------------------------------------------------------------------------------
_draw = np.random.default_rng(0)
QUERY, KEY, VALUE = (_draw.standard_normal((2, 2, n, 8)).astype(np.float32) for n in (101, 197, 197))
HALF, DOUBLE, SWAPPED = (
    QUERY[:, 0].astype(np.float16),
    QUERY[:, 0, :40].astype(np.float64),
    QUERY[:, 1, :40].astype(">f4"),
)
LISTS = _draw.integers(-1, 197, (101, 30))
INPUTS = {name: value for name, value in globals().items() if isinstance(value, np.ndarray)}
OUT = np.empty_like(QUERY)


def _attend_in_place() -> object:
    x = DOUBLE.copy()
    return cattn.scaled_dot_product_attention(x, x, x, out=x[::-1])


def _differentiate(**options: Any) -> object:
    lse = np.zeros(QUERY.shape[:-1], np.float32)
    with cattn.num_threads(3):
        return cattn.attention_backward(QUERY, QUERY, KEY, VALUE, QUERY, lse, merged=True, **options)


def _decode(dtype: str) -> object:
    cache = cattn.KVCache((2,), 2, 50, 8, dtype=dtype)
    cache.append(KEY[:, :, :40], VALUE[:, :, :40])
    cache.truncate(np.array([30, 20]))
    cache.keep([[*range(20), 29], [19, 3]])
    cache.reorder([1, 0])
    cache = cache.fork()
    offset = cache.query_offset()
    cache.append(KEY[:, :, 40:42], VALUE[:, :, 40:42])
    out = cattn.causal_attention(QUERY[:, :, :2], cache.k, cache.v, query_offset=offset)
    return out, cache.lengths, repr(cache)


CALLS: dict[str, Call] = {
    "tiny": lambda: cattn.softmax(cattn.causal_attention(DOUBLE[0, :3], DOUBLE[0, :3], DOUBLE[0, :3])),
    "mixed": lambda: cattn.scaled_dot_product_attention(DOUBLE, SWAPPED[:, ::-1], DOUBLE.tolist()),
    "ranges": lambda: cattn.causal_attention(
        QUERY, KEY, VALUE, query_offset=[3, 90], window_size=(60, 0), key_value_seq_starts=[6, 21]
    ),
    "gradients of lists": lambda: _differentiate(key_indices=LISTS),
    "a dropout mask of PyTorch": lambda: cattn.causal_attention(
        QUERY, KEY, VALUE, dropout_p=0.3, rng=cattn.TorchGenerator(5), return_dropout_mask=True
    ),
    "out": lambda: cattn.scaled_dot_product_attention(QUERY, KEY, VALUE, out=OUT),
    "out, tuple": lambda: cattn.scaled_dot_product_attention(QUERY, KEY, VALUE, out=cattn.AttentionOutput(OUT)),
    "out, overlapping": _attend_in_place,
    "masked_softmax, several axes": lambda: cattn.masked_softmax(DOUBLE, axis=(0, 2), is_causal="upper_left"),
    "masked_softmax, name made at run time": lambda: cattn.masked_softmax(**{"".join(("sco", "res")): DOUBLE}),
    "dropout_backward, integers": lambda: cattn.dropout_backward([2**53 + 1, 2**53 + 3], 0.5, mask=True),
    **{f"a cache of {dtype}": functools.partial(_decode, dtype) for dtype in ("float32", "int8", "float8_e4m3fn")},
    "manual_seed": lambda: cattn.manual_seed(3).rand(2),
    "show_config": lambda: sorted(cattn.show_config("dicts")),
}


# ---- random calls ----------------------------------------------------------------------------------------------------
def _on(work: Work, path: str, threads: int) -> Call:
    def call() -> object:
        with forced(path), cattn.num_threads(threads):
            return work.run()

    return call


FEW, LONG = Limits((5, 101), (9, 197), (4, 17)), Limits((5, 40), (1600,), (8,))  # one chunk of keys, and two


def _random(name: str, seed: int) -> Work:
    function, make = FUNCTIONS[name]
    limits = LONG if IS_ATTENTION.get(name) and seed % 4 == 3 else FEW
    arguments = make(from_rng(np.random.default_rng([number_of(name), seed])), limits)
    # NumPy, which copies results into halves and other layouts, crashes where its copy gets no memory
    for key in {"out", "state_out"} & arguments.keys() if "lse" not in arguments else ():
        out = arguments.pop(key)
        if isinstance(out, np.ndarray) and out.dtype in (np.float32, np.float64):
            arguments[key] = np.ascontiguousarray(out)
    return Work(name, function, arguments)


for _name in FUNCTIONS:
    for _seed in range(8 if IS_ATTENTION.get(_name) else 3 if _name in IN_C else 2):
        _work = _random(_name, _seed)
        INPUTS |= {f"{_name} {_seed} {key}": x for key, x in _work.arguments.items() if isinstance(x, np.ndarray)}
        CALLS[f"{_name}, {_seed}"] = _on(_work, PATHS[_seed % 4], 1 + 2 * (_seed // 4 != _seed % 2))


def fresh(name: str) -> object:
    """Make the call after releasing threads and scratch, so that it has to allocate its own."""
    assert _cattn._release()
    return CALLS[name]()


def contents(result: object) -> list[object]:
    """Return the contents of a result as a list to compare with ==; arrays as dtype, shape and bytes."""
    if isinstance(result, np.ndarray):
        return [result.dtype, result.shape, result.tobytes()]
    if isinstance(result, dict):
        result = list(result.items())
    if isinstance(result, (tuple, list)):
        return [part for item in result for part in contents(item)]
    return [result]


# ---- allocations that fail -------------------------------------------------------------------------------------------
UNTOUCHED = 7.0
UNTOUCHED_BITS = np.full_like(OUT, UNTOUCHED).tobytes()
GENERATOR = cattn.TorchGenerator(1)
STATE = GENERATOR.get_state()
INPUT_BITS = contents(INPUTS)
SHARES = 40  # of the sweep, each in a process of its own
failures: collections.Counter[str] = collections.Counter()


class Shim:
    """The numbers of the preloaded shim."""

    def __init__(self) -> None:
        shim = ctypes.CDLL(None)
        self.fail_in = ctypes.c_int.in_dll(shim, "fail_in")
        self.failed = ctypes.c_char_p.in_dll(shim, "failed")
        self.live = ctypes.c_long.in_dll(shim, "live")


def settle() -> None:
    """Restore the state before the first call."""
    assert _cattn._release()
    gc.collect()
    OUT[...] = UNTOUCHED
    GENERATOR.set_state(STATE)


def failing(shim: Shim, call: Call, n: int) -> tuple[bool, object]:
    """Make the call with its n-th allocation failing. Return whether it has n, and its result or None (MemoryError)."""
    settle()
    shim.failed.value = None
    try:
        shim.fail_in.value = n
        result = call()
    except MemoryError:
        result = None
    enough = shim.fail_in.value == 0
    shim.fail_in.value = 0
    return enough, result


def leaks(shim: Shim, call: Call, n: int) -> bool:
    """Return whether 30 failures in a row leak blocks. Some may fill a cache: NumPy keeps 7 blocks of a small size."""
    for _ in range(30):
        settle()
        before = shim.live.value
        assert failing(shim, call, n)[0]
        settle()
        if shim.live.value <= before:
            return False
    return True


def sweep(shim: Shim, name: str, call: Call) -> None:
    settle()
    right, out = contents(call()), OUT.tobytes()
    n = 1
    while True:
        enough, result = failing(shim, call, n)
        what = f"{name}, allocation {n}, {shim.failed.value!r}"
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
        failures[shim.failed.value.decode()] += 1
        assert not leaks(shim, call, n), f"{what}: blocks leak"
        settle()
        assert contents(call()) == right, f"{what}: the next call gives another result"
        n += 1


WIDE = np.broadcast_to(QUERY, (2, *QUERY.shape))  # gradients of QUERY are summed after the core has computed them
LSE = np.zeros(WIDE.shape[:-1], np.float32)
DRAWN: dict[str, Any] = {"dropout_p": 0.5, "rng": GENERATOR}
ONE_GENERATOR: dict[str, Call] = {  # the calls that go on after they have drawn
    "attention": lambda: cattn.causal_attention(QUERY, QUERY, QUERY, return_dropout_mask=True, **DRAWN),
    "weights": lambda: cattn.attention_weights(QUERY, QUERY, stage="dropout", **DRAWN),
    "weights of halves": lambda: cattn.attention_weights(HALF, HALF, stage="dropout", **DRAWN),
    "gradients": lambda: cattn.attention_backward(WIDE, QUERY, QUERY, WIDE, WIDE, LSE, merged=True, **DRAWN),
    "dropout": lambda: cattn.dropout(DOUBLE, rng=GENERATOR, return_mask=True),
}


def with_a_fault(kind: str) -> object:
    leaked = with_a_fault.__dict__.setdefault("leaked", [])
    try:
        return CALLS["mixed"]()
    except MemoryError:
        if kind == "leak":
            leaked.append(np.empty(5000))
        elif kind == "write":
            QUERY[0, 0, 0, 0] += 1
        elif kind == "lie":
            return 0
        raise


def sweep_all(fault: str | None, share: int = 0) -> None:
    """Sweep a share of all calls, or one call with a fault."""
    shim = Shim()
    every = [*CALLS.items(), *((f"one generator, {name}", call) for name, call in ONE_GENERATOR.items())]
    calls: dict[str, Call] = dict(every[share::SHARES])
    if fault is not None:
        calls = {fault: lambda: with_a_fault(fault)}
    for call in calls.values():
        call()  # fills caches
    gc.collect()
    gc.freeze()  # makes the many later collections short
    for name, call in calls.items():
        sweep(shim, name, call)
    print(json.dumps(failures))


if __name__ == "__main__":
    warnings.simplefilter("error")
    if len(sys.argv) > 1:
        sweep_all(None if sys.argv[1] == "sweep" else sys.argv[1], *map(int, sys.argv[2:]))
        sys.exit()
    for table in _cattn._isa_list():
        if table["usable"]:
            _cattn._set_isa(table["name"])
            for call in CALLS:
                fresh(call)
    print(f"{len(CALLS)} calls", file=sys.stderr)
