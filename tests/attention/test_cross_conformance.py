# SPDX-License-Identifier: Apache-2.0
"""Cross-attention through the public suite of what reads a stored context."""

from __future__ import annotations

from jaxkv.attention import CrossAttention
from jaxkv.testing.conformance import CrossConformance
from tests.attention.formulas import SOME_MESHES


class TestCrossAttention(CrossConformance):
    in_full = SOME_MESHES
    variant = CrossAttention
