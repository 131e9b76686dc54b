"""show_config: the facts about the build, and how the package was installed."""

from __future__ import annotations

import json
import sys
import sysconfig
from importlib import metadata
from pathlib import Path

import pytest

import cattn
from cattn import _installation

CONFIG = cattn.show_config("dicts")
TAGS = "Tag: cp311-abi3-manylinux_2_17_x86_64\nTag: cp311-abi3-manylinux2014_x86_64\n"


def test_the_printed_configuration_has_every_entry(capsys: pytest.CaptureFixture[str]) -> None:
    cattn.show_config()
    lines = capsys.readouterr().out.splitlines()
    for name, value in CONFIG.items():
        assert f"{name + ':':18}{value}" in lines or name == "tables"
    assert [line.split()[0] for line in lines if line.startswith("  ")] == [table["name"] for table in CONFIG["tables"]]


def test_the_build_is_described() -> None:
    assert CONFIG["compiler"].partition(" ")[0] in ("Apple", "Clang", "GCC")
    assert tuple(map(int, CONFIG["python_headers"].split(".")[:2])) >= (3, 11)
    assert CONFIG["free_threaded"] == bool(sysconfig.get_config_var("Py_GIL_DISABLED"))
    if not CONFIG["limited_api"]:  # such a build serves one version of Python
        assert CONFIG["python_headers"].split(".")[:2] == [str(part) for part in sys.version_info[:2]]


def install(folder: Path, wheel: str | None, installer: str | None, origin: object) -> metadata.Distribution:
    """Write what an installer writes beside the package, for a copy of cattn in the folder."""
    place = folder / "cattn-1.0.dist-info"
    place.mkdir(parents=True)
    (place / "METADATA").write_text("Metadata-Version: 2.4\nName: cattn\nVersion: 1.0\n")
    files = {"WHEEL": wheel, "INSTALLER": installer, "direct_url.json": json.dumps(origin) if origin else None}
    for name, text in files.items():
        if text is not None:
            (place / name).write_text(text)
    return metadata.Distribution.at(place)


@pytest.mark.parametrize(
    ("origin", "text"),
    [
        (None, "from a package index by pip"),
        ({"url": "file:///tmp/cattn-1.0-cp311-abi3-win_amd64.whl", "archive_info": {}}, "from a wheel by pip"),
        ({"url": "https://example.org/cattn-1.0.tar.gz", "archive_info": {}}, "from a source archive by pip"),
        ({"url": "https://example.org/cattn.git", "vcs_info": {"vcs": "git"}}, "from a repository by pip"),
        ({"url": "file:///home/me/cattn", "dir_info": {}}, "from a source tree by pip"),
    ],
)  # fmt: skip
def test_the_installer_says_where_it_found_the_package(tmp_path: Path, origin: object, text: str) -> None:
    found = install(tmp_path, f"Wheel-Version: 1.0\n{TAGS}", "pip\n", origin)
    described = _installation.describe(tmp_path / "cattn", [found])
    assert described["installed"] == text
    assert described["wheel"] == "cp311-abi3-manylinux_2_17_x86_64, cp311-abi3-manylinux2014_x86_64"


def test_an_editable_installation_is_found_by_its_source_tree(tmp_path: Path) -> None:
    tree = tmp_path / "a tree"
    origin = {"url": tree.as_uri(), "dir_info": {"editable": True}}
    found = install(tmp_path / "site-packages", TAGS, None, origin)
    assert _installation.describe(tree / "python" / "cattn", [found])["installed"] == "from an editable source tree"
    assert _installation.describe(tmp_path / "another" / "cattn", [found])["installed"] == "not as a wheel"


def test_metadata_of_another_copy_does_not_count(tmp_path: Path) -> None:
    others = [install(tmp_path / "other", TAGS, "pip", None), install(tmp_path / "tree", None, None, None)]
    package = tmp_path / "tree" / "cattn"
    assert _installation.describe(package, others) == {"installed": "not as a wheel", "wheel": "none"}
    right = install(tmp_path / "tree2", TAGS, "uv", None)
    assert _installation.describe(tmp_path / "tree2" / "cattn", [*others, right])["installed"].endswith("index by uv")


def test_this_copy_is_described() -> None:
    if CONFIG["installed"] == "not as a wheel":
        assert CONFIG["wheel"] == "none"
    else:
        assert CONFIG["wheel"].count("-") >= 2
        assert metadata.version("cattn") == CONFIG["version"]
