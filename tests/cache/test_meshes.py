# SPDX-License-Identifier: Apache-2.0
"""Caches on meshes of eight devices: the same results and gradients, and each device's bytes."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from jaxkv.cache import KVSpec, LayerCache, Raw, create_layer, gather_layers
from jaxkv.core.sharding import Rules, use_rules
from tests.cache.meshes import (
    COUNTS,
    KINDS,
    MASK,
    MODES,
    B,
    S,
    extend,
    mesh_of,
    placed,
    prefilled,
    step_inputs,
)
from tests.cache.support import bits, draw_tokens, normal
from tests.support.tolerances import assert_close


@functools.cache
def wanted(kind: str) -> Any:
    """Runs one step without a mesh."""
    spec, _, _ = KINDS[kind]
    run = jax.jit(functools.partial(extend, spec))
    return jax.tree.map(np.asarray, run(prefilled(kind), COUNTS, MASK, step_inputs(kind)))


def stored(cache: LayerCache) -> list[np.ndarray]:
    """Lists what is stored, plane by plane; replicas must agree and count once."""
    found = []
    for plane in cache.records.planes.values():
        x = np.asarray(plane)
        if cache.replicas > 1:
            x = x.reshape(x.shape[0], -1, cache.replicas, *x.shape[2:])
            np.testing.assert_array_equal(x, x[:, :, :1].repeat(cache.replicas, axis=2))
            x = x[:, :, 0]
        found.append(x)
    return found


def cases(usual: list[tuple], *axes: Any) -> list[Any]:
    """Lists all combinations; the unusual ones run with `-m full`."""
    every = itertools.product(*axes)
    return [c if c in usual else pytest.param(*c, marks=pytest.mark.full) for c in every]


USUAL_STEPS = [
    ("heads", (8, 1), "explicit"),
    ("latent", (2, 4), "auto"),
    ("replicated", (2, 4), "explicit"),
]


@pytest.mark.parametrize(
    ("kind", "shape", "mode"), cases(USUAL_STEPS, KINDS, [(8, 1), (2, 4), (1, 8)], MODES)
)  # on (1, 8), the 4 heads of `shared` do not divide by the devices and are not split
def test_a_step_on_a_mesh_equals_one_without(kind: str, shape: tuple[int, int], mode: str) -> None:
    spec, _, replicas = KINDS[kind]
    replicas = replicas if shape[1] == 4 else 1
    out, lse, after = wanted(kind)
    mesh = mesh_of(shape, mode)
    with jax.set_mesh(mesh):
        cache = placed(prefilled(kind, replicas), mesh)
        run = jax.jit(functools.partial(extend, spec))
        got_out, got_lse, got = run(cache, COUNTS, MASK, step_inputs(kind))
    assert_close(got_out, out)
    assert_close(got_lse, lse)
    assert got.lengths.tolist() == after.lengths.tolist()
    assert got.overflowed.tolist() == after.overflowed.tolist()
    for a, b in zip(stored(got), stored(after), strict=True):
        np.testing.assert_array_equal(a, b)
    # Placement is the same before and after.
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(cache), strict=True):
        assert a.sharding.is_equivalent_to(b.sharding, a.ndim), (a.sharding, b.sharding)


def loss(kind: str, arrays: dict[str, Any], cache: LayerCache) -> jax.Array:
    """Weighs outputs, normalisers and what is stored after two prefix tokens and one step."""
    opened = cache.open(2)
    # The prefix enters as tokens that are written first: gradients go through both writes.
    written = opened.write(*opened.replicated(*arrays["prefix"])).close()
    out, lse, after = extend(KINDS[kind][0], written, COUNTS, MASK, arrays["step"])
    weight = normal(np.random.default_rng(4), *out.shape)
    stored = jax.tree.map(lambda x: x[:, :, :9], after.records.planes)
    # A replica is a copy of the same token: it counts once.
    total = sum(jnp.sum(jnp.where(jnp.isfinite(x), x, 0.0)) for x in stored.values())
    normalisers = jnp.sum(jnp.where(jnp.isfinite(lse), lse, 0.0))
    return jnp.sum(out * weight) + normalisers + total / cache.replicas


@functools.cache
def gradient(kind: str) -> Callable[..., Any]:
    return jax.jit(jax.grad(functools.partial(loss, kind)))


@functools.cache
def gradient_inputs(kind: str) -> dict[str, Any]:
    spec, heads, _ = KINDS[kind]
    _, *prefix = draw_tokens(np.random.default_rng(5), spec, heads, B, 2)
    return {"step": step_inputs(kind), "prefix": prefix}


@functools.cache
def wanted_gradient(kind: str) -> Any:
    return gradient(kind)(gradient_inputs(kind), prefilled(kind))


USUAL_GRADIENTS = [("latent", "auto")]


@pytest.mark.parametrize(
    ("kind", "mode"), cases(USUAL_GRADIENTS, ["shared", "latent", "replicated"], MODES)
)
def test_gradients_on_a_mesh_equal_those_without(kind: str, mode: str) -> None:
    spec, _, replicas = KINDS[kind]
    want, mesh = wanted_gradient(kind), mesh_of((2, 4), mode)
    with jax.set_mesh(mesh):
        cache = placed(prefilled(kind, replicas), mesh)
        got = gradient(kind)(gradient_inputs(kind), cache)
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree.flatten_with_path(want)[0]]
    for path, a, b in zip(paths, jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert np.asarray(b).any(), f"{path}: no gradient to compare"
        a, b = (_shared_summed(spec, path, x) for x in (a, b))
        assert_close(a, b, what=path)


def _shared_summed(spec: KVSpec, path: str, grad: Any) -> np.ndarray:
    """Sums the gradient of what heads share over them: they agree, so only the sum counts."""
    grad = np.array(grad)
    if "key" in path or path == "['prefix'][0]":
        grad[..., spec.key_width :] = grad[..., spec.key_width :].sum(axis=2, keepdims=True)
    return grad


def test_shd_07_bytes_of_each_device() -> None:
    mesh = mesh_of((2, 4), "auto")

    def per_device(spec: KVSpec, replicas: int = 1) -> tuple[int, set[int]]:
        cache = create_layer(spec, Raw(jnp.float32), B, S, replicas=replicas)
        planes = placed(cache, mesh).records.planes.values()
        total = sum(x.nbytes for x in cache.records.planes.values())
        shards = [[s.data.nbytes for s in x.addressable_shards] for x in planes]
        return total, {sum(parts) for parts in zip(*shards, strict=True)}

    total, each = per_device(KVSpec(4, 8, 6))
    assert each == {total // 8}, "four heads over four devices, rows over two"
    total, each = per_device(KVSpec(1, 12, 8, value_offset=0))
    assert each == {total // 2}, "one head: a full copy on each tensor device"
    once, _ = per_device(KVSpec(2, 8, 6))
    total, each = per_device(KVSpec(2, 8, 6), replicas=2)
    assert total == 2 * once and each == {once // 4}, "two heads, each on two devices"


def test_shd_05_the_head_axis_stays_the_sharded_one() -> None:
    mesh, spec = mesh_of((1, 4), "auto"), KVSpec(4, 8, 6)
    cache = placed(create_layer(spec, Raw(jnp.float32), 2, 12), mesh)
    key = jnp.ones((2, 3, 4, 8))

    def written(cache: LayerCache) -> LayerCache:
        return cache.open(3).write(key, key[..., :6]).close()

    verbs = [written, lambda c: c.reorder(jnp.array([1, 0], jnp.int32)), lambda c: c.rollback(1)]
    with jax.set_mesh(mesh):
        for verb in (*verbs, *verbs):
            cache = jax.jit(verb)(cache)
            for plane in cache.records.planes.values():
                # [B, K, S, H]: four heads over four devices, and nothing else is split.
                assert plane.sharding.shard_shape(plane.shape) == (2, 1, *plane.shape[2:])


def test_shd_02_device_r_holds_head_r_over_2() -> None:
    mesh = mesh_of((1, 4), "auto")
    spec = KVSpec(2, 8, 6)
    cache = create_layer(spec, Raw(jnp.float32), 1, 4, replicas=2)
    key = jnp.broadcast_to(jnp.arange(2.0)[None, None, :, None], (1, 4, 2, 8))
    opened = cache.open(4)
    plane = placed(opened.write(*opened.replicated(key, key[..., :6])).close(), mesh)
    shards = plane.records.planes["key"].addressable_shards
    held = {s.device.id: np.unique(s.data).tolist() for s in shards}
    assert held == {device.id: [r // 2] for r, device in enumerate(mesh.devices[0])}


@pytest.mark.parametrize("mode", MODES)
def test_verbs_keep_values_and_placement(mode: str) -> None:
    rows = np.array([3, 3, 1, 0, 7, 6, 5, 2], np.int32)
    verbs: dict[str, Callable[[LayerCache], LayerCache]] = {
        "rollback": lambda c: c.rollback(np.arange(B, dtype=np.int32) % 3),
        "reset": lambda c: c.reset(rows > 3),
        "reorder": lambda c: c.reorder(rows),
        "fork": lambda c: c.fork(np.concatenate([rows, rows])),
        "lanes": lambda c: c.convert(lanes=128),
        "codec": lambda c: c.convert(codec=Raw(jnp.bfloat16)),
    }
    mesh, cache = mesh_of((2, 4), mode), prefilled("shared")

    def every(cache: LayerCache) -> dict[str, LayerCache]:
        return {name: verb(cache) for name, verb in verbs.items()}

    want = jax.jit(every)(cache)
    with jax.set_mesh(mesh):
        got = jax.jit(every)(placed(cache, mesh))
    for name, after in got.items():
        place = after.sharding(mesh)
        for a, b, s in zip(*map(jax.tree.leaves, (after, want[name], place)), strict=True):
            np.testing.assert_array_equal(bits(a), bits(b))
            assert a.sharding.is_equivalent_to(s, a.ndim), f"{name}: {a.sharding}, want {s}"


def test_placement_follows_the_rules_in_use() -> None:
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    cache = gather_layers([create_layer(KVSpec(4, 8, 6), Raw(jnp.float32), B, S)] * 2)
    rules = Rules((("batch", "x"), ("kv_heads", "y")))
    with use_rules(rules):
        inside = cache.sharding(mesh)
    given = cache.sharding(mesh, rules)
    for place in (inside, given):
        assert place.layers[0].planes["key"].spec == PartitionSpec("x", "y", None, None)
        assert place.indices[0].lengths.spec == PartitionSpec("x")
    assert jax.tree.structure(given) == jax.tree.structure(cache)
