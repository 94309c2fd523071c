"""Collect facts about the nodes of a job, and report differences in versions, code, data, GPUs and directories."""

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
"""Approximate number of 64 KiB blocks that each node reads of its large inputs, at least three per file."""


@dataclass(frozen=True)
class Problem:
    """Why a job must not start, in one sentence.

    A `mistake` is in the configuration or the installation, so another start would fail the same way. Any other problem
    may pass, or is limited to `nodes`.
    """

    sentence: str
    nodes: tuple[str, ...] = ()
    mistake: bool = False


def inputs(config: RunConfig) -> list[str]:
    """Return the input files that every node reads."""
    files = [prefix + suffix for prefix in prefixes_of(stages_of(config)) for suffix in (".idx", ".bin")]
    if config.data.examples is not None:
        examples = config.data.examples
        files += [path for path in (examples.path, examples.validation) if path is not None]
    # The checkpoint of a continued run is shared by all nodes, and has digests.
    tokenizer = None if saved_tokenizer_directory(config) else config.data.tokenizer
    if tokenizer is not None and Path(tokenizer).is_dir():
        files += sorted(str(path) for path in Path(tokenizer).iterdir() if path.is_file())
    elif tokenizer is not None:
        files.append(tokenizer)
    return files


def node_facts(config: RunConfig, home: Path | None, code: str) -> dict[str, Any]:
    """Describe this node for comparison with the others.

    `home` is where the attempt writes checkpoints; `code` is the digest of the code that runs here.
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
    """Read rank 0's token, and write a file for rank 0 to find."""
    name, facts = f"preflight-{os.uname().nodename}-{os.getpid()}", {"token": None, "error": None, "wrote": None}
    try:
        facts["token"] = (home / "preflight").read_text(encoding="utf-8")
        write_whole(home / name, [b"here\n"], durable=False)
        facts["wrote"] = name
    except OSError as error:
        facts["error"] = f"{error.strerror}: {error.filename}"
    return facts


def differences(nodes: dict[str, dict[str, Any]]) -> list[Problem]:
    """Return a problem per difference from the majority in versions, code or data. `nodes` maps names to facts."""
    found = []
    for kind in ("versions", "data"):
        for key in {key: None for facts in nodes.values() for key in facts[kind]}:
            values = {node: facts[kind].get(key, "absent") for node, facts in nodes.items()}
            counts = Counter(values.values())
            tied = [value for value, count in counts.items() if count == max(counts.values())]
            # Without a majority it is unknown which side is wrong, so each restart excludes another one.
            usual = tied[restart_count() % len(tied)]
            unreadable = [node for node, value in values.items() if value.startswith("not readable")]
            if kind == "data" and unreadable:
                found.append(Problem(f"{', '.join(unreadable)}: {key} is {values[unreadable[0]]}", tuple(unreadable)))
                continue
            odd = [node for node, value in values.items() if value != usual]
            if odd:
                same = next(node for node, value in values.items() if value == usual)
                fix = "copy the same files there" if kind == "data" else "install the same there"
                sentence = f"{', '.join(odd)}: {key} is {values[odd[0]]}, but {usual} on {same}; {fix}"
                found.append(Problem(sentence, tuple(odd)))
    return found


def directory_problems(
    nodes: dict[str, dict[str, Any]],
    home: Path,
    token: str,
    checkpoint_bytes: int,
    keep: int,
) -> list[Problem]:
    """Return a problem for each node where the checkpoint directory is not shared or writable, or if it lacks space.

    If there are several other nodes and none of them sees rank 0's directory, it is not a shared one, which is a
    mistake. It needs space for two checkpoints, or for one if `keep` exist, since the next save then removes one.
    """
    root, found = home.parent, []
    blind = [node for node, facts in nodes.items() if facts["directory"]["token"] != token]
    local = len(blind) > 1 and len(blind) == len(nodes) - 1
    for node, facts in nodes.items():
        directory = facts["directory"]
        if directory["error"] is not None:
            sentence = f"{node}: checkpoint.directory {root} cannot be read and written ({directory['error']})"
            found.append(Problem(sentence, (node,), local))
        elif directory["token"] != token or not (home / directory["wrote"]).is_file():
            sentence = f"{node}: checkpoint.directory {root} is another directory there; choose a shared one"
            found.append(Problem(sentence, (node,), local))
    needed = (1 if len(list_checkpoints(root)) >= keep else 2) * checkpoint_bytes
    free = shutil.disk_usage(root).free
    if free < needed:
        found.append(
            Problem(
                f"checkpoint.directory {root} has {byte_size(free)} free, and two checkpoints need "
                f"{byte_size(2 * checkpoint_bytes)}; make room or choose another"
            )
        )
    return found


def gpu_problems(gpus: dict[str, list[dict[str, Any]]], expected: int, needed: int) -> list[Problem]:
    """Return a problem for each missing GPU and each GPU with less than `needed` bytes of memory.

    Too little memory is a mistake if every GPU has too little. `gpus` maps each node to the `name` and the `total`
    bytes of its ranks' devices.
    """
    found = []
    too_small = all(device["total"] < needed for devices in gpus.values() for device in devices)
    for node, devices in gpus.items():
        if len(devices) < expected:
            sentence = f"{node}: torch sees {len(devices)} of the {expected} GPUs that the job was given there"
            found.append(Problem(sentence, (node,)))
        for index, device in enumerate(devices):
            if device["total"] < needed:
                sentence = (
                    f"{node}: GPU {index} ({device['name']}) has {byte_size(device['total'])}, and the run needs "
                    f"about {byte_size(needed)}; `python -m pretrain.estimate` shows what uses it"
                )
                found.append(Problem(sentence, (node,), too_small))
    return found
