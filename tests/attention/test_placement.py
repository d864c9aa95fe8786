# SPDX-License-Identifier: Apache-2.0
"""How often KV heads are stored on meshes with more devices than heads, and what is said of it."""

from __future__ import annotations

import logging

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, AxisType

from jaxkv.attention import GroupedQueryAttention
from jaxkv.attention.placement import kv_replicas
from jaxkv.testing.meshes import placed
from jaxkv.testing.suite import call, feed
from jaxkv.testing.tolerances import assert_close

X = np.random.default_rng(0).normal(size=(2, 6, 16)).astype(np.float32)


@pytest.mark.parametrize(
    "heads, kv_heads, devices, want, said",
    [
        (8, 8, 4, 1, ""),
        (8, 4, 4, 1, ""),
        (8, 2, 4, 2, "2 KV heads on 4 tensor devices: every head is kept by 2 of them"),
        (16, 2, 8, 4, "2 KV heads on 8 tensor devices: every head is kept by 4 of them"),
        # One head is a plane that all devices share: it has no axis to be split or repeated.
        (8, 1, 4, 1, "1 KV heads on 4 tensor devices: every head is kept by 4 of them"),
        (4, 2, 8, 1, "4 query heads do not divide over 8 tensor devices: each keeps all KV heads"),
        (4, 4, 8, 1, "4 query heads do not divide over 8 tensor devices"),
    ],
)
def test_how_often_heads_are_stored(
    heads: int,
    kv_heads: int,
    devices: int,
    want: int,
    said: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    mesh = AbstractMesh((1, devices), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    with jax.sharding.use_abstract_mesh(mesh), caplog.at_level(logging.WARNING, "jaxkv"):
        assert kv_replicas(heads, kv_heads, "Mine") == want
    assert [m.startswith(f"Mine: {said}") for m in caplog.messages] == ([True] if said else [])


def test_kv_heads_that_fit_no_split_raise() -> None:
    mesh = AbstractMesh((1, 4), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    with (
        jax.sharding.use_abstract_mesh(mesh),
        pytest.raises(ValueError, match="Mine: 3 KV heads do not fit 4 tensor devices"),
    ):
        kv_replicas(12, 3, "Mine")


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=lambda k: k.name)
def test_shd_01_fewer_kv_heads_than_devices(kind: AxisType) -> None:
    attn = GroupedQueryAttention(16, 12, num_kv_heads=2, head_dim=4, rngs=nnx.Rngs(0))
    want, _ = feed(attn, X, attn.init_cache(2, 8), [3, 3])
    mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(kind, kind))
    with jax.set_mesh(mesh):
        cache = attn.init_cache(2, 8)
        assert cache.replicas == 2
        cache = jax.device_put(cache, cache.sharding(mesh))
        got, _ = feed(placed(attn, mesh), X, cache, [3, 3])
    assert_close(got, want)
    three = jax.make_mesh((1, 3), ("data", "tensor"), (kind, kind), devices=jax.devices()[:3])
    with jax.set_mesh(three), pytest.raises(ValueError, match="2 KV heads do not fit 3 tensor"):
        attn.init_cache(2, 8)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=lambda k: k.name)
def test_fewer_query_heads_than_devices_are_not_split(kind: AxisType) -> None:
    attn = GroupedQueryAttention(16, 4, num_kv_heads=2, rngs=nnx.Rngs(0))
    want, _ = call(attn, X)
    mesh = jax.make_mesh((1, 8), ("data", "tensor"), axis_types=(kind, kind))
    with jax.set_mesh(mesh):
        cache = attn.init_cache(2, 8)
        cache = jax.device_put(cache, cache.sharding(mesh))
        got, _ = feed(placed(attn, mesh), X, cache, [3, 3])
    assert_close(got, want)
