"""Compare every positional encoding with RoPE: step time, memory, parameters, and decode time per
token.

    python -m benchmarks.encodings [--only fire cope] [--output FILE.json]

The models differ only in the encoding. Model, batch and step are those of `benchmarks.train_step`:
by default 12 layers, 12 heads x 64, 1,024 tokens. RoPE's model stays in memory. The other encodings
follow one at a time, and their steps alternate with RoPE's, so that other load on the machine
affects both alike. A ratio is the median over pairs of consecutive steps. On a CPU, memory is the
sum of weights, gradients, Adam's state and saved activations. An encoding gets no figure if its
losses differ from those of the naive attention, with parameters perturbed after initialization.

Decoding is measured the same way, with the exported model and a Llama: one sequence, with a cache
of `--context` tokens. An encoding gets no figure if its logits with a cache differ from those
without one.
"""

import argparse
import dataclasses
import json
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
import transformers
from transformers import DynamicCache, PreTrainedModel

from benchmarks.environment import Record, add_record_arguments, quiet_libraries
from benchmarks.generate import decode_seconds
from benchmarks.measured_model import (
    MAX_LOSS_ERROR,
    SHAPES,
    MeasuredModel,
    dtype_of,
    free_memory,
    run_config,
)
from benchmarks.timing import describe_error, median_ratio
from megatron_tape import command_line
from megatron_tape.checks.combinations import validate
from megatron_tape.command_line import whole_number
from megatron_tape.config.schema import ModelConfig, RunConfig, replace_settings
from megatron_tape.errors import ConfigError
from megatron_tape.huggingface.export.remote_code import write_code
from megatron_tape.huggingface.export.to_transformers import huggingface_config
from megatron_tape.model.backend import chosen_backend
from megatron_tape.parallel.layout import ParallelLayout, initialize_distributed
from megatron_tape.planning.parameters import parameter_count
from megatron_tape.position import BUILT_IN, encoding_of

# The encoding with which all others are compared.
BASELINE = "rope"
LEARNED_INCREMENTS = {"position.increments": "learned"}
VARIANTS: dict[str, dict] = {
    encoding.name: {"position_encoding": encoding.name} for encoding in BUILT_IN
} | {
    "yarn": {
        "position_encoding": "rope",
        "position.rope_scaling_type": "yarn",
        "position.rope_scaling_factor": 4.0,
        "position.rope_original_seq_length": 256,
    },
    "rope, learned increments": {"position_encoding": "rope", **LEARNED_INCREMENTS},
    "tape, learned increments": {"position_encoding": "tape", **LEARNED_INCREMENTS},
    "tape, learned increments, unit modulus": {
        "position_encoding": "tape",
        **LEARNED_INCREMENTS,
        "position.state_norm": "unit",
    },
}
"""Measured variants by name, with the settings of `model` in which they differ from the RoPE model.
"""
MAX_LOGIT_ERROR = 1e-3
"""Maximum difference of logits with and without a cache, in their standard deviations; ten times
this in bf16.
"""


def main(argv: list[str] | None = None) -> None:
    """Measure all variants, print a table, and write the record to the file that --output names."""
    arguments = parse(argv)
    quiet_libraries()
    layout = initialize_distributed()
    configs = {name: config_of(name, arguments) for name in [BASELINE, *arguments.only]}
    parameters = {name: parameter_count(config.model) for name, config in configs.items()}
    rows = {
        name: {"parameters": count, "additional_parameters": count - parameters[BASELINE]}
        for name, count in parameters.items()
    }
    result = {
        "shape": dataclasses.asdict(SHAPES[arguments.shape]),
        "precision": arguments.precision,
        "device": str(layout.device),
        "encodings": rows,
    }
    record = Record(arguments)
    for measure in (measure_steps, measure_decoding):
        # Each function adds to `rows`, and yields when it has measured another variant.
        for _ in measure(configs, arguments, layout, rows):
            record.write(result)
    print("\n".join(table(rows)))


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Parse the command line, or `argv` if it is not None."""
    on_gpu = torch.cuda.is_available()
    parser = command_line.Parser(prog="python -m benchmarks.encodings", description=__doc__)
    others = [name for name in VARIANTS if name != BASELINE]
    only = f"variants to measure: {'; '.join(others)} (default: all)"
    parser.add_argument(
        "--only", nargs="+", choices=others, default=others, metavar="NAME", help=only
    )
    default = "default: %(default)s"
    add = parser.add_argument
    shape = "155m-1k" if on_gpu else "cpu"
    add("--shape", choices=SHAPES, default=shape, help=default)
    add("--repetitions", type=whole_number, default=7, help=f"pairs of steps ({default})")
    add("--context", type=whole_number, default=1024, help=f"tokens in the cache ({default})")
    add("--tokens", type=whole_number, default=24, help=f"tokens to decode ({default})")
    precision = "bf16" if on_gpu else "fp32"
    add("--precision", choices=("bf16", "fp32"), default=precision, help=default)
    add_record_arguments(parser)
    return parser.parse_args(argv)


def config_of(name: str, arguments: argparse.Namespace) -> RunConfig:
    """Return the configuration of the variant `name`, a key of VARIANTS. Raises ConfigError if it
    is invalid.
    """
    rope_config = run_config(BASELINE, SHAPES[arguments.shape], arguments.precision)
    settings = {f"model.{key}": value for key, value in VARIANTS[name].items()}
    config = replace_settings(rope_config, settings)
    validate(config, world_size=1)
    return config


def measure_steps(
    configs: dict[str, RunConfig],
    arguments: argparse.Namespace,
    layout: ParallelLayout,
    rows: dict[str, dict],
) -> Iterator[None]:
    """Add the step time and the memory of each variant to its row, and yield after each.

    The steps of a variant alternate with RoPE's. `configs` and `rows` have RoPE and the variants by
    name. A variant that cannot be measured gets the reason under `failed`.
    """
    bytes_before = allocated_bytes()
    rope = build_model(configs[BASELINE], layout)
    rope.step()  # creates the optimizer's state
    baseline = rows[BASELINE]
    baseline["memory"] = peak_of_step(rope, bytes_before)
    for name in arguments.only:
        print(f"training steps: {name}", flush=True)
        row = rows[name]
        free_memory()  # if the last variant has failed, its memory was not released
        bytes_before = allocated_bytes()
        try:
            variant = build_model(configs[name], layout)
        except (ConfigError, RuntimeError) as error:
            row["failed"] = describe_error(error)
            continue

        # Pairs of steps. The first pair is left out below, since the variant's first step also
        # creates its optimizer's state.
        seconds_of_pairs = [
            (rope.step().seconds, variant.step().seconds) for _ in range(arguments.repetitions + 1)
        ]
        rope_seconds, variant_seconds = zip(*seconds_of_pairs[1:])
        row["seconds_per_step"] = statistics.median(variant_seconds)
        row["step_over_rope"] = median_ratio(variant_seconds, rope_seconds)
        row["memory"] = peak_of_step(variant, bytes_before)
        row["memory_over_rope"] = row["memory"] / baseline["memory"]
        row["attention"] = variant.backend
        baseline.setdefault("seconds_per_step", statistics.median(rope_seconds))
        variant.release()
        yield
    rope.release()


def allocated_bytes() -> int:
    """Return the bytes allocated on the GPU, or 0 without a GPU."""
    if torch.cuda.is_available():
        return torch.cuda.memory_allocated()
    return 0


def peak_of_step(measured: MeasuredModel, bytes_before: int) -> int:
    """Return a step's peak memory in bytes, without the `bytes_before` that the GPU held before the
    model was built.
    """
    # On a CPU, the peak is computed without a step.
    if measured.layout.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        measured.step()
    return measured.memory()["peak"] - bytes_before


def build_model(config: RunConfig, layout: ParallelLayout) -> MeasuredModel:
    """Return a model with its optimizer. Raises ConfigError if its token losses differ from those
    with naive attention.
    """
    dtype = dtype_of(config)
    backend = chosen_backend(config.model, dtype, layout.device)
    measured = MeasuredModel(config, layout, backend)
    difference = measured.attention_error
    # In nats. Rounding errors are much larger in bf16.
    allowed = MAX_LOSS_ERROR if dtype is torch.float32 else 0.1
    # Not `>`, which is false for NaN.
    if not difference <= allowed:
        raise ConfigError(
            "token losses", f"differ by {difference:.2g} from those of the naive attention"
        )
    return measured


def measure_decoding(
    configs: dict[str, RunConfig],
    arguments: argparse.Namespace,
    layout: ParallelLayout,
    rows: dict[str, dict],
) -> Iterator[None]:
    """Add each exported variant's decode time per token to its row, and yield after each.

    The tokens of a variant alternate with a Llama's. `configs` and `rows` have RoPE and the
    variants by name. A variant that cannot be measured gets the reason under `decoding_failed`.
    """
    rope_config = configs[BASELINE].model
    dtype = dtype_of(configs[BASELINE])
    llama = checked_export(rope_config, dtype, layout.device)
    # The prompt, one warm-up token and the decoded tokens fill the context.
    length = min(arguments.context, rope_config.seq_length) - arguments.tokens - 1
    prompt = torch.randint(rope_config.vocab_size, (1, length), device=layout.device)
    for name in arguments.only:
        print(f"decoding: {name}", flush=True)
        row = rows[name]
        try:
            variant = checked_export(configs[name].model, dtype, layout.device)
        except (ConfigError, NotImplementedError, ValueError) as error:
            row["decoding_failed"] = describe_error(error)
            continue

        models = {"llama": llama, "variant": variant}
        with torch.inference_mode():
            seconds_by_model = decode_seconds(models, "dynamic", prompt, 1 + arguments.tokens)
        # Without the first token, which is the warm-up.
        llama_seconds = seconds_by_model["llama"][1:]
        variant_seconds = seconds_by_model["variant"][1:]
        row["seconds_per_token"] = statistics.median(variant_seconds)
        row["decoding_over_rope"] = median_ratio(variant_seconds, llama_seconds)
        yield


@torch.inference_mode()
def checked_export(model: ModelConfig, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """Return a model of transformers with random weights, as an export of `model`. Raises
    ConfigError if using a cache changes its logits.
    """
    exported = export_with_random_weights(model).to(device, dtype).eval()
    text = torch.randint(model.vocab_size, (1, 24), device=device)
    cache = DynamicCache(config=exported.config)
    uncached = exported(text, use_cache=False).logits.float()
    # A prompt of 12 tokens, then 3 at once, then 9 one by one.
    cached = [
        exported(part, cache=cache).logits.float() for part in text.split([12, 3, *[1] * 9], 1)
    ]
    difference = ((torch.cat(cached, 1) - uncached).abs().max() / uncached.std()).item()
    allowed = MAX_LOGIT_ERROR if dtype is torch.float32 else 10 * MAX_LOGIT_ERROR
    # Not `>`, which is false for NaN.
    if not difference <= allowed:
        raise ConfigError(
            "logits with a cache",
            f"differ by {difference:.2g} standard deviations from those without",
        )
    return exported


def export_with_random_weights(model: ModelConfig) -> PreTrainedModel:
    """Return a model of transformers with random weights, as an export of `model`.

    Models that differ only in the encoding have equal weights outside it.
    """
    encoding = encoding_of(model)
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        (directory / "config.json").write_text(
            json.dumps(huggingface_config(model, rows=model.vocab_size, dtype="fp32"))
        )
        if encoding.exports_to == "tape":
            write_code(directory)
        elif encoding.exports_to != "plain":
            write_code(directory, type(encoding))
        config = transformers.AutoConfig.from_pretrained(directory, trust_remote_code=True)
        torch.manual_seed(0)
        exported = transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=True)

    # At initialization, TAPE equals RoPE, which would hide errors.
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in exported.named_parameters():
            if ".position." in name:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.02)
    return exported


def table(rows: dict[str, dict]) -> list[str]:
    """Return the lines of a Markdown table of ratios to RoPE, and a line per failure. `rows` are
    the results by variant.
    """
    lines = ["| encoding | step | memory | parameters | token |", "|---|---|---|---|---|"]
    failures = []
    for name, row in rows.items():
        if name == BASELINE:
            lines.append(f"| {name} | 1 | 1 | {row['parameters']:,} | 1 |")
            continue

        step = _ratio_cell(row, "step_over_rope")
        memory = _ratio_cell(row, "memory_over_rope")
        token = _ratio_cell(row, "decoding_over_rope")
        additional = row["additional_parameters"]
        lines.append(f"| {name} | {step} | {memory} | {additional:+,} | {token} |")
        for key in ("failed", "decoding_failed"):
            if key in row:
                failures.append(f"{name}: no figure: {row[key]}")
    return lines + failures


def _ratio_cell(row: dict, key: str) -> str:
    """Return the text of a cell with the ratio `row[key]`; "-" if it was not measured."""
    if key not in row:
        return "-"
    return f"{row[key]:.2f}"


if __name__ == "__main__":
    command_line.run(main)
