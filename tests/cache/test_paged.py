# SPDX-License-Identifier: Apache-2.0
"""Pages: who holds them, what happens when there are none left, and faults seen elsewhere."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.cache import Index, Int8, KVSpec, LayerCache, Paged, Raw, create_layer
from jaxkv.testing.hlo import assert_in_place
from tests.cache.feeding import fed
from tests.cache.support import RULES, SPECS, draw_tokens, poisoned, scoring
from tests.cache.test_layout_index import Store
from tests.support.tolerances import assert_close

Z, ROWS, COLUMNS, POOL = 4, 6, 4, 9
LAYOUT = Paged(Z, pages=POOL)


class Model:
    """Rows of named tokens on a pool of pages, in plain Python."""

    def __init__(self) -> None:
        self.rows: list[list[int]] = [[] for _ in range(ROWS)]
        self.pages: list[list[int]] = [[] for _ in range(ROWS)]  # made-up page names
        self.named = 0

    def free(self) -> int:
        return POOL - len({p for row in self.pages for p in row})

    def new_page(self) -> int:
        self.named += 1
        return self.named

    def extend(self, row: int, tokens: list[int]) -> bool:
        """Appends; says whether something was dropped. Called in the order of the rows."""
        length = len(self.rows[row])
        fit = min(len(tokens), COLUMNS * Z - length)
        want = -(-(length + fit) // Z) - len(self.pages[row])
        granted = min(want, self.free())
        fit = min(fit, (len(self.pages[row]) + granted) * Z - length)
        self.pages[row] += [self.new_page() for _ in range(granted)]
        self.rows[row] += tokens[:fit]
        return fit < len(tokens)

    def shared(self, page: int) -> bool:
        return sum(page in row for row in self.pages) > 1


def checked(index: Index, store: Store, model: Model) -> None:
    """Holds an index and what is stored against the model."""
    table, references = np.asarray(index.state.table), np.asarray(index.state.references)
    assert index.lengths.tolist() == [len(row) for row in model.rows]
    for b, row in enumerate(model.rows):
        count = len(model.pages[b])
        assert count == -(-len(row) // Z)
        assert (table[b, :count] >= 0).all() and (table[b, count:] == -1).all()
        stored = store.names[table[b, :count]].ravel()[: len(row)]
        assert stored.tolist() == row, f"row {b}"
    counts = np.bincount(table[table >= 0], minlength=POOL)
    np.testing.assert_array_equal(references, counts)
    assert (references == 0).sum() == model.free()
    # Pages are shared exactly where the model shares them.
    for b in range(ROWS):
        for column, page in enumerate(model.pages[b]):
            assert (references[table[b, column]] > 1) == model.shared(page)


def test_random_verbs_on_a_small_pool() -> None:
    rng, model = np.random.default_rng(0), Model()
    index, store = LAYOUT.create(ROWS, COLUMNS * Z), Store(POOL, Z)
    plan = jax.jit(lambda i, c, length: LAYOUT.plan(i, Z, length, c), static_argnums=2)
    back = jax.jit(lambda i, c: LAYOUT.rollback(i, Z, c))
    gather, reset = jax.jit(LAYOUT.gather), jax.jit(LAYOUT.reset)
    fresh, seen = 0, {"dropped": 0, "refused": 0, "lost": 0, "copied": 0}
    for _ in range(400):
        action = rng.choice(["extend", "back", "reset", "gather"], p=[0.4, 0.15, 0.05, 0.4])
        if action == "extend":
            length = int(rng.choice([1, 3, 9]))
            count = rng.integers(0, length + 1, ROWS) * rng.integers(0, 2, ROWS)
            new = fresh + np.arange(ROWS * length).reshape(ROWS, length)
            fresh += ROWS * length
            before = index.overflowed
            made = plan(index, jnp.asarray(count, jnp.int32), length)
            store.write(made.jobs, new)
            index = made.after
            dropped = [model.extend(b, new[b, :n].tolist()) for b, n in enumerate(count)]
            np.testing.assert_array_equal(index.overflowed, np.asarray(before) | dropped)
            seen["dropped"] += sum(dropped)
        elif action == "back":
            count = rng.integers(0, 6, ROWS)
            index, moves = back(index, jnp.asarray(count, jnp.int32))
            store.copy(moves.source, moves.target)
            seen["copied"] += int((np.asarray(moves.target) >= 0).sum())
            seen["refused"] += int(index.refused.sum())
            # A refusal for want of a page is right only where one was needed.
            torn = []
            for b, n in enumerate(count):
                left = len(model.rows[b]) - n
                needs = left >= 0 and n and left % Z and model.shared(model.pages[b][left // Z])
                assert not (left >= 0 and not needs and index.refused[b])
                assert not (left < 0 and not index.refused[b])
                torn.append(bool(needs) and not index.refused[b])
            shared = [torn[b] and len(model.rows[b]) - n >= 0 for b, n in enumerate(count)]
            for b, n in enumerate(count):
                if index.refused[b]:
                    continue
                left = len(model.rows[b]) - n
                model.rows[b] = model.rows[b][:left]
                model.pages[b] = model.pages[b][: -(-left // Z)]
                if shared[b]:
                    model.pages[b][-1] = model.new_page()
            index = Index(
                index.lengths, index.overflowed, jnp.zeros_like(index.refused), index.state
            )
        elif action == "reset":
            chosen = rng.random(ROWS) < 0.3
            index = reset(index, jnp.asarray(chosen))
            for b in np.flatnonzero(chosen):
                model.rows[b], model.pages[b] = [], []
        else:
            rows = rng.integers(0, ROWS, ROWS)
            index, moves = gather(index, jnp.asarray(rows, jnp.int32))
            store.copy(moves.source, moves.target)
            seen["copied"] += int((np.asarray(moves.target) >= 0).sum())
            lost = np.asarray(index.refused)
            seen["lost"] += int(lost.sum())
            pages = [list(model.pages[r]) for r in rows]
            model.rows = [
                [] if gone else list(model.rows[r]) for r, gone in zip(rows, lost, strict=True)
            ]
            for b, r in enumerate(rows):
                partial = bool(len(model.rows[b]) % Z)
                if lost[b]:
                    pages[b] = []
                elif partial and b != (r if rows[r] == r else list(rows).index(r)):
                    pages[b][-1] = model.new_page()
            assert not lost[rows == np.arange(ROWS)].any(), "a row that stays is never lost"
            model.pages = pages
            index = Index(
                index.lengths, index.overflowed, jnp.zeros_like(index.refused), index.state
            )
        checked(index, store, model)
    assert min(seen.values()) >= 5, seen


def fresh(name: str, batch: int, capacity: int, layout: Any, codec: Any = None) -> LayerCache:
    codec = codec if codec is not None else Raw(jnp.float32)
    return jax.jit(
        lambda: poisoned(create_layer(SPECS[name][0], codec, batch, capacity, layout=layout))
    )()


def tokens(name: str, batch: int, length: int, seed: int = 0) -> Any:
    return draw_tokens(np.random.default_rng(seed), *SPECS[name], batch, length)


def cut(given: Any, rows: Any, columns: slice = slice(None)) -> Any:
    return [None if x is None else x[rows, columns] for x in given]


def test_pag_01_lengths_that_do_not_fill_a_page_equal_single_runs() -> None:
    equals_single_runs("gqa")


def test_nan_10_nan_in_the_tail_of_a_latent_page_changes_nothing() -> None:
    equals_single_runs("latent")


def equals_single_runs(name: str) -> None:
    # 13 tokens: 3 slots of the fourth page of 4 stay NaN.
    how, given, lengths = scoring(SPECS[name][0]), tokens(name, 3, 13), [3, 6, 13]
    out, lse, cache = fed(how, fresh(name, 3, 13, Paged(4)), given, counts=lengths, width=13)
    probe = tokens(name, 3, 1, seed=1)
    step, _, _ = fed(how, cache, probe)
    for b, n in enumerate(lengths):
        alone = fresh(name, 1, 14, None)
        want, want_lse, alone = fed(how, alone, cut(given, slice(b, b + 1), slice(0, n)), width=13)
        assert_close(out[b, :n], want[0], terms=13)
        assert_close(lse[b, :n], want_lse[0], terms=13)
        want_step, _, _ = fed(how, alone, cut(probe, slice(b, b + 1)))
        assert_close(step[b], want_step[0], terms=13)


def placed(cache: LayerCache, order: np.ndarray) -> LayerCache:
    """Puts page i of the pool at place `order[i]`, and the table with it."""
    back = np.argsort(order)
    planes = {n: x[back] for n, x in cache.records.planes.items()}
    table = cache.index.state.table
    moved = jnp.where(table >= 0, jnp.asarray(order, jnp.int32)[table], -1)
    state = dataclasses.replace(
        cache.index.state, table=moved, references=cache.index.state.references[back]
    )
    return dataclasses.replace(
        cache,
        index=dataclasses.replace(cache.index, state=state),
        records=dataclasses.replace(cache.records, planes=planes),
    )


def test_pag_03_the_table_is_used() -> None:
    how, given = scoring(SPECS["gqa"][0]), tokens("gqa", 1, 10)
    cache = fed(how, fresh("gqa", 1, 12, Paged(4, pages=8)), given, width=10)[2]
    # Pages 0, 1, 2 go to 5, 2, 7.
    moved = placed(cache, np.array([5, 2, 7, 0, 1, 3, 4, 6]))
    assert moved.index.state.table.tolist() == [[5, 2, 7]]
    contiguous = fed(how, fresh("gqa", 1, 12, None), given, width=10)[2]
    probe = tokens("gqa", 1, 1, seed=1)
    assert_close(fed(how, moved, probe)[0], fed(how, contiguous, probe)[0], terms=12)


def test_pag_05_placement_does_not_matter() -> None:
    how, given = scoring(SPECS["gqa"][0]), tokens("gqa", 2, 10)
    cache = fed(how, fresh("gqa", 2, 12, Paged(4)), given, width=10)[2]
    probe = tokens("gqa", 2, 1, seed=1)
    want = fed(how, cache, probe)[0]
    rng = np.random.default_rng(0)
    for _ in range(20):
        order = rng.permutation(6)
        np.testing.assert_array_equal(fed(how, placed(cache, order), probe)[0], want)


@pytest.mark.parametrize("name", ["gqa", "latent"])
def test_small_pages_are_joined_to_blocks_on_a_cpu(name: str) -> None:
    # Blocks of 8 pages of 4: the rows take three of them, one and a part, and nearly none.
    spec, counts = SPECS[name][0], np.array([72, 45, 3], np.int32)
    assert Paged(4).tile(4, 64) == 32 and Paged(16).tile(16, 512) == 128
    assert Paged(64).tile(64, 256) == 64 and Paged(4).tile(4, 4) == 4  # large ones, and devices
    how, given, probe = scoring(spec), tokens(name, 3, 72), tokens(name, 3, 2, seed=1)

    def loss(given: Any, cache: LayerCache) -> Any:
        def stored(cache: LayerCache) -> LayerCache:
            return cache.open(72, jnp.asarray(counts)).write(*given[1:]).close()

        out = stored(cache).extend(*probe, how)[0]
        return jnp.sum(jnp.sin(out)), out

    def run(layout: Any) -> Any:
        return jax.jit(jax.value_and_grad(loss, has_aux=True))(given, fresh(name, 3, 80, layout))

    (_, out), grads = run(Paged(4, pages=60))
    (_, want), want_grads = run(None)
    assert_close(out, want, terms=72)
    for got, wanted in zip(grads, want_grads, strict=True):
        assert (got is None) == (wanted is None)
        if got is not None:
            assert_close(got, wanted, terms=72)


def test_win_09_a_window_whose_edge_lies_inside_a_page() -> None:
    # Page 4, W = 3, 10 tokens: the next query sees 8, 9 and itself, and of the page 4 .. 7 nothing.
    how, given = scoring(SPECS["gqa"][0], RULES["window"]), tokens("gqa", 1, 10)
    probe, results = tokens("gqa", 1, 1, seed=1), []
    for changed in ((), (4, 5, 6, 7), (8,)):
        other = [np.array(x) for x in given]
        for x in other[1:]:
            x[:, list(changed)] += 1
        cache = fed(how, fresh("gqa", 1, 12, Paged(4)), other, width=10)[2]
        results.append(fed(how, cache, probe)[0])
    np.testing.assert_array_equal(results[0], results[1])
    assert np.abs(results[0] - results[2]).max() > 1e-3


def test_pag_06_pages_and_rows_are_used_again() -> None:
    # A, B, C take pages; A leaves, D comes, with rubbish in A's old pages.
    how, given = scoring(SPECS["gqa"][0]), tokens("gqa", 4, 8)
    cache = fed(how, fresh("gqa", 3, 12, Paged(4, pages=8)), cut(given, slice(3)), width=8)[2]
    theirs = cache.index.state.table[0, :2].tolist()
    freed = jax.jit(lambda c: poisoned(c.reset(jnp.array([True, False, False]))))(cache)
    new = cut(given, np.array([3, 1, 2]), slice(0, 5))
    cache = fed(how, freed, new, counts=[5, 0, 0])[2]
    assert cache.lengths.tolist() == [5, 8, 8] and not cache.overflowed.any()
    assert cache.index.state.table[0, :2].tolist() == theirs
    swapped = jax.jit(lambda c: c.reorder(jnp.array([0, 2, 1], jnp.int32)))(cache)
    probe = tokens("gqa", 3, 1, seed=1)
    step, _, done = fed(how, swapped, probe)
    assert done.lengths.tolist() == [6, 9, 9] and not done.overflowed.any()
    for row, (one, held) in enumerate([(3, 5), (2, 8), (1, 8)]):  # D, C, B
        before = cut(given, slice(one, one + 1), slice(0, held))
        alone = fed(how, fresh("gqa", 1, 12, None), before)[2]
        want = fed(how, alone, cut(probe, slice(row, row + 1)))[0]
        assert_close(step[row], want[0], terms=9)


def test_pag_09_what_a_rollback_leaves_behind_changes_nothing() -> None:
    how, given = scoring(SPECS["gqa"][0]), tokens("gqa", 1, 8)
    cache = fed(how, fresh("gqa", 1, 8, Paged(4)), given)[2]
    short = jax.jit(lambda c: c.rollback(3))(cache)
    probe = tokens("gqa", 1, 1, seed=1)
    want = fed(how, short, probe)[0]
    np.testing.assert_array_equal(fed(how, jax.jit(poisoned)(short), probe)[0], want)


def test_nan_11_a_reused_page_that_holds_infinity() -> None:
    how, given = scoring(SPECS["gqa"][0]), tokens("gqa", 1, 4)
    pool = fresh("gqa", 1, 4, Paged(4, pages=1))
    spoilt = jax.tree.map(
        lambda x: jnp.full_like(x, jnp.inf) if x.dtype == jnp.float32 else x, pool
    )
    one, probe = cut(given, slice(None), slice(0, 1)), cut(given, slice(None), slice(1, 2))
    want, got = (fed(how, fed(how, cache, one)[2], probe)[0] for cache in (pool, spoilt))
    assert np.isfinite(got).all()
    np.testing.assert_array_equal(got, want)


def test_pag_10_rows_of_nothing_read_nothing() -> None:
    how, given = scoring(SPECS["gqa"][0]), tokens("gqa", 3, 4)
    out, lse, _ = fed(how, fresh("gqa", 3, 8, Paged(4)), given, counts=[0, 4, 0])
    assert not out[[0, 2]].any() and np.isneginf(lse[[0, 2]]).all()


def test_pag_11_rows_of_nothing_write_nothing() -> None:
    how, given = scoring(SPECS["gqa"][0]), tokens("gqa", 3, 4)
    cache = fresh("gqa", 3, 8, Paged(4))
    _, _, after = fed(how, cache, given, counts=[0, 4, 0])
    table = np.asarray(after.index.state.table)
    assert (table[[0, 2]] == -1).all() and table[1, 0] >= 0
    for name, plane in after.records.planes.items():
        old = np.asarray(cache.records.planes[name])
        others = [p for p in range(6) if p != table[1, 0]]
        np.testing.assert_array_equal(np.asarray(plane)[others], old[others])


def test_pfx_10_no_page_leaks() -> None:
    how, given = scoring(SPECS["gqa"][0]), tokens("gqa", 1, 7)
    cache = fresh("gqa", 1, 32, Paged(4, pages=8))
    step, empty = jax.jit(lambda c: c.rollback(2)), jax.jit(lambda c: c.reset())
    for _ in range(10):
        cache = fed(how, cache, given)[2]
        cache = step(cache)
        assert int((cache.index.state.references > 0).sum()) == 2
        cache = empty(cache)
    assert not cache.index.state.references.any()


def test_out_of_pages_is_a_flag_and_never_an_overwrite() -> None:
    how, given = scoring(SPECS["gqa"][0]), tokens("gqa", 2, 8)
    cache = fresh("gqa", 2, 8, Paged(4, pages=3))
    after = fed(how, cache, given)[2]
    assert after.lengths.tolist() == [8, 4] and after.overflowed.tolist() == [False, True]
    with pytest.raises(ValueError, match=r"do not fit.*rows \[1\]"):
        cache.extend(*given, how)
    with pytest.raises(ValueError, match="no page is left"):
        fed(how, fresh("gqa", 2, 8, Paged(4, pages=2)), given, counts=[3, 3])[2].fork(
            jnp.array([0, 1, 1], jnp.int32)
        )


def test_an_older_flag_does_not_hide_a_lost_row() -> None:
    how, given = scoring(SPECS["gqa"][0]), tokens("gqa", 2, 8)
    cache = fed(how, fresh("gqa", 2, 8, Paged(4, pages=2)), given, counts=[3, 3])[2]
    flagged = jax.jit(lambda c: c.rollback(99))(cache)
    assert flagged.refused.all()
    with pytest.raises(ValueError, match="no page is left"):
        flagged.fork(jnp.array([0, 1, 1], jnp.int32))


_share = jax.jit(lambda cache, rows, count: cache.share(rows, count))


def lender() -> LayerCache:
    """Row 2 holds 6 tokens on the only two pages of 4."""
    how, given = scoring(SPECS["gqa"][0]), tokens("gqa", 3, 6)
    return fed(how, fresh("gqa", 3, 8, Paged(4, pages=2)), given, counts=[0, 0, 6])[2]


def test_sharing_whole_pages_needs_no_free_page() -> None:
    cache = lender()
    before = jax.tree.map(np.asarray, cache)
    shared = _share(cache, jnp.array([2, -1, -1]), jnp.array([4, 0, 0]))
    assert shared.lengths.tolist() == [4, 0, 6] and not shared.refused.any()
    np.testing.assert_array_equal(shared.index.state.table[2], before.index.state.table[2])
    assert shared.index.state.table[0, 0] == shared.index.state.table[2, 0]
    assert sorted(shared.index.state.references.tolist()) == [1, 2]
    # Two rows that take over a third one's pages: the first of them is no original any more.
    moved = _share(cache, jnp.array([2, 2, 0]), jnp.array([4, 6, 0]))
    assert moved.lengths.tolist() == [4, 6, 0] and not moved.refused.any()
    assert sorted(moved.index.state.references.tolist()) == [1, 2]


@pytest.mark.parametrize("count", [3, 6, 7, -1])
def test_a_share_that_cannot_be_leaves_an_empty_row(count: int) -> None:
    cache = lender()
    rows, counts = jnp.array([2, -1, -1]), jnp.array([count, 0, 0])
    shared = _share(cache, rows, counts)
    assert shared.lengths.tolist() == [0, 0, 6]
    assert shared.refused.tolist() == [True, False, False]
    assert shared.index.state.references.tolist() == [1, 1]
    with pytest.raises(ValueError, match=r"no page is left|share of the first .* hold \[0 0 6\]"):
        cache.share(rows, counts)


def test_a_shared_prefix_takes_its_pages_once() -> None:
    how, given = scoring(SPECS["gqa"][0]), tokens("gqa", 1, 10)
    cache = fresh("gqa", 3, 16, Paged(4))
    three = cut(given, np.array([0, 0, 0]))
    cache = fed(how, cache, three, counts=[10, 0, 0], width=10)[2]
    shared = jax.jit(lambda c: c.share(jnp.array([-1, 0, 0]), jnp.array([0, 6, 8])))(cache)
    assert shared.lengths.tolist() == [10, 6, 8] and not shared.refused.any()
    # Row 0 has three pages; row 1 shares one and has a copy of its second; row 2 shares two.
    assert sorted(shared.index.state.references.tolist(), reverse=True)[:5] == [3, 2, 1, 1, 0]
    rest = cut(three, slice(None), slice(6, 10))
    out, _, _ = fed(how, shared, rest, counts=[0, 4, 0])
    want = fed(how, fresh("gqa", 1, 16, None), given, width=10)[0]
    assert_close(out[1], want[0, 6:], terms=16)


def test_a_step_and_a_reorder_are_in_place() -> None:
    def make() -> LayerCache:
        return create_layer(KVSpec(8, 128, 128), Int8(), 8, 2048, layout=Paged(64, pages=300))

    cache = jax.eval_shape(make)
    how = scoring(KVSpec(8, 128, 128))

    def step(cache: LayerCache, q: Any, k: Any) -> Any:
        out, _, cache = cache.extend(q, k, k, how)
        return out, cache

    q = jax.ShapeDtypeStruct((8, 1, 32, 128), jnp.bfloat16)
    k = jax.ShapeDtypeStruct((8, 1, 8, 128), jnp.bfloat16)
    assert_in_place(jax.jit(step, donate_argnums=0).lower(cache, q, k).compile(), cache)
    rows = jax.ShapeDtypeStruct((8,), jnp.int32)
    beams = jax.jit(lambda c, r: c.reorder(r), donate_argnums=0)
    assert_in_place(beams.lower(cache, rows).compile(), cache)


@pytest.mark.full
def test_pag_12_offsets_beyond_32_bits() -> None:
    # 70,000 pages x 8 heads x 16 tokens x 256 channels are more than 2 ** 31.
    layout, spec = Paged(16, pages=70_000), KVSpec(8, 256, 256, value_offset=0)
    cache = create_layer(spec, Int8(), 1, 32, layout=layout)
    references = cache.index.state.references.at[: 70_000 - 2].set(1)
    state = dataclasses.replace(cache.index.state, references=references)
    cache = dataclasses.replace(cache, index=dataclasses.replace(cache.index, state=state))
    rng = np.random.default_rng(0)
    key = rng.normal(size=(1, 20, 8, 256)).astype(np.float32)
    how, step = scoring(spec), jax.jit(lambda c, q, k: c.extend(q, k, None, how), donate_argnums=0)
    _, _, cache = step(cache, key, key)
    assert cache.index.state.table.tolist() == [[69_998, 69_999]]
    for page in (69_998, 69_999):
        assert bool((cache.records.planes["key"][page] != 0).any())
    assert not bool((cache.records.planes["key"][:69_998] != 0).any())
