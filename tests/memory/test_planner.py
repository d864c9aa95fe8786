# SPDX-License-Identifier: Apache-2.0
"""The planner's parts: padding, what fits, notes, units, policies, tables and pictures."""

import dataclasses
import io
import itertools
import re
from pathlib import Path

import pytest
from rich.console import Console

from jaxkv.cache.policies import POLICIES
from jaxkv.cache.quantised import Float8, Int4, Int8
from jaxkv.cache.spec import KVSpec
from jaxkv.memory.chips import CHIPS, find_chip
from jaxkv.memory.counting import Storage, device_spec
from jaxkv.memory.planner import Plan, plan
from jaxkv.memory.plot import draw, lengths, lines
from jaxkv.memory.policy import FORMS, SlotPolicy
from jaxkv.memory.table import tables
from jaxkv.memory.units import DECIMAL, format_bytes, parse_bytes
from jaxkv.models.geometry import LayerSpec, ModelGeometry
from jaxkv.models.presets import load_geometry

GIB = 2**30
V5E, H100 = CHIPS["v5e"], CHIPS["h100"]


def text_of(found: Plan) -> str:
    console = Console(width=200, record=True, file=io.StringIO())
    for table in tables(found):
        console.print(table)
    return console.export_text()


def model(*layers: LayerSpec) -> ModelGeometry:
    return ModelGeometry("tiny", 11, 12, layers, 64)


def test_lanes_pad_the_width_and_tiles_the_slots() -> None:
    latent = load_geometry("deepseek-v3")
    found = plan(latent, context=4096, chip=V5E)
    assert found.bytes_per_token == 70_272
    assert found.sequence_bytes == 4096 * 70_272
    assert found.nbytes == 4096 * 61 * 640 * 2 + 6
    assert found.physical_nbytes == found.nbytes
    assert plan(latent, context=4096, chip=H100).physical_nbytes == 4096 * 70_272 + 6
    narrow = load_geometry("gpt2-xl")
    assert plan(narrow, context=512, chip=V5E).nbytes == 2 * 512 * 307_200 + 6


@pytest.mark.parametrize(
    ("dtype", "slots", "size"), [("float32", 104, 4), ("bfloat16", 112, 2), ("fp8", 128, 1)]
)
def test_tiles_have_more_rows_the_narrower_the_dtype(dtype: str, slots: int, size: int) -> None:
    layer = LayerSpec("full", 4, KVSpec(4, 128, 128))
    found = plan(model(layer), context=100, batch=3, dtype=dtype, chip=V5E)
    records = 3 * 4 * 2 * 128 * size
    assert found.nbytes == records * slots + 18
    assert found.physical_nbytes == records * slots + 18


def test_what_fits_beside_the_weights() -> None:
    found = plan(load_geometry("llama3-8b"), context=8192, chip=H100)
    assert found.fit is not None and found.weight_bytes == 2 * 8_030_261_248
    # 80e9 - 16,060,522,496 bytes are free; a row takes 2**30 + 6 and a token 131,072.
    assert found.fit.free_bytes == 63_939_477_504
    assert found.fit.sequences == found.fit.sequences_per_device == 59
    assert found.fit.longest_context == 487_819
    mesh = plan(
        load_geometry("llama3-8b"), context=8192, chip=H100, devices={"data": 3, "tensor": 4}
    )
    assert mesh.fit is not None and mesh.fit.weight_bytes == 4_015_130_624
    assert mesh.fit.sequences_per_device == (80 * 10**9 - 4_015_130_624) // (GIB // 4 + 6) == 283
    assert mesh.fit.sequences == 3 * 283


def test_weights_of_another_size() -> None:
    model = load_geometry("gpt-oss-120b")
    heavy = plan(model, chip=H100)
    assert heavy.fit is not None and heavy.fit.sequences == 0 and heavy.fit.free_bytes < 0
    assert any("do not fit 1 of these devices" in note for note in heavy.notes)
    packed = plan(model, chip=H100, weight_bytes=parse_bytes("60.8GiB"))
    # 14,716,497,101 bytes are free; a row takes 18 x 2048 x (131,072 + 128) and its index.
    assert packed.fit is not None and packed.fit.sequences == 3
    assert not any("2 bytes" in note or "do not fit" in note for note in packed.notes)


def test_unknown_weights_count_as_nothing_and_are_named() -> None:
    found = plan(model(LayerSpec("full", 4, KVSpec(4, 8, 8))), chip=H100)
    assert found.fit is not None and found.fit.weight_bytes == 0
    assert any("parameter count is not known" in note for note in found.notes)
    assert "unknown" in text_of(found)


def test_cache_that_does_not_grow_has_no_longest_context() -> None:
    windowed = LayerSpec("window", 4, KVSpec(4, 8, 8), window=16)
    found = plan(model(windowed), chip=H100)
    assert found.fit is not None and found.fit.longest_context is None
    assert "no limit" in text_of(found)
    assert Storage().longest_context(model(windowed), 5) == 0


def test_two_devices_of_a_chip_share_its_memory() -> None:
    found = plan(load_geometry("llama3-8b"), context=8192, chip=CHIPS["tpu7x"])
    assert found.fit is not None and found.fit.memory_bytes == 96 * GIB
    assert any("2 JAX devices with 96.000 GiB each" in note for note in found.notes)


def test_chips_keep_their_makers_units() -> None:
    assert CHIPS["v5e"].device_bytes == 16 * GIB and CHIPS["v6e"].device_bytes == 32 * GIB
    assert CHIPS["v5p"].device_bytes == 95 * GIB
    assert CHIPS["h100"].device_bytes == 80 * 10**9 and CHIPS["h200"].device_bytes == 141 * 10**9
    assert CHIPS["b200"].label == "b200 (180 GB)"
    assert CHIPS["tpu7x"].label == "tpu7x (192 GiB, as 2 devices)"
    assert find_chip("H100") is CHIPS["h100"]
    with pytest.raises(ValueError, match="unknown chip 'h10'; known are h100"):
        find_chip("h10")


def test_latents_are_whole_on_every_tensor_device() -> None:
    found = plan(load_geometry("deepseek-v3"), devices={"tensor": 8})
    assert found.device.bytes_per_token == found.bytes_per_token
    assert any("holds all of it" in note for note in found.notes)
    shared = KVSpec(2, 16, 16, shared_width=8)
    assert device_spec(shared, 2).elements_per_token == 16 + 16 + 8


def test_notes_name_idle_devices_and_long_contexts() -> None:
    found = plan(load_geometry("llama3-8b"), context=9000, batch=2, devices={"data": 4})
    assert any("2 rows on 4 data devices" in note for note in found.notes)
    assert any("9,000 tokens are more than" in note for note in found.notes)
    assert plan(load_geometry("llama3-8b")).notes == ()
    assert "ring" in plan(load_geometry("gemma3-1b")).notes[0]


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ({"context": 0}, "context 0 and batch 1"),
        ({"batch": 0}, "context 8192 and batch 0"),
        ({"dtype": "int2"}, "dtype 'int2': want one of bf16, .* or int8, int4, float8, which have"),
        ({"dtype": "bf16:32"}, "dtype 'bf16:32': want one of bf16"),
        ({"dtype": "int4:0"}, "dtype 'int4:0'"),
        ({"dtype": "int4:"}, "dtype 'int4:'"),
        ({"devices": {"model": 2}}, r"unknown device axes \['model'\]"),
        ({"devices": {"tensor": 0}}, "at least 1 on each axis"),
        ({"devices": {"tensor": 3}}, "32 query heads do not divide over 3"),
        ({"policy": "rings"}, "window policy 'rings': want window, full, pages:Z, pages:ZxP, win"),
        ({"policy": "pages:0"}, "window policy 'pages:0': want pages:Z, pages:ZxP, with a number"),
        ({"policy": "pages:16x0"}, "window policy 'pages:16x0'"),
        ({"policy": "pages:16+2"}, "want pages:Z, pages:ZxP, with"),
        ({"policy": "ring"}, r"window policy 'ring': want ring:W, ring:W\+S, with a number for"),
        ({"policy": "ring:²"}, "window policy 'ring:²'"),
        ({"policy": "ring:9999999999999"}, "window policy 'ring:9999999999999'"),
        ({"policy": "snapkv:512"}, r"'snapkv:512': want snapkv:Z\+R, snapkv:Z\+R/pyramid, with"),
        ({"policy": "h2o:512+9"}, "'h2o:512\\+9': want h2o:Z, h2o:Z/pyramid, with"),
    ],
)
def test_bad_settings_are_named(arguments: dict, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        plan(load_geometry("llama3-8b"), **arguments)


def test_heads_and_devices_that_divide_neither_way() -> None:
    with pytest.raises(ValueError, match="6 KV heads and 4 tensor devices"):
        plan(model(LayerSpec("full", 12, KVSpec(6, 8, 8))), devices={"tensor": 4})


@pytest.mark.parametrize("context", [1, 5, 15, 16, 17, 70])
def test_slots_of_layers(context: int) -> None:
    window, shared = LayerSpec("window", 4, KVSpec(4, 8, 8), window=16), LayerSpec("shared", 4)
    parse = SlotPolicy.parse
    assert parse("window").slots(window, context) == min(context, 16)
    assert parse("full").slots(window, context) == context
    for text, slots in {"ring:9": 9, "ring:40": 16, "ring:16+3": 19, "sinks:9+1": 14}.items():
        assert parse(text).slots(window, context) == min(context, slots)
    full = LayerSpec("full", 4, KVSpec(4, 8, 8))
    for text, slots in {"ring:9": 9, "sinks:12": 16, "snapkv:12+5": 17, "h2o:9/pyramid": 9}.items():
        assert parse(text).slots(full, context) == min(context, slots)
    assert parse("pages:3x2").slots(full, context) == parse("pages:3").slots(full, context)
    for page in (1, 3, 16):
        slots = SlotPolicy.parse(f"pages:{page}").slots(window, context)
        assert slots == len({token // page for token in range(context)}) * page
    assert parse("window").slots(shared, context) == 0


def test_policies_read_as_they_write() -> None:
    for form in FORMS:
        text = re.sub("[A-Z]", lambda letter: str(ord(letter[0])), form)
        assert str(SlotPolicy.parse(text)) == text
    assert SlotPolicy.parse("pages:016") == SlotPolicy.parse("pages:16")


def test_every_policy_of_an_evicting_cache_has_a_form() -> None:
    names = {form.partition(":")[0] for form in FORMS}
    assert names >= POLICIES.keys()


def test_sizes_are_written_and_read_with_their_units() -> None:
    assert format_bytes(0) == "0 B" and format_bytes(1023) == "1,023 B"
    assert format_bytes(1000, DECIMAL) == "1.0 kB" and format_bytes(1024) == "1.0 KiB"
    assert format_bytes(3 * 2**40) == "3.000 TiB" and format_bytes(2**12, places=0) == "4 KiB"
    assert parse_bytes("70272") == 70_272 and parse_bytes("1_000 kB") == 10**6
    for text in ("", "GiB", "12 GiX", "-1GB", "1.5.2GB"):
        with pytest.raises(ValueError, match="want a number with a unit"):
            parse_bytes(text)


def test_tables_show_every_figure() -> None:
    text = text_of(
        plan(
            load_geometry("gemma3-27b"), context=32_768, chip=V5E, devices={"data": 2, "tensor": 4}
        )
    )
    for figure in ("window 1,024", "16 x (128 + 128)", "507,904", "2.906 GiB", "744.00 MiB"):
        assert figure in text
    assert "(2.0 times)" in text and "physical_nbytes" in text and "v5e (16 GiB)" in text
    latent = text_of(plan(load_geometry("deepseek-v3")))
    assert "1 x 576 (latent)" in latent and "4.77 MiB = 5.00 MB (71.1 times)" in latent
    state = LayerSpec("state", 4, state_bytes=8)
    others = text_of(
        plan(model(state, LayerSpec("shared", 4), LayerSpec("full", 4, KVSpec(4, 8, 8))))
    )
    assert "a fixed state" in others and "nothing" in others and "times)" not in others


def test_picture_bends_at_the_window_and_nowhere_else() -> None:
    found = plan(load_geometry("gemma3-1b"))
    at, drawn = lengths(found), lines(found)
    assert len(drawn) == 3 and at[-1] == 32_768
    assert 512 in lengths(plan(load_geometry("gemma3-1b"), context=100_000))
    as_it_is, keeping_all, per_head = (line.sequence_bytes for line in drawn)
    assert as_it_is[-1] == 145_752_064 and keeping_all[-1] == 832 * 2**20
    assert per_head[-1] == 4 * keeping_all[-1]
    slopes = [
        (high - low) / (after - before)
        for (before, after), (low, high) in zip(
            itertools.pairwise(at), itertools.pairwise(as_it_is), strict=True
        )
    ]
    bend = at.index(512)
    assert set(slopes[:bend]) == {26 * 1024} and set(slopes[bend:]) == {4 * 1024}


def test_picture_of_plain_models_has_fewer_lines() -> None:
    assert len(lines(plan(load_geometry("gpt2-xl")))) == 1
    latent = lines(plan(load_geometry("deepseek-v3")))
    assert len({line.colour for line in latent}) == len({line.dashes for line in latent}) == 2
    full = plan(load_geometry("gemma3-1b"), policy="full")
    assert len(lines(full)) == 2


@pytest.mark.parametrize(("name", "start"), [("a.png", b"\x89PNG"), ("a.svg", b"<?xml")])
def test_picture_is_written(tmp_path: Path, name: str, start: bytes) -> None:
    draw(plan(load_geometry("gemma3-1b")), tmp_path / name)
    assert (tmp_path / name).read_bytes().startswith(start)


def test_picture_errors_are_named(tmp_path: Path) -> None:
    found = plan(load_geometry("gpt2-xl"))
    with pytest.raises(ValueError, match="no folder"):
        draw(found, tmp_path / "missing" / "a.png")
    with pytest.raises(ValueError, match="plot file 'a.xyz': want a name that ends in"):
        draw(found, tmp_path / "a.xyz")


def test_notes_say_what_is_assumed_of_layouts_and_scales() -> None:
    gemma = load_geometry("gemma3-1b")
    paged = plan(gemma, policy="pages:16", dtype="int8").notes
    assert any("whole pages of 16 tokens" in note for note in paged)
    assert any("Window layers keep every token on pages" in note for note in paged)
    # Heads of 256 channels: 512 bytes become 256 and a scale of 4.
    assert any("1.969 times smaller" in note for note in paged)
    assert not any("Window" in note for note in plan(load_geometry("llama3-8b")).notes)
    assert plan(gemma, policy="full").notes == ()


def test_notes_say_what_is_forgotten_and_what_there_is_room_for() -> None:
    gemma, llama = load_geometry("gemma3-1b"), load_geometry("llama3-8b")
    assert plan(llama, policy="ring:512").notes == ("Every layer keeps its last 512 tokens.",)
    spare, smaller = "A ring has 16 spare slots", "; one with a smaller window of its own keeps"
    sinks = plan(gemma, policy="sinks:1000+16").notes
    assert "last 1,000 tokens and its first 4" + smaller in sinks[0] and spare in sinks[1]
    assert spare in plan(gemma, policy="window+16").notes[1]
    assert plan(llama, policy="window+16").notes == ()
    pyramid = plan(gemma, policy="snapkv:1024+256/pyramid").notes
    assert "Window layers are counted with their window only" in pyramid[0]
    assert "from 1,997 tokens" in pyramid[1] and "to 51 in the last" in pyramid[1]
    assert pyramid[2].endswith("before a row is full: 256.")


def test_layers_of_a_pyramid_are_told_apart() -> None:
    gemma = plan(load_geometry("gemma3-1b"), policy="h2o:1024/pyramid")
    slots = [(group.count, group.slots) for group in gemma.groups]
    assert slots == [(22, 512), (1, 1997), (1, 1348), (1, 700), (1, 51)]
    assert sum(size for count, size in slots if count == 1) == 4 * 1024


def test_picture_bends_where_a_layer_is_full() -> None:
    model = load_geometry("llama3-8b")
    for policy, full in {"ring:700": 700, "snapkv:500+99": 599, "sinks:700+9": 713}.items():
        found = plan(model, policy=policy)
        kept, every, _ = lines(found)
        assert full in lengths(found) and "every token" in every.label
        assert kept.sequence_bytes[-1] == full * 131_072
        assert every.sequence_bytes[-1] == 8192 * 131_072
    assert len(lines(plan(model, policy="pages:16x300"))) == 2


def test_picture_of_pages_is_of_pages() -> None:
    model = load_geometry("gemma3-1b")
    full, paged = (lines(plan(model, policy=policy)) for policy in ("full", "pages:64"))
    assert len(paged) == 2 and paged[0].label == full[0].label
    for pair in zip(full, paged, strict=True):
        at = lengths(plan(model))
        for tokens, plain, whole in zip(at, *(line.sequence_bytes for line in pair), strict=True):
            assert whole * tokens == plain * -(-tokens // 64) * 64


def test_rows_that_fit_on_pages_of_a_tpu() -> None:
    layer = LayerSpec("full", 4, KVSpec(4, 128, 128))
    storage = Storage("bf16", SlotPolicy.parse("pages:16"), V5E)
    # A row has 2 pages of 2 x 4 x 16 x 128 x 2 bytes and 2 counts of them, and 6 bytes of its own;
    # the table of up to 8 rows is one tile.
    row = 2 * 2**15 + 8 + 6
    for rows in (1, 7, 8):
        budget = rows * row + 8 * 128 * 4
        assert storage.most_rows(model(layer), 32, budget) == rows
        assert storage.most_rows(model(layer), 32, budget - 1) == rows - 1
    nothing = plan(model(LayerSpec("shared", 4)), chip=H100, devices={"data": 2})
    assert nothing.fit is not None and nothing.fit.sequences is None
    assert text_of(nothing).count("no limit") == 3


def test_storage_names_its_dtype_in_full() -> None:
    assert Storage("bf16") == Storage() and Storage("fp8").dtype == "float8_e4m3fn"
    geometry = dataclasses.replace(load_geometry("gpt2-xl"), name="x")
    assert Storage("fp32").token_bytes(geometry) == 4 * Storage("fp8").token_bytes(geometry)
    assert Storage("int8").codec == Int8() and Storage("float8:16").codec == Float8(16)
    assert Storage("int4:032") == Storage("int4:32") and Storage("int4:32").codec == Int4(32)
