"""Heat maps of attention weights, drawn with matplotlib (the extra "plot")."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ._input.arrays import as_array, is_bfloat16
from ._input.names import with_hints
from ._input.types import AttentionOutput

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.colors import Colormap
    from matplotlib.image import AxesImage

__all__ = ["plot_attention"]

Labels = Sequence[str] | None

MOST_LABELS = 40  # with more tokens than this the axis shows positions instead
MOST_NUMBERS = 12  # cells of wider matrices do not show their numbers
PANELS_IN_A_ROW = 3
LONGEST_LABEL = 40  # characters of a token along an axis
# What no file of XML may hold, or what turns the text around it: controls but tab and line feed, noncharacters, bidi.
_UNWRITABLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ufdd0-\ufdef"
    + "".join(f"{chr(plane << 16 | 0xFFFE)}{chr(plane << 16 | 0xFFFF)}" for plane in range(17))
    + "]"
)


@with_hints
def plot_attention(
    weights: ArrayLike | AttentionOutput,
    tokens: Sequence[str] | None = None,
    ax: Axes | ArrayLike | None = None,
    *,
    query_tokens: Sequence[str] | None = None,
    entry: int | None = None,
    titles: str | Sequence[str] | None = None,
    annotate: bool | None = None,
    cmap: str | Colormap = "Blues",
    vmax: float | None = None,
    label: str = "weight",
) -> Any:
    """Draw attention weights as heat maps, one panel for each head.

    Weights that are exactly 0, as of hidden keys, stay blank, and so do scores of -inf. If no query of a
    panel sees a later key, a stepped line marks the border of the visible keys. A red cross marks NaN and +inf.

    Parameters
    ----------
    weights : array_like, shape (T_q, T_k) or (H, T_q, T_k), or AttentionOutput
        Attention weights, or scores; of an `AttentionOutput`, its weights. With more than three axes, `entry` is drawn.
        All heads share one scale of colours, which starts at 0 or at the smallest negative number.
    tokens : sequence of str, optional
        The T_k tokens, written along both axes. With T_q < T_k the queries are the last T_q of them.
    ax : matplotlib.axes.Axes, or array of them, optional
        Where to draw, one for each head. A new figure by default.
    query_tokens : sequence of str, optional
        The T_q tokens of the vertical axis, if they differ from `tokens`.
    entry : int, optional
        The entry of the batch, where the weights have more than three axes. Default 0, and the titles say so if there
        are several.
    titles : str, or sequence of str, optional
        Title of each panel. Several heads are called "head 0", "head 1" and so on by default.
    annotate : bool, optional
        Whether cells show their numbers. By default they do if there is room.
    cmap : str or matplotlib.colors.Colormap
        The scale of colours.
    vmax : float, optional
        The number of the last colour. The largest weight by default.
    label : str
        The label of the colour bar.

    Returns
    -------
    matplotlib.axes.Axes, or ndarray of them, shape (H,)
        The Axes: one for weights of two axes, else an array.

    Raises
    ------
    ImportError
        matplotlib is not installed.
    TypeError
        weights are not numbers, tokens is one str, or ax is not an Axes.
    ValueError
        weights has fewer than two axes, or no element, or not this entry; tokens, titles or ax has another length; or
        vmax is not finite.

    See Also
    --------
    attention_weights : Computes the weights.
    show_mask : A mask as text.
    view_attention : A view with pointer and keyboard.

    Examples
    --------
    >>> import numpy as np
    >>> import cattn
    >>> x = np.eye(3)
    >>> weights = cattn.attention_weights(x, x, is_causal=True)
    >>> ax = cattn.plot_attention(weights, ["Your", "journey", "starts"])
    >>> [label.get_text() for label in ax.get_xticklabels()]
    ['Your', 'journey', 'starts']
    """
    given: Any = weights.weights if isinstance(weights, AttentionOutput) else weights
    if given is None and weights is not None:
        raise TypeError("weights is an AttentionOutput without weights: make that call with return_weights=True")
    panels, batch = _panels(given, entry)
    heads, seqlen_q, seqlen_k = panels.shape
    one = np.ndim(given) == 2
    batch_words = f"entry {0 if entry is None else entry} of {batch}" if batch > 1 else ""
    key_labels, query_labels = token_labels(tokens, query_tokens, seqlen_q, seqlen_k)
    names = _titles(titles, heads, one, batch_words)
    mpl = _matplotlib()
    colours = mpl.colormaps.get_cmap(cmap).with_extremes(bad="0.94")
    axes = _axes(ax, panels.shape)
    hidden = (panels == 0) | np.isneginf(panels)
    finite = panels[np.isfinite(panels)]
    if not (vmax is None or isinstance(vmax, (int, float, np.integer, np.floating))):
        raise TypeError(f"vmax must be a number, got {type(vmax).__name__}")
    if vmax is not None and not math.isfinite(vmax):
        raise ValueError(f"vmax must be finite, got {vmax}")
    low, high = min(0.0, finite.min(initial=0.0)), finite.max(initial=0.0) if vmax is None else vmax
    norm = mpl.colors.Normalize(low, high if high > low else low + 1)
    if annotate is None:
        annotate = max(seqlen_q, seqlen_k) <= (MOST_NUMBERS if one else MOST_NUMBERS // 2)
    future = np.triu_indices(seqlen_q, seqlen_k - seqlen_q + 1, seqlen_k)
    for panel, blank, title, where in zip(panels, hidden, names, axes, strict=True):
        image = where.imshow(np.ma.array(panel, mask=blank | ~np.isfinite(panel)), cmap=colours, norm=norm)
        where.plot(*np.nonzero(~np.isfinite(panel) & ~blank)[::-1], "x", color="red")  # NaN and inf are seen
        where.set(title=title, xlabel="key", ylabel="query")
        _name_ticks(where.xaxis, key_labels, rotation=45)
        _name_ticks(where.yaxis, query_labels, rotation=0)
        if annotate:
            _write_numbers(where, np.where(blank, np.nan, panel), image)
        if future[0].size > 0 and blank[future].all():
            _draw_staircase(where, seqlen_q, seqlen_k)
    shrink = 0.6 if 1 < heads <= PANELS_IN_A_ROW else 0.8  # as high as a row of panels without their titles
    axes[0].figure.colorbar(image, ax=list(axes), label=as_text(label), shrink=shrink, fraction=0.05, pad=0.02)
    if ax is None:
        axes[0].figure.draw_without_rendering()  # the first layout clips labels, the second does not
    return axes[0] if one else axes


def _matplotlib() -> ModuleType:
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise ImportError("plot_attention needs matplotlib: pip install 'cattn[plot]'") from error
    return mpl


def take_entry(array: NDArray[Any], entry: int | None, name: str, rank: int = 3) -> tuple[NDArray[Any], int]:
    """Return one entry of a batch, of the last `rank` axes, and the number of entries."""
    lead = array.shape[:-rank] if array.ndim > rank else ()
    count = math.prod(lead)
    if entry is not None and not isinstance(entry, (int, np.integer)):
        raise TypeError(f"entry must be an int, got {type(entry).__name__}")
    index = 0 if entry is None else int(entry)
    if not 0 <= index < max(count, 1):
        raise ValueError(f"entry must be from 0 to {count - 1} for {name} of shape {array.shape}, got {index}")
    return (array[np.unravel_index(index, lead)] if lead and count else array), count


def _panels(weights: ArrayLike, entry: int | None) -> tuple[NDArray[Any], int]:
    """Return the weights as (heads, T_q, T_k), and the number of entries of the batch."""
    array = as_array(weights, "weights")
    if array.ndim < 2:
        raise ValueError(f"weights must have shape (T_q, T_k) or (H, T_q, T_k), got {array.shape}")
    if array.size == 0:
        raise ValueError(f"weights must not be empty, got shape {array.shape}")
    array, batch = take_entry(array, entry, "weights")
    panels = array.reshape((-1, *array.shape[-2:]))
    return (panels.astype(np.float32) if is_bfloat16(array.dtype) else panels), batch  # matplotlib has no bfloat16


def _whole(label: str) -> str:
    """Return a str with U+FFFD in place of halves of surrogate pairs, which no file and no browser can show.

    Names of files that are not UTF-8 have them.
    """
    return label.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def as_text(label: str) -> str:
    """Return a str with U+FFFD in place of all that a picture or a page cannot write as text."""
    return _UNWRITABLE.sub("\ufffd", _whole(label))


def _tick(label: str) -> str:
    """Return a token as one short line."""
    text = as_text(label if len(label) <= LONGEST_LABEL else f"{label[: LONGEST_LABEL - 1]}…")
    return text.replace("\n", "↵").replace("\t", "→")


def strings(labels: Sequence[object], name: str, length: int, what: str = "tokens") -> list[str]:
    """Return the labels as a list of str, of which there must be `length`."""
    if isinstance(labels, (str, bytes)):
        raise TypeError(f"{name} must be a sequence of str, got one {type(labels).__name__}: split it, or list() it")
    if not isinstance(labels, Iterable):
        raise TypeError(f"{name} must be a sequence of str, got {type(labels).__name__}")
    found = [_whole(str(label)) for label in labels]
    if len(found) != length:
        raise ValueError(f"{name} must name {length} {what}, got {len(found)}")
    return found


def token_labels(tokens: Labels, query_tokens: Labels, seqlen_q: int, seqlen_k: int) -> tuple[list[str] | None, ...]:
    """Return the labels of the keys and of the queries."""
    keys = None if tokens is None else strings(tokens, "tokens", seqlen_k)
    if query_tokens is not None:
        return keys, strings(query_tokens, "query_tokens", seqlen_q)
    if keys is not None and seqlen_q > seqlen_k:
        raise ValueError(f"query_tokens must be given where T_q > T_k, got weights with {seqlen_q} > {seqlen_k}")
    return keys, None if keys is None else keys[seqlen_k - seqlen_q :]


def _titles(titles: str | Sequence[str] | None, heads: int, one: bool, batch: str) -> list[str]:
    if titles is None:
        return [""] if one else [", ".join([*([batch] if batch else []), f"head {h}"]) for h in range(heads)]
    if not isinstance(titles, Iterable):
        raise TypeError(f"titles must be a str or a sequence of them, got {type(titles).__name__}")
    names = [as_text(str(title)) for title in ([titles] if isinstance(titles, str) else titles)]
    if len(names) != heads:
        raise ValueError(f"titles must have one str for each of {heads} heads, got {len(names)}")
    return names


def _axes(ax: Axes | ArrayLike | None, shape: tuple[int, ...]) -> NDArray[Any]:
    """Return one Axes for each head, of a new figure by default."""
    from matplotlib.axes import Axes

    heads, seqlen_q, seqlen_k = shape
    if ax is not None:
        given = np.atleast_1d(np.asarray(ax, dtype=object)).ravel()
        if not all(isinstance(item, Axes) for item in given):
            raise TypeError(f"ax must be a matplotlib Axes, or an array of them, got {type(ax).__name__}")
        if len(given) != heads:
            raise ValueError(f"ax must have one Axes for each of {heads} heads, got {len(given)}")
        return given

    import matplotlib.pyplot as plt

    columns = min(heads, PANELS_IN_A_ROW)
    rows = math.ceil(heads / columns)
    # Inches of a panel: room for the labels of its tokens, but not more than a page.
    width = np.clip(0.42 * seqlen_k, 2.6, 6.0) if heads == 1 else 2.8
    height = np.clip(width * seqlen_q / seqlen_k, 1.0, 8.0)
    _, grid = plt.subplots(
        rows, columns, figsize=(columns * width + 1.4, rows * (height + 0.9)), layout="constrained", squeeze=False
    )
    for unused in grid.ravel()[heads:]:
        unused.set_visible(False)
    return grid.ravel()[:heads]


def _name_ticks(axis: Axis, labels: list[str] | None, rotation: float) -> None:
    """Write the tokens along an axis, or the positions if there are many tokens."""
    from matplotlib.ticker import MaxNLocator

    if labels is None or len(labels) > MOST_LABELS:
        axis.set_major_locator(MaxNLocator(integer=True))
        return
    # no parse_math, because a token may contain "$"
    names = [_tick(label) for label in labels]
    axis.set_ticks(range(len(labels)), names, rotation=rotation, ha="right", rotation_mode="anchor", parse_math=False)
    axis.set_tick_params(length=0, labelsize="small")


def _write_numbers(where: Axes, panel: NDArray[Any], image: AxesImage) -> None:
    """Write each number into its cell, in white on dark colours."""
    for (i, j), number in np.ndenumerate(panel):
        if np.isfinite(number):
            red, green, blue, _ = image.to_rgba(number)
            dark = 0.299 * red + 0.587 * green + 0.114 * blue < 0.5  # luma of ITU-R BT.601
            colour = "white" if dark else "black"
            where.text(j, i, f"{number:.2f}", ha="center", va="center", size="x-small", color=colour)


def _draw_staircase(where: Axes, seqlen_q: int, seqlen_k: int) -> None:
    """Draw the border between the last visible key of each query and later keys."""
    edges = np.arange(seqlen_q + 1) - 0.5
    border = np.arange(seqlen_q) + (seqlen_k - seqlen_q) + 0.5
    where.plot(np.repeat(border, 2), np.repeat(edges, 2)[1:-1], color="0.3", linewidth=1.0)
    where.set(xlim=(-0.5, seqlen_k - 0.5), ylim=(seqlen_q - 0.5, -0.5))
