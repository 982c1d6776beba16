"""`generate` of a language model: transformers' own, with the searches of `search_vaswani.py`."""

import functools
from typing import Any, ClassVar

import torch
from torch.nn import functional as F  # noqa: N812
from transformers import GenerationConfig, GenerationMixin
from transformers.generation import GenerateBeamDecoderOnlyOutput, GenerateDecoderOnlyOutput

from .coverage_vaswani import NotCovered
from .generation_vaswani import VaswaniGenerationMixin
from .incremental_vaswani import IncrementalDecoder
from .rules_vaswani import TokenRules
from .settings_vaswani import check_tokens, refuse_packed


def check_prefix(
    prefix_mask: Any, attention_mask: Any, position_ids: Any, batch: int, width: int | None
) -> None:
    """Refuse a prefix mask that does not fit the batch. `width` is None if there is a cache.

    Raises:
        ValueError: the message names the shape or the positions.
    """
    if (
        not torch.is_tensor(prefix_mask)
        or prefix_mask.dim() != 2
        or len(prefix_mask) != batch
        or width not in (None, prefix_mask.shape[1])
    ):
        shape = tuple(prefix_mask.shape) if torch.is_tensor(prefix_mask) else repr(prefix_mask)
        raise ValueError(
            f"prefix_mask must be a tensor of shape ({batch}, {width or 'T'}), as input_ids, got "
            f"{shape}."
        )
    if torch.is_tensor(attention_mask) and attention_mask.dim() == 4:
        raise ValueError(
            "prefix_mask needs an attention_mask of shape (B, T), got one of shape "
            f"{tuple(attention_mask.shape)}: leave prefix_mask out, because a mask of four "
            "dimensions already says which tokens see each other."
        )
    if not torch.is_tensor(position_ids) or torch.compiler.is_compiling():
        return
    restarts = position_ids[..., 1:] < position_ids[..., :-1]
    if torch.is_tensor(attention_mask) and attention_mask.shape == position_ids.shape:
        # transformers fills the positions of padding with a constant.
        restarts = restarts & attention_mask[:, 1:].bool()
    if bool(restarts.any()):
        raise ValueError(
            "prefix_mask needs one text in each row, but position_ids start again within a row: "
            "pad the texts instead of packing them, or leave prefix_mask out."
        )


class VaswaniCausalGenerationMixin(VaswaniGenerationMixin):
    """`generate` with transformers' arguments and defaults; prompts are padded on the left."""

    _known_inputs: ClassVar[frozenset[str]] = frozenset(
        {"attention_mask", "position_ids", "prefix_mask"}
        | {"use_cache", "past_key_values", "logits_to_keep"}
    )
    _beam_output: ClassVar[type] = GenerateBeamDecoderOnlyOutput
    _greedy_output: ClassVar[type] = GenerateDecoderOnlyOutput

    @functools.wraps(GenerationMixin.generate)
    def generate(
        self,
        inputs: torch.Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Continue a text as transformers does."""
        refuse_packed(kwargs)
        for name in ("max_length_offset", "max_length_factor"):
            if kwargs.get(name):
                raise ValueError(
                    f"{name}={kwargs[name]!r} limits a translation by the length of its source, "
                    "which a language model does not have: pass max_new_tokens."
                )
        for settings in (kwargs, vars(generation_config or self.generation_config)):
            check_tokens(settings)
        with torch.no_grad():
            return super(VaswaniGenerationMixin, self).generate(
                inputs, generation_config, *args, **kwargs
            )

    def prepare_inputs_for_generation(
        self,
        input_ids: torch.LongTensor,
        # transformers looks for these names, and counts on their order
        next_sequence_length: int | None = None,
        past_key_values: Any = None,
        attention_mask: torch.LongTensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        is_first_iteration: bool | None = False,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Prepare inputs as transformers does, but keep the prefix with a static cache.

        transformers makes the mask of a static cache itself, and its mask is causal. So the model
        makes the mask of the prompt. Generated tokens come after the prefix, so later steps need no
        prefix mask.
        """
        inputs = super().prepare_inputs_for_generation(
            input_ids,
            next_sequence_length,
            past_key_values,
            attention_mask,
            inputs_embeds,
            is_first_iteration,
            **kwargs,
        )
        prefix, ids = inputs.get("prefix_mask"), inputs.get("input_ids")
        if prefix is not None and ids is not None and past_key_values is None:
            # Without a cache, each step reads the whole text again.
            inputs["prefix_mask"] = F.pad(prefix, (0, max(ids.shape[1] - prefix.shape[1], 0)))
        if inputs.get("prefix_mask") is None or inputs.get("attention_mask") is attention_mask:
            return inputs
        if is_first_iteration:
            inputs["attention_mask"] = attention_mask
        else:
            del inputs["prefix_mask"]
        return inputs

    # The fast search replaces this method, so an overridden method turns the fast search off.
    _prepare_as_written = prepare_inputs_for_generation

    def _limits_and_rules(
        self,
        prompt: torch.Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        config: Any,
        model_kwargs: dict[str, Any],
        **outside: Any,
    ) -> tuple[torch.Tensor, TokenRules]:
        """Return limits and rules, as for translation.

        The search reads prompts that are padded on the left, with the positions of `generate`.

        Raises:
            NotCovered: transformers' search must run, for example to read other prompts.
        """
        if self.config.attends_to_source:
            raise NotCovered("cross-attention")
        if not prompt.shape[1]:
            raise NotCovered("an empty prompt")
        if config.return_dict_in_generate and config.num_beams == 1:
            raise NotCovered("a returned cache")  # the caller may continue the text with it
        if prompt.device != self.model.decoder.embed_tokens.weight.device:
            raise NotCovered("a prompt on another device")  # transformers moves it in each step
        mask, positions = model_kwargs.get("attention_mask"), model_kwargs.get("position_ids")
        if (prefix := model_kwargs.get("prefix_mask")) is not None:
            # transformers has repeated the prefix for every hypothesis, but not the prompt.
            repeats = max(len(prefix) // max(len(prompt), 1), 1)
            check_prefix(prefix[::repeats], mask, positions, *prompt.shape)
        if mask is not None and not (
            mask.shape[-1:] == prompt.shape[1:]
            and mask.dim() == 2
            and bool((mask[:, 1:] >= mask[:, :-1]).all())
        ):
            raise NotCovered("a prompt that is not padded on the left")
        if mask is not None and not bool(mask[:, -1].all()):
            raise NotCovered("a prompt of padding only")
        if positions is not None:
            counted = torch.arange(prompt.shape[1], device=prompt.device)
            if mask is not None:
                counted = (mask.long().cumsum(dim=1) - 1).clamp(min=0)
            if positions.shape[-1] != prompt.shape[1] or not bool((positions == counted).all()):
                raise NotCovered("position_ids of the call")
        return super()._limits_and_rules(
            prompt, logits_processor, stopping_criteria, config, model_kwargs, **outside
        )

    def _incremental_decoder(self, model_kwargs: dict[str, Any], beams: int) -> IncrementalDecoder:
        """Start a decoder over the prompts of a call, whose inputs are repeated for each beam."""
        mask, prefix = model_kwargs.get("attention_mask"), model_kwargs.get("prefix_mask")
        return IncrementalDecoder(
            self,
            source=None,
            prompt_mask=None if mask is None else mask[::beams],
            prefix_mask=None if prefix is None else prefix[::beams],
        )


__all__ = ["VaswaniCausalGenerationMixin", "check_prefix"]
