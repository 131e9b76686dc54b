"""A hypothesis strategy for pieces of work: calls of the public API whose results depend on their arguments alone.

The same work gives the same bits whatever happened before, on every kernel table in the bit contract, and whatever
other threads do. test_random_histories.py and tools/soak repeat work under changing circumstances. Each repetition
makes its random generators anew.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from hypothesis import strategies as st

import cattn
from cattn import functional
from support import find
from support.attention_strategy import (
    KEYS,
    LONG,
    ROWS,
    calls,
    gathered_calls,
    packed_calls,
    quantize,
    statistics_options,
)
from support.wrong_calls import CASES, WORKING, Row

Results = list[np.ndarray]
FLOATS = [np.float32, np.float64, np.float16, ml_dtypes.bfloat16]
BATCHES = [0, 1, 2, 3]
WIDTHS = [1, 3, 8, 17]
INF = np.inf


class Work(NamedTuple):
    """A piece of work: its name, the function that does it, and its inputs."""

    name: str
    run: Callable[[], Results]
    inputs: dict[str, Any]  # the arrays that it reads, and the numbers that tell one piece of work from another

    def __repr__(self) -> str:
        return f"{self.name}({self.inputs})"


def arrays(*results: Any) -> Results:
    """Return all arrays of nested results in one list; None and other values are left out."""
    flat: Results = []
    for result in results:
        if isinstance(result, tuple):
            flat += arrays(*result)
        elif isinstance(result, np.ndarray):
            flat.append(result)
    return flat


def generator_of(rng: dict[str, Any] | int) -> Any:
    return cattn.TorchGenerator(**rng) if isinstance(rng, dict) else rng


rngs = st.one_of(
    st.integers(0, 2**64 - 1),
    st.fixed_dictionaries({"seed": st.integers(0, 2**64 - 1), "dropout": st.sampled_from(["aten", "mkl"])}),
)


def normal(draw: st.DrawFn, *shape: int, dtype: Any = np.float32) -> np.ndarray:
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    return rng.standard_normal(shape).astype(dtype)


# ---- attention and its gradients -----------------------------------------------------------------------------------
@st.composite
def summary(draw: st.DrawFn) -> Work:
    """Statistics of attention weights."""
    call = {name: a for name, a in draw(calls())[0].items() if name not in ("value", "dropout_p", "rng")}
    call |= draw(statistics_options(call["key"].shape[-2]))
    return Work("summary", lambda: arrays(cattn.attention_statistics(**call)), call)


@st.composite
def attention_calls(draw: st.DrawFn) -> dict[str, Any]:
    call, _ = draw(calls())
    if draw(st.integers(0, 3)) == 0:
        call = quantize(draw, call)
    stream = draw(rngs)
    if "dropout_p" in call:
        call["rng"] = stream
    singles = all(call[name].dtype not in (np.float16, np.float64) for name in ("query", "key", "value"))
    if singles and draw(st.booleans()):
        call["compute_dtype"] = "bfloat16"
    return call


def again(call: dict[str, Any]) -> dict[str, Any]:
    """Return the call with a new generator in the state that the first one had."""
    return call | ({"rng": generator_of(call["rng"])} if "rng" in call else {})


@st.composite
def attention(draw: st.DrawFn) -> Work:
    call = draw(attention_calls())

    def run() -> Results:
        extras = {"return_weights": True, "return_lse": True, "return_dropout_mask": True}
        return arrays(cattn.scaled_dot_product_attention(**again(call), **extras))

    return Work("attention", run, call)


@st.composite
def gradients(draw: st.DrawFn) -> Work:
    call, double_lse = draw(attention_calls()), draw(st.booleans())
    call.pop("scale", None)
    if any(isinstance(call[name], cattn.Quantized) for name in ("key", "value")):
        call.pop("compute_dtype", None)

    def run() -> Results:
        result = cattn.scaled_dot_product_attention(**again(call), return_lse=True)
        if double_lse:
            out = cattn.AttentionOutput(lse=np.empty(result.lse.shape, np.float64))
            result = cattn.scaled_dot_product_attention(**again(call), return_lse=True, out=out)
        steps = (np.arange(result.out.size) * 7 % 32 - 16) / 8  # exact, in any rounding direction
        grad_out = steps.reshape(result.out.shape).astype(result.out.dtype)
        grad_lse = result.lse if double_lse else None
        return arrays(
            result,
            cattn.attention_backward(grad_out, out=result.out, lse=result.lse, grad_lse=grad_lse, **again(call)),
        )

    return Work("gradients", run, call)


@st.composite
def gathered(draw: st.DrawFn) -> Work:
    """Attention and gradients of lists of keys."""
    call, _ = draw(gathered_calls())

    def run() -> Results:
        result = cattn.scaled_dot_product_attention(**call, return_weights=True, return_lse=True)
        wide = {name: a for name, a in call.items() if name != "scale"}
        again = cattn.scaled_dot_product_attention(**wide, return_lse=True)
        grads = cattn.attention_backward(again.out, out=again.out, lse=again.lse, **wide)
        return arrays(result, cattn.attention_weights(**{n: a for n, a in call.items() if n != "value"}), grads)

    return Work("gathered", run, call)


@st.composite
def tangents(draw: st.DrawFn) -> Work:
    """The derivative in a direction, and its gradients."""
    call, _ = draw(calls())
    call.pop("scale", None)
    names = [
        name for name in ("query", "key", "value", "bias", "sinks") if name in call and draw(st.integers(0, 3)) > 0
    ]
    steps = {name: np.arange(np.size(call[name])).reshape(np.shape(call[name])) % 7 / 4 - 0.75 for name in names}
    direction = {f"{name}_tangent": x.astype(np.asarray(call[name]).dtype) for name, x in steps.items()}

    def run() -> Results:
        found = cattn.attention_jvp(**call, **direction, return_lse=True)
        results = {
            "out": found.out,
            "lse": found.lse,
            "out_tangent": found.out_tangent,
            "lse_tangent": found.lse_tangent,
        }
        return arrays(found, cattn.attention_jvp_backward(found.out, **results, **call, **direction))

    return Work("tangents", run, call | direction)


@st.composite
def packed(draw: st.DrawFn) -> Work:
    call = draw(packed_calls())
    options = draw(statistics_options(call["key"].shape[0]))
    summed = {name: a for name, a in call.items() if name not in ("value", "dropout_p", "rng")}

    def run() -> Results:
        result = cattn.varlen_attention(**call, return_lse=True)
        summary = cattn.varlen_attention_statistics(**summed, **options)
        grads = cattn.varlen_attention_backward(result.out, out=result.out, lse=result.lse, **call)
        return arrays(result, summary, grads)

    return Work("varlen", run, call | options)


# ---- decoding ------------------------------------------------------------------------------------------------------
@st.composite
def decoding(draw: st.DrawFn) -> Work:
    """A prompt and three tokens through a cache, which is truncated at the end."""
    heads, kv_heads, dtype = 4, draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from(FLOATS))
    D, prompt, steps = draw(st.sampled_from(WIDTHS)), draw(st.sampled_from([1, 190, 192, *LONG[:3]])), 3
    query, key, value = (normal(draw, n, prompt + steps, D, dtype=dtype) for n in (heads, kv_heads, kv_heads))
    truncated_length = draw(st.integers(0, prompt))
    stored = draw(st.sampled_from([dtype, "int8", "float8_e4m3fn"])) if np.dtype(dtype).itemsize > 2 else dtype

    def run() -> Results:
        cache = cattn.KVCache((), kv_heads, prompt + steps, D, dtype=stored)
        cache.append(key[:, :prompt], value[:, :prompt])
        results = []
        for t in range(prompt, prompt + steps):
            cache.append(key[:, t : t + 1], value[:, t : t + 1])
            offset = cache.lengths - 1
            token = query[:, t : t + 1]
            result = cattn.causal_attention(
                token, cache.k, cache.v, enable_gqa=True, query_offset=offset, return_lse=True
            )
            results += arrays(result)
        cache.truncate(truncated_length)
        held = [a for stored in (cache.k, cache.v) for a in (stored if type(stored) is not np.ndarray else [stored])]
        return [*results, *(a.astype(np.float64) for a in held), cache.lengths]

    return Work("decoding", run, {"query": query, "key": key, "value": value, "truncated_length": truncated_length})


@st.composite
def merging(draw: st.DrawFn) -> Work:
    call, _ = draw(calls())
    call = {name: call[name] for name in ("query", "key", "value")}
    middle = call["key"].shape[-2] // 2

    def run() -> Results:
        halves = [
            cattn.scaled_dot_product_attention(
                call["query"], call["key"][..., part, :], call["value"][..., part, :], return_lse=True
            )
            for part in (slice(middle), slice(middle, None))
        ]
        return arrays(cattn.merge_attention([half.out for half in halves], [half.lse for half in halves]))

    return Work("merge", run, call)


# ---- rows of numbers -----------------------------------------------------------------------------------------------
@st.composite
def rowwise(draw: st.DrawFn) -> Work:
    """Softmax and masked softmax, dropout, and their gradients."""
    shape = [*draw(st.lists(st.sampled_from([1, 2, 3]), max_size=2)), draw(st.sampled_from(ROWS))]
    shape.append(draw(st.sampled_from([*KEYS, 511, 512, 513, 1100])))
    x = normal(draw, *shape, dtype=draw(st.sampled_from(FLOATS)))
    x = x[..., ::-1] if draw(st.booleans()) else x
    axis, p, rng = draw(st.integers(-len(shape), -1)), draw(st.sampled_from([0.1, 0.5, 1.0])), draw(rngs)
    offset = draw(st.integers(-3, 600))
    where = np.random.default_rng(draw(st.integers(0, 99))).random(shape[-2:]) < 0.7

    def run() -> Results:
        weights = cattn.softmax(x, axis, where=where)
        masked = cattn.masked_softmax(x, where, is_causal=True, query_offset=offset, scale=0.5)
        dropped = cattn.dropout(x, p, rng=generator_of(rng), return_mask=True)
        back = cattn.softmax_backward(x, weights, axis), cattn.dropout_backward(x, p, rng=generator_of(rng))
        return arrays(weights, masked, dropped, back)

    return Work("rowwise", run, {"x": x, "axis": axis, "where": where, "offset": offset, "p": p, "rng": rng})


SCALINGS = [
    None,
    {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 16},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
]


@st.composite
def rotation(draw: st.DrawFn) -> Work:
    """RMS norm, rotary positions, and the gradients of both."""
    shape = [*draw(st.lists(st.sampled_from([1, 2, 5]), max_size=2)), draw(st.sampled_from(ROWS))]
    n_cols = draw(st.sampled_from([4, 7, 16, 66, 128]))
    x = normal(draw, *shape, n_cols, dtype=draw(st.sampled_from(FLOATS)))
    x = x[..., ::-1] if draw(st.booleans()) else x
    weight = normal(draw, n_cols, dtype=x.dtype) if draw(st.booleans()) else None
    matrix = normal(draw, n_cols, n_cols, dtype=x.dtype)
    start = draw(st.sampled_from([0, 1000, 2**40]))
    options = {
        "positions": np.arange(start, start + shape[-1]),
        "rotary_dim": n_cols // 2 * 2,
        "interleaved": draw(st.booleans()),
        "scaling": draw(st.sampled_from(SCALINGS)),
    }

    def run() -> Results:
        normed = cattn.rms_norm(x, weight, 1e-5)
        rotated = cattn.rope(normed, **options)
        grad = cattn.rope(x, inverse=True, **options)
        layer = functional.layer_norm(x, weight, weight, 1e-5)
        active = functional.gelu(layer), functional.gelu(layer, "tanh"), functional.silu(layer)
        slopes = functional.gelu_backward(grad, layer), functional.silu_backward(grad, layer)
        gradients = cattn.rms_norm_backward(grad, x, weight, 1e-5), functional.layer_norm_backward(grad, x, weight)
        projected = functional.linear(x, matrix, weight)
        gradients = *gradients, functional.linear_backward(projected, x, matrix)
        return arrays(normed, rotated, grad, layer, projected, *active, *slopes, *gradients)

    return Work("rotation", run, {"x": x, "weight": weight, "matrix": matrix} | options)


@st.composite
def stream(draw: st.DrawFn) -> Work:
    """Numbers of a TorchGenerator. Its state is saved and restored between the draws."""
    seed, kind = draw(st.integers(0, 2**64 - 1)), draw(st.sampled_from(["aten", "mkl"]))
    sizes = draw(st.lists(st.sampled_from([1, 15, 16, 17, 623, 624, 700]), min_size=1, max_size=3))

    def run() -> Results:
        generator, results = cattn.TorchGenerator(seed, kind), []
        for n in sizes:
            state = generator.get_state()
            drawn = [generator.rand(n), generator.randn(n), generator.randint(0, 9, (n,))]
            drawn += [generator.bernoulli(0.3, n), generator.dropout_mask(0.3, n)]
            generator.set_state(state)
            results += [*drawn, generator.randn(n, dtype=np.float64)]
        return [*results, generator.get_state()]

    return Work("stream", run, {"seed": seed, "kind": kind, "sizes": sizes})


@st.composite
def small(draw: st.DrawFn) -> Work:
    """Masks, slopes, counts, quantized numbers, and what is made of weights."""
    T_q, T_k = draw(st.sampled_from(ROWS)), draw(st.sampled_from(KEYS))
    x = normal(draw, 2, T_q, draw(st.sampled_from([1, 8, 33])), dtype=draw(st.sampled_from(FLOATS)))
    weights = np.abs(normal(draw, 2, 3, T_q, T_q))
    corner, left, axis = (
        draw(st.sampled_from(["upper_left", "lower_right"])),
        draw(st.integers(0, 99)),
        draw(st.sampled_from([-1, -2])),
    )

    def run() -> Results:
        options = {"is_causal": corner, "window_size": (cattn.sliding_window(left + 1)[0], 0)}
        pairs = np.array(cattn.explain(x, x, x, is_causal=corner).visible_pairs)
        kept = cattn.quantize(x, axis)
        wide = cattn.dequantize(kept.values, kept.scale)
        scores = cattn.head_scores(weights[0], np.arange(T_q) % 5)
        return arrays(
            cattn.causal_mask(T_q, T_k, **options), cattn.get_alibi_slopes(T_q), pairs, kept.values,
            kept.scale, wide, cattn.attention_rollout(weights), tuple(scores),
            np.array([ord(c) for c in cattn.show_mask(3, 4, is_causal=corner)]),
        )  # fmt: skip

    return Work("small", run, {"x": x, "weights": weights, "corner": corner, "left": left, "axis": axis, "T_k": T_k})


# ---- modules -------------------------------------------------------------------------------------------------------
def _whole(*shape: int) -> np.ndarray:
    """Small whole numbers, whose products and sums are exact in any order in which the BLAS adds them."""
    return (np.arange(np.prod(shape, dtype=int)) % 5 - 2).astype(np.float32).reshape(shape)


@st.composite
def modules(draw: st.DrawFn) -> Work:
    """A layer with exact projections: forward, backward to the output projection, a state_dict, decoding with a cache.

    The BLAS may round differently from call to call. So the output projection is a permutation, and only gradients
    that the BLAS computes exactly are compared.
    """
    heads, tokens, seed = (
        draw(st.sampled_from([1, 2, 4])),
        draw(st.sampled_from([1, 5, 33, 97])),
        draw(st.integers(0, 9)),
    )
    groups, p = draw(st.sampled_from([g for g in (1, 2, 4) if heads % g == 0])), draw(st.sampled_from([0.0, 0.4]))
    x = _whole(tokens, 6)

    def layer() -> cattn.MultiHeadAttention:
        made = cattn.MultiHeadAttention(6, 8, 128, p, heads, num_kv_groups=groups, rng=seed)
        for linear in (made.W_query, made.W_key, made.W_value):
            linear.weight[...] = _whole(*linear.weight.shape)
        made.out_proj.weight[...] = np.eye(8)[::-1]
        made.out_proj.bias[...] = 0
        return made

    def run() -> Results:
        first, second = layer(), layer()
        second.load_state_dict(first.state_dict())
        outputs = [module(x, return_weights=True) for module in (first, second)]
        first.backward(_whole(*outputs[0][0].shape))
        second.eval()
        cache = cattn.KVCache((), groups, tokens, 8 // heads)
        steps = [second(x[t : t + 1], cache=cache) for t in range(tokens)]
        return arrays(*outputs, np.concatenate(steps), second(x), first.grads["out_proj.bias"])

    return Work("module", run, {"heads": heads, "groups": groups, "tokens": tokens, "p": p, "seed": seed})


# ---- all of them ---------------------------------------------------------------------------------------------------
def any_function() -> st.SearchStrategy[Work]:
    """All work except layers and statistics, whose sums and products are NumPy's."""
    of_attention = attention(), gathered(), gradients(), tangents(), summary(), packed(), decoding(), merging()
    return st.one_of(*of_attention, rowwise(), rotation(), stream())


def any_work() -> st.SearchStrategy[Work]:
    return st.one_of(any_function(), small(), modules())


# Calls that must be refused. Not among them: warnings turned into errors, which is a setting of the process, and calls
# that set the number of threads of the process.
REFUSED: list[tuple[str, Row]] = [
    (function, row)
    for function, row in CASES
    if not issubclass(row.error, Warning) and "num_threads" not in function and function != "show_config"
]


def refused(function: str, row: Row) -> str:
    """Make a call that must fail, from the table of wrong_calls.py; return the message."""
    arguments = {**WORKING[function](), **row.changes}
    try:
        find(function)(**arguments)
    except row.error as error:
        return str(error)
    raise AssertionError(f"{function} accepted {row.changes}")
