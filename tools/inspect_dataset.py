"""Show what indexed datasets hold and check that their files are intact; the exit code is 2 if they are not.

    python tools/inspect_dataset.py data/c4 --tokenizer tokenizer.model --documents 3
    python tools/inspect_dataset.py data/books data/web --seq-length 8192 --long-documents 8192 0.6 --plot reach.png

The second also shows how far into their documents training will reach: with --seq-length, what share of a run's
positions have at least so many tokens of their own document before them in their sequence, for the datasets as they
are and for a run with data.long_documents. It is computed from the lengths of all documents, without data.split. With
--sequences, the number of a run's sequences, it says how many times the run would pass over the long documents and over
the others.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from megatron_tape import command_line
from megatron_tape.command_line import whole_number
from megatron_tape.data.descriptors import refuse_more_files
from megatron_tape.data.indexed_dataset import IndexedDatasetReader
from megatron_tape.data.long_documents import (
    divide,
    drawn_from,
    passes_in_words,
    share_past_in_mix,
    share_past_in_stream,
)
from megatron_tape.data.origins import Origin, check_tokenizer, read_origin, unknown_tokenizers
from megatron_tape.data.tokenizer import Tokenizer, load_tokenizer, record_of
from megatron_tape.errors import ConfigError, FileError, refuse
from megatron_tape.io.files import atomic_output

_PLOTTED = 65
_PICTURES = (".png", ".pdf", ".svg")


def main() -> None:
    """Parse the command line, check the datasets and describe them."""
    arguments = parser().parse_args()
    check(arguments)
    tokenizer = load_tokenizer(arguments.tokenizer) if arguments.tokenizer else None
    count = len(arguments.prefix)
    refuse_more_files("the command line", f"names {count:,} datasets", 2 * count, "name fewer at once")
    datasets = [IndexedDatasetReader(prefix) for prefix in arguments.prefix]
    if tokenizer is None:
        origins = {prefix: read_origin(prefix) for prefix in arguments.prefix}
    else:
        origins = check_tokenizer(arguments.prefix, record_of(tokenizer), arguments.tokenizer)
        if warning := unknown_tokenizers(origins, arguments.tokenizer):
            command_line.say(warning)
    for prefix, dataset in zip(arguments.prefix, datasets):
        if len(datasets) > 1:
            print(f"{prefix}:")
        describe(prefix, dataset, tokenizer, origins[prefix])
    lengths = [dataset.document_lengths() for dataset in datasets]
    print("\n" + histogram(np.concatenate(lengths)), end="")
    if arguments.seq_length is not None:
        # The units that training shuffles.
        sequences = [dataset.lengths for dataset in datasets]
        print("\n" + reach_table(sequences, arguments), end="")
        if arguments.sequences is not None:
            print("\n" + passes(sequences, arguments), end="")
        if arguments.plot:
            plot_reach(sequences, arguments)
    for prefix, dataset in zip(arguments.prefix, datasets):
        for index in range(min(arguments.documents, len(dataset))):
            print(
                f"\n{f'{prefix}, ' if len(datasets) > 1 else ''}{text_of(dataset, index, tokenizer, arguments.tokens)}"
            )


def check(arguments: argparse.Namespace) -> None:
    """Raise ConfigError for options that contradict each other."""
    for option, value in (("--long-documents", arguments.long_documents), ("--plot", arguments.plot)):
        alone = value is not None and arguments.seq_length is None
        refuse(alone, option, "needs --seq-length", "give the length of training sequences")
    if arguments.long_documents is not None:
        minimum, share = arguments.long_documents
        fix = "give a whole number of tokens, less than 2^31, and a share of at most 1"
        refuse(minimum % 1 > 0 or minimum >= 2**31 or share > 1, "--long-documents", f"is {minimum:g} {share:g}", fix)
        arguments.long_documents = int(minimum), share
    alone = arguments.sequences is not None and arguments.long_documents is None
    refuse(alone, "--sequences", "needs --long-documents", "give the minimum and the share")
    drawn = arguments.plot is None or Path(arguments.plot).suffix.lower() in _PICTURES
    problem = f"is {arguments.plot}, which does not end in one of {', '.join(_PICTURES)}"
    refuse(not drawn, "--plot", problem, "rename it")
    weights, count = len(arguments.weights or arguments.prefix), len(arguments.prefix)
    refuse(weights != count, "--weights", f"gives {weights} for {count} datasets", "give one each")


def describe(prefix: str, dataset: IndexedDatasetReader, tokenizer: Tokenizer | None, origin: Origin | None) -> None:
    """Print a dataset's size and its tokenizer; raises FileError if it is damaged."""
    with command_line.step(f"checking {len(dataset):,} documents, {dataset.bin_size / 1e6:,.1f} MB"):
        problems = list(dataset.problems(tokenizer.vocab_size if tokenizer else None))
    if problems:
        raise FileError(prefix, f"is not whole: {'; '.join(problems)}", "write it again")
    lengths = dataset.document_lengths()
    print(f"documents  {len(dataset):,}")
    print(f"tokens     {len(dataset.tokens):,}")
    print(f"dtype      {dataset.dtype.name}")
    print(f"tokenizer  {'unknown' if origin is None else described(origin)}")
    if len(lengths):
        print(
            f"length     min {lengths.min():,}, median {np.median(lengths):,.0f}, mean {lengths.mean():,.1f}, "
            f"max {lengths.max():,}"
        )


def described(origin: Origin) -> str:
    """Return what a dataset records of its tokenizer, in words."""
    tokenizer = origin["tokenizer"]
    ends = f"documents end in {tokenizer['eod']}" if origin["append_eod"] else "no token ends documents"
    return f"{tokenizer['vocab_size']:,} ids, digest {tokenizer['digest'][:12]}; {ends}"


def text_of(dataset: IndexedDatasetReader, index: int, tokenizer: Tokenizer | None, tokens: int) -> str:
    """Return the beginning of a document, as text or ids, under a heading."""
    ids = dataset.document(index)
    shown = ids[:tokens].tolist()
    text = tokenizer.decode(shown) if tokenizer else " ".join(map(str, shown))
    return f"document {index}, {len(ids):,} tokens:\n{text}{' ...' if len(shown) < len(ids) else ''}"


def histogram(lengths: np.ndarray) -> str:
    """Return documents and tokens by length, in bins whose bounds are powers of two."""
    if not len(lengths):
        return "no document\n"
    bins = np.frexp(lengths)[1]  # 0 for an empty document, else k for lengths from 2 ** (k - 1) to below 2 ** k
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


def reach_table(lengths: Sequence[np.ndarray], arguments: argparse.Namespace) -> str:
    """Return what share of positions lies past each distance, for the datasets as they are and mixed as asked."""
    seq_length = arguments.seq_length
    distances = [seq_length * eighths // 8 for eighths in (1, 2, 4, 6)]
    rows = reach(lengths, arguments, distances)
    width = max(map(len, rows))
    lines = [
        f"share of positions with at least so many tokens of their document before them in sequences of {seq_length:,}",
        " " * width + "".join(f"{distance:>10,}" for distance in distances),
    ]
    lines += [f"{name:{width}}" + "".join(f"{100 * value:8.1f} %" for value in row) for name, row in rows.items()]
    return "\n".join(lines) + "\n"


def reach(
    lengths: Sequence[np.ndarray], arguments: argparse.Namespace, distances: Sequence[int]
) -> dict[str, np.ndarray]:
    """Return the share of positions past each distance by name of the mix."""
    seq_length = arguments.seq_length
    tokens = np.array([values.sum(dtype=np.int64) for values in lengths], dtype=float)
    parts = tokens if arguments.weights is None else np.array(arguments.weights)
    shares = [share_past_in_stream(values, seq_length, distances) for values in lengths]
    rows = {"all documents alike": np.average(shares, axis=0, weights=parts if parts.sum() else None)}
    if arguments.long_documents is not None:
        minimum, share = arguments.long_documents
        for name, pool, of_mix in (("at least", np.greater_equal, share), ("less than", np.less, 1 - share)):
            largest = max(int(values[pool(values, minimum)].sum(dtype=np.int64)) for values in lengths)
            if of_mix and largest <= seq_length:
                raise ConfigError(
                    ("--long-documents", "--seq-length"),
                    f"is {minimum} {share:g} and draws {100 * of_mix:g} % from documents of {name} {minimum} "
                    f"tokens, but no dataset has more than {largest:,} tokens in these, too few for a sequence",
                    "choose another minimum or share",
                )
        rows[f"long_documents: {{minimum: {minimum}, share: {share:g}}}"] = share_past_in_mix(
            lengths, arguments.weights, seq_length, distances, minimum, share
        )
    rows["one document per sequence"] = np.array([1 - distance / seq_length for distance in distances])
    return rows


def passes(lengths: Sequence[np.ndarray], arguments: argparse.Namespace) -> str:
    """Return how many times a run passes over the long documents and over the others, with what to do if often."""
    (minimum, share), seq_length = arguments.long_documents, arguments.seq_length
    pools = drawn_from(divide(arguments.prefix, lengths, arguments.weights, minimum), share, seq_length)
    lines = []
    for sentence, warning in passes_in_words(pools, minimum, share, arguments.sequences * seq_length):
        lines += [sentence, f"warning: {warning}"] if warning else [sentence]
    return "\n".join(lines) + "\n"


def plot_reach(lengths: Sequence[np.ndarray], arguments: argparse.Namespace) -> None:
    """Write a picture of the reach by distance."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    distances = np.linspace(0, arguments.seq_length - 1, min(_PLOTTED, arguments.seq_length)).astype(int)
    figure, axes = plt.subplots(figsize=(7, 4.2))
    for name, row in reach(lengths, arguments, distances.tolist()).items():
        axes.plot(distances, 100 * row, label=name, linestyle=":" if name.startswith("one") else "-")
    axes.set(
        xlabel="tokens of the document before a position, within its sequence",
        ylabel="positions with at least so many (%)",
        title=f"sequences of {arguments.seq_length:,} tokens",
        xlim=(0, arguments.seq_length),
        ylim=(0, 100),
    )
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    with atomic_output(arguments.plot, overwrite=True) as file:
        figure.savefig(file, format=Path(arguments.plot).suffix[1:].lower(), dpi=110)
    plt.close(figure)
    command_line.say(f"{arguments.plot}: written")


def whole_number_or_0(text: str) -> int:
    """Read a whole number of at least 0."""
    return 0 if text == "0" else whole_number(text)


def positive(text: str) -> float:
    """Read a finite number above 0."""
    try:
        number = float(text.encode("ascii"))
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return number


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    result = command_line.Parser(description=__doc__)
    add = result.add_argument
    add("prefix", metavar="P", nargs="+", help="a dataset is P.bin and P.idx")
    add("--tokenizer", help="decode with it, and check that it made the dataset")
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
        help="show N tokens of each at most (default: %(default)s)",
    )
    add("--seq-length", type=whole_number, metavar="L", help="show how far sequences of L tokens reach into documents")
    add(
        "--long-documents",
        nargs=2,
        type=positive,
        metavar=("MINIMUM", "SHARE"),
        help="show it also for data.long_documents: {minimum: MINIMUM, share: SHARE}",
    )
    add(
        "--sequences",
        type=whole_number,
        metavar="N",
        help="say how often a run of N sequences (train.steps times train.global_batch_size) repeats the documents",
    )
    add("--weights", nargs="+", type=positive, metavar="W", help="one per dataset (default: their tokens)")
    add("--plot", metavar="F", help="also draw it for all distances; F ends in .png, .pdf or .svg")
    return result


if __name__ == "__main__":
    command_line.run(main)
