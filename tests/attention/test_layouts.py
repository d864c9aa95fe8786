# SPDX-License-Identifier: Apache-2.0
"""The conformance suite, or the parts that caches matter to, on other layouts than contiguous.

What each variant, layout and codec give together stands in test_every_cache.py.
"""

from __future__ import annotations

import pytest

from jaxkv.attention import GroupedQueryAttention, MultiHeadLatentAttention, MultiQueryAttention
from jaxkv.cache import Paged, Ring
from jaxkv.testing.caching import Caching
from jaxkv.testing.conformance import AttentionConformance
from jaxkv.testing.gradients import Rematerialised
from jaxkv.testing.padding import Padding
from jaxkv.testing.transforms import Transforms


class TestPagedGroupedQuery(Rematerialised, Transforms):
    in_full = (
        "test_jax_14_checkpointed_calls_store_once",
        "test_vmap_over_a_batch_of_caches",
        "test_jax_11_layers_in_one_scan",
        "test_a_scan_over_steps",
    )
    variant = GroupedQueryAttention
    layout = Paged(4)


@pytest.mark.full
class TestAllOfPagedGroupedQuery(AttentionConformance):
    variant = GroupedQueryAttention
    layout = Paged(4)


@pytest.mark.full
class TestPagedLatent(Caching, Rematerialised, Transforms):
    variant = MultiHeadLatentAttention
    layout = Paged(3)


@pytest.mark.full
class TestRingMultiQuery(Caching, Padding, Rematerialised, Transforms):
    variant = MultiQueryAttention
    layout = Ring(window=16)
    # What a ring keeps means nothing to a query that sees everything.
    test_msk_01_one_token_steps_do_not_need_the_causal_rule = None


class TestRingLatent(Caching, Padding):
    variant = MultiHeadLatentAttention
    layout = Ring(window=20, pinned=2)
    test_msk_01_one_token_steps_do_not_need_the_causal_rule = None
