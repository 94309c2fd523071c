import shutil
import sys
import sysconfig
from pathlib import Path

import pytest
import torch
from environments import ROOT


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(2)


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    """Models this small gain nothing from threads, and on a busy machine wait for them at every operation."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def source_text():
    return (Path(sysconfig.get_path("stdlib")) / "queue.py").read_text(encoding="utf-8")


@pytest.fixture(scope="session")
def exports(tmp_path_factory):
    """Exports of random models, made when asked for, with a tokenizer that was trained on source code.

    `tape` and `rope` are TAPE's own classes and a Llama, as they are exported; others are names of exported_models.
    """
    from exported_models import OWN_CLASSES, PLAIN_ROPE, make

    sys.path.insert(0, str(ROOT / "tools"))
    from train_tokenizer import train

    tokenizer, rows = tmp_path_factory.mktemp("tokenizer") / "tokenizer.model", 400
    library = Path(sysconfig.get_path("stdlib"))
    tokenizer.write_bytes(train([(library / "heapq.py").read_text(encoding="utf-8")], rows))
    changes = dict(tokenizer=str(tokenizer), seq_length=128, vocab_size=rows, unpadded_vocab_size=rows, init_std=0.15)
    folder = tmp_path_factory.mktemp("exports")

    class Exports(dict):
        def __missing__(self, name):
            full = {"tape": OWN_CLASSES, "rope": PLAIN_ROPE}.get(name, name)
            self[name] = make(folder, full, label=name, **changes)
            return self[name]

    return Exports()


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """Return the export of an encoding, or of TAPE's own classes, made once; see exported_models."""
    from exported_models import make, register_toys

    made, folder, undo = {}, tmp_path_factory.mktemp("exported"), register_toys()

    def of(name):
        if name not in made:
            made[name] = make(folder, name)
        return made[name]

    yield of
    undo()


@pytest.fixture(scope="session")
def package_site(tmp_path_factory):
    """A folder that holds what an installed transformers-tape consists of; a slow test compares it with the wheel."""
    folder, source = tmp_path_factory.mktemp("site"), ROOT / "transformers_tape"
    shutil.copytree(
        source / "src" / "transformers_tape", folder / "transformers_tape", ignore=shutil.ignore_patterns("__pycache__")
    )
    for file in (ROOT / "megatron_tape" / "huggingface" / "modeling").glob("*_tape.py"):
        if not file.stem.endswith("_encoded_tape"):
            shutil.copy(file, folder / "transformers_tape")
    shutil.copy(source / "transformers_tape.pth", folder)
    return folder
