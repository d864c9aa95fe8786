# SPDX-License-Identifier: Apache-2.0
"""The loss against its definition in float64, and its gradient against finite differences."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.training import Batch, Program, TrainConfig, next_token_loss, parameters
from jaxkv.training.step import summed_gradient
from tests.training.tiny import decoder

RNG = np.random.default_rng(1)


def loops(logits: np.ndarray, batch: Batch) -> tuple[float, int]:
    """Sums -log p over the tokens that follow one of their own document and are not masked."""
    total, count = 0.0, 0
    for b, t in np.ndindex(*batch.targets.shape):
        if batch.segment_ids is not None:
            before, after = batch.segment_ids[b, t], batch.segment_ids[b, t + 1]
            if before != after or after == 0:
                continue
        if batch.mask is not None and not batch.mask[b, t + 1]:
            continue
        x = logits[b, t].astype(np.float64)
        total -= x[batch.tokens[b, t + 1]] - np.log(np.exp(x).sum())
        count += 1
    return total, count


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_loss_is_its_definition(dtype: str, masked: bool, packed: bool) -> None:
    segments = np.array([[1, 1, 1, 2, 2, 2, 0], [0, 0, 3, 3, 0, 3, 3], [5, 5, 5, 5, 5, 5, 5]])
    batch = Batch(
        RNG.integers(0, 11, (3, 7)).astype(np.int32),
        segments.astype(np.int32) if packed else None,
        RNG.random((3, 7)) < 0.7 if masked else None,
    )
    logits = jnp.asarray(5 * RNG.normal(size=(3, 6, 11)), dtype)
    total, count = jax.jit(next_token_loss)(logits, batch)
    want, number = loops(np.asarray(logits, np.float64), batch)
    assert (total.dtype, int(count)) == (jnp.float32, number)
    assert float(total) == pytest.approx(want, rel=1e-5)


def test_what_stands_in_padding_does_not_matter() -> None:
    batch = Batch(np.array([[1, 2, 0, 0]], np.int32), np.array([[1, 1, 0, 0]], np.int32))
    logits = jnp.zeros((1, 3, 4)).at[:, 1:].set(jnp.nan)
    (total, _), grad = jax.value_and_grad(next_token_loss, has_aux=True)(logits, batch)
    assert float(total) == pytest.approx(np.log(4))
    np.testing.assert_allclose(grad, [[[0.25, 0.25, -0.75, 0.25], [0] * 4, [0] * 4]])


def test_logits_of_another_batch_are_refused() -> None:
    batch = Batch(jnp.zeros((2, 5), jnp.int32))
    with pytest.raises(ValueError, match=r"logits \(2, 5, 8\): want \[2, 4, vocab\]"):
        next_token_loss(jnp.zeros((2, 5, 8)), batch)


def test_gradient_is_the_slope_of_the_loss() -> None:
    model = decoder(norm="layer", use_bias=True, tied=False)
    program = Program.of(model, TrainConfig(steps=1))
    batch = Batch(jnp.asarray(RNG.integers(0, 256, (1, 2, 10)), jnp.int32))
    params = parameters(model)
    run = jax.jit(lambda p: summed_gradient(program, p, batch, jax.random.key(0)))
    _, count, grads = run(params)
    flat, tree = jax.tree.flatten(params)
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    wanted = (
        "'embedding'",
        "'key']['kernel'",
        "'down']['kernel'",
        "'norm']['scale'",
        "'up']['bias'",
    )
    checked = [i for i, path in enumerate(paths) if any(name in path for name in wanted)]
    assert len(checked) >= len(wanted)
    for i in checked:
        slope = jax.tree.leaves(grads)[i]
        direction = slope / jnp.linalg.norm(slope.ravel())
        ends = []
        for step in (0.02, -0.02):
            moved = [*flat[:i], flat[i] + step * direction, *flat[i + 1 :]]
            ends.append(float(run(jax.tree.unflatten(tree, moved))[0]))
        measured = (ends[0] - ends[1]) / 0.04
        assert measured == pytest.approx(float(jnp.sum(slope * direction)), rel=2e-2), paths[i]
    assert int(count) == 18
