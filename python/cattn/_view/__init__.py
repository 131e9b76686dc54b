"""Interactive views of attention: in notebooks (the extra "widget"), and as pages that need nothing else."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from numpy.typing import ArrayLike

from .._input.names import with_hints
from .._input.types import AttentionOutput, AttentionStatistics
from .._plot import as_text
from ..nn._files import FilePath, followed, replacing
from ._contents import Statistics, Weights, WeightsOf
from ._live import live_options
from ._page import core, page, picture

if TYPE_CHECKING:
    from ._widget import AttentionWidget

__all__ = ["AttentionView", "view_attention"]

MOST_BYTES_SENT = 2**24  # to a notebook's page; parts of larger weights are sent when they are shown
MOST_BYTES_SAVED = 2**26  # in a file, before base64
MOST_BYTES_IN_OUTPUT = 2**22  # of a notebook, where anywidget is not installed


class AttentionView:
    """What `view_attention` returns: an interactive view of attention.

    As the last line of a notebook's cell it shows itself, in JupyterLab, Notebook, VS Code, Colab and marimo. Where no
    widget can run, as on GitHub, the notebook shows a picture, if matplotlib is installed.

    Parameters
    ----------
    contents : object
        What `view_attention` has prepared; views are not constructed by hand.

    See Also
    --------
    view_attention : Makes views.

    Examples
    --------
    >>> import numpy as np
    >>> import cattn
    >>> x = np.eye(3)
    >>> cattn.view_attention(cattn.attention_weights(x, x), ["a", "b", "c"])
    AttentionView(float64 (1, 1, 3, 3))
    """

    @with_hints
    def __init__(self, contents: Weights | Statistics) -> None:
        self._contents = contents
        self._widget: AttentionWidget | None = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._contents!r})"

    @property
    def widget(self) -> AttentionWidget:
        """The anywidget of this view, made at its first use (the extra "widget").

        Its traits ``heads``, a list of one or two ``[layer, head]``, ``query``, ``key`` and ``scale`` follow what the
        reader chooses, and can be set.
        """
        if self._widget is None:
            try:
                from ._widget import AttentionWidget
            except ImportError as error:
                raise ImportError("the widget needs anywidget: pip install 'cattn[widget]'") from error
            self._widget = AttentionWidget(self._contents, MOST_BYTES_SENT)
        return self._widget

    def to_html(self, title: str | None = None) -> str:
        """Return the view as one page of HTML that fetches nothing, as `save` writes it.

        Parameters
        ----------
        title : str, optional
            The title of the page. The view's own by default.
        """
        return page(self._contents, title or self._contents.info.get("heading") or "attention", MOST_BYTES_SAVED)

    def save(self, path: FilePath, title: str | None = None) -> None:
        """Write the view to one file of HTML, which any browser shows without a kernel and without a network.

        Weights above 64 MiB are rounded to float16 or, if that is not enough, reduced: each cell is then the largest
        weight of a block. The page says so. Save fewer layers to keep every weight.

        Parameters
        ----------
        path : str or os.PathLike
            The file, whose name ends in .html. An existing one is replaced when the new one is complete.
        title : str, optional
            The title of the page. The view's own by default, or the name of the file.

        Raises
        ------
        ValueError
            The name has another ending, as of a picture.
        """
        target = followed(path)
        if target.suffix.lower() not in ("", ".htm", ".html"):
            raise ValueError(
                f"{target.name}: a view is a page, so its name must end in .html; plot_attention draws .png, .pdf, .svg"
            )
        text = self.to_html(title or self._contents.info.get("heading") or target.stem)
        with replacing(target) as temporary:
            temporary.write_text(text, encoding="utf-8")

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> Any:
        """Return the widget for front ends that can run it, and a picture for all others.

        Without anywidget it is the page in a frame, unless that is large. The picture follows the frame, whose script
        hides it: viewers that remove frames, such as GitHub, still show it.
        """
        data: dict[str, Any] = {"text/plain": repr(self)}
        metadata: dict[str, Any] = {}
        image = picture(self._contents)
        if image is not None:
            data["image/png"] = base64.b64encode(image[0]).decode("ascii")
        try:
            if getattr(self._contents, "live", None) is not None:
                raise ImportError("a widget has no core: the page in a frame is live")
            bundle = self.widget._repr_mimebundle_()
        except ImportError:
            html = page(self._contents, "attention", MOST_BYTES_IN_OUTPUT)
            data["text/html"] = _frame(html, data.get("image/png"))
        else:
            found, metadata = bundle if isinstance(bundle, tuple) else (bundle, {})
            data = {**(found or {}), **data}
        return data, metadata | ({} if image is None else {"image/png": image[1]})

    def _display_(self) -> Any:
        """Return the widget for marimo, which shows anywidgets itself."""
        return self.widget


def _frame(html: str, image: str | None) -> str:
    """Return a page in a frame, followed by a picture that the page's script hides."""
    frame = f'<iframe srcdoc="{escape(html)}" style="width: 100%; height: 640px; border: 0" title="attention"></iframe>'
    alt = "Attention as heat maps."
    return frame + (
        f'<img class="cattn-picture" src="data:image/png;base64,{image}" alt="{alt}" style="max-width: 100%">'
        if image
        else ""
    )


@with_hints
def view_attention(
    weights: ArrayLike | AttentionOutput | AttentionStatistics | Sequence[Any],
    tokens: Sequence[str] | None = None,
    *,
    query_tokens: Sequence[str] | None = None,
    layers: Sequence[object] | None = None,
    entry: int | None = None,
    title: str | None = None,
    query: ArrayLike | None = None,
    key: ArrayLike | None = None,
    value: ArrayLike | None = None,
    scale: float | None = None,
    weights_of: WeightsOf | None = None,
    live: bool | Mapping[str, Any] = False,
) -> AttentionView:
    """Show attention weights, or their statistics, to look at with pointer and keyboard.

    All heads are shown small, and one of them large: as a map, as lines between two copies of the text, or step by
    step, from scores to output, with temperature and dropout to move. The view opens at the sharpest head and its
    largest weight off the diagonal. A token under the pointer shows the keys that it looks at and the
    queries that look at it, coloured in the text. Two heads can be compared. The page shows the numbers of the array,
    exactly; zeros, as of hidden keys, and scores of -inf stay blank, and NaN is red.

    Parameters
    ----------
    weights : array_like, AttentionOutput, sequence of arrays, or AttentionStatistics
        Weights of shape (T_q, T_k), (H, T_q, T_k) or (L, H, T_q, T_k), in any dtype that cattn takes. Of an
        `AttentionOutput`, its weights, whose first axes are a batch. A sequence has the weights of one layer each,
        such as the ``attentions`` of a model of transformers. Negative numbers, as of scores, get a scale of two
        colours. Statistics, of shape (T,), (H, T) or (L, H, T), are shown as strips along the text.
    tokens : sequence of str, optional
        The T_k tokens. With T_q < T_k the queries are the last T_q of them.
    query_tokens : sequence of str, optional
        The T_q tokens of the queries, if they differ from `tokens`.
    layers : sequence, optional
        Names of the L layers. Their indices by default; the first of four axes of one array is then called a batch
        entry, and ``layers=range(L)`` calls it a layer.
    entry : int, optional
        The entry of the batch that is shown: of weights (B, H, T_q, T_k), of an `AttentionOutput`, of a sequence of
        such layers, or of (L, B, H, T_q, T_k). Default 0 where the weights can only be a batch, and the view says so if
        there are several. Four axes without `entry` are all shown.
    title : str, optional
        A heading above the view, and the title of a saved page.
    query, key, value : array_like, optional
        What the weights were computed from, of the same layers and heads. With query and key the form "step by step"
        shows the scores and, for the marked key, the product of each dimension, with value the output.
    scale : float, optional
        The factor of the scores, for query and key. Default 1 / sqrt(head_dim).
    weights_of : callable, optional
        For statistics: ``weights_of(layer, head, queries)``, with two ints and a slice, returns the weights of these
        queries over all keys, shape (len, T_k). It is called in the kernel where the reader zooms in on 256 tokens or
        fewer.
    live : bool or mapping
        Let the reader change the mask, the temperature, softcap, ALiBi, a sink and dropout: the page then holds query,
        key, value and the core of cattn, compiled for browsers, which computes each step again in float32, with the
        bits of Python. True where the weights come from query, key, scale and a mask, which is read off their zeros;
        other options of the call as a mapping, of is_causal, window_size, softcap, alibi_slopes, sinks, attn_mask and
        query_offset. Needs query and key.

    Returns
    -------
    AttentionView
        A notebook shows it, and ``save("attention.html")`` writes it to a file.

    Raises
    ------
    TypeError
        weights are not numbers, tokens is one str, or weights_of is not callable or given without statistics.
    ValueError
        weights has another number of axes, or no element, or not this entry; or tokens, query_tokens or layers has
        another length; or live lacks query or key, names an option that the page does not have, or the weights do
        not come from its options.
    RuntimeError
        live in an installation without the core for browsers: wheels have it.

    Warns
    -----
    UserWarning
        weights has negative numbers, no -inf, and rows that do not sum to 1, as queries and scores. The page says so of
        all rows that do not sum to 1.

    See Also
    --------
    attention_weights : Computes the weights.
    attention_statistics : Computes statistics of long texts.
    plot_attention : Heat maps by matplotlib.

    Notes
    -----
    A notebook's page gets up to 16 MiB of weights; of larger ones it gets the largest weight of each block, and asks
    the kernel for the part that is shown. ``weights.astype(np.float16)`` halves the size of float32.

    Examples
    --------
    >>> import numpy as np
    >>> import cattn
    >>> query, key = np.random.default_rng(0).standard_normal((2, 4, 3, 8))  # four heads, three tokens
    >>> weights = cattn.attention_weights(query, key, is_causal=True)
    >>> view = cattn.view_attention(weights, ["Your", "journey", "starts"])
    >>> view
    AttentionView(float64 (1, 4, 3, 3))
    >>> "journey" in view.to_html()
    True
    """
    given: Any = weights.weights if isinstance(weights, AttentionOutput) else weights
    if given is None and weights is not None:
        raise TypeError("weights is an AttentionOutput without weights: make that call with return_weights=True")
    if title is not None and not isinstance(title, str):
        raise TypeError(f"title must be a str, got {type(title).__name__}")
    operands = {"query": query, "key": key, "value": value}
    if isinstance(given, AttentionStatistics):
        passed = [name for name, array in operands.items() if array is not None]
        if passed:
            raise TypeError(f"{passed[0]} is for weights: statistics show no single scores")
        if weights_of is not None and not callable(weights_of):
            raise TypeError(f"weights_of must be callable, got {type(weights_of).__name__}")
        if live is not False:
            raise TypeError("live is for weights: statistics are not computed again")
        return _titled(Statistics(given, tokens, query_tokens, layers, weights_of, entry), title)
    if weights_of is not None:
        raise TypeError("weights_of is for statistics: weights are given already")
    contents = Weights(given, tokens, query_tokens, layers, entry, isinstance(weights, AttentionOutput))
    contents.add_operands(operands, entry, scale)
    if not isinstance(live, (bool, Mapping)):
        raise TypeError(f"live must be a bool or a mapping of options, got {type(live).__name__}")
    if live is not False:
        core()  # an error here, and not when the view is shown
        contents.live = live_options(contents, {} if live is True else live)
    return _titled(contents, title)


def _titled(contents: Weights | Statistics, title: str | None) -> AttentionView:
    """Return the view with a heading."""
    contents.info["heading"] = "" if title is None else as_text(title)
    return AttentionView(contents)
