# SPDX-License-Identifier: Apache-2.0
"""What a compiled step on a mesh moves between devices: nothing."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxkv.cache import LayerCache, Raw, create_layer
from tests.cache.meshes import KINDS, B, S, extend, mesh_of, placed, step_inputs

pytestmark = pytest.mark.as_shipped

COLLECTIVES = re.compile(
    r" (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-start)?\("
)


@pytest.mark.parametrize(
    ("kind", "mode"),
    [
        ("heads", "auto"),
        ("latent", "explicit"),
        pytest.param("heads", "explicit", marks=pytest.mark.full),
        pytest.param("latent", "auto", marks=pytest.mark.full),
        pytest.param("replicated", "explicit", marks=pytest.mark.full),
    ],
)
def test_a_compiled_step_moves_nothing_between_devices(kind: str, mode: str) -> None:
    spec, _, replicas = KINDS[kind]
    mesh = mesh_of((2, 4), mode)
    with jax.set_mesh(mesh):
        cache = placed(create_layer(spec, Raw(jnp.float32), B, S, replicas=replicas), mesh)
        inputs = step_inputs(kind, length=1)

        def step(cache: LayerCache, inputs: dict[str, Any]) -> Any:
            return extend(spec, cache, None, None, inputs)

        compiled = jax.jit(step, donate_argnums=0).lower(cache, inputs).compile()
    assert COLLECTIVES.findall(compiled.as_text()) == []
    here = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(cache))
    assert compiled.memory_analysis().alias_size_in_bytes == here
