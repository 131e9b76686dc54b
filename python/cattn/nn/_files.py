"""Arrays in .npz and .safetensors files, written beside their target and renamed into place."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
FilePath = str | os.PathLike[str]

_SUFFIXES = (".npz", ".safetensors")


def _suffix(path: Path) -> str:
    if path.suffix not in _SUFFIXES:
        raise ValueError(f"{path}: files of weights end in {' or '.join(_SUFFIXES)}")
    return path.suffix


def safetensors_package() -> Any:
    """Import safetensors, or say how to get it."""
    try:
        import safetensors.numpy
    except ImportError as error:
        raise ImportError(
            ".safetensors files need the package safetensors: pip install 'cattn[safetensors]'"
        ) from error
    with contextlib.suppress(ImportError):
        import ml_dtypes  # noqa: F401 # from then on NumPy knows bfloat16 by name
    return safetensors


def temporary_beside(target: Path) -> Path:
    """Return the name of a file that is not there, short enough wherever the target's is."""
    return target.with_name(f".cattn-{secrets.token_hex(8)}.part")


@contextlib.contextmanager
def told_as(temporary: Path, target: Path) -> Iterator[None]:
    """Name the target in errors about the temporary file, which the caller has never seen."""
    try:
        yield
    except OSError as error:
        if error.filename != str(temporary):
            raise
        raise OSError(error.errno, error.strerror, str(target)) from error


def save_arrays(path: FilePath, arrays: Mapping[str, Array]) -> None:
    """Write arrays to path; an existing file is replaced when the new one is complete, and not before."""
    target = Path(os.path.realpath(path))  # a link stays a link, its file is replaced
    suffix = _suffix(target)
    arrays = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    temporary = temporary_beside(target)
    try:
        with told_as(temporary, target):
            with open(temporary, "xb") as stream:
                if suffix == ".npz":
                    np.savez(stream, **arrays)  # type: ignore[arg-type] # its stubs take a name for allow_pickle
                else:  # bytes, because save_file would make a file that only its owner may read
                    stream.write(safetensors_package().numpy.save(arrays))
            os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


def load_arrays(path: FilePath) -> dict[str, Array]:
    """Read all arrays of a file. Nothing is ever unpickled."""
    source = Path(path)
    if _suffix(source) == ".safetensors":
        with open_safetensors(source) as (names, read):
            return {name: read(name) for name in names}
    with open(source, "rb") as stream:
        try:
            with np.load(stream, allow_pickle=False) as archive:
                return {name: archive[name] for name in archive.files}
        except MemoryError:
            raise
        except Exception as error:  # no list of what NumPy, zipfile and tokenize raise for a damaged file is complete
            pickled = "allow_pickle" in str(error)  # how to unpickle it is no advice
            reason = "cattn reads arrays of numbers and never unpickles" if pickled else error
            raise ValueError(f"{source} is no .npz file of numbers, or damaged: {reason}") from error


@contextlib.contextmanager
def open_safetensors(source: Path) -> Iterator[tuple[list[str], Callable[[str], Array]]]:
    """Give the names of a file's arrays, and the function that reads one of them."""
    package = safetensors_package()
    with open(source, "rb"):  # a missing file is Python's own error, with the name in it
        pass

    def read(name: str) -> Array:
        try:
            array: Array = archive.get_tensor(name)
        except (AttributeError, TypeError) as error:
            dtype = archive.get_slice(name).get_dtype()
            raise ValueError(
                f"{source}: {name} is of type {dtype}, which NumPy does not have (bfloat16: pip install 'cattn[bf16]')"
            ) from error
        return array

    try:
        archive = package.safe_open(source, framework="np")
    except Exception as error:  # the package's own exception type moved between its versions
        raise ValueError(f"{source} is no .safetensors file, or damaged: {error}") from error
    with archive:
        yield list(archive.keys()), read
