"""The configuration of this build, how it was installed, and the part of it that this machine uses."""

from __future__ import annotations

import platform
from typing import Any, Literal, overload

import numpy as np

from . import _cattn, _threads
from ._input.checks import is_word
from ._version import __version__

__all__ = ["show_config"]


def _config() -> dict[str, Any]:
    from . import _installation  # it imports many modules that nothing else needs

    current = _cattn._get_isa()
    tables = [
        {
            "name": table["name"],
            "usable": table["usable"],
            "bit_contract": table["has_fma"] and table["keeps_arithmetic"],
            "test_only": table["test_only"],
            "lanes_float32": table["lanes_f32"],
            "micro_tile": (table["mr"], table["nr"]),
            "block_queries": table["br"],
        }
        for table in _cattn._isa_list()
    ]
    build = _cattn._build_info()
    return {
        "version": __version__,
        "instruction_set": current,
        "bit_contract": next(table["bit_contract"] for table in tables if table["name"] == current),
        "tables": tables,
        "bfloat16_tiles": "AMX" if _cattn._has_tiles() else "float32 instructions",
        "block_keys": _cattn._block_keys(),
        "chunk_keys": _cattn._chunk_keys(),
        "num_threads": _threads.get_num_threads(),
        **build,
        **_installation.describe(),
        "platform": platform.platform(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "numpy": np.__version__,
    }


@overload
def show_config(mode: Literal["stdout"] = ...) -> None: ...
@overload
def show_config(mode: Literal["dicts"]) -> dict[str, Any]: ...
def show_config(mode: str = "stdout") -> dict[str, Any] | None:
    """Show the version, the instruction sets built and used, tile sizes, threads, the build and the installation.

    Parameters
    ----------
    mode : {"stdout", "dicts"}
        Print, or return a dict. As in ``numpy.show_config``.

    Returns
    -------
    dict or None
        With ``mode="dicts"``: "instruction_set" is the kernel table in use; "bit_contract" says whether a known
        product has the right bits on this machine, that is, whether the table keeps the bit contract; "tables"
        lists every table of this build. "bfloat16_tiles" names the instructions for ``compute_dtype="bfloat16_tiles"``:
        "AMX", which the system is asked for, or "float32 instructions", with the same bits. "compiler",
        "python_headers" (the version of Python that the build was for), "limited_api" (whether one build serves all
        later versions, too), "free_threaded" and "assertions" are facts about the build. "installed" says where the
        installer found it, "wheel" has the tags of the wheel that it unpacked or built. On Linux, ``manylinux`` or
        ``musllinux`` in the tag is a wheel for many machines, ``linux`` one for this machine.

    Raises
    ------
    ValueError
        mode is neither of the two.

    See Also
    --------
    explain : How a call would be computed.
    get_num_threads : The number of threads alone.

    Examples
    --------
    >>> import cattn
    >>> config = cattn.show_config(mode="dicts")
    >>> config["instruction_set"] in [table["name"] for table in config["tables"] if table["usable"]]
    True
    """
    if not is_word(mode, "stdout") and not is_word(mode, "dicts"):
        raise ValueError(f"mode must be 'stdout' or 'dicts', got {_cattn._shown(mode)}")
    config = _config()
    if mode == "dicts":
        return config
    print("\n".join(config_lines(config)))
    return None


def config_lines(config: dict[str, Any]) -> list[str]:
    """Return the lines to print for a configuration, one for each entry and for each table."""
    lines = []
    for key, entry in config.items():
        if key != "tables":
            lines.append(f"{key + ':':18}{entry}")
            continue
        lines.append("tables:")
        width = max(len(table["name"]) for table in entry) + 1
        for table in entry:
            rows, cols = table["micro_tile"]
            notes = [f"{table['lanes_float32']:2} lanes, micro-tile {rows}x{cols}, blocks of {table['block_queries']}"]
            notes += [] if table["usable"] else ["not on this CPU"]
            notes += [] if table["bit_contract"] else ["outside the bit contract"]
            notes += ["for tests only"] if table["test_only"] else []
            lines.append(f"  {table['name']:{width}}{', '.join(notes)}")
    return lines
