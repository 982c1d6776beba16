"""The encoder alone (section 3.1) under three heads: masked words, sequences, tokens.

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

from ..configuration.siblings_vaswani import VaswaniEncoderConfig
from .dropout_vaswani import drop_out
from .language_head_vaswani import LanguageHead
from .modeling_vaswani import VaswaniEncoderModel, VaswaniPreTrainedModel


class VaswaniEncoderPreTrainedModel(VaswaniPreTrainedModel):
    """An encoder under a head."""

    config: VaswaniEncoderConfig
    config_class = VaswaniEncoderConfig
    # A translation model, and an encoder under another head, have weights beside the encoder's.
    _keys_to_ignore_on_load_unexpected: ClassVar[list[str]] = [
        r"^(model\.)?decoder\.",
        r"^lm_head\.",
        r"^classifier\.",
    ]

    def __init__(self, config: VaswaniEncoderConfig) -> None:
        super().__init__(config)
        self.model = VaswaniEncoderModel(config)

    generate = VaswaniEncoderModel.generate


class VaswaniForMaskedLM(LanguageHead, VaswaniEncoderPreTrainedModel):
    """The encoder with a pre-softmax map (3.4), which says what stands at masked positions."""

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
        self.lm_head = nn.Linear(config.d_model, config.vocab_size, bias=config.lm_head_bias)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        num_items_in_batch: torch.Tensor | int | None = None,
        skip_logits: bool | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> MaskedLMOutput:
        """Predict the token at every position: logits (B, S, V).

        Args:
            input_ids: (B, S) tokens, some of them masked.
            attention_mask: (B, S), 1 at real tokens; without it there is no padding.
            inputs_embeds: (B, S, D) in place of `input_ids`, not yet scaled by sqrt(d_model).
            labels: (B, S) the tokens that were masked, -100 elsewhere.
            num_items_in_batch: masked tokens of the whole update, from the Trainer.
            skip_logits: with `labels`, return no logits and never hold those of a whole batch; None
                does so in training mode.
            **kwargs: passed on to the attention backend.
        """
        outputs = self.model(input_ids, attention_mask, inputs_embeds, return_dict=True, **kwargs)
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
        rate = config.classifier_dropout
        self.dropout = config.dropout if rate is None else rate
        self.classifier = nn.Linear(config.d_model, _number_of_classes(config))
        self.post_init()

    def classify(self, states: torch.Tensor) -> torch.Tensor:
        """Map states (..., D) to logits (..., C)."""
        return self.classifier(drop_out(states, self.dropout, self.training))

    def check_classes(self, labels: torch.Tensor) -> None:
        """Refuse labels of no class; -100 marks what is ignored.

        Raises:
            ValueError: a label is neither -100 nor the number of a class.
        """
        classes = _number_of_classes(self.config)
        if labels.is_floating_point() or labels.device.type != "cpu":
            return
        wrong = labels[(labels != -100) & ((labels < 0) | (labels >= classes))]
        if wrong.numel():
            raise ValueError(
                f"Label {wrong[0].item()} is outside the {classes} classes: set num_labels to "
                "their number when the model is made or loaded."
            )


class VaswaniForSequenceClassification(VaswaniClassifier):
    """The encoder with a classifier of whole sequences, or a regression of them."""

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        num_items_in_batch: torch.Tensor | int | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> SequenceClassifierOutput:
        """Classify sequences: logits (B, C).

        Args:
            input_ids: (B, S) tokens.
            attention_mask: (B, S), 1 at real tokens; without it there is no padding.
            inputs_embeds: (B, S, D) in place of `input_ids`, not yet scaled by sqrt(d_model).
            labels: (B,) classes, (B, C) zeros and ones where a sequence has several classes, or
                (B,) or (B, C) numbers for a regression; `config.problem_type` says which, and
                is decided by the labels where it is None.
            num_items_in_batch: labels of the whole update, from the Trainer.
            **kwargs: passed on to the attention backend.
        """
        outputs = self.model(input_ids, attention_mask, inputs_embeds, return_dict=True, **kwargs)
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
        """Compute the loss that `config.problem_type` names, as transformers decides it."""
        if labels.dim() == 1 and _number_of_classes(self.config) > 1:
            self.check_classes(labels)
        loss = self.loss_function(labels=labels, pooled_logits=logits, config=self.config)
        if num_items_in_batch is None:
            return loss
        # transformers' losses are means; the Trainer wants this batch's share of its update.
        return loss * (labels != -100).sum() / torch.as_tensor(num_items_in_batch).to(loss)

    def pool(self, states: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
        """Represent sequences (B, S, D) by their mean or their first position: (B, D)."""
        if self.config.pooling == "first":
            return states[:, 0]
        if attention_mask is None or attention_mask.dim() != 2:
            return states.mean(dim=1)
        real = attention_mask.to(states.dtype)[:, :, None]  # (B, S, 1)
        return (states * real).sum(dim=1) / real.sum(dim=1).clamp(min=1)


class VaswaniForTokenClassification(VaswaniClassifier):
    """The encoder with a classifier of every token."""

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        num_items_in_batch: torch.Tensor | int | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> TokenClassifierOutput:
        """Classify tokens: logits (B, S, C).

        Args:
            input_ids: (B, S) tokens.
            attention_mask: (B, S), 1 at real tokens; without it there is no padding.
            inputs_embeds: (B, S, D) in place of `input_ids`, not yet scaled by sqrt(d_model).
            labels: (B, S) classes, -100 at tokens to ignore.
            num_items_in_batch: labels of the whole update, from the Trainer.
            **kwargs: passed on to the attention backend.
        """
        outputs = self.model(input_ids, attention_mask, inputs_embeds, return_dict=True, **kwargs)
        logits = self.classify(outputs.last_hidden_state)
        loss = None
        if labels is not None:
            self.check_classes(labels)
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
