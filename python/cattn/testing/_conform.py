"""``python -m cattn conform``: whether another attention has right numbers, and keeps cattn's laws to the bit."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .._input.doors import DOORS
from . import _vectors
from ._close import _array, first_beyond_bound
from ._diagnose import _check_arguments
from ._function import RefusedError, _quiet, _torch, is_module, library_of, prepared

Array = NDArray[Any]
INPUTS = ("query", "key", "value")
_SPELLED = {"attn_mask": "mask", "is_causal": "causal"}  # how other libraries call these options
_CAUSAL = {"is_causal": "upper_left"}
# What no bound is known for: other products, dropped weights; and another order of axes.
_UNBOUNDED = frozenset({"compute_dtype", "dropout_p", "gate", "layout"})
_TOKENS = 200


class LacksError(Exception):
    """The function does not take what a law is about: the text says it."""


class Law(NamedTuple):
    """What should hold, whether it does (None: it was not asked), and the first number that differs, or the reason."""

    name: str
    holds: bool | None
    text: str = ""

    @property
    def word(self) -> str:
        """The cell of a table."""
        return "–" if self.holds is None else "yes" if self.holds else "no"


class Peer:
    """Calls a function with arrays of (B, H, T, D) and cattn's options, and returns an array."""

    def __init__(self, function: Callable[..., Any], is_causal: bool) -> None:
        _check_arguments(function, {}, {}, {})
        known = next((each for name, each in KNOWN.items() if function in (each.call, _loaded(name))), None)
        self.function = known.call if known else function
        self.own = _CAUSAL if is_causal else {}  # what the function does by itself
        target: Any = self.function
        parameters: dict[str, inspect.Parameter] = {}
        with contextlib.suppress(TypeError, ValueError):  # of a function of C
            parameters = {**inspect.signature(target.forward if is_module(target) else target).parameters}
        names = [*known.options] if known else [*parameters]
        self.takes = {name: name for name in names}
        self.takes |= {name: other for name, other in _SPELLED.items() if name not in names and other in names}
        mask = parameters.get(self.takes.get("attn_mask", ""))
        self.needs_mask = mask is not None and mask.default is mask.empty
        self.library = "numpy"

    def find_library(self) -> None:
        """Find whose arrays the function takes; RefusedError if there is no such library."""
        x = _vectors.draw("numbers", 1, (2, 2, 5, 4))
        refusals = []
        for library in library_of(self.function):
            self.library = library
            try:
                self((x, x, x), **self.own)
            except RefusedError as error:
                refusals.append(error)
            else:
                return
        raise refusals[0]

    def __call__(self, inputs: Sequence[Array], **options: Any) -> Array:
        """Call the function; RefusedError if it raises, or returns what is no result of attention."""
        if lacking := [name for name in options if name not in self.takes and name not in self.own]:
            raise LacksError(f"it takes no {lacking[0]}")
        if self.own.keys() - options.keys():
            raise LacksError("it is causal")
        if self.needs_mask:
            options = {"attn_mask": np.ones((inputs[0].shape[2], inputs[1].shape[2]), np.bool_)} | options

        def converted(x: Any) -> Any:
            if not isinstance(x, np.ndarray):
                return True if x == "upper_left" else x
            return _torch().from_numpy(x.copy()) if self.library == "torch" else x.copy()

        words = {self.takes[name]: converted(x) for name, x in options.items() if name not in self.own}
        try:
            with _quiet(self.library):
                result = self.function(*map(converted, inputs), **words)
            out = _array(result[0] if isinstance(result, (tuple, list)) else result, "the result")
        except (Exception, SystemExit) as error:
            text = " ".join(str(error).split())[:200]
            raise RefusedError("raises", f"it raises {type(error).__name__}: {text}") from error
        wanted = (*inputs[0].shape[:-1], inputs[2].shape[-1])
        if out.shape != wanted:
            raise RefusedError("wrong_shape", f"it returns an array of {out.shape}, wanted {wanted}")
        return out


# ---- the vectors -----------------------------------------------------------------------------------------------------
def _asked(peer: Peer, dtype: str, without: frozenset[str]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yield the vectors that a function can be asked, and their arguments."""
    known = {*INPUTS, *peer.takes, *peer.own}
    for vector in _vectors.read()["vectors"]:
        names = {*vector["arrays"], *vector["options"]}
        of_attention = vector["function"] == "scaled_dot_product_attention" and dtype in vector["results"]
        if of_attention and not names & without and names <= known and peer.own.keys() <= names:
            call = _vectors.arguments(vector, dtype)
            # A function that is causal by itself may have either alignment, and PyTorch's argument has one.
            other = call.get("is_causal") == "lower_right" and "query_offset" not in known
            other |= bool(peer.own) and call["query"].shape[2] != call["key"].shape[2]
            if not other and not isinstance(call.get("rng"), dict):
                yield vector, call


def _each_vector(peer: Peer, dtype: str, without: frozenset[str], check: Callable[..., str]) -> str:
    """Return what a check says of the first vector that fails it, or ""."""
    tried = False
    for vector, call in _asked(peer, dtype, without):
        inputs = {name: call.pop(name) for name in INPUTS}
        if check is _is_close and inputs["key"].size == 0:  # rows without a key have a law of their own
            continue
        tried = True
        try:
            out = peer([*inputs.values()], **call)
            wrong = f"it returns {out.dtype}" if out.dtype != dtype else check(vector, out, inputs, call)
        except RefusedError as error:
            wrong = str(error)
        if wrong:
            return f"vector {vector['name']!r}, {dtype}: {wrong}"
    if not tried:
        raise LacksError("no vector fits it")
    return ""


def _is_close(_: Any, out: Array, inputs: dict[str, Array], options: dict[str, Any]) -> str:
    return first_beyond_bound(out, inputs, options)


def _has_bits(vector: dict[str, Any], out: Array, *_: Any) -> str:
    digits, right, size = _vectors.in_hex(out), vector["results"][out.dtype.name]["out"], 2 * out.itemsize
    if _vectors.stored(digits) == right:
        return ""
    if right.startswith("sha256"):
        return "another SHA-256"
    at = next(i for i in range(0, len(right), size) if digits[i : i + size] != right[i : i + size])
    return f"number {at // size} is {digits[at : at + size]}, not {right[at : at + size]}"


# ---- the laws --------------------------------------------------------------------------------------------------------
def _inputs() -> list[Array]:
    return [_vectors.draw("numbers", seed, (2, 2, _TOKENS, 32), np.float32) for seed in (1, 2, 3)]


def _difference(got: Array, right: Array) -> str:
    """Return the first number that differs, or ""."""
    differs = np.argwhere(~((got == right) | (np.isnan(got) & np.isnan(right))))
    at = tuple(differs[0].tolist()) if len(differs) else ()
    return f"{len(differs)} of {got.size} numbers, first at {at}: {got[at]!s} and {right[at]!s}" if len(differs) else ""


def _prefix(peer: Peer) -> str:
    inputs = _inputs()
    return _difference(peer([x[:, :, :70] for x in inputs], **_CAUSAL), peer(inputs, **_CAUSAL)[:, :, :70])


def _last_alone(peer: Peer) -> str:
    query, *others = _inputs()
    return _difference(peer([query[:, :, -1:], *others]), peer([query, *others])[:, :, -1:])


def _entry_alone(peer: Peer) -> str:
    inputs = _inputs()
    return _difference(peer([x[1:] for x in inputs], **peer.own), peer(inputs, **peer.own)[1:])


def _left_padding(peer: Peer) -> str:
    inputs, starts = _inputs(), np.array([50, 0])
    if "key_value_seq_starts" in peer.takes:
        padded = peer(inputs, **_CAUSAL, key_value_seq_starts=starts)
    else:
        keys = np.arange(_TOKENS) >= starts[:, None, None, None]
        padded = peer(inputs, **_CAUSAL, attn_mask=np.broadcast_to(keys, (2, 1, _TOKENS, _TOKENS)))
    return _difference(padded[:1, :, 50:], peer([x[:1, :, 50:] for x in inputs], **_CAUSAL))


def _hidden(peer: Peer, which: int) -> str:
    """Compare with a call in which key or value 7 is NaN, and hidden by a mask; or the last one, by causality."""
    inputs, mask = _inputs(), np.ones((_TOKENS, _TOKENS), np.bool_)
    mask[:, 7] = False
    by_mask = "attn_mask" in peer.takes
    options: dict[str, Any] = peer.own | {"attn_mask": mask} if by_mask else dict(_CAUSAL)
    right = peer(inputs, **options)
    inputs[which][:, :, 7 if by_mask else -1] = np.nan
    seen = _TOKENS if by_mask else _TOKENS - 1
    return _difference(peer(inputs, **options)[:, :, :seen], right[:, :, :seen])


def _empty_row(peer: Peer) -> str:
    mask = np.ones((_TOKENS, _TOKENS), np.bool_)
    mask[3] = False
    row = peer(_inputs(), **peer.own, attn_mask=mask)[:, :, 3]
    return _difference(row, np.zeros_like(row))


LAWS: dict[str, Callable[[Peer], str]] = {
    "values within the bound of rounding, float32": lambda peer: _each_vector(peer, "float32", _UNBOUNDED, _is_close),
    "values within the bound of rounding, float64": lambda peer: _each_vector(peer, "float64", _UNBOUNDED, _is_close),
    "a prefix of the tokens has the same bits": _prefix,
    "the last token alone, as in decoding, has the same bits": _last_alone,
    "an entry of a batch alone has the same bits": _entry_alone,
    "padding on the left changes no bit": _left_padding,
    "a hidden key may be NaN": lambda peer: _hidden(peer, 1),
    "a hidden value may be NaN": lambda peer: _hidden(peer, 2),
    "a query that sees no key gives 0": _empty_row,
}
BITS: dict[str, Callable[[Peer], str]] = {
    "the bits of the vectors, float32": lambda peer: _each_vector(peer, "float32", frozenset(), _has_bits),
    "the bits of the vectors, float64": lambda peer: _each_vector(peer, "float64", frozenset(), _has_bits),
}


def conform(function: Callable[..., Any], *, is_causal: bool = False, bits: bool = False) -> list[Law]:
    """Return which laws a function keeps. `is_causal`: it is causal by itself. `bits`: it must have cattn's bits."""
    peer, wanted = Peer(function, is_causal), LAWS | (BITS if bits else {})
    with prepared(function):
        try:
            peer.find_library()
        except RefusedError as error:  # no call works
            first, *others = wanted
            return [Law(first, False, str(error)), *(Law(name, None) for name in others)]
        return [_try(name, law, peer) for name, law in wanted.items()]


def _try(name: str, law: Callable[[Peer], str], peer: Peer) -> Law:
    try:
        text = law(peer)
    except (LacksError, RefusedError) as error:
        return Law(name, None if isinstance(error, LacksError) else False, str(error))
    return Law(name, not text, text)


def table(found: Mapping[str, Sequence[Law]]) -> str:
    """Return the laws as rows and the functions as columns, and below it what does not hold."""
    rows = [["law", *found], ["---"] * (len(found) + 1)]
    rows += [[laws[0].name, *(law.word for law in laws)] for laws in zip(*found.values(), strict=True)]
    texts = [f"{name}: {law.word}, {law.name}: {law.text}" for name, laws in found.items() for law in laws if law.text]
    return "\n".join([*("| " + " | ".join(row) + " |" for row in rows), *texts])


# ---- other libraries -------------------------------------------------------------------------------------------------
def _of_torch(*inputs: Array, attn_mask: Any = None, **options: Any) -> Any:
    import torch

    query, key, value, mask = (None if x is None else torch.from_numpy(x) for x in (*inputs, attn_mask))
    attend: Any = torch.nn.functional.scaled_dot_product_attention
    return attend(query, key, value, mask, **options)


def _of_jax(query: Array, key: Array, value: Array, attn_mask: Any = None, **options: Any) -> Any:
    """Call JAX, which has heads after tokens, groups them without being told, and has values as wide as keys."""
    import jax

    options = {DOORS["jax"].spelled.get(name, name): x for name, x in options.items() if name != "enable_gqa"}
    if attn_mask is not None:
        options["mask" if attn_mask.dtype == bool else "bias"] = attn_mask
    wide = np.pad(value, [(0, 0)] * 3 + [(0, max(key.shape[-1] - value.shape[-1], 0))])
    static = ("is_causal", "local_window_size", "return_residual")
    with jax.enable_x64(query.dtype == np.float64):
        call = jax.jit(jax.nn.dot_product_attention, static_argnames=static)
        found = call(*(x.swapaxes(1, 2) for x in (query, key, wide)), **options)
        out = found[0] if isinstance(found, tuple) else found
        return np.asarray(out).swapaxes(1, 2)[..., : value.shape[-1]]


def run_onnx(
    operator: str, domain: str, given: dict[str, Array], attributes: dict[str, Any], n_outputs: int = 1
) -> Any:
    """Return the first result of a model of one node by onnxruntime. Inputs whose names begin with _ are left out."""
    import onnxruntime
    from onnx import helper

    inputs = {name: x for name, x in given.items() if not name.startswith("_")}
    kind, outputs = helper.np_dtype_to_tensor_dtype, [f"Y{i}" for i in range(n_outputs)]
    names = [name if name in inputs else "" for name in given]
    node = helper.make_node(operator, names, outputs, domain=domain, **attributes)
    values = [helper.make_tensor_value_info(name, kind(x.dtype), x.shape) for name, x in inputs.items()]
    results = [helper.make_tensor_value_info(name, values[0].type.tensor_type.elem_type, None) for name in outputs]
    opsets = [helper.make_opsetid("", 23), helper.make_opsetid("com.microsoft", 1)]
    graph = helper.make_graph([node], "attention", values, results)
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    settings = onnxruntime.SessionOptions()
    settings.log_severity_level = 4
    session = onnxruntime.InferenceSession(model.SerializeToString(), settings, providers=["CPUExecutionProvider"])
    return session.run(outputs[:1], inputs)[0]


def _of_onnxruntime(*inputs: Array, attn_mask: Any = None, **options: Any) -> Any:
    """Compute the operator Attention, which groups heads without being told."""
    given = dict(zip("QKV", inputs, strict=True)) | ({} if attn_mask is None else {"mask": attn_mask})
    attributes = {name: int(x) if isinstance(x, bool) else x for name, x in options.items() if name != "enable_gqa"}
    return run_onnx("Attention", "", given, attributes)


class _Known(NamedTuple):
    """How a function with other arrays or arguments is called, and which options it has."""

    call: Callable[..., Any]
    options: tuple[str, ...]


_USUAL = ("attn_mask", "is_causal", "scale", "enable_gqa")
KNOWN = {
    "torch.nn.functional:scaled_dot_product_attention": _Known(_of_torch, _USUAL),
    "jax.nn:dot_product_attention": _Known(_of_jax, (*_USUAL, "bias", "query_seq_lengths", "key_value_seq_lengths")),
    "onnxruntime:Attention": _Known(_of_onnxruntime, (*_USUAL, "softcap")),
}


def _loaded(name: str) -> Any:
    """Return ``module:function`` if somebody imported the module, else None."""
    module, _, function = name.partition(":")
    return getattr(sys.modules.get(module), function, None)


def find_function(name: str) -> Callable[..., Any]:
    """Return ``module:function``, or raise ValueError that says what is wrong; importing the module may raise more."""
    module, _, path = name.partition(":")
    if not (module and path):
        raise ValueError("must be module:function, such as torch.nn.functional:scaled_dot_product_attention")
    found: Any = importlib.import_module(module)
    if name in KNOWN and not hasattr(found, path):  # an operator
        return KNOWN[name].call
    for part in path.split("."):
        if not hasattr(found, part):
            raise ValueError(f"there is no {path} in {module}")
        found = getattr(found, part)
    return found  # type: ignore[no-any-return]
