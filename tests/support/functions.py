"""Random calls of every public function, and of every class.

FUNCTIONS has a maker of arguments for each of them; `work` chooses a call that gives the same bits whenever it is made.
test_random_histories.py and tools/soak repeat such calls under changing circumstances, fuzz/binding.py replaces their
arguments by others.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import numpy as np

import cattn
from cattn import functional
from support.calls import (
    LIMITS,
    NUMBERS,
    OPERANDS,
    QUANTIZED,
    SMALL,
    STORED,
    Call,
    Choose,
    Function,
    Limits,
    Sizes,
    again,
    attention,
    broadcastable,
    cotangent,
    direction,
    floats,
    lay_out,
    one_in,
    options_of,
    packed,
    random_bytes,
    seed,
    some,
    statistics_options,
)  # fmt: skip

STAGES = ("qk", "softcap", "bias", "mask", "softmax", "dropout")
Results = list[np.ndarray]
Arguments = Callable[[Choose, Limits], Call]  # makes the arguments of a function


# ---- attention -------------------------------------------------------------------------------------------------------
def seed_of(choose: Choose, function: Function) -> Any:
    """Return a number or a generator for dropout, which a function of a forward pass can draw again."""
    parameters = inspect.signature(function).parameters
    if "query_tangent" in parameters or "cu_seqlens_q" in parameters or choose((True, False)):
        return choose(range(2**62)) * 4 + 3
    generators: list[Callable[[int], Any]] = [lambda n: cattn.TorchGenerator(n, choose(["aten", "mkl"]))]
    if "grad_out" not in parameters:
        generators += [np.random.default_rng, np.random.SeedSequence, np.random.RandomState]
    return choose(generators)(choose(range(100)))


def _attention(choose: Choose, function: Function, limits: Limits) -> tuple[Call, Sizes]:
    call, sizes = attention(choose, function, limits=limits)
    return call | ({"rng": seed_of(choose, function)} if "rng" in call else {}), sizes


def _stored_result(call: Call) -> np.dtype:
    """Return the dtype of the output: bytes count as float32."""
    inputs = [call[name] for name in ("query", "key", "value") if name in call]
    quantized = any(isinstance(a, cattn.Quantized) for a in inputs)
    dtype = call["query"].dtype
    return np.dtype(np.float32) if quantized and dtype.itemsize == 2 else dtype


def _results(choose: Choose, call: Call, sizes: Sizes) -> Call:
    """Choose what a forward call returns, and where."""
    names = ["return_weights"] if "key_indices" in call else ["return_weights", "return_dropout_mask"]
    found: Call = {name: one_in(choose, 4) for name in names}
    found["return_lse"] = choose([False, False, True, np.float64])
    shape = [*sizes.batch, *sizes.axes_of("NT")]
    if one_in(choose, 3):
        out_shape = [*shape, sizes.letters["D"]]
        out = lay_out(choose, np.full(out_shape, 7, _stored_result(call)))
        found["out"] = out.swapaxes(-3, -2) if call.get("layout") == "bthd" else out
    elif found["return_lse"] and one_in(choose, 2):
        found["out"] = cattn.AttentionOutput(lse=lay_out(choose, np.full(shape, 7, np.float64)))
    return found


def forward(choose: Choose, limits: Limits) -> Call:
    call, sizes = attention(choose, limits=limits)
    return call | _results(choose, call, sizes)


def _forward(function: Function) -> Arguments:
    def make(choose: Choose, limits: Limits) -> Call:
        call, sizes = _attention(choose, function, limits)
        return call | _results(choose, call, sizes)

    return make


def _weights(choose: Choose, limits: Limits) -> Call:
    call, sizes = _attention(choose, cattn.attention_weights, limits)
    call["stage"] = choose(STAGES[:-1] if "key_indices" in call else STAGES)
    if one_in(choose, 3) and "key_indices" not in call:
        call["out"] = lay_out(choose, np.full([*sizes.batch, *sizes.axes_of("NTS")], 7, _stored_result(call)))
    return call


def _explained(choose: Choose, limits: Limits) -> Call:
    call, sizes = _attention(choose, cattn.explain, limits)
    found = _results(choose, call, sizes)
    return call | {name: bool(x) for name, x in found.items() if name != "out"}


def _given(choose: Choose, result: Any) -> Call:
    """Choose what a gradient takes beside the call: the results, and their own gradients."""
    call = {"grad_out": cotangent(result.out), "out": result.out, "lse": result.lse}
    return call | _optional(choose, grad_lse=lambda: cotangent(result.lse), merged=lambda: True)


def _backward(choose: Choose, limits: Limits) -> Call:
    call, _ = _attention(choose, cattn.attention_backward, limits)
    result = cattn.scaled_dot_product_attention(**again(call), return_lse=choose((True, np.float64)))
    return call | _given(choose, result)


def _jvp(choose: Choose, limits: Limits) -> Call:
    call, _ = _attention(choose, cattn.attention_jvp, limits)
    if one_in(choose, 4):
        result = cattn.scaled_dot_product_attention(**call, return_lse=np.float64)
        call |= {"out": result.out, "lse": result.lse}
    return call | direction(choose, call) | {"return_lse": choose((False, True, np.float64))}


def _jvp_backward(choose: Choose, limits: Limits) -> Call:
    call = _jvp(choose, limits)
    result = cattn.attention_jvp(**call | {"return_lse": choose((True, np.float64))})
    del call["return_lse"]
    call |= dict(zip(result._fields, result, strict=True)) | {"grad_out_tangent": cotangent(result.out)}
    return call | ({"grad_lse_tangent": cotangent(result.lse)} if choose((False, True)) else {})


def _statistics(choose: Choose, limits: Limits) -> Call:
    call, sizes = _attention(choose, cattn.attention_statistics, limits)
    return call | statistics_options(choose, sizes.letters["S"])


def _packed(choose: Choose, limits: Limits) -> Call:
    call = _longest(choose, packed(choose, limits=limits))
    if one_in(choose, 3):
        shape = *call["query"].shape[:-1], call["value"].shape[-1]
        call["out"] = lay_out(choose, np.full(shape, 7, _stored_result(call)))
    return call | {"return_lse": choose((False, True, np.float64))}


def _packed_backward(choose: Choose, limits: Limits) -> Call:
    call = _longest(choose, packed(choose, cattn.varlen_attention_backward, limits=limits))
    return call | _given(choose, cattn.varlen_attention(**again(call), return_lse=choose((True, np.float64))))


def _longest(choose: Choose, call: Call) -> Call:
    """Say how long the longest sequence is, or leave it out."""
    edges = {x: call[f"cu_seqlens_{x}"] for x in "qk"}
    return call | _optional(choose, **{f"max_seqlen_{x}": (lambda x=x: int(np.diff(edges[x]).max())) for x in "qk"})


def _packed_statistics(choose: Choose, limits: Limits) -> Call:
    call = _longest(choose, packed(choose, cattn.varlen_attention_statistics, limits=limits))
    return call | statistics_options(choose, call["key"].shape[0])


def _merged(choose: Choose, limits: Limits) -> Call:
    """Choose partial results of halves of the keys."""
    call, sizes = attention(choose, without=(*OPERANDS.keys() - {"query", "key", "value"}, *NUMBERS), limits=limits)
    middle = sizes.letters["S"] // 2
    halves = [
        cattn.scaled_dot_product_attention(
            call["query"], call["key"][..., part, :], call["value"][..., part, :], return_lse=True
        )
        for part in (slice(middle), slice(middle, None))
    ]
    return {"outs": [half.out for half in halves], "lses": [half.lse for half in halves]}


# ---- rows of numbers -------------------------------------------------------------------------------------------------
def _shape(choose: Choose, limits: Limits) -> list[int]:
    return [*some(choose, [1, 2, 3], 2), choose(limits.rows), choose(limits.keys)]


def _optional(choose: Choose, **makers: Callable[[], Any]) -> Call:
    """Make each argument or leave it out."""
    return {name: make() for name, make in makers.items() if choose((False, True))}


def _on_rows(name: str, **makers: Callable[[Choose, np.ndarray], Any]) -> Arguments:
    """Choose an array of rows, and arguments made of it, any of which may be left out."""

    def make(choose: Choose, limits: Limits) -> Call:
        x = floats(choose, *_shape(choose, limits), dtype=choose(STORED))
        return {name: x} | _optional(
            choose, **{key: (lambda make=make: make(choose, x)) for key, make in makers.items()}
        )

    return make


def _axis(choose: Choose, x: np.ndarray) -> int:
    return choose(range(-x.ndim, x.ndim))


def _where(choose: Choose, x: np.ndarray) -> np.ndarray:
    return seed(choose).random(broadcastable(choose, x.shape)[choose(range(x.ndim)) :]) < 0.7


def _empty(choose: Choose, x: np.ndarray) -> np.ndarray:
    return lay_out(choose, np.full(x.shape, 7, x.dtype))


def _alike(choose: Choose, x: np.ndarray) -> np.ndarray:
    return floats(choose, *x.shape, dtype=x.dtype)


def _column(choose: Choose, x: np.ndarray) -> np.ndarray:
    return floats(choose, x.shape[-1], dtype=x.dtype)


def _p(choose: Choose, _: np.ndarray) -> float:
    return choose((0.5, 0.1, 0.0, 1.0))


def _softmax_backward(choose: Choose, limits: Limits) -> Call:
    call = _on_rows("grad_out", out=_empty)(choose, limits)
    axis, scale = _axis(choose, call["grad_out"]), choose((1.0, -0.5))
    weights = cattn.softmax(_alike(choose, call["grad_out"]), axis, scale=scale)
    return call | {"weights": weights, "axis": axis, "scale": scale}


def _masked(choose: Choose, limits: Limits) -> Call:
    call = _on_rows(
        "scores", mask=_where, axis=lambda choose, _: choose((-1, -2)), scale=lambda *_: 0.5,
        method=lambda *_: "renormalize", out=_empty,
    )(choose, limits)  # fmt: skip
    return call | _placed(choose, *call["scores"].shape[-2:])


def _placed(choose: Choose, T_q: int, T_k: int) -> Call:
    """Choose causality and the position of the first query."""
    corner = choose((None, "upper_left", "lower_right"))
    return {"is_causal": corner} if corner else {"is_causal": True, "query_offset": choose(range(-T_q, T_k + 1))}


def _pairs(choose: Choose, limits: Limits) -> Call:
    """Choose which keys the queries of one sequence see."""
    T_q, T_k = choose(limits.rows), choose(limits.keys)
    return {"T_q": T_q, "T_k": T_k} | _placed(choose, T_q, T_k) | _optional(
        choose, window_size=lambda: choose(((-1, -1), (2, 0), (0, 30)))
    )  # fmt: skip


def _shown(choose: Choose, _: Limits) -> Call:
    call = _pairs(choose, SMALL)
    T_q, T_k = call["T_q"], call["T_k"]
    return call | _optional(
        choose,
        attn_mask=lambda: seed(choose).random((T_q, T_k)) < 0.7,
        query_seq_lengths=lambda: choose(range(T_q + 1)),
        key_value_seq_lengths=lambda: choose(range(T_k + 1)),
        key_value_seq_starts=lambda: choose(range(T_k + 1)),
    )


def _dropped(choose: Choose, limits: Limits) -> Call:
    call = _on_rows("x", p=_p, return_mask=lambda *_: True, training=lambda *_: True, out=_empty)(choose, limits)
    return call | {"rng": seed_of(choose, cattn.dropout)}


def _dropout_backward(choose: Choose, limits: Limits) -> Call:
    call = _on_rows("grad_out", out=_empty)(choose, limits) | {"p": choose((0.5, 0.1, 1.0))}
    drawn_again = {"rng": choose((3, cattn.TorchGenerator(3)))}
    return call | (
        drawn_again if choose((False, True)) else {"mask": seed(choose).random(call["grad_out"].shape) < 0.7}
    )


SCALINGS = [
    None,
    {"rope_type": "linear", "factor": 2.0},
    {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 16},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
]


def _rotated(choose: Choose, limits: Limits) -> Call:
    x = floats(
        choose, *some(choose, [1, 2, 5], 2), choose(limits.rows), choose([4, 7, 16, 66, 128]), dtype=choose(STORED)
    )
    start, T = choose([0, 1000, 2**40]), x.shape[-2]
    places: list[Any] = [np.arange(start, start + T), np.arange(T) / 2, [3] * T]
    return {"x": x, "positions": choose(places), "rotary_dim": x.shape[-1] // 2 * 2} | _optional(
        choose,
        theta=lambda: choose((10000.0, 1.5, 500000)), interleaved=lambda: True, inverse=lambda: True,
        scaling=lambda: choose(SCALINGS), out=lambda: _empty(choose, x),
    )  # fmt: skip


def _with_gradient(make: Arguments, *without: str) -> Arguments:
    """Choose the arguments of a function's gradient."""

    def gradient(choose: Choose, limits: Limits) -> Call:
        call = {name: x for name, x in make(choose, limits).items() if name not in without}
        return {"grad_out": _alike(choose, call["x"])} | call

    return gradient


def _projected(choose: Choose, limits: Limits) -> Call:
    x = floats(choose, *_shape(choose, limits), dtype=choose(STORED))
    n, fits = choose(limits.widths), x.dtype not in (np.float16, np.float64)
    call = {"x": x, "weight": floats(choose, n, x.shape[-1], dtype=x.dtype)}
    out = np.full((*x.shape[:-1], n), 7, x.dtype)
    call |= _optional(choose, bias=lambda: floats(choose, n, dtype=x.dtype), out=lambda: lay_out(choose, out))
    return call | ({"compute_dtype": "bfloat16"} if fits and one_in(choose, 3) else {})


def _projection_gradients(choose: Choose, limits: Limits) -> Call:
    call = _projected(choose, limits)
    call = {name: x for name, x in call.items() if name not in ("bias", "out")}
    return {"grad_out": floats(choose, *call["x"].shape[:-1], len(call["weight"]), dtype=call["x"].dtype)} | call


def _edges(choose: Choose, total: int) -> list[int]:
    return [0, total // choose((1, 2, 3)), total]


def _with_state(choose: Choose, limits: Limits) -> tuple[Call, tuple[int, ...], tuple[int, ...]]:
    """Choose the arguments of linear attention. Returns the shapes of the output and of the states, too."""
    few, each, tokens = choose((1, 2)), choose((1, 2, 3)), choose((0, 1, 5, 17, 40))
    d_k, d_v, dtype, packed = choose(limits.widths), choose(limits.widths), choose(STORED), one_in(choose, 4)
    states, batch = few * each, () if packed else choose(((1,), (2,)))
    queries = choose((few, states, 2 * states))
    key, value = choose(((few, states), (states, few)))
    layout = choose(("bhtd", "bthd"))
    wide = np.float64 if dtype == np.float64 else np.float32

    def tokens_of(heads: int, *width: int, dtype: Any = dtype) -> np.ndarray:
        x = floats(choose, *batch, heads, tokens, *width, dtype=dtype)
        return x.swapaxes(len(batch), len(batch) + 1) if layout == "bthd" else x

    edges = _edges(choose, tokens)
    shape = (len(edges) - 1 if packed else batch[0], states, d_k, d_v)
    call: Call = {"query": tokens_of(queries, d_k), "key": tokens_of(key, d_k), "value": tokens_of(value, d_v)}
    call |= {"layout": layout, **({"cu_seqlens": edges} if packed else {})}
    call |= _optional(
        choose,
        decay=lambda: -np.abs(tokens_of(states, *choose(((), (d_k,))), dtype=wide)),
        beta=lambda: np.abs(tokens_of(states, dtype=wide)) / 4,
        state=lambda: floats(choose, *shape, dtype=wide), scale=lambda: choose((0.5, 1.0)),
    )  # fmt: skip
    if not packed and one_in(choose, 2):
        call["seq_lengths"] = choose((tokens // 2, [tokens // 3] * batch[0]))
    heads = (max(states, queries), tokens)
    return call, (*batch, *(heads if layout == "bhtd" else heads[::-1]), d_v), shape


def _linear_attention(choose: Choose, limits: Limits) -> Call:
    call, out, state = _with_state(choose, limits)
    wide = np.float64 if call["query"].dtype == np.float64 else np.float32
    return call | _optional(
        choose,
        return_state=lambda: True, state_out=lambda: lay_out(choose, np.full(state, 7, wide)),
        out=lambda: lay_out(choose, np.full(out, 7, call["query"].dtype)),
    )  # fmt: skip


def _linear_attention_gradients(choose: Choose, limits: Limits) -> Call:
    call, out, state = _with_state(choose, limits)
    wide = np.float64 if call["query"].dtype == np.float64 else np.float32
    call["grad_out"] = floats(choose, *out, dtype=call["query"].dtype)
    return call | _optional(choose, grad_state=lambda: floats(choose, *state, dtype=wide))


def _convolved(choose: Choose, limits: Limits) -> Call:
    batch, tokens, channels = choose(((), (2,))), choose((0, 1, 3, 17)), choose((*limits.widths, 300))
    width, dtype = choose((1, 2, 4)), choose(STORED)
    call: Call = {"x": floats(choose, *batch, tokens, channels, dtype=dtype)}
    call["weight"] = floats(choose, channels, width, dtype=dtype)
    edges = _edges(choose, tokens)
    packed = not batch and one_in(choose, 2)
    state = (*((len(edges) - 1,) if packed else batch), width - 1, channels)
    call |= {"cu_seqlens": edges} if packed else _optional(choose, seq_lengths=lambda: tokens // 2)
    return call | _optional(
        choose,
        bias=lambda: floats(choose, channels, dtype=dtype), activation=lambda: "silu",
        state=lambda: floats(choose, *state, dtype=dtype), return_state=lambda: True,
        state_out=lambda: lay_out(choose, np.full(state, 7, dtype)), out=lambda: _empty(choose, call["x"]),
    )  # fmt: skip


def _convolution_gradients(choose: Choose, limits: Limits) -> Call:
    call = _convolved(choose, limits)
    left_out = ["cu_seqlens", "seq_lengths", "return_state", "state_out", "out", *["state"] * ("cu_seqlens" in call)]
    call = {name: x for name, x in call.items() if name not in left_out}
    call["grad_out"] = _alike(choose, call["x"])
    state = (*call["x"].shape[:-2], call["weight"].shape[1] - 1, call["x"].shape[-1])
    return call | _optional(choose, grad_state=lambda: floats(choose, *state, dtype=call["x"].dtype))


_normed = _on_rows("x", weight=_column, eps=lambda choose, _: choose((1e-5, 0.5)), out=_empty)
_layer_normed = _on_rows("x", weight=_column, bias=_column, eps=lambda choose, _: choose((1e-5, 0.5)), out=_empty)
_activated = _on_rows("x", out=_empty)
_gelu = _on_rows("x", approximate=lambda *_: "tanh", out=_empty)


def _constant(**arguments: Any) -> Arguments:
    """Make these arguments; what can be called chooses."""
    return lambda choose, _: {name: value(choose) if callable(value) else value for name, value in arguments.items()}


def _weights_of_layers(choose: Choose, limits: Limits) -> Call:
    n = choose(limits.rows)
    weights = np.abs(floats(choose, choose((1, 3)), *some(choose, [1, 2], 1), 2, n, n))
    return {"weights": weights} | _optional(choose, residual=lambda: choose((0, 1)))


def _scored(choose: Choose, limits: Limits) -> Call:
    n = choose(limits.rows)
    return {"weights": np.abs(floats(choose, 2, n, n)), "token_ids": np.arange(n) % 3}


def _quantizable(choose: Choose, limits: Limits) -> Call:
    x = floats(choose, 2, choose(limits.rows), choose((1, 8, 33)), dtype=choose(STORED))
    return {"x": x, "axis": choose((-1, -2, 0)), "dtype": choose(("int8", "float8_e4m3fn"))}


def _bytes(choose: Choose) -> np.ndarray:
    return random_bytes(seed(choose), (2, 3), choose(QUANTIZED))


# ---- classes ---------------------------------------------------------------------------------------------------------
def whole(*shape: int) -> np.ndarray:
    """Small whole numbers, whose products and sums are exact in any order in which the BLAS adds them."""
    return (np.arange(np.prod(shape, dtype=int)) % 5 - 2).astype(np.float32).reshape(shape)


def use_cache(batch_shape: Any, num_kv_heads: Any, query: Any, key: Any, value: Any, n: Any, dtype: Any) -> Any:
    """Fill a cache, attend with it and truncate it; a call that raises must not change it."""
    cache = cattn.KVCache(batch_shape, num_kv_heads, 6, 3, dtype=dtype)
    one = np.ones((*cache.batch_shape, cache.num_kv_heads, 2, 3), np.float16)
    cache.append(one, one)
    attended = []

    def state() -> Any:
        return cache.lengths.tolist(), [store.tobytes() for store in cache._stores()]

    def attend() -> None:
        attended.append(cattn.causal_attention(query, cache, enable_gqa=True, return_lse=True))

    for change in (lambda: cache.append(key, value), attend, lambda: cache.truncate(n)):
        before = state()
        try:
            change()
        except Exception as error:
            assert state() == before, "a cache that refused has changed"
            raise error from None
    stores = [store.view(np.uint8) for store in cache._stores()]
    return *attended, cache.lengths, cache.query_offset(), *stores


def _caching(choose: Choose, _: Limits) -> Call:
    batch, heads, tokens = choose([(), (1,), (2,)]), choose((1, 2)), choose((1, 2, 4))
    query, key, value = (floats(choose, *batch, n, tokens, 3) for n in (2 * heads, heads, heads))
    dtype = choose(("float32", "float64", "float16", "int8", "float8_e4m3fn"))
    return {"batch_shape": batch, "num_kv_heads": heads, "query": query, "key": key, "value": value,
            "n": choose((0, 1, 2)), "dtype": dtype}  # fmt: skip


def train(x: Any, num_heads: Any, num_kv_groups: Any, dropout: Any, rng: Any, grad_out: Any) -> Any:
    """Run a layer forward and backward. Its projections are exact, because the BLAS may round in any order.

    So the output projection is a permutation, and only gradients that the BLAS computes exactly are returned.
    """
    layer = cattn.MultiHeadAttention(6, 8, 128, dropout, num_heads, num_kv_groups=num_kv_groups, rng=rng)
    for linear in (layer.W_query, layer.W_key, layer.W_value):
        linear.weight[...] = whole(*linear.weight.shape)
    layer.out_proj.weight[...] = np.eye(8)[::-1]
    layer.out_proj.bias[...] = 0
    out = layer(x, return_weights=True)
    layer.backward(grad_out)
    return out, layer.grads["out_proj.bias"]


def _training(choose: Choose, _: Limits) -> Call:
    heads, tokens = choose((1, 2, 4)), choose((1, 5, 33, 97))
    groups = choose([g for g in (1, 2, 4) if heads % g == 0])
    return {"x": whole(tokens, 6), "num_heads": heads, "num_kv_groups": groups, "dropout": choose((0.0, 0.4)),
            "rng": choose(range(10)), "grad_out": whole(tokens, 8)}  # fmt: skip


def load(state_dict: Any, strict: Any) -> Any:
    """Load weights; a call that raises must not change them."""
    layer = cattn.Linear(3, 2, rng=1)
    before = layer.weight.copy()
    try:
        return layer.load_state_dict(state_dict, strict), layer.state_dict()
    except Exception as error:
        assert layer.weight.tobytes() == before.tobytes(), "a state_dict that was refused has changed the weights"
        raise error from None


def _layer(kind: Function) -> Function:
    """Return a function that makes a layer and calls it."""

    def call(x: Any, **arguments: Any) -> Any:
        return kind(**arguments)(x)

    return _named(call, [*inspect.signature(kind).parameters, "x"])


def _method(name: str) -> Function:
    """Return a function that draws from a new generator, whose state afterwards belongs to the result."""

    def call(seed: Any, dropout: Any, **arguments: Any) -> Any:
        generator = cattn.TorchGenerator(seed, dropout)
        return getattr(generator, name)(*arguments.values()), generator.get_state()

    return _named(call, ["seed", "dropout", *inspect.signature(getattr(cattn.TorchGenerator, name)).parameters])


def _named(function: Any, names: Sequence[str]) -> Function:
    function.names = names  # of the arguments that an error may name
    return function


def _drawing(**arguments: Any) -> Arguments:
    kinds = lambda choose: choose(("aten", "mkl"))  # noqa: E731
    return _constant(seed=lambda choose: choose(range(2**62)), dropout=kinds, **arguments)


def _size(choose: Choose) -> int:
    return choose((1, 15, 16, 17, 623, 624, 700))


def set_threads(n: Any) -> Any:
    try:
        return cattn.set_num_threads(n)
    finally:
        cattn.set_num_threads(None)


# ---- all public functions --------------------------------------------------------------------------------------------
MATRIX = np.ones((2, 5, 3), np.float32)
_SIZED = _constant(x=MATRIX, d_in=3, d_out=4, rng=3)
_CONTEXT: Call = {"x": MATRIX, "d_in": 3, "d_out": 4, "context_length": 8, "dropout": 0.5, "rng": 3}
FUNCTIONS: dict[str, tuple[Function, Arguments]] = {
    "scaled_dot_product_attention": (cattn.scaled_dot_product_attention, _forward(cattn.scaled_dot_product_attention)),
    "causal_attention": (cattn.causal_attention, _forward(cattn.causal_attention)),
    "attention_weights": (cattn.attention_weights, _weights),
    "attention_backward": (cattn.attention_backward, _backward),
    "attention_jvp": (cattn.attention_jvp, _jvp),
    "attention_jvp_backward": (cattn.attention_jvp_backward, _jvp_backward),
    "attention_statistics": (cattn.attention_statistics, _statistics),
    "varlen_attention": (cattn.varlen_attention, _packed),
    "varlen_attention_backward": (cattn.varlen_attention_backward, _packed_backward),
    "varlen_attention_statistics": (cattn.varlen_attention_statistics, _packed_statistics),
    "merge_attention": (cattn.merge_attention, _merged),
    "explain": (cattn.explain, _explained),
    "softmax": (
        cattn.softmax,
        _on_rows("x", axis=_axis, where=_where, scale=lambda choose, _: choose((0.5, -2)), out=_empty),
    ),
    "softmax_backward": (cattn.softmax_backward, _softmax_backward),
    "masked_softmax": (cattn.masked_softmax, _masked),
    "dropout": (cattn.dropout, _dropped),
    "dropout_backward": (cattn.dropout_backward, _dropout_backward),
    "rope": (cattn.rope, _rotated),
    "rms_norm": (cattn.rms_norm, _normed),
    "rms_norm_backward": (cattn.rms_norm_backward, _with_gradient(_normed, "out")),
    "layer_norm": (functional.layer_norm, _layer_normed),
    "layer_norm_backward": (functional.layer_norm_backward, _with_gradient(_layer_normed, "bias", "out")),
    "gelu": (functional.gelu, _gelu),
    "gelu_backward": (functional.gelu_backward, _with_gradient(_gelu)),
    "silu": (functional.silu, _activated),
    "silu_backward": (functional.silu_backward, _with_gradient(_activated)),
    "linear": (functional.linear, _projected),
    "linear_backward": (functional.linear_backward, _projection_gradients),
    "linear_attention": (cattn.linear_attention, _linear_attention),
    "linear_attention_backward": (functional.linear_attention_backward, _linear_attention_gradients),
    "causal_conv": (functional.causal_conv, _convolved),
    "causal_conv_backward": (functional.causal_conv_backward, _convolution_gradients),
    "quantize": (cattn.quantize, _quantizable),
    "dequantize": (
        cattn.dequantize,
        _constant(x=_bytes, scale=lambda choose: choose((0.5, [[1], [2]]))),
    ),
    "causal_mask": (cattn.causal_mask, _pairs),
    "show_mask": (cattn.show_mask, _shown),
    "sliding_window": (cattn.sliding_window, _constant(total=lambda choose: choose((1, 4, 99)))),
    "get_alibi_slopes": (cattn.get_alibi_slopes, _constant(num_heads=lambda choose: choose((1, 4, 12)))),
    "attention_rollout": (cattn.attention_rollout, _weights_of_layers),
    "head_scores": (cattn.head_scores, _scored),
    # classes
    "Quantized": (cattn.Quantized, _constant(values=_bytes, scale=np.float32(0.5))),
    "BlockMask": (
        cattn.BlockMask,
        _constant(blocks=lambda choose: seed(choose).random((2, 3)) < 0.5, size=lambda choose: choose((1, 16))),
    ),
    "KVCache": (use_cache, _caching),
    "TorchGenerator": (cattn.TorchGenerator, _constant(seed=4, dropout="aten")),
    "TorchGenerator.rand": (_method("rand"), _drawing(size=_size)),
    "TorchGenerator.randn": (_method("randn"), _drawing(size=_size)),
    "TorchGenerator.randint": (_method("randint"), _drawing(low=0, high=9, size=lambda choose: (_size(choose),))),
    "TorchGenerator.bernoulli": (_method("bernoulli"), _drawing(p=0.3)),
    "TorchGenerator.dropout_mask": (_method("dropout_mask"), _drawing(p=0.3, size=_size)),
    "TorchGenerator.linear": (_method("linear"), _drawing(in_features=3, out_features=2, bias=True)),
    "TorchGenerator.set_state": (_method("set_state"), _drawing(state=lambda _: cattn.TorchGenerator(2).get_state())),
    "TorchGenerator.manual_seed": (_method("manual_seed"), _drawing(new=5)),
    "Linear": (load, _constant(state_dict=lambda _: {"weight": whole(2, 3), "bias": whole(2)}, strict=True)),
    "MultiHeadAttention": (train, _training),
    "Dropout": (_layer(cattn.Dropout), _constant(x=MATRIX, p=0.5, rng=3)),
    "SelfAttention_v1": (_layer(cattn.SelfAttention_v1), _SIZED),
    "SelfAttention_v2": (_layer(cattn.SelfAttention_v2), _SIZED),
    "CausalAttention": (_layer(cattn.CausalAttention), _constant(**_CONTEXT)),
    "MultiHeadAttentionWrapper": (_layer(cattn.MultiHeadAttentionWrapper), _constant(**_CONTEXT, num_heads=2)),
    "set_num_threads": (set_threads, _constant(n=2)),
}  # fmt: skip


# ---- pieces of work --------------------------------------------------------------------------------------------------
class Work(NamedTuple):
    """A call whose result depends on its arguments alone: each run makes its generators and outputs anew."""

    name: str
    function: Function
    arguments: Call

    def run(self) -> Results:
        result = self.function(**again(self.arguments))
        return arrays(result.visible_pairs if self.name == "explain" else result)  # the rest of a plan is the machine's


def arrays(*results: Any) -> Results:
    """Return all arrays and numbers of nested results in one list of arrays."""
    flat: Results = []
    for result in results:
        if isinstance(result, (tuple, list)):
            flat += arrays(*result)
        elif isinstance(result, dict):
            flat += arrays(*result.values())
        elif isinstance(result, np.ndarray):
            flat.append(result)
        elif isinstance(result, (str, bool, int, float)):
            flat.append(np.asarray([ord(c) for c in result] if isinstance(result, str) else result))
    return flat


def assert_near(got: Results, wanted: Results | None, bound: float) -> None:
    """Compare results of a function with the reference, relative to the largest number of each array."""
    assert wanted is not None
    assert len(got) == len(wanted)
    for a, b in zip(got, wanted, strict=True):
        wide = b.astype(np.float64)
        size = np.abs(wide).max(initial=0, where=np.isfinite(wide))
        np.testing.assert_allclose(a.astype(np.float64), wide, rtol=0, atol=bound * (1 + size), strict=True)


# Their products and sums are NumPy's, which depend on the floating-point mode, or on the BLAS.
IN_NUMPY = {"attention_rollout", "head_scores", "get_alibi_slopes", "quantize", "dequantize", "Linear", "Dropout",
            "MultiHeadAttention", "KVCache"}  # fmt: skip
BY_BLAS = {"SelfAttention_v1", "SelfAttention_v2", "CausalAttention", "MultiHeadAttentionWrapper"}
OF_THE_PROCESS = {"set_num_threads"}
OFTEN = [name for name, (function, _) in FUNCTIONS.items() if options_of(function)]  # half of all calls


def work(choose: Choose, without: Collection[str] = (), limits: Limits = LIMITS) -> Work:
    """Choose a call of any function that gives the same bits whenever it is made."""
    every = [name for name in FUNCTIONS if name not in {*BY_BLAS, *OF_THE_PROCESS, *without}]
    name = choose(choose([OFTEN, every]))
    function, make = FUNCTIONS[name]
    return Work(name, function, make(choose, limits))
