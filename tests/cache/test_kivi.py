# SPDX-License-Identifier: Apache-2.0
"""Codes of whole groups of tokens, and the exact newest tokens beside them."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
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
    Layout,
    Paged,
    Raw,
    Ring,
    create_layer,
    gather_layers,
)
from jaxkv.ops.api import attention
from tests.cache.feeding import extended, fed
from tests.cache.meshes import mesh_of
from tests.cache.support import SPECS, bits, draw_tokens, scoring, values_of
from tests.support import dense
from tests.support.tolerances import assert_close

Q = 4
KIVI = Kivi(bits=4, group=Q, value_group=3, dtype=jnp.float32)
B, S, WIDTH = 2, 26, 24
LAYOUTS: dict[str, Layout] = {"contiguous": Contiguous(), "paged": Paged(2 * Q, pages=40)}
USUAL = [(name, "contiguous") for name in ("gqa", "latent")] + [("gqa", "paged")]
EVERY = [
    case if case in USUAL else pytest.param(*case, marks=pytest.mark.full)
    for case in itertools.product(SPECS, LAYOUTS)
]


def flushed(length: int, group: int = Q) -> int:
    """Counts encoded tokens, from the rule: group g once there are (g + 2) groups."""
    return sum(group for g in range(length) if length >= (g + 2) * group)


def empty(name: str = "gqa", layout: str = "contiguous", codec: Any = KIVI) -> LayerCache:
    """Makes an empty cache whose every float is NaN and whose every code is 1."""
    cache = create_layer(SPECS[name][0], codec, B, S, layout=LAYOUTS[layout])
    spoilt = jax.tree.map(
        lambda x: jnp.full_like(x, jnp.nan if x.dtype == jnp.float32 else 1),
        (cache.records.planes, cache.records.rest),
    )
    records = dataclasses.replace(cache.records, planes=spoilt[0], rest=spoilt[1])
    return dataclasses.replace(cache, records=records)


def given(name: str = "gqa", length: int = WIDTH, seed: int = 0) -> Any:
    return draw_tokens(np.random.default_rng(seed), *SPECS[name], B, length)


def feed(cache: LayerCache, name: str, tokens: Any, widths: list[int], first: int = 0) -> Any:
    outs = []
    for width in widths:
        out, _, cache = fed(
            scoring(SPECS[name][0]), cache, tokens, first, first + width, width=WIDTH
        )
        outs.append(out)
        first += width
    return np.concatenate(outs, axis=1), cache


def live(cache: LayerCache, row: int) -> dict[str, list[bytes]]:
    """Gives the bytes of what a row stores: codes group by group, exact tokens by order."""
    r, length = cache.records, int(np.asarray(cache.lengths)[row])
    index = jax.tree.map(np.asarray, cache.index)
    entry, slot, _ = (np.asarray(x)[row] for x in cache.layout.places(index, r.slots))
    group = r.codec.group
    done, found = flushed(length, group), {}
    for name, plane in r.codec.planes(r.spec, 1).items():
        x = bits(r.planes[name])
        picked = range(0, done, plane.stride)
        found[name] = [x[entry[k], :, slot[k] // plane.stride].tobytes() for k in picked]
    for name, x in r.rest.items():
        x = bits(x)
        found[f"rest {name}"] = [x[row, :, k % (3 * group)].tobytes() for k in range(done, length)]
    return found


def coded(codec: Kivi, spec: KVSpec, key: Any, value: Any) -> Any:
    stored = jax.jit(functools.partial(codec.encode, spec))(key, value)
    return map(np.asarray, jax.jit(functools.partial(codec.decode, spec))(stored))


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


_rollback = jax.jit(lambda cache, count: cache.rollback(count))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_rollback_is_exact_as_far_as_the_residual_goes(layout: str) -> None:
    tokens, other = given(), given(seed=1)
    for length in (5, 8, 15, 17, 24):
        _, cache = feed(empty("gqa", layout), "gqa", tokens, [length])
        for left in range(max(flushed(length) - 1, 0), length):
            count = np.array([length - left, 0], np.int32)
            back = _rollback(cache, count)
            refused = left < flushed(length)
            assert back.refused.tolist() == [refused, False]
            assert back.lengths.tolist() == [length if refused else left, length]
            assert live(back, 1) == live(cache, 1)
            if refused:
                assert live(back, 0) == live(cache, 0)
                continue
            # As if the tokens had never been there, now and once others stand in their place.
            _, never = feed(empty("gqa", layout), "gqa", tokens, [left])
            assert live(back, 0) == live(never, 0)
            more = WIDTH - length
            if left in (flushed(length), length - 1) and more:
                out, back = feed(back, "gqa", other, [more], first=length)
                want, never = feed(never, "gqa", other, [more], first=length)
                assert live(back, 0) == live(never, 0)
                np.testing.assert_array_equal(out[0], want[0])


def test_a_mark_stays_until_a_row_is_emptied() -> None:
    _, cache = feed(empty(), "gqa", given(), [17])
    once = _rollback(cache, 5)
    assert once.lengths.tolist() == [12, 12] and not once.refused.any()
    # Token 11 is encoded and exact no more, though a row of 12 would have it.
    assert _rollback(once, 1).refused.all()
    with pytest.raises(ValueError, match="rollback of .* tokens: rows hold"):
        once.rollback(1)
    anew = cache.reset(jnp.array([True, False]))
    _, anew = feed(anew, "gqa", given(), [3])
    assert _rollback(anew, 2).refused.tolist() == [False, False]
    assert _rollback(anew, 2).lengths.tolist() == [1, 18]


_fork = jax.jit(lambda cache, rows: cache.fork(rows))
_share = jax.jit(lambda cache, rows, count: cache.share(rows, count))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_qnt_12_rows_move_with_their_residuals(layout: str) -> None:
    tokens, others = given(), given(seed=1)
    _, cache = feed(empty("gqa", layout), "gqa", tokens, [11])
    cache = _rollback(cache, np.array([0, 2], np.int32))
    rows = [live(cache, b) for b in range(B)]
    for order in ([1, 0], [0, 0]):
        moved = _fork(cache, np.array(order, np.int32))
        assert [live(moved, b) for b in range(B)] == [rows[r] for r in order]
    # Copies go on as the row does, each with tokens of its own: whole pages stay shared.
    mixed = [np.stack([x[0], y[0]]) for x, y in zip(tokens, others, strict=True)]
    _, went_on = feed(moved, "gqa", mixed, [9], first=11)
    _, alone = feed(cache, "gqa", tokens, [9], first=11)
    assert live(went_on, 0) == live(alone, 0) != live(went_on, 1)
    _, other = feed(moved, "gqa", others, [9], first=11)
    assert live(other, 0) != live(alone, 0)
    shared = _share(cache, np.array([-1, 0], np.int32), np.array([0, 9], np.int32))
    assert shared.lengths.tolist() == [11, 9] and not shared.refused.any()
    assert live(shared, 1) == live(_rollback(cache, np.array([2, 0], np.int32)), 0)
    deep = _share(cache, np.array([-1, 0], np.int32), np.array([0, 3], np.int32))
    assert deep.refused.tolist() == [False, True]


_reset = jax.jit(lambda cache, rows: cache.reset(rows))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("seed", range(3))
def test_random_verbs_leave_what_one_call_of_the_same_tokens_stores(layout: str, seed: int) -> None:
    rng, how, start = np.random.default_rng(seed), scoring(SPECS["gqa"][0]), empty("gqa", layout)
    stock = given(length=400, seed=seed)

    def tokens(rows: list[list[int]]) -> Any:
        at = np.array([(row + [0] * WIDTH)[:WIDTH] for row in rows])
        return [np.stack([x[0, k] for k in at]) for x in stock]

    cache, rows, high, next_one = start, [[] for _ in range(B)], [0] * B, 0
    verbs = set()
    for _ in range(40):
        verb = rng.choice(["extend", "extend", "extend", "rollback", "fork", "reset"])
        verbs.add(verb)
        counts = rng.integers(0, 8, B)
        if verb == "extend":
            counts = np.minimum(counts, [WIDTH - len(row) for row in rows])
            new = [[next_one + b * 8 + i for i in range(n)] for b, n in enumerate(counts)]
            next_one = (next_one + 16) % 384
            _, _, cache = fed(how, cache, tokens(new), counts=counts, width=WIDTH)
            rows = [row + more for row, more in zip(rows, new, strict=True)]
            high = [max(h, len(row)) for h, row in zip(high, rows, strict=True)]
        elif verb == "rollback":
            cache = _rollback(cache.clear_flags(), counts.astype(np.int32))
            bad = [
                n > 0 and len(row) - n < flushed(h)
                for n, row, h in zip(counts, rows, high, strict=True)
            ]
            bad = [b or n > len(row) for b, n, row in zip(bad, counts, rows, strict=True)]
            assert cache.refused.tolist() == bad
            rows = [
                row if b else row[: len(row) - n]
                for b, n, row in zip(bad, counts, rows, strict=True)
            ]
        elif verb == "fork":
            order = rng.integers(0, B, B)
            cache = _fork(cache, order.astype(np.int32))
            rows, high = [list(rows[r]) for r in order], [high[r] for r in order]
        else:
            gone = rng.random(B) < 0.5
            cache = _reset(cache, gone)
            rows = [[] if g else row for g, row in zip(gone, rows, strict=True)]
            high = [0 if g else h for g, h in zip(gone, high, strict=True)]
        held = [len(row) for row in rows]
        assert cache.lengths.tolist() == held
        _, _, want = fed(how, start, tokens(rows), counts=held, width=WIDTH)
        assert [live(cache, b) for b in range(B)] == [live(want, b) for b in range(B)]
    assert len(verbs) == 4


def test_what_does_not_fit_is_dropped_and_no_group_is_made_of_it() -> None:
    tokens, more = given(), given(seed=1)
    _, cache = feed(empty(), "gqa", tokens, [13])
    _, full = feed(cache, "gqa", more, [WIDTH])
    _, want = feed(cache, "gqa", more, [13])
    assert full.lengths.tolist() == [S] * B == want.lengths.tolist()
    assert full.overflowed.all() and not want.overflowed.any()
    assert [live(full, b) for b in range(B)] == [live(want, b) for b in range(B)]


def converted(cache: LayerCache, **options: Any) -> LayerCache:
    return jax.jit(lambda cache: cache.convert(**options))(cache)


@pytest.mark.parametrize(
    "name", ["gqa", *(pytest.param(n, marks=pytest.mark.full) for n in ("latent", "shared"))]
)
def test_converting_gives_what_appending_gives(name: str) -> None:
    tokens, length = given(name), WIDTH - 2
    done = flushed(length)
    _, cache = feed(empty(name), name, tokens, [length])
    _, raw = feed(empty(name, codec=Raw(jnp.float32)), name, tokens, [length])
    want = [live(cache, b) for b in range(B)]
    fresh = jax.tree.structure(empty(name))
    grouped = converted(raw, codec=KIVI)
    paged = converted(cache, layout=LAYOUTS["paged"])
    wide = converted(cache, lanes=128)
    for made in (grouped, paged, converted(paged, layout=Contiguous()), converted(wide, lanes=1)):
        assert [live(made, b) for b in range(B)] == want
    assert jax.tree.structure(grouped) == fresh != jax.tree.structure(paged)
    assert {x.shape[-1] for x in wide.records.rest.values()} == {128}
    # Back in one dtype the exact tokens are exact, and the others what their codes mean.
    means = np.asarray(next(coded(KIVI, SPECS[name][0], *tokens[1:])))
    for made in (cache, paged):
        back = converted(made, codec=Raw())
        assert back.index.high is None and back.records.codec == Raw(jnp.float32)
        entry, slot, _ = back.layout.places(back.index, back.records.slots)
        key = np.asarray(back.records.planes["key"])[entry, :, slot][:, :length]
        width = SPECS[name][0].key_width
        np.testing.assert_allclose(key[:, :done], means[:, :done, :, :width], rtol=0, atol=1e-6)
        np.testing.assert_array_equal(key[:, done:], tokens[1][:, done:length, :, :width])


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


def test_layers_of_different_codecs_agree_on_what_a_row_holds() -> None:
    codecs = (Raw(jnp.float32), KIVI)
    cache = gather_layers([create_layer(SPECS["gqa"][0], c, B, S) for c in codecs])
    assert [index.high is None for index in cache.indices] == [True, False]
    tokens = given()

    @jax.jit
    def step(cache: Any, tokens: Any) -> Any:
        opened = cache.open(tokens[0].shape[1])
        made = [opened.layer(i).extend(*tokens, scoring(SPECS["gqa"][0]))[2] for i in range(2)]
        return opened.close(made)

    cache = step(cache, tokens)
    # The first layer could give back any number of its 24 tokens, the second its 4 exact ones.
    for count, refused in ((4, False), (5, True)):
        back = _rollback(cache, count)
        assert back.refused.tolist() == [refused] * B
        assert {tuple(i.lengths.tolist()) for i in back.indices} == {(24 if refused else 20,) * B}


@pytest.mark.parametrize("mode", ["explicit", pytest.param("auto", marks=pytest.mark.full)])
def test_a_step_and_the_verbs_on_a_mesh_equal_those_without(mode: str, tmp_path: Path) -> None:
    how, spec = scoring(SPECS["gqa"][0]), SPECS["gqa"][0]
    tokens, rows = given(length=19), np.array([1, 0], np.int32)

    def work(cache: LayerCache, tokens: Any, rows: Any) -> Any:
        out, _, cache = cache.extend(*tokens, how)
        # Tokens 12 and on of 19 are exact.
        moved = cache.reorder(rows).rollback(2)
        return out, moved, moved.convert(codec=Raw()).records.planes

    cache = create_layer(spec, KIVI, B, S)
    want = jax.jit(work)(cache, tokens, rows)
    mesh = mesh_of((2, 2), mode)
    path = tmp_path / "cache"
    with jax.set_mesh(mesh):
        placed = jax.device_put(cache, cache.sharding(mesh))
        got = jax.jit(work)(placed, tokens, rows)
    assert_close(got[0], want[0], terms=19 * 16)
    assert [live(got[1], b) for b in range(B)] == [live(want[1], b) for b in range(B)]
    assert len(live(want[1], 0)["key"]) == 12
    for name, x in want[2].items():
        np.testing.assert_allclose(got[2][name], x, rtol=0, atol=1e-6)
    # Saved as the devices hold it, read back on one.
    checkpointer = ocp.Checkpointer(ocp.StandardCheckpointHandler())
    checkpointer.save(path, args=ocp.args.StandardSave(got[1]))
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    like = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=one), want[1].abstract()
    )
    back = checkpointer.restore(path, args=ocp.args.StandardRestore(like))
    assert jax.tree.structure(back) == jax.tree.structure(want[1])
    assert [live(back, b) for b in range(B)] == [live(want[1], b) for b in range(B)]


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
