# SPDX-License-Identifier: Apache-2.0
"""Temporary bytes per chip of compiled programs, as recorded; see docs/measurements.md."""

from __future__ import annotations

from typing import Any

RECORDED_WITH = "jax 0.12.0.1 and libtpu 0.0.50.1"
# Another compiler may place a buffer elsewhere; a copy of a cache plane is far more than this.
ALLOWANCE = 1.1

TEMPORARY_BYTES: dict[tuple[str, ...], int] = {
    # One token for 8 rows of 2,048 slots.
    ("decode", "mha", "v5e"): 3_599_360,
    ("decode", "mha", "v6e"): 3_663_904,
    ("decode", "gqa", "v5e"): 3_198_464,
    ("decode", "gqa", "v6e"): 3_270_944,
    ("decode", "mqa", "v5e"): 3_239_424,
    ("decode", "mqa", "v6e"): 2_943_584,
    ("decode", "gqa-64", "v5e"): 3_908_608,
    ("decode", "gqa-64", "v6e"): 3_401_888,
    ("decode", "mla", "v5e"): 4_624_384,
    ("decode", "mla", "v6e"): 4_521_408,
    # 512 tokens for each of them.
    ("prefill", "mha", "v5e"): 704_996_864,
    ("prefill", "mha", "v6e"): 822_314_688,
    ("prefill", "gqa", "v5e"): 366_438_400,
    ("prefill", "gqa", "v6e"): 452_087_328,
    ("prefill", "mqa", "v5e"): 289_440_256,
    ("prefill", "mqa", "v6e"): 487_657_856,
    ("prefill", "gqa-64", "v5e"): 297_510_400,
    ("prefill", "gqa-64", "v6e"): 259_129_664,
    ("prefill", "mla", "v5e"): 1_573_136_896,
    ("prefill", "mla", "v6e"): 1_519_030_976,
    # 8 rows of 2,048 tokens, on several chips: their number is in the test.
    ("train", "mha", "v5e"): 2_213_306_368,
    ("train", "mha", "v6e"): 2_374_479_552,
    ("train", "gqa", "v5e"): 2_603_504_640,
    ("train", "gqa", "v6e"): 2_608_935_008,
    ("train", "mqa", "v5e"): 2_388_724_224,
    ("train", "mqa", "v6e"): 2_123_970_144,
    ("train", "mla", "v5e"): 2_900_385_280,
    ("train", "mla", "v6e"): 3_097_164_960,
    ("train narrow", "gqa", "v5e"): 5_193_216,
    ("train narrow", "mla", "v5e"): 9_693_184,
    ("gradient", "gqa", "v5e"): 2_979_293_184,
    ("gradient", "gqa", "v6e"): 3_045_622_720,
    ("gradient", "mla", "v6e"): 10_375_066_464,
    # One causal call over 8,192 tokens, layouts free. On v5e and v6e what fits VMEM does not count.
    ("attention", "mha", "v5e"): 355_328,
    ("attention", "gqa", "v5e"): 387_072,
    ("attention", "mqa", "v5e"): 419_840,
    ("attention", "mla", "v5e"): 355_328,
    ("attention", "window", "v5e"): 355_328,
    ("attention", "mha", "v6e"): 359_136,
    ("attention", "gqa", "v6e"): 390_400,
    ("attention", "mqa", "v6e"): 424_128,
    ("attention", "mla", "v6e"): 391_392,
    ("attention", "window", "v6e"): 359_136,
    ("attention", "mha", "v5p"): 17_071_360,
    ("attention", "gqa", "v5p"): 25_589_984,
    ("attention", "mqa", "v5p"): 17_201_856,
    ("attention", "mla", "v5p"): 12_974_816,
    ("attention", "window", "v5p"): 17_071_360,
    ("attention", "mha", "tpu7x"): 8_682_752,
    ("attention", "gqa", "tpu7x"): 25_557_248,
    ("attention", "mqa", "tpu7x"): 391_392,
    ("attention", "mla", "tpu7x"): 17_135_872,
    ("attention", "window", "tpu7x"): 8_682_752,
    ("attention gradient", "mha", "v5e"): 774_656,
    ("attention gradient", "gqa", "v5e"): 741_888,
    ("attention gradient", "mqa", "v5e"): 871_424,
    ("attention gradient", "mla", "v5e"): 645_632,
    ("attention gradient", "window", "v5e"): 774_656,
    ("attention gradient", "mha", "v6e"): 1_044_608,
    ("attention gradient", "gqa", "v6e"): 847_200,
    ("attention gradient", "mqa", "v6e"): 1_044_608,
    ("attention gradient", "mla", "v6e"): 717_248,
    ("attention gradient", "window", "v6e"): 1_044_608,
    ("attention gradient", "mha", "v5p"): 21_099_232,
    ("attention gradient", "gqa", "v5p"): 28_274_880,
    ("attention gradient", "mqa", "v5p"): 26_767_968,
    ("attention gradient", "mla", "v5p"): 25_819_360,
    ("attention gradient", "window", "v5p"): 21_099_232,
    ("attention gradient", "mha", "tpu7x"): 9_139_104,
    ("attention gradient", "gqa", "tpu7x"): 26_014_048,
    ("attention gradient", "mqa", "tpu7x"): 9_105_856,
    ("attention gradient", "mla", "tpu7x"): 25_819_552,
    ("attention gradient", "window", "tpu7x"): 9_139_104,
    ("blockwise", "v5e"): 386_560,
    ("blockwise", "v6e"): 619_424,
    ("blockwise gradient", "v5e"): 676_864,
    ("blockwise gradient", "v6e"): 978_880,
    # The largest of all records and lengths.
    ("write", "v5e"): 387_072,
    ("write", "v6e"): 357_632,
    # Reading with 1 and 64 queries a row.
    ("read 1", "gqa", "v5e"): 452_096,
    ("read 1", "gqa", "v6e"): 488_096,
    ("read 1", "mla", "v5e"): 355_328,
    ("read 1", "mla", "v6e"): 389_888,
    ("read 1", "narrow", "v5e"): 452_096,
    ("read 1", "narrow", "v6e"): 488_096,
    ("read 64", "gqa", "v5e"): 419_840,
    ("read 64", "gqa", "v6e"): 423_104,
    ("read 64", "mla", "v5e"): 134_639_616,
    ("read 64", "mla", "v6e"): 218_528_960,
    ("read 64", "narrow", "v5e"): 419_840,
    ("read 64", "narrow", "v6e"): 423_104,
}


def check_temporary_bytes(compiled: Any, *program: str) -> None:
    """Holds a program to its recorded temporary bytes."""
    got, want = compiled.memory_analysis().temp_size_in_bytes, TEMPORARY_BYTES.get(program, 0)
    assert got <= want * ALLOWANCE, (
        f"{program} takes {got:,} temporary bytes; {want:,} were recorded with {RECORDED_WITH}."
    )
