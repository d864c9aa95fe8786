# SPDX-License-Identifier: Apache-2.0
"""Makes `tests/fixtures/hf`: tiny whole models and what Hugging Face's own code computes with them.

Needs an environment of its own, since tests never need torch: a Python 3.11 virtual environment
with `torch==2.13.0` (the CPU build), `transformers==5.24.0` and `safetensors`. No network is used
and nothing is downloaded: every weight is drawn here. Run it from the repository root with that
environment's Python:

    python scripts/make_hf_fixtures.py
"""

from __future__ import annotations

import argparse
import platform
import unittest.mock
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import safetensors
import torch
import transformers
from safetensors.torch import save_file
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)

OUTPUT = Path(__file__).parent.parent / "tests" / "fixtures" / "hf"
VOCAB, PROMPT, PREFILL, NEW = 96, 24, 16, 12
CANDIDATES, ROWS = 1024, 2
MIN_MARGIN, MIN_DISTINCT = 0.05, 6
# Large enough to see which norms use it: DeepSeek's latent norms have 1e-6 whatever this says.
EPSILON = 0.01

LLAMA = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "rms_norm_eps": EPSILON,
}
LLAMA3_ROPE = {
    # With 8 frequencies of theta 1e4 these bounds put wavelengths in all three bands: kept,
    # interpolated, and divided by the factor.
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
DEEPSEEK = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 60,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 28,
    "qk_nope_head_dim": 20,
    "qk_rope_head_dim": 16,
    "v_head_dim": 14,
    "rms_norm_eps": EPSILON,
    "num_mtp_layers": 0,
    "max_position_embeddings": 2560,
}
YARN_ROPE = {
    # mscale differs from mscale_all_dim, so that cos and sin carry a factor as well as the softmax
    # scale; the narrow ramp makes 24 positions enough to see the interpolation.
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 40.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 8.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.8,
}


class Model(NamedTuple):
    """One fixture: how to build it, and what a reader should know of it."""

    build: type[PreTrainedModel]
    config: PreTrainedConfig
    seed: int
    note: str


class Run(NamedTuple):
    """Logits of a prompt and of its greedy continuation."""

    logits: torch.Tensor
    cached: torch.Tensor
    greedy_tokens: torch.Tensor
    greedy_logits: torch.Tensor


def deepseek(layers: int, **options: Any) -> DeepseekV3Config:
    """Configures a model without experts."""
    return DeepseekV3Config(
        **DEEPSEEK, num_hidden_layers=layers, first_k_dense_replace=layers, **options
    )


def models() -> dict[str, Model]:
    """Lists the fixtures by name."""
    plain = {"rope_type": "default", "rope_theta": 10000.0}
    linear = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
    gqa = LlamaConfig(
        **LLAMA,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        rope_parameters=LLAMA3_ROPE,
    )
    mha = LlamaConfig(
        **LLAMA,
        num_key_value_heads=6,
        attention_bias=True,
        mlp_bias=True,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        rope_parameters=linear,
    )
    yarn = deepseek(2, q_lora_rank=24, rope_parameters=YARN_ROPE)
    noq = deepseek(2, q_lora_rank=None, rope_parameters=plain)
    halves = deepseek(
        1, q_lora_rank=24, rope_parameters=plain, rope_interleave=False, attention_bias=True
    )
    return {
        "llama_gqa": Model(
            LlamaForCausalLM, gqa, 1, "GQA, 6 query and 2 KV heads, 16-wide, llama3 rope, free head"
        ),
        "llama_mha_bias": Model(
            LlamaForCausalLM, mha, 2, "MHA, biases on all projections, linear rope, tied head"
        ),
        "deepseek_v3_yarn": Model(
            DeepseekV3ForCausalLM, yarn, 3, "MLA, compressed queries, YaRN with both mscales"
        ),
        "deepseek_v3_noq": Model(
            DeepseekV3ForCausalLM, noq, 4, "MLA, plain query projection, unscaled rope"
        ),
        "deepseek_v3_halves_bias": Model(
            DeepseekV3ForCausalLM, halves, 5, "MLA, one layer, rope in halves, biases"
        ),
    }


def gain(name: str, config: PreTrainedConfig) -> float:
    """States how far a matrix's outputs spread, for inputs of spread one."""
    if name.endswith("embed_tokens.weight"):
        # A tied head reads these rows too and would answer every token with itself, were they not
        # small beside what the layers add.
        return 0.4 if config.tie_word_embeddings else 1.0
    if "lm_head" in name:
        return 4.0
    if any(part in name for part in ("q_proj", "k_proj", "q_b_proj", "kv_a_proj", "kv_b_proj")):
        return 1.6
    return 2.0 if config.tie_word_embeddings else 1.0


@torch.no_grad()
def draw(model: PreTrainedModel, seed: int) -> None:
    """Draws every parameter so that none is trivial and attention is far from uniform."""
    random = torch.Generator().manual_seed(seed)
    for name, parameter in sorted(model.named_parameters()):
        drawn = torch.randn(parameter.shape, generator=random)
        if "norm" in name:
            drawn = 1.0 + 0.3 * drawn.clamp(-2.0, 2.0)
        elif name.endswith("bias"):
            drawn = 0.5 * drawn
        else:
            rows = 1 if "embed_tokens" in name else parameter.shape[1]
            drawn = drawn * gain(name, model.config) * rows**-0.5
        parameter.copy_(drawn)


@torch.no_grad()
def run(model: PreTrainedModel, tokens: torch.Tensor) -> Run:
    """Runs a prompt at once, then in cached steps, then continues it greedily."""
    full = model(tokens, use_cache=False).logits
    out = model(tokens[:, :PREFILL], use_cache=True)
    cached = [out.logits]
    for t in range(PREFILL, PROMPT):
        out = model(tokens[:, t : t + 1], cache=out.cache, use_cache=True)
        cached.append(out.logits)
    chosen, logits = [], []
    for _ in range(NEW):
        logits.append(out.logits[:, -1])
        chosen.append(out.logits[:, -1].argmax(-1))
        out = model(chosen[-1][:, None], cache=out.cache, use_cache=True)
    return Run(full, torch.cat(cached, 1), torch.stack(chosen, 1), torch.stack(logits, 1))


def margins(logits: torch.Tensor) -> torch.Tensor:
    """Measures the gap between the largest and the second largest logit."""
    top = logits.topk(2, dim=-1).values
    return top[..., 0] - top[..., 1]


def choose_prompts(model: PreTrainedModel, seed: int) -> torch.Tensor:
    """Picks, of many random prompts, those whose every choice of a token is the clearest."""
    random = torch.Generator().manual_seed(seed + 1000)
    prompts = torch.randint(0, VOCAB, (CANDIDATES, PROMPT), generator=random)
    tried = run(model, prompts)
    clearest = torch.cat([margins(tried.logits), margins(tried.greedy_logits)], 1).amin(1)
    distinct = torch.tensor([row.unique().numel() for row in tried.greedy_tokens])
    clearest[distinct < MIN_DISTINCT] = 0.0
    best = clearest.topk(ROWS)
    if best.values[-1] < MIN_MARGIN:
        raise SystemExit(f"widest margins {best.values.tolist()}: want at least {MIN_MARGIN}")
    return prompts[best.indices]


def build(model: Model) -> PreTrainedModel:
    """Builds a model whose attention is the plain one, with its drawn weights."""
    made = model.build._from_config(model.config, attn_implementation="eager").eval()
    draw(made, model.seed)
    return made


def in_float64(model: Model, compute: Callable[[PreTrainedModel], Run]) -> Run:
    """Runs `compute` with the model in float64 throughout.

    Norms, softmax and rotary angles name float32 in Hugging Face's code. The name stands for
    float64 while the model is built (its frequencies) and run; the weights are drawn outside.
    """
    weights = build(model).double().state_dict()
    with (
        unittest.mock.patch.object(torch, "float32", torch.float64),
        unittest.mock.patch.object(torch, "float", torch.float64),
    ):
        made = model.build._from_config(model.config, attn_implementation="eager").eval().double()
        made.load_state_dict(weights)
        return compute(made)


@torch.no_grad()
def attention_peak(model: PreTrainedModel, tokens: torch.Tensor) -> float:
    """Averages the largest weight of the last 8 queries, where uniform would be about 0.05."""
    weights = model(tokens, use_cache=False, output_attentions=True).attentions
    return float(torch.stack(weights)[..., -8:, :].amax(-1).mean())


def write(name: str, model: Model) -> dict[str, float | int | str]:
    """Writes one model's folder and returns its row of the README."""
    made = build(model)
    tokens = choose_prompts(made, model.seed)
    single = run(made, tokens)
    double = in_float64(model, lambda wide: run(wide, tokens))
    if not torch.equal(single.greedy_tokens, double.greedy_tokens):
        raise SystemExit(f"{name}: float32 and float64 continue differently")
    oracle = {
        "tokens": tokens.int(),
        "logits": single.logits,
        "cached_logits": single.cached,
        "logits_float64": double.logits,
        "greedy_tokens": single.greedy_tokens.int(),
        "greedy_logits": single.greedy_logits,
        "greedy_margins": margins(single.greedy_logits),
    }
    folder = OUTPUT / name
    folder.mkdir(parents=True, exist_ok=True)
    saved = {key: value.contiguous() for key, value in made.state_dict().items()}
    if model.config.tie_word_embeddings:
        del saved["lm_head.weight"]
    save_file(saved, folder / "model.safetensors", metadata={"format": "pt"})
    save_file({k: v.contiguous() for k, v in oracle.items()}, folder / "oracle.safetensors")
    made.config.architectures = [type(made).__name__]
    (folder / "config.json").write_text(made.config.to_json_string())
    return {
        "name": name,
        "note": model.note,
        "parameters": sum(p.numel() for p in made.parameters()),
        "largest": float(single.logits.abs().max()),
        "cached": float((single.cached - single.logits).abs().max()),
        "rounding": float((single.logits - double.logits).abs().max()),
        "margin": float(margins(single.logits).min()),
        "greedy": float(oracle["greedy_margins"].min()),
        "peak": attention_peak(made, tokens),
    }


README = """\
# Tiny models with Hugging Face's own logits

Made by `scripts/make_hf_fixtures.py`, which also writes this page; do not edit by hand. Weights
are drawn at random, nothing is taken from a released checkpoint.
Versions: Python {python}, torch {torch}, transformers {transformers}, safetensors {safetensors}.
Attention is the plain ("eager") implementation, in float32.

Each folder holds `config.json` and `model.safetensors` under Hugging Face's names, and
`oracle.safetensors`:

| tensor | shape | what it is |
|---|---|---|
| `tokens` | int32 {prompts} | prompts, chosen among {candidates} random ones for wide margins |
| `logits` | float32 {scored} | of the whole prompt in one call, no cache |
| `cached_logits` | float32 {scored} | prefill of {prefill} tokens, then single steps |
| `logits_float64` | float64 {scored} | `logits` with every operation in float64 |
| `greedy_tokens` | int32 {answers} | cached greedy continuation (the same in float64) |
| `greedy_logits` | float32 {chosen} | the logits that each was chosen from |
| `greedy_margins` | float32 {answers} | largest minus second largest of these |

| model | what is special | parameters |
|---|---|---|
{models}

What the numbers are worth, as maxima of absolute values over all logits (margins: minima; peak:
mean of the largest attention weight of the last 8 queries, about 0.05 if it were uniform):

| model | logit | cached - full | float32 - float64 | margin, prompt | margin, continued | peak |
|---|---|---|---|---|---|---|
{numbers}
"""


def write_readme(rows: list[dict[str, float | int | str]]) -> None:
    """Writes the page that says what each file is and how exact it is."""
    text = README.format(
        python=platform.python_version(),
        torch=torch.__version__,
        transformers=transformers.__version__,
        safetensors=safetensors.__version__,
        prompts=f"[{ROWS}, {PROMPT}]",
        answers=f"[{ROWS}, {NEW}]",
        scored=f"[{ROWS}, {PROMPT}, {VOCAB}]",
        chosen=f"[{ROWS}, {NEW}, {VOCAB}]",
        prefill=PREFILL,
        candidates=CANDIDATES,
        models="\n".join("| `{name}` | {note} | {parameters:,} |".format(**row) for row in rows),
        numbers="\n".join(
            "| `{name}` | {largest:.1f} | {cached:.1e} | {rounding:.1e} | {margin:.3f} "
            "| {greedy:.3f} | {peak:.2f} |".format(**row)
            for row in rows
        ),
    )
    (OUTPUT / "README.md").write_text(text)


def main() -> None:
    """Makes all fixtures, always together, so that README and files have one set of versions."""
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    write_readme([write(name, model) for name, model in models().items()])


if __name__ == "__main__":
    main()
