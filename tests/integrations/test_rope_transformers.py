"""Rotary positions and QK-norm as the models of Hugging Face transformers compute them.

transformers computes frequencies, angles and their cosines in float32, so its angles are off by up to an ULP of float32
of their size: for few tokens by less than 1e-6, and for many by that times the position. In float64 the comparison is
with a float64 form of the same formulas, applied by the model's own function.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import cattn

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5")

from transformers import GPTJConfig, GPTNeoXConfig, LlamaConfig, Qwen3Config  # noqa: E402
from transformers.models.gpt_neox import modeling_gpt_neox as gpt_neox  # noqa: E402
from transformers.models.gptj import modeling_gptj as gptj  # noqa: E402
from transformers.models.llama import modeling_llama as llama  # noqa: E402
from transformers.models.qwen3 import modeling_qwen3 as qwen3  # noqa: E402

HEAD_DIM, LENGTH = 64, "original_max_position_embeddings"
FEW, MANY = np.arange(8), np.array([0, 1, 500, 4095, 4096, 30000])
# name: theta and the dict of the config
LLAMA: dict[str, tuple[float, dict[str, Any]]] = {
    "Llama": (10000.0, {"rope_type": "default"}),
    "Llama 3.1": (
        500000.0,
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, LENGTH: 8192},
    ),
    "linear": (10000.0, {"rope_type": "linear", "factor": 4.0}),
    "dynamic": (10000.0, {"rope_type": "dynamic", "factor": 2.0}),
    "Yarn": (10000.0, {"rope_type": "yarn", "factor": 16.0, LENGTH: 4096}),
    "Yarn, Qwen": (1000000.0, {"type": "yarn", "factor": 4.0, LENGTH: 32768}),
    "Yarn, DeepSeek": (
        10000.0,
        {
            "type": "yarn", "factor": 40.0, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 0.707,
            LENGTH: 4096,
        },
    ),
    "Yarn, not truncated": (150000.0, {"rope_type": "yarn", "factor": 32.0, "truncate": False, LENGTH: 4096}),
    "Yarn, attention_factor": (10000.0, {"rope_type": "yarn", "factor": 8.0, "attention_factor": 1.3, LENGTH: 2048}),
}  # fmt: skip


def queries(tokens: int, head_dim: int = HEAD_DIM) -> np.ndarray:
    return np.random.default_rng(0).standard_normal((2, 3, tokens, head_dim))


def tensor(array: np.ndarray) -> Any:
    return torch.from_numpy(np.ascontiguousarray(array))


def tolerance(positions: np.ndarray) -> float:
    """Return 1e-6 for few tokens, and else the error of an angle in float32, times the largest element."""
    return float(max(1e-6, 4 * 2.0**-23 * positions.max() * 5))


def own_scaling(scaling: dict[str, Any]) -> dict[str, Any]:
    """Return the dict for cattn: `dynamic` names the length that transformers takes from the config."""
    kind = scaling.get("rope_type", scaling.get("type"))
    return {**scaling, LENGTH: 16} if kind == "dynamic" else scaling


@pytest.mark.promise("rotary positions")
@pytest.mark.parametrize("positions", [FEW, MANY], ids=["few", "many"])
@pytest.mark.parametrize("name", LLAMA)
def test_llama(name: str, positions: np.ndarray) -> None:
    theta, scaling = LLAMA[name]
    config = LlamaConfig(
        hidden_size=3 * HEAD_DIM,
        num_attention_heads=3,
        head_dim=HEAD_DIM,
        max_position_embeddings=16 if "dynamic" in name else 131072,
        rope_parameters={**scaling, "rope_theta": theta},
    )
    x = queries(len(positions)).astype(np.float32)
    embedding = llama.LlamaRotaryEmbedding(config)
    cos, sin = embedding(tensor(x), tensor(positions)[None])
    expected, _ = llama.apply_rotary_pos_emb(tensor(x), tensor(x), cos, sin)
    rotated = cattn.rope(x, positions, theta=theta, scaling=own_scaling(scaling))
    np.testing.assert_allclose(rotated, expected.numpy(), rtol=0, atol=tolerance(positions))
    # the dict as the config holds it, with all the keys that transformers adds
    if "dynamic" not in name:
        again = cattn.rope(x, positions, theta=theta, scaling=config.rope_parameters)
        np.testing.assert_array_equal(again, rotated)


@pytest.mark.parametrize("name", LLAMA)
def test_llama_in_float64(name: str) -> None:
    """The model's rotation with the same formulas in float64."""
    theta, scaling = LLAMA[name]
    positions = np.arange(40)
    frequencies, factor = frequencies_in_float64(theta, scaling, HEAD_DIM, seq_len=40, max_len=16)
    angles = positions[:, None] * np.concatenate([frequencies, frequencies])
    cos, sin = tensor(factor * np.cos(angles))[None], tensor(factor * np.sin(angles))[None]
    x = queries(40)
    expected, _ = llama.apply_rotary_pos_emb(tensor(x), tensor(x), cos, sin)
    rotated = cattn.rope(x, theta=theta, scaling=own_scaling(scaling))
    np.testing.assert_allclose(rotated, expected.numpy(), rtol=0, atol=1e-12)
    gradient = tensor(x).requires_grad_()
    llama.apply_rotary_pos_emb(gradient, gradient, cos, sin)[0].backward(tensor(x[::-1]))
    inverse = cattn.rope(x[::-1], theta=theta, scaling=own_scaling(scaling), inverse=True)
    np.testing.assert_allclose(inverse, gradient.grad.numpy(), rtol=0, atol=1e-12)


def frequencies_in_float64(
    theta: float, scaling: dict[str, Any], dim: int, *, seq_len: int, max_len: int
) -> tuple[np.ndarray, float]:
    """Compute frequencies and attention factor number by number, as the papers write them."""
    kind = scaling.get("rope_type", scaling.get("type"))
    factor = scaling.get("factor", 1.0)
    if kind == "dynamic" and seq_len > max_len:
        theta *= (factor * seq_len / max_len - (factor - 1)) ** (dim / (dim - 2))
    frequencies, attention = [], 1.0
    for i in range(dim // 2):
        f = 1 / theta ** (2 * i / dim)
        if kind == "linear":
            f /= factor
        elif kind == "llama3":
            low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
            wave = 2 * math.pi / f
            if wave > scaling[LENGTH] / low:
                f /= factor
            elif wave >= scaling[LENGTH] / high:
                smooth = (scaling[LENGTH] / wave - low) / (high - low)
                f = (1 - smooth) * f / factor + smooth * f
        elif kind == "yarn":
            low, high = (
                dim * math.log(scaling[LENGTH] / (beta * 2 * math.pi)) / (2 * math.log(theta)) for beta in (32, 1)
            )
            if scaling.get("truncate", True):
                low, high = math.floor(low), math.ceil(high)
            ramp = min(max((i - max(low, 0)) / (min(high, dim - 1) - max(low, 0)), 0), 1)
            f = f / factor * ramp + f * (1 - ramp)
        frequencies.append(f)
    if kind == "yarn":
        one = 0.1 * math.log(factor)
        attention = scaling.get("attention_factor", one + 1)
        if "mscale" in scaling:
            attention = (scaling["mscale"] * one + 1) / (scaling["mscale_all_dim"] * one + 1)
    return np.array(frequencies), attention


@pytest.mark.promise("rotary positions")
def test_qwen3_norms_queries_before_it_rotates_them() -> None:
    torch.manual_seed(0)
    config = Qwen3Config(
        hidden_size=3 * HEAD_DIM, num_attention_heads=3, num_key_value_heads=3, head_dim=HEAD_DIM, rms_norm_eps=1e-6
    )
    norm = qwen3.Qwen3RMSNorm(HEAD_DIM, eps=config.rms_norm_eps)
    with torch.no_grad():
        norm.weight.copy_(torch.randn(HEAD_DIM))
    x = queries(len(FEW)).astype(np.float32)
    cos, sin = qwen3.Qwen3RotaryEmbedding(config)(tensor(x), tensor(FEW)[None])
    with torch.no_grad():
        normed = norm(tensor(x))
        expected, _ = qwen3.apply_rotary_pos_emb(normed, normed, cos, sin)
    weight = norm.weight.detach().numpy()
    ours = cattn.rms_norm(x, weight, config.rms_norm_eps)
    np.testing.assert_allclose(ours, normed.numpy(), rtol=1e-6, atol=1e-6)
    theta = config.rope_parameters["rope_theta"]
    rotated = cattn.rope(ours, theta=theta, scaling=config.rope_parameters)
    np.testing.assert_allclose(rotated, expected.numpy(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("positions", [FEW, MANY[:4]], ids=["few", "many"])
def test_gptj_rotates_neighbours(positions: np.ndarray) -> None:
    config = GPTJConfig(n_embd=3 * HEAD_DIM, n_head=3, rotary_dim=32, n_positions=4096)
    x = queries(len(positions)).astype(np.float32)
    tokens = tensor(x.swapaxes(1, 2))  # (B, T, H, D)
    sin, cos = gptj.GPTJRotaryEmbedding(config)(tokens, position_ids=tensor(positions)[None])
    rotated = gptj.apply_rotary_pos_emb(tokens[..., :32], sin, cos)
    expected = torch.cat([rotated, tokens[..., 32:]], dim=-1).numpy().swapaxes(1, 2)
    actual = cattn.rope(x, positions, rotary_dim=32, interleaved=True)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance(positions))


@pytest.mark.parametrize("positions", [FEW, MANY], ids=["few", "many"])
def test_gpt_neox_rotates_a_part_of_the_columns(positions: np.ndarray) -> None:
    config = GPTNeoXConfig(
        hidden_size=3 * HEAD_DIM,
        num_attention_heads=3,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
    )
    x = queries(len(positions)).astype(np.float32)
    cos, sin = gpt_neox.GPTNeoXRotaryEmbedding(config)(tensor(x), tensor(positions)[None])
    expected, _ = gpt_neox.apply_rotary_pos_emb(tensor(x), tensor(x), cos, sin)
    actual = cattn.rope(x, positions, rotary_dim=16, scaling=config.rope_parameters)
    np.testing.assert_allclose(actual, expected.numpy(), rtol=0, atol=tolerance(positions))
