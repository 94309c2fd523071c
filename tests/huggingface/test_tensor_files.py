"""Safetensors files of exports are written one tensor at a time in the requested dtype."""

import os

from conversions import convert, limited_files
from torch.multiprocessing.reductions import StorageWeakRef

from megatron_tape.huggingface.export.saved_weights import SavedWeights
from megatron_tape.huggingface.export.to_transformers import export


def test_a_full_disk_gives_one_sentence_and_leaves_nothing_behind(exports, tmp_path):
    arguments = ["to-hf", "--checkpoint", exports["tape"].checkpoint, "--output", tmp_path / "out"]
    arguments += ["--tokenizer", exports["tape"].directory / "tokenizer.model"]
    largest = max(path.stat().st_size for path in exports["tape"].directory.iterdir())
    for size in (0, 300, 1000, 4000, 12000, largest - 1):
        with limited_files(size):
            done = convert(*arguments)
        assert done.returncode == 1
        assert os.listdir(tmp_path) == []
        message = done.stderr.splitlines()[-1]
        assert message.startswith(f"error: File too large: {tmp_path / 'out'}"), size
    assert convert(*arguments).returncode == 0


def test_weights_are_read_and_written_one_at_a_time(exports, tmp_path, monkeypatch):
    read = SavedWeights.read_parameter
    alive = []
    most = 0

    def watched(self, name):
        nonlocal most
        most = max(most, sum(not each.expired() for each in alive))
        tensor = read(self, name)
        alive.append(StorageWeakRef(tensor.untyped_storage()))
        return tensor

    monkeypatch.setattr(SavedWeights, "read_parameter", watched)
    export(exports["rope"].checkpoint, tmp_path / "out", "bf16", 20_000, tokenizer="none")
    assert len(alive) > 20
    assert most <= 1
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1
