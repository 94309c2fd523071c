"""JSON records of measurements, with hardware, package versions and commit. Does not import torch
at its top.
"""

import argparse
import json
import logging
import os
import platform
import shlex
import sys
import warnings
from datetime import UTC, datetime
from pathlib import Path

from megatron_tape.io.files import atomic_output
from megatron_tape.io.versions import commit, cpu_name, toolchain, versions

PACKAGES = (
    "torch",
    "triton",
    "megatron-core",
    "deepspeed",
    "flash-attn",
    "numpy",
    "sentencepiece",
    "transformers",
)


def describe_environment() -> dict:
    """Return the environment of a measurement as JSON data: hardware, versions, git commit, command
    and time.

    `commit` ends in "-dirty" if tracked files have changed. GPUs are listed only if this process
    has imported torch.
    """
    facts = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["python", *sys.orig_argv[1:]]),
        "commit": commit(),
        "cpu": cpu_name(),
        "threads": None,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "gpus": [],
        "gpu_software": {},
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "packages": versions(PACKAGES),
    }
    # Importing torch here would slow down programs that do not use it.
    torch = sys.modules.get("torch")
    if torch is None:
        return facts

    facts["threads"] = torch.get_num_threads()
    if torch.cuda.is_available():
        first = torch.cuda.get_device_properties(0)
        facts["gpus"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        facts["gpu_memory_gib"] = round(first.total_memory / 2**30, 1)
        facts["capability"] = f"{first.major}.{first.minor}"
        facts["gpu_software"] = {
            "cuda": f"CUDA {torch.version.cuda}",
            "driver": f"driver {toolchain().get('driver', 'unknown')}",
            "cudnn": f"cuDNN {torch.backends.cudnn.version()}",
        }
    return facts


class Record:
    """The JSON file that --output names, rewritten with every new result.

    `arguments` are the options of the program. Without --output, nothing is written.
    """

    def __init__(self, arguments: argparse.Namespace):
        self.path: Path | None = arguments.output
        if self.path is None:
            return

        environment = describe_environment()
        if arguments.commit is not None:
            environment["commit"] = arguments.commit
        # The options of the program as JSON data. `default=str` converts paths and shapes to texts,
        # since JSON does not have them.
        options = json.loads(json.dumps(vars(arguments), default=str))
        self.origin = {"environment": environment, "arguments": options}
        self.path.parent.mkdir(parents=True, exist_ok=True)

    def write(self, result: dict) -> None:
        """Replace the file by one with the environment, the options and `result`, all results so
        far.
        """
        if self.path is not None:
            with atomic_output(self.path, "w", overwrite=True) as file:
                file.write(json.dumps(self.origin | result, indent=1) + "\n")


def add_record_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options --output and --commit to `parser`."""
    parser.add_argument(
        "--output", type=Path, metavar="FILE.json", help="write results to this file as they arrive"
    )
    parser.add_argument("--commit", help="commit of this code, if git cannot determine it")


def quiet_libraries(rank: int = 0) -> None:
    """Reduce the logging of libraries, as training does. Only rank 0 logs below errors. Without a
    GPU, select DeepSpeed's CPU accelerator.

    Call it before DeepSpeed and Megatron-core are imported.
    """
    import torch

    level = logging.INFO if rank == 0 else logging.ERROR
    logging.basicConfig(level=level, format="%(message)s")
    for noisy in ("DeepSpeed", "megatron", "torch"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", module="megatron")
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    # DeepSpeed would otherwise search for accelerators, and warn.
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
