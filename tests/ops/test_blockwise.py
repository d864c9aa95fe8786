# SPDX-License-Identifier: Apache-2.0
"""Attention in tiles: edges, transforms, what is skipped, and how much memory it takes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.ops import blockwise
from jaxkv.ops.api import attention, prepare
from jaxkv.ops.blockwise import Blockwise
from jaxkv.ops.tiles import Cut, live_tiles
from tests.ops.suite import (
    KERNELS,
    QUICK,
    bars_for,
    call,
    check,
    compare,
    kept,
    normal,
    operands,
    outputs,
    outputs_and_gradients,
    run,
)
from tests.support import dense
from tests.support.tolerances import assert_close


@pytest.mark.parametrize(("T", "S"), [(4, 12), (12, 4), (5, 13)])
def test_fla_01_unequal_lengths(T, S):
    check(Blockwise(rows=8, slots=4), operands(T=T, S=S), causal=True, offset=S - T)


@pytest.mark.parametrize(("T", "size"), [(13, 8), (192, 128)])
def test_fla_02_lengths_that_are_no_multiple_of_the_tile(T, size):
    arrays = operands(B=1, T=T, S=T, N=2, K=1)
    how = Blockwise(rows=2 * size, slots=size)
    bars = bars_for(arrays)
    first = outputs_and_gradients(how, arrays, bars, jit=True, causal=True)
    compare(arrays, first, dense.attention(arrays, {"causal": True}, bars))
    for _ in range(9):
        again = outputs_and_gradients(how, arrays, bars, jit=True, causal=True)
        for x, y in zip(jax.tree.leaves(again), jax.tree.leaves(first), strict=True):
            np.testing.assert_array_equal(x, y)


SIZES = [(1, 1), (3, 2), (7, 100), (100, 11)]
OTHERS = sorted({(r, s) for r in (1, 3, 7, 100) for s in (1, 2, 11, 100)} - set(SIZES))


@pytest.mark.parametrize(
    ("rows", "slots"), SIZES + [pytest.param(*x, marks=pytest.mark.full) for x in OTHERS]
)
def test_tiles_of_every_size_agree(rows, slots):
    check(Blockwise(rows, slots), operands(T=7, S=11), jit=True, causal=True, offset=2)


# Half of the last tile is empty, or nearly all of it.
@pytest.mark.parametrize(
    "how",
    [
        pytest.param(Blockwise(8, 8), id="blockwise"),
        *(pytest.param(x, id=n, marks=pytest.mark.full) for n, x in KERNELS.items()),
    ],
)
def test_num_05_scores_near_minus_100_before_a_half_empty_tile(how):
    arrays = operands(B=1, T=12, S=12, N=1, K=1, H=16, V=4)
    # In sixteenths, every score is a float32: none owes its last bits to the order of a sum.
    arrays["query"] = 2.5 + np.round(2 * arrays["query"]) / 16
    arrays["key"] = -2.5 + np.round(2 * arrays["key"]) / 16
    bars = bars_for(arrays)
    out, lse, grads = outputs_and_gradients(how, arrays, bars, jit=True, scale=1.0)
    want = dense.attention(arrays, {"scale": 1.0}, bars)
    assert want.lse.min() > -110 and want.lse.max() < -88.7  # exp(0 - lse) is inf in float32
    np.testing.assert_allclose(out, want.out, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(lse, want.lse, rtol=1e-5, atol=1e-5)
    for name, grad in grads.items():
        np.testing.assert_allclose(grad, want.grads[name], rtol=1e-5, atol=1e-5, err_msg=name)


def test_fla_05_gradients_of_a_key_are_summed_over_its_group():
    how, arrays = Blockwise(rows=4, slots=2), operands()
    bars = bars_for(arrays)
    _, _, grads = outputs_and_gradients(how, arrays, bars)
    repeated = arrays | {n: np.repeat(arrays[n], 2, axis=2) for n in ("key", "value")}
    _, _, apart = outputs_and_gradients("reference", repeated, bars)
    for name in ("key", "value"):
        B, S, N, width = apart[name].shape
        want = apart[name].reshape(B, S, N // 2, 2, width).sum(3)
        np.testing.assert_allclose(grads[name], want, rtol=0, atol=1e-5)


def test_fla_05_gradients_equal_finite_differences():
    how = Blockwise(rows=4, slots=2)
    arrays = {n: jnp.asarray(x) for n, x in operands(B=1, T=3, S=3, H=2, V=2).items()}
    bars = bars_for(arrays)

    def loss(key):
        out, lse = call(arrays | {"key": key}, {"causal": True}, how)
        return jnp.sum(out * bars[0]) + jnp.sum(lse * bars[1])

    got, losses = jax.grad(loss)(arrays["key"]), jax.jit(jax.vmap(loss))
    step = 1e-2 * jnp.eye(arrays["key"].size).reshape(-1, *arrays["key"].shape)
    up, down = (losses(arrays["key"][None] + s * step) for s in (1, -1))
    want = (up - down).reshape(arrays["key"].shape) / 2e-2
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-3)


WRAPPED = {
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "jit of checkpoint": lambda f: jax.jit(jax.checkpoint(f)),
    "checkpoint of jit": lambda f: jax.checkpoint(jax.jit(f)),
    "scan": lambda f: lambda x: jax.lax.scan(lambda c, _: (c, f(x)), None, length=2)[1][1],
}


IN_FULL = {name: [pytest.mark.full] for name in ("jit", "checkpoint of jit")}


@pytest.mark.parametrize(
    "wrap", [pytest.param(w, id=n, marks=IN_FULL.get(n, [])) for n, w in WRAPPED.items()]
)
def test_fla_07_transforms_nest(wrap):
    arrays = {n: jnp.asarray(x) for n, x in operands(B=1, T=16, S=17, N=2, K=1).items()}
    options, bars = {"causal": True, "offset": 1}, bars_for(arrays)

    def loss(arrays):
        out, lse = call(arrays, options, Blockwise(rows=8, slots=4))
        return jnp.sum(out * bars[0]) + jnp.sum(lse * bars[1])

    want = dense.attention(arrays, options, bars).grads
    for grads in (jax.grad(wrap(loss))(arrays), jax.jit(jax.grad(wrap(loss)))(arrays)):
        for name, grad in grads.items():
            assert_close(grad, want[name], terms=32, what=name)


def test_a_linear_form_can_be_used_again():
    arrays = {n: jnp.asarray(x) for n, x in operands().items()}
    _, pull = jax.vjp(lambda a: call(a, {}, Blockwise(rows=4, slots=2)), arrays)
    bars = [bars_for(arrays), tuple(2 * b for b in bars_for(arrays))]
    once, twice = (pull(b)[0] for b in bars)
    jax.tree.map(lambda a, b: assert_close(b, 2 * np.asarray(a), terms=24), once, twice)
    # What `jax.linearize` gives can be transposed, and used again; pushed forward it says why not.
    _, linear = jax.linearize(lambda a: call(a, {}, Blockwise(rows=4, slots=2)), arrays)
    back = jax.linear_transpose(linear, arrays)
    for bar, want in zip(bars, (once, twice), strict=True):
        jax.tree.map(np.testing.assert_array_equal, back(bar)[0], want)
    with pytest.raises(TypeError, match="forward-mode"):
        linear(arrays)
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(lambda a: call(a, {}, Blockwise(rows=4, slots=2)), (arrays,), (arrays,))


SHAPES = [(1, 1, 3, 5), (1, 4, 3, 5), (2, 1, 3, 5), (2, 4, 3, 5), (2, 4, 1, 5), (5,), (3, 5)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_fla_09_gradients_of_biases_of_every_shape(shape):
    arrays = operands() | {"bias": normal("bias", *shape)}
    _, _, grads = check(Blockwise(rows=4, slots=2), arrays, causal=True, offset=np.array([0, 2]))
    assert grads["bias"].shape == shape


def test_fla_10_no_gradient_goes_missing():
    extras = {
        "bias": normal("bias", 4, 3, 5)[None],
        "sink_logits": normal("sink", 4),
        "alibi_slopes": np.array([0.5, 0.2, 0.1, 0.05], np.float32),
    }
    arrays = {n: jnp.asarray(x) for n, x in (operands() | extras).items()}
    how, bars = Blockwise(rows=4, slots=2), bars_for(arrays)
    _, _, grads = check(how, arrays, soft_cap=3.0)
    assert all((grad != 0).any() for grad in grads.values())

    # A scale that is learned per head multiplies the queries.
    def loss(scales, how):
        scaled = arrays | {"query": arrays["query"] * scales[None, None, :, None]}
        return jnp.sum(call(scaled, {}, how)[0] * bars[0])

    ours, theirs = (jax.grad(loss)(jnp.arange(1.0, 5.0), i) for i in (how, "reference"))
    assert (ours != 0).all()
    assert_close(ours, theirs, terms=24)


def test_values_that_lie_in_the_keys_send_both_gradients_to_them():
    arrays = {n: jnp.asarray(x) for n, x in operands(H=8, V=3).items()}
    bars, how = bars_for(arrays), Blockwise(rows=4, slots=2)

    def loss(key):
        out, lse = call(arrays | {"key": key, "value": key[..., 2:5]}, {}, how)
        return jnp.sum(out * bars[0]) + jnp.sum(lse * bars[1])

    apart = dense.attention(arrays | {"value": arrays["key"][..., 2:5]}, {}, bars).grads
    want = apart["key"]
    want[..., 2:5] += apart["value"]
    assert_close(jax.grad(loss)(arrays["key"]), want, terms=24)


def test_a_gradient_nobody_asks_for_is_not_computed():
    arrays = {n: jnp.asarray(x) for n, x in operands(T=64, S=64).items()}
    bias = jnp.ones((2, 4, 64, 64))

    def loss(query, bias):
        return jnp.sum(call(arrays | {"query": query, "bias": bias}, {}, Blockwise(16, 8))[0])

    compiled = jax.jit(jax.grad(loss)).lower(arrays["query"], bias).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < bias.nbytes


# Every pair of values of two features meets in some case (see `covering`).
FEATURES = {
    "rule": {
        "all": {},
        "causal": {"causal": True, "offset": np.array([3, -2])},
        "window": {"causal": True, "window": 4, "offset": np.array([4, 0])},
        "both sides": {"window": (2, 1), "offset": 3},
        "pinned": {"causal": True, "window": 3, "pinned": 2, "offset": 4},
    },
    "heads": {"mha": (4, 4), "gqa": (4, 2), "mqa": (4, 1)},
    "score": {"plain": {}, "capped": {"soft_cap": 1.5}, "scaled": {"scale": 0.7}},
    "bias": {"none": None, "rows": (2, 1, 7, 11), "heads": (1, 4, 1, 11), "keys": (11,)},
    "extra": {"none": (), "sinks": ("sink_logits",), "alibi": ("alibi_slopes",)},
    "tokens": {
        "all": {},
        "ragged": {"query_lengths": np.array([7, 4]), "key_lengths": np.array([5, 11])},
        "segments": {
            "query_segments": np.array([[1, 1, 2, 2, 2, 0, 3], [0, 0, 1, 1, 1, 1, 1]], np.int32),
            "key_segments": np.array([[1] * 4 + [2] * 5 + [0, 3], [0] + [1] * 10], np.int32),
        },
        "mask": {"mask": normal("keep", 2, 1, 7, 11) > -0.3},
        "slots": {"key_order": np.array([[3, 4, 5, 6, -1, -1, 0, 1, 2, 7, 8]], np.int32)},
    },
    "dtype": {"f32": np.float32, "bf16": jnp.bfloat16},
    "dropout": {"none": 0.0, "some": 0.4},
    "value": {"apart": False, "in the key": True},
}
IN_KEY = slice(2, 5)


def covering():
    """Draws cases until every two values of two features have met, by a fixed generator."""
    rng = np.random.default_rng(0)
    names = list(FEATURES)
    pairs = {
        (a, x, b, y)
        for i, a in enumerate(names)
        for b in names[i + 1 :]
        for x in FEATURES[a]
        for y in FEATURES[b]
    }
    cases = []
    while pairs:
        drawn = [{n: rng.choice(list(FEATURES[n])).item() for n in names} for _ in range(60)]
        met = [
            {(a, c[a], b, c[b]) for i, a in enumerate(names) for b in names[i + 1 :]} & pairs
            for c in drawn
        ]
        best = max(range(len(drawn)), key=lambda i: len(met[i]))
        if met[best]:
            pairs -= met[best]
            cases.append(drawn[best])
    return cases


@functools.cache
def dropped(heads, rate):
    """Gives a key, and what einsum multiplies the weights by for it (see test_dropout.py)."""
    key, shape = jax.random.key(7), operands(T=7, S=11, N=heads)
    return key, kept("einsum", key, rate, shape)


def call_in_key(arrays, options, implementation, bars):
    """Computes `(out, lse)` and gradients where the values are some channels of the keys."""

    def both(arrays):
        return call(arrays | {"value": arrays["key"][..., IN_KEY]}, options, implementation)

    outs, pull = jax.vjp(both, arrays)
    return outs, pull(bars)[0]


def check_in_key(how, arrays, keep=None, **options):
    """Holds `call_in_key` against float64."""
    apart = arrays | {"value": arrays["key"][..., IN_KEY]}
    bars = bars_for(apart)
    given = {name: x for name, x in arrays.items() if name != "value"}
    (out, lse), grads = run(call_in_key, how, True, given, options, bars)
    truth = {name: x for name, x in options.items() if not name.startswith("dropout")}
    want = dense.attention(apart, truth, bars, keep)
    want.grads["key"][..., IN_KEY] += want.grads["value"]
    compare(apart, (out, lse, grads), want)


@pytest.mark.parametrize("case", covering(), ids=lambda case: "-".join(case.values()))
def test_every_two_features_together(case):
    N, K = FEATURES["heads"][case["heads"]]
    arrays = operands(T=7, S=11, N=N, K=K, dtype=FEATURES["dtype"][case["dtype"]])
    shape = FEATURES["bias"][case["bias"]]
    if shape is not None:
        arrays["bias"] = normal("bias", *shape)
    for name in FEATURES["extra"][case["extra"]]:
        arrays[name] = np.abs(normal(name, N, times=0.3))
    options = {}
    for feature in ("rule", "score", "tokens"):
        options |= FEATURES[feature][case[feature]]
    if rate := FEATURES["dropout"][case["dropout"]]:
        options["dropout_key"], options["keep"] = dropped(N, rate)
        options["dropout_rate"] = rate
    how = Blockwise(rows=3 * N // K, slots=4)
    if FEATURES["value"][case["value"]]:
        check_in_key(how, arrays, **options)
    else:
        check(how, arrays, jit=True, **options)


@pytest.mark.parametrize("heads", [1, 2], ids=["head by head", "heads together"])
def test_the_tiles_of_a_device_give_the_same(monkeypatch, heads):
    def on_a_device(fn, how, *args):
        return fn(how, False, *args)

    arrays = operands(T=7, S=11) | {
        "bias": normal("bias", 1, 4, 7, 11),
        "alibi_slopes": np.array([0.5, 0.2, 0.1, 0.05], np.float32),
    }
    monkeypatch.setattr(blockwise, "_by_platform", on_a_device)
    monkeypatch.setattr("jaxkv.ops.walk.DEVICE_SCORES", heads * 2 * 4 * 3)
    check(Blockwise(rows=4, slots=3), arrays, causal=True, offset=np.array([4, 2]))


RULES = {
    "causal": {"causal": True},
    "offset": {"causal": True, "offset": np.array([-5, 9])},
    "window": {"causal": True, "window": 9},
    "both sides": {"window": (3, 6)},
    "pinned": {"causal": True, "window": 5, "pinned": 3},
    "lengths": {"query_lengths": np.array([30, 4]), "key_lengths": np.array([5, 17])},
    "documents": {"query_segments": np.int32([[1, 2, 3, 0], [1, 1, 2, 2]]).repeat(8, 1)},
    "mask": {"mask": np.kron(np.eye(4, dtype=bool), np.ones((8, 8), bool))},
    "masks of heads": {"mask": normal("keep", 2, 4, 32, 32) > 2.5},
}


@pytest.mark.parametrize("options", RULES.values(), ids=RULES)
def test_tiles_with_nothing_to_see_are_left_out(options):
    B, T, N, K = 2, 32, 4, 2
    arrays = {n: jnp.asarray(x) for n, x in operands(B=B, T=T, S=T, N=N, K=K).items()}
    given = {n: jnp.asarray(x) if isinstance(x, np.ndarray) else x for n, x in options.items()}
    live = live_tiles(prepare(**arrays, **given), Cut(T, 5), Cut(T, 6), N // K)
    seen = dense.visible((B, N, T, T), options)
    for b, k, i in np.ndindex(B, K, 7):
        group = seen[b, 2 * k : 2 * k + 2, 5 * i : 5 * i + 5].any(axis=(0, 1))
        want = [j for j in range(6) if group[6 * j : 6 * j + 6].any()]
        at = (min(b, live.count.shape[0] - 1), min(k, live.count.shape[1] - 1), i)
        assert live.tiles[at][: live.count[at]].tolist() == want


def test_tiles_with_nothing_to_see_are_not_touched():
    arrays = operands(T=16, S=16)
    arrays["value"] = arrays["value"].copy()
    arrays["value"][:, :4] = np.nan  # a weight of 0 would give NaN too
    out, _ = outputs(Blockwise(4, 4), arrays, causal=True, window=3)
    assert np.isnan(out[:, :6]).all()
    assert np.isfinite(out[:, 8:]).all()


def test_nan_in_tiles_behind_the_length_reaches_nothing():
    arrays = operands(T=6, S=20)
    lengths = {"key_lengths": np.array([3, 11])}
    clean = outputs_and_gradients(Blockwise(6, 4), arrays, bars_for(arrays), **lengths)
    for name in ("key", "value"):
        arrays[name] = arrays[name].copy()
        arrays[name][0, 3:], arrays[name][1, 11:] = np.nan, np.inf
    got = outputs_and_gradients(Blockwise(6, 4), arrays, bars_for(arrays), **lengths)
    jax.tree.map(np.testing.assert_array_equal, got, clean)


def test_dropout_does_not_depend_on_the_tiles():
    key = jax.random.key(1)
    made = functools.partial(outputs, dropout_rate=0.4, dropout_key=key)
    for how in (Blockwise(4, 2), Blockwise(2, 5), "reference"):
        assert_close(made(how, operands())[0], made("einsum", operands())[0])


@pytest.mark.parametrize("wanted", [("rows", 0), ("slots", -1)])
def test_tiles_of_no_size_raise(wanted):
    name, size = wanted
    with pytest.raises(ValueError, match=f"{name}={size}: want a tile of at least 1"):
        Blockwise(**{name: size})


def temporary_bytes(T, backward):
    shapes = [jax.ShapeDtypeStruct((1, T, 8, 64), jnp.float32)] * 3

    def forward(q, k, v):
        return attention(q, k, v, causal=True, implementation="blockwise")

    def loss(*qkv):
        return jnp.sum(forward(*qkv))

    fn = jax.grad(loss, (0, 1, 2)) if backward else forward
    compiled = jax.jit(fn, compiler_options=QUICK).lower(*shapes).compile()
    return compiled.memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "gradient"])
def test_memory_grows_with_the_length_and_not_its_square(backward):
    half, whole = (temporary_bytes(T, backward) for T in (4096, 8192))
    assert whole <= 2.1 * half
    # One head's scores are 64 MiB at 4,096 tokens, all heads' 512.
    assert half <= 20 * 2**20
