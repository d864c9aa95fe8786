# SPDX-License-Identifier: Apache-2.0
"""Settings for every test and doctest; pytest loads this before any module makes an array."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_default_matmul_precision", "highest")

# The first example of a shape compiles: a time limit per example would measure the compiler.
hypothesis.settings.register_profile("jaxkv", deadline=None, derandomize=True)
hypothesis.settings.load_profile("jaxkv")


@pytest.fixture(autouse=True)
def doctest_names(doctest_namespace: dict[str, object]) -> None:
    """Gives docstring examples the three names that they all need."""
    doctest_namespace.update(jax=jax, jnp=jnp, np=np)
