"""How this copy of cattn was installed, from what its installer wrote down (PEP 376, PEP 427, PEP 610)."""

import json
import re
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

PACKAGE = Path(__file__).resolve().parent


def _origin(distribution: metadata.Distribution) -> dict[str, Any]:
    """Return what the installer wrote down about a URL that it installed from; nothing if that was an index."""
    origin: dict[str, Any] = json.loads(distribution.read_text("direct_url.json") or "{}")
    return origin


def _is_of(package: Path, distribution: metadata.Distribution) -> bool:
    """Return whether the package belongs to the distribution. A copy elsewhere on the path may have the same name."""
    if Path(str(distribution.locate_file("cattn"))).resolve() == package:
        return True
    origin = _origin(distribution)
    folder = Path(url2pathname(urlsplit(origin.get("url", "")).path)).resolve()
    return bool(origin.get("dir_info", {}).get("editable")) and package.is_relative_to(folder)


def describe(package: Path = PACKAGE, distributions: Iterable[metadata.Distribution] | None = None) -> dict[str, str]:
    """Return where the installer found this package, and the tags of the wheel that it unpacked or built."""
    for distribution in metadata.distributions(name="cattn") if distributions is None else distributions:
        wheel = distribution.read_text("WHEEL")
        if wheel is None or not _is_of(package, distribution):
            continue
        origin = _origin(distribution)
        if "dir_info" in origin:
            found = "an editable source tree" if origin["dir_info"].get("editable") else "a source tree"
        elif "vcs_info" in origin:
            found = "a repository"
        elif origin:
            found = "a wheel" if urlsplit(origin["url"]).path.endswith(".whl") else "a source archive"
        else:
            found = "a package index"
        installer = (distribution.read_text("INSTALLER") or "").strip()
        return {
            "installed": f"from {found}" + f" by {installer}" * bool(installer),
            "wheel": ", ".join(re.findall(r"^Tag: *(\S+)", wheel, re.MULTILINE)),
        }
    return {"installed": "not as a wheel", "wheel": "none"}
