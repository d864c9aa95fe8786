# SPDX-License-Identifier: Apache-2.0
"""A decode step of every layout, compiled for TPU chips: in place, whatever the capacity."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxkv.cache import (
    H2O,
    TOVA,
    Contiguous,
    Evicting,
    Float8,
    Int4,
    Int8,
    Kivi,
    KVSpec,
    LayerCache,
    Paged,
    Raw,
    Ring,
    Scoring,
    SnapKV,
    create_layer,
    tree_bytes,
)
from jaxkv.core.visibility import Visibility
from jaxkv.testing.aot import compile_for_tpu, tpu_mesh
from jaxkv.testing.flow import whole_moves
from jaxkv.testing.hlo import LEAST_TEMP

RECORDS = {"gqa": (KVSpec(8, 128, 128), 32), "mla": (KVSpec(1, 576, 512, value_offset=0), 128)}
# 2,004 slots and 1,028 are no whole tiles; the cache is padded to them.
LAYOUTS = {
    "contiguous": (Contiguous(), 2004),
    "ring": (Ring(window=1024, pinned=4), 4096),
    "paged": (Paged(64), 2048),
    "pages of 16": (Paged(16), 2048),
    "h2o": (Evicting(1024, H2O()), 4096),
    "tova": (Evicting(1024, TOVA()), 4096),
    "snapkv": (Evicting(1024, SnapKV(), room=256), 4096),
    "caller": (Evicting(1024), 4096),
}
CODECS = {"bfloat16": Raw(jnp.bfloat16), "int8": Int8(), "int4": Int4(), "float8": Float8()}
CODECS["kivi"] = Kivi(dtype=jnp.bfloat16)
CASES = [(n, layout, "bfloat16") for n in RECORDS for layout in ("contiguous", "ring", "paged")]
CASES += [("gqa", "h2o", "bfloat16")]  # one head has no slots apart
CASES += [("gqa", "contiguous", "int8"), ("gqa", "contiguous", "int4"), ("gqa", "ring", "int8")]
CASES += [("gqa", "paged", "int8"), ("gqa", "contiguous", "kivi"), ("mla", "contiguous", "int8")]
CASES += [("mla", "contiguous", "kivi"), ("mla", "paged", "kivi")]
MORE = [*CASES, ("gqa", "paged", "int4"), ("mla", "contiguous", "int4"), ("mla", "paged", "int8")]
MORE += [("gqa", "paged", "kivi"), ("mla", "ring", "int8"), ("gqa", "contiguous", "float8")]
MORE += [("gqa", "paged", "float8"), ("gqa", "ring", "int4"), ("gqa", "h2o", "int8")]
MORE += [("gqa", layout, "bfloat16") for layout in ("tova", "snapkv", "caller", "pages of 16")]
OFTEN = [(*c, "v5e") for c in CASES]
FULL = [(*c, chip) for c in MORE for chip in ("v5e", "v6e", "tpu7x") if (*c, chip) not in OFTEN]
EVERY = OFTEN + [pytest.param(*c, marks=pytest.mark.full) for c in FULL]


def step(cache: LayerCache, query: Any, key: Any, value: Any) -> Any:
    out, _, cache = cache.extend(query, key, value, Scoring(Visibility(), 0.1))
    return out, cache


@pytest.mark.parametrize(("name", "layout", "codec", "chip"), EVERY)
def test_a_decode_step_is_in_place(name: str, layout: str, codec: str, chip: str) -> None:
    (spec, heads), (chosen, capacity) = RECORDS[name], LAYOUTS[layout]
    cache = jax.eval_shape(
        lambda: create_layer(spec, CODECS[codec], 8, capacity, layout=chosen, lanes=128)
    )

    def tokens(heads: int, width: int) -> Any:
        return jax.ShapeDtypeStruct((8, 1, heads, width), jnp.bfloat16)

    apart = spec.value_offset is None
    given = (
        tokens(heads, spec.key_width),
        tokens(spec.kv_heads, spec.key_width),
        tokens(spec.kv_heads, spec.value_width) if apart else None,
    )
    compiled = compile_for_tpu(step, (cache, *given), tpu_mesh(chip), donate=0)
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= tree_bytes(cache)
    # A step that also encodes a group may take what any step may.
    assert memory.temp_size_in_bytes <= (LEAST_TEMP if codec == "kivi" else 2 * 2**20)
    # What serves groups of tokens, and the residual, is smaller than a block of the others.
    plane = math.prod(cache.records.planes["key"].shape)
    assert whole_moves(compiled.as_text(), "planes[", plane // 2) == []
    if (name, chip) == ("mla", "tpu7x"):
        return  # The newest latents, 1 MiB whatever the capacity, get a tile of their own in VMEM.
    for rest in cache.records.rest.values():
        assert whole_moves(compiled.as_text(), "rest[", math.prod(rest.shape) // 2) == []
