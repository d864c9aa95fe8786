# SPDX-License-Identifier: Apache-2.0
"""The options that attention modules share."""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable
from typing import Any, Literal, TypedDict, get_type_hints

from flax import nnx

from jaxkv.core.alibi import alibi_slopes
from jaxkv.core.numerics import Numerics
from jaxkv.core.rotary import Rotary
from jaxkv.core.trees import check_constants, check_sizes

Initializer = Callable[..., Any]
UseBias = bool | Literal["qkv"]


@dataclasses.dataclass(frozen=True)
class ScoreOptions:
    """States how scores are made of queries and keys.

    Args:
      scale: Multiplies the scores; `None` is the key width to the power -1/2 (with MLA's rotary
        part, and YaRN's factor where there is one).
      soft_cap: Squashes scores into (-cap, cap); `None` is off.
      sink_logits: Learn a logit per head that joins the softmax without a value.
      qk_norm: RMS-normalise each query and key head before the rotation (Qwen3).
      pinned: First tokens of a row that a window never hides (StreamingLLM's sinks).
      alibi: Lower each score by its head's slope times the distance in tokens (ALiBi,
        arXiv:2108.12409): True for the slopes of `alibi_slopes`, or one for each query head.
        Slopes are constants, not parameters. A rotation may be there as well.

    Raises:
      ValueError: If a number is out of range.
    """

    scale: float | None = None
    soft_cap: float | None = None
    sink_logits: bool = False
    qk_norm: bool = False
    pinned: int = 0
    alibi: bool | tuple[float, ...] = False

    def __post_init__(self) -> None:
        check_constants(scale=self.scale, soft_cap=self.soft_cap)
        if self.scale is not None and not math.isfinite(self.scale):
            raise ValueError(f"scale={self.scale}: want a finite number, or None.")
        if self.soft_cap is not None and not 0 < self.soft_cap < math.inf:
            raise ValueError(f"soft_cap={self.soft_cap}: want a finite number above 0, or None.")
        if isinstance(self.pinned, bool) or not isinstance(self.pinned, int) or self.pinned < 0:
            raise ValueError(f"pinned={self.pinned}: want at least 0 tokens.")
        given = self.alibi if isinstance(self.alibi, tuple) else ()
        numbers = all(isinstance(x, (int, float)) and math.isfinite(x) for x in given)
        if not isinstance(self.alibi, (bool, tuple)) or not numbers:
            raise ValueError(f"alibi={self.alibi!r}: want True, False or a tuple of finite slopes.")

    def slopes(self, num_heads: int) -> tuple[float, ...] | None:
        """Gives ALiBi's slope of each of N heads, or `None` without ALiBi.

        Raises:
          ValueError: If there are slopes for another number of heads.
        """
        if isinstance(self.alibi, bool):
            return alibi_slopes(num_heads) if self.alibi else None
        if len(self.alibi) != num_heads:
            raise ValueError(f"alibi has {len(self.alibi)} slopes: want {num_heads}, one a head.")
        return self.alibi


class HeadOptions(TypedDict, total=False):
    """Keyword arguments that all attention modules share.

    Attributes:
      head_dim: H, default `in_features // num_heads`.
      value_dim: V, default H.
      out_features: Width of the result, default `in_features`.
      causal: Hide later tokens, default True.
      window: W keys, self included, or (left, right); default all.
      rotary: `Rotary()`, or None (the default) for no rotation.
      score: `ScoreOptions`.
      use_bias: True for all projections, "qkv" for all but the output's; default False.
      dropout_rate: Of attention weights in training, default 0.
      numerics: `Numerics`.
      kernel_init: Called on 2-D kernels, so any initialiser sees the right fan-in.
      bias_init: Likewise for biases.
      rngs: `nnx.Rngs`, required.
    """

    head_dim: int | None
    value_dim: int | None
    out_features: int | None
    causal: bool
    window: int | tuple[int, int] | None
    rotary: Rotary | None
    score: ScoreOptions
    use_bias: UseBias
    dropout_rate: float
    numerics: Numerics
    kernel_init: Initializer
    bias_init: Initializer
    rngs: nnx.Rngs


# Of the options that have one other than None.
DEFAULTS = {
    "causal": True,
    "score": ScoreOptions(),
    "use_bias": False,
    "dropout_rate": 0.0,
    "numerics": Numerics(),
}


def written_out(init: Callable[..., None]) -> inspect.Signature:
    """Gives a constructor's signature without `self` and with `HeadOptions` argument by argument.

    >>> def __init__(self, num_heads, **options): ...
    >>> str(written_out(__init__))[:45]
    '(num_heads, *, head_dim: int | None = None, v'
    """
    parameters = list(inspect.signature(init).parameters.values())[1:]
    own = [p for p in parameters if p.kind is not p.VAR_KEYWORD]
    if len(own) == len(parameters):
        return inspect.Signature(own)
    shared = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            annotation=kind,
            default=inspect.Parameter.empty if name == "rngs" else DEFAULTS.get(name),
        )
        for name, kind in get_type_hints(HeadOptions).items()
    ]
    return inspect.Signature([*own, *shared])


KINDS = {"rotary": Rotary, "score": ScoreOptions, "numerics": Numerics, "rngs": nnx.Rngs}


def check_options(options: HeadOptions) -> None:
    """Checks the names of keyword arguments, which Python does not do for a `TypedDict`.

    Raises:
      ValueError: Naming what is unknown, and what there is.
    """
    if unknown := sorted(set(options) - set(HeadOptions.__annotations__)):
        raise ValueError(
            f"unknown options {unknown}: want of {sorted(HeadOptions.__annotations__)}."
        )
    check_sizes(**{name: options.get(name) for name in ("head_dim", "value_dim", "out_features")})
    if options.get("use_bias", False) not in (True, False, "qkv"):
        raise ValueError(f"use_bias={options.get('use_bias')!r}: want True, False or 'qkv'.")
    for name, kind in KINDS.items():
        value = options.get(name)
        if value is not None and not isinstance(value, kind):
            raise ValueError(f"{name}={value!r}: want a {kind.__name__}.")
