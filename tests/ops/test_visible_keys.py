# SPDX-License-Identifier: Apache-2.0
"""Which keys a query sees: causal alignment, windows, lengths, segments, masks."""

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from jaxkv.ops.api import attention
from tests.ops.suite import (
    IMPLEMENTATIONS,
    QUICK,
    bars_for,
    call,
    check,
    compare,
    normal,
    operands,
    outputs,
    outputs_and_gradients,
    seen_keys,
)
from tests.support import dense
from tests.support.tolerances import assert_close

RULES = {
    "causal": {"causal": True},
    "window-1": {"causal": True, "window": 1},
    "window-3": {"causal": True, "window": 3},
    "pinned": {"causal": True, "window": 2, "pinned": 2},
    "both-sides": {"window": (1, 2)},
    "both-sides-pinned": {"window": (1, 0), "pinned": 3},
    "both-sides-causal": {"causal": True, "window": (2, 3)},
}


PACKED = {"causal": True, "query_segments": np.array([[1, 1, 1, 2, 2, 2, 2]]), "jit": True}


class TestCausal:
    def test_msk_02_start_and_end_aligned(self, implementation):
        arrays = {
            "query": np.ones((1, 2, 1, 1), np.float32),
            "key": np.ones((1, 5, 1, 1), np.float32),
            "value": np.arange(5, dtype=np.float32).reshape(1, 5, 1, 1),
        }
        end, _ = outputs(implementation, arrays, jit=True, causal=True, offset=3)
        start, _ = outputs(implementation, arrays, jit=True, causal=True, offset=0)
        assert_close(end.ravel(), [1.5, 2.0])
        assert_close(start.ravel(), [0.0, 0.5])

    @pytest.mark.parametrize(
        "T", [1, 2, 5, 6, *(pytest.param(T, marks=pytest.mark.full) for T in (3, 4))]
    )
    def test_msk_04_unequal_lengths_at_every_offset(self, implementation, T):
        offsets = np.arange(-1, 7)  # one row each; the last ones stand beyond the keys
        options = {"causal": True, "offset": offsets}
        calls = {S: operands(B=8, T=T, S=S, N=2, K=1, H=2, V=2) for S in range(1, 7)}

        def every_size(calls):
            return {S: call(arrays, options, implementation) for S, arrays in calls.items()}

        program = jax.jit(every_size, compiler_options=QUICK)
        for S, (out, lse) in jax.device_get(program(calls)).items():
            compare(calls[S], (out, lse, {}), dense.attention(calls[S], options))

    @pytest.mark.parametrize(("T", "S"), [(1, 6), (6, 1)], ids=str)
    def test_msk_04_gradients_at_unequal_lengths(self, implementation, T, S):
        arrays = operands(B=3, T=T, S=S, N=2, K=1, H=2, V=2)
        check(implementation, arrays, jit=True, causal=True, offset=np.array([S - T, 1, -1]))

    @pytest.mark.parametrize("options", [{"causal": True}, {"window": (2, 2)}])
    @pytest.mark.parametrize(("T", "S"), [(2, 5), (5, 2), (1, 3)])
    def test_msk_04_unequal_lengths_without_an_offset_raise(self, T, S, options):
        arrays = operands(T=T, S=S)
        with pytest.raises(ValueError, match=f"{T} queries and {S} keys.*{S - T} aligns the ends"):
            attention(**arrays, **options)

    def test_msk_05_rows_filled_unequally(self, implementation):
        options = {"offset": np.array([3, 1]), "key_lengths": np.array([5, 3])}
        seen = seen_keys(implementation, T=2, S=8, B=2, causal=True, **options)
        assert seen == [
            [{0, 1, 2, 3}, {0, 1, 2, 3, 4}],
            [{0, 1}, {0, 1, 2}],
        ]


class TestWindow:
    @pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
    def test_rules_match_float64(self, implementation, rule):
        for offset in ([0, 2], [3, -1]):
            check(implementation, operands(), offset=np.array(offset), **rule)

    @pytest.mark.full
    @pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
    def test_rules_match_float64_where_all_rows_start_alike(self, implementation, rule):
        for offset in (2, -1):
            check(implementation, operands(), offset=offset, **rule)

    def test_win_01_a_window_counts_keys_and_the_query_itself(self, implementation):
        seen = seen_keys(implementation, T=8, S=8, causal=True, window=4)
        assert [len(keys) for keys in seen[0]] == [1, 2, 3, 4, 4, 4, 4, 4]

    def test_msk_09_left_window_without_causal_hides_the_future(self, implementation):
        rule = {"window": (2, 0), "causal": False, "jit": True}
        assert seen_keys(implementation, T=8, S=8, window=(2, 0))[0][3] == {1, 2, 3}

        arrays = operands(B=1, T=8, S=8, N=2, K=2, H=2, V=2)
        other = {name: x.copy() for name, x in arrays.items()}
        for name in ("key", "value"):
            other[name][:, 4:] = normal("other", *other[name][:, 4:].shape)
        bars = [bar.copy() for bar in bars_for(arrays)]
        for bar in bars:
            bar[:, 4:] = 0  # the loss reads rows 0 to 3 only
        one = outputs_and_gradients(implementation, arrays, tuple(bars), **rule)
        two = outputs_and_gradients(implementation, other, tuple(bars), **rule)
        np.testing.assert_array_equal(one[0][:, :4], two[0][:, :4])
        for name in arrays:
            np.testing.assert_array_equal(one[2][name][:, :4], two[2][name][:, :4])
        for name in ("key", "value"):
            assert not two[2][name][:, 4:].any()

    def test_pinned_tokens_stay_visible(self, implementation):
        seen = seen_keys(implementation, T=6, S=6, causal=True, window=2, pinned=1)
        assert seen == [[{0}, {0, 1}, {0, 1, 2}, {0, 2, 3}, {0, 3, 4}, {0, 4, 5}]]


class TestLengthsAndSegments:
    def test_msk_10_key_lengths_need_no_query_lengths(self, implementation):
        arrays = operands(B=3, S=8)
        options = {"key_lengths": np.array([2, 5, 8]), "jit": True}
        out, lse, grads = check(implementation, arrays, **options)
        for b, length in enumerate(options["key_lengths"]):
            for name in ("key", "value"):
                arrays[name][b, length:] = 1e4 * normal("rubbish", *arrays[name][b, length:].shape)
        again = outputs_and_gradients(implementation, arrays, bars_for(arrays), **options)
        np.testing.assert_array_equal(again[0], out)
        np.testing.assert_array_equal(again[1], lse)
        for name, grad in grads.items():
            np.testing.assert_array_equal(again[2][name], grad)

    def test_query_lengths_blind_the_rest_of_the_queries(self, implementation):
        lengths = np.array([0, 2])
        out, _, _ = check(implementation, operands(), query_lengths=lengths)
        assert not out[0].any() and not out[1, 2].any() and out[1, :2].all()

    def test_zer_03_rows_without_a_query(self, implementation):
        arrays = operands(B=4, T=1, S=5)
        k_lengths = np.array([0, 3, 0, 5])
        out, lse, _ = check(
            implementation,
            arrays,
            jit=True,
            query_lengths=np.array([0, 1, 0, 1]),
            key_lengths=k_lengths,
        )
        for b in (1, 3):  # the same as the row alone, cut to its keys
            row = {"query": arrays["query"][b : b + 1]}
            row |= {x: arrays[x][b : b + 1, : k_lengths[b]] for x in ("key", "value")}
            alone = dense.attention(row)
            assert_close(out[b], alone.out[0])
            assert_close(lse[b], alone.lse[0])
        assert not out[[0, 2]].any() and np.isneginf(lse[[0, 2]]).all()

    def test_keys_in_any_order_with_holes(self, implementation):
        orders = np.array([[4, -1, 0, 2, 1], [3, 2, 1, 0, -1]])
        check(
            implementation,
            operands(),
            causal=True,
            window=2,
            query_order=np.array([[0, 3, 4], [2, 1, 3]]),
            key_order=orders,
        )

    def test_segments_match_float64(self, implementation):
        q_segments = np.array([[1, 1, 2], [0, 3, 0]])
        k_segments = np.array([[1, 2, 2, 0, 1], [0, 0, 3, 1, 2]])
        options = {"query_segments": q_segments, "key_segments": k_segments, "offset": 2}
        check(implementation, operands(), causal=True, **options)

    def test_pak_01_packed_documents_equal_documents_alone(self, implementation):
        arrays = operands(B=1, T=7, S=7)
        out, lse, _ = check(implementation, arrays, **PACKED)
        for rows in (slice(0, 3), slice(3, 7)):
            alone = {name: x[:, rows] for name, x in arrays.items()}
            want = dense.attention(alone, {"causal": True})
            assert_close(out[:, rows], want.out)
            assert_close(lse[:, rows], want.lse)

    @pytest.mark.parametrize("padding", [0, 6])
    def test_pak_03_padding_sees_nothing_and_is_not_seen(self, implementation, padding):
        arrays = operands(B=1, T=7, S=7)
        options = PACKED | {"query_segments": np.array([[0, 1, 1, 0, 2, 2, 0]])}
        out, _, grads = check(implementation, arrays, **options)
        for x in arrays.values():
            x[:, padding] = 100.0
        other, _, again = check(implementation, arrays, **options)
        np.testing.assert_array_equal(other, out)
        for name, grad in grads.items():
            np.testing.assert_array_equal(again[name], grad)
            assert not grad[:, padding].any()

    def test_pak_05_documents_do_not_reach_each_other(self, implementation):
        arrays = operands(B=1, T=7, S=7)
        one = outputs_and_gradients(implementation, arrays, bars_for(arrays), **PACKED)
        for name, x in arrays.items():
            x[:, :3] = normal(f"other {name}", *x[:, :3].shape)
        two = outputs_and_gradients(implementation, arrays, bars_for(arrays), **PACKED)
        np.testing.assert_array_equal(one[0][:, 3:], two[0][:, 3:])
        assert (one[0][:, :3] != two[0][:, :3]).any()
        for name in arrays:
            np.testing.assert_array_equal(one[2][name][:, 3:], two[2][name][:, 3:])

    def test_zer_06_negative_lengths_raise_outside_jit_and_are_0_inside(self, implementation):
        arrays = operands()
        lengths = jnp.array([-1, 4])
        for name in ("query_lengths", "key_lengths"):
            with pytest.raises(ValueError, match=rf"{name} \[-1, 4\]: want 0 to"):
                attention(**arrays, **{name: lengths}, implementation=implementation)
        inside = outputs(implementation, arrays, jit=True, key_lengths=lengths)
        zero = outputs(implementation, arrays, jit=True, key_lengths=jnp.array([0, 4]))
        for got, want in zip(inside, zero, strict=True):
            np.testing.assert_array_equal(got, want)
        assert not inside[0][0].any()


class TestMask:
    def test_msk_08_true_keeps(self, implementation):
        arrays = operands()
        mask = np.array([False, False, True, False, False])
        out, _, _ = check(implementation, arrays, mask=mask)
        assert_close(out, np.repeat(arrays["value"][:, [2, 2, 2]], 2, axis=2))
        with pytest.raises(ValueError, match="mask is int32: want bool, True = keep"):
            attention(**arrays, mask=mask.astype(np.int32), implementation=implementation)

    @pytest.mark.parametrize(
        "shape",
        [(5,), (3, 5), (2, 1, 1, 5), (2, 1, 3, 5), (2, 4, 3, 5), (1, 4, 1, 5)],
        ids=str,
    )
    def test_msk_11_masks_of_every_shape(self, implementation, shape):
        mask = normal("mask", *shape) > -0.5
        check(implementation, operands(), mask=mask)

    @pytest.mark.parametrize(
        "shape", [(), (4,), (1,), (5, 3), (3, 1), (2, 3, 5), (2, 3, 3, 5), (2, 4, 3, 1)], ids=str
    )
    def test_masks_of_other_shapes_raise(self, shape):
        with pytest.raises(ValueError, match=r"mask \(.*does not fit: want \[S\], \[T, S\]"):
            attention(**operands(), mask=np.ones(shape, bool))


class TestEverythingTogether:
    @pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
    @pytest.mark.parametrize("rule", ["both-sides-pinned"])
    @hypothesis.given(data=st.data())
    @hypothesis.settings(max_examples=10)
    def test_any_mix_matches_float64(self, implementation, rule, data):
        def ints(low, high, *shape):
            size = int(np.prod(shape))
            values = data.draw(st.lists(st.integers(low, high), min_size=size, max_size=size))
            return np.array(values, np.int32).reshape(shape)

        arrays = operands(H=4)
        arrays["bias"] = normal("bias", 2, 1, 3, 5)
        arrays["sink_logits"] = normal("sink", 4)
        check(
            implementation,
            arrays,
            offset=ints(-2, 5, 2),
            query_segments=ints(0, 2, 2, 3),
            key_segments=ints(0, 2, 2, 5),
            key_lengths=ints(0, 5, 2),
            query_lengths=ints(0, 3, 2),
            mask=ints(0, 3, 2, 1, 3, 5) > 0,
            soft_cap=2.0,
            jit=True,
            **RULES[rule],
        )
