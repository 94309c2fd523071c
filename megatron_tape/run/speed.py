"""How fast every GPU multiplies and neighbouring ranks exchange data, and which of them are far below the others.

Judging imports no torch.
"""

import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypedDict

from megatron_tape.run.nodes import Problem

FEW = 3
"""The fewest links that can be said to agree on what is usual."""
_TFLOPS, _GBS = ("TFLOP/s", 1e12), ("GB/s", 1e9)


class Speed(TypedDict):
    """What a rank measured."""

    matmul: float
    """FLOP/s."""
    links: dict[str, float]
    """Bytes/s in each direction at once, by the other rank's number."""


def measure(rank: int, size: int) -> Speed:
    """Measure this rank's GPU, or the CPU, and its links to the ranks before and after it; all ranks call it together.

    Neighbours in a ring exchange 64 MiB, all pairs at the same time: first those that begin with an even rank.
    """
    import torch
    import torch.distributed as dist

    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")

    def best(call: Callable[[], object]) -> float:
        seconds = []
        for _ in range(4):  # the first is a warm-up
            began = time.perf_counter()
            call()
            if on_gpu:
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - began)
        return min(seconds[1:])

    width, products = (8192, 20) if on_gpu else (256, 5)
    matrix = torch.ones(width, width, dtype=torch.bfloat16 if on_gpu else torch.float32, device=device)
    seconds = best(lambda: [matrix @ matrix for _ in range(products)])
    found: Speed = {"matmul": products * 2 * width**3 / seconds, "links": {}}
    sent, received = torch.zeros(2, (64 if on_gpu else 1) << 20, dtype=torch.uint8, device=device)
    for phase in (0, 1):
        other = (rank + (1 if (rank + phase) % 2 == 0 else -1)) % size
        # In a ring of an odd number one rank has no partner, and of two ranks the second phase repeats the first.
        alone = (other + (1 if (other + phase) % 2 == 0 else -1)) % size != rank
        dist.barrier()
        if size == 2 and phase == 1 or alone:
            continue

        def exchange(other: int = other) -> None:
            both = dist.P2POp(dist.isend, sent, other), dist.P2POp(dist.irecv, received, other)
            for work in dist.batch_isend_irecv(list(both)):
                work.wait()

        found["links"][str(other)] = sent.nbytes / best(exchange)
    return found


@dataclass(frozen=True)
class _Measured:
    name: str
    nodes: tuple[str, ...]
    rate: float


def judge(speeds: Sequence[Speed], nodes: Sequence[str], least: float) -> Iterator[tuple[str, list[Problem]]]:
    """Yield, for products and for each kind of links, a line for the log, and what is below `least` of the median.

    `speeds` and `nodes` are those of all ranks, in order. Links inside nodes are compared with those at the same place
    of other nodes, as some pairs of GPUs are linked better than others, and judged if there are FEW or more.
    """
    ranks = range(len(speeds))
    products = [_Measured(f"rank {r} on {nodes[r]}", (nodes[r],), speeds[r]["matmul"]) for r in ranks]
    yield _line("matrix products", _TFLOPS, products), _slow("matrix products", _TFLOPS, products, least)
    inside: dict[tuple[int, ...], list[_Measured]] = {}
    between = []
    for r in ranks:
        for other, rate in ((int(name), rate) for name, rate in speeds[r]["links"].items() if r < int(name)):
            pair = (nodes[r], nodes[other])
            name = f"ranks {r} and {other} on {' and '.join(dict.fromkeys(pair))}"
            if pair[0] == pair[1]:
                place = tuple(one - nodes.index(pair[0]) for one in (r, other))
                inside.setdefault(place, []).append(_Measured(name, pair, rate))
            else:
                between.append(_Measured(name, pair, rate))
    if inside:
        alike = [_slow("links in a node", _GBS, links, least) for links in inside.values() if len(links) >= FEW]
        yield _line("links in a node", _GBS, sum(inside.values(), [])), sum(alike, [])
    if between:
        found = _slow("links between nodes", _GBS, between, least) if len(between) >= FEW else []
        yield _line("links between nodes", _GBS, between), found


def _line(what: str, unit: tuple[str, float], found: list[_Measured]) -> str:
    rates = [one.rate / unit[1] for one in found]
    return f"{what}: {statistics.median(rates):.3g} {unit[0]} ({min(rates):.3g} to {max(rates):.3g})"


def _slow(what: str, unit: tuple[str, float], found: list[_Measured], least: float) -> list[Problem]:
    median = statistics.median([one.rate for one in found])
    slow = [one for one in found if one.rate < least * median]
    # A node whose links are all slow has more of them than the nodes at their other ends.
    counts = Counter(node for one in slow for node in dict.fromkeys(one.nodes))
    problems = []
    for one in slow:
        most = max(counts[node] for node in one.nodes)
        culprits = tuple(dict.fromkeys(node for node in one.nodes if counts[node] == most))
        name, size = unit
        sentence = f"{one.name}: {what} reach {one.rate / size:.3g} {name}, and {median / size:.3g} is the median"
        problems.append(Problem(sentence, culprits))
    return problems
