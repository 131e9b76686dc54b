"""Arrays from .npy and .npz files, and results written beside their target and renamed into place."""

import os
import secrets
import zipfile
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


class InputError(Exception):
    """What the user gave cannot be used: exit code 2."""


def load(spec: str, name: str) -> Array:
    """Return the array that `spec` points to: ``file.npy``, ``file.npz:name``, or the member `name` of ``file.npz``.

    An array of a .npy file is memory-mapped, read-only. Nothing is ever unpickled.
    """
    path, colon, member = spec.rpartition(".npz:")
    file = Path(path + ".npz" if colon else spec)
    if _is_zip(file):
        return load_members(file, [member if colon else name])[0]
    if colon:
        raise InputError(f"{file} is a single array, so {spec!r} cannot name one in it")
    try:
        return np.asarray(np.load(file, mmap_mode="r", allow_pickle=False))
    except Exception as error:  # whatever NumPy's parser of headers makes of damage
        raise InputError(f"{file} {_what_is_wrong(error)}") from error


def load_members(file: Path, names: Sequence[str]) -> list[Array]:
    """Read the named arrays of a .npz file."""
    if not _is_zip(file):
        raise InputError(f"{file} is a single array; give query, key and value, or a .npz file that holds all three")
    try:
        with open(file, "rb") as stream, np.load(stream, allow_pickle=False) as archive:
            present = list(archive.files)
            missing = [name for name in names if name not in present]
            if not missing:
                return [archive[name] for name in names]
    except MemoryError:
        raise
    except Exception as error:  # no list of what NumPy, zipfile and tokenize raise for a damaged file is complete
        raise InputError(f"{file} {_what_is_wrong(error)}") from error
    raise InputError(f"{file} has no array {', '.join(missing)}; it has {', '.join(present) or 'none'}")


def _is_zip(file: Path) -> bool:
    """Tell .npz from .npy by content; anything else is refused."""
    try:
        with open(file, "rb") as stream:
            start = stream.read(6)
    except OSError as error:
        raise InputError(f"{file}: {error.strerror or error}") from error
    if start == b"\x93NUMPY":
        return False
    if start[:4] in (b"PK\x03\x04", b"PK\x05\x06"):
        return True
    raise InputError(f"{file} is neither a .npy nor a .npz file")


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
        if self.target.suffix not in (".npy", ".npz"):
            raise InputError(f"{target}: output files end in .npy or .npz")
        if self.target.is_dir() or not self.target.parent.is_dir():
            raise InputError(f"{target}: there is no such directory, or the name is a directory's")
        unique = secrets.token_hex(4)
        self._temporary = self.target.with_name(f".{self.target.name}.{unique}.npy.part")
        self._archive = self.target.with_name(f".{self.target.name}.{unique}.npz.part")

    def allocate(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Create the temporary file and return its array, to be filled in."""
        if 0 in shape:  # nothing to map
            self.array = np.empty(shape, dtype)
            with open(self._temporary, "wb") as stream:
                np.lib.format.write_array(stream, self.array)
            return self.array
        mapped = np.lib.format.open_memmap(self._temporary, mode="w+", dtype=dtype, shape=shape)
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
        finished = self._temporary
        if self.target.suffix == ".npz":
            with zipfile.ZipFile(self._archive, "w", zipfile.ZIP_STORED) as archive:
                archive.write(self._temporary, f"{self.name}.npy")
            finished = self._archive
        os.replace(finished, self.target)

    def __enter__(self) -> "Output":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for leftover in (self._temporary, self._archive):
            leftover.unlink(missing_ok=True)
