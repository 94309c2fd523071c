"""The Python files of an exported model, which transformers loads with `trust_remote_code`.

TAPE has files of its own. Every other encoding is exported with the same few files and with its own.
"""

import hashlib
from pathlib import Path

from megatron_tape.errors import UserError
from megatron_tape.huggingface.export.encoding_files import encoding_files
from megatron_tape.position import PositionEncoding

_ENCODED = "modeling_encoded_tape.py"
_CONFIGURATION = "configuration_encoded_tape.py"


def _auto_map(family: str, files: str) -> dict[str, str]:
    heads = ("CausalLM", "SequenceClassification")
    modeling = f"modeling_{files}.{family}"
    names = {"AutoConfig": f"configuration_{files}.{family}Config", "AutoModel": f"{modeling}Model"}
    return names | {f"AutoModelFor{head}": f"{modeling}For{head}" for head in heads}


AUTO_MAP = _auto_map("Tape", "tape")
ENCODED_AUTO_MAP = _auto_map("Encoded", "encoded_tape")
_MODELING = Path(__file__).parents[1] / "modeling"
_IMPORT = "from .encoding_tape import Encoding, Memory, in_some_layers\n"


def code_files(encoding: type[PositionEncoding] | None = None) -> dict[str, bytes]:
    """Return the files of an export by name: of TAPE, or of another encoding.

    Raises UserError if the encoding's file cannot be exported.
    """
    paths = sorted(_MODELING.glob("*_tape.py"))
    files = {path.name: path.read_bytes() for path in paths if encoding is not None or "encoded" not in path.name}
    if encoding is None:
        return files
    own = {name: text.encode() for name, text in encoding_files(encoding).items()}
    assert not files.keys() & own.keys(), "an encoding's files are named after their modules"
    others = sorted(name.removesuffix(".py") for name in {**files, **own} if name not in (_ENCODED, "encoding_tape.py"))
    text = files[_ENCODED].decode()
    assert text.count(_IMPORT) == 1
    named = "".join(f"from .{name} import __name__ as _\n" for name in others)
    # transformers tells configurations of one directory name apart by their text, and finds a model's class by the
    # class of its configuration.
    digest = hashlib.sha256(b"".join(content for _, content in sorted(own.items()))).hexdigest()[:16]
    files[_CONFIGURATION] += f"# For the positional encoding {encoding.name}, {digest}.\n".encode()
    comment = "# Some versions of transformers copy only files that this one names itself.\n"
    return files | own | {_ENCODED: text.replace(_IMPORT, _IMPORT + comment + named).encode()}


def write_code(directory: Path, encoding: type[PositionEncoding] | None = None) -> None:
    """Write the files into `directory`."""
    for name, content in code_files(encoding).items():
        (directory / name).write_bytes(content)


def is_own_code(directory: Path, encoding: type[PositionEncoding] | None = None) -> bool:
    """Return whether the Python files of `directory` are exactly these, byte for byte.

    transformers also runs `custom_generate/generate.py`, if there is one.
    """
    if (directory / "custom_generate").exists():
        return False
    try:
        expected = code_files(encoding)
    except UserError:
        return False
    found = {file.name for file in directory.glob("*.py")}
    return found == set(expected) and all((directory / name).read_bytes() == expected[name] for name in expected)
