# SPDX-License-Identifier: Apache-2.0
"""A decode step is a small program: what it traces, lowers and compiles follows its operations."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from jaxkv.attention import GroupedQueryAttention
from jaxkv.cache import H2O, Codec, Contiguous, Evicting, Int8, Kivi, Layout, Paged, Ring
from jaxkv.core.rotary import Rotary


def equations(jaxpr: Any) -> Iterator[Any]:
    """Lists what a program does, loops and calls included."""
    for equation in jaxpr.eqns:
        yield equation
        for part in jax.tree.leaves(list(equation.params.values())):
            inner = getattr(part, "jaxpr", part)
            if hasattr(inner, "eqns"):
                yield from equations(inner)


@pytest.mark.parametrize(
    "layout, codec, most",
    [
        (Contiguous(), None, 700),
        (Ring(8, pinned=2), None, 800),
        (Paged(4), None, 1150),
        (Evicting(8, H2O()), None, 1000),
        (Contiguous(), Int8(), 1050),
        (Contiguous(), Kivi(bits=4, group=4), 1650),
    ],
    ids=str,
)
def test_a_step_has_few_operations(layout: Layout, codec: Codec | None, most: int) -> None:
    window = 8 if isinstance(layout, Ring) else None
    attn = GroupedQueryAttention(16, 4, rotary=Rotary(100.0), window=window, rngs=nnx.Rngs(0))
    cache = attn.init_cache(2, 64, layout=layout, codec=codec)
    step = jax.jit(lambda attn, x, cache: attn(x, cache=cache))
    traced = step.trace(attn, np.zeros((2, 1, 16), np.float32), cache)
    found = list(equations(traced.jaxpr.jaxpr))
    # A division that rounds down looks at signs. Pages have one, so that XLA does not see where a
    # page begins (jaxkv/cache/blocks.py says what it would do).
    signs = [e for e in found if e.primitive.name == "sign"]
    assert not signs or isinstance(layout, Paged), signs
    # With negative indices and such divisions a contiguous step had 1,359.
    assert len(found) <= most
