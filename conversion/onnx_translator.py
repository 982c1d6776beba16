"""Translation with the ONNX graphs of `onnx.save`, by the searches of `generate`."""

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, Literal

import torch

from ..configuration.configuration_vaswani import VaswaniConfig
from ..generation.limits_vaswani import check_position_limit, length_limits, length_rule
from .loading import open_tokenizers
from .onnx_graphs import Array, GraphDecoder, OnnxModel, padded, refuse_string, run_graph


class OnnxTranslator(OnnxModel):
    """Greedy and beam search over the graphs of `onnx.save`, with the results of `generate`.

    Arguments are those of `OnnxModel`: the folder, and `threads` for onnxruntime.
    """

    parts: ClassVar[tuple[str, ...]] = ("encoder", "prefill", "decode")
    config_class: ClassVar[type[VaswaniConfig]] = VaswaniConfig

    def translate(self, texts: Iterable[str], **settings: Any) -> list[str]:
        """Translate texts with the tokenizer of the folder; the settings are those of `generate`.

        The translation of an empty text is empty.

        Raises:
            TypeError: `texts` is one string.
            ValueError: the folder has no tokenizer.
        """
        refuse_string(texts)
        texts = list(texts)
        source, target = open_tokenizers(self.folder)
        if source is None:
            raise ValueError(f"{self.folder} holds no tokenizer: pass token ids to generate.")
        translations = [""] * len(texts)
        filled = [index for index, text in enumerate(texts) if text.strip()]
        if filled:
            encoded = source([texts[index] for index in filled]).input_ids
            ids = self.generate(encoded, **settings)
            written = (target or source).batch_decode(ids, skip_special_tokens=True)
            for index, text in zip(filled, written, strict=True):
                translations[index] = text
        return translations

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
            ValueError: a source is empty or too long, or has an unknown token; a setting is
                invalid; nothing limits the translations; or the folder names no start token.
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
            "max_new_tokens": max_new_tokens,
        }
        settings = self.overridden(given)
        if max_length_offset is max_length_factor is None:
            max_new_tokens = settings.get("max_new_tokens")  # of the call, or else saved
        limits = self._limits(sources, settings, max_new_tokens)
        decoder = self.encode(sources)
        start = settings.get("decoder_start_token_id", settings.get("bos_token_id"))
        if start is None:
            raise ValueError(f"{self.folder} names no decoder_start_token_id.")
        prompt = torch.full((len(sources), 1), start)
        return self.search(decoder, prompt, limits, settings)

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
        limit = settings.get("max_new_tokens")
        if limit is None and "max_length" in settings:
            limit = settings["max_length"] - 1  # max_length counts the start token
        if limit is None:
            raise ValueError(
                "Nothing limits the translations: pass max_new_tokens or max_length_offset."
            )
        if limit < 1:
            raise ValueError(f"A translation has at least 1 new token, but its limit is {limit}.")
        return torch.full_like(lengths, limit)

    def padded(self, sources: Sequence[Sequence[int]]) -> tuple[Array, Array]:
        """Pad sentences on the right: token ids, and a mask with 1 at real tokens, (B, S) each."""
        ids, mask = padded(sources, 0, "right")  # the mask hides the padding
        self.check_ids(ids)
        return ids, mask

    def encode(self, sources: Sequence[Sequence[int]]) -> "OnnxDecoder":
        """Run the encoder, and return a decoder for these sources."""
        ids, mask = self.padded(sources)
        feed = {"input_ids": ids, "attention_mask": mask}
        states = run_graph(self.sessions["encoder"], feed)["last_hidden_state"]
        source = {"encoder_outputs.last_hidden_state": states, "attention_mask": mask}
        return OnnxDecoder(self.sessions, source, self.position_limit)


class OnnxDecoder(GraphDecoder):
    """The decoder of a translation model, over the states of sources and their mask.

    Args:
        sessions: onnxruntime sessions of the graphs prefill and decode.
        fixed: states of the sources and their mask.
        position_limit: learned positions of the model; None means no limit.
    """

    def __init__(
        self, sessions: dict[str, Any], fixed: dict[str, Array], position_limit: int | None
    ) -> None:
        super().__init__(sessions, fixed)
        self.position_limit = position_limit
        self.length = 0  # tokens of each hypothesis so far

    def inputs(self, tokens: Array) -> dict[str, Array]:
        """Return the inputs that come with new target tokens (B * K, T).

        Raises:
            ValueError: a translation has more tokens than the model has learned positions.
        """
        self.length += tokens.shape[1]
        check_position_limit("A translation", self.length, self.position_limit)
        return {"decoder_input_ids": tokens}


__all__ = ["OnnxDecoder", "OnnxTranslator"]
