"""PyTorch's own samples of its operators and modules, inside the contexts: numbers and gradients as without them.

They have no public interface, and their import takes seconds, so that the quick form does without.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from support import looped

torch = pytest.importorskip("torch")
pytest.importorskip("expecttest", reason="PyTorch's samples need it")
if not hasattr(torch.library, "get_kernel"):
    pytest.skip("batch_invariant needs PyTorch 2.9", allow_module_level=True)

from cattn.integrations.torch import batch_invariant, use_cattn  # noqa: E402

pytestmark = [pytest.mark.thorough, pytest.mark.filterwarnings("ignore::UserWarning")]  # PyTorch's own
PRODUCTS = ("mm", "bmm", "mv", "dot", "addmm", "baddbmm", "addmv", "matmul", "einsum", "nn.functional.linear")
REDUCTIONS = (
    "sum", "mean", "nansum", "prod", "norm", "linalg.vector_norm", "var", "std", "var_mean", "std_mean", "softmax",
    "log_softmax", "logsumexp", "nn.functional.nll_loss", "nn.functional.cross_entropy", "nn.functional.batch_norm",
    "nn.functional.layer_norm",
)  # fmt: skip
ELEMENTS = (
    "atan2", "atanh", "cosh", "exp2", "hypot", "igamma", "igammac", "logaddexp", "logaddexp2", "logit", "pow", "rsqrt",
    "sigmoid", "sinh", "special.i0e", "nn.functional.elu", "nn.functional.gelu", "nn.functional.glu",
    "nn.functional.mish", "nn.functional.silu", "nn.functional.softplus",
)  # fmt: skip
ATTENTION = "nn.functional.scaled_dot_product_attention"
MODULES = (
    "Transformer",
    "TransformerEncoder",
    "TransformerEncoderLayer",
    "TransformerDecoderLayer",
    "MultiheadAttention",
)
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64, torch.int64)
# Largest difference, relative to the largest number: both sides round, and the samples have scores of up to 50.
TOLERANCES = {
    torch.float64: 1e-12,
    torch.float32: 5e-5,
    torch.bfloat16: 0.02,
    torch.float16: 0.003,
    torch.complex64: 5e-5,
}


def leaves(value: Any) -> Iterator[Any]:
    """Return the tensors in nested tuples, lists and dicts."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list, dict)):
        for part in value.values() if isinstance(value, dict) else value:
            yield from leaves(part)


def weighted_gradients(out: Any, inputs: list[Any]) -> list[Any]:
    """Return the gradients of a weighted sum of the outputs."""
    generator = torch.Generator().manual_seed(0)
    parts = [part for part in leaves(out) if part.requires_grad]
    total = sum((part * torch.randn(part.shape, dtype=part.dtype, generator=generator)).sum() for part in parts)
    return list(torch.autograd.grad(total, inputs, allow_unused=True)) if parts and inputs else []


def assert_near(found: Any, expected: Any) -> None:
    """Compare tensors, or gradients that may be None."""
    assert (found is None) == (expected is None)
    if found is not None:
        assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
        finite = expected.detach()[expected.detach().isfinite()]
        scale = max(1.0, float(finite.abs().max())) if finite.numel() else 1.0
        limit = TOLERANCES.get(expected.dtype, 0) * scale
        torch.testing.assert_close(found, expected, rtol=0, atol=limit, equal_nan=True)


def description(name: str) -> Any:
    """Return PyTorch's description of an operator."""
    from torch.testing._internal.common_methods_invocations import op_db

    (found,) = [info for info in op_db if info.name == name and not info.variant_test_name]
    return found


@looped("name, dtype", [(name, dtype) for name in (*PRODUCTS, *REDUCTIONS, *ELEMENTS) for dtype in DTYPES], ids=str)
def test_samples_of_the_operators(name: str, dtype: Any) -> None:
    """In every form of a call: one that returns a tensor, one that changes its own, and one that fills another."""
    info, floats = description(name), dtype.is_floating_point
    if dtype not in info.supported_dtypes("cpu"):
        return
    products = 0
    torch.manual_seed(0)
    for sample in info.sample_inputs("cpu", dtype, requires_grad=floats and info.supports_autograd):
        arguments = (sample.input, *sample.args)
        inputs = [x for x in leaves((arguments, sample.kwargs)) if x.requires_grad]
        expected = info.op(*arguments, **sample.kwargs)
        wanted = weighted_gradients(expected, inputs)
        with batch_invariant() as seen:
            found = info.op(*arguments, **sample.kwargs)
            gradients = weighted_gradients(found, inputs)
            for ours, right in zip([*leaves(found), *gradients], [*leaves(expected), *wanted], strict=True):
                assert_near(ours, right)
            check_forms(info, found, arguments, sample.kwargs)
        assert seen.products_passed_on == 0 or not floats
        products += seen.products
    assert products > 0 or name not in PRODUCTS or not floats


def check_forms(info: Any, found: Any, arguments: Any, options: Any) -> None:
    """Ask whether the other forms give the numbers of the first one, and the bits where no parts are added."""
    first, *others = [x.detach() if isinstance(x, torch.Tensor) else x for x in arguments]
    results, found = [], found.detach() if isinstance(found, torch.Tensor) else found
    if info.supports_out and isinstance(found, torch.Tensor):
        outs = torch.empty_like(found), torch.empty(0, dtype=found.dtype)
        results = [info.op(first, *others, **options, out=out) for out in outs]
        assert all(result is out for result, out in zip(results, outs, strict=True))
    in_place = info.inplace_variant or getattr(torch.ops.aten, f"{info.name.split('.')[-1]}_", None)
    if in_place is not None and first.shape == found.shape and first.dtype is found.dtype:
        results.append(in_place(first.clone(), *others, **options))
    for result in results:
        assert_near(result, found)
        if info.name in ELEMENTS:
            torch.testing.assert_close(result, found, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_samples_of_attention(dtype: Any) -> None:
    info = description(ATTENTION)
    count = 0
    for sample in info.sample_inputs("cpu", dtype, requires_grad=True):
        arguments = (sample.input, *sample.args)
        inputs = [x for x in leaves((arguments, sample.kwargs)) if x.requires_grad]
        expected = info.op(*arguments, **sample.kwargs)
        each = []
        with use_cattn() as seen:
            for _ in range(2):
                torch.manual_seed(1)
                each.append(info.op(*arguments, **sample.kwargs))
        assert seen.calls == 2
        assert torch.equal(*each)
        assert (each[0].shape, each[0].dtype) == (expected.shape, dtype)
        if sample.kwargs.get("dropout_p", 0.0) == 0.0:  # the masks of a dropout are cattn's own
            count += 1
            both = [[out, *weighted_gradients(out, inputs)] for out in (each[0], expected)]
            for ours, right in zip(*both, strict=True):
                assert_near(ours, right)
    assert count >= 10


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", MODULES)
def test_samples_of_the_modules(name: str, training: bool, dtype: Any) -> None:
    from torch.testing._internal.common_modules import module_db

    (info,) = [info for info in module_db if info.name == f"nn.{name}"]
    count = calls = 0
    for sample in info.module_inputs_func(info, device="cpu", dtype=dtype, requires_grad=True, training=training):
        torch.manual_seed(0)
        constructor, given = sample.constructor_input, sample.forward_input
        module = info.module_cls(*constructor.args, **constructor.kwargs).to(dtype).train(training)
        for part in module.modules():
            if isinstance(part, torch.nn.Dropout):
                part.p = 0.0
            elif isinstance(part, torch.nn.MultiheadAttention):
                part.dropout = 0.0
        inputs = [x for x in leaves((given.args, given.kwargs)) if x.requires_grad]
        inputs += list(module.parameters())
        if name == "MultiheadAttention":
            given.kwargs["need_weights"] = False  # with weights it computes them step by step
        expected = module(*given.args, **given.kwargs)
        with use_cattn() as seen:
            found = module(*given.args, **given.kwargs)
        calls += seen.calls
        both = [[*leaves(out), *weighted_gradients(out, inputs)] for out in (found, expected)]
        for ours, right in zip(*both, strict=True):
            assert_near(ours, right)
        count += 1
    assert count > 0
    assert calls > 0
