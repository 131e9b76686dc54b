"""The exact values, and the errors of a result.

The oracle is the textbook's formula in a wider type. For float64 that is NumPy's long double, with 64 bits of
significand on x86 and 113 elsewhere: its errors are at least 2048 times smaller than in float64.
For float32 and halves, float64 is wide enough to add up matrix products. `check` compares long double with mpmath in
60 digits.

Errors have two units. ULP is the spacing of the dtype at the exact value (below the normal numbers, the spacing of the
subnormals). It suits functions and sums of positive numbers. The terms of attention's outputs and gradients cancel: a
sum may be a thousand times smaller than its terms, and its error in ULP would measure the cancellation, not the
computation. There the unit is eps times the RMS of the whole result.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
WIDE = np.longdouble


def wide(dtype: Any) -> Any:
    """Return the type in which the oracle adds products up. For float32 and halves, float64 errs 5e8 times less."""
    return WIDE if np.dtype(dtype) == np.float64 else np.float64


def limits(dtype: Any) -> Any:
    """Return finfo of any floating dtype."""
    if np.dtype(dtype).name == "bfloat16":
        import ml_dtypes

        return ml_dtypes.finfo(dtype)
    return np.finfo(dtype)


def spacing(exact: Array, dtype: Any) -> Array:
    """Return the size of a unit in the last place of `dtype` at exact values."""
    info = limits(dtype)
    exponent = np.frexp(exact)[1] - 1
    return np.ldexp(exact.dtype.type(1), np.maximum(exponent, int(info.minexp)) - int(info.nmant))


@dataclass
class Errors:
    """Errors of one quantity over several inputs. Elements that are 0 in both results do not count."""

    dtype: Any
    count: int = 0
    lost: int = 0  # elements that are NaN or infinite although the exact value is a number of the dtype
    ulp_squares: float = 0.0
    ulp_largest: float = 0.0
    squares: np.longdouble = field(default_factory=WIDE)
    largest: np.longdouble = field(default_factory=WIDE)
    exact_squares: np.longdouble = field(default_factory=WIDE)

    def add(self, actual: Any, exact: Array) -> Errors:
        """Add a result."""
        actual = np.asarray(actual).astype(exact.dtype)
        assert actual.shape == exact.shape
        counts = (actual != 0) | (exact != 0)
        finite = np.isfinite(actual)
        self.lost += int((~finite).sum())
        actual, exact = actual[counts & finite], exact[counts & finite]
        if exact.size:
            error = np.abs(actual - exact)
            ulps = error / spacing(exact, self.dtype)
            self.count += error.size
            self.ulp_squares += float(np.square(ulps).sum())
            self.ulp_largest = max(self.ulp_largest, float(ulps.max()))
            self.squares += np.square(error).sum()
            self.largest = max(self.largest, error.max())
            self.exact_squares += np.square(exact).sum()
        return self

    def summary(self) -> dict[str, float]:
        """Return the RMS and the largest error, in ULP and in eps times the RMS of the exact values."""
        count = max(self.count, 1)
        unit = WIDE(limits(self.dtype).eps) * np.sqrt(self.exact_squares / count)
        rms = np.sqrt(self.squares / count)
        return {
            "ulp_rms": float(np.sqrt(self.ulp_squares / count)),
            "ulp_largest": self.ulp_largest,
            "rms": float(rms / unit) if unit else float(rms > 0),
            "largest": float(self.largest / unit) if unit else float(rms > 0),
            "lost": self.lost,
        }


# ---- the textbook's formulas: in the inputs' dtype a contestant (NumPy), in long double the oracle -------------------
def softmax(x: Array, hidden: Array | None = None) -> Array:
    """Return the softmax over the last axis."""
    if hidden is not None:
        x = np.where(hidden, x.dtype.type(-np.inf), x)
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def softmax_backward(grad: Array, weights: Array) -> Array:
    """Return the gradient of the scores."""
    return weights * (grad - (weights * grad).sum(axis=-1, keepdims=True))


def attention(
    query: Array, key: Array, value: Array, grad_out: Array, bias: Array | None = None, *,
    causal: bool = False, softcap: float | None = None,
) -> dict[str, Array]:  # fmt: skip
    """Return attention with all its gradients."""
    kind = query.dtype.type
    # 1/sqrt in the widest type: the contestant rounds it once, the oracle does not.
    scale = kind(1 / np.sqrt(WIDE(query.shape[-1])))
    scores = (query @ key.swapaxes(-1, -2)) * scale
    if softcap:
        bent = np.tanh(scores / kind(softcap))
        scores = bent * kind(softcap)
    if bias is not None:
        scores = scores + bias
    if causal:
        scores = np.where(np.tri(*scores.shape[-2:], dtype=bool), scores, kind(-np.inf))
    row_max = scores.max(axis=-1, keepdims=True)
    e = np.exp(scores - row_max)
    total = e.sum(axis=-1, keepdims=True)
    weights = e / total
    grad_scores = softmax_backward(grad_out @ value.swapaxes(-1, -2), weights)
    grad_bias = grad_scores
    if softcap:
        grad_scores = grad_scores * (1 - bent * bent)
    return {
        "out": weights @ value,
        "weights": weights,
        "lse": (row_max + np.log(total))[..., 0],
        "dQ": (grad_scores @ key) * scale,
        "dK": (grad_scores.swapaxes(-1, -2) @ query) * scale,
        "dV": weights.swapaxes(-1, -2) @ grad_out,
    } | ({} if bias is None else {"dbias": grad_bias})


# ---- the oracle's own error ----------------------------------------------------------------------------------------
def check(tokens: int = 12, head_dim: int = 8) -> dict[str, float]:
    """Return the oracle's largest errors against mpmath in 60 digits; nothing if mpmath is not installed.

    Units: float64's eps times the RMS for attention and its gradients, ULP of float64 for exp and tanh.
    """
    try:
        import mpmath
    except ImportError:
        return {}
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal((tokens, head_dim)) for _ in range(4)]
    computed = attention(*(a.astype(WIDE) for a in arrays), causal=True)
    with mpmath.workdps(60):
        right = _attention_by_mpmath(mpmath, arrays)
        found = {name: Errors(np.float64) for name in right}
        for name, exact in right.items():
            found[name].add(_difference(computed[name], exact), np.zeros(exact.shape, WIDE))
            found[name].exact_squares = np.square(computed[name]).sum()
        largest = {name: errors.summary()["largest"] for name, errors in found.items()}
        for name in ("exp", "tanh"):
            x = rng.uniform(-700, 0, 2000) if name == "exp" else np.exp(rng.uniform(-69, 3, 2000))
            y = getattr(np, name)(x.astype(WIDE))
            exact = np.array([getattr(mpmath, name)(mpmath.mpf(float(number))) for number in x])
            largest[name] = float((np.abs(_difference(y, exact)) / spacing(y, np.float64)).max())
    return largest


def _difference(computed: Array, exact: Array) -> Array:
    """Return computed - exact. A long double becomes the sum of two doubles, which mpmath can read."""
    import mpmath

    high = computed.astype(np.float64)
    low = (computed - high).astype(np.float64)
    apart = [mpmath.mpf(float(a)) + float(b) - c for a, b, c in zip(high.flat, low.flat, exact.flat, strict=True)]
    return np.array([float(a) for a in apart]).reshape(computed.shape)


def _attention_by_mpmath(mpmath: Any, arrays: list[Array]) -> dict[str, Array]:
    """Return causal attention of mpmath's numbers, in NumPy arrays of objects."""
    query, key, value, grad_out = (np.vectorize(lambda x: mpmath.mpf(float(x)), otypes=[object])(a) for a in arrays)
    exp, log = (np.vectorize(f, otypes=[object]) for f in (mpmath.exp, mpmath.log))
    visible = np.tri(len(query), dtype=bool)
    scale = 1 / mpmath.sqrt(query.shape[-1])
    e = np.where(visible, exp(query @ key.T * scale), mpmath.mpf(0))
    total = e.sum(axis=-1, keepdims=True)
    weights = e / total
    grad_scores = softmax_backward(grad_out @ value.T, weights)
    return {
        "out": weights @ value, "weights": weights, "lse": log(total)[:, 0], "dQ": grad_scores @ key * scale,
        "dK": grad_scores.T @ query * scale, "dV": weights.T @ grad_out,
    }  # fmt: skip
