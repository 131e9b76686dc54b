"""What the tests' log says about the machine they ran on. The other machines are tools/machines' business."""

import os
import platform

import pytest

import conftest
from cattn import _cattn


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
@pytest.mark.skipif(bool(os.environ.get("CATTN_TABLES")), reason="CATTN_TABLES chooses")
def test_every_table_is_compiled_wherever_it_can_be() -> None:
    """Also the one that the processor lacks: the compiler at least has seen it."""
    names = {table["name"] for table in _cattn._isa_list()}
    assert names >= {"scalar", "gnu128"}
    if platform.machine() in ("x86_64", "AMD64"):
        assert names >= {"gnu512", "avx2", "avx512_256", "avx512"}, "compiled with CATTN_TABLES?"
