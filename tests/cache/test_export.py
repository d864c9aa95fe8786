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
    H2O,
    TOVA,
    Codec,
    Contiguous,
    Evicting,
    Int4,
    Int8,
    LayerCache,
    Layout,
    ModelCache,
    Paged,
    Raw,
    Recent,
    Ring,
    SnapKV,
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


ANY_BATCH: dict[str, Layout] = {
    "ring": Ring(8),
    "paged": Paged(4, pages=20),
    "h2o": Evicting(8, H2O()),
    "tova": Evicting(8, TOVA()),
    "recent": Evicting(8, Recent(6, 2)),
    "snapkv": Evicting(8, SnapKV(1), room=4),
}


@pytest.mark.parametrize("name", ANY_BATCH)
@pytest.mark.parametrize(
    "codec",
    [
        pytest.param(Raw(jnp.float32), id="raw"),
        *(pytest.param(c, id=str(c), marks=pytest.mark.full) for c in (Int8(), Int4())),
    ],
)
def test_jax_17_every_layout_can_be_exported_for_any_batch(name: str, codec: Codec) -> None:
    spec, heads = SPECS["gqa"]
    how = scoring(spec)

    def make(batch: int) -> LayerCache:
        return create_layer(spec, codec, batch, 24, layout=ANY_BATCH[name])

    def step(cache: LayerCache, given: Any) -> Any:
        out, _, cache = cache.extend(*given, how)
        return out, cache

    (b,) = export.symbolic_shape("batch")
    one, two = (jax.eval_shape(lambda n=n: make(n)) for n in (1, 2))

    def symbolic(x: Any, y: Any) -> jax.ShapeDtypeStruct:
        """Takes the axes whose size follows the batch; a pool of pages is as it is."""
        shape = (b if m != n else n for m, n in zip(x.shape, y.shape, strict=True))
        return jax.ShapeDtypeStruct(tuple(shape), x.dtype)

    rng = np.random.default_rng(0)
    shapes = [jax.eval_shape(lambda n=n: draw_tokens(rng, spec, heads, n, 1)) for n in (1, 2)]
    made = export.export(jax.jit(step))(
        jax.tree.map(symbolic, one, two), jax.tree.map(symbolic, *shapes)
    )
    loaded, given = export.deserialize(made.serialize()), draw_tokens(rng, spec, heads, 3, 1)
    got, want = loaded.call(make(3), given), jax.jit(step)(make(3), given)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a.astype(jnp.float32), b.astype(jnp.float32), atol=1e-6)


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
