# SPDX-License-Identifier: Apache-2.0
"""Narrow codecs: their error, their bits, and what a read of them costs."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.cache import Float8, Int4, Int8, KVSpec, LayerCache, Paged, Raw, Ring, create_layer
from jaxkv.testing.hlo import assert_in_place
from tests.cache.feeding import fed
from tests.cache.support import SPECS, draw_tokens, scoring
from tests.support.tolerances import assert_close

NARROW = {"int8": Int8(), "int4": Int4(), "float8": Float8(), "int4 by 4": Int4(group=4)}


def there_and_back(codec: Any, spec: KVSpec, key: Any, value: Any = None) -> Any:
    stored = jax.jit(lambda k, v: codec.encode(spec, k, v))(key, value)
    back = jax.jit(lambda planes: codec.decode(spec, planes))(stored)
    return stored, *map(np.asarray, back)


def relative(got: np.ndarray, want: np.ndarray) -> float:
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def test_qnt_01_int8_has_half_a_percent_of_error_with_a_scale_per_token_and_head() -> None:
    rng = np.random.default_rng(0)
    spec, key = KVSpec(2, 64, 64), rng.normal(size=(4, 64, 2, 64)).astype(np.float32) * 2
    _, back, _ = there_and_back(Int8(), spec, key, key)
    assert 0.004 < relative(back, key) < 0.008
    # The same codes with a scale of 1, as if scales were forgotten, are far off.
    assert relative(np.round(key), key) > 0.1
    zeros = np.zeros_like(key)
    for codec in NARROW.values():
        np.testing.assert_array_equal(there_and_back(codec, spec, zeros, zeros)[1], zeros)


def test_qnt_03_a_large_head_does_not_spoil_the_others() -> None:
    rng = np.random.default_rng(0)
    key = rng.normal(size=(2, 32, 4, 64)).astype(np.float32)
    key[:, :, 0] *= 100
    _, back, _ = there_and_back(Int8(), KVSpec(4, 64, 64), key, key)
    for head in range(4):
        assert relative(back[:, :, head], key[:, :, head]) < 0.008


@pytest.mark.parametrize("name", NARROW)
def test_the_error_is_within_the_bound_that_the_codec_states(name: str) -> None:
    codec, rng = NARROW[name], np.random.default_rng(0)
    key = (rng.normal(size=(3, 50, 2, 16)) * rng.lognormal(sigma=2, size=(3, 50, 1, 1))).astype("f")
    _, back, _ = there_and_back(codec, KVSpec(2, 16, 16), key, key)
    groups = key.reshape(3, 50, 2, -1, codec.group or 16)
    largest = np.abs(groups).max(-1, keepdims=True)
    error = np.abs(back.reshape(groups.shape) - groups)
    if isinstance(codec, Float8):
        # 3 bits of mantissa: half a step is 1/16, and the smallest normal number is 2 ** -6.
        limit = np.maximum(np.abs(groups) / 16, largest / 448 * 2.0**-10)
    else:
        limit = np.broadcast_to(largest / codec.largest / 2, groups.shape)
    assert (error <= limit * (1 + 1e-5)).all()
    assert error.max() > 0


def test_qnt_07_float8_saturates_and_is_never_nan() -> None:
    # JAX turns 465 into NaN; the largest number of each token becomes exactly 448 steps.
    key = np.array([1e4, 3e38, np.inf, 465.0, -465.0, 1e-30, 0.0, 1.0], np.float32)
    stored, back, _ = there_and_back(
        Float8(), KVSpec(1, 8, 8), key.reshape(1, 1, 1, 8), key[None, None, None]
    )
    codes = np.asarray(stored["key"]).astype(np.float32)
    assert np.isfinite(codes).all() and np.abs(codes).max() <= 448
    assert np.isfinite(back).all()
    for value in (1e4, 464.0, 465.0, 1e30):
        x = np.full((1, 1, 1, 8), value, np.float32)
        x[..., 1:] = 0.5
        _, back, _ = there_and_back(Float8(), KVSpec(1, 8, 8), x, x)
        assert np.isfinite(back).all() and abs(back.max() / value - 1) < 1e-6


@pytest.mark.parametrize(
    ("spec", "name"),
    [
        pytest.param(*case, marks=[] if number % 3 == 0 else pytest.mark.full)
        for number, case in enumerate(itertools.product(SPECS, NARROW))
    ],
)
def test_qnt_09_every_way_of_writing_gives_the_same_bits(name: str, spec: str) -> None:
    how, given = scoring(SPECS[spec][0]), draw_tokens(np.random.default_rng(0), *SPECS[spec], 2, 17)

    def stored(widths: list[int]) -> dict[str, np.ndarray]:
        cache = create_layer(SPECS[spec][0], NARROW[name], 2, 20)
        start = 0
        for width in widths:
            cache = fed(how, cache, given, start, start + width, width=17)[2]
            start += width
        return {
            n: np.asarray(x)[:, :, :17].astype(np.float32) for n, x in cache.records.planes.items()
        }

    want = stored([17])
    for widths in ([16, 1], [5, 5, 7]):
        for n, plane in stored(widths).items():
            np.testing.assert_array_equal(plane, want[n])


READ_SPECS, READ_NAMES = ("gqa", "latent"), ("int8", "int4 by 4", "float8")


@pytest.mark.parametrize(
    ("spec", "name"),
    [
        pytest.param(*case, marks=[] if number % 2 == 0 else pytest.mark.full)
        for number, case in enumerate(itertools.product(READ_SPECS, READ_NAMES))
    ],
)
def test_qnt_05_scales_count_on_every_read_path(spec: str, name: str) -> None:
    # A cache of codes equals a float32 cache of what the codes mean, however it is laid out.
    record, heads = SPECS[spec]
    query, key, value = draw_tokens(np.random.default_rng(0), record, heads, 2, 12)
    how = scoring(record)
    _, back_key, back_value = there_and_back(NARROW[name], record, key, value)
    meant = (query, back_key, None if value is None else back_value)
    for layout in (None, Paged(4), Ring(window=12)):
        narrow = create_layer(record, NARROW[name], 2, 12, layout=layout)
        wide = create_layer(record, Raw(jnp.float32), 2, 12)
        for first, last in ((0, 7), (7, 11), (11, 12)):
            got, lse, narrow = fed(how, narrow, (query, key, value), first, last)
            want, want_lse, wide = fed(how, wide, meant, first, last)
            assert_close(got, want, terms=12 * 16, what=f"{layout} {first}")
            assert_close(lse, want_lse, terms=12 * 16)


def test_qnt_10_small_groups_keep_an_outlying_channel_from_the_others() -> None:
    rng = np.random.default_rng(0)
    key = rng.normal(size=(2, 64, 1, 64)).astype(np.float32)
    key[..., 0] += 50
    spec = KVSpec(1, 64, 64)
    rest = slice(8, None)
    _, spoilt, _ = there_and_back(Int4(), spec, key, key)
    _, kept, _ = there_and_back(Int4(group=8), spec, key, key)
    assert relative(spoilt[..., rest], key[..., rest]) > 0.9
    assert relative(kept[..., rest], key[..., rest]) < 0.13


KINDS = {"gqa": (KVSpec(8, 128, 128), 32), "latent": (KVSpec(1, 576, 512, value_offset=0), 16)}
EVERY = list(itertools.product(KINDS, (Int8(), Int4(), Float8()), (1, 8)))
USUAL = {("gqa", Int8(), 8), ("latent", Int8(), 1), ("gqa", Float8(), 1)}


@pytest.mark.as_shipped
@pytest.mark.parametrize(
    ("kind", "codec", "batch"),
    [case if case in USUAL else pytest.param(*case, marks=pytest.mark.full) for case in EVERY],
    ids=str,
)
def test_qnt_11_a_step_makes_no_wide_copy(kind: str, codec: Any, batch: int) -> None:
    spec, heads = KINDS[kind]
    cache = jax.eval_shape(lambda: create_layer(spec, codec, batch, 4096))
    how = scoring(spec)

    def step(cache: LayerCache, query: Any, key: Any, value: Any) -> Any:
        out, _, cache = cache.extend(query, key, value, how)
        return out, cache

    def tokens(heads: int, width: int) -> Any:
        return jax.ShapeDtypeStruct((batch, 1, heads, width), jnp.bfloat16)

    value = None if spec.value_offset is not None else tokens(spec.kv_heads, spec.value_width)
    given = (tokens(heads, spec.key_width), tokens(spec.kv_heads, spec.key_width), value)
    assert_in_place(jax.jit(step, donate_argnums=0).lower(cache, *given).compile(), cache)


def test_gradients_pass_as_if_nothing_was_rounded() -> None:
    record, heads = SPECS["gqa"]
    query, key, value = draw_tokens(np.random.default_rng(0), record, heads, 1, 3)
    how = scoring(record)

    def loss(codec: Any, query: Any, key: Any, value: Any) -> Any:
        out, _, _ = create_layer(record, codec, 1, 8).extend(query, key, value, how)
        return jnp.sum(jnp.sin(out))

    grads = {
        n: jax.jit(jax.grad(lambda *x, c=c: loss(c, *x), argnums=(0, 1, 2)))(query, key, value)
        for n, c in {"int8": Int8(), "raw": Raw(jnp.float32)}.items()
    }
    for got, want in zip(grads["int8"], grads["raw"], strict=True):
        assert float(jnp.abs(want).max()) > 0.01
        np.testing.assert_allclose(got, want, rtol=0, atol=0.03)


@pytest.mark.parametrize("name", NARROW)
def test_qnt_12_every_verb_works_and_moves_no_code(name: str) -> None:
    how, given = (
        scoring(SPECS["gqa"][0]),
        draw_tokens(np.random.default_rng(0), *SPECS["gqa"], 2, 8),
    )
    cache = fed(how, create_layer(SPECS["gqa"][0], NARROW[name], 2, 8), given)[2]

    def rows(cache: LayerCache) -> list[np.ndarray]:
        leaves = (cache.records.planes[n] for n in sorted(cache.records.planes))
        return [np.asarray(x).astype(np.float32) for x in leaves]

    swapped = cache.reorder(jnp.array([1, 0], jnp.int32)).rollback(3)
    for a, b in zip(rows(swapped), rows(cache), strict=True):
        np.testing.assert_array_equal(a, b[::-1])
    wide = cache.convert(codec=Raw(jnp.float32))
    back = wide.convert(codec=NARROW[name])
    for a, b in zip(rows(back), rows(cache), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)
    assert cache.reset().lengths.tolist() == [0, 0]
    assert swapped.lengths.tolist() == [5, 5]


def test_a_native_int4_counts_half_a_byte() -> None:
    cache = create_layer(KVSpec(2, 64, 64), Int4(), 1, 8)
    # 2 heads x 2 x (64 / 2 + 4) bytes a token.
    assert cache.bytes_per_token == 144
    index = 4 + 1 + 1
    assert cache.nbytes == 8 * 144 + index
    assert {x.dtype.name for x in cache.records.planes.values()} == {"uint8", "float32"}
    # With lanes, as on TPU, the native dtype; padding to tiles of 64 slots by 128 channels counts.
    wide = create_layer(KVSpec(2, 64, 64), Int4(), 1, 8, lanes=128)
    assert {x.dtype.name for x in wide.records.planes.values()} == {"int4", "float32"}
    assert wide.bytes_per_token == 144 and wide.nbytes == 64 * (2 * 2 * (128 // 2 + 4)) + index
    with pytest.raises(ValueError, match="group=0: want an int of at least 1"):
        Int4(group=0)
