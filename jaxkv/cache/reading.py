# SPDX-License-Identifier: Apache-2.0
"""The static choices of a read, and how many slots and heads it takes at a time."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from jaxkv.cache.codecs import Codec, Planes
from jaxkv.cache.grouped import tokens_together
from jaxkv.cache.index import Blocks
from jaxkv.cache.spec import KVSpec
from jaxkv.core.visibility import Visibility

# Scores of one block, in elements: bounds the temporaries of long queries.
BLOCK_SCORES = 2**19
# Slots of one block, at least and at most.
CPU_SLOTS = (64, 512)
DEVICE_SLOTS = (128, 512)
# On CPU one head's block, in bytes: its copy stays in the core's own cache.
CPU_BLOCK_BYTES = 2**17


class BlockView(Protocol):
    """Turns a block into another form before it is attended (MLA: expanded heads)."""

    def spec(self, num_heads: int) -> KVSpec:
        """The record that this form's `num_heads` queries (a device's share) fit."""
        ...

    def apply(self, weights: Any, spec: KVSpec, codec: Codec, block: Planes) -> Planes:
        """Gives the block as planes of `spec`, stored raw, in the dtype of `weights`."""
        ...

    @property
    def codec(self) -> Codec:
        """Reads the planes that `apply` gives."""
        ...

    @property
    def weight_axes(self) -> Any:
        """Names the logical axes of `weights`, as a tree of them."""
        ...


@dataclasses.dataclass(frozen=True)
class Reading:
    """The static choices of one read."""

    spec: KVSpec
    codec: Codec
    layout: Blocks
    rule: Visibility
    scale: float
    groups: int  # query heads that share a KV head of the records
    slots: int  # of an entry, in whole groups of tokens, without other padding
    held: int  # the same with the padding that every plane has
    soft_cap: float | None = None
    precision: Any = None
    view: BlockView | None = None

    @property
    def strides(self) -> dict[str, int]:
        """Tells of each plane how many tokens an entry of its token axis serves."""
        return {n: p.stride for n, p in self.codec.planes(self.spec, 1).items()}

    def read_spec(self, num_heads: int) -> KVSpec:
        """The record that `num_heads` queries, a device's share, fit."""
        if self.view is not None:
            return self.view.spec(num_heads)
        # One KV head serves any share of the query heads; several are shared out alike.
        return dataclasses.replace(self.spec, kv_heads=max(1, num_heads // self.groups))

    def viewed(self, heads: int, block: Planes, weights: Any) -> tuple[KVSpec, Codec, Planes]:
        """Gives a block of `heads` KV heads in the form that is attended."""
        if self.view is None:
            return dataclasses.replace(self.spec, kv_heads=heads), self.codec, block
        view = self.view
        return view.spec(heads), view.codec, view.apply(weights, self.spec, self.codec, block)


class Tile(NamedTuple):
    """What a read takes at a time: `size` slots, of `heads` of `kv_heads` heads.

    They lie in one entry of `slots` slots, or are several whole entries (pages).
    """

    slots: int
    size: int
    heads: int
    kv_heads: int

    @property
    def run(self) -> int:
        """Slots that lie beside each other."""
        return min(self.size, self.slots)


def choose_tile(how: Reading, cpu: bool, query: jax.Array, planes: Planes) -> Tile:
    """Chooses the block of a read of queries `[B, K, M, H]`.

    On CPU a product over many heads repacks its operands, so heads are taken one by one, and a
    block's copy has to stay in the core's cache. A device wants large products.
    """
    K, M = query.shape[1:3]
    slots = how.slots
    if how.layout.per_head or (cpu and how.view is None):
        heads, (low, high) = 1, CPU_SLOTS
        # Many query rows pay for the traffic of a larger block.
        strides = how.strides
        widest = max(_slot_bytes(x, K) // strides[n] for n, x in planes.items())
        want = max(CPU_BLOCK_BYTES // max(widest, 1), 2 * M)
    else:
        heads, (low, high) = K, DEVICE_SLOTS
        want = high
    want = min(want, high, BLOCK_SCORES // (heads * M))
    want = max(low, 2 ** int(np.log2(max(want, 1))))
    if not cpu:  # pages are large there, and a copy that joins them costs more than a loop
        want = min(want, slots)
    step = tokens_together(how.codec)
    return Tile(slots, step * how.layout.tile(slots // step, max(1, want // step)), heads, K)


def _slot_bytes(plane: jax.Array, kv_heads: int) -> int:
    """Counts the bytes of one slot and one head (or what heads share)."""
    width = math.prod(plane.shape[3:]) * max(1, plane.shape[1] // kv_heads)
    return max(1, width * plane.dtype.itemsize)
