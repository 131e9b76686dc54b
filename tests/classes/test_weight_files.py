"""Files of weights, .npz and .safetensors: saving, loading, damaged files, errors."""

import os
import pickle
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_state_dict import assert_state, causal, mha, other, rng, v1, v2, wrapper

import cattn
from cattn.nn._files import load_arrays, save_arrays
from support import assert_same_bits, needs_links
from support.processes import finish, run_command

FILES = ["weights.npz", "weights.safetensors"]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("make", [mha, wrapper, v1, v2, causal, lambda: cattn.Linear(6, 4, rng=rng())])
def test_a_saved_module_loads_again(name: str, make: Callable[[], Any], tmp_path: Path) -> None:
    module, twin = make(), make()
    module.load_state_dict(other(module))
    assert module.save(tmp_path / name) is None
    assert twin.load(str(tmp_path / name)) == ([], [])
    assert_state(twin, module.state_dict())
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert stat.S_IMODE((tmp_path / name).stat().st_mode) & 0o400


@pytest.mark.parametrize("name", FILES)
def test_transposed_views_are_saved(name: str, tmp_path: Path) -> None:
    module, twin = v1(6, 8), v1(6, 8)
    module.W_query = np.random.default_rng(3).standard_normal((8, 6)).astype(np.float32).T
    module.save(tmp_path / name)
    twin.load(tmp_path / name)
    assert_same_bits(twin.W_query, module.W_query)


def test_safetensors_files_of_torch_are_loaded(tmp_path: Path) -> None:
    torch, files = pytest.importorskip("torch"), pytest.importorskip("safetensors.torch")
    expected = other(causal())
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        tensors = {f"attn.{key}": torch.from_numpy(value).to(dtype) for key, value in expected.items()}
        files.save_file(tensors, tmp_path / "x.safetensors")
        module = causal()
        module.load(tmp_path / "x.safetensors")
        assert_state(module, {key: t.float().numpy() for key, t in zip(expected, tensors.values(), strict=True)})


def test_safetensors_dtypes_that_numpy_lacks_are_named(tmp_path: Path) -> None:
    """bfloat16 loads although nobody has imported ml_dtypes. Another dtype is named, not reported as damage."""
    torch, files = pytest.importorskip("torch"), pytest.importorskip("safetensors.torch")
    path = tmp_path / "x.safetensors"
    files.save_file({"a": torch.ones(3, dtype=torch.bfloat16)}, path)
    code = f"from cattn.nn._files import load_arrays; print(load_arrays({str(path)!r})['a'].dtype)"
    done = run_command([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("bfloat16\n", "")
    files.save_file({"b": torch.ones(3).to(torch.float8_e4m3fn)}, path)
    with pytest.raises(ValueError, match=r"x\.safetensors: b is of type F8_E4M3, which NumPy does not have"):
        load_arrays(path)


@pytest.mark.promise("whole files")
@pytest.mark.parametrize("name", FILES)
def test_a_file_is_replaced_whole_or_not_at_all(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / name
    module = v2()
    module.save(path)
    before = path.read_bytes()
    module.load_state_dict(other(module))

    def full_disk(*args: Any) -> None:
        raise OSError("no space")

    with monkeypatch.context() as patch:
        patch.setattr("cattn.nn._files.os.replace", full_disk)
        with pytest.raises(OSError, match="no space"):
            module.save(path)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == [name]
    module.save(path)
    assert path.read_bytes() != before


@needs_links
@pytest.mark.parametrize("name", FILES)
def test_saving_to_a_link_replaces_its_target(name: str, tmp_path: Path) -> None:
    path, module = tmp_path / name, v1()
    path.write_bytes(b"")
    link = tmp_path / f"link{path.suffix}"
    link.symlink_to(path)
    module.save(link)
    assert link.is_symlink()
    assert path.stat().st_size > 0


@pytest.mark.parametrize("name", FILES)
def test_damaged_files_are_refused_by_name(name: str, tmp_path: Path) -> None:
    path, module = tmp_path / name, v2()
    with pytest.raises(FileNotFoundError, match=name):
        module.load(path)
    module.save(path)
    content = path.read_bytes()
    for damage in (b"", b"nonsense", content[:40], content[:-30]):
        path.write_bytes(damage)
        with pytest.raises(ValueError, match=r"is no \.\w+ file"):
            module.load(path)


def test_lack_of_memory_is_not_reported_as_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = v2()
    module.save(tmp_path / "w.npz")
    monkeypatch.setattr(np, "load", lambda *args, **kwargs: no_memory())
    with pytest.raises(MemoryError):
        module.load(tmp_path / "w.npz")


def no_memory() -> Any:
    raise MemoryError


def test_other_file_types_and_pickles_are_refused(tmp_path: Path) -> None:
    module = v2()
    for path in (tmp_path / "w.pt", tmp_path / "w"):
        with pytest.raises(ValueError, match=r"files of weights end in \.npz or \.safetensors"):
            module.save(path)
        with pytest.raises(ValueError, match="files of weights end in"):
            module.load(path)
    np.savez(tmp_path / "objects.npz", W_query=np.array([{}], object))
    (tmp_path / "pickle.npz").write_bytes(pickle.dumps({}))
    for name in ("objects.npz", "pickle.npz"):
        with pytest.raises(ValueError, match=r"is no \.npz file of numbers.*never unpickles") as caught:
            module.load(tmp_path / name)
        assert "allow_pickle" not in str(caught.value)
    np.save(tmp_path / "one.npy", np.ones(3, np.float32))
    os.rename(tmp_path / "one.npy", tmp_path / "one.npz")
    with pytest.raises(ValueError, match=r"is no \.npz file of numbers"):
        module.load(tmp_path / "one.npz")
    with pytest.raises(FileNotFoundError, match=r"absent[/\\]+w\.npz'$"):
        module.save(tmp_path / "absent" / "w.npz")


def test_the_extra_is_named_if_safetensors_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "safetensors.numpy", None)
    with pytest.raises(ImportError, match=r"pip install 'cattn\[safetensors\]'"):
        v2().save(tmp_path / "w.safetensors")
    assert not list(tmp_path.iterdir())
    v2().save(tmp_path / "w.npz")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes")
def test_a_pipe_stays_and_takes_the_file(folder: Path) -> None:
    """As root, to replace a device such as /dev/null would take it from all programs."""
    os.mkfifo("pipe.npz")
    reader = subprocess.Popen([sys.executable, "-c", "open('copy.npz', 'wb').write(open('pipe.npz', 'rb').read())"])
    weights = {"w": np.arange(6.0).reshape(2, 3)}
    save_arrays("pipe.npz", weights)
    finish(reader)
    assert reader.returncode == 0
    assert stat.S_ISFIFO(os.stat("pipe.npz").st_mode)
    assert_same_bits(load_arrays("copy.npz")["w"], weights["w"])
