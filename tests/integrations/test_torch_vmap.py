"""torch.vmap over cattn's attention: one call, with the bits of a loop."""

import warnings
from typing import Any

import pytest

import cattn

torch = pytest.importorskip("torch")

from test_torch_integration import attention  # noqa: E402
from test_torch_options import LISTS, B, D, H, T_k, T_q, tensor  # noqa: E402

LOGICAL: dict[str, tuple[list[tuple[int, ...]], dict[str, Any]]] = {
    "two dimensions": ([(T_q, D), (T_k, D), (T_k, 5)], {"is_causal": "lower_right", "sinks": tensor(1)}),
    "three dimensions": (
        [(B, T_q, D), (B, T_k, D), (B, T_k, 5)],
        {"key_value_seq_lengths": torch.tensor([4, 9]), "attn_mask": tensor(B, T_q, T_k), "sinks": tensor(B, 1)},
    ),
    "three dimensions with heads": (
        [(4, T_q, D), (2, T_k, D), (2, T_k, 5)],
        {"enable_gqa": True, "sinks": tensor(4), "bias": tensor(4, 1, T_k)},
    ),
    "four dimensions": (
        [(B, H, T_q, D), (B, H, T_k, D), (B, H, T_k, 5)],
        {"query_offset": torch.tensor([3, 1]), "is_causal": True, "bias": tensor(H, T_q, T_k), "softcap": 2.0,
         "alibi_slopes": tensor(H)},
    ),
    "other numbers of dimensions": ([(B, H, T_q, D), (T_k, D), (H, T_k, 5)], {"attn_mask": tensor(T_k) > 0}),
    "blocks": ([(B, T_q, D), (B, T_k, D), (B, T_k, 5)], {"block_mask": (tensor(B, 2, 3) > -1, 4)}),
    "blocks of each head": (
        [(B, H, T_q, D), (B, H, T_k, D), (B, H, T_k, 5)],
        {"block_mask": (tensor(H, 2, 3) > -1, 4)},
    ),
    "lists of keys": ([(B, T_q, D), (B, T_k, D), (B, T_k, 5)], {"key_indices": LISTS}),
    "lists of each head": ([(B, H, T_q, D), (B, H, T_k, D), (B, H, T_k, 5)], {"key_indices": LISTS[0, :H, None]}),
    "five dimensions": ([(3, B, H, T_q, D), (B, H, T_k, D), (B, H, T_k, 5)],
        {"key_value_seq_lengths": 8, "key_value_seq_starts": torch.tensor([[1, 4]])}),
}  # fmt: skip


@pytest.mark.parametrize("name", LOGICAL)
@pytest.mark.parametrize("batched", [(0, 0, 0), (None, 1, None), (2, None, 0)])
def test_vmap_gives_what_a_loop_gives_in_one_call(name: str, batched: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes, options = LOGICAL[name]
    inputs = []
    for i, (shape, dim) in enumerate(zip(shapes, batched, strict=True)):
        full = shape if dim is None else (*shape[: min(dim, 1)], 3, *shape[min(dim, 1) :])
        inputs.append(tensor(*full, seed=i).requires_grad_())
    dims = tuple(None if dim is None else min(dim, 1) for dim in batched)
    calls = []
    forward = cattn.scaled_dot_product_attention

    def counting(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        return forward(*args, **kwargs)

    monkeypatch.setattr(cattn, "scaled_dot_product_attention", counting)

    def call(q: Any, k: Any, v: Any) -> Any:
        result = attention(q, k, v, **options, return_weights=True, return_lse=True)
        return result.out, result.weights, result.lse

    with warnings.catch_warnings():
        warnings.simplefilter("error")  # PyTorch warns where it falls back to a loop
        ours = torch.vmap(call, dims)(*inputs)
    assert len(calls) == 1
    parts = [call(*(x if d is None else x.select(d, i) for x, d in zip(inputs, dims, strict=True))) for i in range(3)]
    for found, right in zip(ours, map(torch.stack, zip(*parts, strict=True)), strict=True):
        assert torch.equal(found, right)
    grad = torch.randn(ours[0].shape, dtype=torch.float64)
    right = torch.stack([part[0] for part in parts])
    for a, b in zip(torch.autograd.grad(ours[0], inputs, grad), torch.autograd.grad(right, inputs, grad), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", LOGICAL)
def test_batched_gradients(name: str) -> None:
    """Several gradients of the output at once: vmap over the backward pass."""
    shapes, options = LOGICAL[name]
    inputs = [tensor(*shape, seed=i).requires_grad_() for i, shape in enumerate(shapes)]
    out = attention(*inputs, **options)
    grad = torch.randn(3, *out.shape, dtype=torch.float64)
    ours = torch.autograd.grad(out, inputs, grad, is_grads_batched=True, retain_graph=True)
    parts = [torch.autograd.grad(out, inputs, g, retain_graph=True) for g in grad]
    for a, b in zip(ours, map(torch.stack, zip(*parts, strict=True)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_vmap_with_dropout() -> None:
    x = torch.ones(4, 2, 9, 8)

    def call(x: Any) -> Any:
        return attention(x, x, torch.eye(9).expand(2, 9, 9), dropout_p=0.5)

    same = torch.vmap(call, randomness="same")(x)
    assert all(torch.equal(part, same[0]) for part in same)
    torch.manual_seed(3)
    different = torch.vmap(call, randomness="different")(x)
    assert not torch.equal(different[0], different[1])
    torch.manual_seed(3)
    assert torch.equal(torch.vmap(call, randomness="different")(x), different)
