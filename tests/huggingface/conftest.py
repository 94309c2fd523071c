import shutil
import sys

import pytest
import torch
from datasets_for_tests import source_code
from environments import ROOT


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(2)


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    """Use one thread: small models gain nothing from more, and on a busy machine each operation
    waits for them.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def unwritten_memory_is_nan():
    """Fill uninitialized memory with NaN, so that it shows in results."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="module")
def model():
    """A small TAPE model in float64, far from RoPE."""
    from small_models import build

    torch.manual_seed(0)
    return build(torch.float64)


@pytest.fixture(scope="session")
def source_text():
    return source_code("queue")


@pytest.fixture(scope="session")
def code_tokenizer(tmp_path_factory):
    """A tokenizer of 400 tokens, trained on source code."""
    sys.path.insert(0, str(ROOT / "tools"))
    from train_tokenizer import train

    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.model"
    path.write_bytes(train([source_code("heapq")], 400))
    return path


@pytest.fixture(scope="session")
def exports(tmp_path_factory, code_tokenizer):
    """Exports of random models, made when asked for, with a tokenizer that was trained on source
    code.

    `tape` and `rope` are TAPE's own classes and a Llama, as they are exported; others are names of
    exported_models.
    """
    from exported_models import OWN_CLASSES, PLAIN_ROPE, make

    changes = dict(seq_length=128, vocab_size=400, unpadded_vocab_size=400, init_std=0.15)
    folder = tmp_path_factory.mktemp("exports")

    class Exports(dict):
        def __missing__(self, name):
            full = {"tape": OWN_CLASSES, "rope": PLAIN_ROPE}.get(name, name)
            self[name] = make(
                folder,
                full,
                label=name,
                tokenizer=str(code_tokenizer),
                **changes,
            )
            return self[name]

    return Exports()


@pytest.fixture(scope="session")
def streamable(exports, tmp_path_factory):
    """The exports without output of incomplete characters, which transformers cannot stream."""
    from exported_models import write_no_bytes

    folder = tmp_path_factory.mktemp("ecosystem")
    for name in ("tape", "rope"):
        shutil.copytree(exports[name].directory, folder / name)
        write_no_bytes(folder / name)
    return {name: folder / name for name in ("tape", "rope")}


@pytest.fixture(scope="session")
def made_exports():
    return {}


@pytest.fixture(scope="module")
def exported(made_exports, tmp_path_factory):
    """Return the export of an encoding, or of TAPE's own classes, made once; see
    exported_models.
    """
    from exported_models import make
    from toy_encodings import registered

    def of(name):
        if name not in made_exports:
            made_exports[name] = make(tmp_path_factory.mktemp("exported"), name)
        return made_exports[name]

    with registered():
        yield of


@pytest.fixture(scope="session")
def package_site(tmp_path_factory):
    """A folder with the contents of an installed transformers-tape; a slow test compares it with
    the wheel.
    """
    folder = tmp_path_factory.mktemp("site")
    source = ROOT / "transformers_tape"
    shutil.copytree(
        source / "src" / "transformers_tape",
        folder / "transformers_tape",
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    for file in (ROOT / "megatron_tape" / "huggingface" / "modeling").glob("*_tape.py"):
        if not file.stem.endswith("_encoded_tape"):
            shutil.copy(file, folder / "transformers_tape")
    shutil.copy(source / "transformers_tape.pth", folder)
    return folder
