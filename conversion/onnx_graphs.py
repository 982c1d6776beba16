"""Base classes of the ONNX models: graphs with a cache, and the settings of a folder."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from ..configuration.configuration_vaswani import VaswaniConfig
from ..configuration.extras import needs
from ..generation.beam_vaswani import FILL
from ..generation.rules_vaswani import SearchSettings, TokenRules
from ..generation.search_vaswani import beam_search, greedy_search
from ..generation.settings_vaswani import VaswaniGenerationConfig

Array = np.ndarray[Any, Any]

# Settings of a generation config that this file applies, and settings without an effect here.
_SEARCH = ("num_beams", "length_penalty", "length_penalty_type", "early_stopping")
_LIMITS = ("max_new_tokens", "max_length_offset", "max_length_factor", "max_length")
_TOKENS = ("decoder_start_token_id", "eos_token_id", "pad_token_id", "bos_token_id")
_RULES = (
    *("suppress_tokens", "bad_words_ids", "min_length", "min_new_tokens", "forced_eos_token_id"),
    "renormalize_logits",
)
_WITHOUT_EFFECT = (
    *("transformers_version", "use_cache", "_from_model_config"),
    *("temperature", "top_k", "top_p", "min_p", "typical_p"),  # do_sample is refused
)
_NEUTRAL = {"repetition_penalty": 1.0, "num_return_sequences": 1, "num_beam_groups": 1}


def unknown_settings(settings: dict[str, Any]) -> list[str]:
    """List settings of `generate` that would change the results, but are not followed here."""
    known = {*_SEARCH, *_LIMITS, *_TOKENS, *_RULES, *_WITHOUT_EFFECT}
    unknown = [
        f"{name}={value!r}"
        for name, value in settings.items()
        if value and name not in known and _NEUTRAL.get(name) != value
    ]
    if any(len(words) > 1 for words in settings.get("bad_words_ids") or ()):
        unknown.append("bad_words_ids of several tokens")
    return unknown


class OnnxModel:
    """The graphs of `onnx.save` in onnxruntime, with the settings of their folder.

    Args:
        folder: the output of `onnx.save`.
        threads: number of threads of onnxruntime. None lets onnxruntime choose.
        providers: execution providers of onnxruntime.
        strict: refuse a generation config with settings that this class does not follow.

    Raises:
        ImportError: onnxruntime is not installed.
        OSError: the folder holds another kind of model.
        ValueError: the folder's generation config has settings that this class does not follow.
    """

    parts: ClassVar[tuple[str, ...]]
    config_class: ClassVar[type[VaswaniConfig]]

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
        config = self.config_class.from_pretrained(self.folder)
        self.position_limit, self.vocab_size = config.position_limit, config.vocab_size
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads or 0
        self.sessions: dict[str, Any] = {
            name: onnxruntime.InferenceSession(
                str(self.folder / f"{name}.onnx"), options, providers=list(providers)
            )
            for name in self.parts
        }
        self.settings = self._read_settings()
        if strict and (unknown := unknown_settings(self.settings)):
            raise ValueError(
                f"{type(self).__name__} does not know {', '.join(unknown)} of "
                "generation_config.json: remove them there, or use `generate`."
            )
        self.pad_token_id = self.settings.get("pad_token_id", 0)

    def _read_settings(self) -> dict[str, Any]:
        """Read generation_config.json, without settings that are null."""
        file = self.folder / "generation_config.json"
        settings = json.loads(file.read_text(encoding="utf-8"))
        return {name: value for name, value in settings.items() if value is not None}

    def overridden(self, given: dict[str, Any]) -> dict[str, Any]:
        """Return the folder's settings, overridden by those that are given and not None.

        Raises:
            ValueError: names a setting, its value and the valid values.
        """
        settings = self.settings | {n: value for n, value in given.items() if value is not None}
        followed = {*_SEARCH, *_LIMITS, *_TOKENS, *_RULES} & settings.keys()
        VaswaniGenerationConfig.read_settings({name: settings[name] for name in followed})  # checks
        return settings

    def check_ids(self, ids: Array) -> None:
        """Refuse token ids without an entry. onnxruntime counts negative ones from the end.

        Raises:
            ValueError: names the id and the number of entries.
        """
        if (wrong := ids[(ids < 0) | (ids >= self.vocab_size)]).size:
            raise ValueError(
                f"Token id {wrong[0]} is outside the {self.vocab_size} entries of the vocabulary: "
                "check that tokenizer and model belong together."
            )

    def search(
        self,
        decoder: "GraphDecoder",
        prompt: torch.Tensor,
        limits: torch.Tensor,
        settings: dict[str, Any],
    ) -> list[list[int]]:
        """Continue prompts (B, T), and return the new tokens of each sentence.

        Each sentence has a limit of new tokens (B,).
        """
        given = {name: settings[name] for name in _SEARCH if name in settings}
        search = SearchSettings(
            **given, eos_token_ids=tuple(_token_ids_of(settings, "eos_token_id"))
        )
        rules = _token_rules(settings, prompt.shape[1])
        if search.num_beams == 1:
            tokens = greedy_search(decoder, prompt, limits, search, rules)
        else:
            tokens, _, _ = beam_search(decoder, prompt, limits, search, rules)
        return [row[row != FILL].tolist() for row in tokens]


def _token_rules(settings: dict[str, Any], prompt_length: int) -> TokenRules:
    min_length = settings.get("min_new_tokens")
    if min_length is None:  # min_length counts the prompt too
        min_length = max(settings.get("min_length", 0) - prompt_length, 0)
    ends = set(_token_ids_of(settings, "eos_token_id"))
    words = {words[0] for words in settings.get("bad_words_ids", []) if len(words) == 1}
    return TokenRules(
        # transformers drops end tokens from bad_words_ids; otherwise no sentence would end.
        never={*_token_ids_of(settings, "suppress_tokens"), *(words - ends)},
        ends=ends,
        min_length=min_length,
        forced_last=next(iter(_token_ids_of(settings, "forced_eos_token_id")), None),
        renormalize=bool(settings.get("renormalize_logits")),
    )


def _token_ids_of(settings: dict[str, Any], name: str) -> list[int]:
    """Return the tokens of a setting that is one token, a list of tokens, or missing."""
    found = settings.get(name, [])
    return found if isinstance(found, list) else [found]


class GraphDecoder:
    """The decoder's graphs with their cache, behind the interface that the searches need.

    Shapes: B sentences, K hypotheses of each, T tokens, R rows, V entries of the vocabulary. The
    cache has a row for each of B * K hypotheses.

    Args:
        sessions: onnxruntime sessions of the graphs prefill and decode.
        fixed: inputs that all hypotheses of a sentence share, with a row for each sentence.
    """

    def __init__(self, sessions: dict[str, Any], fixed: dict[str, Array]) -> None:
        self.sessions = sessions
        self.fixed = fixed
        self.cache: dict[str, Array] = {}
        self.beams = 1  # K
        self.vocabulary = 0  # V

    def inputs(self, tokens: Array) -> dict[str, Array]:
        """Return the inputs that come with new tokens (B * K, T)."""
        raise NotImplementedError

    def read(self, prefix: torch.Tensor) -> torch.Tensor:
        """Read the first tokens (B, T), and predict the next: logits (B, V)."""
        outputs = run_graph(self.sessions["prefill"], self.fixed | self.inputs(prefix.numpy()))
        self.fixed |= {n: array for n, array in outputs.items() if ".cross_attention_cache." in n}
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
            self.cache = {name: array[rows] for name, array in self.cache.items()}
        inputs = self.inputs(tokens.reshape(-1, 1).numpy())
        feed = self.fixed | self.cache | inputs
        logits = self._remember(run_graph(self.sessions["decode"], feed))
        return logits if open_rows is None else logits[open_rows]

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """Return the logits of some rows (r, V), which the graphs return already."""
        return states

    def keep(self, sentences: torch.Tensor) -> None:
        """Forget all sentences but these, given by their numbers (B',)."""
        self._take((sentences.numpy()[:, None] * self.beams + np.arange(self.beams)).ravel())

    def _take(self, rows: Array) -> None:
        self.fixed = {name: array[rows] for name, array in self.fixed.items()}
        self.cache = {name: array[rows] for name, array in self.cache.items()}

    def _remember(self, outputs: dict[str, Array]) -> torch.Tensor:
        self.cache = {
            name: array
            for name, array in outputs.items()
            if name.startswith("past_key_values.") and ".cross_attention_cache." not in name
        }
        self.vocabulary = outputs["logits"].shape[-1]
        return torch.from_numpy(outputs["logits"][:, -1])


def refuse_string(texts: Any) -> None:
    """Raise TypeError for one string, whose characters would be texts."""
    if isinstance(texts, str):
        raise TypeError(f"texts is the string {texts[:40]!r}: pass a list of texts.")


def padded(rows: Sequence[Sequence[int]], pad: int, side: str) -> tuple[Array, Array]:
    """Pad rows of token ids on the "left" or "right": ids, and 1 at real tokens, (B, T) each."""
    lengths = np.array([len(row) for row in rows])
    mask = (np.arange(lengths.max()) < lengths[:, None]).astype(np.int64)
    if side == "left":
        mask = np.ascontiguousarray(mask[:, ::-1])
    ids = np.full(mask.shape, pad, dtype=np.int64)
    ids[mask == 1] = np.concatenate([np.asarray(row) for row in rows])
    return ids, mask


def run_graph(session: Any, feed: dict[str, Array]) -> dict[str, Array]:
    """Run a graph with its inputs among `feed`. Names have no prefix "input." or "output."."""
    inputs = {given.name: feed[given.name.removeprefix("input.")] for given in session.get_inputs()}
    names = [output.name for output in session.get_outputs()]
    outputs = zip(names, session.run(names, inputs), strict=True)
    return {name.removeprefix("output."): array for name, array in outputs}


__all__ = [
    "Array",
    "GraphDecoder",
    "OnnxModel",
    "padded",
    "refuse_string",
    "run_graph",
    "unknown_settings",
]
