# SPDX-License-Identifier: Apache-2.0
"""Prefix reuse: what is found, whose pages are shared, and logits against cold runs."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxkv
from jaxkv.serving import Match, PrefixIndex, adopt, prefixes

VOCAB, ROWS, Z, POOL, LIMIT = 13, 3, 4, 6, 16
A, B = [1, 2, 3, 4, 5, 6, 7, 8], [9, 10, 11, 12, 1, 3, 5, 7]


@functools.cache
def model() -> jaxkv.Decoder:
    factory = functools.partial(jaxkv.GroupedQueryAttention, num_heads=2, rotary=jaxkv.Rotary())
    return jaxkv.Decoder(VOCAB, 16, 2, factory, rngs=nnx.Rngs(5))


def fresh(pages: int = POOL, **how: Any) -> Any:
    return model().init_cache(ROWS, LIMIT, layout=jaxkv.Paged(Z, pages=pages), **how)


@jax.jit
def _step(decoder: jaxkv.Decoder, cache: Any, tokens: jax.Array, lengths: jax.Array) -> Any:
    return decoder(tokens, cache=cache, lengths=lengths)


@jax.jit
def _forward(decoder: jaxkv.Decoder, tokens: jax.Array) -> jax.Array:
    return decoder(tokens)[0]


def run(cache: Any, row: int, tokens: list[int]) -> tuple[np.ndarray, Any]:
    """Runs tokens of one row, all others stand by; gives their logits `[T, vocab]`."""
    given, lengths = np.zeros((ROWS, LIMIT), np.int32), np.zeros(ROWS, np.int32)
    given[row, : len(tokens)], lengths[row] = tokens, len(tokens)
    logits, cache = _step(model(), cache, jnp.asarray(given), jnp.asarray(lengths))
    assert not cache.overflowed.any() and not cache.refused.any()
    return np.asarray(logits)[row, : len(tokens)], cache


def cold(tokens: list[int]) -> np.ndarray:
    """Gives the logits `[T, vocab]` of a run without any cache."""
    given = np.zeros((1, LIMIT), np.int32)
    given[0, : len(tokens)] = tokens
    return np.asarray(_forward(model(), jnp.asarray(given)))[0, : len(tokens)]


def assert_same(got: np.ndarray, want: np.ndarray) -> None:
    """Checks logits to 1e-6, of the largest one if that is above 1."""
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-6 * max(1.0, abs(want).max()))


def served(cache: Any, index: PrefixIndex, row: int, tokens: list[int]) -> tuple[int, Any]:
    """Adopts, runs the rest and holds its logits against the cold run; gives the count."""
    cache, count = adopt(cache, index, row, tokens)
    assert cache.lengths[row] == count
    logits, cache = run(cache, row, tokens[count:])
    assert cache.lengths[row] == len(tokens)
    assert_same(logits, cold(tokens)[count:])
    check_pool(cache)
    return count, cache


def emptied(cache: Any, row: int) -> Any:
    return cache.reset(jnp.arange(ROWS) == row)


def free_pages(cache: Any) -> int:
    return int((cache.indices[0].state.references == 0).sum())


def check_pool(cache: Any) -> None:
    """Checks that references are what the table says, so held and free pages are the pool."""
    table, references = map(np.asarray, (cache.indices[0].state.table, cache.layouts[0].pages))
    held = np.unique(table[table >= 0])
    np.testing.assert_array_equal(
        cache.indices[0].state.references, np.bincount(table[table >= 0], minlength=references)
    )
    assert held.size + free_pages(cache) == references
    lengths = np.asarray(cache.lengths)
    np.testing.assert_array_equal((table >= 0).sum(axis=1), -(-lengths // Z))


@pytest.fixture
def colliding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefixes, "block_key", lambda before, block: 7)


def test_pfx_01_equal_hashes_of_unequal_prompts_share_nothing(colliding: None) -> None:
    index, cache = PrefixIndex(Z, ROWS), fresh()
    count, cache = served(cache, index, 0, A)
    index.store(0, A)
    # Nor does the second block alone, which both have in common.
    assert index.match(B) == index.match([*B[:4], *A[4:], 0]) == Match(-1, 0)
    count, cache = served(cache, index, 1, B)
    assert count == 0 and free_pages(cache) == POOL - 4
    index.store(1, B)
    # What is really the same is still found among the colliding ones.
    assert index.match([*B, 0]) == Match(1, 8) and index.match([*A, 0]) == Match(0, 8)
    assert index.match([*A[:4], *B[4:], 0]) == Match(0, 4)
    index.release(1)
    assert index.match([*A, 0]) == Match(0, 8) and index.match([*B, 0]) == Match(-1, 0)


@pytest.mark.parametrize("key", [prefixes.block_key, lambda before, block: 7])
def test_pfx_02_an_evicted_row_is_not_found_again(
    key: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefixes, "block_key", key)
    index, cache = PrefixIndex(Z, ROWS), fresh(pages=2)
    _, cache = served(cache, index, 0, A)
    index.store(0, A)
    with pytest.raises(ValueError, match=r"needs 2 pages, and 0 of 2 are free.*evict"):
        adopt(cache, index, 1, B)
    cache = emptied(cache, index.evict())
    assert index.stored == () and free_pages(cache) == 2
    for _ in range(2):
        count, cache = served(cache, index, 1, B)
        assert count == 0 and free_pages(cache) == 0
        index.store(1, B)
        assert index.match([*A, 0]) == Match(-1, 0) and index.match([*B, 0]) == Match(1, 8)
        cache = emptied(cache, index.evict())
        assert index.match([*B, 0]) == Match(-1, 0) and free_pages(cache) == 2


def test_pfx_04_a_page_that_is_not_full_is_not_shared() -> None:
    index, cache = PrefixIndex(Z, ROWS), fresh()
    _, cache = served(cache, index, 2, A[:7])
    index.store(2, A[:7])
    count, cache = served(cache, index, 0, [*A[:6], 12, 12])
    table = np.asarray(cache.indices[0].state.table)
    assert count == 4 and np.intersect1d(table[0, :2], table[2, :2]).tolist() == [table[2, 0]]
    assert np.sort(cache.indices[0].state.references)[::-1].tolist() == [2, 1, 1, 0, 0, 0]
    # Not even where the prompt goes on with the very tokens of that page.
    assert index.match([*A[:7], 12]) == Match(2, 4)


@pytest.mark.parametrize("row", [0, 1])
def test_pfx_05_a_prompt_that_is_stored_whole_still_runs_a_token(row: int) -> None:
    index, cache = PrefixIndex(Z, ROWS), fresh()
    first, cache = run(adopt(cache, index, 0, A)[0], 0, A)
    index.store(0, A)
    cache, count = adopt(cache, index, row, A)
    assert count == 4 and index.stored == ((0,) if row else ())
    second, cache = run(cache, row, A[count:])
    assert_same(second[-1], first[-1])
    assert_same(second, cold(A)[count:])
    assert cache.lengths[row] == 8 and free_pages(cache) == (3 if row else 4)


def test_pfx_06_prefill_goes_on_behind_the_adopted_tokens() -> None:
    index, cache = PrefixIndex(Z, ROWS), fresh()
    _, cache = served(cache, index, 0, A)
    index.store(0, A)
    prompt = [*A[:4], 11, 12]
    cache, count = adopt(cache, index, 1, prompt)
    logits, cache = run(cache, 1, prompt[count:])
    assert count == 4 and cache.lengths.tolist() == [8, 6, 0]
    want = cold(prompt)
    assert_same(logits, want[4:])
    # These are not the logits of the two tokens at positions 0 and 1.
    assert abs(cold(prompt[4:]) - want[4:]).max() > 1e-3


def test_pfx_08_a_second_release_raises_and_frees_no_page_twice() -> None:
    index, cache = PrefixIndex(Z, ROWS), fresh()
    _, cache = served(cache, index, 0, A)
    index.store(0, A)
    _, cache = served(cache, index, 1, A)  # shares a page, which must outlive row 0
    index.release(0)
    with pytest.raises(ValueError, match=r"row 0 is not stored"):
        index.release(0)
    for _ in range(2):
        cache = emptied(cache, 0)
        check_pool(cache)
        assert free_pages(cache) == POOL - 2
    _, cache = served(cache, index, 0, B)
    _, cache = served(cache, index, 2, B[:5])
    table = np.asarray(cache.indices[0].state.table)
    assert np.unique(table[:, :2]).size == 6 and free_pages(cache) == 0


def test_pfx_11_hashes_of_half_a_page_hit_whole_pages() -> None:
    index, prompt = PrefixIndex(8, ROWS, unit=4), list(range(12))
    index.store(0, prompt)
    assert index.match(prompt) == Match(0, 8)
    assert index.match([*prompt, 0, 0, 0, 0, 0]) == Match(0, 8)
    assert index.match([*prompt[:6], 99, *prompt[7:]]) == Match(-1, 0)


def test_a_row_is_adopted_over_its_own_old_tokens() -> None:
    index, cache = PrefixIndex(Z, ROWS), fresh(pages=2)
    _, cache = served(cache, index, 0, A)
    index.store(0, A)
    # Of its two pages the first stays, so that there is one for the rest.
    with pytest.raises(ValueError, match="12 tokens, 4 of them stored, needs 2 pages, and 1 of 2"):
        adopt(cache, index, 0, [*A[:4], *B])
    count, cache = served(cache, index, 0, [*A[:4], 12, 12])
    assert count == 4 and index.stored == ()
    index.store(0, [*A[:4], 12, 12])
    # Where nothing fits, the row begins empty, and older flags are gone.
    cache = jax.jit(lambda c: c.rollback(jnp.array([99, 0, 0])))(cache)
    assert cache.refused[0]
    count, cache = served(cache, index, 0, B)
    assert count == 0 and index.stored == () and cache.lengths.tolist() == [8, 0, 0]


def test_keys_tell_blocks_and_what_stands_before_them_apart() -> None:
    keys = [prefixes.block_key(before, block) for before in (0, 5) for block in (b"ab", b"ba")]
    assert len(set(keys)) == 4


def longest(stored: dict[int, list[int]], prompt: list[int]) -> tuple[set[int], int]:
    """Finds all rows with the longest whole pages in common, token by token."""

    def common(text: list[int]) -> int:
        pairs = zip(text, prompt[:-1], strict=False)
        same = next(
            (i for i, (a, b) in enumerate(pairs) if a != b), min(len(text), len(prompt) - 1)
        )
        return same // Z * Z

    counts = {row: common(text) for row, text in stored.items()}
    best = max(counts.values(), default=0)
    return {row for row, n in counts.items() if n == best > 0}, best


def test_requests_in_random_order_equal_cold_runs() -> None:
    rng, index, cache = np.random.default_rng(3), PrefixIndex(Z, ROWS, unit=2), fresh()
    stored: dict[int, list[int]] = {}  # the least recently used first
    hits = evicted = 0
    for _ in range(40):
        prompt = rng.integers(0, 2, 1 + rng.integers(12)).tolist()
        prompt[:8] = ([1] * 8 if rng.random() < 0.6 else prompt)[: min(8, len(prompt))]
        row = next((r for r in range(ROWS) if r not in stored), None)
        while row is None or -(-len(prompt) // Z) > free_pages(cache):
            row = index.evict()
            assert row == next(iter(stored)), "the least recently used goes first"
            stored.pop(row)
            cache, evicted = emptied(cache, row), evicted + 1
        rows, want = longest(stored, prompt)
        count, cache = served(cache, index, row, prompt)
        assert count == want
        if rows:
            used = next(r for r in reversed(stored) if r in rows)
            assert index.stored[-1] == used, "the most recently used of equals is taken"
            stored[used] = stored.pop(used)
            hits += 1
        index.store(row, prompt)
        stored[row] = prompt
        assert index.stored == tuple(stored)
    assert hits > 8 and evicted > 8
    while index.stored:
        cache = emptied(cache, index.evict())
    check_pool(cache)
    assert free_pages(cache) == POOL and not index._holders


def test_stored_tokens_are_a_copy() -> None:
    index, tokens = PrefixIndex(Z, ROWS), np.array(A)
    index.store(0, tokens)
    tokens[:] = 0
    assert index.match([*A, 0]) == Match(0, 8) and index.match([0] * 9) == Match(-1, 0)


def test_bad_input_says_what_fits() -> None:
    index = PrefixIndex(Z, ROWS)
    for wrong, word in [
        (lambda: PrefixIndex(8, 2, unit=3), "unit=3 for pages of 8"),
        (lambda: PrefixIndex(0, 2), "page=0"),
        (lambda: index.store(3, A), "row 3: want a row from 0 to 2"),
        (lambda: index.match([]), r"tokens float64\(0,\)"),
        (lambda: index.match([[1, 2]]), r"int64\(1, 2\): want int \[T\]"),  # type: ignore
        (index.evict, "none of the 3 rows is stored"),
    ]:
        with pytest.raises(ValueError, match=word):
            wrong()
    index.store(1, A)
    with pytest.raises(ValueError, match="row 1 is stored already"):
        index.store(1, B)


def test_caches_that_do_not_fit_are_refused() -> None:
    index = PrefixIndex(Z, ROWS)
    index.store(1, A)
    kivi = jaxkv.Kivi(bits=4, group=4)
    for cache, word in [
        (model().init_cache(ROWS, LIMIT), r"Contiguous.*want Paged\(4\)"),
        (model().init_cache(ROWS, LIMIT, layout=jaxkv.Paged(8)), r"want Paged\(4\)"),
        (model().init_cache(2, LIMIT, layout=jaxkv.Paged(4)), "2 rows, an index of 3"),
        (fresh(codec=kivi), "a codec that encodes each token"),
        (fresh(), "row 1 is stored with 4 tokens or more, but holds 0"),
    ]:
        with pytest.raises(ValueError, match=word):
            adopt(cache, index, 0, A)
        assert index.stored == (1,) and not cache.lengths.any()
    with pytest.raises(ValueError, match="outside jit"):
        jax.jit(lambda cache: adopt(cache, index, 0, A)[0])(fresh())
