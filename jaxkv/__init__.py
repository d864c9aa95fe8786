# SPDX-License-Identifier: Apache-2.0
"""Attention for JAX and Flax, built around the KV cache.

`jaxkv.attention` is the package of modules; the function on arrays is `dot_product_attention`.
"""

from jaxkv.attention import Attention as Attention
from jaxkv.attention import CrossAttention as CrossAttention
from jaxkv.attention import GroupedQueryAttention as GroupedQueryAttention
from jaxkv.attention import HeadOptions as HeadOptions
from jaxkv.attention import LatentOptions as LatentOptions
from jaxkv.attention import MultiHeadAttention as MultiHeadAttention
from jaxkv.attention import MultiHeadLatentAttention as MultiHeadLatentAttention
from jaxkv.attention import MultiQueryAttention as MultiQueryAttention
from jaxkv.attention import ScoreOptions as ScoreOptions
from jaxkv.cache import H2O as H2O
from jaxkv.cache import TOVA as TOVA
from jaxkv.cache import Contiguous as Contiguous
from jaxkv.cache import Evicting as Evicting
from jaxkv.cache import Float8 as Float8
from jaxkv.cache import Int4 as Int4
from jaxkv.cache import Int8 as Int8
from jaxkv.cache import Kivi as Kivi
from jaxkv.cache import KVSpec as KVSpec
from jaxkv.cache import LayerCache as LayerCache
from jaxkv.cache import ModelCache as ModelCache
from jaxkv.cache import Paged as Paged
from jaxkv.cache import Raw as Raw
from jaxkv.cache import Ring as Ring
from jaxkv.cache import SharedKV as SharedKV
from jaxkv.cache import SnapKV as SnapKV
from jaxkv.cache import pyramid_budgets as pyramid_budgets
from jaxkv.core.alibi import alibi_slopes as alibi_slopes
from jaxkv.core.numerics import Numerics as Numerics
from jaxkv.core.rotary import Rotary as Rotary
from jaxkv.core.rotary_scaling import NTK as NTK
from jaxkv.core.rotary_scaling import DynamicNTK as DynamicNTK
from jaxkv.core.rotary_scaling import Linear as Linear
from jaxkv.core.rotary_scaling import Llama3 as Llama3
from jaxkv.core.rotary_scaling import YaRN as YaRN
from jaxkv.core.sharding import Rules as Rules
from jaxkv.core.sharding import use_rules as use_rules
from jaxkv.core.visibility import Visibility as Visibility
from jaxkv.generation import Beams as Beams
from jaxkv.generation import DraftModel as DraftModel
from jaxkv.generation import Generation as Generation
from jaxkv.generation import PromptLookup as PromptLookup
from jaxkv.generation import Sampling as Sampling
from jaxkv.generation import StopReason as StopReason
from jaxkv.generation import generate as generate
from jaxkv.models.decoder import Decoder as Decoder
from jaxkv.models.sharing import Reads as Reads
from jaxkv.ops.api import attention as dot_product_attention  # noqa: F401
from jaxkv.ops.api import explain as explain
from jaxkv.ops.merge import merge as merge

__version__ = "0.1.0"
