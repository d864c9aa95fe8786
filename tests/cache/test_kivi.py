# SPDX-License-Identifier: Apache-2.0
"""Codes of whole groups of tokens, and the exact newest tokens beside them."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxkv.attention import (
    GroupedQueryAttention,
    LatentOptions,
    MultiHeadAttention,
    MultiHeadLatentAttention,
)
from jaxkv.cache import (
    Contiguous,
    Int4,
    Kivi,
    KVSpec,
    LayerCache,
    Paged,
    Raw,
    Ring,
    create_layer,
)
from jaxkv.ops.api import attention
from tests.cache.feeding import extended, fed
from tests.cache.groups import (
    EVERY,
    KIVI,
    WIDTH,
    B,
    Q,
    S,
    coded,
    converted,
    empty,
    feed,
    flushed,
    given,
    live,
)
from tests.cache.support import SPECS, bits, scoring, values_of
from tests.support import dense
from tests.support.tolerances import assert_close


@pytest.mark.parametrize("number", [2, 4, 8])
def test_the_error_is_half_a_step_of_the_channel_or_of_the_token(number: int) -> None:
    rng, codec = np.random.default_rng(0), Kivi(number, 8, value_group=6, dtype=jnp.float32)
    sizes = rng.lognormal(sigma=2, size=(1, 1, 2, 16))
    key = (rng.normal(size=(3, 40, 2, 16)) * sizes + 3 * sizes).astype(np.float32)
    got_key, got_value = coded(codec, KVSpec(2, 16, 16), key, key)
    steps = 2**number - 1
    by_group = key.reshape(3, 5, 8, 2, 16)
    bound = np.ptp(by_group, axis=2, keepdims=True) / (2 * steps) + 1e-6 * np.abs(by_group)
    error = np.abs(got_key.reshape(by_group.shape) - by_group)
    assert (error <= bound).all() and error.max() > 0
    for part in (slice(0, 6), slice(6, 12), slice(12, 16)):
        x = key[..., part]
        bound = np.ptp(x, axis=-1, keepdims=True) / (2 * steps)
        assert (np.abs(got_value[..., part] - x) <= bound + 1e-6 * np.abs(key).max()).all()
    # One number for all: no step, no error; and infinities are cut, not spread.
    same = np.full((1, 8, 1, 4), 7.25, np.float32)
    np.testing.assert_array_equal(next(coded(codec, KVSpec(1, 4, 4), same, same)), same)
    same[0, 0, 0] = [np.inf, -np.inf, 1, 2]
    assert np.isfinite(list(coded(codec, KVSpec(1, 4, 4), same, same))).all()


def test_qnt_10_a_scale_for_each_channel_keeps_an_outlying_one_from_the_others() -> None:
    rng, spec = np.random.default_rng(0), KVSpec(1, 64, 64)

    def errors(key: np.ndarray) -> list[float]:
        found = []
        for codec in (Kivi(4, 32, dtype=jnp.float32), Int4()):
            back, _ = coded(codec, spec, key, key)
            x, y = key[..., 1:], back[..., 1:]
            found.append(float(np.linalg.norm(y - x) / np.linalg.norm(x)))
        return found

    key = rng.normal(size=(2, 64, 1, 64)).astype(np.float32)
    key[..., 0] += 50
    kivi, by_token = errors(key)
    assert kivi < 0.09 and by_token > 0.9
    key[..., 0] = 100 * rng.normal(size=(2, 64, 1))
    kivi, by_token = errors(key)
    assert kivi < 0.09 and by_token > 0.8


@pytest.mark.parametrize(("name", "layout"), EVERY)
def test_qnt_09_groups_are_encoded_to_the_same_bits_however_tokens_arrive(
    name: str, layout: str
) -> None:
    tokens = given(name)
    spec = SPECS[name][0]
    _, want = feed(empty(name, layout), name, tokens, [WIDTH])
    for widths in ([1] * WIDTH, [5, 1, 9, 2, 7]):
        _, cache = feed(empty(name, layout), name, tokens, widths)
        for b in range(B):
            assert live(cache, b) == live(want, b)
            assert len(live(cache, b)["key"]) == 20 and len(live(cache, b)["rest key"]) == 4
    # The bits are those of the groups alone, and the exact tokens those that were given.
    alone = jax.jit(functools.partial(KIVI.encode, spec))(*tokens[1:])
    for b in range(B):
        found = live(cache, b)
        assert found["key_scale"] == [bits(alone["key_scale"])[b, :, g].tobytes() for g in range(5)]
        assert found["rest key"] == [
            bits(tokens[1])[b, k, :, : spec.key_width].tobytes() for k in range(20, WIDTH)
        ]


@pytest.mark.parametrize(("name", "layout"), EVERY)
def test_a_read_sees_codes_of_flushed_groups_and_exact_newest_tokens(
    name: str, layout: str
) -> None:
    # Against float64 on what the rule says a step sees; what is free is NaN.
    spec = SPECS[name][0]
    query, key, value = given(name)
    key_back, value_back = coded(KIVI, spec, key, value)
    values = values_of(spec, key, value)
    cache, first = empty(name, layout), 0
    for width in (5, 1, 9, 2, 7):
        last, seen = first + width, flushed(first)
        out, lse, cache = fed(scoring(spec), cache, (query, key, value), first, last, width=WIDTH)
        arrays = {
            "query": query[:, first:last],
            "key": np.concatenate([key_back[:, :seen], key[:, seen:last]], axis=1),
            "value": np.concatenate([value_back[:, :seen], values[:, seen:last]], axis=1),
        }
        options = dict(causal=True, offset=first, scale=scoring(spec).scale)
        want = dense.attention(arrays, options)
        assert_close(out, want.out, terms=WIDTH * 16, what=f"{layout} {first}")
        assert_close(lse, want.lse, terms=WIDTH * 16)
        first = last


def test_a_row_of_less_than_two_groups_is_exact() -> None:
    tokens, plain = given(), empty(codec=Raw(jnp.float32))
    got, cache = feed(empty(), "gqa", tokens, [3, 4, 1])
    want, plain = feed(plain, "gqa", tokens, [3, 4, 1])
    np.testing.assert_array_equal(got, want)
    # The next step is the first one that reads a code.
    got, want = (feed(c, "gqa", tokens, [1], first=8)[0] for c in (cache, plain))
    assert 1e-4 < np.abs(got - want).max() < 0.2


def test_appending_leaves_older_codes_as_they_are() -> None:
    tokens = given()
    _, cache = feed(empty(), "gqa", tokens, [13])
    before = live(cache, 0)
    for k in range(13, WIDTH):
        _, cache = feed(cache, "gqa", tokens, [1], first=k)
        after = live(cache, 0)
        for name in before:
            if not name.startswith("rest"):
                assert after[name][: len(before[name])] == before[name]
                assert len(after[name]) >= len(before[name])
        before = after
    assert len(before["key"]) == flushed(WIDTH) == 20


def test_what_does_not_fit_is_dropped_and_no_group_is_made_of_it() -> None:
    tokens, more = given(), given(seed=1)
    _, cache = feed(empty(), "gqa", tokens, [13])
    _, full = feed(cache, "gqa", more, [WIDTH])
    _, want = feed(cache, "gqa", more, [13])
    assert full.lengths.tolist() == [S] * B == want.lengths.tolist()
    assert full.overflowed.all() and not want.overflowed.any()
    assert [live(full, b) for b in range(B)] == [live(want, b) for b in range(B)]


def test_codes_of_two_bits_lie_four_to_a_byte_and_with_lanes_two() -> None:
    codec = Kivi(2, Q, dtype=jnp.bfloat16)
    _, cache = feed(empty(codec=codec), "gqa", given(), [WIDTH])
    assert (cache.records.planes["key"].dtype, cache.records.planes["key"].shape[3]) == (
        jnp.uint8,
        2,
    )
    wide = converted(cache, lanes=128)
    assert wide.records.planes["key"].dtype == jnp.int4
    assert wide.records.rest["key"].dtype == jnp.bfloat16
    again = converted(wide, lanes=1)
    assert [live(again, b) for b in range(B)] == [live(cache, b) for b in range(B)]
    other = jax.eval_shape(lambda: wide.convert(codec=Kivi(8, 2)))
    assert other.records.codec == Kivi(8, 2, dtype=jnp.bfloat16)
    assert other.records.rest["key"].dtype == jnp.bfloat16


def test_layouts_and_codecs_that_do_not_fit_are_named() -> None:
    spec = SPECS["gqa"][0]
    made = functools.partial(create_layer, spec, batch=1, capacity=8)
    raw = Raw(jnp.float32)
    for layout, reason in (
        (Ring(window=8), r"Ring\(window=8.* with Kivi\(.*: it does not keep whole groups of 4"),
        (Paged(6), r"Paged\(size=6.* with Kivi\(.*: a page is no whole number of groups of 4"),
    ):
        for make in (
            lambda layout=layout: made(KIVI, layout=layout),
            lambda layout=layout: made(KIVI).convert(layout=layout),
            lambda layout=layout: made(raw, layout=layout).convert(codec=KIVI),
        ):
            with pytest.raises(ValueError, match=reason + r".* fits Contiguous\(\), and Paged"):
                jax.eval_shape(make)
    out = jax.eval_shape(
        lambda: made(raw, layout=Ring(window=8)).convert(
            codec=KIVI, layout=Contiguous(), capacity=8
        )
    )
    assert out.records.codec == KIVI and out.layout == Contiguous()
    back = jax.eval_shape(lambda: made(KIVI).convert(codec=raw, layout=Ring(window=8)))
    assert back.records.codec == raw and back.layout == Ring(window=8)
    for wrong, match in ((dict(bits=3), "bits=3: want one of 2, 4, 8"), (dict(group=0), "group=0")):
        with pytest.raises(ValueError, match=match):
            Kivi(**wrong)


def test_bytes_by_hand() -> None:
    # 2 heads of 8 key and 6 value channels; 26 slots are 7 groups of 4.
    spec, codec = KVSpec(2, 8, 6), Kivi(4, 4, dtype=jnp.float32)
    cache = create_layer(spec, codec, 3, 26)
    codes, by_token, by_group = (8 + 6) // 2, 2 * 4, 2 * 4 * 8
    assert cache.bytes_per_token == 2 * (codes + by_token + by_group // 4)
    rest = 3 * 4 * 2 * (8 + 6) * 4
    index = 4 + 1 + 1 + 4
    assert cache.nbytes == 3 * (7 * 4 * cache.bytes_per_token + rest + index)
    assert cache.nbytes == sum(x.nbytes for x in jax.tree.leaves(cache)) == cache.abstract().nbytes
    two = create_layer(spec, dataclasses.replace(codec, bits=2), 3, 26)
    assert two.bytes_per_token == 2 * (2 + 2 + by_token + by_group // 4)


def test_no_gradient_reaches_what_is_encoded_and_all_of_it_the_exact_tokens() -> None:
    how, length = scoring(SPECS["gqa"][0]), 11
    query, key, value = jax.tree.map(jnp.asarray, given(length=length))
    start = create_layer(SPECS["gqa"][0], dataclasses.replace(KIVI, bits=8), B, S)

    def step(cache: LayerCache, token: Any) -> Any:
        out, _, cache = extended(how, cache, [x[:, None] for x in token])
        return cache, out

    def cached(key: Any, value: Any) -> Any:
        tokens = [x.swapaxes(0, 1) for x in (query, key, value)]
        return jnp.sum(jnp.sin(jax.lax.scan(step, start, tokens)[1][-1]))

    def plain(key: Any, value: Any) -> Any:
        out = attention(query[:, 10:], key, value, causal=True, offset=10, scale=how.scale)
        return jnp.sum(jnp.sin(out))

    got, want = (jax.jit(jax.grad(f, argnums=(0, 1)))(key, value) for f in (cached, plain))
    done = flushed(10)
    for a, b in zip(got, want, strict=True):
        assert float(jnp.abs(b).max()) > 0.01
        assert not np.asarray(a[:, :done]).any()
        np.testing.assert_allclose(a[:, done:], b[:, done:], rtol=0, atol=0.005)


LATENT = LatentOptions(latent_dim=12, rope_dim=4, form="expanded")
MODULES = {
    "gqa": lambda rngs: GroupedQueryAttention(16, 4, num_kv_heads=2, rngs=rngs),
    "mha": lambda rngs: MultiHeadAttention(16, 2, rngs=rngs),
    "mla": lambda rngs: MultiHeadLatentAttention(16, 2, head_dim=8, latent=LATENT, rngs=rngs),
}


@pytest.mark.parametrize(
    ("kind", "number"),
    [("gqa", 4)]
    + [
        pytest.param(*c, marks=pytest.mark.full)
        for c in (("mha", 4), ("gqa", 8), ("mla", 4), ("mla", 8))
    ],
)
def test_modules_stay_near_their_uncached_selves(kind: str, number: int) -> None:
    attn = MODULES[kind](nnx.Rngs(0))
    x = np.random.default_rng(0).normal(size=(B, 19, 16)).astype(np.float32)
    want = np.asarray(nnx.jit(lambda attn, x: attn(x)[0])(attn, x))
    traces = []

    @nnx.jit
    def step(attn: Any, x: Any, cache: Any, lengths: Any) -> Any:
        traces.append(x.shape)
        return attn(x, cache=cache, lengths=lengths)

    cache, parts, first = attn.init_cache(B, 24, codec=Kivi(number, Q)), [], 0
    for width in (6, 1, 1, 5, 6):
        padded = np.full((B, 6, 16), np.nan, np.float32)
        padded[:, :width] = x[:, first : first + width]
        y, cache = step(attn, padded, cache, np.full(B, width, np.int32))
        parts.append(np.asarray(y)[:, :width])
        first += width
    assert len(traces) == 1
    gap = np.abs(np.concatenate(parts, axis=1) - want)
    # Nothing is encoded yet when the first 8 tokens are attended.
    assert_close(np.concatenate(parts, axis=1)[:, :8], want[:, :8], terms=400)
    # A step of 8 bits is 1/17 of one of 4 bits.
    assert 0 < gap[:, 8:].max() < {8: 0.01, 4: 0.17}[number] * np.abs(want).max()
