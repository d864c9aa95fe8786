# SPDX-License-Identifier: Apache-2.0
"""The planner against caches that are really allocated, for every layout and codec."""

import functools
import itertools
from collections.abc import Callable
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
from jaxkv.cache.policies import H2O, TOVA, SnapKV, pyramid_budgets
from jaxkv.cache.quantised import Float8, Int4, Int8
from jaxkv.cache.ring import Ring
from jaxkv.cache.spec import KVSpec
from jaxkv.core.visibility import Visibility
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
# What a layer of window W, or of none, keeps; budgets by layer are those of layers without one.
POLICIES: dict[str, Callable[[int | None], Layout]] = {
    "window": lambda w: Ring(w) if w else Contiguous(),
    "full": lambda w: Contiguous(),
    "pages:4": lambda w: Paged(4),
    "h2o:5": lambda w: Ring(w) if w else Evicting(5, H2O()),
    "tova:20": lambda w: Ring(w) if w else Evicting(20, TOVA()),
    "window+3": lambda w: Ring(w, spare=3) if w else Contiguous(),
    "ring:5": lambda w: Ring(min(w or 5, 5)),
    "ring:4+2": lambda w: Ring(min(w or 4, 4), spare=2),
    "sinks:4": lambda w: Ring(4) if w == 4 else Ring(4, pinned=4),
    "sinks:3+2": lambda w: Ring(3, pinned=4, spare=2),
    "pages:4x8": lambda w: Paged(4, pages=8),
    "snapkv:3+5": lambda w: Ring(w) if w else Evicting(3, SnapKV(), room=5),
}
PYRAMIDS: dict[str, Callable[[int], Layout]] = {
    "h2o:5/pyramid": lambda budget: Evicting(budget, H2O()),
    "snapkv:5+2/pyramid": lambda budget: Evicting(budget, SnapKV(), room=2),
}
EVERY = (*POLICIES, *PYRAMIDS)


def layouts_of(model: ModelGeometry, policy: str) -> list[Layout]:
    windows = [layer.window for layer in model.layers if layer.spec is not None]
    if policy in POLICIES:
        return [POLICIES[policy](window) for window in windows]
    choosing = windows.count(None)
    budgets = iter(pyramid_budgets(5, choosing) if choosing else [])
    return [Ring(w) if w else PYRAMIDS[policy](next(budgets)) for w in windows]


def real_cache(
    model: ModelGeometry, dtype: str, policy: str, batch: int, capacity: int, lanes: int = 1
) -> ModelCache:
    """Allocates a cache layer by layer."""
    specs = [layer.spec for layer in model.layers if layer.spec is not None]
    return gather_layers(
        [
            create_layer(
                spec, {**CODECS, **GROUPED}[dtype], batch, capacity, layout=layout, lanes=lanes
            )
            for spec, layout in zip(specs, layouts_of(model, policy), strict=True)
        ]
    )


def live_bytes(tree: object) -> int:
    """Asks the runtime for the size of every buffer: int4 takes half a byte there."""
    return sum(leaf.on_device_size_in_bytes() for leaf in jax.tree.leaves(tree))


def covering() -> list[Any]:
    """Lets every two of model, policy and codec meet; `-m full` runs all three of each."""
    names, codecs = list(MODELS), list(CODECS)
    every = itertools.product(range(len(names)), range(len(EVERY)), range(len(codecs)))
    return [
        pytest.param(
            *(names[i], EVERY[j], codecs[k]),
            marks=[] if (i + j + k) % len(codecs) == 0 else pytest.mark.full,
        )
        for i, j, k in every
    ]


# As many models as codecs: each policy meets every one of both.
assert len(MODELS) == len(CODECS)
GRID = covering()
GRID += [("gqa", "full", dtype) for dtype in GROUPED]
GRID += [(name, "pages:4", "kivi:4") for name in ("gqa", "mla", "tied")]
GRID += [(name, "pages:4x8", dtype) for name in ("gqa", "mla") for dtype in ("kivi:4", "kivi2:2")]


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
    # Of a pool a row counts the pages that it takes.
    alone = real_cache(MODELS[name], dtype, policy.removesuffix("x8"), 1, 3)
    assert found.sequence_bytes == live_bytes(alone.layers)


# Of what a cache without lanes shows by default, every third: lanes pad each plane alike.
WIDE = [
    pytest.param(*getattr(case, "values", case), marks=[pytest.mark.full] if number % 3 else [])
    for number, case in enumerate(case for case in GRID if not getattr(case, "marks", ()))
]
WIDE += [case for case in GRID if getattr(case, "marks", ())]


@pytest.mark.parametrize(("name", "policy", "dtype"), WIDE)
def test_planned_bytes_are_those_of_a_live_cache_with_lanes(
    name: str, policy: str, dtype: str
) -> None:
    cache = real_cache(MODELS[name], dtype, policy, 3, 13, lanes=128)
    found = plan(MODELS[name], context=13, batch=3, dtype=dtype, policy=policy, chip=CHIPS["v5e"])
    assert found.nbytes == cache.nbytes == live_bytes(cache)
    assert found.physical_nbytes == cache.physical_nbytes("v5e") >= found.nbytes
    assert found.bytes_per_token == cache.bytes_per_token


@pytest.mark.parametrize(("data", "tensor"), [(2, 2), (4, 1), (1, 2)])
@pytest.mark.parametrize(
    ("dtype", "policy"),
    [
        *itertools.product(["bf16", "int8", "int4:8"], ["window", "pages:4"]),
        ("int8", "sinks:3+2"),
        ("int4:8", "pages:4x8"),
        ("bf16", "h2o:5"),
        ("int8", "snapkv:5+2/pyramid"),
    ],
)
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


@pytest.mark.parametrize("policy", ["window", "window+3", "full", "pages:4"])
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


FORGETTING = ["h2o:5", "ring:4+2", "sinks:4", "snapkv:5+2/pyramid"]


@pytest.mark.parametrize("policy", FORGETTING)
def test_a_row_that_gives_tokens_up_never_outgrows_its_memory(policy: str) -> None:
    storage = Storage("int8", SlotPolicy.parse(policy), CHIPS["v5e"])
    enough = real_cache(MODELS["gemma3"], "int8", policy, 1, 40, 128).physical_nbytes("v5e")
    assert storage.longest_context(MODELS["gemma3"], enough) is None


def test_a_ring_of_groups_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"Ring\(window=5.* with Kivi\(.* fits Contiguous\(\)"):
        plan(MODELS["gemma3"], context=13, dtype="kivi:4")
    assert plan(MODELS["gemma3"], context=13, dtype="kivi:4", policy="full").nbytes


@pytest.mark.parametrize("policy", ["ring:5", "sinks:4", "h2o:5/pyramid", "pages:6x7"])
def test_what_keeps_no_whole_groups_is_refused_alike(policy: str) -> None:
    with pytest.raises(ValueError, match=r"with Kivi\(.* fits Contiguous\(\)") as error:
        plan(MODELS["gqa"], context=13, dtype="kivi:4", policy=policy)
    assert "--windows" not in str(error.value)


@pytest.mark.parametrize("dtype", ["bf16", "int8", "int4"])
@pytest.mark.parametrize(("form", "policy"), [("h2o:{}", H2O()), ("snapkv:{}+2", SnapKV())])
def test_budgets_by_head_take_the_slots_of_the_largest(
    form: str, policy: H2O | SnapKV, dtype: str
) -> None:
    layout = Evicting((3, 6), policy, room=2 if isinstance(policy, SnapKV) else 0)
    cache = create_layer(KVSpec(2, 24, 16), CODECS[dtype], 3, 13, layout=layout)
    model = geometry(LayerSpec("full", 6, KVSpec(2, 24, 16)))
    for largest in (5, 6, 7):
        found = plan(model, context=13, batch=3, dtype=dtype, policy=form.format(largest))
        assert (found.nbytes == live_bytes(cache)) == (largest == 6)


def test_a_smaller_window_needs_no_more_than_its_own_ring() -> None:
    # What queries see through a ring of 9 and pinned tokens is what one of their window shows.
    for window in (1, 4, 9):
        rule = Visibility(window=window)
        assert Ring(9, pinned=4, spare=2).narrowed(rule) == Ring(window).narrowed(rule) == rule
    assert Ring(9, pinned=4).narrowed(Visibility(window=10)) == Visibility(window=9, pinned=4)


def test_a_model_with_budgets_by_layer_is_the_plan_to_the_byte() -> None:
    full = functools.partial(GroupedQueryAttention, num_heads=4, num_kv_heads=2, head_dim=8)
    built = nnx.eval_shape(lambda: Decoder(11, 12, 4, [full] * 4, rngs=nnx.Rngs(0)))
    budgets = pyramid_budgets(6, 4)
    assert len(set(budgets)) == 4
    layouts = [Evicting(budget, SnapKV(), room=3) for budget in budgets]
    cache = built.init_cache(3, 20, layout=layouts, codec=Int4())
    model = geometry(*(LayerSpec("full", 4, KVSpec(2, 8, 8)),) * 4)
    found = plan(model, context=20, batch=3, dtype="int4", policy="snapkv:6+3/pyramid")
    assert found.nbytes == cache.nbytes == live_bytes(cache)
    assert [group.slots for group in found.groups] == [budget + 3 for budget in budgets]
    # Heads of 4 + 4 bytes of codes and 2 scales; an order for each slot.
    slots = sum(budgets) + 4 * 3
    assert found.sequence_bytes == slots * 2 * (4 + 4 + 2 * 4)
    assert found.nbytes == 3 * (found.sequence_bytes + slots * 2 * 4 + 4 * (6 + 4))


def test_rings_by_hand() -> None:
    found = plan(MODELS["gemma3"], context=100, batch=4, policy="sinks:6+2", dtype="int8")
    # Windows of 5 in 5 layers and 6 in one, with 2 spare slots each and 4 pinned ones in the last.
    slot = 2 * (24 + 24 + 2 * 4)
    assert found.sequence_bytes == (5 * (5 + 2) + 6 + 4 + 2) * slot
    # Lengths, flags and a high-water mark, once for each kind of ring.
    assert found.nbytes == 4 * (found.sequence_bytes + 2 * (6 + 4))
    assert [str(group.layout) for group in found.groups] == [
        "Ring(window=5, pinned=0, spare=2)",
        "Ring(window=6, pinned=4, spare=2)",
    ]


def test_a_pool_by_hand() -> None:
    model = MODELS["gqa"]
    found = plan(
        model, context=100, batch=9, policy="pages:16x30", dtype="int8", chip=CHIPS["h200"]
    )
    token = 2 * 2 * (24 + 16 + 2 * 4)
    # 30 pages, however many rows; lengths, flags and 7 pages of a table for each row.
    assert found.nbytes == 30 * (16 * token + 4) + 9 * (6 + 7 * 4)
    # A row of its own takes 7 pages, so the pool has room for 4 that share none.
    assert found.sequence_bytes == 7 * 16 * token
    assert found.fit is not None
    assert (found.fit.sequences, found.fit.longest_context) == (4, 30 * 16)
    assert found.notes[0].startswith(
        "All rows share a pool of 30 pages of 16 tokens: room for 4 rows of 100 tokens"
    )
    halves = plan(model, context=100, batch=9, policy="pages:16x30", devices={"data": 2})
    assert "room for 4 rows" in halves.notes[0]
    with pytest.raises(ValueError, match="30 pages on 4 data devices: want a multiple"):
        plan(model, context=100, policy="pages:16x30", devices={"data": 4})


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
