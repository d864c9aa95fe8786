# SPDX-License-Identifier: Apache-2.0
"""Grouped-query attention: the conformance suite, and its own maths."""

from jaxkv.attention import GroupedQueryAttention
from jaxkv.testing.conformance import AttentionConformance


class TestConformance(AttentionConformance):
    variant = GroupedQueryAttention
