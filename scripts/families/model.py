# SPDX-License-Identifier: Apache-2.0
"""A whole model's decode steps, against reading its weights and a plain loop (goals 11, 12)."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from families.measuring import Case, Sizes, Step, Timed
from flax import nnx

import jaxkv

# Tokens that are decoded in one timed run.
TOKENS = 8
HEADS, KV_HEADS, THETA = 9, 3, 10_000.0


def model_cases(sizes: Sizes) -> Iterator[Case]:
    """Lists the family: greedy decoding of one row, whose cache is nearly full."""
    count = f"{TOKENS} tokens of {sizes.layers} layers, {sizes.model} wide"
    names = ("float32", "bfloat16")
    for name, goal in zip(names, (2.3, 2.5), strict=True):
        yield Timed(
            f"{count}, B=1 {name}",
            f"weights read {TOKENS} times",
            lambda n=name: our_loop(sizes, n),
            lambda n=name: read_weights(sizes, n),
            sizes.goal(goal),
        )
    yield Timed(
        f"{count}, B=1 bfloat16",
        "ours, float32",
        lambda: our_loop(sizes, "bfloat16"),
        lambda: our_loop(sizes, "float32"),
        sizes.goal(1.0),
    )
    for name, goal in zip(names, (None, 0.2), strict=True):
        yield Timed(
            f"{count}, B=1 {name}",
            "plain Python loop",
            lambda n=name: our_loop(sizes, n),
            lambda n=name: plain_loop(sizes, n),
            None if goal is None else sizes.goal(goal),
        )


@functools.cache
def make_model(sizes: Sizes, name: str) -> jaxkv.Decoder:
    """Builds the model that all contenders take their weights from."""
    numerics = jaxkv.Numerics(dtype=jnp.dtype(name), param_dtype=jnp.dtype(name))
    attention = functools.partial(
        jaxkv.GroupedQueryAttention,
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        rotary=jaxkv.Rotary(THETA),
        numerics=numerics,
    )
    return jaxkv.Decoder(
        sizes.vocab,
        sizes.model,
        sizes.layers,
        attention,
        mlp_features=sizes.mlp,
        numerics=numerics,
        rngs=nnx.Rngs(0),
    )


@functools.cache
def prefilled(sizes: Sizes, name: str) -> tuple[jaxkv.ModelCache, jax.Array]:
    """Stores a prompt that leaves room for `TOKENS`: the cache, and the token that comes next."""
    model, room = make_model(sizes, name), sizes.model_slots - TOKENS
    prompt = jax.random.randint(jax.random.key(5), (1, room), 0, sizes.vocab)
    fill = jax.jit(lambda model, prompt, cache: model(prompt, cache=cache), donate_argnums=2)
    logits, cache = fill(model, prompt, model.init_cache(1, sizes.model_slots))
    return cache, jnp.argmax(logits[:, -1], axis=-1)


def our_loop(sizes: Sizes, name: str) -> Step:
    """Decodes on the device, in one program, and takes the tokens back."""
    graph, state = nnx.split(make_model(sizes, name))
    cache, first = prefilled(sizes, name)
    held = [jax.tree.map(jnp.copy, cache)]

    def loop(state: Any, cache: jaxkv.ModelCache, token: jax.Array) -> Any:
        model = nnx.merge(graph, state)

        def step(carry: Any, _: None) -> Any:
            cache, token = carry
            logits, cache = model(token[:, None], cache=cache)
            token = jnp.argmax(logits[:, 0], axis=-1).astype(token.dtype)
            return (cache, token), token

        (cache, _), tokens = jax.lax.scan(step, (cache, token), None, TOKENS)
        return tokens[:, 0], cache.rollback(TOKENS)

    compiled = jax.jit(loop, donate_argnums=1)

    def run() -> jax.Array:
        tokens, held[0] = compiled(state, held[0], first)
        return tokens

    return run


def read_weights(sizes: Sizes, name: str) -> Step:
    """Reads the bytes of all weights with numpy, once for each token: the floor."""
    leaves = jax.tree.leaves(nnx.state(make_model(sizes, name)))
    codes = np.int32 if name == "float32" else np.int16
    arrays = [np.asarray(leaf).reshape(-1).view(codes) for leaf in leaves]

    def run() -> None:
        for _ in range(TOKENS):
            for array in arrays:
                array.max()

    return run


def plain_loop(sizes: Sizes, name: str) -> Step:
    """The same model written without the library: one jitted step, called from Python."""
    weights = plain_weights(make_model(sizes, name))
    cache, first = prefilled(sizes, name)
    held = [[tuple(r.planes[n].swapaxes(1, 2) for n in ("key", "value")) for r in cache.layers]]
    step, start = jax.jit(plain_step, donate_argnums=1), sizes.model_slots - TOKENS

    def run() -> jax.Array:
        token, made = first, []
        for position in range(start, start + TOKENS):
            token, held[0] = step(weights, held[0], token, jnp.int32(position))
            made.append(token)
        return jnp.concatenate(made)

    return run


def plain_weights(model: jaxkv.Decoder) -> dict[str, Any]:
    """Takes the arrays out of a model."""
    layers = []
    for block in model.blocks:
        attention, mlp = block.attention, block.mlp
        parts = {n: getattr(attention, n) for n in ("query", "key", "value", "out")}
        parts |= {n: getattr(mlp, n) for n in ("gate", "up", "down")}
        layer = {n: part.kernel[...] for n, part in parts.items()}
        norms = {"before": block.attention_norm, "between": block.mlp_norm}
        layers.append(layer | {n: norm.scale[...] for n, norm in norms.items()})
    return {
        "embedding": model.embedding[...],
        "layers": layers,
        "after": model.norm.scale[...],
    }


def plain_step(
    weights: dict[str, Any], cache: list[Any], token: jax.Array, position: jax.Array
) -> tuple[jax.Array, list[Any]]:
    """One greedy step as it is usually written: `[B, S, K, H]` caches, einsums and `jax.nn`."""
    x, kept = weights["embedding"][token][:, None], []
    for layer, (keys, values) in zip(weights["layers"], cache, strict=True):
        h = plain_norm(x, layer["before"])
        query, key, value = (
            jnp.einsum("btd,dnh->btnh", h, layer[n]) for n in ("query", "key", "value")
        )
        query, key = (plain_rotation(y, position) for y in (query, key))
        keys = jax.lax.dynamic_update_slice(keys, key, (0, position, 0, 0))
        values = jax.lax.dynamic_update_slice(values, value, (0, position, 0, 0))
        length = jnp.broadcast_to(position + 1, token.shape)
        out = jax.nn.dot_product_attention(query, keys, values, key_value_seq_lengths=length)
        x = x + jnp.einsum("btnh,nhd->btd", out, layer["out"])
        h = plain_norm(x, layer["between"])
        inner = jax.nn.silu(h @ layer["gate"]) * (h @ layer["up"])
        x = x + inner @ layer["down"]
        kept.append((keys, values))
    logits = plain_norm(x, weights["after"])[:, 0] @ weights["embedding"].T
    return jnp.argmax(logits, axis=-1).astype(token.dtype), kept


def plain_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Divides by the root mean square, in float32."""
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + 1e-6)
    return (wide * scale.astype(jnp.float32)).astype(x.dtype)


def plain_rotation(x: jax.Array, position: jax.Array) -> jax.Array:
    """Rotates `[B, 1, N, H]` by halves (arXiv:2104.09864)."""
    half = x.shape[-1] // 2
    angle = position.astype(jnp.float32) * THETA ** (-jnp.arange(half, dtype=jnp.float32) / half)
    low, high = x[..., :half].astype(jnp.float32), x[..., half:].astype(jnp.float32)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    turned = jnp.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)
    return turned.astype(x.dtype)
