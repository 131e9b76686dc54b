"""The meaning of the argument ``rng``: a seed for functions, a generator for classes."""

from __future__ import annotations

import copy
import operator
import sys
from typing import TYPE_CHECKING, Any, SupportsIndex, TypeAlias

import numpy as np

from .. import _cattn
from ..random import TorchGenerator, default_generator

if TYPE_CHECKING:
    from .types import RNG

# A string, because the attribute access would import numpy.random, which is slow.
GeneratorOrNone: TypeAlias = "TorchGenerator | np.random.Generator | None"


def _numpy_generator(rng: Any, accepted: str) -> np.random.Generator:
    # NumPy recurses without end into the rows of a numpy.matrix, so pass an exact ndarray.
    torch: Any = sys.modules.get("torch")  # not imported: there are no generators of PyTorch
    if torch is not None and isinstance(rng, torch.Generator):
        raise TypeError(
            f"rng must be {accepted}, got a torch.Generator: pass cattn.TorchGenerator({rng.initial_seed()}), which "
            f"draws the same numbers"
        )
    if rng is np.random:
        raise TypeError(f"rng must be {accepted}, got the module numpy.random: pass numpy.random.default_rng()")
    exact = np.asarray(rng) if isinstance(rng, np.ndarray) else rng
    # NumPy would read each byte as a number, and recurse without end into a list of itself.
    if isinstance(rng, (str, bytes, bytearray, memoryview)) or _is_deep(rng):
        raise TypeError(f"rng must be {accepted}, got {type(rng).__name__}")
    try:
        return np.random.default_rng(exact)
    except ValueError as error:
        raise ValueError(f"rng must be {accepted}: {error}") from error
    except (MemoryError, RecursionError):
        raise
    except Exception as error:  # of the object's own methods
        raise TypeError(f"rng must be {accepted}: {error}") from error


def _is_deep(obj: object, levels: int = 4) -> bool:
    """Return whether lists are nested more than so many levels."""
    return isinstance(obj, (list, tuple)) and (levels == 0 or any(_is_deep(item, levels - 1) for item in obj))


def draw_seed(rng: Any) -> int:
    """Return the 64-bit seed of one call: an int is the seed itself, a generator draws one."""
    try:
        return operator.index(rng)
    except (MemoryError, RecursionError):
        raise
    except Exception:
        accepted = "None, an int, a cattn.TorchGenerator, or what numpy.random.default_rng takes"
        return int(_numpy_generator(rng, accepted).integers(0, 2**64, dtype=np.uint64))


def as_generator(rng: RNG) -> GeneratorOrNone:
    """Return the generator of a class. None stays None: each use draws from the generator of `manual_seed`."""
    if rng is None or isinstance(rng, TorchGenerator):
        return rng
    accepted = "None, an int, a TorchGenerator or a numpy.random.Generator"
    if isinstance(rng, (bool, np.bool_)):
        raise TypeError(f"rng must be {accepted}, got bool")
    if isinstance(rng, SupportsIndex) and getattr(rng, "ndim", 0) == 0:
        try:
            seed = operator.index(rng)
        except (MemoryError, RecursionError):
            raise
        except Exception:
            pass
        else:
            if not -(2**63) <= seed < 2**64:
                raise ValueError(f"rng must be in -2**63 <= rng < 2**64 if it is an int, got {_cattn._shown(seed)}")
            return TorchGenerator(seed)
    return _numpy_generator(rng, accepted)


def generator_or_default(generator: GeneratorOrNone) -> TorchGenerator | np.random.Generator:
    """Return the generator to draw from now."""
    return default_generator() if generator is None else generator


def to_replay(generator: GeneratorOrNone) -> GeneratorOrNone:
    """Return a copy, which repeats the next draws of the generator."""
    return copy.deepcopy(generator)
