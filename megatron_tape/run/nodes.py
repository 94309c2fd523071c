"""Compare the nodes of a job before it trains: versions, code, input files, GPUs and directories.

Each node collects facts about itself with `node_facts`. Rank 0 finds problems in the facts of all
nodes.
"""

import shutil
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_tape.checkpoint.directories import list_checkpoints
from megatron_tape.checkpoint.saved_tokenizer import saved_tokenizer_directory
from megatron_tape.config.schema import RunConfig
from megatron_tape.config.stages import prefixes_of, stages_of
from megatron_tape.io.files import fingerprint, write_whole
from megatron_tape.io.versions import node_name, toolchain, versions
from megatron_tape.text import byte_size

PACKAGES = ("torch", "megatron-core", "deepspeed", "triton")


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
    if (examples := config.data.examples) is not None:
        files += [path for path in (examples.path, examples.validation) if path is not None]

    # A continued run reads the tokenizer of its checkpoint, which has checksums and is shared by
    # all nodes.
    tokenizer = config.data.tokenizer
    if tokenizer is not None and saved_tokenizer_directory(config) is None:
        directory = Path(tokenizer)
        if directory.is_dir():
            files += sorted(str(path) for path in directory.iterdir() if path.is_file())
        else:
            files.append(tokenizer)
    return files


def node_facts(config: RunConfig, home: Path | None, code: str) -> dict[str, Any]:
    """Return facts about this node: `versions`, `data` (fingerprints of the input files by path),
    and, if it cannot write to the checkpoint directory, `error`.

    Args:
        config: the settings of the run.
        home: the staging directory of the attempt's checkpoints, into which the node writes a file
            whose existence rank 0 checks; None skips this check.
        code: a digest of the code that this node runs.
    """
    facts: dict[str, Any] = {
        "versions": versions(PACKAGES) | toolchain() | {"code": code},
        "data": {},
        "error": None,
    }
    for path in inputs(config):
        try:
            facts["data"][path] = fingerprint(path)
        except OSError as error:
            facts["data"][path] = f"not readable ({error.strerror})"
    if home is not None:
        try:
            write_whole(home / f"preflight-{node_name()}", [b"here\n"], durable=False)
        except OSError as error:
            facts["error"] = f"{error.strerror}: {error.filename}"
    return facts


def differences(nodes: dict[str, dict[str, Any]]) -> list[Problem]:
    """Return a problem for each version or input file that differs from that of most nodes, or
    cannot be read. `nodes` are the facts of all nodes by name.
    """
    problems = []
    for kind in ("versions", "data"):
        for key in dict.fromkeys(key for facts in nodes.values() for key in facts[kind]):
            values = {node: facts[kind].get(key, "absent") for node, facts in nodes.items()}
            unreadable = [node for node in nodes if values[node].startswith("not readable")]
            if unreadable:
                sentence = f"{', '.join(unreadable)}: {key} is {values[unreadable[0]]}"
                problems.append(Problem(sentence, tuple(unreadable)))
                continue

            expected = Counter(values.values()).most_common(1)[0][0]
            different = [node for node in nodes if values[node] != expected]
            if different:
                like_most = next(node for node in nodes if values[node] == expected)
                sentence = (
                    f"{', '.join(different)}: {key} is {values[different[0]]}, but {expected} on"
                    f" {like_most}; make them the same on all nodes"
                )
                problems.append(Problem(sentence, tuple(different)))
    return problems


def directory_problems(
    nodes: dict[str, dict[str, Any]], home: Path, checkpoint_bytes: int, keep: int
) -> list[Problem]:
    """Return a problem for each node on which the checkpoint directory is not shared or not
    writable, or if it is full.

    Args:
        nodes: the facts of all nodes by name.
        home: the staging directory of the attempt, in the checkpoint directory.
        checkpoint_bytes: the size of a checkpoint. There must be space for two, or for one if
            `keep` checkpoints exist, since the next save then deletes one.
        keep: `checkpoint.keep`.
    """
    root = home.parent
    absent = [node for node in nodes if not (home / f"preflight-{node}").is_file()]
    # If no other node shares the directory, it is on a local disk, which is a mistake in the
    # settings.
    is_local = 1 < len(absent) == len(nodes) - 1
    problems = []
    for node in absent:
        reason = nodes[node]["error"] or f"rank 0's node does not see what {node} has written"
        sentence = (
            f"{node}: checkpoint.directory {root} is not shared or not writable ({reason}); set it"
            " to a directory on a shared file system"
        )
        problems.append(Problem(sentence, (node,), is_local))

    has_all = len(list_checkpoints(root)) >= keep
    free = shutil.disk_usage(root).free
    if free < checkpoint_bytes or (free < 2 * checkpoint_bytes and not has_all):
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
    all_too_small = all(gpu["total"] < needed for of_node in gpus.values() for gpu in of_node)
    for node, of_node in gpus.items():
        if len(of_node) < expected:
            sentence = (
                f"{node}: torch finds {len(of_node)} of the {expected} GPUs that the job has there"
            )
            problems.append(Problem(sentence, (node,)))
        for index, gpu in enumerate(of_node):
            if gpu["total"] < needed:
                sentence = (
                    f"{node}: GPU {index} ({gpu['name']}) has {byte_size(gpu['total'])}, and the"
                    f" run needs about {byte_size(needed)}; `python -m pretrain.estimate` shows"
                    " what uses the memory"
                )
                problems.append(Problem(sentence, (node,), all_too_small))
    return problems
