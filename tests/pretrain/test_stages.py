"""The stages of a demo: how they start several processes."""

import os
import subprocess

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
