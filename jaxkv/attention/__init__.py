# SPDX-License-Identifier: Apache-2.0
"""Attention variants as Flax NNX modules, one file each."""

from jaxkv.attention.base import Attention as Attention
from jaxkv.attention.cross import CrossAttention as CrossAttention
from jaxkv.attention.grouped_query import GroupedQueryAttention as GroupedQueryAttention
from jaxkv.attention.heads import HeadAttention as HeadAttention
from jaxkv.attention.multi_head import MultiHeadAttention as MultiHeadAttention
from jaxkv.attention.multi_head_latent import LatentOptions as LatentOptions
from jaxkv.attention.multi_head_latent import (
    MultiHeadLatentAttention as MultiHeadLatentAttention,
)
from jaxkv.attention.multi_query import MultiQueryAttention as MultiQueryAttention
from jaxkv.attention.options import HeadOptions as HeadOptions
from jaxkv.attention.options import ScoreOptions as ScoreOptions
