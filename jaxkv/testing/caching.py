# SPDX-License-Identifier: Apache-2.0
"""What a cache must not change: however tokens arrive, the result is that of one pass."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.cache import reading
from jaxkv.cache.codecs import Raw
from jaxkv.core.numerics import Numerics
from jaxkv.testing.suite import Suite, call, cast, feed, poisoned, quick_jit, written
from jaxkv.testing.tolerances import (
    agreement,
    assert_close,
    assert_trees_close,
    assert_trees_equal,
)


class Caching(Suite):
    """One shot, token by token and in chunks; full caches; rollback."""

    def test_num_07_cached_equals_uncached(self, attn: Any) -> None:
        x = self.tokens()
        want, none = call(attn, x)
        assert none is None
        for widths in ([5, 1, 1, 1], [1] * 8, [4, 4], [1, 5, 1, 1]):
            got, cache = feed(attn, x, self.cache(attn), widths)
            assert_close(got, want, agreement("float32"), f"chunks {widths}")
            assert cache.lengths.tolist() == [8, 8]
            assert not cache.overflowed.any() and not cache.refused.any()

    @pytest.mark.parametrize(
        "compute, stored",
        [("float32", "bfloat16"), ("bfloat16", "float32"), ("bfloat16", "bfloat16")],
    )
    def test_pairs_of_compute_and_cache_dtype(self, attn: Any, compute: str, stored: str) -> None:
        want, _ = call(attn, self.tokens())
        narrow = Numerics(dtype=jnp.dtype(compute))
        other = attn if compute == "float32" else self.rotated(numerics=narrow)
        cache = self.cache(other, codec=Raw(jnp.dtype(stored)))
        got, cache = feed(other, self.tokens(), cache, [4, 4])
        assert got.dtype == compute
        assert {x.dtype.name for x in cache.records.planes.values()} == {stored}
        assert_close(got, want, agreement(compute, stored))

    def test_rounded_records_do_not_depend_on_chunks(self, attn: Any) -> None:
        x = self.tokens()
        caches = [self.cache(attn, codec=Raw(jnp.bfloat16)) for _ in range(2)]
        want, _ = feed(attn, x, caches[0], [4, 4])
        assert_close(feed(attn, x, caches[1], [1, 1, 1, 1, 4])[0], want)

    def test_the_input_names_the_compute_dtype(self, attn: Any) -> None:
        x = self.tokens()
        want, _ = call(attn, x)
        got, _ = call(attn, cast(x, jnp.bfloat16))
        assert got.dtype == jnp.bfloat16
        assert_close(got, want, agreement("bfloat16"))

    def test_cac_11_a_prompt_in_one_call_or_in_five(self, attn: Any) -> None:
        x = self.tokens(length=5)
        once, whole = feed(attn, x, self.cache(attn), [5])
        singly, parts = feed(attn, x, self.cache(attn), [1] * 5)
        assert_close(singly, once)
        assert_trees_close(written(parts), written(whole))

    def test_chk_01_ragged_chunks_equal_one_pass(self, attn: Any) -> None:
        # 16 tokens as 7 + 9, 1 + 15, 8 + 8 and 5 + 5 + 6: one row each, so chunks are ragged.
        x = self.tokens(rows=4, length=16)
        want, full = call(attn, x, self.cache(attn, 4, capacity=16), lengths=np.full(4, 16))
        assert_close(want, call(attn, x)[0], what="one pass with a cache")
        cache, done = self.cache(attn, 4, capacity=16), np.zeros(4, np.int32)
        for counts in ([7, 1, 8, 5], [9, 15, 8, 5], [0, 0, 0, 6]):
            given = np.zeros_like(x)
            for b, count in enumerate(counts):
                given[b, :count] = x[b, done[b] : done[b] + count]
            got, cache = call(attn, given, cache, lengths=np.asarray(counts))
            for b, count in enumerate(counts):
                assert_close(got[b, :count], want[b, done[b] : done[b] + count], what=f"row {b}")
                assert not got[b, count:].any(), "padding must give 0"
            done += counts
        assert_trees_close(written(cache), written(full))

    def test_chk_06_an_empty_cache_keeps_the_causal_rule(self, attn: Any) -> None:
        x, other = self.tokens(length=5), self.tokens(length=5)
        other[:, -1] += 1.0
        y, first = call(attn, x, self.cache(attn))
        z, changed = call(attn, other, self.cache(attn))
        assert_trees_equal(y[:, :4], z[:, :4])
        assert_trees_equal(written(first, 4), written(changed, 4))
        # A second layer stores what it would see without a cache.
        _, second = call(attn, y, self.cache(attn))
        _, want = call(attn, call(attn, x)[0], self.cache(attn))
        assert_trees_close(second, want)

    def test_msk_01_one_token_steps_do_not_need_the_causal_rule(self, attn: Any) -> None:
        x = self.tokens(length=4)
        steps = [
            feed(module, x, self.cache(module), [1] * 4)[0]
            for module in (attn, self.rotated(causal=False))
        ]
        assert_trees_equal(*steps)

    def test_what_stands_in_unfilled_slots_changes_nothing(self, attn: Any) -> None:
        x = self.tokens()
        clean = feed(attn, x, self.cache(attn), [5, 1, 1, 1])
        dirty = feed(attn, x, poisoned(self.cache(attn)), [5, 1, 1, 1])
        assert_trees_equal(dirty[0], clean[0])
        assert_trees_equal(written(dirty[1]), written(clean[1]))

    def test_a_cache_of_several_blocks(self, attn: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("CPU_SLOTS", "DEVICE_SLOTS"):
            monkeypatch.setattr(reading, name, (4, 4))
        # Reads take slots 0 to 3, 4 to 7, and 6 to 9, of which they count 8 and 9.
        x = self.tokens(length=10)
        got, _ = feed(attn, x, poisoned(self.cache(attn, capacity=10)), [5, 5])
        assert_close(got, call(attn, x)[0])

    def test_lane_padding_changes_nothing(self, attn: Any) -> None:
        x = self.tokens()
        cache = poisoned(self.cache(attn, lanes=128))
        assert {p.shape[-1] for p in cache.records.planes.values()} == {128}
        assert cache.bytes_per_token == self.cache(attn).bytes_per_token
        want, _ = feed(attn, x, self.cache(attn), [4, 4])
        assert_close(feed(attn, x, cache, [4, 4])[0], want)

    def test_a_full_cache_raises_outside_jit(self, attn: Any) -> None:
        _, cache = feed(attn, self.tokens(), self.cache(attn), [4, 4])
        with pytest.raises(
            ValueError, match=r"8 8\] new tokens .* hold \[8 8\] of 12; rows \[0, 1"
        ):
            attn(self.tokens(), cache=cache)

    def test_a_full_cache_drops_inside_jit_and_keeps_what_it_holds(self, attn: Any) -> None:
        x = self.tokens()
        _, before = call(attn, x, self.cache(attn), lengths=np.array([8, 4]))
        _, after = call(attn, self.tokens(seed=1), before, lengths=np.array([8, 8]))
        assert after.lengths.tolist() == [12, 12]
        assert after.overflowed.tolist() == [True, False]
        old, new = written(before), written(after)
        for name in before.records.planes:
            assert_trees_equal(new[name][0, :8], old[name][0, :8])
            assert_trees_equal(new[name][1, :4], old[name][1, :4])
            assert new[name][:, 8:].any(), "tokens that fit must be stored"
        _, again = call(attn, x[:, :1], after)
        assert again.lengths.tolist() == [12, 12] and again.overflowed.all()
        assert_trees_equal(again.records.planes, after.records.planes)

    def test_rollback_leaves_no_trace_of_a_draft(self, attn: Any) -> None:
        x, draft, rest = self.tokens(), self.tokens(seed=1), self.tokens(seed=2)
        _, cache = call(attn, x, self.cache(attn), lengths=np.array([8, 6]))
        _, cache = feed(attn, draft[:, :3], cache, [1] * 3)
        rolled = quick_jit(lambda cache, count: cache.rollback(count))(cache, np.array([3, 1]))
        assert rolled.lengths.tolist() == [8, 8] and not rolled.refused.any()
        got, _ = feed(attn, rest[:, :2], rolled, [1, 1])
        kept = np.stack([x[0], np.concatenate([x[1, :6], draft[1, :2]])])
        want, _ = call(attn, np.concatenate([kept, rest[:, :2]], axis=1))
        assert_close(got, want[:, 8:])

    def test_zer_05_no_tokens_and_no_rows(self, attn: Any) -> None:
        for rows, length in ((2, 0), (0, 4)):
            x = self.tokens(rows, length)
            y, _ = call(attn, x)
            z, cache = call(attn, x, self.cache(attn, rows))
            assert y.shape == z.shape == x.shape
            assert cache.lengths.tolist() == [0] * rows
