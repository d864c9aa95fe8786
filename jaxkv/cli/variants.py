# SPDX-License-Identifier: Apache-2.0
"""The variants and model sizes that the commands offer."""

from __future__ import annotations

import dataclasses
import functools

import jax
from flax import nnx

from jaxkv.attention import (
    Attention,
    GroupedQueryAttention,
    MultiHeadAttention,
    MultiHeadLatentAttention,
    MultiQueryAttention,
)
from jaxkv.core.numerics import Numerics
from jaxkv.core.rotary import Rotary
from jaxkv.models.decoder import Decoder

# A new variant is one line here. The first one is what ratios are taken to.
VARIANTS: dict[str, type[Attention]] = {
    "mha": MultiHeadAttention,
    "mqa": MultiQueryAttention,
    "gqa": GroupedQueryAttention,
    "mla": MultiHeadLatentAttention,
}
BYTES = 256


@dataclasses.dataclass(frozen=True)
class Size:
    """How large a model is, how long it trains, and at what length it is decoded.

    Attributes:
      layers: L.
      features: D.
      heads: N.
      length: Tokens of a training row.
      batch: Rows of a training step.
      steps: Training steps.
      learning_rate: At the end of the warm-up.
      live: Tokens in the cache when decoding is timed.
      timed: Decode steps of a timed run.
    """

    layers: int
    features: int
    heads: int
    length: int
    batch: int
    steps: int
    learning_rate: float = 1e-3
    live: int = 1024
    timed: int = 64


SIZES = {
    "tiny": Size(2, 64, 8, 64, 16, 72, learning_rate=5e-3, timed=32),
    "small": Size(4, 128, 8, 128, 8, 300, learning_rate=2e-3),
    "medium": Size(6, 384, 12, 256, 32, 1000, live=2048),
    "large": Size(12, 768, 12, 512, 32, 2000, live=4096),
}


def pick(name: str, table: dict, what: str) -> str:
    """Checks a name against a table.

    Raises:
      ValueError: Naming what there is.
    """
    if name not in table:
        raise ValueError(f"unknown {what} {name!r}: want one of {', '.join(table)}.")
    return name


def make_decoder(
    variant: str,
    size: Size,
    *,
    mlp_features: int | None = None,
    numerics: Numerics | None = None,
    vocab: int = BYTES,
    dropout_rate: float = 0.0,
    remat: bool = False,
    seed: int = 0,
) -> Decoder:
    """Builds a byte-level decoder with rotary positions and a gated MLP."""
    numerics = numerics if numerics is not None else Numerics()
    factory = functools.partial(
        VARIANTS[variant],
        num_heads=size.heads,
        rotary=Rotary(),
        dropout_rate=dropout_rate,
        numerics=numerics,
    )
    return Decoder(
        vocab,
        size.features,
        size.layers,
        factory,
        mlp_features=mlp_features or default_mlp(size),
        dropout_rate=dropout_rate,
        remat=remat,
        numerics=numerics,
        rngs=nnx.Rngs(seed),
    )


def default_mlp(size: Size) -> int:
    """Chooses a gated MLP's width: 8/3 D, so that it has as many weights as a plain one of 4 D."""
    return round(size.features * 8 / 3)


def count_parameters(model: object) -> int:
    """Counts a model's parameters, real or abstract."""
    return sum(x.size for x in jax.tree.leaves(nnx.state(model, nnx.Param)))


def matched_mlp(variant: str, size: Size, target: int) -> int:
    """Finds the MLP width at which a variant has about `target` parameters.

    The count is linear in the width, so two counts give it.
    """

    def count(width: int) -> int:
        make = functools.partial(make_decoder, variant, size, mlp_features=width)
        return count_parameters(nnx.eval_shape(make))

    low = count(1)
    each = count(2) - low
    return max(1, 1 + round((target - low) / each))
