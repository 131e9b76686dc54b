"""`python -m cattn info`: what a bug report needs, on this system and on others."""

import platform
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import cattn
from cattn import _cattn
from cattn.__main__ import main
from cattn._cli import info

FIRST = ["system", "libc", "cpu", "python", "numpy", "cattn", "instruction_set", "bit_contract", "threads"]


def entries(text: str) -> dict[str, str]:
    return dict(line.split(":", 1) for line in text.splitlines() if not line.startswith(" "))


def test_info_begins_with_the_system_and_ends_with_the_tables(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CATTN_NUM_THREADS", "3")
    monkeypatch.setenv("PASSWORD", "secret")
    with cattn.num_threads(2):
        assert main(["info"]) == 0
    text = capsys.readouterr().out
    found = {key: value.strip() for key, value in entries(text).items()}
    assert list(found)[: len(FIRST)] == FIRST
    assert list(found)[-1] == "tables"
    assert platform.release() in found["system"]
    assert found["python"] == f"{platform.python_implementation()} {platform.python_version()}"
    assert (found["numpy"], found["cattn"]) == (np.__version__, cattn.__version__)
    assert found["instruction_set"] == _cattn._get_isa()
    assert found["threads"].startswith("2 on ")
    assert "CATTN_NUM_THREADS=3" in found["environment"]
    assert "secret" not in text
    assert "pytest" not in found["packages"]
    assert len(re.findall(r"^  \w+ +\d+ lanes, micro-tile", text, re.MULTILINE)) == len(_cattn._isa_list())


def test_info_has_every_entry_of_show_config(capsys: pytest.CaptureFixture[str]) -> None:
    renamed = {"version": "cattn", "num_threads": "threads", "machine": "system"}
    assert main(["info"]) == 0
    shown = entries(capsys.readouterr().out)
    for key, value in cattn.show_config("dicts").items():
        if key not in ("tables", "platform"):  # the platform is the system and the C library
            assert str(value) in shown[renamed.get(key, key)]


@pytest.mark.skipif(sys.platform != "linux", reason="the file is Linux's")
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("processor\t: 0\nmodel name\t: Some CPU @ 2 GHz\nflags\t\t: fpu\n\nprocessor\t: 1\n", "Some CPU @ 2 GHz"),
        ("processor\t: 0\nCPU implementer\t: 0x41\nCPU variant\t: 0x3\nCPU part\t: 0xd0c\n", "variant 0x41 0xd0c 0x3"),
        ("processor\t: 0\ncpu\t\t: POWER9, altivec supported\n", "POWER9, altivec supported"),
        ("", platform.processor() or platform.machine()),
    ],
    ids=["x86", "arm", "power", "none"],
)
def test_info_names_the_cpu(monkeypatch: pytest.MonkeyPatch, text: str, expected: str) -> None:
    monkeypatch.setattr(info, "_read", {"/proc/cpuinfo": text}.__getitem__)
    assert info.cpu().endswith(expected)


def test_info_names_the_cpu_of_a_mac(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(info, "sys", SimpleNamespace(platform="darwin"))
    monkeypatch.setattr(info, "_output", lambda *command: "Apple M9" if "machdep.cpu.brand_string" in command else "")
    assert info.cpu() == "Apple M9"


def test_info_names_musl(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The loader of musl prints its version if it is run without arguments."""
    loader = tmp_path / "ld-musl-x86_64.so.1"
    loader.write_text(
        "#!/bin/sh\nprintf 'musl libc (x86_64)\\nVersion 1.2.5\\nDynamic Program Loader\\n' >&2\nexit 1\n"
    )
    loader.chmod(0o755)
    monkeypatch.setattr(info, "sys", SimpleNamespace(platform="linux"))
    monkeypatch.setattr(info.os, "confstr", lambda _: None)
    maps = f"7f00-7f01 r--p 00000000 08:01 123   {loader}\n"
    monkeypatch.setattr(info, "_read", {"/proc/self/maps": maps}.__getitem__)
    assert info.libc() == "musl 1.2.5"
    loader.unlink()
    assert info.libc() == "musl"


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_info_names_glibc() -> None:
    assert info.libc() == " ".join(platform.libc_ver())


def test_a_program_that_cannot_be_run_prints_nothing() -> None:
    assert info._output("/nowhere/program") == ""
    assert info._output(sys.executable, "-c", "print('x')") == "x"
