# SPDX-License-Identifier: Apache-2.0
"""Grouped-query attention: groups of query heads share a KV head."""

from __future__ import annotations

from typing import Unpack

from jaxkv.attention.heads import HeadAttention
from jaxkv.attention.options import HeadOptions


class GroupedQueryAttention(HeadAttention):
    """Attends with N query heads over K KV heads.

    Args:
      in_features: D.
      num_heads: N.
      num_kv_heads: K, a divisor of N; default: the largest one up to max(2, N / 4).
      **options: See `HeadOptions`; `rngs` is required.

    Raises:
      ValueError: If K does not divide N.

    Source: Ainslie et al. 2023, "GQA" (arXiv:2305.13245), section 2.2.

    >>> from flax import nnx
    >>> attn = GroupedQueryAttention(64, 8, rngs=nnx.Rngs(0))
    >>> attn.spec.kv_heads, attn.init_cache(batch=1, capacity=16).bytes_per_token
    (2, 128)
    """

    def __init__(
        self,
        in_features: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        **options: Unpack[HeadOptions],
    ) -> None:
        if num_kv_heads is None:
            num_kv_heads = default_kv_heads(num_heads)
        super().__init__(in_features, num_heads, num_kv_heads, **options)


def default_kv_heads(num_heads: int) -> int:
    """Chooses the largest divisor of N up to max(2, N / 4).

    >>> [default_kv_heads(n) for n in (1, 2, 4, 6, 8, 25, 32)]
    [1, 2, 2, 2, 2, 5, 8]
    """
    limit = max(2, num_heads // 4)
    return max(k for k in range(1, limit + 1) if num_heads % k == 0)
