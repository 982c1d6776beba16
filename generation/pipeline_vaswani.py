"""`pipeline("translation")` for this model: text in, text out, however much there is of it.

transformers 5 has no such task of its own: importing the package registers this class for it.
Without the package, transformers finds the class through `custom_pipelines` in config.json.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence, Sized
from typing import Any

import torch
from transformers import Pipeline
from transformers.utils import logging

from ..configuration.places_vaswani import check_model_type
from ..tokenization.tokenization_vaswani import half_character

# Seconds of work after which a progress bar appears by itself.
_PROGRESS_AFTER = 5
# A line counts as so many tokens at least: what is written from it costs memory, too.
_LEAST_TOKENS = 16

Translations = list[dict[str, Any]]


def batches_by_length(
    lengths: Sequence[int], max_tokens: int, batch_size: int | None = None
) -> Iterator[list[int]]:
    """Group the indices of sentences of similar length, the longest first, leaving out length 0.

    No batch is padded to more than `max_tokens`, unless one sentence alone is longer, or holds more
    than `batch_size` sentences. Short sentences count as 16 tokens.
    """
    filled = (index for index, length in enumerate(lengths) if length)
    order = sorted(filled, key=lambda index: (-lengths[index], index))
    start = 0
    while start < len(order):
        size = max(max_tokens // max(lengths[order[start]], _LEAST_TOKENS), 1)
        end = start + min(size, batch_size or size)
        yield order[start:end]
        start = end


class VaswaniTranslationPipeline(Pipeline):
    """Translate a string, a list of strings or a stream of them, in the order of the input.

    A string gives `[{"translation_text": ...}]`; a list gives one such dict a string, or a list of
    them where `num_return_sequences` asks for several; any other iterable gives an iterator over
    what each string alone would give. Strings are read `window` at a time and sorted by length
    inside it, so that batches hold little padding and memory does not grow with a stream. A blank
    string is translated by an empty one. The model is moved to the first accelerator there is,
    unless `device` says otherwise.

    Args:
        model: a VaswaniForConditionalGeneration.
        tokenizer: the tokenizer of its source, and of its target unless that has another.
        target_tokenizer: of the target, where the vocabularies are separate; None, the default,
            looks for it in the subfolder target_tokenizer of the tokenizer's folder.
        max_tokens: a batch holds at most this many padded source tokens (default 4096).
        batch_size: and at most this many sentences (default: as many as fit).
        window: strings read ahead (default 4096); a stream's first result waits for them.
        return_scores: add "score", the log-probability over the length penalty by which beam search
            ranks (section 6.1; default False).
        progress: draw a progress bar for lists and streams; None, the default, draws one only when
            the work takes longer than five seconds.
        **kwargs: for transformers' Pipeline (`device`), else for `generate` (`num_beams=4`), which
            follows the model's generation config in all that is not given.

    All but the first two may be given here, for every call, or to the call itself.

    Raises:
        TypeError: the input or a line of it is no string; names the line.
        ValueError: there is no tokenizer, or none of a separate target vocabulary; a setting is no
            integer or below 1; a line is too long for learned positions, or holds half of a
            surrogate pair; names the line.
    """

    model: Any
    tokenizer: Any
    _load_tokenizer: Any = True
    _load_processor: Any = False
    _load_image_processor: Any = False
    _load_video_processor: Any = False
    _load_feature_extractor: Any = False
    # Settings for `generate` go to it untouched: the Pipeline would merge them with others.
    _pipeline_calls_generate = False

    def __init__(
        self, model: Any, tokenizer: Any = None, target_tokenizer: Any = None, **kwargs: Any
    ) -> None:
        if not hasattr(model, "target_tokenizer"):
            if model.name_or_path:
                check_model_type(model.name_or_path, model.config.model_type, "vaswani")
            raise ValueError(
                f"{type(self).__name__} translates with a VaswaniForConditionalGeneration, not "
                f"with {type(model).__name__}: call its `generate`."
            )
        if tokenizer is None:
            raise ValueError(f"{type(self).__name__} needs the tokenizer of the model.")
        super().__init__(model, tokenizer=tokenizer, **kwargs)
        self.target_tokenizer = target_tokenizer or model.target_tokenizer(self.tokenizer)

    def _sanitize_parameters(
        self, **settings: Any
    ) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        """Sort settings into those of batches, those of `generate`, and those of results (none)."""
        settings.pop("num_workers", None)  # of the data loader that other pipelines have
        names = ("max_tokens", "batch_size", "window", "progress")
        batching = {name: settings.pop(name) for name in names if name in settings}
        for name in ("max_tokens", "batch_size", "window"):
            value = batching.get(name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ValueError(f"{name} must be an integer of at least 1, got {value!r}.")
        return batching, settings, {}

    def __call__(self, inputs: Any, **settings: Any) -> Any:
        """Translate; see the class."""
        batching, generating, _ = self._sanitize_parameters(**settings)
        batching = {"batch_size": self._batch_size, **self._preprocess_params, **batching}
        generating = {**self._forward_params, **generating}
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
        if self._hypotheses(generating) == 1:
            return [translation for (translation,) in results]
        return list(results)

    def _translated(
        self,
        inputs: Iterable[str],
        generating: dict[str, Any],
        max_tokens: int = 4096,
        batch_size: int | None = None,
        window: int = 4096,
        progress: bool | None = None,
    ) -> Iterator[Translations]:
        """Yield the translations of each of `inputs`, window by window."""
        lines, first = iter(inputs), 1
        blank: dict[str, Any] = {"translation_text": ""}
        if generating.get("return_scores"):
            blank["score"] = 0.0  # certain, as the rule that makes it
        bar = logging.tqdm(
            total=len(inputs) if isinstance(inputs, Sized) else None,
            unit=" lines",
            delay=0 if progress else _PROGRESS_AFTER,
            disable=progress is False,
        )
        with bar:
            while chunk := list(itertools.islice(lines, window)):
                ids = self.preprocess(chunk, first)
                results = [[dict(blank) for _ in range(self._hypotheses(generating))] for _ in ids]
                bar.update(sum(not sentence for sentence in ids))
                lengths = [len(sentence) for sentence in ids]
                for batch in batches_by_length(lengths, max_tokens, batch_size):
                    inputs_of_batch = self.tokenizer.pad(
                        {"input_ids": [ids[index] for index in batch]}, return_tensors="pt"
                    )
                    outputs = self.forward(dict(inputs_of_batch), **generating)
                    translations = self.postprocess(outputs)
                    each = len(translations) // len(batch)
                    for row, index in enumerate(batch):
                        results[index] = translations[row * each : (row + 1) * each]
                    bar.update(len(batch))
                yield from results
                first += len(chunk)

    def preprocess(self, lines: list[Any], first: int = 1) -> list[list[int]]:
        """Token ids of `lines`, of which the first has the number `first`; none where blank."""
        for number, line in enumerate(lines, start=first):
            if not isinstance(line, str):
                raise TypeError(
                    f"Line {number} is {line!r}, not a string; of records, choose a column: "
                    "KeyDataset(dataset, name)."
                )
            if flaw := half_character(line):
                raise ValueError(f"Line {number} {flaw}.")
        filled = [index for index, line in enumerate(lines) if line.strip()]
        ids: list[list[int]] = [[] for _ in lines]
        if filled:
            encoded = self.tokenizer([lines[index] for index in filled])["input_ids"]
            for index, sentence in zip(filled, encoded, strict=True):
                ids[index] = sentence
        config = self.model.config
        if config.position_encoding == "learned":
            limit = config.max_position_embeddings
            for number, sentence in enumerate(ids, start=first):
                if len(sentence) > limit:
                    raise ValueError(
                        f"Line {number} has {len(sentence)} tokens, more than the {limit} learned "
                        "positions of the model (max_position_embeddings): split it."
                    )
        return ids

    def _forward(
        self, inputs: dict[str, torch.Tensor], return_scores: bool = False, **generating: Any
    ) -> dict[str, torch.Tensor]:
        """Generate from a padded batch: sequences (B * hypotheses, T) and, on request, scores."""
        generating["return_dict_in_generate"] = return_scores
        with self.model.evaluating():
            output = self.model.generate(**inputs, **generating)
        if not return_scores:
            return {"sequences": output}
        scores = output.get("sequences_scores")
        if scores is None:  # greedy search and sampling keep none
            hypotheses = len(output.sequences) // len(inputs["input_ids"])
            config = generating.get("generation_config")
            penalty = {
                name: generating.get(name, getattr(config, name, None))
                for name in ("length_penalty", "length_penalty_type")
            }
            sources = inputs["input_ids"].repeat_interleave(hypotheses, dim=0)
            scored = self.model.score(sources, output.sequences[:, 1:], **penalty)
            scores = scored.sequences_scores
        return {"sequences": output.sequences, "scores": scores}

    def postprocess(self, outputs: dict[str, torch.Tensor]) -> Translations:
        """Text, and score if there is one, of every sequence."""
        texts = self.target_tokenizer.batch_decode(outputs["sequences"], skip_special_tokens=True)
        translations: Translations = [{"translation_text": text} for text in texts]
        if "scores" in outputs:
            for translation, score in zip(translations, outputs["scores"].tolist(), strict=True):
                translation["score"] = score
        return translations

    def _hypotheses(self, generating: dict[str, Any]) -> int:
        """How many translations a sentence gets."""
        config = generating.get("generation_config")
        given = (
            generating,
            {} if config is None else vars(config),
            vars(self.model.generation_config),
        )
        counts = (settings.get("num_return_sequences") for settings in given)
        return next((count for count in counts if count is not None), 1)


__all__ = ["VaswaniTranslationPipeline"]
