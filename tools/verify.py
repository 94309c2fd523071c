"""Check that an inference engine computes what a model computes in training, at positions up to
four times the trained length.

    python tools/verify.py exported/tape_demo --against runs/demo/tape
    python tools/verify.py models/Qwen3-0.6B --engine vllm
    python tools/verify.py models/Qwen3-0.6B --write-tokens tokens.npz
    python tools/verify.py models/Qwen3-0.6B --logits logits.npz

Prints a table of errors by position, the first layer and position that differ, and the likely
cause. Exit statuses: 0 equal, 1 different, 2 cannot be compared.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_tape import command_line
from megatron_tape.errors import ConfigError

if TYPE_CHECKING:
    from megatron_tape.evaluation.model_source import ModelSource
    from megatron_tape.extension.rope_scaling import RopeScaling
    from megatron_tape.huggingface.verification.trained import Trained
    from megatron_tape.huggingface.verification.verify import Verification

TRANSFORMERS = "transformers"
VLLM = "vllm"
NAMES_OF_PRECISIONS = ("fp32", "bf16")


def main() -> int:
    """Parse the command line, compare, and print the report. Returns the exit status."""
    arguments = parser().parse_args()
    _check_options(arguments)
    # Imported here, since importing torch takes seconds.
    from megatron_tape.extension.rope_scaling import read_options
    from megatron_tape.huggingface.verification.verify import Verification

    scaling = read_options(arguments.rope_scaling, arguments.rope_scaling_factor)
    source, expected = _find_models(arguments, scaling)
    verification = Verification(_trained(source, expected), arguments.lengths)
    if expected is source and not source.is_checkpoint:
        verification.notes.append(
            "The reference is MODEL's own config.json; --against compares with its training."
        )

    if not source.needs_export:
        verification.read_directory(source.path)
    if arguments.write_tokens is not None:
        from megatron_tape.huggingface.verification.logits_file import write_tokens

        sequence = verification.whole_sequence(arguments.every_token)
        write_tokens(arguments.write_tokens, sequence)
        print(f"wrote the tokens to {arguments.write_tokens}; add their logits, and give --logits")
        return 0

    if arguments.logits is not None:
        verification.title = f"{arguments.logits}, computed with {arguments.model}"
        _check_logits(verification, arguments)
    else:
        with source.in_transformers_format() as directory:
            if arguments.engine == VLLM:
                _check_vllm(verification, directory, arguments)
            else:
                _check_transformers(verification, directory, arguments, source.needs_trust)
    if scaling is not None:
        verification.title += f" with {scaling.name}"
    verification.title += f", against {verification.trained.name} in plain torch (float64)"

    report = verification.report()
    print(report.text())
    if report.is_equal:
        return 0
    return 1


def _check_options(arguments: argparse.Namespace) -> None:
    """Raise ConfigError for options that exclude each other, and for an existing output."""
    alone = "omit one of them"
    if arguments.logits is not None and arguments.engine == VLLM:
        raise ConfigError("--logits", "cannot be combined with --engine vllm", alone)
    if arguments.logits is not None and arguments.lengths:
        raise ConfigError("--lengths", "cannot be combined with --logits", alone)
    if arguments.write_tokens is not None and arguments.logits is not None:
        raise ConfigError("--write-tokens", "cannot be combined with --logits", alone)
    if arguments.logits is not None and len(arguments.precision or ()) > 1:
        raise ConfigError(
            "--precision", "has several values, but the logits of --logits have one", "give one"
        )
    if arguments.engine_python is not None and arguments.engine != VLLM:
        raise ConfigError("--engine-python", "requires --engine vllm", "add it")
    if arguments.write_tokens is not None and arguments.write_tokens.exists():
        raise ConfigError("--write-tokens", f"{arguments.write_tokens} exists", "give another file")


def _find_models(
    arguments: argparse.Namespace, scaling: RopeScaling | None
) -> tuple[ModelSource, ModelSource]:
    """Return MODEL, and the model with which it is compared: that of --against, or the same."""
    if arguments.against is None:
        source = _find("MODEL", arguments.model, arguments.average, scaling)
        source.check_code(arguments.trust_remote_code)
        return source, source

    # An export has its scaling already, and no other weights.
    is_export = Path(arguments.model, "config.json").is_file()
    if is_export:
        source = _find("MODEL", arguments.model, average=False, scaling=None)
    else:
        source = _find("MODEL", arguments.model, arguments.average, scaling)
    source.check_code(arguments.trust_remote_code)
    expected = _find("--against", arguments.against, arguments.average, scaling)
    return source, expected


def _find(name: str, path: str, average: bool, scaling: RopeScaling | None) -> ModelSource:
    """Return the `ModelSource` of the argument `name`. Raises ConfigError about the argument."""
    from megatron_tape.evaluation.model_source import find_model

    try:
        return find_model(path, average=average, scaling=scaling)
    except ConfigError as error:
        if error.key != "--model":
            raise
        raise ConfigError(name, error.problem, error.fix) from None


def _trained(source: ModelSource, expected: ModelSource) -> Trained:
    """Return the model that the engine should compute.

    The engine reads `source`, which is compared with `expected`.
    """
    from dataclasses import replace

    from megatron_tape.huggingface.export.saved_weights import open_weights
    from megatron_tape.huggingface.verification.trained import (
        described_by,
        rounded_as,
        trained_by,
    )

    if expected.is_checkpoint:
        trained = trained_by(open_weights(expected.path, expected.average))
    else:
        trained = described_by(expected.path)
    # A checkpoint as MODEL is exported in fp32, without rounding.
    if expected is not source and not source.is_checkpoint:
        trained = rounded_as(source.path, trained)
    if expected.scaling is not None:
        scaled = expected.scaling.scaled(trained.model, expected.path)
        trained = replace(trained, model=scaled)
    return trained


def _check_transformers(
    verification: Verification,
    directory: Path,
    arguments: argparse.Namespace,
    trust_remote_code: bool,
) -> None:
    """Add the checks of transformers, in all precisions."""
    from megatron_tape.huggingface.verification.rounding import PRECISIONS, Precision
    from megatron_tape.huggingface.verification.transformers_checks import (
        check_transformers,
        transformers_version,
    )

    verification.title = f"{arguments.model} in transformers {transformers_version()}"
    for name in arguments.precision or NAMES_OF_PRECISIONS:
        dtype = PRECISIONS[name]
        check_transformers(
            verification,
            directory,
            Precision(dtype, dtype),
            whole_up_to=arguments.every_token,
            layers_up_to=arguments.every_token,
            trust_remote_code=trust_remote_code,
        )


def _check_vllm(verification: Verification, directory: Path, arguments: argparse.Namespace) -> None:
    """Add the checks of vLLM, in all precisions."""
    from megatron_tape.huggingface.verification.rounding import PRECISIONS, Precision
    from megatron_tape.huggingface.verification.sequences import Outputs
    from megatron_tape.huggingface.verification.vllm_engine import find_python, run_vllm

    verification.read_directory(directory)
    verification.title = f"{arguments.model} in vLLM"
    python = find_python(arguments.engine_python)
    sequence = verification.whole_sequence(arguments.every_token)
    for name in arguments.precision or NAMES_OF_PRECISIONS:
        dtype = PRECISIONS[name]
        precision = Precision(dtype, dtype)
        found, served = run_vllm(python, directory, sequence, dtype)
        if len(served) < len(sequence.compared):
            verification.notes.append(
                f"vLLM serves no positions after {served[-1]:,} (max_position_embeddings)."
            )
            sequence = sequence.until(served[-1])
        for way, logits in found.items():
            verification.add(f"{way}, {name}", sequence, Outputs(logits), precision)


def _check_logits(verification: Verification, arguments: argparse.Namespace) -> None:
    """Add the check of a file of logits."""
    from megatron_tape.huggingface.verification.logits_file import read_logits
    from megatron_tape.huggingface.verification.rounding import PRECISIONS, Precision
    from megatron_tape.huggingface.verification.sequences import Outputs

    sequence, logits, is_normalized = read_logits(arguments.logits, verification.vocab_size)
    # The file does not say in which precision the engine computed.
    name = "fp32"
    if arguments.precision is not None:
        (name,) = arguments.precision
    dtype = PRECISIONS[name]
    precision = Precision(dtype, dtype)
    verification.add(f"logits, {name}", sequence, Outputs(logits), precision, is_normalized)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    result = command_line.Parser(description=__doc__)
    add = result.add_argument
    add(
        "model",
        metavar="MODEL",
        help="an export, another model in transformers format, or a run or checkpoint, which is"
        " exported to a temporary directory",
    )
    add(
        "--against",
        metavar="CHECKPOINT",
        help="the run or checkpoint from which MODEL was exported (default: what MODEL's"
        " config.json says)",
    )
    add(
        "--engine",
        choices=(TRANSFORMERS, VLLM),
        default=TRANSFORMERS,
        help="what computes MODEL (default: %(default)s)",
    )
    add(
        "--engine-python",
        type=command_line.path,
        metavar="PYTHON",
        help="the Python that has vLLM (default: that of .venv-vllm)",
    )
    add(
        "--logits",
        type=command_line.path,
        metavar="FILE",
        help="compare logits that another engine has computed, an .npz file (docs/verification.md"
        " has its format)",
    )
    add(
        "--write-tokens",
        type=command_line.path,
        metavar="FILE",
        help="only write the tokens that another engine is to read for --logits; --lengths sets"
        " which",
    )
    add(
        "--lengths",
        nargs="+",
        type=command_line.whole_number,
        default=[],
        metavar="N",
        help="positions to compare, besides 0 (default: L/2, L - 1, L, 2 L and 4 L for the trained"
        " length L)",
    )
    add(
        "--every-token",
        type=command_line.whole_number,
        default=8192,
        metavar="N",
        help="largest position of texts of which all tokens are read; other texts have only groups"
        " of tokens near the positions (default: %(default)s)",
    )
    add(
        "--precision",
        nargs="+",
        choices=NAMES_OF_PRECISIONS,
        default=None,
        help="precisions of the engine (default: fp32 bf16; with --logits: fp32)",
    )
    add(
        "--average",
        action="store_true",
        help="use the averaged weights of CHECKPOINT, or without --against of MODEL, a run with"
        " train.average",
    )
    command_line.add_rope_scaling(add)
    add(
        "--trust-remote-code",
        action="store_true",
        help="run Python files in MODEL that are not this project's",
    )
    return result


if __name__ == "__main__":
    # 1 means that something differs.
    command_line.run(main, unavailable=2)
