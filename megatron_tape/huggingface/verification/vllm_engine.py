"""Run vLLM in its own environment, and read the logits that it computes."""

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from megatron_tape import command_line
from megatron_tape.errors import UserError
from megatron_tape.huggingface.verification.logits_file import write_tokens
from megatron_tape.huggingface.verification.sequences import Sequence
from megatron_tape.io.versions import ROOT

ENVIRONMENT = Path(".venv-vllm", "bin", "python")
"""The Python of the environment that `make .venv-vllm` creates in a clone of the repository."""
_SCRIPT = Path(__file__).with_name("vllm_logits.py")
_MODELING = Path(__file__).parents[1] / "modeling"
_PLUG_IN = ROOT / "transformers_tape" / "src" / "transformers_tape"
_ENTRY_POINT = "[vllm.general_plugins]\ntape = transformers_tape.vllm_plugin:register\n"
_IS_INSTALLED = "import importlib.metadata; importlib.metadata.version('transformers-tape')"


def find_python(given: Path | None) -> Path:
    """Return the Python that has vLLM: `given`, or that of `.venv-vllm` in the repository or in the
    current directory, or this one. Raises UserError if there is none.
    """
    if given is not None:
        if not given.is_file():
            raise UserError(given, "does not exist", "name the Python of an environment with vLLM")
        return given

    for folder in (ROOT, Path.cwd()):
        if (folder / ENVIRONMENT).is_file():
            return folder / ENVIRONMENT
    if importlib.util.find_spec("vllm") is not None:
        return Path(sys.executable)
    raise UserError(
        "vLLM",
        "is not installed here, and there is no .venv-vllm",
        "run `make .venv-vllm`, or name the Python of an environment with vLLM by --engine-python",
    )


def run_vllm(
    python: Path, directory: Path, sequence: Sequence, dtype: torch.dtype
) -> tuple[dict[str, Tensor], list[int]]:
    """Return the logits (P, V), in float32, that vLLM computes for the compared tokens of a
    sequence without gaps, and the positions of these tokens.

    The logits of "alone" are those of a request alone, read in one step; those of "together" are
    of all requests in one batch, read in chunks with a prefix cache. Positions that vLLM does not
    serve are left out. Raises UserError if vLLM fails.

    Args:
        python: the Python of an environment with vLLM; see `find_python`.
        directory: the model.
        sequence: the tokens.
        dtype: torch.float32 or torch.bfloat16.
    """
    with tempfile.TemporaryDirectory(prefix="vllm-") as work:
        tokens = Path(work, "tokens.npz")
        output = Path(work, "logits.npz")
        write_tokens(tokens, sequence)
        # The folder of the script must not hide packages of the same names from vLLM.
        environment = os.environ | {"PYTHONSAFEPATH": "1"}
        if _needs_plug_in(python, directory):
            site = _copy_plug_in(Path(work, "site"))
            paths = [str(site)]
            if os.environ.get("PYTHONPATH"):
                paths.append(os.environ["PYTHONPATH"])
            environment["PYTHONPATH"] = os.pathsep.join(paths)

        precision = str(dtype).removeprefix("torch.")
        command = [python, _SCRIPT, directory.absolute(), tokens, output, "--dtype", precision]
        with command_line.step(f"computing logits with vLLM in {precision}"):
            done = subprocess.run(
                list(map(str, command)),
                env=environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
            )
        if done.returncode != 0:
            reason = _reason(done)
            fix = ""
            if "No module named 'vllm'" in reason:
                fix = "run `make .venv-vllm`, or name another Python by --engine-python"
            raise UserError(str(directory), f"failed in vLLM: {reason}", fix)

        with np.load(output, allow_pickle=False) as archive:
            logits = {
                "alone": torch.from_numpy(archive["logits"]),
                "together": torch.from_numpy(archive["logits_together"]),
            }
            return logits, archive["positions"].tolist()


def _needs_plug_in(python: Path, directory: Path) -> bool:
    """Return whether a model is served by the plug-in of this repository, and the environment of
    `python` does not have it. Without the repository, return False; then vLLM's error names it.
    """
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    if config.get("model_type") != "tape" or not _PLUG_IN.is_dir():
        return False
    done = subprocess.run([python, "-c", _IS_INSTALLED], capture_output=True)
    return done.returncode != 0


def _copy_plug_in(site: Path) -> Path:
    """Fill the folder `site` with what `pip install ./transformers_tape` installs for vLLM, and
    return it.
    """
    package = site / "transformers_tape"
    shutil.copytree(_PLUG_IN, package, ignore=shutil.ignore_patterns("__pycache__"))
    for file in _MODELING.glob("*_tape.py"):
        # Models with other encodings need code that only their exports contain.
        if not file.stem.endswith("_encoded_tape"):
            shutil.copy(file, package)
    metadata = site / "transformers_tape-0.dist-info"
    metadata.mkdir()
    (metadata / "entry_points.txt").write_text(_ENTRY_POINT, encoding="utf-8")
    return site


def _reason(done: subprocess.CompletedProcess[str]) -> str:
    """Return why the script failed: the last line that it wrote as an error, or the last line of
    all.
    """
    if done.returncode < 0:
        return f"it was ended by {signal.Signals(-done.returncode).name}"
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return (errors or lines or [f"exit status {done.returncode}"])[-1]
