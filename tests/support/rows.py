"""The arrays of each function that C implements, from the rows of csrc/call: calls that work, and calls that must not.

A new function, or a new array of one, is in all of them without an edit here if its letters and its kind are known.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

import cattn
from cattn import _cattn, functional
from support import find

Call = dict[str, Any]


class Array(NamedTuple):
    """A row of an array, or of an array for a result."""

    name: str
    role: str
    kind: str
    axes: str
    fits: str


# The size of each axis in a call that works, and where a letter has another meaning. `*` is the batch, which arrays of
# attention have before their own axes, or any shape if it stands alone.
SIZES = {"T": 5, "S": 6, "H": 8, "D": 3, "N": 4, "K": 2, "C": 6, "V": 2, "G": 2, "L": 2, "X": 1, "Y": 1}
OWN_SIZES = {
    **{name: {"D": 6} for name in ("rms_norm", "layer_norm", "rope")},
    "linear": {"K": 6, "N": 3},
    "causal_conv": {"K": 4, "S": 3},
}
SHAPE = (2, 5, 6)  # of whose axes a batch has as many as give the first array three dimensions, but at least one
ONE_NUMBER = ("causal_mask", "query_offset")  # it takes no array there
TABLE = {
    name: [Array(*row) for row in rows if row[1] in ("ARRAY", "RESULT") and (name, row[0]) != ONE_NUMBER]
    for name, rows in _cattn._functions().items()
}
IS_ATTENTION = {name: "attn_mask" in {row.name for row in rows} for name, rows in TABLE.items()}
INTEGERS = ("OFFSETS", "QUERY_COUNTS", "KEY_COUNTS", "LISTS", "EDGES")
FLOATS = (
    "STORED",
    "GATES",
    "KEYS",
    "VALUES",
    "COMPUTED",
    "PROMOTED",
    "FACTOR",
    "WEIGHT",
    "POSITIONS",
    "SLOPES",
    "LOGITS",
)
RESULTS = {"grad_out": "out", "grad_state": "state", "weights": "out"}  # of the forward pass: what a gradient takes


@functools.cache
def parameters_of(function: str) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(find(function)).parameters)


@functools.cache
def arrays_of(function: str) -> dict[str, Array]:
    """Return the rows that are parameters of a function; a gradient in Python has those of the forward pass."""
    if function in TABLE:
        return {row.name: row for row in TABLE[function] if row.name in parameters_of(function)}
    forward = {row.name: row for row in TABLE[function.removesuffix("_backward")]}
    given = {name: forward.get(RESULTS.get(name, name)) for name in parameters_of(function)}
    return {name: row._replace(name=name, role="ARRAY" if name in RESULTS else row.role)
            for name, row in given.items() if row is not None}  # fmt: skip


def numbers_of(function: str) -> dict[str, str]:
    """Return the kinds of the parameters that are no arrays; the kind of a flag for a result is WISH."""
    rows = _cattn._functions()
    of = rows.get(function) or rows[function.removesuffix("_backward")]
    return {
        name: kind or role
        for name, role, kind, *_ in of
        if role in ("NUMBER", "WORD", "WISH") and name in parameters_of(function)
    }


GRADIENTS = [f"{name}_backward" for name in TABLE if hasattr(functional, f"{name}_backward")]
IN_C = [*TABLE, *(name for name in GRADIENTS if name not in TABLE)]


def sizes_of(function: str) -> dict[str, int]:
    return SIZES | OWN_SIZES.get(function.removesuffix("_backward"), {})


def batch_of(function: str) -> tuple[int, ...]:
    first = next(iter(arrays_of(function).values()), None)
    return SHAPE[: max(1, 3 - len(first.axes.strip("*")))] if first else ()


def shape_of(function: str, row: Array, **sizes: int) -> tuple[int, ...]:
    """Return the shape of an array in the call that works; `sizes` are others for some axes."""
    size = sizes_of(function) | sizes
    packed = "cu_seqlens_q" in parameters_of(function)
    own = tuple(size[letter] for letter in row.axes if letter != "*")
    if packed and row.axes[:1] in ("N", "K") and len(row.axes) > 2:  # tokens before heads
        return (own[1], own[0], *own[2:])
    has_batch = "*" in row.axes or (IS_ATTENTION.get(function, False) and not packed)
    batch = batch_of(function) if has_batch else ()
    return (*(batch[:1] if row.kind in INTEGERS else batch), *own)


def array(row: Array, shape: tuple[int, ...]) -> Any:
    """Return an array of the kind of the row."""
    if row.kind in FLOATS:
        return np.ones(shape, np.float32)
    if row.kind == "BLOCKS":
        return cattn.BlockMask(np.ones(shape, np.bool_), max(SIZES["T"], SIZES["S"]))
    return np.ones(shape, np.int64 if row.kind in INTEGERS else np.bool_)


# ---- calls that work -------------------------------------------------------------------------------------------------
NEEDS: dict[str, Call] = {  # what goes with an array that may be left out
    "query_offset": {"is_causal": True},
}


def working(function: str, *optional: str) -> Call:
    """Return a call that works: all arrays without a default, those for results, and these others."""
    rows, parameters = arrays_of(function), parameters_of(function)
    call: Call = {}
    for name, parameter in parameters.items():
        row = rows.get(name)
        wanted = parameter.default is parameter.empty or name in optional
        if row and (wanted or row.kind == "VALUES" or (row.role == "RESULT" and not optional)):
            call[name] = array(row, shape_of(function, row))
    edges = {name: [0, 6 if name.endswith("_k") else 5] for name in call if rows[name].kind == "EDGES"}
    call |= edges | {name: 5 for name in ("T_q", "count") if name in parameters}
    for name in optional:
        call |= {key: x for key, x in NEEDS.get(name, {}).items() if key in parameters}
        of = name.removesuffix("_tangent")
        if of != name and of in rows and of not in call:  # a tangent of an option
            call[of] = array(rows[of], shape_of(function, rows[of]))
    if "mask" in parameters and function == "dropout_backward":
        call["mask"] = np.True_
    if "merged" in parameters:
        call |= {"out": np.ones_like(call["grad_out"]), "merged": True}
    elif function == "attention_jvp" and "lse" in optional:
        call["out"] = cattn.scaled_dot_product_attention(call["query"], call["key"], call["value"])
    elif function == "attention_jvp_backward":
        tangents = {name: x for name, x in call.items() if name in parameters_of("attention_jvp") and name != "lse"}
        result = cattn.attention_jvp(**tangents, return_lse=True)
        call |= dict(zip(result._fields, result, strict=True))
    if "cu_seqlens" in optional:  # of one entry
        call = {name: x[0] if isinstance(x, np.ndarray) and "*" in rows[name].axes else x for name, x in call.items()}
    return call


# ---- calls that must be refused --------------------------------------------------------------------------------------
class Wrong(NamedTuple):
    """A call that must be refused, with an error that begins with one of these names."""

    what: str
    call: Call
    error: type[Exception]
    names: list[str]


def wrong_arrays(function: str, name: str) -> Iterator[Wrong]:
    """Yield calls in which one array has another type, too few axes, or a size that does not fit."""
    rows = arrays_of(function)
    row = rows[name]
    call = working(function, *[name] * (row.role == "ARRAY"))
    right, shape = call[name], shape_of(function, row)
    if row.kind != "BLOCKS":  # the constructor checks these
        for what, x in (("complex", np.ones(shape, np.complex64)), ("objects", np.full(shape, None)),
                        ("masked", np.ma.masked_array(right, False))):  # fmt: skip
            yield Wrong(what, call | {name: x}, TypeError, [name])
        if row.role == "ARRAY":
            yield Wrong("ragged", call | {name: [[1.0, 2.0], [3.0]]}, ValueError, [name])
    own = len(row.axes.strip("*"))
    if row.fits != "BROADCASTS" and own > 1:
        yield Wrong("too few axes", call | {name: array(row, shape[-1:])}, ValueError, [name])
    if row.fits == "BROADCASTS" and len(shape) > own:
        yield Wrong("another batch", call | {name: array(row, (SHAPE[0] + 1, *shape[1:]))}, ValueError, [name])
    names = [name, *(other for other in rows if other in call and other != name)]
    if row.axes == "*" and row.kind not in INTEGERS and len(names) > 1:
        yield Wrong("another shape", call | {name: array(row, (*shape[:-1], shape[-1] + 1))}, ValueError, names)
    for letter in sorted({*row.axes} - {"*"}):
        others = [other for other, its in rows.items() if other in call and other != name and letter in its.axes]
        if others:  # one of them is named, because the wrong one is whichever does not fit the first
            x = array(row, shape_of(function, row, **{letter: sizes_of(function)[letter] + 1}))
            edges = [other for other in call if other.startswith("cu_seqlens")]
            yield Wrong(f"another {letter}", call | {name: x}, ValueError, [name, *others, *edges])
