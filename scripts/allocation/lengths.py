# SPDX-License-Identifier: Apache-2.0
"""How long requests are: log-normal lengths with published means, drawn from a seed."""

from __future__ import annotations

import dataclasses
import statistics

import numpy as np

QUANTILES = 4096


@dataclasses.dataclass(frozen=True)
class Lengths:
    """Log-normal lengths of `mean` tokens, whose logarithm spreads by `sigma`, cut at `limit`.

    >>> drawn = Lengths(161, 1.0, 1024).draw(20_000, np.random.default_rng(0))
    >>> round(float(drawn.mean()), -1), int(drawn.min()) >= 1, int(drawn.max())
    (160.0, True, 1024)
    """

    mean: float
    sigma: float
    limit: int

    def draw(self, count: int, rng: np.random.Generator) -> np.ndarray:
        """Draws lengths, int64 `[count]`, each in 1 .. limit."""
        return self._cut(self._middle(), rng.standard_normal(count))

    def _middle(self) -> float:
        """Finds the logarithm's mean that gives lengths, once cut, the mean asked for."""
        normal = statistics.NormalDist()
        at = [normal.inv_cdf((i + 0.5) / QUANTILES) for i in range(QUANTILES)]
        low, high = -10.0, np.log(self.limit) + 10
        for _ in range(60):
            middle = (low + high) / 2
            short = self._cut(middle, np.asarray(at)).mean() < self.mean
            low, high = (middle, high) if short else (low, middle)
        return (low + high) / 2

    def _cut(self, middle: float, normal: np.ndarray) -> np.ndarray:
        drawn = np.rint(np.exp(middle + self.sigma * normal))
        return np.clip(drawn, 1, self.limit).astype(np.int64)


@dataclasses.dataclass(frozen=True)
class Mix:
    """Requests of one kind, and the memory that serves them.

    Args:
      name: What the tables call it.
      source: Where the two means come from; the spread is chosen here.
      prompt: Lengths of prompts.
      output: Lengths of what is generated.
      longest: Tokens that a request may have at all, which a maximal reservation sets aside.
      pool: Slots of the memory, in tokens: a multiple of `longest`.
      rows: Requests that may run at a time, however small they are.
    """

    name: str
    source: str
    prompt: Lengths
    output: Lengths
    longest: int
    pool: int
    rows: int

    def draw(self, requests: int, seed: int) -> np.ndarray:
        """Draws requests: int64 `[requests, 2]`, tokens of the prompt and of the output."""
        rng = np.random.default_rng(seed)
        return np.stack([self.prompt.draw(requests, rng), self.output.draw(requests, rng)], axis=1)


VLLM = "Kwon et al. 2023 (arXiv:2309.06180), figure 11"
MIXES = (
    # 16,384 slots: about what 12 GB hold of a 13B model there (table 1: 15.7K).
    Mix(
        "chat",
        f"ShareGPT, {VLLM}",
        Lengths(161, 1.0, 1024),
        Lengths(338, 1.0, 1024),
        longest=2048,
        pool=16_384,
        rows=96,
    ),
    Mix(
        "instructions",
        f"Alpaca, {VLLM}",
        Lengths(19, 0.7, 1024),
        Lengths(58, 0.7, 1024),
        longest=2048,
        pool=4096,
        rows=192,
    ),
    # Words there are counted as tokens here.
    Mix(
        "documents",
        "GovReport, Huang et al. 2021 (arXiv:2104.02112), table 1",
        Lengths(9409, 0.6, 30_720),
        Lengths(553, 0.5, 2048),
        longest=32_768,
        pool=262_144,
        rows=64,
    ),
)
