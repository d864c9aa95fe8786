# SPDX-License-Identifier: Apache-2.0
"""The public conformance suite: what every attention variant of this library does."""

from __future__ import annotations

from jaxkv.testing.caching import Caching
from jaxkv.testing.gradients import Gradients
from jaxkv.testing.interop import Interop
from jaxkv.testing.masking import Masking
from jaxkv.testing.meshes import Meshes
from jaxkv.testing.padding import Padding
from jaxkv.testing.scoring import Scoring
from jaxkv.testing.transforms import Transforms


class AttentionConformance(
    Caching, Padding, Masking, Scoring, Gradients, Transforms, Interop, Meshes
):
    """Tests of one self-attention variant, collected by pytest from a subclass that names it.

    ```python
    from jaxkv.testing.conformance import AttentionConformance

    class TestMine(AttentionConformance):
        variant = MyAttention
        sizes = {"in_features": 16, "num_heads": 4, "my_width": 6}
    ```

    A subclass may override `make(rngs, **overrides)` instead, and lists the `ScoreOptions` that
    its variant refuses in `unsupported`. Tolerances stand in `jaxkv.testing.tolerances`. The mesh
    tests need 8 devices (`jax.config.update("jax_num_cpu_devices", 8)`), and all of them matrix
    products in float32: `jax.config.update("jax_default_matmul_precision", "highest")`.
    """
