# SPDX-License-Identifier: Apache-2.0
"""The variants' formulas in float64 NumPy, token by token, from the papers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from flax import nnx

from tests.support import dense

Params = Mapping[str, Any]


def parameters(attn: nnx.Module) -> dict[str, Any]:
    """Gives a module's parameters as nested dictionaries of float64 arrays."""

    def widened(node: Any) -> Any:
        if isinstance(node, Mapping):
            return {name: widened(child) for name, child in node.items()}
        return np.asarray(node).astype(np.float64)

    return widened(nnx.to_pure_dict(nnx.state(attn, nnx.Param)))


def perturbed(attn: Any, seed: int = 0) -> Any:
    """Adds noise to every parameter, so that biases, scales and sinks are not at their start."""
    graph, state = nnx.split(attn)
    rng = np.random.default_rng(seed)

    def noisy(variable: nnx.Variable) -> nnx.Variable:
        noise = 0.3 * rng.normal(size=variable[...].shape)
        return variable.replace((np.asarray(variable[...]) + noise).astype(np.float32))

    noisy_state = nnx.map_state(lambda _, v: noisy(v), state)
    return nnx.merge(graph, noisy_state)


def linear(p: Params, x: np.ndarray, inputs: int = 1) -> np.ndarray:
    """Contracts the last axes of `x` with a kernel and adds its bias, if there is one."""
    return np.tensordot(x, p["kernel"], inputs) + p.get("bias", 0.0)


def rms(x: np.ndarray, p: Params, epsilon: float = 1e-6) -> np.ndarray:
    """Divides by the root mean square of the last axis."""
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + epsilon) * p["scale"]


def rotated(
    x: np.ndarray, theta: float | None, frequencies: np.ndarray | None = None
) -> np.ndarray:
    """Rotates `[B, T, N, H]`: channels i and i + H / 2 are a complex number (RoFormer, 3.2.2)."""
    if theta is None and frequencies is None:
        return x
    half = x.shape[-1] // 2
    if frequencies is None:
        frequencies = np.float64(theta) ** (-np.arange(half) / half)
    angle = np.arange(x.shape[1])[:, None] * frequencies
    z = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angle)[None, :, None]
    return np.concatenate([z.real, z.imag], axis=-1)


def head_attention(
    p: Params,
    x: np.ndarray,
    theta: float | None = None,
    options: Mapping[str, Any] | None = None,
    slopes: np.ndarray | None = None,
) -> np.ndarray:
    """Computes attention of N query over K KV heads (GQA, arXiv:2305.13245), causal by default."""
    x = x.astype(np.float64)
    query, key, value = (linear(p[name], x) for name in ("query", "key", "value"))
    if "query_norm" in p:
        query, key = rms(query, p["query_norm"]), rms(key, p["key_norm"])
    arrays = {"query": rotated(query, theta), "key": rotated(key, theta), "value": value}
    if "sink_logits" in p:
        arrays["sink_logits"] = p["sink_logits"]
    if slopes is not None:
        arrays["alibi_slopes"] = slopes
    out = dense.attention(arrays, {"causal": True, **(options or {})}).out
    return linear(p["out"], out, 2)


def latent_attention(
    p: Params,
    x: np.ndarray,
    rope_dim: int,
    theta: float | None = None,
    *,
    scale: float | None = None,
    frequencies: np.ndarray | None = None,
    slopes: np.ndarray | None = None,
) -> np.ndarray:
    """Computes DeepSeek-V2's latent attention (arXiv:2405.04434, section 2.1, eq. 9 to 19).

    Latents are normalised, as the paper's section 3.1.2 says.
    """
    h, R = x.astype(np.float64), rope_dim
    if "query" in p:
        queries = linear(p["query"], h)
    else:
        c_query = rms(linear(p["query_down"], h), p["query_latent_norm"])  # eq. 12
        queries = linear(p["query_up"], c_query)  # eq. 13, 14
    C = p["latent_norm"]["scale"].shape[0]
    down = linear(p["latent_down"], h)
    c_kv = rms(down[..., :C], p["latent_norm"])  # eq. 9
    rope_key = rotated(down[:, :, None, C:], theta, frequencies)[:, :, 0]  # eq. 15
    H = queries.shape[-1] - R
    rope_query = rotated(queries[..., H:], theta, frequencies)
    B, T, N, _ = queries.shape
    scale = 1 / np.sqrt(H + R) if scale is None else scale

    out = np.zeros((B, T, N, p["value_up"].shape[-1]))
    for b, t, n in np.ndindex(B, T, N):
        scores, values = np.zeros(t + 1), np.zeros((t + 1, out.shape[-1]))
        for j in range(t + 1):
            key = np.concatenate([c_kv[b, j] @ p["key_up"][:, n], rope_key[b, j]])  # eq. 10, 17
            query = np.concatenate([queries[b, t, n, :H], rope_query[b, t, n]])  # eq. 16
            scores[j] = query @ key * scale - (0 if slopes is None else slopes[n] * (t - j))
            values[j] = c_kv[b, j] @ p["value_up"][:, n]  # eq. 11
        weights = np.exp(scores - scores.max())
        out[b, t, n] = weights / weights.sum() @ values  # eq. 18
    return linear(p["out"], out, 2)  # eq. 19


# Multi-head and multi-query attention are grouped-query attention with N and with 1 KV heads, and
# these tests of the suite compile long programs that the number of KV heads hardly changes.
LIKE_GROUPED_QUERY = (
    "test_an_exported_step_comes_back",
    "test_jax_14_checkpointed_calls_store_once",
    "test_jax_11_layers_in_one_scan",
    "test_jax_09_a_while_loop_over_scanned",
    "test_nan_01_a_row_that_is_all_padding",
    "test_vmap_over_a_batch_of_caches",
    "test_jax_16_gradients_reach_the_prefix",
    "test_masks_follow_the_tokens_of_a_padded_row",
    "test_a_cache_of_several_blocks",
    "test_pairs_of_compute_and_cache_dtype",
    "test_row_01_a_left_padded_batch",
    "test_a_mask_hides_keys",
    "test_a_window_shows_so_many_keys",
    "test_score_options_act_alike",
    "test_a_score_option_has_an_effect",
    "test_sco_07_a_given_scale",
    "test_lane_padding_changes_nothing",
    "test_rounded_records_do_not_depend",
    "test_msk_01_one_token_steps",
    "test_a_scan_over_steps",
    "test_the_linen_bridge",
    "test_a_saved_cache_comes_back",
    "test_the_input_names_the_compute_dtype",
    "test_drp_03",
    "test_a_mesh_changes_nothing[8x1",
    "test_a_mesh_changes_nothing[2x4-explicit",
    "test_a_mesh_changes_nothing[1x8-auto",
)
# Every shape of mesh and both kinds are left, but for cases that tests/in_full.txt names.
SOME_MESHES = (
    "test_a_mesh_changes_nothing[8x1-auto",
    "test_a_mesh_changes_nothing[2x4-auto",
    "test_a_mesh_changes_nothing[1x8-explicit",
)
