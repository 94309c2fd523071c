"""Preprocessing in shards: which part of the inputs a shard holds, its name, and what it was made from.

Each shard, such as `P.shard-00003-of-00008`, is a dataset. Concatenated, the shards have the very bytes that a single
process would have written to P. Each records its origin, so that shards of different inputs or settings are not mixed.
"""

import glob
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_tape.config.values import shown
from megatron_tape.data.indexed_dataset import dataset_paths, origin_path
from megatron_tape.data.origins import read_origin
from megatron_tape.data.preprocessing import Encoding
from megatron_tape.data.raw_chunks import FilePart, is_cuttable
from megatron_tape.errors import ConfigError, FileError
from megatron_tape.io.files import refuse_existing

CUT = """how --shard cuts the inputs: by their bytes on disk, in order. Uncompressed .jsonl and .json are cut between
lines: a line belongs to the shard in whose bytes it begins. Any other file belongs as a whole to the shard in which it
begins, so many shards of compressed text or parquet need many files. A shard may be empty."""

# Increase this when the same inputs are cut in another way.
_CUT_VERSION = 1


@dataclass(frozen=True)
class Shard:
    """Part `index`, from 0, of `count`."""

    index: int
    count: int

    @classmethod
    def parse(cls, text: str) -> "Shard":
        """Return the shard that a text such as "3/8" names; raises ConfigError for other texts."""
        match = re.fullmatch(r"([0-9]{1,6})/([0-9]{1,6})", text)
        if not match or int(match[1]) >= int(match[2]):
            raise ConfigError("--shard", f"is {shown(text)}", "give I/N with I from 0 to N - 1, such as 0/8")
        return cls(int(match[1]), int(match[2]))

    def prefix(self, prefix: str) -> str:
        """Return the prefix of this shard of the dataset `prefix`."""
        return f"{prefix}.shard-{self.index:05}-of-{self.count:05}"

    def cut(self, paths: list[str]) -> list[FilePart]:
        """Return this shard's part of the inputs; all shards together hold every document once, in order."""
        sizes = [os.path.getsize(path) for path in paths]
        first, stop = (sum(sizes) * index // self.count for index in (self.index, self.index + 1))
        # Empty files at the end begin where nothing is left; they may be an error, which one shard must report.
        stop += self.index == self.count - 1
        parts, begin = [], 0
        for path, size in zip(paths, sizes):
            start, end = max(first - begin, 0), min(stop - begin, size)
            if is_cuttable(path) and (start, end) != (0, size):
                if start < end:
                    parts.append(FilePart(path, start, end))
            elif first <= begin < stop:
                parts.append(FilePart(path))
            begin += size
        return parts


def find_shards(prefix: str, count: int | None = None) -> list[Shard]:
    """Return the complete shards of the dataset `prefix`, in order.

    Raises FileError when shards of several counts exist and `count` is None.
    """
    found = []
    for path in glob.glob(f"{glob.escape(prefix)}.shard-*-of-*.idx"):
        if match := re.fullmatch(r"\.shard-([0-9]{5,6})-of-([0-9]{5,6})\.idx", path[len(prefix) :]):
            shard = Shard(int(match[1]), int(match[2]))
            # shard-000000-of-000008 would be the same shard as shard-00000-of-00008.
            if shard.index < shard.count and path == f"{shard.prefix(prefix)}.idx":
                found.append(shard)
    counts = sorted({shard.count for shard in found} if count is None else {count})
    if len(counts) > 1:
        numbers = " and of ".join(map(str, counts))
        raise FileError(prefix, f"has shards of {numbers}", "pass --count to choose")
    return sorted((shard for shard in found if shard.count in counts), key=lambda shard: shard.index)


def describe_origin(paths: list[str], encoding: Encoding, on_error: str) -> dict[str, Any]:
    """Return everything that a dataset's content depends on, ready for JSON.

    Raises FileError for an input that is not a regular file, since it cannot be cut.
    """
    inputs = {}
    for path in paths:
        if not os.path.isfile(path):
            raise FileError(path, "is not a regular file", "leave out --shard, or copy it to a regular file")
        status = os.stat(path)
        inputs[path] = [status.st_size, status.st_mtime_ns]
    return {
        **encoding.origin,
        "text_key": encoding.text_key,
        "on_error": on_error,
        **({"max_document_bytes": encoding.document_bytes} if on_error == "skip" else {}),
        "cut": _CUT_VERSION,
        "inputs": inputs,
    }


def same_origin(one: Mapping[str, Any] | None, other: Mapping[str, Any]) -> bool:
    """Return whether two origins are the same, also in the order of their inputs, which decides what a shard holds."""
    if one is None:
        return False
    one, other = ({key: value for key, value in origin.items() if key != "files"} for origin in (one, other))
    return one == other and list(one.get("inputs", ())) == list(other.get("inputs", ()))


def is_made(prefix: str, origin: dict[str, Any], overwrite: bool) -> bool:
    """Return whether the dataset already exists and was made from `origin`; if not, it may be written.

    Raises FileError when something else exists there and `overwrite` is false. Files left behind by
    a killed writer of a dataset with an origin may be replaced.
    """
    bin_path, idx_path = dataset_paths(prefix)
    found = read_origin(prefix, of_any_files=True)
    if idx_path.exists() and same_origin(found, origin):
        if read_origin(prefix) is not None:
            return True
        if not overwrite:
            raise FileError(prefix, "has changed since it was written", "remove it or pass --overwrite")
        return False
    if not overwrite:
        if found is None:
            refuse_existing(idx_path, bin_path)
        if idx_path.exists():
            reason = difference(origin, found)
            raise FileError(prefix, f"was made differently ({reason})", "remove it or pass --overwrite")
    return False


def difference(wanted: Mapping[str, Any], found: Mapping[str, Any]) -> str:
    """Describe the first difference of `found` from the origin `wanted`."""
    if "inputs" not in found:
        return "without --shard"
    for key in dict.fromkeys((*wanted, *found)):
        here, there = wanted.get(key), found.get(key)
        if here == there or key == "files":
            continue
        if key != "inputs":
            return "with another tokenizer" if key == "tokenizer" else f"{key} {there!r} instead of {here!r}"
        for path in (*here, *there):
            if path not in there:
                return f"without the input {path}"
            if path not in here:
                return f"from the input {path} too"
            if here[path] != there[path]:
                return f"from another version of {path}"
    return "with its inputs in another order"


def remove(prefix: str) -> None:
    """Remove a dataset, its index first, so that what remains never looks complete."""
    bin_path, idx_path = dataset_paths(prefix)
    for path in (idx_path, bin_path, origin_path(prefix)):
        path.unlink(missing_ok=True)
