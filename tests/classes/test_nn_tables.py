"""The outputs that the chapter prints for its classes, computed from the stored weights and from the seeds alone."""

import json
from typing import Any

import numpy as np
import pytest

import cattn
from support import ROOT, assert_same_bits

CASES: dict[str, Any] = {
    case["id"]: case for case in json.loads((ROOT / "tests" / "data" / "seed_tables.json").read_text())
}


def inputs(case: dict[str, Any]) -> np.ndarray:
    x = np.array(case["recipe"]["inputs"], np.float32)
    return np.stack([x] * 2) if len(case["recipe"]["input_shape"]) == 3 else x


CAUSAL_KINDS = [cattn.CausalAttention, cattn.MultiHeadAttentionWrapper]


def drawn_by(case: dict[str, Any]) -> list[type]:
    """Return the classes that draw the weights in the order of the case."""
    if case["step"] == "context_vec_masked":
        return CAUSAL_KINDS
    return [cattn.SelfAttention_v1 if case["weights_layout"] == "in_out" else cattn.SelfAttention_v2]


def build(kind: type, *, rng: Any = None) -> Any:
    sizes = {cattn.CausalAttention: (6, 0.5), cattn.MultiHeadAttentionWrapper: (6, 0.0, 1)}.get(kind, ())
    return kind(3, 2, *sizes, rng=rng).eval()


# All cases that show the output of a class. Not 003: its d_v differs from its head_dim, as in no class of the book.
CONTEXTS = [
    name for name, case in CASES.items() if case["step"] in ("context_vec", "context_vec_masked")
    and case.get("weights") and not name.startswith("003")
]  # fmt: skip


def assert_table(case: dict[str, Any], result: np.ndarray) -> None:
    expected = np.array(case["values"])
    assert result.shape == expected.shape
    assert np.abs(result - expected).max() <= case["tolerance"]


@pytest.mark.parametrize("name", CONTEXTS)
def test_stored_weights_give_the_printed_tables(name: str) -> None:
    """Every class loads the weights, whether they are stored as (in, out) or as (out, in)."""
    case = CASES[name]
    bare = case["weights_layout"] == "in_out"
    state = {key if bare else f"{key}.weight": np.array(value) for key, value in case["weights"].items()}
    causal = case["step"] == "context_vec_masked"
    for kind in CAUSAL_KINDS if causal else [cattn.SelfAttention_v1, cattn.SelfAttention_v2]:
        module = build(kind, rng=0)
        module.load_state_dict(state)
        assert_table(case, module(inputs(case)))


def test_nine_tables_show_the_output_of_a_class() -> None:
    assert len(CONTEXTS) == 9


@pytest.mark.parametrize("name", [name for name in CONTEXTS if "ex3.1-v1" not in name])
def test_seeds_give_the_printed_tables(name: str) -> None:
    case = CASES[name]
    for kind in drawn_by(case):
        cattn.manual_seed(case["recipe"]["seed"])
        module = build(kind)
        assert_table(case, module(inputs(case)))
        for key, value in case["weights"].items():
            layer = getattr(module.heads[0] if hasattr(module, "heads") else module, key)
            np.testing.assert_array_equal(getattr(layer, "weight", layer), np.array(value, np.float32))


def test_exercise_3_1_gives_the_printed_and_the_correct_table() -> None:
    """The chapter assigns W_query twice and W_key never, and prints the result. A state dict refuses that slip."""
    printed, correct = CASES["004-ex3.1-v1-as-printed"], CASES["004-ex3.1-v1-correct"]
    cattn.manual_seed(123)
    v1 = cattn.SelfAttention_v1(3, 2)
    cattn.manual_seed(123)
    v2 = cattn.SelfAttention_v2(3, 2)
    own_key = v1.W_key
    v1.W_query = v2.W_query.weight.T
    v1.W_query = v2.W_query.weight.T
    v1.W_value = v2.W_value.weight.T
    assert_table(printed, v1(inputs(printed)))

    slip = {"W_query": v2.W_query.weight.T, "W_value": v2.W_value.weight.T}
    with pytest.raises(ValueError, match="missing: W_key"):
        v1.load_state_dict(slip)
    assert v1.W_key is own_key

    v1.load_state_dict(v2.state_dict())
    assert_table(correct, v1(inputs(correct)))
    assert_same_bits(v1(inputs(correct)), v2(inputs(correct)))
