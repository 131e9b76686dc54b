"""A check of the pages that were built: each link within the site has a target, and each picture has a text."""

from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from sphinx.util import logging


class Page(HTMLParser):
    """The targets, links and pictures of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.pictures: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note what a tag has."""
        found = dict(attrs)
        self.ids.update(value for name in ("id", "name") if (value := found.get(name)))
        if tag == "a" and found.get("href"):
            self.links.append(found["href"] or "")
        if tag == "img" and not found.get("alt"):
            self.pictures.append(found.get("src") or "")


def problems(folder: Path) -> list[str]:
    """Return the dead links and the pictures without a text of all pages in a folder."""
    files = [path for path in sorted(folder.rglob("*.html")) if "_static" not in path.parts]  # views are no documents
    pages = {path.resolve(): Page(path.read_text(encoding="utf-8")) for path in files}
    found = []
    for path, page in pages.items():
        name = path.relative_to(folder.resolve())
        found += [f"{name}: {picture} has no alternative text" for picture in page.pictures]
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            missing = target in pages and parts.fragment and unquote(parts.fragment) not in pages[target].ids
            if missing or not target.exists():
                found.append(f"{name}: {link} has no target")
    return sorted(set(found))


def check(app: Any, error: Exception | None) -> None:
    """Warn of each problem after a build of HTML; `nox -s docs` fails for a warning."""
    if error is None and app.builder.name == "html":
        for problem in problems(Path(app.outdir)):
            logging.getLogger(__name__).warning(problem)
