# SPDX-License-Identifier: Apache-2.0
"""Writes that begin at whole tiles, as on TPU, against those that begin where the tokens do."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.cache import Contiguous, Layout, Paged, Ring
from jaxkv.cache.write import _written, tile_rows

B, S = 3, 128
RNG = np.random.default_rng(0)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def step(layout: Layout, tiles: bool, length: int, index: Any, planes: Any, new: Any) -> Any:
    plan = layout.plan(index, planes["key"].shape[2], length, jnp.array([length, 0, 2], jnp.int32))
    return _written(tiles, planes, new, plan.jobs), plan.after


@pytest.mark.parametrize("length", [2, 45])
@pytest.mark.parametrize("dtype", ["int8", "int4"])
@pytest.mark.parametrize("layout", [Contiguous(), Ring(100, pinned=28), Paged(64)], ids=str)
def test_the_same_tokens_are_written_from_whole_tiles(
    layout: Layout, dtype: str, length: int
) -> None:
    entries, slots = layout.storage(B, S)
    codes = RNG.integers(-8, 8, (entries, 2, slots, 16))
    planes = {"key": jnp.asarray(codes, dtype), "scale": jnp.zeros((entries, 2, slots))}
    assert tile_rows(planes["key"]) == {"int8": 32, "int4": 64}[dtype]
    assert tile_rows(planes["scale"]) == 1
    index, stored = layout.create(B, S), [planes, planes]
    for _ in range(5):
        new = {
            "key": jnp.asarray(RNG.integers(-8, 8, (B, 2, length, 16)), dtype),
            "scale": jnp.asarray(RNG.normal(size=(B, 2, length)), jnp.float32),
        }
        made = [step(layout, t, length, index, p, new) for t, p in enumerate(stored)]
        stored, index = [planes for planes, _ in made], made[0][1]
        for name in planes:
            np.testing.assert_array_equal(*(np.asarray(p[name]) for p in stored))
    assert int(index.lengths[0]) == min(5 * length, S) or isinstance(layout, Ring)
