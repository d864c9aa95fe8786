# SPDX-License-Identifier: Apache-2.0
"""Runs one attention call through an implementation and through float64, and compares all of it."""

from __future__ import annotations

import dataclasses
import functools
import zlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.ops.api import attention
from jaxkv.ops.blockwise import Blockwise
from jaxkv.ops.einsum import Einsum
from jaxkv.ops.operands import Operands
from jaxkv.ops.reference import Reference
from jaxkv.ops.splash import Splash
from jaxkv.ops.triton import Triton
from tests.support import dense
from tests.support.tolerances import assert_close


@dataclasses.dataclass(frozen=True)
class Interpreted:
    """A kernel of some device, as plain operations: a test whose call it refuses is skipped.

    It is asked about each call as `attention` prepared it, so a call that is wrong still raises.
    """

    kernel: Any

    @property
    def name(self) -> str:
        """The kernel's."""
        return self.kernel.name

    def refuses(self, operands: Operands) -> None:
        """Skips the test where the kernel refuses, and says why."""
        if reason := self.kernel.refuses(operands):
            pytest.skip(f"{self.name} {reason}")

    def yields(self, operands: Operands) -> str | None:
        """Yields where the kernel does."""
        return self.kernel.yields(operands)

    def run(self, operands: Operands) -> tuple[jax.Array, jax.Array]:
        """Computes `(out, lse)` by the kernel."""
        return self.kernel.run(operands)


# Every test of this folder runs with each. A new implementation joins by its line here.
IMPLEMENTATIONS: dict[str, Any] = {
    "einsum": Einsum(),
    "blockwise": Blockwise(rows=4, slots=2),
    "reference": Reference(),
}

# With these too, but they take minutes: with `-m full` only.
KERNELS: dict[str, Any] = {
    "splash": Interpreted(Splash(128, 128, interpret=True)),
    "triton": Interpreted(Triton(16, 16, interpret=True)),
}

# A library for GPUs, which nothing runs on a CPU: see test_gpu.py.
ELSEWHERE = ("cudnn",)

# Values that a program is specialised to; everything else is traced.
STATIC = ("causal", "window", "pinned", "scale", "soft_cap", "dropout_rate", "precision")
# Time here is the compiler's. Operation by operation, calls of one shape share what is compiled
# whatever their options, so tests keep to the shapes of `operands()` where they can; a shape of
# its own is quicker as one program, which need not be optimised.
QUICK = {"xla_backend_optimization_level": 0}


def normal(name: str, *shape: int, dtype: Any = np.float32, times: float = 1.0) -> np.ndarray:
    """Draws a fixed array, another one for each name."""
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    return (times * rng.normal(size=shape)).astype(np.float32).astype(dtype)


def operands(
    B: int = 2,
    T: int = 3,
    S: int = 5,
    N: int = 4,
    K: int = 2,
    H: int = 8,
    V: int = 3,
    *,
    dtype: Any = np.float32,
    times: float = 1.0,
) -> dict[str, np.ndarray]:
    """Draws query, key and value."""
    return {
        "query": normal("query", B, T, N, H, dtype=dtype, times=times),
        "key": normal("key", B, S, K, H, dtype=dtype, times=times),
        "value": normal("value", B, S, K, V, dtype=dtype, times=times),
    }


def call(arrays: dict, options: dict, implementation: Any) -> Any:
    """Computes `(out, lse)`."""
    return attention(**arrays, **options, implementation=implementation, return_lse=True)


def call_and_pull(arrays: dict, options: dict, implementation: Any, bars: Any) -> Any:
    """Computes `(out, lse)` and the gradient by every array."""
    outs, pull = jax.vjp(lambda arrays: call(arrays, options, implementation), arrays)
    return outs, pull(bars)[0]


@functools.cache
def compiled(fn: Any, implementation: Any, static: tuple[tuple[str, Any], ...]) -> Any:
    """Compiles `fn(arrays, traced options, ...)` for fixed static options."""

    def program(arrays: dict, traced: dict, *rest: Any) -> Any:
        return fn(arrays, dict(static) | traced, implementation, *rest)

    return jax.jit(program, compiler_options=QUICK)


def run(fn: Any, implementation: Any, jit: bool, arrays: Any, options: Any, *rest: Any) -> Any:
    """Calls `fn` as one program or operation by operation, and fetches what it gives."""
    arrays = {name: jnp.asarray(x) for name, x in arrays.items()}
    kernel = isinstance(implementation, Interpreted)
    # Some kernels must know an offset that the caller knows.
    static = {k: v for k, v in options.items() if k in STATIC or (kernel and isinstance(v, int))}
    traced = {k: jnp.asarray(v) for k, v in options.items() if k not in static}
    if jit or kernel:  # operation by operation, each step of a kernel would be compiled
        program = compiled(fn, implementation, tuple(sorted(static.items())))
        return jax.device_get(program(arrays, traced, *rest))
    return jax.device_get(fn(arrays, static | traced, implementation, *rest))


def outputs(
    implementation: Any, arrays: Mapping[str, Any], *, jit: bool = False, **options: Any
) -> tuple[np.ndarray, np.ndarray]:
    """Computes `(out, lse)` as NumPy arrays."""
    return run(call, implementation, jit, arrays, options)


def outputs_and_gradients(
    implementation: Any, arrays: Mapping[str, Any], bars: Any, *, jit: bool = False, **options: Any
) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
    """Computes out, lse and the gradient by every array, for the results' gradients `bars`."""
    (out, lse), grads = run(call_and_pull, implementation, jit, arrays, options, bars)
    return out, lse, grads


def bars_for(arrays: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Draws what a loss's gradient by out and lse could be."""
    B, T, N, _ = arrays["query"].shape
    value = arrays["value"]
    return normal("out bar", B, T, N, value.shape[3], dtype=value.dtype), normal("lse", B, T, N)


def check(
    implementation: Any,
    arrays: Mapping[str, Any],
    *,
    gradients: bool = True,
    jit: bool = False,
    keep: np.ndarray | None = None,
    **options: Any,
) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
    """Holds outputs, log-sum-exps and all gradients against float64.

    Args:
      implementation: The one under test.
      arrays: Differentiable operands by name.
      gradients: Also compare gradients.
      jit: As one compiled program, with every array option traced.
      keep: What dropout multiplies the weights by.
      **options: As in `ops.attention`.

    Returns:
      `(out, lse, gradients by name)` of the implementation.
    """
    bars = bars_for(arrays)
    if gradients:
        got = outputs_and_gradients(implementation, arrays, bars, jit=jit, **options)
    else:
        got = (*outputs(implementation, arrays, jit=jit, **options), {})
    truth = {k: v for k, v in options.items() if not k.startswith("dropout")}
    compare(arrays, got, dense.attention(arrays, truth, bars if gradients else None, keep))
    return got


def compare(arrays: Mapping[str, Any], got: Any, want: dense.Result) -> None:
    """Compares `(out, lse, gradients)` with the truth, in the tolerances of the value's dtype."""
    out, lse, grads = got
    B, T, N, H = arrays["query"].shape
    S = arrays["key"].shape[1]
    dtype = arrays["value"].dtype
    assert out.dtype == dtype and lse.dtype == jnp.float32
    assert_close(out, want.out, dtype=dtype, terms=max(H, S), what="out")
    # Scores are float32 sums of exact products, so 16-bit inputs cost the lse nothing.
    assert_close(lse, want.lse, dtype=jnp.float32, terms=max(H, S), what="lse")
    blind = np.isneginf(want.lse)
    assert not out[blind].any(), "a query that sees nothing must give exactly 0"
    for name, grad in grads.items():
        assert grad.dtype == arrays[name].dtype, name
        terms = max(H, S, B * T * N)
        assert_close(grad, want.grads[name], dtype=dtype, terms=terms, what=f"d {name}")
    if grads:
        assert not grads["query"][blind].any(), "a query that sees nothing has gradient 0"


def kept(
    implementation: Any, key: jax.Array, rate: float, arrays: Any = None, **options: Any
) -> np.ndarray:
    """Finds what dropout multiplies each weight by, `[B, N, T, S]`: unit vectors as values."""
    arrays = arrays or operands()
    B, S, K, _ = arrays["value"].shape
    unit = np.broadcast_to(np.eye(S, dtype=np.float32)[:, None], (B, S, K, S))
    arrays = arrays | {"value": unit}
    dropped, _ = outputs(implementation, arrays, dropout_rate=rate, dropout_key=key, **options)
    weights = dense.attention(arrays, options).out
    ratio = np.where(weights == 0, 0, dropped / np.where(weights == 0, 1, weights))
    return ratio.transpose(0, 2, 1, 3)


def seen_keys(implementation: Any, T: int, S: int, B: int = 1, **options: Any) -> list:
    """Finds which keys each query of each row mixes: sets, as `[B][T]`.

    All scores are equal and the values are unit vectors, so the output is the weights.
    """
    arrays = {
        "query": np.zeros((B, T, 1, 1), np.float32),
        "key": np.zeros((B, S, 1, 1), np.float32),
        "value": np.broadcast_to(np.eye(S, dtype=np.float32)[None, :, None], (B, S, 1, S)),
    }
    out, _ = outputs(implementation, arrays, jit=True, **options)
    return [[set(np.flatnonzero(out[b, t, 0]).tolist()) for t in range(T)] for b in range(B)]
