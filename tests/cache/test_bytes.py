# SPDX-License-Identifier: Apache-2.0
"""The three byte figures of a cache, held against the arrays and against published models."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxkv.cache import KVSpec, Raw, create_layer, gather_layers, physical_bytes
from tests.cache.support import SPECS


def abstract(
    spec: KVSpec, dtype: Any, batch: int, capacity: int, layers: int, lanes: int = 1
) -> Any:
    def make() -> Any:
        made = [create_layer(spec, Raw(dtype), batch, capacity, lanes=lanes) for _ in range(layers)]
        return gather_layers(made)

    return jax.eval_shape(make)


@pytest.mark.parametrize(
    ("spec", "layers", "want"),
    [
        (KVSpec(25, 64, 64), 48, 307_200),  # GPT-2 XL
        (KVSpec(96, 128, 128), 96, 4_718_592),  # GPT-3 175B
        (KVSpec(8, 128, 128), 80, 327_680),  # Llama-2 70B
        (KVSpec(8, 128, 128), 32, 131_072),  # Llama-3 8B
        (KVSpec(1, 512 + 64, 512, value_offset=0), 61, 70_272),  # DeepSeek-V3
        (KVSpec(128, 128 + 64, 128), 61, 4_997_120),  # the same, heads expanded
    ],
)
def test_bytes_per_token_of_published_models(spec: KVSpec, layers: int, want: int) -> None:
    cache = abstract(spec, jnp.bfloat16, 1, 16, layers)
    assert cache.bytes_per_token == want
    # Lane padding is no part of what a token is said to leave behind.
    assert abstract(spec, jnp.bfloat16, 1, 16, layers, lanes=128).bytes_per_token == want
    assert cache.nbytes == 16 * want + 1 * (4 + 1 + 1)


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("lanes", [1, 128])
def test_nbytes_is_what_the_arrays_add_up_to(name: str, lanes: int) -> None:
    spec = SPECS[name][0]
    layers = [create_layer(spec, Raw(jnp.float16), 3, 5, lanes=lanes) for _ in range(2)]
    cache = gather_layers(layers)
    assert cache.nbytes == sum(x.nbytes for x in jax.tree.leaves(cache))
    assert cache.abstract().nbytes == cache.nbytes
    assert cache.abstract().bytes_per_token == cache.bytes_per_token
    if lanes == 1:
        index = 3 * (4 + 1 + 1)
        assert cache.nbytes == 3 * 5 * cache.bytes_per_token + index


def test_physical_bytes_count_the_tiles_of_a_tpu() -> None:
    # The latent of DeepSeek-V3: 576 channels take 5 tiles of 128.
    latent = KVSpec(1, 576, 512, value_offset=0)
    cache = abstract(latent, jnp.bfloat16, 1, 4096, 61)
    index = 4 + 1 + 1
    assert cache.physical_nbytes("cpu") == cache.nbytes == 61 * 4096 * 576 * 2 + index
    assert cache.physical_nbytes("v5e") == 61 * 4096 * 640 * 2 + index
    padded = abstract(latent, jnp.bfloat16, 1, 4096, 61, lanes=128)
    assert padded.nbytes == padded.physical_nbytes("v5e") == cache.physical_nbytes("v6e")
    # 64 channels take a whole tile; 10 slots are padded to 16 rows of 16 bits, 8 of 32.
    for dtype, rows in ((jnp.bfloat16, 16), (jnp.float32, 16), (jnp.float8_e4m3fn, 32)):
        plane = jax.ShapeDtypeStruct((2, 3, 10, 64), dtype)
        assert physical_bytes(plane, True) == 2 * 3 * rows * 128 * jnp.dtype(dtype).itemsize
        assert physical_bytes(plane, False) == 2 * 3 * 10 * 64 * jnp.dtype(dtype).itemsize
    # int4 holds two numbers a byte.
    assert physical_bytes(jax.ShapeDtypeStruct((1, 1, 64, 128), jnp.int4), False) == 64 * 128 // 2


def test_abstract_keeps_everything_but_the_numbers() -> None:
    cache = gather_layers([create_layer(SPECS["gqa"][0], Raw(jnp.bfloat16), 2, 8, lanes=128)])
    shapes = cache.abstract()
    assert jax.tree.structure(shapes) == jax.tree.structure(cache)
    for a, b in zip(jax.tree.leaves(shapes), jax.tree.leaves(cache), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype) and isinstance(a, jax.ShapeDtypeStruct)
    jax.jit(lambda c: c.rollback(0)).lower(shapes).compile()
