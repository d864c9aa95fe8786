# SPDX-License-Identifier: Apache-2.0
"""Random verbs on a cache, each step held against a list of tokens in float64."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterable
from typing import Any

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from jaxkv.cache import Codec, KVSpec, LayerCache, Scoring, create_layer
from tests.cache.support import (
    CODECS,
    LAYOUTS,
    RULES,
    SPECS,
    History,
    bits,
    draw_tokens,
    poisoned,
    scoring,
    values_of,
)
from tests.support.tolerances import assert_close

B, S = 3, 11
# A few tokens, and more than the cache has slots.
WIDTHS = (4, 13)
COUNTS = st.lists(st.integers(0, 4), min_size=B, max_size=B)
ROWS = st.lists(st.integers(0, B - 1), min_size=B, max_size=B)
SEEDS = st.integers(0, 2**16)


@dataclasses.dataclass(frozen=True)
class Setting:
    """One combination of record, layout, codec, rule, and whether mask and bias are given."""

    name: str
    layout: str
    codec: str
    rule: str
    masked: bool

    def __str__(self) -> str:
        return "-".join(str(x) for x in dataclasses.astuple(self))

    @property
    def spec(self) -> KVSpec:
        return SPECS[self.name][0]

    @property
    def heads(self) -> int:
        return SPECS[self.name][1]

    @property
    def how(self) -> Scoring:
        cap = 3.0 if self.masked else None
        return scoring(self.spec, RULES[self.rule], soft_cap=cap)

    @property
    def seen(self) -> Scoring:
        """The same, narrowed to what the layout keeps: what the history is held to."""
        rule = LAYOUTS[self.layout].layout.narrowed(RULES[self.rule])
        return dataclasses.replace(self.how, rule=rule)


# How far a number of size 1 to 4 is moved by each codec.
ROUNDING = {
    "float32": 0.0,
    "bfloat16": 0.01,
    "float16": 0.002,
    "int8": 0.02,
    "int4": 0.4,
    "float8": 0.3,
}
# (record, rule, whether there are a mask, a bias and a soft-cap too)
USUAL = [
    ("gqa", "causal", False),
    ("gqa", "window", True),
    ("latent", "causal", True),
    ("shared", "lookahead", False),
    ("middle", "causal", True),
]


def covering() -> list[Setting]:
    """Takes every layout, with coded records and some exact, every codec, record and rule."""
    settings = [Setting(name, "contiguous", "float32", rule, m) for name, rule, m in USUAL[:3]]
    pairs = [(layout, "int8") for layout in LAYOUTS]
    pairs += [
        ("contiguous", "int4"),
        ("ring", "float8"),
        ("paged", "float32"),
        ("paged", "bfloat16"),
    ]
    pairs += [("evicting", "float16")]
    for number, (layout, codec) in enumerate(pairs):
        name, rule, masked = USUAL[(number + 3) % len(USUAL)]
        settings.append(Setting(name, layout, codec, rule, masked))
    return settings


def settings_of(kinds: Iterable[tuple[str, str, bool]]) -> list[Setting]:
    return [
        Setting(name, layout, codec, rule, masked)
        for layout, codec in itertools.product(LAYOUTS, CODECS)
        for name, rule, masked in kinds
    ]


@functools.partial(jax.jit, static_argnums=0)
def _extend(setting: Setting, cache: LayerCache, arrays: dict[str, Any], counts: jax.Array) -> Any:
    query = arrays["query"]
    opened = cache.open(query.shape[1], counts)
    masks = {name: arrays[name] for name in ("mask", "bias") if name in arrays}
    out, lse, written = opened.extend(query, arrays["key"], arrays["value"], setting.how, **masks)
    return out, lse, written.close()


@functools.partial(jax.jit, static_argnums=0)
def _probe(setting: Setting, cache: LayerCache, query: jax.Array) -> Any:
    order = cache.lengths[:, None] + jnp.arange(query.shape[1], dtype=jnp.int32)[None]
    return cache.attend(query, setting.how, q_order=order)


@jax.jit
def _decoded(cache: LayerCache) -> Any:
    key, value = cache.records.codec.decode(cache.records.spec, cache.records.planes)
    return key, value, _places(cache)


@jax.jit
def _places(cache: LayerCache) -> Any:
    return cache.layout.places(cache.index, cache.records.slots)


def contents(cache: LayerCache, row: int) -> dict[int, dict[str, bytes]]:
    """Gives the bytes of a row's tokens, by their order, whatever the layout."""
    entries, slots, orders = (np.asarray(x)[row] for x in _places(cache))
    planes = {n: bits(x) for n, x in cache.records.planes.items()}
    return {
        int(k): {n: plane[e, :, s].tobytes() for n, plane in planes.items()}
        for e, s, k in zip(entries, slots, orders, strict=True)
        if k >= 0
    }


@functools.partial(jax.jit, static_argnums=(0, 1))
def _coded(codec: Codec, spec: KVSpec, key: jax.Array, value: jax.Array | None) -> Any:
    return codec.decode(spec, codec.encode(spec, key, value))


_poisoned = jax.jit(poisoned)
_rollback = jax.jit(lambda cache, count: cache.rollback(count))
_reset = jax.jit(lambda cache, rows: cache.reset(rows))
_reorder = jax.jit(lambda cache, rows: cache.reorder(rows))
_fork = jax.jit(lambda cache, rows: cache.fork(rows))
_widened = jax.jit(lambda cache: cache.convert(lanes=128))
_narrowed = jax.jit(lambda cache: cache.convert(lanes=1))


class Verbs(RuleBasedStateMachine):
    """Applies each verb to a cache and to a history; `setting` is given by the test."""

    setting: Setting

    def __init__(self) -> None:
        super().__init__()
        s = self.setting
        self.kept = LAYOUTS[s.layout]
        self.cache = _poisoned(create_layer(s.spec, CODECS[s.codec], B, S, layout=self.kept.layout))
        self.history = History([[] for _ in range(B)])
        self.overflowed, self.refused = [False] * B, [False] * B
        self.high = [0] * B

    @rule(
        counts=st.lists(st.integers(0, WIDTHS[0]), min_size=B, max_size=B),
        seed=SEEDS,
    )
    def extend(self, counts: list[int], seed: int) -> None:
        self._extend(WIDTHS[0], counts, seed)

    @rule(counts=st.lists(st.integers(0, WIDTHS[1]), min_size=B, max_size=B), seed=SEEDS)
    def extend_by_many(self, counts: list[int], seed: int) -> None:
        self._extend(WIDTHS[1], counts, seed)

    def _extend(self, width: int, counts: list[int], seed: int) -> None:
        s, rng, held = self.setting, np.random.default_rng(seed), self._held()
        query, key, value = draw_tokens(rng, s.spec, s.heads, B, width)
        arrays: dict[str, Any] = {"query": query, "key": key, "value": value}
        width_of_masks = self.kept.layout.mask_width(self.cache.index, self.cache.records.slots)
        if s.masked and width_of_masks is not None:
            keys = width_of_masks
            arrays["mask"] = rng.random((B, 1, width, keys)) < 0.8
            arrays["bias"] = rng.normal(size=(1, s.heads, width, keys)).astype(np.float32)
        before = self.cache
        out, lse, self.cache = _extend(s, before, arrays, np.asarray(counts, np.int32))
        out, lse = np.asarray(out), np.asarray(lse)

        key, value = self._through_codec(key, value)
        fits = [min(n, self.kept.room(held[b], S)) for b, n in enumerate(counts)]
        for b, (n, fit) in enumerate(zip(counts, fits, strict=True)):
            new = list(zip(key[b, :n], value[b, :n], strict=True))
            everything = History([self.history.rows[b] + new])
            # What does not fit is given no meaning: only tokens that stay are compared.
            masks = {
                name: np.broadcast_to(arrays[name], (B, s.heads, width, width_of_masks))[b, :, :fit]
                for name in ("mask", "bias")
                if name in arrays
            }
            if "mask" in masks:
                everything.rows[0] = everything.rows[0][:width_of_masks]
            want = everything.attend(0, s.spec, s.seen, query[b, :fit], held[b], **masks)
            self._compare(out[b, :fit], lse[b, :fit], want, f"row {b} of extend")
            assert not out[b, n:].any(), "padding gives 0"
            assert np.isneginf(lse[b, n:]).all(), "padding has no normaliser"
            self.history.rows[b] += new[:fit]
            self.overflowed[b] |= fit < n
            self.high[b] = max(self.high[b], held[b] + fit)
        self._nothing_else_moved(before, held, fits)

    @rule(counts=COUNTS)
    def rollback(self, counts: list[int]) -> None:
        held, before = self._held(), self.cache
        self.cache = _rollback(before, np.asarray(counts, np.int32))
        for b, n in enumerate(counts):
            if self.kept.refuses(held[b], n, self.high[b]):
                self.refused[b] = True
                continue
            left = held[b] - n
            self.history.rows[b] = self.history.rows[b][:left]
            if n and self.kept.lowers(left):
                self.high[b] = left
        self._tokens_are_those_of(before)

    @rule(rows=ROWS)
    def reorder(self, rows: list[int]) -> None:
        before, self.cache = self.cache, _reorder(self.cache, np.asarray(rows, np.int32))
        self.history = History([list(self.history.rows[r]) for r in rows])
        self.overflowed = [self.overflowed[r] for r in rows]
        self.refused = [self.refused[r] for r in rows]
        self.high = [self.high[r] for r in rows]
        self._rows_are_those_of(self.cache, before, rows)

    @rule(rows=st.lists(st.integers(0, B - 1), min_size=5, max_size=5))
    def fork(self, rows: list[int]) -> None:
        before, kept = self.cache, self.cache
        self.cache = _fork(before, np.asarray(rows, np.int32))
        assert self.cache.lengths.tolist() == [self._held()[r] for r in rows]
        assert self.cache.overflowed.tolist() == [self.overflowed[r] for r in rows]
        assert self.cache.refused.tolist() == [self.refused[r] for r in rows]
        self._rows_are_those_of(self.cache, before, rows)
        self.cache = kept
        self._rows_are_those_of(kept, before, list(range(B)))

    @rule(rows=st.lists(st.booleans(), min_size=B, max_size=B))
    def reset(self, rows: list[bool]) -> None:
        before, self.cache = self.cache, _reset(self.cache, np.asarray(rows))
        for b, emptied in enumerate(rows):
            if emptied:
                self.history.rows[b] = []
                self.overflowed[b] = self.refused[b] = False
                self.high[b] = 0
        self._tokens_are_those_of(before)

    @rule()
    def convert_lanes_there_and_back(self) -> None:
        before = self.cache
        wide = _widened(before)
        for name, plane in wide.records.planes.items():
            narrow = before.records.planes[name]
            assert plane.shape[:2] == narrow.shape[:2]
            slots = narrow.shape[2]
            assert not np.asarray(plane[:, :, slots:]).any(), "slot padding is 0"
            if narrow.ndim > 3:  # scales have no channels
                assert plane.shape[2] % 8 == 0 and plane.shape[3] % 128 == 0
                packed = plane.dtype != narrow.dtype  # two channels to a byte
                width = narrow.shape[3] * (2 if packed else 1)
                assert not np.asarray(plane[..., width:]).any(), "lane padding is 0"
        self.cache = _narrowed(wide)
        self._rows_are_those_of(self.cache, before, list(range(B)))

    @rule()
    def poison(self) -> None:
        self.cache = _poisoned(self.cache)

    @rule(seed=SEEDS)
    def attend(self, seed: int) -> None:
        s, rng = self.setting, np.random.default_rng(seed)
        query, _, _ = draw_tokens(rng, s.spec, s.heads, B, 2)
        out, lse = map(np.asarray, _probe(s, self.cache, query))
        for b, held in enumerate(self._held()):
            want = self.history.attend(b, s.spec, s.seen, query[b], held)
            self._compare(out[b], lse[b], want, f"row {b} of attend")

    @invariant()
    def counts_and_contents_are_those_of_the_history(self) -> None:
        assert self.cache.lengths.tolist() == self._held()
        assert self.cache.overflowed.tolist() == self.overflowed
        assert self.cache.refused.tolist() == self.refused
        key, value, places = jax.tree.map(np.asarray, _decoded(self.cache))
        for b, held in enumerate(self._held()):
            want_key, want_value = self.history.arrays(b, self.setting.spec)
            entry, slot, order = (x[b] for x in places)
            there = order >= 0
            assert sorted(order[there]) == self.kept.orders(held, self.high[b])
            entry, slot, order = entry[there], slot[there], order[there]
            np.testing.assert_array_equal(key[entry, slot], want_key[0][order])
            np.testing.assert_array_equal(value[entry, slot], want_value[0][order])

    def _held(self) -> list[int]:
        return [len(row) for row in self.history.rows]

    def _compare(self, out: Any, lse: Any, want: tuple[np.ndarray, np.ndarray], what: str) -> None:
        terms = S * self.setting.spec.query_width
        assert_close(out, want[0], terms=terms, what=f"out, {what}")
        assert_close(lse, want[1], terms=terms, what=f"lse, {what}")

    def _through_codec(self, key: np.ndarray, value: np.ndarray | None) -> tuple[Any, Any]:
        spec, codec = self.setting.spec, CODECS[self.setting.codec]
        stored_key, stored_value = map(np.asarray, _coded(codec, spec, key, value))
        moved = ROUNDING[self.setting.codec]
        np.testing.assert_allclose(stored_key, key, rtol=0, atol=moved)
        np.testing.assert_allclose(stored_value, values_of(spec, key, value), rtol=0, atol=moved)
        return stored_key, stored_value

    def _nothing_else_moved(self, before: LayerCache, held: list[int], fits: list[int]) -> None:
        entries, slots, orders = map(np.asarray, _places(self.cache))
        for name, plane in self.cache.records.planes.items():
            old, new = bits(before.records.planes[name]), bits(plane)
            written = np.zeros((new.shape[0], new.shape[2]), bool)
            for b, start in enumerate(held):
                fresh = orders[b] >= start
                written[entries[b][fresh], slots[b][fresh]] = True
            still = np.moveaxis(new, 2, 1)[~written]
            np.testing.assert_array_equal(still, np.moveaxis(old, 2, 1)[~written])

    def _tokens_are_those_of(self, before: LayerCache) -> None:
        """The tokens that are left are the ones from before, bit by bit."""
        for b in range(B):
            had = contents(before, b)
            assert all(had[k] == token for k, token in contents(self.cache, b).items())

    def _rows_are_those_of(self, after: LayerCache, before: LayerCache, rows: list[int]) -> None:
        for b, r in enumerate(rows):
            assert contents(after, b) == contents(before, r)


def run(setting: Setting, examples: int) -> None:
    machine = type("VerbsOf", (Verbs,), {"setting": setting})
    run_state_machine_as_test(
        machine,
        settings=settings(max_examples=examples, stateful_step_count=12, print_blob=False),
    )


@pytest.mark.parametrize("setting", covering(), ids=str)
def test_random_verbs_equal_a_history(setting: Setting) -> None:
    run(setting, examples=6)


@pytest.mark.full
@pytest.mark.parametrize(
    "setting", settings_of(itertools.product(SPECS, RULES, [False, True])), ids=str
)
def test_many_random_verbs_equal_a_history(setting: Setting) -> None:
    run(setting, examples=40)
