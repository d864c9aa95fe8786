# SPDX-License-Identifier: Apache-2.0
"""Entry point of the `jaxkv` command."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from jaxkv.core.extras import require

STOPPED = 130  # what a shell says of a program that Ctrl-C ended
# What a user can cause: these end in one clear line; anything else is ours and shows its trace.
USER_ERRORS = (ValueError, OSError, ImportError, FloatingPointError)


def run(arguments: Sequence[str]) -> int:
    """Runs one command line and returns its exit status."""
    debug = "--debug" in arguments
    arguments = [a for a in arguments if a != "--debug"]
    try:
        require("typer", extra="cli")
        from jaxkv.cli.app import make_app

        app = make_app()
        status = app(arguments or ["--help"], prog_name="jaxkv", standalone_mode=False)
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 1
    except KeyboardInterrupt:
        status = STOPPED
    except USER_ERRORS as error:
        if debug:
            raise
        return _said(str(error) or type(error).__name__, 1)
    except Exception as error:
        # A command line that does not fit: its class has had several homes.
        message = getattr(error, "format_message", None)
        if message is None:
            raise
        said = str(message()).rstrip(".")
        return _said(f"{said}. See jaxkv --help.", 2)
    if status == STOPPED:
        return _said("stopped.", STOPPED)
    return status if isinstance(status, int) else 0


def _said(text: str, status: int) -> int:
    """Prints one line and gives the exit status back."""
    sys.stderr.write(f"jaxkv: {' '.join(text.split())}\n")
    return status


def app_entry() -> None:
    """Runs the command line of this process."""
    sys.exit(run(sys.argv[1:]))
