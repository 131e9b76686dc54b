"""An attention backend for the models of Hugging Face transformers, on the CPU.

`register` gives transformers two functions. One computes attention by cattn. The other describes the mask of a layer:
transformers passes a function of positions, and causality, windows and padding become numbers and lengths instead of
a matrix of T x T booleans.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from typing import Any, NoReturn, TypeAlias

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from .._input.names import public_names
from ._eager_attention import (
    asks_the_interface,
    find_keywords,
    has_attention_of_its_own,
    knows_eager_alone,
    wants_a_tensor,
)
from .torch import scaled_dot_product_attention
from .torch._indexers import Chosen
from .torch._tensors import converted

__all__ = ["AttentionMask", "register", "set_attn_implementation"]
__dir__ = public_names(globals())


# Keywords that layers write into their calls and that say nothing about attention.
_NO_MEANING = frozenset(
    {
        "cache", "cache_position", "deterministic", "hidden_states", "layer_idx", "logits_to_keep",
        "num_items_in_batch", "output_attentions", "output_hidden_states", "output_router_logits", "past_key_values",
        "position_embeddings", "position_ids", "return_dict", "use_cache",
    }
)  # fmt: skip


# ---- the structure of a mask ---------------------------------------------------------------------------------------
class _Unknown:
    """An index that may not be looked at: a mask that depends on it has no structure."""

    __hash__ = None  # type: ignore[assignment]

    def __bool__(self) -> NoReturn:
        raise TypeError("the mask depends on a value")

    def __eq__(self, other: object) -> NoReturn:
        raise TypeError("the mask depends on a value")

    __ne__ = __eq__


class _Range(_Unknown):
    """A condition lower <= key - query <= upper on two positions; None sets no bound."""

    device = torch.device("cpu")

    def __init__(self, lower: int | None = None, upper: int | None = None) -> None:
        self.lower = lower
        self.upper = upper

    def __and__(self, other: object) -> _Range:
        if not isinstance(other, _Range):
            return NotImplemented
        lowers = [bound for bound in (self.lower, other.lower) if bound is not None]
        uppers = [bound for bound in (self.upper, other.upper) if bound is not None]
        return _Range(max(lowers) if lowers else None, min(uppers) if uppers else None)

    def to(self, _device: Any) -> _Range:
        return self


class _Position(_Unknown):
    """The number keys * key + queries * query + constant, for the positions of a key and a query.

    Mask functions are called with tensors of positions. With these in the place of tensors they tell their structure.
    """

    def __init__(self, keys: int, queries: int, constant: int = 0) -> None:
        self.terms = (keys, queries, constant)

    def __sub__(self, other: _Position | int) -> _Position:
        if isinstance(other, int):
            other = _Position(0, 0, other)
        keys, queries, constant = (a - b for a, b in zip(self.terms, other.terms, strict=True))
        return _Position(keys, queries, constant)

    def __add__(self, other: int) -> _Position:
        return self - -other

    def __abs__(self) -> _Distance:
        return _Distance(self)

    def _at_most_zero(self) -> _Range:
        keys, queries, constant = self.terms
        if (keys, queries) == (1, -1):
            return _Range(upper=-constant)
        if (keys, queries) == (-1, 1):
            return _Range(lower=constant)
        if (keys, queries) in ((-1, 0), (0, -1)) and constant <= 0:  # no position is negative
            return _Range()
        raise TypeError("the mask depends on a single position")

    def __le__(self, other: _Position | int) -> _Range:
        return (self - other)._at_most_zero()

    def __lt__(self, other: _Position | int) -> _Range:
        return (self - other + 1)._at_most_zero()

    def __ge__(self, other: _Position | int) -> _Range:
        return (_Position(0, 0) - (self - other))._at_most_zero()

    def __gt__(self, other: _Position | int) -> _Range:
        return (_Position(0, 0) - (self - other) + 1)._at_most_zero()

    def new_ones(self, _size: Any, dtype: Any) -> _Range:
        return _Range()


class _Distance(_Unknown):
    """The distance of a key from a query."""

    def __init__(self, difference: _Position) -> None:
        self.difference = difference

    def __le__(self, bound: int) -> _Range:
        return (self.difference <= bound) & (self.difference >= -bound)


def _find_range(mask_function: Any) -> _Range | None:
    """Return the range of a mask function, or None if it is more than a range."""
    try:
        found = mask_function(_Unknown(), _Unknown(), _Position(0, 1), _Position(1, 0))
    except Exception:  # a function that looks at values fails in ways of its own; its dense mask is right
        return None
    if not isinstance(found, _Range) or (found.upper or 0) < 0 or (found.lower or 0) > 0:
        return None
    return found


# Scores plus a mask, in PyTorch's names. Only attention adds a mask to something.
_SUMS = frozenset({"add", "add_", "__add__", "__radd__", "__iadd__", "__sub__", "__rsub__", "sub", "sub_", "rsub"})


def _by_the_tensor(name: str) -> Any:
    """Return an operator of `AttentionMask` that is computed with its tensor, or refused."""

    def operate(self: AttentionMask, *others: Any) -> Any:
        self._refuse_attention_in(name)
        return getattr(self.dense(), name)(*others)

    return operate


class AttentionMask:
    """What a layer may see, as cattn takes it. Made by the mask function that `register` adds to transformers.

    It takes the place of eager attention's mask, a float tensor of shape (B, 1, T_q, T_k), on the way through a model.
    A model that takes a part of it or computes with it gets that tensor, which is made then. A model that adds it to
    scores of its own, because it does not use the attention interface, gets a NotImplementedError.

    Attributes
    ----------
    shape : tuple of int
        The shape of the tensor in whose place it is.
    options : dict
        Arguments of the attention function: causality, window, offset, lengths and starts.
    attn_mask : Tensor or None
        A boolean mask besides: (B, 1, 1, T_k) for padding between tokens, the whole mask for other patterns.
    dtype : torch.dtype
        The dtype of the tensor in whose place it is.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        options: dict[str, Any],
        attn_mask: Tensor | None,
        config: Any,
        make_visible: Callable[[], Tensor],
        dtype: torch.dtype = torch.float32,
        make_for_keys: Callable[[int], Any] = lambda keys: None,
    ) -> None:
        self.shape = shape
        self.options = options
        self.attn_mask = attn_mask
        self.dtype = dtype
        self._config = config
        self._make_visible = make_visible
        self._make_for_keys = cache(make_for_keys)
        self._visible: Tensor | None = None

    device = torch.device("cpu")

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self.shape)

    def dim(self) -> int:
        """Return the number of dimensions."""
        return self.ndim

    def size(self, dim: int | None = None) -> Any:
        """Return the shape, or one of its numbers."""
        return self.shape if dim is None else self.shape[dim]

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Return the mask itself, or its tensor if another dtype is asked for."""
        wanted = torch.empty(0, dtype=self.dtype, device=self.device).to(*args, **kwargs).dtype
        return self if wanted is self.dtype else self.dense().to(*args, **kwargs)

    def visible(self) -> Tensor:
        """Return the boolean tensor of the shape `shape`: True where a query sees a key."""
        if self._visible is None:
            self._visible = self._make_visible()
        return self._visible

    def for_keys(self, keys: int) -> AttentionMask:
        """Return the mask as one of so many keys, of which the query is the last; itself if their padding is unknown.

        A model whose first layer has a state asks that layer how many keys there are, and it has none.
        """
        found: AttentionMask | None = self._make_for_keys(keys)
        return self if found is None else found

    def dense(self) -> Tensor:
        """Return the tensor of eager attention: 0 where a query sees a key, the least finite number elsewhere."""
        if has_attention_of_its_own(type(self._config)):
            self._refuse("computes with")
        return _add_nothing_or_least(self.visible(), self.dtype)

    def _refuse(self, action: str) -> NoReturn:
        raise NotImplementedError(
            f"the model of {type(self._config).__name__} {action} its attention mask itself, instead of leaving "
            f'attention to the interface of transformers: use attn_implementation="eager" for it'
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.dense(), name)

    def __getitem__(self, index: Any) -> Any:
        plain = self.ndim == 4 and type(index) is tuple and all(type(i) in (int, slice) for i in index)
        if not plain or index not in ((slice(None), 0), (slice(None), 0, slice(None), slice(None))):
            return self.dense()[index]
        shape = (self.shape[0], *self.shape[2:])  # for an indexer
        return AttentionMask(
            shape, self.options, self.attn_mask, self._config, lambda: self.visible()[:, 0], self.dtype
        )

    def masked_fill(self, mask: Any, value: Any) -> Any:
        """Return the tensor with a number in some places, or the keys that an indexer chose among the visible ones."""
        return mask if isinstance(mask, Chosen) else self.dense().masked_fill(mask, value)

    def _refuse_attention_in(self, name: str) -> None:
        """Refuse a sum with the mask. The one without an axis of heads is an indexer's, which adds it to scores."""
        if name in _SUMS and self.ndim == 4:
            self._refuse("computes add with")

    __add__, __radd__, __sub__, __rsub__ = map(_by_the_tensor, ("__add__", "__radd__", "__sub__", "__rsub__"))
    __hash__ = object.__hash__
    __eq__, __ne__, __lt__, __le__ = map(_by_the_tensor, ("__eq__", "__ne__", "__lt__", "__le__"))
    __gt__, __ge__, __neg__, __mul__ = map(_by_the_tensor, ("__gt__", "__ge__", "__neg__", "__mul__"))
    __rmul__, __truediv__ = map(_by_the_tensor, ("__rmul__", "__truediv__"))

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for x in (*args, *(kwargs or {}).values()):
            if isinstance(x, cls):
                x._refuse_attention_in(func.__name__)
        args, kwargs = tree_map_only(cls, cls.dense, (tuple(args), kwargs or {}))
        return func(*args, **kwargs)


def _add_nothing_or_least(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a boolean mask as eager attention has it, to be added to scores."""
    least = torch.full((), torch.finfo(dtype).min, dtype=dtype, device=visible.device)
    return torch.where(visible, torch.zeros_like(least), least)


def _describe_padding(
    attention_mask: Tensor, kv_length: int, kv_offset: Any
) -> tuple[dict[str, Tensor], Tensor | None]:
    """Return lengths and starts (B,) for padding at the ends, or a mask (B, 1, 1, T_k) for padding between tokens.

    The starts are there with the mask, too: they make no bit depend on the padding before the first token.
    """
    missing = kv_length + kv_offset - attention_mask.shape[-1]
    if missing > 0:
        attention_mask = torch.nn.functional.pad(attention_mask, (0, missing))
    visible = attention_mask[:, kv_offset : kv_offset + kv_length].to(torch.bool)
    starts = visible.to(torch.uint8).argmax(-1)
    if torch.compiler.is_compiling():  # its values are not known yet
        return {"key_value_seq_starts": starts}, visible[:, None, None, :]
    tokens = visible.sum(-1)
    if bool((tokens == kv_length).all()):
        return {}, None
    lengths, keys = starts + tokens, torch.arange(kv_length, device="cpu")
    ends = {"key_value_seq_starts": starts} if bool((starts > 0).any()) else {}
    if not bool((visible == ((keys >= starts[:, None]) & (keys < lengths[:, None]))).all()):
        return ends, visible[:, None, None, :]
    if bool((lengths < kv_length).any()):
        ends["key_value_seq_lengths"] = lengths
    return ends, None


def _make_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: Any = 0,
    mask_function: Any = None,
    attention_mask: Tensor | AttentionMask | None = None,
    config: Any = None,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> AttentionMask | Tensor:
    """Describe the mask of a layer; it has the arguments of transformers' ``sdpa_mask``."""
    from transformers.masking_utils import causal_mask_function, sdpa_mask

    if isinstance(attention_mask, AttentionMask):  # generate() makes the masks before it calls the model
        return attention_mask
    if mask_function is None:
        mask_function = causal_mask_function
    # What transformers' functions take, without their permissions to make no mask. A static cache counts its tokens in
    # place, so that the tensor of the offset must be kept as it is now.
    dense = options | {
        "batch_size": batch_size, "q_length": q_length, "kv_length": kv_length, "q_offset": q_offset + 0,
        "kv_offset": kv_offset + 0, "mask_function": mask_function, "attention_mask": attention_mask, "config": config,
        "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False,
    }  # fmt: skip

    def make_visible() -> Tensor:
        visible: Tensor = sdpa_mask(**dense)
        return visible

    def make_for_keys(keys: int) -> Any:
        if attention_mask is not None and attention_mask.shape[-1] != keys:
            return None
        given = (mask_function, attention_mask, config, dtype)
        return _make_mask(batch_size, q_length, keys, keys - q_length, 0, *given, **options)

    if wants_a_tensor(type(config)):
        return _add_nothing_or_least(make_visible(), dtype)
    shape = (batch_size, 1, q_length, kv_length)
    # transformers allows to skip the mask where it is causal, a window or nothing. The compiler cannot follow the
    # other functions of positions into tensors, which may name the sequence of each token.
    plain = options.get("allow_is_causal_skip", True) or options.get("allow_is_bidirectional_skip", False)
    found = _find_range(mask_function) if plain or not torch.compiler.is_compiling() else None
    if found is None:
        visible = make_visible()
        return AttentionMask(shape, {}, visible, config, lambda: visible, dtype, make_for_keys)
    offset = q_offset - kv_offset
    causal = found.upper == 0
    right = -1 if causal or found.upper is None else found.upper
    left = -1 if found.lower is None else -found.lower
    if isinstance(offset, int):  # bounds that hide no key of this call cost time for nothing
        causal = causal and offset < kv_length - 1
        left = -1 if left >= q_length - 1 + offset else left
    call: dict[str, Any] = {}
    if causal:
        call["is_causal"] = "upper_left"
    if (left, right) != (-1, -1):
        call["window_size"] = (left, right)
    if call:
        call["query_offset"] = offset
    between: Tensor | None = None
    if attention_mask is not None:
        ends, between = _describe_padding(attention_mask, kv_length, kv_offset)
        call |= ends
    return AttentionMask(shape, call, between, config, make_visible, dtype, make_for_keys)


# ---- attention -----------------------------------------------------------------------------------------------------
Result: TypeAlias = tuple[Tensor, Tensor | None]


def _wants_weights(options: dict[str, Any]) -> bool:
    """Return whether the caller asks for the weights: by a keyword, or by the hooks that collect a model's outputs."""
    if options.get("output_attentions"):
        return True
    from transformers.utils import output_capturing

    collected = output_capturing._active_collector.get()
    return collected is not None and any(key.endswith("attentions") for key in collected)


def _refuse_unknown(module: Any, options: dict[str, Any]) -> None:
    given = [name for name, value in options.items() if value is not None and name not in _NO_MEANING]
    if not given:
        return
    known = find_keywords(type(module))
    unknown = sorted(given if known is None else known.intersection(given))
    if unknown:
        raise NotImplementedError(
            f"{type(module).__name__} passes {', '.join(unknown)} to attention, which cattn does not know: "
            f'use attn_implementation="eager" for this model'
        )


def _fit_mask(
    module: Any, mask: AttentionMask, wanted: tuple[int, int, int, int]
) -> tuple[dict[str, Any], Tensor | None]:
    """Return a mask as arguments; one that was made for a single query or sequence serves all of them."""
    if mask.shape[2:] == (1, 1) and wanted[2] == 1 < wanted[3]:
        mask = mask.for_keys(wanted[3])
    if mask.shape == wanted:
        return mask.options, mask.attn_mask
    fits = all(size in (1, target) for size, target in zip(mask.shape[:3], wanted[:3], strict=True))
    if not fits or mask.shape[3] != wanted[3]:
        raise NotImplementedError(
            f"{type(module).__name__} made its attention mask for (B, T_q, T_k) = {(mask.shape[0], *mask.shape[2:])} "
            f'and attends with {(wanted[0], *wanted[2:])}: use attn_implementation="eager" for this model'
        )
    return {}, mask.visible()


def _join(attn_mask: Tensor | None, visible: Tensor) -> Tensor:
    """Return the mask with the keys of the boolean mask hidden as well."""
    if attn_mask is None:
        return visible
    if attn_mask.dtype is torch.bool:
        return attn_mask & visible
    return attn_mask.masked_fill(~visible, -torch.inf)


def _find_lists(module: Any, indices: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Return the keys that an indexer chose for each query, as lists (B, 1 or H, T_q, n) with -1 for none.

    Indices are of keys, of shape (B, T_q, n), or of blocks of keys, of shape (B, H_i, T_q, n). Negative
    ones choose nothing.
    """
    if indices.ndim == 3:
        return indices[:, None]
    size = getattr(getattr(module, "indexer", None), "block_size", None)
    if size is None:
        raise NotImplementedError(f"{type(module).__name__} passes block_indices, but has no indexer.block_size")
    first, inside = indices[..., None] * size, torch.arange(size, device=indices.device)
    keys = torch.where((first >= 0) & (first + inside < key.shape[2]), first + inside, -1).flatten(-2)
    return keys.repeat_interleave(query.shape[1] // keys.shape[1], dim=1)


def _find_selected(lists: Tensor, keys: int) -> Tensor:
    """Return lists of keys as a mask (B, 1 or H, T_q, T_k)."""
    chosen = torch.zeros((*lists.shape[:3], keys + 1), dtype=torch.bool, device=lists.device)
    return chosen.scatter_(-1, lists.long().masked_fill(lists < 0, keys), True)[..., :keys]


def _find_own_sequence(query: Tensor, key: Tensor, ends: Tensor, key_ends: Tensor | None) -> Tensor | None:
    """Return which keys belong to the sequence of each query of a batch without padding; None for one sequence."""
    ends, key_ends = ends.long(), ends.long() if key_ends is None else key_ends.long()
    if ends.shape[0] <= 2 and key_ends.shape[0] <= 2:
        return None
    if query.shape[0] != 1:
        raise NotImplementedError(f"cu_seq_lens_q needs a batch of one row, got {query.shape[0]} rows")
    sequences = [
        torch.bucketize(torch.arange(tokens.shape[2], device=bounds.device), bounds, right=True)
        for tokens, bounds in ((query, ends), (key, key_ends))
    ]
    return (sequences[0][:, None] == sequences[1])[None, None]


def _read_mask(
    module: Any, mask: Any, query: Tensor, key: Tensor, is_causal: bool | None, sliding_window: int | None
) -> tuple[dict[str, Any], Tensor | None]:
    """Return arguments of the attention function, and a mask besides."""
    if isinstance(mask, AttentionMask):
        return _fit_mask(module, mask, (query.shape[0], 1, query.shape[2], key.shape[2]))
    if isinstance(mask, Tensor):
        if mask.ndim != 4:
            raise ValueError(f"attention_mask has shape {tuple(mask.shape)}, wanted (B, 1 or H, T_q, T_k)")
        return {}, mask
    if mask is not None:
        raise TypeError(f"attention_mask must be a torch.Tensor, got {type(mask).__name__}")
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if causal and knows_eager_alone(type(module)):
        causal = False  # eager attention without a mask hides nothing
    if not causal or query.shape[2] == 1:
        if sliding_window is not None:
            raise NotImplementedError(f"{type(module).__name__} passes sliding_window without a mask or causality")
        return {}, None
    window = (-1, -1) if sliding_window is None else (sliding_window - 1, -1)
    return {"is_causal": "upper_left", "query_offset": 0, "window_size": window}, None


def _attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    sliding_window: int | None = None,
    sinks: Tensor | None = None,
    indices: Tensor | None = None,
    block_indices: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: Any = None,
    max_length_k: Any = None,
    **options: Any,
) -> Result:
    """Compute the attention of a layer; it has the signature of transformers' attention functions."""
    _refuse_unknown(module, options)
    if isinstance(attention_mask, Chosen):
        indices, attention_mask, is_causal = attention_mask.indices, None, False
    call, attn_mask = _read_mask(module, attention_mask, query, key, is_causal, sliding_window)
    if isinstance(attn_mask, Tensor) and attn_mask.is_floating_point():
        attn_mask = converted(attn_mask, query.dtype, "attention_mask")
    weights, dropout = _wants_weights(options), dropout if module.training else 0.0
    chosen = block_indices if indices is None else indices
    if chosen is not None:
        lists = _find_lists(module, chosen, query, key)
        if weights or dropout:  # of all keys
            attn_mask = _join(attn_mask, _find_selected(lists, key.shape[2]))
        else:
            call = {**call, "key_indices": lists}
    if cu_seq_lens_q is not None:
        own = _find_own_sequence(query, key, cu_seq_lens_q, cu_seq_lens_k)
        attn_mask = attn_mask if own is None else _join(attn_mask, own)
    result: Any = scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask,
        dropout,
        scale=scaling,
        enable_gqa=None,
        bias=position_bias,
        softcap=softcap,
        sinks=None if s_aux is None else s_aux.reshape(-1),
        return_weights=weights,
        return_lse=sinks is not None,
        **call,
    )
    plain = not weights and sinks is None
    out, found = (result, None) if plain else (result.out, result.weights if weights else None)
    if sinks is not None:  # one logit of each query: a factor of what it gives to keys
        share = torch.sigmoid(result.lse.unsqueeze(-1) - sinks).to(out.dtype)
        out, found = out * share, None if found is None else found * share
    return out.transpose(1, 2).contiguous(), found


def register(name: str = "cattn") -> None:
    """Make cattn an attention implementation of Hugging Face transformers.

    Afterwards ``AutoModel.from_pretrained(..., attn_implementation="cattn")`` and
    ``model.set_attn_implementation("cattn")`` compute attention on the CPU by cattn.

    Parameters
    ----------
    name : str
        The name of the implementation.

    Raises
    ------
    ImportError
        The package transformers is not installed.
    ValueError
        The name contains the name of one of transformers' own implementations, which it treats in a way of its own.

    Notes
    -----
    Computed without a matrix of scores: causality, sliding windows, padding on either side, grouped heads, softcap
    (Gemma 2), sinks (``s_aux``, GPT-OSS), and position biases (T5); with gradients, dropout, dynamic and static caches,
    and under ``torch.compile``. ``output_attentions=True`` gives the weights, before dropout. Masks of other patterns
    are computed from a boolean matrix.

    A keyword of a model that cattn does not know, and a model that computes with the mask itself, is a
    NotImplementedError that names it.

    Examples
    --------
    >>> from cattn.integrations import transformers
    >>> transformers.register()  # doctest: +SKIP
    >>> model.set_attn_implementation("cattn")  # doctest: +SKIP
    """
    if not isinstance(name, str):
        raise TypeError(f"name must be a str, got {type(name).__name__}")
    reserved = [word for word in ("eager", "sdpa", "flash", "flex", "paged") if word in name]
    if reserved or not name:
        raise ValueError(f"name must not contain {reserved[0]!r}, got {name!r}" if reserved else "name is empty")
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
    except ImportError as error:
        raise ImportError("this needs transformers: pip install 'cattn[transformers]'") from error
    AttentionInterface.register(name, _attend)
    AttentionMaskInterface.register(name, _make_mask)


def set_attn_implementation(model: Any, name: str = "cattn") -> None:
    """Let a model compute its attention by cattn, or say why it cannot.

    ``model.set_attn_implementation`` does the same, but leaves a model as it is that computes attention itself, with no
    more than a line in transformers' log.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        The model. It is not changed if there is an error.
    name : str
        The name of the implementation. It is registered if it is not yet.

    Raises
    ------
    NotImplementedError
        All layers of the model compute attention themselves, or it has no attention.

    Warns
    -----
    UserWarning
        A part of the model computes attention itself, and goes on to. The warning names its classes.

    Examples
    --------
    >>> from cattn.integrations.transformers import set_attn_implementation
    >>> set_attn_implementation(model)  # doctest: +SKIP
    """
    register(name)
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"model must be a transformers.PreTrainedModel, got {type(model).__name__}")
    if not any(asks_the_interface(cls) for cls in {type(x) for x in model.modules()}):
        raise NotImplementedError(
            f"no layer of {type(model).__name__} leaves attention to the interface of transformers: the model computes "
            f"attention itself, or it has none"
        )
    parts = dict.fromkeys(type(x) for x in model.modules() if isinstance(x, PreTrainedModel))
    own = [cls.__name__ for cls in parts if not cls._can_set_attn_implementation()]
    if own:
        warnings.warn(
            f"{', '.join(own)} keep their own attention: they do not leave it to the interface of transformers",
            stacklevel=2,
        )
    model.set_attn_implementation(name)
