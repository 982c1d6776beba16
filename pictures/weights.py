"""Attention weights (section 3.2) of one sentence pair, with the names of its tokens.

Shapes: L layers, H heads, R rows (queries), C columns (keys).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from transformers import PreTrainedTokenizerBase

from ..configuration.configuration_vaswani import VaswaniConfig
from ..generation.scoring_vaswani import sharing_copy
from .labels import token_labels

Kind = Literal["cross", "encoder", "decoder"]
Sentence = str | Sequence[int] | torch.Tensor

# The title of each kind of attention (3.2.3), and what its rows and columns are.
KINDS: dict[Kind, tuple[str, str, str]] = {
    "cross": ("Encoder-decoder attention", "target", "source"),
    "encoder": ("Encoder self-attention", "source", "source"),
    "decoder": ("Decoder self-attention", "target", "target read so far"),
}
_MAX_TOKENS = 1000  # with more tokens, a row of a single map is less than two pixels high


@dataclass(frozen=True)
class AttentionWeights:
    """The weights of one kind of attention: (L, H, R, C), on the CPU. Each row sums to 1."""

    kind: Kind
    rows: list[str]
    columns: list[str]
    values: torch.Tensor


def attention_weights(
    model: Any,
    tokenizer: Any,
    source: Sentence,
    target: Sentence | None = None,
    *,
    kinds: Sequence[Kind] = ("cross", "encoder", "decoder"),
    target_tokenizer: PreTrainedTokenizerBase | None = None,
) -> list[AttentionWeights]:
    """Read the weights of some kinds of attention in one pass through the network.

    A row of the decoder has the name of the token that it predicts, up to "</s>". A column of the
    decoder's self-attention has the name of the token that was read, from the start token on.

    Args:
        model: a VaswaniForConditionalGeneration.
        tokenizer: the tokenizer of the source.
        source: one sentence, or its token ids.
        target: its translation, or the token ids of `model.score`. None uses the translation by
            `generate`. The encoder's attention needs no target.
        kinds: the kinds of attention to return, in this order.
        target_tokenizer: the tokenizer of the target. None looks for it as the
            VaswaniTranslationPipeline does.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: a sentence is empty or too long, or the call holds several sentences, or model
            and tokenizer have different tokens.
    """
    check_model(model, tokenizer)
    source_ids = _ids("source", source, model, tokenizer)
    source_names = token_labels(source_ids, tokenizer)
    target_ids: list[int] = []
    target_names: list[str] = []
    read_names: list[str] = []
    if set(kinds) != {"encoder"}:
        reader = target_tokenizer or model.target_tokenizer(tokenizer)
        if target is None:
            target_ids = _translation(model, source_ids)
        else:
            target_ids = _ids("target", target, model, reader)
        target_names = token_labels(target_ids, reader)
        start = model._token_id("decoder_start_token_id")
        read_names = token_labels([start, *target_ids[:-1]], reader)
    rows = {"cross": target_names, "encoder": source_names, "decoder": target_names}
    columns = {"cross": source_names, "encoder": source_names, "decoder": read_names}
    values = _forward(model, source_ids, target_ids)
    return [AttentionWeights(kind, rows[kind], columns[kind], values[kind]) for kind in kinds]


def check_model(model: Any, tokenizer: Any) -> None:
    """Refuse a model without a decoder, and an object that is not a tokenizer.

    Raises:
        TypeError: names the argument and its type.
    """
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    if model_type != VaswaniConfig.model_type or not hasattr(model, "score"):
        raise TypeError(
            f"model must be a VaswaniForConditionalGeneration, got {type(model).__name__}."
        )
    if not hasattr(tokenizer, "convert_ids_to_tokens"):
        raise TypeError(f"tokenizer must be that of the model, got {type(tokenizer).__name__}.")


def _is_batch(sentence: Any) -> bool:
    nested = isinstance(sentence, list | tuple) and any(
        isinstance(entry, str | list | tuple) for entry in sentence
    )
    return nested or getattr(sentence, "ndim", 1) == 2


def _ids(name: str, sentence: Sentence, model: Any, tokenizer: Any) -> list[int]:
    """Return the token ids of one sentence, after all checks. A batch of one is a sentence."""
    if _is_batch(sentence) and len(sentence) == 1:
        sentence = cast(Sentence, sentence[0])
    if _is_batch(sentence) or getattr(sentence, "ndim", 1) != 1:
        raise ValueError(
            f"{name} must be one sentence, a string or its token ids, but holds {len(sentence)}: "
            "make one call for each sentence."
        )
    if isinstance(sentence, str) and not sentence.strip():
        way_out = "pass some text" if name == "source" else "None means the model's own translation"
        raise ValueError(f"{name} is empty ({sentence!r}): {way_out}.")
    argument, size = "text", model.config.vocab_size
    if name == "target":
        argument, size = "text_target", model.config.decoder_vocab_size

    def read(texts: list[str]) -> Any:
        return tokenizer(**{argument: texts})["input_ids"]

    (ids,) = model._token_ids(name, [sentence], read, size)
    if len(ids) > _MAX_TOKENS:
        raise ValueError(
            f"{name} has {len(ids)} tokens, more than the {_MAX_TOKENS} that a picture can show: "
            "shorten it."
        )
    return ids


def _translation(model: Any, source: list[int]) -> list[int]:
    """Translate a source by `generate`; return labels, without the start token."""
    batch = torch.tensor([source], device=model.device)
    with model.evaluating():
        output = model.generate(input_ids=batch, attention_mask=torch.ones_like(batch))
    sequences = getattr(output, "sequences", output)
    return model._without_padding(sequences[0, 1:].tolist())


def _forward(model: Any, source: list[int], target: list[int]) -> dict[Kind, torch.Tensor]:
    """Return the weights of each kind of attention (L, H, R, C); without a target, the encoder's.

    Only eager attention returns weights. A copy that shares all tensors runs it, because other
    threads may use the model at the same time.
    """
    twin = sharing_copy(model)
    if twin is model:
        raise ValueError(
            "The weights of the model are divided among processes: load the model in one process "
            "to draw its attention."
        )
    twin.eval()
    twin.set_attn_implementation("eager")
    with torch.no_grad():
        if not target:
            batch = torch.tensor([source], device=model.device)
            return {
                "encoder": _stacked(twin.get_encoder()(batch, output_attentions=True).attentions)
            }
        ((_, inputs, _),) = twin._forced_batches([(source, target)], max_tokens=1)
        output = twin(**inputs, use_cache=False, output_attentions=True)
    return {
        "cross": _stacked(output.cross_attentions),
        "encoder": _stacked(output.encoder_attentions),
        "decoder": _stacked(output.decoder_attentions),
    }


def _stacked(layers: Sequence[torch.Tensor]) -> torch.Tensor:
    """Stack the weights of the layers, on the CPU, at least in float32."""
    weights = torch.cat([layer.cpu() for layer in layers])  # (L, H, R, C)
    return weights.to(torch.promote_types(weights.dtype, torch.float32))


__all__ = ["KINDS", "AttentionWeights", "Kind", "Sentence", "attention_weights", "check_model"]
