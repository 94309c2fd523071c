"""The watchdog of a training process: it handles signals, detects hangs and newer attempts, and
writes the heartbeat.

It runs in a separate thread, because the main thread may be blocked in a collective with a lost
rank, or by a file system that does not respond.
"""

import contextlib
import faulthandler
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Iterator
from typing import Any

from megatron_tape.errors import StaleAttempt
from megatron_tape.io.files import write_whole
from megatron_tape.parallel.launcher import local_rank
from megatron_tape.run.attempts import HUNG, STALE, TRAINING, Attempt, stop_reason

POLL_SECONDS = 1.0
"""Seconds between two wake-ups of the watchdog thread."""
OWNER_SECONDS = 5.0
OWNER_SECONDS_OF_OTHERS = 60.0
"""Seconds between two checks whether the attempt owns the run, for the first rank of a node and for
its other ranks.

Frequent checks by thousands of ranks would overload the metadata server. When the first rank of a
node ends, the launcher ends the others."""
GRACE_SECONDS = 5.0
"""Seconds that a hung rank waits before it exits, so that the other ranks of its node can write
their stacks.
"""
STARTUP_SECONDS = 3600.0
"""Minimum timeout of start-up: imports, building the data index, verifying the checkpoint's
checksums.
"""
EXIT_STALE = 76
"""Exit status if a newer attempt owns the run, or the run's directory has vanished."""
EXIT_HUNG = 77
"""Exit status after `train.hang_timeout` seconds without progress."""
STOP_SIGNALS = (signal.SIGUSR1, signal.SIGTERM)
"""Signals that ask the run to save a checkpoint and stop. Schedulers send them before they kill."""
PROFILE_SIGNAL = signal.SIGUSR2
CTRL_C = "Ctrl-C"
"""The reason to stop after SIGINT."""
CTRL_C_MESSAGE = (
    b"\nCtrl-C: saving a checkpoint after this step; press Ctrl-C again to end at once\n"
)


def longest_wait(hang_timeout: float | None) -> float | None:
    """Return the maximum number of seconds that a rank may wait for others, for `hang_timeout` in
    seconds. None means no limit.
    """
    if hang_timeout is None:
        return None
    return max(hang_timeout, STARTUP_SECONDS)


class Watch:
    """The watchdog of this process. Create it first, so that no signal is lost, and `attach` it to
    the attempt later.

    Signals:

    - SIGUSR1, SIGTERM and, on rank 0, `Attempt.request_stop` set `stop`, which the training loop
      reads between steps.
    - SIGINT (Ctrl-C) sets `stop` to CTRL_C during training. Before training, and the second time,
      it raises KeyboardInterrupt.
    - SIGUSR2 requests a profile of the next steps.

    After `hang_timeout` seconds without a call of `progress` (None disables the timeout), the
    process writes the Python stacks of its threads to `stacks-RANK.txt` in the attempt's directory,
    its last collectives to `collectives-RANK.json`, and exits. Before `begin_training`, the timeout
    is at least an hour.
    """

    def __init__(self, hang_timeout: float | None):
        self.stop: str | None = None
        """Why the run should save a checkpoint and stop, such as the name of a signal; None if it
        should continue.
        """
        self.done = False
        """Whether all ranks have finished writing. The run may then lose its directory."""
        self.attempt: Attempt | None = None
        """The attempt that is watched, or None before `attach`."""
        self._rank = 0
        self._hang_timeout = longest_wait(hang_timeout)
        """Seconds without progress after which this process exits; None disables the timeout. It is
        at least an hour before training.
        """
        self._training_hang_timeout = hang_timeout
        """`_hang_timeout` from `begin_training` on."""
        self._phase = "starting"
        self._step: int | None = None
        self._since = time.monotonic()
        """When this process last made progress, by the monotonic clock."""
        self._begun: dict[str, float] = {}
        """The entries `from_step` and `began` of the heartbeat; empty before training."""
        self._phases: dict[str, float] | None = None
        """Seconds spent in each phase since training began; None before training."""
        # Set by `close`, which ends the watchdog thread.
        self._ended = threading.Event()
        self._profile_requested = False

        handlers = dict.fromkeys(STOP_SIGNALS, self._on_signal)
        handlers[PROFILE_SIGNAL] = self._on_profile_signal
        # A process that a shell script has started in the background ignores Ctrl-C from the start,
        # and must keep doing so.
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            handlers[signal.SIGINT] = self._on_interrupt
        self._previous_handlers = {
            number: signal.signal(number, handler) for number, handler in handlers.items()
        }

    def _on_signal(self, number: int, frame: object) -> None:
        # Keep the first reason: after SIGUSR1, the scheduler sends SIGTERM too.
        self.stop = self.stop or signal.Signals(number).name

    def _on_interrupt(self, number: int, frame: object) -> None:
        # Before training there is nothing to save, and a second Ctrl-C means not to wait.
        if self._phases is None or self.stop == CTRL_C:
            raise KeyboardInterrupt
        self.stop = CTRL_C
        if self._rank == 0:
            # The signal may have interrupted a print, which must not be called again within itself.
            # Descriptor 2 is stderr. The write fails if Ctrl-C has ended a `tee` of stderr.
            with contextlib.suppress(OSError):
                os.write(2, CTRL_C_MESSAGE)

    def _on_profile_signal(self, number: int, frame: object) -> None:
        self._profile_requested = True

    def take_profile_request(self) -> bool:
        """Return whether a profile was requested since the last call."""
        requested = self._profile_requested
        self._profile_requested = False
        return requested

    def attach(self, attempt: Attempt, rank: int) -> None:
        """Start the thread that watches the attempt and, on rank 0, writes its heartbeat."""
        self.attempt = attempt
        self._rank = rank
        threading.Thread(target=self._watch, name="watch", daemon=True).start()

    def progress(self, phase: str, step: int | None = None) -> None:
        """Report progress: the process begins `phase`, such as `saving`, in step `step` (None: the
        previous one).
        """
        now = time.monotonic()
        # The time since the last call belongs to the previous phase.
        if self._phases is not None:
            seconds = self._phases.get(self._phase, 0.0)
            self._phases[self._phase] = seconds + now - self._since
        self._phase = phase
        if step is not None:
            self._step = step
        self._since = now

        if self.attempt is not None and self._hang_timeout is not None:
            # The watchdog thread cannot run if a hung thread holds the GIL. This timer does not
            # need the GIL. It waits longer, since the watchdog thread writes more before it exits.
            faulthandler.dump_traceback_later(self._hang_timeout + 4 * GRACE_SECONDS, exit=True)

    def begin_training(self, step: int) -> None:
        """End start-up, and begin training: apply `hang_timeout`, and measure phases.

        `step` is the number of steps that earlier attempts have trained.
        """
        self.progress(TRAINING)
        self._begun = {"from_step": step, "began": time.time()}
        self._phases = {}
        self._hang_timeout = self._training_hang_timeout

    def each(self, phase: str, items: Iterable[Any]) -> Iterator[Any]:
        """Yield the items, and report progress in `phase` before each of them."""
        for item in items:
            self.progress(phase)
            yield item

    def close(self) -> None:
        """Stop watching, and restore the previous signal handlers."""
        self._ended.set()
        faulthandler.cancel_dump_traceback_later()
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)

    def record_end(
        self,
        outcome: str,
        message: str,
        error: BaseException | None = None,
        bad_nodes: Iterable[str] = (),
    ) -> None:
        """Record how this rank ended: its outcome, such as FAILED, a line about it, and the
        traceback of `error`. `bad_nodes` are the nodes that caused the failure.

        Do nothing before `attach` or if the rank has already recorded its end, and ignore errors of
        the file system.
        """
        if self.attempt is None:
            return

        detail = ""
        if error is not None:
            detail = "".join(traceback.format_exception(error))
        with contextlib.suppress(OSError):
            self.attempt.record_end(self._rank, outcome, message, detail, bad_nodes)
            # The last heartbeat may lack the last step and the last phase.
            if self._rank == 0:
                self._write_heartbeat()

    def _watch(self) -> None:
        """Run the watchdog thread: check the owner, write the heartbeat and detect a hang, until
        `close`.
        """
        owner_seconds = OWNER_SECONDS if local_rank() == 0 else OWNER_SECONDS_OF_OTHERS
        # Times of the last check of the owner and of the last heartbeat, by the monotonic clock.
        # With -infinity, the first ones are due at once.
        owner_checked = float("-inf")
        heartbeat_written = float("-inf")
        while not self._ended.wait(POLL_SECONDS):
            now = time.monotonic()
            # A full disk or a temporary error of the file system must not end the run.
            with contextlib.suppress(OSError):
                if now - owner_checked >= owner_seconds:
                    self._check_owner()
                    owner_checked = now

                # Only rank 0 reads requests to stop, since all ranks exchange `stop` after every
                # step.
                if self._rank == 0:
                    self._read_stop_request()
                    if now - heartbeat_written >= OWNER_SECONDS:
                        heartbeat_written = now
                        self._write_heartbeat()

            if self._hang_timeout is not None and now - self._since > self._hang_timeout:
                self._exit_as_hung()

    def _check_owner(self) -> None:
        """Exit if a newer attempt owns the run. Raises OSError if the file system fails."""
        try:
            self.attempt.check_owner()
        except StaleAttempt as error:
            # When all ranks are done, rank 0 removes the staging directory, and with it the
            # ownership. This is no reason to exit.
            if not self.done:
                self._exit(STALE, EXIT_STALE, str(error))

    def _read_stop_request(self) -> None:
        """Set `stop` if a process has called `Attempt.request_stop`, or the attempt's directory is
        lost.
        """
        reason = stop_reason(self.attempt.directory)
        if reason is None and not self.attempt.directory.is_dir():
            # Stop instead of exiting: the checkpoint directory may be elsewhere and still work.
            reason = f"the loss of {self.attempt.directory}"
        if reason is not None:
            self.stop = self.stop or reason

    def _write_heartbeat(self) -> None:
        """Write `heartbeat.json`. Raises OSError if the disk is full or fails."""
        facts: dict[str, Any] = {"phase": self._phase, "step": self._step, **self._begun}
        if self._phases is not None:
            # Iterate over a copy, since the main thread may add a phase meanwhile.
            phases = self._phases.copy()
            facts["phases"] = {phase: round(seconds, 3) for phase, seconds in phases.items()}
        # Records have Unix times. `_since` is a time of the monotonic clock, which timeouts need:
        # unlike the system's clock, it does not jump when the time is corrected.
        since = time.time() - (time.monotonic() - self._since)
        self.attempt.heartbeat(since=since, hang_timeout=self._hang_timeout, **facts)

    def _exit_as_hung(self) -> None:
        """Write this rank's stacks and last collectives to the attempt's directory, and exit with
        status EXIT_HUNG.
        """
        where = f"{self._phase} (step {self._step})"
        path = self.attempt.directory / f"stacks-{self._rank:05d}.txt"
        with contextlib.suppress(OSError), open(path, "w", encoding="utf-8") as file:
            file.write(
                f"rank {self._rank} on {os.uname().nodename}, pid {os.getpid()}, while {where}\n"
            )
            file.flush()  # faulthandler writes to the descriptor, past Python's buffer
            faulthandler.dump_traceback(file, all_threads=True)

        with contextlib.suppress(Exception):  # the rank must exit in any case
            self._dump_collectives()

        # When this rank exits, the launcher ends the others, which must have written their stacks
        # by then.
        time.sleep(GRACE_SECONDS)
        message = (
            f"no progress for {self._hang_timeout:g} s (train.hang_timeout) while {where}; the"
            f" Python stacks and last collectives of all ranks are in {self.attempt.directory}"
        )
        self._exit(HUNG, EXIT_HUNG, message)

    def _dump_collectives(self) -> None:
        """Write this rank's last collectives, from PyTorch's flight recorder, to the attempt's
        directory.

        NCCL and gloo have separate recorders. A build of torch with CUDA contains both, and without
        a GPU only gloo's has entries.
        """
        # Look the module up instead of importing it: a rank that hangs in an import must not import
        # more. It is None if torch is not imported.
        module = sys.modules.get("torch._C._distributed_c10d")

        # The functions are private, and another version of torch may lack one of them.
        for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json"):
            dump = getattr(module, name, None)
            if dump is None:
                continue

            trace = dump()
            if trace and json.loads(trace).get("entries"):
                path = self.attempt.directory / f"collectives-{self._rank:05d}.json"
                write_whole(path, [trace], durable=False)
                return

    def _exit(self, outcome: str, status: int, message: str) -> None:
        """Record how this rank ended, print the message, and exit at once with `status`."""
        with contextlib.suppress(OSError):
            self.attempt.record_end(self._rank, outcome, message)
        print(f"error (rank {self._rank}): {message}", file=sys.stderr, flush=True)
        # Other threads hang, so the process cannot end in the usual way, which waits for them.
        os._exit(status)
