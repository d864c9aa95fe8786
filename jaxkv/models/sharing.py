# SPDX-License-Identifier: Apache-2.0
"""Layers that read an earlier layer's keys and values: which reads which, and what has to fit."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from flax import nnx

from jaxkv.attention.base import ATTENDED, Attention

AttentionFactory = Callable[..., Attention]
Sources = tuple[int | None, ...]


@dataclasses.dataclass(frozen=True)
class Reads:
    """Stands for a layer that reads the keys and values of an earlier one, and keeps none.

    It has queries and an output of its own (and, with latents, up-projections).

    Args:
      layer: Number of the layer that is read, from 0.
      attention: The reader's factory; default that of the layer that is read. It must make the
        same records and rotate alike; window, scale and so on are its own.

    Source: Brandon et al. 2024, "Reducing Transformer Key-Value Cache Size with Cross-Layer
    Attention" (arXiv:2405.12981), section 3.1; Sun et al. 2024, "You Only Cache Once"
    (arXiv:2405.05254), section 2.

    >>> import functools
    >>> from jaxkv import Decoder, GroupedQueryAttention
    >>> gqa = functools.partial(GroupedQueryAttention, num_heads=4)
    >>> pairs = [gqa, Reads(0), gqa, Reads(2)]
    >>> model = Decoder(97, 32, 4, pairs, rngs=nnx.Rngs(0))
    >>> model.init_cache(batch=1, capacity=64).bytes_per_token  # of 2 layers
    256
    """

    layer: int
    attention: AttentionFactory | None = None


def sources_of(layers: Sequence[AttentionFactory | Reads]) -> Sources:
    """Lists which layer each one reads, `None` where it has keys and values of its own.

    Raises:
      ValueError: If one reads a layer that does not come before it, or that reads itself.
    """
    found = tuple(layer.layer if isinstance(layer, Reads) else None for layer in layers)
    for number, source in enumerate(found):
        if source is None:
            continue
        if isinstance(source, bool) or not isinstance(source, int) or not 0 <= source < number:
            raise ValueError(
                f"layer {number} reads layer {source!r}: want one that comes before it."
            )
        if found[source] is not None:
            raise ValueError(
                f"layer {number} reads layer {source}, which has no keys and values of its own: "
                f"it reads layer {found[source]}."
            )
    return found


def make_attention(
    layers: Sequence[AttentionFactory | Reads], number: int, features: int, rngs: nnx.Rngs
) -> Attention:
    """Makes the module of layer `number`."""
    layer = layers[number]
    if not isinstance(layer, Reads):
        return layer(features, rngs=rngs)
    factory: Any = layers[layer.layer] if layer.attention is None else layer.attention
    return factory(features, rngs=rngs).reading()


def check_readers(modules: Sequence[Attention], sources: Sources) -> None:
    """Checks that every reader can make sense of what its source makes.

    Raises:
      ValueError: Naming both layers and what differs.
    """
    for number, source in enumerate(sources):
        if source is None:
            continue
        reader, read = modules[number], modules[source]
        where = f"layer {number} reads layer {source}"
        if reader.reads_context != read.reads_context:
            keeps, reads = (ATTENDED[module.reads_context] for module in (read, reader))
            raise ValueError(
                f"{where}, which is a {type(read).__name__} and keeps {keeps}: "
                f"{type(reader).__name__} reads {reads}."
            )
        if reader.spec != read.spec:
            raise ValueError(f"{where}, which keeps {read.spec}: it wants {reader.spec}.")
        if reader.rotary != read.rotary:
            raise ValueError(f"{where}, whose keys turn by {read.rotary}: it by {reader.rotary}.")


def check_choices(
    chosen: Sequence[Any], modules: Sequence[Attention], sources: Sources, what: str
) -> None:
    """Checks layouts or codecs, one for each layer: a reader has those of the layer it reads.

    Raises:
      ValueError: If they differ, or a layout does not keep what a reader looks at.
    """
    for number, source in enumerate(sources):
        if source is None:
            continue
        kept = chosen[source]
        if chosen[number] not in (None, kept):
            raise ValueError(
                f"layer {number} reads layer {source}: want the same {what} or None, not "
                f"{chosen[number]} and {kept}."
            )
        if hasattr(kept, "narrowed"):
            kept.narrowed(modules[number].rule)
