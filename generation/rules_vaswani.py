"""Settings of a search, and rules about its tokens (section 6.1)."""

import ctypes
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal

import torch


def length_penalty(length: Any, alpha: float, kind: str | None) -> Any:
    """lp(Y) = ((5 + |Y|) / 6)^alpha (Wu et al., 2016, equation 14), or transformers' |Y|^alpha.

    The length |Y| is a number or a tensor; so is the result.
    """
    return ((5.0 + length) / 6.0) ** alpha if kind == "gnmt" else length**alpha


@dataclasses.dataclass(frozen=True)
class SearchSettings:
    """Settings of a search, under the names of transformers' GenerationConfig.

    Args:
        num_beams: K.
        num_return_sequences: n.
        length_penalty: the exponent alpha.
        length_penalty_type: "gnmt" for lp(Y), anything else for transformers' penalty.
        early_stopping: "never" searches until no open hypothesis can win; True stops at K finished
            hypotheses; False stops by transformers' heuristic.
        eos_token_ids: tokens that end a sentence.
    """

    num_beams: int = 1
    num_return_sequences: int = 1
    length_penalty: float = 1.0
    length_penalty_type: str | None = None
    early_stopping: bool | Literal["never"] = False
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Refuse a search without hypotheses, which the compiled kernels do not check."""
        if self.num_beams < 1:
            raise ValueError(f"num_beams must be at least 1, got {self.num_beams!r}.")

    @classmethod
    def of_call(cls, config: Any) -> "SearchSettings":
        """Return the settings in the prepared generation config of a call of `generate`."""
        ends = config._eos_token_tensor
        return cls(
            num_beams=config.num_beams,
            num_return_sequences=config.num_return_sequences,
            length_penalty=float(config.length_penalty or 0),  # None only without beams
            length_penalty_type=getattr(config, "length_penalty_type", None),
            early_stopping=config.early_stopping,
            eos_token_ids=() if ends is None else tuple(ends.tolist()),
        )

    @property
    def exact(self) -> bool:
        """Whether the search ends only when no open hypothesis can win."""
        return self.early_stopping == "never"

    @functools.cached_property
    def end_array(self) -> Any:
        """The end tokens, for the compiled kernels."""
        return (ctypes.c_int64 * len(self.eos_token_ids))(*self.eos_token_ids)

    @property
    def candidates(self) -> int:
        """How many candidates of a sentence have K open hypotheses among them (C)."""
        return max(2, 1 + len(self.eos_token_ids)) * self.num_beams

    @property
    def to_beat(self) -> int:
        """The place of the finished hypothesis that an open one must beat, among the best K."""
        return (self.num_return_sequences if self.exact else self.num_beams) - 1

    def penalty(self, length: Any) -> Any:
        """Return the divisor of a hypothesis' log-probability; `length` may be a tensor."""
        return length_penalty(length, self.length_penalty, self.length_penalty_type)

    def ends(self, tokens: torch.Tensor, limits: torch.Tensor, length: int) -> torch.Tensor:
        """Mark tokens that end their sentence: end tokens, and all tokens at the sentence's limit.

        The tokens are number `length` of their sentences, counted from 1.
        """
        ends = (length >= limits).expand_as(tokens)
        for token in self.eos_token_ids:
            ends = ends | (tokens == token)
        return ends


@dataclasses.dataclass
class TokenRules:
    """Rules about the next token, which depend only on its position in the sentence.

    Args:
        never: tokens that must not be predicted.
        ends: tokens that end a sentence.
        min_length: tokens that a sentence has before an end token is allowed.
        forced_last: the token at the length limit; None leaves it free.
        renormalize: redistribute the probability of banned tokens (renormalize_logits).
        warpers: processors of the logits that tokens are sampled from, such as temperature.
    """

    never: set[int] = dataclasses.field(default_factory=set)
    ends: set[int] = dataclasses.field(default_factory=set)
    min_length: int = 0
    forced_last: int | None = None
    renormalize: bool = False
    warpers: list[Callable] = dataclasses.field(default_factory=list)

    def banned(self, length: int, logits: torch.Tensor) -> torch.Tensor | None:
        """List the tokens that must not be number `length`, from 1; None if all are allowed."""
        tokens = self.never | self.ends if length <= self.min_length else self.never
        columns = [token for token in sorted(tokens) if 0 <= token < logits.shape[1]]
        return torch.tensor(columns, device=logits.device) if columns else None


__all__ = ["SearchSettings", "TokenRules", "length_penalty"]
