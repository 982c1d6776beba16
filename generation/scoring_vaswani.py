"""Forced decoding: scores and word alignments of given translations.

`score` returns their log-probabilities, by which beam search ranks (section 6.1). `align` links
each target word to the source word that it attends to most, by the encoder-decoder attention
(section 3.2.3).

Shapes: N pairs; B pairs of one batch; S source tokens, T target tokens, H heads, D = d_model,
V entries of the target vocabulary.
"""

import contextlib
import copy
import itertools
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from transformers import PreTrainedTokenizerBase
from transformers.utils import cached_file

from .batches_vaswani import batches_by_length
from .limits_vaswani import check_position_limit
from .links_vaswani import linked_units, links_of, words_of_tokens
from .rules_vaswani import length_penalty as length_penalty_of
from .settings_vaswani import check_penalty, first_setting

_LOGITS_AT_ONCE = 2**24  # logits in memory at a time: 64 MiB in float32
_TOKENS_AT_ONCE = 4096  # padded target tokens of a batch of generated sentences

# For each module in `evaluation_mode`: the number of open calls, and the module's mode before the
# first call. The lock guards this table, because several threads may evaluate one model.
_evaluated: weakref.WeakKeyDictionary[torch.nn.Module, tuple[int, bool]] = (
    weakref.WeakKeyDictionary()
)
_evaluated_lock = threading.Lock()

Sentences = Sequence[str] | Sequence[Sequence[int]] | Sequence[torch.Tensor] | torch.Tensor


def _has_target_tokenizer(folder: str, **origin: Any) -> bool:
    """Tell whether a folder or a repository of the Hub has a tokenizer for the target alone."""
    file = "target_tokenizer/tokenizer.json"
    if os.path.isdir(folder):
        return os.path.isfile(os.path.join(folder, file))
    return (
        cached_file(folder, file, _raise_exceptions_for_missing_entries=False, **origin) is not None
    )


def _have_same_tokens(left: Any, right: Any, size: int) -> bool:
    """Tell whether the first `size` tokens of two tokenizers have the same ids."""
    vocabularies = [
        {token: number for token, number in tokenizer.get_vocab().items() if number < size}
        for tokenizer in (left, right)
    ]
    return vocabularies[0] == vocabularies[1]


@dataclass(frozen=True)
class VaswaniScores:
    """Scores of sentence pairs, in their order, on the CPU, in float32 or the model's float64.

    Args:
        log_probs: the log-probabilities of the target tokens of each pair, (T,).
        sums: their sums, (N,).
        sequences_scores: the sums divided by the length penalty, (N,). Beam search ranks by these
            scores (6.1).
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


@contextlib.contextmanager
def evaluation_mode(model: Any) -> Iterator[None]:
    """Set all modules to evaluation; afterwards each module returns to its own mode.

    Several threads may evaluate a model. The last thread that leaves restores the modes.
    """
    modules = list(model.modules())
    with _evaluated_lock:
        for module in modules:
            count, training = _evaluated.get(module, (0, module.training))
            _evaluated[module] = count + 1, training
    try:
        model.eval()
        yield
    finally:
        with _evaluated_lock:
            for module in modules:
                count, training = _evaluated.pop(module)
                if count == 1:
                    module.training = training
                else:
                    _evaluated[module] = count - 1, training


def sharing_copy(model: Any) -> Any:
    """Copy the modules of a model, but share all parameters and buffers.

    Settings and hooks of the copy do not change the model, which other threads may use at the same
    time. Wrappers of torch.compile are left out, because compiled code may ignore new hooks. A
    model whose weights are divided among processes cannot be copied. Then this is the model itself.
    """
    # FSDP2 and tensor parallelism mark parameters by device_mesh, DeepSpeed ZeRO-3 by ds_id.
    if any(hasattr(part, "device_mesh") or hasattr(part, "ds_id") for part in model.parameters()):
        return model
    # Hooks of Accelerate hold offloaded weights, so the copy shares them too.
    hooks = (vars(module)["_hf_hook"] for module in model.modules() if "_hf_hook" in vars(module))
    shared = list(itertools.chain(model.parameters(), model.buffers(), hooks))
    return _without_compilation(copy.deepcopy(model, {id(part): part for part in shared}))


def _without_compilation(module: Any) -> Any:
    """Replace the wrappers of torch.compile in a module by the modules in them."""
    for name, child in module._modules.items():
        if child is not None:
            module._modules[name] = _without_compilation(child)
    return getattr(module, "_orig_mod", module)


class VaswaniScoringMixin:
    """`score`, `align` and `soft_align`, for a model that generates."""

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
        """Evaluate without gradients; afterwards each module returns to its own mode."""
        with evaluation_mode(self), torch.no_grad():
            yield

    def score(
        self,
        sources: Sentences,
        targets: Sentences,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        target_tokenizer: PreTrainedTokenizerBase | None = None,
        max_tokens: int = 4096,
        length_penalty: float | None = None,
        length_penalty_type: Literal["gnmt", "hf"] | None = None,
    ) -> VaswaniScores:
        """Return the log-probabilities of given translations, token by token, by forced decoding.

        Dropout and label smoothing are off. The network reads batches of pairs of similar length.
        Only the logits of a chunk of tokens are in memory at a time.

        Args:
            sources: strings, or the tokenizer's token ids of each sentence. Padding on both
                sides (pad_token_id, -100) is left out.
            targets: likewise, one for each source. Token ids are labels, without the decoder's
                start token: `sequences[:, 1:]` of what `generate` returns. A prefix that was given
                to `generate` is scored too.
            tokenizer: tokenizer of strings. It adds the end token "</s>", which counts as a target
                token.
            target_tokenizer: tokenizer of target strings; None, the default, looks for it in the
                subfolder target_tokenizer of the tokenizer's folder.
            max_tokens: padded tokens of a batch on either side, at most.
            length_penalty: the exponent alpha of `sequences_scores`; None takes it from the
                generation config.
            length_penalty_type: likewise.

        Raises:
            TypeError: sources or targets are one string, or hold something else than sentences.
            ValueError: their numbers differ; a sentence is empty or too long for learned positions;
                a token is outside the vocabulary; a tokenizer is missing; the penalty is invalid.
        """
        call = {"length_penalty": length_penalty, "length_penalty_type": length_penalty_type}
        check_penalty(**call)
        pairs = self._pairs(sources, targets, tokenizer, target_tokenizer)
        log_probs: list[torch.Tensor] = [torch.empty(0)] * len(pairs)
        with self.evaluating():
            for rows, inputs, labels in self._forced_batches(pairs, max_tokens):
                states = self.model(**inputs, use_cache=False, return_dict=True)[0]  # (B, T, D)
                labels = labels.to(states.device)
                real = labels != -100
                values = self._token_log_probs(states[real], labels[real]).cpu()
                for row, value in zip(rows, values.split(real.sum(1).tolist()), strict=True):
                    log_probs[row] = value
        found = [values.sum() for values in log_probs]
        sums = torch.stack(found) if found else torch.zeros(0, device="cpu")
        lengths = sums.new_tensor([len(values) for values in log_probs])
        return VaswaniScores(log_probs, sums, sums / self._penalties(lengths, call))

    def align(
        self,
        sources: Sentences,
        targets: Sentences,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        target_tokenizer: PreTrainedTokenizerBase | None = None,
        level: Literal["word", "token"] | None = None,
        layer: int | Iterable[int] | None = None,
        heads: Iterable[int] | None = None,
        with_eos: bool = False,
        max_tokens: int = 4096,
    ) -> list[str]:
        """Return the links of given translations as "0-0 1-2" (Pharaoh: source-target, from 0).

        Each target token is linked to the source token that the decoder attends to most when it
        predicts the target token. Two words are linked if tokens of them are.

        Args:
            sources: strings or token ids, as for `score`.
            targets: strings or token ids, as for `score`.
            tokenizer: tokenizer of strings.
            target_tokenizer: as for `score`.
            level: "word" links words between white space, and needs strings; "token" links tokens;
                None links words of strings and tokens of token ids.
            layer: a decoder layer, negative from the last, or several to average; None averages
                all. A single layer may align better: with six, the last but one (Garg et al.,
                2019).
            heads: heads to average; None averages all.
            with_eos: link the "</s>" of both sides too, at token level.
            max_tokens: padded tokens of a batch on either side, at most.

        Raises:
            TypeError: as `score`.
            ValueError: as `score`; or the layer, the head or the level does not exist.
        """
        if level not in (None, "word", "token"):
            raise ValueError(f"level must be 'word' or 'token', got {level!r}.")
        sources = sources if isinstance(sources, str) else list(sources)
        targets = targets if isinstance(targets, str) else list(targets)
        strings = tokenizer is not None and _are_strings(sources) and _are_strings(targets)
        if level == "word" and not strings:
            raise ValueError("level='word' needs strings and the tokenizer.")
        words_of_pairs = None
        if strings and level != "token" and sources and targets:
            sources, source_words = _tokens_and_words(tokenizer, sources)
            target_tokenizer = target_tokenizer or self.target_tokenizer(tokenizer)
            targets, target_words = _tokens_and_words(target_tokenizer, targets, text_target=True)
            words_of_pairs = list(zip(source_words, target_words, strict=False))
        pairs = self._pairs(sources, targets, tokenizer, target_tokenizer)
        links = [""] * len(pairs)
        for row, weights in self._attention(pairs, layer, heads, max_tokens):
            if words_of_pairs is None:
                units = tuple(self._positions(side, with_eos) for side in pairs[row])
            else:
                units = words_of_pairs[row]
            links[row] = links_of(linked_units(weights, units[0]), units[1])
        return links

    def soft_align(
        self,
        sources: Sentences,
        targets: Sentences,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        target_tokenizer: PreTrainedTokenizerBase | None = None,
        layer: int | Iterable[int] | None = None,
        heads: Iterable[int] | None = None,
        max_tokens: int = 4096,
    ) -> list[torch.Tensor]:
        """Return the attention that `align` reads: (T, S) for each pair, on the CPU.

        Arguments and errors are those of `align`. Each row sums to 1, with "</s>" included.
        """
        pairs = self._pairs(sources, targets, tokenizer, target_tokenizer)
        weights = dict(self._attention(pairs, layer, heads, max_tokens))
        return [weights[row] for row in range(len(pairs))]

    def target_tokenizer(self, tokenizer: Any) -> Any:
        """Return the target's tokenizer: `tokenizer`, or the one in its folder target_tokenizer/.

        Raises:
            OSError: a file of the folder is damaged.
            ValueError: the target has a separate vocabulary, and the folder does not exist or
                cannot be reached.
        """
        config, folder = self.config, tokenizer.name_or_path
        # With one vocabulary, the sides may still be split into tokens differently.
        shared = config.share_encoder_decoder_embeddings
        if folder:
            origin = getattr(tokenizer, "origin", {})
            try:
                found = _has_target_tokenizer(folder, **origin)
            except OSError as error:
                if shared:
                    return tokenizer
                raise ValueError(
                    f"The subfolder target_tokenizer of {folder} cannot be looked up ({error}): "
                    "pass target_tokenizer."
                ) from error
            if found:
                loaded = type(tokenizer).from_pretrained(
                    folder, subfolder="target_tokenizer", **origin
                )
                if not shared or _have_same_tokens(tokenizer, loaded, config.vocab_size):
                    return loaded
        if shared or config.vocab_size == config.decoder_vocab_size:
            return tokenizer
        raise ValueError(
            f"The target has a separate vocabulary of {config.decoder_vocab_size} tokens, but "
            f"{folder or 'the tokenizer'} has no subfolder target_tokenizer: pass "
            "target_tokenizer."
        )

    def _continuation_scores(
        self, inputs: dict[str, torch.Tensor], prompt_length: int, real: torch.Tensor, *places: Any
    ) -> torch.Tensor:
        """Return the scores of generated tokens, by which beam search would rank: (B,).

        Args:
            inputs: inputs of the model, with the sequences of `generate` as `decoder_input_ids`.
            prompt_length: tokens of the sequences before the first generated token.
            real: (B, T) marks generated tokens, but not padding.
            *places: dicts and configs that may set the length penalty, in order.
        """
        sequences = inputs["decoder_input_ids"]
        size = max(_TOKENS_AT_ONCE // sequences.shape[1], 1)
        sums = []
        with self.evaluating():
            for start in range(0, len(sequences), size):
                rows = slice(start, start + size)
                part = {name: value[rows] for name, value in inputs.items()}
                part["decoder_input_ids"] = sequences[rows, :-1]
                states = self.model(**part, use_cache=False, return_dict=True)[0]  # (B, T, D)
                states = states[:, prompt_length - 1 :]
                counted = real[rows].to(states.device)
                tokens = sequences[rows, prompt_length:].to(states.device)
                values = self._token_log_probs(states[counted], tokens[counted])
                sums += [row.sum() for row in values.split(counted.sum(1).tolist())]
        total = torch.stack(sums)
        lengths = real.sum(dim=1).clamp(min=1).to(total)  # a sentence may have padding only
        return total / self._penalties(lengths, *places)

    def _penalties(self, lengths: torch.Tensor, *places: Any) -> torch.Tensor:
        """Return the divisors of log-probabilities, by the first of `places` with the settings."""
        alpha, kind = (
            first_setting(name, *places, self.generation_config)
            for name in ("length_penalty", "length_penalty_type")
        )
        return length_penalty_of(lengths, 1.0 if alpha is None else float(alpha), kind)

    def _token_log_probs(self, states: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the log-probability of each target (B * T,) after its state (B * T, D)."""
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
        """Yield the index and the attention to the source (T, S) of each pair, in any order."""
        copied = sharing_copy(self)  # hooks on the model itself would disturb other threads
        layers = copied.model.decoder.layers
        head_count = self.config.decoder_attention_heads
        layer_numbers = [layer] if isinstance(layer, int) else layer
        chosen_layers = [
            layers[index] for index in indices_among("layer", layer_numbers, len(layers), "layers")
        ]
        chosen_heads = indices_among("heads", heads, head_count, "heads")
        for rows, inputs, _ in self._forced_batches(pairs, max_tokens):
            with copied.evaluating():
                weights = copied._source_attention(inputs, chosen_layers, chosen_heads)
            for row, weight in zip(rows, weights.cpu(), strict=True):  # (T, S) with padding
                source, target = map(len, pairs[row])
                yield row, weight[:target, :source]

    def _source_attention(
        self, inputs: dict[str, torch.Tensor], layers: list[Any], heads: list[int]
    ) -> torch.Tensor:
        """Return the attention to the source, averaged over layers and heads: (B, T, S).

        The model's fused kernels return no weights, so a hook computes them once more. The model
        must be this thread's own copy, because the hook records every call.
        """
        recorded: list[torch.Tensor] = []
        padding = inputs["attention_mask"][:, None, None] == 0  # (B, 1, 1, S)

        def record(attention: Any, states: tuple[torch.Tensor, ...]) -> None:
            projected = (attention.q_proj(states[0]), attention.k_proj(states[1]))
            query, key = (
                attention._split_heads(part, attention.d_k)[:, heads] for part in projected
            )  # (B, H, T or S, d_k)
            scores = query @ key.transpose(-2, -1) * attention.scaling
            scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
            scores = scores.masked_fill(padding.to(scores.device), float("-inf"))
            recorded.append(scores.softmax(dim=-1).mean(dim=1))

        with contextlib.ExitStack() as hooks:
            for layer in layers:
                hooks.enter_context(layer.encoder_attn.register_forward_pre_hook(record))
            self.model(**inputs, use_cache=False)
        return torch.stack([weights.to(recorded[0].device) for weights in recorded]).mean(dim=0)

    def _forced_batches(
        self, pairs: list[tuple[list[int], list[int]]], max_tokens: int
    ) -> Iterator[tuple[list[int], dict[str, torch.Tensor], torch.Tensor]]:
        """Yield batches: the indices of pairs, the inputs of the model, and the labels (B, T)."""
        if max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {max_tokens}.")
        device = self.device
        for rows in batches_by_length([(len(s), len(t)) for s, t in pairs], max_tokens):
            source = _padded([pairs[row][0] for row in rows], device)  # (B, S)
            labels = _padded([pairs[row][1] for row in rows], device)  # (B, T)
            prefix = self.prepare_decoder_input_ids_from_labels(labels)
            prefix[:, 0] = self._token_id("decoder_start_token_id")
            inputs = {
                # The mask hides the padding, so any token will do. The source vocabulary may lack
                # the target's padding token.
                "input_ids": source.masked_fill(source == -100, 0),
                "attention_mask": (source != -100).long(),
                "decoder_input_ids": prefix,
            }
            yield rows, inputs, labels

    def _pairs(
        self, sources: Sentences, targets: Sentences, tokenizer: Any, target_tokenizer: Any
    ) -> list[tuple[list[int], list[int]]]:
        """Return the token ids of both sides, after all checks."""
        config = self.config

        def read_source(texts: list[str]) -> Any:
            return tokenizer(texts)["input_ids"]

        def read_target(texts: list[str]) -> Any:
            of_targets = target_tokenizer or self.target_tokenizer(tokenizer)
            return of_targets(text_target=texts)["input_ids"]

        readers = (read_source, read_target) if tokenizer is not None else (None, None)
        source_ids = self._token_ids("sources", sources, readers[0], config.vocab_size)
        target_ids = self._token_ids("targets", targets, readers[1], config.decoder_vocab_size)
        if len(source_ids) != len(target_ids):
            raise ValueError(
                f"There are {len(source_ids)} sources and {len(target_ids)} targets: give each "
                "source one target, and repeat a source that has several."
            )
        return list(zip(source_ids, target_ids, strict=True))

    def _token_ids(
        self, name: str, sentences: Sentences, read: Callable | None, vocab_size: int
    ) -> list[list[int]]:
        if isinstance(sentences, str):
            raise TypeError(f"{name} is one string: pass a list of strings, such as [text].")
        rows: list[Any] = list(sentences)
        texts = any(isinstance(row, str) for row in rows)
        if texts:
            for index, row in enumerate(rows):
                if not isinstance(row, str):
                    raise TypeError(f"{name}[{index}] is {row!r}, not a string like others.")
            if read is None:
                raise ValueError(f"{name} are strings: pass the tokenizer too, or token ids.")
            rows = read(rows)
        sentences_of_ids = []
        for index, row in enumerate(rows):
            place = f"{name}[{index}]"
            ids = row.tolist() if hasattr(row, "tolist") else row
            if not isinstance(ids, Sequence) or not all(type(entry) is int for entry in ids):
                raise TypeError(
                    f"{place} must be a string or a sequence of token ids, got {row!r}."
                )
            if not texts:  # tokenizers add no padding here
                ids = self._without_padding(ids)
            if not ids:
                raise ValueError(f"{place} has no tokens: leave it out.")
            if (wrong := min(ids)) < 0 or (wrong := max(ids)) >= vocab_size:
                raise ValueError(
                    f"{place} has the token id {wrong}, outside the {vocab_size} entries of the "
                    "vocabulary: check that tokenizer and model belong together."
                )
            check_position_limit(place, len(ids), self.config.position_limit)
            sentences_of_ids.append(ids)
        return sentences_of_ids

    def _without_padding(self, ids: Sequence[int]) -> list[int]:
        pad, start, end = self._token_id("pad_token_id"), 0, len(ids)
        while end and ids[end - 1] in (pad, -100):
            end -= 1
        ends = self._eos_token_ids()
        # If "</s>" is the padding too, a first "</s>" may belong to the sentence.
        padding = (-100,) if pad in ends else (pad, -100)
        while start < end and ids[start] in padding:
            start += 1
        if end < len(ids) and ids[end] in ends and not (end and ids[end - 1] in ends):
            end += 1  # if "</s>" is the padding too, the first one ends the sentence
        return list(ids[start:end])

    def _positions(self, ids: list[int], with_eos: bool) -> list[list[int]]:
        """Return the position of each token; without `with_eos`, the last "</s>" has none."""
        ended = ids[-1] in self._eos_token_ids() and not with_eos
        return [[position] for position in range(len(ids) - ended)] + [[]] * ended

    def _eos_token_ids(self) -> list[int | None]:
        eos = self._token_id("eos_token_id")
        return eos if isinstance(eos, list) else [eos]

    def _token_id(self, name: str) -> Any:
        """Look a special token up where `generate` does: in the generation config first."""
        return first_setting(name, self.generation_config, self.config)


def _padded(rows: list[list[int]], device: torch.device) -> torch.Tensor:
    """Pad rows with -100 on the right: (B, T)."""
    tensors = [torch.tensor(row, device="cpu") for row in rows]
    padded = torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_value=-100)
    return padded.to(device)


def _are_strings(sentences: Sentences) -> bool:
    return not isinstance(sentences, str) and all(isinstance(entry, str) for entry in sentences)


def _tokens_and_words(
    tokenizer: Any, texts: Any, text_target: bool = False
) -> tuple[list[list[int]], list[list[list[int]]]]:
    """Return the token ids of each text, and for each token the numbers of its words."""
    texts = list(texts)
    given = {"text_target" if text_target else "text": texts}
    encoded = tokenizer(**given, return_offsets_mapping=True)
    words = [
        words_of_tokens(text, offsets)
        for text, offsets in zip(texts, encoded["offset_mapping"], strict=True)
    ]
    return encoded["input_ids"], words


def indices_among(name: str, indices: Iterable[int] | None, count: int, things: str) -> list[int]:
    """Return indices from 0 to `count` - 1; None selects all, negative ones count from the end.

    Raises:
        ValueError: an index is out of range, or there is none.
    """
    indices = range(count) if indices is None else list(indices)
    wrong = [index for index in indices if not -count <= index < count]
    if wrong or not indices:
        raise ValueError(
            f"{name} must name some of the {count} {things} (0 to {count - 1}, negative from the "
            f"last), got {wrong or indices}."
        )
    return [index % count for index in indices]


__all__ = [
    "VaswaniScores",
    "VaswaniScoringMixin",
    "evaluation_mode",
    "indices_among",
    "sharing_copy",
]
