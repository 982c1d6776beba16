"""The decoder, one token at a time, for the searches of `search_vaswani.py` (section 3.1).

Shapes: B sentences, K hypotheses of each (the beam), S source tokens, N positions in the cache,
H heads, D = d_model, V entries of the target vocabulary.
"""

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

_FIRST_CAPACITY = 64  # positions in the cache: a beam of 4 fills them in 16 steps
_FEW_ROWS = 3  # that PyTorch multiplies by a float32 weight as it lies, without packing it anew
_WORTH_PACKING = 2**14  # weights; packing is for matrices that take time to read

_Fingerprint = tuple[list[tuple], list[torch.Tensor]]
_Place = tuple[torch.Size, torch.Tensor | None]  # (B, K), and which of these rows are at hand


class IncrementalDecoder:
    """A decoder that remembers what it has read, for K hypotheses of each of B sentences.

    The source's keys and values are kept once per sentence, not once per hypothesis. So are the
    target's: the hypotheses of a sentence share one list of positions, and a mask says which of
    them are a hypothesis' own past. A choice of hypotheses changes the mask alone; keys and values
    never change places. When the list is full, positions no hypothesis descends from are dropped.

    Args:
        model: a VaswaniForConditionalGeneration.
        source: (B, S, D) the encoder's output.
        source_mask: (B, S), nonzero at real source tokens; None where there is no padding.
    """

    def __init__(
        self, model: Any, source: torch.Tensor, source_mask: torch.Tensor | None = None
    ) -> None:
        self.decoder, self.lm_head = model.model.decoder, model.lm_head
        self.source_mask = None  # (B, 1, 1, S), 0 at real tokens and -inf at padding
        if source_mask is not None and not source_mask.all():
            padding = (source_mask == 0)[:, None, None]
            self.source_mask = torch.zeros_like(padding, dtype=source.dtype)
            self.source_mask.masked_fill_(padding, -torch.inf)
        # Of every layer: keys and values, (B, H, S or capacity, d_k or d_v).
        self.source = [layer.encoder_attn._keys_values(source) for layer in self.decoder.layers]
        self.target: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.used = 0  # positions of that capacity which are taken
        self.past: torch.Tensor | None = None  # (B, K, capacity), 0 at a hypothesis' past, or -inf
        self.position = 0  # of the next token in the sentence

    def read(self, prefix: torch.Tensor) -> torch.Tensor:
        """Read the first target tokens (B, T), and predict the next: logits (B, V)."""
        length = prefix.shape[1]
        hidden_states = self.decoder.embed(prefix, None)
        causal_mask = None
        if length > 1:
            causal_mask = hidden_states.new_full((length, length), -torch.inf).triu(1)
        hidden_states = self._layers(hidden_states.flatten(0, 1), prefix.shape, None, causal_mask)
        self.position = length
        return self.lm_head(hidden_states.view(*prefix.shape, -1)[:, -1])

    def step(
        self,
        tokens: torch.Tensor,
        parents: torch.Tensor | None = None,
        open_rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Extend the hypotheses by `tokens` (B, K), and predict the next: logits (B * K, V).

        `parents` (B, K) says which hypothesis of the step before each of the new ones extends.
        `open_rows` (R,) restricts the work to those of the B * K: then the logits are (R, V).
        """
        flat = tokens.flatten() if open_rows is None else tokens.flatten()[open_rows]
        hidden_states = self.decoder.embed(flat[:, None], None, self.position)[:, 0]  # (B * K, D)
        mask = self._descend(tokens, parents, hidden_states) if tokens.shape[1] > 1 else None
        hidden_states = self._layers(hidden_states, tokens.shape, open_rows, mask)
        self.position += 1
        return self.lm_head(hidden_states)

    def keep(self, sentences: torch.Tensor) -> None:
        """Forget all sentences but these, given by their numbers (B',)."""
        for layers in (self.source, self.target):
            layers[:] = [
                (keys.index_select(0, sentences), values.index_select(0, sentences))
                for keys, values in layers
            ]
        if self.source_mask is not None:
            self.source_mask = self.source_mask.index_select(0, sentences)
        if self.past is not None:
            self.past = self.past.index_select(0, sentences)

    def _layers(
        self,
        states: torch.Tensor,
        shape: torch.Size,
        rows: torch.Tensor | None,
        mask: torch.Tensor | None,
    ) -> torch.Tensor:
        """Run the layers on (B * K, D), or on those `rows` of them; `shape` is (B, K)."""
        self._make_room(shape[1])
        for index, layer in enumerate(self.decoder.layers):
            place = (shape, rows)
            to_past = functools.partial(self._attend_past, index, layer.self_attn, mask, place)
            to_source = functools.partial(self._attend_source, index, layer.encoder_attn, place)
            states = layer.add_norm(states, to_past, layer.self_attn_layer_norm)
            states = layer.add_norm(states, to_source, layer.encoder_attn_layer_norm)
            states = layer.add_norm(states, layer.feed_forward, layer.final_layer_norm)
        self.used += shape[1]
        return self.decoder.layer_norm(states)

    def _attend_past(
        self, index: int, attention: Any, mask: Any, place: _Place, states: torch.Tensor
    ) -> torch.Tensor:
        end = self.used + place[0][1]
        projections = (attention.k_proj, attention.v_proj)
        for cached, projection in zip(self.target[index], projections, strict=True):
            new = attention._split_heads(_spread(projection(states), *place))
            cached[:, :, self.used : end] = new
        keys, values = (cached[:, :, :end] for cached in self.target[index])
        return self._attend(attention, place, states, keys, values, mask)

    def _attend_source(
        self, index: int, attention: Any, place: _Place, states: torch.Tensor
    ) -> torch.Tensor:
        keys, values = self.source[index]
        return self._attend(attention, place, states, keys, values, self.source_mask)

    def _attend(
        self,
        attention: Any,
        place: _Place,
        states: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        mask: torch.Tensor | None,
    ) -> torch.Tensor:
        query = attention._split_heads(_spread(attention.q_proj(states), *place))  # (B, H, K, d_k)
        output = F.scaled_dot_product_attention(
            query, keys, values, attn_mask=mask, scale=attention.scaling
        )
        output = output.transpose(1, 2).flatten(2).flatten(0, 1)  # (B * K, H * d_v)
        return attention.out_proj(output if place[1] is None else output[place[1]])

    def _descend(
        self, tokens: torch.Tensor, parents: torch.Tensor | None, like: torch.Tensor
    ) -> torch.Tensor:
        """Let the hypotheses see their parents' past and themselves: a mask (B, 1, K, N)."""
        sentences, beams = tokens.shape
        if self.past is None:
            self.past = like.new_full((sentences, beams, self._capacity), -torch.inf)
            self.past[:, :, : self.used] = 0
        else:
            assert parents is not None  # of whom else would there be a past?
            self.past = self.past.gather(1, parents[:, :, None].expand_as(self.past))
        self._make_room(beams)
        end = self.used + beams
        self.past[:, :, self.used : end].diagonal(dim1=1, dim2=2).zero_()
        return self.past[:, None, :, :end]

    @property
    def _capacity(self) -> int:
        return self.target[0][0].shape[2] if self.target else 0

    def _make_room(self, positions: int) -> None:
        """See to it that the cache can take that many more positions."""
        if not self.target:
            capacity = max(_FIRST_CAPACITY, 2 * positions)
            self.target = [
                tuple(
                    like.new_empty((*like.shape[:2], capacity, like.shape[3]))
                    for like in keys_values
                )
                for keys_values in self.source
            ]
        if self.used + positions <= self._capacity:
            return
        if self.past is not None:
            self._drop_dead_ends()
        if 2 * (self.used + positions) > self._capacity:
            more = max(self._capacity, positions)
            self.target = [
                tuple(F.pad(cached, (0, 0, 0, more)) for cached in keys_values)
                for keys_values in self.target
            ]
            if self.past is not None:
                self.past = F.pad(self.past, (0, more), value=-torch.inf)

    def _drop_dead_ends(self) -> None:
        """Close the ranks of the positions that some hypothesis descends from."""
        past: Any = self.past
        alive = (past == 0).any(dim=1)  # (B, capacity)
        self.used = int(alive.sum(dim=1).max())
        # Where a sentence has fewer, dead ones remain behind them, which no hypothesis sees.
        order = alive.to(torch.uint8).argsort(dim=1, descending=True, stable=True)
        self.past = past.gather(2, order[:, None].expand_as(past))
        order = order[:, None, : self.used, None]
        for keys_values in self.target:
            for cached in keys_values:
                kept = order.expand(-1, cached.shape[1], -1, cached.shape[3])
                cached[:, :, : self.used] = cached.gather(2, kept)


def _spread(states: torch.Tensor, shape: torch.Size, rows: torch.Tensor | None) -> torch.Tensor:
    """Lay out states of some rows as (B, K, D), zeros at the others."""
    if rows is not None:
        states = states.new_zeros(shape.numel(), states.shape[1]).index_copy_(0, rows, states)
    return states.view(*shape, -1)


# Of every model: what its linear layers' weights looked like, and their packed copies.
_packed: weakref.WeakKeyDictionary[nn.Module, tuple[_Fingerprint, list[Callable]]] = (
    weakref.WeakKeyDictionary()
)
# Of every model at work: by how many threads, and the layers that run on packed weights.
_at_work: weakref.WeakKeyDictionary[nn.Module, tuple[int, list[nn.Linear]]] = (
    weakref.WeakKeyDictionary()
)
_lock = threading.Lock()


@contextlib.contextmanager
def packed_linears(model: nn.Module) -> Iterator[None]:
    """Run the model's linear layers on packed weights, on CPUs where oneDNN has them.

    PyTorch packs a weight anew in each call, which takes longer than the product itself when a few
    hypotheses are multiplied. The packed copies live as long as the model, or until a call finds
    that its layers cannot be packed any more.
    """
    with _lock:
        users, linears = _at_work.get(model, (0, []))
        if not users:
            linears = _pack(model)
        _at_work[model] = users + 1, linears
    try:
        yield
    finally:
        with _lock:
            users = _at_work[model][0] - 1
            _at_work[model] = users, linears
            if not users:
                for linear in linears:
                    vars(linear).pop("forward", None)
                del _at_work[model]


def forward_replaced(module: nn.Module) -> bool:
    """Tell whether somebody has put a function over `forward`, Accelerate's casts left aside.

    Accelerate wraps a model for mixed precision and keeps the original beside. Without it our
    searches compute in the type of the weights.
    """
    return "forward" in vars(module) and "_original_forward" not in vars(module)


def _pack(model: nn.Module) -> list[nn.Linear]:
    """Put packed weights into the layers that can take them, and return these layers."""
    compiled = forward_replaced(model) or model._compiled_call_impl is not None
    linears: list[Any] = []
    if not compiled and not _needs_torch():
        linears = [module for module in model.modules() if _can_pack(module)]
    if not linears:
        _packed.pop(model, None)
        return []
    fingerprint = _fingerprint(linears)
    if model not in _packed or not _same(_packed[model][0], fingerprint):
        _packed.pop(model, None)  # the old copies make room before the new ones are made
        _packed[model] = fingerprint, [_packed_forward(linear) for linear in linears]
    for linear, forward in zip(linears, _packed[model][1], strict=True):
        linear.forward = forward
    return linears


def _needs_torch() -> bool:
    """Tell whether this thread casts or records what layers do, which packed ones cannot."""
    return torch.is_grad_enabled() or torch.is_autocast_enabled("cpu")


def _packed_forward(linear: nn.Linear) -> Callable[[torch.Tensor], torch.Tensor]:
    """Make what may stand in for a linear layer's `forward` as long as its weights stay."""
    weight, bias = linear.weight, linear.bias
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach())

    few = _FEW_ROWS * weight.shape[1] if weight.dtype == torch.float32 else 0

    def forward(states: torch.Tensor) -> torch.Tensor:
        if states.numel() <= few or _needs_torch():
            return F.linear(states, weight, bias)
        return torch.ops.mkldnn._linear_pointwise(states, packed, bias, "none", [], "")

    return forward


def _fingerprint(linears: list[nn.Linear]) -> _Fingerprint:
    """Tell weights from changed ones: by address, by version, and by samples of their values.

    Changes made through `.data` (merging adapters makes such) leave no trace in the version: the
    samples show those of a whole row, column or matrix, but not of a single value.
    """
    identities: list[tuple] = []
    samples: dict[torch.dtype, list[torch.Tensor]] = {}
    for linear in linears:
        weight, bias = linear.weight.detach(), linear.bias
        version = None if weight.is_inference() else linear.weight._version
        address = None if bias is None else bias.data_ptr()
        identities.append((weight.data_ptr(), address, version, weight.dtype, weight.shape))
        columns = weight.shape[1]
        # A value of every row, and of every column of a matrix that is not far taller than wide.
        samples.setdefault(weight.dtype, []).append(weight.reshape(-1)[:: columns + 1])
    return identities, [torch.cat(some) for some in samples.values()]


def _same(one: _Fingerprint, other: _Fingerprint) -> bool:
    return one[0] == other[0] and all(map(torch.equal, one[1], other[1]))


def _can_pack(module: nn.Module) -> bool:
    """Tell whether a module is a plain linear layer on a CPU, of a type oneDNN packs."""
    if type(module) is not nn.Linear or "forward" in vars(module) or module._forward_pre_hooks:
        return False  # a hook may make the weight anew
    weight = module.weight
    if weight.device.type != "cpu" or weight.layout != torch.strided:
        return False
    if weight.numel() < _WORTH_PACKING or type(weight.data) is not torch.Tensor:
        return False
    return bool(torch.backends.mkldnn.enabled) and weight.dtype in _packed_dtypes()


@functools.cache
def _packed_dtypes() -> tuple[torch.dtype, ...]:
    if not torch.backends.mkldnn.is_available():
        return ()
    try:  # the operators that torch.compile's own CPU backend calls
        torch.ops.mkldnn._linear_pointwise  # noqa: B018
        bfloat16 = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    except AttributeError:
        return ()
    return (torch.float32, torch.bfloat16) if bfloat16 else (torch.float32,)
