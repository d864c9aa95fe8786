# SPDX-License-Identifier: Apache-2.0
"""The KV cache: record, codec, layout, index, and the verbs on all of them."""

from jaxkv.cache.codecs import Codec as Codec
from jaxkv.cache.codecs import Plane as Plane
from jaxkv.cache.codecs import Raw as Raw
from jaxkv.cache.contiguous import Contiguous as Contiguous
from jaxkv.cache.evicting import Evicting as Evicting
from jaxkv.cache.export import register_export as register_export
from jaxkv.cache.index import Index as Index
from jaxkv.cache.index import Jobs as Jobs
from jaxkv.cache.index import Layout as Layout
from jaxkv.cache.index import Plan as Plan
from jaxkv.cache.kivi import Kivi as Kivi
from jaxkv.cache.layer_cache import LayerCache as LayerCache
from jaxkv.cache.layer_cache import Scoring as Scoring
from jaxkv.cache.layer_cache import create_layer as create_layer
from jaxkv.cache.model_cache import ModelCache as ModelCache
from jaxkv.cache.model_cache import gather_layers as gather_layers
from jaxkv.cache.paged import Paged as Paged
from jaxkv.cache.policies import H2O as H2O
from jaxkv.cache.policies import TOVA as TOVA
from jaxkv.cache.policies import Policy as Policy
from jaxkv.cache.policies import Recent as Recent
from jaxkv.cache.policies import SnapKV as SnapKV
from jaxkv.cache.policies import pyramid_budgets as pyramid_budgets
from jaxkv.cache.quantised import Float8 as Float8
from jaxkv.cache.quantised import Int4 as Int4
from jaxkv.cache.quantised import Int8 as Int8
from jaxkv.cache.records import Records as Records
from jaxkv.cache.records import bytes_per_token as bytes_per_token
from jaxkv.cache.records import create_records as create_records
from jaxkv.cache.records import physical_bytes as physical_bytes
from jaxkv.cache.records import tree_bytes as tree_bytes
from jaxkv.cache.ring import Ring as Ring
from jaxkv.cache.shared import SharedKV as SharedKV
from jaxkv.cache.spec import KVSpec as KVSpec
