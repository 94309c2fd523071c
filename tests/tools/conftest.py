import os
import subprocess
import sysconfig
from pathlib import Path

import pytest
from tool_runs import command, write_lines

MODULES = ("argparse.py", "base64.py", "bisect.py", "calendar.py", "copy.py", "csv.py", "heapq.py", "json/decoder.py")


@pytest.fixture(scope="session")
def run_tool(tmp_path_factory):
    cache = tmp_path_factory.mktemp("cache")
    environment = {**os.environ, "HF_HOME": str(cache), "HF_HUB_OFFLINE": "1"}

    def run(tool, *arguments, code=0):
        result = subprocess.run(
            command(tool, *arguments), capture_output=True, text=True, env=environment, timeout=120, check=False
        )
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
    path = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    write_lines(path, texts)
    return path


@pytest.fixture(scope="session")
def tokenizer_path(tmp_path_factory, corpus, run_tool):
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.model"
    run_tool("train_tokenizer", "--input", corpus, "--vocab-size", 800, "--output", path)
    return path
