"""The documentation: names, examples, scripts, notebooks, promises; each is complete, and each example runs."""

from __future__ import annotations

import ast
import doctest
import functools
import importlib
import importlib.util
import inspect
import itertools
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cattn
from support import ROOT, find
from support.processes import run_command

sys.path.insert(0, str(ROOT / "docs"))
import _promises

sys.path.pop(0)

PUBLIC = [name for name in dict.fromkeys([*cattn.__all__, *cattn.functional.__all__]) if callable(find(name))]
MODULES = [cattn, cattn.functional, cattn.random]  # tests/classes/test_nn.py has the modules of cattn.nn


FINDER = doctest.DocTestFinder(exclude_empty=True)
DOCSTRINGS = [test for module in MODULES for test in FINDER.find(module, globs={"np": np, "cattn": cattn})]


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


@pytest.mark.promise("documentation")
@pytest.mark.parametrize("docstring", DOCSTRINGS, ids=lambda docstring: docstring.name)
def test_its_examples_run(docstring: doctest.DocTest) -> None:
    if docstring.name in ("cattn", "cattn.plot_attention"):
        pytest.importorskip("matplotlib")
    assert doctest.DocTestRunner(verbose=False).run(docstring).failed == 0


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
    kept = [json.loads(path.read_text("utf-8")) for path in sorted((ROOT / "benchmarks" / "results").glob("*.json"))]
    machines = [of["prefill"]["rows"] for of in kept if "prefill" in of]
    assert len(machines) == 3
    numpy: list[float] = []
    for rows in machines:
        causal = [row for row in rows if row.get("keys") is None]
        best = [row["ratios"][row["best_peer"]] for row in causal]
        assert f"{min(best):.1f} to {max(best):.1f} times" in text
        numpy += [row["ratios"]["numpy"] for row in causal if "numpy" in row["ratios"]]
    first = " ".join((ROOT / "docs/index.md").read_text(encoding="utf-8").split())
    for page in (text, first):
        assert f"{min(numpy):.0f} to {max(numpy):.0f} times as fast as textbook NumPy" in page


@pytest.mark.promise("documentation")
def test_the_links_of_the_readme_lead_somewhere() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    targets = [target for target in re.findall(r"\]\(([^)#]+)", text) if not target.startswith("https://")]
    assert len(targets) >= 5
    assert [target for target in targets if not (ROOT / target).exists()] == []


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
    ".bfloat16()": ["ml_dtypes"],
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


# ---- scripts of examples/ --------------------------------------------------------------------------------------------
EXAMPLES = ROOT / "examples"
MODELS = runpy.run_path(str(EXAMPLES / "numpy_models.py"))


@pytest.mark.parametrize("case", MODELS["cases"](70), ids=lambda case: case.name)
def test_a_model_gives_the_same_numbers_by_cattn(case: Any) -> None:
    plain, ours = case.plain(), case.by_cattn()
    for a, b in zip(plain, ours, strict=True) if isinstance(plain, tuple) else [(plain, ours)]:
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        np.testing.assert_allclose(b, a, rtol=1e-4, atol=1e-5)


def test_the_page_shows_the_code_of_the_script() -> None:
    """The page removes the indented lines of the functions before the change."""
    page = (EXAMPLES.parent / "docs" / "in_your_model.md").read_text("utf-8")
    script = {line.strip() for line in (EXAMPLES / "numpy_models.py").read_text("utf-8").splitlines()}
    removed = [line[1:].strip() for line in page.splitlines() if line.startswith("-    ")]
    assert len(removed) >= 10
    assert [line for line in removed if line not in script] == []


# ---- the GPT of the site's live page: small_gpt.py reads it, page_gpt.py trains it ----
SMALL_GPT = runpy.run_path(str(EXAMPLES / "small_gpt.py"))
LIVE, PIECES = SMALL_GPT["load"](ROOT / "docs" / "live_gpt.npz")


def test_the_live_page_cuts_any_text_into_pieces() -> None:
    odd = "na\u00efve \U0001f389\ufe0f <b>x</b> &amp;\n\n\tif (a_b):  \x00\x1c\u2028\ufeff"
    for text in ("", " ", odd, odd * 400, "a" * 10_000, "the cat " * 1250):
        ids = PIECES.encode(text)
        assert PIECES.decode(ids) == re.sub(r"(?m)^(?=[A-Za-z])", " ", text)
        assert all(0 <= token < len(LIVE.weights["token"]) for token in ids)
    first = "The cat sat on the mat."
    assert [PIECES[i] for i in PIECES.encode(first)] == [b" The", b" cat", b" sat", b" on", b" the", b" mat", b"."]


def test_the_heads_of_the_live_page_look_where_it_says() -> None:
    """The page finds the head of the token before, and the one that looks at what came after the same word."""
    ids = PIECES.encode("The cat sat on the mat. The dog ran to the house, and the cat")
    before = LIVE.attention_weights(ids).diagonal(-1, -2, -1).mean(-1)
    assert before.shape == (2, 4)
    assert before[0, 0] > 0.5
    words = PIECES.encode(" house dog rabbit lion bird small function node")
    assert len(words) == 8
    after = LIVE.attention_weights(words * 2).diagonal(-7, -2, -1)[..., 1:].mean(-1)
    assert after[1, 0] > 0.5
    logits = LIVE(words * 2)
    assert (logits[8:15].argmax(-1) == words[1:]).mean() > 0.5


def test_the_examples_of_the_live_page_work() -> None:
    """After the repetition "mat" is one of the five next words; the sentence of the book keeps its words."""
    sentences = re.findall(r'^  "[a-z ]+": "(.*)",$', (ROOT / "docs/live/gpt.js").read_text("utf-8"), re.MULTILINE)
    repetition, book = (next(text for text in sentences if text.startswith(word)) for word in ("The cat", "Your"))
    logits = LIVE(PIECES.encode(repetition))[-1]
    assert b" mat" in [PIECES[i] for i in np.argsort(logits)[-5:]]
    assert [PIECES[i].decode() for i in PIECES.encode(book)] == [f" {word}" for word in book.split()]
    for text in sentences:
        assert len(PIECES.encode(text)) == len(re.findall(r"\w+|[^\w ]", text))


def test_the_live_page_gets_the_model_that_was_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("tokenizers")
    monkeypatch.syspath_prepend(str(EXAMPLES))
    page_gpt = importlib.import_module("page_gpt")
    weights = {name: torch.tensor(weight) for name, weight in LIVE.weights.items()}
    ids = np.arange(60).reshape(2, 30) * 17
    logits, first = page_gpt.forward(weights, LIVE.heads, torch.tensor(ids))
    np.testing.assert_allclose(LIVE(ids), logits, rtol=1e-3, atol=1e-3)
    for layer, found in zip(LIVE.attention_weights(ids), first, strict=True):
        np.testing.assert_allclose(layer[:, 0], found.exp(), rtol=1e-3, atol=1e-5)
    pages = [str(inspect.getdoc(find(name))) for name in PUBLIC]
    monkeypatch.setattr(page_gpt, "documentation", lambda: pages)
    monkeypatch.setattr(page_gpt, "common_words", lambda: ["the", "of", "and"])
    page_gpt.train(str(tmp_path / "model.npz"), 2, vocabulary=300, merges=20, tales=200)
    model, pieces = page_gpt.load(tmp_path / "model.npz")
    assert len(pieces) == len(model.weights["token"]) == 300
    page_gpt.save(tmp_path / "again.npz", model, pieces)
    for name, weight in page_gpt.load(tmp_path / "again.npz")[0].weights.items():
        np.testing.assert_array_equal(weight, model.weights[name])


@pytest.mark.skipif(importlib.util.find_spec("mpi4py") is None, reason="mpi4py is not installed")
@pytest.mark.skipif(shutil.which("mpirun") is None, reason="mpirun is not installed")
@pytest.mark.parametrize("processes", [1, 4])
def test_the_ring_of_mpi_processes_agrees_with_one_call(processes: int) -> None:
    """The script itself compares. Open MPI wants to be asked for more processes than cores, and for the user root."""
    variables = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    version = subprocess.run(["mpirun", "--version"], capture_output=True, text=True, check=True).stdout
    crowded = ["--oversubscribe"] if "Open MPI" in version or "OpenRTE" in version else []
    run = run_command(
        ["mpirun", *crowded, "-n", str(processes), sys.executable, str(EXAMPLES / "ring_attention.py")],
        capture_output=True, text=True, env={**os.environ, **variables},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith(f"{processes} processes, {processes * 512} tokens, largest difference")


# ---- notebooks -------------------------------------------------------------------------------------------------------
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))
each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def cells(path: Path, kind: str = "code") -> list[dict[str, Any]]:
    every: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return [cell for cell in every if cell["cell_type"] == kind]


def tags(cell: dict[str, Any]) -> list[str]:
    return list(cell["metadata"].get("tags", ()))


def pictures(cell: dict[str, Any]) -> list[dict[str, Any]]:
    return [output for output in cell["outputs"] if "image/png" in output.get("data", ())]


@each_notebook
def test_every_picture_has_an_alternative_text(path: Path) -> None:
    drawn = [cell for cell in cells(path) if pictures(cell)]
    assert drawn
    texts = [cell["metadata"].get("mystnb", {}).get("image", {}).get("alt", "") for cell in drawn]
    assert min(map(len, texts)) > 40
    assert len(set(texts)) == len(texts)


@each_notebook
def test_no_cell_shows_a_warning(path: Path) -> None:
    """As of fonts that are missing: `nox -s notebooks -- --inplace` stores all that a cell writes."""
    assert [cell["id"] for cell in cells(path) for output in cell["outputs"] if output.get("name") == "stderr"] == []


def test_notebooks_end_with_links_in_their_order() -> None:
    ends = {path.name: "".join(cells(path, "markdown")[-1]["source"]) for path in NOTEBOOKS}
    for before, after in itertools.pairwise(ends):
        assert f"({after})" in ends[before]
        assert f"({before})" in ends[after]


@each_notebook
def test_pictures_are_small(path: Path) -> None:
    """`nox -s notebooks -- --inplace` reduces their colours; otherwise a notebook would have a megabyte."""
    assert path.stat().st_size < 450_000


@each_notebook
def test_checks_at_the_end_of_a_cell_are_hidden(path: Path) -> None:
    """A cell that shows a result does not end with a check of it: that is in a hidden cell of its own."""
    hidden = [cell for cell in cells(path) if "remove-cell" in tags(cell)]
    assert hidden
    for cell in cells(path):
        last = ast.parse(re.sub(r"^%.*$", "", "".join(cell["source"]), flags=re.MULTILINE)).body[-1]
        checks = isinstance(last, ast.Assert)
        if "hide-cell" in tags(cell):  # a solution
            assert cell["metadata"]["jupyter"] == {"outputs_hidden": True, "source_hidden": True}
        if "remove-cell" in tags(cell):
            assert cell["outputs"] == []
            assert cell["metadata"]["jupyter"]["source_hidden"]
        else:
            assert not (checks and cell["outputs"]), "".join(cell["source"])


@each_notebook
def test_exercises_have_folded_solutions(path: Path) -> None:
    questions = [cell for cell in cells(path, "markdown") if re.match(r"\*\*\d+\.\*\* ", "".join(cell["source"]))]
    solutions = [cell for cell in cells(path) if "hide-cell" in tags(cell)]
    assert len(questions) == len(solutions) >= 2
    for cell in solutions:
        assert cell["metadata"]["jupyter"]["source_hidden"]
        assert cell["outputs"], "a solution shows its result"


# ---- promises --------------------------------------------------------------------------------------------------------
PROMISES = {name: promise for section in _promises.promises().values() for name, promise in section.items()}
marked_tests = functools.cache(_promises.marked_tests)  # it parses all tests


def test_names_of_promises_are_unique() -> None:
    assert len(PROMISES) == sum(map(len, _promises.promises().values()))


def test_no_marker_names_an_unknown_promise() -> None:
    assert set(marked_tests()) <= set(PROMISES)


@pytest.mark.parametrize("name", PROMISES)
def test_every_promise_is_checked(name: str) -> None:
    promise = PROMISES[name]
    assert promise.text.endswith(".")
    assert "|" not in promise.text
    assert promise.tools or marked_tests().get(name), f"no test is marked with promise({name!r})"
    for tool in promise.tools:
        assert (ROOT / tool).exists(), f"{tool} does not exist"


# ---- the built pages -------------------------------------------------------------------------------------------------
