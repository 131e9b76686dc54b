"""The extras of pyproject.toml: each has the packages that its files import."""

import ast
import json
import re
import sys
import tomllib
from pathlib import Path

import pytest

from support import ROOT

NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
EXTRAS: dict[str, list[str]] = PROJECT["project"]["optional-dependencies"]
GROUPS: dict[str, list[str | dict[str, str]]] = PROJECT["dependency-groups"]


def packages(name: str) -> set[str]:
    """Return the names of the packages of an extra or group, and of those that it includes, as modules."""
    found = {"numpy"}
    for requirement in EXTRAS.get(name) or GROUPS[name]:
        if isinstance(requirement, dict):
            found |= packages(requirement["include-group"])
        elif included := re.match(r"cattn\[(.*)\]", requirement):
            found.update(*map(packages, included[1].split(",")))
        else:
            found.add(re.match(r"[\w-]+", requirement)[0].replace("-", "_"))
    return found


def imports(code: str) -> set[str]:
    """Return the packages that Python code imports, besides cattn and the standard library."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names.add(node.module or "")
    return {name.partition(".")[0] for name in names} - sys.stdlib_module_names - {"cattn"}


def test_the_group_docs_builds_the_documentation() -> None:
    """autodoc imports the integrations, and conf.py names the extensions of Sphinx and the theme."""
    needed = {"sphinx"}
    for path in (ROOT / "python" / "cattn" / "integrations").rglob("*.py"):
        needed |= imports(path.read_text(encoding="utf-8"))
    settings: dict[str, object] = {}
    for node in ast.parse((ROOT / "docs" / "conf.py").read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in ("extensions", "html_theme"):
            settings[ast.unparse(node.targets[0])] = ast.literal_eval(node.value)
    extensions = settings["extensions"]
    assert isinstance(extensions, list)
    needed |= {name.partition(".")[0] for name in [*extensions, settings["html_theme"]]}
    assert {"torch", "onnx", "furo", "myst_nb"} <= needed
    assert needed <= packages("docs")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_extra_examples_has_what_a_notebook_needs_or_the_notebook_says_so(path: Path) -> None:
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    code = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    code = re.sub(r"^%.*$", "", code, flags=re.MULTILINE)  # IPython's commands
    needed = imports(code) - packages("examples") - {script.stem for script in path.parent.glob("*.py")}
    assert needed <= {"torch", "transformers"}
    extras = "bf16,examples,transformers" if "transformers" in needed else "examples,torch"
    assert (f"'.[{extras}]'" in "".join(cells[0]["source"])) == bool(needed)


def test_the_extra_examples_does_not_bring_pytorch() -> None:
    """Its default build on Linux is for GPUs and has several gigabytes. Half of the notebooks do not use it."""
    assert "torch" not in packages("examples")


def test_the_group_dev_has_the_tools_of_the_sessions_and_of_the_hooks() -> None:
    run = set(re.findall(r'session\.run\("([\w-]+)"', (ROOT / "noxfile.py").read_text(encoding="utf-8")))
    hooks = set(re.findall(r"entry: ([\w-]+)", (ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8")))
    needed = {name.replace("-", "_") for name in run | hooks} - {"python", "actionlint", "jupyter", "sphinx_build"}
    assert hooks <= run
    assert {"ruff", "mypy", "clang_format", "pytest"} <= needed <= packages("dev")
    assert {"jupyterlab", "sphinx"} <= packages("dev")
