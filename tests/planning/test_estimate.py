"""The output of `python -m pretrain.estimate`: the estimate, advice, assumed times and the search
for a layout.
"""

import re
import subprocess
import sys

import pytest
from plans import GIB, RECIPES, of_recipe

from megatron_tape.command_line import status_of
from megatron_tape.planning.flops import flops_per_step
from megatron_tape.planning.hardware import KINDS
from megatron_tape.planning.memory import checkpoint_bytes, memory
from megatron_tape.planning.step_time import step_time
from megatron_tape.text import byte_size
from pretrain import estimate


@pytest.fixture
def run(capsys):
    """Return a function that runs the command and returns its output and warnings."""

    def run(*arguments, name="tape_1b", status=0):
        assert estimate.main(["--config", str(RECIPES / f"{name}.yaml"), *arguments]) == status
        return capsys.readouterr()

    return run


@pytest.fixture
def refused(capsys):
    """Return a function that runs the command with invalid arguments and returns its error, one
    line.
    """

    def refused(*arguments):
        assert (
            status_of(
                lambda: estimate.main(["--config", str(RECIPES / "tape_1b.yaml"), *arguments])
            )
            == 2
        )
        output, error = capsys.readouterr()
        assert output == ""
        assert error.startswith("error: ")
        assert error.count("\n") == 1
        return error

    return refused


def test_the_command_prints_the_numbers(run):
    output, error = run("--processes", "4", name="tape_155m")
    plan = of_recipe(4, name="tape_155m")
    assert re.search(rf"^parameters +{plan.elements:,}$", output, re.M)
    assert re.search(rf"^memory per GPU +{byte_size(memory(plan).peak)}$", output, re.M)
    assert re.search(r"^tokens per step +524,288$", output, re.M)
    assert re.search(r"^tokens of the run +5,242,880,000 ", output, re.M)
    assert f"{flops_per_step(plan):.3e}" in output
    assert byte_size(checkpoint_bytes(plan)) in output
    assert error == ""


def test_the_command_reads_overrides_and_assumes_the_minimum_number_of_processes(run):
    output, _ = run("--train.micro_batch_size", "1", "--parallel.tensor_model_parallel_size=4")
    assert re.search(r"^layout +4 processes: 4 tensor parallel x 1 data parallel", output, re.M)
    assert re.search(r"^  per model-parallel rank", output, re.M)


@pytest.mark.parametrize(
    "writers, number",
    [("2", 2), ("4", 4), ("null", 8)],
)
def test_the_copy_of_an_asynchronous_save_is_shared_by_its_writers(run, writers, number):
    """By default, one writer per GiB, limited by the number of processes."""
    two = "--parallel.tensor_model_parallel_size=2"
    asynchronous = ["--checkpoint.asynchronous=true", f"--checkpoint.writers={writers}"]
    output = run("--processes=8", two, *asynchronous).out
    row = re.search(r"^host memory per checkpoint writer +([\d.]+) GiB, (\d+) w", output, re.M)
    size = checkpoint_bytes(of_recipe(8, two)) / GIB / number
    assert (float(row[1]), int(row[2])) == (pytest.approx(size, rel=0.01), number)
    assert "writer" not in run("--processes=8", two).out


@pytest.mark.parametrize("more", [[], ["--processes=8", "--search"]])
@pytest.mark.parametrize(
    "encoding, warned",
    [("cope", "all keys"), ("tape", ""), ("xpos", "")],
)
def test_attention_slower_than_ropes_is_a_warning(run, encoding, warned, more):
    warnings = run(f"--model.position_encoding={encoding}", *more, name="tape_155m").err
    assert warned in warnings
    assert bool(warnings) == bool(warned)


def test_windows_are_shown_and_lower_the_cost(run):
    window = ["--model.sliding_window=256", "--model.full_attention_every=4"]
    output, error = run(*window, name="tape_155m")
    assert re.search(r"^sliding window +256 tokens in 9 of 12 layers$", output, re.M)
    assert "triton" in output
    assert not error
    flops = [
        float(re.search(r"^FLOPs per step +(\S+),", text, re.M)[1])
        for text in (output, run(name="tape_155m").out)
    ]
    assert flops[0] < flops[1]
    masking = run(*window, "--model.attention_backend=torch", name="tape_155m").err
    assert "attention skips the tokens outside model.sliding_window" in masking


def test_a_window_of_the_whole_sequence_changes_no_estimate(run):
    whole = run("--model.sliding_window=1024", name="tape_155m").out
    assert whole == run(name="tape_155m").out


RECOMPUTED = ["--train.recompute=full", "--train.micro_batch_size=1"]
ONE = "--parallel.tensor_model_parallel_size=1"
TWO = ["--parallel.tensor_model_parallel_size=2", "--deepspeed.zero_stage=2"]


@pytest.mark.parametrize(
    "arguments, size", [(["--gpu-memory=1"], 1), (["--train.micro_batch_size=64"], 80)]
)
def test_exceeding_the_gpu_memory_is_a_warning(run, arguments, size):
    error = run(*TWO, *arguments).err
    warning = rf"warning: .* GiB does not fit in {size} GiB with 10% kept free; .*--search.*\n"
    assert re.fullmatch(warning, error)


def test_fitting_into_the_gpu_memory_gives_no_warning(run):
    """Under ZeRO 3, no GPU holds all weights, which are 129 GiB in bf16."""
    layout = [ONE, "--parallel.pipeline_model_parallel_size=1", "--deepspeed.zero_stage=3"]
    layout.append("--parallel.virtual_pipeline_size=1")
    batch = ["--train.global_batch_size=512", *RECOMPUTED]
    assert run("--processes=512", "--gpu-memory=80", *layout, *batch, name="tape_70b").err == ""


@pytest.mark.parametrize(
    "arguments, named",
    [
        (["--processes", "3", *TWO], "the number of processes is 3"),
        (["--processes", "0"], "argument --processes: 0 is below 1"),
        (["--gpu-memory", "-1"], "--gpu-memory is -1.0"),
        (["--model.num_layers", "1000000000"], "model.num_layers"),
        (["--model.kv_channels=2048"], "gives heads of 2048 elements"),
        (["--search"], "--search needs --processes"),
        (["--search", "--processes=16", *RECOMPUTED], "--search chooses train."),
        (["--search", "--processes=8", "--train.precision=fp32"], "train.precision is fp32"),
    ],
)
def test_mistakes_end_in_one_sentence(refused, arguments, named):
    assert named in refused(*arguments)


def test_an_estimate_needs_no_torch():
    program = (
        "import sys\nfrom pretrain.estimate import main\n"
        "main(sys.argv[1:])\nassert not {'torch', 'megatron', 'deepspeed'} & set(sys.modules)"
    )
    command_line = [sys.executable, "-c", program, "--config", str(RECIPES / "tape_1b.yaml")]
    subprocess.run(command_line, check=True, capture_output=True, cwd=RECIPES.parents[1])


def test_a_step_time_is_marked_as_assumed_and_has_two_digits(run):
    output = run("--processes", "64", *TWO).out
    expected = step_time(of_recipe(64, *TWO), KINDS["H100"])
    row = re.search(r"^step time, assumed +([\d.]+) s on H100 at 40% .*, (\d+)% comm", output, re.M)
    assert float(row[1]) == pytest.approx(expected.total, rel=0.05)
    assert len(row[1].strip("0.").replace(".", "")) <= 2
    assert int(row[2]) == round(100 * expected.communication / expected.total)


@pytest.mark.parametrize(
    "option, said",
    [
        ("--train.precision=fp32", r"^step time +not estimated: train.precision is "),
        ("--gpu=H200", " s on H200 at"),
    ],
)
def test_the_step_time_is_estimated_for_the_named_gpu_or_reported_as_unknown(run, option, said):
    assert re.search(said, run(option).out, re.M)


def test_an_estimate_in_fp32_refers_to_no_step_time_and_to_no_search_in_fp32(run):
    fp32 = "--train.precision=fp32"
    assert run(fp32, "--model.position_encoding=cope", name="tape_155m").err == ""
    assert "train.precision bf16 takes less" in run(fp32, "--gpu-memory=1").err


def test_a_search_lists_the_fastest_layouts_that_fit(run):
    output = run("--search", "--processes=16", "--gpu-memory=40").out
    rows = re.findall(
        r"^ +(\d+) +\d+ +[\dx]+ +\d+ +([123]) +\d+ +\w+ +([\d.]+) +([\d.]+)$", output, re.M
    )
    assert len(rows) == 10
    assert "assumed for 16 GPUs, H100 at" in output
    assert [float(row[2]) for row in rows] == sorted(float(row[2]) for row in rows)
    assert all(float(row[3]) <= 0.9 * 40 for row in rows)


def test_a_search_without_a_fitting_layout_lists_the_smallest_or_the_reasons(run):
    output = run("--search", "--processes=16", "--gpu-memory=1", status=1).out
    heading = "none fits in 1 GiB with 10% kept free; the smallest:\n"
    assert heading in output
    rows = re.findall(r" ([\d.]+)  of which .* [\d.]+$", output.partition(heading)[2], re.M)
    assert len(rows) == 5
    assert rows == sorted(rows, key=float)
    output = run("--search", "--processes=63", status=1).out
    assert "\nno layout can run on 63 GPUs\n" in output
    assert "fits in" not in output
    assert "cannot run: train.global_batch_size 512 is not divisible by" in output
