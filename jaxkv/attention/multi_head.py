# SPDX-License-Identifier: Apache-2.0
"""Multi-head attention: every query head has a KV head of its own."""

from __future__ import annotations

from typing import Unpack

from jaxkv.attention.heads import HeadAttention
from jaxkv.attention.options import HeadOptions


class MultiHeadAttention(HeadAttention):
    """Attends with N query heads over N KV heads.

    Args:
      in_features: D.
      num_heads: N.
      **options: See `HeadOptions`; `rngs` is required.

    Source: Vaswani et al. 2017, "Attention Is All You Need" (arXiv:1706.03762), section 3.2.2.

    >>> from flax import nnx
    >>> attn = MultiHeadAttention(64, 8, rngs=nnx.Rngs(0))
    >>> attn.init_cache(batch=1, capacity=16).bytes_per_token  # 2 x 8 x 8 x 4 bytes
    512
    """

    def __init__(self, in_features: int, num_heads: int, **options: Unpack[HeadOptions]) -> None:
        super().__init__(in_features, num_heads, num_heads, **options)
