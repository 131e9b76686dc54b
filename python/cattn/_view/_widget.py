"""The views as an anywidget (the extra "widget")."""

from __future__ import annotations

from typing import Any

import anywidget
import traitlets

from ._contents import Rectangle, Statistics, Weights, to_bytes
from ._page import first_state, module, style


class AttentionWidget(anywidget.AnyWidget):  # type: ignore[misc]
    """A view in a notebook. The traits `heads`, `query`, `key` and `scale` follow the page, and the page follows them.

    `heads` holds [layer, head] of the head that is shown large, or of two heads whose difference is shown; `query` and
    `key` are the pinned positions, -1 for the last; `scale` is "linear" or "log".
    """

    _esm = module()
    _css = style()

    info = traitlets.Dict().tag(sync=True)
    weights = traitlets.Bytes().tag(sync=True)
    heads = traitlets.List(traitlets.List(traitlets.Int(), minlen=2, maxlen=2), minlen=1, maxlen=2).tag(sync=True)
    query = traitlets.Int(-1).tag(sync=True)
    key = traitlets.Int(-1).tag(sync=True)
    scale = traitlets.Enum(["linear", "log"], "linear").tag(sync=True)

    def __init__(self, contents: Weights | Statistics, most: int) -> None:
        info, data = contents.pack(most)
        self._contents = contents
        super().__init__(info={**info, "kernel": True}, weights=data, **first_state(contents))
        self.on_msg(self._answer)

    @traitlets.validate("heads")  # type: ignore[untyped-decorator]
    def _check_heads(self, proposal: Any) -> Any:
        n_layers, heads = self._contents.shape[:2]
        for layer, head in proposal["value"]:
            if not (0 <= layer < n_layers and 0 <= head < heads):
                raise traitlets.TraitError(
                    f"heads must be [layer, head] with layer < {n_layers} and head < {heads}, got {[layer, head]}"
                )
        return proposal["value"]

    def _answer(self, _: object, question: Any, buffers: object) -> None:
        """Send the part of a matrix that the page asks for."""
        if question.get("kind") != "window":
            return
        try:
            where = Rectangle(*(int(question[name]) for name in Rectangle._fields))
            part = self._contents.window(where)
        except Exception as error:  # the page shows it: there is no other place where the user would see it
            self.send({"id": question.get("id"), "error": f"{type(error).__name__}: {error}"})
            return
        self.send({"id": question["id"], "dtype": part.dtype.name}, buffers=[to_bytes(part)])
