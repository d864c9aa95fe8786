# SPDX-License-Identifier: Apache-2.0
"""The compute dtype of a command."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxkv.core.numerics import Numerics

DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}


def compute_numerics(dtype: str | None) -> Numerics:
    """Chooses the compute dtype; parameters are float32.

    Raises:
      ValueError: If the dtype is unknown.
    """
    if dtype is None:
        dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    if dtype not in DTYPES:
        raise ValueError(f"--dtype {dtype!r}: want one of {', '.join(DTYPES)}.")
    return Numerics(dtype=DTYPES[dtype])
