# SPDX-License-Identifier: Apache-2.0
"""What a whole model keeps of a token, layer by layer, and nothing else about it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Literal

from jaxkv.cache.spec import KVSpec
from jaxkv.core.rotary import Rotary

Kind = Literal["full", "window", "state", "shared"]
STORING = ("full", "window")


@dataclasses.dataclass(frozen=True)
class LayerSpec:
    """Describes what one layer keeps.

    Args:
      kind: `"full"` keeps every token, `"window"` the last `window` ones, `"state"` none but a
        state of fixed size (linear attention), `"shared"` nothing (it reads another layer's cache).
      num_heads: N, query heads.
      spec: The record of one token; `None` for `"state"` and `"shared"`.
      window: W, tokens that a query sees, itself included; only for `"window"`.
      expanded: The record of a latent layer written out per head, for comparison; `None` where
        that is `spec` with N KV heads.
      rotary: How positions turn queries and keys, `None` without rotary embeddings.
      state_bytes: Bytes of a fixed state per row; only for `"state"`.
      source: Number of the layer whose cache a `"shared"` layer reads, `None` where not known.
      alibi: Slopes by which each head's scores fall with distance, `None` without ALiBi.

    Raises:
      ValueError: If the kind does not go with the other fields, or N is not a multiple of K.

    >>> LayerSpec("full", 32, KVSpec(8, 128, 128)).per_head.elements_per_token
    8192
    """

    kind: Kind
    num_heads: int
    spec: KVSpec | None = None
    window: int | None = None
    expanded: KVSpec | None = None
    rotary: Rotary | None = None
    state_bytes: int = 0
    source: int | None = None
    alibi: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if self.kind not in (*STORING, "state", "shared"):
            raise ValueError(f"layer kind {self.kind!r}: want full, window, state or shared.")
        if (self.spec is not None) != (self.kind in STORING):
            raise ValueError(
                f"a {self.kind} layer with spec {self.spec}: full and window need one."
            )
        if (self.window is not None) != (self.kind == "window"):
            raise ValueError(
                f"a {self.kind} layer with window {self.window}: window layers need one."
            )
        if self.window is not None and self.window < 1:
            raise ValueError(f"window {self.window}: want at least 1 token.")
        if self.state_bytes < 0 or (self.state_bytes and self.kind != "state"):
            raise ValueError(f"a {self.kind} layer with state_bytes {self.state_bytes}.")
        if self.source is not None and self.kind != "shared":
            raise ValueError(f"a {self.kind} layer with source {self.source}.")
        if self.spec is not None and self.num_heads % self.spec.kv_heads:
            raise ValueError(
                f"{self.num_heads} query heads are no multiple of {self.spec.kv_heads} KV heads."
            )

    @property
    def per_head(self) -> KVSpec | None:
        """Returns the record if every query head had a KV head of its own."""
        if self.spec is None or self.expanded is not None:
            return self.expanded
        return dataclasses.replace(self.spec, kv_heads=self.num_heads)


@dataclasses.dataclass(frozen=True)
class ModelGeometry:
    """Describes what a whole model keeps.

    Args:
      name: Name for tables and messages.
      vocab: Entries of the embedding table.
      features: D, model width.
      layers: One `LayerSpec` per layer, first layer first.
      max_context: Tokens the model was made for.
      parameters: Parameters of the whole model, experts included; `None` if not known.

    Raises:
      ValueError: If there is no layer, a size is below 1, or a layer reads one that does not come
        before it or keeps nothing.
    """

    name: str
    vocab: int
    features: int
    layers: tuple[LayerSpec, ...]
    max_context: int
    parameters: int | None = None

    def __post_init__(self) -> None:
        if not self.layers:
            raise ValueError(f"{self.name}: a model has at least one layer.")
        if min(self.vocab, self.features, self.max_context) < 1:
            raise ValueError(
                f"{self.name}: vocab {self.vocab}, features {self.features} and max_context "
                f"{self.max_context} are at least 1."
            )
        for number, layer in enumerate(self.layers):
            source = layer.source
            if source is None:
                continue
            if not 0 <= source < number or self.layers[source].spec is None:
                raise ValueError(
                    f"{self.name}: layer {number} reads layer {source}: want an earlier one that "
                    "keeps tokens."
                )

    def per_head(self) -> ModelGeometry:
        """Gives every query head a KV head of its own (the multi-head form of each layer)."""
        layers = tuple(dataclasses.replace(layer, spec=layer.per_head) for layer in self.layers)
        return dataclasses.replace(self, layers=layers)

    def with_kv_heads(self, kv_heads: int) -> ModelGeometry:
        """Stores `kv_heads` heads in every layer that keeps tokens.

        Raises:
          ValueError: If a layer's query heads are no multiple of `kv_heads`.
        """
        return self.with_specs(lambda spec: dataclasses.replace(spec, kv_heads=kv_heads))

    def with_specs(self, change: Callable[[KVSpec], KVSpec]) -> ModelGeometry:
        """Changes the record of every layer that keeps tokens."""
        layers = tuple(
            layer if layer.spec is None else dataclasses.replace(layer, spec=change(layer.spec))
            for layer in self.layers
        )
        return dataclasses.replace(self, layers=layers)
