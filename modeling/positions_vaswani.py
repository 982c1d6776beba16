"""Positions (section 3.5): sines and cosines, or a trained vector for each position.

Shapes: T positions, D = d_model.
"""

import math

import torch
from torch import nn

from ..configuration.configuration_vaswani import VaswaniConfig


class SinusoidalPositions(nn.Module):
    """PE(pos, 2i) = sin(pos / 10000^(2i/d_model)), PE(pos, 2i+1) = cos(the same) (section 3.5).

    Every call computes the encodings in float32. There is no table, so sentences have no limit.
    """

    def __init__(self, config: VaswaniConfig) -> None:
        super().__init__()
        self.offset = config.position_offset
        self.pairs = config.d_model // 2
        self.interleaved = config.position_encoding == "sinusoidal"
        # tensor2tensor stretches the wavelengths, so that the last one is exactly 10000 * 2 pi.
        steps = self.pairs - 1 if config.position_encoding == "sinusoidal_t2t" else self.pairs
        self.log_step = -math.log(10000.0) / max(steps, 1)

    def forward(
        self,
        start: int | torch.Tensor,
        length: int,
        device: torch.device,
        position_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Encode the positions start, ..., start + length - 1: (T, D) in float32.

        If `position_ids` (..., T) are given, encode these instead: (..., T, D).
        """
        if position_ids is None:
            position_ids = torch.arange(length, device=device) + start
        positions = position_ids + self.offset
        pairs = torch.arange(self.pairs, device=positions.device, dtype=torch.float32)
        steps = torch.exp(pairs * self.log_step)
        angles = positions.to(torch.float32)[..., None] * steps  # (..., T, D/2)
        if self.interleaved:
            return torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(-2)
        return torch.cat((angles.sin(), angles.cos()), dim=-1)


class LearnedPositions(nn.Embedding):
    """A trained vector for each position (section 3.5 and row (E) of Table 3)."""

    def __init__(self, config: VaswaniConfig) -> None:
        rows = (config.max_position_embeddings or 0) + config.position_offset
        super().__init__(rows, config.d_model)
        self.offset = config.position_offset

    def forward(
        self,
        start: int | torch.Tensor,
        length: int,
        device: torch.device,
        position_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Look up the positions start, ..., start + length - 1: (T, D).

        If `position_ids` (..., T) are given, look up these instead: (..., T, D).

        Raises:
            ValueError: a position lies beyond the table.
        """
        if position_ids is None:
            self._check(start + length)
            return super().forward(torch.arange(length, device=device) + (start + self.offset))
        self._check(position_ids.max() + 1, position_ids.min())
        return super().forward(position_ids + self.offset)

    def _check(self, end: int | torch.Tensor, start: int | torch.Tensor = 0) -> None:
        limit = self.num_embeddings - self.offset
        # A static cache counts in a tensor. Reading it would make the CPU wait for the GPU. While a
        # graph is traced, lengths may be symbols.
        known = not torch.compiler.is_compiling() and (
            isinstance(end, int) or end.device.type == "cpu"
        )
        if known and end > limit:
            raise ValueError(
                f"A sequence of {int(end)} tokens exceeds max_position_embeddings "
                f"({limit}) of the learned positions: shorten it, or use "
                "position_encoding='sinusoidal', which has no limit."
            )
        if known and start < 0:
            raise ValueError(f"Position {int(start)} is negative: positions count from 0.")


__all__ = ["LearnedPositions", "SinusoidalPositions"]
