"""Language models as the ONNX graphs of `onnx.save`, with the searches of `generate`."""

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, Literal

import numpy as np
import torch

from ..configuration.configuration_vaswani import VaswaniConfig
from ..configuration.siblings_vaswani import VaswaniDecoderConfig
from ..generation.limits_vaswani import check_position_limit
from .loading import open_tokenizers
from .onnx_graphs import Array, GraphDecoder, OnnxModel, padded, refuse_string


class OnnxLanguageModel(OnnxModel):
    """Greedy and beam search over the graphs of `onnx.save`, with the results of `generate`.

    The graphs are causal: they take no `prefix_mask`. Arguments are those of `OnnxModel`: the
    folder, and `threads` for onnxruntime.
    """

    parts: ClassVar[tuple[str, ...]] = ("prefill", "decode")
    config_class: ClassVar[type[VaswaniConfig]] = VaswaniDecoderConfig

    def write(self, texts: Iterable[str], **settings: Any) -> list[str]:
        """Continue texts with the tokenizer of the folder; the settings are those of `generate`.

        Returns:
            The texts with their continuations.

        Raises:
            TypeError: `texts` is one string.
            ValueError: the folder has no tokenizer.
        """
        refuse_string(texts)
        tokenizer, _ = open_tokenizers(self.folder)
        if tokenizer is None:
            raise ValueError(f"{self.folder} holds no tokenizer: pass token ids to generate.")
        prompts = tokenizer(list(texts)).input_ids
        found = self.generate(prompts, **settings)
        rows = [[*prompt, *new] for prompt, new in zip(prompts, found, strict=True)]
        return tokenizer.batch_decode(rows, skip_special_tokens=True)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        num_beams: int | None = None,
        length_penalty: float | None = None,
        length_penalty_type: Literal["gnmt", "hf"] | None = None,
        early_stopping: bool | Literal["never"] | None = None,
        max_new_tokens: int | None = None,
    ) -> list[list[int]]:
        """Continue token ids. The results are the new tokens, with the end token.

        The folder's generation config has the defaults of all settings.

        Args:
            prompts: token ids of each text.
            num_beams: 1 is greedy search.
            length_penalty: the exponent alpha.
            length_penalty_type: "gnmt" is ((5 + |Y|) / 6)^alpha (6.1), "hf" is |Y|^alpha.
            early_stopping: as in `generate`; "never" is exact.
            max_new_tokens: limit of the new tokens.

        Raises:
            ValueError: a prompt is empty or has an unknown token, a setting is invalid, a text
                becomes too long, or nothing limits the texts.
        """
        if not prompts:
            return []
        if empty := [number for number, prompt in enumerate(prompts) if not len(prompt)]:
            raise ValueError(
                f"Prompt {empty[0]} has no tokens: begin an empty text with the tokenizer's "
                "bos_token."
            )
        given = {
            "num_beams": num_beams,
            "length_penalty": length_penalty,
            "length_penalty_type": length_penalty_type,
            "early_stopping": early_stopping,
            "max_new_tokens": max_new_tokens,
        }
        settings = self.overridden(given)
        ids, mask = padded(prompts, self.pad_token_id, "left")
        self.check_ids(ids)
        decoder = self.decoder(mask)
        limits = torch.full((len(ids),), self._limit(settings, ids.shape[1]))
        return self.search(decoder, torch.from_numpy(ids), limits, settings)

    def decoder(self, mask: Array) -> "CausalGraphDecoder":
        """Return a decoder for prompts that are padded on the left, with their mask (B, T)."""
        return CausalGraphDecoder(self.sessions, mask, self.position_limit)

    def _limit(self, settings: dict[str, Any], prompt_length: int) -> int:
        """Return the limit of new tokens, which `max_new_tokens` sets before `max_length`."""
        limit = settings.get("max_new_tokens")
        if limit is None and "max_length" in settings:
            limit = settings["max_length"] - prompt_length  # max_length counts the prompt
        if limit is None:
            raise ValueError("Nothing limits the texts: pass max_new_tokens.")
        if limit < 1:
            raise ValueError(
                f"max_length {settings.get('max_length')} leaves no room after the "
                f"{prompt_length} tokens of the prompt: pass max_new_tokens."
            )
        return limit


class CausalGraphDecoder(GraphDecoder):
    """A language model's graphs, with a mask that grows by one column in each step.

    Args:
        sessions: onnxruntime sessions of the graphs prefill and decode.
        mask: (B, T), 1 at real tokens of the prompts, which are padded on the left.
        position_limit: learned positions of the model; None means no limit.
    """

    def __init__(self, sessions: dict[str, Any], mask: Array, position_limit: int | None) -> None:
        super().__init__(sessions, {"attention_mask": mask})
        self.position_limit = position_limit

    def inputs(self, tokens: Array) -> dict[str, Array]:
        """Return the inputs that come with new tokens (B * K, T), and extend the mask by them."""
        mask = self.fixed["attention_mask"]
        if self.cache:
            mask = np.concatenate((mask, np.ones_like(tokens)), axis=1)
            self.fixed["attention_mask"] = mask
        positions = np.maximum(mask.cumsum(axis=1) - 1, 0)[:, -tokens.shape[1] :]
        check_position_limit("A text", int(positions.max()) + 1, self.position_limit)
        return {"input_ids": tokens, "attention_mask": mask, "position_ids": positions}


__all__ = ["CausalGraphDecoder", "OnnxLanguageModel"]
