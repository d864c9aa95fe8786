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
    # One causal call over 8,192 tokens. What fits VMEM does not count.
    ("attention", "mha", "v5e"): 0,
    ("attention", "gqa", "v5e"): 268_564_480,
    ("attention", "mqa", "v5e"): 0,
    ("attention", "mla", "v5e"): 172_095_488,
    ("attention", "window", "v5e"): 0,
    ("attention", "mha", "v6e"): 17_235_520,
    ("attention", "gqa", "v6e"): 218_234_752,
    ("attention", "mqa", "v6e"): 0,
    ("attention", "mla", "v6e"): 201_981_312,
    ("attention", "window", "v6e"): 17_235_520,
    ("attention", "mha", "v5p"): 92_536_576,
    ("attention", "gqa", "v5p"): 344_129_344,
    ("attention", "mqa", "v5p"): 50_560_800,
    ("attention", "mla", "v5p"): 243_433_312,
    ("attention", "window", "v5p"): 92_536_576,
    ("attention", "mha", "tpu7x"): 84_278_912,
    ("attention", "gqa", "tpu7x"): 285_474_560,
    ("attention", "mqa", "tpu7x"): 67_305_280,
    ("attention", "mla", "tpu7x"): 269_188_384,
    ("attention", "window", "tpu7x"): 84_278_912,
    ("attention gradient", "mha", "v5e"): 30_037_504,
    ("attention gradient", "gqa", "v5e"): 321_960_960,
    ("attention gradient", "mqa", "v5e"): 0,
    ("attention gradient", "mla", "v5e"): 336_641_024,
    ("attention gradient", "window", "v5e"): 30_037_504,
    ("attention gradient", "mha", "v6e"): 51_444_672,
    ("attention gradient", "gqa", "v6e"): 278_035_808,
    ("attention gradient", "mqa", "v6e"): 0,
    ("attention gradient", "mla", "v6e"): 268_664_608,
    ("attention gradient", "window", "v6e"): 51_444_672,
    ("attention gradient", "mha", "v5p"): 131_169_696,
    ("attention gradient", "gqa", "v5p"): 343_866_688,
    ("attention gradient", "mqa", "v5p"): 68_222_400,
    ("attention gradient", "mla", "v5p"): 370_703_840,
    ("attention gradient", "window", "v5p"): 131_169_696,
    ("attention gradient", "mha", "tpu7x"): 118_520_800,
    ("attention gradient", "gqa", "tpu7x"): 436_633_184,
    ("attention gradient", "mqa", "tpu7x"): 67_927_264,
    ("attention gradient", "mla", "tpu7x"): 411_794_720,
    ("attention gradient", "window", "tpu7x"): 118_520_800,
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
