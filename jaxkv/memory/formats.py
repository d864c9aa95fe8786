# SPDX-License-Identifier: Apache-2.0
"""The names of storage formats in commands, and the codecs that they mean."""

from __future__ import annotations

import jax.numpy as jnp

from jaxkv.cache.codecs import Codec, Raw
from jaxkv.cache.kivi import Kivi
from jaxkv.cache.quantised import Float8, Int4, Int8

SHORT = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp8": "float8_e4m3fn"}
DTYPES = (*SHORT.values(), "float8_e5m2")
SCALED = {"int8": Int8, "int4": Int4, "float8": Float8}
# Kivi of so many bits; its group is of tokens, and its newest tokens are bfloat16.
KIVI = {"kivi": 4, "kivi2": 2, "kivi8": 8}


def full_name(text: str) -> str:
    """Reads a format's name and writes it in full.

    Raises:
      ValueError: If it is none that a cache stores, or groups what has no scales.

    >>> full_name("bf16"), full_name("int4:032")
    ('bfloat16', 'int4:32')
    """
    name, colon, group = text.partition(":")
    scaled = name in SCALED or name in KIVI
    if scaled and not colon:
        return name
    if scaled and group.isdecimal() and int(group) > 0:
        return f"{name}:{int(group)}"
    if not colon and SHORT.get(name, name) in DTYPES:
        return SHORT.get(name, name)
    raise ValueError(
        f"dtype {text!r}: want one of {', '.join([*SHORT, *DTYPES])}, stored as they are, or "
        f"{', '.join(SCALED)}, which have scales, one for a group of channels as in int4:32, or "
        f"{', '.join(KIVI)}, of which a key channel has one for a group of tokens as in kivi:32."
    )


def make_codec(text: str) -> Codec:
    """Makes the codec that a format's name means.

    Raises:
      ValueError: As `full_name`.

    >>> make_codec("int4:32"), make_codec("float8")
    (Int4(group=32), Float8(group=None))
    """
    name, _, group = full_name(text).partition(":")
    if name in KIVI:
        return Kivi(KIVI[name], int(group) if group else Kivi.group, dtype=jnp.bfloat16)
    if name not in SCALED:
        return Raw(jnp.dtype(name))
    return SCALED[name](int(group) if group else None)


def is_scaled(text: str) -> bool:
    """Tells whether a format stores scales beside its numbers."""
    return text.partition(":")[0] in {**SCALED, **KIVI}
