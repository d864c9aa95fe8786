# SPDX-License-Identifier: Apache-2.0
"""Packed and ragged rows without a cache: what they see, and which kernels they may use."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxkv.attention import GroupedQueryAttention, MultiHeadLatentAttention, ScoreOptions
from jaxkv.core.rotary import Rotary
from jaxkv.testing.suite import call
from jaxkv.testing.tolerances import assert_close
from tests.support.platforms import TPU

LENGTH = 1024


@pytest.mark.parametrize(
    ("variant", "options", "ragged", "serves"),
    [
        (GroupedQueryAttention, {}, "segment_ids", True),
        (MultiHeadLatentAttention, {}, "segment_ids", True),
        (GroupedQueryAttention, {}, "lengths", True),
        # Padding by lengths is behind all tokens, so that places tell their distance.
        (GroupedQueryAttention, {"window": 300}, "lengths", True),
        # Padding may stand between the tokens of a document, and a window counts tokens.
        (GroupedQueryAttention, {"window": 300}, "segment_ids", False),
    ],
)
def test_long_rows_run_splash_on_tpu(
    variant: type, options: dict[str, Any], ragged: str, serves: bool
) -> None:
    attn = variant(16, 4, rotary=Rotary(), rngs=nnx.Rngs(0), **options)
    x = jnp.zeros((2, LENGTH, 16))
    given = {
        "segment_ids": jnp.ones((2, LENGTH), jnp.int32),
        "lengths": jnp.array([LENGTH, 9], jnp.int32),
    }[ragged]

    def loss(attn: Any, x: jax.Array, given: jax.Array) -> jax.Array:
        return jnp.sum(attn(x, **{ragged: given})[0])

    with jax.sharding.use_abstract_mesh(TPU):
        program = str(jax.make_jaxpr(jax.grad(loss, argnums=1))(attn, x, given))
    assert ("pallas_call" in program) == serves


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"window": 2},
        {"window": 2, "score": ScoreOptions(pinned=1)},
        {"score": ScoreOptions(alibi=True)},
    ],
    ids=["causal", "window", "pinned", "alibi"],
)
def test_padding_between_the_tokens_of_a_document_is_not_counted(options: dict[str, Any]) -> None:
    attn = GroupedQueryAttention(16, 4, rotary=Rotary(50.0), rngs=nnx.Rngs(0), **options)
    x = np.random.default_rng(0).normal(size=(1, 9, 16)).astype(np.float32)
    segments = np.array([[1, 0, 1, 1, 2, 0, 2, 2, 0]], np.int32)
    got, _ = call(attn, x, segment_ids=segments)
    for document in (1, 2):
        places = segments[0] == document
        assert_close(got[:, places], call(attn, x[:, places])[0])
    assert not np.any(got[:, segments[0] == 0])
