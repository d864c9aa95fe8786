# SPDX-License-Identifier: Apache-2.0
"""Rows of unequal lengths, against padding them, and on other layouts (goal 4)."""

from __future__ import annotations

from collections.abc import Iterator

import jax.numpy as jnp
import numpy as np
from families.measuring import Case, Sizes, Timed
from families.steps import jax_step, our_step

from jaxkv.cache import Layout, Paged, Ring


def ragged_cases(sizes: Sizes) -> Iterator[Case]:
    """Lists the family."""
    lengths = ragged_lengths(sizes.slots)
    share = 100 * sum(lengths) / (len(lengths) * sizes.slots)
    name = f"B={len(lengths)}, lengths {lengths[0]} to {lengths[-1]} ({share:.0f} % live)"
    layouts: tuple[tuple[str, Layout, float | None], ...] = (
        ("pages of 128", Paged(128), 1.5),
        ("pages of 64", Paged(64), None),
        ("pages of 16", Paged(16), None),
        ("ring", Ring(window=sizes.slots), None),
    )
    for kind in ("float32", "bfloat16"):
        dtype = jnp.dtype(kind)
        yield Timed(
            f"{name}, {kind}",
            "jax.nn, padded",
            lambda d=dtype: our_step(sizes, lengths, d),
            lambda d=dtype: jax_step(sizes, lengths, d),
            sizes.goal(0.08),
        )
        for label, layout, goal in layouts:
            yield Timed(
                f"{label}, {kind}",
                "ours, contiguous",
                lambda d=dtype, lay=layout: our_step(sizes, lengths, d, layout=lay),
                lambda d=dtype: our_step(sizes, lengths, d),
                None if goal is None else sizes.goal(goal),
            )


def ragged_lengths(slots: int) -> list[int]:
    """Chooses 8 lengths in equal ratios from 1/64 of the slots to all of them.

    >>> ragged_lengths(8192)
    [128, 232, 420, 761, 1378, 2497, 4523, 8192]
    """
    return [round(slots * 64 ** (i / 7 - 1)) for i in np.arange(8).tolist()]
