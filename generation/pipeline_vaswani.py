"""`pipeline("translation")` for this model: strings, lists of strings, and streams of any length.

transformers 5 has no task "translation". Importing the package registers this class for it. Without
the package, transformers finds the class through `custom_pipelines` in config.json.
"""

import copy
import itertools
import os
import sys
from collections.abc import Iterable, Iterator, Sized
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import create_repo, upload_folder
from transformers import Pipeline
from transformers.generation import GenerateBeamEncoderDecoderOutput
from transformers.utils import logging

from ..configuration.places_vaswani import check_model_type
from ..tokenization.kinds_vaswani import lone_surrogate
from .batches_vaswani import batches_by_length
from .limits_vaswani import check_position_limit, length_limits, real_tokens
from .settings_vaswani import first_setting

_PROGRESS_AFTER = 5  # seconds of work after which a progress bar appears
_SHORTEST = 16  # tokens; a shorter line counts as this many, because its translation costs memory
# Settings of `generate` that may have an entry for each line.
_SETTINGS_PER_LINE = ("decoder_start_token_id", "decoder_input_ids", "decoder_attention_mask")
# Settings of `generate` that end a sentence without an end token, and before its limit.
_OWN_STOPS = ("stop_strings", "stopping_criteria")

Translations = list[dict[str, Any]]


class VaswaniTranslationPipeline(Pipeline):
    """Translate a string, a list of strings or a stream of strings, in the order of the input.

    A string gives `[{"translation_text": ...}]`. A list gives one such dict for each string, or a
    list of dicts if `num_return_sequences` is above 1. Any other iterable gives an iterator over
    what each string alone would give. A blank string gives an empty translation.

    Strings are read in windows and sorted by length inside a window. Batches therefore hold little
    padding, and memory does not grow with a stream. The model is moved to the first accelerator,
    unless `device` names another device.

    Args:
        model: a VaswaniForConditionalGeneration.
        tokenizer: the tokenizer of the source. It also serves the target, unless the target has its
            own.
        target_tokenizer: the tokenizer of a separate target vocabulary; None, the default, looks
            for it in the subfolder target_tokenizer of the tokenizer's folder.
        max_tokens: padded source tokens of a batch, at most (default 4096).
        batch_size: sentences of a batch, at most (default: as many as `max_tokens` allows).
        window: strings that are sorted together (default 4096). The first result of a stream waits
            for them.
        return_scores: add "score", by which beam search ranks: the log-probability divided by the
            length penalty (section 6.1; default False).
        progress: draw a progress bar for lists and streams; None, the default, draws it after five
            seconds of work.
        **kwargs: arguments of transformers' Pipeline, such as `device`, or of `generate`, such as
            `num_beams=4`. The model's generation config has the defaults of `generate`. A list or
            tensor for the decoder's start, such as `decoder_input_ids`, has an entry for each line,
            or one entry for all lines.

    All arguments but the first two may be given here, for every call, or to the call itself.

    Raises:
        TypeError: the input or a line is not a string. The message names the line.
        ValueError: a tokenizer is missing; a setting is not an integer or below 1, or has entries
            for another number of lines; a line has more tokens than the model has learned
            positions, or half of a surrogate pair. The message names the line.
    """

    model: Any
    tokenizer: Any
    _load_tokenizer: Any = True  # Any, because transformers declares None
    _load_processor: Any = False
    _load_image_processor: Any = False
    _load_video_processor: Any = False
    _load_feature_extractor: Any = False
    # The Pipeline must not merge settings of `generate` with others. `generate` merges them.
    _pipeline_calls_generate = False

    def __init__(
        self, model: Any, tokenizer: Any = None, target_tokenizer: Any = None, **kwargs: Any
    ) -> None:
        if not hasattr(model, "target_tokenizer"):
            if model.name_or_path:
                check_model_type(model.name_or_path, model.config.model_type, "vaswani")
            raise ValueError(
                f"{type(self).__name__} needs a VaswaniForConditionalGeneration, got "
                f"{type(model).__name__}: call its `generate` instead."
            )
        if tokenizer is None:
            raise ValueError(f"{type(self).__name__} needs the tokenizer of the model.")
        super().__init__(model, tokenizer=tokenizer, **kwargs)
        self.target_tokenizer = target_tokenizer or model.target_tokenizer(self.tokenizer)

    def save_pretrained(self, save_directory: str | os.PathLike, **kwargs: Any) -> None:
        """Save the model and its tokenizers, as transformers' pipelines do."""
        super().save_pretrained(save_directory, **kwargs)
        if self.target_tokenizer is self.tokenizer:
            return
        folder = Path(save_directory) / "target_tokenizer"
        self.target_tokenizer.save_pretrained(folder)
        if kwargs.get("push_to_hub"):
            name = kwargs.get("repo_id") or Path(save_directory).name
            repository = create_repo(name, exist_ok=True, token=kwargs.get("token"))
            upload_folder(
                repo_id=repository.repo_id,
                folder_path=folder,
                path_in_repo=folder.name,
                commit_message="Upload the tokenizer of the target",
                token=kwargs.get("token"),
                revision=kwargs.get("revision"),
                create_pr=kwargs.get("create_pr", False),
            )

    def _sanitize_parameters(
        self, **settings: Any
    ) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        """Divide settings into three: for batches, for `generate`, and for results (none)."""
        settings.pop("num_workers", None)  # other pipelines have a data loader; this one does not
        names = ("max_tokens", "batch_size", "window", "progress")
        batching = {name: settings.pop(name) for name in names if name in settings}
        for name in ("max_tokens", "batch_size", "window"):
            value = batching.get(name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ValueError(f"{name} must be an integer of at least 1, got {value!r}.")
        return batching, settings, {}

    def __call__(self, inputs: Any, **settings: Any) -> Any:
        """Translate `inputs`; the class describes arguments and results."""
        settings = {"batch_size": self._batch_size, **settings}
        batching, generating, _ = self._sanitize_parameters(**settings)
        batching = {**self._preprocess_params, **batching}
        generating = {**self._defaults(generating), **generating}
        if isinstance(inputs, str):
            return next(self._translated([inputs], generating, **{**batching, "progress": False}))
        iterable = hasattr(inputs, "__iter__") or hasattr(inputs, "__getitem__")
        if not iterable or isinstance(inputs, bytes | dict):
            raise TypeError(
                "Pass a string, a list of strings or an iterable of strings, not "
                f"{type(inputs).__name__}."
            )
        results = self._translated(inputs, generating, **batching)
        if not isinstance(inputs, list | tuple):
            return results
        if self._translations_per_line(generating) == 1:
            return [translation for (translation,) in results]
        return list(results)

    def _defaults(self, generating: dict[str, Any]) -> dict[str, Any]:
        """Return the pipeline's own settings of `generate`, without those that a call overrides."""
        config = generating.get("generation_config")
        limits = ("max_length", "max_new_tokens")
        replaced = {
            name for name in self._forward_params if getattr(config, name, None) is not None
        }
        defaults = dict(self._forward_params)
        if any(first_setting(name, generating, config) is not None for name in limits):
            replaced.update(limits)
            if (own := defaults.get("generation_config")) is not None:
                defaults["generation_config"] = copy.deepcopy(own)
                defaults["generation_config"].update(**dict.fromkeys(limits))
        return {name: value for name, value in defaults.items() if name not in replaced}

    def _translated(
        self,
        inputs: Iterable[str],
        generating: dict[str, Any],
        max_tokens: int = 4096,
        batch_size: int | None = None,
        window: int = 4096,
        progress: bool | None = None,
    ) -> Iterator[Translations]:
        """Yield the translations of each line, in windows of lines."""
        count = len(inputs) if isinstance(inputs, Sized) else None
        lines, first = _entries_of(inputs, count), 1
        of_lines = self._settings_of_lines(generating)
        blank: dict[str, Any] = {"translation_text": ""}
        if generating.get("return_scores"):
            blank["score"] = 0.0  # log-probability of a certain result
        bar = logging.tqdm(
            total=count,
            unit=" lines",
            delay=0 if progress else _PROGRESS_AFTER,
            disable=progress is False or sys.stderr is None,
        )
        with bar:
            while chunk := list(itertools.islice(lines, window)):
                ids = self.preprocess(chunk, first)
                _check_entries(of_lines, count, first + len(chunk) - 1)
                results = [
                    [dict(blank) for _ in range(self._translations_per_line(generating))]
                    for _ in ids
                ]
                bar.update(sum(not sentence for sentence in ids))
                lengths = [(len(sentence),) for sentence in ids]
                for batch in batches_by_length(lengths, max_tokens, batch_size, _SHORTEST):
                    inputs_of_batch = self.tokenizer.pad(
                        {"input_ids": [ids[index] for index in batch]},
                        padding_side="right",
                        return_attention_mask=True,
                        return_tensors="pt",
                    )
                    own = _entries(of_lines, [first - 1 + index for index in batch])
                    outputs = self.forward(dict(inputs_of_batch), **{**generating, **own})
                    if outputs.get("output_scores"):
                        generating = {**generating, "output_scores": True}
                    translations = self.postprocess(outputs)
                    per_line = len(translations) // len(batch)
                    for row, index in enumerate(batch):
                        results[index] = translations[row * per_line : (row + 1) * per_line]
                    bar.update(len(batch))
                yield from results
                first += len(chunk)

    def preprocess(self, lines: list[Any], first: int = 1) -> list[list[int]]:
        """Return the token ids of each line; a blank line has none.

        `first` is the number of the first line, for errors.
        """
        for number, line in enumerate(lines, start=first):
            if not isinstance(line, str):
                raise TypeError(
                    f"Line {number} is {line!r}, not a string. For a data set, choose a column: "
                    "KeyDataset(dataset, name)."
                )
            if flaw := lone_surrogate(line):
                raise ValueError(f"Line {number} {flaw}.")
        filled = [index for index, line in enumerate(lines) if line.strip()]
        ids: list[list[int]] = [[] for _ in lines]
        if filled:
            encoded = self.tokenizer([lines[index] for index in filled])["input_ids"]
            for index, sentence in zip(filled, encoded, strict=True):
                ids[index] = sentence
        for number, sentence in enumerate(ids, start=first):
            check_position_limit(f"Line {number}", len(sentence), self.model.config.position_limit)
        return ids

    def _forward(
        self, inputs: dict[str, torch.Tensor], return_scores: bool = False, **generating: Any
    ) -> dict[str, Any]:
        """Generate from a padded batch: sequences (B * hypotheses, T), and scores if asked for.

        `output_scores` in the result tells whether the search needs this setting to return scores.
        """
        outputs = {"return_dict_in_generate": return_scores}
        if generating.get("output_scores"):
            outputs["output_scores"] = generating.pop("output_scores")
        with self.model.evaluating():
            output = self.model.generate(**inputs, **_with_settings(generating, outputs))
            if not return_scores:
                return {"sequences": output}
            # transformers' beam search returns no scores without output_scores. Our faster search
            # does, so only a search by transformers runs again.
            beams = isinstance(output, GenerateBeamEncoderDecoderOutput)
            if beams and output.sequences_scores is None:
                outputs["output_scores"] = True
                output = self.model.generate(**inputs, **_with_settings(generating, outputs))
        scores = output.get("sequences_scores")
        if scores is None:  # greedy search and sampling return no scores
            scores = self._forced_scores(inputs, output.sequences, generating)
        return {
            "sequences": output.sequences,
            "scores": scores,
            "output_scores": outputs.get("output_scores"),
        }

    def _forced_scores(
        self, inputs: dict[str, torch.Tensor], sequences: torch.Tensor, generating: dict[str, Any]
    ) -> torch.Tensor:
        """Score sequences (B * hypotheses, T) of greedy search or sampling, by forced decoding."""
        model, given = self.model, generating.get("generation_config")
        prompt_length = model._prompt_length(given, generating)
        masks = {"decoder_attention_mask": generating.get("decoder_attention_mask")}
        repeated = {
            name: part.repeat_interleave(len(sequences) // len(part), dim=0)
            for name, part in {**inputs, **masks}.items()
            if part is not None
        }
        if (mask := repeated.get("decoder_attention_mask")) is not None:
            # `generate` may put the start token before the prompt. All its tokens are visible.
            before, after = prompt_length - mask.shape[1], sequences.shape[1] - 1 - prompt_length
            mask = torch.nn.functional.pad(mask, (before, after), value=1)
            repeated["decoder_attention_mask"] = mask
        tokens = sequences[:, prompt_length:]
        real = self._real_tokens(tokens, repeated, generating)
        repeated["decoder_input_ids"] = sequences
        # None in the call switches the paper's penalty off.
        off = {"length_penalty": 1.0, "length_penalty_type": "hf"}
        call = {
            **generating,
            **{name: off[name] for name in off if generating.get(name, 0) is None},
        }
        return model._continuation_scores(repeated, prompt_length, real, call, given)

    def _real_tokens(
        self, tokens: torch.Tensor, inputs: dict[str, torch.Tensor], generating: dict[str, Any]
    ) -> torch.Tensor:
        """Mark the generated tokens (B, T) up to the end token, or up to the sentence's limit.

        A model may also predict the padding token, so the token alone does not mark padding.
        """
        given, defaults = generating.get("generation_config"), self.model.generation_config
        eos = first_setting("eos_token_id", generating, given, defaults)
        if eos is None or generating.get("eos_token_id", eos) is None:
            eos = []  # None in the call switches the default off
        rule = self.model._length_rule_of_call(given, generating)
        lengths = inputs["attention_mask"].sum(dim=1)
        real = real_tokens(tokens, eos, None if rule is None else length_limits(lengths, *rule))
        if any(first_setting(name, generating, given, defaults) for name in _OWN_STOPS):
            pad = first_setting("pad_token_id", generating, given, defaults)
            filled = tokens == (-1 if pad is None else pad)
            real &= filled.flip(1).cumprod(dim=1).flip(1) == 0
        return real

    def postprocess(self, outputs: dict[str, torch.Tensor]) -> Translations:
        """Return the text of every sequence, and its score if there is one."""
        texts = self.target_tokenizer.batch_decode(outputs["sequences"], skip_special_tokens=True)
        translations: Translations = [{"translation_text": text} for text in texts]
        if "scores" in outputs:
            for translation, score in zip(translations, outputs["scores"].tolist(), strict=True):
                translation["score"] = score
        return translations

    def _settings_of_lines(self, generating: dict[str, Any]) -> dict[str, torch.Tensor]:
        """Return the settings that have an entry for each line, as tensors (lines, ...)."""
        places = (generating, generating.get("generation_config"), self.model.generation_config)
        values = {name: first_setting(name, *places) for name in _SETTINGS_PER_LINE}
        tensors = {
            name: torch.as_tensor(value, device=self.device)
            for name, value in values.items()
            if value is not None
        }
        for name, value in tensors.items():
            if name != "decoder_start_token_id" and value.dim() == 1:
                raise ValueError(
                    f"{name} must have a row for each line, or one row for all lines, got a flat "
                    f"list of {len(value)} numbers: pass [[...]]."
                )
        return {name: value for name, value in tensors.items() if value.dim()}

    def _translations_per_line(self, generating: dict[str, Any]) -> int:
        """Return how many translations a sentence gets."""
        given = generating.get("generation_config")
        places = (generating, given, self.model.generation_config)
        return first_setting("num_return_sequences", *places) or 1


def _entries_of(inputs: Any, count: int | None) -> Iterator[Any]:
    """Yield the entries of an iterable, or of a torch Dataset, which need not be iterable."""
    if count is None or isinstance(inputs, Iterable):
        return iter(inputs)
    return map(inputs.__getitem__, range(count))


def _check_entries(settings: dict[str, torch.Tensor], count: int | None, read: int) -> None:
    """Refuse settings with entries for another number of lines.

    Args:
        settings: settings with an entry for each line, or one entry for all lines.
        count: lines of the input; None if the input is a stream.
        read: lines read so far.

    Raises:
        ValueError: names the setting and both numbers.
    """
    for name, entries in settings.items():
        size = len(entries)
        if size != 1 and (size < read or count not in (None, size)):
            lines = f"at least {read}" if count is None else count
            raise ValueError(
                f"{name} has {size} entries, but the number of lines is {lines}: give each line an "
                "entry, or give one entry for all lines."
            )


def _entries(settings: dict[str, torch.Tensor], lines: list[int]) -> dict[str, Any]:
    """Return the entries of some lines, numbered from 0, as `generate` takes them."""
    chosen: dict[str, Any] = {
        name: entries[[0] * len(lines) if len(entries) == 1 else lines]
        for name, entries in settings.items()
    }
    if "decoder_start_token_id" in chosen:
        chosen["decoder_start_token_id"] = chosen["decoder_start_token_id"].tolist()
    return chosen


def _with_settings(generating: dict[str, Any], outputs: dict[str, Any]) -> dict[str, Any]:
    """Add settings to those of a call: to a copy of its generation config, if there is one.

    transformers warns of a config beside single settings.
    """
    if (given := generating.get("generation_config")) is None:
        return {**generating, **outputs}
    config = copy.deepcopy(given)
    config.update(**outputs)
    unchanged = {name: value for name, value in generating.items() if name not in outputs}
    return {**unchanged, "generation_config": config}


__all__ = ["VaswaniTranslationPipeline"]
