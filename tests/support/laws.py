"""What must hold for the results of any call of attention, and random problems to check it on.

`problem` chooses a problem, `check` computes it:

- the value of every output, stage, statistic, gradient and tangent against `cattn.reference` in float64, and the sign
  of every zero;
- its bits on all kernel tables inside the bit contract, on any path, with one thread and with two, with other strides,
  and with tokens before heads;
- its bits if NaN stands where no query looks;
- its bits for one batch entry alone and for a few queries alone;
- outputs again with products of bfloat16.

Packed sequences have the bits of a padded batch, a cache has the bits of one pass, and both then are such a problem.
tests/values/test_attention.py checks a few problems, and 20,000 with `pytest --nightly`.
"""

from typing import Any, NamedTuple

import numpy as np

import cattn
from cattn import _cattn, reference
from cattn.reference._attention import Problem as Scores
from cattn.reference._attention import of_output, score
from cattn.reference._shared import logistic, rounded_to_bfloat16
from support import (
    HALVES,
    INF,
    NAN,
    PATHS,
    WORDS,
    Expected,
    assert_same_bits,
    each,
    everything,
    expected,
    forced,
    in_contract,
    quiet,
    rounded,
    table,
    without,
)
from support.calls import (
    HEAD_DIMS,
    NUMBERS,
    OPERANDS,
    STORED,
    Call,
    Choose,
    attention,
    cotangent,
    dequantized,
    packed,
    padded,
    some,
    statistics_options,
    tokens_first,
    unpad,
)
from support.derivatives import arguments, direction, results_of

TABLES = [entry["name"] for entry in _cattn._isa_list() if entry["usable"]]
SAME_BITS = [name for name in TABLES if in_contract(name)]
STAGES = ("qk", "softcap", "bias", "mask", "softmax", "dropout")
VALUE = ("value", "gate")  # what weights and statistics do not take
DROPOUT = ("dropout_p", "rng")
NOT_OF_STATISTICS = (*VALUE, *DROPOUT, "compute_dtype")
SCORED = {*OPERANDS, *NUMBERS} - {"query", "key", "value", "sinks", "gate", *DROPOUT}  # what the scores depend on
BUDGET = 6e6  # multiply-adds of a problem: it is computed some hundred times, also without vectors


class Problem(NamedTuple):
    """A problem: its kind, arguments of attention, arguments of the statistics alone, a seed for all other choices."""

    kind: str
    call: Call
    statistics: Call
    seed: int


# ---- drawing ---------------------------------------------------------------------------------------------------------
def work(call: Call) -> float:
    """Return about how many multiply-adds a call takes."""
    query, value = call["query"], call["value"]
    rows = np.prod(np.broadcast_shapes(query.shape[:-2], call["key"].shape[:-2] if query.ndim < 3 else (1,)))
    return float(rows) * query.shape[-2] * value.shape[-2] * (query.shape[-1] + value.shape[-1] + 8)


def problem(choose: Choose) -> Problem:
    kind = choose(["one call", "one call", "one call", "packed", "cache"])
    if kind == "packed":
        call = packed(choose, cattn.varlen_attention_backward)
    elif kind == "cache":
        call = cached(choose)
    else:  # the checks choose the other ways themselves
        call, _ = attention(choose, without=("layout", "compute_dtype"), long=True)
        if work(call) > BUDGET:  # the last queries and the first keys are left out
            call = only_rows(call, 0, max(1, int(call["query"].shape[-2] * BUDGET / work(call))))
    seed = choose(range(2**32))
    return Problem(kind, call, statistics_options(choose, call["key"].shape[0 if kind == "packed" else -2]), seed)


def cached(choose: Choose) -> Call:
    """Choose queries, keys and values of a text, and how they come to a cache."""
    rng, stored = np.random.default_rng(choose(range(2**32))), choose(STORED)
    batch, group, kv_heads = some(choose, [1, 2], 2), choose((1, 2, 3)), choose((1, 2))
    tokens, D, D_v = choose([1, 2, 7, 33, 97, 193, 300]), choose(HEAD_DIMS[:17]), choose(HEAD_DIMS[:17])
    shapes = {"query": (group * kv_heads, tokens, D), "key": (kv_heads, tokens, D), "value": (kv_heads, tokens, D_v)}
    call: Call = {n: rng.standard_normal((*batch, *shape)).astype(stored) for n, shape in shapes.items()}
    call["cache_dtype"] = choose([np.dtype(stored).name, "int8", "float8_e4m3fn"])
    call["steps"] = some(choose, range(1, tokens + 1), 3)
    call["window_size"] = (choose([-1, 0, 5, 150]), 0)
    if choose((False, True)):
        call["softcap"] = choose([0.7, 5.0, 50])
    if choose((False, True)):
        call["sinks"] = rng.standard_normal(group * kv_heads)
    if choose((False, True)):
        call["alibi_slopes"] = rng.random(group * kv_heads)
    return call


# ---- parts of a problem ----------------------------------------------------------------------------------------------
def widened(call: Call) -> Call:
    """Return the call on the numbers of its arrays: halves and quantized ones as float32."""
    halves = {name: a for name, a in call.items() if isinstance(a, np.ndarray) and a.dtype in HALVES}
    return dequantized(call) | {name: quiet(a, np.float32) for name, a in halves.items()}


def contiguous(call: Call) -> Call:
    return {name: x.copy("C") if isinstance(x, np.ndarray) else x for name, x in call.items()}


def scores_of(call: Call) -> Scores:
    """Return what the reference computes before the softmax."""
    inputs = (call["query"], call["key"], call["value"])
    options = {name: x for name, x in call.items() if name in SCORED}
    with np.errstate(all="ignore"):
        return score(inputs, **options)


def sum_to(a: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Sum over the axes along which an array of this shape was broadcast, and over the heads that share a head."""
    if len(shape) > 2 and a.ndim > 2 and shape[-3] not in (1, a.shape[-3]):
        a = a.reshape(*a.shape[:-3], shape[-3], a.shape[-3] // shape[-3], *a.shape[-2:]).sum(-3)
    missing = a.ndim - len(shape)
    axes = [i for i in range(a.ndim) if i < missing or shape[i - missing] != a.shape[i]]
    return a.sum(axis=tuple(axes)).reshape(shape)


def only_rows(call: Call, first: int, end: int) -> Call:
    """Return the call for some of its queries, at the same positions. `first` is at the start of a block of the mask.

    A lower-right alignment becomes an offset.
    """
    T_q, T_k = call["query"].shape[-2], call["key"].shape[-2]
    found = dict(call)
    for name, row in OPERANDS.items():
        axis = row.axes.find("T") - len(row.axes)
        if "T" in row.axes and name in call and call[name].ndim >= -axis and call[name].shape[axis] == T_q:
            found[name] = call[name][(..., slice(first, end), *[slice(None)] * (-axis - 1))]
    if call.get("block_mask") is not None:
        blocks, size = call["block_mask"]
        if blocks.ndim > 1 and blocks.shape[-2] > 1:
            found["block_mask"] = cattn.BlockMask(blocks[..., first // size : -(-end // size), :], size)
    lengths = call.get("query_seq_lengths")
    if lengths is not None:
        found["query_seq_lengths"] = np.clip(np.asarray(lengths) - first, 0, end - first)
    if call.get("is_causal") == "lower_right":
        keys = np.asarray(T_k if call.get("key_value_seq_lengths") is None else call["key_value_seq_lengths"])
        found |= {"query_offset": keys - (T_q if lengths is None else np.asarray(lengths)), "is_causal": True}
    found["query_offset"] = np.asarray(found.get("query_offset", 0)) + first
    return found


def only_entry(call: Call, rank: int, one_head: bool, index: tuple[int, ...]) -> Call:
    """Return the call for one batch entry, with batch dimensions of size 1. `rank`: dimensions of the output."""
    batch = rank - (2 if one_head else 3)
    found = dict(call)
    axes = {name: len(row.axes) - (one_head and len(row.axes) > 1) for name, row in OPERANDS.items()}

    def entry(a: Any, n: int) -> Any:
        if not isinstance(a, np.ndarray) or a.ndim <= n:
            return a
        lead = a.ndim - n
        cut = [slice(None) if a.shape[d] == 1 else slice(index[d + batch - lead], index[d + batch - lead] + 1)
               for d in range(lead)]  # fmt: skip
        return a[tuple(cut)]

    for name, n in axes.items():
        if name in call:
            found[name] = each(lambda a, n=n: entry(a, n), call[name])
    if isinstance(found.get("block_mask"), cattn.BlockMask):
        blocks, size = found["block_mask"]
        found["block_mask"] = cattn.BlockMask(entry(blocks, axes["block_mask"]), size)
    return found


def poisoned(call: Call) -> Call:
    """Return the call with NaN, or numbers that would be noticed, in everything that no query sees."""
    problem, found = scores_of(widened(call)), dict(call)
    visible = problem.of_all_keys(problem.visible)
    visible = visible[..., 0, :, :] if problem.one_head else visible
    for name, other in (("query", -1), ("key", -2), ("value", -2)):
        a, scale = call[name] if isinstance(call[name], cattn.Quantized) else (call[name], None)
        seen = sum_to(visible.any(other)[..., None], (*a.shape[:-1], 1)) > 0
        poison = -128 if a.dtype == np.int8 else NAN
        found[name] = np.where(seen, a, np.asarray(poison, a.dtype))
        if scale is not None:  # no scale is NaN
            used = sum_to(np.broadcast_to(seen, a.shape), np.shape(scale)) > 0
            found[name] = cattn.Quantized(found[name], np.where(used, scale, np.float32(2.0**100)))
        if name != "query" and f"{name}_tangent" in call:
            tangent = call[f"{name}_tangent"]
            found[f"{name}_tangent"] = np.where(seen, tangent, np.asarray(NAN, tangent.dtype))
    if "gate" in call:
        sees = np.broadcast_to(visible.any(-1)[..., None], (*visible.shape[:-1], call["value"].shape[-1]))
        gate = call["gate"]
        found["gate"] = np.where(sum_to(sees, gate.shape) > 0, gate, np.asarray(NAN, gate.dtype))
    for name in ("attn_mask", "bias"):
        a = call.get(name)
        if a is not None and a.dtype.kind == "f":
            found[name] = np.where((sum_to(visible, a.shape) > 0) | (a == -INF), a, np.asarray(NAN, a.dtype))
    return found


# ---- comparisons -----------------------------------------------------------------------------------------------------
def assert_same_zeros(actual: np.ndarray, wanted: np.ndarray, what: str) -> None:
    """Where both are zero, both must have the same sign."""
    wrong = (actual == 0) & (wanted == 0) & (np.signbit(actual) != np.signbit(wanted))
    if wrong.any():
        at = tuple(np.argwhere(wrong)[0].tolist())
        raise AssertionError(f"{wrong.sum()} zeros of another sign, first at {at}: {actual[at]}; {what}")


def products_underflow(scale: float, call: Call) -> bool:
    """Return whether the scale is so small that products underflow, each order of operations in its own way."""
    numbers = np.finfo(np.float64 if call["query"].dtype == np.float64 else np.float32)
    return 0 < abs(scale) < numbers.tiny / numbers.eps**2


def assert_within(actual: np.ndarray, wanted: np.ndarray, tolerance: Any, what: str) -> None:
    """Compare element by element with one tolerance for each."""
    assert actual.shape == wanted.shape, what
    with np.errstate(invalid="ignore"):
        wrong = ~((np.abs(actual - wanted) <= tolerance) | (actual == wanted) | (np.isnan(actual) & np.isnan(wanted)))
    if wrong.any():
        at = tuple(np.argwhere(wrong)[0].tolist())
        limit = np.broadcast_to(tolerance, wrong.shape)[at]
        raise AssertionError(f"{wrong.sum()} wrong, first at {at}: {actual[at]} != {wanted[at]} +- {limit}; {what}")


def assert_same_fields(actual: Any, wanted: Any, what: str) -> None:
    """Compare all arrays of two results. Where one is a half, it must be the other one, rounded once."""
    for name, a in wanted._asdict().items():
        b = getattr(actual, name)
        assert (a is None) == (b is None), name
        if isinstance(a, np.ndarray):
            right = quiet(a, b.dtype) if b.dtype in HALVES else a
            assert_same_bits(np.ascontiguousarray(b), np.ascontiguousarray(right), f"{name}: {what}")


def ways(rng: np.random.Generator) -> Any:
    """Yield every table inside the contract with one thread and with two, each on a random path."""
    for name in SAME_BITS:
        for threads in (1, 2):
            path = str(rng.choice(PATHS[:-1]))
            with table(name), forced(path), cattn.num_threads(threads):
                yield f"{name}, {path}, {threads} threads"


def tables(threads: tuple[int, ...] = (1, 2)) -> Any:
    for name in SAME_BITS:
        for n in threads:
            with table(name), cattn.num_threads(n):
                yield f"{name}, {n} threads"


# ---- checks ----------------------------------------------------------------------------------------------------------
def check_outputs(call: Call, rng: np.random.Generator) -> cattn.AttentionOutput:
    """Check output, weights, lse and dropout mask; return them."""
    wide, stored = widened(call), call["query"].dtype
    dtype = np.float64 if stored == np.float64 else np.float32
    right = expected(wide, dtype) if "key_indices" not in call else expected_of_lists(wide, dtype)
    with table("scalar"), forced("rows"), cattn.num_threads(1):
        whole = everything(**contiguous(wide))
    right.check(whole, "scalar, rows")
    for name in ("out", "weights", "lse"):
        assert_same_zeros(getattr(whole, name), getattr(right.result, name), name)
    halves = stored in HALVES and not any(isinstance(call[name], cattn.Quantized) for name in ("key", "value"))
    yardstick = rounded(whole, stored) if halves else whole
    for way in ways(rng):
        assert_same_bits(everything(**call), yardstick, way)
    for name in set(TABLES) - set(SAME_BITS):
        with table(name):
            right.check(everything(**wide), name)
    assert_same_bits(everything(**poisoned(call)), yardstick, "poison")
    check_parts(call, yardstick, rng)
    return yardstick


def expected_of_lists(call: Call, dtype: Any) -> Expected:
    """Return the result of the reference for a call with key_indices, and the tolerance for `dtype`."""
    right = reference.scaled_dot_product_attention(**call, return_weights=True, return_lse=True)
    assert isinstance(right, cattn.AttentionOutput)
    terms = call["query"].shape[-1] + right.weights.shape[-1] / 16
    eps = float(np.finfo(dtype).eps * (8 * (2 + largest_score(call)) + terms))
    largest = float(np.abs(np.asarray(call["value"])).max(initial=0))
    lse = 1 + float(np.abs(right.lse).max(initial=0, where=np.isfinite(right.lse)))
    return Expected(right, {"out": eps * (1 + largest), "weights": eps, "lse": eps * lse})


def largest_score(call: Call) -> float:
    """Return the largest sum of the absolute terms of a visible score."""
    problem = scores_of(call)
    size = problem.of_listed_keys(np.abs(problem.query * problem.scale) @ np.abs(problem.key).swapaxes(-1, -2))
    visible = problem.visible & (problem.scores > -INF)
    with np.errstate(invalid="ignore"):
        size = size + np.abs(np.where(visible, problem.scores - problem.capped, 0))
    return float(size.max(initial=0, where=visible))


def for_products(call: Call, word: str) -> Call:
    """Return the call with products of bfloat16, on numbers of float32 or bfloat16."""
    found = dict(call) | {"compute_dtype": word}
    for name in ("query", "key", "value", "attn_mask", "bias"):
        a = call.get(name)
        if isinstance(a, np.ndarray) and a.dtype in (np.float64, np.float16):
            found[name] = quiet(a, np.float32)
    return found


def check_products(call: Call, rng: np.random.Generator) -> None:
    """Check output, weights and lse with compute_dtype."""
    call = for_products(call, str(rng.choice(WORDS)))
    wide, stored = widened(call), call["query"].dtype
    with table("scalar"), forced("rows"), cattn.num_threads(1):
        whole = everything(**contiguous(wide))
    right = reference.scaled_dot_product_attention(**wide, return_weights=True, return_lse=True)
    assert isinstance(right, cattn.AttentionOutput)
    eps = float(4 * np.finfo(np.float32).eps * (2 + largest_score(wide)))
    p = call.get("dropout_p", 0.0)
    largest = np.abs(rounded_to_bfloat16(wide["value"])).max(initial=0) / (1 - p if p < 1 else 1)
    assert_within(whole.weights, right.weights, eps, "weights of rounded inputs")
    assert_within(whole.lse, right.lse, eps * (1 + np.abs(np.nan_to_num(right.lse, posinf=0, neginf=0))), "lse")
    assert_within(whole.out, right.out, (2.0**-8 + 2 * eps) * largest, "products of bfloat16")
    halves = stored in HALVES and not any(isinstance(call[name], cattn.Quantized) for name in ("key", "value"))
    yardstick = rounded(whole, stored) if halves else whole
    for way in ways(rng):
        assert_same_bits(everything(**call), yardstick, f"products of bfloat16, {way}")
    assert_same_bits(everything(**poisoned(call)), yardstick, "poison, products of bfloat16")
    check_parts(call, yardstick, rng)


def fields(result: Any) -> dict[str, np.ndarray]:
    """Return the arrays of a result."""
    return {name: a for name, a in result._asdict().items() if isinstance(a, np.ndarray)}


def check_parts(call: Call, whole: cattn.AttentionOutput, rng: np.random.Generator) -> None:
    """Check one batch entry alone, and a few queries alone."""
    T_q, size = call["query"].shape[-2], call["block_mask"].size if "block_mask" in call else 1
    if whole.lse.size == 0:
        return
    first = int(rng.integers(0, T_q)) // size * size
    end = int(rng.integers(first, T_q)) + 1
    part = everything(**only_rows(call, first, end))
    index = {"lse": (..., slice(first, end))}
    rows = {name: a[index.get(name, (..., slice(first, end), slice(None)))] for name, a in fields(whole).items()}
    rows = cattn.AttentionOutput(**rows)
    assert_same_bits(part, rows, f"queries {first}:{end} alone")
    if call.get("dropout_p"):  # its numbers depend on the batch entry
        return
    one_head = whole.out.ndim == 2 or (whole.out.ndim == 3 and not call.get("enable_gqa"))
    batch = whole.out.shape[: whole.out.ndim - (2 if one_head else 3)]
    place = tuple(int(rng.integers(0, n)) for n in batch)
    alone = everything(**only_entry(call, whole.out.ndim, one_head, place))
    entry = tuple(slice(i, i + 1) for i in place)
    right = cattn.AttentionOutput(**{name: a[entry] for name, a in fields(whole).items()})
    assert_same_bits(alone, right, f"batch entry {place} alone")


def check_stages(call: Call, rng: np.random.Generator) -> None:
    """Check scores and weights after each stage."""
    call = without(call, *VALUE)
    wide = widened(call)
    numbers = np.finfo(np.float64 if call["query"].dtype == np.float64 else np.float32)
    eps, problem = numbers.eps, scores_of(wide | {"value": wide["key"]})
    scale, cap = problem.scale, call.get("softcap") or 0
    # Sums of products in any order: an ULP of the absolute terms for each. tanh and its division add some more.
    size = problem.of_listed_keys(np.abs(problem.query * scale) @ np.abs(problem.key).swapaxes(-1, -2))
    least = numbers.smallest_subnormal * (8 + np.abs(problem.key).max(initial=0))  # of products that underflow
    tolerance = {"qk": (eps * size + least) * (problem.query.shape[-1] + 4)}
    terms = np.abs(np.where(problem.capped == -INF, 0, problem.capped))
    tolerance["softcap"] = tolerance["qk"] + 8 * eps * terms * (cap > 0)
    for name in ("alibi_slopes", "attn_mask", "bias"):  # each alone, because they may cancel
        others = {"alibi_slopes", "attn_mask", "bias", "softcap"} - {name}
        alone = scores_of(without(wide, *others) | {"value": wide["key"]})
        with np.errstate(invalid="ignore"):
            terms = terms + np.abs(np.where(alone.scores == -INF, 0, alone.scores - alone.products))
    tolerance["bias"] = tolerance["mask"] = tolerance["softcap"] + 8 * eps * terms
    halves = call["query"].dtype in HALVES and not isinstance(call["key"], cattn.Quantized)
    for stage in STAGES[: -1 if "key_indices" in call else None]:
        dropout = () if stage == "dropout" else DROPOUT
        options = {"stage": stage}
        with table("scalar"), forced("rows"), cattn.num_threads(1):
            found = cattn.attention_weights(**without(contiguous(wide), *dropout), **options)
        wanted = reference.attention_weights(**without(wide, *dropout), **options)
        if stage in tolerance:
            limit = tolerance[stage][..., 0, :, :] if problem.one_head else tolerance[stage]
            assert_within(found, wanted, limit, stage)
        if not products_underflow(scale, call):
            assert_same_zeros(found, wanted, stage)
        yardstick = quiet(found, call["query"].dtype) if halves else found
        for way in ways(rng):
            again = cattn.attention_weights(**without(call, *dropout), **options)
            assert_same_bits(again, yardstick, f"{stage}, {way}")


def check_statistics(actual: Any, call: Call, options: Call) -> Any:
    """Check every field against the reference, whose statistics are returned. `call` has no halves."""
    call = without(call, *VALUE, *DROPOUT)
    wanted = reference.attention_statistics(**call, **options)
    query, key = call["query"], call["key"]
    dtype = np.float64 if query.dtype == np.float64 else np.float32
    eps, top_k = np.finfo(dtype).eps, options.get("top_k", 0)
    seqlen_q, seqlen_k = query.shape[-2], key.shape[-2]
    # a score is a sum of products that are rounded; an error of the score is a relative error of the weight
    with np.errstate(all="ignore"):
        scores = reference.attention_weights(**without(call, "sinks"), stage="mask")
    size = np.abs(scores[np.isfinite(scores)]).max(initial=1)
    scale = abs(call.get("scale", 1.0)) * np.abs(query).max(initial=1, where=np.isfinite(query))
    error = eps * (8 * size + 4 * query.shape[-1] * scale + 40)
    positions = np.abs(np.asarray(call.get("query_offset", 0))).max(initial=0) + 2 * (seqlen_q + seqlen_k)
    sizes = {"entropy": 2 + np.log(max(seqlen_k, 2)), "distance": positions, "received": seqlen_q, "lse": size}
    for name in cattn.AttentionStatistics._fields:
        a, b = getattr(actual, name), getattr(wanted, name)
        assert (a is None) == (b is None), name
        if a is None or name == "top_keys":
            continue
        assert a.shape == b.shape, name
        assert a.dtype == dtype, name
        np.testing.assert_allclose(a, b, rtol=error, atol=error * sizes.get(name, size), err_msg=name)
    if top_k > 0:
        # keys may change places where scores differ by less than their rounding errors
        assert actual.top_keys.shape == wanted.top_keys.shape
        assert ((actual.top_keys == -1) == (wanted.top_keys == -1)).all()
    return wanted


def check_all_statistics(call: Call, options: Call) -> None:
    """Check the statistics: values, zeros and bits."""
    call = without(call, *VALUE, *DROPOUT)
    with table("scalar"), cattn.num_threads(1):
        found = cattn.attention_statistics(**contiguous(widened(call)), **options)
    wanted = check_statistics(found, widened(call), options)
    whole = cattn.attention_statistics(**call, **options | {"statistics": None})
    for name, a in found._asdict().items():
        if a is not None:  # each may be asked for without the others
            assert_same_bits(getattr(whole, name), a, f"{name} with all others")
        if a is not None and name != "top_keys" and not products_underflow(call.get("scale") or 0, call):
            assert_same_zeros(a, getattr(wanted, name), name)
    for way in tables():
        assert_same_fields(cattn.attention_statistics(**call, **options), found, way)
    poison = without(poisoned(call | {"value": call["key"]}), *VALUE)
    assert_same_fields(cattn.attention_statistics(**poison, **options), found, "poison")


def check_gradients(call: Call, rng: np.random.Generator) -> None:
    """Check the gradients of an output, and of a log-sum-exp in half of the problems."""
    lse_dtype = rng.choice([None, np.float64])
    result = cattn.scaled_dot_product_attention(**call, return_lse=True if lse_dtype is None else np.float64)
    grad_out = rng.standard_normal(result.out.shape).astype(result.out.dtype)
    grad_lse = rng.standard_normal(result.lse.shape) if rng.integers(2) else None
    given: Call = {"grad_out": grad_out, "out": result.out, "lse": result.lse, "grad_lse": grad_lse}
    wide = widened(call | given)
    with table("scalar"), cattn.num_threads(1):
        found = cattn.attention_backward(**contiguous(wide))
    wanted = reference.attention_backward(**wide)
    tolerance = gradient_tolerance(wide, wanted)
    for name, a in found._asdict().items():
        b = getattr(wanted, name)
        assert (a is None) == (b is None), name
        if a is not None:
            assert_within(a, b, getattr(tolerance, name), f"gradient of {name}")
            assert_same_zeros(a, b, f"gradient of {name}")
    for way in tables():
        assert_same_fields(cattn.attention_backward(**call, **given), found, f"gradients, {way}")
    assert_same_fields(cattn.attention_backward(**poisoned(call), **given), found, "gradients, poison")


def gradient_tolerance(call: Call, wanted: cattn.AttentionGradients) -> cattn.AttentionGradients:
    """Return how far each number of the gradients may be off.

    A score is off by some ULP of its absolute terms, and the weight by the same factor; so is every product with it. So
    the tolerance is the gradient of absolute numbers, times ULPs: of the largest score, and of as many additions as the
    longest chains have.
    """
    problem = scores_of(call)
    dtype = np.float64 if call["query"].dtype == np.float64 else np.float32

    def with_heads(name: str, axis: int) -> np.ndarray:
        a = np.asarray(call[name], np.float64)
        return np.expand_dims(a, axis) if problem.one_head else a

    grad_out, out, lse = np.abs(with_heads("grad_out", -3)), np.abs(with_heads("out", -3)), with_heads("lse", -2)
    grad_lse = 0 if call["grad_lse"] is None else np.abs(with_heads("grad_lse", -2))
    q, k, v = (np.abs(a) for a in (problem.query, problem.key, problem.value))
    visible = problem.visible & (problem.scores > -INF)
    with np.errstate(all="ignore"):
        weights = np.where(visible, np.exp(problem.scores - lse[..., None]), 0)
    p = call.get("dropout_p", 0.0)
    factor = 1 / (1 - p) if p < 1 else 0
    largest = largest_score(call) + np.abs(np.where(np.isfinite(lse), lse, 0)).max(initial=0)
    terms = q.shape[-1] + v.shape[-1] + (q.shape[-2] + weights.shape[-1]) / 16  # sums of chains of 16 and of columns
    weights = problem.of_all_keys(weights)
    eps = np.finfo(dtype).eps * (8 * (1 + largest) + terms) + (0 if dtype == np.float64 else np.finfo(dtype).eps)
    delta = (grad_out * out).sum(-1) + grad_lse
    of_gate = None
    if wanted.gate is not None:
        gates = of_output(call["gate"], "gate", problem, "bhtd")
        of_gate = grad_out * out * logistic(-gates)
        grad_out = grad_out * logistic(gates)
    dS = weights * (factor * (grad_out @ v.swapaxes(-1, -2)) + delta[..., None])
    scale = 2 * abs(problem.scale)
    least = 4 * float(np.finfo(dtype).smallest_normal) * (1 + terms)  # of results that underflow

    def tolerance(a: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        return eps * sum_to(a[..., 0, :, :] if problem.one_head else a, shape) + least * a.size

    grads: list[Any] = [
        tolerance(scale * dS @ k, call["query"].shape),
        tolerance(scale * dS.swapaxes(-1, -2) @ q, call["key"].shape),
        tolerance(factor * weights.swapaxes(-1, -2) @ grad_out, call["value"].shape),
    ]
    bias = sinks = None
    if wanted.bias is not None:
        bias = tolerance(dS, wanted.bias.shape)
    if wanted.sinks is not None:
        with np.errstate(all="ignore"):
            mass = np.nan_to_num(np.exp(np.asarray(call["sinks"], np.float64)[..., None] - lse)) * delta
        sinks = eps * sum_to(mass.sum(-1), wanted.sinks.shape) + least * mass.size
    gate = None if of_gate is None else tolerance(of_gate, wanted.gate.shape)
    return cattn.AttentionGradients(*grads, bias, sinks, gate)


def tangent_tolerance(call: Call, lse: np.ndarray) -> dict[str, np.ndarray]:
    """Return how far each number of the tangents may be off: some ULP of its absolute terms, as for the gradients."""
    problem, dtype = scores_of(call), np.float64 if call["query"].dtype == np.float64 else np.float32
    p, v = call.get("dropout_p", 0.0), np.abs(problem.value)

    def moved(name: str, like: np.ndarray | None = None) -> np.ndarray:
        """Return the size of a tangent with an axis for the heads, which are repeated for their groups."""
        a = np.abs(np.asarray(call.get(f"{name}_tangent", 0), np.float64))
        a = np.expand_dims(a, -3) if problem.one_head and a.ndim > 2 else a
        if like is None or a.ndim < 3 or a.shape[-3] in (1, like.shape[-3]):
            return a if like is None else np.broadcast_to(a, like.shape)
        return np.broadcast_to(np.repeat(a, like.shape[-3] // a.shape[-3], axis=-3), like.shape)

    lse = np.expand_dims(lse, -2) if problem.one_head else lse
    with np.errstate(all="ignore"):
        weights = np.where(problem.visible & (problem.scores > -INF), np.exp(problem.scores - lse[..., None]), 0)
        sink = np.nan_to_num(np.exp(np.asarray(call.get("sinks", -INF), np.float64)[..., None] - lse))
    factor = 1 / (1 - p) if p < 1 else 0
    steps = moved("query", problem.query) @ np.abs(problem.key).swapaxes(-1, -2)
    steps = steps + np.abs(problem.query) @ moved("key", problem.key).swapaxes(-1, -2)
    steps = np.where(problem.visible, abs(problem.scale) * steps + moved("bias"), 0)
    mean = (weights * steps).sum(-1) + sink * moved("sinks")[..., None]
    out = factor * ((weights * (steps + mean[..., None])) @ v + weights @ moved("value", v))
    terms = 2 * problem.query.shape[-1] + v.shape[-1] + v.shape[-2] / 16
    largest = largest_score(call) + np.abs(np.where(np.isfinite(lse), lse, 0)).max(initial=0)
    eps = np.finfo(dtype).eps * (16 * (1 + largest) + terms)
    least = 4 * float(np.finfo(dtype).smallest_normal) * (1 + terms) * (1 + steps.max(initial=0) + v.max(initial=0))
    out, mean = eps * out + least, eps * mean + least
    return {"out_tangent": out[..., 0, :, :], "lse_tangent": mean[..., 0, :]} if problem.one_head else {
        "out_tangent": out, "lse_tangent": mean}  # fmt: skip


def check_tangents(call: Call, rng: np.random.Generator) -> None:
    """Check the derivative in a direction, and the bits of its gradients."""
    if "key_indices" in call or any(isinstance(call[name], cattn.Quantized) for name in ("key", "value")):
        return
    call = without(call, "gate")
    names = [name for name in arguments(call) if rng.random() < 0.7]
    call = call | direction(call, int(rng.integers(2**32)), names)
    wide = widened(call)
    with table("scalar"), cattn.num_threads(1):
        exact = cattn.attention_jvp(**contiguous(wide), return_lse=True)
        found = cattn.attention_jvp(**contiguous(call), return_lse=True)  # of halves: from a rounded output
    wanted = reference.attention_jvp(**wide, return_lse=True)
    for name, limit in tangent_tolerance(wide, wanted.lse).items():
        assert_within(getattr(exact, name), getattr(wanted, name), limit, name)
    result = cattn.attention_jvp(**call, return_lse=np.float64)
    given = results_of(result) | {"grad_out_tangent": cotangent(result.out), "grad_lse_tangent": cotangent(result.lse)}
    with table("scalar"), cattn.num_threads(1):
        gradients = cattn.attention_jvp_backward(**contiguous(call | given))
    for way in tables():
        assert_same_fields(cattn.attention_jvp(**call, return_lse=True), found, f"tangents, {way}")
        assert_same_fields(cattn.attention_jvp_backward(**call, **given), gradients, f"second derivative, {way}")
    poison = poisoned(call)
    assert_same_fields(cattn.attention_jvp(**poison, return_lse=True), found, "tangents, poison")
    assert_same_fields(cattn.attention_jvp_backward(**poison, **given), gradients, "second derivative, poison")


def check_layout(call: Call) -> None:
    """Check that results with tokens before heads have the bits of those with heads before tokens."""
    rank = call["query"].ndim
    if rank < 3 or (rank == 3 and not call.get("enable_gqa")):
        return
    right, found = everything(**call), everything(**tokens_first(call))
    assert_same_bits(found._replace(out=found.out.swapaxes(-3, -2)), right, "tokens before heads")
    given = call | {"grad_out": cotangent(right.out), "out": right.out, "lse": right.lse}
    wanted = cattn.attention_backward(**given)
    for name, a in fields(cattn.attention_backward(**tokens_first(given))).items():
        own = a.swapaxes(-3, -2) if name in ("query", "key", "value", "gate") else a
        right_one = np.reshape(getattr(wanted, name), own.shape)  # a gate may have got more axes
        assert_same_bits(own, right_one, f"gradient of {name}, tokens before heads")


def check_call(call: Call, statistics: Call, rng: np.random.Generator) -> None:
    """Check all functions of one call of attention."""
    check_outputs(call, rng)
    check_products(call, rng)
    check_layout(call)
    check_stages(call, rng)
    if "key_indices" not in call:
        check_all_statistics(call, statistics)
    check_gradients(call, rng)
    check_tangents(call, rng)


# ---- packed sequences and caches -------------------------------------------------------------------------------------
def check_packed(call: Call, statistics: Call, rng: np.random.Generator) -> None:
    """Packed sequences have the bits of the padded batch: outputs, gradients and statistics."""
    edges_q, edges_k, batch = call["cu_seqlens_q"], call["cu_seqlens_k"], padded(call)
    right = cattn.scaled_dot_product_attention(**batch, return_lse=np.float64)
    hidden = (np.arange(batch["query"].shape[-2]) >= np.diff(edges_q)[:, None])[:, None]
    lse = np.where(hidden, 0, right.lse)  # a sink sees the rows after the last query
    grad_out = rng.standard_normal((len(call["query"]), *right.out.shape[1::2])).astype(right.out.dtype)
    grad_out_batch = padded({"query": grad_out, "cu_seqlens_q": edges_q, "cu_seqlens_k": edges_k})["query"]
    grad_lse = rng.standard_normal((right.lse.shape[1], len(grad_out)))
    of_lse = padded({"query": grad_lse.T[..., None], "cu_seqlens_q": edges_q, "cu_seqlens_k": edges_k})["query"][..., 0]
    grads = cattn.attention_backward(
        np.where(hidden[..., None], 0, grad_out_batch).astype(grad_out.dtype), out=right.out, lse=lse,
        grad_lse=np.where(hidden, 0, of_lse), **batch,
    )  # fmt: skip
    summed = without(batch, *NOT_OF_STATISTICS)
    whole = cattn.attention_statistics(**summed, **_fitting(statistics, batch) | {"statistics": None})
    for way in ways(rng):
        found = cattn.varlen_attention(**call, return_lse=np.float64)
        assert_same_bits(np.ascontiguousarray(found.out), unpad(right.out, edges_q), f"packed, {way}")
        assert_same_bits(np.ascontiguousarray(found.lse.T), unpad(right.lse[..., None], edges_q)[..., 0], f"lse, {way}")
    for way in tables():
        own = cattn.varlen_attention_backward(grad_out, out=found.out, lse=found.lse, grad_lse=grad_lse, **call)
        for name, edges in (("query", edges_q), ("key", edges_k), ("value", edges_k)):
            assert_same_bits(getattr(own, name), unpad(getattr(grads, name), edges), f"gradient of {name}, {way}")
        if grads.gate is not None and own.gate.shape == (*grad_out.shape,):
            assert_same_bits(own.gate, unpad(grads.gate, edges_q), f"gradient of gate, {way}")
        if grads.sinks is not None:
            assert_same_bits(own.sinks, grads.sinks, f"gradient of sinks, {way}")
        summary = cattn.varlen_attention_statistics(**without(call, *NOT_OF_STATISTICS), **statistics)
        for name, a in whole._asdict().items():
            if a is None or getattr(summary, name) is None:  # each may be asked for without the others
                continue
            edges = edges_k if name.startswith("received") else edges_q
            rows = unpad(a[..., None] if a.ndim == 3 else a, edges).swapaxes(0, 1)
            got = getattr(summary, name)
            got = (got[..., None] if got.ndim == 2 else got)[..., : rows.shape[2]]
            assert_same_bits(np.ascontiguousarray(got), np.ascontiguousarray(rows), f"{name}, {way}")


def _fitting(statistics: Call, batch: Call) -> Call:
    """Return the options for the padded batch, which may have fewer keys than all sequences together."""
    return statistics | {"top_k": min(statistics["top_k"], batch["key"].shape[-2])}


def check_cache(call: Call, rng: np.random.Generator) -> Call:
    """Fill a cache step by step: every step has the bits of the whole. Return the call of the last queries."""
    steps, cache_dtype = call["steps"], call["cache_dtype"]
    options = without(call, "query", "key", "value", "steps", "cache_dtype")
    query, key, value = call["query"], call["key"], call["value"]
    *batch, kv_heads, tokens, _ = key.shape
    cache = cattn.KVCache(tuple(batch), kv_heads, tokens + 3, key.shape[-1], value.shape[-1], dtype=cache_dtype)
    outs: list[Any] = []
    done = 0
    for count in [*steps, tokens]:
        end = min(tokens, done + count)
        if end == done:
            continue
        cache.append(key[..., done:end, :], value[..., done:end, :])
        if rng.integers(3) == 0 and end - done < 3:  # tokens that are thrown away again
            cache.append(key[..., :1, :] + key[..., :1, :], value[..., :1, :])
            cache.truncate(end)
        with table(str(rng.choice(SAME_BITS))), cattn.num_threads(int(rng.integers(1, 3))):
            outs.append(cattn.causal_attention(
                query[..., done:end, :], cache.k, cache.v, enable_gqa=True, query_offset=done, **options
            ))  # fmt: skip
        done = end
    whole: Call = {"query": query, "key": cache.k, "value": cache.v, "enable_gqa": True, "query_offset": 0} | options
    right = cattn.causal_attention(**whole)
    assert_same_bits(np.concatenate(outs, axis=-2), right, "steps with a cache")
    return whole | {"is_causal": True}


def check(problem: Problem) -> None:
    """Raise AssertionError unless all results of the problem are right."""
    rng, call = np.random.default_rng(problem.seed), problem.call
    if problem.kind == "packed":
        check_packed(call, problem.statistics, rng)
        call = without(padded(call, 0), "compute_dtype")
        if work(call) > BUDGET:
            return
    if problem.kind == "cache":
        call = check_cache(call, rng)
    check_call(call, _fitting(problem.statistics, call), rng)
