"""PyTorch's own samples of attention, which its installed package holds: of its table of operators and of its modules.

They have no public interface, and their import takes ten seconds and the package expecttest.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("expecttest")

from cattn.integrations.torch import use_cattn  # noqa: E402 - needs PyTorch

pytestmark = pytest.mark.long
# Largest difference, relative to the largest number: both sides round, and the samples have scores of up to 50.
TOLERANCES = {torch.float32: 3e-5, torch.float64: 1e-13}
MODULES = [
    "Transformer",
    "TransformerEncoder",
    "TransformerEncoderLayer",
    "TransformerDecoderLayer",
    "MultiheadAttention",
]


def leaves(value: Any) -> Iterator[Any]:
    """Return the tensors in nested tuples, lists and dicts."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list, dict)):
        for part in value.values() if isinstance(value, dict) else value:
            yield from leaves(part)


def gradients(out: Any, inputs: list[Any]) -> list[Any]:
    """Return the gradients of a weighted sum of the outputs."""
    generator = torch.Generator().manual_seed(0)
    total = sum((part * torch.randn(part.shape, dtype=part.dtype, generator=generator)).sum() for part in leaves(out))
    return list(torch.autograd.grad(total, inputs, allow_unused=True))


def assert_near(found: Any, expected: Any, dtype: Any) -> None:
    """Compare tensors, or gradients that may be None."""
    assert (found is None) == (expected is None)
    if found is not None:
        scale = max(1.0, float(expected.detach().abs().max())) if expected.numel() else 1.0
        torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCES[dtype] * scale)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_samples_of_the_operator(dtype: Any) -> None:
    from torch.testing._internal.common_methods_invocations import op_db

    (info,) = [info for info in op_db if info.name == "nn.functional.scaled_dot_product_attention"]
    count = 0
    for sample in info.sample_inputs("cpu", dtype, requires_grad=True):
        arguments = (sample.input, *sample.args)
        inputs = [tensor for tensor in leaves((arguments, sample.kwargs)) if tensor.requires_grad]
        torch.manual_seed(1)
        expected = torch.nn.functional.scaled_dot_product_attention(*arguments, **sample.kwargs)
        with use_cattn() as seen:
            torch.manual_seed(1)
            found = torch.nn.functional.scaled_dot_product_attention(*arguments, **sample.kwargs)
            torch.manual_seed(1)
            again = torch.nn.functional.scaled_dot_product_attention(*arguments, **sample.kwargs)
        assert seen.calls == 2
        assert torch.equal(found, again)
        assert found.shape == expected.shape
        assert found.dtype is dtype
        if sample.kwargs.get("dropout_p", 0.0) == 0.0:  # the masks of a dropout are cattn's own
            assert_near(found, expected, dtype)
            pairs = zip(gradients(found, inputs), gradients(expected, inputs), strict=True)
            for ours, theirs in pairs:
                assert_near(ours, theirs, dtype)
            count += 1
    assert count >= 10


@pytest.mark.filterwarnings("ignore::UserWarning")  # PyTorch's, about nested tensors and masks of two kinds
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
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
        inputs = [tensor for tensor in leaves((given.args, given.kwargs)) if tensor.requires_grad]
        inputs += list(module.parameters())
        if name == "MultiheadAttention":
            given.kwargs["need_weights"] = False  # with weights it computes them step by step
        expected = module(*given.args, **given.kwargs)
        with use_cattn() as seen:
            found = module(*given.args, **given.kwargs)
        calls += seen.calls
        for ours, theirs in zip(leaves(found), leaves(expected), strict=True):
            assert_near(ours, theirs, dtype)
        for ours, theirs in zip(gradients(found, inputs), gradients(expected, inputs), strict=True):
            assert_near(ours, theirs, dtype)
        count += 1
    assert count > 0
    assert calls > 0
