"""Communication between the processes of an evaluation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

from megatron_tape.errors import ConfigError, UserError
from megatron_tape.evaluation.task import Unit
from megatron_tape.parallel.launcher import check_master_address, rank_and_size

T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """The rank of this process, and the number of processes of an evaluation. One process needs no
    process group.
    """

    rank: int = 0
    count: int = 1

    @classmethod
    def join(cls) -> Ranks:
        """Connect the processes that torchrun or Slurm has started; return the `Ranks` of this
        process.
        """
        ranks = cls(*rank_and_size())
        if ranks.count > 1:
            with ranks.rank_0_reports():
                check_master_address()
                import torch.distributed as dist

                # Ranks wait for each other at the end of a task, which may take hours.
                dist.init_process_group("gloo", timeout=timedelta(days=7))
        return ranks

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks on rank 0, and an empty list on the others. Includes a
        barrier.
        """
        if self.count == 1:
            return [value]
        import torch.distributed as dist

        values = []
        if self.rank == 0:
            values = [None] * self.count
        with _others_alive():
            # torch accepts a list only on the destination rank.
            dist.gather_object(value, values or None, dst=0)
            dist.barrier()
        return values

    def run_on_rank_0(self, work: Callable[[], T]) -> T:
        """Call `work` on rank 0, and return its result on every rank. If it raises an error, every
        rank raises one.
        """
        value = None
        failure = None  # the error itself, which only rank 0 has
        failed = False  # whether rank 0 has raised an error, as it tells the other ranks
        if self.rank == 0:
            try:
                value = work()
            except Exception as error:  # raised below, after telling the other ranks
                failure = error
        if self.count > 1:
            import torch.distributed as dist

            # Errors cannot always be pickled, so the others learn only that there was one.
            messages = [(value, failure is not None)]
            with _others_alive():
                dist.broadcast_object_list(messages, src=0)
            value, failed = messages[0]
        if failure is not None:
            raise failure
        if failed:  # only other ranks come here, since rank 0 has raised its error above
            raise ConfigError("the evaluation", "failed on rank 0", "see the message of rank 0")
        return value

    @contextmanager
    def rank_0_reports(self) -> Iterator[None]:
        """Turn a UserError into a ValueError on all ranks but 0, so that only rank 0 shows it to
        the user.
        """
        try:
            yield
        except UserError as error:
            if self.rank == 0:
                raise
            raise ValueError(str(error)) from None

    def leave(self) -> None:
        """Disconnect this process from the others."""
        if self.count > 1:
            import torch.distributed as dist

            dist.destroy_process_group()

    def assign(self, units: list[Unit]) -> list[list[Unit]]:
        """Return the units of each rank. Units are assigned by falling cost, each to the rank with
        the least work so far."""
        # The cheap units, which are assigned last, even out the loads.
        loads = [0.0] * self.count
        rank_of = {}
        for unit in sorted(units, key=lambda unit: -unit.cost):
            least_loaded = loads.index(min(loads))
            loads[least_loaded] += unit.cost
            rank_of[unit.key] = least_loaded
        # A rank evaluates its units in their original order.
        return [[unit for unit in units if rank_of[unit.key] == rank] for rank in range(self.count)]


@contextmanager
def _others_alive() -> Iterator[None]:
    """Raise ValueError if a collective call fails because another process has ended."""
    try:
        yield
    except RuntimeError as error:
        raise ValueError(
            "another process of this evaluation has ended; see the messages of that process"
        ) from error
