"""Join indexed datasets in the given order, or the shards that preprocess_data.py --shard made.

    python tools/merge_datasets.py --shards data/c4 --remove-shards
    python tools/merge_datasets.py --input data/c4 data/wiki --output-prefix data/both

The result appears under its name only when it is complete. Memory does not grow with the number of tokens.
"""

import argparse

from megatron_tape import command_line
from megatron_tape.data import shards
from megatron_tape.data.descriptors import refuse_more_files
from megatron_tape.data.indexed_dataset import IndexedDatasetReader, IndexedDatasetWriter, check_output_prefix
from megatron_tape.data.origins import check_tokenizer, common_origin, read_origin, unknown_tokenizers
from megatron_tape.errors import ConfigError, FileError


def main() -> None:
    """Parse the command line and merge."""
    arguments = parser().parse_args()
    if arguments.shards is not None:
        if arguments.output_prefix is not None:
            raise ConfigError("--output-prefix", "is given, but --shards P writes P", "leave it out")
        merge_shards(arguments.shards, arguments)
        return
    if arguments.output_prefix is None:
        raise ConfigError("--input", "needs --output-prefix", "add it")
    if arguments.remove_shards or arguments.count is not None:
        raise ConfigError(("--remove-shards", "--count"), "and --count belong to --shards", "leave them out")
    check_output_prefix("--output-prefix", arguments.output_prefix)
    merge(arguments.input, arguments.output_prefix, overwrite=arguments.overwrite)


def merge_shards(prefix: str, arguments: argparse.Namespace) -> None:
    """Merge all shards of `prefix`; raises FileError when one is missing, damaged or of another origin."""
    found = shards.find_shards(prefix, arguments.count)
    if not found:
        if read_origin(prefix, of_any_files=True) is None:
            raise FileError(prefix, "has no shards", "make them with tools/preprocess_data.py --shard")
        IndexedDatasetReader(prefix)
        command_line.say(f"{prefix} is complete already and has no shards; nothing to do")
        return
    origin = _common_origin([shard.prefix(prefix) for shard in found])
    whole = set(found)
    everyone = [shards.Shard(index, found[0].count) for index in range(found[0].count)]
    if shards.is_made(prefix, origin, arguments.overwrite):
        command_line.say(f"{prefix} is complete already")
    else:
        if missing := [str(shard.index) for shard in everyone if shard not in whole]:
            named = ", ".join(missing[:10]) + ", ..." * (len(missing) > 10)
            problem = f"lacks {len(missing):,} of its {len(everyone):,} shards: {named}"
            fix = f"make them with tools/preprocess_data.py --shard {missing[0]}/{len(everyone)}"
            raise FileError(prefix, problem, fix)
        merge([shard.prefix(prefix) for shard in everyone], prefix, overwrite=True, origin=origin)
    if arguments.remove_shards:
        for shard in everyone:
            shards.remove(shard.prefix(prefix))
        command_line.say(f"removed the shards of {prefix}")


def _common_origin(prefixes: list[str]) -> dict:
    first = None
    for prefix in prefixes:
        origin = read_origin(prefix)
        if origin is None and read_origin(prefix, of_any_files=True) is not None:
            raise FileError(prefix, "is not whole, or was replaced: its .origin is of other files", "make it again")
        if origin is None or "inputs" not in origin:
            raise FileError(prefix, "has no .origin file, so it may come from other inputs", "make it again")
        first = origin if first is None else first
        if not shards.same_origin(origin, first):
            reason = shards.difference(first, origin)
            raise FileError(prefix, f"was made differently from {prefixes[0]} ({reason})", "make one of them again")
    return first


def merge(prefixes: list[str], output_prefix: str, *, overwrite: bool, origin: dict | None = None) -> None:
    """Write the datasets, one after the other, to `output_prefix`.

    Without `origin`, that of the result names the tokenizer that made all of them. Raises FileError when one is not
    whole, is multimodal, was made with another tokenizer or has another token type than the first, or when all are
    empty.
    """
    origins = check_tokenizer(prefixes, None, "")
    if warning := unknown_tokenizers(origins, "the same as of the others"):
        command_line.say(warning)
    refuse_more_files("the merge", f"reads {len(prefixes):,} datasets", len(prefixes), "merge some of them first")
    datasets = [IndexedDatasetReader(prefix) for prefix in prefixes]
    dtype = datasets[0].dtype
    for prefix, dataset in zip(prefixes, datasets):
        if dataset.dtype != dtype:
            problem = f"holds {dataset.dtype.name} tokens, but {prefixes[0]} holds {dtype.name}"
            raise FileError(prefix, problem, "merge only datasets of the same tokenizer")
        if dataset.multimodal:
            raise FileError(prefix, "is a multimodal dataset, which cannot be merged", "leave it out")
    size = sum(dataset.bin_size for dataset in datasets)
    with IndexedDatasetWriter(output_prefix, dtype, overwrite=overwrite) as writer:
        with command_line.step(f"checking {len(datasets):,} datasets, {size / 1e6:,.1f} MB"):
            for prefix, dataset in zip(prefixes, datasets):
                if problem := next(dataset.problems(), None):
                    raise FileError(prefix, f"is not whole: {problem}", "write it again")
        if not any(map(len, datasets)):
            raise FileError(
                prefixes[0], "and the others hold no document", "check --input and --text-key of the preprocessing"
            )
        progress = command_line.Progress(size)

        def copied() -> None:
            done = writer.tokens * dtype.itemsize
            progress.update(done, lambda seconds: f"{done / 1e6:,.1f} MB, {done / 1e6 / seconds:,.1f} MB/s")

        try:
            for dataset in datasets:
                writer.add_dataset(dataset, copied)
        finally:
            progress.end()
        with command_line.step("writing the index"):
            writer.finish(origin or common_origin(origins.values()))
    command_line.say(
        f"{output_prefix}: {writer.documents:,} documents, {writer.tokens:,} tokens, {progress.seconds:.1f} s"
    )


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    result = command_line.Parser(description=__doc__)
    sources = result.add_mutually_exclusive_group(required=True)
    sources.add_argument("--input", nargs="+", metavar="P", help="prefixes of datasets, in order, of one token type")
    sources.add_argument("--shards", metavar="P", help="merge the shards of P into P")
    add = result.add_argument
    add("--output-prefix", metavar="P", help="with --input: write P.bin and P.idx")
    several = "with --shards: the number of shards, if P has shards of several counts"
    add("--count", type=command_line.whole_number, metavar="N", help=several)
    add("--remove-shards", action="store_true", help="remove the shards once they are merged")
    add("--overwrite", action="store_true", help="replace an existing P; the old one stays until the new is complete")
    return result


if __name__ == "__main__":
    command_line.run(main)
