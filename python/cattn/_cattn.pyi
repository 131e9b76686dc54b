"""The C extension. Private; every argument is positional and none has a default."""

from collections.abc import Callable
from typing import Any, Literal, TypedDict, TypeVar, type_check_only

import numpy as np
from numpy.typing import NDArray
from typing_extensions import disjoint_base

_Result = TypeVar("_Result")
_Function = TypeVar("_Function", bound=Callable[..., Any])

@type_check_only
class IsaInfo(TypedDict):
    name: str
    usable: bool
    has_fma: bool
    test_only: bool
    lanes_f32: int
    mr: int
    nr: int
    br: int

@type_check_only
class BuildInfo(TypedDict):
    compiler: str
    limited_api: bool

@disjoint_base
class TorchStream:
    def _uniform(self, out: NDArray[Any], low: object, high: object, /) -> NDArray[Any]: ...
    def _normal(self, out: NDArray[Any], /) -> NDArray[Any]: ...
    def _integers(self, out: NDArray[np.int64], low: int, high: int, /) -> NDArray[np.int64]: ...
    def _bernoulli(self, out: NDArray[Any], p: object, /) -> NDArray[Any]: ...
    def _dropout_mask(self, out: NDArray[np.bool_], p: object, skip: int, /) -> NDArray[np.bool_]: ...
    def _linear(
        self, weight: NDArray[Any], bias: NDArray[Any] | None, /
    ) -> tuple[NDArray[Any], NDArray[Any] | None]: ...
    def _seed(self, seed: object, dropout: object, /) -> None: ...
    def _set_state(self, state: NDArray[np.uint8], /) -> None: ...
    def _get_state(self) -> NDArray[np.uint8]: ...
    def _settings(self) -> tuple[int, Literal["aten", "mkl"]]: ...

def explain(
    query: object,
    key: object,
    value: object,
    attn_mask: object,
    dropout_p: object,
    is_causal: object,
    scale: object,
    enable_gqa: object,
    bias: object,
    query_offset: object,
    query_seq_lengths: object,
    key_value_seq_lengths: object,
    window_size: object,
    softcap: object,
    alibi_slopes: object,
    sinks: object,
    rng: object,
    need_weights: object,
    return_lse: object,
    return_dropout_mask: object,
    out: object,
    /,
) -> dict[str, Any]: ...
def scaled_dot_product_attention(
    query: object,
    key: object,
    value: object,
    attn_mask: object,
    dropout_p: object,
    is_causal: object,
    scale: object,
    enable_gqa: object,
    bias: object,
    query_offset: object,
    query_seq_lengths: object,
    key_value_seq_lengths: object,
    window_size: object,
    softcap: object,
    alibi_slopes: object,
    sinks: object,
    rng: object,
    need_weights: object,
    return_lse: object,
    return_dropout_mask: object,
    out: object,
    /,
) -> Any: ...
def causal_attention(
    query: object,
    key: object,
    value: object,
    attn_mask: object,
    dropout_p: object,
    scale: object,
    enable_gqa: object,
    bias: object,
    query_offset: object,
    query_seq_lengths: object,
    key_value_seq_lengths: object,
    window_size: object,
    softcap: object,
    alibi_slopes: object,
    sinks: object,
    rng: object,
    need_weights: object,
    return_lse: object,
    return_dropout_mask: object,
    out: object,
    /,
) -> Any: ...
def attention_backward(
    query: object,
    key: object,
    value: object,
    attn_mask: object,
    dropout_p: object,
    is_causal: object,
    scale: object,
    enable_gqa: object,
    bias: object,
    query_offset: object,
    query_seq_lengths: object,
    key_value_seq_lengths: object,
    window_size: object,
    softcap: object,
    alibi_slopes: object,
    sinks: object,
    rng: object,
    need_weights: object,
    return_lse: object,
    return_dropout_mask: object,
    out: object,
    grad_out: object,
    forward_out: object,
    forward_lse: object,
    /,
) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any], NDArray[Any] | None, NDArray[Any] | None, np.dtype[Any]]: ...
def softmax_backward(grad_out: object, weights: object, scale: object, out: object, /) -> NDArray[Any]: ...
def varlen_attention(
    query: object,
    key: object,
    value: object,
    attn_mask: object,
    dropout_p: object,
    is_causal: object,
    scale: object,
    enable_gqa: object,
    bias: object,
    query_offset: object,
    query_seq_lengths: object,
    key_value_seq_lengths: object,
    window_size: object,
    softcap: object,
    alibi_slopes: object,
    sinks: object,
    rng: object,
    need_weights: object,
    return_lse: object,
    return_dropout_mask: object,
    out: object,
    query_starts: NDArray[np.int64],
    query_lengths: NDArray[np.int64],
    key_starts: NDArray[np.int64],
    key_lengths: NDArray[np.int64],
    max_seqlen_q: int,
    max_seqlen_k: int,
    /,
) -> Any: ...
def attention_weights(
    query: object,
    key: object,
    value: object,
    attn_mask: object,
    dropout_p: object,
    is_causal: object,
    scale: object,
    enable_gqa: object,
    bias: object,
    query_offset: object,
    query_seq_lengths: object,
    key_value_seq_lengths: object,
    window_size: object,
    softcap: object,
    alibi_slopes: object,
    sinks: object,
    rng: object,
    need_weights: object,
    return_lse: object,
    return_dropout_mask: object,
    out: object,
    stage: object,
    /,
) -> Any: ...
def causal_mask(
    T_q: object, T_k: object, is_causal: object, query_offset: object, window_size: object, /
) -> NDArray[Any]: ...
def softmax(x: object, axis: object, where: object, scale: object, out: object, /) -> NDArray[Any]: ...
def masked_softmax(
    scores: object,
    mask: object,
    is_causal: object,
    query_offset: object,
    scale: object,
    method: object,
    out: object,
    /,
) -> NDArray[Any]: ...
def dropout(x: object, p: object, training: object, rng: object, return_mask: object, out: object, /) -> Any: ...
def get_num_threads() -> int: ...
def set_num_threads(n: int | None, /) -> None: ...
def _shortcut(
    function: _Function, text: str, names: tuple[str, ...], defaults: tuple[object, ...], n_positional: int, /
) -> _Function: ...
def _probability(p: object, name: str, /) -> float: ...
def _in_default_mode(
    function: Callable[..., _Result], args: tuple[object, ...], kwargs: dict[str, Any], /
) -> _Result: ...
def _check_out(out: object, dtype: np.dtype[Any], /) -> None: ...
def _store(result: NDArray[Any], out: object, /) -> NDArray[Any]: ...
def _override_num_threads(n: int, /) -> int: ...
def _isa_list() -> list[IsaInfo]: ...
def _set_isa(name: str | None, /) -> None: ...
def _get_isa() -> str: ...
def _set_path(name: str, /) -> None: ...
def _block_keys() -> int: ...
def _chunk_keys() -> int: ...
def _build_info() -> BuildInfo: ...
def _release() -> bool: ...
