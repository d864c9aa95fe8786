# SPDX-License-Identifier: Apache-2.0
"""What must not change a result: chunks, capacity, neighbours, rubbish, and number formats."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.cache import Raw, create_layer
from tests.cache.feeding import fed
from tests.cache.support import SPECS, History, bits, draw_tokens, fresh, poisoned, scoring
from tests.support.tolerances import assert_close, tolerance

FORMATS = ["float32", "bfloat16", "float16"]


@pytest.mark.parametrize("name", ["gqa", "latent"])
def test_cac_08_steps_and_chunks_equal_one_pass(name: str) -> None:
    spec, heads = SPECS[name]
    given = draw_tokens(np.random.default_rng(0), spec, heads, 2, 8)
    how = scoring(spec)
    want, want_lse, whole = fed(how, fresh(name), given)
    cache, outs, lses = fresh(name), [], []
    for first, last, width in ((0, 3, 8), (3, 5, 8), (5, 6, 1), (6, 7, 1), (7, 8, 1)):
        out, lse, cache = fed(how, cache, given, first, last, width=width)
        outs.append(out)
        lses.append(lse)
    assert cache.lengths.tolist() == [8, 8]
    for plane, x in cache.records.planes.items():
        np.testing.assert_array_equal(bits(x), bits(whole.records.planes[plane]))
    np.testing.assert_allclose(np.concatenate(outs, axis=1), want, atol=1e-5)
    np.testing.assert_allclose(np.concatenate(lses, axis=1), want_lse, atol=1e-5)


def test_nan_12_capacity_does_not_change_the_output() -> None:
    spec, heads = SPECS["latent"]
    given = draw_tokens(np.random.default_rng(0), spec, heads, 1, 104)
    texts = []
    for capacity in (104, 128, 2048):
        cache, parts = fresh("latent", 1, capacity), []
        for first, last in ((0, 101), (101, 102), (102, 104)):
            out, _, cache = fed(scoring(spec), cache, given, first, last, width=101)
            parts.append(out)
        texts.append(np.concatenate(parts, axis=1))
    for text in texts[1:]:
        np.testing.assert_allclose(text, texts[0], atol=1e-6)


@pytest.mark.parametrize("name", ["gqa", pytest.param("latent", marks=pytest.mark.full)])
def test_nan_09_rubbish_behind_the_length_reaches_nothing(name: str) -> None:
    spec, heads = SPECS[name]
    given = draw_tokens(np.random.default_rng(0), spec, heads, 2, 3)
    query, key, value = draw_tokens(np.random.default_rng(1), spec, heads, 2, 3)

    @jax.jit
    def run(fill: Any) -> Any:
        cache = create_layer(spec, Raw(jnp.float32), 2, 12)
        records = jax.tree.map(lambda x: jnp.full_like(x, fill), cache.records)
        opened = dataclasses.replace(cache, records=records).open(3, jnp.array([3, 1]))
        _, _, written = opened.extend(*given, scoring(spec))

        def loss(query: Any) -> Any:
            out, lse, _ = written.close().extend(query, key, value, scoring(spec))
            return jnp.sum(out) + jnp.sum(lse), (out, lse)

        return jax.value_and_grad(loss, has_aux=True)(query)

    clean = jax.tree.leaves(run(0.0))
    assert all(np.isfinite(x).all() for x in clean)
    for rubbish in (np.nan, np.inf, -np.inf):
        for a, b in zip(jax.tree.leaves(run(rubbish)), clean, strict=True):
            np.testing.assert_array_equal(a, b)


def test_row_08_permuting_rows_permutes_outputs() -> None:
    spec, heads = SPECS["gqa"]
    given = draw_tokens(np.random.default_rng(0), spec, heads, 2, 8)
    new = draw_tokens(np.random.default_rng(1), spec, heads, 2, 1)
    found = []
    for rows in ([0, 1], [1, 0]):
        counts = np.array([2, 8])[rows]
        _, _, cache = fed(scoring(spec), fresh("gqa"), [x[rows] for x in given], counts=counts)
        found.append(fed(scoring(spec), cache, [x[rows] for x in new])[:2])
    for a, b in zip(*found, strict=True):
        np.testing.assert_array_equal(a, b[::-1])


def test_zer_01_an_empty_row_beside_a_filled_one() -> None:
    spec, heads = SPECS["gqa"]
    query, key, value = draw_tokens(np.random.default_rng(0), spec, heads, 2, 3)
    _, _, cache = fed(scoring(spec), fresh("gqa"), (query, key, value), counts=[0, 3])
    order = jnp.array([[0, 1, 2], [3, 4, 5]], jnp.int32)

    @jax.jit
    def probe(query: Any) -> Any:
        def loss(query: Any) -> Any:
            out, lse = cache.attend(query, scoring(spec), q_order=order)
            return jnp.sum(out), (out, lse)

        return jax.value_and_grad(loss, has_aux=True)(query)

    (_, (out, lse)), grad = probe(query)
    assert not out[0].any() and np.isneginf(lse[0]).all() and not grad[0].any()
    assert np.isfinite(grad).all() and grad[1].any()
    row = History([list(zip(key[1], value[1], strict=True))])
    want = row.attend(0, spec, scoring(spec), query[1], 3)
    assert_close(out[1], want[0])
    assert_close(lse[1], want[1])


def test_chk_03_later_tokens_of_a_chunk_do_not_reach_earlier_ones() -> None:
    # A block of the read loop holds 4 slots here: the history ends beside and on its edge.
    spec, heads = SPECS["gqa"]
    rng = np.random.default_rng(0)
    prefix, chunk = (draw_tokens(rng, spec, heads, 2, n) for n in (9, 5))
    other = [np.concatenate([x[:, :1], rng.normal(size=x[:, 1:].shape)], axis=1) for x in chunk]
    other = [x.astype(np.float32) for x in other]
    for history in (7, 8, 9):
        cache = fresh("gqa", 2, 16)
        _, _, cache = fed(scoring(spec), cache, prefix, 0, history, width=9)
        out, lse, _ = fed(scoring(spec), cache, chunk, width=5)
        changed, changed_lse, _ = fed(scoring(spec), cache, other, width=5)
        np.testing.assert_array_equal(out[:, 0], changed[:, 0])
        np.testing.assert_array_equal(lse[:, 0], changed_lse[:, 0])
        assert np.abs(out - changed)[:, 1:].min() > 0


@pytest.mark.parametrize(
    ("compute", "stored"),
    [
        pytest.param(c, s, id=f"{c}-in-{s}", marks=[] if "float32" in (c, s) else pytest.mark.full)
        for c in FORMATS
        for s in FORMATS
    ],
)
def test_num_10_every_pair_of_compute_and_cache_dtype(compute: Any, stored: Any) -> None:
    compute, stored = jnp.dtype(compute), jnp.dtype(stored)
    spec, heads = SPECS["gqa"]
    drawn = draw_tokens(np.random.default_rng(0), spec, heads, 2, 6)
    query, key, value = given = [x.astype(compute) for x in drawn]
    cache, outs = jax.jit(poisoned)(create_layer(spec, Raw(stored), 2, 12)), []
    for first, last in ((0, 4), (4, 5), (5, 6)):
        out, _, cache = fed(scoring(spec), cache, given, first, last, width=4)
        assert {x.dtype for x in cache.records.planes.values()} == {stored}
        outs.append(out)
    got = np.concatenate(outs, axis=1)
    # What is stored is rounded to the cache's format, new tokens alike: float64 on that. The
    # new ones return to the compute format, which may round them once more.
    through = [x.astype(stored).astype(np.float32) for x in (key, value)]
    limit = tolerance(compute, terms=64) + 2 * float(jnp.finfo(compute).eps)
    for b in range(2):
        row = History([list(zip(*(x[b] for x in through), strict=True))])
        want, _ = row.attend(0, spec, scoring(spec), query[b].astype(np.float32), 0)
        assert np.abs(got[b] - want).max() <= limit * max(1.0, np.abs(want).max())
