"""The Transformer of "Attention Is All You Need" (Vaswani et al., 2017), in the paper's order.

attention_vaswani.py                    3.2        VaswaniEncoder, VaswaniDecoder   3.1, 3.4
positions_vaswani.py                    3.5        VaswaniModel                     3, figure 1
VaswaniEncoderLayer, ...DecoderLayer    3.1, 3.3   VaswaniForConditionalGeneration  3.4, 5.4

The default configuration has no departures from the paper.
Shapes: B sentences, S source and T target tokens, D = d_model, d_ff, a target vocabulary of V.
"""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn
from transformers import Cache, DynamicCache, EncoderDecoderCache
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import (
    BaseModelOutput,
    BaseModelOutputWithPastAndCrossAttentions,
    Seq2SeqLMOutput,
    Seq2SeqModelOutput,
)
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs, can_return_tuple
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from ..configuration.configuration_vaswani import VaswaniConfig, refuse_other_config
from ..generation.coverage_vaswani import remember
from ..generation.generation_vaswani import VaswaniGenerationMixin
from ..generation.scoring_vaswani import VaswaniScoringMixin
from ..generation.settings_vaswani import VaswaniGenerationConfig
from .attention_vaswani import VaswaniAttention, linear_with_gain
from .dropout_vaswani import drop_out
from .embeddings_vaswani import SharedEmbeddings, TargetVocabulary
from .language_head_vaswani import LanguageHead
from .packing_vaswani import (
    bidirectional_mask,
    both_in_prefix,
    causal_mask,
    position_encodings,
    takes_packed_batches,
)
from .pickling_vaswani import PicklableModule
from .positions_vaswani import LearnedPositions, SinusoidalPositions
from .quantization_vaswani import AdaptableModule, RoundableModel, has_int8, init_int8
from .training_kernels_vaswani import add_and_normalize
from .training_products_vaswani import project

if TYPE_CHECKING:
    # transformers copies the files that remote code imports. This line makes transformers copy the
    # encoders too, because a saved configuration names them.
    from .heads_vaswani import VaswaniForMaskedLM  # noqa: F401


class VaswaniLayer(PicklableModule, AdaptableModule, GradientCheckpointingLayer):
    """The common part of encoder and decoder layers: self-attention and feed-forward (3.1)."""

    def __init__(
        self, config: VaswaniConfig, layer_idx: int, num_heads: int, ffn_dim: int, is_causal: bool
    ) -> None:
        super().__init__()
        self.config = config
        self.norm_first = config.norm_position == "pre"
        self.dropout = config.dropout
        self.activation_dropout = config.activation_dropout
        self.activation_fn = ACT2FN[config.activation_function]
        self.self_attn = VaswaniAttention(config, num_heads, layer_idx, is_causal)
        self.self_attn_layer_norm = nn.LayerNorm(config.d_model, config.layer_norm_eps)
        # fairseq keeps torch's bound for these layers: Xavier's times the gain is 1 / sqrt(inputs).
        width, both = config.d_model, config.d_model + ffn_dim
        self.fc1 = linear_with_gain(width, ffn_dim, fairseq_gain=math.sqrt(both / width / 6))
        self.fc2 = linear_with_gain(ffn_dim, width, fairseq_gain=math.sqrt(both / ffn_dim / 6))
        self.final_layer_norm = nn.LayerNorm(config.d_model, config.layer_norm_eps)

    def add_norm(
        self, hidden_states: torch.Tensor, sublayer: Callable, norm: nn.Module
    ) -> torch.Tensor:
        """LayerNorm(x + Dropout(Sublayer(x))) (3.1, 5.4); pre-norm for imported checkpoints."""
        output = sublayer(norm(hidden_states) if self.norm_first else hidden_states)
        if self.training and not self.norm_first and self.config._attn_implementation != "eager":
            computed = add_and_normalize(hidden_states, output, self.dropout, norm)
            if computed is not None:
                return computed
        output = hidden_states + drop_out(output, self.dropout, self.training)
        return output if self.norm_first else norm(output)

    def feed_forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """FFN(x) = max(0, x W_1 + b_1) W_2 + b_2 (section 3.3, equation 2)."""
        inner = self.activation_fn(project(self.fc1, hidden_states))  # (B, T, d_ff)
        return project(self.fc2, drop_out(inner, self.activation_dropout, self.training))


class VaswaniEncoderLayer(VaswaniLayer):
    """Self-attention over the source, then the feed-forward network (3.1)."""

    def __init__(self, config: VaswaniConfig, layer_idx: int) -> None:
        heads, ffn_dim = config.encoder_attention_heads, config.encoder_ffn_dim
        super().__init__(config, layer_idx, heads, ffn_dim, is_causal=False)

    def forward(
        self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None, **kwargs: Any
    ) -> torch.Tensor:
        """Transform the source states (B, S, D)."""
        hidden_states = self.add_norm(
            hidden_states,
            lambda states: self.self_attn(states, attention_mask=attention_mask, **kwargs)[0],
            self.self_attn_layer_norm,
        )
        return self.add_norm(hidden_states, self.feed_forward, self.final_layer_norm)


class VaswaniDecoderLayer(VaswaniLayer):
    """Masked self-attention, attention to the encoder's output, feed-forward network (3.1).

    A language model has no encoder, so its layers have no encoder-decoder attention.
    """

    # transformers reads this field to resolve negative layer numbers in `output_hidden_states`.
    num_hidden_layers_key: ClassVar[str] = "decoder_layers"

    def __init__(self, config: VaswaniConfig, layer_idx: int) -> None:
        heads, ffn_dim = config.decoder_attention_heads, config.decoder_ffn_dim
        super().__init__(config, layer_idx, heads, ffn_dim, is_causal=True)
        self.encoder_attn = None
        if config.attends_to_source:
            self.encoder_attn = VaswaniAttention(config, heads, layer_idx)
            self.encoder_attn_layer_norm = nn.LayerNorm(config.d_model, config.layer_norm_eps)

    def forward(
        self,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None,
        attention_mask: torch.Tensor | None = None,
        encoder_attention_mask: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Transform the target states (B, T, D), with attention to source states (B, S, D)."""
        hidden_states = self.add_norm(
            hidden_states,
            lambda states: self.self_attn(
                states, attention_mask=attention_mask, past_key_values=past_key_values, **kwargs
            )[0],
            self.self_attn_layer_norm,
        )
        if (attention := self.encoder_attn) is not None:
            hidden_states = self.add_norm(
                hidden_states,
                lambda states: attention(
                    states, encoder_hidden_states, encoder_attention_mask, past_key_values, **kwargs
                )[0],
                self.encoder_attn_layer_norm,
            )
        return self.add_norm(hidden_states, self.feed_forward, self.final_layer_norm)


class VaswaniPreTrainedModel(PicklableModule, SharedEmbeddings, RoundableModel):
    """The base of all models: attributes that transformers reads, and initialisation."""

    config: VaswaniConfig
    config_class = VaswaniConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules: ClassVar[list[str]] = ["VaswaniEncoderLayer", "VaswaniDecoderLayer"]
    _skip_keys_device_placement: ClassVar[list[str]] = ["past_key_values"]
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Draw embeddings with std `init_std` or d_model^-0.5, and matrices by `initializer`."""
        if has_int8(module):
            init_int8(module)
        elif isinstance(module, nn.Linear):
            fairseq = self.config.initializer == "fairseq"
            gain = getattr(module, "fairseq_gain", 1.0) if fairseq else 1.0
            init.xavier_uniform_(module.weight, gain=gain)
            if module.bias is not None:
                init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            std = self.config.init_std or self.config.d_model**-0.5
            init.normal_(module.weight, mean=0.0, std=std)
        elif isinstance(module, nn.LayerNorm):
            init.ones_(module.weight)
            init.zeros_(module.bias)


class VaswaniStack(VaswaniPreTrainedModel):
    """Embeddings, positions and N identical layers: encoder or decoder (3.1, 3.4, 3.5)."""

    _input_hint: str  # how callers pass the input, for error messages

    def __init__(
        self, config: VaswaniConfig, vocab_size: int, layer_class: type, num_layers: int
    ) -> None:
        super().__init__(config)
        config.validate_architecture()
        learned = config.position_encoding == "learned"
        self.dropout = config.dropout
        self.embed_scale = math.sqrt(config.d_model) if config.scale_embedding else 1.0
        self.embed_tokens = nn.Embedding(vocab_size, config.d_model)
        self.embed_positions = LearnedPositions(config) if learned else SinusoidalPositions(config)
        self.layers = nn.ModuleList([layer_class(config, index) for index in range(num_layers)])
        final_norm = config.final_layer_norm
        if final_norm is None:
            # With pre-norm, no layer normalises the last residual sum.
            final_norm = config.norm_position == "pre"
        self.layer_norm = (
            nn.LayerNorm(config.d_model, config.layer_norm_eps) if final_norm else nn.Identity()
        )
        self.gradient_checkpointing = False
        self.post_init()

    def embed(
        self,
        input_ids: torch.Tensor | None,
        inputs_embeds: torch.Tensor | None,
        attention_mask: Any = None,
        start: int | torch.Tensor = 0,
        position_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return embeddings * sqrt(d_model) (3.4) + positions (3.5), with dropout (5.4): (B, T, D).

        Positions count from `start`, unless `position_ids` (B, T) are given.

        Raises:
            ValueError: not exactly one of the two inputs is given, sequences are empty, or a token
                id is outside the vocabulary.
        """
        if inputs_embeds is None and input_ids is not None:
            inputs_embeds = self.look_up(input_ids)
        elif inputs_embeds is None or input_ids is not None:
            raise ValueError(
                f"{type(self).__name__} needs exactly one of input_ids and inputs_embeds, got "
                f"{'neither' if inputs_embeds is None else 'both'}. {self._input_hint}"
            )
        if inputs_embeds.shape[1] == 0:
            raise ValueError(
                f"{type(self).__name__} got sequences without tokens: even an empty sentence has "
                "an end-of-sentence token."
            )
        positions = position_encodings(
            self.embed_positions, start, inputs_embeds, attention_mask, position_ids
        )
        hidden_states = inputs_embeds * self.embed_scale + positions.to(inputs_embeds)
        return drop_out(hidden_states, self.dropout, self.training)

    def look_up(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Look up the embeddings of token ids: (..., D). On a CPU, refuse unknown ids."""
        try:
            return self.embed_tokens(input_ids)
        except IndexError as error:
            size = self.embed_tokens.num_embeddings
            wrong = input_ids[(input_ids < 0) | (input_ids >= size)][0].item()
            raise ValueError(
                f"Token id {wrong} is outside the {size} entries of {type(self).__name__}'s "
                "vocabulary: check that tokenizer and model belong together, or call "
                "model.resize_token_embeddings(len(tokenizer))."
            ) from error


class VaswaniEncoder(VaswaniStack):
    """N layers of self-attention and feed-forward network over the source (3.1)."""

    _input_hint = "Pass the source as input_ids, inputs_embeds or encoder_outputs."
    _can_record_outputs: ClassVar[dict] = {
        "hidden_states": VaswaniEncoderLayer,
        "attentions": VaswaniAttention,
    }

    def __init__(self, config: VaswaniConfig) -> None:
        super().__init__(config, config.vocab_size, VaswaniEncoderLayer, config.encoder_layers)

    @takes_packed_batches
    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutput:
        """Encode `input_ids` (B, S) to (B, S, D); `attention_mask` (B, S) is 1 at real tokens.

        Positions count from 0, padding included, unless `position_ids` (B, S) are given.
        """
        hidden_states = self.embed(
            input_ids, inputs_embeds, attention_mask, position_ids=position_ids
        )
        mask = bidirectional_mask(self.config, hidden_states, attention_mask)
        for layer in self.layers:
            hidden_states = layer(hidden_states, mask, **kwargs)
        return BaseModelOutput(last_hidden_state=self.layer_norm(hidden_states))


class VaswaniDecoder(VaswaniStack):
    """N layers of masked self-attention, encoder-decoder attention, feed-forward network (3.1)."""

    _input_hint = (
        "Pass the target as labels, decoder_input_ids or decoder_inputs_embeds. The Trainer of "
        "transformers removes the labels if label_smoothing_factor is set: leave the factor at 0, "
        "because config.label_smoothing smooths the loss, or use "
        "DataCollatorForSeq2Seq(model=model)."
    )
    _can_record_outputs: ClassVar[dict] = {
        "hidden_states": VaswaniDecoderLayer,
        "attentions": OutputRecorder(VaswaniAttention, index=1, layer_name="self_attn"),
        "cross_attentions": OutputRecorder(VaswaniAttention, index=1, layer_name="encoder_attn"),
    }

    def __init__(self, config: VaswaniConfig) -> None:
        vocab_size = config.decoder_vocab_size or config.vocab_size
        super().__init__(config, vocab_size, VaswaniDecoderLayer, config.decoder_layers)

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        encoder_hidden_states: torch.Tensor | None = None,
        encoder_attention_mask: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        position_ids: torch.Tensor | None = None,
        prefix_mask: torch.Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutputWithPastAndCrossAttentions:
        """Decode `input_ids` (B, T) over `encoder_hidden_states` (B, S, D): (B, T, D).

        Positions that are 1 in `prefix_mask` (B, T) see each other in both directions.
        """
        self._check_source(encoder_hidden_states)
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        if past_key_values is not None and self.config.attends_to_source:
            past_key_values = self._with_cross_attention(past_key_values)
        start = past_key_values.get_seq_length() if past_key_values is not None else 0

        hidden_states = self.embed(input_ids, inputs_embeds, attention_mask, start, position_ids)
        target_mask = causal_mask(
            self.config,
            hidden_states,
            attention_mask,
            past_key_values=past_key_values.self_attention_cache
            if isinstance(past_key_values, EncoderDecoderCache)
            else past_key_values,
            position_ids=position_ids,
            or_mask_function=None if prefix_mask is None else both_in_prefix(prefix_mask),
        )
        source_mask = None
        if encoder_hidden_states is not None:
            source_mask = bidirectional_mask(
                self.config,
                hidden_states,
                encoder_attention_mask,
                queries=attention_mask,
                encoder_hidden_states=encoder_hidden_states,
            )
        for layer in self.layers:
            hidden_states = layer(
                hidden_states,
                encoder_hidden_states,
                attention_mask=target_mask,
                encoder_attention_mask=source_mask,
                past_key_values=past_key_values,
                **kwargs,
            )
        return BaseModelOutputWithPastAndCrossAttentions(
            last_hidden_state=self.layer_norm(hidden_states), past_key_values=past_key_values
        )

    def _check_source(self, encoder_hidden_states: torch.Tensor | None) -> None:
        if self.config.attends_to_source and encoder_hidden_states is None:
            raise ValueError("VaswaniDecoder attends to a source: pass encoder_hidden_states.")
        if encoder_hidden_states is not None and not self.config.attends_to_source:
            raise ValueError(
                "VaswaniDecoder got encoder_hidden_states, but a language model attends to no "
                "source: set add_cross_attention=True in its configuration, or put the source "
                "before the target in one sequence."
            )

    def _with_cross_attention(self, cache: Cache) -> EncoderDecoderCache:
        if isinstance(cache, EncoderDecoderCache):
            return cache
        return EncoderDecoderCache(cache, DynamicCache(config=self.config))


class VaswaniModel(VaswaniPreTrainedModel):
    """Encoder and decoder (section 3, figure 1), without the linear map to the vocabulary."""

    def __init__(self, config: VaswaniConfig) -> None:
        refuse_other_config(type(self), config)
        super().__init__(config)
        if config.share_encoder_decoder_embeddings:
            self._tied_weights_keys = {"decoder.embed_tokens.weight": "encoder.embed_tokens.weight"}
        self.encoder = VaswaniEncoder(config)
        self.decoder = VaswaniDecoder(config)
        self.post_init()

    @can_return_tuple
    @takes_packed_batches
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        decoder_input_ids: torch.Tensor | None = None,
        decoder_attention_mask: torch.Tensor | None = None,
        encoder_outputs: BaseModelOutput | tuple | list | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        decoder_inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> Seq2SeqModelOutput:
        """Encode (B, S), unless `encoder_outputs` are given, and decode (B, T) to (B, T, D)."""
        encoded: BaseModelOutput
        if encoder_outputs is None:
            encoded = self.encoder(
                input_ids, attention_mask, inputs_embeds, return_dict=True, **kwargs
            )
        elif isinstance(encoder_outputs, (tuple, list)):
            encoded = BaseModelOutput(*encoder_outputs)
        elif hasattr(encoder_outputs, "last_hidden_state"):
            encoded = encoder_outputs
        else:
            encoded = BaseModelOutput(**encoder_outputs)
        decoder_outputs = self.decoder(
            decoder_input_ids,
            decoder_attention_mask,
            encoded.last_hidden_state,
            attention_mask,
            past_key_values,
            decoder_inputs_embeds,
            use_cache=use_cache,
            return_dict=True,
            **kwargs,
        )
        return Seq2SeqModelOutput(
            last_hidden_state=decoder_outputs.last_hidden_state,
            past_key_values=decoder_outputs.past_key_values,
            decoder_hidden_states=decoder_outputs.hidden_states,
            decoder_attentions=decoder_outputs.attentions,
            cross_attentions=decoder_outputs.cross_attentions,
            encoder_last_hidden_state=encoded.last_hidden_state,
            encoder_hidden_states=encoded.hidden_states,
            encoder_attentions=encoded.attentions,
        )


class VaswaniForConditionalGeneration(
    TargetVocabulary,
    LanguageHead,
    VaswaniPreTrainedModel,
    VaswaniGenerationMixin,
    VaswaniScoringMixin,
):
    """The Transformer with its pre-softmax linear map (3.4), loss (5.4) and `generate` (6.1)."""

    _tp_plan: ClassVar[dict[str, str]] = {"lm_head": "colwise_gather_output"}

    def __init__(self, config: VaswaniConfig) -> None:
        refuse_other_config(type(self), config)
        super().__init__(config)
        source = "encoder" if config.share_encoder_decoder_embeddings else "decoder"
        self._tied_weights_keys = {"lm_head.weight": f"model.{source}.embed_tokens.weight"}
        self.model = VaswaniModel(config)
        self.lm_head = nn.Linear(
            config.d_model, config.decoder_vocab_size or config.vocab_size, bias=config.lm_head_bias
        )
        self.generation_config = VaswaniGenerationConfig.paper_defaults(
            pad_token_id=config.pad_token_id,
            bos_token_id=config.bos_token_id,
            eos_token_id=config.eos_token_id,
            decoder_start_token_id=config.decoder_start_token_id,
        )
        self.post_init()

    @classmethod
    def from_encoder_decoder_pretrained(
        cls, encoder: Any, decoder: Any = None, **overrides: Any
    ) -> "VaswaniForConditionalGeneration":
        """Join the encoder of one folder and the decoder of another, for a warm start.

        A warning names the weights that neither folder has, such as the attention to the encoder.

        Args:
            encoder: folder or repository of an encoder with any head.
            decoder: folder or repository of a language model. None makes a new decoder.
            **overrides: fields of the configuration. Arguments of `from_pretrained`, such as dtype
                and revision, load both folders.
        """
        from .halves_vaswani import load_halves

        return load_halves(encoder, decoder, **overrides)

    def prepare_decoder_input_ids_from_labels(self, labels: torch.Tensor) -> torch.Tensor:
        """Shift the targets (B, T) right by one position (3.1): add the start, drop the last token.

        Raises:
            ValueError: the configuration has no decoder_start_token_id.
        """
        start = self.config.decoder_start_token_id
        if start is None:
            raise ValueError(
                "Labels are shifted right after decoder_start_token_id, which is None: set it in "
                "the configuration, to eos_token_id for example."
            )
        shifted = labels.new_full(labels.shape, start)
        shifted[:, 1:] = labels[:, :-1]
        return shifted.masked_fill(shifted == -100, self.config.pad_token_id or 0)

    @can_return_tuple
    @takes_packed_batches
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        decoder_input_ids: torch.Tensor | None = None,
        decoder_attention_mask: torch.Tensor | None = None,
        encoder_outputs: BaseModelOutput | tuple | list | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        decoder_inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        num_items_in_batch: torch.Tensor | int | None = None,
        skip_logits: bool | None = None,
        r_drop: float | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> Seq2SeqLMOutput:
        """Predict the next target token at every position: logits (B, T, V).

        Args:
            input_ids: (B, S) source tokens, padded on the right.
            attention_mask: (B, S), 1 at real source tokens; None means no padding.
            decoder_input_ids: (B, T) target tokens so far; None makes them from `labels`.
            decoder_attention_mask: (B, T), 1 at real target tokens.
            encoder_outputs: the encoder's output of an earlier call, (B, S, D) first.
            past_key_values: the cache of an earlier call. Pass only new target tokens with it.
            inputs_embeds: (B, S, D) in place of `input_ids`, before scaling by sqrt(d_model).
            decoder_inputs_embeds: (B, T, D) in place of `decoder_input_ids`.
            labels: (B, T) target tokens from the tokenizer, -100 at positions to ignore. The model
                shifts them right, and returns the loss first.
            use_cache: return `past_key_values`; ignored with `labels` and in packed batches.
            logits_to_keep: number of last positions with logits (0: all), or a tensor of positions.
            num_items_in_batch: real target tokens of the whole update, from the Trainer.
            skip_logits: with `labels`, return no logits and save their memory; None does so in
                training mode, unless `lm_head` has hooks, is wrapped (LoRA), int8 or divided.
            r_drop: weight of the divergence of two passes in the loss, for a batch whose second
                half repeats the first. `VaswaniTrainer(r_drop=...)` makes such batches.
            **kwargs: for the attention backend.
        """
        if labels is not None:
            use_cache = False
            if decoder_input_ids is None and decoder_inputs_embeds is None:
                decoder_input_ids = self.prepare_decoder_input_ids_from_labels(labels)
        outputs = self.model(
            input_ids,
            attention_mask,
            decoder_input_ids,
            decoder_attention_mask,
            encoder_outputs,
            past_key_values,
            inputs_embeds,
            decoder_inputs_embeds,
            use_cache=use_cache,
            return_dict=True,
            **kwargs,
        )
        hidden_states = outputs.last_hidden_state
        logits, loss = self.predict(
            hidden_states, labels, num_items_in_batch, logits_to_keep, skip_logits, r_drop
        )
        recorded = {name: value for name, value in outputs.items() if name != "last_hidden_state"}
        return Seq2SeqLMOutput(loss=loss, logits=logits, **recorded)


VaswaniForConditionalGeneration._network_classes = remember(
    VaswaniAttention,
    VaswaniEncoderLayer,
    VaswaniDecoderLayer,
    VaswaniEncoder,
    VaswaniDecoder,
    VaswaniModel,
    VaswaniForConditionalGeneration,
)

__all__ = ["VaswaniForConditionalGeneration", "VaswaniModel", "VaswaniPreTrainedModel"]
