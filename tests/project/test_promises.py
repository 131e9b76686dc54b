"""Every promise of docs/promises.toml is held by a test or a tool, and no test is marked with an unknown promise."""

import sys
from pathlib import Path

import pytest

from support import ROOT

sys.path.insert(0, str(ROOT / "docs"))
import _promises

sys.path.pop(0)

PROMISES = {name: promise for section in _promises.promises().values() for name, promise in section.items()}
MARKED = _promises.marked_tests()


def test_names_are_unique() -> None:
    assert len(PROMISES) == sum(map(len, _promises.promises().values()))


def test_no_marker_names_an_unknown_promise() -> None:
    assert set(MARKED) <= set(PROMISES)


@pytest.mark.parametrize("name", PROMISES)
def test_every_promise_is_checked(name: str) -> None:
    promise = PROMISES[name]
    assert promise.text.endswith(".")
    assert "|" not in promise.text
    assert promise.tools or MARKED.get(name), f"no test is marked with promise({name!r})"
    for tool in promise.tools:
        assert (ROOT / tool).exists(), f"{tool} does not exist"


def test_markers_are_found(tmp_path: Path) -> None:
    """Above and below other decorators, several names in one marker."""
    (tmp_path / "values").mkdir()
    (tmp_path / "values/test_some.py").write_text(
        "import pytest\n"
        "@pytest.mark.promise('first', 'second')\n@pytest.mark.parametrize('x', [1])\ndef test_a(x): ...\n"
        "@pytest.mark.parametrize('x', [1])\n@pytest.mark.promise('first')\ndef test_b(x): ...\n"
        "def test_c(): ...\n"
    )
    found, file = _promises.marked_tests(tmp_path), "values/test_some.py"
    assert found == {"first": [f"{file}::test_a", f"{file}::test_b"], "second": [f"{file}::test_a"]}
