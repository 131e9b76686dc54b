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
from cattn import _cattn
from support import find
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
from support.rows import IN_C, IS_ATTENTION, Array, arrays_of, numbers_of, parameters_of

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


def _chosen(choose: Choose, limits: Limits) -> Call:
    """Choose keys with a mask for all heads; its rows of keys may be blocks."""
    call, sizes = attention(choose, cattn.choose_keys, without=["block_size"], limits=limits)  # it is no BlockMask's
    if sizes.letters["N"] == 0:
        return _chosen(choose, limits)
    for name in call.keys() & {"attn_mask", "bias"}:
        if call[name].ndim > 2 and sizes.heads:
            call[name] = call[name][..., :1, :, :]
    count = choose((1, 2, 5, 300))
    call |= {"count": count, "block_size": choose((1, 1, 2, 3, 16)), "pooled": one_in(choose, 3)}
    call |= {"first": choose((0, 0, 1)), "last": choose((0, min(1, count - 1)))} | _optional(
        choose,
        weights=lambda: floats(choose, *sizes.batch, *sizes.axes_of("NT"), dtype=choose((np.float32, np.float64))),
        activation=lambda: "relu",
        return_scores=lambda: True,
    )
    if one_in(choose, 3):
        shape = cattn.choose_keys(**again(call) | {"return_scores": False}).shape
        call["out"] = lay_out(choose, np.full(shape, 7, np.int32))
    return call


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


# ---- the other functions of C ----------------------------------------------------------------------------------------
def _optional(choose: Choose, **makers: Callable[[], Any]) -> Call:
    """Make each argument or leave it out."""
    return {name: make() for name, make in makers.items() if choose((False, True))}


SCALINGS = [
    None,
    {"rope_type": "linear", "factor": 2.0},
    {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 16},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
]
WORDS = {row[0]: row[3].split("|") for of in _cattn._functions().values() for row in of if row[1] == "WORD" and row[3]}
# Numbers by their kinds; of the others the hook of the function knows what fits.
SETTINGS: dict[str, Callable[[Choose, str], Any]] = {
    "REAL": lambda choose, _: choose((0.5, -2.0)),
    "NOT_NEGATIVE": lambda choose, _: choose((1e-5, 0.5)),
    "BASE": lambda choose, _: choose((10000.0, 1.5, 500000)),
    "PROBABILITY": lambda choose, _: choose((0.5, 0.1, 0.0, 1.0)),
    "FLAG": lambda *_: True,
    "TRUTH": lambda *_: True,
    "WISH": lambda *_: True,
    "WORD": lambda choose, name: choose(WORDS[name]),
    "SCALING": lambda choose, _: choose(SCALINGS),
}
# Numbers that are no normal ones: those with which a state does not grow.
CONTENTS: dict[str, Callable[[np.ndarray, int], np.ndarray]] = {
    "decay": lambda x, _: -np.abs(x),
    "beta": lambda x, d_k: np.abs(x) / x.dtype.type(2 * d_k + 1),
}


class Drawn:
    """Sizes, storage and batch of a call; a batch of packed sequences is one of states alone."""

    def __init__(self, choose: Choose, limits: Limits, rows: dict[str, Array]) -> None:
        letters = set("".join(row.axes for row in rows.values()))
        self.stored = choose(STORED)
        self.wide = np.float64 if self.stored is np.float64 else np.float32
        self.batch = some(choose, [1, 2, 3], 2)
        self.any = [*self.batch, choose(limits.rows), choose(limits.keys)]  # the shape of `*` alone
        self.sizes = {"T": choose(limits.rows), "C": choose(limits.keys), "N": choose(limits.widths)}
        self.sizes |= {letter: choose(limits.widths if "H" in letters else limits.keys) for letter in "HDK"}
        if "S" in letters:  # a convolution, which keeps one row less than it has weights
            self.sizes["K"] = choose((1, 2, 4))
            self.sizes["S"] = self.sizes["K"] - 1
        if "V" in letters:  # heads of keys, values and queries, and of states
            few, each = choose((1, 2)), choose((1, 2, 3))
            self.sizes |= dict(zip("KV", choose(((few, few * each), (few * each, few))), strict=True))
            self.sizes |= {"G": few * each, "N": choose((few, few * each, 2 * few * each))}
            self.batch, self.sizes["T"] = [choose((1, 2))], choose((0, 1, 5, 17, 40))
        self.is_packed = "seq_lengths" in rows and one_in(choose, 4)
        self.edges = _edges(choose, self.sizes["T"])
        self.batch = [] if self.is_packed else self.batch

    def shape(self, row: Array) -> list[int]:
        if row.axes == "*" and row.kind != "QUERY_COUNTS":
            return self.any
        own = [self.sizes[letter] for letter in row.axes if letter != "*"]
        if row.axes == "*NTD":  # each query of few heads reads several states
            own[0] = max(own[0], self.sizes["G"])
        of_states = self.is_packed and "T" not in row.axes
        batch = [len(self.edges) - 1] if of_states else self.batch
        return [*batch, *own] if "*" in row.axes else own


def _edges(choose: Choose, total: int) -> list[int]:
    return [0, total // choose((1, 2, 3)), total]


def _made(choose: Choose, drawn: Drawn, row: Array) -> Any:
    """Return an array of the shape and the kind of its row."""
    shape = drawn.shape(row)
    if row.kind == "EDGES":
        return drawn.edges
    if row.kind == "QUERY_COUNTS":
        return choose((drawn.sizes["T"] // 2, [drawn.sizes["T"] // 3] * shape[0] if len(shape) == 1 else 0))
    dtype = drawn.wide if row.kind == "COMPUTED" else drawn.stored
    if row.role == "RESULT":
        return lay_out(choose, np.full(shape, 7, dtype))
    if row.kind == "BOOLS":
        return seed(choose).random(broadcastable(choose, shape)[choose(range(len(shape))) :]) < 0.7
    if row.axes == "*GTH" and one_in(choose, 2):  # a number for each token
        shape = shape[:-1]
    x = floats(choose, *shape, dtype=dtype)
    return CONTENTS[row.name](x, drawn.sizes["H"]) if row.name in CONTENTS else x


def of_rows(name: str) -> Arguments:
    """Choose the arguments of a function from its rows in C, and those that its hook knows."""
    rows, parameters, hook = arrays_of(name), parameters_of(name), HOOKS.get(name.removesuffix("_backward"))
    numbers = numbers_of(name)

    def make(choose: Choose, limits: Limits) -> Call:
        drawn, call = Drawn(choose, limits, rows), Call()
        for row in rows.values():
            left_out = row.kind in ("OFFSETS", "POSITIONS") or (row.kind == "QUERY_COUNTS" and drawn.is_packed)
            if row.kind == "EDGES":
                wanted = drawn.is_packed
            else:
                wanted = parameters[row.name].default is inspect.Parameter.empty or (not left_out and choose((0, 1)))
            if wanted:
                call[row.name] = _made(choose, drawn, row)
        for key, kind in numbers.items():
            if kind in SETTINGS and choose((False, True)):
                call[key] = SETTINGS[kind](choose, key)
        if "compute_dtype" in numbers and drawn.stored not in (np.float16, np.float64) and one_in(choose, 3):
            call["compute_dtype"] = "bfloat16"
        return hook(choose, call, name) if hook else call

    return make


# ---- what only one function knows ------------------------------------------------------------------------------------
def _along_axes(choose: Choose, call: Call, name: str) -> Call:
    x = call["x" if name == "softmax" else "grad_out"]
    call |= _optional(choose, axis=lambda: choose(range(-x.ndim, x.ndim)))
    if name == "softmax_backward":
        options = {key: call[key] for key in ("axis", "scale") if key in call}
        call["weights"] = cattn.softmax(floats(choose, *x.shape, dtype=x.dtype), **options)
    return call


def _masked(choose: Choose, call: Call, _: str) -> Call:
    call |= _optional(choose, axis=lambda: choose((-1, -2)))
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


def _dropped(choose: Choose, call: Call, name: str) -> Call:
    if name == "dropout":
        return call | {"rng": seed_of(choose, cattn.dropout)}
    again = choose((3, cattn.TorchGenerator(3), None))
    return call | ({"rng": again} if again else {"mask": seed(choose).random(call["grad_out"].shape) < 0.7})


def _rotated(choose: Choose, call: Call, _: str) -> Call:
    T, columns = call["x"].shape[-2:]
    start = choose([0, 1000, 2**40])
    if call.get("scaling", {}) and columns < 4:
        del call["scaling"]
    places: list[Any] = [np.arange(start, start + T), np.arange(T) / 2, [3] * T]
    return call | {"positions": choose(places), "rotary_dim": columns // 2 * 2}


def _in_a_layout(choose: Choose, call: Call, name: str) -> Call:
    """Choose the order of heads and tokens."""
    call["layout"] = choose(("bhtd", "bthd"))
    for key, row in arrays_of(name).items():
        if key in call and "T" in row.axes and call["layout"] == "bthd":
            heads = int("cu_seqlens" not in call)  # behind the batch
            call[key] = call[key].swapaxes(heads, heads + 1)
    return call


HOOKS: dict[str, Callable[[Choose, Call, str], Call]] = {
    "softmax": _along_axes,
    "masked_softmax": _masked,
    "dropout": _dropped,
    "rope": _rotated,
    "linear_attention": _in_a_layout,
}


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
    """Load weights and run the layer; a call that raises must not change them."""
    layer = cattn.Linear(3, 2, rng=1)
    before = layer.weight.copy()
    try:
        loaded = layer.load_state_dict(state_dict, strict)
    except Exception as error:
        assert layer.weight.tobytes() == before.tobytes(), "a state_dict that was refused has changed the weights"
        raise error from None
    return loaded, layer.state_dict(), layer(whole(4, 3)), layer.backward(whole(4, 2)), layer.grads


def _layer(kind: Function) -> Function:
    """Return a function that makes a layer, and runs it forward and backward."""

    def call(x: Any, **arguments: Any) -> Any:
        layer = kind(**arguments)
        out = layer(x)
        return out, layer.backward(np.ones_like(out)), layer.grads

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
MATRIX = np.ones((2, 40, 8), np.float32)
_SIZED = _constant(x=MATRIX, d_in=8, d_out=4, rng=3)
_CONTEXT: Call = {"x": MATRIX, "d_in": 8, "d_out": 4, "context_length": 40, "dropout": 0.5, "rng": 3}
FUNCTIONS: dict[str, tuple[Function, Arguments]] = {
    "scaled_dot_product_attention": (cattn.scaled_dot_product_attention, _forward(cattn.scaled_dot_product_attention)),
    "causal_attention": (cattn.causal_attention, _forward(cattn.causal_attention)),
    "attention_weights": (cattn.attention_weights, _weights),
    "attention_backward": (cattn.attention_backward, _backward),
    "attention_jvp": (cattn.attention_jvp, _jvp),
    "attention_jvp_backward": (cattn.attention_jvp_backward, _jvp_backward),
    "attention_statistics": (cattn.attention_statistics, _statistics),
    "choose_keys": (cattn.choose_keys, _chosen),
    "varlen_attention": (cattn.varlen_attention, _packed),
    "varlen_attention_backward": (cattn.varlen_attention_backward, _packed_backward),
    "varlen_attention_statistics": (cattn.varlen_attention_statistics, _packed_statistics),
    "merge_attention": (cattn.merge_attention, _merged),
    "explain": (cattn.explain, _explained),
    **{name: (find(name), of_rows(name)) for name in IN_C if not IS_ATTENTION.get(name) and name != "causal_mask"},
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
    "TorchGenerator.uniform": (_method("uniform"), _drawing(low=-0.5, high=2.0, size=_size)),
    "TorchGenerator.bernoulli": (_method("bernoulli"), _drawing(p=lambda choose: choose((0.3, np.full(5, 0.5))))),
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
