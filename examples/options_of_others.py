"""Try which options of attention other libraries have on the CPU, and whether they honour them.

Each library is called with each option, by its own name for it, on four heads of 40 tokens (float32). The result is
compared with `cattn.reference`:

    yes      the right numbers
    other    other numbers, without an error
    refused  an error, although the library has the option
    no       the library has no such argument, and says so
    ignored  the numbers are those without the option, or without one of the two

Libraries that are not installed are left out. Run it by

    python examples/options_of_others.py
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

import cattn
from cattn import reference
from cattn.testing._conform import KNOWN, run_onnx

Array = np.ndarray[Any, np.dtype[Any]]
HEADS, TOKENS = 4, 40

random = np.random.default_rng(0)
QUERY, KEY, VALUE = random.standard_normal((3, 1, HEADS, TOKENS, 16), dtype=np.float32)
MASK = random.random((TOKENS, TOKENS)) < 0.7
MASK[:, 0] = True
BIAS = random.standard_normal((TOKENS, TOKENS)).astype(np.float32)
SLOPES = cattn.get_alibi_slopes(HEADS).astype(np.float32)
SINKS = random.standard_normal(HEADS).astype(np.float32)
# option: the arguments of cattn
OPTIONS: dict[str, dict[str, Any]] = {
    "boolean mask": {"attn_mask": MASK},
    "additive mask": {"attn_mask": BIAS},
    "causal": {"is_causal": True},
    "causal, and a mask": {"is_causal": True, "attn_mask": MASK},
    "a query that sees no key": {"attn_mask": MASK & (np.arange(TOKENS)[:, None] != 5)},
    "shared key heads": {"is_causal": True, "enable_gqa": True},
    "window of 8 tokens": {"is_causal": True, "window_size": (7, 0)},
    "lengths of keys": {"key_value_seq_lengths": np.array([30])},
    "softcap": {"is_causal": True, "softcap": 2.0},
    "ALiBi slopes": {"is_causal": True, "alibi_slopes": SLOPES},
    "sinks": {"is_causal": True, "sinks": SINKS},
    "weights": {"is_causal": True, "return_weights": True},
    "log-sum-exp": {"is_causal": True, "return_lse": True},
    "an unknown argument": {"is_causal": True, "soft_cap": 2.0},
}


class NoSuchArgumentError(Exception):
    """The library has no argument for this option."""


def translate(options: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    """Return the options under the library's names. Names that it does not have stay, for the library to refuse."""
    return {names.get(name, name): value for name, value in options.items()}


def with_cattn(q: Array, k: Array, v: Array, **options: Any) -> Any:
    """Compute attention with cattn."""
    return cattn.scaled_dot_product_attention(q, k, v, **options)


def with_flex(q: Array, k: Array, v: Array, **options: Any) -> Any:
    """Compute attention with flex_attention, which takes functions of positions instead of options."""
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    given = {name: torch.from_numpy(x) if isinstance(x, np.ndarray) else x for name, x in options.items()}
    mask, slopes, cap = given.pop("attn_mask", None), given.pop("alibi_slopes", None), given.pop("softcap", None)
    causal, (left, _) = given.pop("is_causal", False), given.pop("window_size", (TOKENS, 0))
    lengths = given.pop("key_value_seq_lengths", torch.tensor([TOKENS]))

    def score(s: Any, _batch: Any, head: Any, i: Any, j: Any) -> Any:
        if cap:
            s = cap * torch.tanh(s / cap)
        if slopes is not None:
            s = s - slopes[head] * (i - j).abs()
        return s + mask[i, j] if mask is not None and mask.dtype != torch.bool else s

    def visible(batch: Any, _head: Any, i: Any, j: Any) -> Any:
        seen = j < lengths[batch]
        if causal:
            seen = seen & (j <= i) & (i - j <= left)
        return seen & mask[i, j] if mask is not None and mask.dtype == torch.bool else seen

    blocks = create_block_mask(visible, 1, None, TOKENS, TOKENS, device="cpu")
    return flex_attention(*map(torch.from_numpy, (q, k, v)), score_mod=score, block_mask=blocks, **given)


def with_group_query(q: Array, k: Array, v: Array, **options: Any) -> Any:
    """Compute attention with onnxruntime's GroupQueryAttention, which is always causal."""
    options.pop("enable_gqa", None)  # it needs no option
    if not options.pop("is_causal", False):
        raise NoSuchArgumentError
    rows = [x.swapaxes(1, 2).reshape(1, TOKENS, -1) for x in (q, k, v)]
    past = np.zeros((1, k.shape[1], 0, 16), np.float32)
    given = dict(zip(("Q", "K", "V", "past_K", "past_V"), (*rows, past, past), strict=True))
    given |= {"last": np.array([TOKENS - 1], np.int32), "keys": np.array([TOKENS], np.int32)}
    attributes: dict[str, Any] = {"num_heads": HEADS, "kv_num_heads": k.shape[1]}
    if "window_size" in options:
        attributes["local_window_size"] = options.pop("window_size")[0] + 1
    if "attn_mask" in options:
        mask = options.pop("attn_mask")
        bias = mask if mask.dtype != bool else np.where(mask, 0, -np.inf).astype(np.float32)
        given |= {"_cos": past, "_sin": past, "_positions": past, "bias": bias[None, None]}
    if "sinks" in options:
        given |= dict.fromkeys(("_cos", "_sin", "_positions", "_bias"), past) | {"sinks": options.pop("sinks")}
    if not all(isinstance(x, float) for x in options.values()):
        raise NoSuchArgumentError
    found = run_onnx("GroupQueryAttention", "com.microsoft", given, attributes | options, n_outputs=3)
    return found.reshape(1, TOKENS, HEADS, -1).swapaxes(1, 2)


def with_openvino(q: Array, k: Array, v: Array, **options: Any) -> Any:
    """Compute attention with OpenVINO's operator, in float32."""
    import openvino
    from openvino import opset13

    arrays = [q, k, v]
    if "attn_mask" in options:
        arrays.append(options.pop("attn_mask"))
    kinds = {np.dtype(np.float32): openvino.Type.f32, np.dtype(bool): openvino.Type.boolean}
    inputs = [opset13.parameter(list(array.shape), kinds[array.dtype]) for array in arrays]
    words = translate(options, {"is_causal": "causal"})
    result = opset13.scaled_dot_product_attention(*inputs, **words)
    compiled = openvino.Core().compile_model(
        openvino.Model([result], inputs), "CPU", {"INFERENCE_PRECISION_HINT": "f32"}
    )
    return compiled(arrays)[0]


LIBRARIES: dict[str, Callable[..., Any]] = {
    "cattn": with_cattn,
    "PyTorch": KNOWN["torch.nn.functional:scaled_dot_product_attention"].call,
    "flex_attention": with_flex,
    "JAX": KNOWN["jax.nn:dot_product_attention"].call,
    "onnxruntime": KNOWN["onnxruntime:Attention"].call,
    "ORT's GQA": with_group_query,
    "OpenVINO": with_openvino,
}


def expected(k: Array, v: Array, options: dict[str, Any]) -> Array:
    """Return the output by cattn.reference in float64."""
    known = {name: x for name, x in options.items() if name not in ("return_weights", "return_lse", "soft_cap")}
    wide = (array.astype(np.float64) for array in (QUERY, k, v))
    return np.asarray(reference.scaled_dot_product_attention(*wide, **known))


def answer(attend: Callable[..., Any], options: dict[str, Any]) -> str:
    """Return the word for one option of a library."""
    k, v = (x[:, :2] if "enable_gqa" in options else x for x in (KEY, VALUE))
    try:
        found = attend(QUERY, k, v, **options)
    except ImportError:
        raise
    except (TypeError, NoSuchArgumentError):
        return "no"
    except Exception as error:
        return "no" if "nrecognized attribute" in str(error) else "refused"
    found = np.asarray(found[0] if isinstance(found, tuple) else getattr(found, "out", found))
    if np.allclose(found, expected(k, v, options), atol=1e-4):
        return "ignored" if "soft_cap" in options else "yes"
    for name in options.keys() - {"enable_gqa"}:
        rest = {other: x for other, x in options.items() if other != name}
        if np.allclose(found, expected(k, v, rest), atol=1e-4):
            return "ignored"
    return "other"


def main() -> None:
    """Print the table."""
    columns: dict[str, list[str]] = {}
    for name, attend in LIBRARIES.items():
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                columns[name] = [answer(attend, options) for options in OPTIONS.values()]
        except ImportError as error:
            print(f"{name} is left out: {error}")
    print("| option |", " | ".join(columns), "|")
    print("| --- " * (len(columns) + 1) + "|")
    for row, option in enumerate(OPTIONS):
        print(f"| {option} |", " | ".join(column[row] for column in columns.values()), "|")


if __name__ == "__main__":
    main()
