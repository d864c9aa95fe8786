# SPDX-License-Identifier: Apache-2.0
"""What happens to scores: heads, scale, soft-cap, bias, sinks."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.ops.api import attention
from tests.ops.suite import check, normal, operands, outputs
from tests.support.tolerances import assert_close


def lone_score(implementation, score, **options):
    """Finds what becomes of one query's score with its only key: the log-sum-exp is the score."""
    one = np.ones((1, 1, 1, 1), np.float32)
    arrays = {"query": score * one, "key": one, "value": one}
    return outputs(implementation, arrays, **options)[1].item()


class TestHeads:
    def test_gqa_01_query_heads_repeat_kv_heads(self, implementation):
        arrays = operands()
        arrays["value"][:] = np.arange(2)[:, None]
        out, _, _ = check(implementation, arrays)
        assert_close(out[..., 0], np.broadcast_to([0, 0, 1, 1], out.shape[:3]))

    # The value may be wider, narrower, or one channel; so may the key.
    @pytest.mark.parametrize(("N", "K", "H", "V"), [(4, 1, 7, 1), (4, 4, 1, 4), (6, 2, 4, 5)])
    def test_any_grouping_and_widths_match_float64(self, implementation, N, K, H, V):
        arrays = operands(N=N, K=K, H=H, V=V)
        out, _, _ = check(implementation, arrays, jit=True, causal=True, offset=2)
        assert out.shape == (2, 3, N, V)

    @pytest.mark.parametrize(("N", "K"), [(6, 4), (4, 0), (2, 4)])
    def test_gqa_03_heads_that_do_not_divide_raise(self, implementation, N, K):
        with pytest.raises(ValueError, match=f"{N} query heads are no multiple of {K} KV heads"):
            attention(**operands(N=N, K=K), implementation=implementation)


class TestScale:
    @pytest.mark.parametrize("scale", [0.5, 1.0, -2.0])
    def test_sco_07_a_given_scale_is_used_once(self, implementation, scale):
        assert lone_score(implementation, 3.0, scale=scale) == 3.0 * scale
        check(implementation, operands(), scale=scale)
        check(implementation, operands(), scale=scale, soft_cap=2.0)

    def test_sco_06_a_scale_that_is_not_the_width_s(self, implementation):
        arrays = {
            "query": np.zeros((1, 1, 1, 128), np.float32),
            "key": np.zeros((1, 1, 1, 128), np.float32),
            "value": np.ones((1, 1, 1, 1), np.float32),
        }
        arrays["query"][..., 0] = arrays["key"][..., 0] = 1
        default = outputs(implementation, arrays, jit=True)[1].item()
        given = outputs(implementation, arrays, jit=True, scale=168**-0.5)[1].item()
        assert default == pytest.approx(0.0883883, abs=1e-7)
        assert given == pytest.approx(0.0771517, abs=1e-7)


class TestSoftCap:
    def test_sco_01_soft_cap_is_applied(self, implementation):
        assert lone_score(implementation, 10.0, soft_cap=5.0) == pytest.approx(4.82014, abs=1e-5)
        assert lone_score(implementation, 100.0, soft_cap=50.0) == pytest.approx(48.2014, abs=1e-4)
        capped, _, _ = check(implementation, operands(times=4.0), soft_cap=5.0)
        plain, _, _ = check(implementation, operands(times=4.0), soft_cap=0.0)
        assert np.abs(capped - plain).max() > 0.1

    def test_sco_02_soft_cap_comes_before_mask_and_bias(self, implementation):
        arrays = operands(times=4.0)
        mask = np.array([True, False, True, True, False])
        check(implementation, arrays, soft_cap=5.0, mask=mask)
        arrays["key"][:, [1, 4]] *= 1e4
        arrays["value"][:, [1, 4]] = 1e30  # any weight above 0 would show
        arrays["bias"] = normal("bias", 3, 5, times=9.0)
        out, _, _ = check(implementation, arrays, gradients=False, soft_cap=5.0, mask=mask)
        assert np.abs(out).max() < 100


class TestBias:
    @pytest.mark.parametrize(
        "shape",
        [(5,), (3, 5), (1, 1, 3, 5), (1, 4, 3, 5), (2, 1, 1, 5), (2, 4, 3, 5)],
        ids=str,
    )
    def test_bias_of_every_shape(self, implementation, shape):
        arrays = operands() | {"bias": normal("bias", *shape)}
        _, _, grads = check(implementation, arrays, causal=True, offset=2)
        assert grads["bias"].shape == shape and grads["bias"].any()

    def test_bias_does_not_make_a_hidden_key_visible(self, implementation):
        arrays = operands() | {"bias": normal("bias", 3, 5, times=50.0)}
        check(implementation, arrays, key_lengths=np.array([0, 2]))

    @pytest.mark.parametrize("bias", [np.ones(5, bool), np.ones(5, np.int32)])
    def test_bias_that_is_no_float_raises(self, bias):
        with pytest.raises(ValueError, match=f"bias is {bias.dtype}: want a float dtype"):
            attention(**operands(), bias=jnp.asarray(bias))


class TestSinks:
    def test_a_sink_takes_its_share(self, implementation):
        arrays = {
            "query": np.zeros((1, 1, 1, 1), np.float32),
            "key": np.zeros((1, 2, 1, 1), np.float32),
            "value": np.eye(2, dtype=np.float32).reshape(1, 2, 1, 2),
            "sink_logits": np.zeros(1, np.float32),
        }
        out, lse = outputs(implementation, arrays, jit=True)
        assert_close(out.ravel(), [1 / 3, 1 / 3])
        assert_close(lse.item(), np.log(3))

    @pytest.mark.parametrize("times", [1.0, 30.0, 300.0])
    def test_sinks_match_float64(self, implementation, times):
        arrays = operands() | {"sink_logits": normal("sink", 4, times=times)}
        options = {"causal": True, "offset": np.array([-2, 1])}
        _, _, grads = check(implementation, arrays, **options)
        assert grads["sink_logits"].any()

    def test_a_blind_query_with_a_sink_gives_0_and_the_sink_s_lse(self, implementation):
        arrays = operands() | {"sink_logits": normal("sink", 4)}
        out, lse, _ = check(implementation, arrays, key_lengths=np.array([0, 3]))
        assert not out[0].any()
        np.testing.assert_array_equal(lse[0], np.repeat(arrays["sink_logits"][None], 3, axis=0))

    def test_a_sink_of_minus_infinity_is_no_sink(self, implementation):
        arrays = operands() | {"sink_logits": np.full(4, -np.inf, np.float32)}
        out, lse, grads = check(implementation, arrays)
        bare = check(implementation, operands())
        np.testing.assert_array_equal(out, bare[0])
        np.testing.assert_array_equal(lse, bare[1])
        for name in operands():
            assert_close(grads[name], bare[2][name])
        assert not grads["sink_logits"].any()

    @pytest.mark.parametrize("name", ["sink_logits", "alibi_slopes"])
    @pytest.mark.parametrize("shape", [(1,), (2,), (1, 4)])
    def test_numbers_per_head_of_other_shapes_raise(self, name, shape):
        with pytest.raises(ValueError, match=rf"{name} float32\(.*: want float \(4,\), one per"):
            attention(**operands(), **{name: jnp.zeros(shape)})


class TestAlibi:
    """Press et al. 2022 (arXiv:2108.12409): scores fall with the distance."""

    def test_scores_fall_by_the_slope_for_each_token_between(self, implementation):
        arrays = {
            "query": np.zeros((1, 1, 2, 1), np.float32),
            "key": np.zeros((1, 3, 1, 1), np.float32),
            "value": np.eye(3, dtype=np.float32).reshape(1, 3, 1, 3),
            "alibi_slopes": np.array([0.0, np.log(2.0)], np.float32),
        }
        out, _ = outputs(implementation, arrays, jit=True, causal=True, offset=2)
        assert_close(out[0, 0], [[1 / 3, 1 / 3, 1 / 3], [1 / 7, 2 / 7, 4 / 7]])

    @pytest.mark.parametrize("causal", [True, False])
    def test_slopes_and_their_gradients_match_float64(self, implementation, causal):
        arrays = operands() | {"alibi_slopes": np.array([0.5, 0.25, 0.1, -0.2], np.float32)}
        options = {"causal": causal, "offset": np.array([-1, 2]), "soft_cap": 2.0}
        _, _, grads = check(implementation, arrays, **options)
        assert (grads["alibi_slopes"] != 0).all()

    def test_slopes_join_a_bias_and_follow_given_orders(self, implementation):
        extras = {"alibi_slopes": normal("slope", 4), "bias": normal("bias", 2, 1, 3, 5)}
        key_order = np.array([[4, 0, 2, -1, 1], [3, 1, -1, -1, 0]], np.int32)
        query_order = np.array([[0, 2, 5], [1, 1, 4]], np.int32)
        options = {"query_order": query_order, "key_order": key_order, "causal": True}
        check(implementation, operands() | extras, **options)
