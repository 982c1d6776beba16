"""Packed batches: the sentences of a batch are concatenated, without padding.

All position-wise parts of the network compute (1, N, D), the states of N real tokens. Only
attention needs the boundaries of sentences. Attention reads the boundaries from a
`Packing`, which replaces the mask of a padded batch. The inputs of a packed batch have the names of
transformers' DataCollatorWithFlattening, with the prefix `decoder_` on the target side.

Shapes: B sentences, N tokens of one side, G sentences of a group, Q queries, K keys, H heads,
D = d_model; d_k and d_v as in the paper.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812
from torch.nn.attention.varlen import varlen_attn
from transformers.masking_utils import create_bidirectional_mask, create_causal_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

# Sentences share a group if the longest has at most this multiple of the shortest one's tokens, or
# at most this number of tokens more.
_LENGTH_RATIO, _EXTRA_TOKENS = 1.25, 3
_KEYS = ("position_ids", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")


class Packing:
    """Boundaries of the sentences of one side of a packed batch.

    Args:
        cu_seq_lens: (B + 1,) start of each sentence, then N, for example 0, 5, 12, ...
        max_length: number of tokens of the longest sentence. None computes it.
        position_ids: (1, N) position of each token in its sentence. None counts from 0.
    """

    def __init__(
        self,
        cu_seq_lens: torch.Tensor,
        max_length: int | None = None,
        position_ids: torch.Tensor | None = None,
    ) -> None:
        self.cu_seq_lens = cu_seq_lens.to(torch.int32)
        self.max_length = int(self.lengths.max() if max_length is None else max_length)
        self.given_positions = position_ids

    @functools.cached_property
    def lengths(self) -> torch.Tensor:
        """The number of tokens of each sentence: (B,), on the CPU."""
        return self.cu_seq_lens.diff().cpu().long()

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
                f"cu_seq_lens end at {int(self.cu_seq_lens[-1])}, but the packed batch has "
                f"{tokens} tokens: its last entry must be the number of tokens."
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
        columns = torch.arange(states.shape[1], device=states.device)
        return states[columns < self.cu_seq_lens.diff()[:, None]][None]

    def _repeated(self, values: torch.Tensor, tokens: int) -> torch.Tensor:
        """Give each token the value of its sentence: (B,) to (N,)."""
        return values.long().repeat_interleave(self.cu_seq_lens.diff(), output_size=tokens)


@dataclasses.dataclass(frozen=True)
class _Group:
    """Sentences of similar length, which are padded together inside attention.

    Args:
        sentences: (G,) numbers of the sentences in the batch.
        queries, keys: rows of the group among all padded rows.
        sizes: Q and K.
        real_keys: (G, 1, 1, K) mask of the real keys, or None if the group has no padded keys.
    """

    sentences: torch.Tensor
    queries: slice
    keys: slice
    sizes: tuple[int, int]
    real_keys: torch.Tensor | None

    def additive_mask(self, causal: bool, like: torch.Tensor) -> torch.Tensor:
        """Return a mask to add to scores, (G or 1, 1, Q, K): 0 at visible keys, else a minimum."""
        seen = torch.ones(self.sizes, dtype=torch.bool, device=like.device)
        seen = (seen.tril() if causal else seen)[None, None]
        if self.real_keys is not None:
            seen = seen & self.real_keys
        lowest = torch.finfo(like.dtype).min
        return torch.zeros_like(seen, dtype=like.dtype).masked_fill(~seen, lowest)


class PackedMask:
    """The attention mask of a packed batch: a query sees only keys of its own sentence."""

    def __init__(self, queries: Packing, keys: Packing) -> None:
        self.queries = queries
        self.keys = keys

    @functools.cached_property
    def layout(self) -> tuple[torch.Tensor, torch.Tensor, list[_Group]]:
        """The padded row of each query (N,), the padded row of each key, and the groups."""
        device = self.queries.cu_seq_lens.device
        lengths = torch.stack((self.queries.lengths, self.keys.lengths), dim=1)  # (B, 2)
        starts, groups = torch.zeros_like(lengths), []
        first_query = first_key = 0
        for members in _similar_sentences(lengths):
            number, longest = len(members), lengths[members].amax(dim=0)
            rows = torch.arange(number)[:, None] * longest
            starts[members] = rows + torch.tensor([first_query, first_key])
            queries, keys = longest.tolist()
            real = torch.arange(keys) < lengths[members, 1:]  # (G, K)
            group = _Group(
                sentences=members.to(device),
                queries=slice(first_query, first_query + number * queries),
                keys=slice(first_key, first_key + number * keys),
                sizes=(queries, keys),
                real_keys=None if real.all() else real[:, None, None].to(device),
            )
            first_query, first_key = group.queries.stop, group.keys.stop
            groups.append(group)
        query_rows, key_rows = (
            (start.repeat_interleave(length) + _positions(length)).to(device)
            for start, length in zip(starts.T, lengths.T, strict=True)
        )
        return query_rows, key_rows, groups


def _similar_sentences(lengths: torch.Tensor) -> list[torch.Tensor]:
    """Divide sentences with lengths (B, 2) into groups that need little padding."""
    total = lengths.sum(dim=1)
    order = total.argsort(stable=True)
    groups, start = [], 0
    ordered = total[order].tolist()
    for index, length in enumerate(ordered):
        shortest = ordered[start]
        if length > max(_LENGTH_RATIO * shortest, shortest + _EXTRA_TOKENS):
            groups.append(order[start:index])
            start = index
    return [*groups, order[start:]]


def _positions(lengths: torch.Tensor) -> torch.Tensor:
    """Return the position of each token in its sentence: lengths (B,) to (N,)."""
    starts = lengths.cumsum(0) - lengths
    return torch.arange(int(lengths.sum())) - starts.repeat_interleave(lengths)


class _TakeRows(torch.autograd.Function):
    """Select rows, each at most once. The gradient is copied, not summed as in `index_select`."""

    @staticmethod
    def forward(ctx: Any, states: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(rows)
        ctx.number = len(states)
        return states.index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        (rows,) = ctx.saved_tensors
        whole = gradient.new_zeros((ctx.number, *gradient.shape[1:]))
        return whole.index_copy_(0, rows, gradient), None


def attention_function(
    implementation: str, attention_mask: Any, eager_attention: Callable
) -> Callable:
    """Return the attention function of packed batches, or the one that transformers chooses."""
    if isinstance(attention_mask, PackedMask):
        return functools.partial(packed_attention, implementation, eager_attention)
    return ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager_attention)


@torch.compiler.disable
def packed_attention(
    implementation: str,
    eager_attention: Callable,
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: PackedMask,
    scaling: float,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute attention inside the sentences of a packed batch: (1, H, N, d_k) to (1, N, H, d_v).

    GPUs run flash attention by cumulative lengths, without a mask. On other devices, sentences of
    similar length are padded together for attention only. Only "eager" returns weights, of shape
    (B, H, Q, K).
    """
    mask = attention_mask
    if implementation.startswith("flash"):
        flash = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager_attention)
        return flash(
            module,
            query,
            key,
            value,
            None,
            scaling=scaling,
            dropout=dropout,
            cu_seq_lens_q=mask.queries.cu_seq_lens,
            cu_seq_lens_k=mask.keys.cu_seq_lens,
            max_length_q=mask.queries.max_length,
            max_length_k=mask.keys.max_length,
        )
    # (1, H, N, d) to (N, H, d), the layout of the projections.
    states = [side[0].transpose(0, 1) for side in (query, key, value)]
    if implementation != "eager" and not dropout and _varlen_supports(*states):
        return _by_cumulative_lengths(states, mask, module.is_causal, scaling)[None], None
    eager = eager_attention if implementation == "eager" else None
    return _in_groups(eager, module, states, mask, scaling, dropout)


def _varlen_supports(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """Tell whether torch's `varlen_attn` supports the device, the dtype and the head sizes."""
    return (
        query.is_cuda
        and "window_size" in inspect.signature(varlen_attn).parameters
        and query.dtype in (torch.float16, torch.bfloat16)
        and query.shape[-1] == value.shape[-1]
        and query.shape[-1] % 8 == 0
        and query.shape[-1] <= 256
        and torch.cuda.get_device_capability(query.device) >= (8, 0)
    )


def _by_cumulative_lengths(
    states: list[torch.Tensor], mask: PackedMask, causal: bool, scaling: float
) -> torch.Tensor:
    query, key, value = states
    output: Any = varlen_attn(
        query,
        key,
        value,
        mask.queries.cu_seq_lens,
        mask.keys.cu_seq_lens,
        mask.queries.max_length,
        mask.keys.max_length,
        scale=scaling,
        window_size=(-1, 0) if causal else (-1, -1),
    )
    return output


def _in_groups(
    eager_attention: Callable | None,
    module: Any,
    states: list[torch.Tensor],
    mask: PackedMask,
    scaling: float,
    dropout: float,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Pad (N, H, d) by groups, attend, and remove the padding: (1, N, H, d_v)."""
    query_rows, key_rows, groups = mask.layout
    number = (groups[-1].queries.stop, groups[-1].keys.stop)
    query = _put_rows(states[0], query_rows, number[0])
    key, value = (_put_rows(side, key_rows, number[1]) for side in states[1:])
    outputs, weights = [], []
    for group in groups:
        shapes = ((group.queries, 0, query), (group.keys, 1, key), (group.keys, 1, value))
        heads = [
            side[rows].unflatten(0, (-1, group.sizes[which])).transpose(1, 2)
            for rows, which, side in shapes
        ]  # (G, H, Q or K, d)
        if eager_attention is not None:
            additive = group.additive_mask(module.is_causal, query)
            output, weight = eager_attention(
                module, *heads, additive, scaling=scaling, dropout=dropout
            )
            weights.append(weight)
        else:
            # Padding follows the last query of a sentence, so a causal mask hides it.
            output = F.scaled_dot_product_attention(
                *heads,
                attn_mask=None if module.is_causal else group.real_keys,
                is_causal=module.is_causal,
                dropout_p=dropout,
                scale=scaling,
            ).transpose(1, 2)  # (G, Q, H, d_v)
        outputs.append(output.flatten(0, 1))
    output = _TakeRows.apply(torch.cat(outputs), query_rows)[None]
    return output, _padded_weights(weights, mask) if weights else None


def _put_rows(states: torch.Tensor, rows: torch.Tensor, number: int) -> torch.Tensor:
    return states.new_zeros((number, *states.shape[1:])).index_copy(0, rows, states)


def _padded_weights(weights: list[torch.Tensor], mask: PackedMask) -> torch.Tensor:
    """Join the weights of the groups (G, H, Q, K) to (B, H, Q, K), with 0 at padding."""
    sentences, heads = len(mask.queries.cu_seq_lens) - 1, weights[0].shape[1]
    sizes = (mask.queries.max_length, mask.keys.max_length)
    joined = weights[0].new_zeros(sentences, heads, *sizes)
    for group, weight in zip(mask.layout[2], weights, strict=True):
        real = torch.arange(group.sizes[0], device=weight.device)
        real = real < mask.queries.cu_seq_lens.diff()[group.sentences, None]  # (G, Q)
        missing = (0, sizes[1] - group.sizes[1], 0, sizes[0] - group.sizes[0])
        own = weight.masked_fill(~real[:, None, :, None], 0.0)
        joined = joined.index_copy(0, group.sentences, F.pad(own, missing))
    return joined


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
    encode: Callable, start: Any, states: torch.Tensor, attention_mask: Any
) -> torch.Tensor:
    """Encode the positions of (B, T, D). In a packed batch, each sentence starts at position 0."""
    length, device = states.shape[1], states.device
    if isinstance(attention_mask, Packing):
        length = attention_mask.number_of_tokens(states)
        table = encode(0, attention_mask.max_length, device)
        return F.embedding(attention_mask.position_ids(length), table)
    return encode(start, length, device)


def _pop_packing(kwargs: dict[str, Any], prefix: str) -> Packing | None:
    """Remove the boundaries of one side from a call's arguments. Return None for a padded side."""
    if kwargs.get(f"{prefix}cu_seq_lens_q") is None:
        return None
    given = {name: kwargs.pop(prefix + name, None) for name in _KEYS}
    return Packing(given["cu_seq_lens_q"], given["max_length_q"], given["position_ids"])


def takes_packed_batches(forward: Callable) -> Callable:
    """Decorate `forward` to accept packed batches, and pad its outputs for them.

    Padded batches are not changed. `pad_outputs=False` returns logits and hidden states of shape
    (1, N, ...). Attention weights are always (B, H, Q, K).
    """
    decodes = "decoder_attention_mask" in inspect.signature(forward).parameters

    @functools.wraps(forward)
    def wrapper(self: Any, *args: Any, pad_outputs: bool = True, **kwargs: Any) -> Any:
        source, target = _pop_packing(kwargs, ""), _pop_packing(kwargs, "decoder_")
        if source is None and target is None:
            return forward(self, *args, **kwargs)
        if source is None or (decodes and target is None):
            raise ValueError(
                "Only one side of the batch is packed: pass both cu_seq_lens_q and "
                "decoder_cu_seq_lens_q, as DataCollatorForPackedSeq2Seq does."
            )
        if target is not None:
            _prepare_decoder(self, kwargs, target)
        outputs = forward(self, *args, attention_mask=source, **kwargs)
        for name, value in outputs.items() if pad_outputs else ():
            side = source if target is None or name.startswith("encoder") else target
            if name == "logits" or name.endswith(("hidden_state", "hidden_states")):
                outputs[name] = _padded_output(side, value)
        return outputs

    return wrapper


def _prepare_decoder(model: Any, kwargs: dict[str, Any], target: Packing) -> None:
    """Make the decoder's inputs from packed labels, and turn off the cache."""
    kwargs |= {"decoder_attention_mask": target, "use_cache": False}
    labels, given = kwargs.get("labels"), ("decoder_input_ids", "decoder_inputs_embeds")
    if labels is not None and all(kwargs.get(name) is None for name in given):
        kwargs["decoder_input_ids"] = _shift_right(model, labels, target)


def _shift_right(model: Any, labels: torch.Tensor, target: Packing) -> torch.Tensor:
    padded = target.padded(labels, -100)
    return target.flat(model.prepare_decoder_input_ids_from_labels(padded))


def decoder_inputs(
    model: Any, labels: torch.Tensor, batch: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    """Shift labels right inside each sentence of a padded or packed batch."""
    cu_seq_lens = batch.get("decoder_cu_seq_lens_q")
    if cu_seq_lens is None:
        return model.prepare_decoder_input_ids_from_labels(labels)
    return _shift_right(model, labels, Packing(cu_seq_lens))


def _padded_output(side: Packing | None, value: Any) -> Any:
    if side is None or value is None:
        return value
    if isinstance(value, tuple):
        return tuple(side.padded(states) for states in value)
    return side.padded(value)


__all__ = [
    "PackedMask",
    "Packing",
    "attention_function",
    "bidirectional_mask",
    "both_in_prefix",
    "causal_mask",
    "decoder_inputs",
    "packed_attention",
    "position_encodings",
    "takes_packed_batches",
]
