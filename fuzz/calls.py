"""Turns bytes into calls that work: every public function with arguments that fit."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "python"))

try:
    import atheris
except ImportError:
    import cattn
else:
    with atheris.instrument_imports(include=["cattn"]):
        import cattn
from arguments import FLOATS, QUANTIZED, SIZES, Bytes, Ours, any_thing, numbers

from cattn import _cattn, functional

CANARY = 0x5A


class Finding(Exception):  # noqa: N818 - the word in libFuzzer's reports
    """A call misbehaved."""


# ---- calls that work -----------------------------------------------------------------------------------------------
class Shapes:
    """Sizes and a dtype that fit together."""

    def __init__(self, data: Bytes) -> None:
        self.data = data
        self.dtype = data.pick(FLOATS)
        self.compute = np.float64 if self.dtype is np.float64 else np.float32
        self.batch_dims = tuple(data.pick((1, 2, 2, 3, 0)) for _ in range(data.below(3)))
        self.groups, self.kv_heads = 1 + data.below(2), 1 + data.below(2)
        self.T_q, self.T_k, self.D, self.D_v = (data.pick(SIZES) for _ in range(4))
        self.with_heads = len(self.batch_dims) > 0 and data.chance(2)
        self.heads = (self.groups * self.kv_heads,) if self.with_heads else ()

    def make(self, *shape: int, dtype: Any = None) -> np.ndarray:
        return numbers(self.data, shape, self.dtype if dtype is None else dtype)

    def out(self, *shape: int, dtype: Any = None) -> np.ndarray:
        dtype = np.dtype(self.dtype if dtype is None else dtype)
        return np.full(int(np.prod(shape)) * dtype.itemsize, CANARY, np.uint8).view(dtype).reshape(shape)

    def rng(self) -> Any:
        makers: list[Callable[[], Any]] = [
            lambda: 5,
            lambda: cattn.TorchGenerator(3),
            lambda: np.random.default_rng(1),
            lambda: np.random.RandomState(1),
            lambda: np.random.SeedSequence(4),
        ]
        return self.data.pick(makers)()

    def attention(self) -> dict[str, Any]:
        kv = (self.kv_heads,) if self.with_heads else ()
        call = {
            "query": self.make(*self.batch_dims, *self.heads, self.T_q, self.D),
            "key": self.make(*self.batch_dims, *kv, self.T_k, self.D),
            "value": self.make(*self.batch_dims, *kv, self.T_k, self.D_v),
        }
        data = self.data
        one_head = not self.with_heads and len(self.batch_dims) < 2
        shape = (*self.batch_dims, *self.heads, self.T_q, self.T_k)
        heads = (1,) if one_head else ((self.heads or self.batch_dims[-1:])[-1],)
        options: dict[str, Callable[[], Any]] = {
            "attn_mask": lambda: self.make(*shape, dtype=np.float32) > 0,
            "bias": lambda: self.make(*shape[-2:], dtype=self.compute),
            "scale": lambda: 0.5,
            "softcap": lambda: 3.0,
            "alibi_slopes": lambda: np.full(heads, 0.5),
            "sinks": lambda: np.full(heads, 0.5),
            "query_offset": lambda: data.below(9),
            "window_size": lambda: (data.below(4), 0),
            "key_value_seq_lengths": lambda: data.below(self.T_k + 1),
            "query_seq_lengths": lambda: data.below(self.T_q + 1),
            "key_value_seq_starts": lambda: data.below(self.T_k + 1),
        }
        for name, make in options.items():
            if data.chance(5):
                call[name] = make()
        if data.chance(5):
            size = 1 + data.below(20)
            blocks = self.make(-(-self.T_q // size), -(-self.T_k // size), dtype=np.float32) > 0
            call["block_mask"] = cattn.BlockMask(blocks, size)
        if data.chance(3):
            call |= {"dropout_p": 0.5, "rng": self.rng()}
        return call

    def outputs(self, d: int | None = None) -> np.ndarray:
        return self.out(*self.batch_dims, *self.heads, self.T_q, self.D_v if d is None else d)


def quantize(data: Bytes, function: Callable[..., Any], call: dict[str, Any]) -> None:
    """Make key and value quantized. Chosen after all else, so that older inputs keep their meaning."""
    takes = "layout" in inspect.signature(function).parameters and "query_tangent" not in call
    for name in ("key", "value"):
        array = call.get(name)
        if not takes or not data.chance(3) or not isinstance(array, np.ndarray) or array.size >= 1 << 20:
            continue
        values = numbers(data, array.shape, data.pick(QUANTIZED))
        kinds = ((*array.shape[:-1], 1), array.shape[-1:], array.shape, ())
        scale = np.abs(numbers(data, data.pick(kinds), np.float32)) + np.float32(0.5)
        try:
            call[name] = cattn.Quantized(values, any_thing(data) if data.chance(4) else scale)
        except (TypeError, ValueError, OverflowError, MemoryError, Ours):
            call[name] = array


def list_keys(data: Bytes, function: Callable[..., Any], call: dict[str, Any]) -> None:
    """Give each query, or all of them, a list of keys. Chosen last, for the same reason."""
    key, query = call.get("key"), call.get("query")
    if "key_indices" not in inspect.signature(function).parameters or not data.chance(5):
        return
    if not isinstance(key, np.ndarray) or not isinstance(query, np.ndarray) or min(key.ndim, query.ndim) < 2:
        return
    for name in ("alibi_slopes", "dropout_p", "return_dropout_mask"):
        call.pop(name, None)
    rows, n = data.pick((1, min(query.shape[-2], 1000))), data.below(40)
    call["key_indices"] = np.arange(rows * n).reshape(rows, n) * 7 % (min(key.shape[-2], 10**6) + 1) - 1


def more_options(data: Bytes, function: Callable[..., Any], call: dict[str, Any]) -> None:
    """Products of bfloat16, and tokens before heads. Chosen after the lists."""
    parameters = inspect.signature(function).parameters
    if "compute_dtype" in parameters and data.chance(6):
        call["compute_dtype"] = "bfloat16"
    if "layout" not in parameters or not data.chance(6):
        return
    call["layout"] = "bthd"
    for name, a in call.items():
        if name.startswith(("query", "key", "value", "grad_out", "out")) and getattr(a, "ndim", 0) > 2:
            call[name] = a.swapaxes(-2, -3) if isinstance(a, np.ndarray) else a


def attention(data: Bytes) -> dict[str, Any]:
    s = Shapes(data)
    call = s.attention() | {"is_causal": data.pick((False, True, "upper_left", "lower_right"))}
    if call["is_causal"] == "lower_right":
        call.pop("query_offset", None)
    for name in ("return_weights", "return_lse", "return_dropout_mask"):
        call[name] = data.chance(4)
    if call["return_lse"]:
        call["return_lse"] = data.pick((True, np.float64))
    if data.chance(3):
        call["out"] = s.outputs()
    elif call["return_lse"] and data.chance(2):
        call["out"] = cattn.AttentionOutput(lse=s.out(*s.batch_dims, *s.heads, s.T_q, dtype=np.float64))
    return call


def causal(data: Bytes) -> dict[str, Any]:
    s = Shapes(data)
    return s.attention() | ({"out": s.outputs()} if data.chance(3) else {})


def weights(data: Bytes) -> dict[str, Any]:
    s = Shapes(data)
    call = s.attention()
    del call["value"]
    call["stage"] = data.pick(("qk", "softcap", "bias", "mask", "softmax", "dropout"))
    return call | ({"out": s.outputs(s.T_k)} if data.chance(3) else {})


def explained(data: Bytes) -> dict[str, Any]:
    call = Shapes(data).attention()
    return {name: call[name] for name in call if name in inspect.signature(cattn.explain).parameters}


def backward(data: Bytes) -> dict[str, Any]:
    s = Shapes(data)
    call = s.attention()
    if "dropout_p" in call:
        call["rng"] = data.pick((5, cattn.TorchGenerator(3)))
    lse = s.make(*s.batch_dims, *s.heads, s.T_q, dtype=np.float64 if data.chance(3) else s.compute)
    shape = (*s.batch_dims, *s.heads, s.T_q, s.D_v)
    out = s.make(*shape, dtype=s.compute if data.chance(3) else s.dtype)
    call |= {"grad_out": s.make(*shape), "out": out, "lse": lse}
    call["merged"] = not data.chance(4)  # without it nearly all are refused after they were computed
    return call | ({"grad_lse": s.make(*shape[:-1], dtype=s.compute)} if data.chance(2) else {})


def packed(data: Bytes) -> dict[str, Any]:
    s = Shapes(data)
    q, k = ([data.pick(SIZES) for _ in range(2)] for _ in range(2))
    heads = s.groups * s.kv_heads
    call = {
        "query": s.make(sum(q), heads, s.D),
        "key": s.make(sum(k), s.kv_heads, s.D),
        "value": s.make(sum(k), s.kv_heads, s.D_v),
        "cu_seqlens_q": np.cumsum([0, *q]),
        "cu_seqlens_k": np.cumsum([0, *k]),
        "is_causal": data.pick((False, True, "upper_left", "lower_right")),
    }
    if data.chance(3):
        call |= {"dropout_p": 0.5, "rng": 5}
    return call | ({"out": s.out(sum(q), heads, s.D_v)} if data.chance(3) else {})


def packed_backward(data: Bytes) -> dict[str, Any]:
    call = packed(data)
    call.pop("out", None)
    shape = (*call["query"].shape[:-1], call["value"].shape[-1])
    out = np.zeros(shape, call["query"].dtype)
    return call | {"grad_out": out, "out": out, "lse": np.zeros(shape[1::-1], np.float32), "merged": True}


def statistics_of(call: dict[str, Any], data: Bytes) -> dict[str, Any]:
    for name in ("value", "dropout_p", "rng", "out"):
        call.pop(name, None)
    call |= {"top_k": data.below(4)} if data.chance(3) else {}
    call |= {"observation_window": data.pick((None, 1, 5))} if data.chance(3) else {}
    return call | ({"statistics": data.pick((None, "lse", ["entropy", "received"]))} if data.chance(2) else {})


def statistics(data: Bytes) -> dict[str, Any]:
    return statistics_of(Shapes(data).attention(), data)


def packed_statistics(data: Bytes) -> dict[str, Any]:
    return statistics_of(packed(data), data)


def tangents(data: Bytes) -> dict[str, Any]:
    s = Shapes(data)
    call = s.attention()
    if "dropout_p" in call:
        call["rng"] = 5
    for name in ("query", "key", "value", "bias", "sinks"):
        if name in call and data.chance(2):
            call[f"{name}_tangent"] = s.make(*call[name].shape, dtype=call[name].dtype)
    return call


def tangents_backward(data: Bytes) -> dict[str, Any]:
    call = tangents(data)
    shape = (*call["query"].shape[:-1], call["value"].shape[-1])
    call["grad_out_tangent"] = numbers(data, shape, call["query"].dtype)
    return call | ({"grad_lse_tangent": numbers(data, shape[:-1], np.float32)} if data.chance(2) else {})


def rolling(data: Bytes) -> dict[str, Any]:
    n, s = data.pick(SIZES), Shapes(data)
    return {"weights": np.abs(s.make(1 + data.below(3), *s.batch_dims, 2, n, n)), "residual": data.pick((0.5, 0, 1))}


def scoring(data: Bytes) -> dict[str, Any]:
    n = data.pick(SIZES)
    return {"weights": np.abs(numbers(data, (2, n, n), np.float32)), "token_ids": np.arange(n) % 3}


def rowwise(name: str, **more: Callable[[Bytes], Any]) -> Callable[[Bytes], dict[str, Any]]:
    def make(data: Bytes) -> dict[str, Any]:
        s = Shapes(data)
        shape = (*s.batch_dims, s.T_q, s.T_k)
        call = {name: s.make(*shape)} | {key: value(data) for key, value in more.items() if data.chance(2)}
        if "mask" in call or "where" in call:
            key = "mask" if "mask" in call else "where"
            call[key] = s.make(*shape[-2:], dtype=np.float32) > 0
        if "weights" in more:
            call["weights"] = s.make(*shape)
        return call | ({"out": s.out(*shape)} if data.chance(3) else {})

    return make


def axis(data: Bytes) -> int:
    return data.below(4) - 2


def rotating(data: Bytes) -> dict[str, Any]:
    s = Shapes(data)
    shape = (*s.batch_dims, *s.heads, s.T_q, s.D)
    options: dict[str, Callable[[], Any]] = {
        "positions": lambda: data.pick((np.arange(s.T_q), np.arange(s.T_q) / 2, [3] * s.T_q)),
        "theta": lambda: data.pick((10000.0, 1.5, 500000)),
        "interleaved": lambda: data.chance(2),
        "inverse": lambda: data.chance(2),
        "scaling": lambda: data.pick((None, {"rope_type": "linear", "factor": 2.0}, {"type": "yarn"})),
        "out": lambda: s.out(*shape),
    }
    call = {name: make() for name, make in options.items() if data.chance(2)}
    return {"x": s.make(*shape), "rotary_dim": s.D // 2 * 2} | call


def norming(data: Bytes) -> dict[str, Any]:
    s = Shapes(data)
    shape = (*s.batch_dims, s.T_q, s.D)
    call: dict[str, Any] = {"x": s.make(*shape), "eps": data.pick((1e-6, 0.0, 1))}
    if data.chance(2):
        call["weight"] = s.make(s.D)
    return call | ({"out": s.out(*shape)} if data.chance(3) else {})


def norm_gradients(data: Bytes) -> dict[str, Any]:
    call = norming(data)
    call.pop("out", None)
    return {"grad_out": call["x"][::-1], **call}


def projecting(data: Bytes) -> dict[str, Any]:
    s = Shapes(data)
    shape, n = (*s.batch_dims, s.T_q), data.pick(SIZES)
    call: dict[str, Any] = {"x": s.make(*shape, s.D), "weight": s.make(n, s.D)}
    if data.chance(2):
        call["bias"] = s.make(n)
    return call | ({"out": s.out(*shape, n)} if data.chance(3) else {})


def projection_gradients(data: Bytes) -> dict[str, Any]:
    s = Shapes(data)
    shape, n = (*s.batch_dims, s.T_q), data.pick(SIZES)
    return {"grad_out": s.make(*shape, n), "x": s.make(*shape, s.D), "weight": s.make(n, s.D)}


def layer_norming(data: Bytes) -> dict[str, Any]:
    call = norming(data)
    return call | ({"bias": call["weight"][::-1]} if "weight" in call else {})


def activating(data: Bytes) -> dict[str, Any]:
    s = Shapes(data)
    shape = (*s.batch_dims, s.T_q, s.D)
    return {"x": s.make(*shape)} | ({"out": s.out(*shape)} if data.chance(3) else {})


def activation_gradients(data: Bytes) -> dict[str, Any]:
    call = activating(data)
    return {"grad_out": call["x"][::-1], **call, "approximate": data.pick(("none", "tanh"))}


def merging(data: Bytes) -> dict[str, Any]:
    s, n = Shapes(data), 1 + data.below(3)
    shape = (*s.batch_dims, s.T_q)
    return {
        "outs": [s.make(*shape, s.D_v) for _ in range(n)],
        "lses": [s.make(*shape, dtype=s.compute) for _ in range(n)],
    }


def constant(**arguments: Any) -> Callable[[Bytes], dict[str, Any]]:
    return lambda data: {name: value(data) if callable(value) else value for name, value in arguments.items()}


def byte_dtype(data: Bytes) -> str:
    return data.pick(("int8", "float8_e4m3fn"))


# ---- the functions ---------------------------------------------------------------------------------------------------
def fill_cache(batch_shape: Any, num_kv_heads: Any, key: Any, value: Any, n: Any, dtype: Any) -> Any:
    """Fill and truncate a cache; a call that raises must not change it."""
    cache = cattn.KVCache(batch_shape, num_kv_heads, 6, 3, dtype=dtype)
    one = np.ones((*cache.batch_shape, cache.num_kv_heads, 2, 3), np.float16)
    cache.append(one, one)
    before = cache.lengths, [store.tobytes() for store in cache._stores()]
    for change in (lambda: cache.append(key, value), lambda: cache.truncate(n)):
        try:
            change()
        except Exception:
            same = [store.tobytes() for store in cache._stores()] == before[1]
            if not same or not np.array_equal(cache.lengths, before[0]):
                raise Finding("a cache that refused has changed") from None
            raise
        before = cache.lengths, [store.tobytes() for store in cache._stores()]
    return cache.query_offset()


def run_layer(x: Any, num_heads: Any, num_kv_groups: Any, dropout: Any, rng: Any, grad_out: Any) -> Any:
    layer = cattn.MultiHeadAttention(3, 4, 8, dropout, num_heads, num_kv_groups=num_kv_groups, rng=rng)
    return layer(x), layer.backward(grad_out)


def load_layer(state_dict: Any, strict: Any) -> Any:
    layer = cattn.Linear(3, 2, rng=1)
    before = layer.weight.copy()
    try:
        return layer.load_state_dict(state_dict, strict)
    except Exception:
        if layer.weight.tobytes() != before.tobytes():
            raise Finding("a state_dict that was refused has changed the weights") from None
        raise


def draw(method: str) -> Callable[..., Any]:
    def call(**arguments: Any) -> Any:
        return getattr(cattn.TorchGenerator(1), method)(**arguments)

    parameters = [p for p in inspect.signature(getattr(cattn.TorchGenerator, method)).parameters if p != "self"]
    call.names = parameters  # type: ignore[attr-defined]
    return call


def derive_twice(grad_out_tangent: Any, grad_lse_tangent: Any = None, **arguments: Any) -> Any:
    """Compute the derivatives and then their gradients, whose results have to fit."""
    found = cattn.attention_jvp(**arguments, return_lse=True)
    results = {"out": found.out, "lse": found.lse, "out_tangent": found.out_tangent, "lse_tangent": found.lse_tangent}
    return cattn.attention_jvp_backward(grad_out_tangent, **results, **arguments, grad_lse_tangent=grad_lse_tangent)


def layer(kind: Callable[..., Any]) -> Callable[..., Any]:
    """Make a layer and call it."""

    def call(x: Any, **arguments: Any) -> Any:
        return kind(**arguments)(x)

    call.names = [*inspect.signature(kind).parameters, "x"]  # type: ignore[attr-defined]
    return call


def set_threads(n: Any) -> None:
    try:
        cattn.set_num_threads(n)
    finally:
        cattn.set_num_threads(None)


def in_order(function: Callable[..., Any]) -> Callable[..., Any]:
    """Call a function that takes its arguments by position only."""

    def call(**arguments: Any) -> Any:
        return function(*arguments.values())

    return call


def in_time(function: Callable[..., Any]) -> Callable[..., Any]:
    """Skip broadcast arrays of a terabyte: explain allocates nothing for them and would count for hours."""

    def call(**arguments: Any) -> Any:
        large = any(isinstance(a, np.ndarray) and a.size > 1 << 32 for a in arguments.values())
        return None if large else function(**arguments)

    return call


def every_argument(function: Callable[..., Any], make: Callable[[Bytes], dict[str, Any]]) -> Any:
    """Make calls that name all arguments, also those that have their defaults."""
    defaults = {name: parameter.default for name, parameter in inspect.signature(function).parameters.items()}
    return function, lambda data: defaults | {name: a for name, a in make(data).items() if name in defaults}


def any_stage(data: Bytes) -> dict[str, Any]:
    return Shapes(data).attention() | {"stage": data.pick(("qk", "mask", "softmax", "dropout"))}


def plain_attention(data: Bytes) -> dict[str, Any]:
    return Shapes(data).attention()


def whole(data: Bytes) -> dict[str, np.ndarray]:
    return {"weight": numbers(data, (2, 3), np.float32), "bias": numbers(data, (2,), np.float32)}


Maker = Callable[[Bytes], dict[str, Any]]
SHAPE, TOKENS = np.ones((2, 3), np.float32), np.ones((2, 1, 2, 3), np.float32)
CALLS: list[tuple[Callable[..., Any], Maker]] = [
    (cattn.scaled_dot_product_attention, attention),
    (cattn.causal_attention, causal),
    (cattn.attention_weights, weights),
    (cattn.attention_backward, backward),
    (cattn.varlen_attention, packed),
    (in_time(cattn.explain), explained),
    (cattn.softmax, rowwise("x", axis=axis, where=axis, scale=axis)),
    (cattn.masked_softmax, rowwise("scores", mask=axis, is_causal=lambda d: d.chance(2), query_offset=axis)),
    (cattn.softmax_backward, rowwise("grad_out", weights=axis, axis=axis)),
    (cattn.dropout, rowwise("x", p=lambda d: d.pick((0.0, 0.5, 1.0)), rng=lambda d: 3, training=lambda d: d.chance(2))),
    (cattn.dropout_backward, rowwise("grad_out", p=lambda d: 0.5, rng=lambda d: 3, mask=axis)),
    (cattn.merge_attention, merging),
    (cattn.causal_mask, constant(T_q=lambda d: d.pick(SIZES), T_k=lambda d: d.pick(SIZES), query_offset=axis)),
    (cattn.show_mask, constant(T_q=lambda d: d.pick(SIZES), T_k=3, is_causal="upper_left")),
    (cattn.sliding_window, constant(total=4)),
    (cattn.get_alibi_slopes, constant(num_heads=4)),
    (cattn.TorchGenerator, constant(seed=4, dropout="aten")),
    (draw("linear"), constant(in_features=3, out_features=2, bias=True)),
    (draw("bernoulli"), constant(p=0.5)),
    (draw("set_state"), constant(state=lambda d: cattn.TorchGenerator(2).get_state())),
    (draw("manual_seed"), constant(seed=5)),
    (set_threads, constant(n=2)),
    (fill_cache, constant(batch_shape=2, num_kv_heads=1, key=TOKENS, value=TOKENS, n=1, dtype="float32")),
    (
        run_layer,
        constant(
            x=lambda d: numbers(d, (2, 3), np.float32),
            num_heads=2, num_kv_groups=1, dropout=0.5, rng=3,
            grad_out=lambda d: numbers(d, (2, 4), np.float32),
        ),
    ),
    (load_layer, constant(state_dict=whole, strict=True)),
    every_argument(cattn.scaled_dot_product_attention, plain_attention),
    (in_time(cattn.explain), every_argument(cattn.explain, plain_attention)[1]),
    every_argument(cattn.attention_weights, any_stage),
    every_argument(cattn.attention_backward, backward),
    every_argument(cattn.softmax, constant(x=SHAPE)),
    every_argument(cattn.masked_softmax, constant(scores=SHAPE)),
    (in_order(_cattn.softmax_backward), constant(grad_out=SHAPE, weights=SHAPE, scale=1.0, out=None)),
    every_argument(cattn.dropout, constant(x=SHAPE, rng=3, return_mask=True)),
    every_argument(cattn.causal_mask, constant(T_q=3, T_k=4)),
    (cattn.rope, rotating),
    (cattn.rms_norm, norming),
    (cattn.rms_norm_backward, norm_gradients),
    (cattn.functional.linear, projecting),
    (cattn.functional.linear_backward, projection_gradients),
    every_argument(cattn.functional.linear, constant(x=SHAPE, weight=SHAPE)),
    every_argument(cattn.rope, constant(x=TOKENS[..., :2])),
    every_argument(cattn.rms_norm, constant(x=SHAPE)),
    (in_order(_cattn.rms_norm_backward), constant(grad_out=SHAPE, x=SHAPE, weight=None, eps=1e-6)),
    (functional.layer_norm, layer_norming),
    (functional.layer_norm_backward, norm_gradients),
    (functional.gelu_backward, activation_gradients),
    (functional.silu, activating),
    every_argument(functional.layer_norm, constant(x=SHAPE)),
    every_argument(functional.gelu, constant(x=SHAPE)),
    every_argument(functional.silu_backward, constant(grad_out=SHAPE, x=SHAPE)),
    (fill_cache, constant(batch_shape=2, num_kv_heads=1, key=TOKENS, value=TOKENS, n=1, dtype=byte_dtype)),
    (cattn.quantize, constant(x=TOKENS, axis=axis, dtype=byte_dtype)),
    (
        cattn.dequantize,
        constant(
            x=lambda d: np.arange(-3, 3).reshape(2, 3).astype(d.pick((np.int8, ml_dtypes.float8_e4m3fn))),
            scale=lambda d: abs(numbers(d, (2, 1), np.float32)) + 1,
        ),
    ),
]  # fmt: skip

MATRIX = np.ones((2, 5, 3), np.float32)
SIZED = constant(x=MATRIX, d_in=3, d_out=4, rng=3)
IN_CONTEXT = constant(x=MATRIX, d_in=3, d_out=4, context_length=8, dropout=0.5, rng=3)
# Functions that came later: inputs whose first byte is 192 or more choose from these.
MORE_CALLS: list[tuple[Callable[..., Any], Maker]] = [
    (cattn.attention_jvp, tangents),
    (derive_twice, tangents_backward),
    (cattn.attention_statistics, statistics),
    (cattn.varlen_attention_statistics, packed_statistics),
    (cattn.varlen_attention_backward, packed_backward),
    every_argument(cattn.attention_jvp, tangents),
    every_argument(cattn.attention_statistics, statistics),
    every_argument(cattn.varlen_attention, packed),
    (cattn.attention_rollout, rolling),
    (cattn.head_scores, scoring),
    (cattn.Quantized, constant(values=lambda d: numbers(d, (2, 3), d.pick(QUANTIZED)), scale=np.float32(0.5))),
    (cattn.BlockMask, constant(blocks=lambda d: numbers(d, (2, 3), np.float32) > 0, size=16)),
    (functional.gelu, activating),
    (layer(cattn.Dropout), constant(x=SHAPE, p=0.5, rng=3)),
    (layer(cattn.SelfAttention_v1), SIZED),
    (layer(cattn.SelfAttention_v2), SIZED),
    (layer(cattn.CausalAttention), IN_CONTEXT),
    (layer(cattn.MultiHeadAttentionWrapper), lambda data: IN_CONTEXT(data) | {"num_heads": 2}),
]
