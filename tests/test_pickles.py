"""Pickles: which modules they name, and that those of an earlier layout are read."""

import pickle
import re

import numpy as np

import cattn


def test_pickles_name_public_modules_and_those_of_an_earlier_layout_are_read() -> None:
    """The names of private modules change: a pickle must not depend on them."""
    layer = cattn.MultiHeadAttention(4, 4, 8, dropout=0.1, num_heads=2, rng=1)
    x = np.zeros((2, 2))
    warning, explained = cattn.CausalAlignmentWarning("x"), cattn.explain(x, x, x)
    for original in (layer, cattn.Linear(2, 2), cattn.AttentionOutput(1), warning, explained):
        content = pickle.dumps(original, protocol=0)
        assert not re.search(rb"cattn[.\w]*\._", content.replace(b"cattn.random\n_restored", b""))
        assert type(pickle.loads(content)) is type(original)
    content = re.sub(rb"ccattn\.nn\n(Linear|Dropout)", rb"ccattn._layers\n\1", pickle.dumps(layer, protocol=0))
    assert b"cattn._layers\nLinear" in content
    np.testing.assert_array_equal(pickle.loads(content).W_query.weight, layer.W_query.weight)
    for module, name in (
        ("_types", "AttentionOutput"),
        ("_types", "CausalAlignmentWarning"),
        ("_explain", "Explanation"),
    ):
        assert pickle.loads(f"ccattn.{module}\n{name}\n.".encode()) is getattr(cattn, name)
