# SPDX-License-Identifier: Apache-2.0
"""The two trained models of `glassllm`, in its own NumPy code and as decoders of ours."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from importlib import resources
from typing import Any

import numpy as np
from flax import nnx
from glassllm import LANGUAGES as LANGUAGES
from glassllm import Config, GlassLM, Tokenizer, load_pretrained

from jaxkv.attention import GroupedQueryAttention
from jaxkv.core.numerics import Numerics
from jaxkv.core.rotary import Rotary
from jaxkv.models.decoder import Decoder
from jaxkv.models.families.loading import Recipe, Weight, fill


@functools.cache
def theirs(language: str, dtype: str = "float64") -> GlassLM:
    """Loads the NumPy model, which then computes in `dtype` throughout."""
    with resources.as_file(resources.files("glassllm") / "weights" / f"{language}.npz") as path:
        return GlassLM.load(path, dtype=np.dtype(dtype))


@functools.cache
def tokenizer(language: str) -> Tokenizer:
    """Loads the model's tokenizer."""
    return load_pretrained(language)[1]


@functools.cache
def ours(language: str) -> Decoder:
    """Loads the same weights, which are stored in float16, into a float32 decoder."""
    model = theirs(language)
    tensors = {name: tensor.data for name, tensor in model.named_parameters().items()}
    config = model.cfg
    decoder = functools.partial(_decoder, config, tensors["blocks.0.ffn.W1"].shape[1])
    return fill(Recipe(decoder, weights(language)), tensors, Numerics())


@functools.cache
def weights(language: str) -> tuple[Weight, ...]:
    """Lists where each of our parameters comes from; gradients go the same way."""
    model = theirs(language)
    shapes = {name: tensor.shape for name, tensor in model.named_parameters().items()}
    return tuple(_weights(model.cfg, shapes))


def _decoder(config: Config, inner: int, *, numerics: Numerics, rngs: nnx.Rngs) -> Decoder:
    attention = functools.partial(
        GroupedQueryAttention,
        num_heads=config.n_heads,
        num_kv_heads=config.n_kv_heads,
        rotary=Rotary(config.rope_base, layout="interleaved"),
        numerics=numerics,
    )
    return Decoder(
        config.vocab_size,
        config.d_model,
        config.n_layers,
        attention,
        mlp_features=inner,
        norm_epsilon=config.eps,
        numerics=numerics,
        rngs=rngs,
    )


def _weights(config: Config, shapes: dict[str, tuple[int, ...]]) -> Iterator[Weight]:
    width = config.d_model // config.n_heads

    def one(target: str, source: str, *split: int) -> Weight:
        """Matrices are stored (in, out); `split` separates the heads of one of the axes."""
        convert: Any = (lambda w: w.reshape(split)) if split else (lambda w: w)
        return Weight(target, source, shapes[source], convert)

    yield one("embedding", "E")
    yield one("norm.scale", "norm_f.gamma")
    for i in range(config.n_layers):
        ours, theirs = f"blocks.{i}", f"blocks.{i}"
        yield one(f"{ours}.attention_norm.scale", f"{theirs}.norm1.gamma")
        yield one(f"{ours}.mlp_norm.scale", f"{theirs}.norm2.gamma")
        for name, source, heads in (
            ("query", "W_Q", config.n_heads),
            ("key", "W_K", config.n_kv_heads),
            ("value", "W_V", config.n_kv_heads),
        ):
            kernel = f"{ours}.attention.{name}.kernel"
            yield one(kernel, f"{theirs}.attn.{source}", -1, heads, width)
        yield one(f"{ours}.attention.out.kernel", f"{theirs}.attn.W_O", config.n_heads, width, -1)
        for name, source in (("gate", "W1"), ("up", "W3"), ("down", "W2")):
            yield one(f"{ours}.mlp.{name}.kernel", f"{theirs}.ffn.{source}")
