# SPDX-License-Identifier: Apache-2.0
"""The writer and the read loop alone, compiled for TPU chips."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxkv.cache.codecs import Raw
from jaxkv.cache.layer_cache import LayerCache, Scoring, create_layer
from jaxkv.cache.spec import KVSpec
from jaxkv.core.visibility import Visibility
from jaxkv.testing.aot import compile_for_tpu, tpu_mesh
from jaxkv.testing.flow import whole_moves
from tests.aot.programs import LENGTH, ROWS, device_bytes, smallest_plane
from tests.aot.recorded import check_temporary_bytes

pytestmark = pytest.mark.full

# Llama-3-8B's record, DeepSeek-V3's, and one half a tile wide.
RECORDS = {
    "gqa": KVSpec(8, 128, 128),
    "mla": KVSpec(1, 576, 512, value_offset=0),
    "narrow": KVSpec(8, 64, 64),
}
BF16 = jnp.bfloat16


def shapes(name: str, lanes: int = 128) -> LayerCache:
    return jax.eval_shape(lambda: create_layer(RECORDS[name], Raw(BF16), ROWS, LENGTH, lanes=lanes))


def new_tokens(name: str, length: int) -> tuple[Any, Any]:
    spec = RECORDS[name]
    key = jax.ShapeDtypeStruct((ROWS, length, spec.kv_heads, spec.key_width), BF16)
    apart = spec.value_offset is None
    return key, jax.ShapeDtypeStruct((*key.shape[:3], spec.value_width), BF16) if apart else None


def write(cache: LayerCache, key: Any, value: Any) -> LayerCache:
    return cache.open(key.shape[1]).write(key, value).close()


@pytest.mark.parametrize("chip", ["v5e", "v6e"])
@pytest.mark.parametrize("length", [1, 5, 512])
@pytest.mark.parametrize("name", RECORDS)
def test_writer_is_in_place(name: str, length: int, chip: str) -> None:
    cache = shapes(name)
    args = (cache, *new_tokens(name, length))
    compiled = compile_for_tpu(write, args, tpu_mesh(chip), donate=0)
    assert compiled.memory_analysis().alias_size_in_bytes >= device_bytes(cache)
    assert whole_moves(compiled.as_text(), "planes[", smallest_plane(cache) // 2) == []
    check_temporary_bytes(compiled, "write", chip)


@pytest.mark.parametrize("chip", ["v5e", "v6e"])
@pytest.mark.parametrize("length", [1, 64])
@pytest.mark.parametrize("name", RECORDS)
def test_reading_touches_block_by_block(name: str, length: int, chip: str) -> None:
    cache, spec = shapes(name), RECORDS[name]
    heads = 128 if name == "mla" else 32
    query = jax.ShapeDtypeStruct((ROWS, length, heads, spec.key_width), BF16)

    def attend(cache: LayerCache, query: Any) -> Any:
        order = cache.lengths[:, None] + jnp.arange(length, dtype=jnp.int32)[None]
        return cache.attend(query, Scoring(Visibility(), 0.1), q_order=order)

    compiled = compile_for_tpu(attend, (cache, query), tpu_mesh(chip))
    assert whole_moves(compiled.as_text(), "planes[", smallest_plane(cache) // 2) == []
    check_temporary_bytes(compiled, f"read {length}", name, chip)
