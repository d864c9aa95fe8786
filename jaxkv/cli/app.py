# SPDX-License-Identifier: Apache-2.0
"""The commands of `jaxkv`, put together."""

from __future__ import annotations

from typing import Annotated

import typer

from jaxkv.cli.compare import compare
from jaxkv.cli.evaluate import evaluate
from jaxkv.cli.generate import generate
from jaxkv.cli.plan import plan
from jaxkv.cli.train import train


def make_app() -> typer.Typer:
    """Builds the command-line application."""
    app = typer.Typer(
        no_args_is_help=True, pretty_exceptions_enable=False, add_completion=False, help=__doc__
    )

    @app.callback(help="Attention variants and their KV caches, trained, decoded and counted.")
    def root(
        debug: Annotated[
            bool, typer.Option("--debug", help="Show the whole traceback of an error.")
        ] = False,
    ) -> None:
        del debug  # `main.run` takes it off the command line before this sees it.

    for command in (compare, plan, train, generate, evaluate):
        app.command()(command)
    return app
