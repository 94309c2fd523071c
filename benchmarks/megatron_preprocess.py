"""The baseline of `preprocess.py`: build an indexed dataset the way Megatron-LM's preprocessing tool does.

This is a new implementation of how that tool works, for comparison only. Each document is one task of a pool (sent 32
at a time), which parses a line and returns its ids as a list; the parent turns each list into an array and passes it to
Megatron-core's builder. Like that tool, it imports torch and Megatron-core.

    python benchmarks/megatron_preprocess.py INPUT.jsonl TOKENIZER.model PREFIX WORKERS
"""

import json
import multiprocessing
import sys

import sentencepiece
import torch  # noqa: F401
from megatron.core.datasets import indexed_dataset

_tokenizer = None


def _start(path: str) -> None:
    global _tokenizer
    _tokenizer = sentencepiece.SentencePieceProcessor(model_file=path)


def _encode(line: str) -> tuple[list[int], list[int], int]:
    ids = _tokenizer.encode_as_ids(json.loads(line)["text"])
    ids.append(_tokenizer.eos_id())
    return ids, [len(ids)], len(line)


def main(source: str, tokenizer: str, prefix: str, workers: str) -> None:
    """Write `prefix`.bin and .idx."""
    _start(tokenizer)
    dtype = indexed_dataset.DType.optimal_dtype(_tokenizer.vocab_size())
    builder = indexed_dataset.IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    with open(source, encoding="utf-8") as lines:
        with multiprocessing.Pool(int(workers), initializer=_start, initargs=(tokenizer,)) as pool:
            for ids, lengths, _ in pool.imap(_encode, lines, 32):
                builder.add_document(ids, lengths)
    builder.finalize(f"{prefix}.idx")


if __name__ == "__main__":
    main(*sys.argv[1:])
