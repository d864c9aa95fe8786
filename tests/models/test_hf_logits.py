# SPDX-License-Identifier: Apache-2.0
"""Whole tiny Llama and DeepSeek-V3 models give the logits and tokens of Hugging Face's code."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.attention import MultiHeadLatentAttention
from jaxkv.core.rotary import interleaved_to_half
from jaxkv.models.decoder import Decoder
from jaxkv.models.families import deepseek, from_hf
from tests.support import hf

PLAIN = {"rope_type": "default", "rope_theta": 10_000.0}
# What YaRN with factor 40, mscale 1 and mscale_all_dim 0.8 does to cos and sin.
MAGNITUDE = (1 + 0.1 * math.log(40)) / (1 + 0.08 * math.log(40))


def distance(logits: np.ndarray, name: str) -> float:
    """Measures the largest gap of a prompt's logits, in tolerances."""
    gap = np.abs(logits - hf.oracle(name)["logits_float64"]).max()
    return float(gap) / hf.tolerance(name)


def with_form(name: str, form: str) -> Decoder:
    """Loads a latent model that always attends in one form."""
    decoder = from_hf(hf.config(name), hf.weights(name))
    for block in decoder.blocks:
        assert isinstance(block.attention, MultiHeadLatentAttention)
        block.attention.latent = dataclasses.replace(block.attention.latent, form=form)
    return decoder


@pytest.mark.parametrize("name", hf.NAMES)
def test_imp_01_prompt_logits_match(name: str) -> None:
    logits = hf.prompt_logits(hf.model(name), hf.oracle(name)["tokens"])
    assert distance(logits, name) <= 1


@pytest.mark.parametrize("name", hf.NAMES)
def test_logits_of_prefill_and_single_steps_match(name: str) -> None:
    logits = hf.cached_logits(hf.model(name), hf.oracle(name)["tokens"])
    assert distance(logits, name) <= 1


@pytest.mark.parametrize("name", hf.NAMES)
def test_greedy_continuation_matches(name: str) -> None:
    saved, decoder = hf.oracle(name), hf.model(name)
    logits, cache = hf.prefilled(decoder, saved["tokens"])
    tokens, scores = [], []
    for _ in range(hf.NEW):
        scores.append(np.asarray(logits[:, -1]))
        tokens.append(scores[-1].argmax(-1))
        logits, cache = hf.step(decoder, jnp.asarray(tokens[-1][:, None], jnp.int32), cache)
    # Hugging Face's own scores are float32 here, so that both sides round.
    assert np.abs(np.stack(scores, 1) - saved["greedy_logits"]).max() <= 2 * hf.tolerance(name)
    assert saved["greedy_margins"].min() > 100 * hf.tolerance(name)
    np.testing.assert_array_equal(np.stack(tokens, 1), saved["greedy_tokens"])


@pytest.mark.parametrize(
    "name", [hf.LATENT[0], *(pytest.param(n, marks=pytest.mark.full) for n in hf.LATENT[1:])]
)
def test_the_other_form_of_latent_attention_matches_too(name: str) -> None:
    """By itself a model expands without a cache and absorbs with one, at this size."""
    chosen = hf.model(name).blocks[0].attention
    assert isinstance(chosen, MultiHeadLatentAttention)
    assert chosen.form(24, cached=False) == "expanded"
    assert {chosen.form(length, cached=True) for length in (hf.PREFILL, 1)} == {"absorbed"}
    tokens = hf.oracle(name)["tokens"]
    assert distance(hf.prompt_logits(with_form(name, "absorbed"), tokens), name) <= 1
    assert distance(hf.cached_logits(with_form(name, "expanded"), tokens), name) <= 1


@pytest.mark.parametrize("name", hf.LATENT)
def test_imp_02_rows_of_one_rope_layout_serve_the_other(name: str) -> None:
    """The other flag alone is wrong, with the rows in its order it is right, and back is exact."""
    config = copy.deepcopy(hf.config(name))
    halves = not config["rope_interleave"]
    config["rope_interleave"] = halves
    wrong = from_hf(config, hf.weights(name))
    moved = {
        key: reordered(key, tensor, config, to_half=not halves)
        for key, tensor in hf.weights(name).items()
    }
    right = from_hf(config, moved)
    tokens = hf.oracle(name)["tokens"]
    assert distance(hf.prompt_logits(wrong, tokens), name) > hf.MOVED
    assert distance(hf.prompt_logits(right, tokens), name) <= 1
    for key, tensor in moved.items():
        back = reordered(key, tensor, config, to_half=halves)
        np.testing.assert_array_equal(back, hf.weights(name)[key])


def reordered(key: str, tensor: np.ndarray, config: dict[str, Any], to_half: bool) -> np.ndarray:
    """Puts the rotated rows of queries and keys in the order of the other layout."""
    R, H = config["qk_rope_head_dim"], config["qk_nope_head_dim"]
    order = interleaved_to_half(R)
    order = order if to_half else np.argsort(order)
    if key.split(".")[-2] in ("q_proj", "q_b_proj"):
        rows = tensor.reshape(config["num_attention_heads"], H + R, -1)
        return np.concatenate([rows[:, :H], rows[:, H:][:, order]], 1).reshape(tensor.shape)
    if "kv_a_proj_with_mqa" in key:
        return np.concatenate([tensor[:-R], tensor[-R:][order]])
    return tensor


def rope(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda config: config["rope_parameters"].update(changes)


def fields(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda config: config.update(changes)


# What is left out -> the model that has it, and its config without it. Every entry is a mistake
# that some loader has made.
LEFT_OUT: dict[str, tuple[str, Callable[[dict[str, Any]], None]]] = {
    "llama3 scaling": ("llama_gqa", fields(rope_parameters=PLAIN)),
    "linear scaling": ("llama_mha_bias", fields(rope_parameters=PLAIN)),
    "theta": ("llama_gqa", rope(rope_theta=500_000.0)),
    "epsilon": ("llama_gqa", fields(rms_norm_eps=1e-6)),
    "yarn": ("deepseek_v3_yarn", fields(rope_parameters=PLAIN)),
    "yarn's frequencies": ("deepseek_v3_yarn", rope(beta_fast=32.0, beta_slow=16.0)),
    # The magnitude that both mscales give is kept, so that only the softmax scale changes.
    "mscale squared": (
        "deepseek_v3_yarn",
        rope(mscale_all_dim=None, attention_factor=MAGNITUDE),
    ),
    "mscale of cos and sin": ("deepseek_v3_yarn", rope(attention_factor=1.0)),
    "epsilon of wide norms": ("deepseek_v3_noq", fields(rms_norm_eps=1e-6)),
}


@pytest.mark.parametrize("what", LEFT_OUT)
def test_leaving_a_feature_out_moves_logits(what: str) -> None:
    name, change = LEFT_OUT[what]
    config = copy.deepcopy(hf.config(name))
    change(config)
    logits = hf.prompt_logits(from_hf(config, hf.weights(name)), hf.oracle(name)["tokens"])
    assert distance(logits, name) > hf.MOVED


def test_latent_norms_do_not_use_the_epsilon_of_the_config(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "deepseek_v3_noq"
    monkeypatch.setattr(deepseek, "LATENT_EPSILON", hf.config(name)["rms_norm_eps"])
    wrong = from_hf(hf.config(name), hf.weights(name))
    assert distance(hf.prompt_logits(wrong, hf.oracle(name)["tokens"]), name) > hf.MOVED


@pytest.mark.parametrize("name", hf.NAMES)
def test_imp_06_every_bias_and_norm_counts(name: str) -> None:
    """Every small tensor, taken as trivial, moves the logits."""
    tokens, tensors = hf.oracle(name)["tokens"], hf.weights(name)
    small = [key for key, tensor in tensors.items() if tensor.ndim == 1]
    kinds = sorted({key.split(".", 3)[-1] for key in small})
    assert len(kinds) >= 3
    for kind in kinds:
        trivial = {
            key: np.full_like(tensor, float("norm" in key)) if key.endswith(kind) else tensor
            for key, tensor in tensors.items()
        }
        logits = hf.prompt_logits(from_hf(hf.config(name), trivial), tokens)
        assert distance(logits, name) > hf.MOVED, kind
