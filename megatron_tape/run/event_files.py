"""Files that records are appended to, and TensorBoard's event files built on them.

A run's files survive a full disk, because what cannot be written waits in memory. They also survive an earlier attempt
that is still alive elsewhere, because every file it may hold open is replaced (`rewrite`): whatever it still writes
goes to unlinked files.

TensorBoard reads the event files of a folder in the order of their names. TensorBoard's own code frames the records and
reads them back. Its `EventFileWriter` is not used: a full disk ends its thread.
"""

import io
import logging
import os
import re
import socket
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import chain, islice
from pathlib import Path

from google.protobuf.message import DecodeError
from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.plugins.image import metadata as images
from tensorboard.summary.writer.record_writer import RecordWriter

from megatron_tape.errors import FileError
from megatron_tape.io.files import SUFFIX, open_to_append, write_whole

logger = logging.getLogger(__name__)

TEXT_SUFFIX = "/text_summary"


class RecordFile:
    """Appends records; what cannot be written waits in memory and is written, in order, before later ones.

    Once it is closed, records are dropped.
    """

    def __init__(self, path: Path):
        self._path = path
        self._file = open_to_append(path, buffering=0)
        self._waiting = b""
        self._failing = False

    def append(self, record: bytes) -> None:
        """Write what waits and this record, as far as that is possible; other processes see it at once."""
        if self._file.closed:
            return
        self._waiting += record
        try:
            while self._waiting:
                self._waiting = self._waiting[os.write(self._file.fileno(), self._waiting) :]
        except OSError as error:
            if not self._failing:
                logger.warning("metrics cannot be written (%s: %s); kept in memory until they can", self._path, error)
            self._failing = True
            return
        if self._failing:
            logger.info("%s can be written again and holds what was kept for it", self._path)
        self._failing = False

    def sync(self) -> None:
        """Flush what was written to disk, if the disk allows it."""
        with suppress(OSError):
            if not self._file.closed:
                os.fsync(self._file.fileno())

    def close(self) -> None:
        """Try once more to write what waits, and log a warning about what is lost."""
        if self._file.closed:
            return
        self.append(b"")
        if self._waiting:
            logger.warning("%s is closed without its last %d bytes", self._path, len(self._waiting))
        try:
            self._file.close()
        except OSError as error:
            logger.warning("%s may lack its last records (%s)", self._path, error)


def rewrite(path: Path, chunks: Iterable[bytes], staging: Path | None = None) -> None:
    """Replace `path` by a new file of `chunks`, which may be read from the old one; the result survives a power cut.

    The new file is first written in `staging`, if that is given and on the same file system.

    Raises:
        OSError: naming `path`, if there is no room for the copy; the old file is left unchanged.
    """
    try:
        if staging is not None and staging.stat().st_dev != path.parent.stat().st_dev:
            staging = None
        for leftover in path.parent.glob(f".*{SUFFIX}"):  # from a process that was killed during this function
            leftover.unlink(missing_ok=True)
        write_whole(path, chunks, staging=staging)
    except OSError as error:
        reason = f"{error.strerror}, while copying a file of an earlier attempt"
        raise OSError(error.errno, reason, str(path)) from error


class EventFile(RecordFile):
    """A new event file, the last by name in its folder."""

    def __init__(self, directory: Path, first_step: int):
        """Open the file; a TensorBoard that is already running drops what it has read from `first_step` on."""
        if os.path.lexists(directory) and not directory.is_dir():
            raise FileError(str(directory), "is not a directory", "remove it, or set logging.tensorboard to false")
        directory.mkdir(parents=True, exist_ok=True)
        # The clocks of two machines may differ, and TensorBoard must not read this file before an earlier attempt's.
        names = [path.name for path in event_files(directory)]
        taken = [int(number) for name in names for number in re.findall(r"tfevents\.([0-9]{1,10})\.", name)]
        seconds = max([int(time.time()), *(number + 1 for number in taken)])
        name = f"events.out.tfevents.{seconds:010d}.{socket.gethostname()}.{os.getpid()}.0"
        super().__init__(directory / name)
        self._add(Event(file_version="brain.Event:2"))
        self._add(Event(step=first_step, session_log=SessionLog(status=SessionLog.START)))

    def add_scalars(self, values: Mapping[str, float], step: int) -> None:
        """Add one value per tag, all in one record."""
        scalars = [Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        self._add(Event(step=step, summary=Summary(value=scalars)))

    def add_text(self, tag: str, text: str, step: int) -> None:
        metadata = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
        self._add_strings(tag + TEXT_SUFFIX, [text.encode()], metadata, step)

    def add_picture(self, tag: str, png: bytes, size: tuple[int, int], step: int) -> None:
        """Add a PNG of `size` (width, height) under `tag`."""
        width, height = (str(pixels).encode() for pixels in size)
        self._add_strings(tag, [width, height, png], images.create_summary_metadata("", ""), step)

    def _add_strings(self, tag: str, strings: list[bytes], metadata: SummaryMetadata, step: int) -> None:
        shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=len(strings))])
        tensor = TensorProto(dtype="DT_STRING", string_val=strings, tensor_shape=shape)
        value = Summary.Value(tag=tag, metadata=metadata, tensor=tensor)
        self._add(Event(step=step, summary=Summary(value=[value])))

    def _add(self, event: Event) -> None:
        event.wall_time = time.time()
        self.append(_framed(event.SerializeToString()))


def event_files(directory: Path) -> list[Path]:
    """Return the event files of a folder, which need not exist, in the order TensorBoard reads them."""
    return sorted(path for path in directory.glob("events.out.tfevents.*") if path.is_file())


def keep_events(
    directory: Path, last_step: int, restated_texts: Collection[str] = (), staging: Path | None = None
) -> None:
    """Replace every event file by one without events past `last_step`; remove files that would hold no events.

    Texts of `last_step` under a tag in `restated_texts` are dropped too, because the next attempt writes them again.
    For `staging` see `rewrite`.
    """
    tags = {tag + TEXT_SUFFIX for tag in restated_texts}

    def stays(event: Event) -> bool:
        if event.HasField("file_version"):
            return True
        # A session start tells a running TensorBoard what to drop; in the rewritten file those events are gone already.
        if event.step > last_step or event.HasField("session_log"):
            return False
        return event.step < last_step or tags.isdisjoint(value.tag for value in event.summary.value)

    for path in event_files(directory):
        kept = (_framed(event.SerializeToString()) for event in _events(path) if stays(event))
        first = list(islice(kept, 2))
        if len(first) < 2:  # only the file version
            path.unlink()
        else:
            rewrite(path, chain(first, kept), staging)


def _events(path: Path) -> Iterator[Event]:
    """Yield the events of a file up to the first one that is truncated or damaged."""
    with suppress(DecodeError, MemoryError, OverflowError):  # the latter where it names a length that it does not have
        yield from map(Event.FromString, RawEventFileLoader(str(path)).Load())


def _framed(data: bytes) -> bytes:
    record = io.BytesIO()
    RecordWriter(record).write(data)
    return record.getvalue()
