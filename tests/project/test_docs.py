"""The documentation: every public name is documented, and every example in docstrings, README and pages runs."""

from __future__ import annotations

import doctest
import importlib
import importlib.util
import inspect
import json
import re
import runpy
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cattn
from support import ROOT, find

PUBLIC = [name for name in dict.fromkeys([*cattn.__all__, *cattn.functional.__all__]) if callable(find(name))]
MODULES = [cattn, cattn.functional, cattn.random]  # tests/classes/test_nn.py has the modules of cattn.nn


def examples(owner: Any, name: str) -> list[doctest.DocTest]:
    found = doctest.DocTestFinder(exclude_empty=True).find(owner, name, globs={"np": np, "cattn": cattn})
    return [test for test in found if test.examples]


@pytest.mark.promise("documentation")
@pytest.mark.parametrize("name", PUBLIC)
def test_it_is_documented(name: str) -> None:
    value = find(name)
    doc = inspect.getdoc(value) or ""
    assert doc
    if isinstance(value, type) and issubclass(value, (tuple, Warning)):
        return
    names = [p for p in inspect.signature(value).parameters if p not in ("self", "args", "kwargs")]
    assert not names or "Parameters\n----------" in doc
    for parameter in names:
        described = re.search(rf"^(\w+, )*{parameter}(, \w+)*( :.*)?$", doc, re.MULTILINE)
        assert described, f"{parameter} is not described"
    assert "Examples\n--------" in doc


@pytest.mark.parametrize("name", PUBLIC)
def test_see_also_names_other_public_objects(name: str) -> None:
    value = find(name)
    if isinstance(value, type) and issubclass(value, (tuple, Warning)):
        return
    _, heading, rest = (inspect.getdoc(value) or "").partition("See Also\n--------\n")
    assert heading, "a reader who came to the wrong function finds no way to the right one"
    names = re.findall(r"^([\w.]+) : .+\.$", rest.partition("\n\n")[0], re.MULTILINE)
    assert len(names) == len(rest.partition("\n\n")[0].splitlines())
    for other in names:
        assert other != name
        found: Any = cattn
        for part in other.removeprefix("cattn.").split("."):
            found = find(part) if found is cattn and part in cattn.functional.__all__ else getattr(found, part)


SEARCHED = """
scaled dot product attention, masked softmax, causal mask, attention dropout, GQA, MQA, KV cache, key_padding_mask,
look-ahead mask, sliding window, heat map, heatmap, cross attention, cu_seqlens, huggingface, BTHD,
padding mask, install, GPT-2
"""


@pytest.mark.parametrize("words", [words.strip() for words in SEARCHED.split(",")])
def test_the_site_has_the_words_that_people_search(words: str) -> None:
    """Sphinx's search finds only words that stand in a page."""
    terms = (ROOT / "docs" / "terms.md").read_text(encoding="utf-8").lower()
    assert words.lower() in terms


@pytest.mark.promise("documentation")
@pytest.mark.parametrize("name", PUBLIC)
def test_its_examples_run(name: str) -> None:
    if name == "plot_attention":
        pytest.importorskip("matplotlib")
    tests = examples(find(name), name)
    for test in tests:
        assert doctest.DocTestRunner(verbose=False).run(test).failed == 0, test.name


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_the_examples_of_modules_run(module: Any) -> None:
    if module is cattn:
        pytest.importorskip("matplotlib")  # the examples of plot_attention are among them
    results = doctest.testmod(module)
    assert results.failed == 0
    assert results.attempted > 0 or module in (cattn.random,)


@pytest.mark.promise("PyTorch's function")
def test_the_signature_begins_with_pytorchs_parameters() -> None:
    names = list(inspect.signature(cattn.scaled_dot_product_attention).parameters)
    assert names[:8] == ["query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa"]


@pytest.mark.promise("documentation")
def test_the_readme_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # it writes a page
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    test = doctest.DocTestParser().get_doctest("\n".join(blocks), {}, "README", "README.md", 0)
    results = doctest.DocTestRunner(verbose=False).run(test)
    assert results.failed == 0
    assert results.attempted >= 8
    assert len(text.splitlines()) <= 100, "the README is the first page, not the documentation"


def test_the_readmes_numbers_are_the_measured_ones() -> None:
    """Of causal attention, against the best peer of each row and against NumPy."""
    text = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    rows = json.loads((ROOT / "benchmarks/results/amd_epyc_family_25_model_17.json").read_text("utf-8"))["prefill"][
        "rows"
    ]
    causal = [row for row in rows if row.get("keys") is None]
    best = [row["ratios"][row["best_peer"]] for row in causal]
    numpy = [row["ratios"]["numpy"] for row in causal if "numpy" in row["ratios"]]
    assert f"is {min(best):.1f} to {max(best):.1f} times as fast as the best other library" in text
    assert f"{min(numpy):.0f} to {max(numpy):.0f} times as fast as textbook NumPy" in text
    first = " ".join((ROOT / "docs/index.md").read_text(encoding="utf-8").split())
    assert f"{min(numpy):.0f} to {max(numpy):.0f} times as fast as textbook NumPy" in first
    peers = {name for row in causal for name in row["ratios"]}
    assert f"Times of {['nine', 'ten', 'eleven'][len(peers) - 9]} other ways" in text
    assert all(min(row["ratios"].values()) > 1 for row in causal)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert [name.rstrip("=>.0123456789") for name in project["dependencies"]] == ["numpy"]


@pytest.mark.promise("documentation")
def test_the_links_of_the_readme_lead_somewhere() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    targets = [target for target in re.findall(r"\]\(([^)#]+)", text) if not target.startswith("https://")]
    assert len(targets) >= 5
    assert [target for target in targets if not (ROOT / target).exists()] == []


def test_the_readmes_comparison_holds_for_cattn() -> None:
    example = runpy.run_path(str(ROOT / "examples" / "others.py"))
    assert all(example["answers"](example["with_cattn"]).values())
    assert not all(example["answers"](example["with_numpy"]).values())


def test_the_table_of_options_holds_for_cattn_and_finds_wrong_numbers() -> None:
    example = runpy.run_path(str(ROOT / "examples" / "options_of_others.py"))
    options = example["OPTIONS"]
    words = {name: example["answer"](example["with_cattn"], dict(given)) for name, given in options.items()}
    assert words.pop("an unknown argument") == "no"
    assert set(words.values()) == {"yes"}
    ignores = lambda q, k, v, softcap=None, **rest: example["with_cattn"](q, k, v, **rest)  # noqa: E731
    assert example["answer"](ignores, options["softcap"]) == "ignored"
    assert example["answer"](lambda q, k, v, **_: v, options["softcap"]) == "other"


@pytest.mark.promise("documentation")
def test_the_readme_has_its_two_commands() -> None:
    lines = (ROOT / "README.md").read_text("utf-8").splitlines()
    assert "pip install . && python -m cattn" in lines
    assert "pip install -e '.[test]' && pytest" in lines


PAGES = sorted((ROOT / "docs").glob("*.md"))
# words on a page: the packages that its blocks need
NEEDS = {
    ">>> import torch": ["torch"],
    ">>> import jax": ["jax"],
    ">>> import transformers": ["torch", "transformers"],
    "cattn.plot_attention(": ["matplotlib"],
    "from cattn.integrations.dask": ["dask"],
    "from cattn.integrations.keras": ["keras", "jax"],
}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_pages_of_the_site_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks of a page share one namespace; blocks that need a package are marked ```{code-block} python."""
    fence = r"^```(?:python|\{code-block\} python)\n(.*?)^```"
    blocks = re.findall(fence, page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    assert all(block.startswith(">>> ") for block in blocks)
    monkeypatch.chdir(tmp_path)
    text = "\n".join(blocks)
    for words, packages in NEEDS.items():
        for package in packages if words in text else ():
            if importlib.util.find_spec(package) is None:
                pytest.skip(f"{package} is not installed")
    if "from cattn.integrations.keras" in text:
        monkeypatch.setenv("KERAS_BACKEND", "numpy")
    if "import threadpoolctl" in page.read_text(encoding="utf-8"):
        # cattn registers its pool if threadpoolctl is imported first, as the page says. Here cattn came first, so
        # get_num_threads has to register the pool.
        importlib.import_module("threadpoolctl")
        cattn.get_num_threads()
    test = doctest.DocTestParser().get_doctest(text, {}, page.stem, str(page), 0)
    assert doctest.DocTestRunner(verbose=False).run(test).failed == 0


def test_the_site_lists_every_name() -> None:
    listed = set((ROOT / "docs/api/index.md").read_text(encoding="utf-8").split())
    assert {name for name in cattn.__all__ if callable(getattr(cattn, name))} <= listed
    assert set(cattn.functional.__all__) - set(cattn.__all__) <= listed


def test_the_live_views_open_at_what_their_page_names() -> None:
    """The first page says that "it" looks at "animal" in head 0, at the token before in head 1, and so on."""
    kept = np.load(ROOT / "docs" / "minilm.npz")
    pronoun, before, after, rest = kept["animal"]
    tokens = kept["animal_tokens"].tolist()
    assert tokens[pronoun[tokens.index("it")].argmax()] == "animal"
    assert (before.argmax(axis=-1)[1:] == np.arange(len(tokens) - 1)).mean() > 0.9
    assert (after.argmax(axis=-1)[:-1] == np.arange(1, len(tokens))).mean() > 0.5
    assert (rest.argmax(axis=-1) == 0).all()


def test_every_extra_of_users_is_on_the_page_of_installation() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    named = set(re.findall(r"^\| `(\w+)` \|", (ROOT / "docs/install.md").read_text("utf-8"), re.MULTILINE))
    assert named <= set(extras)
    assert set(extras) - named == {"examples", "test", "test-portable"}
