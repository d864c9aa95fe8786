# SPDX-License-Identifier: Apache-2.0
"""Comparisons: two things timed in turn, or counted, and the bound that a goal sets."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

# Worker threads spin for a while when a run is over, which is not the next run's CPU time.
SETTLE = 0.02
Step = Callable[[], Any]


@dataclasses.dataclass(frozen=True)
class Timed:
    """One comparison of times: ours, the rival, and the bound on ours / rival, if there is one."""

    name: str
    rival: str
    make_ours: Callable[[], Step]
    make_rival: Callable[[], Step]
    goal: float | None = None
    unit: str = "ms"
    series: tuple[str, int] | None = None  # which line of the picture, and where on it


@dataclasses.dataclass(frozen=True)
class Counted:
    """One comparison of numbers that are exact, or of functions that find them."""

    name: str
    rival: str
    ours: float | Callable[[], float]
    theirs: float | Callable[[], float]
    unit: str
    goal: float | None = None
    series: tuple[str, int] | None = None


Case = Timed | Counted


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of the attention that is timed: by default a Llama 3 8B layer with 8,192 slots.

    `scored` says whether they are those that the goals are about.
    """

    slots: int = 8192
    heads: int = 32
    kv_heads: int = 8
    width: int = 128
    latent_heads: int = 128
    latent_slots: int = 4096
    latent: int = 512
    rope: int = 64
    features: int = 512
    layers: int = 30
    model: int = 576
    mlp: int = 1536
    vocab: int = 49_152
    model_slots: int = 512
    lengths: tuple[int, ...] = (512, 1024, 2048, 4096)
    flash_heads: int = 8
    flash_width: int = 64
    scored: bool = True

    def goal(self, bound: float) -> float | None:
        """Gives a goal's bound, if it is about these sizes."""
        return bound if self.scored else None


QUICK = Sizes(
    slots=128,
    heads=8,
    kv_heads=2,
    width=16,
    latent_heads=4,
    latent_slots=64,
    latent=32,
    rope=8,
    features=32,
    layers=1,
    model=72,
    mlp=96,
    vocab=256,
    model_slots=64,
    lengths=(32, 64),
    flash_heads=2,
    flash_width=8,
    scored=False,
)


def clock() -> float:
    """CPU seconds of all threads, or wall seconds where the work is done elsewhere."""
    return time.process_time() if jax.default_backend() == "cpu" else time.perf_counter()


def measure(case: Case, repeats: int) -> tuple[float, float]:
    """Gives ours and the rival's: counts, or the medians of both, timed in turn, milliseconds."""
    if isinstance(case, Counted):
        return _found(case.ours), _found(case.theirs)
    steps = case.make_ours(), case.make_rival()
    for step in steps:
        jax.block_until_ready(step())
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(repeats):
        for step, log in zip(steps, times, strict=True):
            time.sleep(SETTLE)
            start = clock()
            jax.block_until_ready(step())
            log.append((clock() - start) * 1e3)
    return statistics.median(times[0]), statistics.median(times[1])


def _found(number: float | Callable[[], float]) -> float:
    return number() if callable(number) else number


def random(shape: tuple[int, ...], dtype: Any, seed: int) -> jax.Array:
    """Draws standard normal numbers."""
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32).astype(dtype)
