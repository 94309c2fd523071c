"""What torchrun, or a Slurm script, says in the environment about the processes of a program."""

import os

from megatron_tape.errors import UserError, refuse

FIX = "start the program with torchrun or a script in slurm/, or unset these variables to run a single process"


def check_launched() -> None:
    """Raise UserError for variables of a launcher that do not fit together.

    Those of an earlier one may be left in a shell. A process would take them for its own, and wait for others or take
    itself for one of them.
    """
    size, rank, local_rank = _number("WORLD_SIZE", 1), _number("RANK", 0), _number("LOCAL_RANK", 0)
    if (size is not None and size > 1) or _finds_rank_0():
        given, value = ("RANK", rank) if size is None else ("WORLD_SIZE", size)
        for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            if not os.environ.get(name):
                raise UserError((given, name), f"is {value}, but {name} is not set", FIX)
        _number("MASTER_PORT", 0)
    for name, value in (("RANK", rank), ("LOCAL_RANK", local_rank)):
        if value and size is None:
            raise UserError((name, "WORLD_SIZE"), f"is {value}, but WORLD_SIZE is not set", FIX)
        if value and value >= size:
            raise UserError((name, "WORLD_SIZE"), f"is {value}, but WORLD_SIZE is {size}", FIX)


def refuse_launcher(program: str, reason: str) -> None:
    """Raise UserError if a launcher has started a program that must be started alone, or its variables do not fit."""
    fix = "run it without torchrun or srun, and unset RANK and MASTER_ADDR if an earlier launcher has left them"
    refuse(_finds_rank_0(), program, reason, fix)
    check_launched()


def _finds_rank_0() -> bool:
    """Return whether there is what only a launcher sets: DeepSpeed leaves RANK behind, but not where rank 0 is."""
    return {"RANK", "MASTER_ADDR"} <= os.environ.keys()


def _number(name: str, least: int) -> int | None:
    text = os.environ.get(name)
    if text is None:
        return None
    if not text.isdecimal() or int(text) < least:
        raise UserError(name, f"is {text!r}, not a whole number of at least {least}", FIX)
    return int(text)
