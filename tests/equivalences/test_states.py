"""Functions with a state: a call has the bits of its batch entries, packed sequences or pieces, each computed alone."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
from table import FLOATS, PREFERRED, Ask, Call, assert_same_fields, numbers

import cattn
from cattn import functional
from support import HALVES, INF, NAN, in_contract, quiet, table, widened, without

TOKENS = 70  # gradients keep a state every 64 tokens
SHARED = ("weight", "bias")
RULES = list(itertools.product((None, "token", "row"), (False, True)))


class ConvGradients(NamedTuple):
    """The gradients that have an entry for each of the batch; the others are sums over it."""

    x: Any
    state: Any


# ---- calls -----------------------------------------------------------------------------------------------------------
def linear(decay: str | None, beta: bool, dtype: Any) -> Call:
    """Return a batch of two entries with grouped heads and a state."""
    wide = np.float64 if dtype is np.float64 else np.float32
    widths = {"query": (2, 20), "key": (2, 20), "value": (4, 37), "grad_out": (4, 37)}
    call = {name: numbers(n, 2, h, TOKENS, n, dtype=dtype) / np.dtype(dtype).type(3) for name, (h, n) in widths.items()}
    if decay is not None:
        call["decay"] = -np.abs(numbers(1, *(2, 4, TOKENS, 20)[: 3 if decay == "token" else 4], dtype=wide))
    if beta:
        call["beta"] = np.abs(numbers(2, 2, 4, TOKENS, dtype=wide)) / 2
    return call | {name: numbers(i, 2, 4, 20, 37, dtype=wide) for i, name in enumerate(("state", "grad_state"))}


def convolution(bias: bool, activation: str | None, dtype: Any) -> Call:
    call: Call = {name: numbers(i, 2, TOKENS, 37, dtype=dtype) for i, name in enumerate(("x", "grad_out"))}
    call |= {name: numbers(i, 2, 3, 37, dtype=dtype) for i, name in enumerate(("state", "grad_state"))}
    call |= {"weight": numbers(5, 37, 4, dtype=dtype), "activation": activation}
    return call | ({"bias": numbers(6, 37, dtype=dtype)} if bias else {})


CALLS: dict[str, Callable[[Any], Call]] = {
    **{f"decay of a {d}, beta {b}": lambda dtype, d=d, b=b: linear(d, b, dtype) for d, b in RULES},
    "convolution": lambda dtype: convolution(False, None, dtype),
    "convolution, bias, silu": lambda dtype: convolution(True, "silu", dtype),
}


def forward(call: Call) -> cattn.LinearAttentionOutput:
    """Return the output and the last state, which may take the place of the first one."""
    function: Any = cattn.linear_attention if "query" in call else functional.causal_conv
    call = without(call, "grad_out", "grad_state")
    result: cattn.LinearAttentionOutput = function(**call, return_state=True)
    state = call["state"].copy()
    out = function(**call | {"state": state}, state_out=state)
    assert_same_fields(cattn.LinearAttentionOutput(out, state), result, "in place")
    return result


def gradients(call: Call) -> Any:
    if "query" in call:
        return functional.linear_attention_backward(**call)
    grad_x, _, _, grad_state = functional.causal_conv_backward(**call)
    return ConvGradients(grad_x, grad_state)


# ---- parts of a call -------------------------------------------------------------------------------------------------
def axis_of(call: Call) -> int:
    """Return the axis of tokens of all arrays that have one."""
    return 2 if "query" in call else 1


def part(call: Call, entry: int, begin: int = 0, end: int | None = None) -> Call:
    """Return the call on these tokens of one entry."""
    at = (slice(entry, entry + 1), *[slice(None)] * (axis_of(call) - 1), slice(begin, end))
    found = {}
    for name, x in call.items():
        if isinstance(x, np.ndarray) and name not in SHARED:
            x = x[at[:1] if "state" in name else at]
        found[name] = x
    return found


def together(parts: list[Any], axis: int, state: int | None = None) -> Any:
    """Join results along an axis; of states, along the first axis, or one part has the whole."""
    joined = {}
    for name in parts[0]._fields:
        all_parts = [getattr(p, name) for p in parts]
        if all_parts[0] is None:
            joined[name] = None
        elif name == "state":
            joined[name] = np.concatenate(all_parts) if state is None else all_parts[state]
        else:
            joined[name] = np.concatenate(all_parts, axis)
    return type(parts[0])(**joined)


def padded(result: Any, axis: int, n: int) -> Any:
    """Return a result with zeros for padding."""
    fields = {}
    for name, x in result._asdict().items():
        widths = [(0, n if i == axis and name != "state" else 0) for i in range(0 if x is None else x.ndim)]
        fields[name] = x if x is None else np.pad(x, widths)
    return type(result)(**fields)


# ---- rows ------------------------------------------------------------------------------------------------------------
def entries(ask: Ask, call: Call) -> Any:
    return together([ask(part(call, b)) for b in range(2)], 0)


def with_padding(call: Call) -> Call:
    """Return the call with lengths, and poison in the padding."""
    found = {name: x.copy() if isinstance(x, np.ndarray) else x for name, x in call.items()}
    for name, x in found.items():
        if isinstance(x, np.ndarray) and name not in SHARED and "state" not in name:
            rest = x.swapaxes(1, axis_of(call))
            rest[0, 31:], rest[1, 1:] = NAN, INF
    return found | {"seq_lengths": np.array([31, 1])}


def without_padding(ask: Ask, call: Call) -> Any:
    lengths, call = call["seq_lengths"].tolist(), without(call, "seq_lengths")
    axis = axis_of(call)
    return together([padded(ask(part(call, b, 0, n)), axis, TOKENS - n) for b, n in enumerate(lengths)], 0)


EDGES = [0, 5, 5, 69, 70]


def packed(call: Call) -> Call:
    """Return one entry as packed sequences, the states of which are slices of the other's."""
    found: Call = {}
    for name, x in call.items():
        is_entry = isinstance(x, np.ndarray) and name not in SHARED
        found[name] = x[[0, 1, 1, 0]] if is_entry and "state" in name else x[0] if is_entry else x
    return found | {"cu_seqlens": np.array(EDGES)}


def each_sequence(ask: Ask, call: Call) -> Any:
    call = without(call, "cu_seqlens")
    batch = {
        name: x[None] if isinstance(x, np.ndarray) and name not in SHARED and "state" not in name else x
        for name, x in call.items()
    }
    parts = []
    for b, (begin, end) in enumerate(itertools.pairwise(EDGES)):
        one = part(batch, 0, begin, end) | {n: x[b : b + 1] for n, x in call.items() if "state" in n}
        parts.append(ask(one))
    found = together(parts, axis_of(batch))
    return type(found)(*(x if x is None or n == "state" else x[0] for n, x in found._asdict().items()))


def in_pieces(cuts: Any) -> Callable[[Ask, Call], Any]:
    """Return what pieces give: each has the state of the one before, and the gradient of the state after it."""

    def equivalent(ask: Ask, call: Call) -> Any:
        axis, found = axis_of(call), []
        for b in range(2):
            pieces = [part(call, b, *edges) for edges in itertools.pairwise([0, *cuts, TOKENS])]
            for now, after in itertools.pairwise(pieces):
                after["state"] = forward(now).state
            if ask is forward:
                found.append(together([ask(piece) for piece in pieces], axis, -1))
                continue
            results = [ask(pieces[-1])]
            for piece in reversed(pieces[:-1]):
                results.insert(0, ask(piece | {"grad_state": results[0].state}))
            found.append(together(results, axis, 0))
        return together(found, 0)

    return equivalent


def swapped(fields: Call) -> Call:
    return {n: x.swapaxes(1, 2) if isinstance(x, np.ndarray) and "state" not in n else x for n, x in fields.items()}


def tokens_first(call: Call) -> Call:
    return swapped(call) | {"layout": "bthd"}


def heads_first(ask: Ask, call: Call) -> Any:
    found = ask(without(swapped(call), "layout"))
    return type(found)(**swapped(found._asdict()))


def strided(call: Call) -> Call:
    """Return the call with memory between the elements, and with the last axis backwards."""
    found = dict(call)
    for name, x in call.items():
        if isinstance(x, np.ndarray):
            found[name] = np.repeat(np.repeat(x, 2, axis=-1), 3, axis=0)[::3][..., ::-2]
            found[name][...] = x
    return found


def contiguous(ask: Ask, call: Call) -> Any:
    return ask({name: x.copy() if isinstance(x, np.ndarray) else x for name, x in call.items()})


def one_query_for_each_state(ask: Ask, call: Call) -> Any:
    return ask(call | {name: np.repeat(call[name], 2, axis=1) for name in ("query", "key")})


def rounded_once(ask: Ask, call: Call) -> Any:
    found = ask(widened(call))
    return found._replace(out=quiet(found.out, call["query"].dtype))


LINEAR = [name for name in CALLS if "convolution" not in name]
EVERY: list[tuple[Ask, Any]] = [(forward, CALLS), (gradients, CALLS)]
RAGGED: list[tuple[Ask, Any]] = [(forward, CALLS), (gradients, LINEAR)]


class Row(NamedTuple):
    """A way to make a call, and the calls that give the same bits."""

    change: Callable[[Call], Call]
    equivalent: Callable[[Ask, Call], Any]
    asks: list[tuple[Ask, Any]]  # what is asked, and of which calls
    dtypes: Any = FLOATS


ROWS = {
    "batch": Row(dict, entries, EVERY),
    "seq_lengths": Row(with_padding, without_padding, RAGGED),
    "cu_seqlens": Row(packed, each_sequence, RAGGED),
    "a few pieces": Row(dict, in_pieces([1, 2, 40]), RAGGED, FLOATS[:2]),
    "token by token": Row(dict, in_pieces(range(1, TOKENS)), RAGGED, FLOATS[:2]),
    "layout": Row(tokens_first, heads_first, [(forward, LINEAR), (gradients, LINEAR)]),
    "strides": Row(strided, contiguous, EVERY),
    "grouped heads": Row(dict, one_query_for_each_state, [(forward, LINEAR)]),
    "halves": Row(dict, rounded_once, [(forward, LINEAR)], HALVES),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("row", ROWS.values(), ids=list(ROWS))
def test_a_call_has_the_bits_of_the_equivalent_ones(row: Row, name: str, isa: str) -> None:
    """With any table and number of threads."""
    for dtype in row.dtypes:
        for ask, _ in (entry for entry in row.asks if name in entry[1]):
            call = row.change(CALLS[name](dtype))
            with table(PREFERRED if in_contract(isa) else isa), cattn.num_threads(1):
                right = row.equivalent(ask, call)
            for threads in (1, 3):
                with cattn.num_threads(threads):
                    assert_same_fields(ask(call), right, f"{np.dtype(dtype)}, {ask.__name__}, {threads} threads")
