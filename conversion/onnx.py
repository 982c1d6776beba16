"""To ONNX: a folder of three graphs, and a small translator that runs them with onnxruntime.

    python -m vaswani.conversion to-onnx runs/en-de out/

    from vaswani.conversion.onnx import OnnxTranslator
    print(OnnxTranslator("out/").translate(["ninety-nine"], num_beams=4))

encoder.onnx reads the source; prefill.onnx reads the first target tokens and fills the cache;
decode.onnx reads one token more. Their weights lie beside them, in files that end in .onnx.data.
The folder also gets config, generation config and tokenizer. All is in float32, whatever the model
is.

The graphs are made by transformers' OnnxExporter; the encoder by a call of its own, since what the
exporter makes for generation has no such part. All lengths and batch sizes may differ from those
that were traced: where onnxruntime is installed, that is checked before the folder appears.
"""

import argparse
import contextlib
import copy
import io
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..configuration.extras import needs
from ..modeling.generation_vaswani import VaswaniGenerationConfig
from ..modeling.limits_vaswani import checked_factor, checked_offset, length_limits
from ..modeling.search_vaswani import length_penalty as length_penalty_of
from .checkpoints import (
    add_model_arguments,
    new_folder,
    open_model,
    open_tokenizers,
    refuse,
    save_tokenizers,
)
from .rules import ConversionError

Array = np.ndarray[Any, Any]

PARTS = ("encoder", "prefill", "decode")
# Sizes that are traced: all differ, and none is 1, which the tracer would take for a constant.
_BATCH, _SOURCE, _PROMPT = 2, 5, 3
_CLOSE = 1e-3  # largest difference of a logit that rounding explains
_OUT = -1e9  # score of what must not be chosen, as in search_vaswani.py

# What `OnnxTranslator` knows of a generation config, and what changes no translation.
_SETTINGS = ("num_beams", "length_penalty", "length_penalty_type", "early_stopping")
_LIMITS = ("max_new_tokens", "max_length_offset", "max_length_factor", "max_length")
_TOKENS = ("decoder_start_token_id", "eos_token_id", "pad_token_id", "bos_token_id")
_RULES = (
    *("suppress_tokens", "bad_words_ids", "min_length", "min_new_tokens", "forced_eos_token_id"),
    "renormalize_logits",
)
_WITHOUT_EFFECT = ("transformers_version", "use_cache", "_from_model_config")


def add_save_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the arguments of `save` but for the output."""
    add_model_arguments(parser, tokenizers=True)
    parser.add_argument(
        "--opset", type=int, help="version of ONNX's operators; the newest if left out"
    )


def save(
    model: str | Path | PreTrainedModel,
    output: str | Path,
    opset: int | None = None,
    tokenizer: str | Path | PreTrainedTokenizerBase | None = None,
    target_tokenizer: str | Path | PreTrainedTokenizerBase | None = None,
) -> None:
    """Write a folder of ONNX graphs; a model in memory stays as it is.

    Args:
        model: a folder of ours, a name on the Hub, or the model itself.
        output: a folder that does not exist yet.
        opset: version of ONNX's operators; None leaves it to the exporter.
        tokenizer: goes into the folder too. None is that of the model's folder, if any.
        target_tokenizer: likewise, where source and target have different vocabularies.

    Raises:
        ConversionError: the model cannot be traced, a graph computes something else than the model,
            or what exports is not installed.
        FileExistsError: something is there already.
    """
    exporter, options = _exporter(opset)
    tokenizers = open_tokenizers(model, tokenizer, target_tokenizer)
    original = open_model(model)
    refuse(_problems(original.config), "The model")
    # The exporter leaves traces in the modules that it has wrapped.
    float32: Any = copy.deepcopy(original).float().cpu().eval()
    float32.set_attn_implementation("sdpa")
    with new_folder(Path(output)) as folder:
        for name, graph in _graphs(exporter, options, float32).items():
            _write(graph, folder / f"{name}.onnx")
        original.config.save_pretrained(folder)
        original.generation_config.save_pretrained(folder)
        save_tokenizers(folder, *tokenizers)
        _check(folder, copy.deepcopy(original).float().cpu().eval())


def _exporter(opset: int | None) -> tuple[Any, Any]:
    """Make the exporter of transformers, and its options."""
    try:
        from transformers.exporters import OnnxConfig, OnnxExporter

        exporter = OnnxExporter()  # looks for the packages it needs
    except ImportError as error:
        raise ConversionError(
            f"ONNX cannot be written ({error}): it needs transformers' exporters (5.17 or newer) "
            "and pip install 'vaswani[convert]'."
        ) from error
    return exporter, OnnxConfig(dynamic=True, opset_version=opset)


def _problems(config: Any) -> list[str]:
    traced = max(_SOURCE, 1 + _PROMPT + 2)
    if config.position_encoding == "learned" and config.max_position_embeddings < traced:
        return [
            f"max_position_embeddings {config.max_position_embeddings} (tracing takes {traced} "
            "positions)"
        ]
    return []


def _graphs(exporter: Any, options: Any, model: Any) -> dict[str, Any]:
    """Trace the three graphs; `model` is not to be used afterwards."""
    token = min(model.config.vocab_size, model.config.decoder_vocab_size) - 1
    source = {
        "input_ids": torch.full((_BATCH, _SOURCE), token),
        "attention_mask": torch.ones(_BATCH, _SOURCE, dtype=torch.long),
    }
    source["attention_mask"][0, -2:] = 0
    # Nothing here may end or branch the search which the exporter watches.
    model.generation_config = VaswaniGenerationConfig(decoder_start_token_id=0, pad_token_id=0)
    prompt = torch.full((_BATCH, _PROMPT), token)
    with contextlib.redirect_stdout(io.StringIO()):
        encoder = exporter.export(copy.deepcopy(model.get_encoder()), dict(source), options)
        decoder = exporter.export_for_generation(
            model, {**source, "decoder_input_ids": prompt}, options
        )
    # transformers 5.17 returns the programs themselves, later versions a folder's worth of them.
    encoder = getattr(encoder, "program", encoder)
    parts = {
        name: getattr(part, "program", part)
        for name, part in getattr(decoder, "components", decoder).items()
    }
    return {"encoder": encoder, "prefill": parts["prefill"], "decode": parts["decode"]}


def _write(program: Any, path: Path) -> None:
    import onnx_ir

    graph = getattr(program, "model", program)
    onnx_ir.save(graph, path, external_data=f"{path.name}.data")


def _check(folder: Path, model: Any) -> None:
    """Compare the graphs with `model` on other lengths and another batch than were traced."""
    try:
        translator = OnnxTranslator(folder, strict=False)
    except ImportError:
        return
    generator = torch.Generator().manual_seed(0)
    sizes = model.config.vocab_size, model.config.decoder_vocab_size
    sources = [torch.randint(sizes[0], (n,), generator=generator).tolist() for n in (1, 6, 3)]
    target = torch.randint(sizes[1], (len(sources), 3), generator=generator)
    decoder = translator.encode(sources)
    steps = [decoder.read(target[:, :1].numpy())]
    steps += [decoder.step(target[:, t].numpy()) for t in (1, 2)]
    ids, mask = (torch.from_numpy(array) for array in translator.padded(sources))
    with torch.no_grad():
        expected = model(ids, attention_mask=mask, decoder_input_ids=target).logits
    distance = (torch.from_numpy(np.stack(steps, axis=1)) - expected).abs().max().item()
    if not distance <= _CLOSE * max(1.0, expected.abs().max().item()):
        raise ConversionError(
            f"The graphs do not compute what the model does: a logit differs by {distance:.2g}."
        )


class OnnxTranslator:
    """Greedy and beam search over the graphs that `save` wrote, with the outcome of `generate`.

    Args:
        folder: what `save` wrote.
        threads: of onnxruntime; None leaves it the choice.
        providers: where onnxruntime computes.
        strict: refuse a generation config with settings that this search does not have.

    Raises:
        ImportError: onnxruntime is not installed.
        ValueError: the folder's generation config has settings that this search does not have.
    """

    def __init__(
        self,
        folder: str | Path,
        threads: int | None = None,
        providers: Sequence[str] = ("CPUExecutionProvider",),
        strict: bool = True,
    ) -> None:
        with needs("vaswani[convert]"):
            import onnxruntime

        self.folder = Path(folder)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads or 0
        self.sessions: dict[str, Any] = {
            name: onnxruntime.InferenceSession(
                str(self.folder / f"{name}.onnx"), options, providers=list(providers)
            )
            for name in PARTS
        }
        self._read_settings(strict)

    def _read_settings(self, strict: bool) -> None:
        read = {
            name: json.loads((self.folder / f"{name}.json").read_text(encoding="utf-8"))
            for name in ("config", "generation_config")
        }
        self.settings: dict[str, Any] = read["generation_config"]
        known = {*_SETTINGS, *_LIMITS, *_TOKENS, *_RULES, *_WITHOUT_EFFECT}
        unknown = [
            f"{name}={value!r}"
            for name, value in self.settings.items()
            if value and name not in known
        ]
        if any(len(words) > 1 for words in self.settings.get("bad_words_ids") or []):
            unknown.append("bad_words_ids of several tokens")
        if unknown and strict:
            raise ValueError(
                f"OnnxTranslator does not know {', '.join(unknown)} of generation_config.json: "
                "remove them there, or use `generate`."
            )
        learned = read["config"]["position_encoding"] == "learned"
        self.positions = read["config"]["max_position_embeddings"] if learned else None
        self.pad = self.settings.get("pad_token_id") or 0
        self.rules = _Rules.read(self.settings)

    def translate(self, texts: Sequence[str], **settings: Any) -> list[str]:
        """Translate texts by the tokenizer of the folder; settings as of `generate`."""
        source, target = open_tokenizers(self.folder, None, None)
        if source is None:
            raise ValueError(f"{self.folder} holds no tokenizer: pass token ids to generate.")
        ids = self.generate(source(list(texts)).input_ids, **settings)
        return (target or source).batch_decode(ids, skip_special_tokens=True)

    def generate(
        self,
        sources: Sequence[Sequence[int]],
        *,
        num_beams: int | None = None,
        length_penalty: float | None = None,
        length_penalty_type: Literal["gnmt", "hf"] | None = None,
        early_stopping: bool | Literal["never"] | None = None,
        max_length_offset: int | None = None,
        max_length_factor: float | None = None,
        max_new_tokens: int | None = None,
    ) -> list[list[int]]:
        """Translate token ids, without start token, up to and with the end-of-sentence token.

        Args:
            sources: a list for each sentence, its end-of-sentence token included.
            num_beams: 1 is greedy search. This and all below are by default as in the folder's
                generation config.
            length_penalty: alpha.
            length_penalty_type: "gnmt" is ((5 + |Y|) / 6)^alpha (6.1), "hf" |Y|^alpha.
            early_stopping: as in `generate`; "never" is exact.
            max_length_offset: tokens by which a translation may outgrow its own source.
            max_length_factor: a translation may be this many times as long as its source, plus
                max_length_offset.
            max_new_tokens: one limit for all, in place of the two.

        Raises:
            ValueError: a source is empty or too long, or nothing limits the translations.
        """
        if not sources:
            return []
        limits = self._limits(sources, max_length_offset, max_length_factor, max_new_tokens)
        decoder = self.encode(sources)
        start = self.settings.get("decoder_start_token_id", self.settings.get("bos_token_id"))
        logits = decoder.read(np.full((len(sources), 1), start))
        beams = self._setting("num_beams", num_beams, 1)
        if beams == 1:
            return _greedy_search(decoder, logits, limits, self.rules)
        return _beam_search(
            decoder,
            logits,
            limits,
            self.rules,
            beams,
            self._setting("length_penalty", length_penalty, 1.0),
            self._setting("length_penalty_type", length_penalty_type, None),
            self._setting("early_stopping", early_stopping, False),
        )

    def _setting(self, name: str, given: Any, default: Any) -> Any:
        values = (given, self.settings.get(name), default)
        return next((value for value in values if value is not None), None)

    def _limits(
        self,
        sources: Sequence[Sequence[int]],
        offset: int | None,
        factor: float | None,
        most: int | None,
    ) -> Array:
        """How many tokens each translation may have: (B,)."""
        lengths = np.array([len(source) for source in sources])
        if not lengths.all():
            raise ValueError(
                f"Source {int(lengths.argmin())} has no tokens: even an empty sentence has its "
                "end-of-sentence token."
            )
        if self.positions is not None and lengths.max() > self.positions:
            raise ValueError(
                f"Source {int(lengths.argmax())} has {lengths.max()} tokens, more than "
                f"max_position_embeddings ({self.positions}) of the learned positions: shorten it."
            )
        if most is not None:
            return np.full_like(lengths, most)
        offset = checked_offset(self._setting("max_length_offset", offset, 0))
        factor = self._setting("max_length_factor", factor, None)
        if offset or factor:
            factor = 1.0 if factor is None else checked_factor(factor)
            limits = length_limits(torch.from_numpy(lengths), factor, offset).numpy()
            return limits if self.positions is None else limits.clip(max=self.positions - 1)
        most = self.settings.get("max_new_tokens")
        if most is None and self.settings.get("max_length") is not None:
            most = self.settings["max_length"] - 1  # which counts the start token
        if most is None:
            raise ValueError(
                "Nothing limits the translations: pass max_new_tokens or max_length_offset."
            )
        return np.full_like(lengths, most)

    def padded(self, sources: Sequence[Sequence[int]]) -> tuple[Array, Array]:
        """Pad sentences on the right: the token ids, and a mask that is 1 at them, (B, S) each."""
        lengths = np.array([len(source) for source in sources])
        mask = (np.arange(lengths.max()) < lengths[:, None]).astype(np.int64)
        ids = np.full(mask.shape, self.pad, dtype=np.int64)
        ids[mask == 1] = np.concatenate([np.asarray(source) for source in sources])
        return ids, mask

    def encode(self, sources: Sequence[Sequence[int]]) -> "OnnxDecoder":
        """Run the encoder."""
        ids, mask = self.padded(sources)
        feed = {"input_ids": ids, "attention_mask": mask}
        states = _run(self.sessions["encoder"], feed)["last_hidden_state"]
        return OnnxDecoder(self.sessions, states, mask)


@dataclass(frozen=True)
class _Rules:
    """What a generation config says of single tokens.

    Args:
        never: those that are not to be predicted.
        ends: those that end a sentence.
        least: how many tokens come before an end.
        last: what the last token that a limit allows must be, if any.
        anew: the probability of what is forbidden goes to what is left.
    """

    never: list[int]
    ends: list[int]
    least: int
    last: int | None
    anew: bool

    @classmethod
    def read(cls, settings: dict[str, Any]) -> "_Rules":
        """Read a generation config."""

        def tokens(name: str) -> list[Any]:
            found = settings.get(name)
            return found if isinstance(found, list) else [] if found is None else [found]

        least = settings.get("min_new_tokens")
        if least is None:
            least = max((settings.get("min_length") or 0) - 1, 0)  # which counts the start token
        return cls(
            never=tokens("suppress_tokens") + [words[0] for words in tokens("bad_words_ids")],
            ends=tokens("eos_token_id"),
            least=least,
            last=next(iter(tokens("forced_eos_token_id")), None),
            anew=bool(settings.get("renormalize_logits")),
        )

    def obeyed(self, scores: Array, length: int, limits: Array) -> Array:
        """Give -inf to what must not be token number `length`, from 1: scores (R, V), limits (R,).

        Where the last token is given, its score is 0.
        """
        banned = self.never + (self.ends if length <= self.least else [])
        if banned:
            scores = scores.copy()
            scores[:, banned] = -np.inf
        if self.last is not None and (at_limit := limits == length).any():
            scores = np.where(at_limit[:, None], scores.dtype.type(-np.inf), scores)
            scores[at_limit, self.last] = 0.0
        return scores

    def log_probabilities(self, logits: Array, length: int, limits: Array) -> Array:
        """Turn logits (R, V) into log-probabilities that obey."""
        if self.anew:
            logits = self.obeyed(logits, length, limits)
        shifted = logits - logits.max(axis=-1, keepdims=True)
        log_probs: Array = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
        return log_probs if self.anew else self.obeyed(log_probs, length, limits)


class OnnxDecoder:
    """The decoder and what it remembers, a row for each of R hypotheses.

    Args:
        sessions: of the graphs prefill and decode.
        states: (R, S, D) from the encoder.
        mask: (R, S), 1 at real tokens.
    """

    def __init__(self, sessions: dict[str, Any], states: Array, mask: Array) -> None:
        self.sessions = sessions
        self.source = {"encoder_outputs.last_hidden_state": states, "attention_mask": mask}
        self.target: dict[str, Array] = {}

    def read(self, tokens: Array) -> Array:
        """Read the first tokens (R, T), and predict what follows: logits (R, V)."""
        outputs = _run(
            self.sessions["prefill"], {**self.source, "decoder_input_ids": tokens.astype(np.int64)}
        )
        for name, array in outputs.items():
            if ".cross_attention_cache." in name:
                self.source[name] = array
        return self._remember(outputs)

    def step(self, tokens: Array) -> Array:
        """Read one more token each (R,), and predict what follows: logits (R, V)."""
        feed = {"decoder_input_ids": tokens[:, None].astype(np.int64)}
        return self._remember(_run(self.sessions["decode"], self.source | self.target | feed))

    def _remember(self, outputs: dict[str, Array]) -> Array:
        self.target = {
            name: array for name, array in outputs.items() if ".self_attention_cache." in name
        }
        return outputs["logits"][:, -1]

    def choose(self, rows: Array, sources: Array | None = None) -> None:
        """Go on with these rows, and the sources of rows `sources`; None is all that there are."""
        self.target = {name: array[rows] for name, array in self.target.items()}
        if sources is not None:
            self.source = {name: array[sources] for name, array in self.source.items()}


def _run(session: Any, feed: dict[str, Array]) -> dict[str, Array]:
    """Run a graph on those of the arrays that it takes; names without "input." and "output."."""
    inputs = {given.name: feed[given.name.removeprefix("input.")] for given in session.get_inputs()}
    names = [output.name for output in session.get_outputs()]
    outputs = zip(names, session.run(names, inputs), strict=True)
    return {name.removeprefix("output."): array for name, array in outputs}


def _greedy_search(
    decoder: OnnxDecoder, logits: Array, limits: Array, rules: _Rules
) -> list[list[int]]:
    """Take the most probable token at every step."""
    found: list[list[int]] = [[] for _ in limits]
    rows = np.arange(len(limits))  # the sentences still searched
    for length in itertools.count(1):
        tokens = rules.obeyed(logits, length, limits[rows]).argmax(axis=-1)
        for row, token in zip(rows, tokens, strict=True):
            found[row].append(int(token))
        going = ~np.isin(tokens, rules.ends) & (length < limits[rows])
        if not going.any():
            return found
        if not going.all():
            kept = going.nonzero()[0]
            decoder.choose(kept, kept)
            rows, tokens = rows[kept], tokens[kept]
        logits = decoder.step(tokens)
    raise AssertionError


def _beam_search(
    decoder: OnnxDecoder,
    logits: Array,
    limits: Array,
    rules: _Rules,
    beams: int,
    alpha: float,
    kind: str | None,
    stopping: bool | str,
) -> list[list[int]]:
    """Search for the best sentence with `beams` hypotheses (6.1), as search_vaswani.py does.

    Shapes: B sentences still searched, K hypotheses of each, T tokens, C candidates of a step, V
    entries of the target vocabulary.
    """
    # As many candidates as leave K to go on with where each hypothesis could end.
    count = max(2, 1 + len(rules.ends)) * beams
    rows = np.arange(len(limits))
    ended: list[list[tuple[float, list[int]]]] = [[] for _ in rows]  # the best K, best first
    repeated = rows.repeat(beams)
    decoder.choose(repeated, repeated)
    logits = logits[repeated]  # (B * K, V)
    running = np.full((len(rows), beams), _OUT, dtype=logits.dtype)
    running[:, 0] = 0.0
    tokens = np.zeros((len(rows), beams, 0), dtype=np.int64)  # (B, K, T)
    for length in itertools.count(1):
        log_probs = rules.log_probabilities(logits, length, limits[rows].repeat(beams))
        scores, parents, new = _best_continuations(log_probs, running, count)
        at_end = np.isin(new, rules.ends) | (length >= limits[rows])[:, None]  # (B, C)

        # Of the best K, those that end compete with the ones that ended before.
        for row, place in zip(*at_end[:, :beams].nonzero(), strict=True):
            penalised = scores[row, place] / length_penalty_of(length, alpha, kind)
            sentence = [*tokens[row, parents[row, place]].tolist(), int(new[row, place])]
            ended[rows[row]].append((float(penalised), sentence))
            ended[rows[row]].sort(key=lambda hypothesis: -hypothesis[0])
            del ended[rows[row]][beams:]

        # The best K that do not end go on.
        chosen = np.argsort(-(scores + at_end * scores.dtype.type(_OUT)), axis=1, kind="stable")
        chosen = chosen[:, :beams]
        running = np.take_along_axis(scores + at_end * scores.dtype.type(_OUT), chosen, axis=1)
        parents, new = (np.take_along_axis(array, chosen, axis=1) for array in (parents, new))
        tokens = np.take_along_axis(tokens, parents[:, :, None], axis=1)
        tokens = np.concatenate((tokens, new[:, :, None]), axis=2)

        # Can what goes on still beat what would be returned?
        exact = stopping == "never"
        longest = limits[rows] if exact and alpha > 0 else length
        best_going = running[:, 0] / length_penalty_of(longest, alpha, kind)
        to_beat = [
            one[0 if exact else -1][0] if one and (exact or len(one) == beams) else _OUT
            for one in (ended[row] for row in rows)
        ]
        going = (best_going > to_beat) & (length < limits[rows])
        if stopping is True:
            going &= [len(ended[row]) < beams for row in rows]
        if not going.any():
            return [best[0][1] for best in ended]
        kept = going.nonzero()[0]
        first = kept[:, None] * beams
        sources = None if going.all() else (first + np.arange(beams)).ravel()
        decoder.choose((first + parents[kept]).ravel(), sources)
        rows, running, tokens = rows[kept], running[kept], tokens[kept]
        logits = decoder.step(tokens[:, :, -1].ravel())
    raise AssertionError


def _best_continuations(log_probs: Array, running: Array, count: int) -> tuple[Array, Array, Array]:
    """Find the best next tokens: log-probabilities, best first, hypotheses, tokens: (B, C) each."""
    sentences, beams = running.shape
    scores = (log_probs.reshape(sentences, beams, -1) + running[:, :, None]).reshape(sentences, -1)
    count = min(count, scores.shape[1])
    best = np.argpartition(-scores, count - 1, axis=1)[:, :count]
    values = np.take_along_axis(scores, best, axis=1)
    order = np.argsort(-values, axis=1, kind="stable")
    best, values = (np.take_along_axis(array, order, axis=1) for array in (best, values))
    return values, *np.divmod(best, log_probs.shape[-1])


__all__ = ["OnnxDecoder", "OnnxTranslator", "add_save_arguments", "save"]
