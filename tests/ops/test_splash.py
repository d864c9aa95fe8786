# SPDX-License-Identifier: Apache-2.0
"""Splash attention, interpreted on a CPU: what all promise, at sizes of its own."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu

from jaxkv.core.visibility import Visibility
from jaxkv.ops import splash
from jaxkv.ops.api import explain, prepare
from jaxkv.ops.splash import Splash
from jaxkv.ops.splash_blocks import Pattern, block_sizes, visits
from tests.ops.suite import QUICK, bars_for, call, compare, normal, operands
from tests.support import dense
from tests.support.platforms import TPU

# Also simulates the chip's memories: what is read before it is written is NaN, and no read may be
# out of bounds.
INTERPRETED = Splash(128, 128, interpret=tpu.InterpretParams())
# That interpreter of JAX's cannot yet run a kernel over several rows at once.
ROWS_TOGETHER = Splash(128, 128, interpret=True)


def check(arrays: dict[str, Any], implementation: Any = INTERPRETED, **options: Any) -> Any:
    """Holds outputs, log-sum-exps and the gradients of both against float64; options are static."""
    bars = bars_for(arrays)

    def program(arrays: dict[str, Any]) -> Any:
        outs, pull = jax.vjp(lambda arrays: call(arrays, options, implementation), arrays)
        return *outs, pull(bars)[0]

    got = jax.device_get(jax.jit(program, compiler_options=QUICK)(arrays))
    compare(arrays, got, dense.attention(arrays, options, bars))
    return got


def packed(*counts: int) -> np.ndarray:
    """Writes a row of 256: so many tokens of each document, then padding."""
    row = np.repeat(np.arange(1, len(counts) + 1), counts)
    return np.pad(row, (0, 256 - len(row))).astype(np.int32)[None]


def test_grouped_heads_behind_the_keys_with_blind_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    # No length is a multiple of a block, and 70 queries stand before the first key. One KV head
    # is taken at a time.
    monkeypatch.setattr(splash, "HEADS_BYTES", 1)
    arrays = operands(B=1, T=200, S=140, N=4, K=2, H=16, V=8)
    out, lse, _ = check(arrays, causal=True, offset=-70)
    assert np.isneginf(lse[:, :70]).all() and np.isfinite(lse[:, 70:]).all()
    assert not out[:, :70].any()


def test_packed_documents_with_a_window_sinks_and_soft_cap() -> None:
    arrays = operands(B=1, T=256, S=256, N=2, K=1, H=16, V=16)
    arrays["sink_logits"] = normal("sinks", 2)
    rows = packed(90, 5, 101)
    for name in ("query", "key", "value"):
        arrays[name][rows == 0] = np.nan
    options = dict(causal=True, window=50, pinned=3, soft_cap=2.0)
    _, lse, grads = check(arrays, **options, query_segments=rows)
    sinks = np.broadcast_to(arrays["sink_logits"], (60, 2))
    np.testing.assert_allclose(lse[0, 196:], sinks, rtol=1e-6)
    assert not any(grads[name][rows == 0].any() for name in ("query", "key", "value"))


@pytest.mark.full
def test_both_sides_of_a_window_and_ragged_keys() -> None:
    arrays = operands(B=2, T=200, S=300, N=2, K=2, H=16, V=16)
    lengths = np.array([300, 170])
    check(arrays, ROWS_TOGETHER, window=(20, 40), offset=120, key_lengths=lengths)


@pytest.mark.full
@pytest.mark.parametrize("S", [256, 250])
def test_everything_is_seen(S: int) -> None:
    check(operands(B=1, T=256, S=S, N=2, K=2, H=16, V=16))


@pytest.mark.full
@pytest.mark.parametrize(("N", "K"), [(2, 2), (4, 1)])
@pytest.mark.parametrize("heads", [1, 2])
def test_bfloat16_and_rows_and_heads_one_by_one(
    N: int, K: int, heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(splash, "HEADS_BYTES", heads * 4 * 128 * 256)
    monkeypatch.setattr(splash, "ROWS_BYTES", 1)
    check(operands(B=2, T=256, S=256, N=N, K=K, H=16, V=16, dtype=jnp.bfloat16), causal=True)


def test_nothing_to_see_and_nothing_at_all() -> None:
    arrays = operands(B=1, T=128, S=128, N=1, K=1, H=16, V=16)
    check(arrays, causal=True, offset=-128)
    for empty in (dict(B=0), dict(T=0), dict(S=0)):
        check(operands(**dict(T=3, S=3) | empty))


def refusal(implementation: Splash = INTERPRETED, dtype: Any = np.float32, **options: Any) -> Any:
    given = {k: jnp.asarray(v) if isinstance(v, np.ndarray) else v for k, v in options.items()}
    return implementation.refuses(prepare(**operands(T=5, dtype=dtype), **given))


REFUSED = {
    "has no float16": dict(dtype=np.float16),
    "has no bias": dict(bias=np.zeros(5, np.float32)),
    "has no ALiBi slopes": dict(alibi_slopes=np.ones(4, np.float32)),
    "has no mask but the rule and segments": dict(mask=np.ones(5, bool)),
    "has no dropout": dict(dropout_rate=0.5, dropout_key=jax.random.key(0)),
    "must know at trace time where queries and keys stand": dict(offset=np.zeros(2, np.int32)),
    "has no precision BF16_BF16_F32": dict(precision=jax.lax.DotAlgorithmPreset.BF16_BF16_F32),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_it_cannot_do_is_said(reason: str) -> None:
    assert refusal(**REFUSED[reason]) == reason


def test_what_it_can_do_is_not_refused() -> None:
    sides = [dict(), dict(causal=True), dict(window=(1, 2)), dict(causal=True, window=3, pinned=1)]
    where = [dict(), dict(offset=-2), dict(query_segments=np.ones((2, 5), np.int32))]
    ragged = [dict(), dict(key_lengths=np.array([0, 4]), query_lengths=np.array([3, 2]))]
    more = [dict(), dict(soft_cap=3.0, scale=0.1, sink_logits=np.ones(4, np.float32))]
    for options in itertools.product(sides, where, ragged, more):
        assert refusal(**{k: v for part in options for k, v in part.items()}) is None
    for precision in ("highest", jax.lax.Precision.HIGH):
        assert refusal(precision=precision) is None


def test_it_is_the_first_choice_on_a_tpu_and_no_choice_elsewhere() -> None:
    def said(T: int, S: int) -> str:
        answers = {}
        jax.eval_shape(lambda arrays: answers.update(explain(**arrays)), operands(T=T, S=S))
        return answers["splash"]

    assert said(300, 400) == "runs on TPU only, not on cpu"
    with jax.sharding.use_abstract_mesh(TPU):
        assert said(300, 400) == "serves"
        assert said(1, 4000) == "serves, but pads queries to a block"
        assert said(200, 200) == "serves, but has one tile"


def test_another_splash_attention_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(splash, "USED", ("no_such_kernel",))
    assert refusal() == "is another one in this version of JAX"


@pytest.mark.parametrize("size", [0, 64, 200])
def test_blocks_are_made_of_whole_lanes(size: int) -> None:
    with pytest.raises(ValueError, match=f"q_block={size}: want a multiple of 128"):
        Splash(q_block=size)
    with pytest.raises(ValueError, match=f"kv_block={size}: want a multiple of 128"):
        Splash(kv_block=size)


RULES = [
    Visibility(causal=False),
    Visibility(),
    Visibility(window=1),
    Visibility(window=5, pinned=3),
    Visibility(causal=False, window=(3, 1)),
    Visibility(causal=False, window=(0, 9), pinned=2),
]


@pytest.mark.parametrize("rule", RULES, ids=repr)
@pytest.mark.parametrize("offset", [-13, -4, 0, 3, 30])
def test_every_pair_with_something_to_see_is_visited(rule: Visibility, offset: int) -> None:
    T, S, q_block, kv_block = 13, 18, 4, 8
    parts = rule.causal, (rule.left, rule.right or 0) if rule.window else None, rule.pinned
    sees = np.zeros((16, 24), bool)
    for i, j in np.ndindex(T, S):
        sees[i, j] = dense.sees(i + offset, j, *parts)
    pattern = Pattern(rule, offset, T, S, q_block, kv_block)
    assert (pattern.queries, pattern.keys) == (16, 24)

    q, k = np.indices(sees.shape)
    mask = pattern.mask_function()
    found = np.ones(sees.shape, bool) if mask is None else mask(q, k)
    np.testing.assert_array_equal(found[:T], sees[:T])  # nobody reads the padding's outputs

    live = sees.reshape(4, q_block, 3, kv_block).any(axis=(1, 3))
    np.testing.assert_array_equal(pattern.live(), live)
    for blocks in (live, live.T):
        block, run = visits(blocks)
        assert block.shape == run.shape and block.dtype == np.int8
        for row, wanted in enumerate(blocks):
            assert block[0, row][run[0, row] > 0].tolist() == np.flatnonzero(wanted).tolist()
        # A step that does nothing names what the next one that does will take.
        steps = list(zip(block.ravel(), run.ravel(), strict=True))
        for n, (named, runs) in enumerate(steps):
            following = [b for b, r in steps[n:] + steps[:n] if r]
            assert runs or not following or named == following[0]


def test_blocks_fit_lengths_windows_and_widths() -> None:
    def blocks(T: int, S: int, width: int = 128, dtype: Any = jnp.bfloat16, **rule: Any) -> Any:
        return block_sizes(Visibility(**rule), T, S, width, dtype)

    assert blocks(8192, 8192) == (1024, 1024)
    assert blocks(1100, 130) == (512, 256)
    assert blocks(8192, 8192, window=4096) == (1024, 1024)
    assert blocks(8192, 8192, window=1024) == (1024, 512)
    assert blocks(8192, 8192, window=4) == (1024, 256)
    assert blocks(8192, 8192, 256) == (1024, 1024)
    assert blocks(8192, 8192, 576) == (512, 512)
    assert blocks(8192, 8192, 256, jnp.float32) == (512, 512)
    assert blocks(8192, 8192, 576, jnp.float32) == (256, 256)
