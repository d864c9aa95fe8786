# SPDX-License-Identifier: Apache-2.0
"""What a decoder makes of tokens and positions that it cannot use."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxkv
from jaxkv.testing.tolerances import assert_close

FACTORY = functools.partial(jaxkv.MultiQueryAttention, num_heads=2)


def model(**options: int) -> jaxkv.Decoder:
    return jaxkv.Decoder(17, 8, 1, FACTORY, rngs=nnx.Rngs(0), **options)


@pytest.mark.parametrize("token", [17, -1])
def test_an_unknown_token_is_named_or_shows(token: int) -> None:
    tokens = jnp.array([[1, token, 3], [1, 2, 3]], jnp.int32)
    with pytest.raises(ValueError, match=rf"tokens of {min(token, 1)} to {max(token, 3)}: want 0"):
        model()(tokens)
    # Under jit nobody can raise, but it does not pass for another token.
    logits = jax.jit(lambda m, t: m(t)[0])(model(), tokens)
    assert jnp.isnan(logits[0, 1]).all() and jnp.isfinite(logits[1]).all()


@pytest.mark.parametrize("token", [17, -1])
def test_padding_may_be_any_number(token: int) -> None:
    padded = jnp.array([[token, token, 1, 2], [3, 4, 5, 6]], jnp.int32)
    segments = jnp.array([[0, 0, 1, 1], [1, 1, 1, 1]], jnp.int32)
    run = jax.jit(lambda m, t, s, c: m(t, segment_ids=s, cache=c)[0])
    want, _ = model()(jnp.array([[1, 2]], jnp.int32))
    for cache in (None, model().init_cache(2, 4)):
        assert_close(run(model(), padded, segments, cache)[0, 2:], want[0])


def test_positions_that_nothing_uses_are_refused() -> None:
    tokens, positions = jnp.zeros((1, 3), jnp.int32), jnp.arange(3, dtype=jnp.int32)[None]
    with pytest.raises(ValueError, match="neither rotation nor learned positions"):
        model()(tokens, positions=positions)
    learned = model(max_positions=8)
    got = [np.asarray(learned(tokens, positions=positions + n)[0]) for n in (0, 2)]
    assert np.abs(got[0] - got[1]).max() > 1e-3


def test_a_list_is_no_array() -> None:
    with pytest.raises(ValueError, match="tokens is a list: want an array"):
        model()([[1, 2]])
    cache = model().init_cache(1, 4)
    for verb in (cache.fork, cache.reorder, cache.reset):
        with pytest.raises(ValueError, match="rows is a list: want an array"):
            verb([0])
    with pytest.raises(ValueError, match=r"rollback count float32\(\): want int32 \(1,\), or one"):
        cache.rollback(1.7)


def test_the_signature_shows_what_there_is() -> None:
    assert "mlp_features" in str(jaxkv.Decoder.__signature__)
    for variant in (jaxkv.GroupedQueryAttention, jaxkv.MultiHeadLatentAttention):
        names = list(variant.__signature__.parameters)
        assert names[:2] == ["in_features", "num_heads"] and {"rotary", "rngs"} <= set(names)
