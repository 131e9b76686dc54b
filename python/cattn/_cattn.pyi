"""The C extension. Private; every argument is positional and none has a default."""

from typing import Any, TypedDict, type_check_only

from numpy.typing import NDArray

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

def attention(
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
    rng: object,
    need_weights: object,
    return_lse: object,
    return_dropout_mask: object,
    out: object,
    /,
) -> Any: ...
def attention_weights(
    query: object,
    key: object,
    attn_mask: object,
    is_causal: object,
    scale: object,
    enable_gqa: object,
    bias: object,
    query_offset: object,
    stage: object,
    out: object,
    /,
) -> NDArray[Any]: ...
def causal_mask(T_q: object, T_k: object, is_causal: object, query_offset: object, /) -> NDArray[Any]: ...
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
