"""`benchmarks.prefill`: it records what it measures, and gives no figure to attention that is wrong."""

import json

import pytest
import torch

from benchmarks import prefill
from megatron_tape.huggingface.modeling import attention_tape

ON_GPU = torch.cuda.is_available()


@pytest.mark.skipif(ON_GPU, reason="attention by blocks is for CPUs")
def test_prefill_is_timed_beside_llama_and_recorded(monkeypatch, tmp_path):
    path = tmp_path / "prefill.json"
    monkeypatch.setattr("sys.argv", ["prefill", "--toy", "--passes=2", f"--output={path}", "--commit=abc"])
    prefill.main()
    found = json.loads(path.read_text())
    assert set(found["shapes"]) == {"smollm2-135m", "12x64"} and found["rejected"] == {}
    for shape in found["shapes"].values():
        row = shape["lengths"]["64"]
        assert row["passes"] == 2 and 0 < row["tape_over_llama"] < 100 and 0 < row["cpu_tape_over_llama"] < 100

    right = attention_tape.attend_by_blocks

    def wrong(query, key, value, *arguments):
        return [part.roll(1, 1) for part in right(query, key, value, *arguments)]

    for monkeypatched in (lambda *x: [right(*x)[0], torch.zeros(x[0].transpose(1, 2).shape).to(x[0])], wrong):
        monkeypatch.setattr(attention_tape, "attend_by_blocks", monkeypatched)
        with pytest.raises(SystemExit, match="so no figure is given"):
            prefill.main()
