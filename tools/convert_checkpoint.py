"""Convert checkpoints to and from Hugging Face's transformers, and from the TAPE authors' code.

    python tools/convert_checkpoint.py to-hf --checkpoint runs/tape_demo --output exported/tape_demo
    python tools/convert_checkpoint.py to-hf --checkpoint runs/extended --output adapter --adapter
    python tools/convert_checkpoint.py from-hf --model models/Qwen3-0.6B --output imported/qwen3
    python tools/convert_checkpoint.py from-released --weights model.safetensors \\
        --config config.json --output released

An output appears only when it is complete. An existing output is never changed, unless to-hf
replaces a whole export (--overwrite).
"""

import argparse
from collections.abc import Callable

from megatron_tape import command_line
from megatron_tape.errors import UserError


def main() -> None:
    """Parse the command line and convert a checkpoint or a model."""
    arguments = vars(parser().parse_args())
    arguments.pop("convert")(**arguments)


def to_hf(output: str, base: str | None, adapter: bool, results: list[str], **model) -> None:
    """Export a checkpoint of this project as a Hugging Face model, or as an adapter for peft."""
    if adapter and results:
        raise UserError("--results", "cannot be combined with --adapter", "remove one of them")
    if base is not None and not adapter:
        raise UserError("--base", "requires --adapter", "add --adapter, or remove --base")
    if adapter:
        from megatron_tape.huggingface.export.to_peft import export_adapter

        export_adapter(output=output, base=base, **model)
        return
    from megatron_tape.huggingface.export.to_transformers import export

    command_line.log(f"exported {export(output=output, results=results, **model)} to {output}")


def from_hf(model: str, output: str, **options) -> None:
    """Import a Hugging Face model as a checkpoint of this project."""
    from megatron_tape.huggingface.imports.from_transformers import import_model

    import_model(model, output, **options)


def from_released(**options) -> None:
    """Import a checkpoint of the TAPE authors' code."""
    from megatron_tape.huggingface.imports.from_released import import_released

    import_released(**options)


def factor(text: str) -> float:
    """Parse an option that is a finite number of at least 1."""
    try:
        number = float(text.encode("ascii"))
    except ValueError:
        number = 0.0
    if not 1 <= number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 1")
    return number


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    result = command_line.Parser(description=__doc__)
    directions = result.add_subparsers(required=True, metavar="DIRECTION")

    def add(name: str, convert: Callable, what: str, add_options: Callable, example: str) -> None:
        epilog = f"example: python tools/convert_checkpoint.py {name} {example}"
        direction = directions.add_parser(
            name, help=what, description=f"Convert {what}.", epilog=epilog
        )
        direction.set_defaults(convert=convert)
        add_options(direction.add_argument)

    what = "a checkpoint of this project to a Hugging Face model"
    add(
        "to-hf",
        to_hf,
        what,
        add_export,
        "--checkpoint runs/demo/tape --output exported/tape --dtype bf16",
    )
    what = "a Llama, Mistral, Qwen2, Qwen3 or exported TAPE model to a checkpoint of this project"
    example = (
        "--model models/Qwen3-0.6B --output imported/qwen3 ; it prints how to train the result"
    )
    add("from-hf", from_hf, what, add_import, example)
    what = "a checkpoint of the TAPE authors' code to one of this project"
    example = "--weights model.safetensors --config config.json --output released"
    add("from-released", from_released, what, add_released, example)
    return result


def add_export(add: Callable) -> None:
    """Add the options of to-hf."""
    newest = (
        "a run or its checkpoints directory (the newest complete checkpoint is used), or the"
        " directory of one step"
    )
    add("--checkpoint", required=True, metavar="DIR", help=newest)
    add("--output", required=True, metavar="DIR", help="the directory to write; it must not exist")
    add(
        "--overwrite",
        action="store_true",
        help="replace OUTPUT, if it is an export, when the new one is complete",
    )
    add(
        "--dtype",
        choices=("fp32", "bf16", "fp16"),
        default="fp32",
        help="dtype of the weights (default: %(default)s)",
    )
    add(
        "--tokenizer",
        metavar="T",
        help="a .model, a tokenizer.json, their directory, or none (default: the run's)",
    )
    add(
        "--average",
        action="store_true",
        help="export the averaged weights of a run with train.average",
    )
    trained = (
        "write only the trained parameters, in peft's format; the run must have trained only LoRA"
        " layers, embeddings, norms or TAPE's matrices. By default, LoRA layers are merged into the"
        " model"
    )
    add("--adapter", action="store_true", help=trained)
    base = (
        "with --adapter: directory of the base model; it is written there if the directory does not"
        " exist (default: OUTPUT/base)"
    )
    add("--base", metavar="DIR", help=base)
    results = (
        "results of pretrain.evaluate for the model card (default: those in evaluation/STEP of the"
        " run, if any)"
    )
    add("--results", nargs="+", default=[], metavar="DIR", help=results)


def add_import(add: Callable) -> None:
    """Add the options of from-hf."""
    model = (
        "directory with config.json, weights and tokenizer, as transformers saves them; or a GGUF"
        " file"
    )
    add("--model", required=True, metavar="DIR", help=model)
    name = (
        "the model's name on the Hugging Face Hub, for the model cards of exports (default: the"
        " name in the Hub's cache, if MODEL is there)"
    )
    add("--base-model", type=str, metavar="OWNER/NAME", help=name)
    add_checkpoint(add)
    encoding = (
        "rope keeps the model's encoding; tape initially computes the same outputs and can learn to"
        " rewrite positions (default: tape; for a model that this project exported, its encoding)"
    )
    add("--position-encoding", choices=("tape", "rope"), help=encoding)
    scaling = (
        "extend the context to X times its length: divide positions by X, or multiply the factor of"
        " the model's own scaling by X (default: %(default)s)"
    )
    add("--rope-scaling-factor", type=factor, default=1.0, metavar="X", help=scaling)
    add(
        "--gate-input",
        choices=("mlp", "attention"),
        help="input of the gate of TAPE's position MLP (default: mlp)",
    )
    width = "inner width of TAPE's position MLP (default: 4 times the number of query heads)"
    add("--position-mlp-size", type=command_line.whole_number, metavar="P", help=width)
    add(
        "--seed",
        type=int,
        default=1234,
        help="seed of TAPE's random initial parameters (default: %(default)s)",
    )


def add_released(add: Callable) -> None:
    """Add the options of from-released."""
    weights = "safetensors file with the parameter names of the released code"
    add("--weights", required=True, metavar="FILE", help=weights)
    add(
        "--config",
        required=True,
        metavar="JSON",
        help="the config.json with which the model was trained",
    )
    add_checkpoint(add)


def add_checkpoint(add: Callable) -> None:
    """Add the options that from-hf and from-released share."""
    add(
        "--output", required=True, metavar="CKPT", help="the checkpoint to write; it must not exist"
    )
    multiple = (
        "pad the vocabulary to a multiple of this, as tensor parallelism needs (default:"
        " %(default)s)"
    )
    add("--vocab-multiple", type=command_line.whole_number, default=1, metavar="N", help=multiple)
    mixing = (
        "TAPE's map over heads: a full matrix, or one scale per head as in the released code"
        " (default: %(default)s)"
    )
    add("--token-mixing", choices=("full", "per_head"), default="full", help=mixing)
    pickles = (
        "also read .bin and .pt files; they can execute code, so use only files from people you"
        " trust"
    )
    add("--allow-pickle", action="store_true", help=pickles)


if __name__ == "__main__":
    command_line.run(main)
