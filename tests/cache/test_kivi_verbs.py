# SPDX-License-Identifier: Apache-2.0
"""The verbs on caches of groups: what moves, what is refused, what conversions and meshes keep."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from jaxkv.cache import (
    Contiguous,
    LayerCache,
    Raw,
    create_layer,
    gather_layers,
)
from tests.cache.feeding import fed
from tests.cache.groups import (
    KIVI,
    LAYOUTS,
    WIDTH,
    B,
    S,
    coded,
    converted,
    empty,
    feed,
    flushed,
    given,
    live,
)
from tests.cache.meshes import mesh_of
from tests.cache.support import SPECS, scoring
from tests.support.tolerances import assert_close


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
    with pytest.raises(ValueError, match="rollback of .* tokens, .*: rows hold"):
        once.rollback(1)
    anew = cache.reset(jnp.array([True, False]))
    _, anew = feed(anew, "gqa", given(), [3])
    assert _rollback(anew, 2).refused.tolist() == [False, False]
    assert _rollback(anew, 2).lengths.tolist() == [1, 18]


_rollback = jax.jit(lambda cache, count: cache.rollback(count))
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
