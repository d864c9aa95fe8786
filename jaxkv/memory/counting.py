# SPDX-License-Identifier: Apache-2.0
"""Counts the bytes of a model's cache with the code that allocates it, on shapes alone."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable

import jax

from jaxkv.cache.codecs import Codec
from jaxkv.cache.index import Layout
from jaxkv.cache.layer_cache import LayerCache
from jaxkv.cache.model_cache import gather_layers
from jaxkv.cache.pairs import check_pair
from jaxkv.cache.plans import marked
from jaxkv.cache.records import (
    Records,
    bytes_per_token,
    create_records,
    physical_bytes,
    tree_bytes,
)
from jaxkv.cache.ring import Ring
from jaxkv.cache.spec import KVSpec
from jaxkv.memory.chips import Chip
from jaxkv.memory.formats import full_name, make_codec
from jaxkv.memory.policy import Rings, SlotPolicy
from jaxkv.models.geometry import LayerSpec, ModelGeometry

# Sizes beyond this many tokens or rows count as endless.
ENDLESS = 2**50


@dataclasses.dataclass(frozen=True)
class Storage:
    """States how records are stored, and counts them.

    Args:
      dtype: How a record is stored: bf16, fp16, fp32, fp8 or JAX's name of a dtype, as it is; or
        int8, int4, float8, which have scales, one for a group of channels as in `int4:32`; or
        kivi, kivi2, kivi8, with `kivi:32` for groups of 32 tokens, whose newest are bfloat16.
      policy: The layout of each layer.
      chip: Where they lie; `None` is a place without padding.

    Raises:
      ValueError: If the dtype is none of these.

    >>> from jaxkv.models.presets import load_geometry
    >>> llama = load_geometry("llama3-8b")
    >>> Storage().token_bytes(llama), Storage().row_bytes(llama, 8192) == 2**30
    (131072, True)
    >>> Storage("int8").token_bytes(llama)  # float32 scales, one for 128 channels
    67584
    """

    dtype: str = "bfloat16"
    policy: SlotPolicy = Rings()
    chip: Chip | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", full_name(self.dtype))

    @property
    def codec(self) -> Codec:
        """The codec of every layer."""
        return make_codec(self.dtype)

    def layer_token_bytes(self, layer: LayerSpec) -> int:
        """Counts the bytes of one token in one layer, as specified."""
        return 0 if layer.spec is None else bytes_per_token(layer.spec, self.codec)

    def layer_row_bytes(self, layer: LayerSpec, layout: Layout | None, context: int) -> int:
        """Counts the bytes of one row in one layer, as specified: its slots or its state."""
        if layer.spec is None or layout is None:
            return layer.state_bytes
        return tree_bytes(self._records(layer, layer.spec, layout, 1, context, 1))

    def token_bytes(self, geometry: ModelGeometry) -> int:
        """Counts the bytes that one token leaves behind in all layers, as specified."""
        return _over_layers(geometry, self.layer_token_bytes)

    def row_bytes(self, geometry: ModelGeometry, context: int) -> int:
        """Counts the bytes of one row of `context` tokens in all layers, as specified."""
        kinds = _kinds(geometry, self.policy.of_row())
        return sum(
            count * self.layer_row_bytes(layer, layout, context)
            for (layer, layout), count in kinds.items()
        )

    def nbytes(self, geometry: ModelGeometry, rows: int, context: int) -> int:
        """Counts every array of a cache for `rows` rows, as allocated: lanes and index included."""
        return self._arrays(geometry, rows, context, tree_bytes)

    def physical_nbytes(self, geometry: ModelGeometry, rows: int, context: int) -> int:
        """Counts the same as it lies in the chip's memory, with the padding of tiles."""
        tiled = self.chip is not None and self.chip.tiled

        def measure(tree: object) -> int:
            return sum(physical_bytes(leaf, tiled) for leaf in jax.tree.leaves(tree))

        return self._arrays(geometry, rows, context, measure)

    def longest_context(self, geometry: ModelGeometry, budget: int) -> int | None:
        """Finds the longest row whose cache takes at most `budget` bytes of memory.

        Returns:
          Tokens, 0 if not one fits, or `None` if the cache never outgrows the budget; no more than
          a pool of pages holds.

        >>> from jaxkv.models.presets import load_geometry
        >>> Storage().longest_context(load_geometry("llama3-8b"), 2**30 + 6)
        8192
        """
        return _most(lambda tokens: self._fits(geometry, 1, tokens, budget))

    def most_rows(self, geometry: ModelGeometry, context: int, budget: int) -> int | None:
        """Finds how many rows of `context` tokens take at most `budget` bytes of memory.

        Returns:
          Rows, or `None` if they take no memory at all; no more than a pool of pages holds.

        >>> from jaxkv.models.presets import load_geometry
        >>> Storage().most_rows(load_geometry("llama3-8b"), 8192, 3 * 2**30)
        2
        """
        return _most(lambda rows: self._fits(geometry, rows, context, budget))

    def _fits(self, geometry: ModelGeometry, rows: int, context: int, budget: int) -> bool:
        held = self.policy.holds(rows, context)
        return held and self.physical_nbytes(geometry, rows, context) <= budget

    def _arrays(
        self, geometry: ModelGeometry, rows: int, context: int, measure: Callable[[object], int]
    ) -> int:
        lanes = 1 if self.chip is None else self.chip.lanes
        counts, layers = [], []
        for (layer, layout), count in _kinds(geometry, self.policy).items():
            if layer.spec is None or layout is None:
                continue
            index = jax.eval_shape(
                lambda layout=layout: marked(layout.create(rows, context), self.codec)
            )
            records = self._records(layer, layer.spec, layout, rows, context, lanes)
            layers.append(LayerCache(index, records, None, layout, replicas=1, context=False))
            counts.append(count)
        # Equal layers share an index, so one of each kind gives every index, but for layouts
        # of which each layer has its own.
        indices = measure(gather_layers(layers).indices) + sum(
            (count - 1) * measure(made.index)
            for count, made in zip(counts, layers, strict=True)
            if made.layout.per_layer
        )
        records = sum(
            count * measure(made.records) for count, made in zip(counts, layers, strict=True)
        )
        states = rows * _over_layers(geometry, lambda layer: layer.state_bytes)
        return indices + records + states

    def _records(
        self, layer: LayerSpec, spec: KVSpec, layout: Layout, rows: int, context: int, lanes: int
    ) -> Records:
        """Makes the shapes of a layer's records as `create_layer` allocates them."""
        try:
            check_pair(layout, self.codec)
        except ValueError as error:
            if layer.window is None or not isinstance(layout, Ring):
                raise
            raise ValueError(
                f"{error} Window layers keep every token with --windows full."
            ) from None
        entries, slots = layout.storage(rows, context)
        fill = jax.ShapeDtypeStruct
        return create_records(spec, self.codec, entries, slots, lanes, fill, rows)


def _kinds(geometry: ModelGeometry, policy: SlotPolicy) -> Counter[tuple[LayerSpec, Layout | None]]:
    """Counts the layers that are alike in what they keep and how."""
    return Counter(zip(geometry.layers, policy.layouts(geometry.layers), strict=True))


def _most(fits: Callable[[int], bool]) -> int | None:
    """Finds the largest number that fits, 0 if 1 does not; `None` if there is no end of them."""
    low, high = 0, 1
    while fits(high):
        low, high = high, 2 * high
        if high > ENDLESS:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def device_part(geometry: ModelGeometry, tensor: int) -> ModelGeometry:
    """Takes what one of `tensor` devices stores: its KV heads, at least one of each layer.

    A record of one head (MQA, latents) is whole on every device; fixed states are not divided.

    Raises:
      ValueError: If KV heads and `tensor` divide neither way.
    """
    return geometry.with_specs(lambda spec: device_spec(spec, tensor))


def device_spec(spec: KVSpec, tensor: int) -> KVSpec:
    """Takes one device's part of a record: K / tensor heads, or one that others hold too.

    Raises:
      ValueError: If K and `tensor` divide neither way.

    >>> device_spec(KVSpec(8, 128, 128), 4).kv_heads, device_spec(KVSpec(8, 128, 128), 16).kv_heads
    (2, 1)
    """
    if spec.kv_heads % tensor and tensor % spec.kv_heads:
        raise ValueError(
            f"{spec.kv_heads} KV heads and {tensor} tensor devices: one must divide the other."
        )
    return dataclasses.replace(spec, kv_heads=max(spec.kv_heads // tensor, 1))


def replicated(geometry: ModelGeometry, tensor: int) -> ModelGeometry:
    """Repeats KV heads as a cache does where there are more tensor devices than heads.

    A record of one head is not repeated: its array is one, which every device holds.
    """
    return geometry.with_specs(
        lambda spec: (
            spec.replicated(tensor // spec.kv_heads) if 1 < spec.kv_heads < tensor else spec
        )
    )


def _over_layers(geometry: ModelGeometry, count: Callable[[LayerSpec], int]) -> int:
    return sum(times * count(layer) for layer, times in Counter(geometry.layers).items())
