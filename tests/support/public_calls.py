"""One small call of each public function; for attention, one call for each path, storage and option; of the other
functions of C, some random calls.

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
import contextlib
import ctypes
import functools
import gc
import json
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np

import cattn
from cattn import _cattn
from support import number_of
from support.calls import Limits, from_rng
from support.functions import FUNCTIONS, Work
from support.rows import IN_C, IS_ATTENTION

Call = Callable[[], object]
LIMITS = Limits((5, 40), (9, 90), (4, 17))

_draw = np.random.default_rng(0)


def _normal(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return _draw.standard_normal(shape).astype(dtype)


# Several blocks of queries and of keys, the last of each incomplete; grouped heads.
QUERY, KEY, VALUE = _normal(2, 4, 101, 8), _normal(2, 2, 197, 8), _normal(2, 2, 197, 9)
FEW, LONG_KEY, LONG_VALUE = _normal(1, 2, 3, 8), _normal(1, 2, 1600, 8), _normal(1, 2, 1600, 8)  # two chunks of keys
MASK, BIAS = _draw.random((101, 197)) < 0.8, _normal(4, 1, 197)
SLOPES, SINKS = np.linspace(0.1, 0.4, 4), _normal(4)
LENGTHS = np.array([[197], [55]])
LISTS = _draw.integers(-1, 197, (101, 30), dtype=np.int32)
X = _normal(3, 3)
SCORES = _normal(3, 70, 90)
PACKED = _normal(120, 2, 8)
EDGES = np.array([0, 50, 50, 120])
HALF, BFLOAT16 = _normal(2, 101, 8, dtype=np.float16), _normal(2, 101, 8).astype(ml_dtypes.bfloat16)
DOUBLE, SWAPPED = _normal(2, 40, 8, dtype=np.float64), _normal(2, 40, 8).astype(">f4")
INPUTS = {name: value for name, value in globals().items() if isinstance(value, np.ndarray)}
OUT, OUT_LIKE = np.empty((2, 4, 101, 9), np.float32), INPUTS.setdefault("OUT_LIKE", _normal(2, 4, 101, 9))


@contextlib.contextmanager
def _path_and_threads(path: str, threads: int) -> Iterator[None]:
    _cattn._set_path(path)
    before = _cattn._override_num_threads(threads)
    try:
        yield
    finally:
        _cattn._override_num_threads(before)
        _cattn._set_path("auto")


def _attend(*arrays: np.ndarray, path: str = "auto", threads: int = 1, **options: Any) -> object:
    with _path_and_threads(path, threads):
        return cattn.scaled_dot_product_attention(*arrays, **options)


def _threaded(call: Call) -> object:
    with cattn.num_threads(3):
        return call()


def _attend_in_place() -> object:
    x = DOUBLE.copy()
    return _attend(x, x, x, out=x[::-1])


def _differentiate(*, threads: int, **options: Any) -> object:
    with _path_and_threads("auto", threads):
        lse = np.zeros((2, 4, 101), np.float32)
        return cattn.attention_backward(OUT_LIKE, QUERY, KEY, VALUE, OUT_LIKE, lse, merged=True, **options)


def _derive(*, threads: int, **options: Any) -> cattn.AttentionTangents:
    with _path_and_threads("auto", threads):
        return cattn.attention_jvp(QUERY, KEY, VALUE, QUERY, KEY, VALUE, return_lse=True, attn_mask=MASK, **options)


def _derive_twice(*, threads: int, **options: Any) -> object:
    out, out_tangent, lse, lse_tangent = _derive(threads=threads, **options)
    with _path_and_threads("auto", threads):
        return cattn.attention_jvp_backward(
            out, QUERY, KEY, VALUE, out, lse, out_tangent, lse_tangent, QUERY, KEY, VALUE, attn_mask=MASK, **options
        )


def _in_threads(threads: int, function: Any, *arrays: np.ndarray, **options: Any) -> object:
    with _path_and_threads("auto", threads):
        return function(*arrays, **options)


ALL_OUTPUTS = {"return_weights": True, "return_lse": True, "return_dropout_mask": True}


def _decode() -> object:
    cache = cattn.KVCache((2,), 2, 50, 8, v_head_dim=9)
    cache.append(KEY[:, :, :40], VALUE[:, :, :40])
    cache.truncate(np.array([30, 30]))
    out = cattn.causal_attention(QUERY[:, :, :1], cache.k, cache.v, query_offset=29)
    return out, cache.lengths, repr(cache)


def _decode_quantized(dtype: str) -> object:
    cache = cattn.KVCache((2,), 2, 50, 8, v_head_dim=9, dtype=dtype)
    cache.append(KEY[:, :, :40], VALUE[:, :, :40])
    cache.truncate(np.array([30, 20]))
    cache.keep([[*range(20), 29], [19, 3]])
    cache.reorder([1, 0])
    cache = cache.fork()
    offset = cache.query_offset()
    cache.append(KEY[:, :, 40:42], VALUE[:, :, 40:42])
    return cattn.causal_attention(QUERY[:, :, :2], cache.k, cache.v, query_offset=offset), cache.lengths


def _draw_all() -> object:
    g = cattn.TorchGenerator(7)
    drawn = [g.rand(4), g.randn(20), g.uniform(1, 2, 3), g.randint(9, (3,)), g.bernoulli(np.full(5, 0.5))]
    drawn += [*g.linear(3, 2), g.dropout_mask(0.5, 40)]
    state = g.get_state()
    g.manual_seed(3).set_state(state)
    return drawn, g.dropout, g.initial_seed(), g.rand(2)


def _train(layer: Any, **options: Any) -> object:
    out = layer(DOUBLE.astype(np.float32), **options)
    return out, layer.backward(np.ones_like(out)), layer.grads, layer.state_dict()


def _load() -> object:
    layer = cattn.Linear(8, 40, rng=1)
    return layer.load_state_dict({"weight": DOUBLE[0], "bias": DOUBLE[1, :, 0]}), layer.state_dict()


def _set_threads() -> object:
    cattn.set_num_threads(2)
    with cattn.num_threads(3):
        counts = cattn.get_num_threads()
    cattn.set_num_threads(None)
    return counts


CALLS: dict[str, Call] = {
    # attention: paths
    "tiny": lambda: _attend(X, X, X, path="tiny"),
    "tile": lambda: _attend(QUERY, KEY, VALUE, path="tile"),
    "tile, threads": lambda: _attend(QUERY, KEY, VALUE, path="tile", threads=3, is_causal="lower_right"),
    "rows": lambda: _attend(QUERY[:, :, :5], KEY, VALUE, path="rows"),
    "rows, threads": lambda: _attend(QUERY[:, :, :5], KEY, VALUE, path="rows", threads=2),
    "split": lambda: _attend(FEW, LONG_KEY, LONG_VALUE, path="split"),
    "split, threads": lambda: _attend(FEW, LONG_KEY, LONG_VALUE, path="split", threads=3),
    # attention: storage and conversions
    "float16": lambda: _attend(HALF, HALF, HALF),
    "bfloat16": lambda: _attend(BFLOAT16, BFLOAT16, BFLOAT16, return_weights=True),
    "float64": lambda: _attend(DOUBLE, DOUBLE, DOUBLE, return_lse=True),
    "mixed": lambda: _attend(DOUBLE, SWAPPED[:, ::-1], DOUBLE.tolist()),
    # attention: options
    "masks": lambda: _attend(QUERY, KEY, VALUE, MASK, bias=BIAS, softcap=5.0, alibi_slopes=SLOPES, sinks=SINKS),
    "ranges": lambda: _attend(
        QUERY, KEY, VALUE, is_causal="upper_left", query_offset=np.array([[3], [90]])[:, 0], window_size=(60, 0),
        key_value_seq_lengths=LENGTHS[:, 0], key_value_seq_starts=LENGTHS[::-1, 0] // 9,
    ),
    "blocks": lambda: _attend(
        QUERY, KEY, VALUE, block_mask=cattn.BlockMask(np.arange(-(-KEY.shape[2] // 16)) % 3 > 0, 16),
    ),
    "lists of keys": lambda: _attend(
        QUERY, KEY, VALUE, MASK, bias=BIAS, sinks=SINKS, key_indices=LISTS, is_causal="upper_left", threads=2,
        return_weights=True, return_lse=True,
    ),
    "a list of keys": lambda: _attend(FEW, LONG_KEY, LONG_VALUE, key_indices=LISTS[0], threads=3),
    "all outputs": lambda: _attend(QUERY, KEY, VALUE, dropout_p=0.3, rng=5, **ALL_OUTPUTS),
    "stream": lambda: _attend(QUERY, KEY, VALUE, dropout_p=0.3, rng=cattn.TorchGenerator(5), threads=2, **ALL_OUTPUTS),
    "NumPy's generator": lambda: _attend(QUERY, KEY, VALUE, dropout_p=0.3, rng=np.random.default_rng(1)),
    "out": lambda: _attend(QUERY, KEY, VALUE, out=OUT),
    "out, tuple": lambda: _attend(QUERY, KEY, VALUE, out=cattn.AttentionOutput(OUT)),
    "out, overlapping": _attend_in_place,
    # attention: the other functions
    "causal_attention": lambda: cattn.causal_attention(QUERY, KEY[:, :, :101], VALUE[:, :, :101], MASK[:, :101]),
    "varlen_attention": lambda: cattn.varlen_attention(PACKED, PACKED, PACKED, EDGES, EDGES, return_lse=True),
    "attention_weights": lambda: cattn.attention_weights(QUERY, KEY, MASK, dropout_p=0.5, rng=1),
    "attention_weights, dropped": lambda: cattn.attention_weights(QUERY, KEY, dropout_p=0.3, rng=1, stage="dropout"),
    "stages": lambda: [
        cattn.attention_weights(QUERY, KEY, MASK, softcap=3.0, bias=BIAS, stage=stage)
        for stage in ("qk", "softcap", "bias", "mask")
    ],
    "merge_attention": lambda: cattn.merge_attention([OUT_LIKE, OUT_LIKE], [OUT_LIKE[..., 0], OUT_LIKE[..., 1]]),
    "explain": lambda: cattn.explain(QUERY, KEY, VALUE, MASK)[:3],
    # gradients
    "varlen_attention_backward": lambda: cattn.varlen_attention_backward(
        PACKED, PACKED, PACKED, PACKED, PACKED, np.zeros(PACKED.shape[1::-1], np.float32), EDGES, EDGES, merged=True
    ),
    "attention_backward": lambda: _differentiate(threads=1, bias=BIAS, sinks=SINKS, attn_mask=MASK),
    "attention_backward, threads": lambda: _differentiate(threads=3, dropout_p=0.3, rng=5),
    "attention_backward, lists of keys": lambda: _differentiate(threads=3, bias=BIAS, sinks=SINKS, key_indices=LISTS),
    "attention_backward, a list of keys": lambda: _differentiate(threads=1, attn_mask=MASK, key_indices=LISTS[0]),
    "attention_jvp": lambda: _derive(threads=1, bias=BIAS, bias_tangent=BIAS, sinks=SINKS, sinks_tangent=SINKS),
    "attention_jvp, threads": lambda: _derive(threads=3, dropout_p=0.3, rng=5, softcap=2.0),
    "attention_jvp, half": lambda: cattn.attention_jvp(HALF, HALF, HALF, HALF, HALF, HALF, return_lse=True),
    "attention_jvp_backward": lambda: _derive_twice(threads=1, bias=BIAS, bias_tangent=BIAS, sinks=SINKS),
    "attention_jvp_backward, threads": lambda: _derive_twice(threads=3, dropout_p=0.3, rng=5, softcap=2.0),
    "attention_backward, stream": lambda: _differentiate(threads=2, dropout_p=0.3, rng=cattn.TorchGenerator(5)),
    "choose_keys": lambda: cattn.choose_keys(QUERY, KEY, 20, weights=QUERY[..., 0], attn_mask=MASK, return_scores=True),
    "choose_keys, blocks, threads": lambda: _in_threads(
        3, cattn.choose_keys, FEW, LONG_KEY, 9, block_size=16, activation="relu", is_causal="lower_right"
    ),
    # statistics
    "attention_statistics": lambda: cattn.attention_statistics(QUERY, KEY, MASK, bias=BIAS, sinks=SINKS, top_k=3),
    "attention_statistics, one head, threads": lambda: _in_threads(
        3, cattn.attention_statistics, HALF, HALF, is_causal=True, observation_window=70
    ),
    "varlen_attention_statistics": lambda: cattn.varlen_attention_statistics(PACKED, PACKED, EDGES, EDGES, top_k=2),
    "head_scores": lambda: cattn.head_scores(BIAS[:, :, :1], [3]),
    "attention_rollout": lambda: cattn.attention_rollout(np.abs(SCORES)[None, :, :, :70]),
    # row by row
    "masked_softmax, several axes": lambda: cattn.masked_softmax(SCORES, axis=(0, 2), is_causal="upper_left"),
    "masked_softmax, name made at run time": lambda: cattn.masked_softmax(**{"".join(("sco", "res")): SCORES}),
    "dropout_backward, integers": lambda: cattn.dropout_backward([2**53 + 1, 2**53 + 3], 0.5, mask=True),
    # masks, numbers, settings
    "causal_mask": lambda: cattn.causal_mask(5, 7, is_causal="lower_right", window_size=(2, 0)),
    "show_mask": lambda: cattn.show_mask(5, 7, is_causal="upper_left"),
    "sliding_window": lambda: cattn.sliding_window(4),
    "get_alibi_slopes": lambda: cattn.get_alibi_slopes(12),
    "manual_seed": lambda: cattn.manual_seed(3).rand(2),
    "TorchGenerator": _draw_all,
    "KVCache": _decode,
    "KVCache, int8": lambda: _decode_quantized("int8"),
    "KVCache, float8_e4m3fn": lambda: _decode_quantized("float8_e4m3fn"),
    "quantize": lambda: [a for axis in (-1, -2) for a in cattn.quantize(KEY, axis)],
    "quantize, float8_e4m3fn": lambda: cattn.quantize(BFLOAT16, dtype="float8_e4m3fn").scale,
    "dequantize": lambda: cattn.dequantize(cattn.quantize(KEY).values, 0.5),
    "set_num_threads": _set_threads,
    "show_config": lambda: sorted(cattn.show_config("dicts")),
    # layers
    "Linear": lambda: _train(cattn.Linear(8, 4, rng=1)),
    "load_state_dict": _load,
    "Dropout": lambda: cattn.Dropout(0.5, rng=1)(DOUBLE),
    "SelfAttention": lambda: (
        cattn.SelfAttention_v1(8, 4, rng=1)(DOUBLE[0]), cattn.SelfAttention_v2(8, 4, rng=1)(DOUBLE[0])
    ),
    "CausalAttention": lambda: _train(cattn.CausalAttention(8, 4, 40, 0.1, rng=1)),
    "MultiHeadAttention": lambda: _train(cattn.MultiHeadAttention(8, 8, 40, 0.0, num_heads=2, rng=1)),
    "MultiHeadAttentionWrapper": lambda: cattn.MultiHeadAttentionWrapper(8, 4, 40, 0.0, num_heads=2, rng=1)(DOUBLE),
}  # fmt: skip

# Of the other functions of C some random calls, every third one with threads.
for _name in [name for name in IN_C if not IS_ATTENTION.get(name)]:
    for _seed in range(3):
        _arguments = FUNCTIONS[_name][1](from_rng(np.random.default_rng([number_of(_name), _seed])), LIMITS)
        # NumPy, which copies results into halves and other layouts, crashes where its copy gets no memory
        for _key in {"out", "state_out"} & _arguments.keys():
            _out = _arguments.pop(_key)
            if _out is None or _out.dtype in (np.float32, np.float64):
                _arguments[_key] = None if _out is None else np.ascontiguousarray(_out)
        _work = Work(_name, FUNCTIONS[_name][0], _arguments)
        INPUTS |= {f"{_name} {_seed} {key}": x for key, x in _arguments.items() if isinstance(x, np.ndarray)}
        CALLS[f"{_name}, {_seed}"] = _work.run if _seed < 2 else functools.partial(_threaded, _work.run)


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
    """Return whether ten failures in a row leak blocks. One may be a cache of Python or NumPy that grows."""
    for _ in range(10):
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
