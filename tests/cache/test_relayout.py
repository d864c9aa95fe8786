# SPDX-License-Identifier: Apache-2.0
"""Moving a cache to another layout: the same tokens, the same bits, the same next step."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.cache import (
    TOVA,
    Codec,
    Contiguous,
    Evicting,
    Float8,
    Int4,
    Int8,
    Kivi,
    LayerCache,
    Paged,
    Raw,
    Ring,
    create_layer,
    gather_layers,
)
from jaxkv.core.visibility import Visibility
from jaxkv.testing.suite import written
from jaxkv.testing.tolerances import assert_trees_equal
from tests.cache.feeding import fed
from tests.cache.groups import converted
from tests.cache.support import SPECS, draw_tokens, scoring
from tests.support.tolerances import assert_close

LAYOUTS = {"contiguous": Contiguous(), "paged": Paged(4), "ring": Ring(12)}
LENGTHS = [3, 9, 0]


KINDS: dict[str, Codec] = {
    "raw": Raw(jnp.float32),
    "int8": Int8(),
    "int4": Int4(),
    "float8": Float8(),
}


def filled(layout: str, codec: str = "raw", lanes: int = 1, capacity: int = 12) -> LayerCache:
    spec, heads = SPECS["gqa"]
    cache = create_layer(spec, KINDS[codec], 3, capacity, layout=LAYOUTS[layout], lanes=lanes)
    given = draw_tokens(np.random.default_rng(0), spec, heads, 3, 9)
    return fed(scoring(spec), cache, given, counts=LENGTHS, width=9)[2]


# By default two kinds of record move; all layouts meet in the walk below.
DEFAULT = {
    ("ring", "contiguous", "raw", 128),
    ("contiguous", "paged", "float8", 1),
}
MOVES = [
    pytest.param(*move, *how, marks=[] if (*move, *how) in DEFAULT else pytest.mark.full)
    for move, how in (
        itertools.product(
            itertools.permutations(LAYOUTS, 2),
            [("raw", 1), ("int8", 1), ("raw", 128), ("int4", 1), ("float8", 1)],
        )
    )
]


@pytest.mark.parametrize(("old", "new", "codec", "lanes"), MOVES)
def test_tokens_keep_their_bits_and_go_on(old: str, new: str, codec: str, lanes: int) -> None:
    before = filled(old, codec, lanes)
    moved = jax.jit(lambda c: c.convert(layout=LAYOUTS[new], capacity=12))(before)
    assert moved.layout == LAYOUTS[new] and not moved.refused.any()
    assert_trees_equal(written(moved), written(before))
    probe = draw_tokens(np.random.default_rng(1), *SPECS["gqa"], 3, 2)
    how = scoring(SPECS["gqa"][0])
    got, lse, after = fed(how, moved, probe)
    want, want_lse, _ = fed(how, before, probe)
    assert_close(got, want, terms=96)
    assert_close(lse, want_lse, terms=96)
    assert after.lengths.tolist() == [n + 2 for n in LENGTHS]
    # There and back, the arrays are those of a cache that was made so.
    back = moved.convert(layout=LAYOUTS[old], capacity=12)
    assert jax.tree.map(jnp.shape, back) == jax.tree.map(jnp.shape, before)
    assert_trees_equal(written(back), written(before))


WALK = [Paged(4), Evicting(12), Ring(12), Paged(5), Evicting(12), Contiguous()]


def test_a_walk_over_layouts_loses_nothing() -> None:
    before = cache = filled("contiguous")
    for layout in WALK:
        cache = converted(cache, layout=layout, capacity=12)
        assert isinstance(cache.layout, type(layout)) and not cache.refused.any()
        assert_trees_equal(written(cache), written(before))


def test_a_layout_need_not_fit_the_codec_that_a_cache_leaves() -> None:
    spec, heads = SPECS["gqa"]
    given = draw_tokens(np.random.default_rng(0), spec, heads, 3, 9)
    old, new = (Kivi(4, group=group, dtype=jnp.float32) for group in (2, 3))
    before = fed(scoring(spec), create_layer(spec, old, 3, 12), given, counts=LENGTHS, width=9)[2]
    moved = converted(before, layout=Paged(3), codec=new, capacity=12)
    plain = converted(converted(before, codec=Raw(jnp.float32)), layout=Paged(3), capacity=12)
    assert_trees_equal(moved, converted(plain, codec=new))
    assert moved.lengths.tolist() == LENGTHS and moved.records.codec == new
    with pytest.raises(ValueError, match="a page is no whole number of groups of 2 tokens"):
        before.convert(layout=Paged(3), capacity=12)


@pytest.mark.parametrize(
    ("layout", "old"),
    [
        (layout, old) if i % 3 == j % 3 else pytest.param(layout, old, marks=pytest.mark.full)
        for (i, layout), (j, old) in itertools.product(enumerate(LAYOUTS), enumerate(KINDS))
    ],
)
def test_other_codecs_encode_what_was_stored(layout: str, old: str) -> None:
    before = filled(layout, old)
    spec = before.records.spec
    want = before.records.codec.decode(spec, before.records.planes)
    there = np.asarray(before.layout.places(before.index, before.records.slots)[2]) >= 0
    for new, codec in KINDS.items():
        moved = jax.jit(lambda c, codec=codec: c.convert(codec=codec))(before)
        assert moved.records.codec == codec and moved.lengths.tolist() == LENGTHS
        got = moved.records.codec.decode(spec, moved.records.planes)
        for one, other in zip(got, codec.decode(spec, codec.encode(spec, *want)), strict=True):
            entry, slot, _ = before.layout.places(before.index, before.records.slots)
            at = np.asarray(entry)[there], np.asarray(slot)[there]
            # Programs may round a scale to the last bit in two ways.
            np.testing.assert_allclose(np.asarray(one)[at], np.asarray(other)[at], rtol=1e-6)
        if new == old:
            assert_trees_equal(written(moved), written(before))


def test_a_ring_keeps_the_last_tokens_of_a_longer_row() -> None:
    before = filled("contiguous")
    moved = before.convert(layout=Ring(4, pinned=1))
    kept, all_of_them = written(moved, 9), written(before, 9)
    np.testing.assert_array_equal(moved.lengths, LENGTHS)
    for name in before.records.planes:
        np.testing.assert_array_equal(
            kept[name][1, [0, 5, 6, 7, 8]], all_of_them[name][1, [0, 5, 6, 7, 8]]
        )
        assert not kept[name][1, 1:5].any()
        np.testing.assert_array_equal(kept[name][0, :3], all_of_them[name][0, :3])


def test_what_a_ring_has_forgotten_is_refused() -> None:
    ring = filled("contiguous").convert(layout=Ring(4))
    with pytest.raises(ValueError, match=r"Contiguous\(\) cannot keep the tokens.*rows \[1\]"):
        ring.convert(layout=Contiguous(), capacity=12)
    moved = jax.jit(lambda c: c.convert(layout=Contiguous(), capacity=12))(ring)
    assert moved.lengths.tolist() == [3, 0, 0] and moved.refused.tolist() == [False, True, False]
    # A flag from before does not hide it.
    flagged = jax.jit(lambda c: c.rollback(99))(ring)
    with pytest.raises(ValueError, match=r"cannot keep the tokens.*rows \[1\]"):
        flagged.convert(layout=Contiguous(), capacity=12)
    with pytest.raises(ValueError, match="has no capacity of its own: pass one for Contiguous"):
        ring.convert(layout=Contiguous())
    with pytest.raises(ValueError, match=r"cannot keep the tokens.*rows \[1\]"):
        filled("contiguous").convert(layout=Paged(4), capacity=8)
    with pytest.raises(ValueError, match=r"cannot keep the tokens.*rows \[1\]"):
        filled("contiguous").convert(layout=Paged(4, pages=3))


def test_what_a_ring_has_forgotten_counts_as_evicted() -> None:
    ring = filled("contiguous").convert(layout=Ring(4))
    moved = jax.jit(lambda c: c.convert(layout=Evicting(6), capacity=12))(ring)
    assert moved.lengths.tolist() == LENGTHS and not moved.refused.any()
    assert_trees_equal(written(moved), written(ring))
    probe = draw_tokens(np.random.default_rng(1), *SPECS["gqa"], 3, 1)
    how = scoring(SPECS["gqa"][0], Visibility(window=4))
    for one, other in zip(fed(how, moved, probe)[:2], fed(how, ring, probe)[:2], strict=True):
        assert_close(one, other, terms=96)
    # Row 1 holds 5 to 8: now any of them can go, and what is gone cannot be gone back to.
    keep = jnp.ones((3, 9), bool).at[1, 6].set(False)
    left = np.sort(moved.evict(keep).index.state.order[1, 0])
    assert left.tolist() == [-1, -1, -1, 5, 7, 8]
    back = jax.jit(lambda c: c.rollback(jnp.array([1, 1, 0], jnp.int32)))(moved)
    assert back.refused.tolist() == [False, True, False] and back.lengths.tolist() == [2, 9, 0]
    # Four do not fit three slots, unless a policy chooses.
    with pytest.raises(ValueError, match=r"Evicting.* cannot keep the tokens.*rows \[1\]"):
        ring.convert(layout=Evicting(3), capacity=12)
    chosen = ring.convert(layout=Evicting(3, TOVA()), capacity=12)
    assert np.sort(chosen.index.state.order[1, 0]).tolist() == [6, 7, 8]


def test_a_model_s_cache_moves_layer_by_layer() -> None:
    layer = filled("contiguous")
    model = gather_layers([layer, jax.tree.map(jnp.copy, layer)])
    moved = model.convert(layout=Paged(4), codec=Int8())
    assert moved.layouts == (Paged(4),) and moved.lengths.tolist() == LENGTHS
    want = layer.convert(codec=Int8()).convert(layout=Paged(4))
    for number in range(2):
        assert_trees_equal(written(moved.layer(number)), written(want))


CACHES = [("contiguous", "raw"), ("ring", "int8"), ("paged", "int8"), ("paged", "raw")]


@pytest.mark.parametrize(("layout", "codec"), CACHES)
def test_spc_06_reordering_moves_every_leaf(layout: str, codec: str) -> None:
    before = filled(layout, codec)
    after = jax.jit(lambda c: c.reorder(jnp.array([1, 1, 0], jnp.int32)))(before)
    old, new = written(before, 9), written(after, 9)
    assert set(old) == set(new) and {"lengths", "key", "value"} <= set(old)
    for name in old:
        np.testing.assert_array_equal(new[name], old[name][[1, 1, 0]])


@pytest.mark.parametrize(("layout", "codec"), CACHES[1:3])
def test_spc_05_nothing_outlives_a_rollback(layout: str, codec: str) -> None:
    # Take three back and give one: the same as if the three had never been.
    spec, heads = SPECS["gqa"]
    how, given = scoring(spec), draw_tokens(np.random.default_rng(0), spec, heads, 3, 9)
    probe = draw_tokens(np.random.default_rng(1), spec, heads, 3, 1)
    empty = filled(layout, codec).reset()
    long = fed(how, empty, given, counts=[9, 9, 9], width=9)[2].rollback(3)
    short = fed(how, empty, given, counts=[6, 6, 6], width=9)[2]
    out, lse, after = fed(how, long, probe)
    want, want_lse, fresh = fed(how, short, probe)
    np.testing.assert_array_equal(out, want)
    np.testing.assert_array_equal(lse, want_lse)
    assert_trees_equal(written(after), written(fresh))
