# SPDX-License-Identifier: Apache-2.0
"""A mesh changes where arrays lie, and nothing else."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh

from jaxkv.core.sharding import named
from jaxkv.testing.suite import Suite, quick_jit
from jaxkv.testing.tolerances import assert_close, assert_trees_close

ROWS = ("batch", None, None)
SHAPES = [(8, 1), (2, 4), (1, 8)]
KINDS = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}


class Meshes(Suite):
    """Cached decode and training gradients, on data and tensor axes."""

    @pytest.fixture(scope="class")
    @classmethod
    def on_one_device(cls) -> Any:
        """What the sharded runs must give."""
        attn = cls.rotated(num_heads=8, head_dim=4)
        given = cls().given(rows=8)
        return results(attn, cls.tokens(rows=8), attn.init_cache(8, cls.capacity), given)

    @pytest.mark.parametrize("kind", list(KINDS))
    @pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"{s[0]}x{s[1]}")
    def test_a_mesh_changes_nothing(
        self, on_one_device: Any, shape: tuple[int, int], kind: str
    ) -> None:
        if jax.device_count() < 8:
            pytest.skip("needs 8 devices: jax.config.update('jax_num_cpu_devices', 8)")
        attn = self.rotated(num_heads=8, head_dim=4)
        mesh = jax.make_mesh(shape, ("data", "tensor"), axis_types=(KINDS[kind],) * 2)
        with jax.set_mesh(mesh):
            cache = attn.init_cache(8, self.capacity)
            cache = jax.device_put(cache, cache.sharding(mesh))
            x, given = (
                jax.tree.map(lambda a: jax.device_put(a, named(mesh, ROWS, a.shape)), arrays)
                for arrays in (self.tokens(rows=8), self.given(rows=8))
            )
            y, grads, after = results(placed(attn, mesh), x, cache, given)
        want, expected, _ = on_one_device
        assert_close(y, want)
        assert_trees_close(grads, expected)
        for name, plane in after.records.planes.items():
            given = cache.records.planes[name]
            assert plane.sharding.is_equivalent_to(given.sharding, plane.ndim), f"{name} was moved"
            share = (shape[0], 1 if plane.shape[1] == 1 else shape[1])
            local = given.sharding.shard_shape(given.shape)
            assert local[:2] == (8 // share[0], given.shape[1] // share[1]), f"{name} is not split"


@quick_jit
def decode(attn: Any, x: Any, cache: Any, given: Any) -> Any:
    """Continues a cache."""
    return attn(x, cache=cache, **given)


@quick_jit
def training_gradient(attn: Any, x: Any, given: Any) -> Any:
    """Gives a loss's gradients, as plain arrays by parameter name."""
    grads = jax.grad(lambda attn: jnp.mean(jnp.square(attn(x, **given)[0])))(attn)
    return nnx.to_pure_dict(nnx.state(grads))


def results(attn: Any, x: Any, cache: Any, given: Any) -> Any:
    """Decodes in two chunks, of which the first has what is given, and differentiates a loss."""
    half, outs = x.shape[1] // 2, []
    for part, more in ((np.asarray(x)[:, :half], given), (np.asarray(x)[:, half:], {})):
        y, cache = decode(attn, jax.device_put(part, getattr(x, "sharding", None)), cache, more)
        outs.append(np.asarray(y))
    grads = jax.tree.map(np.asarray, training_gradient(attn, x, given))
    return np.concatenate(outs, axis=1), grads, cache


def placed(attn: Any, mesh: Mesh) -> Any:
    """Puts every parameter where its logical axes say; one without axes is on every device."""
    graph, state = nnx.split(attn)

    def place(variable: nnx.Variable) -> nnx.Variable:
        value = variable[...]
        axes = variable.get_metadata().get("axes", (None,) * value.ndim)
        return variable.replace(jax.device_put(value, named(mesh, axes, value.shape)))

    state = jax.tree.map(place, state, is_leaf=lambda x: isinstance(x, nnx.Variable))
    return nnx.merge(graph, state)
