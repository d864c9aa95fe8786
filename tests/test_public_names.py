# SPDX-License-Identifier: Apache-2.0
"""What `import jaxkv` offers, and that no name hides a package."""

import importlib
import pkgutil
import types

import jaxkv

NAMES = [
    "Attention",
    "Beams",
    "Contiguous",
    "CrossAttention",
    "Decoder",
    "DraftModel",
    "DynamicNTK",
    "Evicting",
    "Float8",
    "Generation",
    "GroupedQueryAttention",
    "H2O",
    "HeadOptions",
    "Int4",
    "Int8",
    "KVSpec",
    "Kivi",
    "LatentOptions",
    "LayerCache",
    "Linear",
    "Llama3",
    "ModelCache",
    "MultiHeadAttention",
    "MultiHeadLatentAttention",
    "MultiQueryAttention",
    "NTK",
    "Numerics",
    "Paged",
    "PromptLookup",
    "Raw",
    "Reads",
    "Ring",
    "Rotary",
    "Rules",
    "Sampling",
    "ScoreOptions",
    "SnapKV",
    "SharedKV",
    "StopReason",
    "TOVA",
    "Visibility",
    "YaRN",
    "alibi_slopes",
    "dot_product_attention",
    "explain",
    "generate",
    "merge",
    "pyramid_budgets",
    "use_rules",
]


def test_the_public_names_are_these() -> None:
    packages = {m.name for m in pkgutil.iter_modules(jaxkv.__path__)}
    public = {n for n in vars(jaxkv) if not n.startswith("_")} - packages
    assert public == set(NAMES)


def test_no_name_hides_a_package() -> None:
    for module in pkgutil.iter_modules(jaxkv.__path__):
        if module.ispkg:
            importlib.import_module(f"jaxkv.{module.name}")
            assert isinstance(getattr(jaxkv, module.name), types.ModuleType), module.name
