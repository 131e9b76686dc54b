"""The chapter's attention classes as PyTorch modules: the names and state dicts of `cattn.nn`, trained by autograd.

The layers are PyTorch's own ``nn.Linear`` and ``nn.Dropout``, drawn in the order of the NumPy classes: the same
``torch.manual_seed`` gives the parameters that `cattn.manual_seed` gives there. Attention is the operator of
`cattn.integrations.torch`.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

import cattn

from ..._input.checks import as_head_counts, as_size
from ..._input.names import public_names
from ..._input.types import Window
from ...functional._options import entries
from ...nn._state_dict import LoadResult, match
from ._attention import scaled_dot_product_attention
from ._tensors import check_memory

__all__ = ["CausalAttention", "MultiHeadAttention", "MultiHeadAttentionWrapper", "SelfAttention_v1", "SelfAttention_v2"]
__dir__ = public_names(globals())


# torch.fx traces through modules with stand-ins for tensors, which have no shapes: it takes these functions as a whole.
for _name in ("_tokens", "_attend", "_join", "_result"):
    torch.fx.wrap(_name)


def _tokens(x: Tensor, d_in: int, context_length: int | None = None) -> Tensor:
    """Return x as (B, T, d_in), with T up to context_length."""
    if not isinstance(x, Tensor):
        raise TypeError(f"x must be a torch.Tensor, got {type(x).__name__}")
    if x.ndim not in (2, 3) or x.shape[-1] != d_in:
        raise ValueError(f"x has shape {tuple(x.shape)}, wanted (T, {d_in}) or (B, T, {d_in})")
    if context_length is not None and x.shape[-2] > context_length:
        raise ValueError(f"x has {x.shape[-2]} tokens, context_length is {context_length}")
    check_memory(x, "x")
    return x if x.ndim == 3 else x.unsqueeze(0)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    is_causal: bool,
    return_weights: bool,
    dropout_p: float = 0.0,
    window_size: Window = (-1, -1),
) -> tuple[Tensor, Tensor | None]:
    """Return the context (B, T, H * d_v) and the weights of q, k, v (B, H, T, d)."""
    result = scaled_dot_product_attention(
        q, k, v, dropout_p=dropout_p, is_causal="upper_left" if is_causal else False, enable_gqa=True,
        window_size=window_size, return_weights=return_weights,
    )  # fmt: skip
    out, weights = (result.out, result.weights) if return_weights else (result, None)
    return out.transpose(1, 2).flatten(2), weights


def _join(parts: list[tuple[Tensor, Tensor | None]]) -> tuple[Tensor, Tensor | None]:
    """Return the contexts and weights of heads as one call returns them."""
    contexts, weights = zip(*parts, strict=True)
    return torch.cat(contexts, dim=-1), None if weights[0] is None else torch.cat(weights, dim=1)


def _active(dropout: nn.Dropout) -> float:
    """Return the probability of dropping a weight in the present mode."""
    return dropout.p if dropout.training else 0.0


def _result(x: Tensor, context: Tensor, weights: Tensor | None, one_head: bool = True) -> Any:
    """Remove the axes that the caller's x does not have."""
    if weights is not None and one_head:
        weights = weights[:, 0]
    if x.ndim == 2:
        context, weights = context[0], None if weights is None else weights[0]
    return context if weights is None else (context, weights)


# The entries that differ from the class of `cattn.nn`, whose rng PyTorch has in torch.manual_seed.
_OWN = """
context_length : int
    Maximum number of tokens of a sequence.
dtype : torch.dtype, optional
    Default ``torch.get_default_dtype()``.
"""

_Class = TypeVar("_Class", bound=type)


def _with_parameters(cls: _Class) -> _Class:
    """Write the parameters of the class of `cattn.nn` with this name before the attributes, in the docstring."""
    theirs, document = (inspect.getdoc(x) for x in (getattr(cattn, cls.__name__), cls))
    if theirs is None or document is None:  # python -OO
        return cls
    before, _, rest = document.partition("\n\nAttributes\n")
    first, _, own = before.partition("\n\nParameters\n----------\n")
    parameters = entries(theirs.partition("Parameters\n----------\n")[2].partition("\n\n")[0])
    parameters |= entries(_OWN) | entries(f"{own}\n")
    names = list(inspect.signature(cls).parameters)
    listed = "\n".join(text for key, text in parameters.items() if key[0] in names)
    listed = listed.replace("`sliding_window`", "`cattn.sliding_window`")
    cls.__doc__ = f"{first}\n\nParameters\n----------\n{listed}\n\nAttributes\n{rest}\n"
    return cls


class _Attention(nn.Module):
    """Base of the classes: projections, the forward pass, and state dicts in all naming schemes."""

    d_in: int
    context_length: int | None = None
    _one_head = True

    def forward(self, x: Tensor, *, return_weights: bool = False) -> Any:
        """Return a context vector for each token, or (context, weights).

        Parameters
        ----------
        x : Tensor, shape (T, d_in) or (B, T, d_in)
            The tokens.
        return_weights : bool
            Return (context, weights).

        Returns
        -------
        Tensor, shape (T, width) or (B, T, width), or (Tensor, Tensor)
            The weights are those before dropout, one matrix for each head if the class has several.
        """
        batch = _tokens(x, self.d_in, self.context_length)
        context, weights = self._context(batch, return_weights)
        return _result(x, context, weights, one_head=self._one_head)

    def _context(self, batch: Tensor, return_weights: bool) -> tuple[Tensor, Tensor | None]:
        """Return the output and the weights (B, H, T, T) of tokens (B, T, d_in)."""
        raise NotImplementedError

    def _add_projections(self, d_in: int, d_out: int, d_kv: int, bias: bool, dtype: torch.dtype | None) -> None:
        self.W_query: Any = nn.Linear(d_in, d_out, bias, dtype=dtype)
        self.W_key: Any = nn.Linear(d_in, d_kv, bias, dtype=dtype)
        self.W_value: Any = nn.Linear(d_in, d_kv, bias, dtype=dtype)

    def _of_one_head(self, batch: Tensor) -> tuple[Tensor, ...]:
        """Return queries, keys and values (B, 1, T, d_out) of tokens (B, T, d_in)."""
        return tuple(layer(batch).unsqueeze(1) for layer in (self.W_query, self.W_key, self.W_value))

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> LoadResult:
        """Load the parameters from a state dict of cattn, of PyTorch, or in another naming scheme.

        Parameters
        ----------
        state_dict : mapping of str to Tensor or array_like
            As for `cattn.MultiHeadAttention.load_state_dict`, with the same names and layouts.
        strict : bool
            If False, parameters without an array keep their values, and arrays without a parameter are ignored.
        assign : bool
            Replace the parameters, instead of copying into them.

        Returns
        -------
        LoadResult
            The lists missing_keys and unexpected_keys, which are empty if strict.
        """
        own = {name: parameter.detach() for name, parameter in self.named_parameters()}
        arrays = {
            name: (tensor if tensor.dtype is torch.float64 else tensor.float()).cpu().numpy()
            for name, tensor in own.items()
        }
        new, result = match(state_dict, arrays, strict=strict, what=repr(self))
        tensors = {name: torch.from_numpy(array).to(own[name]) for name, array in new.items()}
        super().load_state_dict(tensors, strict=False, assign=assign)
        return result


class _SelfAttention(_Attention):
    """Base of the classes without a mask."""

    def _context(self, batch: Tensor, return_weights: bool) -> tuple[Tensor, Tensor | None]:
        return _attend(*self._of_one_head(batch), is_causal=False, return_weights=return_weights)


@_with_parameters
class SelfAttention_v1(_SelfAttention):  # noqa: N801 - the book's name
    """Self-attention with three bare matrices, the twin of `cattn.SelfAttention_v1`.

    Attributes
    ----------
    W_query, W_key, W_value : Parameter, shape (d_in, d_out)
        The matrices, uniform in [0, 1).
    """

    def __init__(self, d_in: int, d_out: int, *, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.d_in, self.d_out = as_size(d_in, "d_in"), as_size(d_out, "d_out")
        self.W_query = nn.Parameter(torch.rand(d_in, d_out, dtype=dtype))
        self.W_key = nn.Parameter(torch.rand(d_in, d_out, dtype=dtype))
        self.W_value = nn.Parameter(torch.rand(d_in, d_out, dtype=dtype))

    def _of_one_head(self, batch: Tensor) -> tuple[Tensor, ...]:
        return tuple((batch @ matrix).unsqueeze(1) for matrix in (self.W_query, self.W_key, self.W_value))


@_with_parameters
class SelfAttention_v2(_SelfAttention):  # noqa: N801 - the book's name
    """Self-attention with three linear layers, the twin of `cattn.SelfAttention_v2`.

    Attributes
    ----------
    W_query, W_key, W_value : torch.nn.Linear
        The layers.
    """

    def __init__(self, d_in: int, d_out: int, qkv_bias: bool = False, *, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.d_in, self.d_out = as_size(d_in, "d_in"), as_size(d_out, "d_out")
        self._add_projections(d_in, d_out, d_out, qkv_bias, dtype)


class _Causal(_Attention):
    """Base of the causal classes: a token sees itself and the tokens before it, up to context_length."""

    _one_head = False

    def __init__(self, d_in: int, d_out: int, context_length: int, window_size: Window) -> None:
        super().__init__()
        cattn.causal_mask(1, window_size=window_size)  # raises what a call would raise later
        self.window_size = window_size
        self.d_in, self.d_out = as_size(d_in, "d_in"), as_size(d_out, "d_out")
        self.context_length = as_size(context_length, "context_length")


@_with_parameters
class CausalAttention(_Causal):
    """One head of causal attention with dropout, the twin of `cattn.CausalAttention`.

    Attributes
    ----------
    W_query, W_key, W_value : torch.nn.Linear
        The projections.
    dropout : torch.nn.Dropout
        The probability and the mode of dropout.
    """

    _one_head = True

    def __init__(
        self,
        d_in: int,
        d_out: int,
        context_length: int,
        dropout: float,
        qkv_bias: bool = False,
        *,
        window_size: Window = (-1, -1),
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(d_in, d_out, context_length, window_size)
        self.dropout = nn.Dropout(dropout)
        self._add_projections(d_in, d_out, d_out, qkv_bias, dtype)

    def _context(self, batch: Tensor, return_weights: bool) -> tuple[Tensor, Tensor | None]:
        return _attend(
            *self._of_one_head(batch), is_causal=True, dropout_p=_active(self.dropout), return_weights=return_weights,
            window_size=self.window_size,
        )  # fmt: skip


@_with_parameters
class MultiHeadAttentionWrapper(_Causal):
    """Several `CausalAttention` heads with concatenated context vectors, the twin of `cattn.MultiHeadAttentionWrapper`.

    Parameters
    ----------
    num_heads : int
        Number of heads.

    Attributes
    ----------
    heads : torch.nn.ModuleList of CausalAttention
        The heads. Each draws its own dropout.
    """

    def __init__(
        self,
        d_in: int,
        d_out: int,
        context_length: int,
        dropout: float,
        num_heads: int,
        qkv_bias: bool = False,
        *,
        window_size: Window = (-1, -1),
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(d_in, d_out, context_length, window_size)
        self.num_heads = as_size(num_heads, "num_heads")
        self.heads = nn.ModuleList(
            CausalAttention(d_in, d_out, context_length, dropout, qkv_bias, window_size=window_size, dtype=dtype)
            for _ in range(num_heads)
        )

    def _context(self, batch: Tensor, return_weights: bool) -> tuple[Tensor, Tensor | None]:
        heads: Any = self.heads
        context, weights = _join([head._context(batch, return_weights) for head in heads])
        return context, weights


@_with_parameters
class MultiHeadAttention(_Causal):
    """Causal attention with several heads and an output projection, the twin of `cattn.MultiHeadAttention`.

    Attributes
    ----------
    W_query, W_key, W_value, out_proj : torch.nn.Linear
        The projections.
    dropout : torch.nn.Dropout
        The probability and the mode of dropout.

    Examples
    --------
    >>> import torch
    >>> import cattn
    >>> from cattn.integrations.torch import nn
    >>> theirs = cattn.MultiHeadAttention(8, 8, 16, dropout=0.0, num_heads=2, rng=123)
    >>> ours = nn.MultiHeadAttention(8, 8, 16, dropout=0.0, num_heads=2)
    >>> ours.load_state_dict(theirs.state_dict())
    LoadResult(missing_keys=[], unexpected_keys=[])
    >>> x = torch.randn(3, 8)
    >>> bool(torch.allclose(ours(x), torch.from_numpy(theirs(x)), atol=1e-6))
    True
    """

    def __init__(
        self,
        d_in: int,
        d_out: int,
        context_length: int,
        dropout: float,
        num_heads: int,
        qkv_bias: bool = False,
        *,
        num_kv_groups: int | None = None,
        out_bias: bool = True,
        window_size: Window = (-1, -1),
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(d_in, d_out, context_length, window_size)
        self.num_heads, self.num_kv_groups = as_head_counts(self.d_out, num_heads, num_kv_groups)
        self.head_dim = self.d_out // self.num_heads
        d_kv = self.num_kv_groups * self.head_dim
        self.dropout = nn.Dropout(dropout)
        self._add_projections(d_in, d_out, d_kv, qkv_bias, dtype)
        self.out_proj = nn.Linear(d_out, d_out, out_bias, dtype=dtype)

    def _context(self, batch: Tensor, return_weights: bool) -> tuple[Tensor, Tensor | None]:
        q, k, v = (
            layer(batch).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for layer in (self.W_query, self.W_key, self.W_value)
        )
        context, weights = _attend(
            q, k, v, is_causal=True, dropout_p=_active(self.dropout), return_weights=return_weights,
            window_size=self.window_size,
        )  # fmt: skip
        return self.out_proj(context), weights
