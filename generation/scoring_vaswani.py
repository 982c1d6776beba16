"""Forced decoding: what the model makes of translations that are already there.

`score` gives their log-probabilities, as beam search ranks by them (section 6.1); `align` says
which source word every target word looked at, from the encoder-decoder attention (section 3.2.3).

Shapes: N pairs; B pairs of one batch; S source tokens, T target tokens, H heads, D = d_model,
V entries of the target vocabulary.
"""

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from transformers.utils import cached_file

from .search_vaswani import length_penalty as length_penalty_of

# Logits of one chunk of tokens, whatever the batch: 64 MiB in float32.
_LOGITS_AT_ONCE = 2**24

Sentences = Sequence[str] | Sequence[Sequence[int]] | Sequence[torch.Tensor] | torch.Tensor


@dataclass(frozen=True)
class VaswaniScores:
    """What `score` found, in the order of the pairs, on the CPU, in float32 or the model's float64.

    Args:
        log_probs: for every pair, the log-probabilities of its target tokens, (T,).
        sums: their sums, (N,).
        sequences_scores: the sums over the length penalty, (N,): what beam search ranks by (6.1).
    """

    log_probs: list[torch.Tensor]
    sums: torch.Tensor
    sequences_scores: torch.Tensor

    def __repr__(self) -> str:
        """Print as a table: a line for each pair."""
        rows = zip(self.log_probs, self.sums, self.sequences_scores, strict=True)
        lines = [
            f"{number:>5}  {len(log_probs):>6}  {total:>8.3f}  {penalised:>8.3f}  "
            f"{total / max(len(log_probs), 1):>9.3f}"
            for number, (log_probs, total, penalised) in enumerate(rows)
        ]
        return "\n".join([" pair  tokens       sum     score  per token", *lines])


def batches_by_length(lengths: Sequence[tuple[int, int]], max_tokens: int) -> Iterator[list[int]]:
    """Group the indices of pairs of similar (source, target) lengths, the longest pairs first.

    No batch is padded to more than `max_tokens` on either side, unless one pair alone is longer.
    """
    batch: list[int] = []
    width = 0
    for index in sorted(range(len(lengths)), key=lambda i: (-max(lengths[i]), *lengths[i], i)):
        if batch and (len(batch) + 1) * width > max_tokens:
            yield batch
            batch = []
        width = width if batch else max(lengths[index])
        batch.append(index)
    if batch:
        yield batch


class VaswaniScoringMixin:
    """`score`, `align` and `soft_align` of a model that generates."""

    config: Any
    generation_config: Any
    model: Any
    lm_head: Any
    device: Any
    modules: Any
    eval: Any
    prepare_decoder_input_ids_from_labels: Any

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Evaluate without gradients; afterwards every module trains again that trained before."""
        modules = list(self.modules())
        modes = [module.training for module in modules]
        self.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            for module, mode in zip(modules, modes, strict=True):
                module.training = mode

    def score(
        self,
        sources: Sentences,
        targets: Sentences,
        tokenizer: Any = None,
        *,
        target_tokenizer: Any = None,
        max_tokens: int = 4096,
        length_penalty: float | None = None,
        length_penalty_type: Literal["gnmt", "hf"] | None = None,
    ) -> VaswaniScores:
        """Log-probabilities of given translations, token by token, by forced decoding.

        Dropout and label smoothing are off. Pairs go through the network in batches by length, and
        the logits of few tokens at a time are held.

        Args:
            sources: strings, or token ids as the tokenizer gives them, one sequence a sentence;
                padding at the end (pad_token_id, -100) is left out, as are pad tokens that a model
                wrote there itself.
            targets: likewise, one for each source. Token ids are labels: without the decoder's
                start token, so `sequences[:, 1:]` of what `generate` returns. A prefix that the
                call gave counts among them, and is scored too.
            tokenizer: for strings; it ends them by "</s>", which counts as a target token.
            target_tokenizer: of the targets, where vocabularies are separate; None, the default,
                looks for it in the subfolder target_tokenizer of the tokenizer's folder.
            max_tokens: a batch holds at most this many padded tokens on either side.
            length_penalty: the exponent alpha of `sequences_scores`; None takes it, and
                `length_penalty_type`, from the generation config.

        Raises:
            TypeError: sources or targets are one string, or hold something else than sentences.
            ValueError: their numbers differ; a sentence has no tokens, one outside the vocabulary
                or too many for learned positions; strings come without a tokenizer.
        """
        pairs = self._pairs(sources, targets, tokenizer, target_tokenizer)
        log_probs: list[torch.Tensor] = [torch.empty(0)] * len(pairs)
        with self.evaluating():
            for rows, inputs, labels in self._forced_batches(pairs, max_tokens):
                states = self.model(**inputs, use_cache=False).last_hidden_state  # (B, T, D)
                labels = labels.to(states.device)
                real = labels != -100
                values = self._token_log_probs(states[real], labels[real]).cpu()
                for row, value in zip(rows, values.split(real.sum(1).tolist()), strict=True):
                    log_probs[row] = value
        sums = torch.stack([values.sum() for values in log_probs]) if pairs else torch.zeros(0)
        settings = self.generation_config
        if length_penalty is None:
            length_penalty = getattr(settings, "length_penalty", None)
        if length_penalty_type is None:
            length_penalty_type = getattr(settings, "length_penalty_type", None)
        alpha = 1.0 if length_penalty is None else float(length_penalty)
        lengths = torch.tensor([len(values) for values in log_probs], dtype=sums.dtype)
        penalties = length_penalty_of(lengths, alpha, length_penalty_type)
        return VaswaniScores(log_probs, sums, sums / penalties)

    def align(
        self,
        sources: Sentences,
        targets: Sentences,
        tokenizer: Any = None,
        *,
        target_tokenizer: Any = None,
        level: Literal["word", "token"] | None = None,
        layer: int | Iterable[int] | None = None,
        heads: Iterable[int] | None = None,
        with_eos: bool = False,
        max_tokens: int = 4096,
    ) -> list[str]:
        """Links of given translations as "0-0 1-2" (Pharaoh: source-target, counted from 0).

        Every target token is linked to one source token, that to which the decoder attends most at
        the step that predicts it. Words, which are what stands between white space, are linked
        where tokens of theirs are.

        Args:
            sources: strings or token ids, as for `score`.
            targets: likewise.
            tokenizer: for strings.
            target_tokenizer: as for `score`.
            level: link "word"s, which needs strings, or "token"s; None is words of strings and
                tokens of token ids.
            layer: a decoder layer, negative from the last, or several to average; None is all. One
                alone may align better: with six, the last but one (Garg et al., 2019).
            heads: those to average; None is all.
            with_eos: link the "</s>" of both sides too, at token level.
            max_tokens: a batch holds at most this many padded tokens on either side.

        Raises:
            TypeError: as `score`.
            ValueError: as `score`; or there is no such layer, head or level.
        """
        if level not in (None, "word", "token"):
            raise ValueError(f"level must be 'word' or 'token', got {level!r}.")
        sides: list[Any] = [
            side if isinstance(side, str) else list(side) for side in (sources, targets)
        ]
        texts = tokenizer is not None and all(
            isinstance(side, list) and all(isinstance(sentence, str) for sentence in side)
            for side in sides
        )
        if level == "word" and not texts:
            raise ValueError("level='word' needs strings and the tokenizer.")
        words = level != "token" and texts and all(sides)
        if words:
            encoded = (
                tokenizer(sides[0], return_offsets_mapping=True),
                (target_tokenizer or self.target_tokenizer(tokenizer))(
                    text_target=sides[1], return_offsets_mapping=True
                ),
            )
            pairs = self._pairs(encoded[0]["input_ids"], encoded[1]["input_ids"], None, None)
        else:
            pairs = self._pairs(sides[0], sides[1], tokenizer, target_tokenizer)
        links = [""] * len(pairs)
        for row, weights in self._attention(pairs, layer, heads, max_tokens):
            # Of every token, the numbers that its links may have; "</s>" and spaces have none.
            if words:
                units = [
                    words_of_tokens(text[row], side["offset_mapping"][row])
                    for text, side in zip(sides, encoded, strict=True)
                ]
            else:
                units = [self._tokens(ids, with_eos) for ids in pairs[row]]
            linkable = [index for index, numbers in enumerate(units[0]) if numbers]
            if not linkable:
                continue
            best = weights[:, linkable].argmax(dim=1).tolist()  # (T,)
            linked = {
                (target, source)
                for token, numbers in enumerate(units[1])
                for target in numbers
                for source in units[0][linkable[best[token]]]
            }
            links[row] = " ".join(f"{source}-{target}" for target, source in sorted(linked))
        return links

    def soft_align(
        self,
        sources: Sentences,
        targets: Sentences,
        tokenizer: Any = None,
        *,
        target_tokenizer: Any = None,
        layer: int | Iterable[int] | None = None,
        heads: Iterable[int] | None = None,
        max_tokens: int = 4096,
    ) -> list[torch.Tensor]:
        """The attention that `align` links by: (T, S) a pair, over all tokens, on the CPU.

        Arguments and errors are those of `align`. Rows sum to 1, "</s>" included.
        """
        pairs = self._pairs(sources, targets, tokenizer, target_tokenizer)
        weights = dict(self._attention(pairs, layer, heads, max_tokens))
        return [weights[row] for row in range(len(pairs))]

    def target_tokenizer(self, tokenizer: Any) -> Any:
        """Find the target's tokenizer: the source's own, or one in its folder's target_tokenizer/.

        Raises:
            OSError: a file of the folder is damaged.
            ValueError: the target has a vocabulary of its own, and no such folder is there, or it
                cannot be looked for.
        """
        config, folder = self.config, tokenizer.name_or_path
        if config.share_encoder_decoder_embeddings:
            return tokenizer
        if folder:
            origin = getattr(tokenizer, "origin", {})
            try:
                found = cached_file(
                    folder,
                    "target_tokenizer/tokenizer.json",
                    _raise_exceptions_for_missing_entries=False,
                    **origin,
                )
            except OSError as error:
                raise ValueError(
                    f"Whether {folder} has a subfolder target_tokenizer cannot be found out, so "
                    f"pass target_tokenizer: {error}"
                ) from error
            if found is not None:
                reader = type(tokenizer)
                return reader.from_pretrained(folder, subfolder="target_tokenizer", **origin)
        if config.vocab_size == config.decoder_vocab_size:
            return tokenizer  # one vocabulary with two tables of embeddings
        raise ValueError(
            f"The target has a vocabulary of its own, of {config.decoder_vocab_size} tokens, but "
            f"{folder or 'the tokenizer'} has no subfolder target_tokenizer: pass "
            "target_tokenizer."
        )

    def _token_log_probs(self, states: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Log-probability of each of `targets` (B * T,) after its state (B * T, D)."""
        rows = max(_LOGITS_AT_ONCE // (self.config.decoder_vocab_size or 1), 1)
        parts = []
        for chunk, gold in zip(states.split(rows), targets.split(rows), strict=True):
            logits = self.lm_head(chunk)  # (rows, V)
            logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
            at_target = logits.gather(1, gold[:, None]).squeeze(1)
            parts.append(at_target - logits.logsumexp(dim=1))
        return torch.cat(parts)

    def _attention(
        self,
        pairs: list[tuple[list[int], list[int]]],
        layer: int | Iterable[int] | None,
        heads: Iterable[int] | None,
        max_tokens: int,
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield every pair's index and its attention to the source, (T, S), in any order."""
        layers = self.model.decoder.layers
        every = range(len(layers)) if layer is None else layer
        wanted = [every] if isinstance(every, int) else every
        chosen = [layers[index] for index in _checked("layer", wanted, len(layers), "layers")]
        head_count = self.config.decoder_attention_heads
        every = range(head_count) if heads is None else heads
        chosen_heads = _checked("heads", every, head_count, "heads")
        for rows, inputs, _ in self._forced_batches(pairs, max_tokens):
            with self.evaluating():
                weights = self._source_attention(inputs, chosen, chosen_heads).cpu()  # (B, T, S)
            for row, weight in zip(rows, weights, strict=True):
                source, target = map(len, pairs[row])
                yield row, weight[:target, :source]

    def _source_attention(
        self, inputs: dict[str, torch.Tensor], layers: list[Any], heads: list[int]
    ) -> torch.Tensor:
        """Average the attention of the given layers and heads over a batch: (B, T, S).

        The weights are computed beside the model's own attention, whose fused kernels keep none.
        """
        seen: list[torch.Tensor] = []
        padding = inputs["attention_mask"][:, None, None] == 0  # (B, 1, 1, S)

        def watch(attention: Any, given: tuple[torch.Tensor, ...]) -> None:
            projected = (attention.q_proj(given[0]), attention.k_proj(given[1]))
            query, key = (
                attention._split_heads(states, attention.d_k)[:, heads] for states in projected
            )  # (B, H, T or S, d_k)
            scores = query @ key.transpose(-2, -1) * attention.scaling
            scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
            scores = scores.masked_fill(padding.to(scores.device), float("-inf"))
            seen.append(scores.softmax(dim=-1).mean(dim=1))

        with contextlib.ExitStack() as watched:
            for layer in layers:
                watched.enter_context(layer.encoder_attn.register_forward_pre_hook(watch))
            self.model(**inputs, use_cache=False)
        return torch.stack([weights.to(seen[0].device) for weights in seen]).mean(dim=0)

    def _forced_batches(
        self, pairs: list[tuple[list[int], list[int]]], max_tokens: int
    ) -> Iterator[tuple[list[int], dict[str, torch.Tensor], torch.Tensor]]:
        """Yield indices of pairs, the model's inputs for them, and their labels (B, T)."""
        if max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {max_tokens}.")
        device = self.device
        for rows in batches_by_length([(len(s), len(t)) for s, t in pairs], max_tokens):
            source = _padded([pairs[row][0] for row in rows], device)  # (B, S)
            labels = _padded([pairs[row][1] for row in rows], device)  # (B, T)
            prefix = self.prepare_decoder_input_ids_from_labels(labels)
            prefix[:, 0] = self._token_id("decoder_start_token_id")
            inputs = {
                "input_ids": source.masked_fill(source == -100, self.config.pad_token_id or 0),
                "attention_mask": (source != -100).long(),
                "decoder_input_ids": prefix,
            }
            yield rows, inputs, labels

    def _pairs(
        self, sources: Sentences, targets: Sentences, tokenizer: Any, target_tokenizer: Any
    ) -> list[tuple[list[int], list[int]]]:
        """Token ids of both sides, checked."""
        config = self.config

        def read_source(texts: list[str]) -> Any:
            return tokenizer(texts)["input_ids"]

        def read_target(texts: list[str]) -> Any:
            reader = target_tokenizer or self.target_tokenizer(tokenizer)
            return reader(text_target=texts)["input_ids"]

        readers = (read_source, read_target) if tokenizer is not None else (None, None)
        source_ids = self._token_ids("sources", sources, readers[0], config.vocab_size)
        target_ids = self._token_ids("targets", targets, readers[1], config.decoder_vocab_size)
        if len(source_ids) != len(target_ids):
            raise ValueError(
                f"There are {len(source_ids)} sources and {len(target_ids)} targets: every source "
                "needs one target; repeat a source that has several."
            )
        return list(zip(source_ids, target_ids, strict=True))

    def _token_ids(
        self, name: str, sentences: Sentences, read: Callable | None, vocab_size: int
    ) -> list[list[int]]:
        if isinstance(sentences, str):
            raise TypeError(f"{name} is one string: pass a list of strings, such as [text].")
        rows: list[Any] = list(sentences)
        if any(isinstance(row, str) for row in rows):
            for index, row in enumerate(rows):
                if not isinstance(row, str):
                    raise TypeError(f"{name}[{index}] is {row!r}, but others are strings.")
            if read is None:
                raise ValueError(f"{name} are strings: pass the tokenizer too, or token ids.")
            rows = read(rows)
        limit = self.config.max_position_embeddings
        if self.config.position_encoding != "learned":
            limit = None
        checked = []
        for index, row in enumerate(rows):
            place = f"{name}[{index}]"
            ids = row.tolist() if hasattr(row, "tolist") else row
            if not isinstance(ids, Sequence) or not all(type(entry) is int for entry in ids):
                raise TypeError(
                    f"{place} must be a string or a sequence of token ids, got {row!r}."
                )
            ids = self._without_padding(ids)
            if not ids:
                raise ValueError(f"{place} has no tokens: even an empty sentence has its </s>.")
            if (wrong := min(ids)) < 0 or (wrong := max(ids)) >= vocab_size:
                raise ValueError(
                    f"{place} has the token id {wrong}, outside the {vocab_size} entries of the "
                    "vocabulary: check that tokenizer and model belong together."
                )
            if limit is not None and len(ids) > limit:
                raise ValueError(
                    f"{place} has {len(ids)} tokens, more than the {limit} learned positions "
                    "(max_position_embeddings): shorten it."
                )
            checked.append(ids)
        return checked

    def _without_padding(self, ids: Sequence[int]) -> list[int]:
        pad, end = self._token_id("pad_token_id"), len(ids)
        while end and ids[end - 1] in (pad, -100):
            end -= 1
        ends = self._eos_token_ids()
        if end < len(ids) and ids[end] in ends and not (end and ids[end - 1] in ends):
            end += 1  # where "</s>" is the padding too, the first one ends the sentence
        return list(ids[:end])

    def _tokens(self, ids: list[int], with_eos: bool) -> list[list[int]]:
        """Every token's own position; the "</s>" at the end may have none."""
        ended = ids[-1] in self._eos_token_ids() and not with_eos
        return [[position] for position in range(len(ids) - ended)] + [[]] * ended

    def _eos_token_ids(self) -> list[int | None]:
        eos = self._token_id("eos_token_id")
        return eos if isinstance(eos, list) else [eos]

    def _token_id(self, name: str) -> Any:
        """Look up a special token where `generate` does: in the generation config first."""
        found = getattr(self.generation_config, name, None)
        return getattr(self.config, name) if found is None else found


def _padded(rows: list[list[int]], device: torch.device) -> torch.Tensor:
    """Rows of different lengths with -100 behind them."""
    tensors = [torch.tensor(row) for row in rows]
    padded = torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_value=-100)
    return padded.to(device)


def _checked(name: str, indices: Iterable[int], count: int, things: str) -> list[int]:
    """Turn indices, negative ones too, into positions among `count` things."""
    indices = list(indices)
    wrong = [index for index in indices if not -count <= index < count]
    if wrong or not indices:
        raise ValueError(
            f"{name} must name some of the {count} {things} (0 to {count - 1}, negative from the "
            f"last), got {wrong or indices}."
        )
    return [index % count for index in indices]


def words_of_tokens(text: str, offsets: list[tuple[int, int]]) -> list[list[int]]:
    """For every token of `text`, the numbers of the words whose characters it covers."""
    word_at: list[int | None] = [None] * len(text)
    for number, match in enumerate(re.finditer(r"\S+", text)):
        word_at[match.start() : match.end()] = [number] * len(match.group())
    return [
        sorted({word for word in word_at[start:end] if word is not None}) for start, end in offsets
    ]


__all__ = ["VaswaniScores", "VaswaniScoringMixin", "words_of_tokens"]
