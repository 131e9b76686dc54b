"""The tables of docs/promises.md: the sentences of promises.toml beside the tests marked with them.

The tests are parsed, not imported, so a build of the documentation needs neither pytest nor PyTorch.
"""

import ast
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parent.parent
SENTENCES = Path(__file__).with_name("promises.toml")


class Promise(NamedTuple):
    """One promise: a sentence, and the tools that check it beside the tests."""

    text: str
    tools: tuple[str, ...] = ()


def promises() -> dict[str, dict[str, Promise]]:
    """Return all promises by section and name."""
    sections = tomllib.loads(SENTENCES.read_text(encoding="utf-8"))
    return {title: {name: _promise(entry) for name, entry in named.items()} for title, named in sections.items()}


def _promise(entry: str | dict[str, Any]) -> Promise:
    return Promise(entry) if isinstance(entry, str) else Promise(**entry)


def marked_tests(folder: Path = ROOT / "tests") -> dict[str, list[str]]:
    """Return the tests that hold each promise, as "folder/test_file.py::test_name"."""
    found: dict[str, list[str]] = {}
    for path in sorted(folder.glob("*/test_*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            for decorator in node.decorator_list if isinstance(node, ast.FunctionDef | ast.ClassDef) else ():
                if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "pytest.mark.promise":
                    test = f"{path.parent.name}/{path.name}::{node.name}"
                    for name in decorator.args:
                        found.setdefault(ast.literal_eval(name), []).append(test)
    return found


def tables() -> str:
    """Return a Markdown table for each section."""
    tests = marked_tests()
    lines = []
    for title, named in promises().items():
        lines += [f"## {title}", "", "| promise | checked by |", "| --- | --- |"]
        for name, promise in named.items():
            checks = ", ".join(f"`{check}`" for check in [*tests.get(name, ()), *promise.tools])
            lines.append(f"| {promise.text} | {checks} |")
        lines.append("")
    return "\n".join(lines)
