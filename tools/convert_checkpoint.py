"""Convert checkpoints to and from Hugging Face's transformers, and from the TAPE authors' code.

    python tools/convert_checkpoint.py to-hf --checkpoint runs/tape_demo --output exported/tape_demo
    python tools/convert_checkpoint.py to-hf --checkpoint runs/extended --output adapter --adapter
    python tools/convert_checkpoint.py to-hf --checkpoint runs/tape_demo --output exported/longer \\
        --rope-scaling yarn --rope-scaling-factor 4
    python tools/convert_checkpoint.py from-hf --model models/Qwen3-0.6B --output imported/qwen3
    python tools/convert_checkpoint.py from-released --weights model.safetensors \\
        --config config.json --output released

An output appears only when it is complete. An existing output is never changed, unless to-hf
replaces a whole export (--overwrite).
"""

import argparse
from collections.abc import Callable

from megatron_tape import command_line
from megatron_tape.errors import ConfigError


def main() -> None:
    """Parse the command line and convert a checkpoint or a model."""
    options = vars(parser().parse_args())
    # `parser` sets this to the function for the direction, whose parameters are the options.
    convert = options.pop("convert")
    convert(**options)


def to_hf(
    output: str,
    adapter: bool,
    rope_scaling: str | None,
    rope_scaling_factor: float | None,
    no_verify: bool,
    **options,
) -> None:
    """Export a checkpoint of this project as a Hugging Face model, or as an adapter for peft.

    `options` are the other options of the command line.
    """
    # The functions import torch only when they run, so that --help is fast.
    from megatron_tape.extension.rope_scaling import read_options

    scaling = read_options(rope_scaling, rope_scaling_factor)
    if adapter and scaling is not None:
        raise ConfigError(
            "--rope-scaling",
            "cannot be combined with --adapter, which exports the model as it was trained",
            "omit one of them",
        )

    if adapter:
        from megatron_tape.huggingface.export.to_peft import export_adapter

        checkpoint = export_adapter(output=output, **options)
    elif scaling is not None:
        from megatron_tape.extension.scaled_export import export_scaled

        checkpoint = export_scaled(scaling, output=output, verify=not no_verify, **options)
    else:
        from megatron_tape.huggingface.export.to_transformers import export

        checkpoint = export(output=output, verify=not no_verify, **options)
    command_line.log(f"exported {checkpoint} to {output}")


def from_hf(**options) -> None:
    """Import a Hugging Face model as a checkpoint of this project."""
    from megatron_tape.huggingface.imports.from_transformers import import_model

    import_model(**options)


def from_released(**options) -> None:
    """Import a checkpoint of the TAPE authors' code."""
    from megatron_tape.huggingface.imports.from_released import import_released

    import_released(**options)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    result = command_line.Parser(description=__doc__)
    directions = result.add_subparsers(required=True, metavar="DIRECTION")

    def add(name: str, convert: Callable, conversion: str, add_options: Callable) -> None:
        """Add the subcommand `name`. `conversion` says what it converts to what."""
        direction = directions.add_parser(
            name, help=conversion, description=f"Convert {conversion}."
        )
        direction.set_defaults(convert=convert)
        add_options(direction.add_argument)

    conversion = "a checkpoint of this project to a Hugging Face model"
    add("to-hf", to_hf, conversion, add_export)
    conversion = "a model of the Llama family, or an export, to a checkpoint of this project"
    add("from-hf", from_hf, conversion, add_import)
    conversion = "a checkpoint of the TAPE authors' code to one of this project"
    add("from-released", from_released, conversion, add_released)
    return result


def add_export(add: Callable) -> None:
    """Add the options of to-hf. `add` is `add_argument` of its parser."""
    add(
        "--checkpoint",
        required=True,
        metavar="DIR",
        help="a run or its checkpoints directory (the newest complete checkpoint is used), or the"
        " directory of one step",
    )
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
    command_line.add_rope_scaling(add)
    add(
        "--adapter",
        action="store_true",
        help="write only the trained parameters, in peft's format, and the base model to"
        " OUTPUT/base; the run must have trained only LoRA layers, embeddings, norms or TAPE's"
        " matrices. By default, LoRA layers are merged into the model",
    )
    add(
        "--no-verify",
        action="store_true",
        help="do not load the export with transformers to compare its logits with those of the"
        " training, which needs memory for the model in fp32",
    )


def add_import(add: Callable) -> None:
    """Add the options of from-hf. `add` is `add_argument` of its parser."""
    add(
        "--model",
        required=True,
        metavar="DIR",
        help="directory with config.json, weights and tokenizer, as transformers saves them",
    )
    add(
        "--base-model",
        type=str,
        metavar="OWNER/NAME",
        help="the model's name on the Hugging Face Hub, for the model cards of exports (default:"
        " for an export, the name in its card)",
    )
    add_checkpoint(add)
    add(
        "--position-encoding",
        choices=("tape", "rope"),
        help="rope keeps the model's encoding; tape initially computes the same outputs and can"
        " learn to rewrite positions (default: tape; for a model that this project exported, its"
        " encoding)",
    )
    add(
        "--seed",
        type=int,
        default=1234,
        help="seed of TAPE's random initial parameters (default: %(default)s)",
    )


def add_released(add: Callable) -> None:
    """Add the options of from-released. `add` is `add_argument` of its parser."""
    add(
        "--weights",
        required=True,
        metavar="FILE",
        help="safetensors file with the parameter names of the released code",
    )
    add(
        "--config",
        required=True,
        metavar="JSON",
        help="the config.json with which the model was trained",
    )
    add_checkpoint(add)
    add(
        "--token-mixing",
        choices=("full", "per_head"),
        default="full",
        help="TAPE's map over heads: a full matrix, or one scale per head as in the released code"
        " (default: %(default)s)",
    )


def add_checkpoint(add: Callable) -> None:
    """Add the options that from-hf and from-released share. `add` is `add_argument`."""
    add(
        "--output", required=True, metavar="CKPT", help="the checkpoint to write; it must not exist"
    )
    add(
        "--vocab-multiple",
        type=command_line.whole_number,
        default=1,
        metavar="N",
        help="pad the vocabulary to a multiple of this, as tensor parallelism needs (default:"
        " %(default)s)",
    )
    add(
        "--allow-pickle",
        action="store_true",
        help="also read .bin and .pt files; they can execute code, so use only files from people"
        " you trust",
    )


if __name__ == "__main__":
    command_line.run(main)
