"""Comparison of one result with the exact one, within a bound on rounding errors."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from .._input.arrays import read_array
from .._input.types import AttentionOutput
from ..functional import scaled_dot_product_attention
from ..reference._attention import normalize, score

Floats = NDArray[np.float64]

# Bits of the significand with the hidden one, and the exponent of the smallest subnormal.
_FORMATS = {"float16": (11, -24), "bfloat16": (8, -133), "float32": (24, -149), "float64": (53, -1074)}
_EXP = 40  # units of roundoff of exp or tanh: 20 ULP, as in the fast exp of PyTorch's fused kernels
_STORED = ("return_weights", "return_lse", "return_dropout_mask", "need_weights", "out")
_SHOWN = 5  # rows that a message lists


class _Exact(NamedTuple):
    """The exact result, and what a bound on the error needs."""

    out: Floats  # (..., H, T_q, D_v), as all others with an axis of heads
    visible: NDArray[np.bool_]
    weights: Floats  # before dropout
    sink: Floats  # the weight of the sink (..., T_q, 1)
    value: Floats  # (..., T_k, D_v), or (..., T_q, n, D_v) of listed keys
    kept: Floats | None  # factors of dropout: 0 or 1 / (1 - p)
    size: Floats  # of the products: the scores if every term counts with its absolute value
    rest: Floats  # the absolute values of the numbers that are rounded four times after the products
    below: Floats  # the distance of each score from the largest
    sink_below: Floats
    head_dim: int
    one_head: bool  # the caller's arrays have no axis of heads


def assert_attention_close(
    out: ArrayLike,
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    *,
    compute_dtype: DTypeLike | None = None,
    weights_dtype: DTypeLike | None = None,
    **options: Any,
) -> None:
    r"""Assert that a result of attention is the exact one, up to rounding errors.

    The tolerance is not a guess: it is a bound on what rounding can do to these very numbers, in any order of the sums.

    Parameters
    ----------
    out : array_like or torch.Tensor, shape (..., T_q, D_v)
        The result to test, of float16, bfloat16, float32 or float64.
    query, key, value : array_like or torch.Tensor
        The inputs that it was computed from.
    compute_dtype : dtype, optional
        The dtype of scores and sums. The default is float64 if the result and the inputs are float64, and float32
        otherwise. Say float16 if scores are computed in float16.
    weights_dtype : dtype, optional
        The dtype that weights are rounded to before they multiply the values. The default is the dtype of the result,
        which allows for halves what FlashAttention does; say float32 if halves keep their weights in float32.
    **options
        Every option of `cattn.scaled_dot_product_attention` that changes the result: ``attn_mask``, ``is_causal``,
        ``scale``, ``bias``, ``window_size``, ``softcap``, ``sinks`` and so on. Dropout needs the ``rng`` that drew it.

    Raises
    ------
    AssertionError
        The shape is wrong, or rows are off by more than rounding explains. The message lists the worst rows, each with
        its error in units in the last place and in multiples of the bound.
    TypeError, ValueError
        An argument is wrong.

    See Also
    --------
    cattn.testing.diagnose : What is wrong, where the error is larger than rounding.
    cattn.scaled_dot_product_attention : The options.

    Notes
    -----
    With the unit roundoff :math:`u` of the computation (2\ :sup:`-24` for float32), a sum of n products in any order
    has an error of at most :math:`\gamma_n = nu / (1 - nu)` times the sum of the absolute products [1]_. So a score
    :math:`s_{ij}` has an error of at most :math:`\gamma_{D+3} \, |scale| \sum |q||k|`, plus a few u times the numbers
    that are added to it. The shift by the largest score m adds :math:`u |s_{ij} - m|` and the exponential 20 units in
    the last place, and together they are the relative error :math:`\epsilon_{ij}` of a weight before the division
    [2]_. The division lets a common factor cancel, so that to first order

    .. math:: |\Delta out_i| \le \sum_j w_{ij} \epsilon_{ij} |v_j - out_i|
        + \gamma_{T_k + 3} (\sum_j w_{ij} |v_j| + |out_i|) + u_w \sum_j w_{ij} |v_j - out_i| + u_o |out_i|

    with the unit roundoffs :math:`u_w` and :math:`u_o` of weights and output, if they are rounded to a narrower dtype,
    times :math:`1 + 2 \max_j \epsilon_{ij}` for the higher orders, and plus the spacing of subnormal numbers. The exact
    result comes from `cattn.reference`, in float64; for float64 its own bound is added. All T_q x T_k scores are held.

    References
    ----------
    .. [1] N. J. Higham, "Accuracy and Stability of Numerical Algorithms", 2nd edition, SIAM 2002, section 3.1.
    .. [2] P. Blanchard, D. J. Higham and N. J. Higham, "Accurately computing the log-sum-exp and softmax functions",
       IMA Journal of Numerical Analysis 41, 2021.

    Examples
    --------
    >>> import numpy as np
    >>> from cattn.testing import assert_attention_close
    >>> query, key, value = np.random.default_rng(0).standard_normal((3, 6, 4), dtype=np.float32)
    >>> scores = np.where(np.tri(6, dtype=bool), query @ key.T / 2, -np.inf)
    >>> weights = np.exp(scores) / np.exp(scores).sum(axis=-1, keepdims=True)
    >>> assert_attention_close(weights @ value, query, key, value, is_causal=True)
    >>> weights[5, 0] = 0
    >>> assert_attention_close(weights @ value, query, key, value, is_causal=True)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    AssertionError: 1 of 6 rows is off by more than rounding explains (float32):
        row (5,): ... times the bound, ... ULP in column ...: got ..., exact is ..., the bound is ...
    ...
    """
    for name in _STORED:
        if name in options:
            raise TypeError(f"{name} does not change the result: leave it out")
    got = _array(out, "out")
    arrays = {name: _array(a, name) for name, a in (("query", query), ("key", key), ("value", value))}
    options = {name: _untorched(option) for name, option in options.items()}
    if got.dtype.name not in _FORMATS:
        raise TypeError(f"out must be {', '.join(_FORMATS)}, got {got.dtype}")
    # The library's own call checks all arguments, and its errors name them.
    attend: Any = scaled_dot_product_attention
    checked = attend(**arrays, **options, return_dropout_mask=options.get("dropout_p", 0) != 0)
    mask = checked.dropout_mask if isinstance(checked, AttentionOutput) else None
    exact = _exact(arrays, options, mask)
    right = exact.out[..., 0, :, :] if exact.one_head else exact.out
    if got.shape != right.shape:
        raise AssertionError(f"out has shape {got.shape}, wanted {right.shape}")

    bound = _bound_of(exact, got, arrays["query"].dtype, compute_dtype, weights_dtype)
    _compare(got, right, bound[..., 0, :, :] if exact.one_head else bound)


def first_beyond_bound(got: NDArray[Any], arrays: dict[str, NDArray[Any]], options: dict[str, Any]) -> str:
    """Return the first number that is off by more than rounding explains, as a text, or ""; of rows that see a key.

    There is no dropout, and the arrays have an axis of heads.
    """
    exact = _exact(arrays, options, None)
    ratio, _, _ = _errors(got, exact.out, _bound_of(exact, got, arrays["query"].dtype))
    wrong = np.argwhere((ratio > 1) & exact.visible.any(axis=-1, keepdims=True))
    if not len(wrong):
        return ""
    at = tuple(wrong[0].tolist())
    return f"{len(wrong)} of {got.size} numbers, first at {at}: {got[at]}, exact is {exact.out[at]:.9g}"


def _bound_of(
    exact: _Exact, got: NDArray[Any], query: DTypeLike, compute_dtype: Any = None, weights_dtype: Any = None
) -> Floats:
    wide = got.dtype == np.float64 and query == np.float64
    compute = _format(compute_dtype, "compute_dtype", "float64" if wide else "float32")
    weights = _format(weights_dtype, "weights_dtype", got.dtype.name)
    return _bound(exact, compute, weights, got.dtype.name) + _bound(exact, "float64", "float64", "float64")


def _array(given: Any, name: str) -> NDArray[Any]:
    return read_array(_untorched(given), name)


def _untorched(given: Any) -> Any:
    """Return a tensor without its gradient and on the CPU, and anything else as it is."""
    return given.detach().cpu() if hasattr(given, "detach") and hasattr(given, "cpu") else given


def _format(given: Any, name: str, default: str) -> str:
    """Return the name of a floating dtype."""
    if given is None:
        return default
    found = str(given).removeprefix("torch.") if "torch" in str(type(given)) else np.dtype(given).name
    if found not in _FORMATS:
        raise TypeError(f"{name} must be one of {', '.join(_FORMATS)}, got {found}")
    return found


def _exact(arrays: dict[str, NDArray[Any]], options: dict[str, Any], mask: NDArray[Any] | None) -> _Exact:
    p = float(options.get("dropout_p", 0.0))
    kept_options = {name: a for name, a in options.items() if name not in ("dropout_p", "rng", "sinks")}
    given = (arrays["query"], arrays["key"], arrays["value"])
    with np.errstate(all="ignore"):
        problem = score(given, **kept_options)
        sinks = options.get("sinks")
        weights, lse = normalize(problem.scores, problem.visible, sinks)
        key = np.abs(problem.key).swapaxes(-1, -2)
        size = problem.of_listed_keys(np.abs(problem.query * problem.scale) @ key)
        scores = np.where(problem.visible, problem.scores, 0.0)
        capped = np.where(problem.visible, problem.capped, 0.0)
        # Slopes and additive masks are the difference between these; each addition rounds at most their sum.
        of_tanh = _EXP / 4 if options.get("softcap") else 1.0
        rest = of_tanh * np.abs(capped) + np.abs(scores - capped) + np.abs(scores)
        top = np.max(problem.scores, axis=-1, keepdims=True, initial=-np.inf, where=problem.visible)
        sink_score = np.asarray(-np.inf if sinks is None else sinks, np.float64)[..., None, None]
        top = np.maximum(top, sink_score)
        top = np.where(np.isfinite(top), top, 0.0)
        below = np.where(problem.visible, top - problem.scores, 0.0)
        sink_score = np.broadcast_to(sink_score, top.shape)
        sink = np.where(sink_score > -np.inf, np.exp(sink_score - lse[..., None]), 0.0)
        sink_below = np.where(sink_score > -np.inf, top - sink_score, 0.0)
    kept = None
    if p > 0 and mask is not None:
        kept = (np.expand_dims(mask, -3) if problem.one_head else mask) / (1 - p if p < 1 else 1)
    dropped = weights if kept is None else weights * kept
    out = _sum(problem.of_all_keys(dropped), problem.value, problem.of_all_keys(problem.visible))
    value = problem.value if problem.indices is None else _gathered(problem.value, problem.indices)
    return _Exact(
        out, problem.visible, weights, sink, value, kept, size, rest, below, sink_below, problem.query.shape[-1],
        problem.one_head,
    )  # fmt: skip


def _gathered(value: Floats, indices: NDArray[np.int64]) -> Floats:
    """Return the values of the listed keys, (..., T_q, n, D_v), 0 where there is none."""
    padded = np.concatenate([value, np.zeros((*value.shape[:-2], 1, value.shape[-1]))], axis=-2)
    return np.take_along_axis(padded[..., None, :, :], indices[..., None], axis=-2)


def _sum(weights: Floats, value: Floats, visible: NDArray[np.bool_]) -> Floats:
    """Multiply weights by values without the values that a row does not see."""
    finite = np.isfinite(value)
    total: Floats = weights @ np.where(finite, value, 0.0)
    with np.errstate(all="ignore"):
        for j in np.flatnonzero(~finite.all(axis=(*range(value.ndim - 2), -1))):
            row = np.where(finite, 0.0, value)[..., j, None, :]
            total += np.where(visible[..., j, None], weights[..., j, None] * row, 0.0)
    return total


def _gamma(n: int, u: float) -> float:
    """Return the bound on the relative error of n operations, Higham's gamma; infinite where it says nothing."""
    return n * u / (1 - n * u) if n * u < 1 else np.inf


def _bound(exact: _Exact, compute: str, weights: str, stored: str) -> Floats:
    """Return the bound of the docstring for every element of the output."""
    bits, least = _FORMATS[compute]
    u = 2.0**-bits
    weight_bits, weight_least = _FORMATS[weights]
    u_weights = 2.0**-weight_bits if weight_bits < bits else 0.0
    u_out = 2.0 ** -_FORMATS[stored][0] if _FORMATS[stored][0] < bits else 0.0
    T_k = exact.visible.shape[-1]
    with np.errstate(all="ignore"):
        epsilon = _gamma(exact.head_dim + 3, u) * exact.size + 4 * u * exact.rest + u * exact.below + _EXP * u
        epsilon = np.where(exact.visible & np.isfinite(epsilon), epsilon, 0.0)
        sink_epsilon = u * exact.sink_below + _EXP * u
        higher = 1 + 2 * np.maximum(epsilon.max(axis=-1, keepdims=True, initial=0.0), sink_epsilon)
        value = np.where(np.isfinite(exact.value), exact.value, 0.0)
        size = np.zeros(exact.out.shape)
        moved, rounded = size.copy(), size.copy()
        hidden_sum = size.copy()
        for j in range(T_k):  # a key at a time: the differences of all keys and rows would be T_q x T_k x D_v
            row = value[..., j, :] if value.ndim > exact.visible.ndim else value[..., j, None, :]
            seen = exact.visible[..., j, None]
            factor = 1.0 if exact.kept is None else exact.kept[..., j, None]
            term = np.where(seen, factor * row, 0.0)
            w = exact.weights[..., j, None]
            moved += w * epsilon[..., j, None] * np.abs(term - exact.out)
            rounded += w * np.abs(term - exact.out)
            size += w * np.abs(term)
            hidden_sum += np.abs(term)
        moved += exact.sink * sink_epsilon * np.abs(exact.out)
        size_out = np.abs(exact.out)
        bound = moved + _gamma(T_k + 3, u) * (size + size_out) + 3 * u * size_out
        bound += (u_weights * (rounded + size)) + 2.0**weight_least * hidden_sum + 2.0**least * T_k
        bound = bound * higher + u_out * size_out * higher + 2.0 ** _FORMATS[stored][1]
        # Weights below the smallest normal number may be 0.
        return np.asarray(bound + 2.0 ** (least + bits) * hidden_sum)


def _compare(got: NDArray[Any], exact: Floats, bound: Floats) -> None:
    """Raise the AssertionError that lists the rows beyond the bound."""
    ratio, error, ulp = _errors(got, exact, bound)
    wide = got.astype(np.float64)
    worst = ratio.max(axis=-1, initial=0.0)
    wrong = np.argwhere(worst > 1)
    if not len(wrong):
        return
    wrong = wrong[np.argsort(-worst[tuple(wrong.T)], kind="stable")]
    verb = "rows are" if len(wrong) > 1 else "row is"
    lines = [f"{len(wrong)} of {worst.size} rows {verb.split()[-1]} off by more than rounding explains ({got.dtype}):"]
    for index in wrong[:_SHOWN].tolist():
        row = tuple(index)
        column = int(np.argmax(ratio[row]))
        at = (*row, column)
        lines.append(
            f"    row {row}: {ratio[at]:.5g} times the bound, {error[at] / ulp[at]:.4g} ULP in column {column}: "
            f"got {wide[at]:.9g}, exact is {exact[at]:.9g}, the bound is {bound[at]:.2g}"
        )
    if len(wrong) > _SHOWN:
        lines.append(f"    and {len(wrong) - _SHOWN} more rows")
    rest = worst[worst <= 1]
    if rest.size:
        lines.append(f"    all other rows are within {rest.max():.2g} of the bound")
    raise AssertionError("\n".join(lines))


def _errors(got: NDArray[Any], exact: Floats, bound: Floats) -> tuple[Floats, Floats, Floats]:
    """Return each error as a multiple of the bound, the error, and the unit in the last place."""
    bits, least = _FORMATS[got.dtype.name]
    wide = got.astype(np.float64)
    with np.errstate(all="ignore"):
        error = np.abs(wide - exact)
        same = (wide == exact) | (np.isnan(wide) & np.isnan(exact))
        error = np.where(same, 0.0, np.where(np.isfinite(error), error, np.inf))
        ratio = np.where(error == 0, 0.0, np.where(np.isinf(error), np.inf, error / bound))
        exponent = np.floor(np.log2(np.maximum(np.abs(exact), 2.0**-1022)))
        ulp = np.maximum(2.0 ** np.maximum(exponent - bits + 1, -1074), 2.0**least)
    return ratio, error, ulp
