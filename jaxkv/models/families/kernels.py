# SPDX-License-Identifier: Apache-2.0
"""Weights of linear layers as Hugging Face stores them, (out, in), and as a decoder has them."""

from __future__ import annotations

from collections.abc import Iterator

from jaxkv.models.families.loading import Weight


def linear(target: str, source: str, inputs: int, outputs: int, bias: bool) -> Iterator[Weight]:
    """Lists a plain layer: `(out, in)` becomes `[in, out]`."""
    yield Weight(f"{target}.kernel", f"{source}.weight", (outputs, inputs), lambda w: w.T)
    if bias:
        yield Weight(f"{target}.bias", f"{source}.bias", (outputs,))


def into_heads(
    target: str, source: str, inputs: int, heads: int, width: int, bias: bool
) -> Iterator[Weight]:
    """Lists a projection to heads: `(N * H, D)` becomes `[D, N, H]`."""
    yield Weight(
        f"{target}.kernel",
        f"{source}.weight",
        (heads * width, inputs),
        lambda w: w.reshape(heads, width, inputs).transpose(2, 0, 1),
    )
    if bias:
        yield Weight(
            f"{target}.bias",
            f"{source}.bias",
            (heads * width,),
            lambda b: b.reshape(heads, width),
        )


def out_of_heads(
    target: str, source: str, heads: int, width: int, outputs: int, bias: bool
) -> Iterator[Weight]:
    """Lists a projection from heads: `(D, N * V)` becomes `[N, V, D]`."""
    yield Weight(
        f"{target}.kernel",
        f"{source}.weight",
        (outputs, heads * width),
        lambda w: w.reshape(outputs, heads, width).transpose(1, 2, 0),
    )
    if bias:
        yield Weight(f"{target}.bias", f"{source}.bias", (outputs,))


def norm(target: str, source: str, width: int) -> Iterator[Weight]:
    """Lists a norm's scale."""
    yield Weight(f"{target}.scale", f"{source}.weight", (width,))


def gated_mlp(target: str, source: str, width: int, inner: int, bias: bool) -> Iterator[Weight]:
    """Lists a gated MLP."""
    yield from linear(f"{target}.gate", f"{source}.gate_proj", width, inner, bias)
    yield from linear(f"{target}.up", f"{source}.up_proj", width, inner, bias)
    yield from linear(f"{target}.down", f"{source}.down_proj", inner, width, bias)


def around_blocks(vocab: int, width: int, layers: int, tied: bool) -> Iterator[Weight]:
    """Lists embedding, head and all norms of model width."""
    yield Weight("embedding", "model.embed_tokens.weight", (vocab, width))
    for i in range(layers):
        source, target = f"model.layers.{i}", f"blocks.{i}"
        yield from norm(f"{target}.attention_norm", f"{source}.input_layernorm", width)
        yield from norm(f"{target}.mlp_norm", f"{source}.post_attention_layernorm", width)
    yield from norm("norm", "model.norm", width)
    if not tied:
        yield from linear("head", "lm_head", width, vocab, bias=False)
