"""Calls of attention whose bits depend on the order of operations, and the result that each must give.

The yardstick is the scalar kernel table on the row path with one thread. A table outside the bit contract (named by
show_config; on x86 the table without FMA) is compared with its own row path instead.
"""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

import cattn
from support import INF, NAN, everything, forced, in_contract, table

Call = dict[str, Any]
Normal = Callable[..., np.ndarray]  # of conftest.py
BLOCK, CHUNK = cattn._cattn._block_keys(), cattn._cattn._chunk_keys()


def yardstick(call: Call, isa: str) -> cattn.AttentionOutput:
    with table("scalar" if in_contract(isa) else isa), forced("rows"), cattn.num_threads(1):
        return everything(**call)


def plain(normal: Normal, T_q: int = 101, T_k: int = 200, **options: Any) -> Call:
    return {"query": normal(2, T_q, 11), "key": normal(2, T_k, 11), "value": normal(2, T_k, 19)} | options


def with_bias(normal: Normal, change: Callable[[np.ndarray], None], **options: Any) -> Call:
    """A call with four key blocks and a bias modified by `change`."""
    call = plain(normal, 101, 3 * BLOCK + 20, **options)
    bias = normal(101, 3 * BLOCK + 20)
    change(bias)
    return call | {"bias": bias}


def set_to(index: Any, number: float) -> Callable[[np.ndarray], None]:
    def change(a: np.ndarray) -> None:
        a[index] = number

    return change


def grouped(normal: Normal, T_q: int, **options: Any) -> Call:
    return {"query": normal(2, 6, T_q, 11), "key": normal(2, 2, 90, 11), "value": normal(2, 2, 90, 5)} | options


def with_values(normal: Normal, change: Callable[[np.ndarray], None], name: str = "value", **options: Any) -> Call:
    call = plain(normal, **options)
    change(call[name])
    return call


def finfo_min(normal: Normal, rows: Any) -> Call:
    least = np.finfo(normal().dtype).min
    return with_bias(normal, set_to((rows, slice(None)), least))


def huge(normal: Normal, power: float, **options: Any) -> Call:
    """A call with scores near the largest number, or beyond it if power > 0.5: +inf and -inf."""
    top = float(np.finfo(normal().dtype).max) ** power
    call = plain(normal, **options)
    call["query"][0, ::3] *= top
    call["key"][:, ::5] *= top
    return call


def all_neg_inf(normal: Normal) -> Call:
    """A call in which every score of rows 0, 7, 14, ... of the first batch entry overflows to -inf."""
    call = plain(normal)
    top = np.sqrt(np.finfo(normal().dtype).max) * 100
    call["query"][0, ::7] = top
    call["key"][0] = -top
    call["key"][0, :, 0] *= 1 + np.arange(200) % 3
    return call


def mask_of(rng_seed: int, *shape: int, p: float = 0.5) -> np.ndarray:
    return np.random.default_rng(rng_seed).random(shape) < p


# Numbers of keys around the 8 chains of a sum, chains of 16, runs of 96 keys of the product P V, key blocks, a chunk.
EDGES = [1, 7, 8, 9, 15, 16, 17, 63, 65, 95, 96, 97, 103, 104, 105, 111, 112, 113, 191, 192, 193]
EDGES += [287, 288, 289, 384, 385, 1535, 1536, 1537]
CASES: dict[str, Callable[[Normal], Call]] = {
    "plain": plain,
    "causal": lambda normal: plain(normal, is_causal="lower_right"),
    "upper left": lambda normal: plain(normal, is_causal="upper_left"),
    "offset": lambda normal: plain(normal, is_causal=True, query_offset=np.array([-50, 97])),
    "window": lambda normal: plain(normal, is_causal="lower_right", window_size=(30, 0)),
    "window to both sides": lambda normal: plain(normal, T_k=600, query_offset=300, window_size=(200, 17)),
    "window, mask, dropout": lambda normal: plain(
        normal, attn_mask=mask_of(4, 101, 200), query_offset=50, window_size=(5, 90), dropout_p=0.5, rng=2
    ),
    "lengths": lambda normal: plain(
        normal, is_causal="lower_right", query_seq_lengths=[101, 60], key_value_seq_lengths=[100, 193]
    ),
    "starts": lambda normal: plain(normal, is_causal="lower_right", key_value_seq_starts=[7, 190]),
    "starts and lengths": lambda normal: grouped(
        normal, 90, is_causal=True, key_value_seq_starts=[33, 0], key_value_seq_lengths=[90, 70]
    ),
    "softcap": lambda normal: plain(normal, softcap=2.0, is_causal="lower_right"),
    "softcap of scores that overflow": lambda normal: huge(normal, 0.6, softcap=10.0),
    "slopes": lambda normal: plain(normal, alibi_slopes=np.array([0.37]), query_offset=40),
    "slopes far away": lambda normal: plain(normal, alibi_slopes=np.array([1e-4]), query_offset=2**23 + 5),
    "sinks": lambda normal: plain(normal, sinks=np.array([1.5]), is_causal="lower_right"),
    "all of them": lambda normal: grouped(
        normal,
        20,
        softcap=3.0,
        alibi_slopes=np.linspace(0.1, 0.9, 6),
        sinks=np.linspace(-3, 3, 6),
        bias=normal(20, 90),
        attn_mask=mask_of(8, 20, 90),
        is_causal="lower_right",
        window_size=(33, 0),
        dropout_p=0.2,
        rng=1,
    ),
    "one row": lambda normal: plain(normal, 1, 700),
    "two rows": lambda normal: plain(normal, 2, 130),
    "tiny": lambda normal: plain(normal, 6, 6, is_causal=True),
    **{f"{n} keys": functools.partial(plain, T_q=13, T_k=n, is_causal="lower_right") for n in EDGES},
    "bool mask": lambda normal: plain(normal, attn_mask=mask_of(1, 101, 200)),
    "sparse mask": lambda normal: plain(normal, attn_mask=mask_of(2, 2, 101, 200, p=0.02), is_causal="lower_right"),
    "block mask": lambda normal: plain(normal, block_mask=cattn.BlockMask(mask_of(9, 2, 7, 13), 16)),
    "sparse block mask": lambda normal: plain(
        normal, 101, 1700, block_mask=cattn.BlockMask(mask_of(10, 3, 34, p=0.1), 50), is_causal="lower_right"
    ),
    "block mask, mask, bias, dropout": lambda normal: with_bias(
        normal,
        set_to((1, 2), -INF),
        block_mask=cattn.BlockMask(mask_of(11, 15, 86), 7),
        attn_mask=mask_of(3, 596),
        dropout_p=0.3,
        rng=4,
    ),
    "bias and mask": lambda normal: with_bias(normal, set_to((1, 2), -INF), attn_mask=mask_of(3, 596)),
    "two biases": lambda normal: with_bias(normal, set_to((1, 2), -INF), attn_mask=normal(2, 1, 596)),
    "scale": lambda normal: plain(normal, scale=-0.37),
    "groups": lambda normal: grouped(normal, 20, is_causal="lower_right"),
    "groups, window": lambda normal: grouped(normal, 20, is_causal="lower_right", window_size=(11, 0)),
    "groups, many queries": lambda normal: grouped(normal, 100, is_causal="upper_left", bias=normal(6, 1, 90)),
    "groups, dropout": lambda normal: grouped(normal, 20, dropout_p=0.5, rng=99),
    "dropout": lambda normal: plain(normal, dropout_p=0.1, rng=5),
    "dropout, causal, mask": lambda normal: plain(
        normal, dropout_p=0.5, rng=2**63, is_causal="lower_right", attn_mask=mask_of(4, 101, 200)
    ),
    "dropout of all": lambda normal: plain(normal, dropout_p=1.0, rng=5),
    # weights exp(0) = 1
    "equal scores": lambda normal: with_values(normal, set_to(..., 0), "query"),
    "equal keys": lambda normal: with_values(normal, set_to(np.s_[:, :, :], 0.3), "key", is_causal="upper_left"),
    "same maximum in every block": lambda normal: with_bias(normal, set_to(np.s_[:, 5::BLOCK], 50.0)),
    "maximum ever larger": lambda normal: plain(normal, 101, 596, bias=np.arange(596, dtype=normal().dtype) / 3),
    "maximum ever smaller": lambda normal: plain(normal, 101, 596, bias=-np.arange(596, dtype=normal().dtype) / 3),
    # rows of the lowest finite number, or of -inf
    "all finfo.min": lambda normal: finfo_min(normal, slice(None)),
    "some rows finfo.min": lambda normal: finfo_min(normal, slice(None, None, 3)),
    "all hidden by -inf": lambda normal: with_bias(normal, set_to(..., -INF)),
    "some rows hidden by -inf": lambda normal: with_bias(normal, set_to(slice(None, None, 3), -INF)),
    "scores -inf": all_neg_inf,
    "first block -inf": lambda normal: with_bias(normal, set_to(np.s_[:, :BLOCK], -INF)),
    "first block finfo.min": lambda normal: with_bias(
        normal, set_to(np.s_[:, :BLOCK], float(np.finfo(normal().dtype).min))
    ),
    "middle block -inf": lambda normal: with_bias(normal, set_to(np.s_[:, BLOCK : 2 * BLOCK], -INF)),
    "last block -inf": lambda normal: with_bias(normal, set_to(np.s_[:, 3 * BLOCK :], -INF)),
    "first key -inf": lambda normal: with_bias(normal, set_to(np.s_[:, 0], -INF), is_causal="upper_left"),
    # subnormal numbers, signed zeros, overflow
    "subnormal values": lambda normal: with_values(normal, lambda v: np.multiply(v, 1e-40 * tiny(v), out=v)),
    "subnormal keys": lambda normal: with_values(normal, lambda k: np.multiply(k, 1e-40 * tiny(k), out=k), "key"),
    "subnormal bias": lambda normal: with_bias(normal, lambda b: np.multiply(b, 1e-40 * tiny(b), out=b)),
    "values -0": lambda normal: with_values(normal, set_to(np.s_[:, ::2], -0.0)),
    "all values -0": lambda normal: with_values(normal, set_to(..., -0.0), is_causal="upper_left"),
    "results that underflow": lambda normal: with_values(
        normal, lambda v: v.fill(-np.finfo(v.dtype).smallest_subnormal)
    ),
    "keys -0": lambda normal: with_values(normal, set_to(..., -0.0), "key"),
    "huge values": lambda normal: with_values(normal, lambda v: np.multiply(v, np.finfo(v.dtype).max / 1e5, out=v)),
    "values that overflow": lambda normal: with_values(
        normal, lambda v: np.multiply(v, np.finfo(v.dtype).max / 4, out=v)
    ),
    "huge scores": lambda normal: huge(normal, 0.49),
    "scores that overflow": lambda normal: huge(normal, 0.6),
    "scores that overflow, masked": lambda normal: huge(normal, 0.6, attn_mask=mask_of(5, 101, 200)),
    # NaN and infinity
    "NaN in a masked bias": lambda normal: with_bias(
        normal, set_to(np.s_[:, 7::9], NAN), attn_mask=np.arange(3 * BLOCK + 20) % 9 != 7
    ),
    "NaN in a visible bias": lambda normal: with_bias(normal, set_to(np.s_[::4, 7], NAN)),
    "NaN in a key": lambda normal: with_values(normal, set_to(np.s_[:, 60, 3], NAN), "key", is_causal="upper_left"),
    "NaN in a query": lambda normal: with_values(normal, set_to(np.s_[:, 60, 3], NAN), "query"),
    "NaN in a value": lambda normal: with_values(normal, set_to(np.s_[:, 60, 3], NAN), is_causal="upper_left"),
    "NaN of another sign": lambda normal: with_values(normal, set_to(np.s_[:, 60, 3], -NAN), is_causal="upper_left"),
    "inf in a value": lambda normal: with_values(normal, set_to(np.s_[:, 60, 3], -INF), attn_mask=mask_of(6, 101, 200)),
    "inf in a key": lambda normal: with_values(normal, set_to(np.s_[:, 60, 3], INF), "key", is_causal="upper_left"),
}


def tiny(a: np.ndarray) -> Any:
    """Return a factor: 1e-40 times it is subnormal in the dtype of `a`."""
    return a.dtype.type(1.0) if a.dtype == np.float32 else a.dtype.type(1e-270)


def build(name: str, dtype: type) -> Call:
    rng = np.random.default_rng(list(name.encode()))
    with np.errstate(over="ignore"):
        return CASES[name](lambda *shape: np.asarray(rng.standard_normal(shape), dtype))


@functools.cache
def yardstick_of(name: str, dtype: type, isa: str) -> cattn.AttentionOutput:
    return yardstick(build(name, dtype), isa)
