# SPDX-License-Identifier: Apache-2.0
"""Training and prefill of causal attention (goals 6, 7 and 8), forward and with its gradient."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from families.measuring import Case, Counted, Sizes, Step, Timed, random
from flax import nnx

from jaxkv.ops import attention

# Ours / jax.nn, forward and with gradients, at 2,048 and 4,096 tokens; at fewer it may not be 1.
BOUNDS = {"forward": 0.35, "gradient": 0.45}
LONG = 2048
# Temporary bytes: ours at twice the length / ours, and ours / jax.nn with gradients.
GROWTH, SHARE = 2.1, 1 / 32
# A window of 512 tokens at 4,096 / the whole causal triangle.
WINDOW, WINDOWED = 512, 0.4

Fn = Callable[..., jax.Array]


def ours(**options: Any) -> Fn:
    """Attends in tiles."""
    return functools.partial(attention, implementation="blockwise", **options)


def of_jax(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """Attends by `jax.nn`."""
    return jax.nn.dot_product_attention(query, key, value, is_causal=True)


def of_flax(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """Attends by Flax, whose causal rule is a mask."""
    mask = nnx.make_causal_mask(jnp.ones(query.shape[:2]))
    return nnx.dot_product_attention(query, key, value, mask=mask)


def of_tokamax(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """Attends by Tokamax's chunked form."""
    import tokamax

    return tokamax.dot_product_attention(
        query, key, value, is_causal=True, implementation="xla_chunked"
    )


def rivals() -> dict[str, Fn]:
    """Lists the rivals beside `jax.nn` that are there."""
    found: dict[str, Fn] = {"flax.nnx": of_flax}
    if importlib.util.find_spec("tokamax") is not None:
        found["tokamax chunked"] = of_tokamax
    return found


def attention_cases(sizes: Sizes) -> Iterator[Case]:
    """Lists the family: B = 1, 8 heads of 64."""
    causal, lengths = ours(causal=True), sizes.lengths
    for dtype in ("float32", "bfloat16"):
        for kind, bound in BOUNDS.items():
            for T in lengths:
                make = functools.partial(step, sizes, T, dtype, kind)
                goal = sizes.goal(bound if T >= LONG else 1.0)
                series = (f"{dtype}, {kind}", T)
                name = f"{T} tokens, {dtype}, {kind}"
                pair = (functools.partial(make, causal), functools.partial(make, of_jax))
                yield Timed(name, "jax.nn", *pair, goal, series=series)
                size = functools.partial(temporaries, sizes, T, dtype, kind)
                share = kind == "gradient" and dtype == "float32" and lengths[-1] == T
                pair = (functools.partial(size, causal), functools.partial(size, of_jax))
                goal = sizes.goal(SHARE) if share else None
                yield Counted(f"{name}, temporaries", "jax.nn", *pair, "KiB", goal, series)
    yield from others(sizes, causal)


def others(sizes: Sizes, causal: Fn) -> Iterator[Case]:
    """Lists other rivals, windows, masks, growth and errors."""
    T, last = sizes.lengths[-2:]
    for rival, fn in rivals().items():
        for dtype in ("float32", "bfloat16"):
            for kind in BOUNDS:
                make = functools.partial(step, sizes, T, dtype, kind)
                pair = (functools.partial(make, causal), functools.partial(make, fn))
                yield Timed(f"{T} tokens, {dtype}, {kind}", rival, *pair)
    window = WINDOW * last // 4096
    blocks = jnp.asarray(np.kron(np.eye(8, dtype=bool), np.ones((last // 8, last // 8), bool)))
    narrow = {"window": ours(causal=True, window=window), "mask": ours(causal=True, mask=blocks)}
    names = {"window": f"a window of {window}", "mask": "a mask of 8 blocks"}
    for what, fn in narrow.items():
        for kind in BOUNDS:
            make = functools.partial(step, sizes, last, "float32", kind)
            pair = (functools.partial(make, fn), functools.partial(make, causal))
            name = f"{last} tokens, float32, {kind}, {names[what]}"
            yield Timed(name, "ours, full causal", *pair, sizes.goal(WINDOWED))
    for kind in BOUNDS:
        pair = (
            functools.partial(temporaries, sizes, 2 * last, "float32", kind, causal),
            functools.partial(temporaries, sizes, last, "float32", kind, causal),
        )
        name = f"{2 * last} tokens, float32, {kind}, temporaries"
        yield Counted(name, f"ours at {last}", *pair, "KiB", sizes.goal(GROWTH))
    T = sizes.lengths[min(1, len(sizes.lengths) - 1)]
    for dtype in ("float32", "bfloat16"):
        pair = (
            functools.partial(error, sizes, T, dtype, causal),
            functools.partial(error, sizes, T, dtype, of_jax),
        )
        yield Counted(f"{T} tokens, {dtype}, rms error", "jax.nn", *pair, "e-9", sizes.goal(1.0))


def inputs(sizes: Sizes, T: int, dtype: str) -> list[jax.Array]:
    """Draws queries, keys and values `[1, T, N, H]`."""
    shape = (1, T, sizes.flash_heads, sizes.flash_width)
    return [random(shape, jnp.dtype(dtype), seed) for seed in range(3)]


def program(kind: str, fn: Fn) -> Any:
    """Makes the program of a forward pass, or of a loss's gradients."""
    if kind == "forward":
        return jax.jit(fn)

    def loss(*arrays: jax.Array) -> jax.Array:
        return jnp.sum(jnp.square(fn(*arrays).astype(jnp.float32)))

    return jax.jit(jax.grad(loss, (0, 1, 2)))


def step(sizes: Sizes, T: int, dtype: str, kind: str, fn: Fn) -> Step:
    """Compiles a step."""
    return functools.partial(program(kind, fn), *inputs(sizes, T, dtype))


def temporaries(sizes: Sizes, T: int, dtype: str, kind: str, fn: Fn) -> float:
    """Counts what a step needs besides its arguments and results, in KiB."""
    compiled = program(kind, fn).lower(*inputs(sizes, T, dtype)).compile()
    return compiled.memory_analysis().temp_size_in_bytes / 1024


def error(sizes: Sizes, T: int, dtype: str, fn: Fn) -> float:
    """Measures the root mean square of the forward error against float64, in 1e-9."""
    arrays = inputs(sizes, T, dtype)
    query, key, value = (np.asarray(x[0], np.float64).swapaxes(0, 1) for x in arrays)
    scores = query @ key.swapaxes(1, 2) / np.sqrt(query.shape[-1])
    scores = np.where(np.tril(np.ones((T, T), bool)), scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    truth = (weights / weights.sum(axis=-1, keepdims=True)) @ value
    got = np.asarray(program("forward", fn)(*arrays)[0], np.float64).swapaxes(0, 1)
    return float(np.sqrt(np.mean(np.square(got - truth)))) * 1e9
