"""Which GPUs and links the preflight calls slow, and what it measures on CPUs."""

from launch import run_group

from megatron_tape.run.speed import judge

NODES = [node for node in "abcde" for _ in range(2)]


def speeds(products=(), links=()):
    """Ten ranks on five nodes in a ring, with exceptions by rank and by pair of ranks."""
    rates = {frozenset((r, (r + 1) % 10)): (400e9 if r % 2 == 0 else 50e9) for r in range(10)}
    rates |= {frozenset(pair): rate for pair, rate in dict(links).items()}
    return [
        {
            "matmul": dict(products).get(rank, 600e12 + rank * 2e12),
            "links": {str(other): rates[frozenset((rank, other))] for other in ((rank + 1) % 10, (rank - 1) % 10)},
        }
        for rank in range(10)
    ]


def judged(least=0.7, **exceptions):
    lines, problems = zip(*judge(speeds(**exceptions), NODES, least))
    return lines, [problem for found in problems for problem in found]


def test_healthy_nodes_are_described_by_medians_and_extremes():
    lines, problems = judged()
    assert problems == []
    assert lines == (
        "matrix products: 609 TFLOP/s (600 to 618)",
        "links in a node: 400 GB/s (400 to 400)",
        "links between nodes: 50 GB/s (50 to 50)",
    )


def test_a_slow_gpu_and_a_slow_link_in_a_node_are_named_with_the_node():
    _, (problem,) = judged(products={3: 300e12})
    assert problem.sentence == "rank 3 on b: matrix products reach 300 TFLOP/s, and 609 is the median"
    assert problem.nodes == ("b",) and not problem.mistake
    _, (problem,) = judged(links={(4, 5): 100e9})
    assert problem.nodes == ("c",) and problem.sentence.startswith("ranks 4 and 5 on c: links in a node reach 100 GB/s")
    assert judged(least=0.2, products={3: 300e12}, links={(4, 5): 100e9})[1] == []


def test_a_node_with_slow_links_to_both_sides_is_to_blame_and_of_one_slow_link_both_ends_are():
    _, problems = judged(links={(1, 2): 20e9, (3, 4): 25e9})
    assert [problem.nodes for problem in problems] == [("b",), ("b",)]
    _, (problem,) = judged(links={(1, 2): 20e9})
    assert problem.nodes == ("a", "b") and "ranks 1 and 2 on a and b: links between nodes" in problem.sentence


def test_every_rank_measures_itself_and_the_links_to_its_neighbours():
    for size in (2, 3):
        found = run_group("speed_cases", size)
        assert all(speed["matmul"] > 0 for speed in found)
        pairs = {(rank, int(other)) for rank, speed in enumerate(found) for other in speed["links"]}
        assert pairs == {(other, rank) for rank, other in pairs} and {0, 1} <= {rank for rank, _ in pairs}
        assert all(rate > 0 for speed in found for rate in speed["links"].values())


def test_pairs_of_gpus_that_are_linked_worse_than_others_in_every_node_are_healthy():
    nodes = [node for node in "abc" for _ in range(4)]
    rates = {(0, 1): 100e9, (1, 2): 20e9, (2, 3): 100e9}
    links = {(4 * node + a, 4 * node + b): rate for node in range(3) for (a, b), rate in rates.items()}
    found = [{"matmul": 1e12, "links": {str(b): rate for (a, b), rate in links.items() if a == r}} for r in range(12)]
    assert [problems for _, problems in judge(found, nodes, 0.7)] == [[], []]
    found[8]["links"]["9"] = 20e9
    (problem,) = list(judge(found, nodes, 0.7))[1][1]
    assert problem.nodes == ("c",) and "100 is the median" in problem.sentence
    # Of one node, nobody can say what is usual.
    found[0]["links"]["1"] = 1e9
    assert [problems for _, problems in judge(found[:4], nodes[:4], 0.7)] == [[], []]
