"""``python -m cattn attend``: attention of arrays in files. Slices make it possible to report progress and to stop.

The bits of a query do not depend on the other queries and batch entries of a call, so slices do not change the results.
With dropout only queries are sliced, because the dropout mask depends on the batch index.
"""

import argparse
import contextlib
import secrets
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import cattn
from cattn._cli.files import Array, InputError, Output, commit, load, load_members
from cattn._cli.progress import Progress
from cattn._input.arrays import broadcast_shapes
from cattn._input.types import AttentionOutput

DESCRIPTION = """\
Attention of the arrays in .npy (memory-mapped), .npz or .safetensors files:

  cattn attend q.npy k.npy v.npy -o out.npy --causal
  cattn attend qkv.npz -o out.npz                       (arrays called query, key, value)
  cattn attend qkv.safetensors -o out.safetensors       (needs pip install 'cattn[safetensors]')
  cattn attend a.npz:queries b.npz:keys v.npy -o out.npy

Shapes are those of cattn.scaled_dot_product_attention: (..., T_q, D), (..., T_k, D), (..., T_k, D_v), from four
dimensions on with heads on axis -3. Results are written to a temporary file next to the target and renamed when they
are complete: an existing file is replaced then, and an interrupted run changes nothing."""

# The arguments are collected at run time, which the overloads of the function do not allow.
_attention: Callable[..., Any] = cattn.scaled_dot_product_attention

ALIGNMENTS = ("upper_left", "lower_right")
SLICE_SECONDS = 0.25
FIRST_SLICE = 2e8  # multiply-adds of the first slice, when the speed is not known yet


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    add = parser.add_argument
    add("inputs", nargs="+", metavar="FILE", help="query, key and value, or one file that holds all three")
    add("-o", "--output", required=True, metavar="FILE", help="written when complete: .npy, .npz, .safetensors")
    add(
        "--causal",
        nargs="?",
        const="lower_right",
        choices=ALIGNMENTS,
        help="hide later keys; where T_q and T_k differ, align the last query with the last key (lower_right, the "
        "default) or the first with the first (upper_left)",
    )
    add("--scale", type=float, metavar="X", help="factor of the scores, default 1/sqrt(D)")
    add("--mask", metavar="FILE", help="bool: True where the key is visible; or floats to add; as (..., T_q, T_k)")
    add("--bias", metavar="FILE", help="floats to add to the scores; -inf hides a key")
    add("--dropout", type=float, default=0.0, metavar="P", help="probability of dropping a weight")
    add("--seed", type=int, metavar="N", help="of the dropout, 0 <= N < 2**64; without it a fresh one is drawn")
    add("--weights", metavar="FILE", help="also write the attention weights (..., T_q, T_k), before dropout")
    add("--lse", metavar="FILE", help="also write the log-sum-exp of the scores (..., T_q)")
    add("--threads", type=int, metavar="N", help="default: CATTN_NUM_THREADS, or the number of CPUs")
    add("--quiet", action="store_true", help="neither progress nor a closing line")


def complete_causal(arguments: Sequence[str]) -> list[str]:
    """Let a file name follow a bare ``--causal``: argparse would use it as the value of the option."""
    result = list(arguments)
    for i, argument in enumerate(result):
        if argument == "--causal" and i + 1 < len(result) and result[i + 1] not in ALIGNMENTS:
            result[i] = "--causal=lower_right"
    return result


class _Job:
    """The checked inputs of one run, and the shapes of the outputs."""

    def __init__(self, options: argparse.Namespace) -> None:
        files: dict[str, str] = {}
        if len(options.inputs) == 1:
            files = dict.fromkeys(("query", "key", "value"), options.inputs[0])
            arrays = load_members(Path(options.inputs[0]), list(files))
        elif len(options.inputs) == 3:
            files = dict(zip(("query", "key", "value"), options.inputs, strict=True))
            arrays = [load(spec, name) for name, spec in files.items()]
        else:
            raise InputError(f"give query, key and value, or one file of all three, got {len(options.inputs)} files")
        self.masks: dict[str, Array] = {}
        for name, spec in (("attn_mask", options.mask), ("bias", options.bias)):
            if spec is not None:
                files[name] = spec
                self.masks[name] = load(spec, name)
        self._files = ", ".join(f"{name}: {spec}" for name, spec in files.items())

        if not 0 <= options.dropout <= 1:
            raise InputError(f"--dropout must be in [0, 1], got {options.dropout}")
        if options.seed is not None and not 0 <= options.seed < 2**64:
            raise InputError(f"--seed must be in 0 <= N < 2**64, got {options.seed}")
        self.settings: dict[str, Any] = {"scale": options.scale, "dropout_p": options.dropout}
        if options.causal:
            self.settings["is_causal"] = True
        if options.dropout:
            self.settings["rng"] = secrets.randbits(64) if options.seed is None else options.seed
        self.query, self.key, self.value = self._check(arrays)
        self.T_q, self.T_k = self.query.shape[-2], self.key.shape[-2]
        self.offset = self.T_k - self.T_q if options.causal == "lower_right" else 0
        # Arrays of rank 2 have no batch dimensions, and with dropout these must not be sliced.
        self.rank = len(self.shape)
        self.batch = self.shape[0] if self.rank > 2 and not options.dropout else 1

    def _check(self, arrays: list[Array]) -> list[Array]:
        """Let the library check all arguments, in a call without queries, before the first file is created."""
        query, key, value = arrays
        try:
            empty: AttentionOutput = _attention(
                query[..., :0, :] if query.ndim > 1 else query, key, value, query_offset=0, need_weights=True,
                return_lse=True, **self.settings,
            )  # fmt: skip
            self.shape = (*empty.out.shape[:-2], query.shape[-2], empty.out.shape[-1])
            self.score_shape = (*self.shape[:-1], key.shape[-2])
            shapes = {"out": self.shape, "weights": self.score_shape, "lse": self.shape[:-1]}
            self.results = {name: (shape, getattr(empty, name).dtype) for name, shape in shapes.items()}
            for name, mask in self.masks.items():
                with contextlib.suppress(ValueError):
                    if broadcast_shapes(mask.shape, self.score_shape) == self.score_shape:
                        continue
                raise ValueError(f"{name} has shape {mask.shape}, which does not broadcast to {self.score_shape}")
            _attention(
                query[..., :0, :],
                key,
                value,
                query_offset=0,
                **self._mask_rows(self.masks, slice(0, 0)),
                **self.settings,
            )
            whole: dict[str, Any] = self.masks
            cattn.explain(query, key, value, query_offset=0, **whole)  # warns about masks that look wrong
        except (ValueError, TypeError) as error:
            raise InputError(f"{error} ({self._files})") from error
        # Convert once, not in every slice. Arrays of the right dtype are not copied.
        return [np.asarray(array, empty.out.dtype) for array in arrays]

    @staticmethod
    def _mask_rows(masks: dict[str, Array], rows: slice) -> dict[str, Array]:
        return {name: m[..., rows, :] if m.ndim > 1 and m.shape[-2] > 1 else m for name, m in masks.items()}

    def compute(self, entries: slice, rows: slice, outputs: dict[str, Array]) -> None:
        """Compute some batch entries and some queries, into the same places of `outputs`."""

        def cut(array: Array) -> Array:
            return array[entries] if self.batch > 1 and array.ndim == self.rank and array.shape[0] > 1 else array

        masks = {name: cut(mask) for name, mask in self._mask_rows(self.masks, rows).items()}
        parts = {}
        for name, array in outputs.items():
            whole = array[entries] if self.batch > 1 else array
            parts[name] = whole[..., rows] if name == "lse" else whole[..., rows, :]
        _attention(
            cut(self.query[..., rows, :]),
            cut(self.key),
            cut(self.value),
            query_offset=self.offset + rows.start,
            need_weights="weights" in parts,
            return_lse="lse" in parts,
            out=AttentionOutput(parts["out"], parts.get("weights"), parts.get("lse")),
            **masks,
            **self.settings,
        )

    def slices(self) -> Iterator[tuple[slice, slice]]:
        """Yield slices of batch entries and query rows that take about SLICE_SECONDS each on this machine."""
        heads = int(np.prod(self.shape[:-2], dtype=np.int64)) // max(self.batch, 1)
        row_cost = max(1, heads * self.T_k * (self.query.shape[-1] + self.value.shape[-1]))
        budget = FIRST_SLICE
        entry = 0
        while entry < self.batch and self.T_q:
            count = min(self.batch - entry, max(1, int(budget / (row_cost * self.T_q))))
            row = 0
            while row < self.T_q:
                rows = max(16, int(budget / (row_cost * count)) // 16 * 16)
                begun = time.perf_counter()
                yield slice(entry, entry + count), slice(row, min(row + rows, self.T_q))
                seconds = time.perf_counter() - begun
                budget *= min(4.0, max(0.25, SLICE_SECONDS / max(seconds, 1e-6)))
                row += rows
            entry += count


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """Clean up after SIGTERM as after Ctrl-C."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def _plain_warnings() -> Iterator[None]:
    """Print each warning once, in one line without source code."""
    seen: set[str] = set()

    def show(message: Warning | str, *_: Any, **__: Any) -> None:
        if str(message) not in seen:
            seen.add(str(message))
            print(f"cattn: warning: {message}", file=sys.stderr)

    with warnings.catch_warnings():
        warnings.simplefilter("always", UserWarning)
        warnings.showwarning = show
        yield


def run(options: argparse.Namespace) -> None:
    """Carry out the command."""
    start = time.perf_counter()
    targets = {"out": options.output, "weights": options.weights, "lse": options.lse}
    with contextlib.ExitStack() as stack:
        stack.enter_context(_terminable())
        stack.enter_context(_plain_warnings())
        if options.threads is not None:
            if options.threads < 1:
                raise InputError(f"--threads must be at least 1, got {options.threads}")
            try:
                stack.enter_context(cattn.num_threads(options.threads))
            except ValueError as error:
                raise InputError(f"--threads: {error}") from error
        job = _Job(options)
        warnings.simplefilter("ignore", UserWarning)  # slices of a mask may look wrong
        files = {name: stack.enter_context(Output(path, name)) for name, path in targets.items() if path is not None}
        if len({file.target for file in files.values()}) < len(files):
            raise InputError("--output, --weights and --lse must be different files")
        outputs = {name: file.allocate(*job.results[name]) for name, file in files.items()}
        stack.callback(outputs.clear)  # before the files are deleted: Windows deletes none that is mapped

        with Progress(job.batch * job.T_q, options.quiet) as progress:
            for entries, rows in job.slices():
                job.compute(entries, rows, outputs)
                progress.advance((entries.stop - entries.start) * (rows.stop - rows.start))
        seed = f", dropout seed {job.settings['rng']}" if "rng" in job.settings else ""
        shape, dtype = job.results["out"]
        outputs.clear()
        del job  # Windows replaces no file that is mapped, and a result may replace an input
        commit(list(files.values()))
    if not options.quiet:
        _say(f"{options.output}: {shape} {dtype}{seed}, {time.perf_counter() - start:.2f} s")


def _say(line: str) -> None:
    """Print a line after the result is written: a failure to print is not a failure of the command."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    try:
        print(line.encode(encoding, "backslashreplace").decode(encoding), flush=True)
    except OSError as error:
        with contextlib.suppress(OSError):
            sys.stdout.close()  # else Python tries again at exit
        if not isinstance(error, BrokenPipeError):
            print(f"cattn: warning: cannot write to standard output: {error.strerror}; {line}", file=sys.stderr)
