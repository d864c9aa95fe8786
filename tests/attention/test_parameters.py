# SPDX-License-Identifier: Apache-2.0
"""Names, shapes, logical axes and initial spread of every parameter: checkpoints depend on them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxkv.attention import (
    CrossAttention,
    GroupedQueryAttention,
    LatentOptions,
    MultiHeadAttention,
    MultiHeadLatentAttention,
    MultiQueryAttention,
    ScoreOptions,
)
from jaxkv.core.numerics import Numerics

# D 12, N 6, H 4, V 5, out 7; GQA: K 2; MLA: C 9, R 2, queries through 8; cross: context of 11.
D, N, H, V, OUT, K, C, R, Q, CONTEXT = 12, 6, 4, 5, 7, 2, 9, 2, 8, 11
SCORE = ScoreOptions(sink_logits=True, qk_norm=True)
HEADS = {"head_dim": H, "value_dim": V, "out_features": OUT, "use_bias": True}


def heads(kv_heads: int, context: int = D) -> dict[str, tuple[tuple[int, ...], tuple[str, ...]]]:
    """Lists the frozen layout of the variants with one key and value per KV head."""
    kv = ("kv_heads", "head_dim")
    return {
        "query.kernel": ((D, N, H), ("embed", "heads", "head_dim")),
        "query.bias": ((N, H), ("heads", "head_dim")),
        "key.kernel": ((context, kv_heads, H), ("embed", *kv)),
        "key.bias": ((kv_heads, H), kv),
        "value.kernel": ((context, kv_heads, V), ("embed", *kv)),
        "value.bias": ((kv_heads, V), kv),
        "out.kernel": ((N, V, OUT), ("heads", "head_dim", "embed")),
        "out.bias": ((OUT,), ("embed",)),
        "query_norm.scale": ((H,), ("head_dim",)),
        "key_norm.scale": ((H,), ("head_dim",)),
        "sink_logits": ((N,), ("heads",)),
    }


LATENT = {
    "latent_down.kernel": ((D, C + R), ("embed", "latent")),
    "latent_down.bias": ((C + R,), ("latent",)),
    "latent_norm.scale": ((C,), ("latent",)),
    "key_up": ((C, N, H), ("latent", "heads", "head_dim")),
    "value_up": ((C, N, V), ("latent", "heads", "head_dim")),
    "out.kernel": ((N, V, OUT), ("heads", "head_dim", "embed")),
    "out.bias": ((OUT,), ("embed",)),
    "sink_logits": ((N,), ("heads",)),
}
PLAIN_QUERY = {
    "query.kernel": ((D, N, H + R), ("embed", "heads", "head_dim")),
    "query.bias": ((N, H + R), ("heads", "head_dim")),
}
COMPRESSED_QUERY = {
    "query_down.kernel": ((D, Q), ("embed", "latent")),
    "query_down.bias": ((Q,), ("latent",)),
    "query_latent_norm.scale": ((Q,), ("latent",)),
    "query_up.kernel": ((Q, N, H + R), ("latent", "heads", "head_dim")),
}
SINKS = ScoreOptions(sink_logits=True)
LAYOUTS: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "multi_head": (MultiHeadAttention, {"score": SCORE}, heads(N)),
    "multi_query": (MultiQueryAttention, {"score": SCORE}, heads(1)),
    "grouped_query": (GroupedQueryAttention, {"score": SCORE}, heads(K)),
    "cross": (
        CrossAttention,
        {"score": SCORE, "context_features": CONTEXT, "num_kv_heads": K},
        heads(K, CONTEXT),
    ),
    "latent": (
        MultiHeadLatentAttention,
        {"score": SINKS, "latent": LatentOptions(C, R)},
        PLAIN_QUERY | LATENT,
    ),
    "latent, compressed queries": (
        MultiHeadLatentAttention,
        {"score": SINKS, "latent": LatentOptions(C, R, Q)},
        COMPRESSED_QUERY | LATENT,
    ),
}


def variables(attn: nnx.Module) -> dict[str, nnx.Variable]:
    """Lists a module's parameters by dotted name."""
    return {".".join(map(str, p)): v for p, v in nnx.to_flat_state(nnx.state(attn, nnx.Param))}


@pytest.mark.parametrize("name", list(LAYOUTS))
def test_the_layout_of_parameters_is_frozen(name: str) -> None:
    variant, options, want = LAYOUTS[name]
    attn = nnx.eval_shape(lambda: variant(D, N, **HEADS, **options, rngs=nnx.Rngs(0)))
    got = {n: (v.shape, v.get_metadata()["axes"]) for n, v in variables(attn).items()}
    assert got == want
    assert len(jax.tree.leaves(attn)) == len(want), "a module holds parameters and nothing else"


@pytest.mark.parametrize("name", list(LAYOUTS))
def test_options_take_parameters_away(name: str) -> None:
    variant, options, want = LAYOUTS[name]
    plain = {**HEADS, **options, "score": ScoreOptions(), "use_bias": False}
    attn = nnx.eval_shape(lambda: variant(D, N, **plain, rngs=nnx.Rngs(0)))
    gone = ("bias", "query_norm.scale", "key_norm.scale", "sink_logits")
    assert set(variables(attn)) == {n for n in want if not n.endswith(gone)}
    attn = nnx.eval_shape(lambda: variant(D, N, **{**plain, "use_bias": "qkv"}, rngs=nnx.Rngs(0)))
    biases = {n for n in want if n.endswith("bias")} - {"out.bias"}
    assert {n for n in variables(attn) if n.endswith("bias")} == biases


def test_parameters_have_their_own_dtype() -> None:
    numerics = Numerics(dtype=jnp.float32, param_dtype=jnp.bfloat16)
    for variant, options, _ in LAYOUTS.values():
        attn = nnx.eval_shape(
            lambda v=variant, o=options: v(D, N, **HEADS, **o, numerics=numerics, rngs=nnx.Rngs(0))
        )
        assert {v.dtype for v in variables(attn).values()} == {jnp.dtype(jnp.bfloat16)}


def spread(fan_in: int, fan_out: int) -> dict[str, float]:
    """Gives the standard deviation that each initialiser states for a kernel."""
    return {
        "lecun_normal": fan_in**-0.5,
        "he_uniform": (2 / fan_in) ** 0.5,
        "xavier_uniform": (2 / (fan_in + fan_out)) ** 0.5,
        "normal": 0.02,
    }


@pytest.mark.parametrize("name", ["lecun_normal", "he_uniform", "xavier_uniform", "normal", None])
def test_kernels_have_the_spread_of_their_fan_in(name: str | None) -> None:
    makers = {"normal": nnx.initializers.normal(0.02)}
    given = (
        {} if name is None else {"kernel_init": makers.get(name) or vars(nnx.initializers)[name]()}
    )
    mha = MultiHeadAttention(96, 4, head_dim=32, value_dim=40, **given, rngs=nnx.Rngs(0))
    latent = LatentOptions(latent_dim=64, rope_dim=16, query_latent_dim=48)
    mla = MultiHeadLatentAttention(
        96, 4, head_dim=32, value_dim=40, latent=latent, **given, rngs=nnx.Rngs(1)
    )
    # name: (kernel, fan-in, fan-out), whatever the kernel's rank.
    kernels = {
        "query": (mha.query.kernel, 96, 4 * 32),
        "key": (mha.key.kernel, 96, 4 * 32),
        "value": (mha.value.kernel, 96, 4 * 40),
        "out": (mha.out.kernel, 4 * 40, 96),
        "query_down": (mla.query_down.kernel, 96, 48),
        "query_up": (mla.query_up.kernel, 48, 4 * 48),
        "latent_down": (mla.latent_down.kernel, 96, 80),
        "key_up": (mla.key_up, 64, 4 * 32),
        "value_up": (mla.value_up, 64, 4 * 40),
        "mla out": (mla.out.kernel, 4 * 40, 96),
    }
    for kernel, (array, fan_in, fan_out) in kernels.items():
        want = spread(fan_in, fan_out)[name or "lecun_normal"]
        assert np.std(array[...]) == pytest.approx(want, rel=0.05), kernel
    drawn = [np.asarray(array[...]).ravel()[:9].tolist() for array, *_ in kernels.values()]
    assert len({tuple(x) for x in drawn}) == len(drawn), "two kernels were drawn from one key"


def test_an_orthogonal_initialiser_gives_an_orthogonal_map() -> None:
    attn = MultiHeadAttention(
        24, 4, head_dim=6, kernel_init=nnx.initializers.orthogonal(), rngs=nnx.Rngs(0)
    )
    for kernel, rows in ((attn.query.kernel, 24), (attn.out.kernel, 24)):
        flat = np.asarray(kernel[...]).reshape(rows, 24)
        np.testing.assert_allclose(flat @ flat.T, np.eye(24), atol=1e-5)
