"""Translation with the ONNX graphs of `onnx.save`, by the searches of `generate`."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from ..configuration.configuration_vaswani import VaswaniConfig
from ..configuration.extras import needs
from ..generation.limits_vaswani import check_position_limit, length_limits, length_rule
from ..generation.search_vaswani import FILL, SearchSettings, TokenRules, beam_search, greedy_search
from .loading import open_tokenizers

Array = np.ndarray[Any, Any]

PARTS = ("encoder", "prefill", "decode")

# Settings of a generation config that `OnnxTranslator` follows, and those that change nothing.
_SEARCH = ("num_beams", "length_penalty", "length_penalty_type", "early_stopping")
_LIMITS = ("max_new_tokens", "max_length_offset", "max_length_factor", "max_length")
_TOKENS = ("decoder_start_token_id", "eos_token_id", "pad_token_id", "bos_token_id")
_RULES = (
    *("suppress_tokens", "bad_words_ids", "min_length", "min_new_tokens", "forced_eos_token_id"),
    "renormalize_logits",
)
_WITHOUT_EFFECT = ("transformers_version", "use_cache", "_from_model_config")


class OnnxTranslator:
    """Greedy and beam search over the graphs of `onnx.save`, with the results of `generate`.

    Args:
        folder: the output of `onnx.save`.
        threads: for onnxruntime. None lets onnxruntime choose.
        providers: execution providers of onnxruntime.
        strict: refuse a generation config with settings that this class does not follow.

    Raises:
        ImportError: onnxruntime is not installed.
        ValueError: the folder's generation config has settings that this class does not follow.
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
        self.settings = self._read_settings()
        if strict:
            self._refuse_unknown_settings()
        self.position_limit = VaswaniConfig.from_pretrained(self.folder).position_limit
        self.pad_token_id = self.settings.get("pad_token_id", 0)

    def _read_settings(self) -> dict[str, Any]:
        """Read generation_config.json, without settings that are null."""
        file = self.folder / "generation_config.json"
        settings = json.loads(file.read_text(encoding="utf-8"))
        return {name: value for name, value in settings.items() if value is not None}

    def _refuse_unknown_settings(self) -> None:
        """Refuse settings that would change the results, but are not followed here."""
        known = {*_SEARCH, *_LIMITS, *_TOKENS, *_RULES, *_WITHOUT_EFFECT}
        unknown = [
            f"{name}={value!r}"
            for name, value in self.settings.items()
            if value and name not in known
        ]
        if any(len(words) > 1 for words in self.settings.get("bad_words_ids", [])):
            unknown.append("bad_words_ids of several tokens")
        if unknown:
            raise ValueError(
                f"OnnxTranslator does not know {', '.join(unknown)} of generation_config.json: "
                "remove them there, or use `generate`."
            )

    def translate(self, texts: Sequence[str], **settings: Any) -> list[str]:
        """Translate texts with the tokenizer of the folder; the settings are those of `generate`.

        Raises:
            ValueError: the folder has no tokenizer.
        """
        source, target = open_tokenizers(self.folder)
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
        """Translate token ids. The results have no start token, and end with the end token.

        The folder's generation config has the defaults of all settings.

        Args:
            sources: token ids of each sentence, with its end token.
            num_beams: 1 is greedy search.
            length_penalty: the exponent alpha.
            length_penalty_type: "gnmt" is ((5 + |Y|) / 6)^alpha (6.1), "hf" is |Y|^alpha.
            early_stopping: as in `generate`; "never" is exact.
            max_length_offset: tokens by which a translation may be longer than its source.
            max_length_factor: a translation may be this many times as long as its source, plus
                max_length_offset.
            max_new_tokens: one limit for all translations, in place of the two above.

        Raises:
            ValueError: a source is empty or too long, nothing limits the translations, or the
                folder names no start token.
        """
        if not sources:
            return []
        given = {
            "num_beams": num_beams,
            "length_penalty": length_penalty,
            "length_penalty_type": length_penalty_type,
            "early_stopping": early_stopping,
            "max_length_offset": max_length_offset,
            "max_length_factor": max_length_factor,
        }
        settings = self.settings | {n: value for n, value in given.items() if value is not None}
        limits = self._limits(sources, settings, max_new_tokens)
        decoder = self.encode(sources)
        start = settings.get("decoder_start_token_id", settings.get("bos_token_id"))
        if start is None:
            raise ValueError(f"{self.folder} names no decoder_start_token_id.")
        prompt = torch.full((len(sources), 1), start)
        search, rules = _search_settings(settings), _token_rules(settings)
        if search.num_beams == 1:
            tokens = greedy_search(decoder, prompt, limits, search, rules)
        else:
            tokens, _, _ = beam_search(decoder, prompt, limits, search, rules)
        return [row[row != FILL].tolist() for row in tokens]

    def _limits(
        self, sources: Sequence[Sequence[int]], settings: dict[str, Any], max_new_tokens: int | None
    ) -> torch.Tensor:
        """Count the tokens that each translation may have: (B,)."""
        lengths = torch.tensor([len(source) for source in sources])
        if not lengths.all():
            raise ValueError(
                f"Source {int(lengths.argmin())} has no tokens: even an empty sentence has its "
                "end token."
            )
        for index, length in enumerate(lengths.tolist()):
            check_position_limit(f"Source {index}", length, self.position_limit)
        rule = length_rule(settings.get("max_length_factor"), settings.get("max_length_offset"))
        if max_new_tokens is None and rule is not None:
            limits = length_limits(lengths, *rule)
            if self.position_limit is not None:  # the start token takes a position too
                limits = limits.clamp(max=self.position_limit - 1)
            return limits
        limit = max_new_tokens
        if limit is None:
            limit = settings.get("max_new_tokens")
        if limit is None and "max_length" in settings:
            limit = settings["max_length"] - 1  # max_length counts the start token
        if limit is None:
            raise ValueError(
                "Nothing limits the translations: pass max_new_tokens or max_length_offset."
            )
        return torch.full_like(lengths, limit)

    def padded(self, sources: Sequence[Sequence[int]]) -> tuple[Array, Array]:
        """Pad sentences on the right: token ids, and a mask with 1 at real tokens, (B, S) each."""
        lengths = np.array([len(source) for source in sources])
        mask = (np.arange(lengths.max()) < lengths[:, None]).astype(np.int64)
        ids = np.full(mask.shape, self.pad_token_id, dtype=np.int64)
        ids[mask == 1] = np.concatenate([np.asarray(source) for source in sources])
        return ids, mask

    def encode(self, sources: Sequence[Sequence[int]]) -> "OnnxDecoder":
        """Run the encoder, and return a decoder for these sources."""
        ids, mask = self.padded(sources)
        feed = {"input_ids": ids, "attention_mask": mask}
        states = _run(self.sessions["encoder"], feed)["last_hidden_state"]
        return OnnxDecoder(self.sessions, states, mask)


def _search_settings(settings: dict[str, Any]) -> SearchSettings:
    given = {name: settings[name] for name in _SEARCH if name in settings}
    return SearchSettings(**given, eos_token_ids=tuple(_listed(settings, "eos_token_id")))


def _token_rules(settings: dict[str, Any]) -> TokenRules:
    min_length = settings.get("min_new_tokens")
    if min_length is None:
        min_length = max(settings.get("min_length", 0) - 1, 0)  # min_length counts the start token
    words = [words[0] for words in settings.get("bad_words_ids", []) if len(words) == 1]
    return TokenRules(
        never={*_listed(settings, "suppress_tokens"), *words},
        ends=set(_listed(settings, "eos_token_id")),
        min_length=min_length,
        forced_last=next(iter(_listed(settings, "forced_eos_token_id")), None),
        renormalize=bool(settings.get("renormalize_logits")),
    )


def _listed(settings: dict[str, Any], name: str) -> list[int]:
    """Return the tokens of a setting that is one token, a list of tokens, or missing."""
    found = settings.get(name, [])
    return found if isinstance(found, list) else [found]


class OnnxDecoder:
    """The decoder's graphs with their cache, behind the interface that the searches need.

    Shapes: B sentences, K hypotheses of each, T tokens, S source tokens, D = d_model, R rows, V
    entries of the target vocabulary. The cache has a row for each of B * K hypotheses.

    Args:
        sessions: of the graphs prefill and decode.
        states: (B, S, D) from the encoder.
        mask: (B, S), 1 at real tokens.
    """

    def __init__(self, sessions: dict[str, Any], states: Array, mask: Array) -> None:
        self.sessions = sessions
        self.source = {"encoder_outputs.last_hidden_state": states, "attention_mask": mask}
        self.target: dict[str, Array] = {}
        self.beams = 1  # K

    def read(self, prefix: torch.Tensor) -> torch.Tensor:
        """Read the first target tokens (B, T), and predict the next: logits (B, V)."""
        feed = self.source | {"decoder_input_ids": prefix.numpy()}
        outputs = _run(self.sessions["prefill"], feed)
        for name, array in outputs.items():
            if ".cross_attention_cache." in name:
                self.source[name] = array
        return self._remember(outputs)

    def step(
        self,
        tokens: torch.Tensor,
        parents: torch.Tensor | None = None,
        open_rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Extend hypotheses `parents` (B, K) by `tokens` (B, K): logits of the open rows (R, V).

        All rows are computed, because a graph for fewer rows would need a copy of the source's
        cache in every step.
        """
        sentences, beams = tokens.shape
        if beams != self.beams:  # all hypotheses begin with the same prompt
            self._take(np.arange(sentences).repeat(beams))
            self.beams = beams
        elif beams > 1 and parents is not None:
            first = np.arange(sentences)[:, None] * beams
            rows = (first + parents.numpy()).ravel()
            self.target = {name: array[rows] for name, array in self.target.items()}
        feed = {"decoder_input_ids": tokens.reshape(-1, 1).numpy()}
        logits = self._remember(_run(self.sessions["decode"], self.source | self.target | feed))
        return logits if open_rows is None else logits[open_rows]

    def keep(self, sentences: torch.Tensor) -> None:
        """Forget all sentences but these, given by their numbers (B',)."""
        self._take((sentences.numpy()[:, None] * self.beams + np.arange(self.beams)).ravel())

    def _take(self, rows: Array) -> None:
        self.source = {name: array[rows] for name, array in self.source.items()}
        self.target = {name: array[rows] for name, array in self.target.items()}

    def _remember(self, outputs: dict[str, Array]) -> torch.Tensor:
        self.target = {
            name: array for name, array in outputs.items() if ".self_attention_cache." in name
        }
        return torch.from_numpy(outputs["logits"][:, -1])


def _run(session: Any, feed: dict[str, Array]) -> dict[str, Array]:
    """Run a graph with its inputs among `feed`. Names have no prefix "input." or "output."."""
    inputs = {given.name: feed[given.name.removeprefix("input.")] for given in session.get_inputs()}
    names = [output.name for output in session.get_outputs()]
    outputs = zip(names, session.run(names, inputs), strict=True)
    return {name.removeprefix("output."): array for name, array in outputs}


__all__ = ["PARTS", "OnnxDecoder", "OnnxTranslator"]
