"""What a release relies on: one version, a changelog that the release can quote, workflows with pinned actions."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import runpy
import tomllib
from pathlib import Path

import pytest

import cattn
from support import ROOT

TOOL = runpy.run_path(str(ROOT / "tools" / "release_notes"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def text_of(name: str) -> str:
    return (ROOT / ".github" / "workflows" / f"{name}.yml").read_text("utf-8")


# ---- the version -----------------------------------------------------------------------------------------------------
def test_the_version_is_written_in_one_place() -> None:
    module = ast.parse((ROOT / "python" / "cattn" / "_version.py").read_text("utf-8"))
    assert [ast.literal_eval(node.value) for node in module.body if isinstance(node, ast.Assign)] == [cattn.__version__]
    assert "version" not in PROJECT["project"]
    assert PROJECT["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "cattn._version.__version__"}
    files = ["setup.py", "pyproject.toml", "noxfile.py", "docs/conf.py", "recipe/recipe.yaml", "RELEASING.md"]
    others = [ROOT / name for name in files]
    patterns = ("csrc/**/*.[ch]", "python/**/*.py", "python/**/*.pyi", "tools/*")
    others += [path for pattern in patterns for path in ROOT.glob(pattern)]
    number = re.compile(rf"(?<![\d.]){re.escape(cattn.__version__)}(?![\d.])")
    found = [path.name for path in others if path.is_file() and number.search(path.read_text("utf-8", "replace"))]
    assert found == ["_version.py"]


def test_an_installed_copy_has_the_same_version() -> None:
    if cattn.show_config("dicts")["installed"] == "not as a wheel":
        pytest.skip("cattn is not installed")
    assert importlib.metadata.version("cattn") == cattn.__version__


# ---- tools/release_notes ---------------------------------------------------------------------------------------------
CHANGELOG = "# Changelog\n\n## 1.2.0 - 2027-01-31\n\n### Added\n\n- A thing.\n\n## 1.1.0 - 2026-12-31\n\n- Old.\n"


def test_the_notes_are_the_section_of_the_version_if_the_tree_is_ready_for_the_tag() -> None:
    assert TOOL["notes"](CHANGELOG, "1.2.0") == "### Added\n\n- A thing."
    TOOL["check_tag"]("v1.2.0", "1.2.0")
    home = {"GITHUB_SERVER_URL": "https://example.org", "GITHUB_REPOSITORY": "someone/cattn"}
    TOOL["check_urls"]({"urls": {"Source": "https://example.org/someone/cattn"}}, home)
    for check, *arguments in (
        ("notes", CHANGELOG.replace("1.2.0 - 2027-01-31", "Unreleased"), "1.2.0"),
        ("notes", CHANGELOG.replace(" - 2027-01-31", ""), "1.2.0"),
        ("notes", CHANGELOG, "1.2.01"),
        ("notes", CHANGELOG.replace("### Added\n\n- A thing.\n\n", ""), "1.2.0"),
        ("check_tag", "v1.2.1", "1.2.0"),
        ("check_urls", {"urls": {"Source": "https://example.org/another/cattn"}}, home),
    ):
        with pytest.raises(ValueError, match=r"CHANGELOG\.md|must be v1\.2\.0|must have Source"):
            TOOL[check](*arguments)


# ---- the workflows ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_actions_are_pinned_by_commit(path: Path) -> None:
    """A tag of an action can be moved to other code. The comment names the version for readers and Dependabot."""
    lines = [line.strip().removeprefix("- ") for line in path.read_text("utf-8").splitlines()]
    uses = [line for line in lines if line.startswith("uses:")]
    assert uses
    assert [line for line in uses if not re.fullmatch(r"uses: [\w-]+/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", line)] == []


def test_the_workflow_runs_the_readmes_command() -> None:
    assert "        run: pip install -e '.[test]' && pytest\n" in text_of("tests")


@pytest.mark.parametrize("name", ["tests", "release"])
def test_every_supported_python_is_tested(name: str) -> None:
    (line,) = re.findall(r"^ +python: (\[.*, .*, .*\])$", text_of(name), re.MULTILINE)
    prefix = "Programming Language :: Python :: 3."
    claimed = {name.rpartition(" ")[2] for name in PROJECT["project"]["classifiers"] if name.startswith(prefix)}
    assert claimed | {"3.14t"} <= set(ast.literal_eval(line))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_commands_of_the_workflows_exist(path: Path) -> None:
    """A command of a workflow that is renamed would fail only there."""
    for name in re.findall(r"\btools/\w+|\.ci/\w+", path.read_text("utf-8")):
        assert (ROOT / name).exists(), name
    sessions = re.findall(r"^def (\w+)\(session", (ROOT / "noxfile.py").read_text("utf-8"), re.MULTILINE)
    assert set(re.findall(r"nox -s (\w+)", path.read_text("utf-8"))) <= set(sessions)


def test_the_citation_names_the_version() -> None:
    text = (ROOT / "CITATION.cff").read_text("utf-8")
    assert f"\nversion: {cattn.__version__}\n" in text
    assert f"\nlicense: {PROJECT['project']['license']}\n" in text


def test_what_is_published_was_attested_and_is_checked_first() -> None:
    text = text_of("release")
    steps = ["nox -s wheels", "attest-build-provenance@", "gh attestation verify", "gh-action-pypi-publish@"]
    assert sorted(steps, key=text.index) == steps


def test_reports_of_bugs_ask_for_the_configuration() -> None:
    form = (ROOT / ".github" / "ISSUE_TEMPLATE" / "bug.yml").read_text("utf-8")
    assert "label: python -m cattn info\n" in form


def test_the_page_of_platforms_lists_every_wheel() -> None:
    page = (ROOT / "docs" / "platforms.md").read_text("utf-8")
    targets = runpy.run_path(str(ROOT / "tools" / "wheels" / "build.py"))["TARGETS"]
    assert sorted(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)) == sorted(target.tag for target in targets)
