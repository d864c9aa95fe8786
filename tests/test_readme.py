# SPDX-License-Identifier: Apache-2.0
"""The README's examples print what it says, and its links and figures are right."""

import contextlib
import io
import re
import textwrap
from pathlib import Path

import pytest
from flax import nnx

import jaxkv

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", README, re.DOTALL)


def test_examples_print_what_the_readme_says() -> None:
    assert len(BLOCKS) == README.count("```python") == 4
    names: dict[str, object] = {}
    for code, want in BLOCKS:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, "README.md", "exec"), names)
        assert printed.getvalue().strip() == want.strip()


@pytest.mark.parametrize(
    ("variant", "figure"),
    [
        (jaxkv.GroupedQueryAttention, "1,024"),
        (jaxkv.MultiHeadAttention, "4,096"),
        (jaxkv.MultiQueryAttention, "512"),
        (jaxkv.MultiHeadLatentAttention, "1,152"),
    ],
)
def test_the_other_class_names_cost_what_the_readme_says(variant: type, figure: str) -> None:
    assert figure in README
    attn = variant(512, num_heads=8, rotary=jaxkv.Rotary(), rngs=nnx.Rngs(0))
    assert f"{attn.init_cache(batch=2, capacity=64).bytes_per_token:,}" == figure


def test_examples_for_contributors_run() -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL)
    assert blocks
    for code in blocks:
        exec(compile(textwrap.dedent(code), "CONTRIBUTING.md", "exec"), {})


def test_links_lead_somewhere() -> None:
    targets = re.findall(r"\]\(([^)#]+)\)", README)
    assert targets and all((ROOT / target).exists() for target in targets)
