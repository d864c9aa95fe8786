# SPDX-License-Identifier: Apache-2.0
"""Counts the bytes of a model's cache with the code that allocates it, on shapes alone."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxkv.cache.codecs import Raw
from jaxkv.cache.contiguous import Contiguous
from jaxkv.cache.records import bytes_per_token, create_records, physical_bytes, tree_bytes
from jaxkv.cache.spec import KVSpec
from jaxkv.memory.chips import Chip
from jaxkv.memory.policy import SlotPolicy
from jaxkv.models.geometry import LayerSpec, ModelGeometry

SHORT = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp8": "float8_e4m3fn"}
DTYPES = (*SHORT.values(), "float8_e5m2")
# Contexts beyond this many tokens count as endless.
ENDLESS = 2**50


@dataclasses.dataclass(frozen=True)
class Storage:
    """States how records are stored, and counts them.

    Args:
      dtype: Storage dtype, by JAX's name or as bf16, fp16, fp32, fp8.
      policy: What window layers keep.
      chip: Where they lie; `None` is a place without padding.

    Raises:
      ValueError: If the dtype is none that a cache stores as it is.

    >>> from jaxkv.models.presets import load_geometry
    >>> llama = load_geometry("llama3-8b")
    >>> Storage().token_bytes(llama), Storage().row_bytes(llama, 8192) == 2**30
    (131072, True)
    """

    dtype: str = "bfloat16"
    policy: SlotPolicy = SlotPolicy()
    chip: Chip | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", SHORT.get(self.dtype, self.dtype))
        if self.dtype not in DTYPES:
            raise ValueError(
                f"dtype {self.dtype!r}: want one of {', '.join([*SHORT, *DTYPES])}; whole numbers "
                "need scales, which no cache here stores yet."
            )

    @property
    def codec(self) -> Raw:
        """The codec of every layer."""
        return Raw(jnp.dtype(self.dtype))

    def layer_token_bytes(self, layer: LayerSpec) -> int:
        """Counts the bytes of one token in one layer, as specified."""
        return 0 if layer.spec is None else bytes_per_token(layer.spec, self.codec)

    def layer_row_bytes(self, layer: LayerSpec, context: int) -> int:
        """Counts the bytes of one row in one layer, as specified: its slots and its state."""
        slots = self.policy.slots(layer, context)
        return slots * self.layer_token_bytes(layer) + layer.state_bytes

    def token_bytes(self, geometry: ModelGeometry) -> int:
        """Counts the bytes that one token leaves behind in all layers, as specified."""
        return _over_layers(geometry, self.layer_token_bytes)

    def row_bytes(self, geometry: ModelGeometry, context: int) -> int:
        """Counts the bytes of one row of `context` tokens in all layers, as specified."""
        return _over_layers(geometry, lambda layer: self.layer_row_bytes(layer, context))

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
          Tokens, 0 if not one fits, or `None` if the cache never outgrows the budget.

        >>> from jaxkv.models.presets import load_geometry
        >>> Storage().longest_context(load_geometry("llama3-8b"), 2**30 + 6)
        8192
        """

        def fits(tokens: int) -> bool:
            return self.physical_nbytes(geometry, 1, tokens) <= budget

        low, high = 0, 1
        while fits(high):
            low, high = high, 2 * high
            if high > ENDLESS:
                return None
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low

    def _arrays(
        self, geometry: ModelGeometry, rows: int, context: int, measure: Callable[[object], int]
    ) -> int:
        lanes, codec = 1 if self.chip is None else self.chip.lanes, self.codec

        def one(layer: LayerSpec) -> int:
            if layer.spec is None:
                return rows * layer.state_bytes
            slots = self.policy.slots(layer, context)
            entries, slots = Contiguous().storage(rows, slots)
            fill = jax.ShapeDtypeStruct
            return measure(create_records(layer.spec, codec, entries, slots, lanes, fill).planes)

        # One index for all layers with the same layout and capacity.
        stored = (layer for layer in geometry.layers if layer.spec is not None)
        kinds = {(self.policy.is_ring(x), self.policy.slots(x, context)) for x in stored}
        index = jax.eval_shape(lambda: Contiguous().create(rows, context))
        return _over_layers(geometry, one) + len(kinds) * measure(index)


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
