# SPDX-License-Identifier: Apache-2.0
"""One attention call over 8,192 tokens, and one prefill of a cache, compiled for TPU chips."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxkv.cache.codecs import Raw
from jaxkv.cache.layer_cache import LayerCache, Scoring, create_layer
from jaxkv.cache.spec import KVSpec
from jaxkv.core.visibility import Visibility
from jaxkv.ops.api import attention
from jaxkv.testing.aot import compile_for_tpu, tpu_mesh
from tests.aot.recorded import check_temporary_bytes

LENGTH = 8192
# Query heads, KV heads, width of a key and of a value, and options.
LAYERS: dict[str, tuple[int, int, int, int, dict[str, Any]]] = {
    "mha": (8, 8, 128, 128, {}),
    "gqa": (32, 8, 128, 128, {}),
    "mqa": (8, 1, 128, 128, {}),
    "mla": (16, 16, 192, 128, {}),
    "window": (8, 8, 128, 128, {"window": 1024}),
}
# Those of v5e and v6e take 86 s of a core; the other chips are left to `-m full`.
PROGRAMS = [
    pytest.param(name, chip, marks=() if chip in ("v5e", "v6e") else pytest.mark.full)
    for chip in ("v5e", "v6e", "v5p", "tpu7x")
    for name in LAYERS
]


def shapes(name: str, rows: int = 1) -> list[jax.ShapeDtypeStruct]:
    """Shapes of query, key and value in bfloat16."""
    N, K, H, V, _ = LAYERS[name]
    sizes = ((N, H), (K, H), (K, V))
    return [jax.ShapeDtypeStruct((rows, LENGTH, *size), jnp.bfloat16) for size in sizes]


def forward(name: str) -> Any:
    """Gives a causal call with a layer's options, whose implementation is nobody's choice."""

    def call(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        return attention(query, key, value, causal=True, **LAYERS[name][4])

    return call


def gradient(fn: Any) -> Any:
    """Gives `fn`'s output and its gradient for one by the output."""

    def call(bar: jax.Array, *args: jax.Array) -> Any:
        out, pull = jax.vjp(fn, *args)
        return out, pull(bar)

    return call


def bar(name: str) -> jax.ShapeDtypeStruct:
    N, _, _, V, _ = LAYERS[name]
    return jax.ShapeDtypeStruct((1, LENGTH, N, V), jnp.bfloat16)


def check_linear(compiled: Any, program: str, name: str, chip: str) -> None:
    """Holds a program to what was recorded, and to 1 MiB where VMEM does not count."""
    if chip in ("v5e", "v6e"):
        assert compiled.memory_analysis().temp_size_in_bytes <= 2**20
    check_temporary_bytes(compiled, program, name, chip)


@pytest.mark.parametrize(("name", "chip"), PROGRAMS)
def test_a_long_call_runs_splash_in_linear_memory(name: str, chip: str) -> None:
    compiled = compile_for_tpu(forward(name), shapes(name), tpu_mesh(chip), free_layouts=True)
    assert "splash_m" in compiled.as_text()
    check_linear(compiled, "attention", name, chip)


@pytest.mark.parametrize(("name", "chip"), PROGRAMS)
def test_its_gradient_is_splash_s_in_linear_memory(name: str, chip: str) -> None:
    args = [bar(name), *shapes(name)]
    compiled = compile_for_tpu(gradient(forward(name)), args, tpu_mesh(chip), free_layouts=True)
    text = compiled.as_text()
    assert all(f"_{part}_no_residuals" in text for part in ("dq", "dkv"))
    check_linear(compiled, "attention gradient", name, chip)


@pytest.mark.parametrize(
    ("chip", "program"),
    [
        ("v5e", "blockwise"),
        *(
            pytest.param(chip, program, marks=pytest.mark.full)
            for chip, program in (
                ("v5e", "blockwise gradient"),
                ("v6e", "blockwise"),
                ("v6e", "blockwise gradient"),
            )
        ),
    ],
)
def test_tiles_of_plain_operations_take_little(chip: str, program: str) -> None:
    # What serves where splash cannot; 8 heads of 64 in float32.
    x = jax.ShapeDtypeStruct((1, LENGTH, 8, 64), jnp.float32)

    def call(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        return attention(query, key, value, causal=True, implementation="blockwise")

    fn, args = (gradient(call), [x] * 4) if "gradient" in program else (call, [x] * 3)
    compiled = compile_for_tpu(fn, args, tpu_mesh(chip))
    assert compiled.memory_analysis().temp_size_in_bytes <= 2**20
    check_temporary_bytes(compiled, program, chip)


def test_devices_of_a_mesh_attend_to_their_own_rows_and_heads() -> None:
    mesh: Mesh = tpu_mesh("v5e", {"data": 2, "tensor": 2})
    place = NamedSharding(mesh, PartitionSpec("data", None, "tensor"))
    args = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place) for x in shapes("mha", rows=2)]
    text = compile_for_tpu(forward("mha"), args, mesh).as_text()
    assert "splash_mha_fwd" in text
    assert not any(
        word in text for word in ("all-gather", "all-reduce", "collective", "all-to-all")
    )


@pytest.mark.parametrize("rule", [Visibility(), Visibility(window=512, pinned=4)], ids=repr)
def test_prefill_of_a_cache_runs_splash_where_orders_are_relative(rule: Visibility) -> None:
    spec, length = KVSpec(2, 128, 128), 1024
    empty = jax.eval_shape(lambda: create_layer(spec, Raw(jnp.bfloat16), 1, 2048, lanes=128))
    new = jax.ShapeDtypeStruct((1, length, 2, 128), jnp.bfloat16)

    def prefill(cache: LayerCache, counts: jax.Array, *new: jax.Array) -> Any:
        return cache.open(length, counts).extend(*new, Scoring(rule, 0.1))

    args = (empty, jax.ShapeDtypeStruct((1,), jnp.int32), new, new, new)
    text = compile_for_tpu(prefill, args, tpu_mesh("v5e"), donate=0).as_text()
    assert ("splash_mha_fwd" in text) == (rule.pinned == 0)
