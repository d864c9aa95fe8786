# SPDX-License-Identifier: Apache-2.0
"""Rotary embeddings against float64 NumPy, the papers' numbers and Hugging Face."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.core.rotary import Rotary, half_to_interleaved, interleaved_to_half
from jaxkv.core.rotary_scaling import NTK, DynamicNTK, Linear, Llama3, Scaling, YaRN

FIXTURE = json.loads(
    (Path(__file__).parents[1] / "fixtures" / "rotary" / "huggingface.json").read_text()
)
FAR = np.array([0, 1, -1, 4095, 131_071, 1_000_000, -1_000_000, 2**31 - 1], np.int32)


def normal(seed, *shape, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def turned(x, positions, frequencies, layout):
    """Rotates `[B, T, N, H]` as complex numbers, pair by pair, in float64."""
    out = np.array(x, np.float64)
    pairs = len(frequencies)
    for i, frequency in enumerate(frequencies):
        one, two = (i, i + pairs) if layout == "half" else (2 * i, 2 * i + 1)
        angle = np.asarray(positions, np.float64)[..., None] * frequency
        z = (out[..., one] + 1j * out[..., two]) * np.exp(1j * angle)
        out[..., one], out[..., two] = z.real, z.imag
    return out


def scaling_of(parameters):
    """Maps a Hugging Face rope type to a scaling."""
    given = dict(parameters)
    given.pop("rope_theta")
    kind = given.pop("rope_type")
    if "original_max_position_embeddings" in given:
        given["original_context"] = given.pop("original_max_position_embeddings")
    if kind == "dynamic":
        given["original_context"] = 8
    kinds = {"linear": Linear, "dynamic": DynamicNTK, "llama3": Llama3, "yarn": YaRN}
    return None if kind == "default" else kinds[kind](**given)


def test_rop_01_angles_are_exact_at_any_position():
    rotary = Rotary()
    cos, sin = rotary.tables(FAR, 128)
    angles = FAR.astype(np.float64)[:, None] * 10_000.0 ** (-np.arange(64) / 64)
    assert cos.dtype == sin.dtype == jnp.float32
    np.testing.assert_allclose(cos, np.cos(angles), rtol=0, atol=1e-6)
    np.testing.assert_allclose(sin, np.sin(angles), rtol=0, atol=1e-6)

    # A 16-bit model rounds the result, never the angle.
    x = jnp.concatenate([jnp.ones((1, 1, 1, 64)), jnp.zeros((1, 1, 1, 64))], -1)
    out = rotary.rotate(x.astype(jnp.bfloat16), jnp.array([[4095]]))
    assert out.dtype == jnp.bfloat16
    want = np.concatenate([np.cos(angles[3]), np.sin(angles[3])])
    np.testing.assert_allclose(out.astype(jnp.float32).ravel(), want, rtol=0, atol=2**-8)


@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize("H,fraction", [(2, 1.0), (6, 1.0), (16, 1.0), (20, 0.3), (7, 0.6)])
def test_rotation_is_a_complex_product(layout, H, fraction):
    rotary = Rotary(theta=500.0, fraction=fraction, layout=layout)
    x = normal(H, 2, 3, 5, H)
    positions = np.array([[0, 1, 2], [90_001, 3, -7]], np.int32)
    R = int(H * fraction + 1e-9)
    want = turned(x, positions, 500.0 ** (-np.arange(0, R, 2) / R), layout)
    np.testing.assert_allclose(rotary.rotate(x, positions), want, rtol=0, atol=5e-6)


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_scores_depend_on_the_difference_of_positions(layout):
    rotary = Rotary(layout=layout)
    query, key = normal(1, 1, 4, 2, 16), normal(2, 1, 5, 2, 16)

    def scores(start):
        q = rotary.rotate(query, start + jnp.array([[3, 9, 4, 0]]))
        k = rotary.rotate(key, start + jnp.array([[0, 8, 2, 7, 1]]))
        return jnp.einsum("BTNH,BSNH->BNTS", q, k)

    near = scores(0)
    for start in (1, 4096, 1_000_000):
        np.testing.assert_allclose(scores(start), near, rtol=0, atol=2e-5)
    moved = jnp.einsum("BTNH,BSNH->BNTS", rotary.rotate(query, jnp.full((1, 4), 5)), key)
    assert jnp.abs(moved - near).max() > 0.1


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_partial_rotation_keeps_the_rest_bitwise(layout, dtype):
    x = normal(3, 2, 5, 3, 10, dtype=dtype).at[:, :, :, 4:].multiply(jnp.asarray(1.7, dtype))
    positions = jnp.arange(1, 6)[None]
    scaling = YaRN(4.0, 64)  # its magnitude must not reach the rest either
    by_dim = Rotary(dim=4, layout=layout, scaling=scaling).rotate(x, positions)
    by_fraction = Rotary(fraction=0.4, layout=layout, scaling=scaling).rotate(x, positions)
    alone = Rotary(layout=layout, scaling=scaling).rotate(x[..., :4], positions)
    assert by_dim.dtype == dtype and by_dim.shape == x.shape
    np.testing.assert_array_equal(by_dim[..., 4:], x[..., 4:])
    np.testing.assert_array_equal(by_dim[..., :4], alone)
    np.testing.assert_array_equal(by_dim, by_fraction)
    assert jnp.abs(alone - x[..., :4]).max() > 0.1


@pytest.mark.parametrize(
    "fraction,H,R", [(1.0, 64, 64), (0.4, 80, 32), (0.58, 100, 58), (0.35, 64, 22)]
)
def test_fraction_rounds_down_to_whole_channels(fraction, H, R):
    assert Rotary(fraction=fraction).width(H) == Rotary(dim=R).width(H) == R


@pytest.mark.parametrize("R,H", [(2, 2), (6, 6), (8, 8), (6, 11)])
def test_layout_permutations_round_trip_and_keep_scores(R, H):
    to_interleaved, to_half = half_to_interleaved(R, H), interleaved_to_half(R, H)
    np.testing.assert_array_equal(to_interleaved[to_half], np.arange(H))
    np.testing.assert_array_equal(to_half[to_interleaved], np.arange(H))

    half, interleaved = Rotary(dim=R), Rotary(dim=R, layout="interleaved")
    positions = jnp.array([[0, 5, 11]])
    query, key = normal(4, 1, 3, 2, H), normal(5, 1, 3, 2, H)

    def scores(rotary, q, k):
        return jnp.einsum(
            "BTNH,BSNH->BNTS", rotary.rotate(q, positions), rotary.rotate(k, positions)
        )

    want = scores(half, query, key)
    got = scores(interleaved, query[..., to_interleaved], key[..., to_interleaved])
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)
    turned_back = interleaved.rotate(query[..., to_interleaved], positions)[..., to_half]
    np.testing.assert_array_equal(turned_back, half.rotate(query, positions))
    if R > 2:
        assert jnp.abs(scores(interleaved, query, key) - want).max() > 0.1


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_rotation_under_jit_vmap_and_grad(layout):
    rotary = Rotary(layout=layout, dim=6)
    x, weight = normal(6, 3, 4, 2, 8), normal(7, 3, 4, 2, 8)
    positions = jnp.array([[0, 1, 2, 3], [5, 6, 7, 8], [9, 1, 4, 4]], jnp.int32)
    eager = rotary.rotate(x, positions)
    np.testing.assert_allclose(jax.jit(rotary.rotate)(x, positions), eager, rtol=0, atol=1e-6)
    np.testing.assert_allclose(jax.vmap(rotary.rotate)(x, positions), eager, rtol=0, atol=1e-6)
    shared = rotary.rotate(x, positions[:1])
    np.testing.assert_array_equal(shared, rotary.rotate(x, jnp.broadcast_to(positions[:1], (3, 4))))

    # The transpose of a rotation is the rotation backwards.
    gradient = jax.jit(jax.grad(lambda x: (rotary.rotate(x, positions) * weight).sum()))(x)
    np.testing.assert_allclose(gradient, rotary.rotate(weight, -positions), rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_rotation_on_meshes(kind, layout):
    side = 2 if jax.device_count() >= 4 else 1
    types = (getattr(jax.sharding.AxisType, kind),) * 2
    mesh = jax.make_mesh((side, side), ("data", "tensor"), axis_types=types)
    rotary = Rotary(layout=layout, dim=4)
    x, positions = normal(8, 2, 3, 4, 6), jnp.array([[0, 1, 2], [4, 5, 6]], jnp.int32)
    want = rotary.rotate(x, positions), rotary.rotate(x, positions[:1])
    P = jax.sharding.PartitionSpec
    with jax.set_mesh(mesh):
        sharded = jax.device_put(x, P("data", None, "tensor"))
        got = jax.jit(rotary.rotate)(sharded, jax.device_put(positions, P("data")))
        shared = jax.jit(rotary.rotate)(sharded, positions[:1])
    if kind == "Explicit":
        assert got.sharding.spec == shared.sharding.spec == P("data", None, "tensor", None)
    np.testing.assert_allclose(got, want[0], rtol=0, atol=1e-6)
    np.testing.assert_allclose(shared, want[1], rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", FIXTURE["scalings"])
def test_frequencies_and_tables_match_hugging_face(name):
    case = FIXTURE["scalings"][name]
    parameters = case["parameters"]
    rotary = Rotary(theta=parameters["rope_theta"], scaling=scaling_of(parameters))
    frequencies = rotary.frequencies(case["head_width"], case["length"])
    assert frequencies.dtype == np.float64
    np.testing.assert_allclose(frequencies, case["frequencies"], rtol=5e-6)
    assert rotary.magnitude() == pytest.approx(case["magnitude"], rel=1e-8)
    cos, sin = rotary.tables(np.array(case["positions"]), case["head_width"], case["length"])
    np.testing.assert_allclose(cos, case["cos"], rtol=0, atol=1e-5)
    np.testing.assert_allclose(sin, case["sin"], rtol=0, atol=1e-5)


def test_rotations_match_hugging_face():
    case = FIXTURE["rotations"]
    x, positions = jnp.asarray(case["x"], jnp.float32), jnp.asarray(case["positions"])

    def near(rotary, want):
        np.testing.assert_allclose(rotary.rotate(x, positions), want, rtol=0, atol=2e-5)

    near(Rotary(), case["half"])
    near(Rotary(fraction=0.5), case["half_partial"])
    near(Rotary(layout="interleaved"), case["interleaved"])
    # Hugging Face's DeepSeek takes interleaved channels and returns them as halves.
    want = np.take(case["interleaved_to_half"], half_to_interleaved(8), axis=-1)
    near(Rotary(layout="interleaved"), want)


def test_rop_03_dynamic_ntk_works_on_whole_sequences_and_is_refused_with_a_cache():
    rotary = Rotary(scaling=DynamicNTK(factor=2.0, original_context=8))

    def base(length):
        return rotary.frequencies(8, length)[1] ** -4

    assert [round(base(length), 2) for length in (9, 16)] == [13465.22, 43267.49]
    assert base(None) == base(1) == base(8) == pytest.approx(10_000.0)

    # Without a length, that of the call counts.
    x, positions = normal(9, 1, 16, 1, 8), jnp.arange(16)[None]
    whole = rotary.rotate(x, positions)
    want = turned(x, positions, 43267.49 ** (-np.arange(4) / 4), "half")
    np.testing.assert_allclose(whole, want, rtol=0, atol=1e-5)
    step = rotary.rotate(x[:, 9:10], positions[:, 9:10])
    given = rotary.rotate(x[:, 9:10], positions[:, 9:10], length=16)
    assert jnp.abs(step - whole[:, 9:10]).max() > 1e-3
    np.testing.assert_allclose(given, whole[:, 9:10], rtol=0, atol=1e-6)

    with pytest.raises(ValueError, match=r"DynamicNTK.*cache.*NTK\(factor\).*YaRN"):
        rotary.check_cacheable()
    for scaling in (None, Linear(2.0), NTK(2.0), Llama3(2.0), YaRN(2.0, 8)):
        Rotary(scaling=scaling).check_cacheable()


def test_rop_06_yarn_magnitude_is_a_ratio_of_mscales():
    def magnitude(factor, **mscales):
        return Rotary(scaling=YaRN(factor, 4096, **mscales)).magnitude()

    assert magnitude(16.0, mscale=1.0, mscale_all_dim=1.0) == 1.0
    assert magnitude(16.0) == pytest.approx(1.277259, abs=5e-7)
    assert magnitude(16.0, mscale=1.0) == pytest.approx(1.277259, abs=5e-7)
    assert magnitude(16.0, mscale=1.0, mscale_all_dim=0.0) == pytest.approx(1.277259, abs=5e-7)
    assert magnitude(40.0, mscale=1.0, mscale_all_dim=0.707) == pytest.approx(1.368888 / 1.260804)
    assert magnitude(1.0) == magnitude(1.0, mscale=2.0, mscale_all_dim=1.0) == 1.0
    assert magnitude(16.0, attention_factor=0.5, mscale=1.0, mscale_all_dim=1.0) == 0.5
    assert Rotary().magnitude() == Rotary(scaling=Llama3(8.0)).magnitude() == 1.0

    cos, sin = Rotary(scaling=YaRN(16.0, 4096)).tables(np.array([0, 3]), 8)
    np.testing.assert_allclose(cos**2 + sin**2, 1.277259**2, rtol=1e-5)


def test_rop_08_yarn_ramp_has_its_bounds_the_right_way_round():
    def frequencies(**options):
        return Rotary(scaling=YaRN(4.0, 2048, **options)).frequencies(16)

    want = [1, 0.316228, 0.1, 0.0256935, 0.00625, 0.00138350, 0.00025, 0.0000790569]
    np.testing.assert_allclose(frequencies(beta_fast=32.0, beta_slow=1.0), want, rtol=4e-6)
    assert frequencies(truncate=False)[3] == pytest.approx(0.0238702, abs=5e-8)
    with pytest.raises(ValueError, match="beta_fast 1.0 and beta_slow 32.0"):
        YaRN(4.0, 2048, beta_fast=1.0, beta_slow=32.0)


def test_rop_09_yarn_ramp_counts_the_original_context():
    rotary = Rotary(scaling=YaRN(4.0, 2048))
    np.testing.assert_array_equal(rotary.frequencies(16, 8192), rotary.frequencies(16, 2048))
    stretched = Rotary(scaling=YaRN(4.0, 8192)).frequencies(16)
    assert not np.allclose(rotary.frequencies(16), stretched, rtol=1e-2)


@pytest.mark.parametrize("context,share", [(2, 1 / 4.0), (10**9, 1.0)])
def test_yarn_beyond_either_end_of_the_ramp(context, share):
    # With too few tokens for one turn of the fastest pair all are slow; the ramp starts at pair 0.
    got = Rotary(theta=10.0, scaling=YaRN(4.0, context)).frequencies(64)
    plain = Rotary(theta=10.0).frequencies(64)
    np.testing.assert_allclose(got[1:] / plain[1:], share, rtol=1e-12)


def test_rop_10_linear_scaling_belongs_to_one_layer_kind():
    whole = Rotary(theta=1e6, scaling=Linear(8.0))
    local = Rotary(theta=1e4)
    for got, want in (
        (whole.tables(np.array([8]), 16), Rotary(theta=1e6).tables(np.array([1]), 16)),
        (local.tables(np.array([8]), 16), Rotary().tables(np.array([8]), 16)),
    ):
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-6)


def test_rop_11_theta_reaches_the_frequencies_and_the_rotation():
    rotary = Rotary(theta=5e5)
    assert rotary.frequencies(8)[1] == pytest.approx(0.037606, abs=5e-7)
    x = jnp.asarray([0, 1, 0, 0, 0, 0, 0, 0], jnp.float32).reshape(1, 1, 1, 8)
    out = rotary.rotate(x, jnp.array([[1]]))
    assert out[0, 0, 0, 5] == pytest.approx(math.sin(0.037606), abs=1e-6)


def test_ntk_keeps_the_fastest_pair_and_stretches_the_slowest():
    plain = Rotary().frequencies(64)
    ratio = plain / Rotary(scaling=NTK(8.0)).frequencies(64)
    np.testing.assert_allclose(ratio[[0, -1]], [1.0, 8.0], rtol=1e-12)
    np.testing.assert_allclose(np.diff(np.log(ratio)), math.log(8) / 31, rtol=1e-9)


def test_mla_01_softmax_scale_takes_mscale_all_dim():
    rotary = Rotary(scaling=YaRN(40.0, 4096, mscale=1.0, mscale_all_dim=0.707))
    assert 192**-0.5 * rotary.score_mscale() == pytest.approx(0.114721, abs=5e-7)
    other = Rotary(scaling=YaRN(40.0, 4096, mscale=0.707, mscale_all_dim=1.0))
    assert 192**-0.5 * other.score_mscale() == pytest.approx(0.135234, abs=5e-7)


def test_mla_02_softmax_scale_carries_mscale_squared():
    v3 = Rotary(scaling=YaRN(40.0, 4096, mscale=1.0, mscale_all_dim=1.0))
    assert v3.score_mscale() == pytest.approx(1.8739, abs=5e-5)
    assert 192**-0.5 * v3.score_mscale() == pytest.approx(0.135234, abs=5e-7)
    v2_lite = Rotary(scaling=YaRN(40.0, 4096, mscale=0.707, mscale_all_dim=0.707))
    assert v2_lite.score_mscale() == pytest.approx(1.5896, abs=5e-5)
    for scaling in (None, Linear(40.0), YaRN(40.0, 4096), YaRN(40.0, 4096, mscale=1.0)):
        assert Rotary(scaling=scaling).score_mscale() == 1.0
    assert Rotary(scaling=YaRN(1.0, 4096, mscale_all_dim=1.0)).score_mscale() == 1.0


@pytest.mark.parametrize("case", FIXTURE["deepseek_softmax_scales"], ids=str)
def test_softmax_scale_matches_hugging_face(case):
    scaling = YaRN(40.0, 4096, mscale=case["mscale"], mscale_all_dim=case["mscale_all_dim"])
    scale = (128 + 64) ** -0.5 * Rotary(scaling=scaling).score_mscale()
    assert scale == pytest.approx(case["scale"], rel=1e-8)


CHANGES = [
    (Rotary(), {"theta": 500.0, "dim": 8, "fraction": 0.5, "layout": "interleaved"}),
    (Rotary(), {"scaling": Linear(2.0)}),
    (Linear(2.0), {"factor": 3.0}),
    (NTK(2.0), {"factor": 3.0}),
    (DynamicNTK(2.0, 4), {"factor": 3.0, "original_context": 3}),
    (
        Llama3(8.0, original_context=64),
        {"factor": 4.0, "low_freq_factor": 2.0, "high_freq_factor": 5.0, "original_context": 80},
    ),
    (
        YaRN(8.0, 512, mscale=1.0, mscale_all_dim=0.5),
        {
            "factor": 4.0,
            "original_context": 80,
            "beta_fast": 8.0,
            "beta_slow": 4.0,
            "mscale": 0.7,
            "mscale_all_dim": 0.7,
            "attention_factor": 2.0,
            "truncate": False,
        },
    ),
]


@pytest.mark.parametrize("base,changes", CHANGES, ids=lambda value: type(value).__name__)
def test_every_field_changes_the_output(base, changes):
    x, positions = normal(10, 1, 5, 1, 16), jnp.array([[1, 2, 4, 8, 16]])

    def run(config):
        rotary = config if isinstance(config, Rotary) else Rotary(scaling=config)
        assert hash(config) == hash(dataclasses.replace(config))
        return rotary.rotate(x, positions)

    before = run(base)
    for name, value in changes.items():
        changed = jnp.abs(run(dataclasses.replace(base, **{name: value})) - before).max()
        assert changed > 1e-4, name


def test_changes_cover_every_field():
    covered = {(type(base), name) for base, changes in CHANGES for name in changes}
    kinds = [Rotary, *Scaling.__subclasses__()]
    assert covered == {(kind, field.name) for kind in kinds for field in dataclasses.fields(kind)}


@pytest.mark.parametrize(
    "build,message",
    [
        (lambda: Rotary(theta=1.0), "theta 1.0: want a base above 1"),
        (lambda: Rotary(theta=math.nan), "theta nan"),
        (lambda: Rotary(dim=5), "dim 5 rotated channels: want an even number of at least 2"),
        (lambda: Rotary(dim=0), "dim 0 rotated channels"),
        (lambda: Rotary(fraction=0.0), "fraction 0.0: want 0 < fraction <= 1"),
        (lambda: Rotary(fraction=1.5), "fraction 1.5"),
        (lambda: Rotary(dim=4, fraction=0.5), "dim 4 and fraction 0.5: want one of them"),
        (lambda: Rotary(layout="pairs"), "layout 'pairs': want one of .*half.*interleaved"),
        (lambda: Rotary(scaling="yarn"), "scaling 'yarn': want a Scaling"),
        (lambda: Rotary().width(7), "fraction 1.0 of 7 channels: 7 rotated channels"),
        (lambda: Rotary(fraction=0.1).width(8), "fraction 0.1 of 8 channels: 0 rotated"),
        (lambda: Rotary(dim=8).width(6), "dim 8 is wider than the head, which has 6"),
        (lambda: Linear(0.5), "Linear factor 0.5: want at least 1"),
        (lambda: NTK(math.inf), "NTK factor inf"),
        (lambda: NTK(2.0).frequencies(1e4, 2, None), "at least 4 rotated channels, not 2"),
        (lambda: DynamicNTK(0.0, 8), "DynamicNTK factor 0.0"),
        (lambda: DynamicNTK(2.0, 0), "original_context 0: want at least 1 token"),
        (lambda: DynamicNTK(2.0, 8).frequencies(1e4, 8, 0), "length 0: want at least 1"),
        (lambda: DynamicNTK(2.0, 8).frequencies(1e4, 8, 9.5), "length 9.5 must be a static int"),
        (lambda: Llama3(0.9), "Llama3 factor 0.9"),
        (lambda: Llama3(2.0, original_context=-1), "original_context -1"),
        (lambda: Llama3(2.0, 4.0, 4.0), "want 0 < low < high"),
        (lambda: YaRN(0.5, 8), "YaRN factor 0.5"),
        (lambda: YaRN(2.0, 0), "original_context 0"),
        (lambda: YaRN(2.0, 8, beta_slow=0.0), "want 0 < beta_slow <= beta_fast"),
        (lambda: YaRN(2.0, 8, mscale=-1.0), "mscale -1.0: want a number of at least 0"),
        (lambda: YaRN(2.0, 8, mscale_all_dim=-1.0), "mscale_all_dim -1.0"),
        (lambda: YaRN(2.0, 8, attention_factor=0.0), "attention_factor 0.0: want above 0"),
        (lambda: half_to_interleaved(5), "width 5 rotated channels"),
        (lambda: interleaved_to_half(6, 4), "width 6 is wider than the head, which has 4"),
    ],
)
def test_bad_fields_are_named(build, message):
    with pytest.raises(ValueError, match=message):
        build()


@pytest.mark.parametrize(
    "x,positions,message",
    [
        ((2, 3, 1, 4), (2, 4), r"positions \(2, 4\) do not fit x .*want \(2, 3\)"),
        ((2, 3, 1, 4), (3, 3), r"positions \(3, 3\) do not fit"),
        ((2, 3, 1, 4), (3,), r"want \[..., T, N, H\] and \[..., T\]"),
        ((3, 4), (), r"want \[..., T, N, H\]"),
        ((2, 3, 1, 5), (2, 3), "5 rotated channels"),
    ],
)
def test_bad_shapes_are_named(x, positions, message):
    with pytest.raises(ValueError, match=message):
        Rotary().rotate(jnp.zeros(x), jnp.zeros(positions, jnp.int32))


def test_bad_dtypes_are_named():
    with pytest.raises(ValueError, match="positions float32.*want integers"):
        Rotary().rotate(jnp.zeros((1, 2, 1, 4)), jnp.zeros((1, 2)))
    with pytest.raises(ValueError, match="x int32.*want a float dtype"):
        Rotary().rotate(jnp.zeros((1, 2, 1, 4), jnp.int32), jnp.zeros((1, 2), jnp.int32))
    with pytest.raises(ValueError, match="must be a static int"):
        rotary = Rotary(scaling=DynamicNTK(2.0, 8))
        jax.jit(rotary.rotate)(jnp.zeros((1, 2, 1, 4)), jnp.zeros((1, 2), jnp.int32), jnp.int32(9))
