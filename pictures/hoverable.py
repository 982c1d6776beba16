"""Attention (section 3.2) as heat maps in a web page or a notebook, with details on hover."""

import base64
import html
import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from .colours import RAMP
from .weights import KINDS, AttentionWeights, Sentence, attention_weights

MAX_WEIGHTS = 4_000_000  # each takes 2.7 bytes in the page
_NO_SCRIPT = (
    "These heat maps of attention need JavaScript. In a notebook, run the cell or trust the file."
)


@dataclass(frozen=True, repr=False)
class HoverableAttention:
    """Heat maps of one sentence pair. A notebook shows them.

    Args:
        html: the element for a page whose head holds `<script>` and `attention_script()`.
    """

    html: str

    def _repr_html_(self) -> str:
        """Return the element and its script."""
        return f"{self.html}<script>{attention_script()}</script>"


def hoverable_attention(
    model: Any,
    tokenizer: Any,
    source: Sentence,
    target: Sentence | None = None,
    *,
    target_tokenizer: PreTrainedTokenizerBase | None = None,
) -> HoverableAttention:
    """Show which tokens each layer and head looks at, as a view in a notebook or a page.

    The reader chooses the kind of attention, the layer and the head. A token under the pointer
    shows what it looks at, and a cell shows its weight. The view opens in full size. It contains
    its own script and style, and asks no server for anything.

    Args:
        model: a VaswaniForConditionalGeneration. The call changes nothing about the model.
        tokenizer: the tokenizer of the source, and of the target unless that has another.
        source: one sentence, or its token ids.
        target: its translation, or the token ids of `model.score`. None means the model's own
            translation by `generate`.
        target_tokenizer: the tokenizer of the target. None looks for it as the
            VaswaniTranslationPipeline does.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: a sentence is empty, the call holds several sentences, or the pair has more
            weights than a page can hold.
    """
    maps = attention_weights(model, tokenizer, source, target, target_tokenizer=target_tokenizer)
    count = sum(attention.values.numel() for attention in maps)
    if count > MAX_WEIGHTS:
        cross = maps[0]
        raise ValueError(
            f"This pair has {len(cross.columns)} source and {len(cross.rows)} target tokens. Their "
            f"{count:,} weights in all layers and heads are more than the {MAX_WEIGHTS:,} that a "
            "page can hold: shorten the sentences, or draw single heads with plot_attention."
        )
    data = json.dumps({"colours": RAMP, "maps": [*map(_map_data, maps)]}, ensure_ascii=False)
    return HoverableAttention(
        f'<vaswani-attention data="{html.escape(data)}">{_NO_SCRIPT}</vaswani-attention>'
    )


@cache
def attention_script() -> str:
    """The script that draws the element of a HoverableAttention."""
    script, style = (
        Path(__file__).with_name(f"hoverable.{ending}").read_text(encoding="utf-8")
        for ending in ("js", "css")
    )
    return f"{script}\ndefineVaswaniAttention({json.dumps(style)});"


def _map_data(attention: AttentionWeights) -> dict[str, Any]:
    """Return the data that the script draws one kind of attention from."""
    title, row_name, column_name = KINDS[attention.kind]
    layers, heads, _, _ = attention.values.shape
    weights = (65535 * attention.values).round().to(torch.int32).numpy().astype("<u2")
    return {
        "name": title,
        "rowName": row_name,
        "columnName": column_name,
        "rows": attention.rows,
        "columns": attention.columns,
        "layers": layers,
        "heads": heads,
        "weights": base64.b64encode(weights.tobytes()).decode(),
    }


__all__ = ["HoverableAttention", "attention_script", "hoverable_attention"]
