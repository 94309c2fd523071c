import logging
import os
import signal
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

# These tests check the CPU path on any machine; with TESTS_ON=gpu, those marked gpu run on a GPU.
ON_GPU = os.environ.get("TESTS_ON") == "gpu"
if not ON_GPU:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ["TRITON_INTERPRET"] = "1"
    # With small tensors and many processes, threads only slow each other down.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
else:
    # Exact comparisons need fp32 without TF32, which some images enable.
    os.environ |= {"NVIDIA_TF32_OVERRIDE": "0", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "0"}
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    import torch

    # A single process trains on a single GPU; only those that train together get several. Set
    # before CUDA starts, which counting GPUs does not do; workers of pytest-xdist inherit it.
    os.environ.setdefault(
        "TESTED_GPUS",
        os.environ.get("CUDA_VISIBLE_DEVICES")
        or ",".join(map(str, range(torch.cuda.device_count()))),
    )
    os.environ["CUDA_VISIBLE_DEVICES"] = os.environ["TESTED_GPUS"].split(",")[0]
    if not torch.cuda.is_available():
        pytest.exit(
            "TESTS_ON=gpu, but torch sees no GPU here; leave it out to interpret the kernels",
            returncode=1,
        )

GIB_PER_WORKER = 9
"""GPU memory per pytest-xdist worker; float64 scores of 4,096 tokens take most of it."""

# In the background of a script, SIGINT is ignored, and the tests' child processes would inherit
# that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

sys.path.insert(0, str(Path(__file__).parent))

LONGEST = (
    "test_pipeline.py",
    "test_training.py",
    "test_resuming.py",
    "test_two_processes.py",
    "test_rehearse.py",
    "test_documented_runs.py",
    "test_export.py",
    "test_ecosystem.py",
    "test_train_command.py",
)


def pytest_collection_modifyitems(items):
    """Run the slowest files first, so that no pytest-xdist worker ends with one of them."""
    items.sort(key=lambda item: item.path.name not in LONGEST)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config):
    """On a GPU, start as many workers as fit its memory; they spend most of the time compiling."""
    if not ON_GPU:
        return None
    memory = torch.cuda.get_device_properties(0).total_memory / 2**30
    return max(
        1,
        min(8, (os.cpu_count() or 1) // 2, int(memory // GIB_PER_WORKER)),
    )


@pytest.fixture(autouse=ON_GPU)
def gpu_answers():
    """Exit after a GPU fault, which invalidates later results of this process; pytest-xdist starts
    another worker.
    """
    yield
    try:
        torch.cuda.synchronize()
    except Exception:
        os._exit(1)


@pytest.fixture(autouse=True)
def no_messages_to_closed_streams():
    """Undo a command's logging.basicConfig(), whose stream `capsys` closes: later messages would
    print tracebacks.
    """
    root = logging.getLogger()
    handlers = root.handlers[:]
    level = root.level
    yield
    for handler in root.handlers[:]:
        if handler not in handlers and type(handler) is logging.StreamHandler:
            root.removeHandler(handler)
    root.setLevel(level)


@pytest.fixture(autouse=True)
def torchs_own_linear():
    """Undo what ZeRO 3 replaces for the rest of a process: torch's linear, by one without forward
    derivatives.
    """
    yield
    torch = sys.modules.get("torch")
    if torch is not None and torch.nn.functional.linear.__module__.startswith("deepspeed"):
        torch.nn.functional.linear = torch._C._nn.linear


MODULES = (
    "argparse.py",
    "base64.py",
    "bisect.py",
    "calendar.py",
    "copy.py",
    "csv.py",
    "heapq.py",
    "json/decoder.py",
)


@pytest.fixture(scope="session")
def run_tool(tmp_path_factory):
    from tool_runs import command, run_here

    cache = tmp_path_factory.mktemp("cache")
    environment = {**os.environ, "HF_HOME": str(cache), "HF_HUB_OFFLINE": "1"}
    settings = {"capture_output": True, "text": True, "env": environment, "timeout": 120}

    def run(tool, *arguments, code=0, workers=1, variables=None):
        if tool == "preprocess_data":
            arguments = ("--workers", workers, *arguments)
        # A Hugging Face cache is chosen before any import; workers are forked from a process
        # without threads.
        apart = workers > 1 or any(str(argument).startswith("hub") for argument in arguments)
        if apart:
            chosen = settings | {"env": environment | (variables or {})}
            result = subprocess.run(command(tool, *arguments), **chosen)
        else:
            result = run_here(tool, *arguments)
        assert result.returncode == code, result.stderr
        assert "Traceback" not in result.stderr
        return result

    return run


@pytest.fixture(scope="session")
def texts():
    root = Path(sysconfig.get_path("stdlib"))
    return [
        *(root.joinpath(name).read_text(encoding="utf-8") for name in MODULES),
        "naïve Ünïcödé, 漢字, \U0001f980, tabs\t and  two spaces \r\n\n end",
        "x",
    ]


@pytest.fixture(scope="session")
def corpus(tmp_path_factory, texts):
    from tool_runs import write_lines

    path = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    write_lines(path, texts)
    return path


@pytest.fixture(scope="session")
def tokenizer_path(tmp_path_factory, corpus, run_tool):
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.model"
    run_tool("train_tokenizer", "--input", corpus, "--vocab-size", 800, "--output", path)
    return path
