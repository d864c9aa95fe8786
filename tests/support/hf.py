# SPDX-License-Identifier: Apache-2.0
"""The tiny Hugging Face models of `tests/fixtures/hf`, and how close to them is close enough."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file

from jaxkv.cache.model_cache import ModelCache
from jaxkv.models.decoder import Decoder
from jaxkv.models.families import from_hf

FOLDER = Path(__file__).parents[1] / "fixtures" / "hf"
LATENT = ("deepseek_v3_halves_bias", "deepseek_v3_noq", "deepseek_v3_yarn")
NAMES = (*LATENT, "llama_gqa", "llama_mha_bias")
PREFILL, NEW = 16, 12

# Logits are compared with Hugging Face's in float64, and Hugging Face's own float32 logits say how
# far rounding alone carries these models: 0.7e-5 to 2e-5, the largest of 4,608 logits. Ours sum in
# other orders, cached steps in yet others; 4 such distances bound the largest of either (measured:
# 1.5 at most). A mistake moves some logit by at least `MOVED` times that bound.
ROUNDINGS, MOVED = 4, 500


@functools.cache
def config(name: str) -> dict[str, Any]:
    """Reads a model's `config.json`; copy it before changing it."""
    return json.loads((FOLDER / name / "config.json").read_text("utf-8"))


@functools.cache
def weights(name: str) -> dict[str, np.ndarray]:
    """Reads a model's tensors; copy the dictionary before changing it."""
    return load_file(FOLDER / name / "model.safetensors")


@functools.cache
def oracle(name: str) -> dict[str, np.ndarray]:
    """Reads what Hugging Face computed."""
    return load_file(FOLDER / name / "oracle.safetensors")


@functools.cache
def model(name: str) -> Decoder:
    """Loads a model from its folder."""
    return from_hf(FOLDER / name, FOLDER / name)


def tolerance(name: str) -> float:
    """Bounds the distance that rounding explains."""
    saved = oracle(name)
    return ROUNDINGS * float(np.abs(saved["logits"] - saved["logits_float64"]).max())


def prompt_logits(decoder: Decoder, tokens: np.ndarray) -> np.ndarray:
    """Scores a prompt in one call without a cache."""
    return np.asarray(_whole(decoder, jnp.asarray(tokens)))


def cached_logits(decoder: Decoder, tokens: np.ndarray) -> np.ndarray:
    """Scores a prompt by a prefill of `PREFILL` tokens and single steps."""
    return prefilled(decoder, tokens)[0]


def prefilled(decoder: Decoder, tokens: np.ndarray) -> tuple[np.ndarray, ModelCache]:
    """Scores a prompt as `cached_logits` and keeps its cache, with room for `NEW` tokens."""
    cache = decoder.init_cache(tokens.shape[0], tokens.shape[1] + NEW)
    logits, cache = step(decoder, jnp.asarray(tokens[:, :PREFILL]), cache)
    parts = [logits]
    for t in range(PREFILL, tokens.shape[1]):
        logits, cache = step(decoder, jnp.asarray(tokens[:, t : t + 1]), cache)
        parts.append(logits)
    return np.concatenate(parts, axis=1), cache


@jax.jit
def step(decoder: Decoder, tokens: jax.Array, cache: ModelCache) -> Any:
    """Scores new tokens with a cache; returns both."""
    return decoder(tokens, cache=cache)


@jax.jit
def _whole(decoder: Decoder, tokens: jax.Array) -> jax.Array:
    return decoder(tokens)[0]
