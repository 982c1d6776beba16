"""Attention (section 3.2) as heat maps: which tokens each layer and head looks at.

Shapes: L layers, H heads, R rows (queries), C columns (keys).
"""

import copy
import itertools
import os
from collections.abc import Iterable, Iterator, Sequence
from numbers import Integral
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from matplotlib.figure import Figure

from ..configuration.configuration_vaswani import VaswaniConfig
from ..modeling.scoring_vaswani import _checked
from .heat_maps import FORMATS, draw_heat_maps, write_figure
from .labels import token_labels

# What is drawn, and the names of rows and columns.
_KINDS = {
    "cross": ("Encoder-decoder attention", "target", "source"),
    "encoder": ("Encoder self-attention", "source", "source"),
    "decoder": ("Decoder self-attention", "target", "target read so far"),
}
# Beyond, a row of the largest picture is thinner than a pixel.
_MOST_TOKENS = 1000

Sentence = str | Sequence[int] | torch.Tensor


def plot_attention(
    model: Any,
    tokenizer: Any,
    source: Sentence,
    target: Sentence | None = None,
    *,
    layers: int | Iterable[int] | None = None,
    heads: int | Iterable[int] | None = None,
    kind: Literal["cross", "encoder", "decoder"] = "cross",
    target_tokenizer: Any = None,
    path: str | os.PathLike | None = None,
) -> Figure:
    """Draw which tokens the model attends to: one heat map, or a grid over layers and heads.

    Rows are queries and sum to 1, columns are keys. A row of the decoder has the name of the token
    that it predicts, up to "</s>"; a column of `kind="decoder"` that of the token which was read
    there, from the start token on. The model stays as it is, whatever attention it computes with.

    Args:
        model: a VaswaniForConditionalGeneration.
        tokenizer: of the source, and of the target unless that has another.
        source: one sentence, or its token ids.
        target: its translation, or token ids as for `model.score`; None is the model's own, by
            `generate`. `kind="encoder"` does not use it.
        layers: one of them, or several, one row of the grid each, such as `range(6)`; negative from
            the last. None is their average. A grid of one row or column is wrapped.
        heads: likewise, the columns of the grid.
        kind: encoder-decoder ("cross"), "encoder" or "decoder" attention (3.2.3).
        target_tokenizer: of the target; None looks for it where the VaswaniTranslationPipeline
            does.
        path: of a file to write, too, that ends in .png or .svg; it appears whole or not at all.

    Raises:
        TypeError: an argument is none of these.
        ValueError: there is no such layer, head or kind; a sentence is empty, too long to be seen,
            or there are several; model and tokenizer have different tokens; path ends otherwise.
        FileNotFoundError: path is in a folder that is missing.
    """
    file = None if path is None else _checked_path(Path(path))
    if kind not in _KINDS:
        raise ValueError(f"kind must be one of {', '.join(map(repr, _KINDS))}, got {kind!r}.")
    _check_model(model, tokenizer)
    side = "encoder" if kind == "encoder" else "decoder"
    layer_count = getattr(model.config, f"{side}_layers")
    head_count = getattr(model.config, f"{side}_attention_heads")
    drawn_layers = _drawn("layers", layers, layer_count)
    drawn_heads = _drawn("heads", heads, head_count)

    source_ids = _ids("source", source, model, tokenizer)
    target_ids: list[int] = []
    rows = columns = token_labels(source_ids, tokenizer)
    if kind != "encoder":
        reader = target_tokenizer or model.target_tokenizer(tokenizer)
        if target is None:
            target_ids = _translation(model, source_ids)
        else:
            target_ids = _ids("target", target, model, reader)
        rows = token_labels(target_ids, reader)
    if kind == "decoder":
        start = model._token_id("decoder_start_token_id")
        columns = token_labels([start, *target_ids[:-1]], reader)

    weights = _weights(model, source_ids, target_ids, kind)
    maps = list(_maps(weights, drawn_layers, drawn_heads))
    details = [maps[0][0]] if len(maps) == 1 and maps[0][0] else []
    averaged = [f"{layer_count} layers"] * (drawn_layers == [None])
    averaged += [f"{head_count} heads"] * (drawn_heads == [None])
    if averaged:
        details.append(f"mean of {' and '.join(averaged)}")
    title, row_name, column_name = _KINDS[kind]
    figure = draw_heat_maps(
        maps,
        rows=rows,
        columns=columns,
        title=title,
        subtitle=", ".join(details),
        row_name=row_name,
        column_name=column_name,
        across=len(drawn_heads) if len(drawn_layers) > 1 < len(drawn_heads) else None,
    )
    if file is not None:
        write_figure(figure, file)
    return figure


def _checked_path(path: Path) -> Path:
    if path.suffix.lower() not in FORMATS:
        raise ValueError(f"path must end in {' or '.join(FORMATS)}, got {str(path)!r}.")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"path is {str(path)!r}, but there is no folder {path.parent}.")
    return path


def _check_model(model: Any, tokenizer: Any) -> None:
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    if model_type != VaswaniConfig.model_type or not hasattr(model, "score"):
        raise TypeError(
            f"model must be a VaswaniForConditionalGeneration, got {type(model).__name__}."
        )
    if not hasattr(tokenizer, "convert_ids_to_tokens"):
        raise TypeError(f"tokenizer must be that of the model, got {type(tokenizer).__name__}.")


def _drawn(name: str, given: int | Iterable[int] | None, count: int) -> list[int | None]:
    """Positions of the layers or heads to draw; None alone is the average over several."""
    if given is None:
        return [None] if count > 1 else [0]
    indices: list[Any] = [given]
    if isinstance(given, Iterable) and not isinstance(given, str):
        indices = list(given)
    for index in indices:
        if not isinstance(index, Integral) or isinstance(index, bool):
            raise TypeError(f"{name} must be an integer, several or None, got {given!r}.")
    return [*_checked(name, indices, count, name)]


def _ids(name: str, sentence: Sentence, model: Any, tokenizer: Any) -> list[int]:
    """The token ids of one sentence, checked."""
    nested = isinstance(sentence, list | tuple) and any(
        isinstance(entry, str | list | tuple) for entry in sentence
    )
    if nested or getattr(sentence, "ndim", 1) != 1:
        raise ValueError(
            f"{name} must be one sentence, a string or its token ids, but holds {len(sentence)}: "
            "call plot_attention for each."
        )
    if isinstance(sentence, str) and not sentence.strip():
        way_out = "pass some text" if name == "source" else "None stands for the model's own"
        raise ValueError(f"{name} is empty ({sentence!r}): {way_out}.")
    argument, size = "text", model.config.vocab_size
    if name == "target":
        argument, size = "text_target", model.config.decoder_vocab_size

    def read(texts: list[str]) -> Any:
        return tokenizer(**{argument: texts})["input_ids"]

    (ids,) = model._token_ids(name, [sentence], read, size)
    if len(ids) > _MOST_TOKENS:
        raise ValueError(
            f"{name} has {len(ids)} tokens, more than the {_MOST_TOKENS} that a picture can show: "
            "shorten it."
        )
    return ids


def _translation(model: Any, source: list[int]) -> list[int]:
    """What the model itself makes of a source, as labels: without the start token."""
    batch = torch.tensor([source], device=model.device)
    with model.evaluating():
        output = model.generate(input_ids=batch, attention_mask=torch.ones_like(batch))
    sequences = getattr(output, "sequences", output)
    return model._without_padding(sequences[0, 1:].tolist())


def _weights(model: Any, source: list[int], target: list[int], kind: str) -> torch.Tensor:
    """The attention of all layers and heads to one pair: (L, H, R, C), on the CPU.

    Only eager attention keeps its weights. It is switched on in a twin that shares all tensors with
    the model, so that whoever else uses the model meanwhile notices nothing.
    """
    tensors = itertools.chain(model.parameters(), model.buffers())
    twin = copy.deepcopy(model, {id(tensor): tensor for tensor in tensors}).eval()
    twin.set_attn_implementation("eager")
    with torch.no_grad():
        if kind == "encoder":
            batch = torch.tensor([source], device=model.device)
            layers = twin.get_encoder()(batch, output_attentions=True).attentions
        else:
            ((_, inputs, _),) = twin._forced_batches([(source, target)], max_tokens=1)
            output = twin(**inputs, use_cache=False, output_attentions=True)
            layers = output.cross_attentions if kind == "cross" else output.decoder_attentions
    weights = torch.cat([layer.cpu() for layer in layers])  # (L, H, R, C)
    return weights.to(torch.promote_types(weights.dtype, torch.float32))


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
