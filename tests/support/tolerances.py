# SPDX-License-Identifier: Apache-2.0
"""The one table of tolerances, and the one way to compare with a float64 truth."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike


@dataclasses.dataclass(frozen=True)
class Format:
    """A number format: its unit roundoff, and how often a result of ours is rounded to it."""

    unit: float
    roundings: int


# Derivation. The truth is float64 on the same (already rounded) inputs, so only our own
# arithmetic counts. Every sum is accumulated in float32, whatever the inputs are. Rounding errors
# of a sum of n terms are as good as independent and grow like sqrt(n) u (Higham and Mary 2019,
# "A new approach to probabilistic rounding error analysis"); on the way to a result there are
# four such sums in a row (scores, exp and its normaliser, product with the values, and in the
# backward pass the sum over queries) whose terms are a few times larger than the result, hence
# GROWTH = 4 sums x 2. A 16-bit result is rounded besides at most four times: weights (or their
# gradient), scores' gradient, one product, and the result; each costs u of the terms' size.
GROWTH = 8
SINGLE = 2.0**-24
TABLE = {
    "float32": Format(unit=SINGLE, roundings=0),
    "bfloat16": Format(unit=2.0**-8, roundings=4),
    "float16": Format(unit=2.0**-11, roundings=4),
}


def tolerance(dtype: DTypeLike, terms: int = 16) -> float:
    """Bounds the error of a result of size 1 that sums `terms` products.

    Args:
      dtype: Of the inputs; the sums are float32.
      terms: Length of the longest sum.
    """
    row = TABLE[jnp.dtype(dtype).name]
    return row.roundings * row.unit + GROWTH * math.sqrt(terms) * SINGLE


def assert_close(
    got: ArrayLike,
    want: ArrayLike,
    *,
    dtype: DTypeLike = jnp.float32,
    terms: int = 16,
    size: float | None = None,
    what: Any = "result",
) -> None:
    """Fails unless `got` is finite where `want` is, and near it.

    NaN on either side fails; an infinity must meet the same infinity. Shapes must be equal:
    nothing is broadcast.

    Args:
      got: The result under test.
      want: The truth.
      dtype: Of the inputs, a key of the table.
      terms: Length of the longest sum.
      size: Size of what is summed; default the largest finite `|want|`, and at least 1.
      what: Named in the message.
    """
    got, want = np.asarray(got).astype(np.float64), np.asarray(want).astype(np.float64)
    assert got.shape == want.shape, f"{what}: shape {got.shape}, want {want.shape}"
    for side, x in (("got", got), ("want", want)):
        assert not np.isnan(x).any(), f"{what}: NaN in {side} at {_first(np.isnan(x))}"
    finite = np.isfinite(want)
    other = np.where(finite, np.isinf(got), got != want)
    assert not other.any(), f"{what}: an infinity differs at {_first(other)}"
    if not finite.any():
        return
    size = max(1.0, np.abs(want[finite]).max()) if size is None else size
    error = np.abs(np.where(finite, got, 0.0) - np.where(finite, want, 0.0))
    limit = tolerance(dtype, terms) * size
    assert error.max() <= limit, (
        f"{what}: off by {error.max():.3g} at {_first(error == error.max())}, limit {limit:.3g}"
    )


def _first(where: np.ndarray) -> tuple[int, ...]:
    return tuple(int(i) for i in np.argwhere(where)[0])
