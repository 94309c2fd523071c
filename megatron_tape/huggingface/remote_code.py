"""The Python files of an exported TAPE model, which transformers loads with `trust_remote_code`."""

import shutil
from pathlib import Path

FILES = (
    "attention_tape.py",
    "cache_tape.py",
    "configuration_tape.py",
    "modeling_tape.py",
    "paged_tape.py",
    "parallel_tape.py",
    "position_tape.py",
)
AUTO_MAP = {
    "AutoConfig": "configuration_tape.TapeConfig",
    "AutoModel": "modeling_tape.TapeModel",
    "AutoModelForCausalLM": "modeling_tape.TapeForCausalLM",
    "AutoModelForQuestionAnswering": "modeling_tape.TapeForQuestionAnswering",
    "AutoModelForSequenceClassification": "modeling_tape.TapeForSequenceClassification",
    "AutoModelForTokenClassification": "modeling_tape.TapeForTokenClassification",
}
_HERE = Path(__file__).parent


def write_code(directory: Path) -> None:
    """Copy the files into `directory`."""
    for name in FILES:
        shutil.copyfile(_HERE / name, directory / name)


def is_own_code(directory: Path) -> bool:
    """Return whether the Python files of `directory` are exactly these, byte for byte."""
    found = {file.name for file in directory.glob("*.py")}
    return found == set(FILES) and all((directory / name).read_bytes() == (_HERE / name).read_bytes() for name in FILES)
