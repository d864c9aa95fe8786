# SPDX-License-Identifier: Apache-2.0
"""`jaxkv train`: a byte-level model on your own text."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path
from typing import Annotated

import jax
import jax.numpy as jnp
import numpy as np
import typer
from rich.console import Console


def train(
    output: Annotated[
        Path, typer.Option(help="Folder for checkpoints, metrics and the model's note.")
    ] = Path("jaxkv-train"),
    text: Annotated[
        Path | None, typer.Option(help="Your text file; Shakespeare if not given.")
    ] = None,
    variant: Annotated[str, typer.Option(help="mha, mqa, gqa or mla.")] = "gqa",
    size: Annotated[str, typer.Option(help="tiny, small, medium or large.")] = "small",
    steps: Annotated[int | None, typer.Option(help="Training steps.")] = None,
    batch: Annotated[int | None, typer.Option(help="Rows of a step.")] = None,
    length: Annotated[int | None, typer.Option(help="Tokens of a row.")] = None,
    learning_rate: Annotated[float | None, typer.Option(help="At the end of the warm-up.")] = None,
    accumulate: Annotated[
        int, typer.Option(help="Parts a batch is computed in, to save memory.")
    ] = 1,
    remat: Annotated[
        bool, typer.Option("--remat", help="Recompute layers instead of keeping activations.")
    ] = False,
    dropout: Annotated[float, typer.Option(help="Dropout rate.")] = 0.0,
    dtype: Annotated[
        str | None, typer.Option(help="float32 or bfloat16; float32 on CPU, else bfloat16.")
    ] = None,
    implementation: Annotated[
        str | None, typer.Option(help="Who computes attention; the best that can if not given.")
    ] = None,
    eval_every: Annotated[int, typer.Option(help="Steps between evaluations.")] = 100,
    save_every: Annotated[int, typer.Option(help="Steps between checkpoints.")] = 100,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the run in the output folder.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Of parameters, data order and dropout.")] = 0,
) -> None:
    """Train a byte-level language model on a text file, with checkpoints and a resumable run."""
    from jaxkv.cli.numerics import compute_numerics
    from jaxkv.cli.saved import ModelNote
    from jaxkv.cli.variants import SIZES, VARIANTS, count_parameters, default_mlp, pick
    from jaxkv.training import TextData, TrainConfig
    from jaxkv.training import train as run

    given = {"steps": steps, "batch": batch, "length": length, "learning_rate": learning_rate}
    sized = dataclasses.replace(
        SIZES[pick(size, SIZES, "size")], **{k: v for k, v in given.items() if v is not None}
    )
    config = TrainConfig(
        steps=sized.steps,
        batch=sized.batch,
        length=sized.length,
        learning_rate=sized.learning_rate,
        warmup=min(max(sized.steps // 20, 5), sized.steps - 1),
        accumulate=accumulate,
        eval_every=eval_every,
        save_every=save_every,
        seed=seed,
    )
    data = TextData.read_file(text)
    data.count("train", config.length)
    note = ModelNote(
        pick(variant, VARIANTS, "variant"),
        sized.layers,
        sized.features,
        sized.heads,
        default_mlp(sized),
        hashlib.sha256(np.concatenate(list(data.parts.values())).tobytes()).hexdigest(),
    )
    model = note.make(
        compute_numerics(dtype, implementation), dropout_rate=dropout, remat=remat, seed=seed
    )
    # Who cannot compute this attention says so before anything is written.
    jax.eval_shape(model, jax.ShapeDtypeStruct((1, config.length), jnp.int32))
    note.write(output)
    console = Console(stderr=True)
    console.print(
        f"{variant.upper()}, {count_parameters(model):,} parameters, "
        f"{config.steps} steps of {config.batch} x {config.length} bytes of {data.name}",
        highlight=False,
    )
    result = run(model, data, config, directory=output, resume=resume, progress=True)
    console.print(
        f"validation loss {result.validation_loss:.4f} nats per byte; checkpoints and "
        f"metrics.jsonl in {output}",
        highlight=False,
    )
