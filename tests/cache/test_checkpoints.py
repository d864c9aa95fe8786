# SPDX-License-Identifier: Apache-2.0
"""Caches saved and restored by Orbax, also onto another number of devices."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import AxisType, Mesh

from jaxkv.cache import KVSpec, ModelCache, Raw, create_layer, gather_layers
from tests.cache.support import bits


def filled(batch: int = 4) -> ModelCache:
    """Makes a model's cache whose every leaf is told from every other."""
    specs = (KVSpec(4, 8, 6, shared_width=4), KVSpec(1, 12, 8, value_offset=0))
    cache = gather_layers([create_layer(s, Raw(jnp.bfloat16), batch, 6) for s in specs])
    leaves, tree = jax.tree.flatten(cache)
    rng = np.random.default_rng(0)
    leaves = [
        jnp.asarray(rng.integers(0, 2, x.shape) * (i + 1), x.dtype) for i, x in enumerate(leaves)
    ]
    return jax.tree.unflatten(tree, leaves)


def mesh(data: int, tensor: int) -> Mesh:
    return jax.make_mesh(
        (data, tensor),
        ("data", "tensor"),
        axis_types=(AxisType.Auto,) * 2,
        devices=jax.devices()[: data * tensor],
    )


def target(cache: ModelCache, place: Any) -> Any:
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), cache.abstract(), place
    )


def assert_equal(got: Any, want: Any) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(bits(a), bits(b))


def test_jax_19_saved_on_four_devices_restored_on_one_two_and_eight(tmp_path: Path) -> None:
    cache = filled()
    path = tmp_path / "cache"
    checkpointer = ocp.Checkpointer(ocp.StandardCheckpointHandler())
    on_four = jax.device_put(cache, cache.sharding(mesh(2, 2)))
    checkpointer.save(path, args=ocp.args.StandardSave(on_four))

    def restored(like: Any) -> Any:
        return checkpointer.restore(path, args=ocp.args.StandardRestore(like))

    for shape in ((1, 1), (2, 1), (2, 4)):
        place = cache.sharding(mesh(*shape))
        got = restored(target(cache, place))
        assert_equal(got, cache)
        for x, s in zip(jax.tree.leaves(got), jax.tree.leaves(place), strict=True):
            assert x.sharding == s
