"""The vectors: problems whose inputs come from a generator of integers, and the bits of their results.

`vectors.json` beside this file says how to read it; readers in other languages need nothing of this module.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

FILE = Path(__file__).with_name("vectors.json")
MULTIPLIER, INCREMENT = 1664525, 1013904223


@functools.cache
def read() -> dict[str, Any]:
    """Return the file."""
    found: dict[str, Any] = json.loads(FILE.read_text("utf-8"))
    return found


def draw(kind: str, seed: int, shape: Sequence[int], dtype: Any = np.float64) -> NDArray[Any]:
    """Return an array of the generator, as the file describes it."""
    count, first, unit, own = read()["draws"][kind]
    powers = np.full(int(np.prod(shape)) + 1, MULTIPLIER, np.uint32)
    powers[0] = 1
    np.multiply.accumulate(powers, out=powers)  # modulo 2^32, as the sums
    states: Any = powers[1:] * np.uint32(seed) + np.uint32(INCREMENT) * np.add.accumulate(powers[:-1], dtype=np.uint32)
    integers = ((states >> np.uint32(16)).astype(np.int64) * count >> 16) + first
    return np.asarray(integers * unit).reshape(shape).astype(dtype if own == "any" else own)


def arguments(vector: dict[str, Any], dtype: str) -> dict[str, Any]:
    """Return the arguments of a vector's function: its arrays and its options, of which lists become arrays, too."""
    lists = {name: x for name, x in vector["options"].items() if isinstance(x, list)}
    arrays = {name: tuple(x) if name == "window_size" else np.asarray(x) for name, x in lists.items()}
    drawn = {name: draw(kind, seed, shape, dtype) for name, (kind, seed, shape) in vector["arrays"].items()}
    return {**drawn, **vector["options"], **arrays}


def in_hex(array: NDArray[Any]) -> str:
    """Return the bits of all numbers as hexadecimal digits, the most significant first."""
    return np.ascontiguousarray(array, array.dtype.newbyteorder(">")).tobytes().hex()


def stored(digits: str) -> str:
    """Return what the file keeps of these digits: all of them, or a digest if they are many."""
    return digits if len(digits) <= 400 else "sha256 " + hashlib.sha256(bytes.fromhex(digits)).hexdigest()
