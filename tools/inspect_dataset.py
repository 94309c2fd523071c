"""Show the contents of an indexed dataset, and check that its files are intact.

    python tools/inspect_dataset.py data/c4 --tokenizer tokenizer.model --documents 3

The exit status is 2 if the dataset is damaged.
"""

import argparse

import numpy as np

from megatron_tape import command_line
from megatron_tape.data.indexed_dataset import IndexedDatasetReader
from megatron_tape.data.origins import Origin, check_tokenizer, read_origin, unknown_tokenizers
from megatron_tape.data.tokenizer import Tokenizer, load_tokenizer, tokenizer_record
from megatron_tape.errors import FileError
from megatron_tape.text import counted


def main() -> None:
    """Parse the command line, check the dataset and describe it."""
    arguments = parser().parse_args()
    if arguments.tokenizer:
        tokenizer = load_tokenizer(arguments.tokenizer)
    else:
        tokenizer = None
    dataset = IndexedDatasetReader(arguments.prefix)
    origin = read_origin(arguments.prefix)
    if tokenizer is not None:
        origins = check_tokenizer(
            [arguments.prefix], tokenizer_record(tokenizer), arguments.tokenizer
        )
        if warning := unknown_tokenizers(origins, arguments.tokenizer):
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
    with command_line.step(
        f"checking {counted(len(dataset), 'document')}, {dataset.bin_size / 1e6:,.1f} MB"
    ):
        problems = list(dataset.problems())
        # Documents are found by the index, which must be intact.
        if not problems and (invalid := dataset.invalid_id(vocab_size)):
            problems.append(invalid)
    if problems:
        fix = "write the dataset again with tools/preprocess_data.py" + (
            ", or check --tokenizer" if tokenizer else ""
        )
        raise FileError(prefix, f"is damaged: {'; '.join(problems)}", fix)
    lengths = dataset.document_lengths()
    print(f"documents  {len(dataset):,}")
    print(f"tokens     {len(dataset.tokens):,}")
    print(f"dtype      {dataset.dtype.name}")
    print(f"tokenizer  {'unknown' if origin is None else describe_tokenizer(origin)}")
    if len(lengths):
        print(
            f"length     min {lengths.min():,}, median {np.median(lengths):,.0f}, mean"
            f" {lengths.mean():,.1f}, max {lengths.max():,}"
        )


def describe_tokenizer(origin: Origin) -> str:
    """Return a line about the tokenizer recorded in a dataset's origin: its size, digest, and end
    of documents.
    """
    tokenizer = origin["tokenizer"]
    if origin["append_eod"]:
        ends = f"documents end in token {tokenizer['eod']}"
    else:
        ends = "no token ends documents"
    return f"{tokenizer['vocab_size']:,} ids, digest {tokenizer['digest'][:12]}; {ends}"


def text_of(
    dataset: IndexedDatasetReader, index: int, tokenizer: Tokenizer | None, tokens: int
) -> str:
    """Return a heading and the first `tokens` tokens of a document, as text or, without a
    tokenizer, as ids.
    """
    ids = dataset.document(index)
    shown = ids[:tokens].tolist()
    if tokenizer:
        text = tokenizer.decode(shown)
    else:
        text = " ".join(map(str, shown))
    return (
        f"document {index}, {len(ids):,} tokens:\n{text}{' ...' if len(shown) < len(ids) else ''}"
    )


def histogram(lengths: np.ndarray) -> str:
    """Return a table of the numbers of documents and tokens by document length, in bins between
    powers of two.
    """
    if not len(lengths):
        return "no documents\n"
    bins = np.frexp(lengths)[
        1
    ]  # 0 for an empty document, else k for lengths from 2 ** (k - 1) to below 2 ** k
    documents = np.bincount(bins)
    tokens = np.bincount(bins, weights=lengths)
    lines = [f"{'tokens in a document':>24}  {'documents':>18}  {'tokens':>23}"]
    for k in range(int(bins.min()), len(documents)):
        bounds = f"{2**k // 2:,} to {2**k - 1:,}" if k else "0"
        share = 100 * tokens[k] / max(1, tokens.sum())
        lines.append(
            f"{bounds:>24}  {documents[k]:>10,} {100 * documents[k] / len(lengths):5.1f} %  "
            f"{tokens[k]:>15,.0f} {share:5.1f} %  {'#' * round(share / 2)}"
        )
    return "\n".join(line.rstrip() for line in lines) + "\n"


def whole_number_or_0(text: str) -> int:
    """Parse an option that is a whole number of at least 0."""
    if text == "0":
        return 0
    return command_line.whole_number(text)


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
        type=whole_number_or_0,
        default=1,
        metavar="N",
        help="show the first N documents (default: %(default)s)",
    )
    add(
        "--tokens",
        type=whole_number_or_0,
        default=200,
        metavar="N",
        help="show at most N tokens of each document (default: %(default)s)",
    )
    return result


if __name__ == "__main__":
    command_line.run(main)
