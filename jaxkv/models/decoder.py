# SPDX-License-Identifier: Apache-2.0
"""A decoder-only language model built from any of the attention modules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxkv.attention.heads import check_rate
from jaxkv.attention.options import written_out
from jaxkv.attention.projection import Projection, parameter
from jaxkv.attention.tokens import (
    Tokens,
    cached_tokens,
    check_token_arguments,
    compacted,
    restored,
    uncached_tokens,
)
from jaxkv.cache.codecs import Codec
from jaxkv.cache.index import Layout
from jaxkv.cache.layer_cache import LayerCache
from jaxkv.cache.model_cache import ModelCache, gather_layers
from jaxkv.cache.shared import SharedKV
from jaxkv.core.numerics import Numerics
from jaxkv.core.products import unembed
from jaxkv.core.sharding import out_sharding
from jaxkv.core.trees import check_arrays, check_sizes, is_known
from jaxkv.models.block import Block, Norm, dropped, norm_maker
from jaxkv.models.mlp import MLP
from jaxkv.models.sharing import (
    AttentionFactory,
    Reads,
    check_choices,
    check_readers,
    make_attention,
    sources_of,
)


class Decoder(nnx.Module):
    """Predicts the next token: embedding, blocks, norm, logits.

    Args:
      vocab: Number of tokens.
      features: D.
      num_layers: L.
      attention: A factory `(in_features, *, rngs) -> module`, usually
        `functools.partial(GroupedQueryAttention, num_heads=8)`; or one for each layer, where
        `Reads(3)` is a layer that reads the keys and values of layer 3. Layers of
        `CrossAttention` read the call's `context` (an image's or an encoder's features).
      mlp_features: Inner width of the MLP, default 4 D.
      activation: "silu", "gelu", "gelu_tanh" or "relu".
      gated: A gated MLP.
      norm: "rms" or "layer".
      norm_epsilon: Of the norms.
      tied: Use the embedding as output matrix.
      max_positions: Learn an embedding for each of so many positions; `None`: none (rotary).
      use_bias: Biases in the MLP.
      dropout_rate: Of embeddings and residual branches in training.
      remat: Recompute each block in the backward pass instead of keeping its activations.
      numerics: Formats; give the attention factory the same.
      rngs: Draws the parameters.

    Raises:
      ValueError: If a size or name does not fit.

    >>> import functools
    >>> from jaxkv.attention import GroupedQueryAttention
    >>> factory = functools.partial(GroupedQueryAttention, num_heads=4)
    >>> model = Decoder(97, 32, 2, factory, rngs=nnx.Rngs(0))
    >>> logits, _ = model(jnp.zeros((1, 5), jnp.int32))
    >>> logits.shape, model.init_cache(batch=1, capacity=64).bytes_per_token
    ((1, 5, 97), 256)
    """

    def __init__(
        self,
        vocab: int,
        features: int,
        num_layers: int,
        attention: AttentionFactory | Sequence[AttentionFactory | Reads],
        *,
        mlp_features: int | None = None,
        activation: str = "silu",
        gated: bool = True,
        norm: Norm = "rms",
        norm_epsilon: float = 1e-6,
        tied: bool = True,
        max_positions: int | None = None,
        use_bias: bool = False,
        dropout_rate: float = 0.0,
        remat: bool = False,
        numerics: Numerics | None = None,
        rngs: nnx.Rngs,
    ) -> None:
        check_sizes(
            vocab=vocab,
            features=features,
            num_layers=num_layers,
            mlp_features=mlp_features,
            max_positions=max_positions,
        )
        if not isinstance(rngs, nnx.Rngs):
            raise ValueError(f"rngs={rngs!r}: want nnx.Rngs(seed) to draw the parameters.")
        check_rate(dropout_rate)
        numerics = numerics if numerics is not None else Numerics()
        self.vocab, self.features, self.remat = vocab, features, remat
        self.dropout_rate, self.numerics, self.max_positions = dropout_rate, numerics, max_positions
        dtype = numerics.param_dtype
        init = nnx.initializers.normal(features**-0.5)
        self.embedding = parameter(init, rngs, (vocab, features), dtype, ("vocab", "embed"))
        self.position_embedding = (
            parameter(init, rngs, (max_positions, features), dtype, (None, "embed"))
            if max_positions is not None
            else None
        )
        make_norm = norm_maker(norm, features, norm_epsilon, numerics, rngs)
        blocks = []
        if isinstance(attention, (nnx.Module, str)):
            raise ValueError(
                f"attention is a {type(attention).__name__}: want a factory, such as "
                "functools.partial(GroupedQueryAttention, num_heads=8), or one for each layer."
            )
        layers = _per_layer(attention, num_layers, "attention factories")
        # The layer that each one reads, None where it has keys and values of its own.
        self.sources = sources_of(layers)
        for number in range(num_layers):
            mlp = MLP(
                features,
                mlp_features or 4 * features,
                activation=activation,
                gated=gated,
                use_bias=use_bias,
                numerics=numerics,
                rngs=rngs,
            )
            module = make_attention(layers, number, features, rngs)
            blocks.append(Block(module, mlp, make_norm, dropout_rate))
        check_readers([block.attention for block in blocks], self.sources)
        self.blocks = nnx.List(blocks)
        self.norm = make_norm()
        self.head = (
            None
            if tied
            else Projection(
                (features,), (vocab,), ("embed",), ("vocab",), numerics=numerics, rngs=rngs
            )
        )

    def __call__(
        self,
        tokens: jax.Array,
        *,
        cache: ModelCache | None = None,
        positions: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
        lengths: jax.Array | None = None,
        context: jax.Array | None = None,
        context_lengths: jax.Array | None = None,
        deterministic: bool = True,
        rngs: nnx.Rngs | None = None,
    ) -> tuple[jax.Array, ModelCache | None]:
        """Scores the next token at every position.

        Args:
          tokens: int32 `[B, T]`.
          cache: From `init_cache`; the tokens continue its rows. Donate it.
          positions: int32 `[B|1, T]`, default from each row's (or document's) first token.
          segment_ids: int32 `[B, T]`; 0 is padding; without a cache also packs documents.
          lengths: int32 `[B]`, how many of the T tokens of each row are real.
          context: `[B, S, Dc]` for layers of cross-attention; with a cache, once: it is kept.
          context_lengths: int32 `[B]`, how many of the S context tokens are real.
          deterministic: False switches dropout on.
          rngs: Gives a `dropout` key when dropout is on.

        Returns:
          `(logits [B, T, vocab] in the compute dtype, cache)`.

        Raises:
          ValueError: At trace time, if anything does not fit.
        """
        x, cache = self.hidden(
            tokens,
            cache=cache,
            positions=positions,
            segment_ids=segment_ids,
            lengths=lengths,
            context=context,
            context_lengths=context_lengths,
            deterministic=deterministic,
            rngs=rngs,
        )
        return self.logits(x), cache

    def hidden(
        self,
        tokens: jax.Array,
        *,
        cache: ModelCache | None = None,
        positions: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
        lengths: jax.Array | None = None,
        context: jax.Array | None = None,
        context_lengths: jax.Array | None = None,
        deterministic: bool = True,
        rngs: nnx.Rngs | None = None,
    ) -> tuple[jax.Array, ModelCache | None]:
        """Computes the normalised last hidden states `[B, T, D]`; arguments as in the call."""
        check_arrays(tokens=tokens)
        if tokens.ndim != 2 or not jnp.issubdtype(tokens.dtype, jnp.integer):
            raise ValueError(f"tokens {tokens.dtype}{tokens.shape}: want int32 [B, T].")
        B, T = tokens.shape
        check_token_arguments(B, T, positions, segment_ids, lengths)
        if positions is not None and not self._uses_positions():
            raise ValueError("positions: this model has neither rotation nor learned positions.")
        given = self._given_context(context, context_lengths)
        key = self._dropout_key(deterministic, rngs, cache is not None)
        if cache is None:
            placed = uncached_tokens(B, T, positions, segment_ids, lengths)
            told = {"segment_ids": placed.segments}
            given |= told
            x = self._embed(tokens, placed, key)
            x, _ = self._through(x, placed.positions, told, given, None, key)
            return self.norm(x), None
        self._check_cache(cache, B)
        opened = cache.open(T, lengths, segment_ids)
        assert opened.plans is not None
        plan = opened.plans[0]
        placed = cached_tokens(plan, T, positions)
        x = self._embed(compacted(tokens, plan), placed, None)
        given["lengths"] = plan.count
        x, layers = self._through(x, placed.positions, {}, given, opened, None)
        return restored(self.norm(x), plan), opened.close(layers)

    def logits(self, x: jax.Array) -> jax.Array:
        """Scores all tokens for hidden states `[B, T, D]`: `[B, T, vocab]`."""
        if self.head is not None:
            return self.head(x)
        table = self.embedding[...].astype(x.dtype)
        return unembed(x, table, self.numerics.precision)

    def init_cache(
        self,
        batch: int,
        capacity: int,
        *,
        context_capacity: int | None = None,
        layout: Layout | Sequence[Layout] | None = None,
        codec: Codec | Sequence[Codec] | None = None,
        lanes: int | None = None,
    ) -> ModelCache:
        """Makes an empty cache for all layers.

        Args:
          batch: B, rows.
          capacity: Slots of each row, in tokens.
          context_capacity: The same for the context, if there are layers of cross-attention.
          layout: Where tokens go, one or one for each layer; default contiguous. A layer that
            reads another one's keys and values keeps none: `None`, or the same as that layer's.
          codec: How records are stored, likewise; default the compute dtype.
          lanes: Minor widths are padded to a multiple of this; default 128 on TPU, else 1.

        Returns:
          The cache.

        Raises:
          ValueError: If a size does not fit.
        """
        if self.max_positions is not None and capacity > self.max_positions:
            raise ValueError(
                f"capacity {capacity} is more than the {self.max_positions} learned positions."
            )
        check_sizes(context_capacity=context_capacity)
        if context_capacity is None and self._reads_context():
            raise ValueError(
                "this model has layers of CrossAttention: pass context_capacity=, the slots of "
                "their context (to generate: context=)."
            )
        if context_capacity is not None and not self._reads_context():
            raise ValueError(
                f"context_capacity={context_capacity}: no layer of this model is a CrossAttention."
            )
        modules = [block.attention for block in self.blocks]
        layouts = _per_layer(layout, len(modules), "layouts")
        codecs = _per_layer(codec, len(modules), "codecs")
        check_choices(layouts, modules, self.sources, "layout")
        check_choices(codecs, modules, self.sources, "codec")
        return gather_layers(
            [
                modules[i].init_cache(
                    batch,
                    context_capacity or capacity if modules[i].reads_context else capacity,
                    layout=layouts[i],
                    codec=codecs[i],
                    lanes=lanes,
                )
                for i in self._keepers()
            ]
        )

    def _keepers(self) -> list[int]:
        """Lists the layers that keep records: all but those that read another one's."""
        return [i for i, source in enumerate(self.sources) if source is None]

    def _through(
        self,
        x: jax.Array,
        positions: jax.Array,
        tokens: dict[str, Any],
        context: dict[str, Any],
        cache: ModelCache | None,
        key: jax.Array | None,
    ) -> tuple[jax.Array, list[Any]]:
        """Runs every block, and gives back the caches of those that keep records."""
        held: dict[int, Any] = {}
        # The context itself is for its source.
        of_reader = {name: x for name, x in context.items() if not name.startswith("context")}
        for number, i in enumerate(self._keepers()):
            layer = None if cache is None else cache.layer(number)
            held[i] = SharedKV(layer) if i in self.sources else layer
        for i, block in enumerate(self.blocks):
            source = self.sources[i]
            at, told = (i, context) if source is None else (source, of_reader)
            x, held[at] = self._run(
                block, x, positions, tokens, told, held[at], self._layer_key(key, i)
            )
        # A write may overwrite what a reader still sees, so it comes after the last one.
        return x, [h.close() if isinstance(h, SharedKV) else h for h in held.values()]

    def _run(
        self,
        block: Block,
        x: jax.Array,
        positions: jax.Array,
        tokens: dict[str, Any],
        context: dict[str, Any],
        cache: LayerCache | SharedKV | None,
        dropout_key: jax.Array | None,
    ) -> Any:
        def run(block: Block, x: jax.Array, *given: Any) -> Any:
            names = ("positions", "tokens", "context", "cache", "dropout_key")
            return block(x, **dict(zip(names, given, strict=True)))

        run = jax.checkpoint(run) if self.remat else run
        return run(block, x, positions, tokens, context, cache, dropout_key)

    def _uses_positions(self) -> bool:
        rotated = any(block.attention.rotary is not None for block in self.blocks)
        return rotated or self.position_embedding is not None

    def _reads_context(self) -> bool:
        return any(block.attention.reads_context for block in self.blocks)

    def _given_context(
        self, context: jax.Array | None, lengths: jax.Array | None
    ) -> dict[str, Any]:
        check_arrays(context=context, context_lengths=lengths)
        if (context is not None or lengths is not None) and not self._reads_context():
            raise ValueError("context: no layer of this model is a CrossAttention that reads one.")
        return dict(context=context, context_lengths=lengths)

    @staticmethod
    def _layer_key(key: jax.Array | None, number: int) -> jax.Array | None:
        return None if key is None else jax.random.fold_in(key, number)

    def _embed(self, tokens: jax.Array, placed: Tokens, key: jax.Array | None) -> jax.Array:
        positions = placed.positions
        if placed.segments is not None:  # whatever stands for padding is no token
            tokens = jnp.where(placed.segments != 0, tokens, jnp.zeros((), tokens.dtype))
        self._check_known_tokens(tokens)
        dtype = self.numerics.dtype or self.numerics.param_dtype
        sharding = out_sharding(("batch", None, "embed"), (*tokens.shape, self.features))
        rows = self.embedding[...].at[tokens]
        x = rows.get(mode="fill", wrap_negative_indices=False, out_sharding=sharding).astype(dtype)
        if self.position_embedding is not None and self.max_positions is not None:
            if tokens.shape[1] > self.max_positions:
                raise ValueError(
                    f"{tokens.shape[1]} tokens, but only {self.max_positions} learned positions."
                )
            table = self.position_embedding[...].astype(dtype)
            sharding = out_sharding(("batch", None, "embed"), (*positions.shape, self.features))
            self._check_known_positions(placed)
            rows = table.at[positions]
            added = rows.get(mode="fill", wrap_negative_indices=False, out_sharding=sharding)
            x = x + jnp.broadcast_to(added, x.shape)
        return dropped(x, self.dropout_rate, self._layer_key(key, len(self.blocks)))

    def _dropout_key(
        self, deterministic: bool, rngs: nnx.Rngs | None, cached: bool
    ) -> jax.Array | None:
        rates = [self.dropout_rate, *(b.attention.dropout_rate for b in self.blocks)]
        if deterministic or not any(rates):
            return None
        if cached:
            raise ValueError("dropout is for training: call with deterministic=True and a cache.")
        if rngs is None:
            raise ValueError("deterministic=False needs rngs=nnx.Rngs(dropout=key) in the call.")
        return rngs.dropout()

    def _check_known_tokens(self, tokens: jax.Array) -> None:
        """Checks tokens outside `jit`; inside, an unknown one gets an embedding of NaN."""
        if not is_known(tokens) or not tokens.size:
            return
        values = np.asarray(tokens)
        if values.min() < 0 or values.max() >= self.vocab:
            raise ValueError(
                f"tokens of {values.min()} to {values.max()}: want 0 to {self.vocab - 1}."
            )

    def _check_known_positions(self, placed: Tokens) -> None:
        """Checks learned positions outside `jit`; inside, an unknown one gets NaN."""
        if not is_known(placed.positions) or not is_known(placed.segments):
            return
        values = np.asarray(placed.positions)
        if placed.segments is not None:
            values = np.where(np.asarray(placed.segments) != 0, values, 0)
        if values.size and (values.min() < 0 or values.max() >= self.max_positions):
            raise ValueError(
                f"positions of {values.min()} to {values.max()}: want 0 to "
                f"{(self.max_positions or 0) - 1}."
            )

    def _check_cache(self, cache: ModelCache, batch: int) -> None:
        if not isinstance(cache, ModelCache):
            raise ValueError(f"cache is a {type(cache).__name__}: want a ModelCache of init_cache.")
        cache.check_alive()
        keepers = self._keepers()
        if len(cache.layers) != len(keepers):
            raise ValueError(
                f"this cache belongs to another model: {len(cache.layers)} layers, want "
                f"{len(keepers)}."
            )
        for number, i in enumerate(keepers):
            self.blocks[i].attention.check_cache(cache.layer(number), batch)


# Its metaclass would show `(*args, **kwargs)`.
Decoder.__signature__ = written_out(Decoder.__init__)


def _per_layer(given: Any, number: int, what: str) -> list[Any]:
    """Repeats one choice for every layer, or checks that there is one for each."""
    if not isinstance(given, Sequence):
        return [given] * number
    if len(given) != number:
        raise ValueError(f"{len(given)} {what} for {number} layers: want one, or one for each.")
    return list(given)
