# SPDX-License-Identifier: Apache-2.0
"""Rotary position embeddings: which channels turn, how fast, and the rotation itself.

A key is rotated once, from its unrotated channels, at its own position. Nothing here turns a stored
key further: repeated turns of 16-bit keys add up rounding until the text is nonsense.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxkv.core.rotary_scaling import Scaling

LAYOUTS = ("half", "interleaved")


@dataclasses.dataclass(frozen=True)
class Rotary:
    """States how positions turn the channel pairs of queries and keys.

    Args:
      theta: Base of the wavelengths, above 1.
      dim: R, rotated channels (the first ones of a head); `None` takes `fraction` of the head.
      fraction: Part of the head that is rotated, in (0, 1], rounded down to whole channels.
      layout: Which channels form pair i: `"half"` i and i + R // 2 (GPT-NeoX, Llama in Hugging
        Face format), `"interleaved"` 2 i and 2 i + 1 (GPT-J, Llama's and DeepSeek's own format).
      scaling: How frequencies are stretched over longer contexts, or `None`.

    Raises:
      ValueError: If a field is out of range, or if both `dim` and `fraction` are given.

    Source: Su et al. 2021, "RoFormer" (arXiv:2104.09864), section 3.2.2.

    >>> Rotary(theta=5e5).frequencies(8).round(6).tolist()
    [1.0, 0.037606, 0.001414, 5.3e-05]
    >>> Rotary(fraction=0.25).width(96)
    24
    """

    theta: float = 10_000.0
    dim: int | None = None
    fraction: float = 1.0
    layout: Literal["half", "interleaved"] = "half"
    scaling: Scaling | None = None

    def __post_init__(self) -> None:
        if not 1 < self.theta < math.inf:
            raise ValueError(f"theta {self.theta}: want a base above 1.")
        if self.dim is not None:
            _check_width(self.dim, "dim")
        if not 0 < self.fraction <= 1:
            raise ValueError(f"fraction {self.fraction}: want 0 < fraction <= 1.")
        if self.dim is not None and self.fraction != 1:
            raise ValueError(f"dim {self.dim} and fraction {self.fraction}: want one of them.")
        if self.layout not in LAYOUTS:
            raise ValueError(f"layout {self.layout!r}: want one of {LAYOUTS}.")
        if self.scaling is not None and not isinstance(self.scaling, Scaling):
            raise ValueError(
                f"scaling {self.scaling!r}: want a Scaling such as YaRN(...), or None."
            )

    def width(self, head_width: int) -> int:
        """Counts the rotated channels R of a head of `head_width` channels.

        Raises:
          ValueError: If R is odd, below 2 or wider than the head.
        """
        if self.dim is None:
            # The small addend keeps 0.58 x 100 at 58, which in binary is slightly less.
            width = math.floor(head_width * self.fraction + 1e-6)
            _check_width(width, f"fraction {self.fraction} of {head_width} channels:")
            return width
        if self.dim > head_width:
            raise ValueError(f"dim {self.dim} is wider than the head, which has {head_width}.")
        return self.dim

    def frequencies(self, head_width: int, length: int | None = None) -> np.ndarray:
        """Computes radians per token of every pair, on the host.

        Args:
          head_width: Channels of a head, rotated or not.
          length: Tokens of the whole sequence, static; only `DynamicNTK` looks at it, `None` is
            its original context.

        Returns:
          `float64[R // 2]`, fastest pair first.
        """
        scaling = Scaling() if self.scaling is None else self.scaling
        return scaling.frequencies(float(self.theta), self.width(head_width), length)

    def magnitude(self) -> float:
        """Returns the factor on cos and sin (YaRN's attention factor, otherwise 1)."""
        return 1.0 if self.scaling is None else self.scaling.magnitude()

    def score_mscale(self) -> float:
        """Returns DeepSeek's factor on the softmax scale, which attention has to apply itself.

        It is 1 unless the scaling is `YaRN` with `mscale_all_dim`.
        """
        return 1.0 if self.scaling is None else self.scaling.score_mscale()

    def check_cacheable(self) -> None:
        """Raises ValueError if keys rotated this way cannot be kept in a cache."""
        reason = None if self.scaling is None else self.scaling.refuses_cache()
        if reason is not None:
            raise ValueError(reason)

    def tables(
        self, positions: jax.Array, head_width: int, length: int | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """Computes cos and sin of every token and pair, times `magnitude()`.

        Args:
          positions: Positions of the tokens, `int32[..., T]`, any sign.
          head_width: Channels of a head, rotated or not.
          length: Tokens of the whole sequence, static; only `DynamicNTK` looks at it, `None` is T.

        Returns:
          cos and sin, `float32[..., T, R // 2]`.

        Raises:
          ValueError: If positions are not integers.

        Numerics: angles are exact to about 1e-6 radians for every int32 position.

        >>> cos, sin = Rotary().tables(jnp.array([0, 1_000_000]), 2)
        >>> cos.round(4).tolist(), sin.round(4).tolist()
        ([[1.0], [0.9368]], [[0.0], [-0.35]])
        """
        positions = jnp.asarray(positions)
        if not jnp.issubdtype(positions.dtype, jnp.integer) or positions.ndim == 0:
            raise ValueError(
                f"positions {positions.dtype}{positions.shape}: want integers of shape [..., T]."
            )
        tokens = positions.shape[-1] if length is None else length
        angles = _angles(positions.astype(jnp.int32), self.frequencies(head_width, tokens))
        magnitude = jnp.float32(self.magnitude())
        return jnp.cos(angles) * magnitude, jnp.sin(angles) * magnitude

    def rotate(self, x: jax.Array, positions: jax.Array, length: int | None = None) -> jax.Array:
        """Turns the first R channels of every head by its token's position.

        Args:
          x: Queries or keys, `[..., T, N, H]`, any float dtype.
          positions: Positions of the tokens, `int32[..., T]`; leading axes equal those of x or
            are 1.
          length: Tokens of the whole sequence, static; only `DynamicNTK` looks at it, `None` is T.

        Returns:
          The shape and dtype of `x`; channels R and beyond are its own, bit for bit.

        Raises:
          ValueError: If shapes or dtypes do not fit.

        Numerics: computed in float32 and rounded once, to the dtype of `x`.

        Sharding: leading axes and heads may be sharded on Auto and Explicit meshes; it consists of
        elementwise operations, slices and concatenations.

        >>> x = jnp.array([1.0, 0.0]).reshape(1, 1, 1, 2)
        >>> Rotary().rotate(x, jnp.array([[1]])).round(4).ravel().tolist()  # cos 1, sin 1
        [0.5403, 0.8415]
        """
        positions = jnp.asarray(positions)
        _check_operands(x, positions)
        with jax.named_scope("rotate"):
            cos, sin = self.tables(positions, x.shape[-1], length)
            cos, sin = jnp.expand_dims(cos, -2), jnp.expand_dims(sin, -2)
            width = 2 * cos.shape[-1]
            turning = lax.slice_in_dim(x, 0, width, axis=-1).astype(jnp.float32)
            first, second = _split(turning, self.layout)
            turned = _join(first * cos - second * sin, second * cos + first * sin, self.layout)
            turned = turned.astype(x.dtype)
            if width == x.shape[-1]:
                return turned
            rest = lax.slice_in_dim(x, width, x.shape[-1], axis=-1)
            return lax.concatenate([turned, rest], dimension=x.ndim - 1)


def half_to_interleaved(width: int, head_width: int | None = None) -> np.ndarray:
    """Orders the channels of a `"half"` kernel for an `"interleaved"` model.

    Args:
      width: R, rotated channels.
      head_width: Channels of a head (`None`: all are rotated); those beyond R stay in place.

    Returns:
      `int64[head_width]` with `interleaved = np.take(half, index, axis)` on the channel axis.

    Raises:
      ValueError: If `width` is odd or wider than the head.

    >>> half_to_interleaved(6, 7).tolist()
    [0, 3, 1, 4, 2, 5, 6]
    """
    head_width = width if head_width is None else head_width
    _check_width(width, "width")
    if width > head_width:
        raise ValueError(f"width {width} is wider than the head, which has {head_width}.")
    turning = np.arange(width).reshape(2, width // 2).T.ravel()
    return np.concatenate([turning, np.arange(width, head_width)])


def interleaved_to_half(width: int, head_width: int | None = None) -> np.ndarray:
    """Orders the channels of an `"interleaved"` kernel for a `"half"` model.

    The exact inverse of `half_to_interleaved`, with the same arguments and errors.

    >>> interleaved_to_half(6, 7).tolist()
    [0, 2, 4, 1, 3, 5, 6]
    """
    return np.argsort(half_to_interleaved(width, head_width))


def _angles(positions: jax.Array, frequencies: np.ndarray) -> jax.Array:
    """Multiplies positions by frequencies, modulo a full turn.

    A float32 product would be off by 0.06 radians at position 1e6. Turns are therefore counted in
    units of 2^-32, where the wrap-around of int32 drops the whole turns for free; what the
    frequency has beyond the unit is small enough to be a float32 product.
    """
    units = frequencies / (2 * math.pi) * 2.0**32
    whole = np.rint(units)
    shape = (1,) * positions.ndim + units.shape
    positions = jnp.expand_dims(positions, -1)
    beyond = positions.astype(jnp.float32) * (units - whole).astype(np.float32).reshape(shape)
    phase = positions * whole.astype(np.int32).reshape(shape)
    phase = phase + jnp.rint(beyond).astype(jnp.int32)
    return phase.astype(jnp.float32) * jnp.float32(2 * math.pi / 2.0**32)


def _split(x: jax.Array, layout: str) -> tuple[jax.Array, jax.Array]:
    """Separates the first and second channels of all pairs, `[..., R]` to twice `[..., R // 2]`."""
    pairs = x.shape[-1] // 2
    if layout == "half":
        return lax.slice_in_dim(x, 0, pairs, axis=-1), lax.slice_in_dim(x, pairs, None, axis=-1)
    x = x.reshape(*x.shape[:-1], pairs, 2)
    return lax.index_in_dim(x, 0, -1, keepdims=False), lax.index_in_dim(x, 1, -1, keepdims=False)


def _join(first: jax.Array, second: jax.Array, layout: str) -> jax.Array:
    """Undoes `_split`."""
    if layout == "half":
        return lax.concatenate([first, second], dimension=first.ndim - 1)
    x = jnp.stack([first, second], axis=-1)
    return x.reshape(*first.shape[:-1], 2 * first.shape[-1])


def _check_width(width: int, what: str) -> None:
    if width < 2 or width % 2:
        raise ValueError(f"{what} {width} rotated channels: want an even number of at least 2.")


def _check_operands(x: jax.Array, positions: jax.Array) -> None:
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"x {x.dtype}{x.shape}: want a float dtype.")
    if x.ndim < 3 or positions.ndim != x.ndim - 2:
        raise ValueError(
            f"x {x.shape} and positions {positions.shape}: want [..., T, N, H] and [..., T]."
        )
    *batch, T = x.shape[:-2]
    if positions.shape[-1] != T or any(
        have not in (1, want) for have, want in zip(positions.shape[:-1], batch, strict=True)
    ):
        raise ValueError(
            f"positions {positions.shape} do not fit x {x.shape}: want {(*batch, T)}, "
            "leading axes may be 1."
        )
