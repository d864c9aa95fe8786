# SPDX-License-Identifier: Apache-2.0
"""Gradients: against finite differences, through a cache, and past rubbish in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.testing.suite import Suite, poisoned, quick_jit
from jaxkv.testing.tolerances import assert_close, assert_trees_close, assert_trees_equal

STEP = 0.05


class Gradients(Suite):
    """A loss on four new tokens after a prefix of four, with a cache and without one."""

    @staticmethod
    def cached(attn: Any, prefix: Any, x: Any, cache: Any) -> jax.Array:
        """Computes the outputs of the last tokens, decoded from a cache."""
        _, cache = attn(prefix, cache=cache)
        y, _ = attn(x, cache=cache)
        return y

    @staticmethod
    def uncached(attn: Any, prefix: Any, x: Any) -> jax.Array:
        """Computes the same in one pass."""
        y, _ = attn(jnp.concatenate([prefix, x], axis=1))
        return y[:, prefix.shape[1] :]

    @pytest.fixture(scope="class")
    @classmethod
    def gradient(cls) -> Callable[..., Any]:
        """The compiled outputs and gradients of the cached loss."""
        return compiled(cls.cached)

    def inputs(self) -> tuple[np.ndarray, np.ndarray]:
        """Gives a prefix and the tokens after it."""
        x = self.tokens()
        return x[:, :4], x[:, 4:]

    def test_jax_16_gradients_reach_the_prefix_through_the_cache(
        self, attn: Any, gradient: Callable[..., Any]
    ) -> None:
        args = (attn, *self.inputs())
        y, grads = gradient(*args, self.cache(attn))
        want, expected = compiled(self.uncached)(*args)
        assert_close(y, want)
        assert_trees_close(grads, expected)
        assert np.abs(np.asarray(grads[1])).max() > 1e-2, "the prefix has no gradient"

    def test_gradients_equal_finite_differences(
        self, attn: Any, gradient: Callable[..., Any]
    ) -> None:
        args, cache = (attn, *self.inputs()), self.cache(attn)
        y, grads = gradient(*args, cache)
        weights = np.asarray(weighting(y.shape), np.float64)
        leaves, structure = jax.tree.flatten(args)
        paths = [jax.tree_util.keystr(p) for p, _ in jax.tree.leaves_with_path(args)]
        rng = np.random.default_rng(0)
        for i, (path, grad) in enumerate(zip(paths, jax.tree.leaves(grads), strict=True)):
            direction = rng.choice([-1.0, 1.0], size=grad.shape) / np.sqrt(grad.size)

            def along(step: float, i: int = i, direction: np.ndarray = direction) -> float:
                moved = list(leaves)
                moved[i] = (np.asarray(leaves[i]) + step * direction).astype(np.float32)
                out, _ = gradient(*jax.tree.unflatten(structure, moved), cache)
                return float(np.sum(np.asarray(out, np.float64) * weights))

            want = four_point(along)
            got = float(np.sum(np.asarray(grad, np.float64) * direction))
            limit = 1e-3 * float(np.linalg.norm(grad)) + 1e-4
            assert abs(got - want) < limit, f"{path}: gradient {got:.6f}, differences {want:.6f}"

    def test_unfilled_slots_reach_no_gradient(
        self, attn: Any, gradient: Callable[..., Any]
    ) -> None:
        args = (attn, *self.inputs())
        want = gradient(*args, self.cache(attn))
        assert_trees_equal(gradient(*args, poisoned(self.cache(attn))), want)


class Rematerialised(Gradients):
    """The same, and calls that are run once more for their gradient."""

    def test_jax_14_checkpointed_calls_store_once(
        self, attn: Any, gradient: Callable[..., Any]
    ) -> None:
        def remat(attn: Any, prefix: Any, x: Any, cache: Any) -> Any:
            @jax.checkpoint
            def run(attn: Any, x: Any, cache: Any) -> Any:
                return attn(x, cache=cache)

            _, cache = run(attn, prefix, cache)
            y, cache = run(attn, x, cache)
            return jnp.sum(y * weighting(y.shape)), (y, cache.lengths)

        args = (attn, *self.inputs(), self.cache(attn))
        y, grads = gradient(*args)
        run = quick_jit(jax.value_and_grad(remat, argnums=(0, 1, 2), has_aux=True))
        (_, (again, lengths)), regrads = run(*args)
        assert lengths.tolist() == [8, 8]
        assert_close(again, y, 1e-6)
        assert_trees_close(regrads, grads, 1e-6)


def weighting(shape: tuple[int, ...]) -> jax.Array:
    """Weighs every output differently in a loss."""
    return jax.random.normal(jax.random.key(7), shape)


def compiled(forward: Callable[..., jax.Array]) -> Callable[..., Any]:
    """Compiles outputs and the gradients by module, prefix and inputs of a weighted sum."""

    def loss(*args: Any) -> tuple[jax.Array, jax.Array]:
        y = forward(*args)
        return jnp.sum(y * weighting(y.shape)), y

    run = quick_jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True))

    def outputs(*args: Any) -> tuple[Any, Any]:
        (_, y), grads = run(*args)
        return y, grads

    return outputs


def four_point(f: Callable[[float], float], step: float = STEP) -> float:
    """Differentiates at 0 with an error of order step ** 4."""
    near, far = f(step) - f(-step), f(2 * step) - f(-2 * step)
    return (8 * near - far) / (12 * step)
