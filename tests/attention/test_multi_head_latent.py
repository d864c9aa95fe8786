# SPDX-License-Identifier: Apache-2.0
"""Multi-head latent attention: the conformance suite, the paper's formula, and its two forms."""

from __future__ import annotations

from typing import Any, ClassVar

import jax
import numpy as np
import pytest
from flax import nnx

from jaxkv.attention import LatentOptions, MultiHeadLatentAttention, ScoreOptions
from jaxkv.cache import reading
from jaxkv.cache.spec import KVSpec
from jaxkv.core.rotary import Rotary
from jaxkv.core.rotary_scaling import YaRN
from jaxkv.testing.conformance import AttentionConformance
from jaxkv.testing.suite import call, feed, quick_jit
from jaxkv.testing.tolerances import assert_close, assert_trees_close
from tests.attention.formulas import SOME_MESHES, latent_attention, parameters, perturbed

X = np.random.default_rng(0).normal(size=(2, 6, 16)).astype(np.float32)
FORMS = ("absorbed", "expanded")


class TestConformance(AttentionConformance):
    in_full = SOME_MESHES
    variant = MultiHeadLatentAttention
    # All widths differ, and the form is absorbed up to 7 new tokens and expanded from 8 on.
    sizes: ClassVar[dict[str, Any]] = {
        "in_features": 16,
        "num_heads": 4,
        "head_dim": 6,
        "value_dim": 5,
        "latent": LatentOptions(latent_dim=24, rope_dim=4),
    }
    unsupported = frozenset({"qk_norm"})

    def test_the_suite_sees_both_forms(self, attn: Any) -> None:
        assert [attn.form(T, cached=True) for T in (1, 5, 7, 8)] == ["absorbed"] * 3 + ["expanded"]


def latent(form: Any = None, *, compressed: bool = False, **options: Any) -> Any:
    """Makes a module whose widths all differ: nope 6, rope 4, value 5, rank 8."""
    sizes = LatentOptions(
        latent_dim=8, rope_dim=4, query_latent_dim=7 if compressed else None, form=form
    )
    options = {"head_dim": 6, "value_dim": 5, "rotary": Rotary(50.0), **options}
    attn = MultiHeadLatentAttention(16, 3, latent=sizes, **options, rngs=nnx.Rngs(0))
    return perturbed(attn)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("compressed", [False, True])
def test_equals_the_formula_of_deepseek_v2(compressed: bool, form: str) -> None:
    attn = latent(form, compressed=compressed, use_bias=compressed)
    want = latent_attention(parameters(attn), X, 4, 50.0)
    assert_close(call(attn, X)[0], want)
    assert_close(feed(attn, X, attn.init_cache(2, 7), [3, 3])[0], want)


def test_absorbed_equals_expanded_on_every_path() -> None:
    absorbed, expanded, chosen = (latent(form) for form in (*FORMS, None))
    want, _ = call(expanded, X)
    assert_close(call(absorbed, X)[0], want)
    assert_close(call(chosen, X)[0], want)
    # Prefill into an empty cache, into one that holds tokens, and single steps.
    for widths in ([6], [3, 3], [3, 1, 1, 1]):
        outs, caches = zip(
            *(feed(attn, X, attn.init_cache(2, 7), widths) for attn in (absorbed, expanded)),
            strict=True,
        )
        for out in outs:
            assert_close(out, want, what=f"chunks {widths}")
        assert_trees_close(*caches)


def test_both_forms_read_several_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CPU_SLOTS", "DEVICE_SLOTS"):
        monkeypatch.setattr(reading, name, (2, 2))
    for form in FORMS:
        attn = latent(form)
        want = latent_attention(parameters(attn), X, 4, 50.0)
        assert_close(feed(attn, X, attn.init_cache(2, 6), [2, 2, 2])[0], want)


def test_gradients_agree_in_both_forms() -> None:
    def loss(attn: Any, x: Any, cache: Any) -> Any:
        _, cache = attn(x[:, :3], cache=cache)
        y, _ = attn(x[:, 3:], cache=cache)
        return (y * y).mean()

    gradient = quick_jit(jax.grad(loss, argnums=(0, 1)))
    absorbed, expanded = (
        gradient(attn, X, attn.init_cache(2, 7)) for attn in (latent(form) for form in FORMS)
    )
    assert_trees_close(parameters(absorbed[0]), parameters(expanded[0]))
    assert_close(absorbed[1], expanded[1])


def test_sinks_in_a_window_agree_in_both_forms() -> None:
    options = {"score": ScoreOptions(sink_logits=True), "window": 2}
    absorbed, expanded = (latent(form, **options) for form in FORMS)
    want, _ = call(expanded, X)
    for less in ({"window": 2}, {"score": options["score"]}):
        assert np.abs(want - call(latent("expanded", **less), X)[0]).max() > 1e-2
    for attn in (absorbed, expanded):
        assert_close(feed(attn, X, attn.init_cache(2, 7), [3, 3])[0], want)


def test_the_cheaper_form_is_chosen() -> None:
    N, H, R, V, C = 128, 128, 64, 128, 512  # DeepSeek-V3
    for length in (1, 100, 170, 171, 172, 4096):
        absorbed = length * N * ((C + R) + C)  # per key: its score and its share of the output
        expanded = C * N * (H + V) + length * N * ((H + R) + V)
        attn = nnx.eval_shape(
            lambda: MultiHeadLatentAttention(
                256, N, head_dim=H, latent=LatentOptions(C, R), rngs=nnx.Rngs(0)
            )
        )
        cheaper = "absorbed" if absorbed < expanded else "expanded"
        assert attn.form(length, cached=True) == cheaper, length
        assert attn.form(length, cached=False) == "expanded"
    for form in FORMS:
        assert {latent(form).form(T, cached) for T in (1, 999) for cached in (True, False)} == {
            form
        }


def test_mla_03_the_scale_multiplies() -> None:
    attn = MultiHeadLatentAttention(
        16, 2, head_dim=128, latent=LatentOptions(rope_dim=64), rngs=nnx.Rngs(0)
    )
    assert attn.scale == pytest.approx(0.0721688, abs=1e-7)  # 192 ** -0.5
    q, k = np.random.default_rng(0).normal(size=(2, 10_000, 192))
    assert np.var((q * k).sum(axis=1) * attn.scale) == pytest.approx(1.0, abs=0.1)


def test_mla_04_the_absorbed_form_keeps_the_scale_of_the_whole_key() -> None:
    outs = []
    for form in FORMS:
        attn = MultiHeadLatentAttention(
            16,
            2,
            head_dim=192,
            latent=LatentOptions(latent_dim=512, rope_dim=64, form=form),
            rngs=nnx.Rngs(0),
        )
        assert attn.spec.key_width == 576
        assert attn.scale == pytest.approx(0.0625)  # 256 ** -0.5, not 576 ** -0.5
        outs.append(call(attn, X)[0])
        outs.append(feed(attn, X, attn.init_cache(2, 7), [3, 3])[0])
    for out in outs[1:]:
        assert_close(out, outs[0])


def test_mla_05_all_widths_are_different() -> None:
    attn = latent()
    assert attn.spec == KVSpec(1, 12, 8, value_offset=0)
    cache = attn.init_cache(2, 7)
    assert {name: x.shape for name, x in cache.records.planes.items()} == {"key": (2, 1, 7, 12)}
    assert attn.rotary.width(4) == 4
    assert attn.query.kernel.shape == (16, 3, 10)
    assert attn.latent_down.kernel.shape == (16, 12)
    assert attn.key_up.shape == (8, 3, 6) and attn.value_up.shape == (8, 3, 5)
    assert attn.out.kernel.shape == (3, 5, 16)


@pytest.mark.parametrize("form", FORMS)
def test_yarn_reaches_the_scale_of_the_module(form: str) -> None:
    yarn = YaRN(40.0, 4096, mscale=1.0, mscale_all_dim=1.0)
    wide = MultiHeadLatentAttention(
        16,
        2,
        head_dim=128,
        latent=LatentOptions(rope_dim=64),
        rotary=Rotary(scaling=yarn),
        rngs=nnx.Rngs(0),
    )
    assert wide.scale == pytest.approx(0.135234, abs=1e-6)  # DeepSeek-V3, not 0.0721688
    rotary = Rotary(50.0, scaling=yarn)
    attn = latent(form, rotary=rotary)
    mscale = 0.1 * np.log(40.0) + 1.0
    want = latent_attention(
        parameters(attn),
        X,
        4,
        scale=mscale**2 / np.sqrt(10),
        frequencies=rotary.frequencies(4),
    )
    assert_close(call(attn, X)[0], want)
    assert_close(feed(attn, X, attn.init_cache(2, 7), [3, 3])[0], want)
