# SPDX-License-Identifier: Apache-2.0
"""Codecs with scales against float32: bytes, and the time of a step (goal 15)."""

from __future__ import annotations

from collections.abc import Iterator

import jax.numpy as jnp
from families.measuring import Case, Counted, Sizes, Timed
from families.steps import our_step

from jaxkv.cache import Codec, Float8, Int4, Int8, KVSpec, Raw, bytes_per_token

CODECS: dict[str, tuple[Codec, float | None, float | None]] = {
    "int8": (Int8(), 0.27, 1.0),
    "int4": (Int4(), None, None),
    "float8": (Float8(), None, None),
    "bfloat16": (Raw(jnp.bfloat16), None, None),
}


def quantised_cases(sizes: Sizes) -> Iterator[Case]:
    """Lists the family; queries are float32 throughout, and so is the rival's cache."""
    spec, plain = KVSpec(sizes.kv_heads, sizes.width, sizes.width), Raw(jnp.float32)
    for name, (codec, bound, _) in CODECS.items():
        yield Counted(
            f"{name}, a token of one layer",
            "float32",
            bytes_per_token(spec, codec),
            bytes_per_token(spec, plain),
            "bytes",
            None if bound is None else sizes.goal(bound),
        )
    for batch in (1, 8):
        for name, (codec, _, bound) in CODECS.items():
            lengths = [sizes.slots] * batch
            yield Timed(
                f"{name}, B={batch} live {sizes.slots}",
                "float32",
                lambda n=lengths, c=codec: our_step(sizes, n, jnp.float32, codec=c),
                lambda n=lengths: our_step(sizes, n, jnp.float32, codec=plain),
                None if bound is None else sizes.goal(bound),
            )
