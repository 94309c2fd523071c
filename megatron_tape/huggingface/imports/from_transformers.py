"""Import a model of transformers or a GGUF file as a checkpoint of this project.

Only GGUF files require the package `transformers`.
"""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from megatron_tape import command_line
from megatron_tape.errors import FileError
from megatron_tape.huggingface.imports.config_json import (
    ENCODED,
    Changes,
    errors_of_settings,
    model_settings,
    read_settings,
)
from megatron_tape.huggingface.imports.from_gguf import SUFFIX, GgufFile
from megatron_tape.huggingface.imports.model_weights import open_model
from megatron_tape.huggingface.imports.new_checkpoint import (
    advise,
    find_tokenizer,
    with_new_tape,
    write_imported,
)
from megatron_tape.huggingface.imports.source_card import source_card
from megatron_tape.io.files import refuse_existing


def import_model(
    source: str | Path,
    output: str | Path,
    position_encoding: str | None = None,
    seed: int = 1234,
    allow_pickle: bool = False,
    base_model: str | None = None,
    **changes: Any,
) -> None:
    """Import the model of transformers in the directory `source`, or a GGUF file, as the new
    checkpoint `output`.

    Raises UserError or OSError if the model is incomplete or not supported.

    Args:
        position_encoding: `tape`, the default for models with RoPE, adds TAPE's parameters to a
            model without them. They are initialized with `seed` and do not change the logits. This
            project's exports keep their encoding; the code in an export is not read.
        base_model: the model's name on the Hub, for model cards.
        changes: other fields of `Changes`. `rope_scaling_factor` divides positions or, if the model
            has a scaling of its own, multiplies its factor; it extends the context by the same
            factor.
    """
    source = Path(source)
    refuse_existing(output, fix="choose another output, or move it away")
    is_gguf = source.suffix == SUFFIX and source.is_file()
    if not is_gguf and not source.is_dir():
        fix = "download the model into a directory: hf download OWNER/NAME --local-dir DIR"
        raise FileError(str(source), "is neither a directory nor a GGUF file", fix)
    directory = source.parent if is_gguf else source
    with TemporaryDirectory() as converted:
        gguf = GgufFile(source, Path(converted)) if is_gguf else None
        path = source if is_gguf else source / "config.json"
        with errors_of_settings(path):
            settings = read_settings(path) if gguf is None else gguf.settings()
            if position_encoding is None and settings.get("model_type") != ENCODED:
                position_encoding = "tape"
            model = model_settings(settings, path, Changes(position_encoding, **changes))
        exported_here = settings["model_type"] in ("tape", ENCODED)
        card = source_card(directory, base_model, exported_here)
        origin = (
            f"the {settings['model_type']} model {card.get('base_model') or source.resolve().name}"
        )
        tokenizer = find_tokenizer(directory, model.unpadded_vocab_size)
        if gguf is None:
            weights = open_model(source, model, allow_pickle)
        else:
            origin = f"{origin} (GGUF, {gguf.quantization})"
            command_line.log(
                f"{source} contains {gguf.quantization} weights; the checkpoint stores them in fp32"
            )
            if tokenizer is None and gguf.write_tokenizer(Path(converted)):
                tokenizer = find_tokenizer(Path(converted), model.unpadded_vocab_size)
            weights = gguf.weights()
        if model.position_encoding == "tape" and not exported_here:
            weights = with_new_tape(weights, model, seed)
        write_imported(output, model, weights, origin, tokenizer, card=card)
    advise(output, model)
