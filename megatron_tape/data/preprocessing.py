"""Tokenize documents in parallel. The result does not depend on the number of processes.

The parent process splits the input into chunks of raw bytes and writes the dataset; worker
processes parse and tokenize. A bounded number of chunks is in flight and results are consumed in
order, so memory does not grow with the corpus.
"""

import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
from collections import deque
from collections.abc import Generator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_tape.data.documents import Problems, parse_chunk
from megatron_tape.data.indexed_dataset import raise_file_limit, token_dtype
from megatron_tape.data.raw_chunks import DOCUMENT_BYTES, Chunk, UnreadableFile, read_chunks
from megatron_tape.data.tokenizer import Tokenizer, tokenizer_record

CHUNKS_IN_FLIGHT = 3
"""Maximum number of chunks per worker that are queued, being encoded, or finished."""


@dataclass(frozen=True)
class Encoding:
    """How to tokenize texts. `append_eod` ends each document with the end-of-document token."""

    tokenizer: Tokenizer
    text_key: str
    append_eod: bool
    document_bytes: int = DOCUMENT_BYTES
    """Maximum size of a document in bytes, as counted by `read_chunks`."""

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the stored tokens."""
        return token_dtype(self.tokenizer.vocab_size)

    @property
    def origin(self) -> dict[str, Any]:
        """The settings that the dataset's origin records."""
        return {"tokenizer": tokenizer_record(self.tokenizer), "append_eod": self.append_eod}


@dataclass(frozen=True)
class EncodedChunk:
    """The result of tokenizing a chunk.

    `tokens` are the token ids of its good documents, as bytes of the dataset's dtype, and `lengths`
    (int32) their lengths in tokens; `problems` are those of its bad documents. `text_bytes` is the
    number of UTF-8 bytes of text, `bytes_read` the number of input bytes read so far, of all files,
    and `path` the input file.
    """

    path: str
    tokens: bytes
    lengths: np.ndarray
    text_bytes: int
    bytes_read: int
    problems: Problems


def encode_chunk(chunk: Chunk, encoding: Encoding) -> EncodedChunk:
    """Parse and tokenize the documents of a chunk."""
    texts, numbers, problems = parse_chunk(chunk, encoding.text_key)
    end = np.empty(0, np.int32)  # the ids at the end of every document
    if encoding.append_eod:
        end = np.array([encoding.tokenizer.eod], np.int32)
    parts = [np.empty(0, np.int32)]  # `np.concatenate` needs at least one array
    lengths = []
    for ids, number in zip(encoding.tokenizer.encode_batch(texts), numbers):
        # Some tokenizers drop characters, such as spaces, so that nothing is left of a text.
        if len(ids):
            parts += (ids, end)
            lengths.append(len(ids) + len(end))
        else:
            problems.add("text without a token", chunk.place(number))
    return EncodedChunk(
        path=chunk.path,
        tokens=np.concatenate(parts).astype(encoding.dtype).tobytes(),
        lengths=np.array(lengths, dtype=np.int32),
        text_bytes=sum(len(text.encode("utf-8")) for text in texts),
        bytes_read=chunk.bytes_read,
        problems=problems,
    )


def encode_files(
    paths: list[str], encoding: Encoding, workers: int, chunk_bytes: int
) -> Generator[EncodedChunk, None, None]:
    """Tokenize the documents of files in `workers` processes, and yield the chunks in order.

    If a file cannot be read to its end, a chunk without documents reports the problem. Raises
    ChildProcessError if a worker dies, and hub.NetworkError if a streamed file cannot be read.
    """
    raise_file_limit()  # each worker takes descriptors of this process
    executor = ProcessPoolExecutor(
        workers,
        multiprocessing.get_context("fork"),  # shares the tokenizer's memory
        initializer=_start_worker,
        initargs=(encoding,),
    )
    try:
        # The first task makes the executor fork all workers, before this process starts a thread.
        executor.submit(os.getpid).result()
        pending: deque[Future | UnreadableFile] = deque()
        for chunk in read_chunks(paths, encoding.text_key, chunk_bytes, encoding.document_bytes):
            # One less than the maximum, since the next chunk is added before the oldest is awaited.
            max_pending = CHUNKS_IN_FLIGHT * workers - 1
            if isinstance(chunk, UnreadableFile):
                pending.append(chunk)
            else:
                pending.append(executor.submit(_encode_in_worker, chunk))
                # Report a document that is too large at once: its end may be far away, or never
                # come, as in a pipe.
                if len(chunk.documents[-1] or b"") > encoding.document_bytes:
                    max_pending = 0
            while len(pending) > max_pending:
                yield _result(pending.popleft())
        while pending:
            yield _result(pending.popleft())
    except BrokenProcessPool:
        raise ChildProcessError(
            "a worker process died; the kernel may have killed it for lack of memory; use fewer"
            " --workers, or lower --max-document-bytes"
        ) from None
    finally:
        executor.shutdown(cancel_futures=True)


def _result(pending: Future | UnreadableFile) -> EncodedChunk:
    """Wait for a chunk, or turn a file that cannot be read into a chunk without documents."""
    if isinstance(pending, Future):
        return pending.result()
    problems = Problems()
    problems.add(f"the file {pending.problem}, so the rest was not read", pending.subject)
    lengths = np.empty(0, np.int32)
    return EncodedChunk(
        pending.subject, b"", lengths, text_bytes=0, bytes_read=0, problems=problems
    )


_encoding: Encoding
"""The encoding of this worker process. It is set once, since sending it with each chunk would copy
the tokenizer.
"""


def _start_worker(encoding: Encoding) -> None:
    """Prepare a worker process."""
    global _encoding
    _encoding = encoding
    # Ctrl-C is sent to every process of the terminal; only the parent handles it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # The parent's handlers, which the fork copied, would remove its unfinished files.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    # The tokenizers library must not start threads, since there is already one process per core.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    threading.Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
    """End this worker when its parent is killed; otherwise it would wait for work forever."""
    multiprocessing.connection.wait([multiprocessing.parent_process().sentinel])
    os._exit(1)


def _encode_in_worker(chunk: Chunk) -> EncodedChunk:
    return encode_chunk(chunk, _encoding)
