"""Kernels that `batch_invariant` puts in the place of PyTorch's: the same vectors for every element.

PyTorch computes many element-wise functions of full vectors by one formula, and of the elements that are left over by
another. Which elements those are depends on the size of a tensor and on the number of threads, so on the batch.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple, NoReturn, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...functional import causal_conv, causal_conv_backward
from ._tensors import DTYPES, as_array, as_tensor

Kernel: TypeAlias = Callable[..., Any]

# A multiple of what PyTorch's loops take at a time: two vectors, of 32 numbers at most.
LANES = 128
# PyTorch gives at least this number of elements to a thread (at::internal::GRAIN_SIZE).
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
    is_whole = size % (PART * torch.get_num_threads()) == 0 or (size % LANES == 0 and size <= PART)
    if is_whole and all(x.shape == shape and x.is_contiguous() for x in tensors):
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
        shape = tensors[0].shape
        try:
            if any(x.shape != shape for x in tensors):
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


def _kernel_of_glu(theirs: Any, *, backward: bool = False) -> Kernel:
    """Return the kernel of ``glu`` or of its gradient: the two factors are the halves of one tensor."""
    functional = torch.library.get_kernel("aten::glu_backward" if backward else "aten::glu", "CPU")

    def kernel(keyset: Any, *arguments: Any, **options: Any) -> Any:
        result: Tensor = theirs.call_boxed(keyset, *arguments, **options)
        *grad, x = arguments[: 1 + backward]
        dim = arguments[1 + backward] if len(arguments) > 1 + backward else options.get("dim", -1)
        if result.numel() == 0:
            return result
        parts = [*grad, *x.chunk(2, dim)]
        for i, target in enumerate(result.chunk(2, dim) if backward else [result]):

            def compute(*given: Tensor, i: int = i) -> Tensor:
                *grad, first, second = given
                of_both = functional.call_boxed(keyset, *(g[None] for g in grad), torch.stack([first, second]), 0)
                part: Tensor = of_both[i]
                return part

            target.copy_(_by_full_vectors(compute, parts, parts[0].shape))
        return result

    return kernel


# ---- what is refused -----------------------------------------------------------------------------------------------
# Operators whose rows may have other bits in another batch, and that have no kernel here.
REFUSED = ("_scaled_dot_product_flash_attention_for_cpu",)


def kernel_that_refuses(name: str) -> Callable[..., NoReturn]:
    """Return a kernel whose call is an error."""

    def kernel(*arguments: Any, **options: Any) -> NoReturn:
        raise NotImplementedError(
            f"batch_invariant() has no kernel for torch.ops.aten.{name}: the bits of a row may depend on its batch"
        )

    return kernel


Doubles: TypeAlias = NDArray[np.float64]

_COMPLEX = (torch.complex64, torch.complex128)
_DOUBLE = (torch.float64, torch.complex128)
# So many terms are converted at a time, by one thread: they stay in the cache.
_BLOCK = 2**15
# A score below this one is that of a masked key.
_MASKED = -9000


# ---- one after the other ---------------------------------------------------------------------------------------------
def _in_order(terms: Tensor, operation: np.ufunc = np.add, wide: Any = np.float64) -> NDArray[Any]:
    """Return the sum (or the product) of each column, one term after the other, in float64 or wider."""
    n, m = terms.shape
    total: NDArray[Any] = np.full(m, operation.identity, wide)
    step = max(1, _BLOCK // max(m, 1))
    by_columns = m < 16  # NumPy's loop over the shorter axis would take most of the time
    block = np.empty((m, min(step, n) + 1) if by_columns else (min(step, n) + 1, m))
    columns = block if by_columns else block.T
    target = torch.from_numpy(block) if by_columns else torch.from_numpy(block).T
    for start in range(0, n, step):
        size = min(step, n - start)
        target[:, 1 : size + 1].copy_(terms[start : start + size].T)
        part = columns[:, : size + 1].astype(wide, copy=False)
        part[:, 0] = total
        total = operation.accumulate(part, axis=1)[:, -1] if by_columns else operation.reduce(part.T, axis=0)
    return total


# ---- exact sums ------------------------------------------------------------------------------------------------------
def _halve(terms: Doubles) -> tuple[Doubles, Doubles]:
    """Return a sum of the rows, and numbers that are missing from it: both together are the exact sum."""
    errors = [terms[:0]]
    while len(terms) > 1:
        half = len(terms) // 2
        x, y = terms[:half], terms[half : 2 * half]
        total = x + y
        z = total - x
        errors.append((x - (total - z)) + (y - z))
        terms = np.concatenate([total, terms[2 * half :]])
    return terms[0], np.concatenate(errors)


def _round_exactly(terms: Doubles) -> float:
    """Return the exact sum of the terms, rounded once."""
    finite = np.isfinite(terms)
    if not finite.all():
        return float(np.add.reduce(terms[~finite]))
    total, least = 0, -1074
    for start in range(0, len(terms), 2**26):  # a sum of so many numbers of 27 bits is exact
        fractions, exponents = np.frexp(terms[start : start + 2**26])
        digits = np.ldexp(fractions, 53).astype(np.int64)
        places = exponents - 53 - (least - 53)
        for shift, numbers in ((27, digits >> 27), (0, digits & (2**27 - 1))):
            for place, number in enumerate(np.bincount(places, numbers)):
                if number:
                    total += int(number) << (place + shift)
    try:
        return total / (1 << (53 - least))
    except OverflowError:
        return math.inf if total > 0 else -math.inf


def _exactly(terms: Tensor) -> Doubles:
    """Return the sum of each column of float64, rounded once."""
    n, m = terms.shape
    step = max(16, 2**20 // max(m, 1))
    rows: list[Doubles] = []
    missing = np.zeros(m)  # what the sums below leave out is at most so much

    def distil(part: Doubles) -> tuple[Doubles, Doubles]:
        nonlocal missing
        total, errors = _halve(part)
        rest, lost = _halve(errors) if len(errors) else (np.zeros(m), errors)
        missing = missing + np.abs(lost).sum(0)
        return total, rest

    for start in range(0, n, step):
        rows.extend(distil(terms[start : start + step].double().contiguous().numpy()))
    total, rest = distil(np.stack(rows))
    margin = np.where(missing > 0, 1.01 * missing + 2.0**-52 * np.abs(rest), 0)
    low: Doubles = total + (rest - margin)
    unsure = ~(low == total + (rest + margin))
    for i in np.flatnonzero(unsure):
        low[i] = _round_exactly(terms[:, i].double().contiguous().numpy())
    return low + 0.0  # no -0, which zeros of padding would make 0


def _find_axes(x: Tensor, dim: Any) -> tuple[int, ...]:
    """Return the axes that PyTorch has accepted."""
    if dim is None or (not isinstance(dim, int) and not dim):
        return tuple(range(x.ndim))
    axes = [dim] if isinstance(dim, int) else dim
    return tuple(sorted(axis % x.ndim for axis in axes)) if x.ndim else ()


def _columns(x: Tensor, axes: tuple[int, ...]) -> tuple[Tensor, list[int]]:
    """Return a matrix whose columns are to be reduced, and the shape of the result."""
    kept = [axis for axis in range(x.ndim) if axis not in axes]
    shape = [x.shape[axis] for axis in kept]
    return x.permute((*axes, *kept)).reshape(math.prod(x.shape[axis] for axis in axes), math.prod(shape)), shape


def add(x: Tensor, axes: tuple[int, ...], exact: bool) -> Tensor:
    """Return the sum over axes, in float64: exact, or one term after the other."""
    terms, shape = _columns(x, axes)
    with np.errstate(all="ignore"):
        total = _exactly(terms) if exact else _in_order(terms)
    return torch.from_numpy(total).reshape(shape)


def _keep(x: Tensor, axes: tuple[int, ...]) -> Tensor:
    for axis in axes:
        x = x.unsqueeze(axis)
    return x


def _fill(result: Tensor, numbers: Tensor) -> Tensor:
    return result.copy_(numbers.reshape(result.shape))


def _is_ours(x: Tensor, result: Tensor) -> bool:
    return result.dtype in (*DTYPES, *_COMPLEX) and x.layout is torch.strided and x.numel() > 0


# ---- sums and their like ---------------------------------------------------------------------------------------------
def _kernel_of_sum(theirs: Any, *, mean: bool = False, skip_nan: bool = False) -> Kernel:
    def kernel(keyset: Any, x: Tensor, dim: Any = None, keepdim: bool = False, **options: Any) -> Any:
        result: Tensor = theirs.call_boxed(keyset, x, dim, keepdim, **options)
        if not _is_ours(x, result):
            return result
        axes, terms = _find_axes(x, dim), x.to(result.dtype)
        count = math.prod(x.shape[axis] for axis in axes) if mean else 1
        if skip_nan:
            terms = terms.masked_fill(terms.isnan(), 0)
        if not result.is_complex():
            return _fill(result, add(terms, axes, result.dtype in _DOUBLE) / count)
        total = add(torch.view_as_real(terms.resolve_conj()), axes, result.dtype in _DOUBLE) / count
        return _fill(result, torch.view_as_complex(total))

    return kernel


def _kernel_of_product(theirs: Any) -> Kernel:
    def kernel(keyset: Any, x: Tensor, dim: Any = None, *arguments: Any, **options: Any) -> Any:
        given = arguments if dim is None else (dim, *arguments)
        result: Tensor = theirs.call_boxed(keyset, x, *given, **options)
        if not _is_ours(x, result) or result.is_complex():
            return result
        terms, shape = _columns(x.to(result.dtype), _find_axes(x, dim))
        with np.errstate(all="ignore"):
            wide = np.longdouble if result.dtype is torch.float64 else np.float64
            found = _in_order(terms, np.multiply, wide).astype(np.float64)
        return _fill(result, torch.from_numpy(found).reshape(shape))

    return kernel


def _kernel_of_norm(theirs: Any) -> Kernel:
    def kernel(keyset: Any, x: Tensor, order: Any = 2, dim: Any = None, keepdim: bool = False, **options: Any) -> Any:
        result: Tensor = theirs.call_boxed(keyset, x, order, dim, keepdim, **options)
        order = float(order)
        if not _is_ours(x, result) or not math.isfinite(order):  # the largest or the smallest is exact
            return result
        dtype = options.get("dtype")
        sizes = (x if dtype is None else x.to(dtype)).abs().double()
        if order == 0:
            terms = sizes.ne(0).double()
        elif order in (1, 2):
            terms = sizes if order == 1 else sizes * sizes
        else:
            terms = sizes.pow(order)
        total = add(terms, _find_axes(x, dim), result.dtype is torch.float64)
        if order == 2:
            total = total.sqrt()
        elif order not in (0, 1):
            total = total.pow(1 / order)
        return _fill(result, total)

    return kernel


def _kernel_of_variance(theirs: Any, *, root: bool = False, with_mean: bool = False) -> Kernel:
    def kernel(
        keyset: Any, x: Tensor, dim: Any = None, *, correction: Any = None, keepdim: bool = False, **options: Any
    ) -> Any:
        results = theirs.call_boxed(keyset, x, dim, correction=correction, keepdim=keepdim, **options)
        axes = _find_axes(x, dim)
        count = math.prod(x.shape[axis] for axis in axes)
        freedom = count - (1 if correction is None else correction)
        if x.dtype not in DTYPES or x.layout is not torch.strided or x.numel() == 0 or freedom <= 0:
            return results
        wide, exact = x.double(), x.dtype is torch.float64
        mean = add(wide, axes, exact) / count
        rest = wide - _keep(mean, axes)
        found = add(rest * rest, axes, exact) / freedom
        first, *second = results if with_mean else (results,)
        _fill(first, found.sqrt() if root else found)
        for result in second:
            _fill(result, mean)
        return results

    return kernel


# ---- softmax ---------------------------------------------------------------------------------------------------------
class Notices:
    """Warnings that one block gives once."""

    def __init__(self) -> None:
        self.given = False

    def look_for_padding(self, scores: Tensor, dim: int) -> None:
        """Warn of a batch whose first keys are masked in every row: products over the keys are shifted by them."""
        if self.given or scores.ndim < 3 or dim % scores.ndim != scores.ndim - 1 or scores.shape[-2] < 2:
            return
        if (scores[..., 0].flatten(1).amax(1) <= _MASKED).any():
            self.given = True
            warnings.warn(
                "batch_invariant(): softmax of scores whose first keys are masked, as by padding on the left. A "
                "product of the weights with the values adds its terms in another order then than without padding, so "
                "that last bits differ from the text alone: pad on the right, or use cattn.integrations.transformers, "
                "where the model allows it",
                stacklevel=3,
            )


notices = Notices()


def _kernel_of_softmax(theirs: Any, *, log: bool = False) -> Kernel:
    def kernel(keyset: Any, x: Tensor, dim: int, *arguments: Any, **options: Any) -> Any:
        result: Tensor = theirs.call_boxed(keyset, x, dim, *arguments, **options)
        if not _is_ours(x, result) or x.dtype not in DTYPES:
            return result
        notices.look_for_padding(x, dim)
        axes = _find_axes(x, [dim])
        wide = x if x.dtype.itemsize > 2 else x.float()
        rest = wide - wide.amax(dim, keepdim=True)
        sizes = rest.exp()
        total = _keep(add(sizes, axes, x.dtype is torch.float64), axes)
        # the quotient of float32 numbers is rounded to float32 before halves are made of it, as in PyTorch
        return _fill(result, rest - total.log().to(rest.dtype) if log else sizes / total.to(rest.dtype))

    return kernel


def _kernel_of_softmax_gradient(theirs: Any, *, log: bool = False) -> Kernel:
    def kernel(keyset: Any, grad: Tensor, output: Tensor, dim: int, *arguments: Any, **options: Any) -> Any:
        result: Tensor = theirs.call_boxed(keyset, grad, output, dim, *arguments, **options)
        if not _is_ours(grad, result) or grad.dtype not in DTYPES:
            return result
        axes, exact = _find_axes(grad, [dim]), grad.dtype is torch.float64
        wide, out = grad.double(), output.double()
        if log:
            return _fill(result, wide - out.exp() * _keep(add(wide, axes, exact), axes))
        return _fill(result, out * (wide - _keep(add(wide * out, axes, exact), axes)))

    return kernel


# ---- layers and losses -----------------------------------------------------------------------------------------------
def _kernel_of_layer_norm_gradient(theirs: Any) -> Kernel:
    """Return the kernel of a gradient: PyTorch adds the rows' contributions to weight and bias by threads."""

    def kernel(keyset: Any, grad: Tensor, x: Tensor, shape: Any, mean: Tensor, rstd: Tensor, *arguments: Any) -> Any:
        results = theirs.call_boxed(keyset, grad, x, shape, mean, rstd, *arguments)
        axes, exact = tuple(range(x.ndim - len(shape))), x.dtype is torch.float64
        if x.numel() == 0 or x.dtype not in DTYPES:
            return results
        wide = grad.double()
        for result, factor in ((results[1], True), (results[2], False)):
            if result is not None and result.numel():
                terms = wide * ((x.double() - mean.double()) * rstd.double()) if factor else wide
                _fill(result, add(terms, axes, exact))
        return results

    return kernel


def _kernel_of_nll(theirs: Any) -> Kernel:
    """Return the kernel of the loss of log-probabilities, whose sum PyTorch divides by the sum of the weights."""

    def kernel(
        keyset: Any, x: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignored: int, **outs: Any
    ) -> Any:
        results = theirs.call_boxed(keyset, x, target, weight, reduction, ignored, **outs)
        if reduction == 0 or x.dtype not in DTYPES or x.numel() == 0:
            return results
        classes, exact = min(x.ndim - 1, 1), x.dtype is torch.float64
        valid = target != ignored
        index = target.where(valid, 0)
        weights = (torch.ones_like(index, dtype=torch.float64) if weight is None else weight.double()[index]) * valid
        chosen = x.gather(classes, index.unsqueeze(classes)).squeeze(classes).double()
        losses = -chosen.where(valid, 0) * weights
        axes = tuple(range(losses.ndim))
        total, divisor = add(losses, axes, exact), add(weights, axes, exact)
        _fill(results[0], total / divisor if reduction == 1 else total)
        _fill(results[1], divisor)
        return results

    return kernel


def _kernel_of_batch_norm(theirs: Any) -> Kernel:
    """Return the kernel of a normalisation by known statistics, for which PyTorch has a formula for each layout."""

    def kernel(
        keyset: Any, x: Tensor, weight: Any, bias: Any, mean: Any, variance: Any, training: bool, *arguments: Any
    ) -> Any:
        results = theirs.call_boxed(keyset, x, weight, bias, mean, variance, training, *arguments)
        if training or x.dtype not in DTYPES or x.layout is not torch.strided:
            return results
        shape = [-1] + [1] * (x.ndim - 2)
        factor = 1 / (variance.double() + arguments[1]).sqrt()
        factor = factor if weight is None else factor * weight.double()
        added = -mean.double() * factor if bias is None else bias.double() - mean.double() * factor
        _fill(results[0], x.double() * factor.reshape(shape) + added.reshape(shape))
        return results

    return kernel


# ---- the depthwise convolution ---------------------------------------------------------------------------------------
class _Depthwise(NamedTuple):
    """A convolution of each channel by itself, as the short convolution of padded tokens, of which it has some rows."""

    kernels: int  # of each channel
    left: int  # zeros before the first token
    right: int
    first: int  # row of the short convolution
    step: int

    def pad(self, x: Tensor) -> Tensor:
        """Return (B, T, kernels of all channels) of an input (B, C, T)."""
        return torch.nn.functional.pad(x, (self.left, self.right)).repeat_interleave(self.kernels, 1).mT


def _read_depthwise(x: Tensor, weight: Tensor, options: tuple[Any, ...]) -> _Depthwise | None:
    """Return the short convolution that has the rows; None for an input without any. Others are refused."""
    stride, padding, dilation, transposed, _, groups = options
    channels = x.shape[1] if x.ndim == 3 else 0
    is_one = channels == groups and weight.shape[1] == 1 and list(dilation) == [1] and not transposed
    if not is_one or x.dtype not in DTYPES or weight.dtype is not x.dtype:
        kernel_that_refuses("convolution")()
    before = weight.shape[-1] - 1
    if x.numel() == 0 or weight.numel() == 0 or x.shape[-1] + 2 * padding[0] <= before:
        return None
    first = max(0, before - padding[0])
    return _Depthwise(weight.shape[0] // channels, padding[0] - before + first, padding[0], first, stride[0])


def _kernel_of_convolution(theirs: Any) -> Kernel:
    def kernel(keyset: Any, x: Tensor, weight: Tensor, bias: Tensor | None, *options: Any) -> Any:
        rows = _read_depthwise(x, weight, options)
        if rows is None:
            return theirs.call_boxed(keyset, x, weight, bias, *options)
        arrays = (rows.pad(x), weight[:, 0], *(() if bias is None else (bias,)))
        found = as_tensor(causal_conv(*map(as_array, arrays)), x.dtype)
        return found[:, rows.first :: rows.step].mT.contiguous()

    return kernel


def _kernel_of_convolution_gradient(theirs: Any) -> Kernel:
    def kernel(
        keyset: Any, grad: Tensor, x: Tensor, weight: Tensor, bias_sizes: Any, *options: Any
    ) -> tuple[Tensor | None, ...]:
        rows = _read_depthwise(x, weight, options[:-1])
        if rows is None:
            found: tuple[Tensor | None, ...] = theirs.call_boxed(keyset, grad, x, weight, bias_sizes, *options)
            return found
        tokens = rows.pad(x)
        of_rows = torch.zeros_like(tokens)
        of_rows[:, rows.first :: rows.step] = grad.mT
        of_tokens, of_weight, _, _ = causal_conv_backward(*map(as_array, (of_rows, tokens, weight[:, 0])))
        of_x = as_tensor(of_tokens, x.dtype)[:, rows.left : rows.left + x.shape[-1]].mT
        of_channels = of_x.reshape(*x.shape[:2], rows.kernels, -1).sum(2) if rows.kernels > 1 else of_x.contiguous()
        each = (of_channels, as_tensor(of_weight, x.dtype)[:, None], grad.sum((0, 2)))
        return tuple(gradient if is_wanted else None for gradient, is_wanted in zip(each, options[-1], strict=True))

    return kernel


# ---- the table -------------------------------------------------------------------------------------------------------
_mean = partial(_kernel_of_sum, mean=True)
_nansum = partial(_kernel_of_sum, skip_nan=True)
_std = partial(_kernel_of_variance, root=True)
REDUCTIONS: dict[str, Callable[[Any], Kernel]] = {
    **dict.fromkeys(("sum.dim_IntList", "sum.IntList_out"), _kernel_of_sum),
    **dict.fromkeys(("mean.dim", "mean.out"), _mean),
    **dict.fromkeys(("nansum", "nansum.out"), _nansum),
    **dict.fromkeys(("prod", "prod.dim_int", "prod.int_out"), _kernel_of_product),
    **dict.fromkeys(("linalg_vector_norm", "linalg_vector_norm.out"), _kernel_of_norm),
    **dict.fromkeys(("var.correction", "var.correction_out"), _kernel_of_variance),
    **dict.fromkeys(("std.correction", "std.correction_out"), _std),
    "var_mean.correction": partial(_kernel_of_variance, with_mean=True),
    "std_mean.correction": partial(_kernel_of_variance, root=True, with_mean=True),
    **dict.fromkeys(("_softmax", "_softmax.out"), _kernel_of_softmax),
    **dict.fromkeys(("_log_softmax", "_log_softmax.out"), partial(_kernel_of_softmax, log=True)),
    "_softmax_backward_data": _kernel_of_softmax_gradient,
    "_log_softmax_backward_data": partial(_kernel_of_softmax_gradient, log=True),
    **dict.fromkeys(("glu", "glu.out"), _kernel_of_glu),
    **dict.fromkeys(("glu_backward", "glu_backward.grad_input"), partial(_kernel_of_glu, backward=True)),
    "native_batch_norm": _kernel_of_batch_norm,
    "native_layer_norm_backward": _kernel_of_layer_norm_gradient,
    **dict.fromkeys(("nll_loss_forward", "nll_loss_forward.output", "nll_loss2d_forward"), _kernel_of_nll),
}
# For each overload the function that makes our kernel from PyTorch's.
INVARIANT: dict[str, Callable[[Any], Kernel]] = {
    **REDUCTIONS,
    "convolution": _kernel_of_convolution,
    "convolution_backward": _kernel_of_convolution_gradient,
    **{name + form: partial(_make_elements, name, form == "_") for name, forms in _ELEMENTS.items() for form in forms},
    **{form: partial(_make_elements, name, True) for form, name in _IN_PLACE.items()},
}
