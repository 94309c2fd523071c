"""Show what an indexed dataset holds and check that its files are intact; the exit code is 1 if they are not.

python tools/inspect_dataset.py data/c4 --tokenizer tokenizer.model --documents 3
"""

import argparse

import numpy as np

from megatron_tape import command_line
from megatron_tape.data.indexed_dataset import IndexedDatasetReader
from megatron_tape.data.tokenizer import load_tokenizer


def main() -> None:
    """Parse the command line, check the dataset and describe it."""
    arguments = parser().parse_args()
    tokenizer = load_tokenizer(arguments.tokenizer) if arguments.tokenizer else None
    dataset = IndexedDatasetReader(arguments.prefix)
    with command_line.step(f"checking {len(dataset):,} documents, {dataset.bin_size / 1e6:,.1f} MB"):
        problems = list(dataset.problems(tokenizer.vocab_size if tokenizer else None))
    if problems:
        raise ValueError(f"{arguments.prefix} is not whole: {'; '.join(problems)}; write it again")
    lengths = dataset.document_lengths()
    print(f"documents  {len(dataset):,}")
    print(f"tokens     {len(dataset.tokens):,}")
    print(f"dtype      {dataset.dtype.name}")
    if len(lengths):
        print(
            f"length     min {lengths.min():,}, median {np.median(lengths):,.0f}, mean {lengths.mean():,.1f}, "
            f"max {lengths.max():,}"
        )
    for index in range(min(arguments.documents, len(dataset))):
        ids = dataset.document(index)
        print(f"\ndocument {index}, {len(ids):,} tokens:")
        shown = ids[: arguments.tokens].tolist()
        print(
            (tokenizer.decode(shown) if tokenizer else " ".join(map(str, shown)))
            + (" ..." if len(shown) < len(ids) else "")
        )


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    result = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = result.add_argument
    add("prefix", metavar="P", help="the dataset is P.bin and P.idx")
    add("--tokenizer", help="decode with it, and check that every id is in its vocabulary")
    add("--documents", type=int, default=1, metavar="N", help="show the first N documents (default: %(default)s)")
    add("--tokens", type=int, default=200, metavar="N", help="show N tokens of each at most (default: %(default)s)")
    return result


if __name__ == "__main__":
    command_line.run(main)
