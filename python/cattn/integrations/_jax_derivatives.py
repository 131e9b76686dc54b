"""The passes over attention that C computes for JAX, and their derivatives: up to the second, in both modes.

XLA calls cattn's C code directly, as foreign functions. Python takes no part in a compiled call, and copies no array.
Each pass has a rule of forward mode, by which the tangents of its results are a linear function of the tangents of its
operands; another pass is the transpose of this function. What depends on the operands by the results of an earlier
pass counts as a part of the derivative by the operands.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from cattn import _cattn

from ._jax_linear import Arrays, call_linear

# The operands of the foreign functions, in the order of csrc/xla/call.h. The attribute `present` says by its bits which
# of them a call has.
ARGUMENTS, RESULTS = _cattn._xla_operands()
BIT = {name: 1 << i for i, name in enumerate((*ARGUMENTS, *RESULTS))}

INPUTS = ("query", "key", "value", "bias", "sinks", "gate")  # each has a gradient and, but for a gate, a tangent
TANGENTS = tuple(f"{name}_tangent" for name in INPUTS)

Pass = Literal["forward", "backward", "jvp", "jvp_backward"]


class Options(NamedTuple):
    """What is known when a call is compiled: the numbers of the table as csrc/xla/call.h has them, by their names."""

    numbers: tuple[tuple[str, float | int], ...]
    return_residual: bool

    def attributes(self, present: int) -> dict[str, np.generic]:
        """Return the attributes of the foreign functions."""
        given = (*self.numbers, ("present", present))
        return {name: (np.float64 if isinstance(x, float) else np.int64)(x) for name, x in given}


for _name, _target in _cattn._xla_targets().items():
    jax.ffi.register_ffi_target(f"cattn_attention_{_name}", _target, platform="cpu", api_version=1)


@functools.cache
def check_foreign_functions() -> None:
    """Raise RuntimeError if XLA does not pass the structs that cattn knows."""
    # XLA shows its structs when JAX starts the CPU. An import must not do that: JAX could not be configured any more.
    jax.local_devices(backend="cpu")
    if not _cattn._xla_is_known():
        raise RuntimeError(
            f"cattn does not know the foreign functions of jaxlib {jax.lib.__version__}, whose structs have changed: "
            f"install a version of jaxlib that this cattn was tested with, or call cattn by jax.pure_callback"
        )


def compute_dtype(dtype: Any) -> np.dtype[Any]:
    return np.dtype(np.float64 if dtype == np.float64 else np.float32)


def quantized_names(operands: Arrays) -> list[str]:
    """Return which of key and value have scales."""
    return [name for name in ("key", "value") if f"{name}_scale" in operands]


def _bias_gradient_shape(query: Any, key: Any, bias: Any) -> tuple[int, ...]:
    """Return the shape of the gradient that C computes: it sums over one of the last axes, then over no other."""
    batch, seqlen_q, heads = query.shape[:3]
    shape: tuple[int, ...] = bias.shape
    if shape[2] != seqlen_q:
        return batch, heads, 1, key.shape[1]
    if shape[3] != key.shape[1]:
        return batch, heads, seqlen_q, 1
    return shape


def gradient_shapes(at: Arrays, wanted: Sequence[str]) -> dict[str, Any]:
    """Return the shapes of the gradients of a pass from which these can be taken."""
    names = ("query", "key", "value", *(name for name in ("bias", "sinks") if name in wanted))
    shapes = {name: at[name].shape for name in names}
    if "bias" in shapes:
        shapes["bias"] = _bias_gradient_shape(at["query"], at["key"], at["bias"])
    if "sinks" in shapes:
        shapes["sinks"] = (at["query"].shape[0], at["query"].shape[2])
    if "gate" in at:
        shapes["gate"] = at["forward_out"].shape
    dtype = compute_dtype(at["query"].dtype)
    return {f"grad_{name}": jax.ShapeDtypeStruct(shape, dtype) for name, shape in shapes.items()}


_GIVEN = {"out": "grad_out", "residual": "grad_residual"}  # the gradients of results

_Rule = Callable[[Options, Arrays, Arrays, Arrays], tuple[Arrays, Arrays]]


def compute(options: Options, operands: Arrays) -> dict[str, Any]:
    """Return attention, and the residual if it is wanted."""
    return _forward(options, operands, ("out", "residual") if options.return_residual else ("out",))


def _refuse(what: str) -> NoReturn:
    raise NotImplementedError(
        f"cattn's dot_product_attention has no {what}; jax.nn.dot_product_attention has such derivatives"
    )


# ---- the passes, with their rules ------------------------------------------------------------------------------------
def _call(which: Pass, options: Options, operands: Arrays, results: Arrays) -> dict[str, Any]:
    """Call a pass with these operands. `results` has the shape and dtype of each result."""
    names = [name for name in ARGUMENTS if name in operands]
    shapes = {name: results[name] for name in RESULTS if name in results}

    def run(*arrays: Any) -> Any:
        check_foreign_functions()
        call = jax.ffi.ffi_call(f"cattn_attention_{which}", tuple(shapes.values()), vmap_method="expand_dims")
        return call(*arrays, **options.attributes(sum(BIT[name] for name in (*names, *shapes))))

    def derive(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        moving = {
            name: tangent
            for name, tangent in zip(names, tangents, strict=True)
            if type(tangent) is not jax.custom_derivatives.SymbolicZero
        }
        found, moved = _RULES[which](options, dict(zip(names, primals, strict=True)), moving, shapes)
        none = {name: np.zeros(shape.shape, jax.dtypes.float0) for name, shape in shapes.items()}
        return tuple(found[name] for name in shapes), tuple({**none, **moved}[name] for name in shapes)

    function: Any = jax.custom_jvp(run)
    function.defjvp(derive, symbolic_zeros=True)  # the gradient of a constant bias is not computed
    return dict(zip(shapes, function(*(operands[name] for name in names)), strict=True))


def _forward(options: Options, operands: Arrays, names: Sequence[str]) -> dict[str, Any]:
    """Return the results of these names."""
    query, value = operands["query"], operands["value"]
    rows = query.shape[:3]
    shapes = {
        "out": jax.ShapeDtypeStruct((*rows, value.shape[3]), query.dtype),
        "residual": jax.ShapeDtypeStruct(rows, compute_dtype(query.dtype)),
        # Each is a float64, as two words: without jax_enable_x64 JAX has no float64.
        "lse": jax.ShapeDtypeStruct((*rows, 2), np.uint32),
    }
    return _call("forward", options, operands, {name: shapes[name] for name in names})


def _pick(arrays: Arrays, names: Sequence[str]) -> dict[str, Any]:
    return {name: arrays[name] for name in names if name in arrays}


def _inputs(at: Arrays) -> dict[str, Any]:
    """Return the operands of the forward pass and its results."""
    others = (*_GIVEN.values(), *TANGENTS, "forward_out_tangent", "forward_lse_tangent")
    return {name: array for name, array in at.items() if name not in others}


def _jvp(options: Options, at: Arrays, along: Arrays) -> dict[str, Any]:
    """Return the derivatives of both results in this direction."""
    if quantized_names(at) or "gate" in at:
        _refuse(f"forward mode and no second derivatives with {'a gate' if 'gate' in at else 'quantized arrays'}")
    out = at["forward_out"]
    given = _inputs(at) | {f"{name}_tangent": tangent for name, tangent in along.items()}
    return _call("jvp", options, given, {
        "out_tangent": jax.ShapeDtypeStruct(out.shape, out.dtype),
        "lse_tangent": jax.ShapeDtypeStruct(out.shape[:3], compute_dtype(out.dtype)),
    })  # fmt: skip


def _backward(options: Options, at: Arrays, given: Arrays, shapes: Arrays) -> dict[str, Any]:
    """Return gradients. `given` has the gradients of the results, of which one may be missing."""
    arrays = _inputs(at) | {_GIVEN[name]: gradient for name, gradient in given.items()}
    arrays.setdefault("grad_out", jnp.zeros_like(at["forward_out"]))
    return _call("backward", options, arrays, shapes)


def _jvp_backward(options: Options, at: Arrays, given: Arrays, along: Arrays, shapes: Arrays) -> dict[str, Any]:
    """Return gradients of the derivative in this direction, which `at` has as well."""
    arrays = _inputs(at) | _pick(at, ("forward_out_tangent", "forward_lse_tangent"))
    arrays |= {_GIVEN[name]: gradient for name, gradient in given.items()}
    arrays |= {f"{name}_tangent": tangent for name, tangent in along.items()}
    arrays.setdefault("grad_out", jnp.zeros_like(at["forward_out"]))
    return _call("jvp_backward", options, arrays, shapes)


# ---- gradients of arguments that are broadcast -----------------------------------------------------------------------
def _sum_to(gradient: Any, wanted: Any) -> Any:
    """Sum over the axes along which an argument of this shape was broadcast."""
    shapes = zip(gradient.shape, wanted.shape, strict=True)
    axes = tuple(i for i, (full, own) in enumerate(shapes) if full != own)
    return (gradient.sum(axis=axes, keepdims=True) if axes else gradient).astype(wanted.dtype)


def _as_own(gradients: Arrays, shapes: Arrays) -> dict[str, Any]:
    """Return gradients in the shapes and dtypes of their arguments."""
    return {name: _sum_to(gradients[f"grad_{name}"], shapes[name]) for name in INPUTS if name in shapes}


# ---- attention -------------------------------------------------------------------------------------------------------
def _derive_forward(options: Options, operands: Arrays, moving: Arrays, shapes: Arrays) -> tuple[Arrays, Arrays]:
    found = _forward(options, operands, (*(name for name in shapes if name != "lse"), "lse"))
    at = {**operands, "forward_out": found["out"], "forward_lse": found["lse"]}
    results = {name: shape for name, shape in shapes.items() if name != "lse"}

    def derive(at: Arrays, along: Arrays, shapes: Arrays) -> Arrays:
        moved = _jvp(options, at, along)
        return {"out": moved["out_tangent"], "residual": moved["lse_tangent"]}

    def transpose(at: Arrays, given: Arrays, shapes: Arrays) -> Arrays:
        return _as_own(_backward(options, at, given, gradient_shapes(at, list(shapes))), shapes)

    return found, call_linear(derive, transpose, at, _pick(moving, INPUTS), results)


# ---- gradients -------------------------------------------------------------------------------------------------------
def _broadcast_to(tangents: Arrays, at: Arrays) -> dict[str, Any]:
    """Return `at` with bias and sinks in the shapes of their tangents."""
    names = [name for name in ("bias", "sinks") if name in tangents]
    return {**at, **{name: jnp.broadcast_to(at[name], tangents[name].shape) for name in names}}


def _given(at: Arrays) -> dict[str, Any]:
    return {name: at[given] for name, given in _GIVEN.items() if given in at}


def _derive_backward(options: Options, operands: Arrays, moving: Arrays, shapes: Arrays) -> tuple[Arrays, Arrays]:
    found = _call("backward", options, operands, shapes)

    def derive(at: Arrays, along: Arrays, shapes: Arrays) -> Arrays:
        parts = []
        inputs, given = _pick(along, INPUTS), _given(along)
        if inputs:
            moved = {f"forward_{name}": x for name, x in _jvp(options, at, inputs).items()}
            parts.append(_jvp_backward(options, {**at, **moved}, _given(at), inputs, shapes))
        if given:
            parts.append(_backward(options, at, given, shapes))
        return {name: functools.reduce(operator.add, (part[name] for part in parts)) for name in shapes}

    def transpose(at: Arrays, gradients: Arrays, shapes: Arrays) -> Arrays:
        along = {name.removeprefix("grad_"): tangent for name, tangent in gradients.items()}
        along = {name: tangent.astype(at[name].dtype) for name, tangent in along.items()}
        at = _broadcast_to(along, at)
        moved = _jvp(options, at, along)
        results = {"grad_out": moved["out_tangent"], "grad_residual": moved["lse_tangent"]}
        if any(name in shapes for name in INPUTS):
            at |= {f"forward_{name}": x for name, x in moved.items()}
            second = _jvp_backward(options, at, _given(at), along, gradient_shapes(at, list(shapes)))
            results |= _as_own(second, shapes)
        return {name: results[name].astype(shape.dtype) for name, shape in shapes.items()}

    return found, call_linear(derive, transpose, operands, _pick(moving, (*INPUTS, *_GIVEN.values())), shapes)


# ---- the derivative in a direction -----------------------------------------------------------------------------------
def _derive_jvp(options: Options, operands: Arrays, moving: Arrays, shapes: Arrays) -> tuple[Arrays, Arrays]:
    found = _call("jvp", options, operands, shapes)
    at = {**operands, **{f"forward_{name}": x for name, x in found.items()}}

    def derive(at: Arrays, along: Arrays, shapes: Arrays) -> Arrays:
        if any(name in along for name in INPUTS):
            _refuse(
                "forward mode over forward mode (jax.jacfwd of jax.jacfwd, jax.jvp of jax.jvp): take jax.hessian for "
                "second derivatives; it has no third derivatives"
            )
        return _jvp(options, at, {name.removesuffix("_tangent"): x for name, x in along.items()})

    def transpose(at: Arrays, gradients: Arrays, shapes: Arrays) -> Arrays:
        given = {"out" if name == "out_tangent" else "residual": x for name, x in gradients.items()}
        results = {}
        if any(name in shapes for name in INPUTS):
            along = {name: at[f"{name}_tangent"] for name in INPUTS if f"{name}_tangent" in at}
            wanted = gradient_shapes(at, list(shapes))
            results = _as_own(_jvp_backward(options, at, given, along, wanted), shapes)
        tangents = {name: shapes[f"{name}_tangent"] for name in INPUTS if f"{name}_tangent" in shapes}
        if tangents:
            first = _as_own(_backward(options, at, given, gradient_shapes(at, list(tangents))), tangents)
            results |= {f"{name}_tangent": x for name, x in first.items()}
        return results

    return found, call_linear(derive, transpose, at, _pick(moving, (*INPUTS, *TANGENTS)), shapes)


def _refuse_third(options: Options, operands: Arrays, moving: Arrays, shapes: Arrays) -> NoReturn:
    _refuse("third derivatives")


_RULES: dict[Pass, _Rule] = {
    "forward": _derive_forward,
    "backward": _derive_backward,
    "jvp": _derive_jvp,
    "jvp_backward": _refuse_third,
}
