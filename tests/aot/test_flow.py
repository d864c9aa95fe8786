# SPDX-License-Identifier: Apache-2.0
"""What `whole_moves` finds in programs whose faults are known, and what it lets pass."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jaxkv.testing.aot import compile_for_tpu, tpu_mesh
from jaxkv.testing.flow import whole_moves

# Larger than the chip's VMEM, which XLA would otherwise fetch the whole array into to read it.
B, K, S = 8, 8, 16_384
STEPS = jax.ShapeDtypeStruct((B,), jnp.int32)


def moves(fn: Callable[..., Any], width: int = 128, **options: Any) -> list[str]:
    """Compiles `fn(planes, steps)` and names the kinds of the operations that are found."""
    plane = jax.ShapeDtypeStruct((B, K, S, width), jnp.bfloat16)
    compiled = compile_for_tpu(fn, ({"key": plane}, STEPS), tpu_mesh("v5e"), **options)
    found = whole_moves(compiled.as_text(), "planes[", B * K * S * width // 2)
    return [line.split()[0] for line in found]


def put(planes: Any, steps: Any) -> Any:
    rows = jnp.arange(B)
    new = jnp.ones((B, K, planes["key"].shape[-1]), jnp.bfloat16)
    return {"key": planes["key"].at[rows, :, steps].set(new, mode="promise_in_bounds")}


def cast(planes: Any, steps: Any) -> Any:
    return lax.optimization_barrier(planes["key"].astype(jnp.float32)).sum()


def masked(planes: Any, steps: Any) -> Any:
    kept = jnp.arange(S)[:, None] < steps[0]
    return lax.optimization_barrier(jnp.where(kept, planes["key"], 0)).sum()


def transposed(planes: Any, steps: Any) -> Any:
    return planes["key"].swapaxes(2, 3) + jnp.bfloat16(0)


def scores(planes: Any, steps: Any) -> Any:
    query = jnp.ones((B, K, 16, planes["key"].shape[-1]), jnp.bfloat16)
    return jnp.einsum("bkmh,bksh->bkms", query, planes["key"])


def in_a_loop(fn: Callable[..., Any]) -> Callable[..., Any]:
    def looped(planes: Any, steps: Any) -> Any:
        def body(i: Any, carry: Any) -> Any:
            kept, total = carry
            return kept, total + fn(kept, steps + i).astype(jnp.float32).sum()

        return lax.fori_loop(0, steps[0], body, (planes, jnp.zeros(())))[1]

    return looped


def in_a_branch(fn: Callable[..., Any]) -> Callable[..., Any]:
    def branched(planes: Any, steps: Any) -> Any:
        def taken(planes: Any, steps: Any) -> Any:
            return fn(planes, steps).astype(jnp.float32)

        return lax.cond(steps[0] > 0, taken, lambda *_: jnp.zeros(()), planes, steps)

    return branched


@pytest.mark.parametrize("fn", [cast, masked, transposed])
def test_a_new_version_of_the_array_is_found(fn: Callable[..., Any]) -> None:
    assert moves(fn)


@pytest.mark.parametrize("inside", [in_a_loop, in_a_branch])
@pytest.mark.parametrize("fn", [cast, masked])
def test_it_is_found_inside(fn: Callable[..., Any], inside: Callable[..., Any]) -> None:
    assert moves(inside(fn))


def test_a_relayout_is_found() -> None:
    # XLA keeps an array 64 wide with slots as lanes, and copies it to another layout to scatter.
    assert moves(put, width=64, donate=0) == ["copy", "copy"]


def test_a_write_to_an_array_that_is_not_donated_is_found() -> None:
    assert "copy" in moves(put)


@pytest.mark.parametrize("fn", [scores, in_a_loop(scores)])
def test_reading_passes(fn: Callable[..., Any]) -> None:
    assert moves(fn) == []


def test_writing_in_place_passes() -> None:
    assert moves(put, donate=0) == []


def test_an_unknown_argument_is_refused() -> None:
    planes = {"key": jax.ShapeDtypeStruct((B, 128), jnp.bfloat16)}
    compiled = compile_for_tpu(lambda planes: planes["key"] * 2, (planes,), tpu_mesh("v5e"))
    with pytest.raises(ValueError, match="no argument is named 'nothing'"):
        whole_moves(compiled.as_text(), "nothing", 1)
