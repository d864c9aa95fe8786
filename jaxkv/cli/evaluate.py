# SPDX-License-Identifier: Apache-2.0
"""`jaxkv evaluate`: the loss of a trained model through any cache."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from jaxkv.cli.caches import DEFAULT, HELP, CacheChoice, parse_caches


def evaluate(
    run: Annotated[Path, typer.Argument(help="Folder made by jaxkv train --output.")],
    text: Annotated[
        Path | None, typer.Option(help="Text file; the shipped Shakespeare if not given.")
    ] = None,
    cache: Annotated[str | None, typer.Option(help=HELP)] = None,
    context: Annotated[int, typer.Option(min=1, help="Tokens that a cache holds at most.")] = 512,
    limit: Annotated[int, typer.Option(min=2, help="The most bytes of the text read.")] = 65_536,
    which: Annotated[str, typer.Option(help="best or last checkpoint.")] = "best",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show how well a trained model predicts a text (its validation part) through each cache."""
    from jaxkv.cli.numerics import compute_numerics
    from jaxkv.cli.saved import read_note
    from jaxkv.cli.shown import Shown
    from jaxkv.generation.evaluation import evaluate as measure
    from jaxkv.training import TextData, restore_model

    if which not in ("best", "last"):
        raise ValueError(f"--which {which!r}: want best or last.")
    choices = {DEFAULT: CacheChoice()} | (parse_caches(cache) if cache else {})
    model = restore_model(run, read_note(run).make(compute_numerics(None)), which)
    data = TextData.read_file(text)
    tokens = data.parts["validation"][:limit]
    if tokens.size <= context:
        raise ValueError(
            f"{tokens.size} bytes of the text (--limit {limit}), --context {context}: want at "
            f"least {context + 1}, one whole piece and the byte that follows it."
        )
    chunk = next(n for n in range(min(64, context), 0, -1) if context % n == 0)
    found = {}
    with Shown(list(choices)) as shown:
        for name, choice in choices.items():
            found[name] = measure(
                model,
                tokens,
                context=context,
                chunk=chunk,
                make_cache=functools.partial(choice.make, model),
                report=functools.partial(shown.show, name, "reading"),
            )
    if as_json:
        rows = {n: {**e._asdict(), "perplexity": e.perplexity} for n, e in found.items()}
        typer.echo(json.dumps({"text": data.name, "context": context, "caches": rows}, indent=2))
        return
    title = f"{found[DEFAULT].tokens:,} bytes of {data.name}, {context} at a time"
    key = (
        f"B/token: bytes of live records over the {context:,} tokens that a row is given. loss: "
        "nats per byte, each byte given those before it in its piece, as the cache holds them."
    )
    table = Table(title=title, caption=key, title_justify="left", caption_justify="left")
    table.add_column("cache")
    for column in ("B/token", "nats/byte", "- default", "perplexity"):
        table.add_column(column, justify="right")
    for name, e in found.items():
        table.add_row(
            name,
            f"{e.bytes_per_token:,.0f}",
            f"{e.loss:.4f}",
            f"{e.loss - found[DEFAULT].loss:+.4f}",
            f"{e.perplexity:.3f}",
        )
    Console().print(table)
