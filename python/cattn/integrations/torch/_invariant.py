"""Kernels that `batch_invariant` puts in the place of PyTorch's: the same vectors for every element.

PyTorch computes many element-wise functions of full vectors by one formula, and of the elements that are left over by
another. Which elements those are depends on the size of a tensor and on the number of threads, so on the batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NoReturn, TypeAlias

import torch
from torch import Tensor

from ._sums import REDUCTIONS

Kernel: TypeAlias = Callable[..., Any]

# A multiple of what PyTorch's loops take at a time: two vectors, of 32 numbers at most.
LANES = 128
# PyTorch gives at least so many elements to a thread (at::internal::GRAIN_SIZE).
PART = 32768


# ---- element-wise functions ------------------------------------------------------------------------------------------
def _parts(size: int) -> Iterator[tuple[int, int]]:
    """Yield where to cut a tensor so that each thread gets full vectors; only the last part may have others."""
    step = PART * torch.get_num_threads()
    whole = size // step * step
    if whole:
        yield 0, whole
    for start in range(whole, size, PART):
        yield start, min(start + PART, size)


def _by_full_vectors(function: Callable[..., Tensor], tensors: list[Tensor], shape: torch.Size) -> Tensor:
    """Return function(*tensors) of tensors that broadcast to shape, computed of contiguous parts of full vectors."""
    size = math.prod(shape)
    if size % LANES == 0 and size <= PART and all(x.shape == shape and x.is_contiguous() for x in tensors):
        return function(*tensors)
    flat = [x.expand(shape).contiguous().reshape(-1) for x in tensors]
    found: Tensor | None = None
    for start, end in _parts(size):
        parts, count = [x[start:end] for x in flat], end - start
        if count % LANES:
            parts = [torch.cat([x, x.new_ones(-count % LANES)]) for x in parts]
        result = function(*parts)[:count]
        if found is None:
            found = result.new_empty(size)
        found[start:end] = result
    assert found is not None
    full = next((x for x in tensors if x.shape == shape), None)
    if full is None or full.is_contiguous():
        return found.reshape(shape)
    return torch.empty_like(full, dtype=found.dtype).copy_(found.reshape(shape))  # with PyTorch's strides


def _as_tensors(given: list[Any]) -> list[Tensor]:
    """Return the tensors of a call in one dtype. PyTorch hands over a number where a tensor holds one from Python."""
    if len(given) < 2 or len({x.dtype if isinstance(x, Tensor) else type(x) for x in given}) == 1:
        return given
    wanted = torch.result_type(given[0], given[1])
    return [x.to(wanted) if isinstance(x, Tensor) else torch.tensor(x, dtype=wanted) for x in given]


def _kernel_of_elements(theirs: Any, at: list[int], in_place: bool, functional: Any) -> Kernel:
    """Return the kernel of one form of an operator.

    `at` has the positions of the tensors, and `functional` is PyTorch's kernel of the form that returns a new tensor.
    """

    def kernel(keyset: Any, *arguments: Any, **options: Any) -> Any:
        tensors = _as_tensors([arguments[i] for i in at])
        if any(not isinstance(arguments[i], Tensor) for i in at):  # PyTorch's kernel takes tensors only
            arguments = tuple(tensors[at.index(i)] if i in at else x for i, x in enumerate(arguments))
        outs = {name: x for name, x in options.items() if isinstance(x, Tensor)}
        try:
            shape = torch.broadcast_shapes(*(x.shape for x in tensors))  # type: ignore[no-untyped-call]
        except RuntimeError:  # PyTorch's own error
            return theirs.call_boxed(keyset, *arguments, **options)
        if math.prod(shape) == 0 or not all(x.layout is torch.strided for x in (*tensors, *outs.values())):
            return theirs.call_boxed(keyset, *arguments, **options)
        plain = {name: x for name, x in options.items() if name not in outs}

        def compute(*parts: Tensor) -> Tensor:
            given = list(arguments)
            for i, part in zip(at, parts, strict=True):
                given[i] = part
            result: Tensor = functional.call_boxed(keyset, *given, **plain)
            return result

        target = arguments[0] if in_place else next(iter(outs.values()), None)
        if target is None:
            return _by_full_vectors(compute, tensors, shape)
        result = _by_full_vectors(compute, tensors, shape)
        if not torch.can_cast(result.dtype, target.dtype) or (in_place and target.shape != shape):
            return theirs.call_boxed(keyset, *arguments, **options)  # PyTorch's own error
        if not in_place and target.dtype is not result.dtype:
            theirs.call_boxed(keyset, *arguments, **options)  # some operators refuse a cast
        if not in_place and target.shape != shape:
            target.resize_(shape)
        return target.copy_(result)

    return kernel


# Every operator of which a result differs in its last elements or for other strides, with AVX2 or AVX-512.
_ELEMENTS = {
    "atan2": ("", ".out", "_"),
    "atanh": ("", ".out", "_"),
    "cosh": ("", ".out", "_"),
    "elu": ("", ".out", "_"),
    "elu_backward": ("", ".grad_input"),
    "exp2": ("", ".out", "_"),
    "gelu": ("", ".out", "_"),
    "gelu_backward": ("", ".grad_input"),
    "hypot": ("", ".out", "_"),
    "igamma": ("", ".out", "_"),
    "igammac": ("", ".out", "_"),
    "logaddexp": ("", ".out"),
    "logaddexp2": ("", ".out"),
    "logit": ("", ".out", "_"),
    "mish": ("", ".out", "_"),
    "mish_backward": ("",),
    "pow.Tensor_Scalar": ("", "_out"),
    "pow.Tensor_Tensor": ("", "_out"),
    "rsqrt": ("", ".out", "_"),
    "sigmoid": ("", ".out", "_"),
    "silu": ("", ".out", "_"),
    "silu_backward": ("", ".grad_input"),
    "sinh": ("", ".out", "_"),
    "softplus": ("", ".out"),
    "softplus_backward": ("", ".grad_input"),
    "special_i0e": ("", ".out"),
}
_IN_PLACE = {"pow_.Scalar": "pow.Tensor_Scalar", "pow_.Tensor": "pow.Tensor_Tensor"}


def _make_elements(name: str, in_place: bool, theirs: Any) -> Kernel:
    operator, _, overload = name.partition(".")
    schema = getattr(getattr(torch.ops.aten, operator), overload or "default")._schema
    at = [i for i, argument in enumerate(schema.arguments) if str(argument.type) == "Tensor"]
    return _kernel_of_elements(theirs, at, in_place, torch.library.get_kernel(f"aten::{name}", "CPU"))


# ---- what is refused -----------------------------------------------------------------------------------------------
# Operators whose rows may have other bits in another batch, and that have no kernel here.
REFUSED = ("convolution", "mkldnn_rnn_layer", "_scaled_dot_product_flash_attention_for_cpu")


def kernel_that_refuses(name: str) -> Callable[..., NoReturn]:
    """Return a kernel whose call is an error."""

    def kernel(*arguments: Any, **options: Any) -> NoReturn:
        raise NotImplementedError(
            f"batch_invariant() has no kernel for torch.ops.aten.{name}: the bits of a row may depend on its batch"
        )

    return kernel


# ---- the table -----------------------------------------------------------------------------------------------------
# For each overload the function that makes our kernel from PyTorch's.
INVARIANT: dict[str, Callable[[Any], Kernel]] = {
    **REDUCTIONS,
    **{name + form: partial(_make_elements, name, form == "_") for name, forms in _ELEMENTS.items() for form in forms},
    **{form: partial(_make_elements, name, True) for form, name in _IN_PLACE.items()},
}
