"""Arrays from .npy, .npz and .safetensors files; results written beside their target and renamed into place."""

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cattn.nn._files import open_safetensors, safetensors_package, save_arrays, temporary_beside, told_as

Array = NDArray[Any]
ARCHIVES = (".npz", ".safetensors")


class InputError(Exception):
    """What the user gave cannot be used: exit code 2."""


def load(spec: str, name: str) -> Array:
    """Return the array that `spec` points to: ``file.npy``, ``file.npz:name``, or the member `name` of ``file.npz``.

    ``.safetensors`` files are like ``.npz``. An array of a .npy file is memory-mapped, read-only. Nothing is ever
    unpickled.
    """
    file, member = _split(spec)
    if _kind(file) in ARCHIVES:
        return load_members(file, [name if member is None else member])[0]
    if member is not None:
        raise InputError(f"{file} is a single array, so {spec!r} cannot name one in it")
    try:
        return np.asarray(np.load(file, mmap_mode="r", allow_pickle=False))
    except Exception as error:  # whatever NumPy's parser of headers makes of damage
        raise InputError(f"{file} {_what_is_wrong(error)}") from error


def load_members(file: Path, names: Sequence[str]) -> list[Array]:
    """Read the named arrays of a .npz or .safetensors file."""
    kind = _kind(file)
    if kind not in ARCHIVES:
        raise InputError(
            f"{file} is a single array; give query, key and value, or a .npz or .safetensors file that holds all three"
        )
    try:
        with open_safetensors(file) if kind == ".safetensors" else _open_npz(file) as (present, read):
            missing = [name for name in names if name not in present]
            if not missing:
                return [read(name) for name in names]
    except (ImportError, ValueError) as error:
        raise InputError(str(error)) from error
    raise InputError(f"{file} has no array {', '.join(missing)}; it has {', '.join(present) or 'none'}")


@contextlib.contextmanager
def _open_npz(file: Path) -> Iterator[tuple[list[str], Callable[[str], Array]]]:
    """Give the names of a file's arrays, and the function that reads one of them."""
    try:
        with open(file, "rb") as stream, np.load(stream, allow_pickle=False) as archive:
            yield list(archive.files), archive.__getitem__
    except MemoryError:
        raise
    except Exception as error:  # no list of what NumPy, zipfile and tokenize raise for a damaged file is complete
        raise InputError(f"{file} {_what_is_wrong(error)}") from error


def _split(spec: str) -> tuple[Path, str | None]:
    """Take ``file.npz:name`` apart."""
    for suffix in ARCHIVES:
        stem, colon, member = spec.rpartition(f"{suffix}:")
        if colon:
            return Path(stem + suffix), member
    return Path(spec), None


def _kind(file: Path) -> str:
    """Tell files apart by content; anything else is refused."""
    try:
        with open(file, "rb") as stream:
            start = stream.read(9)
    except OSError as error:
        raise InputError(f"{file}: {error.strerror or error}") from error
    if start.startswith(b"\x93NUMPY"):
        return ".npy"
    if start.startswith((b"PK\x03\x04", b"PK\x05\x06")):
        return ".npz"
    if start[8:] == b"{":  # behind the header's length
        return ".safetensors"
    raise InputError(f"{file} is neither a .npy nor a .npz nor a .safetensors file")


def _what_is_wrong(error: Exception) -> str:
    text = str(error)
    if "allow_pickle" in text or "Python objects" in text:
        return "holds Python objects, which only unpickling could read; cattn never does that"
    return f"is truncated or damaged ({text or type(error).__name__})"


class Output:
    """A result on its way to `target`: an array in a temporary file beside it, which `commit` renames.

    Used as a context manager, it leaves nothing behind unless `commit` was called. The array is memory-mapped, so a
    large result needs no memory of its own.
    """

    def __init__(self, target: str, name: str) -> None:
        self.target = Path(os.path.realpath(target))  # a link stays a link, its file is replaced
        self.name = name
        self.array: Array | None = None
        if self.target.suffix not in (".npy", *ARCHIVES):
            raise InputError(f"{target}: output files end in .npy, .npz or .safetensors")
        if self.target.is_dir() or not self.target.parent.is_dir():
            raise InputError(f"{target}: there is no such directory, or the name is a directory's")
        if self.target.suffix == ".safetensors":
            try:
                safetensors_package()
            except ImportError as error:
                raise InputError(str(error)) from error
        self._temporary = temporary_beside(self.target)

    def allocate(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Create the temporary file and return its array, to be filled in."""
        self._dtype = dtype
        if np.dtype(dtype.str) != dtype and self.target.suffix != ".safetensors":
            raise InputError(f"{self.target}: {self.target.suffix} files cannot hold {dtype}, .safetensors files can")
        with told_as(self._temporary, self.target):
            return self._allocate(shape)

    def _allocate(self, shape: tuple[int, ...]) -> Array:
        if 0 in shape:  # nothing to map
            self.array = np.empty(shape, self._dtype)
            with open(self._temporary, "wb") as stream:
                np.lib.format.write_array(stream, self.array)
            return self.array
        mapped = np.lib.format.open_memmap(self._temporary, mode="w+", dtype=self._dtype, shape=shape)
        if hasattr(os, "posix_fallocate"):  # a full disk is an error now, not a bus error later
            with open(self._temporary, "r+b") as stream:
                os.posix_fallocate(stream.fileno(), 0, os.path.getsize(self._temporary))
        self.array = np.asarray(mapped)
        self._flush = mapped.flush
        return self.array

    def commit(self) -> None:
        """Put the finished file in its place, at once."""
        if self.array is not None and self.array.size:
            self._flush()
            del self._flush
        self.array = None
        if self.target.suffix in ARCHIVES:
            save_arrays(self.target, {self.name: np.load(self._temporary, mmap_mode="r").view(self._dtype)})
        else:
            with told_as(self._temporary, self.target):
                os.replace(self._temporary, self.target)

    def __enter__(self) -> "Output":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._temporary.unlink(missing_ok=True)
