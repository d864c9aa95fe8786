# SPDX-License-Identifier: Apache-2.0
"""A module and its cache go through JAX's transformations, and decoding stays in place."""

from __future__ import annotations

import warnings
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxkv.testing.suite import Suite, call, feed, quick_jit
from jaxkv.testing.tolerances import assert_close, assert_trees_close, assert_trees_equal


class Transforms(Suite):
    """jit with donation, scan, while_loop, vmap, and layers stacked in one scan."""

    def test_decode_steps_share_a_trace_and_the_buffers_of_the_cache(self, attn: Any) -> None:
        chex.clear_trace_counter()

        @chex.assert_max_traces(n=1)
        def step(attn: Any, x: Any, cache: Any) -> Any:
            return attn(x, cache=cache)

        x, cache = self.tokens(), self.ready(attn)
        want, _ = feed(attn, x, cache, [1] * 8)
        run, places = quick_jit(step, donate_argnums=2), buffers(cache)
        assert len(set(places)) == len(places), "two arrays of a cache share a buffer"
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # "some donated buffers were not usable"
            for t in range(8):
                y, cache = run(attn, x[:, t : t + 1], cache)
                assert_close(y, want[:, t : t + 1])
                assert buffers(cache) == places, f"step {t} moved the cache"
        memory = run.lower(attn, x[:, :1], cache).compile().memory_analysis()
        assert memory is not None and memory.alias_size_in_bytes == cache.nbytes

    def test_a_scan_over_steps_equals_steps(self, attn: Any) -> None:
        @quick_jit
        def run(attn: Any, x: Any, cache: Any) -> Any:
            def step(cache: Any, x: Any) -> Any:
                y, cache = attn(x, cache=cache)
                return cache, y

            return lax.scan(step, cache, x)

        x = self.tokens()
        want, after = feed(attn, x, self.ready(attn), [1] * 8)
        cache, ys = run(attn, by_step(x), self.ready(attn))
        assert_close(np.asarray(ys)[:, :, 0].swapaxes(0, 1), want)
        assert_trees_close(cache, after)

    def test_vmap_over_a_batch_of_caches(self, attn: Any) -> None:
        x, parts = self.tokens(rows=4, length=5), []
        for b in (0, 2):
            _, cache = call(attn, x[b : b + 2], self.ready(attn))
            parts.append(call(attn, x[b : b + 2, :1], cache))

        @quick_jit
        def run(attn: Any, x: Any, caches: Any) -> Any:
            return jax.vmap(lambda x, cache: attn(x, cache=cache))(x, caches)

        caches = stacked([call(attn, x[b : b + 2], self.ready(attn))[1] for b in (0, 2)])
        y, after = run(attn, x[:, :1].reshape(2, 2, 1, -1), caches)
        assert_close(y, np.stack([y for y, _ in parts]))
        assert_trees_close(after, stacked([cache for _, cache in parts]))

    def test_jax_11_layers_in_one_scan_carry_their_caches(self) -> None:
        layers, x, steps = self._layers(3), self.tokens(length=4), 4
        caches = [self.ready(self.rotated()) for _ in range(3)]
        scanned = stacked(caches)
        one = quick_jit(through_layers)
        for t in range(steps):
            y, scanned = one(layers, x[:, t : t + 1], scanned)
            want = x[:, t : t + 1]
            for i in range(3):
                layer = jax.tree.map(lambda a, i=i: np.asarray(a)[i], layers)
                out, caches[i] = call(layer, want, caches[i])
                want = want + out
            assert_close(y, want, what=f"step {t}")
        assert_trees_close(scanned, stacked(caches))

    def test_jax_09_a_while_loop_over_scanned_and_checkpointed_layers(self) -> None:
        @quick_jit
        def run(layers: Any, x: Any, caches: Any) -> Any:
            def body(carry: Any) -> Any:
                step, x, caches = carry
                return step + 1, *through_layers(layers, x, caches, wrap=jax.checkpoint)

            return lax.while_loop(lambda c: c[0] < 4, body, (jnp.int32(0), x, caches))[1:]

        layers, x = self._layers(3), self.tokens(length=1)
        caches = stacked([self.ready(self.rotated()) for _ in range(3)])
        y, after = run(layers, x, caches)
        one, want = quick_jit(through_layers), x
        for _ in range(4):
            want, caches = one(layers, want, caches)
        assert_trees_equal((y, after), (want, caches))

    def _layers(self, number: int) -> Any:
        """Builds stacked modules: one constructor under vmap."""

        def make(key: jax.Array) -> Any:
            return self.rotated(key)

        return quick_jit(jax.vmap(make))(jax.random.split(jax.random.key(0), number))


def through_layers(layers: Any, x: Any, caches: Any, wrap: Any = lambda f: f) -> Any:
    """Runs stacked layers with residual connections in one scan."""

    @wrap
    def layer(x: Any, part: Any) -> Any:
        attn, cache = part
        y, cache = attn(x, cache=cache)
        return x + y, cache

    return lax.scan(layer, x, (layers, caches))


def by_step(x: np.ndarray) -> np.ndarray:
    """Turns `[B, T, D]` into steps `[T, B, 1, D]`."""
    return x.swapaxes(0, 1)[:, :, None]


def stacked(trees: list[Any]) -> Any:
    """Stacks the arrays of equal trees."""
    return jax.tree.map(lambda *leaves: np.stack([np.asarray(x) for x in leaves]), *trees)


def buffers(tree: Any) -> list[int]:
    """Lists where a tree's arrays lie in memory."""
    return [x.unsafe_buffer_pointer() for x in jax.tree.leaves(tree)]
