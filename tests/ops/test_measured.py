"""`auto` chooses by what was measured on the GPU at hand, and benchmarks fill the table it reads."""

import json
import subprocess
import sys

import pytest
import torch

from benchmarks.measured import merge
from megatron_tape.errors import ConfigError
from megatron_tape.ops import attention, measured
from megatron_tape.ops.attention import Choice, choose_backend
from megatron_tape.ops.backends import AVERAGE, BIAS, ROTATION
from megatron_tape.ops.measured import Heads, Row, read_table

GPU, BF16, H100 = torch.device("cuda"), torch.bfloat16, "NVIDIA H100 80GB HBM3"


def row(seq_length=1024, heads=12, groups=12, head_dim=64, averages=True, precision="bf16", gpu=H100, **seconds):
    return Row(
        gpu=gpu, precision=precision, heads=heads, groups=groups, head_dim=head_dim, seq_length=seq_length,
        averages=averages, batch=4, seconds=seconds or {"torch": 1.0}, torch="2.11.0", triton="3.6.0",
        date="2026-11-22", commit="abc", record="attention.json",
    )  # fmt: skip


@pytest.fixture
def table(monkeypatch, tmp_path):
    """A function that fills the table, on a machine with an H100 on which everything runs but what `missing` names."""
    path, missing = tmp_path / "measured.json", {"tiled"}
    monkeypatch.setattr(measured, "TABLE", path)
    monkeypatch.setattr(attention, "unsupported", lambda name, *_: "is not there" if name in missing else None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: H100)

    def fill(*rows, without=()):
        path.write_text(json.dumps(rows))
        missing.update(without)

    return fill


def auto(seq_length=1024, heads=12, groups=12, head_dim=64, dtype=BF16, needs=frozenset({ROTATION, AVERAGE})):
    return choose_backend("auto", GPU, dtype, Heads(heads, groups, head_dim, seq_length), needs)


def test_the_fastest_backend_at_the_nearest_length_is_chosen(table):
    table(row(1024, triton=2.0, torch=1.0), row(8192, triton=1.0, torch=2.0))
    for length, backend in ((64, "torch"), (1024, "torch"), (2048, "torch"), (4096, "triton"), (65536, "triton")):
        at = "1,024" if backend == "torch" else "8,192"
        assert auto(length) == Choice(backend, f"the fastest that was measured on {H100} at {at} tokens")


def test_of_equally_near_lengths_the_nearest_ratio_of_heads_to_groups_counts(table):
    table(row(heads=32, groups=32, triton=1.0, torch=2.0), row(heads=32, groups=8, triton=2.0, torch=1.0))
    assert auto(heads=12, groups=12).backend == "triton"
    assert auto(heads=64, groups=12).backend == "torch"


@pytest.mark.parametrize(
    "other", [{"gpu": "NVIDIA L4"}, {"precision": "fp32"}, {"head_dim": 128}, {"averages": False}, {"heads": 0}]
)
def test_rows_of_other_gpus_precisions_widths_and_encodings_do_not_count(table, other):
    table(*([] if "heads" in other else [row(torch=1.0, triton=2.0, **other)]))
    assert auto() == Choice("triton", "not measured on this GPU")


def test_a_backend_that_cannot_run_or_has_an_unknown_name_is_passed_over(table):
    table(row(nonsense=0.1, flash_attn=1.0, torch=2.0, triton=3.0), without={"flash_attn"})
    assert auto().backend == "torch"
    table(row(flash_attn=1.0), without={"flash_attn"})
    assert auto() == Choice("triton", "not measured on this GPU")


def test_times_without_a_bias_say_nothing_of_attention_with_one(table):
    table(row(averages=False, torch=1.0))
    assert auto(needs={BIAS}) == Choice("naive", "not measured on this GPU")


def test_a_backend_that_was_named_is_not_replaced_and_a_cpu_needs_no_table(table):
    table(row(torch=1.0, triton=2.0))
    shape = Heads(12, 12, 64, 1024)
    assert choose_backend("triton", GPU, BF16, shape) == Choice("triton", "as model.attention_backend says")
    measured.TABLE.write_text("nonsense")
    assert choose_backend("auto", torch.device("cpu"), BF16, shape) == Choice("torch", "the default on a CPU")


@pytest.mark.parametrize(
    "text, why",
    [
        ("[{", "it is not JSON"),
        ("{}", "it is an object, where a list belongs"),
        (json.dumps([row() | {"seconds": [1.0]}]), r"\[0\].seconds is a list"),
        (json.dumps([row(torch=-1.0)]), r"\[0\].seconds.torch is -1.0, where a number above zero"),
        (json.dumps([row(), row(seq_length=0)]), r"\[1\].seq_length is 0"),
        (json.dumps([{"gpu": H100}]), "is missing"),
        (None, "No such file"),
    ],
)
def test_a_damaged_table_is_one_error_that_names_it(table, text, why):
    table()
    measured.TABLE.unlink() if text is None else measured.TABLE.write_text(text)
    with pytest.raises(ConfigError, match=why) as caught:
        auto()
    message = str(caught.value)
    assert message.count(str(measured.TABLE)) == 1 and "model.attention_backend" in message


def test_records_are_merged_and_replace_rows_with_equal_keys(table, tmp_path):
    table(row(1024, torch=3.0), row(2048, torch=4.0))
    records = [tmp_path / "a.json", tmp_path / "b.json"]
    for path, rows in zip(records, ([row(1024, torch=1.0) | {"note": "x"}], [row(4096), row(1024, averages=False)])):
        path.write_text(json.dumps({"rows": rows, "results": []}))
    assert merge(records) == 3
    found = {(each["seq_length"], each["averages"]): each["seconds"]["torch"] for each in read_table()}
    assert found == {(1024, True): 1.0, (2048, True): 4.0, (4096, True): 1.0, (1024, False): 1.0}
    assert all(each.keys() == Row.__annotations__.keys() for each in read_table())
    before = measured.TABLE.read_bytes()
    for text in ('{"rows": [{}]}', json.dumps({"rows": [row(torch=0.0)]}), "{}"):
        records[1].write_text(text)
        with pytest.raises(ValueError, match="b.json cannot be used: rows"):
            merge(records)
        assert measured.TABLE.read_bytes() == before


def test_merging_needs_no_torch_and_no_rows(tmp_path):
    (tmp_path / "cpu.json").write_text('{"rows": []}')
    code = (
        "import sys; sys.modules['torch'] = None; from benchmarks import measured; "
        f"print(measured.merge(['{tmp_path}/cpu.json']), len(measured.read_table()) >= 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "0 True\n", done.stderr
