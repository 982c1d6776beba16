"""Evaluation of translations: BLEU, chrF, the paper's BLEU, exact matches, perplexity (section 6).

    scores = evaluate_generation(model, tokenizer, sources, references, num_beams=4)
    scores["bleu"], scores["bleu_signature"], scores["compound_split_bleu"]

Everything works offline. Memory does not grow with the number of sentences, except for their text.
"""

import contextlib
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..configuration.extras import needs
from ..generation.batches_vaswani import batches_by_length
from ..generation.scoring_vaswani import evaluation_mode
from .perplexity import perplexity_of

with needs("vaswani[train]"):
    import datasets
    import evaluate
    from sacrebleu.metrics import BLEU, CHRF

# The Perl regular expression of tensor2tensor and fairseq, which reads bytes: a hyphen between two
# bytes that are not white space. Matches do not overlap, so "a-b-c" is split once.
_HYPHEN = re.compile(rb"(\S)-(\S)")
_SENTENCES_AT_A_TIME = 1000
_MOSES = "moses:"


def split_compounds(tokens: str) -> str:
    r"""Split compounds at their hyphens: "rich-text format" is "rich ##AT##-##AT## text format".

    The result has the same bytes as `perl -ple 's{(\S)-(\S)}{$1 ##AT##-##AT## $2}g'`.
    """
    return _HYPHEN.sub(rb"\1 ##AT##-##AT## \2", tokens.encode()).decode()


class TranslationMetric(evaluate.Metric):
    r"""Scores of translations (section 6.1), as an `evaluate.Metric` that needs no download.

    `compute(predictions=..., references=...)`, after any number of `add_batch`, returns

    - `bleu`, `bleu_signature`, with `precisions` and `brevity_penalty`: sacreBLEU (Post, 2018);
    - `chrf`, `chrf_signature`: character F-score (Popovic, 2015), sacreBLEU's chrF2;
    - `compound_split_bleu`, `compound_split_bleu_signature`: the BLEU of the paper's Table 2 for
      English-German. It is higher than sacreBLEU's (fairseq's big model: 29.3 and 28.6);
    - `exact_match`: percentage of predictions that equal a reference, character by character;
    - `sentences`: the number of scored sentences.

    Compound-split BLEU is the procedure of tensor2tensor's `utils/get_ende_bleu.sh` and fairseq's
    `scripts/compound_split_bleu.sh`. Predictions and references are tokenised. In both, every match
    of `(\S)-(\S)` has its hyphen replaced by " ##AT##-##AT## ". BLEU counts n-grams up to 4 over
    tokens between white space, case-sensitive, without smoothing (Moses' multi-bleu.perl). The
    first script tokenises with Moses' tokenizer.perl for German, and the second expects such text.
    Pass `compound_tokenize="moses:de"`, which needs sacremoses, or text tokenised that way and
    "none".

    Args:
        tokenize: sacreBLEU's tokenizer for BLEU. "none" is for tokenised text.
        lowercase: compare lowercased text, except for exact matches.
        compound_tokenize: sacreBLEU's tokenizer for compound-split BLEU, or "moses:" and a
            language. None means the value of `tokenize`.
        **kwargs: arguments of `evaluate.Metric`, such as cache_dir.

    Raises:
        ImportError, RuntimeError: the package of the tokenizer is not installed.
        ValueError: no tokenizer has this name, or `tokenize` names one of Moses.
    """

    def __init__(
        self,
        tokenize: str = "13a",
        lowercase: bool = False,
        compound_tokenize: str | None = None,
        **kwargs: Any,
    ) -> None:
        self.tokenize = tokenize
        self.lowercase = lowercase
        self.compound_tokenize = tokenize if compound_tokenize is None else compound_tokenize
        if tokenize.startswith(_MOSES):
            raise ValueError(f"sacreBLEU has no tokenizer {tokenize!r}: pass compound_tokenize.")
        _tokenizer(self.tokenize)
        self._compound_tokenizer = _tokenizer(self.compound_tokenize)
        super().__init__(**kwargs)

    def _info(self) -> evaluate.MetricInfo:
        text = datasets.Value("string")
        return evaluate.MetricInfo(
            description="BLEU, chrF, compound-split BLEU and exact matches, with signatures.",
            citation="Post, M. (2018). A Call for Clarity in Reporting BLEU Scores. WMT.",
            inputs_description="predictions: texts; references: a text, or several, for each.",
            features=[
                datasets.Features({"predictions": text, "references": text}),
                datasets.Features({"predictions": text, "references": datasets.Sequence(text)}),
            ],
            reference_urls=["https://github.com/mjpost/sacrebleu"],
        )

    def add_batch(
        self,
        *,
        predictions: Sequence[str] | None = None,
        references: Sequence[str] | Sequence[Sequence[str]] | None = None,
        **kwargs: Any,
    ) -> None:
        """Add predictions and references for `compute`. A batch may be empty."""
        # evaluate reads the first sentence of the first batch to detect multiple references.
        if predictions is None or references is None or len(predictions) or len(references):
            super().add_batch(predictions=predictions, references=references, **kwargs)

    def _compute(
        self, predictions: Sequence[str], references: Sequence[str] | Sequence[Sequence[str]]
    ) -> dict[str, Any]:
        """Sum the statistics over slices of the sentences.

        sacreBLEU would count the n-grams of the whole corpus first, which takes far more memory
        than the text.
        """
        tallies = {
            "bleu": _Tally(BLEU(tokenize=self.tokenize, lowercase=self.lowercase, force=True)),
            "chrf": _Tally(CHRF(lowercase=self.lowercase)),
            "compound_split_bleu": _Tally(
                BLEU(tokenize="none", smooth_method="none", force=True), self._compounds_split
            ),
        }
        exact = 0
        for start in range(0, len(predictions), _SENTENCES_AT_A_TIME):
            rows = slice(start, start + _SENTENCES_AT_A_TIME)
            alternatives = [
                [texts] if isinstance(texts, str) else list(texts) for texts in references[rows]
            ]
            if [] in alternatives:
                raise ValueError(f"Sentence {start + alternatives.index([]) + 1} has no reference.")
            for tally in tallies.values():
                tally.add(predictions[rows], alternatives)
            pairs = zip(predictions[rows], alternatives, strict=True)
            exact += sum(text in accepted for text, accepted in pairs)
        scores: dict[str, Any] = {}
        for name, tally in tallies.items():
            result = tally.score()
            scores[name] = result.score
            scores[f"{name}_signature"] = tally.signature()
            if name == "bleu":
                scores |= {"precisions": list(result.precisions), "brevity_penalty": result.bp}
        scores["compound_split_bleu_signature"] = self._compound_signature(
            tallies["compound_split_bleu"]
        )
        return scores | {
            "exact_match": 100 * exact / len(predictions),
            "sentences": len(predictions),
        }

    def _compounds_split(self, text: str) -> str:
        text = text.lower() if self.lowercase else text
        return split_compounds(self._compound_tokenizer(text.rstrip()))

    def _compound_signature(self, tally: "_Tally") -> str:
        """Return sacreBLEU's signature with the case and the tokenizer applied before."""
        signature = tally.metric.get_signature()
        signature.update("case", "lc" if self.lowercase else "mixed")
        signature.update("tok", f"{self.compound_tokenize}+compound-split")
        return str(signature)


def _tokenizer(name: str) -> Callable[[str], str]:
    """Return a tokenizer of sacreBLEU, or the Moses tokenizer of a language."""
    if name.startswith(_MOSES):
        try:
            from sacremoses import MosesTokenizer
        except ImportError as error:
            raise ImportError(
                f"The tokenizer {name!r} needs sacremoses: pip install sacremoses."
            ) from error
        moses = MosesTokenizer(lang=name.removeprefix(_MOSES))
        return lambda text: moses.tokenize(text, return_str=True)
    if name not in BLEU.TOKENIZERS:
        raise ValueError(
            f"There is no tokenizer {name!r}; choose one of {', '.join(map(str, BLEU.TOKENIZERS))}."
        )
    return BLEU(tokenize=name, force=True).tokenizer


class _Tally:
    """The statistics of a sacreBLEU metric, summed sentence by sentence.

    It calls two private methods that every metric of sacreBLEU >= 2.0 has for its bootstrap.
    """

    def __init__(self, metric: BLEU | CHRF, prepare: Callable[[str], str] = str) -> None:
        self.metric = metric
        self.prepare = prepare
        self.sums: list[int] = []
        self.reference_counts: set[int] = set()

    def add(self, predictions: Sequence[str], references: Sequence[Sequence[str]]) -> None:
        self.reference_counts |= {len(alternatives) for alternatives in references}
        prepared = [[self.prepare(text) for text in alternatives] for alternatives in references]
        statistics = self.metric._extract_corpus_statistics(
            [self.prepare(text) for text in predictions], list(itertools.zip_longest(*prepared))
        )
        if not self.sums:
            self.sums = [0] * len(statistics[0])
        self.sums = [sum(column) for column in zip(self.sums, *statistics, strict=True)]

    def score(self) -> Any:
        return self.metric._compute_score_from_stats(list(self.sums))

    def signature(self) -> str:
        varies = len(self.reference_counts) > 1
        self.metric.num_refs = -1 if varies else next(iter(self.reference_counts))
        return str(self.metric.get_signature())


def generate_texts(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    sources: Iterable[str],
    *,
    target_tokenizer: PreTrainedTokenizerBase | None = None,
    batch_tokens: int = 4096,
    window: int = 2048,
    **generate_kwargs: Any,
) -> Iterator[str]:
    """Translate any number of lines in order, with one window of them in memory (section 6.1).

    Sentences of similar length in a window share a batch. A blank line gives "".

    Args:
        model: the model. It translates in evaluation mode, and its mode is restored afterwards.
        tokenizer: tokenizer of the source.
        sources: the lines, read only when needed.
        target_tokenizer: tokenizer of the target; None, the default, looks for it in the subfolder
            target_tokenizer of the tokenizer's folder.
        batch_tokens: largest number of padded source tokens in a batch. A longer sentence has a
            batch of its own.
        window: number of lines that are sorted together.
        **generate_kwargs: arguments of `generate`, such as num_beams=4.

    Raises:
        ValueError: batch_tokens or window is less than 1, or num_return_sequences is not 1.
    """
    for name, value in (("batch_tokens", batch_tokens), ("window", window)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}.")
    if generate_kwargs.get("num_return_sequences", 1) != 1:
        raise ValueError(
            f"num_return_sequences must be 1, got {generate_kwargs['num_return_sequences']}: every "
            "line has one translation here."
        )
    generate: Any = model.generate
    target_tokenizer = _target_tokenizer_of(model, tokenizer, target_tokenizer)
    lines = iter(sources)
    while chunk := list(itertools.islice(lines, window)):
        filled = [index for index, line in enumerate(chunk) if line.strip()]
        token_ids = tokenizer([chunk[index] for index in filled])["input_ids"] if filled else []
        texts = [""] * len(chunk)
        lengths = [(len(ids),) for ids in token_ids]
        for batch in batches_by_length(lengths, batch_tokens):
            inputs = tokenizer.pad(
                {"input_ids": [token_ids[row] for row in batch]},
                padding_side="right",
                return_tensors="pt",
            ).to(model.device)
            with evaluation_mode(model):
                output = generate(**inputs, **generate_kwargs)
            decoded = target_tokenizer.batch_decode(
                getattr(output, "sequences", output), skip_special_tokens=True
            )
            for row, text in zip(batch, decoded, strict=True):
                texts[filled[row]] = text
        yield from texts


def _target_tokenizer_of(model: Any, tokenizer: Any, target_tokenizer: Any) -> Any:
    """Return the tokenizer of the target."""
    if target_tokenizer is None and hasattr(model, "target_tokenizer"):
        return model.target_tokenizer(tokenizer)
    return target_tokenizer or tokenizer


def evaluate_generation(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    sources: Iterable[str],
    references: Iterable[str] | Iterable[Sequence[str]],
    metric: evaluate.Metric | None = None,
    *,
    target_tokenizer: PreTrainedTokenizerBase | None = None,
    batch_tokens: int = 4096,
    window: int = 2048,
    **generate_kwargs: Any,
) -> dict[str, Any]:
    """Translate and score sentence pairs as they are read, with bounded memory (section 6.1).

    The scores equal those of scoring all translations at once. `evaluate` keeps the texts on disk,
    and the model's outputs are not kept.

    Args:
        model, tokenizer, target_tokenizer, batch_tokens, window: as for `generate_texts`.
        sources: source lines.
        references: one translation, or several, for each line.
        metric: an `evaluate.Metric` of predictions and references. None means
            `TranslationMetric()`.
        **generate_kwargs: arguments of `generate`, such as num_beams=4. By default, the
            checkpoint's generation config decides.

    Raises:
        ValueError: there are no lines, or the numbers of sources and references differ.
    """
    metric = TranslationMetric() if metric is None else metric
    target_tokenizer = _target_tokenizer_of(model, tokenizer, target_tokenizer)
    done = 0
    try:
        for chunk in _chunks_of_pairs(sources, references, window):
            predictions = generate_texts(
                model,
                tokenizer,
                [source for source, _ in chunk],
                target_tokenizer=target_tokenizer,
                batch_tokens=batch_tokens,
                window=window,
                **generate_kwargs,
            )
            metric.add_batch(
                predictions=list(predictions), references=[reference for _, reference in chunk]
            )
            done += len(chunk)
    except BaseException:
        with contextlib.suppress(Exception):
            metric.compute()  # forgets the sentences, which must not count in the next call
        raise
    if not done:
        raise ValueError("There is nothing to evaluate: sources and references hold no line.")
    return metric.compute()


def _chunks_of_pairs(
    sources: Iterable[str], references: Iterable[Any], size: int
) -> Iterator[list[tuple[str, Any]]]:
    """Yield sources with their references, and refuse unequal numbers of them."""
    pairs = itertools.zip_longest(sources, references)
    done = 0
    while chunk := list(itertools.islice(pairs, size)):
        for number, (source, reference) in enumerate(chunk, start=done + 1):
            if source is None or reference is None:
                sides = ("sources", "references")
                ended, longer = sides if source is None else sides[::-1]
                raise ValueError(
                    f"There are more {longer} than {ended}: the {ended} end after line "
                    f"{number - 1}. Every source needs a reference."
                )
        yield chunk
        done += len(chunk)


def nbest_accuracy(candidates: Iterable[Sequence[str]], references: Iterable[str]) -> list[float]:
    """Return the percentages of references among the first 1, 2, ... candidates.

    The result has as many percentages as the shortest list has candidates.

    Raises:
        ValueError: there are no candidates, or the numbers of lists and references differ.
    """
    found: list[int] = []
    lines = 0
    for texts, reference in itertools.zip_longest(candidates, references):
        if texts is None or reference is None:
            raise ValueError(
                f"Candidates and references differ in number: one of them ends after line {lines}."
            )
        found = found[: len(texts)] if lines else [0] * len(texts)
        lines += 1
        rank = texts.index(reference) if reference in texts else len(texts)
        found = [count + (rank <= place) for place, count in enumerate(found)]
    if not lines:
        raise ValueError("There is nothing to count: candidates and references hold no line.")
    return [100 * count / lines for count in found]


@torch.no_grad()
def _is_language_model(model: Any) -> bool:
    """Tell whether a model generates text without an encoder."""
    translates = getattr(getattr(model, "config", None), "is_encoder_decoder", True)
    return not translates and model.can_generate()


def evaluate_perplexity(
    model: nn.Module, batches: Iterable[Mapping[str, torch.Tensor]]
) -> dict[str, float]:
    """Return the perplexity per target token: exp of the mean negative log-likelihood (Table 3).

    In evaluation mode this model's loss has no label smoothing (5.4). All target tokens have the
    same weight, so that the result does not depend on the batches. The Trainer's `eval_loss`
    differs: it averages the means of batches with different numbers of tokens, and
    `label_smoothing_factor` smooths it.

    Args:
        model: a model whose loss is the mean over the real target tokens of a batch.
        batches: model inputs with `labels`, which are -100 at padding. For a language model, they
            also have `shift_labels`, in which each label stands at the token before it.

    Returns:
        `loss` in nats per token, `perplexity`, and the number of `target_tokens`. To combine
        several processes, average their losses weighted by target_tokens.

    Raises:
        ValueError: there is no target token, or a batch has no labels that can be counted.
    """
    device = next(model.parameters()).device
    total, tokens = 0.0, 0
    is_language_model = _is_language_model(model)
    with evaluation_mode(model):
        for batch in batches:
            if "labels" not in batch:
                raise ValueError(f"A batch has no labels, only {', '.join(sorted(batch))}.")
            shifted = batch.get("shift_labels")
            if is_language_model and shifted is None:
                raise ValueError(
                    f"{type(model).__name__} shifts labels by itself, so its predictions cannot be "
                    "counted: add shift_labels to the batches."
                )
            count = int(((batch["labels"] if shifted is None else shifted) != -100).sum())
            if count:
                inputs = {
                    name: value.to(device) if isinstance(value, torch.Tensor) else value
                    for name, value in batch.items()
                }
                total += model(**inputs).loss.item() * count
                tokens += count
    if not tokens:
        raise ValueError("There is no target token: no batch was given, or all labels are -100.")
    loss = total / tokens
    return {"loss": loss, "perplexity": perplexity_of(loss), "target_tokens": tokens}
