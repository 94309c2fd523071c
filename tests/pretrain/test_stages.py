"""The stages of a demo: how they start several processes."""

import os
import subprocess
import sys

import pytest

from megatron_tape.errors import ConfigError
from pretrain import demo, demo_smollm2
from pretrain.stages import launcher

NAMELESS = """
import socket
socket.getfqdn = socket.gethostname = lambda *arguments: "nosuchhost.invalid"
"""


def test_processes_start_where_the_name_of_the_machine_does_not_resolve(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(NAMELESS)
    (tmp_path / "started.py").write_text("import os; print(os.environ['MASTER_ADDR'])")
    done = subprocess.run(
        [*launcher(1), "started"],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stdout) == (0, "127.0.0.1\n"), done.stderr


@pytest.mark.parametrize("program", [demo, demo_smollm2])
@pytest.mark.parametrize("option", ["--processes", "--steps"])
def test_a_demo_of_no_processes_or_steps_is_refused(program, option, monkeypatch, tmp_path):
    for value in ("0", "-1", "²"):
        monkeypatch.setattr(sys, "argv", ["demo", f"--directory={tmp_path}/runs", f"{option}={value}"])
        with pytest.raises(ConfigError, match=f"argument {option}: '{value}' is not a whole number"):
            program.main()
    assert not list(tmp_path.iterdir())
