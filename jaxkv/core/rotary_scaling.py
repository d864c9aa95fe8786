# SPDX-License-Identifier: Apache-2.0
"""Ways to stretch rotary frequencies over longer contexts, computed on the host in float64."""

from __future__ import annotations

import dataclasses
import math
import operator

import numpy as np


@dataclasses.dataclass(frozen=True)
class Scaling:
    """Leaves the frequencies as they are; subclasses change them.

    A new scaling is one frozen subclass. Only what it changes needs a method.

    Source: Su et al. 2021, "RoFormer" (arXiv:2104.09864), section 3.2.2.

    >>> Scaling().frequencies(10_000.0, 4, None).tolist()
    [1.0, 0.01]
    """

    def frequencies(self, theta: float, width: int, length: int | None) -> np.ndarray:
        """Computes radians per token of every channel pair.

        Args:
          theta: Base of the geometric series of wavelengths.
          width: R, rotated channels.
          length: Tokens of the whole sequence, static; only `DynamicNTK` looks at it.

        Returns:
          `float64[R // 2]`, fastest pair first.
        """
        return theta ** (-np.arange(0, width, 2, dtype=np.float64) / width)

    def magnitude(self) -> float:
        """Returns the factor on cos and sin."""
        return 1.0

    def score_mscale(self) -> float:
        """Returns the factor on the softmax scale."""
        return 1.0

    def refuses_cache(self) -> str | None:
        """Says why keys rotated this way cannot be kept, or `None` if they can."""
        return None


@dataclasses.dataclass(frozen=True)
class Linear(Scaling):
    """Divides every frequency by `factor` (position interpolation).

    Args:
      factor: Stretch of the context, at least 1.

    Raises:
      ValueError: If `factor` is below 1.

    Source: Chen et al. 2023, "Extending context window ... via positional interpolation"
    (arXiv:2306.15595), section 2.3.

    >>> Linear(8.0).frequencies(10_000.0, 4, None).tolist()
    [0.125, 0.00125]
    """

    factor: float

    def __post_init__(self) -> None:
        _check_factor(self)

    def frequencies(self, theta: float, width: int, length: int | None) -> np.ndarray:
        return super().frequencies(theta, width, length) / self.factor


@dataclasses.dataclass(frozen=True)
class NTK(Scaling):
    """Raises the base, so that the slowest pair is stretched by `factor` and the fastest not.

    Args:
      factor: Stretch of the slowest pair, at least 1.

    Raises:
      ValueError: If `factor` is below 1, or if there is only one channel pair.

    Source: Peng et al. 2023, "YaRN" (arXiv:2309.00071), section 3.1.

    >>> (Scaling().frequencies(1e4, 8, None)[3] / NTK(4.0).frequencies(1e4, 8, None)[3]).round(9)
    np.float64(4.0)
    """

    factor: float

    def __post_init__(self) -> None:
        _check_factor(self)

    def frequencies(self, theta: float, width: int, length: int | None) -> np.ndarray:
        return super().frequencies(_stretched_base(theta, width, self.factor), width, length)


@dataclasses.dataclass(frozen=True)
class DynamicNTK(Scaling):
    """Raises the base with the length of the sequence, beyond the original context only.

    All keys of a sequence have to be rotated with the base of its final length, so this works for
    whole sequences and is refused with a cache, which keeps keys of earlier lengths.

    Args:
      factor: Stretch at which the base starts to grow, at least 1.
      original_context: Tokens the model was trained on.

    Raises:
      ValueError: If `factor` is below 1, `original_context` is below 1, or if there is only one
        channel pair.

    Source: Peng et al. 2023, "YaRN" (arXiv:2309.00071), section 3.3; Hugging Face
    rope type `dynamic` for the formula with a factor.

    >>> base = DynamicNTK(2.0, 8).frequencies(1e4, 8, 9)[1] ** -4  # 10000 up to 8 tokens
    >>> round(float(base), 2)
    13465.22
    """

    factor: float
    original_context: int

    def __post_init__(self) -> None:
        _check_factor(self)
        _check_context(self.original_context)

    def frequencies(self, theta: float, width: int, length: int | None) -> np.ndarray:
        tokens = self.original_context if length is None else _static_length(length)
        stretch = max(tokens, self.original_context) / self.original_context
        growth = self.factor * stretch - (self.factor - 1)
        return super().frequencies(_stretched_base(theta, width, growth), width, length)

    def refuses_cache(self) -> str | None:
        return (
            "DynamicNTK changes the base as a sequence grows, but a cache keeps keys that were "
            "rotated with an earlier base; with a cache use NTK(factor) or "
            "YaRN(factor, original_context), whose frequencies are fixed."
        )


@dataclasses.dataclass(frozen=True)
class Llama3(Scaling):
    """Divides slow frequencies by `factor`, keeps fast ones and blends in between.

    A pair is fast if it turns more than `high_freq_factor` times within the original context and
    slow if it turns less than `low_freq_factor` times.

    Args:
      factor: Stretch of the slow pairs, at least 1.
      low_freq_factor: Turns at which the blend starts.
      high_freq_factor: Turns at which it ends.
      original_context: Tokens the model was trained on.

    Raises:
      ValueError: If `factor` or `original_context` is below 1, or unless
        `0 < low_freq_factor < high_freq_factor`.

    Source: Llama 3.1 reference code and Hugging Face rope type `llama3`.

    >>> plain = Scaling().frequencies(5e5, 128, None)
    >>> ratio = plain / Llama3(8.0).frequencies(5e5, 128, None)
    >>> ratio[[0, 28, 35, 63]].round(6).tolist()
    [1.0, 1.0, 8.0, 8.0]
    """

    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192

    def __post_init__(self) -> None:
        _check_factor(self)
        _check_context(self.original_context)
        if not 0 < self.low_freq_factor < self.high_freq_factor:
            raise ValueError(
                f"low_freq_factor {self.low_freq_factor} and high_freq_factor "
                f"{self.high_freq_factor}: want 0 < low < high."
            )

    def frequencies(self, theta: float, width: int, length: int | None) -> np.ndarray:
        plain = super().frequencies(theta, width, length)
        turns = plain * self.original_context / (2 * math.pi)
        span = self.high_freq_factor - self.low_freq_factor
        keep = np.clip((turns - self.low_freq_factor) / span, 0.0, 1.0)
        return plain * (keep + (1.0 - keep) / self.factor)


@dataclasses.dataclass(frozen=True)
class YaRN(Scaling):
    """Divides slow frequencies by `factor`, ramps over the pair index, and rescales scores.

    Args:
      factor: Stretch of the slow pairs, at least 1.
      original_context: Tokens the model was trained on (never the stretched length).
      beta_fast: Turns within the original context above which a pair stays as it is.
      beta_slow: Turns below which a pair is stretched fully.
      mscale: Numerator of the magnitude; counts only together with `mscale_all_dim`.
      mscale_all_dim: Denominator of the magnitude, and DeepSeek's factor on the softmax scale.
        0 is the same as `None`, as in Hugging Face configs.
      attention_factor: The magnitude itself, instead of one derived from the three above.
      truncate: Round the ends of the ramp outwards to whole pairs.

    Raises:
      ValueError: If `factor` or `original_context` is below 1, an mscale is negative,
        `attention_factor` is not positive, or unless `0 < beta_slow <= beta_fast`.

    Source: Peng et al. 2023, "YaRN" (arXiv:2309.00071), sections 3.2 and 3.4; Hugging Face rope
    type `yarn` for mscale, DeepSeek-V2 (arXiv:2405.04434) for the softmax scale.

    >>> round(YaRN(16.0, 4096).magnitude(), 6)
    1.277259
    >>> YaRN(16.0, 4096, mscale=1.0, mscale_all_dim=1.0).magnitude()
    1.0
    >>> round(YaRN(40.0, 4096, mscale=1.0, mscale_all_dim=1.0).score_mscale(), 4)
    1.8739
    """

    factor: float
    original_context: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        _check_factor(self)
        _check_context(self.original_context)
        if not 0 < self.beta_slow <= self.beta_fast < math.inf:
            raise ValueError(
                f"beta_fast {self.beta_fast} and beta_slow {self.beta_slow} are turns within the "
                "original context: want 0 < beta_slow <= beta_fast."
            )
        for name in ("mscale", "mscale_all_dim"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < math.inf:
                raise ValueError(f"{name} {value}: want a number of at least 0, or None.")
        if self.attention_factor is not None and not 0 < self.attention_factor < math.inf:
            raise ValueError(f"attention_factor {self.attention_factor}: want above 0, or None.")

    def frequencies(self, theta: float, width: int, length: int | None) -> np.ndarray:
        plain = super().frequencies(theta, width, length)

        def pair_that_turns(turns: float) -> float:
            ratio = self.original_context / (turns * 2 * math.pi)
            return width * math.log(ratio) / (2 * math.log(theta))

        low, high = pair_that_turns(self.beta_fast), pair_that_turns(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, width - 1)
        # The least span makes a ramp of no length a step. It also keeps contexts that end before
        # the first pair or after the last one the right way round.
        ramp = np.clip((np.arange(width // 2) - low) / max(high - low, 1e-3), 0.0, 1.0)
        return plain * (1.0 - ramp + ramp / self.factor)

    def magnitude(self) -> float:
        if self.attention_factor is not None:
            return float(self.attention_factor)
        if self.mscale and self.mscale_all_dim:
            return self._mscale(self.mscale) / self._mscale(self.mscale_all_dim)
        return self._mscale(1.0)

    def score_mscale(self) -> float:
        return self._mscale(self.mscale_all_dim) ** 2 if self.mscale_all_dim else 1.0

    def _mscale(self, weight: float) -> float:
        return 1.0 + 0.1 * weight * math.log(self.factor)


def _stretched_base(theta: float, width: int, growth: float) -> float:
    """Raises the base so that the slowest of `width // 2` pairs turns `growth` times slower."""
    if width < 4:
        raise ValueError(f"NTK scaling needs at least 4 rotated channels, not {width}.")
    return theta * growth ** (width / (width - 2))


def _check_factor(scaling: Linear | NTK | DynamicNTK | Llama3 | YaRN) -> None:
    if not 1 <= scaling.factor < math.inf:
        raise ValueError(f"{type(scaling).__name__} factor {scaling.factor}: want at least 1.")


def _check_context(tokens: int) -> None:
    if not 1 <= tokens < math.inf:
        raise ValueError(f"original_context {tokens}: want at least 1 token.")


def _static_length(length: int) -> int:
    try:
        tokens = operator.index(length)
    except TypeError as error:
        raise ValueError(f"length {length!r} must be a static int.") from error
    if tokens < 1:
        raise ValueError(f"length {tokens}: want at least 1 token.")
    return tokens
