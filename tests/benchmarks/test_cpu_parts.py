"""`python -m benchmarks.cpu_parts` measures the real parts, each in both directions."""

import torch

from benchmarks import cpu_parts


def test_every_part_is_run_and_added_up(monkeypatch):
    before = torch.get_num_threads()
    for name, size in {"S": 32, "H": 2, "D": 8, "C": 16, "FFN": 32, "P": 4}.items():
        monkeypatch.setattr(cpu_parts, name, size)
    ran = []
    monkeypatch.setattr(cpu_parts, "plain_update", lambda z, *rest: (ran.append(z.shape), z.clone())[1])
    try:
        head, *rows, ratio = cpu_parts.measure(2)
    finally:
        torch.set_num_threads(before)
    assert ran == [(32, 2, 8)] * 3 and head.split() == ["CPU", "ms", "of", "a", "layer", "RoPE", "TAPE", "more"]
    found = {row[:28].strip(): [float(number) for number in row[28:].split()] for row in rows}
    together = found.pop("together")
    assert found["position update"][0] == found["gate of the update"][0] == 0.0
    del found["rotation alone"]
    sums = [sum(column) for column in zip(*found.values())]
    assert all(abs(a - b) < 0.5 for a, b in zip(sums, together)) and ratio.startswith("TAPE / RoPE: ")
