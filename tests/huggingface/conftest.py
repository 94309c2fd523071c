import shutil
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from megatron_tape.position import model_config

ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Exported:
    directory: Path
    model: torch.nn.Module
    """What was exported, as this process made it."""


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
    """Random models far from RoPE, `tape` and `rope`, with a tokenizer that was trained on source code."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from megatron_tape.huggingface.export.to_transformers import export, huggingface_config
    from megatron_tape.huggingface.imports.new_checkpoint import write_imported
    from megatron_tape.huggingface.modeling.configuration_tape import TapeConfig
    from megatron_tape.huggingface.modeling.modeling_tape import TapeForCausalLM

    sys.path.insert(0, str(ROOT / "tools"))
    from train_tokenizer import train

    folder = tmp_path_factory.mktemp("exports")
    library, rows = Path(sysconfig.get_path("stdlib")), 400
    (folder / "tokenizer.model").write_bytes(train([(library / "heapq.py").read_text(encoding="utf-8")], rows))
    sizes = dict(num_layers=3, hidden_size=32, ffn_hidden_size=48, num_attention_heads=4, num_query_groups=2)
    made = {}
    for encoding in ("tape", "rope"):
        settings = model_config(
            position_encoding=encoding,
            **sizes,
            seq_length=128,
            vocab_size=rows,
            init_std=0.15,
            unpadded_vocab_size=rows,
        )
        config = huggingface_config(settings, rows, "fp32")
        torch.manual_seed(0)
        model = TapeForCausalLM(TapeConfig(**config)) if encoding == "tape" else LlamaForCausalLM(LlamaConfig(**config))
        for name, parameter in model.named_parameters():
            if ".position." in name:
                torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
        write_imported(folder / "checkpoints" / encoding, settings, model.state_dict(), "a random model")
        export(folder / "checkpoints" / encoding, folder / encoding, tokenizer=str(folder / "tokenizer.model"))
        made[encoding] = Exported(folder / encoding, model.eval())
    return made


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
def ecosystem_python():
    """The Python of the environment with the heavy packages."""
    python = ROOT / ".venv-ecosystem" / "bin" / "python"
    if not python.exists():
        pytest.fail(f"{python.relative_to(ROOT)} does not exist; make it with: make .venv-ecosystem")
    return python


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
