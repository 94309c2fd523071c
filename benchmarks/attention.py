"""Time the attention backends with TAPE, RoPE and Wall attention.

    python -m benchmarks.attention [--shapes 12x64@1024 32/8x128@4096] [--window 1024] [--flex]
        [--output FILE.json]

A candidate is an encoding with a backend of `model.attention_backend`, such as `tape torch`. RoPE
and TAPE rotate queries and keys; TAPE also averages its position state and computes the state's
gradient. Wall attention computes the gradient of its decays. Repetitions alternate between
candidates, and medians are reported. A candidate that cannot run, or has more than twice the error
of plain torch, is not timed but listed with the reason. `of_rope` is the time of TAPE's fastest
backend divided by that of RoPE's.

TFLOP/s count the encoding's matrix products, halved for the causal mask: RoPE and Wall attention
have two forward and five backward, TAPE three and seven. Without a GPU, TRITON_INTERPRET=1 includes
`triton`, checked but not timed.

With --window, each candidate is also timed with a sliding window of that size, in repetitions that
alternate with those without it. A second table has both times, and the time without the window
divided by that with it.
"""

import argparse
import functools
import re
import sys
import time
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.environment import Record
from benchmarks.tables import DIRECTIONS, attention_table
from benchmarks.timing import DTYPES, add_time_arguments, describe_error, device_here, timed
from megatron_tape import command_line
from megatron_tape.command_line import whole_number
from megatron_tape.model.reference import rope_phases
from megatron_tape.ops.attention import attention
from megatron_tape.ops.backends import AVERAGE, BACKENDS, DECAY, ROTATION, lacks
from megatron_tape.ops.backends.choice import choose_backend, unsupported
from megatron_tape.ops.decay import with_decay
from megatron_tape.ops.parity import Check, inexact
from megatron_tape.ops.visibility import Visibility

NEEDS = {
    "rope": frozenset({ROTATION}),
    "tape": frozenset({ROTATION, AVERAGE}),
    "wall": frozenset({DECAY}),
}
"""Features that each encoding requires of a backend."""
PRODUCTS = {
    "rope": {"forward": 2, "forward+backward": 7},
    "tape": {"forward": 3, "forward+backward": 10},
    "wall": {"forward": 2, "forward+backward": 7},
}
"""Number of matrix products in each encoding's attention, each of heads x S x S x head_dim."""
IN_WINDOW = "in a window: "
"""Prefix of the names of runs with a window."""


class Shape(NamedTuple):
    """Sizes of attention: query heads H, key/value groups G, head dimension D and tokens per
    sequence S.
    """

    heads: int
    groups: int
    head_dim: int
    length: int

    @classmethod
    def parse(cls, text: str) -> "Shape":
        """Parse `HxD@S` or `H/GxD@S`, such as `12x64@1024` or `32/8x128@4096`.

        Raises ArgumentTypeError for other texts, groups that do not divide heads, or an odd D.
        """
        match = re.fullmatch(r"(\d+)(?:/(\d+))?x(\d+)@(\d+)", text)
        if match:
            # Only G may be missing; there are then as many groups as heads, match[1].
            shape = cls(*(int(size or match[1]) for size in match.groups()))
            if min(shape) >= 1 and shape.heads % shape.groups == 0 and shape.head_dim % 2 == 0:
                return shape
        raise argparse.ArgumentTypeError(
            f"{text} is not a shape such as 12x64@1024 or 32/8x128@4096, with groups that divide"
            " heads and an even head dimension"
        )

    def __str__(self) -> str:
        """Return the text that `parse` accepts."""
        groups = "" if self.groups == self.heads else f"/{self.groups}"
        return f"{self.heads}{groups}x{self.head_dim}@{self.length}"


SHAPES = tuple(map(Shape.parse, ("12x64@1024", "16x128@4096", "32x128@8192")))
"""Shapes of the 155M, 1.3B and 7B models, the default on a GPU."""
TOY = Shape(2, 1, 32, 64)
"""The shape of --toy."""


def random_inputs(shape: Shape, batch: int, dtype: torch.dtype) -> list[Tensor]:
    """Return random q (S, B, H, D) and k, v, z (S, B, G, D) that require gradients.

    B is `batch`. z is RoPE's phases plus noise.
    """
    device = device_here()
    generator = torch.Generator(device).manual_seed(0)
    q, k, v, z = (
        torch.randn(
            (shape.length, batch, heads, shape.head_dim),
            generator=generator,
            device=device,
            dtype=dtype,
        )
        for heads in (shape.heads, shape.groups, shape.groups, shape.groups)
    )
    z.mul_(0.1).add_(initial_phases(shape.length, shape.head_dim, dtype))
    return [x.requires_grad_() for x in (q, k, v, z)]


@functools.lru_cache(maxsize=4)
def initial_phases(length: int, dim: int, dtype: torch.dtype) -> Tensor:
    """Return RoPE's phases (S, 1, 1, D), the position state before the first layer.

    S is `length` and D is `dim`. Cached, so that timed runs do not compute them.
    """
    frequencies = 10000.0 ** -(torch.arange(0, dim, 2).float() / dim)
    return rope_phases(torch.arange(length), frequencies)[:, None, None].to(device_here(), dtype)


def window_visibility(window: int, length: int, batch: int) -> Visibility:
    """Return the visibility of `batch` sequences of `length` tokens with a sliding window."""
    tokens = torch.zeros(batch, length, device=device_here())
    return Visibility.of_whole(tokens).with_window(window)


def attend(
    encoding: str,
    backend: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    z: Tensor,
    visibility: Visibility | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return the averages of the values (S, B, H, D) and, with TAPE, those of z; else None.

    Shapes are those of `random_inputs`. RoPE uses its phases instead of z, and Wall attention takes
    its decays from z: about 0.005 nats per token.
    """
    options = {"backend": backend, "visibility": visibility}
    if encoding == "tape":
        return attention(q, k, v, z, average_state=True, **options)
    if encoding == "wall":
        log_decay = -0.01 * z.square().repeat_interleave(q.shape[2] // z.shape[2], dim=2)
        return attention(q, k, v, rescore=with_decay(log_decay), **options)
    phases = initial_phases(len(z), z.shape[-1], q.dtype)  # without a gradient
    return attention(q, k, v, phases, **options)


def candidates(
    dim: int, dtype: torch.dtype, flex: bool = False
) -> tuple[list[str], dict[str, str]]:
    """Return the names of the candidates that can run with a head dimension `dim`, and the reason
    for each backend that cannot.

    FlexAttention, which takes a minute to compile, is included only with `flex`. Three backends are
    left out: fla, which does not compute TAPE; naive, which is the reference; and, on a GPU, tiled,
    which is for CPUs.
    """
    device = device_here()
    names = []
    rejected = {}
    for backend in BACKENDS:
        if backend in ("naive", "fla") or (backend == "flex" and not flex):
            continue

        problem = unsupported(backend, device, dtype, dim)
        if not problem and backend == "tiled" and device.type != "cpu":
            problem = "is for CPUs"
        if problem:
            rejected[backend] = problem
            continue

        for encoding, needs in NEEDS.items():
            if not lacks(backend, needs):
                names.append(f"{encoding} {backend}")
    return names, rejected


def naive_comparison(
    name: str, shape: Shape, dtype: torch.dtype, window: int | None = None
) -> Check:
    """Return the comparison of a candidate with the naive backend, for one sequence of `shape`."""
    encoding, backend = name.split()
    options = {}
    if window is not None:
        options["visibility"] = window_visibility(window, shape.length, batch=1)
    candidate, naive = (
        functools.partial(attend, encoding, each, **options) for each in (backend, "naive")
    )
    return Check(candidate, naive, random_inputs(shape, 1, dtype))


def why_inexact(
    name: str, length: int, shape: Shape, dtype: torch.dtype, window: int | None = None
) -> str | None:
    """Return why a candidate is not exact for sequences of `length` tokens, or None if its errors
    are at most twice those of plain torch.

    `shape` gives the sizes of heads and groups; its length is not used.
    """
    try:
        comparison = naive_comparison(name, shape._replace(length=length), dtype, window)
        problem = inexact(*comparison, dtype)
    except Exception as error:  # a compiler may raise anything
        problem = describe_error(error)
    if problem:
        where = f"{length} tokens"
        if window is not None:
            where += f", window {window}"
        return f"{where}: {problem}"
    return None


def measure(shape: Shape, arguments: argparse.Namespace, deadline: float) -> Iterator[dict]:
    """Time every exact candidate, forward and forward + backward, without and with the window.

    Yield the result so far after each candidate's check and each direction, so that it can be
    recorded. It is one dictionary, which is completed in place. Candidates that are not yet checked
    at `deadline` (of `time.monotonic`) are listed under `no_time`.
    """
    dtype = DTYPES[arguments.precision]
    batch = max(1, arguments.tokens // shape.length)
    window = arguments.window
    if window is not None and window >= shape.length:
        # A window that hides nothing is no window.
        window = None
    names, rejected = candidates(shape.head_dim, dtype, flex=arguments.flex)
    result = {
        "shape": str(shape),
        "batch": batch,
        "auto": auto_candidates(shape, dtype),
        "timed": {},
        "window": window,
        "in_window": {},
        "of_rope": {},
        "rejected": rejected,
        "no_time": [],
    }

    # Only exact candidates are timed. The check is at most at 1,024 tokens, since scores in float64
    # need much memory.
    exact = []
    exact_in_window = []
    checked_length = min(shape.length, 1024)
    for name in names:
        _, backend = name.split()
        if backend in arguments.without:
            rejected[backend] = "is excluded by --without"
        elif time.monotonic() > deadline:
            result["no_time"].append(name)
        elif problem := why_inexact(name, checked_length, shape, dtype):
            rejected[name] = problem
        else:
            exact.append(name)
        yield result

        if window is None or name not in exact:
            continue
        # The checked sequence must be longer than its window.
        checked_window = min(window, checked_length // 3 + 1)
        if problem := why_inexact(name, checked_length, shape, dtype, checked_window):
            rejected[f"{name}, in the window"] = problem
        else:
            exact_in_window.append(name)
        yield result

    tensors = random_inputs(shape, batch, dtype)
    # Random, because constants would be faster to multiply.
    output_grads = [torch.randn_like(tensors[0]) for _ in range(2)]
    # 2 FLOP for a multiply-add, halved for the causal mask.
    tflop_per_product = 1e-12 * shape.heads * shape.length**2 * shape.head_dim * batch
    visibility = None
    if window is not None:
        visibility = window_visibility(window, shape.length, batch)
    for direction in DIRECTIONS:
        run_candidate = functools.partial(
            _run_candidate, tensors, output_grads, direction != "forward"
        )
        runs = {name: functools.partial(run_candidate, name) for name in exact}
        for name in exact_in_window:
            run = functools.partial(run_candidate, name, visibility=visibility)
            runs[f"{IN_WINDOW}{name}"] = run
        every_timing, errors = timed(runs, arguments.repetitions, device_here())
        for name, problem in errors.items():
            rejected[f"{name}, {direction}"] = problem

        timings = {name: every_timing[name] for name in exact if name in every_timing}
        result["in_window"][direction] = window_timings(every_timing)

        fastest_tape = fastest_candidate(timings, "tape")
        fastest_rope = fastest_candidate(timings, "rope")
        for name, timing in timings.items():
            if "seconds" not in timing:
                continue  # an interpreted kernel, which runs but is not timed
            encoding, _ = name.split()
            timing["tflops"] = PRODUCTS[encoding][direction] * tflop_per_product / timing["seconds"]
            if fastest_rope:
                timing["ratio"] = timing["seconds"] / timings[fastest_rope]["seconds"]

        result["timed"][direction] = timings
        if fastest_tape and fastest_rope:
            result["of_rope"][direction] = {
                "ratio": timings[fastest_tape]["ratio"],
                "tape": fastest_tape,
                "rope": fastest_rope,
            }
        yield result


def window_timings(timings: dict[str, dict]) -> dict[str, dict]:
    """Return the timings of the candidates with a window by name, among all `timings`.

    `speedup` is the time without the window divided by the time with it.
    """
    found = {}
    for full_name, timing in timings.items():
        if not full_name.startswith(IN_WINDOW):
            continue
        name = full_name.removeprefix(IN_WINDOW)
        without = timings.get(name, {})
        if "seconds" in timing and "seconds" in without:
            timing["speedup"] = without["seconds"] / timing["seconds"]
        found[name] = timing
    return found


def window_table(results: list[dict]) -> Iterator[str]:
    """Yield the lines of a table of times with a window; none if no result has one."""
    rows = []
    for result in results:
        for name in result["timed"].get("forward", {}):
            cells = [result["shape"], str(result["window"]), name]
            for direction in DIRECTIONS:
                timing = result["in_window"].get(direction, {}).get(name, {})
                if "speedup" in timing:
                    full = result["timed"][direction][name]["seconds"]
                    milliseconds = f"{1e3 * full:.3f}, {1e3 * timing['seconds']:.3f}"
                    cells.append(f"{milliseconds}, {timing['speedup']:.2f}")
            if len(cells) > 3:
                rows.append(f"| {' | '.join(cells)} |")
    if rows:
        yield (
            "| shape | window | candidate | forward: ms without, with the window, ratio |"
            " forward + backward |"
        )
        yield "|---|---|---|---|---|"
        yield from rows


def auto_candidates(shape: Shape, dtype: torch.dtype) -> dict[str, str]:
    """Return the candidate that `auto` selects for each encoding."""
    grouped = shape.groups < shape.heads
    names = {}
    for encoding, needs in NEEDS.items():
        choice = choose_backend(
            "auto", device_here(), dtype, shape.head_dim, needs, grouped=grouped
        )
        names[encoding] = f"{encoding} {choice.backend}"
    return names


def fastest_candidate(timings: dict[str, dict], encoding: str) -> str | None:
    """Return the name of an encoding's candidate with the shortest time, or None if none was timed.

    `timings` has the entry `seconds` for each candidate that was timed, by its name.
    """
    seconds_by_name = {
        name: timing["seconds"]
        for name, timing in timings.items()
        if name.startswith(encoding) and "seconds" in timing
    }
    return min(seconds_by_name, key=seconds_by_name.get, default=None)


def _run_candidate(
    tensors: list[Tensor],
    output_grads: list[Tensor],
    backward: bool,
    name: str,
    **options: Visibility | None,
) -> None:
    """Run a candidate's forward pass and, with `backward`, the backward pass from
    `output_grads`.

    `tensors` are those of `random_inputs`; `options` are those of `attend`.
    """
    encoding, backend = name.split()
    with torch.set_grad_enabled(backward):
        outputs = [x for x in attend(encoding, backend, *tensors, **options) if x is not None]
    if backward:
        # RoPE does not use z, so z has no gradient.
        torch.autograd.grad(outputs, tensors, output_grads[: len(outputs)], allow_unused=True)


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Parse the command line, or `argv` if it is not None."""
    parser = command_line.Parser(description=__doc__)
    add = parser.add_argument
    default = "default here: %(default)s"
    shapes = SHAPES[:1]
    tokens = 2048
    if torch.cuda.is_available():
        shapes = SHAPES
        tokens = 65536
    sizes = "query heads, key/value groups if fewer, head dimension, tokens (default: our models')"
    add("--shapes", nargs="+", type=Shape.parse, metavar="H[/G]xD@S", default=shapes, help=sizes)
    size = "also time a sliding window of this many tokens, in shapes that are longer"
    add("--window", type=whole_number, metavar="TOKENS", help=size)
    add("--flex", action="store_true", help="compile and time FlexAttention as well")
    excluded = "backends to exclude"
    add("--without", nargs="+", choices=BACKENDS, metavar="NAME", default=[], help=excluded)
    in_batch = f"tokens per batch, at least one sequence ({default})"
    add("--tokens", type=whole_number, default=tokens, help=in_batch)
    repetitions = f"maximum number of timed runs ({default})"
    add("--repetitions", type=whole_number, default=10, help=repetitions)
    minutes = "start no check or shape after this many minutes (default: %(default)s)"
    add("--minutes", type=float, default=8.0, help=minutes)
    add_time_arguments(parser)
    arguments = parser.parse_args(argv)
    if arguments.toy:
        arguments.tokens = 64
        arguments.repetitions = 1
        arguments.shapes = [TOY]
    return arguments


def main(argv: list[str] | None = None) -> None:
    """Time all shapes, print the table, and write the record to the file that --output names."""
    arguments = parse(argv)
    record = Record(arguments)
    results = []
    deadline = time.monotonic() + 60 * arguments.minutes
    for shape in arguments.shapes:
        if time.monotonic() > deadline:
            print(f"skipped {shape}: out of time; increase --minutes", file=sys.stderr)
            continue
        print(shape, file=sys.stderr)
        # `result` is complete only at the end of the loop. It is recorded after every check and
        # measurement, in case a kernel hangs.
        for result in measure(shape, arguments, deadline):
            record.write({"results": [*results, result]})
        results.append(result)
    print("\n".join(attention_table(results)), flush=True)
    if windows := "\n".join(window_table(results)):
        print(f"\n{windows}", flush=True)


if __name__ == "__main__":
    command_line.run(main)
