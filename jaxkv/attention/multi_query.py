# SPDX-License-Identifier: Apache-2.0
"""Multi-query attention: all query heads share one KV head."""

from __future__ import annotations

from typing import Unpack

from jaxkv.attention.heads import HeadAttention
from jaxkv.attention.options import HeadOptions


class MultiQueryAttention(HeadAttention):
    """Attends with N query heads over one KV head: a cache N times smaller.

    Args:
      in_features: D.
      num_heads: N.
      **options: See `HeadOptions`; `rngs` is required.

    Source: Shazeer 2019, "Fast Transformer Decoding" (arXiv:1911.02150), section 3.

    >>> from flax import nnx
    >>> attn = MultiQueryAttention(64, 8, rngs=nnx.Rngs(0))
    >>> attn.init_cache(batch=1, capacity=16).bytes_per_token  # 2 x 1 x 8 x 4 bytes
    64
    """

    def __init__(self, in_features: int, num_heads: int, **options: Unpack[HeadOptions]) -> None:
        super().__init__(in_features, num_heads, 1, **options)
