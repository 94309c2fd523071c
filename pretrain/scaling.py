"""Print the tables of docs/scaling.md: `python -m pretrain.scaling`.

Nothing is measured: every figure comes from the arithmetic of `pretrain.estimate --search`.
"""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

from megatron_tape import command_line
from megatron_tape.checks.arguments import parse_run_config
from megatron_tape.checks.settings import validate
from megatron_tape.config.schema import RunConfig
from megatron_tape.io.files import write_whole
from megatron_tape.planning.hardware import KINDS
from megatron_tape.planning.plan import Plan
from megatron_tape.planning.search import GIB, Prediction, SearchResult, search
from megatron_tape.planning.step_time import step_time
from megatron_tape.position import replaced

RECIPES = Path(__file__).parent / "recipes"
MODELS = {"155M": "tape_155m", "1B": "tape_1b", "7B": "tape_7b", "70B": "tape_70b"}
GPUS = (8, 64, 512, 4096)
LENGTHS = (4096, 32768, 131072)
BATCH = 2**24
"""Tokens of a step."""
HARDWARE = KINDS["H100"]
COMPARED_ON = 64
"""GPUs on which TAPE and RoPE are compared by phase."""
LONGEST = 2**20
"""Tokens of the longest sequences."""

LAYOUT = "| GPUs | tokens | tensor x context x pipeline x data | ZeRO, micro-batch, recompute "
LAYOUT += "| s/step | tokens/s/GPU | MFU | GiB | most time in |"
ALIGNED = "|--:|--:|---|---|--:|--:|--:|--:|---|"
SIZES = f"{LAYOUT} / RoPE |\n{ALIGNED}--:|"
PHASES = "| model | tokens | attention | position update | recomputation | communication | rest | together |\n|---|"
PHASES += "--:|" * 7
BEGINNING, END = "<!-- tables: written by python -m pretrain.scaling --write -->\n", "<!-- end of tables -->\n"
PAGE = Path(__file__).parents[1] / "docs" / "scaling.md"


def run(model: str, length: int, encoding: str = "tape") -> RunConfig:
    """Return the recipe of a size, with other sequences and batches."""
    changes = [f"--model.seq_length={length}", f"--train.global_batch_size={BATCH // length}"]
    recipe = str(RECIPES / f"{MODELS[model]}.yaml")
    return parse_run_config(["--config", recipe, *changes, f"--model.position_encoding={encoding}"])


def find(model: str, length: int, gpus: int, encoding: str = "tape", wanted: int = 1) -> SearchResult:
    """Return the fastest layouts on so many GPUs."""
    return search(Plan(run(model, length, encoding), gpus), HARDWARE, HARDWARE.memory, validate, wanted)


def size_row(model: str, length: int, gpus: int) -> str:
    """Return the row of a model's table for one length and number of GPUs."""
    found = find(model, length, gpus)
    if not found.fitting:
        if found.tried:
            least = min(prediction.memory.peak for prediction in found.too_large)
            why = f"none fits: {least / GIB:,.0f} GiB at least"
        else:
            heads = run(model, length).model.num_attention_heads
            why = f"none: {BATCH // length:,} sequences, and at most {heads} GPUs share one"
        return f"| {gpus:,} | {length:,} | {why} | | | | | | | |"
    best = found.fitting[0]
    rope = find(model, length, gpus, "rope").fitting[0]
    return f"| {gpus:,} | {length:,} | {described(best)} | {best.time.total / rope.time.total:.2f} |"


def described(prediction: Prediction) -> str:
    """Return the columns that describe a layout and its time."""
    plan = prediction.plan
    most = ", ".join(f"{name.replace('_', ' ')} {share:.0%}" for name, share in prediction.phases()[:2])
    cells = (
        f"{plan.tensor_size} x {plan.context_size} x {plan.pipeline} x {plan.replicas // plan.context_size}",
        f"{plan.zero_stage}, {plan.config.train.micro_batch_size}, {plan.config.train.recompute}",
        f"{prediction.time.total:.2f}",
        f"{prediction.tokens_per_second:,.0f}",
        f"{prediction.utilization(HARDWARE):.0%}",
        f"{prediction.memory.peak / GIB:.0f}",
        most,
    )
    return " | ".join(cells)


def phase_row(model: str, length: int) -> str | None:
    """Return what each phase of TAPE's step takes more than RoPE's in TAPE's fastest layout, in per cent of RoPE's."""
    found = find(model, length, COMPARED_ON)
    if not found.fitting:
        return None
    tape = found.fitting[0]
    with_rope = replaced(tape.plan.config, {"model.position_encoding": "rope"})
    rope = step_time(Plan(with_rope, COMPARED_ON), HARDWARE)
    more = {name: (value - getattr(rope, name)) / rope.total for name, value in dataclasses.asdict(tape.time).items()}
    kinds = ("tensor_parallel", "context_parallel", "pipeline_parallel", "zero")
    communication = sum(more[kind] for kind in kinds)
    named = more["attention"], more["position"], more["recomputation"], communication
    cells = " | ".join(f"{100 * share:.1f}" for share in (*named, sum(more.values()) - sum(named), sum(more.values())))
    return f"| {model} | {length:,} | {cells} |"


def tables() -> Iterator[str]:
    """Yield the tables line by line."""
    for model in MODELS:
        yield f"### {model}\n\n{SIZES}"
        yield from (size_row(model, length, gpus) for length in LENGTHS for gpus in GPUS)
        yield ""
    yield f"### TAPE's step on {COMPARED_ON} GPUs beside RoPE's in the same layout, in % of RoPE's\n\n{PHASES}"
    yield from filter(None, (phase_row(model, length) for model in MODELS for length in LENGTHS))
    yield f"\n### 1B with sequences of {LONGEST:,} tokens\n\n{LAYOUT}\n{ALIGNED}"
    found = find("1B", LONGEST, COMPARED_ON, wanted=3)
    yield from (f"| {COMPARED_ON} | {LONGEST:,} | {described(best)} |" for best in found.fitting)


def main(argv: list[str] | None = None) -> None:
    """Print the tables, or write them into the page."""
    parser = command_line.Parser(prog="python -m pretrain.scaling", description=__doc__)
    parser.add_argument("--write", action="store_true", help=f"write the tables into {PAGE.parent.name}/{PAGE.name}")
    if parser.parse_args(argv).write:
        page, whole = PAGE.read_text(encoding="utf-8"), "\n".join(tables())
        before, after = page.partition(BEGINNING)[0], page.partition(END)[2]
        write_whole(PAGE, [f"{before}{BEGINNING}\n{whole}\n\n{END}{after}".encode()])
        return
    for line in tables():
        print(line, flush=True)


if __name__ == "__main__":
    command_line.run(main)
