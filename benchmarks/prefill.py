"""Compare the prefill of TAPE and of a plain Llama of the same size: seconds for a whole prompt into an empty cache.

    python -m benchmarks.prefill [--record]

Both models take turns in one process, and ratios are medians over pairs of neighbouring passes, so that other load on
the machine affects both alike. No figure appears unless, in models of the same widths but at most
`generate.PARITY_LAYERS` layers, TAPE with its initial zero matrices gives Llama's logits and, after TAPE's matrices
are moved away from zero, the attention that is measured gives the same logits as eager attention.
"""

import argparse
import sys
import time
from collections.abc import Callable

import torch
from transformers import PreTrainedModel

from benchmarks.apart import Measurements
from benchmarks.environment import positive, writer
from benchmarks.generate import PARITY_LAYERS, build, new_cache, randomize, summarize
from benchmarks.timing import DTYPES, add_time_arguments, reason, seconds

SHAPES = {
    "smollm2-135m": dict(layers=30, heads=9, groups=3, head_dim=64, ffn=1536, vocab_size=49152),
    "12x64": dict(layers=8, heads=12, groups=12, head_dim=64, ffn=3072, vocab_size=32000),
    "16x128": dict(layers=24, heads=16, groups=16, head_dim=128, ffn=5504, vocab_size=32000),
}
"""A small model with grouped queries, and the shapes of `benchmarks.generate` on a CPU and on a GPU."""
TOY = dict(layers=2, heads=4, groups=2, head_dim=16, ffn=64, vocab_size=128)
PARITY_TOKENS = 300


def models_of(shape: str, arguments: argparse.Namespace, layers: int, dtype: torch.dtype) -> dict[str, PreTrainedModel]:
    """Return a Llama and a TAPE model of this shape with the same weights; TAPE's matrices are zero."""
    sizes = vars(arguments) | (TOY if arguments.toy else SHAPES[shape])
    models = build(argparse.Namespace(**sizes, steps=0), layers, dtype)
    for model in models.values():
        model.set_attn_implementation(arguments.attention)
    return models


def check_parity(shape: str, arguments: argparse.Namespace, dtype: torch.dtype) -> None:
    """Exit if small models do not agree as the module's docstring says."""
    # Kernels for GPUs do not compute in float64.
    exact = torch.float64 if arguments.device.type == "cpu" and arguments.attention == "sdpa" else dtype
    bound = {torch.float64: 1e-9, torch.float32: 1e-4}.get(exact, 5e-2)
    models = models_of(shape, arguments, 2 if arguments.toy else PARITY_LAYERS, exact)
    prompt = torch.randint(1, models["llama"].config.vocab_size, (1, PARITY_TOKENS), device=arguments.device)
    difference = (models["tape"](prompt).logits - models["llama"](prompt).logits).abs().max().item()
    if not difference < max(bound, 1e-5):
        sys.exit(f"error: with TAPE's matrices at zero the logits differ by {difference:.1e}, so no figure is given")
    randomize(models["tape"])
    logits = models["tape"](prompt).logits
    models["tape"].set_attn_implementation("eager")
    difference = (models["tape"](prompt).logits - logits).abs().max().item()
    if not difference < bound:
        sys.exit(f"error: {arguments.attention} and eager attention differ by {difference:.1e}, so no figure is given")


def prefill_seconds(models: dict[str, PreTrainedModel], prompt: torch.Tensor, passes: int) -> tuple[dict, dict]:
    """Return each model's seconds, and CPU seconds, for `prompt` (1, S), `passes` times after one that is not counted.

    Where other programs share the processor, CPU time leaves out what they take.
    """
    taken, on_cpu = ({name: [] for name in models} for _ in range(2))
    for _ in range(passes + 1):
        for name, model in models.items():
            cache = new_cache("dynamic", model, prompt.shape[1])
            call = lambda: model(prompt, past_key_values=cache, use_cache=True, logits_to_keep=1)  # noqa: B023, E731
            started = time.process_time()
            taken[name].append(seconds(call, prompt.device))
            on_cpu[name].append(time.process_time() - started)
    return taken, on_cpu


def measure(arguments: argparse.Namespace, measurements: Measurements, keep: Callable[[dict], None]) -> None:
    """Measure every shape at every length; print results as they come."""
    dtype, result = DTYPES[arguments.precision], {"shapes": {}, "rejected": {}}
    for shape in arguments.shapes:
        measurements.say(f"{shape}: checking that the models agree")
        check_parity(shape, arguments, dtype)
        print(f"{shape}: TAPE at zero equals Llama; {arguments.attention} attention equals eager", flush=True)
        models = models_of(shape, arguments, (TOY if arguments.toy else SHAPES[shape])["layers"], dtype)
        randomize(models["tape"])
        rows = result["shapes"][shape] = {"model": TOY if arguments.toy else SHAPES[shape], "lengths": {}}
        for length in arguments.lengths:
            name = f"{shape}, {length} tokens"
            try:
                if time.monotonic() > measurements.deadline:
                    raise TimeoutError("there was no time left")
                measurements.say(name)
                prompt = torch.randint(1, models["llama"].config.vocab_size, (1, length), device=arguments.device)
                taken, on_cpu = (summarize(x, 1) for x in prefill_seconds(models, prompt, arguments.passes))
            except Exception as error:  # memory may run out, and a compiler may raise anything
                result["rejected"][name] = reason(error)
                print(f"{name}: no figure: {result['rejected'][name]}", flush=True)
            else:
                row = dict(seconds=taken["seconds_per_token"], tape_over_llama=taken["tape_over_llama"])
                row |= dict(cpu_seconds=on_cpu["seconds_per_token"], cpu_tape_over_llama=on_cpu["tape_over_llama"])
                rows["lengths"][length] = row | dict(passes=arguments.passes)
                times = ", ".join(f"{who} {value:.2f} s" for who, value in row["seconds"].items())
                ratios = f"{row['tape_over_llama']:.3f} (CPU time {row['cpu_tape_over_llama']:.3f})"
                print(f"{name}: {times}; TAPE / Llama time {ratios}", flush=True)
            keep(result)


def main() -> None:
    """Print seconds and ratios; `--record` or `--output` also writes them to a file."""
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    shapes = ["16x128"] if on_gpu else ["smollm2-135m", "12x64"]
    parser.add_argument("--shapes", choices=SHAPES, nargs="+", default=shapes, help="default here: %(default)s")
    parser.add_argument(
        "--lengths", type=positive, nargs="+", default=[2048, 4096], help="of prompts (default: %(default)s)"
    )
    parser.add_argument("--passes", type=positive, default=5, help="timed at each length (default: %(default)s)")
    parser.add_argument("--attention", default="sdpa", help="of both models (default: %(default)s)")
    precision = "bf16" if on_gpu else "fp32"
    parser.add_argument("--precision", choices=DTYPES, default=precision, help="default here: %(default)s")
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda" if on_gpu else "cpu"))
    parser.add_argument("--threads", type=positive, help="CPU threads (default: torch's own choice)")
    add_time_arguments(parser)
    arguments = parser.parse_args()
    if arguments.toy:
        arguments.lengths = [64]
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    with torch.no_grad():
        measure(arguments, Measurements(arguments.minutes, apart=False), writer("prefill", arguments))


if __name__ == "__main__":
    main()
