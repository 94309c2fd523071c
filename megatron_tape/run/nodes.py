"""Compare the nodes of a job before it trains: versions, code, input files, GPUs and directories.

Each node collects facts about itself with `node_facts`. Rank 0 finds problems in the facts of all
nodes, which are given to the other functions as a dictionary by the names of the nodes.
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
    """The problem and how to solve it."""
    nodes: tuple[str, ...] = ()
    """The nodes that have the problem, which the next attempt should exclude. Empty if it concerns
    the whole job.
    """
    mistake: bool = False
    """Whether the settings or the installation are wrong, so that another attempt would fail too.
    """


def input_files(config: RunConfig) -> list[str]:
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
        path = Path(tokenizer)
        # A tokenizer is a file, such as tokenizer.model, or a directory of a Hugging Face model.
        if path.is_dir():
            files += sorted(str(file) for file in path.iterdir() if file.is_file())
        else:
            files.append(tokenizer)
    return files


def node_facts(config: RunConfig, staging: Path | None, code_digest: str) -> dict[str, Any]:
    """Return facts about this node:

    - `versions`: the versions of packages and tools by name, and `code_digest` under `code`;
    - `data`: the fingerprint of each input file, or why it cannot be read, by path;
    - `error`: why the node cannot write to the checkpoint directory, or None.

    Args:
        config: the settings of the run.
        staging: the staging directory of the attempt's checkpoints. The node writes a file into it,
            whose existence rank 0 checks (`directory_problems`). None skips this check.
        code_digest: a digest of the code that this node runs.
    """
    facts: dict[str, Any] = {
        "versions": versions(PACKAGES) | toolchain() | {"code": code_digest},
        "data": {},
        "error": None,
    }
    for path in input_files(config):
        try:
            facts["data"][path] = fingerprint(path)
        except OSError as error:
            facts["data"][path] = f"not readable ({error.strerror})"
    if staging is not None:
        try:
            write_whole(staging / f"preflight-{node_name()}", [b"here\n"], durable=False)
        except OSError as error:
            facts["error"] = f"{error.strerror}: {error.filename}"
    return facts


def differences(facts_by_node: dict[str, dict[str, Any]]) -> list[Problem]:
    """Return a problem for each version and each input file that some nodes cannot read, or that
    is not the same on all nodes.
    """
    problems = []
    for kind in ("versions", "data"):
        # Take the keys of all nodes: a node may lack a key of others, such as that of a driver.
        for key in dict.fromkeys(key for facts in facts_by_node.values() for key in facts[kind]):
            values = {node: facts[kind].get(key, "absent") for node, facts in facts_by_node.items()}
            problems += _difference(key, values)
    return problems


def _difference(key: str, values: dict[str, str]) -> list[Problem]:
    """Return a list with one problem if a file cannot be read or the `values` by node differ. The
    list is empty otherwise. `key` is the name of a package or a tool, or the path of the file.

    The value of most nodes is taken to be right, so the problem names the other nodes.
    """
    unreadable = tuple(node for node in values if values[node].startswith("not readable"))
    if unreadable:
        return [Problem(f"{', '.join(unreadable)}: {key} is {values[unreadable[0]]}", unreadable)]

    expected = Counter(values.values()).most_common(1)[0][0]
    different = tuple(node for node in values if values[node] != expected)
    if not different:
        return []
    like_most = next(node for node in values if values[node] == expected)
    sentence = (
        f"{', '.join(different)}: {key} is {values[different[0]]}, but {expected} on"
        f" {like_most}; make them the same on all nodes"
    )
    return [Problem(sentence, different)]


def directory_problems(
    facts_by_node: dict[str, dict[str, Any]], staging: Path, checkpoint_bytes: int, keep: int
) -> list[Problem]:
    """Return a problem for each node that does not share the checkpoint directory or cannot write
    to it. Return one more if the directory has too little free space.

    Args:
        facts_by_node: the facts of all nodes.
        staging: the staging directory of the attempt, in the checkpoint directory.
        checkpoint_bytes: the size of a checkpoint.
        keep: the number of checkpoints that the run keeps (`checkpoint.keep`).
    """
    root = staging.parent
    absent = [node for node in facts_by_node if not (staging / f"preflight-{node}").is_file()]
    # If no node but that of rank 0 shares the directory, it is on a local disk, which is a mistake
    # in the settings. If there is only one other node, that node may simply be bad.
    others = len(facts_by_node) - 1
    is_local = others > 1 and len(absent) == others
    problems = []
    for node in absent:
        reason = (
            facts_by_node[node]["error"] or f"rank 0's node does not see what {node} has written"
        )
        sentence = (
            f"{node}: checkpoint.directory {root} is not shared or not writable ({reason}); set it"
            " to a directory on a shared file system"
        )
        problems.append(Problem(sentence, (node,), mistake=is_local))

    # A checkpoint is written before the oldest one is deleted, so each save needs space for one.
    # While there are fewer than `keep` checkpoints, the next save deletes none, and the save after
    # it needs space for another one.
    deletes_next = len(list_checkpoints(root)) >= keep
    free = shutil.disk_usage(root).free
    if free < checkpoint_bytes or (free < 2 * checkpoint_bytes and not deletes_next):
        sentence = (
            f"checkpoint.directory {root} has {byte_size(free)} of free space, but two checkpoints"
            f" need {byte_size(2 * checkpoint_bytes)}; free some space, or set another directory"
        )
        problems.append(Problem(sentence))
    return problems


def gpu_problems(
    gpus: dict[str, list[dict[str, Any]]], expected_gpus: int, needed_bytes: int
) -> list[Problem]:
    """Return a problem for each node with too few GPUs, and for each GPU that is too small.

    Args:
        gpus: the GPUs of each node by its name, each with its `name` and `total` bytes of memory.
        expected_gpus: number of GPUs that the job has on each node.
        needed_bytes: estimated number of bytes that a rank needs on its GPU.
    """
    problems = []
    # If every GPU is too small, an attempt on other nodes would fail, too. The settings are wrong.
    all_too_small = all(
        gpu["total"] < needed_bytes for node_gpus in gpus.values() for gpu in node_gpus
    )
    for node, node_gpus in gpus.items():
        if len(node_gpus) < expected_gpus:
            sentence = (
                f"{node}: torch finds {len(node_gpus)} of the {expected_gpus} GPUs that the job has"
                " there"
            )
            problems.append(Problem(sentence, (node,)))
        for index, gpu in enumerate(node_gpus):
            if gpu["total"] < needed_bytes:
                sentence = (
                    f"{node}: GPU {index} ({gpu['name']}) has {byte_size(gpu['total'])}, and the"
                    f" run needs about {byte_size(needed_bytes)}; `python -m pretrain.estimate`"
                    " shows what uses the memory"
                )
                problems.append(Problem(sentence, (node,), mistake=all_too_small))
    return problems
