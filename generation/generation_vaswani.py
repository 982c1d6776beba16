"""`generate` as the paper decodes (section 6.1): length penalty, output limit, stopping rule.

Beam and greedy search are those of `search_vaswani.py`, as far as they cover a call; all the rest
of `generate` is transformers' own.
"""

import copy
import functools
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from transformers import GenerationConfig, GenerationMixin
from transformers.generation import (
    EosTokenCriteria,
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    ForcedEOSTokenLogitsProcessor,
    GenerateBeamEncoderDecoderOutput,
    GenerateEncoderDecoderOutput,
    GenerationMode,
    LogitNormalization,
    MaxLengthCriteria,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    StoppingCriteriaList,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)
from transformers.utils import GENERATION_CONFIG_NAME, cached_file

from .fallback_vaswani import TargetSide, fallback_beam_search
from .incremental_vaswani import IncrementalDecoder
from .limits_vaswani import (
    ForcedEndAtOwnLimit,
    SourceLengthCriteria,
    forced_at_own_limit,
    length_limits,
)
from .linear_vaswani import prepared_copy
from .search_vaswani import FILL, SearchSettings, TokenRules, beam_search, greedy_search
from .settings_vaswani import (
    VaswaniGenerationConfig,
    check_search,
    check_tokens,
    checked_factor,
    checked_offset,
)

if TYPE_CHECKING:
    # Where this file is remote code, transformers copies with it what it seems to import: a folder
    # saved from such a model gets its pipeline by this line.
    from .pipeline_vaswani import VaswaniTranslationPipeline  # noqa: F401

# Implementations of the same attention, between which our searches need not choose.
_ATTENTION = ("eager", "sdpa", "flex_attention", "flash_attention_2", "flash_attention_3")
# Modules whose hooks the fast search can skip safely: they only record attentions, or enable the
# input gradients of a frozen model.
_HARMLESS = ("transformers.utils.output_capturing", "transformers.modeling_utils")
# What sampling does to the logits of a step, without a look at earlier tokens.
_WARPERS = (
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    MinPLogitsWarper,
    TypicalLogitsWarper,
    EpsilonLogitsWarper,
    EtaLogitsWarper,
)


def token_rules(processors: Any, prompt_length: int, config: Any) -> TokenRules | None:
    """Read processors as rules that our searches know; None if there are others among them."""
    rules = TokenRules()
    for processor in processors:
        kind = type(processor)
        if kind in _WARPERS:
            rules.warpers.append(processor)
        elif rules.warpers and kind is not LogitNormalization:
            return None  # the rules would come before the warpers here
        elif kind is SuppressTokensLogitsProcessor:
            rules.never |= set(processor.suppress_tokens.tolist())
        elif kind is NoBadWordsLogitsProcessor:
            if any(len(word) > 1 for word in processor.sequence_bias):
                return None
            rules.never |= {token for (token,) in processor.sequence_bias}
        elif kind in (MinLengthLogitsProcessor, MinNewTokensLengthLogitsProcessor):
            least = (
                processor.min_length
                if kind is MinLengthLogitsProcessor
                else processor.min_new_tokens + processor.prompt_length_to_skip
            )
            rules.min_length = max(rules.min_length, least - prompt_length)
            ends = set(processor.eos_token_id.tolist())
            if rules.ends not in (set(), ends):
                return None
            rules.ends = ends
        elif kind in (ForcedEOSTokenLogitsProcessor, ForcedEndAtOwnLimit):
            own = kind is ForcedEndAtOwnLimit
            if len(processor.eos_token_id) > 1 or not (
                own or processor.max_length == config.max_length
            ):
                return None
            rules.forced_last = int(processor.eos_token_id)
        elif kind is LogitNormalization:
            rules.renormalize = True  # transformers runs it after all others
        else:
            return None
    return None if rules.forced_last in rules.never else rules


def _search_settings(config: Any) -> SearchSettings:
    """Read the prepared generation config of a call."""
    ends = config._eos_token_tensor
    return SearchSettings(
        num_beams=config.num_beams,
        num_return_sequences=config.num_return_sequences,
        length_penalty=float(config.length_penalty),
        length_penalty_type=getattr(config, "length_penalty_type", None),
        early_stopping=config.early_stopping,
        eos_token_ids=() if ends is None else tuple(ends.tolist()),
    )


def _forward_replaced(module: torch.nn.Module) -> bool:
    """Tell whether somebody has put a function over `forward`, Accelerate's casts left aside.

    Accelerate wraps a model for mixed precision and keeps the original beside. The fast search
    computes in the type of the weights, without such casts.
    """
    return "forward" in vars(module) and "_original_forward" not in vars(module)


def _hooks_are_harmless(module: torch.nn.Module) -> bool:
    hooks = module._forward_hooks.values()
    return not module._forward_pre_hooks and all(hook.__module__ in _HARMLESS for hook in hooks)


class VaswaniGenerationMixin(GenerationMixin):
    """`generate` with the paper's defaults (6.1); transformers' own arguments keep working."""

    config: Any
    # What a call of `generate` may pass to the model, for the fast search to apply.
    _known_inputs: ClassVar[frozenset[str]] = frozenset(
        # Seq2SeqTrainer passes labels, for nothing.
        {"encoder_outputs", "attention_mask", "use_cache", "past_key_values", "logits_to_keep"}
        | {"labels"}
    )
    _beam_output: ClassVar[type] = GenerateBeamEncoderDecoderOutput
    _greedy_output: ClassVar[type] = GenerateEncoderDecoderOutput
    # The network's classes, the model itself last: the fast search knows what their `forward` does.
    _network_classes: ClassVar[tuple[type[torch.nn.Module], ...]] = ()

    @functools.wraps(GenerationMixin.generate)
    def generate(
        self,
        inputs: torch.Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        logits_processor: Any = None,
        stopping_criteria: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Generate as transformers does, each sentence limited by its own source length (6.1).

        Padding is masked where a call passes no `attention_mask`, as for decoders in transformers.
        """
        for settings in (kwargs, vars(generation_config or self.generation_config)):
            check_tokens(settings)
        mask = self._mask_of_padding(inputs, generation_config, kwargs)
        if mask is not None:
            kwargs["attention_mask"] = mask
        rule = self._length_rule_of_call(generation_config, kwargs)
        if rule is not None:
            prompt = self._prompt_length(generation_config, kwargs)
            limits = length_limits(self._source_lengths(inputs, kwargs), *rule) + prompt  # (B,)
            max_length = int(limits.max())
            if self.config.position_encoding == "learned":
                max_length = min(max_length, self.config.max_position_embeddings)
            if generation_config is None:
                kwargs |= {"max_length": max_length, "max_new_tokens": None}
            else:
                limited: Any = copy.deepcopy(generation_config)
                limited.max_length = max_length
                # Merging will take max_new_tokens from the model's config, where it must not count.
                limited._limited_by_source = True
                generation_config = limited
            padded = self._first_set(generation_config, kwargs, "pad_token_id") is not None
            stopping_criteria = StoppingCriteriaList(
                [*(stopping_criteria or []), SourceLengthCriteria(limits, padded)]
            )
        with torch.no_grad():
            model: Any = self
            # A custom function may keep the model it gets. A global hook may look for a module by
            # identity, and would not find it in a copy.
            hooked = torch.nn.modules.module._has_any_global_hook()
            if kwargs.get("custom_generate") is None and not hooked:
                model = prepared_copy(model, self._is_as_written)
            return super(VaswaniGenerationMixin, model).generate(
                inputs, generation_config, logits_processor, stopping_criteria, *args, **kwargs
            )

    def _mask_of_padding(
        self, inputs: torch.Tensor | None, given: GenerationConfig | None, kwargs: dict[str, Any]
    ) -> torch.Tensor | None:
        """Mask the padding of source ids (B, S) that come without a mask.

        None means that nothing is padded, or that the padding token ends sentences too: then
        padding cannot be told from ends, and transformers warns.
        """
        ids = kwargs.get("input_ids") if inputs is None else inputs
        pad = self._first_set(given, kwargs, "pad_token_id")
        if ids is None or pad is None or kwargs.get("attention_mask") is not None:
            return None
        if ids.dim() != 2 or ids.is_floating_point():
            return None
        ends = self._first_set(given, kwargs, "eos_token_id")
        if ends is not None and int(pad) in torch.as_tensor(ends).flatten().tolist():
            return None
        mask = (ids != int(pad)).long()
        return None if mask.all() else mask

    def _length_rule_of_call(
        self, given: GenerationConfig | None, kwargs: dict[str, Any]
    ) -> tuple[float, int] | None:
        """The factor and offset that limit a sentence by its source; None where they do not.

        The call's own `max_length` or `max_new_tokens` replaces the rule. Those of the model's
        generation config do not count, because Seq2SeqTrainer writes one there.
        """
        for name in ("max_length", "max_new_tokens"):
            if kwargs.get(name) is not None or getattr(given, name, None) is not None:
                return None
        offset = self._first_set(given, kwargs, "max_length_offset")
        factor = self._first_set(given, kwargs, "max_length_factor")
        offset = 0 if offset is None else checked_offset(offset)
        if not (offset or factor):
            return None
        return 1.0 if factor is None else checked_factor(factor), offset

    def _source_lengths(self, inputs: torch.Tensor | None, kwargs: dict[str, Any]) -> torch.Tensor:
        """Count the real source tokens of every sentence: (B,)."""
        source = next(
            (
                tensor
                for tensor in (inputs, kwargs.get("input_ids"), kwargs.get("inputs_embeds"))
                if tensor is not None
            ),
            None,
        )
        if source is None and kwargs.get("encoder_outputs") is not None:
            source = kwargs["encoder_outputs"][0]
        if source is None or not len(source):
            raise ValueError(
                "generate needs at least one source sentence: pass input_ids, inputs_embeds or "
                "encoder_outputs."
            )
        if source.dim() < 2:
            raise ValueError(
                f"The source must be a batch of sentences, (B, S), got the shape "
                f"{tuple(source.shape)}: put a single sentence into a batch of one."
            )
        if (attention_mask := kwargs.get("attention_mask")) is not None:
            return attention_mask.sum(dim=-1)
        return torch.full((source.shape[0],), source.shape[1], device=source.device)

    def _prompt_length(self, given: GenerationConfig | None, kwargs: dict[str, Any]) -> int:
        """Count the decoder's given tokens and the start token that transformers puts first."""
        prompt = kwargs.get("decoder_input_ids")
        if prompt is None:
            return 1
        start = self._first_set(given, kwargs, "decoder_start_token_id", "bos_token_id")
        first = torch.as_tensor(-1 if start is None else start, device=prompt.device).flatten()
        return prompt.shape[1] + int((prompt[:, 0] != first).all())

    def _first_set(
        self, given: GenerationConfig | None, kwargs: dict[str, Any], *names: str
    ) -> Any:
        """Look up what a call sets: in itself, in the config it gives, in the model's own."""
        settings = (kwargs, vars(given or self.generation_config), vars(self.generation_config))
        values = (setting.get(name) for name in names for setting in settings)
        return next((value for value in values if value is not None), None)

    def _prepare_generation_config(
        self, generation_config: GenerationConfig | None, **kwargs: Any
    ) -> tuple[GenerationConfig, dict]:
        """Lay the call's settings over this model's, whose class knows all of their keys."""
        if generation_config is not None:
            prepared, model_kwargs = super()._prepare_generation_config(generation_config, **kwargs)
            check_search(prepared)
            if getattr(prepared, "_limited_by_source", False):
                prepared.max_new_tokens = None
            return prepared, model_kwargs
        settings = VaswaniGenerationConfig.from_dict(self.generation_config.to_dict())
        model_kwargs = settings.update(**kwargs)
        prepared, model_kwargs = super()._prepare_generation_config(settings, **model_kwargs)
        # A None in the call switches a default off (eos_token_id=None); merging has refilled it.
        prepared.update(**{name: None for name, value in kwargs.items() if value is None})
        return prepared, model_kwargs

    def _validate_generation_mode(
        self, generation_mode: Any, generation_config: Any, generation_mode_kwargs: dict[str, Any]
    ) -> None:
        if "streamer" in generation_mode_kwargs and generation_mode == GenerationMode.BEAM_SEARCH:
            raise ValueError(
                "A streamer shows each token when it is chosen, but beam search chooses them at "
                "the end: pass num_beams=1. Without it, this call searches with "
                f"num_beams={generation_config.num_beams}."
            )
        super()._validate_generation_mode(
            generation_mode, generation_config, generation_mode_kwargs
        )

    @functools.wraps(GenerationMixin.compute_transition_scores)
    def compute_transition_scores(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Score each generated token; transformers would count by the source's vocabulary."""
        target: Any = TargetSide(self)
        return GenerationMixin.compute_transition_scores(target, *args, **kwargs)

    def _get_candidate_generator(self, *args: Any, **kwargs: Any) -> Any:
        """Let prompt lookup, too, count by the target's vocabulary."""
        generator: Any = super()._get_candidate_generator(*args, **kwargs)
        if hasattr(generator, "vocab_size"):
            generator.vocab_size = self.config.decoder_vocab_size
        return generator

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        """Note whether the call brings a cache, which it then expects to find filled."""
        generation_config._cache_given = model_kwargs.get("past_key_values") is not None
        super()._prepare_cache_for_generation(generation_config, model_kwargs, *args, **kwargs)

    def _fast_search(
        self,
        prompt: torch.Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        config: Any,
        model_kwargs: dict[str, Any],
    ) -> tuple[torch.Tensor, TokenRules] | None:
        """Tell how many tokens each sentence may get, (B,), and which; None if that takes more.

        Our searches know the paper's decoding and `TokenRules`: whatever changes scores, stops
        otherwise, or wants to see more than the outcome is left to transformers' searches.
        """
        given = {name for name, value in model_kwargs.items() if value is not None}
        rules = token_rules(logits_processor, prompt.shape[1], config)
        if (
            given - self._known_inputs
            or rules is None
            or (config.do_sample and config.num_beams > 1)
            or (rules.warpers and not config.do_sample)
            or config.low_memory
            or not config.use_cache
            or config._cache_given
            or config.cache_implementation is not None
            or config.output_scores
            or config.output_logits
            or config.output_attentions
            or config.output_hidden_states
            or not self._runs_as_written()
        ):
            return None
        device = prompt.device
        longest = [
            criterion.max_length
            for criterion in stopping_criteria
            if type(criterion) is MaxLengthCriteria
        ]
        limits = torch.full((len(prompt),), min(longest, default=config.max_length), device=device)
        for criterion in stopping_criteria:
            if type(criterion) is SourceLengthCriteria:
                own = criterion.max_lengths.to(device)  # of each source, which may have n samples
                limits = limits.minimum(own.repeat_interleave(len(limits) // len(own)))
            elif type(criterion) is EosTokenCriteria:
                if criterion.eos_token_id is not config._eos_token_tensor:
                    return None
            elif type(criterion) is not MaxLengthCriteria:
                return None
        return limits - prompt.shape[1], rules

    def _runs_as_written(self) -> bool:
        """Tell whether the fast search computes what the modules' own `forward` would compute.

        It calls the parts of layers, not the layers. A module that somebody has subclassed, wrapped
        or hooked is left to transformers' searches, which call it.
        """
        model: Any = self
        decoder = model.model.decoder
        modules = [model.model, decoder, *decoder.layers]
        for layer in decoder.layers:
            modules += filter(None, (layer.self_attn, layer.encoder_attn))
        prepare = getattr(model.prepare_inputs_for_generation, "__func__", None)
        return (
            prepare is GenerationMixin.prepare_inputs_for_generation
            and type(model).forward is self._network_classes[-1].forward
            and not _forward_replaced(model)
            and len(set(getattr(model, "hf_device_map", {}).values())) <= 1
            and self.config._attn_implementation in _ATTENTION
            and not torch.nn.modules.module._has_any_global_hook()
            and all(self._is_as_written(module) and not module.training for module in modules)
            and not model.training
            and all(map(_hooks_are_harmless, (model, model.lm_head, *decoder.modules())))
        )

    def _is_as_written(self, module: torch.nn.Module) -> bool:
        """Tell whether a module of the network does what its class says, and nothing else."""
        return (
            type(module) in self._network_classes
            and not _forward_replaced(module)
            and _hooks_are_harmless(module)
        )

    def _incremental_decoder(self, model_kwargs: dict[str, Any], beams: int) -> IncrementalDecoder:
        """Start a decoder over the sources of a call, whose inputs are repeated for each beam."""
        mask = model_kwargs.get("attention_mask")
        source = model_kwargs["encoder_outputs"][0][::beams]
        return IncrementalDecoder(self, source, None if mask is None else mask[::beams])

    def _beam_search(
        self,
        input_ids: torch.LongTensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: GenerationConfig,
        synced_gpus: bool = False,
        **model_kwargs: Any,
    ) -> Any:
        """Search with a beam (6.1): our own search where it applies, else transformers'."""
        config: Any = generation_config
        if config.length_penalty is None:
            config.length_penalty = 1.0  # as transformers documents it
        prompt = input_ids[:: config.num_beams]
        logits_processor = forced_at_own_limit(logits_processor, stopping_criteria)
        fast = self._fast_search(prompt, logits_processor, stopping_criteria, config, model_kwargs)
        if synced_gpus or fast is None:
            return fallback_beam_search(
                self,
                input_ids,
                logits_processor,
                stopping_criteria,
                config,
                synced_gpus=synced_gpus,
                **model_kwargs,
            )
        limits, rules = fast
        decoder = self._incremental_decoder(model_kwargs, config.num_beams)
        tokens, beams, scores = beam_search(
            decoder, prompt, limits, _search_settings(config), rules
        )
        fill = config._pad_token_tensor
        if fill is None and config._eos_token_tensor is not None:
            fill = config._eos_token_tensor[0]
        if fill is not None:
            tokens = tokens.masked_fill(beams == FILL, int(fill))
        prompt = prompt.repeat_interleave(config.num_return_sequences, dim=0)
        sequences: Any = torch.cat((prompt, tokens), dim=1)
        if not config.return_dict_in_generate:
            return sequences
        return self._beam_output(
            sequences=sequences,
            # Copies: the search made its own in inference mode, which autograd would refuse.
            sequences_scores=cast(Any, scores.clone()),
            beam_indices=cast(Any, beams.clone()),
        )

    def _sample(
        self,
        input_ids: torch.LongTensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: GenerationConfig,
        synced_gpus: bool = False,
        streamer: Any = None,
        **model_kwargs: Any,
    ) -> Any:
        """Choose one token at a time: with our own greedy search or sampling where it applies."""
        config: Any = generation_config
        logits_processor = forced_at_own_limit(logits_processor, stopping_criteria)
        fast = self._fast_search(
            input_ids, logits_processor, stopping_criteria, config, model_kwargs
        )
        if fast is None or synced_gpus or streamer is not None or config._pad_token_tensor is None:
            return super()._sample(
                input_ids,
                logits_processor,
                stopping_criteria,
                config,
                synced_gpus,
                streamer,
                **model_kwargs,
            )
        limits, rules = fast
        decoder = self._incremental_decoder(model_kwargs, 1)
        tokens = greedy_search(
            decoder, input_ids, limits, _search_settings(config), rules, config.do_sample
        )
        tokens = tokens.masked_fill(tokens == FILL, int(config._pad_token_tensor))
        sequences: Any = torch.cat((input_ids, tokens), dim=1)
        if not config.return_dict_in_generate:
            return sequences
        return self._greedy_output(sequences=sequences)

    def adjust_generation_fn(
        self,
        generation_config: GenerationConfig | None,
        from_auto_class: bool,
        from_pipeline: str | None,
        pretrained_model_name_or_path: str | None,
        trust_remote_code: bool | None = None,
        **kwargs: Any,
    ) -> None:
        """Lay a checkpoint's generation config over the paper's defaults, for `from_pretrained`.

        A repository's own `custom_generate` is not installed over `generate`; pass it to the call.
        """
        if generation_config is None and pretrained_model_name_or_path is not None:
            # Where there is no such file the defaults hold; one that cannot be read is an error.
            file = cached_file(
                pretrained_model_name_or_path,
                GENERATION_CONFIG_NAME,
                _raise_exceptions_for_missing_entries=False,
                **kwargs,
            )
            if file is not None:
                generation_config = VaswaniGenerationConfig.from_pretrained(
                    pretrained_model_name_or_path, **kwargs
                )
        if generation_config is not None:
            loaded = generation_config.to_dict()
            self.generation_config.update(
                allow_custom_entries=True,
                **{name: value for name, value in loaded.items() if value is not None},
            )
