"""Check at several widths that training moves activations equally far with muP, and not without it.

    python -m pretrain.coordinate_check --recipe RECIPE.yaml --widths 1,2,4,8

The recipe's model is widened by each factor: hidden_size, num_attention_heads, num_query_groups and ffn_hidden_size are
multiplied by it, so that heads keep their width. Each model takes a few steps on the same data at the recipe's peak
learning rate, with optimizer.mup_base (the recipe's own model) and without. After each step the RMS is measured of how
far activations of one fixed batch have moved since initialization. Its logarithm over that of the width should be flat
with muP. Prints the slopes after the last step, and draws all steps into coordinate_check.png in the output directory.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import logging
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from megatron_tape import command_line
from megatron_tape.checks.arguments import parse_run_config
from megatron_tape.checks.settings import validate
from megatron_tape.command_line import Progress, say
from megatron_tape.config.schema import DeepSpeedConfig, EvaluationConfig, ParallelConfig, RunConfig
from megatron_tape.data.inputs import check_data_files, check_datasets
from megatron_tape.errors import ConfigError, refuse
from megatron_tape.evaluation.base import Picture
from megatron_tape.evaluation.figures import legend, log_scale, new_figure, save, shades
from megatron_tape.model.mup import KEY
from megatron_tape.parallel.launcher import refuse_launcher
from megatron_tape.planning.flops import flops_per_token
from megatron_tape.position import replaced
from megatron_tape.text import counted
from pretrain import train

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_tape.model.language_model import LanguageModel
    from megatron_tape.parallel.layout import ParallelLayout
    from megatron_tape.run.watch import Watch

WIDENED = ("hidden_size", "num_attention_heads", "num_query_groups", "ffn_hidden_size")
PICTURE = "coordinate_check"
WITH, WITHOUT = "with muP", "without"
Movements = dict[str, list[float]]
"""By activation, the RMS of its movement after each step."""


def read_command(argv: list[str] | None) -> tuple[argparse.Namespace, dict[str, dict[int, RunConfig]]]:
    """Return the options, and what is trained at each width `WITH` muP and `WITHOUT`, after checking all of it."""
    parser = command_line.Parser(
        prog="python -m pretrain.coordinate_check",
        usage="%(prog)s --recipe RECIPE.yaml [--widths 1,2,4] [--steps N] [--output DIR] [--section.key value ...]",
        description=__doc__,
        epilog="--section.key value changes a setting of the recipe at all widths.",
    )
    add = parser.add_argument
    add("--recipe", required=True, metavar="RECIPE.yaml", help="what is trained; a file as pretrain.train takes it")
    add("--widths", default="1,2,4", metavar="A,B,...", help="factors of the recipe's width (default: 1,2,4)")
    add("--steps", type=command_line.whole_number, default=4, metavar="N", help="steps of each model (default: 4)")
    add("--output", metavar="DIR", help="where the picture goes (default: runs/coordinate_check/<name of the recipe>)")
    options, overrides = parser.parse_known_args(argv)
    refuse_launcher("pretrain.coordinate_check", "is one process")
    factors = read_widths(options.widths)
    options.output = Path(options.output or f"runs/coordinate_check/{Path(options.recipe).stem}")
    own = ["--train.steps", str(options.steps), "--schedule.kind", "constant", "--schedule.warmup_steps", "0"]
    own += [
        "--schedule.decay_steps",
        "null",
        "--schedule.power",
        "1",
        "--train.profile",
        "null",
        "--train.average",
        "null",
    ]
    own += ["--train.batch_ramp", "null", "--train.spikes", "null", "--logging.directory", str(options.output)]
    config = parse_run_config(["--config", options.recipe, *overrides, *own], train.refuse_extension)
    problem = "is set, but the check takes the recipe's own model as the base"
    refuse(config.optimizer.mup_base is not None, KEY, problem, f"add --{KEY} null")
    configs = {name: {factor: widened(config, factor, name == WITH) for factor in factors} for name in (WITH, WITHOUT)}
    for of_width in configs.values():
        for factor, wide in of_width.items():
            try:
                validate(wide, 1)
            except ConfigError as error:
                raise error.at(f"at {factor} times the width") from None
    check_data_files(config)
    check_datasets(config)
    return options, configs


def read_widths(text: str) -> list[int]:
    """Return the factors that `--widths` asks for, in ascending order."""
    given = text.split(",")
    fix = "give at least two different whole numbers, such as 1,2,4"
    numbers = all(re.fullmatch("0*[1-9][0-9]{0,5}", item.strip()) for item in given)
    wrong = not numbers or len(set(map(int, given))) < 2
    refuse(wrong, "--widths", f"is {text}", fix)
    return sorted(set(map(int, given)))


def widened(config: RunConfig, factor: int, mup: bool) -> RunConfig:
    """Return what one process trains at `factor` times the width, with the recipe's model as the base if `mup`."""
    widths = {name: value for name in WIDENED if (value := getattr(config.model, name)) is not None}
    changed = {f"model.{name}": factor * value for name, value in widths.items()}
    # What remains would only take time: it changes no step.
    changed |= {"train.eval_interval": None, "data.num_workers": 0}
    changed |= {"optimizer.mup_base": widths if mup else None}
    alone = {"parallel": ParallelConfig(), "deepspeed": DeepSpeedConfig(), "evaluation": EvaluationConfig()}
    return dataclasses.replace(replaced(config, changed), **alone)


def main(argv: list[str] | None = None) -> None:
    """Check, train all models, print the slopes and draw. Raises UserError for mistakes, before anything is trained."""
    options, configs = read_command(argv)
    options.output.mkdir(parents=True, exist_ok=True)
    found = measure(configs)
    path = options.output / f"{PICTURE}.png"
    save(picture(found, configs), path)
    print("\n".join(table(found, configs)))
    say(f"the picture is {path}")


def measure(configs: dict[str, dict[int, RunConfig]]) -> dict[str, dict[int, Movements]]:
    """Train the model of each configuration; return how far its activations have moved."""
    train.load_libraries(next(iter(configs[WITH].values())), is_rank_0=True)
    import deepspeed  # noqa: F401 -- which sets its own level when it is imported

    for chatty in (None, "DeepSpeed"):  # every model would say what it is
        logging.getLogger(chatty).setLevel(logging.ERROR)
    from megatron_tape.parallel.layout import check_devices, initialize_distributed
    from megatron_tape.run.watch import Watch

    # At the recipe's own width there is nothing to scale.
    runs = [(name, factor) for factor in configs[WITH] for name in configs if (name, factor) != (WITHOUT, 1)]
    costs = {run: flops_per_token(configs[run[0]][run[1]].model) for run in runs}
    steps = configs[WITH][runs[0][1]].train.steps
    progress, done = Progress(steps * sum(costs.values())), 0
    found: dict[str, dict[int, Movements]] = {name: {} for name in configs}
    watch = Watch(None)
    try:
        for name, factor in runs:
            config = configs[name][factor]
            check_devices(config.train.device)
            for step, moved in enumerate(movements(config, initialize_distributed(), watch), 1):
                done += costs[name, factor]
                said = f"{factor} times the width, {name}: step {step} of {steps}"
                progress.update(done, lambda _, said=said: said)
                if watch.stop is not None:
                    raise command_line.Interrupted(signal.SIGTERM)
                for activation, rms in moved.items():
                    found[name].setdefault(factor, {}).setdefault(activation, []).append(rms)
            gc.collect()
    finally:
        watch.close()
        progress.end()
    if 1 in found[WITH]:
        found[WITHOUT] = {1: found[WITH][1]} | found[WITHOUT]
    return found


def movements(config: RunConfig, layout: ParallelLayout, watch: Watch) -> Iterator[dict[str, float]]:
    """Train; yield after each step the RMS of how far each activation of the first micro-batch has moved."""
    from megatron_tape.data.batches import build_batches
    from megatron_tape.data.tokenizer import load_run_tokenizer
    from megatron_tape.model.initialization import initialize_weights, weight_initializations
    from megatron_tape.parallel.layout import seed_everything
    from megatron_tape.parallel.partitions import allocate
    from megatron_tape.training.engine import Engine
    from megatron_tape.training.model_building import build_model
    from megatron_tape.training.schedule import learning_rate

    tokenizer = load_run_tokenizer(config)
    batches = build_batches(config, layout, None if tokenizer is None else tokenizer.eod)
    tokens = next(batches.training())["tokens"]
    seed_everything(config.train.seed, layout)
    model = build_model(config, layout, watch)
    allocate(model, layout.device)
    initials = weight_initializations(config.model, config.extension, config.optimizer.mup_base)
    initialize_weights(model, initials, config.train.seed, 0, 1)
    engine, micro_batches = Engine(model, config, layout), batches.training()
    try:
        before = activations(engine, model, tokens)
        for step in range(1, config.train.steps + 1):
            rate = learning_rate(step, config.optimizer, config.schedule, config.train.steps)
            engine.train_step(micro_batches, rate, step)
            after = activations(engine, model, tokens)
            yield {name: (after[name] - value).square().mean().sqrt().item() for name, value in before.items()}
    finally:
        engine.close()


def activations(engine, model: LanguageModel, tokens: Tensor) -> dict[str, Tensor]:
    """Return the activations in the last layer of all of a batch's tokens, and its logits, in fp32.

    The position state is among them if it depends on parameters: it is what the last layer gets.
    """
    found, last = {}, model.gpt.decoder.layers[-1]

    def keep(name: str, index: int):
        return lambda module, inputs, outputs: found.update({name: outputs[index].float()})

    hooks = [
        last.self_attention.register_forward_hook(keep("attention output", 0)),
        last.mlp.register_forward_hook(keep("MLP output", 0)),
        last.register_forward_hook(keep("last hidden state", 0)),
    ]
    if model.encoding.carries(model.model.num_layers - 1):
        hooks.append(last.register_forward_hook(keep("position state", 1)))
    try:
        found["logits"] = engine.logits(tokens).float()
    finally:
        for hook in hooks:
            hook.remove()
    return found


def slope(of_width: dict[int, Movements], activation: str, step: int = -1) -> float:
    """Return by what power of the width an activation's movement after a step grows."""
    rms = [moved[activation][step] for moved in of_width.values()]
    return float(np.polyfit(np.log(list(of_width)), np.log(rms), 1)[0])


def table(found: dict[str, dict[int, Movements]], configs: dict[str, dict[int, RunConfig]]) -> Iterator[str]:
    """Yield the lines of the table of slopes after the last step."""
    widths = ", ".join(f"{config.model.hidden_size:,}" for config in configs[WITH].values())
    steps = len(next(iter(found[WITH][next(iter(found[WITH]))].values())))
    yield f"slope of log(RMS of the movement) over log(width), widths {widths}, after {counted(steps, 'step')}:"
    yield f"{'':<20}" + "".join(f"{name:>12}" for name in found)
    for activation in _activations(found):
        yield f"{activation:<20}" + "".join(f"{slope(of_width, activation):>12.2f}" for of_width in found.values())


def _activations(found: dict[str, dict[int, Movements]]) -> list[str]:
    return list(next(iter(found[WITH].values())))


def picture(found: dict[str, dict[int, Movements]], configs: dict[str, dict[int, RunConfig]]) -> Picture:
    """Draw each activation's movement by width: a line for each step, above with muP, below without."""
    from matplotlib.ticker import NullLocator

    names = _activations(found)
    figure, axes = new_figure(2, len(names), width=2.9, height=2.7, sharex=True, sharey="col")
    widths = [config.model.hidden_size for config in configs[WITH].values()]
    sentences = []
    for row, (parametrization, of_width) in enumerate(found.items()):
        for column, name in enumerate(names):
            one = axes[row * len(names) + column]
            curves = list(zip(*(moved[name] for moved in of_width.values()), strict=True))
            for step, (color, curve) in enumerate(zip(shades(len(curves)), curves), 1):
                one.plot(widths, curve, color=color, marker="o", markersize=4, linewidth=1.6, label=f"step {step}")
            one.set_xscale("log", base=2)
            log_scale(one, "y")
            one.set_xticks(widths, [f"{width:,}" for width in widths])
            one.xaxis.set_minor_locator(NullLocator())
            one.set_title(f"{name}\n{parametrization}: slope {slope(of_width, name):.2f}", fontsize=10)
            sentences.append(f"{name}, {parametrization}: {slope(of_width, name):.2f}")
            if row == 1:
                one.set_xlabel("hidden size")
            if column == 0:
                one.set_ylabel("RMS of the movement")
    legend(figure)
    text = f"How far activations move by width; slopes after the last step: {'; '.join(sentences)}."
    return Picture(PICTURE, text, figure)


if __name__ == "__main__":
    command_line.run(main)
