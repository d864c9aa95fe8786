# SPDX-License-Identifier: Apache-2.0
"""Caches in exported programs: written, read back, and run in place."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

from jaxkv.cache import (
    Contiguous,
    ModelCache,
    Raw,
    create_layer,
    gather_layers,
    register_export,
)
from tests.cache.support import SPECS, bits, draw_tokens, scoring

S = 12


def model_step(cache: ModelCache, given: Any) -> Any:
    opened, outs, layers = cache.open(1), [], []
    for number, name in enumerate(("gqa", "latent")):
        out, _, layer = opened.layer(number).extend(*given[name], scoring(SPECS[name][0]))
        outs.append(out)
        layers.append(layer)
    return outs, opened.close(layers)


def model(batch: int) -> ModelCache:
    return gather_layers(
        [create_layer(SPECS[name][0], Raw(jnp.bfloat16), batch, S) for name in ("gqa", "latent")]
    )


def inputs(batch: int) -> dict[str, Any]:
    rng = np.random.default_rng(batch)
    return {name: draw_tokens(rng, *SPECS[name], batch, 1) for name in ("gqa", "latent")}


def test_jax_17_an_exported_step_serves_any_batch_in_place() -> None:
    (batch,) = export.symbolic_shape("batch")

    def symbolic(x: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((batch, *x.shape[1:]), x.dtype)

    shapes = jax.tree.map(symbolic, (jax.eval_shape(lambda: model(2)), inputs(2)))
    made = export.export(jax.jit(model_step))(*shapes)
    loaded = export.deserialize(made.serialize())
    assert loaded.in_tree == made.in_tree and loaded.out_tree == made.out_tree
    step = jax.jit(loaded.call, donate_argnums=0)
    want = jax.jit(model_step)(model(3), inputs(3))
    got = step(model(3), inputs(3))
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a.astype(jnp.float32), b.astype(jnp.float32), atol=1e-6)
    memory = step.lower(model(1), inputs(1)).compile().memory_analysis()
    assert memory.alias_size_in_bytes == model(1).nbytes


def test_an_open_step_and_a_lone_layer_can_be_exported() -> None:
    cache = create_layer(SPECS["shared"][0], Raw(jnp.float32), 2, S, lanes=128)
    opened = export.export(jax.jit(lambda cache: cache.open(2)))(cache)
    loaded = export.deserialize(opened.serialize())
    got, want = loaded.call(cache), cache.open(2)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    assert got.layout == Contiguous() and got.records.lanes == 128
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(bits(a), bits(b))


@dataclasses.dataclass(frozen=True)
class Mirrored(Contiguous):
    """Stands for a layout that this library does not know."""

    depth: int = 3


def test_a_layout_of_one_s_own_is_registered_once() -> None:
    cache = create_layer(SPECS["gqa"][0], Raw(jnp.float32), 1, 4, layout=Mirrored(5))
    made = export.export(jax.jit(lambda c: c.rollback(0)))(cache)
    with pytest.raises(ValueError, match="register_export"):
        made.serialize()
    register_export(choices=(Mirrored,))
    assert export.deserialize(made.serialize()).call(cache).layout == Mirrored(5)
    with pytest.raises(ValueError, match="registered already"):
        register_export(choices=(Mirrored,))
