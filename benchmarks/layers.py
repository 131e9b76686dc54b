"""The groups of projections and of whole models: `linear` and its gradients, and three transformers."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np

from cattn.functional import linear as cattn_linear
from cattn.functional import linear_backward

from .contestants import Calls, agreeing, as_floats, as_tensor, torch_or_none
from .machine import Probe
from .timing import Case

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
    """Three transformers of random weights with PyTorch's products and attention, and with ours, one thread."""
    for kind, shapes in (("bert", ((1, 16), (16, 64), (8, 512))), ("gpt2", ((1, 16), (4, 128), (1, 512)))):
        for shape in shapes:
            yield _model_case(f"{kind}, prefill {shape}", functools.partial(_prefill, kind, shape), shape)
    yield _model_case("llama, prefill (1, 512)", functools.partial(_prefill, "llama", (1, 512)), (1, 512))
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
