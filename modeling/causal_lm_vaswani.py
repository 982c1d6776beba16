"""The decoder alone: a language model, or the decoder for another library's encoder.

Shapes: B texts, T tokens, S source tokens, D = d_model, V entries of the vocabulary.
"""

from typing import Any, ClassVar, TypeGuard

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from transformers import Cache, GenerationConfig
from transformers.modeling_outputs import (
    BaseModelOutputWithPastAndCrossAttentions,
    CausalLMOutputWithCrossAttentions,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs, can_return_tuple

from ..configuration.configuration_vaswani import refuse_other_config
from ..configuration.siblings_vaswani import VaswaniDecoderConfig, refuse_inputs_of_other_half
from ..generation.causal_vaswani import VaswaniCausalGenerationMixin, check_prefix
from ..generation.coverage_vaswani import remember
from .attention_vaswani import VaswaniAttention
from .language_head_vaswani import LanguageHead
from .modeling_vaswani import VaswaniDecoder, VaswaniDecoderLayer, VaswaniPreTrainedModel
from .packing_vaswani import refuse_beside_boundaries, split_packing


def _is_plain(attention_mask: Any) -> TypeGuard[torch.Tensor]:
    """Tell whether a mask says which tokens (B, T) are real."""
    return torch.is_tensor(attention_mask) and attention_mask.dim() == 2


def _positions(attention_mask: torch.Tensor, length: int) -> torch.Tensor:
    """Count the real tokens from 0, for the last `length` positions of a mask: (B, T)."""
    return (attention_mask.long().cumsum(dim=1) - 1).clamp(min=0)[:, -length:]


def _without_first_tokens(
    items: torch.Tensor | int, labels: torch.Tensor, shift_labels: torch.Tensor
) -> torch.Tensor:
    """Subtract tokens that the Trainer counts, but that nothing predicts, from an update's tokens.

    The Trainer counts all labels except those of the first column. A text that is padded on the
    left, or packed behind another text, has its first token in a later column. The result
    assumes that all batches of the update have the same share of such tokens.
    """
    counted, kept = ((part != -100).sum() for part in (labels[:, 1:], shift_labels))
    share = torch.where(kept > 0, kept / counted, 1.0)
    return items * share.to(items.device if torch.is_tensor(items) else share.device)


def _may_restart(position_ids: torch.Tensor) -> bool:
    """Tell whether a new sentence starts within a row, by the rule of transformers' masks.

    A traced graph cannot read the positions, so the answer is True.
    """
    return torch.compiler.is_compiling() or bool((position_ids.diff(dim=-1) != 1).any())


class VaswaniDecoderPreTrainedModel(VaswaniPreTrainedModel):
    """The base of models with a VaswaniDecoderConfig."""

    config: VaswaniDecoderConfig
    config_class = VaswaniDecoderConfig

    def __init__(self, config: VaswaniDecoderConfig) -> None:
        refuse_other_config(type(self), config)
        super().__init__(config)


class VaswaniDecoderModel(VaswaniDecoderPreTrainedModel):
    """The decoder alone (3.1), without the map to the vocabulary."""

    # Checkpoints of language models also have a map to the vocabulary.
    _keys_to_ignore_on_load_unexpected: ClassVar[list[str]] = [r"^lm_head\."]

    def __init__(self, config: VaswaniDecoderConfig) -> None:
        super().__init__(config)
        self.decoder = VaswaniDecoder(config)
        self.decoder._input_hint = "Pass the text as input_ids or inputs_embeds."
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        encoder_hidden_states: torch.Tensor | None = None,
        encoder_attention_mask: torch.Tensor | None = None,
        use_cache: bool | None = None,
        prefix_mask: torch.Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutputWithPastAndCrossAttentions:
        """Map tokens (B, T) to states (B, T, D). Arguments are as in `VaswaniForCausalLM`."""
        refuse_inputs_of_other_half(kwargs, "the decoder alone reads one sequence")
        inputs = inputs_embeds if input_ids is None else input_ids
        if prefix_mask is not None and inputs is not None:
            width = inputs.shape[1] if past_key_values is None else None
            check_prefix(prefix_mask, attention_mask, position_ids, len(inputs), width)
        if position_ids is None and inputs is not None and _is_plain(attention_mask):
            position_ids = _positions(attention_mask, inputs.shape[1])
        boundaries = kwargs.get("cu_seq_lens_q")
        if boundaries is not None and prefix_mask is not None:
            raise ValueError(
                "prefix_mask needs one text in each row, but cu_seq_lens_q packs several: pad the "
                "texts instead of packing them, or leave prefix_mask out."
            )
        if boundaries is not None and encoder_hidden_states is not None:
            raise ValueError(
                "cu_seq_lens_q packs texts, but encoder_hidden_states have no boundaries, so each "
                "text would read every source: pad the batch."
            )
        if boundaries is not None and inputs is not None:
            given = {"attention_mask": attention_mask, "past_key_values": past_key_values}
            refuse_beside_boundaries(given)
            attention_mask, others = split_packing({**kwargs, "position_ids": position_ids})
            position_ids, kwargs, use_cache = None, others, False  # type: ignore[assignment]
        # The mask tells the sentences of a packed batch apart by their positions, but only without
        # a cache.
        if (
            use_cache is None
            and attention_mask is None
            and past_key_values is None
            and position_ids is not None
            and (self.training or _may_restart(position_ids))
        ):
            use_cache = False
        return self.decoder(
            input_ids,
            attention_mask,
            encoder_hidden_states,
            encoder_attention_mask,
            past_key_values,
            inputs_embeds,
            use_cache=use_cache,
            position_ids=position_ids,
            prefix_mask=prefix_mask,
            return_dict=True,
            **kwargs,
        )


class VaswaniForCausalLM(LanguageHead, VaswaniDecoderPreTrainedModel, VaswaniCausalGenerationMixin):
    """A language model: the decoder with its pre-softmax map (3.4), loss (5.4) and `generate`."""

    _tp_plan: ClassVar[dict[str, str]] = {"lm_head": "colwise_gather_output"}
    _tied_weights_keys: ClassVar[dict[str, str]] = {
        "lm_head.weight": "model.decoder.embed_tokens.weight"
    }

    def __init__(self, config: VaswaniDecoderConfig) -> None:
        super().__init__(config)
        self.model = VaswaniDecoderModel(config)
        self.lm_head = nn.Linear(config.d_model, config.vocab_size, bias=config.lm_head_bias)
        self.generation_config = GenerationConfig(
            pad_token_id=config.pad_token_id,
            bos_token_id=config.bos_token_id,
            eos_token_id=config.eos_token_id,
        )
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        encoder_hidden_states: torch.Tensor | None = None,
        encoder_attention_mask: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        prefix_mask: torch.Tensor | None = None,
        num_items_in_batch: torch.Tensor | int | None = None,
        skip_logits: bool | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> CausalLMOutputWithCrossAttentions:
        """Predict the next token at every position: logits (B, T, V).

        Args:
            input_ids: (B, T) tokens.
            attention_mask: (B, T), 1 at real tokens; None means no padding.
            position_ids: (B, T) positions counted from 0; None counts the real tokens, in each
                sentence of a packed batch if `cu_seq_lens_q` is given.
            past_key_values: the cache of an earlier call. Pass only new tokens with it.
            inputs_embeds: (B, T, D) in place of `input_ids`, before scaling by sqrt(d_model).
            encoder_hidden_states: (B, S, D) an encoder's output, for `add_cross_attention` only.
            encoder_attention_mask: (B, S), 1 at real source tokens.
            labels: (B, T) the same tokens as `input_ids`, -100 at positions to ignore. The model
                shifts them inside each sentence, and returns the loss first.
            use_cache: return `past_key_values`; ignored with `labels` and in packed batches.
            logits_to_keep: number of last positions with logits (0: all), or a tensor of positions.
            prefix_mask: (B, T), 1 at tokens that see each other in both directions.
            num_items_in_batch: real tokens of the whole update, from the Trainer.
            skip_logits: with `labels`, return no logits, as in `VaswaniForConditionalGeneration`.
            **kwargs: for the attention backend; `shift_labels` (B, T) are `labels` already shifted.
        """
        # This argument is not in the signature, because the Trainer would expect it in every batch.
        shift_labels: Any = kwargs.pop("shift_labels", None)  # type: ignore[typeddict-item]
        is_shifted = shift_labels is not None
        if shift_labels is None and labels is not None:
            shift_labels = F.pad(labels[:, 1:], (0, 1), value=-100)
            if _is_plain(attention_mask) and attention_mask.shape == labels.shape:
                # The first token of a text that is padded on the left follows only padding.
                shift_labels = shift_labels.masked_fill(attention_mask == 0, -100)
        if shift_labels is not None:
            use_cache = False
        outputs = self.model(
            input_ids,
            attention_mask,
            position_ids,
            past_key_values,
            inputs_embeds,
            encoder_hidden_states,
            encoder_attention_mask,
            use_cache=use_cache,
            prefix_mask=prefix_mask,
            return_dict=True,
            **kwargs,
        )
        boundaries = kwargs.get("cu_seq_lens_q")
        if boundaries is not None and labels is not None and shift_labels is not None:
            # The last token of a packed sentence does not predict the first token of the next one.
            shift_labels = shift_labels.index_fill(1, boundaries[1:].long() - 1, -100)
        if num_items_in_batch is not None and labels is not None and not is_shifted:
            # The Trainer counts `shift_labels` as they are, so only `labels` need a correction.
            num_items_in_batch = _without_first_tokens(num_items_in_batch, labels, shift_labels)
        logits, loss = self.predict(
            outputs.last_hidden_state, shift_labels, num_items_in_batch, logits_to_keep, skip_logits
        )
        recorded = {name: value for name, value in outputs.items() if name != "last_hidden_state"}
        return CausalLMOutputWithCrossAttentions(loss=loss, logits=logits, **recorded)


VaswaniForCausalLM._network_classes = remember(
    VaswaniAttention, VaswaniDecoderLayer, VaswaniDecoder, VaswaniDecoderModel, VaswaniForCausalLM
)

# transformers' Trainer shifts the labels of label_smoothing_factor for these names only.
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.setdefault(
    VaswaniDecoderConfig.model_type, VaswaniForCausalLM.__name__
)

__all__ = ["VaswaniDecoderModel", "VaswaniForCausalLM"]
