# SPDX-License-Identifier: Apache-2.0
"""A decoder some of whose layers read the keys and values of an earlier one."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType

import jaxkv
from jaxkv import Contiguous, Int8, LatentOptions, Paged, Reads, Ring, Rotary, ScoreOptions
from jaxkv.testing.meshes import placed
from jaxkv.testing.tolerances import assert_close

VOCAB, D, B, T, WINDOW = 61, 24, 2, 11, 3
TOKENS = jnp.asarray(np.random.default_rng(0).integers(VOCAB, size=(B, T)), jnp.int32)
GQA = functools.partial(
    jaxkv.GroupedQueryAttention,
    num_heads=4,
    head_dim=8,
    rotary=Rotary(),
    score=ScoreOptions(qk_norm=True),
)
MLA = functools.partial(
    jaxkv.MultiHeadLatentAttention,
    num_heads=4,
    head_dim=8,
    rotary=Rotary(layout="interleaved"),
    score=ScoreOptions(alibi=True),
    latent=LatentOptions(12, 4, query_latent_dim=10),
)


def local(kind: Any) -> Any:
    return functools.partial(kind, window=WINDOW)


NARROW = functools.partial(GQA, window=2)
EXPANDED = functools.partial(
    MLA, latent=LatentOptions(12, 4, query_latent_dim=10, form="expanded"), window=2
)
# Layers of windows and of all tokens are read, also by ones that see less and later than others.
KINDS = {
    "gqa": [local(GQA), Reads(0), GQA, Reads(0, NARROW)],
    "mla": [local(MLA), Reads(0), Reads(0, EXPANDED)],
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "contiguous": {},
    "ring": {"layout": Ring(WINDOW)},
    "paged": {"layout": Paged(4)},
    "int8": {"codec": Int8()},
}


@functools.cache
def model(kind: str, **options: Any) -> jaxkv.Decoder:
    made = KINDS[kind]
    return jaxkv.Decoder(VOCAB, D, len(made), made, mlp_features=16, **options, rngs=nnx.Rngs(0))


@jax.jit
def called(model: jaxkv.Decoder, tokens: jax.Array, cache: Any = None, **given: Any) -> Any:
    return model(tokens, cache=cache, **given)


def rms(x: jax.Array, scale: Any) -> jax.Array:
    return (
        x
        / jnp.sqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)
        * scale[...].reshape((1,) * (x.ndim - 1) + (-1,))
    )


def times(x: jax.Array, kernel: Any) -> jax.Array:
    return jnp.tensordot(x, kernel[...], 1)


def own_record(attn: Any, x: jax.Array, at: jax.Array) -> Any:
    """What a source hands on: keys and values, or latents and rotated keys."""
    if isinstance(attn, jaxkv.GroupedQueryAttention):
        key = attn.rotary.rotate(rms(times(x, attn.key.kernel), attn.key_norm.scale), at)
        return key, times(x, attn.value.kernel)
    down = times(x, attn.latent_down.kernel)
    turned = attn.rotary.rotate(down[:, :, None, 12:], at)
    return rms(down[..., :12], attn.latent_norm.scale), turned


def heads(attn: Any, x: jax.Array, record: Any, at: jax.Array) -> tuple[jax.Array, ...]:
    """The reader's own queries, and the record's keys and values, all for 4 heads."""
    if isinstance(attn, jaxkv.GroupedQueryAttention):
        query = attn.rotary.rotate(rms(times(x, attn.query.kernel), attn.query_norm.scale), at)
        return query, *(jnp.repeat(part, 2, axis=2) for part in record)
    down = rms(times(x, attn.query_down.kernel), attn.query_latent_norm.scale)
    query = times(down, attn.query_up.kernel)
    query = jnp.concatenate([query[..., :8], attn.rotary.rotate(query[..., 8:], at)], axis=-1)
    latent, turned = record
    turned = jnp.broadcast_to(turned, (*turned.shape[:2], 4, 4))
    key = jnp.concatenate([times(latent, attn.key_up), turned], axis=-1)
    return query, key, times(latent, attn.value_up)


def reference(model: jaxkv.Decoder, layers: list[Any], tokens: jax.Array) -> jax.Array:
    """The whole model without a cache, written out: every key and value seen is a plain array."""
    at = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    x = model.embedding[...][tokens]
    records: dict[int, Any] = {}
    for number, block in enumerate(model.blocks):
        attn, normed = block.attention, rms(x, block.attention_norm.scale)
        source = layers[number].layer if isinstance(layers[number], Reads) else number
        if source == number:
            records[number] = own_record(attn, normed, at)
        query, key, value = heads(attn, normed, records[source], at)
        scores = jnp.einsum("btnh,bsnh->bnts", query, key) * query.shape[-1] ** -0.5
        gap = at[0][:, None] - at[0][None, :]
        if attn.score.alibi:  # of 4 heads
            slopes = jnp.array([2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8])[None, :, None, None]
            scores = scores - slopes * gap[None, None].astype(jnp.float32)
        seen = (gap >= 0) & (gap < (attn.rule.window or T))
        weights = jax.nn.softmax(jnp.where(seen[None, None], scores, -jnp.inf), axis=-1)
        out = jnp.einsum("bnts,bsnv->btnv", weights, value)
        x = x + jnp.tensordot(out, attn.out.kernel[...], 2)
        normed = rms(x, block.mlp_norm.scale)
        inner = jax.nn.silu(times(normed, block.mlp.gate.kernel))
        x = x + times(inner * times(normed, block.mlp.up.kernel), block.mlp.down.kernel)
    return times(rms(x, model.norm.scale), model.embedding[...].T)


def loss(logits: jax.Array) -> jax.Array:
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - logits[..., 7]) + jnp.mean(logits**2)


@pytest.mark.parametrize(("kind", "remat"), [("gqa", True), ("mla", False)])
def test_a_call_and_its_gradients_are_those_of_the_written_out_model(
    kind: str, remat: bool
) -> None:
    shared = model(kind, remat=remat)

    @jax.jit
    def both(shared: jaxkv.Decoder) -> Any:
        got = nnx.value_and_grad(lambda m: loss(m(TOKENS)[0]))(shared)
        return got, nnx.value_and_grad(lambda m: loss(reference(m, KINDS[kind], TOKENS)))(shared)

    (got, grads), (want, expected) = both(shared)
    assert_close(got, want)
    found, expected = (dict(nnx.to_flat_state(x)) for x in (grads, expected))
    assert found.keys() == expected.keys()
    for path, value in expected.items():
        assert_close(found[path][...], value[...], what=str(path))


# Rows of 11 and 8 tokens in chunks of 5: longer than the window, some of them of padding only.
COUNTS = [[5, 3], [5, 0], [1, 5]]


def chunked(kind: str, cache: Any) -> tuple[list[np.ndarray], Any]:
    """Feeds each row its tokens in the ragged chunks of `COUNTS`."""
    rows: list[list[np.ndarray]] = [[] for _ in range(B)]
    done = [0] * B
    for counts in COUNTS:
        chunk = np.full((B, 5), VOCAB - 1, np.int32)
        for b, n in enumerate(counts):
            chunk[b, :n] = TOKENS[b, done[b] : done[b] + n]
        lengths = jnp.asarray(counts, jnp.int32)
        out, cache = called(model(kind), jnp.asarray(chunk), cache, lengths=lengths)
        for b, n in enumerate(counts):
            rows[b].append(np.asarray(out[b, :n]))
            done[b] += n
    return [np.concatenate(row) for row in rows], cache


def stepped(kind: str, cache: Any, tokens: jax.Array, width: int = 5) -> tuple[jax.Array, Any]:
    """Feeds one token at a time, in calls of `width` tokens of which the others are padding."""
    outs, given = [], {} if width == 1 else {"lengths": jnp.ones((B,), jnp.int32)}
    for t in range(tokens.shape[1]):
        token = jnp.pad(tokens[:, t : t + 1], ((0, 0), (0, width - 1)))
        out, cache = called(model(kind), token, cache, **given)
        outs.append(out[:, :1])
    return jnp.concatenate(outs, axis=1), cache


# The width of a decode step is 1; where it is 5, the program of the chunks does the steps too.
WAYS = [("gqa", "contiguous", 5), ("gqa", "paged", 5), ("gqa", "int8", 5), ("mla", "ring", 1)]
FULL = [(kind, layout, 6 - width) for kind, layout, width in WAYS]
FULL += [("gqa", "ring", 5), ("gqa", "ring", 1), ("mla", "contiguous", 5), ("mla", "contiguous", 1)]
FULL += [("mla", "paged", 1), ("mla", "int8", 5)]


@pytest.mark.parametrize(
    ("kind", "layout", "width"), WAYS + [pytest.param(*w, marks=pytest.mark.full) for w in FULL]
)
def test_imp_11_every_way_through_a_cache_gives_what_a_call_without_one_does(
    kind: str, layout: str, width: int
) -> None:
    # 8-bit records are off by 1 / 254 of a channel group's largest number, layer after layer.
    limit = 0.05 if layout == "int8" else 1e-5
    want, _ = called(model(kind), TOKENS)
    options = LAYOUTS[layout]
    if (kind, layout) == ("gqa", "ring"):  # which has a layer of all tokens besides
        options = {"layout": [Ring(WINDOW), None, None, None]}
    cache = model(kind).init_cache(B, 16, **options)
    by_token, stored = stepped(kind, cache, TOKENS, width)
    assert_close(by_token, want, limit)
    assert stored.lengths.tolist() == [T, T]
    rows, _ = chunked(kind, cache)
    # The codec rounds once, so that even what it loses does not depend on the chunks.
    for b, row in enumerate(rows):
        assert_close(row, by_token[b, : len(row)], 1e-5)
    if (kind, layout) == ("gqa", "ring"):  # all at once: the write comes round three times
        assert_close(called(model(kind), TOKENS, cache)[0], want)


def test_a_reader_has_no_records_and_a_pair_half_the_bytes() -> None:
    pairs = jaxkv.Decoder(VOCAB, D, 4, [GQA, Reads(0), GQA, Reads(2)], rngs=nnx.Rngs(0))
    plain = jaxkv.Decoder(VOCAB, D, 4, GQA, rngs=nnx.Rngs(0))
    caches = [m.init_cache(B, 16, layout=Paged(4), codec=Int8()) for m in (pairs, plain)]
    assert 2 * caches[0].bytes_per_token == caches[1].bytes_per_token
    records = [sum(x.nbytes for x in jax.tree.leaves(cache.layers)) for cache in caches]
    assert 2 * records[0] == records[1]
    # Yoco: half of the layers read one.
    upper = jaxkv.Decoder(VOCAB, D, 4, [GQA, GQA, Reads(1), Reads(1)], rngs=nnx.Rngs(0))
    assert upper.init_cache(B, 16).nbytes == pairs.init_cache(B, 16).nbytes
    assert [len(cache.layers) for cache in caches] == [2, 4]


@pytest.mark.parametrize(
    ("kind", "gone"),
    [
        ("gqa", {"key.kernel", "value.kernel", "key_norm.scale"}),
        ("mla", {"latent_down.kernel", "latent_norm.scale"}),
    ],
)
def test_a_reader_lacks_the_parameters_of_records_and_no_others(kind: str, gone: set[str]) -> None:
    def names(number: int) -> set[str]:
        state = nnx.state(model(kind).blocks[number].attention, nnx.Param)
        return {".".join(map(str, path)) for path, _ in nnx.to_flat_state(state)}

    assert names(0) - names(1) == gone and names(1) < names(0)


def test_packed_documents_and_dropout_share_too() -> None:
    segments = jnp.asarray([[1] * 6 + [2] * 5] * B, jnp.int32)
    packed, _ = called(model("gqa"), TOKENS, segment_ids=segments)
    alone, _ = called(model("gqa"), jnp.roll(TOKENS, -6, axis=1))
    assert_close(packed[:, 6:], alone[:, :5])
    layers = [functools.partial(GQA, dropout_rate=0.5), Reads(0)]
    noisy = jaxkv.Decoder(VOCAB, D, 2, layers, mlp_features=16, rngs=nnx.Rngs(0))

    @jax.jit
    def drawn(key: jax.Array) -> jax.Array:
        return noisy(TOKENS, deterministic=False, rngs=nnx.Rngs(dropout=key))[0]

    one, other = drawn(jax.random.key(1)), drawn(jax.random.key(2))
    assert float(jnp.max(jnp.abs(one - other))) > 1e-3


def test_rows_are_rolled_back_and_reordered() -> None:
    want, _ = called(model("gqa"), TOKENS)
    cache = model("gqa").init_cache(B, 16, **LAYOUTS["paged"])
    _, cache = stepped("gqa", cache, TOKENS[:, :6])
    swapped = cache.rollback(2).reorder(jnp.array([1, 0], jnp.int32))
    again, _ = stepped("gqa", swapped, TOKENS[::-1, 4:])
    assert_close(again, want[::-1, 4:])


@pytest.mark.parametrize(
    "kind", [AxisType.Explicit, pytest.param(AxisType.Auto, marks=pytest.mark.full)]
)
def test_a_mesh_changes_nothing(kind: AxisType) -> None:
    # 2 KV heads on 4 tensor devices: each is stored twice.
    layers = [functools.partial(GQA, num_kv_heads=2), Reads(0)]
    pair = jaxkv.Decoder(64, D, 2, layers, mlp_features=16, rngs=nnx.Rngs(0))
    want, _ = called(pair, TOKENS)
    mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(kind,) * 2)
    with jax.set_mesh(mesh):
        split = placed(pair, mesh)
        cache = split.init_cache(B, 16, layout=Ring(12))
        cache = jax.device_put(cache, cache.sharding(mesh))
        first, cache = called(split, TOKENS[:, :5], cache)
        last, cache = called(split, TOKENS[:, 5:10], cache)
        found = gradient(split) if kind is AxisType.Auto else None
    assert [layer.spec.kv_heads for layer in cache.layers] == [4]
    assert_close(np.concatenate([first, last], axis=1), want[:, :10])
    if found is not None:
        jax.tree.map(assert_close, found, gradient(pair))


@jax.jit
def gradient(model: jaxkv.Decoder) -> Any:
    return nnx.to_pure_dict(nnx.state(jax.grad(lambda m: jnp.mean(m(TOKENS)[0] ** 2))(model)))


def test_generation_goes_on_from_the_shared_cache() -> None:
    pair = jaxkv.Decoder(VOCAB, D, 2, [GQA, Reads(0)], mlp_features=16, rngs=nnx.Rngs(0))
    made = jaxkv.generate(pair, TOKENS[:, :5], max_new_tokens=4)
    assert made.counts.tolist() == [4, 4]
    scores, _ = called(pair, jnp.concatenate([TOKENS[:, :5], made.tokens], axis=1))
    assert jnp.argmax(scores[:, 4:-1], axis=-1).tolist() == made.tokens.tolist()


WRONG = {
    "layer 1 reads layer 2: want one that comes before it": [GQA, Reads(2), GQA],
    "layer 1 reads layer 1: want one that comes before it": [GQA, Reads(1), GQA],
    "layer 1 reads layer -1: want one that comes before it": [GQA, Reads(-1), GQA],
    "layer 1 reads layer '0': want one that comes before it": [GQA, Reads("0"), GQA],  # type: ignore[arg-type]
    "layer 2 reads layer 1, which has no keys .* it reads layer 0": [GQA, Reads(0), Reads(1)],
    "layer 1 reads layer 0, which keeps KVSpec.*: it wants KVSpec": [
        GQA,
        Reads(0, functools.partial(GQA, num_kv_heads=1)),
        GQA,
    ],
    "layer 2 reads layer 0, whose keys turn by Rotary.*: it by None": [
        GQA,
        GQA,
        Reads(0, functools.partial(GQA, rotary=None)),
    ],
    "layer 2 reads layer 1, which is a CrossAttention": [
        GQA,
        functools.partial(jaxkv.CrossAttention, num_heads=4, head_dim=8),
        Reads(1, functools.partial(jaxkv.MultiHeadAttention, num_heads=4, head_dim=8)),
    ],
    "layer 1 reads layer 0, which is a GroupedQueryAttention .*: CrossAttention reads a context": [
        GQA,
        Reads(0, functools.partial(jaxkv.CrossAttention, num_heads=4)),
        GQA,
    ],
}


@pytest.mark.parametrize("message", WRONG)
def test_what_cannot_be_read_is_named(message: str) -> None:
    with pytest.raises(ValueError, match=message):
        nnx.eval_shape(lambda: jaxkv.Decoder(VOCAB, D, 3, WRONG[message], rngs=nnx.Rngs(0)))


def test_a_reader_has_the_layout_and_the_codec_of_its_source() -> None:
    pair = jaxkv.Decoder(
        VOCAB,
        D,
        2,
        [local(GQA), Reads(0, functools.partial(GQA, score=ScoreOptions(pinned=2), window=3))],
        rngs=nnx.Rngs(0),
    )
    with pytest.raises(ValueError, match="layer 1 reads layer 0: want the same layout or None"):
        pair.init_cache(B, 16, layout=[Contiguous(), Ring(3)])
    with pytest.raises(ValueError, match="layer 1 reads layer 0: want the same codec or None"):
        pair.init_cache(B, 16, codec=[None, Int8()])
    with pytest.raises(ValueError, match="pins fewer tokens than"):
        pair.init_cache(B, 16, layout=Ring(3))
    with pytest.raises(ValueError, match="another model: 1 layers, want 3"):
        called(jaxkv.Decoder(VOCAB, D, 3, GQA, rngs=nnx.Rngs(0)), TOKENS, pair.init_cache(B, 16))
