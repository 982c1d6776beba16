"""The encoder alone (section 3.1) with three heads: masked words, sequences, tokens.

All three take packed batches too, for example those of transformers'
DataCollatorWithFlattening(return_flash_attn_kwargs=True).

Shapes: B sequences, S tokens, D = d_model, V entries of the vocabulary, C classes.
"""

from typing import ClassVar

import torch
from torch import nn
from transformers.modeling_outputs import (
    MaskedLMOutput,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs, can_return_tuple

from ..configuration.configuration_vaswani import VaswaniConfig, refuse_other_config
from ..configuration.siblings_vaswani import VaswaniEncoderConfig
from .dropout_vaswani import drop_out
from .encoder_vaswani import VaswaniEncoderModel
from .language_head_vaswani import LanguageHead
from .loss_vaswani import are_readable, check_labels
from .modeling_vaswani import VaswaniPreTrainedModel
from .packing_vaswani import Packing, takes_packed_batches


class VaswaniEncoderPreTrainedModel(VaswaniPreTrainedModel):
    """An encoder with a head."""

    config: VaswaniEncoderConfig
    config_class = VaswaniEncoderConfig
    # Checkpoints of translation models or other heads have weights besides the encoder's.
    _keys_to_ignore_on_load_unexpected: ClassVar[list[str]] = [
        r"^(model\.)?decoder\.",
        r"^lm_head\.",
        r"^classifier\.",
    ]

    def __init__(self, config: VaswaniEncoderConfig) -> None:
        if config.model_type == VaswaniConfig.model_type:
            config = VaswaniEncoderConfig.of(config)
        refuse_other_config(type(self), config)
        super().__init__(config)
        self.model = VaswaniEncoderModel(config)

    generate = VaswaniEncoderModel.generate


class VaswaniForMaskedLM(LanguageHead, VaswaniEncoderPreTrainedModel):
    """The encoder with a pre-softmax map (3.4), which predicts masked tokens."""

    _keys_to_ignore_on_load_unexpected: ClassVar[list[str]] = [
        r"^(model\.)?decoder\.",
        r"^classifier\.",
    ]
    _tp_plan: ClassVar[dict[str, str]] = {"lm_head": "colwise_gather_output"}
    _tied_weights_keys: ClassVar[dict[str, str]] = {
        "lm_head.weight": "model.encoder.embed_tokens.weight"
    }

    def __init__(self, config: VaswaniEncoderConfig) -> None:
        super().__init__(config)
        config = self.config
        self.lm_head = nn.Linear(config.d_model, config.vocab_size, bias=config.lm_head_bias)
        self.post_init()

    @can_return_tuple
    @takes_packed_batches
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        num_items_in_batch: torch.Tensor | int | None = None,
        skip_logits: bool | None = None,
        position_ids: torch.Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> MaskedLMOutput:
        """Predict the token at every position: logits (B, S, V).

        Args:
            input_ids: (B, S) tokens, some of them masked.
            attention_mask: (B, S), 1 at real tokens; None means no padding.
            inputs_embeds: (B, S, D) in place of `input_ids`, before scaling by sqrt(d_model).
            labels: (B, S) original tokens at masked positions, -100 at other positions.
            num_items_in_batch: masked tokens of the whole update, from the Trainer.
            skip_logits: with `labels`, return no logits and save their memory; None does so in
                training mode, unless `lm_head` has hooks, is wrapped (LoRA), int8 or divided.
            position_ids: (B, S) positions; None counts from 0, padding included.
            **kwargs: for the attention backend.
        """
        outputs = self.model(
            input_ids, attention_mask, inputs_embeds, position_ids, return_dict=True, **kwargs
        )
        logits, loss = self.predict(
            outputs.last_hidden_state, labels, num_items_in_batch, skip_logits=skip_logits
        )
        return MaskedLMOutput(
            loss=loss,
            logits=logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


def _number_of_classes(config: VaswaniEncoderConfig) -> int:
    return config.num_labels or 0


class VaswaniClassifier(VaswaniEncoderPreTrainedModel):
    """The common part of both classifiers: a linear map of the encoder's states to C classes."""

    def __init__(self, config: VaswaniEncoderConfig) -> None:
        super().__init__(config)
        config = self.config
        rate = config.classifier_dropout
        if _number_of_classes(config) < 1 or (rate is not None and not 0 <= rate < 1):
            raise ValueError(
                "A classifier needs num_labels of at least 1 and a classifier_dropout from 0 to "
                f"below 1, got {config.num_labels} and {rate}."
            )
        self.dropout = config.dropout if rate is None else rate
        self.classifier = nn.Linear(config.d_model, _number_of_classes(config))
        self.post_init()

    def classify(self, states: torch.Tensor) -> torch.Tensor:
        """Map states (..., D) to logits (..., C)."""
        return self.classifier(drop_out(states, self.dropout, self.training))

    def check_classes(self, labels: torch.Tensor) -> None:
        """Check that every integer label on the CPU is a class number, or -100 (ignored).

        Raises:
            ValueError: a label is neither -100 nor the number of a class.
        """
        if not labels.is_floating_point():
            advice = "classes: set num_labels to their number when the model is made or loaded."
            check_labels(labels, _number_of_classes(self.config), advice)


class VaswaniForSequenceClassification(VaswaniClassifier):
    """The encoder with a classifier or a regression of whole sequences."""

    @can_return_tuple
    @takes_packed_batches
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        num_items_in_batch: torch.Tensor | int | None = None,
        position_ids: torch.Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> SequenceClassifierOutput:
        """Classify sequences: logits (B, C).

        Args:
            input_ids: (B, S) tokens.
            attention_mask: (B, S), 1 at real tokens; None means no padding.
            inputs_embeds: (B, S, D) in place of `input_ids`, before scaling by sqrt(d_model).
            labels: (B,) classes; (B, C) zeros and ones for several classes per sequence; (B,) or
                (B, C) numbers for a regression. `config.problem_type` decides among them. If it is
                None, the labels decide.
            num_items_in_batch: labels of the whole update, from the Trainer.
            position_ids: (B, S) positions; None counts from 0, padding included.
            **kwargs: for the attention backend.
        """
        outputs = self.model(
            input_ids, attention_mask, inputs_embeds, position_ids, return_dict=True, **kwargs
        )
        logits = self.classify(self.pool(outputs.last_hidden_state, attention_mask))
        loss = None
        if labels is not None:
            loss = self.compute_loss(logits, labels, num_items_in_batch)
        return SequenceClassifierOutput(
            loss=loss,
            logits=logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )

    def compute_loss(
        self,
        logits: torch.Tensor,
        labels: torch.Tensor,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> torch.Tensor:
        """Compute transformers' loss for `config.problem_type`.

        Raises:
            ValueError: the number or the shape of the labels is wrong, or a label is not the number
                of a class.
        """
        if labels.dim() > 0 and len(labels) != len(logits):
            raise ValueError(
                f"Labels of shape {tuple(labels.shape)} do not fit {len(logits)} sequences: pass "
                "one label per sequence, in a packed batch too."
            )
        labels = self.checked_labels(labels, logits)
        loss = self.loss_function(labels=labels, pooled_logits=logits, config=self.config)
        if num_items_in_batch is None:
            return loss
        # transformers' loss is a mean. The Trainer needs the batch's share of the update.
        real = (labels != -100).sum()
        share = loss * real / torch.as_tensor(num_items_in_batch).to(loss)
        return torch.where(real > 0, share, 0.0)  # a mean over no labels is NaN

    def checked_labels(self, labels: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Check labels against the kind of problem. Cast integers to the dtype of its loss.

        If `config.problem_type` is None, one class is a regression. Otherwise integers are classes,
        and floats and booleans mark several classes.

        Raises:
            ValueError: the shape of the labels is wrong, or a label is not the number of a class.
        """
        kind, classes = self.config.problem_type, _number_of_classes(self.config)
        if kind is None and classes == 1:
            kind = "regression"
        elif kind is None:
            several = labels.is_floating_point() or labels.dtype == torch.bool
            kind = "multi_label_classification" if several else "single_label_classification"
        numbers = labels if labels.is_floating_point() else labels.float()
        if kind == "regression":
            return numbers
        if kind == "single_label_classification":
            self.check_classes(labels)
            if labels.numel() == len(logits):
                return labels if labels.is_floating_point() else labels.long()
        if labels.shape != logits.shape or kind == "single_label_classification":
            raise ValueError(
                f"Labels of shape {tuple(labels.shape)} do not fit a sequence with any of "
                f"{classes} classes: pass floats (0 or 1) of shape (B, {classes}), or "
                "integers of shape (B,) if a sequence has one class."
            )
        if are_readable(labels) and ((labels < 0) | (labels > 1)).any():
            wrong = labels[(labels < 0) | (labels > 1)][0].item()
            raise ValueError(
                f"Label {wrong:g} is not between 0 and 1: a sequence has a class (1) or not (0)."
            )
        return numbers

    def pool(
        self, states: torch.Tensor, attention_mask: torch.Tensor | Packing | None
    ) -> torch.Tensor:
        """Return the mean or the first position of sequences: (B, S, D) or (1, N, D) to (B, D).

        Raises:
            ValueError: the mean has a mask that is not (B, S), so real tokens are unknown.
        """
        if isinstance(attention_mask, Packing):
            states = attention_mask.padded(states)
            attention_mask = attention_mask.padding_mask(states.shape[1])
        if self.config.pooling == "first":
            return states[:, 0]
        if attention_mask is None:
            return states.mean(dim=1)
        if attention_mask.dim() != 2:
            raise ValueError(
                'pooling="mean" averages the real tokens of an attention_mask (B, S), but got a '
                f'mask of shape {tuple(attention_mask.shape)}: pass (B, S), or use pooling="first".'
            )
        real = attention_mask.to(states.dtype)[:, :, None]  # (B, S, 1)
        return (states * real).sum(dim=1) / real.sum(dim=1).clamp(min=1)


class VaswaniForTokenClassification(VaswaniClassifier):
    """The encoder with a classifier of every token."""

    @can_return_tuple
    @takes_packed_batches
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        num_items_in_batch: torch.Tensor | int | None = None,
        position_ids: torch.Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> TokenClassifierOutput:
        """Classify tokens: logits (B, S, C).

        Args:
            input_ids: (B, S) tokens.
            attention_mask: (B, S), 1 at real tokens; None means no padding.
            inputs_embeds: (B, S, D) in place of `input_ids`, before scaling by sqrt(d_model).
            labels: (B, S) classes, -100 at tokens to ignore.
            num_items_in_batch: labels of the whole update, from the Trainer.
            position_ids: (B, S) positions; None counts from 0, padding included.
            **kwargs: for the attention backend.
        """
        outputs = self.model(
            input_ids, attention_mask, inputs_embeds, position_ids, return_dict=True, **kwargs
        )
        logits = self.classify(outputs.last_hidden_state)
        loss = None
        if labels is not None:
            self.check_classes(labels)
            labels = labels if labels.is_floating_point() else labels.long()
            loss = self.loss_function(
                logits, labels, self.config, num_items_in_batch=num_items_in_batch
            )
        return TokenClassifierOutput(
            loss=loss,
            logits=logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


__all__ = [
    "VaswaniForMaskedLM",
    "VaswaniForSequenceClassification",
    "VaswaniForTokenClassification",
]
