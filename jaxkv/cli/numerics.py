# SPDX-License-Identifier: Apache-2.0
"""The compute dtype of a command."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxkv.core.numerics import Numerics
from jaxkv.ops.api import IMPLEMENTATIONS

DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}


def compute_numerics(dtype: str | None, implementation: str | None = None) -> Numerics:
    """Chooses the compute dtype, and who computes attention; parameters are float32.

    Raises:
      ValueError: If the dtype or the implementation is unknown.
    """
    if dtype is None:
        dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    if dtype not in DTYPES:
        raise ValueError(f"--dtype {dtype!r}: want one of {', '.join(DTYPES)}.")
    names = [one.name for one in IMPLEMENTATIONS]
    if implementation is not None and implementation not in names:
        raise ValueError(f"--implementation {implementation!r}: want one of {', '.join(names)}.")
    return Numerics(dtype=DTYPES[dtype], implementation=implementation)
