"""Attention (section 3.2) as heat maps: which tokens each layer and head looks at.

Shapes: L layers, H heads, R rows (queries), C columns (keys).
"""

import itertools
import os
from collections.abc import Iterable, Iterator
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from ..configuration.extras import needs
from ..generation.scoring_vaswani import indices_among
from .weights import KINDS, AttentionWeights, Kind, Sentence, attention_weights, check_model

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_FORMATS = (".png", ".svg")


def plot_attention(
    model: Any,
    tokenizer: Any,
    source: Sentence,
    target: Sentence | None = None,
    *,
    layers: int | Iterable[int] | None = None,
    heads: int | Iterable[int] | None = None,
    kind: Kind = "cross",
    target_tokenizer: PreTrainedTokenizerBase | None = None,
    path: str | os.PathLike | None = None,
) -> "Figure":
    """Draw which tokens the model attends to: one heat map, or a grid over layers and heads.

    Rows are queries and sum to 1. Columns are keys. A row of the decoder has the name of the token
    that it predicts, up to "</s>". A column of `kind="decoder"` has the name of the token that was
    read, from the start token on.

    Args:
        model: a VaswaniForConditionalGeneration.
        tokenizer: the tokenizer of the source, and of the target unless the target has its own.
        source: one sentence, or its token ids.
        target: its translation, or the token ids of `model.score`. None uses the translation by
            `generate`. `kind="encoder"` ignores the target.
        layers: one layer, or several such as `range(6)` for a row of the grid each. Negative
            numbers count from the last. None averages all layers. A single row is wrapped.
        heads: likewise, for the columns of the grid.
        kind: encoder-decoder ("cross"), "encoder" or "decoder" attention (3.2.3).
        target_tokenizer: the target's tokenizer; None looks for it in the tokenizer's folder.
        path: a .png or .svg file to write as well, whole or not at all.

    Returns:
        A matplotlib Figure. A notebook shows it as a picture.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: the layer, head or kind does not exist; a sentence is empty or too long, or
            there are several; model and tokenizer have different tokens; path has another ending.
        FileNotFoundError: the folder of `path` is missing.
        ModuleNotFoundError: matplotlib is missing.
    """
    with needs("matplotlib"):
        from .heat_maps import write_figure

    file = None if path is None else _picture_file(Path(path))
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(map(repr, KINDS))}, got {kind!r}.")
    check_model(model, tokenizer)
    side = "encoder" if kind == "encoder" else "decoder"
    layer_count = getattr(model.config, f"{side}_layers")
    head_count = getattr(model.config, f"{side}_attention_heads")
    drawn_layers = _drawn("layers", layers, layer_count)
    drawn_heads = _drawn("heads", heads, head_count)
    (attention,) = attention_weights(
        model, tokenizer, source, target, kinds=(kind,), target_tokenizer=target_tokenizer
    )
    figure = _figure(attention, drawn_layers, drawn_heads)
    if file is not None:
        write_figure(figure, file)
    return figure


def _figure(
    attention: AttentionWeights, layers: list[int | None], heads: list[int | None]
) -> "Figure":
    """Draw a map for each of the layers and heads; None draws their average."""
    from .heat_maps import draw_heat_maps

    maps = list(_maps(attention.values, layers, heads))
    details = [maps[0][0]] if len(maps) == 1 and maps[0][0] else []
    layer_count, head_count = attention.values.shape[:2]
    averaged = [f"{layer_count} layers"] * (layers == [None])
    averaged += [f"{head_count} heads"] * (heads == [None])
    if averaged:
        details.append(f"mean of {' and '.join(averaged)}")
    title, row_name, column_name = KINDS[attention.kind]
    return draw_heat_maps(
        maps,
        rows=attention.rows,
        columns=attention.columns,
        title=title,
        subtitle=", ".join(details),
        row_name=row_name,
        column_name=column_name,
        across=len(heads) if len(layers) > 1 < len(heads) else None,
    )


def _picture_file(path: Path) -> Path:
    """Return a path that a picture can be written to.

    Raises:
        ValueError: the path has another ending.
        FileNotFoundError: the folder is missing.
    """
    if path.suffix.lower() not in _FORMATS:
        raise ValueError(f"path must end in {' or '.join(_FORMATS)}, got {str(path)!r}.")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"path is {str(path)!r}, but there is no folder {path.parent}.")
    return path


def _drawn(name: str, given: int | Iterable[int] | None, count: int) -> list[int | None]:
    """Return the layers or heads to draw; [None] means their average."""
    if given is None:
        return [None] if count > 1 else [0]
    indices: list[Any] = [given]
    if isinstance(given, Iterable) and not isinstance(given, str):
        indices = list(given)
    for index in indices:
        if not isinstance(index, Integral) or isinstance(index, bool):
            raise TypeError(f"{name} must be an integer, several or None, got {given!r}.")
    return [*indices_among(name, indices, count, name)]


def _maps(
    weights: torch.Tensor, layers: list[int | None], heads: list[int | None]
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the title and the weights (R, C) of every map, layer by layer."""
    for layer, head in itertools.product(layers, heads):
        of_layer = weights.mean(dim=0) if layer is None else weights[layer]  # (H, R, C)
        shown = of_layer.mean(dim=0) if head is None else of_layer[head]  # (R, C)
        numbers = {"layer": layer, "head": head}
        title = ", ".join(f"{name} {n}" for name, n in numbers.items() if n is not None)
        yield title, shown.numpy()


__all__ = ["plot_attention"]
