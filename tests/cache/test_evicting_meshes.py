# SPDX-License-Identifier: Apache-2.0
"""Rows that evict on meshes: heads choose where their records lie, and all agree with no mesh."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.cache import H2O, TOVA, Evicting, LayerCache, Raw, create_layer
from tests.cache.meshes import KINDS, B, mesh_of
from tests.cache.support import draw_tokens, scoring
from tests.support.tolerances import assert_close

WIDTH, STEPS = 6, 4
POLICIES = {"h2o": H2O(), "tova": TOVA()}
FULL = pytest.mark.full


@functools.partial(jax.jit, static_argnums=0)
def extended(kind: str, cache: LayerCache, tokens: Any, counts: Any) -> Any:
    """Feeds one call."""
    spec, heads, _ = KINDS[kind]
    slopes = jnp.linspace(0.1, 0.5, heads, dtype=jnp.float32)
    opened = cache.open(tokens[0].shape[1], counts)
    out, _, cache = opened.extend(*tokens, scoring(spec), alibi_slopes=slopes)
    return out, cache.close()


def run(kind: str, cache: LayerCache, tokens: Any, counts: Any) -> Any:
    """Feeds some calls, then one token, and takes rows apart."""
    outs = []
    for i in range(STEPS):
        given = [None if x is None else x[i] for x in tokens]
        out, cache = extended(kind, cache, given, counts[i])
        outs.append(np.asarray(out))
    first = [None if x is None else x[0, :, :1] for x in tokens]
    out, after = extended(kind, cache, first, np.ones_like(counts[0]))
    rows = jnp.arange(B, dtype=jnp.int32)[::-1]
    return np.stack(outs), out, jax.jit(lambda cache: cache.reorder(rows))(after)


@pytest.mark.parametrize(
    ("kind", "policy", "mode", "shape"),
    [
        ("heads", "h2o", "explicit", (2, 4)),
        pytest.param("heads", "h2o", "auto", (2, 4), marks=FULL),
        pytest.param("heads", "tova", "explicit", (2, 4), marks=FULL),
        ("latent", "h2o", "explicit", (2, 4)),
        pytest.param("latent", "tova", "auto", (1, 8), marks=FULL),
        pytest.param("heads", "tova", "auto", (1, 8), marks=FULL),
        pytest.param("heads", "h2o", "explicit", (8, 1), marks=FULL),
    ],
)
def test_a_mesh_evicts_the_same_tokens(
    kind: str, policy: str, mode: str, shape: tuple[int, int]
) -> None:
    spec, heads, _ = KINDS[kind]
    rng = np.random.default_rng(0)
    drawn = [draw_tokens(rng, spec, heads, B, WIDTH) for _ in range(STEPS)]
    tokens = [None if x[0] is None else np.stack(x) for x in zip(*drawn, strict=True)]
    counts = rng.integers(0, WIDTH + 1, (STEPS, B)).astype(np.int32)
    layout = Evicting(7, POLICIES[policy])
    cache = create_layer(spec, Raw(jnp.float32), B, 64, layout=layout)
    want = run(kind, cache, tokens, counts)
    mesh = mesh_of(shape, mode)
    with jax.set_mesh(mesh):
        placed = jax.device_put(cache, cache.sharding(mesh))
        got = run(kind, placed, tokens, counts)
    for ours, theirs in zip(got[:2], want[:2], strict=True):
        assert_close(ours, theirs, terms=64 * 16)
    for name in ("lengths", "overflowed", "refused"):
        np.testing.assert_array_equal(getattr(got[2], name), getattr(want[2], name))
    np.testing.assert_array_equal(got[2].index.state.order, want[2].index.state.order)
    for name, plane in want[2].records.planes.items():
        filled = np.broadcast_to(np.asarray(want[2].index.state.order)[..., None] >= 0, plane.shape)
        np.testing.assert_array_equal(
            np.asarray(got[2].records.planes[name])[filled], np.asarray(plane)[filled]
        )
