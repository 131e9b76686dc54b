"""Display forms of results: for interpreters as text, for notebooks as HTML."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Sequence
from typing import Any


def summary(value: object) -> str:
    """Return dtype and shape of an array or tensor, and a short repr of anything else."""
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return f"{value.dtype} {tuple(value.shape)}"
    return reprlib.repr(value)


def show_fields(record: Any) -> str:
    """Return the repr of a named tuple of arrays: dtypes and shapes of the fields that are not None."""
    fields = [
        f"{name}=<{summary(value)}>" if hasattr(value, "dtype") else f"{name}={summary(value)}"
        for name, value in record._asdict().items()
        if value is not None
    ]
    return f"{type(record).__name__}({', '.join(fields)})"


def html_table(title: str, rows: Iterable[Sequence[object]]) -> str:
    """Return an HTML table with a title. The first cell of a row is its name."""
    from html import escape  # imported here, because only notebooks need it

    lines = []
    for name, *cells in rows:
        texts = "".join(f'<td style="text-align: left">{escape(str(cell))}</td>' for cell in cells)
        lines.append(f'<tr><th style="text-align: left">{escape(str(name))}</th>{texts}</tr>')
    return f"<table><caption>{escape(title)}</caption><tbody>{''.join(lines)}</tbody></table>"


def fields_html(record: Any) -> str:
    """Return a named tuple of arrays as an HTML table of names, dtypes and shapes."""
    given = {name: value for name, value in record._asdict().items() if value is not None}
    rows = [
        (name, value.dtype, tuple(value.shape)) if hasattr(value, "dtype") else (name, summary(value), "")
        for name, value in given.items()
    ]
    return html_table(type(record).__name__, rows)


class Text(str):
    """A str of several lines whose repr is the text itself, so that interpreters and notebooks show it as it is."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        from html import escape

        return f'<pre style="line-height: 1.2">{escape(str(self))}</pre>'

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (str(self),)
