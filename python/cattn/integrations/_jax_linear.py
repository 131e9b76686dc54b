"""Linear functions with a transpose of their own, for JAX: the derivatives of the passes that C computes.

JAX differentiates in reverse mode by transposing the derivative of forward mode. C computes a transpose as a whole.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

Arrays = Mapping[str, Any]
# From residuals and arguments to the results of these shapes. It is linear in the arguments, and some may be missing.
Function = Callable[[Arrays, Arrays, Arrays], Arrays]


@dataclasses.dataclass(frozen=True, eq=False)
class Linear:
    """A linear function, with the names of its arrays in the order in which JAX has them."""

    function: Function
    transpose: Function  # from the cotangents of the results to the cotangents of the arguments
    residuals: tuple[str, ...]
    arguments: tuple[str, ...]
    results: Mapping[str, jax.ShapeDtypeStruct]

    def __call__(self, *arrays: Any) -> list[Any]:
        at, along = self._split(arrays)
        found = self.function(at, along, self.results)
        return [found[name] for name in self.results]

    def _split(self, arrays: Sequence[Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        n = len(self.residuals)
        return dict(zip(self.residuals, arrays[:n], strict=True)), dict(zip(self.arguments, arrays[n:], strict=True))

    def bind(self, arrays: Sequence[Any]) -> list[Any]:
        found: list[Any] = _linear_p.bind(*arrays, linear=self)
        return found

    def along(self, arguments: Sequence[str]) -> Linear:
        """Return the function of fewer arguments."""
        return dataclasses.replace(self, arguments=tuple(arguments))

    def transposed(self, given: Sequence[str], shapes: Arrays) -> Linear:
        """Return the transpose: from the cotangents of these results to arguments of these shapes."""
        return Linear(self.transpose, self.function, self.residuals, tuple(given), shapes)

    def batched(self, dims: Sequence[int | None], size: int) -> Linear:
        """Return the function over a leading axis of the arguments, and over these axes of the residuals."""
        axes = dict(zip(self.residuals, dims, strict=True))

        def over_batch(function: Function) -> Function:
            def mapped(at: Arrays, along: Arrays, shapes: Arrays) -> Arrays:
                each = {name: jax.ShapeDtypeStruct(shape.shape[1:], shape.dtype) for name, shape in shapes.items()}
                found: Arrays = jax.vmap(lambda a, b: function(a, b, each), in_axes=(axes, 0), axis_size=size)(
                    at, along
                )
                return found

            return mapped

        results = {
            name: jax.ShapeDtypeStruct((size, *shape.shape), shape.dtype) for name, shape in self.results.items()
        }
        return Linear(over_batch(self.function), over_batch(self.transpose), self.residuals, self.arguments, results)


def call_linear(
    function: Function, transpose: Function, residuals: Arrays, arguments: Arrays, results: Arrays
) -> dict[str, Any]:
    """Return the results of a function with this transpose."""
    if not arguments:
        return {name: jnp.zeros(shape.shape, shape.dtype) for name, shape in results.items()}
    linear = Linear(function, transpose, tuple(residuals), tuple(arguments), results)
    return dict(zip(results, linear.bind([*residuals.values(), *arguments.values()]), strict=True))


_linear_p = Primitive("cattn_linear")
_linear_p.multiple_results = True


def _apply(*arrays: Any, linear: Linear) -> list[Any]:
    return linear(*arrays)


def _shapes(*avals: Any, linear: Linear) -> list[Any]:
    return [jax.core.ShapedArray(result.shape, result.dtype) for result in linear.results.values()]


def _is_zero(tangent: Any) -> bool:
    return type(tangent) is ad.Zero or getattr(tangent, "dtype", None) == jax.dtypes.float0


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, linear: Linear) -> tuple[list[Any], list[Any]]:
    n = len(linear.residuals)
    moved = [i for i, tangent in enumerate(tangents[:n]) if not _is_zero(tangent)]
    along = [i for i, tangent in enumerate(tangents) if i >= n and not _is_zero(tangent)]
    parts = []
    if along:
        fewer = linear.along([linear.arguments[i - n] for i in along])
        parts.append(fewer.bind([*primals[:n], *(tangents[i] for i in along)]))
    if moved:

        def of_moved(*arrays: Any) -> list[Any]:
            changed = dict(zip(moved, arrays, strict=True))
            return linear(*(changed.get(i, primal) for i, primal in enumerate(primals)))

        parts.append(jax.jvp(of_moved, [primals[i] for i in moved], [tangents[i] for i in moved])[1])
    found = linear.bind(primals)
    if not parts:
        return found, [ad.Zero.from_primal_value(x) for x in found]
    return found, [sum(each[1:], start=each[0]) for each in zip(*parts, strict=True)]


def _transpose(cotangents: Sequence[Any], *arrays: Any, linear: Linear) -> list[Any]:
    n = len(linear.residuals)
    given = {name: x for name, x in zip(linear.results, cotangents, strict=True) if type(x) is not ad.Zero}
    shapes = {
        name: jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype)
        for name, x in zip(linear.arguments, arrays[n:], strict=True)
        if ad.is_undefined_primal(x)
    }
    found = linear.transposed(list(given), shapes).bind([*arrays[:n], *given.values()])
    by_name = dict(zip(shapes, found, strict=True))
    return [None] * n + [by_name.get(name) for name in linear.arguments]


def _batch(arrays: Sequence[Any], dims: Sequence[Any], *, linear: Linear) -> Any:
    size = next(x.shape[dim] for x, dim in zip(arrays, dims, strict=True) if dim is not None)
    n = len(linear.residuals)

    def spread(x: Any, dim: Any) -> Any:
        return jnp.broadcast_to(x, (size, *x.shape)) if dim is None else jnp.moveaxis(x, dim, 0)

    arguments = [spread(x, dim) for x, dim in zip(arrays[n:], dims[n:], strict=True)]
    found = linear.batched(dims[:n], size).bind([*arrays[:n], *arguments])
    return found, [0] * len(found)


_linear_p.def_impl(_apply)
_linear_p.def_abstract_eval(_shapes)
ad.primitive_jvps[_linear_p] = _jvp
ad.primitive_transposes[_linear_p] = _transpose
batching.primitive_batchers[_linear_p] = _batch
mlir.register_lowering(_linear_p, mlir.lower_fun(_apply, multiple_results=True))
