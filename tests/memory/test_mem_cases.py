# SPDX-License-Identifier: Apache-2.0
"""The planner against the MEM rows of the cases: every figure worked out by hand there."""

import dataclasses
import math
import re

import jax
import jax.numpy as jnp
import pytest

from jaxkv.cache.codecs import Raw
from jaxkv.cache.contiguous import Contiguous
from jaxkv.cache.layer_cache import create_layer
from jaxkv.cache.model_cache import ModelCache, gather_layers
from jaxkv.cache.ring import Ring
from jaxkv.cache.spec import KVSpec
from jaxkv.memory.chips import CHIPS
from jaxkv.memory.counting import Storage, device_part
from jaxkv.memory.planner import plan
from jaxkv.memory.policy import SlotPolicy
from jaxkv.memory.table import both_units
from jaxkv.models.configs import read_config
from jaxkv.models.geometry import LayerSpec, ModelGeometry
from jaxkv.models.presets import load_geometry, preset, preset_names

GIB = 2**30
BF16 = Storage()
# Lengths int32, overflowed bool and refused bool of one row.
INDEX_ROW = 6


def per_token(name: str) -> int:
    return BF16.token_bytes(load_geometry(name))


def test_mem_01_llama3_8b_to_the_byte_with_the_right_unit() -> None:
    llama = plan(load_geometry("llama3-8b"), context=8192)
    assert llama.bytes_per_token == 131_072
    assert llama.sequence_bytes == GIB
    assert both_units(llama.sequence_bytes) == "1.000 GiB = 1.074 GB"


def test_mem_02_key_value_heads_count_and_not_the_model_width() -> None:
    llama = load_geometry("llama3-8b")
    assert BF16.row_bytes(llama, 8192) != 4 * GIB
    assert BF16.row_bytes(llama.per_head(), 8192) == 4 * GIB
    assert BF16.row_bytes(llama.with_kv_heads(1), 8192) == GIB // 8
    mqa = read_config(preset("llama3-8b")["config"] | {"num_key_value_heads": 1})
    assert BF16.row_bytes(mqa, 8192) == GIB // 8


def test_mem_03_head_width_from_the_config() -> None:
    assert (per_token("qwen3-0.6b"), per_token("qwen3-4b")) == (114_688, 147_456)
    derived = {k: v for k, v in preset("qwen3-4b")["config"].items() if k != "head_dim"}
    assert BF16.token_bytes(read_config(derived)) == 92_160


def test_mem_05_window_policy_is_an_input() -> None:
    model = load_geometry("gpt-oss-20b")

    def rows(policy: str) -> float:
        found = plan(model, context=8192, batch=32, policy=policy)
        return found.batch * found.sequence_bytes / GIB

    assert (rows("window"), rows("full")) == (6.09375, 12.0)
    # Pages that a window has left behind are not freed.
    assert rows("pages:16") == 12.0


def test_mem_06_gemma3_1b_keeps_windows_only() -> None:
    gemma = plan(load_geometry("gemma3-1b"), context=32_768)
    assert gemma.sequence_bytes == 145_752_064
    assert both_units(gemma.sequence_bytes) == "139.00 MiB = 145.75 MB"
    assert [(g.layer.kind, g.count, g.slots) for g in gemma.groups] == [
        ("window", 22, 512),
        ("full", 4, 32_768),
    ]
    assert plan(load_geometry("gemma3-1b"), context=32_768, policy="full").sequence_bytes == (
        832 * 2**20
    )


def test_mem_09_deepseek_v3_latent_and_expanded_apart() -> None:
    found = plan(load_geometry("deepseek-v3"), context=65_536)
    assert found.bytes_per_token == 70_272
    assert round(found.sequence_bytes / GIB, 3) == 4.289
    assert found.per_head_bytes_per_token == 4_997_120


def test_mem_11_unequal_key_and_value_widths() -> None:
    lite = load_geometry("deepseek-v2-lite")
    assert lite.layers[0].expanded == KVSpec(16, 192, 128)
    assert BF16.token_bytes(lite.per_head()) == 276_480


@pytest.mark.parametrize(
    ("dtype", "width", "scale", "times"),
    [
        ("int8", 64, 2, 1.939),
        ("int8", 128, 4, 1.939),
        ("int8", 128, 2, 1.969),
        ("int4", 128, 2, 3.879),
    ],
)
def test_mem_13_scales_count_and_8_bits_do_not_double_the_capacity(
    dtype: str, width: int, scale: int, times: float
) -> None:
    # Scales here have 4 bytes: one of 2 weighs on D channels as one of 4 does on 2 D.
    spec = KVSpec(8, width * 4 // scale, width * 4 // scale)
    model = ModelGeometry("tiny", 11, 12, (LayerSpec("full", 16, spec),) * 3, 4096)
    scaled = Storage(dtype)
    assert round(BF16.token_bytes(model) / scaled.token_bytes(model), 3) == times
    budget = 1000 * BF16.row_bytes(model, 4096)
    tokens = [storage.longest_context(model, budget) for storage in (BF16, scaled)]
    assert tokens[0] is not None and tokens[1] is not None
    assert round(tokens[1] / tokens[0], 3) == times
    assert any(f"{times:.3f} times smaller" in note for note in plan(model, dtype=dtype).notes)
    # As many scales again where each one has half the channels.
    halves = Storage(f"{dtype}:{spec.key_width // 2}")
    assert halves.token_bytes(model) - scaled.token_bytes(model) == 3 * 8 * 2 * 4


def test_mem_14_tokens_for_a_device_budget_grow_with_tensor_devices() -> None:
    llama = load_geometry("llama3-8b")
    budget = 208_000 * 131_072 + INDEX_ROW
    assert BF16.longest_context(device_part(llama, 1), budget) == 208_000
    assert BF16.longest_context(device_part(llama, 4), budget) == 832_000


def test_shd_08_pages_for_a_device_budget_grow_with_tensor_devices() -> None:
    llama, pages = load_geometry("llama3-8b"), Storage(policy=SlotPolicy.parse("pages:16"))
    for kv_heads, growth in ((4, 4), (2, 2)):
        spec = KVSpec(kv_heads, 128, 128)
        layers = tuple(dataclasses.replace(layer, spec=spec) for layer in llama.layers)
        model = dataclasses.replace(llama, layers=layers)
        # Of each page: 16 tokens in bfloat16, 4 bytes of the row's table, 4 of the references.
        budget = 1000 * (16 * 32 * kv_heads * 256 * 2 + 8) + INDEX_ROW
        one, four = (pages.longest_context(device_part(model, n), budget) for n in (1, 4))
        assert one == 16 * 1000
        # Tables do not shrink with the heads of a device.
        assert four is not None and 16 * (growth * 1000 - 1) <= four <= 16 * growth * 1000


def test_mem_15_more_devices_than_key_value_heads() -> None:
    model = load_geometry("llama2-70b")
    at_8, at_16 = (plan(model, devices={"tensor": n}) for n in (8, 16))
    assert at_8.device.bytes_per_token == at_16.device.bytes_per_token == 40_960
    assert 16 * at_16.device.bytes_per_token == 655_360
    assert any("each head is stored 2 times" in note for note in at_16.notes)
    assert not any("stored" in note for note in at_8.notes)


def test_mem_17_data_devices_divide_rows_only() -> None:
    model = load_geometry("llama2-70b")
    one = plan(model, context=4096, devices={"data": 4, "tensor": 2})
    assert one.device.rows == 1
    assert one.device.sequence_bytes == one.sequence_bytes // 2
    assert one.device.nbytes == (one.nbytes - INDEX_ROW) // 2 + INDEX_ROW
    five = plan(model, context=4096, batch=5, devices={"data": 4})
    assert five.device.rows == 2


def test_mem_20_bytes_of_all_layers() -> None:
    assert per_token("llama2-7b") == 524_288
    assert BF16.row_bytes(load_geometry("llama2-7b"), 32_768) == 16 * GIB


def test_mem_21_layers_without_a_cache() -> None:
    full = LayerSpec("full", 16, KVSpec(2, 256, 256))
    state = LayerSpec("state", 16, state_bytes=1_000_000)
    dense = ModelGeometry("dense", 100, 64, (full,) * 64, 4096)
    hybrid = dataclasses.replace(dense, layers=((state,) * 3 + (full,)) * 16)
    assert 4 * BF16.token_bytes(hybrid) == BF16.token_bytes(dense)
    fixed = 48 * 1_000_000
    assert BF16.row_bytes(hybrid, 4096) == BF16.row_bytes(dense, 4096) // 4 + fixed
    found = plan(hybrid, batch=3, chip=CHIPS["h100"])
    assert found.nbytes == 3 * (BF16.row_bytes(hybrid, 4096) + INDEX_ROW)
    shared = dataclasses.replace(dense, layers=(full, LayerSpec("shared", 16)))
    assert BF16.row_bytes(shared, 4096) == BF16.row_bytes(dense, 4096) // 64


def real_cache(
    geometry: ModelGeometry, batch: int, capacity: int, dtype: str, lanes: int = 1, tensor: int = 1
) -> ModelCache:
    """Allocates what a model with these layers allocates."""
    specs = [layer.spec for layer in geometry.layers if layer.spec is not None]
    return gather_layers(
        [
            create_layer(
                spec,
                Raw(jnp.dtype(dtype)),
                batch,
                capacity,
                lanes=lanes,
                replicas=max(tensor // spec.kv_heads, 1) if spec.kv_heads > 1 else 1,
            )
            for spec in specs
        ]
    )


def live_bytes(cache: ModelCache) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(cache))


TINY = {
    "mha": LayerSpec("full", 6, KVSpec(6, 20, 20)),
    "gqa": LayerSpec("full", 6, KVSpec(2, 24, 16)),
    "mqa": LayerSpec("window", 6, KVSpec(1, 40, 40), window=5),
    "mla": LayerSpec("full", 6, KVSpec(1, 36, 28, value_offset=0)),
    "tied": LayerSpec("full", 6, KVSpec(2, 16, 16, shared_width=8, value_offset=0)),
}


def tiny(*kinds: str) -> ModelGeometry:
    layers = (*(TINY[kind] for kind in kinds), LayerSpec("shared", 6))
    return ModelGeometry("tiny", 11, 12, layers, 32)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("kinds", [("mha",), ("gqa",) * 3, ("mqa", "mla"), tuple(TINY)])
def test_mem_19_estimate_equals_real_caches(kinds: tuple[str, ...], dtype: str) -> None:
    model = tiny(*kinds)
    cache = real_cache(model, 3, 13, dtype)
    found = plan(model, context=13, batch=3, dtype=dtype, policy="full")
    assert found.nbytes == cache.nbytes == live_bytes(cache)
    assert found.physical_nbytes == live_bytes(cache)
    assert found.bytes_per_token == cache.bytes_per_token
    assert found.nbytes == 3 * (found.sequence_bytes + INDEX_ROW)


def test_mem_19_estimate_equals_a_real_cache_with_an_index_per_layout() -> None:
    kinds = ("gqa", "mqa", "gqa", "mqa")
    specs, codec = [TINY[kind].spec for kind in kinds], Raw(jnp.bfloat16)
    cache = gather_layers(
        [
            create_layer(spec, codec, 3, 13, layout=Contiguous() if spec.kv_heads > 1 else Ring(5))
            for spec in specs
            if spec is not None
        ]
    )
    assert len(cache.indices) == 2
    found = plan(tiny(*kinds), context=13, batch=3)
    assert found.nbytes == cache.nbytes == live_bytes(cache)
    # A ring has a high-water mark, int32, beside what every index holds.
    assert found.nbytes == 3 * (found.sequence_bytes + 2 * INDEX_ROW + 4)


@pytest.mark.parametrize("chip", ["v5e", "tpu7x"])
def test_mem_19_estimate_equals_real_caches_with_lane_padding(chip: str) -> None:
    model = tiny(*TINY)
    cache = real_cache(model, 3, 13, "bfloat16", lanes=CHIPS[chip].lanes)
    found = plan(model, context=13, batch=3, chip=CHIPS[chip], policy="full")
    assert found.nbytes == cache.nbytes == live_bytes(cache)
    assert found.physical_nbytes == cache.physical_nbytes(chip) >= found.nbytes
    assert found.bytes_per_token == cache.bytes_per_token


@pytest.mark.parametrize(("data", "tensor"), [(8, 1), (2, 4), (1, 8), (4, 2)])
def test_mem_19_estimate_equals_a_device_of_a_real_mesh(data: int, tensor: int) -> None:
    layers = (
        LayerSpec("full", 8, KVSpec(4, 24, 16)),
        LayerSpec("full", 8, KVSpec(1, 36, 28, value_offset=0)),
        LayerSpec("full", 8, KVSpec(8, 16, 16, shared_width=8)),
    )
    model = ModelGeometry("tiny", 11, 12, layers, 32)
    mesh = jax.make_mesh((data, tensor), ("data", "tensor"))
    cache = real_cache(model, 8, 13, "float32", tensor=tensor)
    cache = jax.device_put(cache, cache.sharding(mesh))
    found = plan(model, context=13, batch=8, dtype="fp32", devices={"data": data, "tensor": tensor})
    leaves = jax.tree.leaves(cache)
    for device in mesh.devices.flat:
        shards = [s.data for x in leaves for s in x.addressable_shards if s.device == device]
        assert sum(shard.nbytes for shard in shards) == found.device.nbytes
    assert found.nbytes == live_bytes(cache)


@pytest.mark.parametrize("name", preset_names())
def test_mem_19_estimate_equals_the_shapes_of_every_preset(name: str) -> None:
    model = load_geometry(name)
    shapes = jax.eval_shape(lambda: real_cache(model, 2, 1024, "bfloat16"))
    assert shapes.nbytes == plan(model, context=1024, batch=2, policy="full").nbytes


# The table at the end of the design page: bytes of one token in bfloat16, all layers.
DESIGN = {
    "gpt2-xl": (307_200, 2 * 48 * 25 * 64 * 2),
    "gpt3-175b": (4_718_592, 2 * 96 * 96 * 128 * 2),
    "llama2-70b": (327_680, 2 * 80 * 8 * 128 * 2),
    "llama3-8b": (131_072, 2 * 32 * 8 * 128 * 2),
    "deepseek-v3": (70_272, 61 * (512 + 64) * 2),
}


@pytest.mark.parametrize("name", DESIGN)
def test_design_table(name: str) -> None:
    figure, arithmetic = DESIGN[name]
    assert per_token(name) == figure == arithmetic


def test_design_ratios() -> None:
    gpt3 = load_geometry("gpt3-175b")
    assert BF16.token_bytes(gpt3.with_kv_heads(1)) == 49_152 == per_token("gpt3-175b") // 96
    llama = load_geometry("llama2-7b")
    assert 4 * BF16.token_bytes(llama.with_kv_heads(8)) == BF16.token_bytes(llama)
    grouped = load_geometry("llama2-70b")
    assert 8 * BF16.token_bytes(grouped) == BF16.token_bytes(grouped.per_head())
    saved = 1 - per_token("deepseek-v3") / per_token("gpt2-xl")
    assert math.floor(100 * saved) == 77
    gemma = load_geometry("gemma3-27b")
    assert [layer.kind for layer in gemma.layers].count("window") == 52
    full = plan(gemma, context=32_768, policy="full").sequence_bytes
    assert round(BF16.row_bytes(gemma, 32_768) / GIB, 1) == 2.9
    assert full == 15.5 * GIB


# KiB of one token in bfloat16, as published for these models.
KIB = """gpt2-xl 300 llama3-8b 128 llama3-405b 504 qwen3-8b 144 qwen3-4b 144 qwen3-30b-a3b 96
    gemma3-4b 136 gpt-oss-20b 48 deepseek-v2-lite 30.4 deepseek-v2 67.5 mixtral-8x22b 224
    llama2-7b 512 llama3-70b 320 qwen3-0.6b 112 qwen3-1.7b 112 qwen3-32b 256 qwen3-235b-a22b 188
    gemma3-27b 496 gpt-oss-120b 72 deepseek-v3 68.6 kimi-k2 68.6"""


@pytest.mark.parametrize(("name", "figure"), re.findall(r"(\S+) ([\d.]+)", KIB))
def test_published_kib_per_token(name: str, figure: str) -> None:
    assert f"{per_token(name) / 1024:.1f}".removesuffix(".0") == figure
