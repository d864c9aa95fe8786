# SPDX-License-Identifier: Apache-2.0
"""`python -m jaxkv`: the same as the `jaxkv` command."""

from jaxkv.cli.main import app_entry

if __name__ == "__main__":
    app_entry()
