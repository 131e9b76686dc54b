"""Loading of state dicts in all common naming schemes into the parameters of a class.

A name gives the role of the array (query, key, value, out; weight or bias; which head) and its layout:

========================================  ================================================================
``W_query.weight``, ``W_q``, ``wq``       the book's ``nn.Linear``, (out, in)
``W_query``, ``W_q`` without ``.weight``  a bare parameter, (in, out): ``x @ W_query``
``bias_q``, ``bias_k``, ``bias_v``        the biases beside such parameters
``q_proj.weight`` ... ``o_proj.weight``   ``nn.Linear``
``query.weight``, ``key.weight`` ...      ``nn.Linear``, as in BERT
``in_proj_weight``, ``q_proj_weight``     ``torch.nn.MultiheadAttention``, (out, in)
``qkv.weight``, ``proj.weight``           ``nn.Linear``, the rows of query, key and value in this order
``c_attn.weight``, ``c_proj.weight``      GPT-2: (in, out) in the original, (out, in) in rewrites with ``nn.Linear``
``heads.N.`` before any of these          one of several heads
========================================  ================================================================

The name decides the layout, never the shape: the shape of a square matrix says nothing, and a rule that fails for some
matrices would be a trap. Only the names of GPT-2 are in use for two layouts; there the shape of c_attn decides. If that
is square too, nothing is loaded.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .._input.arrays import as_array, check_tensors, read_array
from .._input.contexts import in_default_mode
from ._files import printable

Array = NDArray[Any]

_FUSED = "query, key and value"
_FUSED_ROLES = ("query", "key", "value")
_ALIASES = {
    "query": ("w_query", "w_q", "wq", "q_proj", "query"),
    "key": ("w_key", "w_k", "wk", "k_proj", "key"),
    "value": ("w_value", "w_v", "wv", "v_proj", "value"),
    "out": ("out_proj", "o_proj", "w_o", "wo", "c_proj", "proj"),
    _FUSED: ("in_proj", "qkv", "c_attn"),
}
_ROLES = {alias: role for role, aliases in _ALIASES.items() for alias in aliases}
_BIASES = {"bias_q": "query", "bias_k": "key", "bias_v": "value"}
_CONV = ("c_attn", "c_proj")  # (in, out) in GPT-2's own files
_TORCH_MHA = ("in_proj", "q_proj", "k_proj", "v_proj")  # these stems take _weight and _bias
_NAME = re.compile(
    rf"(?P<prefix>(?:.+?\.)??)(?:heads\.(?P<head>\d+)\.)?(?P<stem>{'|'.join(_ROLES)})(?P<tail>[._](?:weight|bias)|)",
    re.IGNORECASE,
)
_BIAS_NAME = re.compile(rf"(?P<prefix>(?:.+?\.)??)(?:heads\.(?P<head>\d+)\.)?(?P<stem>{'|'.join(_BIASES)})")
_SHOWN = 8  # most names that an error lists


class LoadResult(NamedTuple):
    """Parameters without an array, and arrays without a parameter; both are empty unless ``strict=False``."""

    missing_keys: list[str]
    unexpected_keys: list[str]


class _Name(NamedTuple):
    """The parts of a name in a state dict."""

    prefix: str
    role: str  # a key of _ALIASES, or the name itself
    part: str  # "weight" or "bias"
    head: int | None = None
    stem: str = ""
    bare: bool = False  # a bare parameter, (in, out)


class _Slot(NamedTuple):
    """Identifies an array independently of its name."""

    role: str
    part: str
    head: int | None

    def __str__(self) -> str:
        return f"the {self.role} {self.part}" + ("" if self.head is None else f" of head {self.head}")


class _Found(NamedTuple):
    """The array of a slot in the state dict."""

    key: str
    array: Array | None  # (out, in); None if an error is reported already
    flipped: bool = False  # (in, out) in the state dict


def _parse(key: str) -> _Name | None:
    if (match := _BIAS_NAME.fullmatch(key)) is not None:
        head = None if match["head"] is None else int(match["head"])
        return _Name(match["prefix"], _BIASES[match["stem"]], "bias", head, match["stem"])
    match = _NAME.fullmatch(key)
    if match is None:
        return None
    stem, tail = match["stem"].lower(), match["tail"].lower()
    bare = tail == ""
    if (bare and not stem.startswith("w")) or (tail.startswith("_") and stem not in _TORCH_MHA):
        return None
    head = None if match["head"] is None else int(match["head"])
    if head is not None and _ROLES[stem] in ("out", _FUSED):
        return None
    return _Name(match["prefix"], _ROLES[stem], tail[1:] or "weight", head, stem, bare)


def _is_buffer(key: str, value: Any) -> bool:
    """Return whether this is a causal mask that a module stores with its weights, which cattn does not need."""
    last = key.rpartition(".")[2]
    ndim = getattr(value, "ndim", -1)
    return (
        (last in ("mask", "tril") and ndim >= 2)
        or (last == "bias" and ndim == 4)
        or (last == "masked_bias" and ndim == 0)
    )


def _read(value: Any, key: str) -> Array:
    """Return value as an array of real numbers. PyTorch's parameters and halves are accepted."""
    torch: Any = sys.modules.get("torch")  # a caller with tensors has imported it
    if torch is not None and isinstance(value, torch.Tensor):
        check_tensors(value, printable(key))
        value = value.detach().cpu()
        if value.dtype == torch.bfloat16:
            value = value.float()
    name = printable(key)
    array = read_array(value, name)
    return as_array(array.astype(np.float32) if array.dtype.name in ("float16", "bfloat16") else array, name)


def _listed(items: Iterable[object]) -> str:
    texts = [str(item) for item in items]
    more = len(texts) - _SHOWN
    return ", ".join(texts[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


class _Loader:
    """One call of `match`: finds an array for each parameter, and collects all problems."""

    def __init__(self, own: Mapping[str, Array], state: Mapping[str, Any], what: str) -> None:
        self.own = own
        self.state = state
        self.what = what
        self.names = {key: _parse(key) or _Name("", key, "weight") for key in own}
        self.plain = [
            key for key, name in self.names.items() if name.role == key
        ]  # the keys of Linear or of a subclass
        self.only_plain = 0 < len(self.plain) == len(self.names)  # other naming schemes do not apply
        self.problems: list[str] = []
        self.unexpected: list[str] = []
        self.found: dict[_Slot, _Found] = {}

    def error(self, problems: list[str]) -> ValueError:
        return ValueError("\n    ".join([f"cannot load into {self.what}:", *map(printable, problems)]))

    # ---- the parameters of the class, in (out, in) order ----
    def shape(self, key: str) -> tuple[int, ...]:
        shape = self.own[key].shape
        return shape[::-1] if self.names[key].bare else shape

    def total(self, role: str, part: str) -> tuple[int, ...] | None:
        """Return the shape of all heads of a role together, or None if the class has no such parameter."""
        roles = _FUSED_ROLES if role == _FUSED else (role,)
        shapes = [self.shape(key) for key, name in self.names.items() if name.role in roles and name.part == part]
        return (sum(shape[0] for shape in shapes), *shapes[0][1:]) if shapes else None

    # ---- keys of the state dict ----
    def name(self, key: str) -> _Name | None:
        for plain in self.plain:
            if key == plain or key.endswith("." + plain):
                return _Name(key.removesuffix(plain), plain, "weight")
        return None if self.only_plain else _parse(key)

    def keys(self) -> dict[str, _Name]:
        """Return the keys of the single module in the state dict, with their parsed names."""
        parsed: dict[str, _Name] = {}
        for key, value in self.state.items():
            if not isinstance(key, str):
                raise TypeError(f"the keys of state_dict must be strings, got {type(key).__name__}: {key!r}")
            if not self.only_plain and _is_buffer(key, value):
                continue
            name = self.name(key)
            # torch.nn.MultiheadAttention(add_bias_kv=True) has three dimensions here: one more key and value
            if name is None or (name.stem in _BIASES and getattr(value, "ndim", 1) != 1):
                self.unexpected.append(key)
            else:
                parsed[key] = name
        # An output projection alone is not an attention module: GPT-2's mlp has a c_proj too.
        prefixes = sorted({name.prefix for name in parsed.values() if name.role != "out"})
        if len(prefixes) > 1:
            shown = _listed(repr(prefix) for prefix in prefixes)
            raise self.error(
                [f"ambiguous: the state holds several modules, with the prefixes {shown}; pass the prefix of one"]
            )
        chosen = {key: name for key, name in parsed.items() if not prefixes or name.prefix == prefixes[0]}
        self.unexpected += [key for key in parsed if key not in chosen]
        return chosen

    # ---- arrays of the slots ----
    def collect(self) -> None:
        """Fill `found` from the state dict."""
        names = self.keys()
        arrays = {key: _read(self.state[key], key) for key in names}
        transposed = self.is_transposed(names, arrays)
        for key, name in names.items():
            array = arrays[key]
            flipped = array.ndim == 2 and (name.bare or (transposed and name.stem in _CONV))
            entry = _Found(key, array.T if flipped else array, flipped)
            if name.role == _FUSED:
                slots = [_Slot(role, name.part, None) for role in _FUSED_ROLES]
                self.cut(entry, self.total(_FUSED, name.part), slots)
            else:
                self.add(_Slot(name.role, name.part, name.head), entry)
        if any(name.head is not None for name in self.names.values()):
            self.separate_heads()
        else:
            self.join_heads()

    def is_transposed(self, names: Mapping[str, _Name], arrays: Mapping[str, Array]) -> bool:
        """Return whether c_attn.weight and c_proj.weight are (in, out), as in GPT-2's own files."""
        shapes = {name.stem: arrays[key].shape for key, name in names.items() if name.part == "weight"}
        stem = next((stem for stem in _CONV if stem in shapes), None)
        if stem is None:
            return False
        wanted = self.total(_ROLES[stem], "weight")
        if wanted is not None and shapes[stem] == wanted == wanted[::-1]:
            other = "in_proj_weight" if stem == "c_attn" else "out_proj.weight"
            self.problems.append(
                f"ambiguous: {stem}.weight has shape {wanted}, and this name is in use for (in, out) as well as for "
                f"(out, in); transpose it if it is (in, out), as in GPT-2's own files, and rename it to {other}"
            )
        return wanted is not None and shapes[stem] == wanted[::-1]

    def add(self, slot: _Slot, entry: _Found) -> None:
        if slot in self.found:
            self.problems.append(f"ambiguous: {self.found[slot].key} and {entry.key} both give {slot}")
        else:
            self.found[slot] = entry

    def cut(self, entry: _Found, total: tuple[int, ...] | None, slots: list[_Slot]) -> None:
        """Give each of `slots` its rows of an array that holds the rows of all of them."""
        if total is None:
            self.unexpected.append(entry.key)
            return
        fits = self.fits(entry, total)
        start = 0
        for slot in slots:
            own = [key for key, name in self.names.items() if (name.role, name.part) == slot[:2]]
            rows = sum(self.shape(key)[0] for key in own if slot.head in (None, self.names[key].head))
            part = entry.array[start : start + rows] if fits and entry.array is not None else None
            self.add(slot, entry._replace(array=part))
            start += rows

    def separate_heads(self) -> None:
        """Cut arrays of all heads: the class has a parameter for each head."""
        heads = sorted({name.head for name in self.names.values() if name.head is not None})
        for slot in [slot for slot in self.found if slot.head is None]:
            entry = self.found.pop(slot)
            self.cut(entry, self.total(slot.role, slot.part), [slot._replace(head=head) for head in heads])

    def join_heads(self) -> None:
        """Concatenate the rows of the heads: the class has one parameter for all of them."""
        heads = sorted({slot.head for slot in self.found if slot.head is not None})
        if len(heads) > 1:  # a single head may have any number
            heads = sorted({*heads, *range(len(heads))})
        for whole in dict.fromkeys(slot._replace(head=None) for slot in self.found if slot.head is not None):
            slots = [whole._replace(head=head) for head in heads]
            missing = [slot for slot in slots if slot not in self.found]
            entries = [self.found.pop(slot) for slot in slots if slot in self.found]
            arrays = [entry.array for entry in entries if entry.array is not None]
            joined = None
            if missing:
                self.problems.append(f"missing: {_listed(missing)}")
            elif len({array.shape[1:] for array in arrays}) > 1 or arrays[0].ndim == 0:
                shapes = _listed(array.shape for array in arrays)
                self.problems.append(f"wrong shape: {_listed(entry.key for entry in entries)} have {shapes}")
            else:
                joined = np.concatenate(arrays)
            self.add(whole, entries[0]._replace(array=joined))

    def fits(self, entry: _Found, wanted: tuple[int, ...]) -> bool:
        """Compare shapes. Report them in the layout of the state dict."""
        if entry.array is None or entry.array.shape == wanted:
            return entry.array is not None
        shape = entry.array.shape
        if entry.flipped:
            shape, wanted = shape[::-1], wanted[::-1]
        hint = ""
        if len(shape) == 2 and shape == wanted[::-1]:
            order = "(in, out)" if entry.flipped else "(out, in), as in nn.Linear"
            hint = f"; it looks transposed: under this name it is {order}"
        self.problems.append(f"wrong shape: {entry.key} has {shape}, wanted {wanted}{hint}")
        return False

    # ---- the result ----
    @in_default_mode
    def cast(self, entry: _Found, array: Array, dtype: np.dtype[Any]) -> Array:
        """Return a new array, which shares no memory with the state dict."""
        with np.errstate(over="ignore"):
            result = np.array(array, dtype=dtype, order="C")
        if dtype.itemsize < array.itemsize and not np.array_equal(np.isfinite(result), np.isfinite(array)):
            self.problems.append(f"too large: {entry.key} holds numbers beyond the range of {dtype}")
        return result

    def results(self) -> tuple[dict[str, Array], list[str]]:
        """Return the new arrays by the names of the class, and the names of missing ones."""
        new, missing = {}, []
        for own, name in self.names.items():
            entry = self.found.pop(_Slot(name.role, name.part, name.head), None)
            if entry is None:
                missing.append(own)
            elif self.fits(entry, self.shape(own)):
                assert entry.array is not None
                new[own] = self.cast(entry, entry.array.T if name.bare else entry.array, self.own[own].dtype)
        return new, missing

    def bias_hint(self, missing: list[str], unexpected: list[str]) -> str:
        """Return how to make the class if the only difference is whether some of its layers have biases, or ""."""
        parsed = [name for key in unexpected if (name := self.name(key)) is not None and name.part == "bias"]
        for option, roles in (("qkv_bias", _FUSED_ROLES), ("out_bias", ("out",))):
            layers = [key for key, name in self.names.items() if name.role in roles and not name.bare]
            own = [key for key in layers if self.names[key].part == "bias"]
            if own and set(own) <= set(missing) and set(layers) - set(own) - set(missing):
                return f"; make the class with {option}=False"
            if layers and not own and any(name.role in (*roles, _FUSED) for name in parsed):
                return f"; make the class with {option}=True"
        return ""


def _part(state: Mapping[Any, Any], prefix: str | None) -> Mapping[str, Any]:
    """Return the arrays whose names start with the prefix."""
    if prefix is None:
        return state
    if not isinstance(prefix, str):
        raise TypeError(f"prefix must be a str, got {type(prefix).__name__}")
    chosen = {key: value for key, value in state.items() if isinstance(key, str) and key.startswith(prefix)}
    if not chosen:
        starts = dict.fromkeys(name.prefix for key in state if isinstance(key, str) and (name := _parse(key)))
        shown = _listed(map(repr, starts)) or "none of a known scheme"
        raise ValueError(printable(f"prefix {prefix!r} begins no name of state_dict; its prefixes are {shown}"))
    return chosen


def match(
    state: Mapping[str, Any], own: Mapping[str, Array], *, strict: bool, what: str, prefix: str | None = None
) -> tuple[dict[str, Array], LoadResult]:
    """Return new arrays for the parameters `own`, in their shapes and dtypes, and the missing and unexpected names.

    Raises ValueError with a list of all problems; `what` names the class in it. Changes nothing.
    """
    if not isinstance(state, Mapping):
        raise TypeError(f"state_dict must be a mapping of names to arrays, got {type(state).__name__}")
    loader = _Loader(own, _part(state, prefix), what)
    loader.collect()
    new, missing = loader.results()
    # The names of the rest are known, but the class has no such parameter.
    unexpected = sorted({*loader.unexpected, *(entry.key for entry in loader.found.values())})
    problems = loader.problems
    if strict and missing:
        problems.append(f"missing: {_listed(missing)}{loader.bias_hint(missing, [])}")
    if strict and unexpected:
        problems.append(f"unexpected: {_listed(unexpected)}{loader.bias_hint([], unexpected)}")
    if problems:
        raise loader.error(problems)
    return new, LoadResult(missing, unexpected)
