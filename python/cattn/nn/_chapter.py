"""The chapter's attention classes, from three bare matrices to many heads, on the fused functions.

Names, positional arguments and attributes follow the book, so that its code runs with another import. Weights
are plain arrays. Random numbers come from the generator of `manual_seed`, in the order in which PyTorch draws them.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from .._input.checks import as_dtype, as_flag, as_head_counts, as_size
from .._input.names import with_hints
from .._input.types import RNG, Window
from ..functional._layers import linear_backward
from ..functional._options import documented
from ..random import as_generator
from ._attention import Causal, SelfAttention
from ._layers import Dropout, Linear, draw_uniform, project, show_dtype

Array = NDArray[Any]


def _forward(layer: Linear, x: Array) -> Array:
    """Apply the layer. A Linear does not keep x for its backward pass: the class around it keeps x once."""
    return layer._forward(x) if type(layer) is Linear else layer(x)


def _backward(layer: Linear, x: Array, grad: Array) -> Array:
    """Return the gradient of x, given the gradient of the layer's output."""
    return layer._backward(x, grad) if type(layer) is Linear else layer.backward(grad)


class _Projections:
    """Three `Linear` layers for queries, keys and values, of one head unless a class overrides both methods."""

    def _add_projections(self, d_in: int, d_out: int, d_kv: int, bias: bool, dtype: DTypeLike, rng: Any) -> None:
        self.W_query = Linear(d_in, d_out, bias, dtype=dtype, rng=rng)
        self.W_key = Linear(d_in, d_kv, bias, dtype=dtype, rng=rng)
        self.W_value = Linear(d_in, d_kv, bias, dtype=dtype, rng=rng)

    def _project(self, x: Array) -> tuple[Array, Array, Array]:
        q, k, v = (_forward(layer, x)[:, None] for layer in (self.W_query, self.W_key, self.W_value))
        return q, k, v

    def _project_backward(self, x: Array, d_q: Array, d_k: Array, d_v: Array) -> Array:
        grad_x = _backward(self.W_query, x, _merge(d_q))
        grad_x += _backward(self.W_key, x, _merge(d_k))
        grad_x += _backward(self.W_value, x, _merge(d_v))
        return grad_x


def _merge(heads: Array) -> Array:
    """Return (B, heads, T, head_dim) as (B, T, heads * head_dim)."""
    batch, n, tokens, width = heads.shape
    return heads.swapaxes(1, 2).reshape(batch, tokens, n * width)


class SelfAttention_v1(SelfAttention):  # noqa: N801 - the book's name
    """Self-attention with three bare matrices: ``x @ W_query`` and so on.

    Parameters
    ----------
    d_in, d_out : int
        Length of a token and of a context vector.
    dtype : dtype
        float32 or float64.
    rng : None, int, TorchGenerator, numpy.random.Generator or what numpy.random.default_rng takes
        Source of the matrices, uniform in [0, 1). None is the generator of `manual_seed`.

    Attributes
    ----------
    W_query, W_key, W_value : ndarray, shape (d_in, d_out)
        The matrices.

    See Also
    --------
    SelfAttention_v2 : The same with linear layers.
    scaled_dot_product_attention : Attention without weights that learn.

    Examples
    --------
    >>> import numpy as np
    >>> import cattn
    >>> inputs = np.array([[0.43, 0.15, 0.89], [0.55, 0.87, 0.66]], np.float32)
    >>> v1 = cattn.SelfAttention_v1(3, 2, rng=123)
    >>> v1.W_query.round(4)
    array([[0.2961, 0.5166],
           [0.2517, 0.6886],
           [0.074 , 0.8665]], dtype=float32)
    >>> v1(inputs).shape
    (2, 2)
    """

    _parameters = ("W_query", "W_key", "W_value")

    @with_hints
    def __init__(self, d_in: int, d_out: int, *, dtype: DTypeLike = np.float32, rng: RNG = None) -> None:
        super().__init__()
        self.d_in, self.d_out, self.dtype = as_size(d_in, "d_in"), as_size(d_out, "d_out"), as_dtype(dtype)
        generator = as_generator(rng)
        self.W_query = draw_uniform(generator, d_in, d_out, self.dtype)
        self.W_key = draw_uniform(generator, d_in, d_out, self.dtype)
        self.W_value = draw_uniform(generator, d_in, d_out, self.dtype)

    def _project(self, x: Array) -> tuple[Array, Array, Array]:
        q, k, v = (project(x, self._matrix(name), None)[:, None] for name in self._parameters)
        return q, k, v

    def _matrix(self, name: str) -> Array:
        return self._parameter(name, (self.d_in, self.d_out))

    def _project_backward(self, x: Array, d_q: Array, d_k: Array, d_v: Array) -> Array:
        grad_x = np.zeros_like(x, dtype=d_q.dtype)
        for name, grad in zip(self._parameters, (d_q, d_k, d_v), strict=True):
            rows = grad.reshape(*x.shape[:-1], self.d_out)
            part, grad_matrix, _ = linear_backward(rows, x, self._matrix(name).T)
            self._add_gradient(name, grad_matrix.T)
            grad_x += part
        return grad_x

    def __repr__(self) -> str:
        return f"SelfAttention_v1({self.d_in}, {self.d_out}{show_dtype(self.dtype)})"


@functools.partial(documented, like=SelfAttention_v1)
class SelfAttention_v2(_Projections, SelfAttention):  # noqa: N801 - the book's name
    """Self-attention with three `Linear` layers.

    Parameters
    ----------
    qkv_bias : bool
        Whether the three layers have biases.
    rng : None, int, TorchGenerator, numpy.random.Generator or what numpy.random.default_rng takes
        Source of the weights. None is the generator of `manual_seed`, an int seeds a TorchGenerator.

    Attributes
    ----------
    W_query, W_key, W_value : Linear
        The layers; ``W_query.weight`` is (d_out, d_in).

    See Also
    --------
    SelfAttention_v1 : The same with bare matrices.
    CausalAttention : The same with a causal mask and dropout.

    Examples
    --------
    >>> import numpy as np
    >>> import cattn
    >>> inputs = np.array(
    ...     [[0.43, 0.15, 0.89], [0.55, 0.87, 0.66], [0.57, 0.85, 0.64],
    ...      [0.22, 0.58, 0.33], [0.77, 0.25, 0.10], [0.05, 0.80, 0.55]], np.float32)
    >>> sa_v2 = cattn.SelfAttention_v2(3, 2, rng=789)
    >>> sa_v2(inputs).round(4)
    array([[-0.0739,  0.0713],
           [-0.0748,  0.0703],
           [-0.0749,  0.0702],
           [-0.076 ,  0.0685],
           [-0.0763,  0.0679],
           [-0.0754,  0.0693]], dtype=float32)
    """

    @with_hints
    def __init__(
        self, d_in: int, d_out: int, qkv_bias: bool = False, *, dtype: DTypeLike = np.float32, rng: RNG = None
    ) -> None:
        super().__init__()
        self.d_in, self.d_out, self.dtype = as_size(d_in, "d_in"), as_size(d_out, "d_out"), as_dtype(dtype)
        generator = as_generator(rng)
        self._add_projections(d_in, d_out, d_out, as_flag(qkv_bias, "qkv_bias"), dtype, generator)

    def __repr__(self) -> str:
        bias = f", qkv_bias={self.W_query.bias is not None}"
        return f"SelfAttention_v2({self.d_in}, {self.d_out}{bias}{show_dtype(self.dtype)})"


@functools.partial(documented, like=SelfAttention_v2)
class CausalAttention(_Projections, Causal):
    """One head of causal attention, with dropout on the weights.

    Parameters
    ----------
    context_length : int
        Maximum number of tokens of a sequence. It is only a limit: no mask of this size is stored.
    dropout : float
        Probability of dropping an attention weight in training mode.
    window_size : (int, int)
        (left, right): a token sees the ``left`` tokens before it and itself, -1 or None: all. The second number has no
        effect; see `sliding_window`.
    rng : None, int, TorchGenerator, numpy.random.Generator or what numpy.random.default_rng takes
        Source of weights and dropout. None is the generator of `manual_seed`, an int seeds a TorchGenerator.

    Attributes
    ----------
    W_query, W_key, W_value : Linear
        The projections.
    dropout : Dropout
        The layer that `train` and `eval` switch.

    See Also
    --------
    MultiHeadAttention : Several heads, and an output projection.
    causal_attention : Causal attention without weights that learn.
    KVCache : Decoding token by token.

    Examples
    --------
    >>> import numpy as np
    >>> import cattn
    >>> ca = cattn.CausalAttention(3, 2, context_length=6, dropout=0.5, rng=123).eval()
    >>> x = np.zeros((2, 3, 3), np.float32)  # two sequences of three tokens
    >>> context, weights = ca(x, return_weights=True)
    >>> weights[0].round(3)
    array([[1.   , 0.   , 0.   ],
           [0.5  , 0.5  , 0.   ],
           [0.333, 0.333, 0.333]], dtype=float32)
    """

    _one_head = True

    @with_hints
    def __init__(
        self,
        d_in: int,
        d_out: int,
        context_length: int,
        dropout: float,
        qkv_bias: bool = False,
        *,
        window_size: Window = (-1, -1),
        dtype: DTypeLike = np.float32,
        rng: RNG = None,
    ) -> None:
        super().__init__(d_in, d_out, context_length, window_size, dtype)
        generator = as_generator(rng)
        self.dropout = Dropout(dropout, rng=generator)
        self._add_projections(d_in, d_out, d_out, as_flag(qkv_bias, "qkv_bias"), dtype, generator)
        self._kv_heads, self._head_dim = 1, self.d_out

    def __repr__(self) -> str:
        return self._show("CausalAttention", self)


@functools.partial(documented, like=CausalAttention)
class MultiHeadAttentionWrapper(Causal):
    """Several `CausalAttention` heads, whose context vectors are concatenated.

    Parameters
    ----------
    d_in, d_out : int
        Length of a token, and of the context vector of one head: the output has ``num_heads * d_out``.
    num_heads : int
        Number of heads. A ``cache`` needs as many heads, of head_dim ``d_out``.
    qkv_bias : bool
        Whether the layers of the heads have biases.

    Attributes
    ----------
    heads : list of CausalAttention
        The heads. In training they draw their dropout one after the other, as in PyTorch.

    See Also
    --------
    MultiHeadAttention : The heads in one set of projections, which is faster.
    CausalAttention : One head.

    Examples
    --------
    >>> import numpy as np
    >>> import cattn
    >>> mha = cattn.MultiHeadAttentionWrapper(3, 2, context_length=6, dropout=0.0, num_heads=2, rng=123)
    >>> mha(np.zeros((2, 6, 3), np.float32)).shape
    (2, 6, 4)
    """

    @with_hints
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
        dtype: DTypeLike = np.float32,
        rng: RNG = None,
    ) -> None:
        super().__init__(d_in, d_out, context_length, window_size, dtype)
        self.num_heads = as_size(num_heads, "num_heads")
        generator = as_generator(rng)
        self.heads = [
            CausalAttention(
                d_in, d_out, context_length, dropout, qkv_bias, window_size=window_size, dtype=dtype, rng=generator
            )
            for _ in range(self.num_heads)
        ]
        self._kv_heads, self._head_dim = self.num_heads, self.d_out

    def _project(self, x: Array) -> tuple[Array, Array, Array]:
        projected = [head._project(x) for head in self.heads]
        q, k, v = (np.concatenate(parts, axis=1) for parts in zip(*projected, strict=True))
        return q, k, v

    def _project_backward(self, x: Array, d_q: Array, d_k: Array, d_v: Array) -> Array:
        grad_x = np.zeros_like(x, dtype=d_q.dtype)
        for i, head in enumerate(self.heads):
            grad_x += head._project_backward(x, *(grad[:, i : i + 1] for grad in (d_q, d_k, d_v)))
        return grad_x

    def _dropouts(self) -> list[Dropout]:
        return [head.dropout for head in self.heads]

    def __repr__(self) -> str:
        return self._show("MultiHeadAttentionWrapper", self.heads[0], f"num_heads={self.num_heads}, ")


@functools.partial(documented, like=CausalAttention)
class MultiHeadAttention(_Projections, Causal):
    """Causal attention with several heads in one set of projections, and an output projection.

    Parameters
    ----------
    d_in, d_out : int
        Length of a token and of a context vector. d_out is a multiple of num_heads.
    num_heads : int
        Number of heads, each of head_dim ``d_out // num_heads``.
    qkv_bias : bool
        Whether W_query, W_key and W_value have biases.
    num_kv_groups : int, optional
        Number of key and value heads, each shared by a group of query heads. Divides num_heads; default num_heads.
    out_bias : bool
        Whether out_proj has a bias.

    Attributes
    ----------
    W_query, W_key, W_value, out_proj : Linear
        The projections.
    dropout : Dropout
        The layer that `train` and `eval` switch.
    d_out, num_heads, head_dim, num_kv_groups, context_length : int
        Sizes. A ``cache`` needs num_kv_groups heads of head_dim.

    See Also
    --------
    CausalAttention : One head.
    MultiHeadAttentionWrapper : Separate heads.
    KVCache : Decoding token by token.
    scaled_dot_product_attention : Attention without weights that learn.

    Examples
    --------
    >>> import numpy as np
    >>> import cattn
    >>> mha = cattn.MultiHeadAttention(8, 8, 16, dropout=0.1, num_heads=4, num_kv_groups=2, rng=123).eval()
    >>> x = np.zeros((5, 8), np.float32)
    >>> mha(x).shape
    (5, 8)
    >>> cache = cattn.KVCache((), num_kv_heads=2, max_len=16, head_dim=2)
    >>> for token in x:
    ...     context = mha(token[None], cache=cache)
    >>> context.shape, cache.lengths
    ((1, 8), array(5))
    """

    @with_hints
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
        dtype: DTypeLike = np.float32,
        rng: RNG = None,
    ) -> None:
        super().__init__(d_in, d_out, context_length, window_size, dtype)
        self.num_heads, self.num_kv_groups = as_head_counts(self.d_out, num_heads, num_kv_groups)
        self.head_dim = self.d_out // self.num_heads
        generator = as_generator(rng)
        d_kv = self.num_kv_groups * self.head_dim
        self.dropout = Dropout(dropout, rng=generator)
        self._add_projections(d_in, d_out, d_kv, as_flag(qkv_bias, "qkv_bias"), dtype, generator)
        self.out_proj = Linear(d_out, d_out, as_flag(out_bias, "out_bias"), dtype=dtype, rng=generator)
        self._kv_heads, self._head_dim = self.num_kv_groups, self.head_dim

    def _project(self, x: Array) -> tuple[Array, Array, Array]:
        layers = (self.W_query, self.num_heads), (self.W_key, self.num_kv_groups), (self.W_value, self.num_kv_groups)
        q, k, v = (_forward(layer, x).reshape(*x.shape[:2], n, self.head_dim).swapaxes(1, 2) for layer, n in layers)
        return q, k, v

    def _finish(self, context: Array) -> Array:
        return _forward(self.out_proj, context)

    def _finish_backward(self, context: Array, grad: Array) -> Array:
        return _backward(self.out_proj, context, grad)

    def __repr__(self) -> str:
        groups = "" if self.num_kv_groups == self.num_heads else f", num_kv_groups={self.num_kv_groups}"
        out = "" if self.out_proj.bias is not None else ", out_bias=False"
        return self._show("MultiHeadAttention", self, f"num_heads={self.num_heads}, ", groups + out)
