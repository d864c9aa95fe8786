# SPDX-License-Identifier: Apache-2.0
"""Multi-head latent attention: the conformance suite, and its own maths."""

from jaxkv.attention import LatentOptions, MultiHeadLatentAttention
from jaxkv.testing.conformance import AttentionConformance


class TestConformance(AttentionConformance):
    variant = MultiHeadLatentAttention
    unsupported = frozenset({"qk_norm"})
