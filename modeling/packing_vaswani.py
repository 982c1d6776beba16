"""Packed batches: the sentences of a batch are concatenated, without padding.

All position-wise parts of the network compute (1, N, D), the states of N real tokens. Only
attention needs the boundaries of sentences. Attention reads the boundaries from a `Packing`, which
replaces the mask of a padded batch. The inputs of a packed batch have the names of transformers'
DataCollatorWithFlattening, with the prefix `decoder_` on the target side.

Shapes: B sentences, N tokens of one side, T tokens of the longest sentence, D = d_model.
"""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812
from transformers.masking_utils import create_bidirectional_mask, create_causal_mask
from transformers.modeling_outputs import BaseModelOutput

from .windows_vaswani import LONG, Windows

_KEYS = ("position_ids", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")


class Packing:
    """Boundaries of the sentences of one side of a packed batch.

    Args:
        cu_seq_lens: (B + 1,) start of each sentence, then N, for example 0, 5, 12, ...
        max_length: number of tokens of the longest sentence. None computes it.
        position_ids: (1, N) position of each token in its sentence. None counts from 0.
        prefix: "decoder_" on the target side, for error messages.

    Raises:
        ValueError: `cu_seq_lens` is not a tensor of integers (B + 1,). On the CPU also: it does not
            start at 0 and rise strictly, `max_length` is too small, or a position is not below it.
    """

    def __init__(
        self,
        cu_seq_lens: torch.Tensor,
        max_length: int | None = None,
        position_ids: torch.Tensor | None = None,
        prefix: str = "",
    ) -> None:
        self.prefix = prefix
        _check_boundaries(cu_seq_lens, f"{prefix}cu_seq_lens_q")
        self.cu_seq_lens = cu_seq_lens.to(torch.int32)
        self.max_length = int(self.lengths.max() if max_length is None else max_length)
        self.given_positions = position_ids
        if self.cu_seq_lens.is_cpu:  # a check on a GPU would wait for it
            self._check_lengths()

    @functools.cached_property
    def lengths(self) -> torch.Tensor:
        """The number of tokens of each sentence: (B,), on the CPU."""
        return self.cu_seq_lens.diff().cpu().long()

    @torch.compiler.disable
    def _check_lengths(self) -> None:
        name, lengths = f"{self.prefix}cu_seq_lens_q", self.lengths.tolist()
        start, longest = int(self.cu_seq_lens[0]), max(lengths)
        if start != 0:
            raise ValueError(
                f"{name} must start at 0, where the first sentence starts, got {start}."
            )
        if min(lengths) < 1:
            number = next(index for index, length in enumerate(lengths) if length < 1)
            raise ValueError(
                f"{name} must rise strictly, but sentence {number} (counted from 0) has "
                f"{lengths[number]} tokens: give each sentence at least one token, such as its "
                "end token."
            )
        if self.max_length < longest:
            raise ValueError(
                f"{self.prefix}max_length_q is {self.max_length}, but the longest sentence has "
                f"{longest} tokens: pass {longest}, or leave {self.prefix}max_length_q out."
            )
        if self.given_positions is not None and self.given_positions.is_cpu:
            self._check_positions(self.given_positions, sum(lengths))

    def _check_positions(self, positions: torch.Tensor, tokens: int) -> None:
        name = f"{self.prefix}position_ids"
        if positions.numel() != tokens:
            raise ValueError(
                f"{name} must have the shape (1, {tokens}), got {tuple(positions.shape)}."
            )
        lowest, highest = int(positions.min()), int(positions.max())
        if lowest < 0 or highest >= self.max_length:
            raise ValueError(
                f"{name} go from {lowest} to {highest}, but the longest sentence has "
                f"{self.max_length} tokens: count from 0 in each sentence, or leave {name} out."
            )

    def number_of_tokens(self, states: torch.Tensor) -> int:
        """Return N from the shape of the states or ids (1, N, ...), without waiting for a GPU.

        Raises:
            ValueError: the shape is not (1, N, ...), or N differs from the end of `cu_seq_lens`.
        """
        if states.shape[0] != 1:
            raise ValueError(
                f"A packed batch has the shape (1, N), got {tuple(states.shape[:2])}: leave out "
                "cu_seq_lens_q for a padded batch, or use DataCollatorForPackedSeq2Seq."
            )
        tokens = states.shape[1]
        if self.cu_seq_lens.is_cpu and int(self.cu_seq_lens[-1]) != tokens:
            raise ValueError(
                f"{self.prefix}cu_seq_lens_q end at {int(self.cu_seq_lens[-1])}, but the packed "
                f"batch has {tokens} tokens: the last entry must be the number of tokens."
            )
        return tokens

    def position_ids(self, tokens: int) -> torch.Tensor:
        """Return the position of each token in its sentence: (N,)."""
        if self.given_positions is not None:
            return self.given_positions.flatten()
        starts = self._repeated(self.cu_seq_lens[:-1], tokens)
        return torch.arange(tokens, device=starts.device) - starts

    def padded(self, states: torch.Tensor, fill: float = 0.0) -> torch.Tensor:
        """Pad the sentences on the right: (1, N, ...) to (B, T, ...)."""
        tokens, sentences = self.number_of_tokens(states), len(self.cu_seq_lens) - 1
        starts = self._repeated(self.cu_seq_lens[:-1], tokens)
        numbers = torch.arange(sentences, device=starts.device)
        rows = self._repeated(numbers, tokens) * self.max_length
        rows += torch.arange(tokens, device=starts.device) - starts
        size = (sentences * self.max_length, *states.shape[2:])
        padded = states.new_full(size, fill).index_copy(0, rows, states[0])
        return padded.unflatten(0, (sentences, self.max_length))

    def flat(self, states: torch.Tensor) -> torch.Tensor:
        """Remove the padding of a padded batch: (B, T, ...) to (1, N, ...)."""
        return states[self.padding_mask(states.shape[1])][None]

    def padding_mask(self, width: int) -> torch.Tensor:
        """Return the mask of the padded batch, True at real tokens: (B, width)."""
        columns = torch.arange(width, device=self.cu_seq_lens.device)
        return columns < self.cu_seq_lens.diff()[:, None]

    def _repeated(self, values: torch.Tensor, tokens: int) -> torch.Tensor:
        """Give each token the value of its sentence: (B,) to (N,)."""
        return values.long().repeat_interleave(self.cu_seq_lens.diff(), output_size=tokens)


def _check_boundaries(cu_seq_lens: Any, name: str) -> None:
    """Check the type, shape and dtype, which needs no value from a GPU."""
    if torch.is_tensor(cu_seq_lens):
        is_integer = cu_seq_lens.dtype in (torch.int32, torch.int64)
        if is_integer and cu_seq_lens.dim() == 1 and len(cu_seq_lens) > 1:
            return
        given = f"one of shape {tuple(cu_seq_lens.shape)} and {cu_seq_lens.dtype}"
    else:
        given = f"a {type(cu_seq_lens).__name__}"
    raise ValueError(
        f"{name} must be an int32 or int64 tensor of shape (B + 1,), the start of each of B "
        f"sentences and then the number of tokens, got {given}."
    )


class PackedMask:
    """The attention mask of a packed batch: a query sees only keys of its own sentence."""

    def __init__(self, queries: Packing, keys: Packing) -> None:
        self.queries = queries
        self.keys = keys

    @functools.cached_property
    def lengths(self) -> torch.Tensor:
        """The number of queries and keys of each sentence: (B, 2), on the CPU."""
        return torch.stack((self.queries.lengths, self.keys.lengths), dim=1)

    @functools.cached_property
    def fits_kernels(self) -> bool:
        """Whether the sentences are short enough for the compiled kernel of attention."""
        return self.lengths.is_cpu and int(self.lengths.max()) <= LONG

    @functools.cached_property
    def windows(self) -> Windows:
        """Short sentences joined into windows, for attention without a flash or compiled kernel."""
        return Windows(self.lengths, self.queries.cu_seq_lens.device)

    @functools.cached_property
    def sentences(self) -> Windows:
        """Windows of one sentence each, for attention weights."""
        return Windows(self.lengths, self.queries.cu_seq_lens.device, join=False)


def bidirectional_mask(
    config: Any,
    hidden_states: torch.Tensor,
    attention_mask: Any,
    queries: Any = None,
    encoder_hidden_states: torch.Tensor | None = None,
) -> Any:
    """Make a mask by which all queries see all real keys.

    `queries` is the `Packing` of the queries, if they are another side than the keys.
    """
    if isinstance(attention_mask, Packing):
        return PackedMask(attention_mask if queries is None else queries, attention_mask)
    return create_bidirectional_mask(
        config=config,
        inputs_embeds=hidden_states,
        attention_mask=attention_mask,
        encoder_hidden_states=encoder_hidden_states,
    )


def causal_mask(
    config: Any, hidden_states: torch.Tensor, attention_mask: Any, **options: Any
) -> Any:
    """Make a mask by which a query sees itself and earlier positions.

    `options` are arguments of transformers' `create_causal_mask`.
    """
    if isinstance(attention_mask, Packing):
        return PackedMask(attention_mask, attention_mask)
    return create_causal_mask(
        config=config, inputs_embeds=hidden_states, attention_mask=attention_mask, **options
    )


def both_in_prefix(prefix_mask: torch.Tensor) -> Callable:
    """Let positions of a prefix, marked by 1 in (B, T), see each other: a mask function."""
    prefix, length = prefix_mask.bool(), prefix_mask.shape[1]

    def allowed(batch: Any, head: Any, query: Any, key: Any) -> torch.Tensor:
        inside = (query < length) & (key < length)
        first, second = query.clamp(max=length - 1), key.clamp(max=length - 1)
        return inside & prefix[batch, first] & prefix[batch, second]

    return allowed


def position_encodings(
    encode: Callable,
    start: Any,
    states: torch.Tensor,
    attention_mask: Any,
    position_ids: torch.Tensor | None = None,
) -> torch.Tensor:
    """Encode the positions of (B, T, D), which are `position_ids` (B, T) if given.

    In a packed batch, each sentence starts at position 0.
    """
    length, device = states.shape[1], states.device
    if position_ids is not None:
        return encode(start, length, device, position_ids)
    if isinstance(attention_mask, Packing):
        length = attention_mask.number_of_tokens(states)
        table = encode(0, attention_mask.max_length, device)
        return F.embedding(attention_mask.position_ids(length), table)
    return encode(start, length, device)


def split_packing(kwargs: dict[str, Any], prefix: str = "") -> tuple[Any, dict[str, Any]]:
    """Divide a call's arguments into the boundaries of one side, as a `Packing`, and the others.

    A padded side has no boundaries, so the first result is None. The arguments are not changed in
    place, because torch.compile would repeat the change for calls with other arguments.
    """
    if kwargs.get(f"{prefix}cu_seq_lens_q") is None:
        return None, kwargs
    names = [prefix + name for name in _KEYS]
    given: dict[str, Any] = {name: kwargs.get(prefix + name) for name in _KEYS}
    packing = Packing(given["cu_seq_lens_q"], given["max_length_q"], given["position_ids"], prefix)
    return packing, {name: value for name, value in kwargs.items() if name not in names}


def takes_packed_batches(forward: Callable) -> Callable:
    """Decorate `forward` to accept packed batches, and pad its outputs for them.

    Padded batches are not changed. `pad_outputs=False` returns logits and hidden states of tokens
    with shape (1, N, ...). Attention weights are always (B, H, Q, K).
    """
    signature = inspect.signature(forward)
    _, *names, _ = signature.parameters  # without self and **kwargs
    decodes = "decoder_attention_mask" in names

    @functools.wraps(forward)
    def wrapper(self: Any, *args: Any, pad_outputs: bool = True, **kwargs: Any) -> Any:
        source, kwargs = split_packing(kwargs)
        target, kwargs = split_packing(kwargs, "decoder_")
        arguments = {**dict(zip(names, args, strict=False)), **kwargs}
        if decodes:
            _refuse_prefix(arguments)
        if source is None and target is None:
            _refuse_restarting_positions(arguments)
            if decodes:
                _refuse_positions(arguments)
            return forward(self, *args, **kwargs)
        if source is None or (decodes and target is None):
            raise ValueError(
                "Only one side of the batch is packed: pass both cu_seq_lens_q and "
                "decoder_cu_seq_lens_q, as DataCollatorForPackedSeq2Seq does."
            )
        if target is not None:
            _check_same_number(source, target)
        if len(arguments) != len(args) + len(kwargs):
            signature.bind(self, *args, **kwargs)  # raises Python's own error
        refuse_beside_boundaries(arguments)
        arguments["attention_mask"] = source
        if target is not None:
            _prepare_decoder(self, arguments, target)
            _flatten_encoder_outputs(arguments, source)
        # Outputs are padded by their names, so a tuple is made at the end.
        as_tuple = arguments.get("return_dict") is False
        if as_tuple:
            arguments["return_dict"] = True
        outputs = forward(self, **arguments)
        for name, value in outputs.items() if pad_outputs else ():
            side = source if target is None or name.startswith("encoder") else target
            if name == "logits" or name.endswith(("hidden_state", "hidden_states")):
                outputs[name] = _padded_output(side, value)
        return outputs.to_tuple() if as_tuple else outputs

    # `generate` asks for signatures in each call, and deriving one takes long.
    wrapper.__signature__ = signature  # type: ignore[attr-defined]
    return wrapper


def _refuse_restarting_positions(arguments: Mapping[str, Any]) -> None:
    """Refuse a packed batch without boundaries: its sentences would attend to each other.

    On a GPU, the check would wait for the values, so it is left out.
    """
    positions = arguments.get("position_ids")
    if positions is None or arguments.get("attention_mask") is not None or not positions.is_cpu:
        return
    if torch.compiler.is_compiling() or not (positions[..., 1:] < positions[..., :-1]).any():
        return
    raise ValueError(
        "position_ids start again within a row, as in a packed batch, but there is no "
        "cu_seq_lens_q: pass return_flash_attn_kwargs=True to DataCollatorWithFlattening, or pad "
        "the batch."
    )


def _refuse_positions(arguments: Mapping[str, Any]) -> None:
    """Refuse positions of a padded batch, because one argument cannot serve both stacks."""
    for name in ("position_ids", "decoder_position_ids"):
        if arguments.get(name) is not None:
            raise ValueError(
                f"A translation model counts its positions itself, but {name} are given: leave "
                f"{name} out. For a packed batch, pass cu_seq_lens_q and decoder_cu_seq_lens_q "
                "too."
            )


def _refuse_prefix(arguments: Mapping[str, Any]) -> None:
    if arguments.get("prefix_mask") is not None:
        raise ValueError(
            "prefix_mask is an input of a language model, but a translation model reads its "
            "source in both directions anyway: leave prefix_mask out, or use VaswaniForCausalLM."
        )


def _check_same_number(source: Packing, target: Packing) -> None:
    sources, targets = len(source.cu_seq_lens) - 1, len(target.cu_seq_lens) - 1
    if sources != targets:
        raise ValueError(
            f"cu_seq_lens_q has {sources} source sentences, but decoder_cu_seq_lens_q has "
            f"{targets} target sentences: each source needs one target."
        )


def refuse_beside_boundaries(arguments: Mapping[str, Any]) -> None:
    """Refuse what a packed batch cannot have beside its boundaries.

    Raises:
        ValueError: `attention_mask`, `decoder_attention_mask`, `past_key_values` or
            `logits_to_keep` is given.
    """
    keep = arguments.get("logits_to_keep")
    if torch.is_tensor(keep) or keep:
        raise ValueError(
            "logits_to_keep counts positions of padded sentences, but this batch is packed: leave "
            "logits_to_keep out."
        )
    for name in ("attention_mask", "decoder_attention_mask"):
        if arguments.get(name) is not None:
            raise ValueError(
                f"A packed batch has no padding, but {name} is given with cu_seq_lens_q: leave "
                f"{name} out, or pad the batch and leave cu_seq_lens_q out."
            )
    if arguments.get("past_key_values") is not None:
        raise ValueError(
            "A packed batch has whole sentences, but past_key_values is given with cu_seq_lens_q: "
            "leave one of them out. PEFT's prefix tuning passes a cache: train it with padded "
            "batches."
        )


def _prepare_decoder(model: Any, arguments: dict[str, Any], target: Packing) -> None:
    """Make the decoder's inputs from packed labels, and turn off the cache."""
    arguments |= {"decoder_attention_mask": target, "use_cache": False}
    labels, given = arguments.get("labels"), ("decoder_input_ids", "decoder_inputs_embeds")
    if labels is not None and all(arguments.get(name) is None for name in given):
        arguments["decoder_input_ids"] = _shift_right(model, labels, target)


def _flatten_encoder_outputs(arguments: dict[str, Any], source: Packing) -> None:
    """Remove the padding that `takes_packed_batches` adds to the states of an encoder."""
    if (given := arguments.get("encoder_outputs")) is None:
        return

    def flat(states: Any) -> Any:
        if states is None:  # of a layer that was not selected
            return None
        if len(states) == len(source.cu_seq_lens) - 1:
            states = source.flat(states)
        source.number_of_tokens(states)
        return states

    outputs = BaseModelOutput(**given) if isinstance(given, Mapping) else BaseModelOutput(*given)
    recorded = outputs.hidden_states
    arguments["encoder_outputs"] = BaseModelOutput(
        flat(outputs.last_hidden_state),
        None if recorded is None else tuple(map(flat, recorded)),
        outputs.attentions,
    )


def _shift_right(model: Any, labels: torch.Tensor, target: Packing) -> torch.Tensor:
    padded = target.padded(labels, -100)
    return target.flat(model.prepare_decoder_input_ids_from_labels(padded))


def decoder_inputs(model: Any, labels: torch.Tensor, batch: Mapping[str, Any]) -> torch.Tensor:
    """Shift labels right inside each sentence of a padded or packed batch."""
    cu_seq_lens = batch.get("decoder_cu_seq_lens_q")
    if cu_seq_lens is None:
        return model.prepare_decoder_input_ids_from_labels(labels)
    longest = batch.get("decoder_max_length_q")
    return _shift_right(model, labels, Packing(cu_seq_lens, longest, prefix="decoder_"))


def _padded_output(side: Packing | None, value: Any) -> Any:
    if side is None or value is None:
        return value
    if isinstance(value, tuple):
        # `output_hidden_states=[...]` selects layers, and the others have None.
        return tuple(None if states is None else side.padded(states) for states in value)
    return side.padded(value) if value.dim() > 2 else value  # logits of whole sentences are (B, C)


__all__ = [
    "PackedMask",
    "Packing",
    "bidirectional_mask",
    "both_in_prefix",
    "causal_mask",
    "decoder_inputs",
    "position_encodings",
    "refuse_beside_boundaries",
    "split_packing",
    "takes_packed_batches",
]
