# SPDX-License-Identifier: Apache-2.0
"""`jaxkv generate`: text from a model that `jaxkv train` made."""

from __future__ import annotations

import codecs
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from jaxkv.generation import Decoding, Generation, Sampling
    from jaxkv.models.decoder import Decoder


def generate(
    run: Annotated[Path, typer.Argument(help="Folder made by jaxkv train --output.")],
    prompt: Annotated[str, typer.Option(help="Text to go on from.")] = "\n",
    tokens: Annotated[int, typer.Option(help="The most new bytes (of each turn).")] = 400,
    temperature: Annotated[float, typer.Option(help="0 takes the most likely byte.")] = 0.8,
    top_k: Annotated[int | None, typer.Option(help="Keep the k most likely.")] = None,
    top_p: Annotated[float, typer.Option(help="Keep the most likely that reach p.")] = 1.0,
    min_p: Annotated[float, typer.Option(help="Keep those of this share of the best.")] = 0.0,
    stop: Annotated[str, typer.Option(help="End at the first of these characters.")] = "",
    seed: Annotated[int, typer.Option(help="Of all draws.")] = 0,
    beams: Annotated[
        int | None, typer.Option(help="Search with so many beams; nothing is drawn.")
    ] = None,
    prompt_lookup: Annotated[
        int | None, typer.Option(help="Draft so many bytes a step from the text itself.")
    ] = None,
    which: Annotated[str, typer.Option(help="best or last checkpoint.")] = "best",
    interactive: Annotated[
        bool, typer.Option("--interactive", help="Take turns; the cache is kept between them.")
    ] = False,
    capacity: Annotated[
        int, typer.Option(help="Tokens the cache holds, with --interactive.")
    ] = 4096,
) -> None:
    """Generate text from a trained model, in one go or in turns."""
    from jaxkv.cli.numerics import compute_numerics
    from jaxkv.cli.saved import read_note
    from jaxkv.generation import Beams, PromptLookup, Sampling
    from jaxkv.training import restore_model

    if which not in ("best", "last"):
        raise ValueError(f"--which {which!r}: want best or last.")
    sampling, decoding = Sampling(temperature, top_k, top_p, min_p), None
    if beams is not None:
        if prompt_lookup is not None:
            raise ValueError("--beams and --prompt-lookup are two ways of decoding: want one.")
        sampling, decoding = Sampling(), Beams(beams)
    elif prompt_lookup is not None:
        decoding = PromptLookup(draft=prompt_lookup)
    model = restore_model(run, read_note(run).make(compute_numerics(None)), which)
    how = (tokens, sampling, tuple(stop.encode()), seed)
    if interactive:
        talk(model, sys.stdin, *how, capacity=capacity, decoding=decoding)
    else:
        speak(model, prompt, *how, decoding=decoding)


def speak(
    model: Decoder,
    prompt: str,
    tokens: int,
    sampling: Sampling,
    stop: tuple[int, ...],
    seed: int,
    *,
    decoding: Decoding | None = None,
) -> None:
    """Prints a prompt and what follows, as it is made."""
    if not prompt:
        raise ValueError("--prompt is empty: want at least one character.")
    sys.stdout.write(prompt)
    _shown(
        model,
        list(prompt.encode()),
        max_new_tokens=tokens,
        sampling=sampling,
        stop_tokens=stop,
        seed=seed,
        decoding=decoding,
    )
    sys.stdout.write("\n")


def talk(
    model: Decoder,
    lines: Iterable[str],
    tokens: int,
    sampling: Sampling,
    stop: tuple[int, ...],
    seed: int,
    *,
    capacity: int,
    decoding: Decoding | None = None,
) -> None:
    """Answers line after line from one cache, until the input ends or the cache is full."""
    cache, pending = model.init_cache(1, capacity), []
    sys.stderr.write("Type a line to go on from; an empty one or the end of input stops.\n")
    for turn, line in enumerate(lines):
        if not line.strip():
            break
        # The last byte of the turn before is not in the cache yet: it goes first.
        made = _shown(
            model,
            pending + list(line.encode()),
            max_new_tokens=tokens,
            sampling=sampling,
            stop_tokens=stop,
            seed=seed + turn,
            cache=cache,
            decoding=decoding,
        )
        cache, pending = made.cache, [int(made.pending[0])]
        held = int(cache.lengths[0])
        sys.stdout.write("\n")
        sys.stderr.write(f"[{made.why()[0]}; the cache holds {held} of {capacity} tokens]\n")
        if made.why() == ["full"]:
            break


def _shown(
    model: Decoder, prompt: list[int], *, decoding: Decoding | None, **how: Any
) -> Generation:
    """Generates and prints: as it is made, unless no byte is final before the end."""
    from jaxkv.generation import generate as run

    show, late = _printer(), decoding is not None and not decoding.streams
    made = run(model, [prompt], decoding=decoding, on_tokens=None if late else show, **how)
    if late:
        show(made.rows())
    return made


def _printer() -> Callable[[list[list[int]]], None]:
    """Writes bytes as text as soon as they make whole characters."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def show(rows: list[list[int]]) -> None:
        sys.stdout.write(decoder.decode(bytes(rows[0])))
        sys.stdout.flush()

    return show
