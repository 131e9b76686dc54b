"""Arrays from .npy, .npz and .safetensors files; results written next to their target and renamed into place."""

import argparse
import atexit
import contextlib
import errno
import io
import math
import os
import shutil
import stat
import sys
import traceback
import zipfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cattn.nn._files import (
    create,
    errors_name,
    followed,
    loses_dtype,
    needs_pickle,
    new_temporary,
    open_npz,
    open_safetensors,
    refuse_lost_dtype,
    remove,
    replace,
    safetensors_package,
    show_damage,
    temporary_beside,
    write_arrays,
)

Array = NDArray[Any]
ARCHIVES = (".npz", ".safetensors")
SHORT = {"query": "q", "key": "k", "value": "v", "attn_mask": "mask"}  # names that archives may use as well


class Command(NamedTuple):
    """A command of ``python -m cattn``: texts, the options that name input files, and functions.

    `run` returns the exit code, or None for 0.
    """

    help: str
    description: str
    inputs: tuple[str, ...]
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int | None]


class InputError(Exception):
    """An argument or input file cannot be used: exit code 2."""


PIPE = "-"  # standard input, or standard output
STDIN, STDOUT = Path("standard input"), Path("standard output")  # the names in messages
_NPY = b"\x93NUMPY"


class Dash(str):
    """A - of a command line, with its place in it."""

    def __new__(cls, place: int) -> "Dash":
        self = super().__new__(cls, PIPE)
        self.place = place
        return self

    place: int


class Piped(str):
    """A - that is an input: the file of this number in the pipe. Messages name standard input."""

    def __new__(cls, pipe: "_Pipe", number: int) -> "Piped":
        self = super().__new__(cls, PIPE)
        self.pipe, self.number = pipe, number
        return self

    pipe: "_Pipe"
    number: int

    def __str__(self) -> str:
        return str(STDIN)


class _Pipe:
    """What comes through standard input: arrays in the .npy format, one after the other, or one archive.

    Each becomes a temporary file, which can be mapped and read again. `uses` is the number of inputs that are -.
    """

    def __init__(self, uses: int) -> None:
        self.uses = uses
        self._files: list[Path] = []
        self._stream: BinaryIO | None = None

    def file(self, number: int) -> Path:
        """Return the temporary file for the input of this number. The pipe must end with the last one."""
        if not self._files:
            self._stream = getattr(sys.stdin, "buffer", None)
            if self._stream is None or self._stream.isatty():
                raise InputError("-: standard input is not a pipe")
            if not self._copy(b""):
                raise InputError("standard input is empty")
        kind = _kind(_Source(self._files[0], str(STDIN)))
        if kind == ".npz" and not _is_one_zip(self._files[0]):
            raise InputError("standard input goes on after an archive: give one archive, or .npy arrays")
        if kind != ".npy":  # an archive has names for all inputs
            return self._files[0]
        while len(self._files) < self.uses and self._copy(_NPY):
            pass
        arrays = f"{len(self._files)} array{'s'[: len(self._files) - 1]}"
        if len(self._files) < self.uses:
            raise InputError(f"standard input ends after {arrays}, but {self.uses} inputs are -")
        if self._stream is not None and self._stream.read(1):
            raise InputError(f"standard input goes on after {arrays}: give - as often as there are arrays in it")
        self._stream = None
        return self._files[number]

    def _copy(self, magic: bytes) -> bool:
        """Copy one .npy array, or all of anything else, to a temporary file; False where nothing is left."""
        assert self._stream is not None
        with errors_name(STDIN):
            start = self._stream.read(8)
            if not start:
                return False
            if not start.startswith(magic):
                raise InputError(f"standard input goes on after array {len(self._files)} with another kind of file")
            self._files.append(new_temporary())
            atexit.register(remove, self._files[-1])  # not before: it is mapped
            with open(self._files[-1], "wb") as copy:
                copy.write(start)
                left = _copy_header(self._stream, copy, start) if start.startswith(_NPY) else None
                if left is None:
                    shutil.copyfileobj(self._stream, copy)
                while left and (block := self._stream.read(min(left, 1 << 20))):
                    copy.write(block)
                    left -= len(block)
        return True


def _copy_header(stream: BinaryIO, copy: BinaryIO, start: bytes) -> int | None:
    """Copy the header of a .npy array; return the bytes of its numbers, None where the header does not tell."""
    size = stream.read(2 if start[6] == 1 else 4)
    header = stream.read(int.from_bytes(size, "little"))
    copy.write(size + header)
    read = np.lib.format.read_array_header_1_0 if start[6] == 1 else np.lib.format.read_array_header_2_0
    try:
        shape, _, dtype = read(io.BytesIO(size + header))
    except Exception:  # NumPy raises many types for damaged headers: `load` reports them
        return None
    return None if dtype.hasobject or min(shape, default=0) < 0 else math.prod(shape) * dtype.itemsize


def _is_one_zip(file: Path) -> bool:
    """Return whether nothing comes before the first member of a zip file and after its end: zipfile ignores that."""
    try:
        with zipfile.ZipFile(file) as archive, open(file, "rb") as stream:
            begins = min((member.header_offset for member in archive.infolist()), default=0)
            end = 22 + len(archive.comment)
            stream.seek(-end, os.SEEK_END)
            return begins == 0 and stream.read(4) == b"PK\x05\x06"
    except (zipfile.BadZipFile, OSError):  # `load` reports the damage
        return True


def mark_pipes(arguments: Sequence[str]) -> list[str]:
    """Return the arguments of a command line with each - as a `Dash`, which argparse passes on; --option=- as two."""
    result: list[str] = []
    for argument in arguments:
        option, equals, value = argument.partition("=")
        if equals and value == PIPE and option.startswith("--"):
            result.append(option)
            argument = value
        result.append(Dash(len(result)) if argument == PIPE else argument)
    return result


def number_pipes(options: argparse.Namespace, names: Sequence[str]) -> None:
    """Let each - among these options be one file of the pipe, in the order of the command line."""
    given = [value for name in names for value in _listed(getattr(options, name)) if isinstance(value, Dash)]
    places = sorted(dash.place for dash in given)
    pipe = _Pipe(len(places))

    def piped(value: Any) -> Any:
        return Piped(pipe, places.index(value.place)) if isinstance(value, Dash) else value

    for name in names:
        value = getattr(options, name)
        setattr(options, name, [*map(piped, value)] if isinstance(value, list) else piped(value))


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


class _Source(NamedTuple):
    """A file to read, its name in messages, and the name of the array in it that the user gave."""

    path: Path
    shown: str
    member: str | None = None


def load(spec: str, name: str) -> Array:
    """Return the array that `spec` names: ``file.npy``, ``file.npz:name``, or an array of ``file.npz``; - is a pipe.

    Without a name that is the member `name`, its short form, or the only member. ``.safetensors`` files are like
    ``.npz``. An array of a .npy file is memory-mapped, read-only. Nothing is ever unpickled.
    """
    source = _split(spec)
    if _kind(source) in ARCHIVES:
        return _read(source, [name])[0]
    if source.member is not None:
        raise InputError(f"{source.shown} is a single array, so {spec!r} cannot name one in it")
    try:
        array = np.asarray(np.load(source.path, mmap_mode="r", allow_pickle=False))
    except Exception as error:  # NumPy's parser of headers raises many types for damaged files
        raise _damage(source, error) from error
    try:
        return refuse_lost_dtype(array, source.shown)
    except ValueError as error:
        raise InputError(str(error)) from error


def load_members(spec: str, names: Sequence[str]) -> list[Array]:
    """Read the named arrays of a .npz or .safetensors file, under these names or their short forms."""
    source = _Source(Path(spec), spec) if not isinstance(spec, Piped) else _split(spec)
    if _kind(source) not in ARCHIVES:
        raise InputError(
            f"{source.shown} is a single array; give {', '.join(names[:-1])} and {names[-1]}, or a .npz or "
            f".safetensors file that holds {'both' if len(names) == 2 else 'all three'}"
        )
    return _read(source, names)


def _read(source: _Source, names: Sequence[str]) -> list[Array]:
    """Read arrays of an archive."""
    path, shown, member = source
    try:
        if _kind(source) == ".safetensors":
            archive = open_safetensors(path, shown)
        else:
            archive = open_npz(path, partial(_damage, source), shown)
        with archive as (present, read):
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
    text = f"{shown} has no array {', '.join(missing)}; it has {', '.join(present) or 'none'}"
    if member is None and present:
        example = " ".join(f"{shown}:{name}" for name in (present if len(present) == len(names) else ["NAME"]))
        short = f", or {', '.join(SHORT[name] for name in names)}" if all(name in SHORT for name in names) else ""
        text += f". Name arrays {', '.join(names)}{short}"
        text += "" if shown == str(STDIN) else f"; or say which array to read: {example}"
    raise InputError(text)


def _split(spec: str) -> _Source:
    """Split ``file.npz:name``. A - is a file of the pipe."""
    if isinstance(spec, Piped):
        return _Source(spec.pipe.file(spec.number), str(STDIN))
    for suffix in ARCHIVES:
        stem, colon, member = spec.rpartition(f"{suffix}:")
        if colon:
            return _Source(Path(stem + suffix), stem + suffix, member)
    return _Source(Path(spec), spec)


def _kind(source: _Source) -> str:
    """Return the format of a file, by its content. Refuse all other formats."""
    file, shown = source.path, source.shown
    try:
        mode = os.stat(file).st_mode
        if stat.S_ISDIR(mode):  # Windows calls that a lack of permission
            raise InputError(f"{shown}: {os.strerror(errno.EISDIR)}")
        if not stat.S_ISREG(mode):  # a pipe can be read only once, and not be mapped
            raise InputError(f"{shown} is not a regular file: give a file, or - for standard input")
        with open(file, "rb") as stream:
            start = stream.read(9)
    except (OSError, ValueError) as error:
        # the text of the C library, since Windows writes in the user's language
        number = getattr(error, "errno", None)
        raise InputError(f"{shown}: {os.strerror(number) if number else error}") from error
    if start.startswith(_NPY):
        return ".npy"
    if start.startswith((b"PK\x03\x04", b"PK\x05\x06")):
        return ".npz"
    if start[8:] == b"{":  # after eight bytes with the length of the header
        return ".safetensors"
    raise InputError(f"{shown} is {'neither a .npy nor a .npz nor a .safetensors file' if start else 'empty'}")


def _damage(source: _Source, error: Exception) -> InputError:
    """Return the error to raise for an error of NumPy's."""
    if needs_pickle(error):
        return InputError(
            f"{source.shown} holds Python objects, which only unpickling could read; cattn never does that"
        )
    return InputError(f"{source.shown} is truncated or damaged ({show_damage(error)})")


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
        self.target = STDOUT if self.piped else followed(target)
        self.name = name
        self.array: Array | None = None
        self._flush: Callable[[], None] | None = None
        self._suffix = ".npy" if self.piped else self.target.suffix  # an .npy file goes down the pipe
        if self._suffix not in (".npy", *ARCHIVES):
            raise InputError(f"{target}: output files end in .npy, .npz or .safetensors")
        if not self.piped and (self.target.is_dir() or not self.target.parent.is_dir()):
            raise InputError(f"{target}: there is no such directory, or the name is a directory's")
        if self._suffix == ".safetensors":
            try:
                safetensors_package()
            except ImportError as error:
                raise InputError(str(error)) from error
        self._temporary = None if self.piped else temporary_beside(self.target)
        self._former: Path | None = None  # the file that `replace` replaced

    def allocate(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Create the temporary file and return its array, to be filled in."""
        self._dtype = dtype
        if loses_dtype(dtype) and self._suffix != ".safetensors":
            raise InputError(f"{self.target}: {self._suffix} files cannot hold {dtype}, .safetensors files can")
        with errors_name(self.target):
            if self._temporary is None:
                self._temporary = new_temporary()
            else:
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
            if self._suffix in ARCHIVES:
                assert self._temporary is not None
                mapped, self._temporary = self._temporary, temporary_beside(self.target)
                try:
                    create(self._temporary, self.target)
                    with open(self._temporary, "wb") as stream:
                        write_arrays(
                            stream, self._suffix, {self.name: np.load(mapped, mmap_mode="r").view(self._dtype)}
                        )
                except BaseException as error:
                    _unlink(mapped, error)
                    raise
                _unlink(mapped)

    def replace(self, *, revocable: bool) -> None:
        """Put the finished file in its place. If revocable, `restore` can undo it."""
        assert self._temporary is not None
        with errors_name(self.target):
            if self.piped:
                with open(self._temporary, "rb") as stream:
                    shutil.copyfileobj(stream, sys.stdout.buffer)
                sys.stdout.buffer.flush()
                return
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
        elif not self.piped and self._temporary is not None and not self._temporary.exists():
            self.target.unlink(missing_ok=True)

    def __enter__(self) -> "Output":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, frames: TracebackType | None
    ) -> None:
        self.array = self._flush = None
        _unlink(self._temporary, error)
        _unlink(self._former)


def _unlink(file: Path | None, error: BaseException | None = None) -> None:
    """Delete a temporary file, also while an error is handled.

    Windows does not delete a file that is mapped: the frames that have ended with the error must drop their arrays.
    """
    if error is not None:
        traceback.clear_frames(error.__traceback__)
    if file is not None:
        remove(file)


def refuse_inputs(option: str, target: Path, inputs: Mapping[str, str]) -> None:
    """Refuse a target that is one of the input files; `inputs` has the name of each argument and its file."""
    for name, spec in inputs.items():
        if isinstance(spec, Piped):  # a temporary file
            continue
        file = _split(spec).path
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
