# SPDX-License-Identifier: Apache-2.0
"""The rows of one step."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

Array = Any  # numpy on the host, jax on the device


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Batch:
    """Holds rows of T + 1 tokens: T that are read, and as many that are predicted.

    Attributes:
      tokens: int32 `[B, T + 1]`.
      segment_ids: int32 `[B, T + 1]`, 0 is padding, or `None`: every row is one document.
      mask: bool `[B, T + 1]`, which tokens to learn to predict, or `None`: all.

    In training all have one more axis in front, `[A, B, T + 1]`: the parts that are accumulated.
    """

    tokens: Array
    segment_ids: Array | None = None
    mask: Array | None = None

    @property
    def inputs(self) -> Array:
        """Takes the tokens that are read, `[B, T]`."""
        return self.tokens[..., :-1]

    @property
    def targets(self) -> Array:
        """Takes the tokens that are predicted, `[B, T]`."""
        return self.tokens[..., 1:]

    @property
    def input_segments(self) -> Array | None:
        """Takes the segments of the tokens that are read, `[B, T]`."""
        return None if self.segment_ids is None else self.segment_ids[..., :-1]

    def in_parts(self, parts: int) -> Batch:
        """Splits `[A * B, T + 1]` into `[A, B, T + 1]`."""
        return jax.tree.map(lambda x: x.reshape(parts, -1, x.shape[-1]), self)
