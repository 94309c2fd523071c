"""Compare the nodes of a job before it trains: versions, code, input files, GPUs and directories.

Each node collects facts about itself with `node_facts`. Rank 0 finds problems in the facts of all
nodes.
"""

import os
import shutil
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_tape.checkpoint.directories import list_checkpoints
from megatron_tape.checkpoint.saved_tokenizer import saved_tokenizer_directory
from megatron_tape.config.schema import RunConfig
from megatron_tape.config.stages import prefixes_of, stages_of
from megatron_tape.io.files import BLOCKS, fingerprint, write_whole
from megatron_tape.io.versions import toolchain, versions
from megatron_tape.parallel.launcher import restart_count
from megatron_tape.text import byte_size

PACKAGES = ("torch", "megatron-core", "deepspeed", "triton")
BLOCKS_OF_ALL = 4096
"""Approximate number of 64 KiB blocks of input files that each node reads for fingerprints, at
least three per file.
"""


@dataclass(frozen=True)
class Problem:
    """Why a job must not start."""

    sentence: str
    nodes: tuple[str, ...] = ()
    """The nodes that have the problem, which the next attempt should exclude. Empty if it concerns
    the whole job.
    """
    mistake: bool = False
    """Whether the settings or the installation are wrong, so that another attempt would fail too.
    """


def inputs(config: RunConfig) -> list[str]:
    """Return the paths of the files that every node reads: datasets, examples and the tokenizer."""
    files = [
        prefix + suffix for prefix in prefixes_of(stages_of(config)) for suffix in (".idx", ".bin")
    ]
    if config.data.examples is not None:
        examples = config.data.examples
        files += [path for path in (examples.path, examples.validation) if path is not None]
    # A continued run reads the tokenizer of its checkpoint, which has checksums and is shared by
    # all nodes.
    if saved_tokenizer_directory(config):
        tokenizer = None
    else:
        tokenizer = config.data.tokenizer
    if tokenizer is not None and Path(tokenizer).is_dir():
        files += sorted(str(path) for path in Path(tokenizer).iterdir() if path.is_file())
    elif tokenizer is not None:
        files.append(tokenizer)
    return files


def node_facts(config: RunConfig, home: Path | None, code: str) -> dict[str, Any]:
    """Return facts about this node: `versions`, `data` (fingerprints of the input files by path)
    and `directory`.

    Args:
        config: the settings of the run.
        home: the staging directory of the attempt's checkpoints; None skips the check of the
            directory.
        code: a digest of the code that this node runs.
    """
    facts: dict[str, Any] = {
        "versions": versions(PACKAGES) | toolchain() | {"code": code},
        "data": {},
        "directory": None,
    }
    files = inputs(config)
    blocks = min(BLOCKS, max(2, BLOCKS_OF_ALL // max(1, len(files))))
    for path in files:
        try:
            facts["data"][path] = fingerprint(path, blocks)
        except OSError as error:
            facts["data"][path] = f"not readable ({error.strerror})"
    if home is not None:
        facts["directory"] = _directory_facts(home)
    return facts


def _directory_facts(home: Path) -> dict[str, Any]:
    """Read the token that rank 0 wrote to `home`, and write a file whose existence rank 0 checks.

    Returns `token`, the name of the file as `wrote`, and `error`; each may be None.
    """
    name = f"preflight-{os.uname().nodename}-{os.getpid()}"
    facts = {"token": None, "error": None, "wrote": None}
    try:
        facts["token"] = (home / "preflight").read_text(encoding="utf-8")
        write_whole(home / name, [b"here\n"], durable=False)
        facts["wrote"] = name
    except OSError as error:
        facts["error"] = f"{error.strerror}: {error.filename}"
    return facts


def differences(nodes: dict[str, dict[str, Any]]) -> list[Problem]:
    """Return a problem for each version or input file that differs from that of most nodes, or
    cannot be read.

    `nodes` are the facts of all nodes by name. Without a majority, the node to exclude changes with
    every restart.
    """
    problems = []
    for kind in ("versions", "data"):
        for key in {key: None for facts in nodes.values() for key in facts[kind]}:
            values = {node: facts[kind].get(key, "absent") for node, facts in nodes.items()}
            counts = Counter(values.values())
            tied = [value for value, count in counts.items() if count == max(counts.values())]
            expected = tied[restart_count() % len(tied)]
            unreadable = [
                node for node, value in values.items() if value.startswith("not readable")
            ]
            if kind == "data" and unreadable:
                problem = f"{', '.join(unreadable)}: {key} is {values[unreadable[0]]}"
                problems.append(Problem(problem, tuple(unreadable)))
                continue
            different = [node for node, value in values.items() if value != expected]
            if different:
                other = next(node for node, value in values.items() if value == expected)
                if kind == "data":
                    fix = f"copy the file from {other}"
                else:
                    fix = "install the same version on all nodes"
                sentence = (
                    f"{', '.join(different)}: {key} is {values[different[0]]}, but {expected} on"
                    f" {other}; {fix}"
                )
                problems.append(Problem(sentence, tuple(different)))
    return problems


def directory_problems(
    nodes: dict[str, dict[str, Any]],
    home: Path,
    token: str,
    checkpoint_bytes: int,
    keep: int,
) -> list[Problem]:
    """Return a problem for each node on which the checkpoint directory is not shared or not
    writable, or if it is full.

    Args:
        nodes: the facts of all nodes by name.
        home: the staging directory of the attempt, in the checkpoint directory.
        token: the text that rank 0 wrote to `home`, which all nodes must have read.
        checkpoint_bytes: the size of a checkpoint. There must be space for two, or for one if
            `keep` checkpoints exist, since the next save then deletes one.
        keep: `checkpoint.keep`.
    """
    root = home.parent
    problems = []
    without_token = [node for node, facts in nodes.items() if facts["directory"]["token"] != token]
    # If no other node shares the directory, it is on a local disk, which is a mistake in the
    # settings.
    local = len(without_token) > 1 and len(without_token) == len(nodes) - 1
    for node, facts in nodes.items():
        directory = facts["directory"]
        if directory["error"] is not None:
            sentence = (
                f"{node}: checkpoint.directory {root} cannot be read and written"
                f" ({directory['error']})"
            )
            problems.append(Problem(sentence, (node,), local))
        elif directory["token"] != token or not (home / directory["wrote"]).is_file():
            fix = "set it to a directory on a shared file system"
            sentence = (
                f"{node}: checkpoint.directory {root} is not the directory of this name on rank 0's"
                f" node; {fix}"
            )
            problems.append(Problem(sentence, (node,), local))
    needed = (1 if len(list_checkpoints(root)) >= keep else 2) * checkpoint_bytes
    free = shutil.disk_usage(root).free
    if free < needed:
        sentence = (
            f"checkpoint.directory {root} has {byte_size(free)} of free space, but two checkpoints"
            f" need {byte_size(2 * checkpoint_bytes)}; free some space, or set another directory"
        )
        problems.append(Problem(sentence))
    return problems


def gpu_problems(
    gpus: dict[str, list[dict[str, Any]]], expected: int, needed: int
) -> list[Problem]:
    """Return a problem for each node with fewer than `expected` GPUs, and for each GPU that is too
    small.

    `gpus` are the GPUs of each node, with their `name` and `total` bytes of memory. A rank needs
    about `needed` bytes. If every GPU is too small, the settings are a mistake.
    """
    problems = []
    too_small = all(device["total"] < needed for devices in gpus.values() for device in devices)
    for node, devices in gpus.items():
        if len(devices) < expected:
            sentence = (
                f"{node}: torch finds {len(devices)} of the {expected} GPUs that the job has on"
                " this node"
            )
            problems.append(Problem(sentence, (node,)))
        for index, device in enumerate(devices):
            if device["total"] < needed:
                sentence = (
                    f"{node}: GPU {index} ({device['name']}) has {byte_size(device['total'])}, and"
                    f" the run needs about {byte_size(needed)}; `python -m pretrain.estimate` shows"
                    " what uses the memory"
                )
                problems.append(Problem(sentence, (node,), too_small))
    return problems
