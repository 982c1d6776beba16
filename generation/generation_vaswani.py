"""`generate` as the paper decodes (section 6.1): length penalty, output limit, stopping rule.

Beam search, greedy search and sampling are those of `search_vaswani.py`, if they cover the settings
of the call. All other searches come from transformers.
"""

import copy
import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from transformers import GenerationConfig, GenerationMixin
from transformers.generation import (
    EosTokenCriteria,
    GenerateBeamEncoderDecoderOutput,
    GenerateEncoderDecoderOutput,
    GenerationMode,
    MaxLengthCriteria,
    PromptLookupCandidateGenerator,
    StoppingCriteriaList,
)
from transformers.utils import GENERATION_CONFIG_NAME, cached_file, logging

from .beam_vaswani import FILL
from .compiled_vaswani import CompiledEncoder
from .coverage_vaswani import (
    NotCovered,
    check_sources,
    class_replaced,
    covers_attention,
    hooks_are_passive,
    method_replaced,
    modules_in,
    stack_modules,
    token_rules,
    weights_are_dense,
)
from .fallback_vaswani import TargetSide, fallback_beam_search
from .incremental_vaswani import IncrementalDecoder
from .limits_vaswani import SourceLengthCriteria, force_end_at_own_limit, length_limits, length_rule
from .linear_vaswani import prepared_copy
from .rules_vaswani import SearchSettings, TokenRules
from .search_vaswani import beam_search, greedy_search
from .settings_vaswani import (
    VaswaniGenerationConfig,
    check_mask,
    check_search,
    check_tokens,
    check_types,
    first_setting,
    refuse_packed,
)

if TYPE_CHECKING:
    # When this file is remote code, transformers copies the files that it imports. This line makes
    # transformers copy the pipeline too.
    from .pipeline_vaswani import VaswaniTranslationPipeline  # noqa: F401

logger = logging.get_logger(__name__)

_SLOWER = "transformers' search runs, which takes longer. The fast search does not cover: %s."
_CUSTOM_GENERATE_INDEX = 6  # of `custom_generate` in `*args` of `generate`
# Modes that the fast search may cover.
_FAST_MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE, GenerationMode.BEAM_SEARCH)


class VaswaniGenerationMixin(GenerationMixin):
    """`generate` with the paper's defaults (6.1), and with all arguments of transformers."""

    config: Any
    model: Any
    lm_head: Any
    device: Any
    training: bool
    forward: Callable
    # Inputs of the model that the fast search handles. Nothing reads the labels of Seq2SeqTrainer,
    # and only the encoder reads `inputs_embeds`.
    _known_inputs: ClassVar[frozenset[str]] = frozenset(
        {"encoder_outputs", "attention_mask", "use_cache", "past_key_values", "logits_to_keep"}
        | {"labels", "inputs_embeds"}
    )
    _makes_cache_late: bool = False  # True in the copy that runs a call
    _beam_output: ClassVar[type] = GenerateBeamEncoderDecoderOutput
    _greedy_output: ClassVar[type] = GenerateEncoderDecoderOutput
    _prepare_as_written: ClassVar[Callable] = GenerationMixin.prepare_inputs_for_generation
    # Classes of the network, the model itself last. The fast search computes what they compute.
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
        """Generate as transformers does, but limit each sentence by the length of its source (6.1).

        A call without `attention_mask` masks the padding, as decoders of transformers do.
        """
        refuse_packed(kwargs)
        check_types({"inputs": inputs, **kwargs}, generation_config)
        for settings in (kwargs, vars(generation_config or self.generation_config)):
            check_tokens(settings)
        mask = self._mask_of_padding(inputs, generation_config, kwargs)
        if mask is not None:
            kwargs["attention_mask"] = mask
        lengths = self._source_lengths(inputs, kwargs)
        prompts = kwargs.get("decoder_input_ids")
        if prompts is not None and len(lengths) > 1:
            check_sources(len(lengths), len(prompts))
        rule = self._length_rule_of_call(generation_config, kwargs)
        if rule is not None:
            prompt = self._prompt_length(generation_config, kwargs)
            limits = length_limits(lengths, *rule) + prompt  # (B,)
            generation_config = self._set_max_length(int(limits.max()), generation_config, kwargs)
            padded = self._setting_of_call("pad_token_id", generation_config, kwargs) is not None
            stopping_criteria = StoppingCriteriaList(
                [*(stopping_criteria or []), SourceLengthCriteria(limits, padded)]
            )
        # The search prepares the decoder. A custom function may keep the model that it gets.
        custom = kwargs.get("custom_generate") is not None or len(args) > _CUSTOM_GENERATE_INDEX
        with torch.no_grad():
            model = self if custom else self._prepared(excluded=self.model.decoder)
            if model is not self:  # a copy for this call
                model._makes_cache_late = True
            return super(VaswaniGenerationMixin, model).generate(
                inputs, generation_config, logits_processor, stopping_criteria, *args, **kwargs
            )

    def _prepared(self, excluded: Any = None) -> Any:
        """Return a copy of the model with prepared layers, except in the module `excluded`.

        With a global hook, return the model itself, because the hook may compare modules by
        identity.
        """
        if torch.nn.modules.module._has_any_global_hook():
            return self
        encoder = getattr(self.model, "encoder", None)

        def compile_encoder(module: Any, copied: Callable) -> Any:
            if (
                module is not encoder
                or self.device.type != "cpu"
                or not covers_attention(self.config._attn_implementation)
                or not self._are_as_written(stack_modules(module))
            ):
                return None
            return CompiledEncoder(module, copied)

        def can_copy(module: Any) -> bool:
            return module is not excluded and self._are_as_written([module])

        return prepared_copy(self, can_copy, compile_encoder)

    def _set_max_length(
        self, max_length: int, given: GenerationConfig | None, kwargs: dict[str, Any]
    ) -> GenerationConfig | None:
        """Set `max_length` in a copy of the given config, or in `kwargs` if no config is given."""
        if self.config.position_limit is not None:
            max_length = min(max_length, self.config.position_limit)
        if given is None:
            kwargs |= {"max_length": max_length, "max_new_tokens": None}
            return None
        limited = copy.deepcopy(given)
        limited.max_length = max_length
        # The merge copies max_new_tokens from the model's config. This mark lets
        # _prepare_generation_config reset it, or it would override max_length.
        vars(limited)["_limited_by_source"] = True
        return limited

    def _mask_of_padding(
        self, inputs: torch.Tensor | None, given: GenerationConfig | None, kwargs: dict[str, Any]
    ) -> torch.Tensor | None:
        """Return a mask for source ids (B, S) that come without one; None if none is needed.

        If the padding token is an end token too, padding cannot be told from ends. Then there is no
        mask, and transformers warns.
        """
        ids = kwargs.get("input_ids") if inputs is None else inputs
        pad = self._setting_of_call("pad_token_id", given, kwargs)
        if ids is None or pad is None or kwargs.get("attention_mask") is not None:
            return None
        if ids.dim() != 2 or ids.is_floating_point():
            return None
        ends = self._setting_of_call("eos_token_id", given, kwargs)
        if ends is not None and int(pad) in torch.as_tensor(ends).flatten().tolist():
            return None
        mask = (ids != int(pad)).long()
        return None if mask.all() else mask

    def _length_rule_of_call(
        self, given: GenerationConfig | None, kwargs: dict[str, Any]
    ) -> tuple[float, int] | None:
        """Return the factor and offset that limit a sentence by its source; None without a limit.

        `max_length` or `max_new_tokens` of the call replace this limit. A `max_new_tokens` in the
        model's generation config does so too, unless the call has settings of this limit. A
        `max_length` there does not, because Seq2SeqTrainer writes one.
        """
        for name in ("max_length", "max_new_tokens"):
            if first_setting(name, kwargs, given) is not None:
                return None
        settings = [
            first_setting(name, kwargs, given)
            for name in ("max_length_factor", "max_length_offset")
        ]
        is_decided = "max_new_tokens" in kwargs or settings != [None, None]
        if not is_decided and self.generation_config.max_new_tokens is not None:
            return None
        return length_rule(
            self._setting_of_call("max_length_factor", given, kwargs),
            self._setting_of_call("max_length_offset", given, kwargs),
        )

    def _source_lengths(self, inputs: torch.Tensor | None, kwargs: dict[str, Any]) -> torch.Tensor:
        """Count the real source tokens of every sentence: (B,)."""
        source = inputs
        for name in ("input_ids", "inputs_embeds"):
            source = kwargs.get(name) if source is None else source
        if source is None and kwargs.get("encoder_outputs") is not None:
            source = kwargs["encoder_outputs"][0]
        if source is None or not len(source):
            raise ValueError(
                "generate needs at least one source sentence: pass input_ids, inputs_embeds or "
                "encoder_outputs."
            )
        if source.dim() < 2:
            raise ValueError(
                f"The source must be a batch of sentences (B, S), got the shape "
                f"{tuple(source.shape)}: put a single sentence into a batch of one."
            )
        attention_mask = kwargs.get("attention_mask")
        if attention_mask is not None and attention_mask.dim() == 2:
            encoded = kwargs.get("encoder_outputs")
            check_mask(attention_mask, source if encoded is None else encoded[0])
            return (attention_mask != 0).sum(dim=-1)
        return torch.full((source.shape[0],), source.shape[1], device=source.device)

    def _prompt_length(self, given: GenerationConfig | None, kwargs: dict[str, Any]) -> int:
        """Count the tokens of `decoder_input_ids`, and the start token that `generate` adds."""
        prompt = kwargs.get("decoder_input_ids")
        if prompt is None:
            return 1
        start = self._setting_of_call("decoder_start_token_id", given, kwargs)
        if start is None:
            start = self._setting_of_call("bos_token_id", given, kwargs)
        start = torch.as_tensor(-1 if start is None else start, device=prompt.device).flatten()
        return prompt.shape[1] + int((prompt[:, 0] != start).all())

    def _setting_of_call(
        self, name: str, given: GenerationConfig | None, kwargs: dict[str, Any]
    ) -> Any:
        """Look a setting up in the call, then in the given config, then in the model's."""
        return first_setting(name, kwargs, given, self.generation_config)

    def _prepare_generation_config(
        self, generation_config: GenerationConfig | None, **kwargs: Any
    ) -> tuple[GenerationConfig, dict]:
        """Override the model's settings by those of the call.

        `VaswaniGenerationConfig` reads the model's settings, because it knows the paper's names.
        """
        if generation_config is not None:
            given = VaswaniGenerationConfig.of(generation_config)
            prepared, model_kwargs = super()._prepare_generation_config(given, **kwargs)
            check_search(prepared)
            if getattr(prepared, "_limited_by_source", False):
                prepared.max_new_tokens = None
            return prepared, model_kwargs
        if misplaced := self.config._get_generation_parameters():
            names = ", ".join(misplaced)
            instead = " Set max_new_tokens there for max_length." * ("max_length" in misplaced)
            raise ValueError(
                f"model.config has settings of the search ({names}), which `generate` does not "
                f"read: set them in model.generation_config.{instead}"
            )
        settings = VaswaniGenerationConfig.read_settings(self.generation_config.to_dict())
        model_kwargs = settings.update(**kwargs)
        prepared, model_kwargs = super()._prepare_generation_config(settings, **model_kwargs)
        # None in the call switches a default off (eos_token_id=None), but the merge refills it.
        prepared.update(**{name: None for name, value in kwargs.items() if value is None})
        return prepared, model_kwargs

    def _validate_generation_mode(
        self, generation_mode: Any, generation_config: Any, generation_mode_kwargs: dict[str, Any]
    ) -> None:
        beams = generation_mode in (GenerationMode.BEAM_SEARCH, GenerationMode.BEAM_SAMPLE)
        if "streamer" in generation_mode_kwargs and beams:
            raise ValueError(
                "A streamer shows each token at once, but beam search chooses tokens at the end: "
                f"pass num_beams=1 (this call has num_beams={generation_config.num_beams})."
            )
        super()._validate_generation_mode(
            generation_mode, generation_config, generation_mode_kwargs
        )

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse continuous batching, which `generate_batch` starts too."""
        raise NotImplementedError(
            f"{type(self).__name__} supports no continuous batching (generate_batch), because its "
            "packed batches take no cache: call generate with a padded batch."
        )

    @functools.wraps(GenerationMixin.compute_transition_scores)
    def compute_transition_scores(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return the score of each generated token, with the size of the target vocabulary."""
        compute: Callable = GenerationMixin.compute_transition_scores
        return compute(TargetSide(self), *args, **kwargs)

    def _get_candidate_generator(self, *args: Any, **kwargs: Any) -> Any:
        """Let prompt lookup use the size of the target vocabulary."""
        generator = super()._get_candidate_generator(*args, **kwargs)
        if isinstance(generator, PromptLookupCandidateGenerator):
            generator.vocab_size = self.config.decoder_vocab_size
        return generator

    def _prepare_cache_for_generation(
        self,
        generation_config: Any,
        model_kwargs: dict[str, Any],
        generation_mode: Any,
        batch_size: int,
        max_cache_length: int,
    ) -> None:
        """Make transformers' cache, or keep the arguments for `_make_cache`.

        The fast search needs no such cache. Note also whether the call brings a cache, because the
        call expects `generate` to fill it.
        """
        generation_config._cache_given = model_kwargs.get("past_key_values") is not None
        arguments = generation_mode, batch_size, max_cache_length
        late = self._makes_cache_late and generation_mode in _FAST_MODES
        generation_config._cache_arguments = arguments if late else None
        if not late:
            super()._prepare_cache_for_generation(generation_config, model_kwargs, *arguments)

    def _make_cache(self, config: Any, model_kwargs: dict[str, Any]) -> None:
        """Make the cache that `_prepare_cache_for_generation` left out."""
        if (arguments := config._cache_arguments) is not None:
            super()._prepare_cache_for_generation(config, model_kwargs, *arguments)

    def _limits_and_rules(
        self,
        prompt: torch.Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        config: Any,
        model_kwargs: dict[str, Any],
        *,
        synced_gpus: bool = False,
        streamer: Any | None = None,
    ) -> tuple[torch.Tensor, TokenRules]:
        """Return the limit of each sentence (B,) and the token rules of the fast search.

        The fast search covers the paper's decoding and `TokenRules`. It does not cover other
        processors and criteria, or calls that return more than sequences and their scores.

        Raises:
            NotCovered: transformers' search must run.
            ValueError: sources and prompts differ in number.
        """
        if (encoded := model_kwargs.get("encoder_outputs")) is not None:
            check_sources(len(encoded[0]) // config.num_beams, len(prompt), config.num_beams)
        given = {name for name, value in model_kwargs.items() if value is not None}
        rules = token_rules(logits_processor, prompt.shape[1], config)
        uncovered = {
            **dict.fromkeys(sorted(given - self._known_inputs), True),
            "synced_gpus": synced_gpus,
            "a streamer": streamer is not None,
            "no pad_token_id": config.num_beams == 1 and config._pad_token_tensor is None,
            "do_sample with beams": config.do_sample and config.num_beams > 1,
            "sampling settings without do_sample": rules.warpers and not config.do_sample,
            "low_memory": config.low_memory,
            "use_cache=False": not config.use_cache,
            "past_key_values": config._cache_given,
            "cache_implementation": config.cache_implementation is not None,
            "output_scores": config.output_scores,
            "output_logits": config.output_logits,
            "output_attentions": config.output_attentions,
            "output_hidden_states": config.output_hidden_states,
        }
        if names := [name for name, applies in uncovered.items() if applies]:
            raise NotCovered(", ".join(names))
        if not self._runs_as_written():
            raise NotCovered(
                "a model in training mode, or with replaced, hooked or divided modules"
            )
        device = prompt.device
        of_call = [
            criterion.max_length
            for criterion in stopping_criteria
            if type(criterion) is MaxLengthCriteria
        ]
        longest = math.ceil(min(of_call, default=config.max_length))  # transformers takes fractions
        if rules.forced_last is not None and longest < config.max_length:
            raise NotCovered("forced_eos_token_id with a MaxLengthCriteria of the call")
        limits = torch.full((len(prompt),), longest, device=device)
        for criterion in stopping_criteria:
            if type(criterion) is SourceLengthCriteria:
                own = criterion.max_lengths.to(device)  # of each source, which may have n samples
                limits = limits.minimum(own.repeat_interleave(len(limits) // len(own)))
            elif type(criterion) is EosTokenCriteria:
                if criterion.eos_token_id is not config._eos_token_tensor:
                    raise NotCovered("an EosTokenCriteria of the call")
            elif type(criterion) is not MaxLengthCriteria:
                raise NotCovered(type(criterion).__name__)
        return limits - prompt.shape[1], rules

    def _runs_as_written(self) -> bool:
        """Tell whether the fast search computes what the modules' own `forward` would compute.

        The fast search calls the parts of layers, never a layer's `forward`. If a module is
        subclassed, wrapped or hooked, transformers' searches must run, which call `forward`.
        """
        network: Any = self  # a module of torch, which the mixin's type does not say
        decoder = self.model.decoder
        modules = [self.model, *stack_modules(decoder)]
        prepare = getattr(self.prepare_inputs_for_generation, "__func__", None)
        return (
            prepare is type(self)._prepare_as_written
            and type(self).forward is self._network_classes[-1].forward
            and not class_replaced(self._network_classes[-1])
            and "predict" not in vars(self)
            and getattr(type(self), "predict", None)
            is getattr(self._network_classes[-1], "predict", None)
            and not method_replaced(network)
            and len(set(getattr(self, "hf_device_map", {}).values())) <= 1
            and covers_attention(self.config._attn_implementation)
            and not torch.nn.modules.module._has_any_global_hook()
            and self._are_as_written(modules)
            and not any(module.training for module in (network, *modules))
            and all(map(hooks_are_passive, (network, self.lm_head, *modules_in(decoder))))
            and weights_are_dense(network)
        )

    def _are_as_written(self, modules: list[torch.nn.Module]) -> bool:
        """Tell whether modules of the network run the methods of their classes and nothing else."""
        classes = set(map(type, modules))
        return (
            classes <= set(self._network_classes)
            and not any(map(class_replaced, classes))
            and not any(map(method_replaced, modules))
            and all(map(hooks_are_passive, modules))
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
        generation_config: Any,
        synced_gpus: bool = False,
        **model_kwargs: Any,
    ) -> Any:
        """Search with a beam (6.1): the fast search if it covers the call, or transformers'."""
        config = generation_config
        if config.length_penalty is None:
            config.length_penalty = 1.0  # the default that transformers documents
        prompt = input_ids[:: config.num_beams]
        logits_processor = force_end_at_own_limit(logits_processor, stopping_criteria)
        try:
            limits, rules = self._limits_and_rules(
                prompt,
                logits_processor,
                stopping_criteria,
                config,
                model_kwargs,
                synced_gpus=synced_gpus,
            )
        except NotCovered as reason:
            logger.info(_SLOWER, reason)
            self._make_cache(config, model_kwargs)
            return fallback_beam_search(
                self._prepared(),
                input_ids,
                logits_processor,
                stopping_criteria,
                config,
                synced_gpus=synced_gpus,
                **model_kwargs,
            )
        decoder = self._incremental_decoder(model_kwargs, config.num_beams)
        tokens, beams, scores = beam_search(
            decoder, prompt, limits, SearchSettings.of_call(config), rules
        )
        padding = config._pad_token_tensor
        if padding is None and config._eos_token_tensor is not None:
            padding = config._eos_token_tensor[0]
        if padding is not None:
            tokens = tokens.masked_fill(beams == FILL, int(padding))
        prompt = prompt.repeat_interleave(config.num_return_sequences, dim=0)
        sequences = cast(torch.LongTensor, torch.cat((prompt, tokens), dim=1))
        if not config.return_dict_in_generate:
            return sequences
        return self._beam_output(
            sequences=sequences,
            # Clone tensors of inference mode, because autograd would refuse them.
            sequences_scores=cast(torch.FloatTensor, scores.clone()),
            beam_indices=cast(torch.LongTensor, beams.clone()),
        )

    def _sample(
        self,
        input_ids: torch.LongTensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        synced_gpus: bool = False,
        streamer: Any | None = None,
        **model_kwargs: Any,
    ) -> Any:
        """Choose a token at a time: by the fast search if it covers the call, or transformers'."""
        config = generation_config
        logits_processor = force_end_at_own_limit(logits_processor, stopping_criteria)
        try:
            limits, rules = self._limits_and_rules(
                input_ids,
                logits_processor,
                stopping_criteria,
                config,
                model_kwargs,
                synced_gpus=synced_gpus,
                streamer=streamer,
            )
        except NotCovered as reason:
            logger.info(_SLOWER, reason)
            self._make_cache(config, model_kwargs)
            return super(VaswaniGenerationMixin, self._prepared())._sample(
                input_ids,
                logits_processor,
                stopping_criteria,
                config,
                synced_gpus,
                streamer,
                **model_kwargs,
            )
        decoder = self._incremental_decoder(model_kwargs, 1)
        tokens = greedy_search(
            decoder, input_ids, limits, SearchSettings.of_call(config), rules, config.do_sample
        )
        tokens = tokens.masked_fill(tokens == FILL, int(config._pad_token_tensor))
        sequences = cast(torch.LongTensor, torch.cat((input_ids, tokens), dim=1))
        if not config.return_dict_in_generate:
            return sequences
        return self._greedy_output(sequences=sequences)

    @functools.wraps(GenerationMixin._assisted_decoding)
    def _assisted_decoding(self, *args: Any, **kwargs: Any) -> Any:
        """Verify tokens that an assistant proposes, as transformers does."""
        return super(VaswaniGenerationMixin, self._prepared())._assisted_decoding(*args, **kwargs)

    def adjust_generation_fn(
        self,
        generation_config: GenerationConfig | None,
        from_auto_class: bool,
        from_pipeline: str | None,
        pretrained_model_name_or_path: str | None,
        trust_remote_code: bool | None = None,
        **kwargs: Any,
    ) -> None:
        """Override the paper's defaults by a checkpoint's generation config, in `from_pretrained`.

        A `custom_generate` of the repository does not replace `generate`; pass it to the call.
        """
        if generation_config is None and pretrained_model_name_or_path is not None:
            # A missing file leaves the defaults. A file that cannot be read is an error.
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
