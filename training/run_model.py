"""The model and the tokenizers of a run: fresh ones, or those of a model to fine-tune."""

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, PreTrainedTokenizerBase

from ..configuration.configuration_vaswani import VaswaniConfig
from ..corpora.reading import DataError, Pair
from ..generation.limits_vaswani import check_position_limit
from ..modeling.modeling_vaswani import VaswaniForConditionalGeneration
from ..modeling.quantization_vaswani import refuse_int8
from .presets import PRESETS
from .run_arguments import RunError
from .run_data import RunData

_SIZES = (
    *("d_model", "d_k", "d_v", "encoder_layers", "encoder_attention_heads", "encoder_ffn_dim"),
    *("decoder_layers", "decoder_attention_heads", "decoder_ffn_dim"),
)

Tokenizers = tuple[PreTrainedTokenizerBase, PreTrainedTokenizerBase]


def model_of(
    options: argparse.Namespace, data: RunData, checkpoint: Path | None
) -> tuple[VaswaniForConditionalGeneration, Tokenizers]:
    """Load the model to fine-tune, or learn a vocabulary and make a fresh model.

    Args:
        options: options of the command line.
        data: what a vocabulary is learned from.
        checkpoint: the checkpoint to resume. It has the vocabulary of its run.

    Returns:
        The model, and the tokenizers of sources and targets. They are one tokenizer, unless the
        model has a separate target vocabulary.

    Raises:
        DataError, RunError: the data or the options are wrong.
    """
    if options.model:
        # Always train in float32, because updates are too small for 16 bits.
        model = AutoModelForSeq2SeqLM.from_pretrained(options.model, dtype=torch.float32)
        try:
            refuse_int8(model, "Training")
        except ValueError as error:
            raise RunError(f"{options.model}: {error}") from error
        loaded = AutoTokenizer.from_pretrained(options.model)
        return model, (loaded, model.target_tokenizer(loaded))
    tokenizer = _tokenizer_of(options, data, checkpoint)
    fields = {
        "vocab_size": len(tokenizer),
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "decoder_start_token_id": tokenizer.eos_token_id,
        **options.set,
    }
    row = "base" if options.preset in PRESETS else options.preset
    try:
        config = VaswaniConfig.preset(row, **fields)
        if checkpoint:
            _check_sizes(config, checkpoint)
        return VaswaniForConditionalGeneration(config), (tokenizer, tokenizer)
    except (ValueError, StrictDataclassError) as error:
        raise RunError(str(error)) from error


def set_search(model: VaswaniForConditionalGeneration, options: argparse.Namespace) -> int:
    """Save the search settings of the command line in the model, and return its beam size.

    Raises:
        RunError: a setting is invalid, or contradicts those of the model.
    """
    generation = model.generation_config
    try:
        generation.update(**options.generation)
        generation.num_beams = generation.num_beams or 4
        generation.validate(strict=True)
    except ValueError as error:
        raise RunError(f"--generation: {error}") from error
    if options.nbest > generation.num_beams:
        needed = f"at least as many --beams, got {generation.num_beams}"
        raise RunError(f"--nbest {options.nbest} needs {needed}")
    return generation.num_beams


def check_positions(
    limit: int | None,
    max_length: int,
    valid: Sequence[Pair],
    test: Sequence[Pair],
    tokenizers: Tokenizers,
) -> None:
    """Refuse lines that are longer than learned positions, before they end the run.

    Args:
        limit: the number of learned positions; None allows all lengths.
        max_length: the longest line of the training data, in tokens.
        valid: pairs of the validation set.
        test: pairs of the test set. The model does not read their targets.
        tokenizers: those of sources and targets.

    Raises:
        RunError: names the first line that is too long, and the way out.
    """
    if limit is None:
        return
    if max_length > limit:
        raise RunError(
            f"--max-length {max_length} is more than the {limit} learned positions: pass "
            f"--max-length {limit}, or more max_position_embeddings."
        )
    for_sources, for_targets = tokenizers
    encoded = {}
    if valid:
        sources, targets = map(list, zip(*valid, strict=True))
        encoded["Source {} of the validation set"] = for_sources(sources)
        encoded["Target {} of the validation set"] = for_targets(text_target=targets)
    if test:
        encoded["Source {} of the test set"] = for_sources([source for source, _ in test])
    for place, lines in encoded.items():
        for number, ids in enumerate(lines["input_ids"], start=1):
            try:
                check_position_limit(place.format(number), len(ids), limit)
            except ValueError as error:
                raise RunError(str(error)) from error


def _tokenizer_of(
    options: argparse.Namespace, data: RunData, checkpoint: Path | None
) -> PreTrainedTokenizerBase:
    if checkpoint or options.tokenizer:
        # A resumed run keeps its vocabulary, because the data may have changed.
        name = "--resume" if checkpoint else "--tokenizer"
        return _usable_tokenizer(name, checkpoint or options.tokenizer)
    try:
        return data.learn_vocabulary()
    except DataError:
        raise
    except ValueError as error:
        raise RunError(str(error)) from error


def _check_sizes(config: VaswaniConfig, checkpoint: Path) -> None:
    """Refuse to resume a checkpoint of a model of another size.

    Raises:
        RunError: names the size and both values.
    """
    saved = VaswaniConfig.from_pretrained(checkpoint)
    for name in _SIZES:
        here, there = getattr(config, name), getattr(saved, name)
        if here != there:
            raise RunError(
                f"{checkpoint} has {name} {there}, but this run has {here}: resume with the "
                "settings of the checkpoint, or pass another --output."
            )


def _usable_tokenizer(option: str, place: str | Path) -> PreTrainedTokenizerBase:
    """Load a tokenizer that pads, and that adds its end token to each target.

    Raises:
        RunError: the tokenizer lacks either, or cannot be loaded.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(place)
    except ValueError as error:
        raise RunError(f"{option} {place}: {error}") from error
    if tokenizer.pad_token_id is None:
        raise RunError(
            f"The tokenizer of {option} {place} has no padding token: set its pad_token."
        )
    if tokenizer.eos_token_id is None:
        raise RunError(f"The tokenizer of {option} {place} has no end token: set its eos_token.")
    if tokenizer.eos_token_id not in tokenizer(text_target="a")["input_ids"]:
        raise RunError(
            f"The tokenizer of {option} {place} does not end a sentence with "
            f"{tokenizer.eos_token}, so the model would not learn to stop: use a tokenizer that "
            "adds it."
        )
    return tokenizer


__all__ = ["check_positions", "model_of", "set_search"]
