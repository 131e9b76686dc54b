"""The arithmetic of products of bfloat16, one exact number at a time."""

from fractions import Fraction

import ml_dtypes
import numpy as np

BF16 = np.dtype(ml_dtypes.bfloat16)
WORDS = ("bfloat16", "bfloat16_tiles")  # of compute_dtype


def fma(a: float, b: float, c: float) -> float:
    """Return c + a * b, rounded once to float32; 0 if it is below 2**-126 after rounding to 24 bits."""
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    if exact == 0:
        return 0.0
    if abs(exact) < Fraction(2) ** -126 - Fraction(2) ** -151:
        return 0.0
    near = np.float32(float(exact))  # may have been rounded twice
    around = [np.nextafter(near, np.float32(-np.inf)), near, np.nextafter(near, np.float32(np.inf))]
    least = min(abs(Fraction(float(x)) - exact) for x in around)
    nearest = [x for x in around if abs(Fraction(float(x)) - exact) == least]
    return float(next(x for x in nearest if len(nearest) == 1 or int(x.view(np.uint32)) % 2 == 0))


def add(a: float, b: float) -> float:
    """Return a + b as fma has it."""
    return fma(a, 1.0, b)


def product(a: np.ndarray, b: np.ndarray, word: str) -> float:
    """Return the sum of products of two rows of bfloat16, by pairs or by tiles."""
    return sum_of_pairs(a, b) if word == "bfloat16" else sum_of_groups(a, b)


def sum_of_groups(a: np.ndarray, b: np.ndarray) -> float:
    """Add groups of 32 terms: in each, a chain of the first 16 terms and a chain of the others."""
    total = 0.0
    for start in range(0, len(a), 32):
        chains = [0.0, 0.0]
        for i in range(start, min(start + 32, len(a))):
            half = (i - start) // 16
            chains[half] = fma(float(a[i]), float(b[i]), chains[half])
        total = add(total, add(*chains))
    return total


def sum_of_pairs(a: np.ndarray, b: np.ndarray) -> float:
    """Add pairs of elements: of each, the second one comes first."""
    total = 0.0
    for left, right in zip(pairs(a), pairs(b), strict=True):
        total = fma(left[0], right[0], fma(left[1], right[1], total))
    return total


def pairs(row: np.ndarray) -> np.ndarray:
    """Return the pairs of a row, the last one filled up with 0."""
    return np.append(row, [0.0] * (len(row) % 2)).reshape(-1, 2)


def flushed(a: np.ndarray) -> np.ndarray:
    return np.where(np.abs(a) < np.finfo(np.float32).tiny, 0.0, a)
