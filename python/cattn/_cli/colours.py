"""Shaded cells on terminals that show 256 colours. Output to files and pipes is plain text."""

import os
import sys
from typing import TextIO

# From light to dark, in the numbers of the 256-colour palette. Text is black on the first ones, white on the others.
# Both colours of a cell are set, so that it can be read on dark and on light terminals.
BLUES = (195, 153, 117, 75, 33, 26, 19)
BLACK_ON = 5
BLACK, WHITE = 16, 231


def has_colours(stream: TextIO | None) -> bool:
    """Return whether to colour what is printed to stream: on terminals, unless NO_COLOR is set (no-color.org)."""
    if stream is None or stream.closed or os.environ.get("NO_COLOR"):  # None: the process has no such stream
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    term = os.environ.get("TERM", "")
    # Older consoles of Windows print the escapes instead. Windows Terminal sets WT_SESSION, but not TERM.
    known = "WT_SESSION" in os.environ if sys.platform == "win32" and not term else term not in ("", "dumb", "linux")
    return known and stream.isatty()


def shade_cell(text: str, darkness: float | None) -> str:
    """Return the text on a blue that is darker for larger numbers from 0 to 1; None is faint and has no colour."""
    if darkness is None:
        return f"\x1b[2m{text}\x1b[0m"
    step = min(int(darkness * len(BLUES)), len(BLUES) - 1)
    return f"\x1b[38;5;{BLACK if step < BLACK_ON else WHITE};48;5;{BLUES[step]}m{text}\x1b[0m"
