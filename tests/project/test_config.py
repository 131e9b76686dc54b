"""What cattn and the log of the tests say: the build, how the package was installed, the machine."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
import sysconfig
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

import cattn
import conftest
from cattn import _cattn, _installation
from support import ROOT
from support.processes import run_command

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


# ---- the machine -----------------------------------------------------------------------------------------------------
@pytest.mark.promise("AVX-512 is tested")
def test_the_log_names_every_table(monkeypatch: pytest.MonkeyPatch) -> None:
    tables = [{"name": "scalar", "usable": True}, {"name": "avx2", "usable": True}, {"name": "avx512", "usable": False}]
    monkeypatch.setattr(_cattn, "_isa_list", lambda: tables)
    monkeypatch.setattr(_cattn, "_get_isa", lambda: "avx2")
    assert conftest.pytest_report_header() == [
        "cattn tables: scalar avx2 avx512; this machine runs scalar avx2, not avx512, which its processor lacks",
        f"in use: avx2 on {conftest.processor()}",
    ]
    assert conftest.processor()


@pytest.mark.promise("AVX-512 is tested")
@pytest.mark.skipif(os.environ.get("CATTN_TABLES") != "all", reason="a build for this machine has fewer tables")
def test_every_table_is_compiled_wherever_it_can_be() -> None:
    """Also the one that the processor lacks: the compiler at least has seen it."""
    names = {table["name"] for table in _cattn._isa_list()}
    assert names >= {"scalar", "gnu128"}
    if platform.machine() in ("x86_64", "AMD64"):
        assert names >= {"avx2_4x2", "avx2", "avx512_256", "avx512"}
        in_place = Path(_cattn.__file__).resolve().is_relative_to(ROOT)
        assert ("gnu512" in names) == in_place  # for the tests only, not in wheels


AVX2 = {"avx2", "fma", "f16c"}
AVX512 = AVX2 | {"avx512f", "avx512bw", "avx512dq", "avx512vl"}
NEEDS = {"avx2_4x2": AVX2, "avx2": AVX2, "avx512_256": AVX512, "avx512": AVX512}
NEEDS |= {name: AVX512 | {"avx512_bf16"} for name in ("avx512_256_bf16", "avx512_bf16_few", "avx512_bf16")}
NEEDS |= {"avx512_amx": AVX512 | {"avx512_bf16", "amx_tile", "amx_bf16"}}


@pytest.fixture(scope="module")
def flags() -> set[str]:
    """Return the features of this processor that Linux knows and supports."""
    file = Path("/proc/cpuinfo")
    if platform.machine() != "x86_64" or not file.exists():
        pytest.skip("needs the flags of an x86 processor in /proc/cpuinfo")
    return set(next(line for line in file.read_text().splitlines() if line.startswith("flags")).split())


def test_the_detected_features_are_those_that_the_system_lists(flags: set[str]) -> None:
    usable = {table["name"]: table["usable"] for table in _cattn._isa_list()}
    assert usable["scalar"]
    for name in NEEDS.keys() & usable.keys():
        assert usable[name] == (NEEDS[name] <= flags)


def import_errors(isa: str, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *options, "-c", "import cattn"]
    environment = {**os.environ, "CATTN_ISA": isa}
    return run_command(command, capture_output=True, text=True, env=environment)


@pytest.mark.parametrize("table", [table for table in _cattn._isa_list() if table["usable"]], ids=lambda t: t["name"])
def test_a_table_without_fma_warns_on_a_processor_with_fma(table: dict[str, Any], flags: set[str]) -> None:
    done = import_errors(table["name"])
    assert done.returncode == 0
    if table["has_fma"] or "fma" not in flags:
        assert done.stderr == ""
        return
    assert f"RuntimeWarning: the kernel table '{table['name']}' is in use because CATTN_ISA selects it" in done.stderr
    assert "usable: scalar, " in done.stderr
    failed = import_errors(table["name"], "-Werror::RuntimeWarning")
    assert failed.returncode == 1
    assert failed.stderr.splitlines()[-1].startswith("RuntimeWarning: the kernel table ")


def test_the_default_table_does_not_warn() -> None:
    if os.environ.get("CATTN_TABLES") not in (None, "", "all"):
        pytest.skip("CATTN_TABLES chooses")
    assert import_errors("").stderr == ""


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="git applies the patches to a clone")
def test_the_planted_bugs_fit_the_source() -> None:
    """tools/sanitize plants them, to see that its checks find them."""
    names = re.findall(r"^=== (\w+):", (ROOT / "tools" / "planted").read_text("utf-8"), re.MULTILINE)
    assert len(names) > 3
    for name in names:
        patch = subprocess.run([ROOT / "tools" / "planted", name], capture_output=True, check=True).stdout
        done = subprocess.run(["git", "apply", "--check"], cwd=ROOT, input=patch, capture_output=True, check=False)
        assert done.returncode == 0, f"{name}: {done.stderr.decode()}"
