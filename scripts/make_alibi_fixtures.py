# SPDX-License-Identifier: Apache-2.0
"""Writes tests/fixtures/alibi/huggingface.json from Hugging Face transformers.

Run once, with torch 2.13 and transformers 5.24 installed (the package itself needs neither):
`python scripts/make_alibi_fixtures.py`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import BloomConfig
from transformers.models.bloom.modeling_bloom import BloomAttention, build_alibi_tensor
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

TARGET = Path(__file__).parents[1] / "tests" / "fixtures" / "alibi" / "huggingface.json"
HEADS, WIDTH, TOKENS = 6, 2, 10


def numbers(x: torch.Tensor) -> Any:
    """Lists a tensor in so many digits that float32 comes back."""

    def shortened(value: Any) -> Any:
        if isinstance(value, list):
            return [shortened(item) for item in value]
        return float(f"{value:.9g}")

    return shortened(x.tolist())


@torch.no_grad()
def bloom() -> dict[str, Any]:
    """Runs BLOOM's attention, with 6 heads (no power of two), on one row of tokens."""
    features = HEADS * WIDTH
    random = torch.Generator().manual_seed(0)
    attention = BloomAttention(BloomConfig(hidden_size=features, n_head=HEADS), layer_idx=0).eval()
    for parameter in attention.parameters():
        drawn = torch.randn(parameter.shape, generator=random)
        parameter.copy_(drawn * (1.5 * features**-0.5 if parameter.ndim == 2 else 0.5))
    x = torch.randn((1, TOKENS, features), generator=random)
    alibi = build_alibi_tensor(torch.ones(1, TOKENS), HEADS, torch.float32)
    later = torch.full((TOKENS, TOKENS), torch.finfo(torch.float32).min).triu(1)
    y = attention(x, torch.zeros_like(x), alibi, later[None, None])[0]
    weights = {name: numbers(value) for name, value in attention.state_dict().items()}
    return {"heads": HEADS, "weights": weights, "x": numbers(x), "y": numbers(y)}


def slopes(heads: int) -> dict[str, Any]:
    """Reads the slopes of so many heads off both models' biases."""
    ones = torch.ones(1, 2)
    return {
        "bloom": numbers(build_alibi_tensor(ones, heads, torch.float32)[:, 0, 1]),
        "mpt": numbers(-build_mpt_alibi_tensor(heads, 2)[:, 0, 0]),
    }


def main() -> None:
    """Writes the file."""
    fixture = {
        "source": (
            f"transformers {transformers.__version__}, torch {torch.__version__.split('+')[0]}, "
            "float32, by scripts/make_alibi_fixtures.py"
        ),
        "attention": bloom(),
        "slopes": {str(heads): slopes(heads) for heads in (1, 2, 3, 6, 8, 12, 25)},
    }
    TARGET.parent.mkdir(parents=True, exist_ok=True)
    TARGET.write_text(json.dumps(fixture) + "\n")


if __name__ == "__main__":
    main()
