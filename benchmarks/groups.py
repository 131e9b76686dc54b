"""The groups: the rows that are measured, and their targets.

To add rows, append to a list such as PREFILL, or write a generator of Case objects and put it into GROUPS.
"""

from __future__ import annotations

import functools
import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np

import cattn
from cattn.functional import linear as cattn_linear
from cattn.functional import linear_backward

from .contestants import (
    Calls,
    agreeing,
    as_floats,
    as_tensor,
    attention_calls,
    book_module,
    jax_or_none,
    numpy_dropout,
    quantized_calls,
    torch_or_none,
)
from .machine import Probe
from .timing import Case

CHILD = Path(__file__).with_name("child.py")
Cases = Iterator[Case]


def normal(*shape: int, dtype: Any = np.float32, seed: int = 0) -> Any:
    """Return normal random numbers."""
    return np.random.default_rng(seed).standard_normal(shape, dtype=dtype)


def qkv(shape: tuple[int, ...], dtype: Any = np.float32, kv_shape: tuple[int, ...] | None = None) -> list[Any]:
    """Return query, key and value."""
    return [normal(*s, dtype=dtype, seed=seed) for seed, s in enumerate((shape, kv_shape or shape, kv_shape or shape))]


def causal_flops(batch: int, heads: int, tokens: int, head_dim: int) -> float:
    """Return the multiplications and additions of both products, over visible keys only."""
    return 4.0 * batch * heads * head_dim * tokens * (tokens + 1) / 2


PREFILL: list[tuple[str, tuple[int, ...], dict[str, float]]] = [
    ("float32", (1, 12, 128, 64), {"percent": 60, "best peer": 2.5}),
    ("float32", (1, 12, 256, 64), {"percent": 67, "best peer": 2.5}),
    ("float32", (1, 12, 512, 64), {"percent": 72, "best peer": 2.5}),
    ("float32", (1, 12, 1024, 64), {"percent": 76, "best peer": 1.65}),
    ("float32", (1, 12, 2048, 64), {}),
    ("float32", (1, 4, 4096, 64), {"percent": 82, "best peer": 1.6}),
    ("float32", (1, 1, 16384, 64), {"percent": 84, "best peer": 1.4}),
    ("float32", (1, 8, 1024, 128), {"percent": 80, "best peer": 1.75}),
    ("float32", (1, 4, 4096, 128), {"percent": 85, "best peer": 1.4}),
    ("float64", (1, 12, 1024, 64), {"percent": 65, "best peer": 2.3}),
    ("float64", (1, 4, 4096, 64), {"best peer": 1.8}),
]
# All keys visible, as in an encoder and in cross-attention: shape of the queries, number of keys.
ALL_KEYS = [
    ((1, 12, 512, 64), 512),
    ((1, 12, 1024, 64), 1024),
    ((1, 4, 4096, 64), 4096),
    ((1, 12, 128, 64), 1024),
    ((1, 12, 1024, 64), 77),
]


def prefill(probe: Probe | None) -> Cases:
    """Attention of a whole sequence, one thread: causal, and with all keys visible."""
    for dtype, shape, targets in PREFILL:
        yield prefill_case(dtype, shape, targets)
    for shape, keys in ALL_KEYS:
        yield prefill_case("float32", shape, {}, keys)


def prefill_case(dtype: str, shape: tuple[int, ...], targets: dict[str, float], keys: int | None = None) -> Case:
    """Return a row of attention over a whole sequence, causal, or with this many keys, all visible."""
    batch, heads, tokens, head_dim = shape
    flops = 4.0 * batch * heads * head_dim * tokens * keys if keys else causal_flops(*shape)

    def calls() -> Calls:
        arrays = qkv(shape, dtype, (*shape[:2], keys or tokens, head_dim))
        return attention_calls(*arrays, matrix=tokens <= 4096, causal=keys is None)

    facts = {"dtype": dtype, "shape": shape, "T": tokens, "keys": keys}
    return Case(f"{dtype} {shape}{all_visible(keys)}", calls, dtype, flops, targets, facts, beside_products=True)


def all_visible(keys: int | None) -> str:
    """Return the end of a row's name: nothing if causal."""
    return f", all {keys} keys visible" if keys else ""


def threads(probe: Probe | None) -> Cases:
    """Two threads against one."""
    for tokens in (64, 128, 256, 512, 1024, 4096):
        least = 1.9 if tokens >= 512 else 1.0
        targets = {"one thread": least} | ({"torch": 3.0} if tokens == 128 else {})
        heads = 12 if tokens < 4096 else 4
        yield Case(
            f"T={tokens}, two threads", functools.partial(_two_threads, (1, heads, tokens, 64)), targets=targets,
            facts={"T": tokens},
        )  # fmt: skip
    for shape, keys in (((1, 12, 1024, 64), 1024), ((1, 12, 128, 64), 1024)):
        calls = functools.partial(_two_threads, shape, keys)
        yield Case(f"T={shape[2]}{all_visible(keys)}, two threads", calls, facts={"T": shape[2], "keys": keys})


def _two_threads(shape: tuple[int, ...], keys: int | None = None) -> Calls:
    arrays = qkv(shape, kv_shape=(*shape[:2], keys or shape[2], shape[3]))
    calls = attention_calls(*arrays, causal=keys is None, threads=2)
    one_thread = calls["cattn"]

    def two_threads() -> object:
        with cattn.num_threads(2):
            return one_thread()

    calls |= {"cattn": two_threads, "one thread": one_thread}
    return calls


def dropout_fused(probe: Probe | None) -> Cases:
    """Attention with dropout and without: the cost of the random bits."""
    torch = torch_or_none()
    for tokens, heads in ((512, 12), (1024, 12), (4096, 2)):
        query, key, value = qkv((1, heads, tokens, 64))
        out = np.empty_like(query)
        ours = functools.partial(cattn.causal_attention, query, key, value, out=out)
        calls: Calls = {"cattn": functools.partial(ours, dropout_p=0.1, rng=1), "p=0": ours}
        if torch is not None and tokens <= 1024:
            tensors = [torch.from_numpy(a) for a in (query, key, value)]
            fused = torch.nn.functional.scaled_dot_product_attention
            calls["torch"] = functools.partial(fused, *tensors, dropout_p=0.1, is_causal=True)
        targets = {"p=0": 0.8} | ({"torch": 13.0} if tokens == 1024 else {})
        yield Case(f"T={tokens}, p=0.1", calls, targets=targets, facts={"T": tokens})


def training(probe: Probe | None) -> Cases:
    """Forward and backward pass of causal attention, one thread; flops count as 3.5 forward passes."""
    torch = torch_or_none()
    for tokens, ratio in ((512, 2.6), (1024, 1.9), (2048, 1.5), (4096, 1.35)):
        for p in (0.0, 0.1):
            arrays = [*qkv((1, 12, tokens, 64)), normal(1, 12, tokens, 64, seed=3)]
            calls: Calls = {"cattn": functools.partial(_train, *arrays, p)}
            if torch is not None and (p == 0 or tokens <= 1024):
                tensors = [torch.tensor(a, requires_grad=i < 3) for i, a in enumerate(arrays)]
                calls["torch"] = functools.partial(_train_torch, torch, *tensors, p)
            targets = {"percent": 65.0 if p == 0 else 50.0, "torch": ratio if p == 0 else 4.0}
            flops = 3.5 * causal_flops(1, 12, tokens, 64)
            yield Case(f"T={tokens}, p={p}", calls, "float32", flops, targets, {"T": tokens})


def _train(query: Any, key: Any, value: Any, grad_out: Any, p: float) -> Any:
    options: dict[str, Any] = {"is_causal": True, "dropout_p": p, "rng": 1}
    result = cattn.scaled_dot_product_attention(query, key, value, return_lse=True, **options)
    return cattn.attention_backward(grad_out, query, key, value, result.out, result.lse, **options)


def _train_torch(torch: Any, query: Any, key: Any, value: Any, grad_out: Any, p: float) -> Any:
    query.grad = key.grad = value.grad = None
    out = torch.nn.functional.scaled_dot_product_attention(query, key, value, dropout_p=p, is_causal=True)
    out.backward(grad_out)
    return query.grad


def dropout(probe: Probe | None) -> Cases:
    """Dropout alone."""
    x = normal(16 * 2**20)
    out = np.empty_like(x)
    calls: Calls = {"cattn": lambda: cattn.dropout(x, 0.1, rng=1, out=out)}
    calls["numpy"] = numpy_dropout(x, 0.1)
    torch = torch_or_none()
    if torch is not None:
        calls["torch"] = functools.partial(torch.nn.functional.dropout, torch.from_numpy(x), 0.1)
    yield Case("16M float32, out=", calls, targets={"numpy": 6, "torch": 20})


def softmax(probe: Probe | None) -> Cases:
    """Causal masked softmax of a matrix of scores."""
    scores = normal(12, 1024, 1024)
    out = np.empty_like(scores)
    calls: Calls = {"cattn": lambda: cattn.masked_softmax(scores, is_causal=True, out=out)}
    hidden = ~np.tri(1024, dtype=bool)

    def numpy() -> Any:
        filled = np.where(hidden, np.float32(-np.inf), scores)
        e = np.exp(filled - filled.max(axis=-1, keepdims=True))
        e /= e.sum(axis=-1, keepdims=True)
        return e

    calls["numpy"] = numpy
    torch = torch_or_none()
    if torch is not None:
        mask, tensor = torch.from_numpy(hidden), torch.from_numpy(scores)
        calls["torch"] = lambda: torch.softmax(tensor.masked_fill(mask, -torch.inf), dim=-1)
    jax = jax_or_none()
    if jax is not None:
        where, given = jax.numpy.asarray(~hidden), jax.numpy.asarray(scores)
        compiled = jax.jit(lambda x: jax.nn.softmax(jax.numpy.where(where, x, -jax.numpy.inf), axis=-1))
        calls["jax"] = lambda: compiled(given).block_until_ready()
    yield Case("(12, 1024, 1024), out=", agreeing(calls), targets={"torch": 12, "jax": 8})


def decode(probe: Probe | None) -> Cases:
    """One query and a cache of keys and values: bound by the read bandwidth."""
    for kv_heads, tokens in ((32, 1024), (32, 4096), (32, 16384), (8, 1024), (8, 4096), (8, 16384)):
        kv_shape = (1, kv_heads, tokens, 128)
        large = tokens == 16384
        targets: dict[str, float] = {"percent": 85, "best peer": 1.25 if kv_heads == 32 else 2.7} if large else {}
        yield Case(
            f"T_k={tokens}, {kv_heads} key-value heads of 32", functools.partial(_decode_calls, probe, kv_shape),
            "read", 2.0 * 4 * float(np.prod(kv_shape)), targets, {"T": tokens, "kv_heads": kv_heads},
        )  # fmt: skip


def _decode_calls(probe: Probe | None, kv_shape: tuple[int, ...]) -> Calls:
    query, key, value = qkv((1, 32, 1, 128), kv_shape=kv_shape)
    calls = attention_calls(query, key, value, causal=False)
    if probe is not None:
        probe.limits["read"] = probe.read(key, value)
    return calls


def halves(probe: Probe | None) -> Cases:
    """float16, and bfloat16 where ml_dtypes is installed, beside PyTorch's and cattn's own float32."""
    dtypes = [(np.dtype(np.float16), 2.3)]
    try:
        import ml_dtypes
    except ImportError:
        print("bfloat16 is left out: ml_dtypes is not installed")
    else:
        dtypes.append((np.dtype(ml_dtypes.bfloat16), 1.9))
    for dtype, ratio in dtypes:
        causal = [
            ((1, 12, 128, 64), None),
            ((1, 12, 512, 64), None),
            ((1, 12, 1024, 64), None),
            ((1, 4, 4096, 64), None),
        ]
        for shape, keys in [*causal, ((1, 12, 1024, 64), 1024), ((1, 12, 128, 64), 1024), ((1, 12, 1024, 64), 77)]:
            targets: dict[str, float] = {"float32": 1.0}
            if shape[2] == 1024 and keys is None:
                targets |= {"GF/s": 70, "torch": ratio}
            kv_shape = (*shape[:2], keys or shape[2], shape[3])
            calls = functools.partial(_beside_float32, shape, kv_shape, dtype, keys is None)
            flops = 4.0 * float(np.prod(shape)) * keys if keys else causal_flops(*shape)
            facts = {"dtype": dtype.name, "keys": keys}
            yield Case(f"{dtype} {shape}{all_visible(keys)}", calls, "float32", flops, targets, facts)
        for kv_heads, tokens in ((32, 1024), (32, 16384), (8, 1024), (8, 16384)):
            kv_shape = (1, kv_heads, tokens, 128)
            targets = {"float32": 1.0} | ({"GB/s": 12, "torch": 3.0} if tokens == 16384 else {})
            calls = functools.partial(_beside_float32, (1, 32, 1, 128), kv_shape, dtype, False, probe)
            yield Case(
                f"{dtype}, T_k={tokens}, {kv_heads} key-value heads of 32", calls, "read",
                2.0 * dtype.itemsize * float(np.prod(kv_shape)), targets, {"dtype": dtype.name},
            )  # fmt: skip


def _beside_float32(
    shape: tuple[int, ...], kv_shape: tuple[int, ...], dtype: Any, causal: bool, probe: Probe | None = None
) -> Calls:
    wide = qkv(shape, kv_shape=kv_shape)
    narrow = [a.astype(dtype) for a in wide]
    calls = attention_calls(*narrow, matrix=False, causal=causal)
    out = np.empty(wide[0].shape, np.float32)
    calls["float32"] = lambda: cattn.scaled_dot_product_attention(*wide, is_causal=causal, out=out)
    if probe is not None:
        probe.limits["read"] = probe.read(*(a.view(np.uint16) for a in narrow[1:]))
    return calls


def quantized(probe: Probe | None) -> Cases:
    """One query and a cache in int8, beside the same cache in other dtypes and beside quantized caches of peers."""
    for tokens in (256, 4096, 16384):
        kv_shape = (1, 8, tokens, 128)
        targets: dict[str, float] = {"float32": 2.5, "bfloat16": 1.54} if tokens == 16384 else {"float32": 1.0}
        yield Case(
            f"int8, T_k={tokens}, 8 key-value heads of 32", functools.partial(_quantized_calls, probe, kv_shape),
            "read", 2.0 * float(np.prod(kv_shape)), targets, {"T": tokens},
        )  # fmt: skip


def _quantized_calls(probe: Probe | None, kv_shape: tuple[int, ...]) -> Calls:
    query, key, value = qkv((1, 32, 1, 128), kv_shape=kv_shape)
    calls = quantized_calls(query, key, value)
    if probe is not None:
        probe.limits["read"] = probe.read(*(np.zeros(kv_shape, np.int8) for _ in range(2)))
    return calls


def calls(probe: Probe | None) -> Cases:
    """Small inputs, including all checks of the arguments."""
    for shape, most in (((6, 2), 1.0), ((1, 4, 16, 16), 2.5), ((8, 12, 64, 64), 1000.0)):
        yield Case(str(shape), attention_calls(*qkv(shape)), targets={"microseconds": most}, facts={"shape": shape})


def window(probe: Probe | None) -> Cases:
    """Attention within a window of 256 keys over 16384 tokens, beside T=4096 without a window."""
    long, short = qkv((1, 2, 16384, 64)), qkv((1, 2, 4096, 64))
    out, short_out = np.empty_like(long[0]), np.empty_like(short[0])
    seen, all_seen = 256 * 257 / 2 + (16384 - 256) * 256, 4096 * 4097 / 2
    yield Case(
        "T=16384, window of 256",
        {
            "cattn": lambda: cattn.causal_attention(*long, window_size=(255, 0), out=out),
            "T=4096 in full": lambda: cattn.causal_attention(*short, out=short_out),
        },
        targets={"T=4096 in full": all_seen / seen / 1.6},
    )


def classes(probe: Probe | None) -> Cases:
    """Multi-head attention of the size of GPT-2: the textbook's module in PyTorch, and the same in cattn's class."""
    torch = torch_or_none()
    if torch is None:
        return
    torch.manual_seed(0)
    eager, fused = (book_module(torch, 768, 1024, 12, kind) for kind in (False, True))
    fused.load_state_dict(eager.state_dict())
    ours = cattn.MultiHeadAttention(768, 768, 1024, 0.1, 12).eval()
    ours.load_state_dict(eager.state_dict())
    for batch in (1, 4):
        x = torch.randn(batch, 1024, 768)
        array = x.numpy()

        def without_tape(module: Any, x: Any = x) -> Any:
            with torch.no_grad():
                return module(x)

        contestants: Calls = {
            "cattn": functools.partial(ours, array),
            "torch, eager": functools.partial(without_tape, eager),
            "torch, SDPA": functools.partial(without_tape, fused),
        }
        yield Case(f"batch of {batch}", agreeing(contestants), targets={"torch, eager": 2.5})


def memory(probe: Probe | None) -> Iterator[dict[str, Any]]:
    """Memory beyond inputs and outputs: the peak of a new process."""
    for tokens in (1024, 2048, 4096):
        peaks = {}
        for name in ("cattn", "torch", "numpy"):
            command = [sys.executable, str(CHILD), "memory", name, "12", str(tokens), "64"]
            found = subprocess.run(command, capture_output=True, text=True, check=False)
            if found.returncode == 0:
                peaks[name] = int(found.stdout)
        mib = peaks["cattn"] / 2**20
        yield {
            "name": f"(1, 12, {tokens}, 64) float32", "T": tokens, "bytes": peaks,
            "targets": {"MiB": {"target": 1, "measured": mib, "met": mib <= 1}},
        }  # fmt: skip


def footprint(probe: Probe | None) -> Iterator[dict[str, Any]]:
    """Time of the import after NumPy's, and the installed size."""
    command = [sys.executable, str(CHILD), "import", "numpy", "cattn"]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    outputs = [subprocess.run(command, capture_output=True, text=True, check=True, env=env).stdout for _ in range(8)]
    beyond = 1e3 * float(np.median([float(seconds) for seconds in outputs[1:]]))  # the first may compile
    package = Path(cattn.__file__).parent
    size = sum(p.stat().st_size for p in package.rglob("*") if p.is_file() and "__pycache__" not in p.parts) / 2**20
    yield {"name": "import beyond NumPy", "targets": {"ms": {"target": 10, "measured": beyond, "met": beyond <= 10}}}
    yield {"name": "installed size", "targets": {"MiB": {"target": 2, "measured": size, "met": size <= 2}}}


# ---- projections and whole models ------------------------------------------------------------------------------------
ROWS = (1, 8, 32, 128, 512)
WEIGHTS = (  # (outputs, inputs)
    (384, 384), (1536, 384), (384, 1536), (768, 768), (3072, 768), (768, 3072), (4096, 1024), (4096, 4096),
)  # fmt: skip


def linear(probe: Probe | None) -> Any:
    """Projections of rows, one thread, beside PyTorch and BLAS; and products of bfloat16, gradients, and float64."""
    for (outputs, inputs), rows in itertools.product(WEIGHTS, ROWS):
        yield projection("float32", rows, outputs, inputs, {"torch": 1.0} | ({"percent": 88} if rows >= 32 else {}))
    for (outputs, inputs), rows in itertools.product(((768, 768), (3072, 768), (768, 3072), (4096, 4096)), ROWS):
        yield Case(
            f"bfloat16 products, {rows} rows, weight ({outputs}, {inputs})",
            functools.partial(_bfloat16_projection, rows, outputs, inputs), "float32", 2.0 * rows * outputs * inputs,
            {"torch": 0.95, "float32": 1.7}, {"dtype": "bfloat16", "rows": rows, "weight": (outputs, inputs)},
        )  # fmt: skip
    for rows, outputs, inputs in ((1, 768, 768), (32, 3072, 768), (512, 768, 768)):
        yield projection("float64", rows, outputs, inputs, {})
    for dtype, rows, outputs, inputs in (
        ("float32", 128, 768, 768), ("float32", 512, 3072, 768), ("float32", 1024, 384, 384),
        ("float64", 256, 768, 768),
    ):  # fmt: skip
        yield Case(
            f"gradients, {dtype}, {rows} rows, weight ({outputs}, {inputs})",
            functools.partial(_gradients, dtype, rows, outputs, inputs), dtype, 4.0 * rows * outputs * inputs,
            {"percent": 80.0}, {"dtype": dtype, "rows": rows},
        )  # fmt: skip


def projection(dtype: str, rows: int, outputs: int, inputs: int, targets: dict[str, float]) -> Case:
    """Return a row of one projection."""
    return Case(
        f"{dtype}, {rows} rows, weight ({outputs}, {inputs})",
        functools.partial(_projection, dtype, rows, outputs, inputs), dtype, 2.0 * rows * outputs * inputs, targets,
        {"dtype": dtype, "rows": rows, "weight": (outputs, inputs)},
    )  # fmt: skip


def _arrays(dtype: str, *shapes: tuple[int, ...]) -> list[Any]:
    rng = np.random.default_rng(0)
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


def _projection(dtype: str, rows: int, outputs: int, inputs: int) -> Calls:
    x, weight = _arrays(dtype, (rows, inputs), (outputs, inputs))
    weight /= np.sqrt(inputs).astype(dtype)
    out, other = np.empty((rows, outputs), dtype), np.empty((rows, outputs), dtype)
    calls: Calls = {"cattn": lambda: cattn_linear(x, weight, out=out), "numpy": lambda: np.matmul(x, weight.T, other)}
    torch = torch_or_none()
    if torch is not None:
        tensors = torch.from_numpy(x), torch.from_numpy(weight)
        calls["torch"] = functools.partial(torch.nn.functional.linear, *tensors)
    return agreeing(calls)


def _bfloat16_projection(rows: int, outputs: int, inputs: int) -> Calls:
    """Arrays of bfloat16, with products in bfloat16; and the same numbers in float32."""
    import ml_dtypes

    wide = x, weight = _arrays("float32", (rows, inputs), (outputs, inputs))
    weight /= np.sqrt(inputs)
    halves = [array.astype(ml_dtypes.bfloat16) for array in wide]
    calls: Calls = {
        "cattn": functools.partial(cattn_linear, *halves, compute_dtype="bfloat16"),
        "float32 inputs": functools.partial(cattn_linear, x, weight, compute_dtype="bfloat16"),
        "float32": functools.partial(cattn_linear, x, weight),
    }
    torch = torch_or_none()
    if torch is not None:
        calls["torch"] = functools.partial(torch.nn.functional.linear, *(as_tensor(torch, array) for array in halves))
    return agreeing(calls, 2.0**-6)


def _gradients(dtype: str, rows: int, outputs: int, inputs: int) -> Calls:
    grad, x, weight = _arrays(dtype, (rows, outputs), (rows, inputs), (outputs, inputs))
    calls: Calls = {"cattn": lambda: linear_backward(grad, x, weight)[:2]}
    calls["numpy"] = lambda: (grad @ weight, grad.T @ x)
    torch = torch_or_none()
    if torch is not None:
        g, a, w = (torch.from_numpy(array) for array in (grad, x, weight))
        calls["torch"] = lambda: (torch.mm(g, w), torch.mm(g.T, a))
    right = calls["cattn"]()
    for name, call in calls.items():
        for found, wanted in zip(call(), right, strict=True):
            limit = 1e-4 * np.abs(wanted).max()
            np.testing.assert_allclose(as_floats(found), wanted, rtol=0, atol=limit, err_msg=name)
    return calls


# ---- models ----------------------------------------------------------------------------------------------------------
STEPS = 5  # steps of decoding in one call, so that the time of entering the context does not count


def models(probe: Probe | None) -> Any:
    """Four transformers of random weights with PyTorch's products and attention, and with ours, one thread."""
    for kind, shapes in (("bert", ((1, 16), (16, 64), (8, 512))), ("gpt2", ((1, 16), (4, 128), (1, 512)))):
        for shape in shapes:
            yield _model_case(f"{kind}, prefill {shape}", functools.partial(_prefill, kind, shape), shape)
    yield _model_case("llama, prefill (1, 512)", functools.partial(_prefill, "llama", (1, 512)), (1, 512))
    yield _model_case("qwen4, prefill (1, 2048)", functools.partial(_prefill, "qwen4", (1, 2048)), (1, 2048))
    for kind, texts in itertools.product(("gpt2", "llama"), (1, 8)):
        name = f"{kind}, decode of {texts} with 256 tokens before"
        yield _model_case(name, functools.partial(_decode, kind, texts), (texts, 1))
    yield _model_case("bert, training step (16, 64)", functools.partial(_train, "bert", (16, 64)), (16, 64))
    yield _model_case("gpt2, training step (2, 128)", functools.partial(_train, "gpt2", (2, 128)), (2, 128))


def _model_case(name: str, calls: Callable[[], Calls], shape: tuple[int, int]) -> Case:
    return Case(name, calls, targets={"torch": 0.95}, facts={"shape": shape})


def _pair(kind: str, train: bool = False) -> tuple[Any, Any]:
    """Return two models with the same weights: with cattn's attention, and with PyTorch's."""
    import torch
    import transformers

    from cattn.integrations.transformers import register

    register()
    configs: dict[str, Callable[..., Any]] = {
        # the size of all-MiniLM-L6-v2
        "bert": lambda **more: transformers.BertConfig(
            hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536, **more
        ),
        "gpt2": lambda **more: transformers.GPT2Config(**more),
        "llama": lambda **more: transformers.LlamaConfig(
            hidden_size=1024, intermediate_size=2816, num_hidden_layers=8, num_attention_heads=16,
            num_key_value_heads=4, vocab_size=8192, **more,
        ),
        # so small that its indexer takes most of the time
        "qwen4": lambda **more: transformers.Qwen4ExpTextConfig(
            hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
            linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=16,
            num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, shared_expert_intermediate_size=24,
            indexer_n_heads=16, indexer_kv_heads=1, indexer_head_dim=16, indexer_budget=6, indexer_compress_ratio=2,
            hc_lowrank=16, layer_types=["linear_attention", "indexed_attention"], pad_token_id=0, vocab_size=8192,
            **more,
        ),
    }  # fmt: skip
    found = []
    for attention in ("cattn", "sdpa"):
        torch.manual_seed(0)
        found.append(transformers.AutoModel.from_config(configs[kind](), attn_implementation=attention).train(train))
    return found[0], found[1]


def _contestants(step: Callable[[Any], Any], kind: str, train: bool = False) -> Calls:
    from cattn.integrations.torch import use_cattn

    torch = torch_or_none()
    ours, theirs = _pair(kind, train)

    def run(model: Any, context: Callable[[], Any]) -> Any:
        with context(), nullcontext() if train else torch.inference_mode():
            return step(model)

    calls: Calls = {
        "cattn": functools.partial(run, ours, lambda: use_cattn(linear=True)),
        "torch": functools.partial(run, theirs, nullcontext),
    }
    np.testing.assert_allclose(as_floats(calls["cattn"]()), as_floats(calls["torch"]()), rtol=0, atol=2e-3)
    return calls


def _prefill(kind: str, shape: tuple[int, int]) -> Calls:
    torch = torch_or_none()
    tokens = torch.from_numpy(np.random.default_rng(1).integers(0, 8000, shape))
    return _contestants(lambda model: model(tokens).last_hidden_state, kind)


def _decode(kind: str, texts: int) -> Calls:
    torch = torch_or_none()
    tokens = torch.from_numpy(np.random.default_rng(1).integers(0, 8000, (texts, 256)))
    caches: dict[int, Any] = {}

    def step(model: Any) -> Any:
        if id(model) not in caches:
            caches[id(model)] = model(tokens, use_cache=True).past_key_values
        cache = caches[id(model)]
        for _ in range(STEPS):
            out = model(tokens[:, :1], past_key_values=cache, use_cache=True).last_hidden_state
        cache.crop(-STEPS)
        return out

    return _contestants(step, kind)


def _train(kind: str, shape: tuple[int, int]) -> Calls:
    torch = torch_or_none()
    tokens = torch.from_numpy(np.random.default_rng(1).integers(0, 8000, shape))

    def step(model: Any) -> Any:
        model.zero_grad()
        for module in model.modules():  # the two models would draw different dropout
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        loss = model(tokens).last_hidden_state.square().mean()
        loss.backward()
        return loss.detach()

    return _contestants(step, kind, train=True)


# ---- all groups ------------------------------------------------------------------------------------------------------
GROUPS: dict[str, Callable[[Probe | None], Iterator[Any]]] = {
    group.__name__: group
    for group in (
        prefill, threads, decode, halves, quantized, softmax, dropout, dropout_fused, training, calls, window, classes,
        linear, models, memory, footprint,
    )
}  # fmt: skip

# Groups where peers allocate many megabytes in each call: malloc keeps freed memory there.
KEEP_MEMORY = {"dropout", "dropout_fused", "training", "prefill", "linear", "models"}
