# SPDX-License-Identifier: Apache-2.0
"""Trains and measures the variants of one comparison."""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from jaxkv.cli.caches import DEFAULT, CacheChoice
from jaxkv.cli.variants import (
    VARIANTS,
    Size,
    count_parameters,
    default_mlp,
    make_decoder,
    matched_mlp,
)
from jaxkv.core.numerics import Numerics
from jaxkv.generation import Sampling, generate
from jaxkv.generation.evaluation import kept_bytes
from jaxkv.generation.timing import measure_decoding
from jaxkv.models.decoder import Decoder
from jaxkv.training import TextData, TrainConfig, train

BATCHES = (1, 8)
PROMPT = "MACBETH:\n"
TRAINING_SHARE = 0.75  # of the work on a variant, for the progress shown
SAMPLE_TOKENS = 240
SAMPLING = Sampling(0.8, min_p=0.05)


@dataclasses.dataclass
class CacheResult:
    """What was measured of one variant's decoding through one cache.

    Attributes:
      cache: Its name.
      prompt: Tokens of the text that it was given in one call, before the others one by one.
      bytes_per_token: Bytes of a live cache's records over the tokens that it was given.
      loss: Of the second half of the decoded text, nats per byte.
      rates: Batch -> decoded tokens per second.
      gap: Largest difference between its logits and those of the variant's default cache.
    """

    cache: str
    prompt: int
    bytes_per_token: float
    loss: float
    rates: dict[int, float]
    gap: float


@dataclasses.dataclass
class Result:
    """What was measured of one variant.

    Attributes:
      variant: Its name.
      mlp_features: Width that makes the parameter totals agree.
      parameters: Their number.
      losses: Final validation loss of each seed, nats per byte.
      curve: `(step, training loss)` of the first seed.
      cache_bytes_per_token: Bytes of a live cache's records over its slots.
      rates: Batch -> decoded tokens per second.
      gap: Largest difference between cached and uncached logits.
      caches: The default cache and those asked for; none if none was.
    """

    variant: str
    mlp_features: int
    parameters: int
    losses: list[float]
    curve: list[tuple[int, float]]
    cache_bytes_per_token: float
    rates: dict[int, float]
    gap: float
    caches: list[CacheResult]

    @property
    def loss(self) -> float:
        """Mean validation loss over the seeds."""
        return statistics.mean(self.losses)

    @property
    def loss_deviation(self) -> float:
        """Standard deviation of the validation loss over the seeds; nan of one seed."""
        return statistics.stdev(self.losses) if len(self.losses) > 1 else math.nan


# Called as report(what is being done, share done of this variant).
Report = Callable[[str, float], None]


def read_text(text: Path | None, size: Size) -> TextData:
    """Reads a text, Shakespeare's if `None`, that is long enough to be trained on and decoded.

    Raises:
      ValueError: Naming how long it is and has to be.
    """
    data = TextData.read_file(text)
    data.count("train", size.length)
    held = data.parts["validation"].size
    whole = sum(part.size for part in data.parts.values())
    if held < size.live:
        want = whole * size.live // max(held, 1)
        raise ValueError(
            f"{data.name} is too short: {size.live:,} bytes are decoded of its validation part, "
            f"which has {held:,} of its {whole:,}: want about {want:,}."
        )
    return data


def compare_variant(
    variant: str,
    size: Size,
    data: TextData,
    seeds: int,
    numerics: Numerics,
    report: Report,
    choices: Mapping[str, CacheChoice],
) -> tuple[Decoder, Result]:
    """Trains one variant with every seed and measures the first one, which is given back too."""
    base = next(iter(VARIANTS))
    target = count_parameters(make_decoder(base, size))
    width = default_mlp(size) if variant == base else matched_mlp(variant, size, target)
    losses, curves, first = [], [], None
    for seed in range(seeds):
        model = make_decoder(variant, size, mlp_features=width, numerics=numerics, seed=seed)
        share = (seed / seeds, 1 / seeds)
        model, loss, curve = _train(model, data, size, seed, report, share)
        first = first if first is not None else model
        losses.append(loss)
        curves.append(curve)
    assert first is not None
    tokens = np.asarray(data.parts["validation"][: size.live], np.int32)
    own, gap, others = _measure(first, tokens, size, report, choices)
    report("done", 1.0)
    return first, Result(
        variant=variant,
        mlp_features=width,
        parameters=count_parameters(first),
        losses=losses,
        curve=curves[0],
        cache_bytes_per_token=own.bytes_per_token,
        rates=own.rates,
        gap=gap,
        caches=[own, *others] if others else [],
    )


def _measure(
    model: Decoder,
    tokens: np.ndarray,
    size: Size,
    report: Report,
    choices: Mapping[str, CacheChoice],
) -> tuple[CacheResult, float, list[CacheResult]]:
    """Decodes a text through the default cache, then through the others.

    Returns:
      The default cache's result, its gap to no cache at all, and the others' results.
    """
    measure = functools.partial(measure_decoding, model, tokens, batches=BATCHES, steps=size.timed)
    default = measure(report=lambda what: report(what, TRAINING_SHARE))
    kept = kept_bytes(model.init_cache(1, tokens.size)) / tokens.size
    own = CacheResult(DEFAULT, 0, kept, default.loss, default.rates, 0.0)
    others = []
    for number, (name, choice) in enumerate(choices.items(), 1):
        share = TRAINING_SHARE + (1 - TRAINING_SHARE) * number / (len(choices) + 1)
        prompt = tokens.size // 2 if choice.needs_prompts else 0
        make = functools.partial(choice.make, model, prompt=prompt)

        def show(what: str, name: str = name, share: float = share) -> None:
            report(f"{name}, {what}", share)

        found = measure(make_cache=make, prompt=prompt, against=default.logits, report=show)
        kept = kept_bytes(make(1, tokens.size)) / tokens.size
        others.append(CacheResult(name, prompt, kept, found.loss, found.rates, found.gap))
    return own, default.gap, others


def _train(
    model: Decoder,
    data: TextData,
    size: Size,
    seed: int,
    report: Report,
    share: tuple[float, float],
) -> tuple[Decoder, float, list[tuple[int, float]]]:
    curve: list[tuple[int, float]] = []

    def on_metrics(metrics: dict) -> None:
        if "loss" in metrics:
            curve.append((metrics["step"], metrics["loss"]))
            done = share[0] + share[1] * metrics["step"] / size.steps
            report(f"training, loss {metrics['loss']:.3f}", TRAINING_SHARE * done)

    config = TrainConfig(
        steps=size.steps,
        batch=size.batch,
        length=size.length,
        learning_rate=size.learning_rate,
        warmup=min(max(size.steps // 20, 5), size.steps - 1),
        eval_every=size.steps,
        seed=seed,
    )
    result = train(model, data, config, progress=False, on_metrics=on_metrics)
    return result.model, result.validation_loss, curve


def write_sample(model: Decoder) -> str:
    """Draws a text from a trained model."""
    drawn = generate(
        model, [list(PROMPT.encode())], max_new_tokens=SAMPLE_TOKENS, sampling=SAMPLING
    )
    return PROMPT + bytes(drawn.rows()[0]).decode("utf-8", "replace")
