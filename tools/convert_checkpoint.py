"""Convert checkpoints to and from Hugging Face's transformers, and from the TAPE authors' code.

    python tools/convert_checkpoint.py to-hf --checkpoint runs/tape_demo --output exported/tape_demo
    python tools/convert_checkpoint.py to-hf --checkpoint runs/extended --output exported/adapter --adapter
    python tools/convert_checkpoint.py to-hf --checkpoint runs/tape --output exported/tape --push-to-hub ME/tape
    python tools/convert_checkpoint.py from-hf --model models/Qwen3-0.6B --output imported/qwen3_tape
    python tools/convert_checkpoint.py from-hf --model SmolLM2-135M.Q8_0.gguf --output imported/smollm2_tape
    python tools/convert_checkpoint.py from-released --weights model.safetensors --config config.json --output released

An output appears only when it is complete; an existing output is never changed.
"""

import argparse

from megatron_tape import command_line
from megatron_tape.io.files import refuse_existing


def main() -> None:
    """Parse the command line and convert."""
    arguments = parser().parse_args()
    arguments.convert(arguments)


def to_hf(arguments: argparse.Namespace) -> None:
    """Write a Hugging Face model from a checkpoint of this project."""
    size = parse_size(arguments.max_shard_size)
    model = arguments.checkpoint, arguments.output, arguments.dtype, size, arguments.tokenizer
    if arguments.private and arguments.push_to_hub is None:
        raise ValueError("--private is for a model of the Hub; add --push-to-hub NAME, or leave it out")
    if arguments.adapter:
        if arguments.push_to_hub is not None or arguments.results:
            raise ValueError("--push-to-hub and --results are for whole models; leave out --adapter")
        from megatron_tape.huggingface.export.to_peft import export_adapter

        export_adapter(*model, arguments.base)
        return
    if arguments.base is not None:
        raise ValueError("--base names the model of an adapter; add --adapter, or leave it out")
    from megatron_tape.huggingface.export.to_transformers import export

    if arguments.push_to_hub is None:
        export(*model, arguments.results)
        return
    from megatron_tape.huggingface.export.hub import repository_of, upload

    refuse_existing(arguments.output, fix="choose another --output")
    repository = repository_of(arguments.push_to_hub)
    export(*model, arguments.results, repository)
    upload(arguments.output, repository, arguments.private)


def from_hf(arguments: argparse.Namespace) -> None:
    """Write a checkpoint of this project from a Hugging Face model."""
    from megatron_tape.huggingface.imports.from_transformers import import_model

    import_model(
        arguments.model,
        arguments.output,
        arguments.position_encoding,
        arguments.rope_scaling_factor,
        arguments.vocab_multiple,
        arguments.token_mixing,
        arguments.gate_input,
        arguments.position_mlp_size,
        arguments.seed,
        arguments.allow_pickle,
        arguments.base_model,
    )


def from_released(arguments: argparse.Namespace) -> None:
    """Write a checkpoint of this project from one of the TAPE authors' code."""
    from megatron_tape.huggingface.imports.from_released import import_released

    import_released(
        arguments.weights,
        arguments.config,
        arguments.output,
        arguments.vocab_multiple,
        arguments.token_mixing,
        arguments.allow_pickle,
    )


def parse_size(text: str) -> int:
    """Read `5GB`, `500MB` or `2000` as bytes, in powers of 1000; raises ValueError for anything else."""
    number, power = text.strip().upper().removesuffix("B"), 0
    if number[-1:] in ("K", "M", "G", "T"):
        number, power = number[:-1], " KMGT".index(number[-1])
    try:
        size = int(float(number) * 1000**power)
    except (ValueError, OverflowError):
        size = 0
    if size < 1:
        raise ValueError(f"--max-shard-size is {text!r}; give a size such as 5GB or 500MB")
    return size


def factor(text: str) -> float:
    """Read a finite number of at least 1."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 1 <= number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 1")
    return number


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    result = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    directions = result.add_subparsers(required=True, metavar="DIRECTION")

    what = "a checkpoint of this project to a Hugging Face model"
    example = "python tools/convert_checkpoint.py to-hf --checkpoint runs/demo/tape --output exported/tape --dtype bf16"
    export = directions.add_parser("to-hf", help=what, description=f"Convert {what}.", epilog=f"example: {example}")
    export.set_defaults(convert=to_hf)
    add = export.add_argument
    add(
        "--checkpoint",
        required=True,
        metavar="DIR",
        help="a run or its checkpoints directory (the newest complete checkpoint is used), or one step",
    )
    add("--output", required=True, metavar="DIR", help="the directory to write; it must not exist")
    add(
        "--dtype",
        choices=("fp32", "bf16", "fp16"),
        default="fp32",
        help="number type of the weights (default: %(default)s)",
    )
    add("--max-shard-size", default="5GB", metavar="SIZE", help="maximum size of a weights file (default: %(default)s)")
    add("--tokenizer", metavar="T", help="a .model, a tokenizer.json or their directory, or none; default: the run's")
    add(
        "--adapter",
        action="store_true",
        help="write only what was trained, in peft's format, for a run that trained LoRA layers, embeddings, norms or "
        "TAPE's matrices alone; without this, LoRA layers are merged into the model",
    )
    add(
        "--base",
        metavar="DIR",
        help="with --adapter: the model that it adds to; if DIR does not exist, that model is written there "
        "(default: OUTPUT/base)",
    )
    add(
        "--results",
        nargs="+",
        default=[],
        metavar="DIR",
        help="results of pretrain.evaluate for the model card (default: those in evaluation/STEP of the run, if any)",
    )
    add(
        "--push-to-hub",
        metavar="NAME",
        help="also upload the model to the Hugging Face Hub, as NAME or OWNER/NAME; needs a login (hf auth login)",
    )
    add("--private", action="store_true", help="with --push-to-hub: a new model is visible to its owner only")

    what = "a Llama, Mistral, Qwen2, Qwen3 or exported TAPE model to a checkpoint of this project"
    example = (
        "python tools/convert_checkpoint.py from-hf --model models/Qwen3-0.6B --output imported/qwen3 ; it ends by "
        "saying how to train from the result"
    )
    imported = directions.add_parser("from-hf", help=what, description=f"Convert {what}.", epilog=f"example: {example}")
    imported.set_defaults(convert=from_hf)
    add = imported.add_argument
    add(
        "--model",
        required=True,
        metavar="DIR",
        help="directory with config.json, weights and tokenizer, as transformers saves them; or a GGUF file, or a "
        "directory with one",
    )
    add(
        "--base-model",
        metavar="OWNER/NAME",
        help="the model's name on the Hugging Face Hub, for the model cards of exports (default: known only if MODEL "
        "lies in the Hub's cache)",
    )
    _add_output(imported)
    add(
        "--position-encoding",
        choices=("tape", "rope"),
        help="tape starts out the same and can learn to move positions; rope keeps the model (default: tape, or for an "
        "export of another encoding its own)",
    )
    add(
        "--rope-scaling-factor",
        type=factor,
        default=1.0,
        metavar="X",
        help="also divide positions by this, which extends the context by the same factor; it multiplies the factor of "
        "a model with yarn (default: %(default)s)",
    )
    add("--gate-input", choices=("mlp", "attention"), help="what gates TAPE's position MLP (default: mlp)")
    add("--position-mlp-size", type=int, metavar="P", help="TAPE's inner width (default: 4 times the query heads)")
    add("--seed", type=int, default=1234, help="seed of TAPE's random initial parameters (default: %(default)s)")

    what = "a checkpoint of the TAPE authors' code to one of this project"
    example = (
        "python tools/convert_checkpoint.py from-released --weights model.safetensors --config config.json "
        "--output released"
    )
    released = directions.add_parser(
        "from-released", help=what, description=f"Convert {what}.", epilog=f"example: {example}"
    )
    released.set_defaults(convert=from_released)
    add = released.add_argument
    add(
        "--weights",
        required=True,
        metavar="FILE",
        help="safetensors file with the parameter names of the released code",
    )
    add("--config", required=True, metavar="JSON", help="the config.json with which the model was trained")
    _add_output(released)
    return result


def _add_output(direction: argparse.ArgumentParser) -> None:
    """Add the options that both imports share."""
    add = direction.add_argument
    add("--output", required=True, metavar="CKPT", help="the checkpoint to write; it must not exist")
    add(
        "--vocab-multiple",
        type=int,
        default=1,
        metavar="N",
        help="pad the vocabulary to a multiple of this, as tensor parallelism needs (default: %(default)s)",
    )
    add(
        "--token-mixing",
        choices=("full", "per_head"),
        default="full",
        help="form of TAPE's map over heads for further training: a matrix, or one scale per head as in the "
        "released code (default: %(default)s)",
    )
    add(
        "--allow-pickle",
        action="store_true",
        help="also read .bin and .pt files; use this only for files from people you trust",
    )


if __name__ == "__main__":
    command_line.run(main)
