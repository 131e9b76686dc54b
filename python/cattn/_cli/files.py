"""Arrays from .npy, .npz and .safetensors files; results written next to their target and renamed into place."""

import atexit
import contextlib
import errno
import functools
import os
import shutil
import stat
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cattn.nn._files import (
    create,
    errors_name,
    loses_dtype,
    needs_pickle,
    open_npz,
    open_safetensors,
    refuse_lost_dtype,
    replace,
    safetensors_package,
    show_damage,
    temporary_beside,
    write_arrays,
)

Array = NDArray[Any]
ARCHIVES = (".npz", ".safetensors")
SHORT = {"query": "q", "key": "k", "value": "v", "attn_mask": "mask"}  # names that archives may use as well


class InputError(Exception):
    """An argument or input file cannot be used: exit code 2."""


PIPE = "-"  # standard input, or standard output


@functools.cache
def _standard_input() -> Path:
    """Copy what comes through the pipe to a temporary file, once, so that it can be mapped and read again."""
    stream = getattr(sys.stdin, "buffer", None)
    if stream is None or sys.stdin.isatty():
        raise InputError("-: standard input is not a pipe")
    handle, name = tempfile.mkstemp(prefix="cattn-")
    atexit.register(_forget, Path(name))
    with open(handle, "wb") as copy:
        shutil.copyfileobj(stream, copy)
    return Path(name)


def _forget(file: Path) -> None:
    with contextlib.suppress(OSError):  # Windows deletes no file that is mapped
        file.unlink(missing_ok=True)


def load(spec: str, name: str) -> Array:
    """Return the array that `spec` names: ``file.npy``, ``file.npz:name``, or an array of ``file.npz``; - is a pipe.

    Without a name that is the member `name`, its short form, or the only member. ``.safetensors`` files are like
    ``.npz``. An array of a .npy file is memory-mapped, read-only. Nothing is ever unpickled.
    """
    file, member = _split(spec)
    if _kind(file) in ARCHIVES:
        return _read(file, [name], member)[0]
    if member is not None:
        raise InputError(f"{file} is a single array, so {spec!r} cannot name one in it")
    try:
        array = np.asarray(np.load(file, mmap_mode="r", allow_pickle=False))
    except Exception as error:  # NumPy's parser of headers raises many types for damaged files
        raise _damage(file, error) from error
    try:
        return refuse_lost_dtype(array, str(file))
    except ValueError as error:
        raise InputError(str(error)) from error


def load_members(spec: str, names: Sequence[str]) -> list[Array]:
    """Read the named arrays of a .npz or .safetensors file, under these names or their short forms."""
    file = _standard_input() if spec == PIPE else Path(spec)
    if _kind(file) not in ARCHIVES:
        raise InputError(
            f"{spec} is a single array; give query, key and value, or a .npz or .safetensors file that holds all three"
        )
    return _read(file, names, None)


def _read(file: Path, names: Sequence[str], member: str | None) -> list[Array]:
    """Read arrays of an archive; `member` is the name that the user gave for the only one."""
    try:
        safetensors = _kind(file) == ".safetensors"
        with open_safetensors(file) if safetensors else open_npz(file, partial(_damage, file)) as (present, read):
            if member is not None:
                chosen = [member]
            elif len(names) == len(present) == 1:
                chosen = present
            else:
                chosen = [SHORT[name] if name not in present and SHORT.get(name) in present else name for name in names]
            missing = [name for name in chosen if name not in present]
            if not missing:
                return [read(name) for name in chosen]
    except (ImportError, ValueError) as error:
        raise InputError(str(error)) from error
    text = f"{file} has no array {', '.join(missing)}; it has {', '.join(present) or 'none'}"
    if member is None and present:
        example = " ".join(f"{file}:{name}" for name in (present if len(present) == len(names) else ["NAME"]))
        short = f", or {', '.join(SHORT[name] for name in names)}" if all(name in SHORT for name in names) else ""
        text += f". Name arrays {', '.join(names)}{short}; or say which array to read: {example}"
    raise InputError(text)


def _split(spec: str) -> tuple[Path, str | None]:
    """Split ``file.npz:name``. A pipe becomes a temporary file."""
    if spec == PIPE:
        return _standard_input(), None
    for suffix in ARCHIVES:
        stem, colon, member = spec.rpartition(f"{suffix}:")
        if colon:
            return Path(stem + suffix), member
    return Path(spec), None


def _kind(file: Path) -> str:
    """Return the format of a file, by its content. Refuse all other formats."""
    try:
        mode = os.stat(file).st_mode
        if stat.S_ISDIR(mode):  # Windows calls that a lack of permission
            raise InputError(f"{file}: {os.strerror(errno.EISDIR)}")
        if not stat.S_ISREG(mode):  # a pipe can be read only once, and not be mapped
            raise InputError(f"{file} is not a regular file: give a file, not a pipe or a device")
        with open(file, "rb") as stream:
            start = stream.read(9)
    except OSError as error:
        # the text of the C library, since Windows writes in the user's language
        raise InputError(f"{file}: {os.strerror(error.errno) if error.errno else error}") from error
    if start.startswith(b"\x93NUMPY"):
        return ".npy"
    if start.startswith((b"PK\x03\x04", b"PK\x05\x06")):
        return ".npz"
    if start[8:] == b"{":  # after eight bytes with the length of the header
        return ".safetensors"
    raise InputError(f"{file} is neither a .npy nor a .npz nor a .safetensors file")


def _damage(file: Path, error: Exception) -> InputError:
    """Return the error to raise for an error of NumPy's."""
    if needs_pickle(error):
        return InputError(f"{file} holds Python objects, which only unpickling could read; cattn never does that")
    return InputError(f"{file} is truncated or damaged ({show_damage(error)})")


class Output:
    """A result for the file `target`: an array in a temporary file next to it, which `commit` renames.

    Used as a context manager, it leaves no temporary file. The array is memory-mapped, so a large result needs no
    memory of its own.
    """

    def __init__(self, target: str, name: str) -> None:
        self.option = "--output" if name == "out" else f"--{name}"
        if not target:
            raise InputError(f"{self.option} must name a file, got ''")
        self.piped = target == PIPE
        if self.piped:
            target = os.path.join(tempfile.gettempdir(), f"cattn-{os.getpid()}.npy")  # an .npy file goes down the pipe
        self.target = Path(os.path.realpath(target))  # replace the file that a link points to, not the link
        self.name = name
        self.array: Array | None = None
        self._flush: Callable[[], None] | None = None
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
        self._former: Path | None = None  # the file that `replace` replaced

    def allocate(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Create the temporary file and return its array, to be filled in."""
        self._dtype = dtype
        if loses_dtype(dtype) and self.target.suffix != ".safetensors":
            raise InputError(f"{self.target}: {self.target.suffix} files cannot hold {dtype}, .safetensors files can")
        with errors_name(self.target):
            create(self._temporary, self.target)
            if 0 in shape:  # an empty array cannot be mapped
                self.array = np.empty(shape, dtype)
                with open(self._temporary, "wb") as stream:  # numpy.save would add .npy to the name
                    np.save(stream, self.array)
                return self.array
            mapped = np.lib.format.open_memmap(self._temporary, mode="w+", dtype=dtype, shape=shape)
            if hasattr(os, "posix_fallocate"):  # a full disk is an error now, not a bus error later
                with open(self._temporary, "r+b") as stream:
                    os.posix_fallocate(stream.fileno(), 0, os.path.getsize(self._temporary))
        self.array = np.asarray(mapped)
        self._flush = mapped.flush
        return self.array

    def finish(self) -> None:
        """Write everything to the temporary file, in the format of the target."""
        with errors_name(self.target):
            if self._flush is not None:
                self._flush()
            self.array = self._flush = None
            if self.target.suffix in ARCHIVES:
                mapped, self._temporary = self._temporary, temporary_beside(self.target)
                try:
                    create(self._temporary, self.target)
                    with open(self._temporary, "wb") as stream:
                        write_arrays(
                            stream, self.target.suffix, {self.name: np.load(mapped, mmap_mode="r").view(self._dtype)}
                        )
                except BaseException as error:
                    _unlink(mapped, error)
                    raise
                _unlink(mapped)

    def replace(self, *, revocable: bool) -> None:
        """Put the finished file in its place. If revocable, `restore` can undo it."""
        if self.piped:
            with open(self._temporary, "rb") as stream:
                shutil.copyfileobj(stream, sys.stdout.buffer)
            sys.stdout.buffer.flush()
            return
        with errors_name(self.target):
            if revocable and self.target.exists():
                former = temporary_beside(self.target)
                try:
                    os.link(self.target, former)
                except OSError:  # a file system without hard links: the target is missing for a moment
                    os.rename(self.target, former)
                self._former = former
            replace(self._temporary, self.target)

    def restore(self) -> None:
        """Undo `replace`, which may have failed."""
        if self._former is not None:
            os.replace(self._former, self.target)
        elif self.piped:
            return
        elif not self._temporary.exists():
            self.target.unlink(missing_ok=True)

    def __enter__(self) -> "Output":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, frames: TracebackType | None
    ) -> None:
        self.array = self._flush = None
        _unlink(self._temporary, error)
        if self._former is not None:
            self._former.unlink(missing_ok=True)


def _unlink(file: Path, error: BaseException | None = None) -> None:
    """Delete a temporary file, also while an error is handled.

    Windows does not delete a file that is mapped: the frames that have ended with the error must drop their arrays.
    """
    if error is not None:
        traceback.clear_frames(error.__traceback__)
    file.unlink(missing_ok=True)


def refuse_inputs(option: str, target: Path, inputs: Mapping[str, str]) -> None:
    """Refuse a target that is one of the input files; `inputs` has the name of each argument and its file."""
    for name, spec in inputs.items():
        file, _ = _split(spec)
        if target.exists() and file.exists() and target.samefile(file):
            raise InputError(
                f"{option}: {target.name} is the input file of {name}; write to another file, or replace it by --force"
            )


def commit(outputs: Sequence[Output]) -> None:
    """Put the finished files in their places: all of them or, after an error, none."""
    for output in outputs:
        output.finish()
    revocable = len(outputs) > 1  # one file is replaced at once
    with contextlib.ExitStack() as undo:
        for output in sorted(outputs, key=lambda output: output.piped):  # what went down a pipe does not come back
            if revocable:
                undo.callback(output.restore)
            output.replace(revocable=revocable)
        undo.pop_all()
