# SPDX-License-Identifier: Apache-2.0
"""Entry point of the `jaxkv` command."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from jaxkv.core.extras import require

# What a user can cause: these end in one clear line; anything else is ours and shows its trace.
USER_ERRORS = (ValueError, OSError, ImportError, FloatingPointError)


def run(arguments: Sequence[str]) -> int:
    """Runs one command line and returns its exit status."""
    debug = "--debug" in arguments
    arguments = [a for a in arguments if a != "--debug"]
    try:
        require("typer", extra="cli")
        from jaxkv.cli.app import make_app

        make_app()(arguments, prog_name="jaxkv", standalone_mode=True)
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 1
    except KeyboardInterrupt:
        sys.stderr.write("\njaxkv: stopped.\n")
        return 130
    except USER_ERRORS as error:
        if debug:
            raise
        line = " ".join(str(error).split()) or type(error).__name__
        sys.stderr.write(f"jaxkv: {line}\n")
        return 1
    return 0


def app_entry() -> None:
    """Runs the command line of this process."""
    sys.exit(run(sys.argv[1:]))
