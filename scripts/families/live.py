# SPDX-License-Identifier: Apache-2.0
"""What is read is what is live: an eighth of a cache (goal 2), and any allocation (goal 3)."""

from __future__ import annotations

from collections.abc import Iterator

import jax.numpy as jnp
from families.decode import EIGHTH, against_jax
from families.measuring import Case, Sizes, Timed
from families.steps import jax_step, our_step


def live_cases(sizes: Sizes) -> Iterator[Case]:
    """Lists the family."""
    live = sizes.slots // 8
    for name in ("float32", "bfloat16"):
        yield against_jax(sizes, [live], name, EIGHTH[name])
    for name in ("float32", "bfloat16"):
        dtype = jnp.dtype(name)
        for who, make, goal in (("ours", our_step, 1.5), ("jax.nn", jax_step, None)):
            yield Timed(
                f"{who}, {name}, live {live} of {sizes.slots}",
                f"{who} in {live} slots",
                lambda m=make, d=dtype: m(sizes, [live], d),
                lambda m=make, d=dtype: m(sizes, [live], d, slots=live),
                None if goal is None else sizes.goal(goal),
            )
