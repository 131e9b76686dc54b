"""``python -m cattn attend``: attention of arrays in files. Slices make it possible to report progress and to stop.

The bits of a query do not depend on the other queries and batch entries of a call, so slices do not change the results.
With dropout only queries are sliced, because the dropout mask depends on the batch index. A slice gets the position of
its first query as query_offset, and lengths that are counted from there.
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
from typing import Any

import numpy as np
from numpy.typing import NDArray

import cattn
from cattn import _cattn
from cattn._cli.files import Array, Command, InputError, Output, commit, load, load_members, refuse_inputs
from cattn._cli.messages import Progress, plain_warnings, say
from cattn._input.doors import DOORS
from cattn._input.objects import Quantized, dequantized
from cattn._input.types import AttentionOutput
from cattn.functional._options import text_of

_DESCRIPTION = """\
Attention of the arrays in .npy (memory-mapped), .npz or .safetensors files:

  cattn attend q.npy k.npy v.npy -o out.npy --causal
  cattn attend qkv.npz -o out.npz                       (arrays called query, key, value or q, k, v)
  cattn attend qkv.safetensors -o out.safetensors       (needs pip install 'cattn[safetensors]')
  cattn attend a.npz:queries b.npz:keys v.npy -o out.npy
  cattn attend qkv.npz -o out.npy --causal --window 255 0 --lengths 512,300
  cattn attend - -o - --causal < qkv.npz > out.npy      (- is standard input or output; one output can go there)
  cat q.npy k.npy | cattn attend - - v.npy -o out.npy   (each - takes the next array of the pipe)

Shapes are as in cattn.scaled_dot_product_attention: (..., T_q, D), (..., T_k, D), (..., T_k, D_v), from four
dimensions on with heads on axis -3. Results are written to a temporary file next to the target and renamed when they
are complete: an existing file is replaced then, and an interrupted run changes nothing. An input file is replaced only
with --force."""

# The arguments are collected at run time, which the overloads of the function do not allow.
_attention: Callable[..., Any] = cattn.scaled_dot_product_attention
_explain: Callable[..., Any] = cattn.explain

ALIGNMENTS = ("upper_left", "lower_right")
SLICE_SECONDS = 0.25
FIRST_SLICE = 2e8  # multiply-adds of the first slice, when the speed is not known yet

# How argparse reads an option of a kind of csrc/call/operands.h. Other kinds are not on the command line.
_FILES = ("MASK", "COMPUTED", "LOGITS", "SCALES")
_NUMBERS = ("QUERY_COUNTS", "KEY_COUNTS")
_OF_THE_CALL = ("REAL", "BOUND", "PROBABILITY", "CHOICE", "WINDOW", "PRODUCTS")  # the same in every slice
_FORMS: dict[str, dict[str, Any]] = {
    kind: form
    for kinds, form in (
        (_FILES, {"metavar": "FILE"}),
        (_NUMBERS, {"metavar": "N,N"}),
        (("OFFSETS", "SEED"), {"type": int, "metavar": "N"}),
        (("REAL", "BOUND"), {"type": float, "metavar": "X"}),
        (("SLOPES", "CHOICE"), {"action": "store_true"}),
        (("PROBABILITY",), {"type": float, "default": 0.0, "metavar": "P"}),
        (("ALIGNMENT",), {"nargs": "?", "const": "lower_right", "choices": ALIGNMENTS}),
        (("WINDOW",), {"nargs": 2, "type": int, "metavar": ("L", "R")}),
        (("PRODUCTS",), {"choices": ["bfloat16", "bfloat16_tiles"]}),
    )
    for kind in kinds
}
# The options in the order of the table: the axes of an array in letters, "" for a number, and the kind.
_ROWS = {row[0]: (row[1], row[2]) for row in _cattn._operands()} | {
    name: ("", kind) for name, kind in _cattn._numbers()
}
_ORDER = (*_cattn._arguments("scaled_dot_product_attention"), *_ROWS)
_OPTIONS = {name: _ROWS[name] for name in sorted(_ROWS, key=_ORDER.index) if _ROWS[name][1] in _FORMS}

# The help of options whose text in cattn.functional is about arrays in Python.
_HELP = {
    "attn_mask": "bool: True where the key is visible; or floats to add; as (..., T_q, T_k)",
    "bias": "floats to add to the scores; -inf hides a key",
    "is_causal": "hide later keys; where T_q and T_k differ, align the last query with the last key (lower_right, the "
    "default) or the first with the first (upper_left)",
    "scale": "factor of the scores, default 1/sqrt(D)",
    "enable_gqa": "axis -3 of arrays of three dimensions is heads, not a batch",
    "query_offset": "position of the first query: with --causal, query i sees the keys j <= i + N. Default: 0, or the "
    "alignment of --causal",
    "query_seq_lengths": "valid queries of each batch entry, if they differ from the keys",
    "key_value_seq_lengths": "valid keys of each batch entry, and valid queries where T_q = T_k: numbers, or a file of "
    "them; one number is for all entries. Other keys are not read, and other queries get 0",
    "alibi_slopes": "subtract ALiBi's slope times the distance of query and key; needs heads",
    "sinks": "one extra logit for each query head, (H,), in the softmax denominator",
    "compute_dtype": "round queries, keys, values and weights to bfloat16 for the products, which are summed in "
    "float32; the files must hold float32 or bfloat16",
    "rng": "of the dropout, 0 <= N < 2**64; without it a fresh one is drawn",
    "key_scale": "scales of int8 keys, which broadcast to them: as (..., T_k, 1)",
    "value_scale": "scales of int8 values",
}


def _dest(name: str) -> str:
    """Return the name of an option on the command line."""
    return DOORS["attend"].spelled.get(name, name)


def _help(name: str) -> str:
    """Return the help of an option: its text in cattn.functional without capital and point, if there is no other."""
    if name in _HELP:
        return _HELP[name]
    text = text_of(name)
    return text[0].lower() + text[1:].rstrip(".")


def _flag(name: str) -> str:
    return f"--{_dest(name).replace('_', '-')}"


_INPUTS = ("inputs", *(_dest(name) for name, (_, kind) in _OPTIONS.items() if kind in (*_FILES, *_NUMBERS)))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    add = parser.add_argument
    add("inputs", nargs="+", metavar="FILE", help="query, key and value, or one file that holds all three")
    add("-o", "--output", required=True, metavar="FILE", help="written when complete: .npy, .npz, .safetensors")
    for name, (_, kind) in _OPTIONS.items():
        add(_flag(name), help=_help(name), **_FORMS[kind])
    add("--weights", metavar="FILE", help="also write the attention weights (..., T_q, T_k), before dropout")
    add("--lse", metavar="FILE", help="also write the log-sum-exp of the scores (..., T_q)")
    add("--threads", type=int, metavar="N", help="default: CATTN_NUM_THREADS, or the number of CPUs")
    add("--force", action="store_true", help="write also to a file that is an input")
    add("--quiet", action="store_true", help="neither progress nor a closing line")


def complete_causal(arguments: Sequence[str]) -> list[str]:
    """Let a file name follow a bare ``--causal``: argparse would use it as the value of the option."""
    result = list(arguments)
    for i, argument in enumerate(result):
        if argument == "--causal" and i + 1 < len(result) and result[i + 1] not in ALIGNMENTS:
            result[i] = "--causal=lower_right"
    return result


def _integers(text: str, option: str) -> NDArray[np.int64]:
    """Return the lengths of an option: one number, some with commas between them, or the array of a file."""
    parts = text.split(",")
    try:
        if all(part.strip().lstrip("-").isdecimal() for part in parts):
            numbers = [int(part) for part in parts]
            return np.array(numbers if len(numbers) > 1 else numbers[0], np.int64)
    except (OverflowError, ValueError) as error:  # beyond 64 bits, or more digits than Python reads
        raise InputError(f"{option} must hold numbers below 2**63, got {text[:40]}") from error
    try:
        array = load(text, option.strip("-").replace("-", "_"))
    except InputError as error:
        raise InputError(f"{option} must be numbers such as 5,3, or a file of them: {error}") from error
    if array.dtype.kind not in "iu":
        raise InputError(f"{option} must hold integers, got {array.dtype} ({text})")
    return array.astype(np.int64)


def _quantized(array: Any, scale: Array, name: str, files: str) -> Quantized:
    try:
        return Quantized(array, scale)
    except (ValueError, TypeError) as error:
        raise InputError(f"{name} with --{name}-scale: {error} ({files})") from error


def _convert(array: Array | Quantized, dtype: np.dtype[Any]) -> Array | Quantized:
    """Convert once, not in every slice. Quantized arrays, and arrays of the right dtype, are not copied."""
    if not isinstance(array, Quantized):
        return np.asarray(array, dtype)
    return dequantized(*array) if dtype == np.float64 else array


class _Job:
    """The checked inputs of one run, and the shapes of the outputs."""

    def __init__(self, options: argparse.Namespace) -> None:
        files: dict[str, str] = {}
        if len(options.inputs) == 1:
            files = dict.fromkeys(("query", "key", "value"), options.inputs[0])
            arrays = load_members(options.inputs[0], list(files))
        elif len(options.inputs) == 3:
            files = dict(zip(("query", "key", "value"), options.inputs, strict=True))
            arrays = [load(spec, name) for name, spec in files.items()]
        else:
            raise InputError(f"give query, key and value, or one file of all three, got {len(options.inputs)} files")
        given = {name: getattr(options, _dest(name)) for name in _OPTIONS}
        given = {name: x for name, x in given.items() if x is not None and x is not False}
        self.arrays: dict[str, Array] = {}  # but for query, key and value, and the slopes
        stored: dict[str, Array | Quantized] = dict(zip(files, arrays, strict=True))
        for name, spec in given.items():
            kind = _OPTIONS[name][1]
            if kind == "SCALES":
                owner = name.removesuffix("_scale")
                stored[owner] = _quantized(stored[owner], load(spec, name), owner, f"{files[owner]}, {spec}")
            elif kind in _FILES:
                self.arrays[name] = load(spec, name)
            if kind in _FILES:
                files[name] = spec
        self.inputs = dict(files)
        for name, text in given.items():
            if _OPTIONS[name][1] in _NUMBERS:
                self.arrays[name] = _integers(text, _flag(name))
                files[name] = f"{_flag(name)} {text}"
                self.inputs[_flag(name)] = text
        self._files = ", ".join(f"{name}: {spec}" for name, spec in files.items())

        if not 0 <= options.dropout <= 1:
            raise InputError(f"--dropout must be in [0, 1], got {options.dropout}")
        if options.seed is not None and not 0 <= options.seed < 2**64:
            raise InputError(f"--seed must be in 0 <= N < 2**64, got {options.seed}")
        self.settings = {name: x for name, x in given.items() if _OPTIONS[name][1] in _OF_THE_CALL}
        if options.dropout:
            self.settings["rng"] = secrets.randbits(64) if options.seed is None else options.seed
        self.query, self.key, self.value = self._check(stored, options)
        self.settings["is_causal"] = options.causal is not None  # a slice gets the offset that the corner means
        self.T_q, self.T_k = self.query.shape[-2], self.key.shape[-2]
        lengths = {"query_seq_lengths": self.T_q, "key_value_seq_lengths": self.T_k}
        queries, keys = (self.arrays.get(name, np.array(default)) for name, default in lengths.items())
        self.offset: NDArray[np.int64] = np.array(options.query_offset or 0)
        if options.query_offset is None and options.causal == "lower_right":
            self.offset = keys - queries
        # Arrays of rank 2 have no batch dimensions, and with dropout these must not be sliced.
        self.rank = len(self.shape)
        heads = self.rank > 3 or options.enable_gqa
        self.batch_dims = max(0, self.rank - (3 if heads else 2))
        self.batch = self.shape[0] if self.batch_dims and not options.dropout else 1

    def _check(self, stored: dict[str, Any], options: argparse.Namespace) -> tuple[Any, Any, Any]:
        """Let the library check all arguments, and say what the results are, before the first file is created."""
        given = {**stored, **self.arrays, **self.settings, "is_causal": options.causal or False}
        if options.query_offset is not None:
            given |= {"is_causal": bool(options.causal), "query_offset": options.query_offset}
        try:
            plan = _explain(**given, return_weights=True, return_lse=True)
        except (ValueError, TypeError) as error:
            raise InputError(f"{error} ({self._files})") from error
        self.results: dict[str, tuple[tuple[int, ...], np.dtype[Any]]] = plan.outputs
        self.shape, dtype = self.results["out"]
        if options.alibi and len(self.shape) < 4 and not options.enable_gqa:
            raise InputError(
                f"--alibi needs heads on axis -3 of four dimensions, the result has {self.shape} ({self._files})"
            )
        if options.alibi:
            self.settings["alibi_slopes"] = cattn.get_alibi_slopes(self.shape[-3])
        query, key, value = (_convert(array, dtype) for array in stored.values())
        if query.shape[-2] == key.shape[-2] and "key_value_seq_lengths" in self.arrays:
            self.arrays.setdefault("query_seq_lengths", self.arrays["key_value_seq_lengths"])
        return query, key, value

    def compute(self, entries: slice, rows: slice, outputs: dict[str, Array]) -> None:
        """Compute some batch entries and some queries, into the same places of `outputs`."""

        def cut(array: Any, n_axes: int = self.rank - self.batch_dims) -> Any:
            """Return the batch entries of an array with this number of axes beside the batch."""
            if isinstance(array, Quantized):
                return Quantized._of_checked(*map(cut, array))
            has_entries = self.batch > 1 and array.ndim == self.batch_dims + n_axes and array.shape[0] > 1
            return array[entries] if has_entries else array

        options = {}
        for name, array in self.arrays.items():
            axes, kind = _OPTIONS[name]
            own = array
            if axes.endswith("TS") and array.ndim > 1 and array.shape[-2] > 1:
                own = array[..., rows, :]
            elif kind == "QUERY_COUNTS":
                own = np.clip(array - rows.start, 0, rows.stop - rows.start)
            options[name] = cut(own, self.rank - self.batch_dims if axes.endswith("TS") else len(axes))
        parts = {}
        for name, array in outputs.items():
            whole = array[entries] if self.batch > 1 else array
            parts[name] = whole[..., rows] if name == "lse" else whole[..., rows, :]
        _attention(
            cut(self.query[..., rows, :]),
            cut(self.key),
            cut(self.value),
            query_offset=cut(self.offset, 0) + rows.start,
            return_weights="weights" in parts,
            return_lse="lse" in parts,
            out=AttentionOutput(parts["out"], parts.get("weights"), parts.get("lse")),
            **options,
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


def run(options: argparse.Namespace) -> None:
    """Carry out the command."""
    start = time.perf_counter()
    targets = {"out": options.output, "weights": options.weights, "lse": options.lse}
    with contextlib.ExitStack() as stack:
        stack.enter_context(_terminable())
        stack.enter_context(plain_warnings())
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
        to_pipe = any(file.piped for file in files.values())
        if len({file.target for file in files.values()}) < len(files):
            raise InputError("--output, --weights and --lse must be different files")
        if not options.force:
            for file in files.values():
                refuse_inputs(file.option, file.target, job.inputs)
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
    if not (options.quiet or to_pipe):
        say(f"{options.output}: {shape} {dtype}{seed}, {time.perf_counter() - start:.2f} s")


COMMAND = Command("attention of arrays in .npy, .npz or .safetensors files", _DESCRIPTION, _INPUTS, add_arguments, run)
