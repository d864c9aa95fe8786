# SPDX-License-Identifier: Apache-2.0
"""Modules and caches leave the process and come back, and Linen users can take them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from jax import export

from jaxkv.testing.suite import Suite, call, quick_jit
from jaxkv.testing.tolerances import assert_close, assert_trees_close, assert_trees_equal


class Interop(Suite):
    """jax.export, Orbax, and the Linen bridge."""

    def test_an_exported_step_comes_back(self, attn: Any) -> None:
        graph, params = pure(attn)

        def step(params: Any, x: Any, cache: Any) -> Any:
            return nnx.merge(graph, params)(x, cache=cache)

        _, cache = call(attn, self.tokens(length=5), self.ready(attn))
        x = self.tokens(length=1)
        exported = export.export(jax.jit(step))(params, x, cache)
        again = export.deserialize(bytearray(exported.serialize()))
        got, after = quick_jit(again.call)(params, x, cache)
        want, expected = call(attn, x, cache)
        assert_close(got, want)
        assert_trees_close(after, expected)

    def test_a_saved_cache_comes_back(self, attn: Any, tmp_path: Path) -> None:
        checkpoint = pytest.importorskip("orbax.checkpoint")
        _, cache = call(attn, self.tokens(length=5), self.ready(attn))
        with checkpoint.StandardCheckpointer() as saver:
            saver.save(tmp_path / "cache", cache)
            saver.wait_until_finished()
            restored = saver.restore(tmp_path / "cache", cache.abstract())
        assert_trees_equal(restored, cache)
        x = self.tokens(length=1)
        assert_trees_equal(call(attn, x, restored)[0], call(attn, x, cache)[0])

    def test_the_linen_bridge_gives_the_same_names_and_output(self, attn: Any) -> None:
        linen = nnx.bridge.to_linen(lambda rngs: self.rotated(), skip_rng=False)
        x, (_, params) = self.tokens(length=5), pure(attn)
        drawn = jax.eval_shape(lambda: linen.init(jax.random.key(0), x, **self.given()))
        names = [jax.tree_util.keystr(p) for p, _ in jax.tree.leaves_with_path(unboxed(drawn))]
        want = [jax.tree_util.keystr(p) for p, _ in jax.tree.leaves_with_path({"params": params})]
        assert names == want

        @quick_jit
        def run(params: Any, x: Any, cache: Any) -> Any:
            return linen.apply({"params": params}, x, cache=cache)

        y, cache = run(params, x, self.ready(attn))
        expected, after = call(attn, x, self.ready(attn))
        assert_close(y, expected)
        assert_trees_equal(np.asarray(cache.lengths), np.asarray(after.lengths))


def pure(attn: Any) -> tuple[Any, Any]:
    """Splits a module into its definition and plain nested dictionaries of arrays."""
    graph, state = nnx.split(attn)
    return graph, nnx.to_pure_dict(state)


def unboxed(variables: Any) -> Any:
    """Takes metadata boxes off Linen variables."""
    return jax.tree.map(
        lambda x: getattr(x, "value", x), variables, is_leaf=lambda x: hasattr(x, "unbox")
    )
