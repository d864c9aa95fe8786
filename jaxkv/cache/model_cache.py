# SPDX-License-Identifier: Apache-2.0
"""The cache of a whole model: one index per group of layers, and each layer's records."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from jaxkv.cache.index import Index, Layout, Plan
from jaxkv.cache.layer_cache import LayerCache
from jaxkv.cache.plans import plan_step
from jaxkv.cache.records import Records
from jaxkv.cache.verbs import Verbs
from jaxkv.core.trees import static


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False)
class ModelCache(Verbs):
    """Records of every layer, with one index per group of layers alike in layout and size.

    The first `steps` groups hold the model's tokens; the others a context, which the model's
    steps read and never extend.

    Donate it: `jax.jit(step, donate_argnums=...)` writes it in place, and the one that was
    passed in is gone.
    """

    indices: tuple[Index, ...]
    layers: tuple[Records, ...]
    plans: tuple[Plan, ...] | None
    layouts: tuple[Layout, ...] = static()
    groups: tuple[int, ...] = static()
    replicas: tuple[int, ...] = static()
    steps: int = static()

    def _parts(self) -> Any:
        return self.layouts, self.indices, self.layers, self.groups

    def _extended(self) -> int:
        return self.steps

    def _rebuilt(
        self,
        indices: tuple[Index, ...],
        layers: tuple[Records, ...],
        layouts: tuple[Layout, ...] | None = None,
        groups: tuple[int, ...] | None = None,
    ) -> ModelCache:
        layouts = self.layouts if layouts is None else layouts
        groups = self.groups if groups is None else groups
        steps = self.steps + len(indices) - len(self.indices)
        return dataclasses.replace(
            self, indices=indices, layers=layers, layouts=layouts, groups=groups, steps=steps
        )

    @property
    def context_lengths(self) -> jax.Array | None:
        """int32 `[B]`, tokens of the context that each row holds; `None` if there is none."""
        return self.indices[self.steps].lengths if self.steps < len(self.indices) else None

    @property
    def context_capacity(self) -> int | None:
        """Tokens that each row's context may have; `None` if there is none."""
        layers = [(g, r.slots) for g, r in zip(self.groups, self.layers, strict=True)]
        limits = [self.layouts[g].limit(self.indices[g], n) for g, n in layers if g >= self.steps]
        return min(limits, default=None)

    def open(
        self, length: int, lengths: jax.Array | None = None, segment_ids: jax.Array | None = None
    ) -> ModelCache:
        """Plans this call's T = `length` tokens, once for each group of layers."""
        plans = plan_step(self._groups(), length, lengths, segment_ids)
        return dataclasses.replace(self, plans=plans)

    def layer(self, number: int) -> LayerCache:
        """Hands out one layer with its group's index and plan."""
        group = self.groups[number]
        context = group >= self.steps
        return LayerCache(
            self.indices[group],
            self.layers[number],
            None if self.plans is None or context else self.plans[group],
            self.layouts[group],
            self.replicas[number],
            context,
        )

    def close(self, layers: Sequence[LayerCache]) -> ModelCache:
        """Ends the step: takes the layers' records back, and the indices move on."""
        if self.plans is None:
            raise ValueError("this cache has no open step: call cache.open(T, lengths) first.")
        # Every layer of a group did the same, so any of them tells the group's index.
        first = [layers[self.groups.index(g)] for g in range(len(self.indices))]
        return dataclasses.replace(
            self,
            indices=tuple(layer.after_step() for layer in first),
            layers=tuple(layer.records for layer in layers),
            plans=None,
        )


def _shapes(index: Index) -> tuple[tuple[int, ...], ...]:
    return tuple(x.shape for x in jax.tree.leaves(index))


def gather_layers(layers: Sequence[LayerCache]) -> ModelCache:
    """Joins fresh layer caches into a model's; layers alike in layout and size share an index."""
    keys = [
        (
            layer.context,
            layer.layout,
            layer.records.slots,
            _shapes(layer.index),
            number if layer.layout.per_layer else 0,
        )
        for number, layer in enumerate(layers)
    ]
    kinds = sorted(dict.fromkeys(keys), key=lambda key: key[0])
    steps = sum(not key[0] for key in kinds)
    if layers and not steps:
        raise ValueError("every layer holds a context: want one that holds the model's tokens.")
    return ModelCache(
        tuple(layers[keys.index(k)].index for k in kinds),
        tuple(layer.records for layer in layers),
        None,
        tuple(k[1] for k in kinds),
        tuple(kinds.index(k) for k in keys),
        tuple(layer.replicas for layer in layers),
        steps,
    )
