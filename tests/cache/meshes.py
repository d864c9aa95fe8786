# SPDX-License-Identifier: Apache-2.0
"""Caches, inputs and steps that the tests on meshes share."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh

from jaxkv.cache import KVSpec, LayerCache, Raw, create_layer
from tests.cache.support import SmallBlocks, draw_tokens, normal, poisoned, scoring

B, S = 8, 12
# record, query heads, and how often each KV head is stored on a mesh with tensor=4
KINDS = {
    "heads": (KVSpec(8, 8, 6), 16, 1),
    "shared": (KVSpec(4, 8, 6, shared_width=4), 8, 1),
    "latent": (KVSpec(1, 12, 8, value_offset=0), 8, 1),
    "replicated": (KVSpec(2, 8, 6), 8, 2),
}
MODES = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}


def mesh_of(shape: tuple[int, int], mode: str) -> Mesh:
    return jax.make_mesh(shape, ("data", "tensor"), axis_types=(MODES[mode],) * 2)


@functools.cache
def prefilled(kind: str, replicas: int = 1) -> LayerCache:
    """Makes a cache whose row b holds b tokens, with rubbish in all other slots."""
    spec = KINDS[kind][0]
    _, key, value = draw_tokens(np.random.default_rng(1), spec, spec.kv_heads, B, 7)

    @jax.jit
    def fill(key: Any, value: Any) -> LayerCache:
        cache = poisoned(
            create_layer(spec, Raw(jnp.float32), B, S, layout=SmallBlocks(), replicas=replicas)
        )
        opened = cache.open(7, jnp.arange(B, dtype=jnp.int32))
        return opened.write(*opened.replicated(key, value)).close()

    return jax.tree.map(np.asarray, fill(key, value))


def step_inputs(kind: str, length: int = 3) -> dict[str, Any]:
    spec, heads, _ = KINDS[kind]
    rng = np.random.default_rng(2)
    query, key, value = draw_tokens(rng, spec, heads, B, length)
    return {
        "query": query,
        "key": key,
        "value": value,
        "bias": normal(rng, 1, heads, 1, S),
        "sink_logits": normal(rng, heads),
        "alibi_slopes": normal(rng, heads),
    }


def extend(
    spec: KVSpec, cache: LayerCache, counts: Any, mask: Any, inputs: dict[str, Any]
) -> tuple[Any, Any, LayerCache]:
    opened = cache.open(inputs["query"].shape[1], counts)
    options = {name: inputs[name] for name in ("bias", "sink_logits", "alibi_slopes")}
    out, lse, written = opened.extend(
        inputs["query"],
        inputs["key"],
        inputs["value"],
        scoring(spec, soft_cap=4.0),
        mask=mask,
        **options,
    )
    return out, lse, written.close()


COUNTS = np.array([3, 0, 1, 2, 3, 3, 2, 3], np.int32)
MASK = np.random.default_rng(3).random((B, 1, 3, S)) < 0.8


def placed(cache: Any, mesh: Mesh) -> Any:
    return jax.device_put(cache, cache.sharding(mesh))
