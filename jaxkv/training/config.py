# SPDX-License-Identifier: Apache-2.0
"""What a training run is told: sizes, schedule, and how often it looks up."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """States a training run.

    Args:
      steps: Optimiser steps of the whole run.
      batch: Rows of one step.
      length: Tokens of a row that are read; each but the padding predicts the next one.
      learning_rate: At the end of the warm-up.
      warmup: Steps in which the learning rate rises; it then falls along a cosine.
      final_ratio: Of the last learning rate to the largest.
      weight_decay: Of AdamW, for kernels only.
      beta1: Decay of AdamW's mean gradient.
      beta2: Decay of AdamW's mean squared gradient.
      clip: Largest global norm of the gradient; `None` is off.
      accumulate: Parts that a batch is computed in, one after the other, to save memory.
      eval_every: Steps between evaluations; `None`: only at the end.
      eval_batches: Validation batches of one evaluation.
      save_every: Steps between checkpoints; `None`: only the best ones and at the end.
      seed: Of the data order and of dropout.

    Raises:
      ValueError: Naming the field, if a value does not fit.
    """

    steps: int
    batch: int = 16
    length: int = 256
    learning_rate: float = 1e-3
    warmup: int = 0
    final_ratio: float = 0.1
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    clip: float | None = 1.0
    accumulate: int = 1
    eval_every: int | None = None
    eval_batches: int = 8
    save_every: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        counts = ("steps", "batch", "length", "accumulate", "eval_batches")
        for name in (*counts, "eval_every", "save_every"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value}: want at least 1.")
        if self.batch % self.accumulate:
            raise ValueError(f"batch={self.batch} does not divide into {self.accumulate} parts.")
        if not 0 <= self.warmup < self.steps:
            raise ValueError(f"warmup={self.warmup}: want 0 <= warmup < steps={self.steps}.")
        for name in ("final_ratio", "beta1", "beta2"):
            value = getattr(self, name)
            if not 0 <= value <= 1:
                raise ValueError(f"{name}={value}: want 0 to 1.")
        if self.learning_rate <= 0 or self.weight_decay < 0 or self.seed < 0:
            raise ValueError(
                f"learning_rate={self.learning_rate}, weight_decay={self.weight_decay}, "
                f"seed={self.seed}: want more than 0, at least 0, at least 0."
            )
        if self.clip is not None and self.clip <= 0:
            raise ValueError(f"clip={self.clip}: want more than 0, or None.")

    @property
    def rows(self) -> int:
        """Counts the rows that are computed at once."""
        return self.batch // self.accumulate
