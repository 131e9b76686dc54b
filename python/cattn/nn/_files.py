"""Arrays in .npz and .safetensors files, written next to their target and renamed into place."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
FilePath = str | os.PathLike[str]

_SUFFIXES = (".npz", ".safetensors")
_TEMPORARY = ".part"


def _suffix(path: Path) -> str:
    if path.suffix not in _SUFFIXES:
        raise ValueError(f"{path}: files of weights end in {' or '.join(_SUFFIXES)}")
    return path.suffix


def safetensors_package() -> Any:
    """Import safetensors. The error says how to install it."""
    try:
        import safetensors.numpy
    except ImportError as error:
        raise ImportError(
            ".safetensors files need the package safetensors: pip install 'cattn[safetensors]'"
        ) from error
    with contextlib.suppress(ImportError):
        import ml_dtypes  # noqa: F401 # its import registers the name "bfloat16" with NumPy
    return safetensors


def printable(text: str) -> str:
    """Return text without characters that a terminal obeys or cannot show: escapes of ESC, of line breaks and others.

    Names of arrays and of files come from strangers: they must not move the cursor, and not end a line of a log.
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


class LostDtypeError(ValueError):
    """An array in a file has no dtype, because NumPy's formats cannot name it."""


def loses_dtype(dtype: np.dtype[Any]) -> bool:
    """Return whether NumPy's formats keep only the bytes of a dtype, such as bfloat16."""
    return np.dtype(dtype.str) != dtype


def refuse_lost_dtype(array: Array, name: str) -> Array:
    """Return the array of a file, unless it was written with a dtype that NumPy's formats lose."""
    if array.dtype.kind == "V" and array.dtype.names is None:
        raise LostDtypeError(
            f"{printable(name)} holds elements of {array.dtype.itemsize} bytes without a dtype: .npy and .npz files "
            "lose bfloat16 and the other types of ml_dtypes. Write a .safetensors file, or convert to float32 first, "
            "quantized numbers with their scale"
        )
    return array


def temporary_beside(target: Path) -> Path:
    """Return an unused file name in the target's directory, short enough for every file system."""
    return target.with_name(f".cattn-{secrets.token_hex(8)}{_TEMPORARY}")


def new_temporary() -> Path:
    """Create a temporary file that only its owner reads, of a name that nobody can foretell."""
    handle, name = tempfile.mkstemp(prefix="cattn-", suffix=_TEMPORARY)
    os.close(handle)
    return Path(name)


def remove(temporary: Path) -> None:
    """Delete a temporary file if that is possible: Windows deletes none that is mapped."""
    with contextlib.suppress(OSError):
        temporary.unlink()


def followed(path: FilePath) -> Path:
    """Return the file that a link points to, which is replaced in place of the link.

    As Linux does for open(), refuse a link that another user has laid in a directory where everybody may write.
    """
    if os.path.islink(path) and hasattr(os, "geteuid"):
        folder = os.stat(os.path.dirname(os.path.abspath(path)))
        everybody = folder.st_mode & stat.S_ISVTX and folder.st_mode & stat.S_IWOTH
        if everybody and os.lstat(path).st_uid not in (os.geteuid(), folder.st_uid):
            raise PermissionError(errno.EACCES, "a link that another user has laid", str(path))
    return Path(os.path.realpath(path))


def create(temporary: Path, target: Path) -> None:
    """Create an empty file for what will replace the target. Until then only its owner reads what replaces a file."""
    mode = 0o600 if target.exists() else 0o666
    os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode))


def replace(temporary: Path, target: Path) -> None:
    """Put a complete file in the place of the target, with the target's owner, extended attributes and mode."""
    with contextlib.suppress(FileNotFoundError):
        former = os.stat(target)
        mode = stat.S_IMODE(former.st_mode)
        if hasattr(os, "chown"):
            own = os.stat(temporary)
            with contextlib.suppress(OSError):
                os.chown(temporary, -1, former.st_gid)
                own = os.stat(temporary)
            if own.st_gid != former.st_gid:  # the group is another one, which gets no more than everybody
                mode &= ~stat.S_IRWXG | (mode & stat.S_IRWXO) << 3
            with contextlib.suppress(OSError):
                os.chown(temporary, former.st_uid, -1)
        if hasattr(os, "listxattr"):
            with contextlib.suppress(OSError):
                for name in os.listxattr(target):
                    with contextlib.suppress(OSError):
                        os.setxattr(temporary, name, os.getxattr(target, name))
        if os.name != "nt":  # there it is one bit, read-only, which would only keep the temporary file
            os.chmod(temporary, mode)
    os.replace(temporary, target)


@contextlib.contextmanager
def errors_name(target: Path) -> Iterator[None]:
    """Make errors of the operating system name the target: the caller never sees the temporary file."""
    try:
        yield
    except OSError as error:
        names = [name for name in (error.filename, error.filename2) if name is not None]
        if names and not any(str(name).endswith(_TEMPORARY) for name in names):
            raise
        if error.errno is None:  # not of the operating system, but of a library that raises OSError
            raise OSError(f"{target}: {error}") from error
        raise OSError(error.errno, error.strerror or str(error), str(target)) from error


@contextlib.contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """Yield an empty file beside the target. It takes the target's place, or is removed if the block raises.

    A device or a pipe stays in its place and takes the contents.
    """
    special = target.exists() and not target.is_file() and not target.is_dir()
    temporary = None
    try:
        with errors_name(target):
            if special:
                temporary = new_temporary()
            else:
                create(temporary := temporary_beside(target), target)
            yield temporary
            if special:
                target.write_bytes(temporary.read_bytes())
            else:
                replace(temporary, target)
    finally:
        if temporary is not None:
            remove(temporary)


def write_arrays(stream: Any, suffix: str, arrays: Mapping[str, Array]) -> None:
    """Write arrays to an open file in the format of the suffix."""
    arrays = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    if suffix == ".npz":
        for name, array in arrays.items():
            if loses_dtype(array.dtype):
                raise ValueError(f"{printable(name)}: .npz files cannot hold {array.dtype}, .safetensors files can")
        np.savez(stream, **arrays)  # type: ignore[arg-type] # its stubs take a name for allow_pickle
    else:  # not save_file: it makes a file that only its owner may read
        stream.write(safetensors_package().numpy.save(arrays))


def save_arrays(path: FilePath, arrays: Mapping[str, Array]) -> None:
    """Write arrays to path. An existing file is replaced only when the new one is complete."""
    target = followed(path)
    suffix = _suffix(target)
    with replacing(target) as temporary, open(temporary, "wb") as stream:
        write_arrays(stream, suffix, arrays)


def load_arrays(path: FilePath) -> dict[str, Array]:
    """Read all arrays of a file. Nothing is ever unpickled."""
    source = Path(path)

    def explain(error: Exception) -> Exception:
        pickled = needs_pickle(error)  # NumPy's text says how to unpickle it, which is no advice
        reason = "cattn reads arrays of numbers and never unpickles" if pickled else show_damage(error)
        return ValueError(printable(f"{source} is no .npz file of numbers, or damaged: {reason}"))

    safetensors = _suffix(source) == ".safetensors"
    with open_safetensors(source) if safetensors else open_npz(source, explain) as (names, read):
        return {name: read(name) for name in names}


@contextlib.contextmanager
def open_npz(
    source: Path, explain: Callable[[Exception], Exception], shown: str | None = None
) -> Iterator[tuple[list[str], Callable[[str], Array]]]:
    """Yield the names of a file's arrays, and a function that reads one of them.

    `explain` makes the error to raise; `shown` is the name of the file in messages.
    """

    def read(name: str) -> Array:
        array = archive[name]
        if not isinstance(array, np.ndarray):  # NumPy returns the bytes of a member without its magic number
            raise ValueError(f"{name} is not in the .npy format")
        return refuse_lost_dtype(array, f"{shown or source}: {name}")

    with open(source, "rb") as stream:
        try:
            with np.load(stream, allow_pickle=False) as archive:
                yield list(archive.files), read
        except (MemoryError, LostDtypeError):
            raise
        except Exception as error:  # no list of what NumPy, zipfile and tokenize raise for a damaged file is complete
            raise explain(error) from error


def needs_pickle(error: Exception) -> bool:
    """Return whether NumPy refused Python objects, which only unpickling could read."""
    text = str(error)
    return "max_header_size" not in text and ("allow_pickle" in text or "Python objects" in text)


def show_damage(error: Exception) -> str:
    """Return why a file could not be read, without NumPy's advice to trust the file."""
    text = str(error)
    return "the header of an array is too long" if "max_header_size" in text else text or type(error).__name__


@contextlib.contextmanager
def open_safetensors(source: Path, shown: str | None = None) -> Iterator[tuple[list[str], Callable[[str], Array]]]:
    """Yield the names of a file's arrays, and a function that reads one of them; `shown` is its name in messages."""
    package = safetensors_package()
    with open(source, "rb"):  # Python's own error for a missing file has its name
        pass

    def read(name: str) -> Array:
        try:
            array: Array = archive.get_tensor(name)
        except (AttributeError, TypeError) as error:
            dtype = archive.get_slice(name).get_dtype()
            raise ValueError(
                f"{printable(f'{shown or source}: {name}')} is of type {dtype}, which NumPy does not have "
                "(bfloat16: pip install 'cattn[bf16]')"
            ) from error
        return array

    try:
        archive = package.safe_open(source, framework="np")
    except Exception as error:  # the package's own exception type moved between its versions
        raise ValueError(printable(f"{shown or source} is no .safetensors file, or damaged: {error}")) from error
    with archive:
        yield list(archive.keys()), read
