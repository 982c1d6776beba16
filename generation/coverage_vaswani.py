"""Checks whether the fast search can run a call of `generate` on a model.

transformers' searches run everything else (section 6.1).
"""

from typing import Any

import torch
from torch import nn
from transformers.generation import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    ForcedEOSTokenLogitsProcessor,
    LogitNormalization,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .limits_vaswani import ForcedEndAtOwnLimit
from .rules_vaswani import TokenRules

# Files of transformers whose hooks the fast search can skip safely. The hooks only record
# attentions or enable input gradients. They are local functions, known by their module alone.
_FILES_OF_PASSIVE_HOOKS = ("transformers.utils.output_capturing", "transformers.modeling_utils")
# Processors of sampling that read the logits of a step only, and no earlier tokens.
_WARPERS = (
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    MinPLogitsWarper,
    TypicalLogitsWarper,
    EpsilonLogitsWarper,
    EtaLogitsWarper,
)


# Methods whose results the fast search may compute by itself. `_remembered_methods` keeps these
# methods of each remembered class.
_COMPUTED = ("forward", "feed_forward", "add_norm", "embed", "look_up", "_split_heads")
_remembered_methods: dict[type, tuple[Any, ...]] = {}
# Attention implementations that the fast search covers, with transformers' function for each.
_ATTENTION = {
    name: ALL_ATTENTION_FUNCTIONS.get(name) for name in ("eager", "sdpa", "flex_attention")
}


class NotCovered(Exception):  # noqa: N818  not an error: transformers' search runs instead
    """The fast search does not cover a call. The message names what it does not cover."""


def token_rules(processors: Any, prompt_length: int, config: Any) -> TokenRules:
    """Translate logits processors to rules of the fast search.

    Raises:
        NotCovered: the fast search has no such rule.
    """
    rules = TokenRules()
    for processor in processors:
        kind = type(processor)
        if rules.renormalize:
            raise NotCovered(f"{kind.__name__} after LogitNormalization")
        if kind in _WARPERS:
            rules.warpers.append(processor)
        elif rules.warpers and kind is not LogitNormalization:
            raise NotCovered(f"{kind.__name__} after sampling settings")
        elif kind is SuppressTokensLogitsProcessor:
            rules.never |= set(processor.suppress_tokens.tolist())
        elif kind is NoBadWordsLogitsProcessor:
            if any(len(word) > 1 for word in processor.sequence_bias):
                raise NotCovered("bad_words_ids of several tokens")
            rules.never |= {token for (token,) in processor.sequence_bias}
        elif kind in (MinLengthLogitsProcessor, MinNewTokensLengthLogitsProcessor):
            min_length = (
                processor.min_length
                if kind is MinLengthLogitsProcessor
                else processor.min_new_tokens + processor.prompt_length_to_skip
            )
            rules.min_length = max(rules.min_length, min_length - prompt_length)
            ends = set(processor.eos_token_id.tolist())
            if rules.ends not in (set(), ends):
                raise NotCovered("minimum lengths with different end tokens")
            rules.ends = ends
        elif kind in (ForcedEOSTokenLogitsProcessor, ForcedEndAtOwnLimit):
            at_limit = kind is ForcedEndAtOwnLimit or processor.max_length == config.max_length
            if len(processor.eos_token_id) > 1 or not at_limit:
                raise NotCovered("forced_eos_token_id with several tokens or a limit of its own")
            rules.forced_last = int(processor.eos_token_id)
        elif kind is LogitNormalization:
            rules.renormalize = True
        else:
            raise NotCovered(kind.__name__)
    if rules.forced_last in rules.never:
        raise NotCovered("a last token that is forced and banned")
    return rules


def remember(*kinds: type[nn.Module]) -> tuple[type[nn.Module], ...]:
    """Remember the methods of classes as they are written, and return the classes."""
    _remembered_methods.update({kind: _computed_methods(kind) for kind in kinds})
    return kinds


def class_replaced(kind: type[nn.Module]) -> bool:
    """Tell whether the methods of a class are monkey-patched, if they were remembered."""
    return kind in _remembered_methods and _remembered_methods[kind] != _computed_methods(kind)


def _computed_methods(kind: type[nn.Module]) -> tuple[Any, ...]:
    return tuple(getattr(kind, name, None) for name in _COMPUTED)


def covers_attention(implementation: str | None) -> bool:
    """Tell whether the fast search computes an implementation of attention.

    A user may register another function under a name of transformers.
    """
    known = ALL_ATTENTION_FUNCTIONS.get(implementation)
    return implementation in _ATTENTION and _ATTENTION[implementation] is known


remember(nn.Linear, nn.LayerNorm, nn.Embedding, nn.ReLU)


def method_replaced(module: torch.nn.Module) -> bool:
    """Tell whether a method of a module is monkey-patched.

    Accelerate's wrapper of `forward` for mixed precision does not count; it keeps
    `_original_forward`. The fast search computes in the dtype of the weights, without such casts.
    """
    own = vars(module)
    if own.keys().isdisjoint(_COMPUTED):
        return False
    return "_original_forward" not in own or any(name in own for name in _COMPUTED[1:])


def hooks_are_passive(module: torch.nn.Module) -> bool:
    """Tell whether the hooks of a module may be skipped."""
    if module._forward_pre_hooks:
        return False
    hooks = module._forward_hooks
    return not hooks or all(hook.__module__ in _FILES_OF_PASSIVE_HOOKS for hook in hooks.values())


def modules_in(root: Any) -> list[torch.nn.Module]:
    """List a module and all modules in it, as `modules` does, but in less time."""
    found, seen = [root], {root, None}
    for module in found:  # the list grows
        for child in list(module._modules.values()):
            if child not in seen:
                seen.add(child)
                found.append(child)
    return found


def weights_are_dense(root: Any) -> bool:
    """Tell whether no weight is sparse, or divided among processes as a DTensor with a mesh."""
    return not any(
        weight.layout is not torch.strided
        or (type(weight) is not torch.nn.Parameter and hasattr(weight, "device_mesh"))
        for module in modules_in(root)
        for weight in module._parameters.values()
        if weight is not None
    )


def check_sources(sources: int, prompts: int, num_beams: int = 1) -> None:
    """Refuse sources whose number is not that of the prompts, if transformers would fail.

    Raises:
        NotCovered: greedy search or sampling continues several prompts of one source.
        ValueError: the numbers differ otherwise.
    """
    if sources == prompts:
        return
    if sources == 1 == num_beams:
        raise NotCovered("one source of several prompts")
    raise ValueError(
        f"generate has {sources} source{'s' * (sources > 1)}, but {prompts} "
        f"prompt{'s' * (prompts > 1)} (decoder_input_ids): pass one for each source"
        f"{', or several prompts of one source with num_beams=1' if sources == 1 else ''}."
    )


def stack_modules(stack: Any) -> list[torch.nn.Module]:
    """List an encoder or a decoder, its layers, and their attention."""
    found = [stack, *stack.layers]
    for layer in stack.layers:
        attentions = layer.self_attn, getattr(layer, "encoder_attn", None)
        found += [attention for attention in attentions if attention is not None]
    return found


__all__ = [
    "NotCovered",
    "check_sources",
    "class_replaced",
    "covers_attention",
    "hooks_are_passive",
    "method_replaced",
    "modules_in",
    "remember",
    "stack_modules",
    "token_rules",
    "weights_are_dense",
]
