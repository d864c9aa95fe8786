# SPDX-License-Identifier: Apache-2.0
"""The planner against caches that are really allocated, for every layout and codec."""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from jaxkv.attention import GroupedQueryAttention
from jaxkv.cache.codecs import Codec, Raw
from jaxkv.cache.contiguous import Contiguous
from jaxkv.cache.evicting import Evicting
from jaxkv.cache.index import Layout
from jaxkv.cache.kivi import Kivi
from jaxkv.cache.layer_cache import create_layer
from jaxkv.cache.model_cache import ModelCache, gather_layers
from jaxkv.cache.paged import Paged
from jaxkv.cache.policies import POLICIES as POLICIES_BY_NAME
from jaxkv.cache.quantised import Float8, Int4, Int8
from jaxkv.cache.ring import Ring
from jaxkv.cache.spec import KVSpec
from jaxkv.memory.chips import CHIPS
from jaxkv.memory.counting import Storage
from jaxkv.memory.planner import plan
from jaxkv.memory.policy import SlotPolicy
from jaxkv.models.decoder import Decoder
from jaxkv.models.geometry import LayerSpec, ModelGeometry
from jaxkv.models.sharing import Reads


def geometry(*layers: LayerSpec) -> ModelGeometry:
    return ModelGeometry("tiny", 11, 12, layers, 32)


FULL = KVSpec(2, 24, 24)
LATENT = KVSpec(1, 36, 28, value_offset=0)
MODELS = {
    "gqa": geometry(*(LayerSpec("full", 6, KVSpec(2, 24, 16)),) * 2),
    "odd": geometry(LayerSpec("full", 6, KVSpec(3, 7, 5))),
    "mla": geometry(*(LayerSpec("full", 6, LATENT),) * 2),
    "tied": geometry(LayerSpec("full", 6, KVSpec(2, 16, 16, shared_width=8, value_offset=0))),
    "gemma3": geometry(*(LayerSpec("window", 4, FULL, window=5),) * 5, LayerSpec("full", 4, FULL)),
    "gpt-oss": geometry(
        *(LayerSpec("window", 8, KVSpec(2, 16, 16), window=4), LayerSpec("full", 8, FULL)) * 2
    ),
    "two windows": geometry(
        LayerSpec("window", 4, FULL, window=4),
        LayerSpec("window", 4, LATENT, window=9),
        LayerSpec("shared", 4),
    ),
}
CODECS: dict[str, Codec] = {
    "bf16": Raw(jnp.bfloat16),
    "fp8": Raw(jnp.float8_e4m3fn),
    "int8": Int8(),
    "int8:5": Int8(5),
    "int4": Int4(),
    "int4:8": Int4(8),
    "float8": Float8(),
}
# Codecs of whole groups of tokens, which rings do not keep.
GROUPED: dict[str, Codec] = {
    "kivi:4": Kivi(group=4, dtype=jnp.bfloat16),
    "kivi2:2": Kivi(2, 2, dtype=jnp.bfloat16),
    "kivi8:4": Kivi(8, 4, dtype=jnp.bfloat16),
}
POLICIES = ("window", "full", "pages:4", "h2o:5", "tova:20")


def layout_of(layer: LayerSpec, policy: str) -> Layout:
    if policy.startswith("pages:"):
        return Paged(int(policy.removeprefix("pages:")))
    kept, _, budget = policy.partition(":")
    if kept in POLICIES_BY_NAME and layer.window is None:
        return Evicting(int(budget), POLICIES_BY_NAME[kept]())
    return Contiguous() if policy == "full" or layer.window is None else Ring(layer.window)


def real_cache(
    model: ModelGeometry, dtype: str, policy: str, batch: int, capacity: int, lanes: int = 1
) -> ModelCache:
    """Allocates a cache layer by layer."""
    return gather_layers(
        [
            create_layer(
                layer.spec,
                {**CODECS, **GROUPED}[dtype],
                batch,
                capacity,
                layout=layout_of(layer, policy),
                lanes=lanes,
            )
            for layer in model.layers
            if layer.spec is not None
        ]
    )


def live_bytes(tree: object) -> int:
    """Asks the runtime for the size of every buffer: int4 takes half a byte there."""
    return sum(leaf.on_device_size_in_bytes() for leaf in jax.tree.leaves(tree))


def covering() -> list[Any]:
    """Lets every two of model, policy and codec meet; `-m full` runs all three of each."""
    names, codecs = list(MODELS), list(CODECS)
    every = itertools.product(range(len(names)), range(len(POLICIES)), range(len(codecs)))
    return [
        pytest.param(
            *(names[i], POLICIES[j], codecs[k]),
            marks=[] if (i + j + k) % len(codecs) == 0 else pytest.mark.full,
        )
        for i, j, k in every
    ]


# As many models as codecs, and more than policies: a Latin square.
assert len(MODELS) == len(CODECS) >= len(POLICIES)
GRID = covering()
GRID += [("gqa", "full", dtype) for dtype in GROUPED]
GRID += [(name, "pages:4", "kivi:4") for name in ("gqa", "mla", "tied")]


@pytest.mark.parametrize(("name", "policy", "dtype"), GRID)
def test_planned_bytes_are_those_of_a_live_cache(name: str, policy: str, dtype: str) -> None:
    cache = real_cache(MODELS[name], dtype, policy, 3, 13)
    found = plan(MODELS[name], context=13, batch=3, dtype=dtype, policy=policy)
    assert found.nbytes == cache.nbytes == live_bytes(cache)
    assert found.physical_nbytes == cache.physical_nbytes("cpu")
    assert found.bytes_per_token == cache.bytes_per_token


@pytest.mark.parametrize(("name", "policy", "dtype"), GRID)
def test_planned_bytes_are_those_of_a_short_row(name: str, policy: str, dtype: str) -> None:
    cache = real_cache(MODELS[name], dtype, policy, 1, 3)
    found = plan(MODELS[name], context=3, dtype=dtype, policy=policy)
    assert found.nbytes == live_bytes(cache)
    assert found.sequence_bytes == live_bytes(cache.layers)


@pytest.mark.parametrize(("name", "policy", "dtype"), GRID)
def test_planned_bytes_are_those_of_a_live_cache_with_lanes(
    name: str, policy: str, dtype: str
) -> None:
    cache = real_cache(MODELS[name], dtype, policy, 3, 13, lanes=128)
    found = plan(MODELS[name], context=13, batch=3, dtype=dtype, policy=policy, chip=CHIPS["v5e"])
    assert found.nbytes == cache.nbytes == live_bytes(cache)
    assert found.physical_nbytes == cache.physical_nbytes("v5e") >= found.nbytes
    assert found.bytes_per_token == cache.bytes_per_token


@pytest.mark.parametrize(("data", "tensor"), [(2, 2), (4, 1), (1, 2)])
@pytest.mark.parametrize("policy", ["window", "pages:4"])
@pytest.mark.parametrize("dtype", ["bf16", "int8", "int4:8"])
def test_planned_bytes_of_a_device_are_those_on_a_mesh(
    dtype: str, policy: str, data: int, tensor: int
) -> None:
    mesh = jax.make_mesh((data, tensor), ("data", "tensor"))
    model = geometry(*MODELS["gemma3"].layers, *MODELS["mla"].layers)
    cache = real_cache(model, dtype, policy, 4, 13)
    placed = jax.device_put(cache, cache.sharding(mesh))
    devices = {"data": data, "tensor": tensor}
    found = plan(
        model,
        context=13,
        batch=4,
        dtype=dtype,
        policy=policy,
        devices=devices,
    )
    for device in mesh.devices.flat:
        shards = [
            shard.data
            for leaf in jax.tree.leaves(placed)
            for shard in leaf.addressable_shards
            if shard.device == device
        ]
        assert live_bytes(shards) == found.device.nbytes
    assert found.nbytes == live_bytes(cache)


@pytest.mark.parametrize("policy", [p for p in POLICIES if p in ("window", "full", "pages:4")])
def test_what_fits_is_as_large_as_memory_allows(policy: str) -> None:
    model, storage = MODELS["gemma3"], Storage("int8", SlotPolicy.parse(policy), CHIPS["v5e"])

    def taken(rows: int, capacity: int) -> int:
        return real_cache(model, "int8", policy, rows, capacity, 128).physical_nbytes("v5e")

    budget = taken(6, 40)
    rows, tokens = storage.most_rows(model, 40, budget), storage.longest_context(model, budget)
    assert rows is not None and taken(rows, 40) <= budget < taken(rows + 1, 40)
    assert tokens is not None and taken(1, tokens) <= budget < taken(1, tokens + 1)
    assert rows >= 6 and tokens > 40


def test_planned_bytes_are_those_of_a_model_whose_last_layers_read_others() -> None:
    full = functools.partial(GroupedQueryAttention, num_heads=4, head_dim=8)
    local, spec = functools.partial(full, window=5), KVSpec(2, 8, 8)
    layers = [local, local, full, Reads(1), Reads(2), Reads(1)]
    built = nnx.eval_shape(lambda: Decoder(11, 12, 6, layers, rngs=nnx.Rngs(0)))
    layouts = [Ring(5), Ring(5), None, None, None, None]
    cache = built.init_cache(3, 13, layout=layouts, codec=Int8())
    model = geometry(
        *(LayerSpec("window", 4, spec, window=5),) * 2,
        LayerSpec("full", 4, spec),
        *(LayerSpec("shared", 4, source=i) for i in (1, 2, 1)),
    )
    found = plan(model, context=13, batch=3, dtype="int8")
    assert found.nbytes == cache.nbytes == live_bytes(cache)
    assert found.bytes_per_token == cache.bytes_per_token == 3 * 2 * 2 * (8 + 4)
    assert found.notes[0] == "3 layers read what others keep, which is counted once."


def test_a_row_that_gives_tokens_up_never_outgrows_its_memory() -> None:
    storage = Storage("int8", SlotPolicy.parse("h2o:5"), CHIPS["v5e"])
    enough = real_cache(MODELS["gemma3"], "int8", "h2o:5", 1, 40, 128).physical_nbytes("v5e")
    assert storage.longest_context(MODELS["gemma3"], enough) is None


def test_a_ring_of_groups_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"Ring\(window=5.* with Kivi\(.* fits Contiguous\(\)"):
        plan(MODELS["gemma3"], context=13, dtype="kivi:4")
    assert plan(MODELS["gemma3"], context=13, dtype="kivi:4", policy="full").nbytes


def test_a_residual_by_hand() -> None:
    found = plan(MODELS["gqa"], context=100, batch=4, dtype="kivi:16")
    # 112 slots in 2 layers of 2 heads: codes and a value's scale and zero point, those of each
    # key channel for 16 tokens, and 48 exact tokens of 2 bytes.
    slots = 112 * ((24 + 16) // 2 + 2 * 4) + 112 // 16 * 24 * 2 * 4
    row = 2 * 2 * (slots + 48 * (24 + 16) * 2)
    assert found.sequence_bytes == row and found.nbytes == 4 * (row + 6 + 4)
    assert found.bytes_per_token == 2 * 2 * (20 + 8 + 24 * 8 // 16)


def test_pages_by_hand() -> None:
    found = plan(MODELS["gqa"], context=100, batch=4, policy="pages:16", dtype="int8")
    # 28 pages of 16 tokens in 2 layers: 2 heads, 24 + 16 codes and 2 scales.
    records = 28 * 16 * 2 * 2 * (24 + 16 + 2 * 4)
    # Lengths and flags, a table of 7 pages each, a count of references to each page: once.
    assert found.nbytes == records + 4 * 6 + 4 * 7 * 4 + 28 * 4
    assert found.sequence_bytes == records // 4
