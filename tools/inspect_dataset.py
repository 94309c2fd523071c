"""Show the contents of an indexed dataset, and check that its files are intact.

    python tools/inspect_dataset.py data/c4 --tokenizer tokenizer.model --documents 3

The exit status is 2 if the dataset is damaged.
"""

import argparse

import numpy as np

from megatron_tape import command_line
from megatron_tape.data.indexed_dataset import IndexedDatasetReader
from megatron_tape.data.origins import Origin, checked_origins, read_origin, unknown_tokenizers
from megatron_tape.data.tokenizer import Tokenizer, load_tokenizer, tokenizer_record
from megatron_tape.errors import FileError
from megatron_tape.text import counted


def main() -> None:
    """Parse the command line, check the dataset and describe it."""
    arguments = parser().parse_args()
    dataset = IndexedDatasetReader(arguments.prefix)
    origin = read_origin(arguments.prefix)
    tokenizer = None
    if arguments.tokenizer:
        tokenizer = load_tokenizer(arguments.tokenizer)
        record = tokenizer_record(tokenizer)
        origins = checked_origins([arguments.prefix], record, arguments.tokenizer)
        warning = unknown_tokenizers(origins, arguments.tokenizer)
        if warning is not None:
            command_line.log(warning)
    describe(arguments.prefix, dataset, tokenizer, origin)
    print("\n" + histogram(dataset.document_lengths()), end="")
    for index in range(min(arguments.documents, len(dataset))):
        print(f"\n{text_of(dataset, index, tokenizer, arguments.tokens)}")


def describe(
    prefix: str, dataset: IndexedDatasetReader, tokenizer: Tokenizer | None, origin: Origin | None
) -> None:
    """Print a dataset's size, tokenizer and document lengths. Raises FileError if it is damaged.

    Negative token ids count as damage and, with `tokenizer`, ids outside its vocabulary.
    """
    vocab_size = None if tokenizer is None else tokenizer.vocab_size
    size = f"{counted(len(dataset), 'document')}, {dataset.bin_size / 1e6:,.1f} MB"
    with command_line.step(f"checking {size}"):
        # The index first: reading documents needs an intact one.
        problem = dataset.damage() or dataset.invalid_id(vocab_size)
    if problem is not None:
        raise FileError(
            prefix,
            f"is damaged: {problem}",
            "write the dataset again with tools/preprocess_data.py, or check --tokenizer",
        )

    tokenizer_line = "unknown"
    if origin is not None:
        tokenizer_line = describe_tokenizer(origin)
    lengths = dataset.document_lengths()
    print(f"documents  {len(dataset):,}")
    print(f"tokens     {len(dataset.tokens):,}")
    print(f"dtype      {dataset.dtype.name}")
    print(f"tokenizer  {tokenizer_line}")
    if len(lengths):
        print(
            f"length     min {lengths.min():,}, median {np.median(lengths):,.0f}, mean"
            f" {lengths.mean():,.1f}, max {lengths.max():,}"
        )


def describe_tokenizer(origin: Origin) -> str:
    """Return a line about a dataset's tokenizer: its size, its digest, and how documents end."""
    tokenizer = origin["tokenizer"]
    ends = "no token ends documents"
    if origin["append_eod"]:
        ends = f"documents end in token {tokenizer['eod']}"
    return f"{tokenizer['vocab_size']:,} ids, digest {tokenizer['digest'][:12]}; {ends}"


def text_of(
    dataset: IndexedDatasetReader, index: int, tokenizer: Tokenizer | None, tokens: int
) -> str:
    """Return a heading and the first `tokens` tokens of a document, as text or as ids."""
    ids = dataset.document(index)
    shown = ids[:tokens].tolist()
    text = " ".join(map(str, shown))
    if tokenizer is not None:
        text = tokenizer.decode(shown)
    if len(shown) < len(ids):
        text += " ..."
    return f"document {index}, {len(ids):,} tokens:\n{text}"


def histogram(lengths: np.ndarray) -> str:
    """Return a table of the numbers of documents and tokens by document length."""
    if not len(lengths):
        return "no documents\n"
    # The bin is 0 for an empty document, else k for lengths from 2 ** (k - 1) to below 2 ** k.
    _, bins = np.frexp(lengths)
    documents = np.bincount(bins)
    tokens = np.bincount(bins, weights=lengths)
    lines = [f"{'tokens in a document':>24}  {'documents':>18}  {'tokens':>23}"]
    for k in range(int(bins.min()), len(documents)):
        bounds = f"{2**k // 2:,} to {2**k - 1:,}"
        if k == 0:
            bounds = "0"
        share = 100 * tokens[k] / max(1, tokens.sum())
        # The bar has one # for two percent of the tokens.
        lines.append(
            f"{bounds:>24}  {documents[k]:>10,} {100 * documents[k] / len(lengths):5.1f} %  "
            f"{tokens[k]:>15,.0f} {share:5.1f} %  {'#' * round(share / 2)}"
        )
    return "\n".join(line.rstrip() for line in lines) + "\n"


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    result = command_line.Parser(description=__doc__)
    add = result.add_argument
    add("prefix", metavar="P", help="prefix of the dataset's files, P.bin and P.idx")
    add(
        "--tokenizer",
        help="tokenizer to show documents as text; check that the dataset was made with it",
    )
    add(
        "--documents",
        type=int,
        default=1,
        metavar="N",
        help="show the first N documents (default: %(default)s)",
    )
    add(
        "--tokens",
        type=int,
        default=200,
        metavar="N",
        help="show at most N tokens of each document (default: %(default)s)",
    )
    return result


if __name__ == "__main__":
    command_line.run(main)
