"""cattn inside PyTorch: keys and values of one byte, with scales, by every way."""

from typing import Any

import numpy as np
import pytest

import cattn

torch = pytest.importorskip("torch")
pytest.importorskip("ml_dtypes")

from test_torch_integration import operator_arguments  # noqa: E402

from cattn.integrations.torch import scaled_dot_product_attention  # noqa: E402
from support import as_tuple, paired  # noqa: E402

B, H, K, T_q, T_k, D, D_V = 2, 4, 2, 6, 30, 16, 8
INTEGERS, FLOATS = torch.int8, torch.float8_e4m3fn
SHAPES: dict[str, tuple[Any, Any]] = {  # of the scales of keys and of values
    "tokens": ((B, K, T_k, 1), (B, K, T_k, 1)),
    "columns": ((K, 1, D), (D_V,)),
    "elements": ((B, K, T_k, D), (B, K, T_k, D_V)),
    "one": ((), (1, 1)),
    "keys alone": ((T_k, 1), None),
    "values alone": (None, (B, 1, T_k, 1)),
}


def arrays_of(name: str, dtype: Any = torch.float32, quantized: Any = INTEGERS) -> tuple[Any, Any, Any, dict[str, Any]]:
    """Return query, key, value and the scales that there are."""
    random = torch.Generator().manual_seed(len(name))
    tensors = [torch.randn((B, H, T_q, D), generator=random).to(dtype)]
    scales = {}
    for which, shape, columns in zip(("key", "value"), SHAPES[name], (D, D_V), strict=True):
        numbers = torch.randn((B, K, T_k, columns), generator=random)
        tensors.append(numbers.to(dtype) if shape is None else (numbers * 40).to(quantized))
        if shape is not None:
            scales[f"{which}_scale"] = torch.rand(shape, generator=random) / 20 + 0.01
    query, key, value = tensors
    return query, key, value, scales


def attention(query: Any, key: Any, value: Any, **options: Any) -> Any:
    """Call the function with pairs of tensors and their scales."""
    return scaled_dot_product_attention(**paired({"query": query, "key": key, "value": value, **options}, as_tuple))


def dequantized(key: Any, value: Any, scales: dict[str, Any], wide: Any) -> list[Any]:
    """Return keys and values as plain tensors: products in float32."""
    found = []
    for name, tensor in (("key", key), ("value", value)):
        scale = scales.get(f"{name}_scale")
        found.append((tensor if scale is None else tensor.to(torch.float32) * scale).to(wide))
    return found


def options_of(wide: Any) -> tuple[list[Any], dict[str, Any]]:
    """Return bias and sinks, which have gradients, and the other options."""
    random = torch.Generator().manual_seed(1)
    leaves = [torch.randn(shape, generator=random).to(wide).requires_grad_() for shape in ((H, T_q, T_k), (H,))]
    return leaves, {"softcap": 5.0, "key_value_seq_lengths": torch.tensor([T_k, 21]), "enable_gqa": True}


WAYS: dict[str, Any] = {
    "at once": lambda function: function,
    "operator": lambda function: torch.compile(function, backend="aot_eager", fullgraph=True),
    "vmap": lambda function: lambda *x: tuple(y[0] for y in torch.vmap(function)(*(t[None] for t in x))),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("quantized", [INTEGERS, FLOATS])
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("way", WAYS)
def test_results_and_gradients_are_those_of_the_products(way: str, name: str, quantized: Any, dtype: Any) -> None:
    """Halves are computed in float32, and their results are rounded."""
    query, key, value, scales = arrays_of(name, dtype, quantized)
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    leaves, options = options_of(wide)
    floats = [query, *(x for x in (key, value) if x.dtype is dtype)]
    leaves = [*(x.requires_grad_() for x in floats), *leaves]
    names = list(scales)

    def ours(query: Any, key: Any, value: Any, bias: Any, sinks: Any, *given: Any) -> Any:
        scaled = dict(zip(names, given, strict=True))
        result = attention(query, key, value, bias=bias, sinks=sinks, **scaled, **options, return_weights=True)
        return result.out, result.weights

    torch.compiler.reset()
    out, weights = WAYS[way](ours)(query, key, value, *leaves[-2:], *scales.values())
    plain = [query.to(wide), *dequantized(key, value, scales, wide)]
    right = attention(*plain, bias=leaves[-2], sinks=leaves[-1], **options, return_weights=True)
    assert out.dtype is dtype
    assert torch.equal(out, right.out.to(dtype))
    assert torch.equal(weights, right.weights.to(dtype))
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).to(dtype)
    found = torch.autograd.grad(out, leaves, grad)
    expected = torch.autograd.grad(right.out, leaves, grad.to(wide))
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("quantized", [INTEGERS, FLOATS])
def test_the_function_for_numpy_has_the_same_bits(quantized: Any) -> None:
    query, key, value, scales = arrays_of("tokens", quantized=quantized)
    ours = attention(query, key, value, **scales, enable_gqa=True)
    call = paired({"query": query, "key": key, "value": value, **scales})
    right = cattn.scaled_dot_product_attention(**call, enable_gqa=True)
    np.testing.assert_array_equal(ours.numpy(), right)


def test_tokens_before_heads_and_other_dtypes_of_scales() -> None:
    """The output has the memory order of the query. Scales are rounded to float32."""
    query, key, value, scales = arrays_of("tokens")
    query = query.transpose(1, 2).contiguous().transpose(1, 2)
    scales = {name: scale.to(torch.bfloat16) for name, scale in scales.items()}
    out = attention(query, key, value, **scales, enable_gqa=True)
    assert out.stride() == torch.empty(B, T_q, H, D_V).transpose(1, 2).stride()
    assert torch.equal(out, attention(query, *dequantized(key, value, scales, torch.float32), enable_gqa=True))


def test_autocast_casts_the_other_tensors() -> None:
    query, key, value, scales = arrays_of("keys alone")
    with torch.autocast("cpu", torch.bfloat16):
        out = attention(query, key, value, **scales, enable_gqa=True)
    right = attention(query.bfloat16(), key, value.bfloat16(), **scales, enable_gqa=True)
    assert out.dtype is torch.bfloat16
    assert torch.equal(out, right)


@pytest.mark.parametrize("quantized", [INTEGERS, FLOATS])
def test_the_operator_fulfils_the_contract_of_torch_library(quantized: Any) -> None:
    query, key, value, scales = arrays_of("tokens", quantized=quantized)
    args = operator_arguments([query.requires_grad_(), key, value], enable_gqa=True, **scales)
    checks = ["test_autograd_registration", "test_faketensor"]
    if quantized is INTEGERS:  # PyTorch's check of the schema multiplies the tensors
        checks.append("test_schema")
    torch.library.opcheck(torch.ops.cattn.attention.default, args, test_utils=checks)
    with torch.no_grad():
        out, lse, _ = torch.ops.cattn.attention(*args)
    backward = (torch.ones_like(out), torch.ones_like(lse), None, out, lse, query.detach(), *args[1:-1])
    torch.library.opcheck(torch.ops.cattn.attention_backward.default, backward, test_utils=checks)


@pytest.mark.parametrize("dims", [(0, 0, 0, 0, 0), (0, None, None, None, None), (None, 1, None, 0, None),
                                  (None, None, None, None, 2)])  # fmt: skip
@pytest.mark.parametrize("axes", [2, 3, 4])
def test_vmap_is_a_loop(dims: tuple[int | None, ...], axes: int) -> None:
    query, key, value, scales = arrays_of("tokens")
    parts = [query[:, :K], key, value, *scales.values()]
    parts = [x[(0,) * (4 - axes)] for x in parts]
    full = [
        x if d is None else torch.stack([x, x.flip(-2), x.roll(1, -2)], min(d, axes - 1))
        for x, d in zip(parts, dims, strict=True)
    ]
    at = tuple(None if d is None else min(d, axes - 1) for d in dims)

    def call(query: Any, key: Any, value: Any, key_scale: Any, value_scale: Any) -> Any:
        return attention(query, key, value, key_scale=key_scale, value_scale=value_scale, is_causal=True)

    found = torch.vmap(call, at)(*full)
    for i in range(3):
        one = call(*(x if d is None else x.select(d, i) for x, d in zip(full, at, strict=True)))
        assert torch.equal(found[i], one)


# ---- errors --------------------------------------------------------------------------------------------------------
X = torch.ones(2, 3, 4)
I8 = X.to(INTEGERS)
WRONG: dict[str, tuple[type[Exception], str, tuple[Any, ...], dict[str, Any]]] = {
    "floats": (TypeError, "key has dtype torch.float32 and a scale; scales belong to int8", (X, X, X),
               {"key_scale": X}),
    "other integers": (TypeError, "value has dtype torch.int16 and a scale", (X, X, X.short()), {"value_scale": X}),
    "one scale": (TypeError, r"value has dtype torch.int8 and no scale: pass the pair \(value, scale\)", (X, I8, I8),
                  {"key_scale": X}),
    "integer queries": (TypeError, "query has dtype torch.int8 and no scale", (I8, I8, X), {"key_scale": X}),
    "dtypes": (TypeError, "value has dtype torch.float64; query has torch.float32", (X, I8, X.double()),
               {"key_scale": X}),
    "array": (TypeError, r"key\.scale must be a torch.Tensor, got ndarray", (X, I8, X), {"key_scale": np.ones(1)}),
    "no tensor": (TypeError, "key must be a torch.Tensor, got int", (X, 1, X), {"key_scale": X}),
    "boolean scale": (TypeError, r"key\.scale has dtype torch.bool; it must hold real numbers", (X, I8, X),
                      {"key_scale": X > 0}),
    "device": (ValueError, r"key\.scale is on meta", (X, I8, X), {"key_scale": X.to("meta")}),
    "shape": (ValueError, r"key\.scale has shape \(3,\), which does not broadcast to the shape of key \(2, 3, 4\)",
              (X, I8, X), {"key_scale": torch.ones(3)}),
    "zero": (ValueError, r"key\.scale must be positive and finite, .* got 0.0", (X, I8, X), {"key_scale": X * 0}),
    "gradient of a scale": (NotImplementedError,
                            r"key\.scale requires grad, but has no gradient: pass key\.scale\.detach",
                            (X, I8, X), {"key_scale": X.clone().requires_grad_()}),
    "gradient of a key": (NotImplementedError, r"key requires grad, but has no gradient: pass key.detach",
                          (X, X.to(FLOATS).requires_grad_(), X), {"key_scale": X}),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_errors_name_the_argument(name: str) -> None:
    kind, text, arguments, options = WRONG[name]
    with pytest.raises(kind, match=text):
        attention(*arguments, **options)
