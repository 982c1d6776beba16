"""The encoder alone (section 3.1).

Shapes: B sentences, S tokens, D = d_model.
"""

from typing import Any, ClassVar

import torch
from transformers.modeling_outputs import BaseModelOutput
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs, can_return_tuple

from ..configuration.configuration_vaswani import VaswaniConfig
from ..configuration.siblings_vaswani import VaswaniEncoderConfig, refuse_inputs_of_other_half
from .modeling_vaswani import VaswaniEncoder, VaswaniPreTrainedModel
from .packing_vaswani import takes_packed_batches


class VaswaniEncoderModel(VaswaniPreTrainedModel):
    """The encoder alone (3.1), for sentence representations or as part of another model.

    A translation model's folder and configuration give its encoder.
    """

    config: VaswaniEncoderConfig
    config_class = VaswaniEncoderConfig
    # This class loads the encoder of a translation model, so ignore the rest of the weights.
    _keys_to_ignore_on_load_unexpected: ClassVar[list[str]] = [
        r"^(model\.)?decoder\.",
        r"^lm_head\.",
        r"^classifier\.",
    ]

    def __init__(self, config: Any) -> None:
        if config.model_type != VaswaniEncoderConfig.model_type:
            config = VaswaniEncoderConfig.of(config)
        super().__init__(config)
        self.encoder = VaswaniEncoder(config)
        self.post_init()

    @classmethod
    def _loadable_types(cls) -> tuple[str, ...]:
        return VaswaniEncoderConfig.readable_types

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Raise an error, because an encoder cannot generate."""
        raise TypeError(
            f"{type(self).__name__} cannot generate, because it has no decoder: "
            "VaswaniForConditionalGeneration translates, and VaswaniForCausalLM continues texts."
        )

    @can_return_tuple
    @takes_packed_batches
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutput:
        """Encode `input_ids` (B, S) to (B, S, D). Arguments are as in `VaswaniForMaskedLM`."""
        refuse_inputs_of_other_half(kwargs, "the encoder alone reads no target")
        return self.encoder(
            input_ids, attention_mask, inputs_embeds, position_ids, return_dict=True, **kwargs
        )


class EncoderOfTranslationModel(VaswaniEncoderModel):
    """A class for the Auto classes that loads the encoder of a translation model's folder.

    The Auto classes of transformers accept only a class with the configuration of the folder. The
    loaded model is a VaswaniEncoderModel.
    """

    config_class = VaswaniConfig  # type: ignore[assignment]

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """Load the encoder; arguments are those of `VaswaniEncoderModel.from_pretrained`."""
        return VaswaniEncoderModel.from_pretrained(*args, **kwargs)

    @classmethod
    def _from_config(cls, config: VaswaniConfig, **kwargs: Any) -> Any:
        return VaswaniEncoderModel._from_config(config, **kwargs)


__all__ = ["EncoderOfTranslationModel", "VaswaniEncoderModel"]
