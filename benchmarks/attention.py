"""Time every implementation of attention with TAPE, compared with RoPE's fastest attention on this machine.

    python -m benchmarks.attention [--shapes 12x64 32/8x128] [--lengths 1024 4096] [--only triton sdpa] [--record]

If a candidate cannot run here, the reason is printed; if its results differ from float64, no time is reported for it.
Repetitions alternate between the candidates, and medians are reported. Both TAPE and RoPE rotate queries and keys;
TAPE also averages its state, and computes its gradient. `of_rope` is the time, forward and backward, of the fastest of
TAPE's candidates that a model can run (`model.attention_backend`) over that of RoPE's fastest candidate of any kind. On
a GPU, those that are not backends of a model use a rotation that torch.compile has fused. `layers` are whole attention
layers, including projections; `layers with update` also rewrite the position state if the candidate is TAPE's.

On a GPU each combination of shape and length is measured in a process of its own: a candidate that crashes or hangs is
left out when the combination is measured again. Only torch is required; `flash_attn` and `triton` are candidates if
they are installed. Without a GPU, TRITON_INTERPRET=1 lets triton's candidates take part, without a time.
"""

import argparse
import sys

import torch

from benchmarks.apart import Measurements
from benchmarks.attention_candidates import BACKENDS, candidates
from benchmarks.attention_timing import Combination, measure, shape_of
from benchmarks.environment import Record
from benchmarks.timing import DTYPES, add_arguments, positive, recorder
from megatron_tape.ops.measured import Row

ON_GPU = ("12x64@1024", "32x128@8192", "16x128@4096", "32/8x128@8192", "12x64@8192", "32x128@4096", "16x64@4096")
"""What is measured on a GPU by default, the most important first."""


def table_rows(results: list[dict], precision: str, record: Record) -> list[Row]:
    """Return the rows for the table by which `auto` chooses: what the backends of a model took on this GPU."""
    origin, rows = record.origin, []
    if not origin["gpus"]:
        return rows
    for result in results:
        timings = result.get("attention forward+backward", {"timings": {}})["timings"]
        for encoding, averages in (("tape", True), ("rope", False)):
            names = {backend: f"{encoding} {backend}" for backend in BACKENDS}
            seconds = {b: timings[n]["seconds"] for b, n in names.items() if "seconds" in timings.get(n, {})}
            if seconds:
                rows.append(
                    Row(
                        gpu=origin["gpus"][0],
                        precision=precision,
                        heads=result["heads"],
                        groups=result["groups"],
                        head_dim=result["head_dim"],
                        seq_length=result["length"],
                        averages=averages,
                        batch=result["batch"],
                        seconds=seconds,
                        torch=origin["packages"]["torch"],
                        triton=origin["packages"].get("triton"),
                        date=origin["date"],
                        commit=origin["commit"],
                        record=record.path.name,
                    )  # fmt: skip
                )
    return rows


def show(shape: str, length: int, result: dict) -> None:
    """Print the table of one combination, and which candidates have no figures and why."""
    for what, measured in result.items():
        if not isinstance(measured, dict) or "timings" not in measured:
            continue
        against = f", against {measured['against']}" if measured["against"] else ""
        print(f"\n{shape}, {length:,} tokens, batch {result['batch']}, {what}{against}")
        for name, timing in sorted(measured["timings"].items(), key=lambda item: item[1].get("seconds", 0)):
            if "seconds" not in timing:
                print(f"  {name:24} interpreted here: exact, not timed")
                continue
            line = f"  {name:24} {timing['seconds'] * 1e3:9.2f} ms"
            if "ratio" in timing:
                line += f" {timing['ratio']:6.2f}x"
            if "tflops" in timing:
                line += f" {timing['tflops']:7.1f} TFLOP/s, {timing['of_matmul_peak']:4.0%} of matmul"
            if "memory_ratio" in timing:
                line += f", memory {timing['memory_ratio']:.2f}x"
            print(line)
    for name, why in result.get("rejected", {}).items():
        print(f"  {name} has no figure: {why}")
    if of_rope := result.get("of_rope"):
        print(f"  forward+backward: {of_rope['tape']} takes {of_rope['ratio']:.2f} times as long as {of_rope['rope']}")
    sys.stdout.flush()


def checked_shape(text: str) -> str:
    """Check a shape such as `12x64` or `32/8x128`: heads, groups if there are fewer, and head dimension."""
    try:
        heads, groups, dim = shape_of(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text} is not a shape such as 12x64 or 32/8x128") from None
    if min(heads, groups, dim) < 1 or heads % groups or dim % 2:
        raise argparse.ArgumentTypeError(f"{text}: groups must divide heads, and the dimension must be even")
    return text


def combinations_of(arguments: argparse.Namespace, on_gpu: bool) -> list[Combination]:
    """Return what to measure: the chosen shapes at the chosen lengths, or this machine's default; shortest first."""
    if arguments.toy:
        return [("2/1x32", 64)]
    if on_gpu and not arguments.shapes and not arguments.lengths:
        return [(shape, int(length)) for shape, length in (text.split("@") for text in ON_GPU)]
    shapes, lengths = arguments.shapes or ["12x64"], arguments.lengths or [1024]
    return [(shape, length) for length in sorted(lengths) for shape in shapes]


def measure_all(arguments: argparse.Namespace, combinations: list[Combination], device: torch.device, apart: bool):
    """Measure every combination for which there is time; print and record the results."""
    record, results = recorder("attention", arguments), []
    measurements = Measurements(arguments.minutes, apart)

    def keep(result: dict) -> None:
        results[-1] = result
        if record:
            rows = table_rows(results, arguments.precision, record)
            record.write({"precision": arguments.precision, "results": results, "rows": rows})

    for done, (shape, length) in enumerate(combinations):
        if measurements.over:
            left = ", ".join(f"{shape} at {length}" for shape, length in combinations[done:])
            measurements.say(f"no time for {left}; --minutes gives more")
            break
        measurements.say(f"{done + 1} of {len(combinations)}: {shape}, {length} tokens")
        results.append({})
        measurements.run(measure, (shape, length), arguments, device, keep=keep)
        show(shape, length, results[-1])


def main() -> None:
    """Print tables; `--record` or `--output` also writes them, and the rows for the table by which `auto` chooses."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    on_gpu = device.type == "cuda"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--shapes", nargs="+", type=checked_shape, metavar="H[/G]xD",
        help="query heads, groups if there are fewer, and head dimension (default: 12x64)",
    )  # fmt: skip
    parser.add_argument(
        "--lengths", nargs="+", type=positive, metavar="N",
        help="tokens per sequence; if above --tokens, the batch is one sequence (default: 1024; on a GPU, with neither "
        f"--shapes nor --lengths: {' '.join(ON_GPU)})",
    )  # fmt: skip
    parser.add_argument("--only", nargs="+", metavar="NAME", help="TAPE candidates, such as triton (default: all)")
    add_arguments(parser, on_gpu, repetitions=10)
    arguments = parser.parse_args()
    if arguments.toy:
        arguments.tokens, arguments.repetitions = 64, 1
    if arguments.only:
        names = candidates(64, DTYPES[arguments.precision], device)[0]
        known = {name.removeprefix("tape ") for name in names if name.startswith("tape")}
        if unknown := set(arguments.only) - known:
            names = ", ".join(sorted(known))
            parser.error(f"--only {' '.join(sorted(unknown))}: not among the candidates here, {names}")
    measure_all(arguments, combinations_of(arguments, on_gpu), device, apart=on_gpu)


if __name__ == "__main__":
    main()
