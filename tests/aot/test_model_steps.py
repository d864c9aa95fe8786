# SPDX-License-Identifier: Apache-2.0
"""Decode and prefill of whole models, compiled for TPU chips."""

import functools
from typing import Any

import jax.numpy as jnp
import pytest
from flax import nnx

from jaxkv.core.numerics import Numerics
from jaxkv.models.decoder import Decoder
from jaxkv.models.sharing import Reads
from jaxkv.testing.aot import compile_for_tpu, tpu_mesh
from jaxkv.testing.flow import whole_moves
from tests.aot.programs import (
    ROWS,
    VARIANTS,
    decoder,
    device_bytes,
    empty_cache,
    smallest_plane,
    tokens,
)
from tests.aot.recorded import check_temporary_bytes

# One variant on one chip runs by default; a compilation takes 5 to 30 seconds of a core.
DEFAULT = (("mla", "v5e"),)
STEPS = [
    pytest.param(v, c, marks=() if (v, c) in DEFAULT else pytest.mark.full)
    for v in VARIANTS
    for c in ("v5e", "v6e")
]


def compile_step(model: str | Decoder, chip: str, length: int) -> tuple[Any, Any]:
    """Compiles one step of `length` tokens a row with a donated cache."""
    if isinstance(model, str):
        model = decoder(model, param_dtype=jnp.bfloat16)
    graphdef, state = nnx.split(model)
    cache = empty_cache(model)

    def step(state: Any, given: Any, cache: Any) -> Any:
        return nnx.merge(graphdef, state)(given, cache=cache)

    args = (state, tokens(ROWS, length), cache)
    return compile_for_tpu(step, args, tpu_mesh(chip), donate=2), cache


def check_in_place(compiled: Any, cache: Any) -> None:
    """Holds the donated cache to be the returned one, and never made anew on the way."""
    assert compiled.memory_analysis().alias_size_in_bytes >= device_bytes(cache)
    assert whole_moves(compiled.as_text(), "planes[", smallest_plane(cache) // 2) == []


@pytest.mark.parametrize(("variant", "chip"), STEPS)
def test_decode_step_is_in_place(variant: str, chip: str) -> None:
    compiled, cache = compile_step(variant, chip, 1)
    check_in_place(compiled, cache)
    check_temporary_bytes(compiled, "decode", variant, chip)


def test_what_later_layers_read_is_written_in_place() -> None:
    numerics = Numerics(dtype=jnp.bfloat16, param_dtype=jnp.bfloat16)
    layers = [functools.partial(VARIANTS["gqa"][1], numerics=numerics), Reads(0), Reads(0)]
    model = nnx.eval_shape(
        lambda: Decoder(1024, 512, 3, layers, numerics=numerics, rngs=nnx.Rngs(0))
    )
    compiled, cache = compile_step(model, "v5e", 1)
    assert len(cache.layers) == 1
    check_in_place(compiled, cache)


@pytest.mark.full
@pytest.mark.parametrize("chip", ["v5e", "v6e"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_prefill_is_in_place(variant: str, chip: str) -> None:
    compiled, cache = compile_step(variant, chip, 512)
    check_in_place(compiled, cache)
    check_temporary_bytes(compiled, "prefill", variant, chip)
