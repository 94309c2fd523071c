"""Merge indexed datasets into one, in the given order.

    python tools/merge_datasets.py --input 'data/c4-*' data/wiki --output-prefix data/both

The result appears under its name only when it is complete. Memory does not grow with the number of
tokens.
"""

import argparse

from megatron_tape import command_line
from megatron_tape.config.datasets import match_datasets
from megatron_tape.data.indexed_dataset import (
    IndexedDatasetReader,
    IndexedDatasetWriter,
    check_output_prefix,
    raise_file_limit,
)
from megatron_tape.data.origins import checked_origins, common_origin, unknown_tokenizers
from megatron_tape.errors import FileError
from megatron_tape.text import counted


def main() -> None:
    """Parse the command line and merge the datasets."""
    arguments = parser().parse_args()
    check_output_prefix(arguments.output_prefix)
    prefixes = [prefix for pattern in arguments.input for prefix in match_datasets(pattern)]
    merge(prefixes, arguments.output_prefix, overwrite=arguments.overwrite)


def merge(prefixes: list[str], output_prefix: str, *, overwrite: bool) -> None:
    """Write the datasets, one after the other, to `output_prefix`.

    The origin of the result records their common tokenizer. Raises FileError if a dataset is
    damaged, if its tokenizer or dtype differs from that of the first one, or if all are empty.
    """
    # Without an expected tokenizer, the datasets are compared with each other.
    origins = checked_origins(prefixes, tokenizer=None)
    # The warning asks the user to make sure that the tokenizer was this one.
    warning = unknown_tokenizers(origins, "the same as for the others")
    if warning is not None:
        command_line.log(warning)
    raise_file_limit()  # every dataset needs open files
    datasets = [IndexedDatasetReader(prefix) for prefix in prefixes]
    dtype = datasets[0].dtype
    for prefix, dataset in zip(prefixes, datasets):
        if dataset.dtype != dtype:
            raise FileError(
                prefix,
                f"has {dataset.dtype.name} tokens, but {prefixes[0]} has {dtype.name}",
                "merge only datasets made with the same tokenizer",
            )
    if not any(map(len, datasets)):
        raise FileError(
            prefixes[0],
            "and all others have no documents",
            "check --input and --text-key of the preprocessing",
        )

    with IndexedDatasetWriter(output_prefix, dtype, overwrite=overwrite) as writer:
        for prefix, dataset in zip(prefixes, datasets):
            with command_line.step(f"copying {prefix}, {dataset.bin_size / 1e6:,.1f} MB"):
                damage = dataset.damage()
                if damage is not None:
                    raise FileError(prefix, f"is damaged: {damage}", "write it again")
                writer.add_dataset(dataset)
        with command_line.step("writing the index"):
            writer.finish(common_origin(origins.values()))
    command_line.log(
        f"{output_prefix}: {counted(writer.documents, 'document')}, {writer.tokens:,} tokens"
    )


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    result = command_line.Parser(description=__doc__)
    add = result.add_argument
    add(
        "--input",
        nargs="+",
        required=True,
        metavar="P",
        help="prefixes of datasets with the same tokenizer, in order, or quoted patterns",
    )
    add("--output-prefix", required=True, metavar="P", help="write P.bin and P.idx")
    add(
        "--overwrite",
        action="store_true",
        help="replace an existing P; the old one stays until the new is complete",
    )
    return result


if __name__ == "__main__":
    command_line.run(main)
