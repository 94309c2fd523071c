"""Import a model of transformers as a checkpoint of this project, without using transformers."""

from pathlib import Path

from megatron_tape.errors import FileError
from megatron_tape.huggingface.imports.config_json import (
    ENCODED,
    errors_of_settings,
    model_settings,
    read_settings,
)
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
    model: str | Path,
    output: str | Path,
    position_encoding: str | None = None,
    seed: int = 1234,
    allow_pickle: bool = False,
    base_model: str | None = None,
    vocab_multiple: int = 1,
) -> None:
    """Import the model of transformers in the directory `model` as the new checkpoint `output`.

    Raises UserError or OSError if the model is incomplete or not supported.

    Args:
        position_encoding: `tape`, the default for models with RoPE, adds TAPE's parameters to a
            model without them. They are initialized with `seed` and do not change the logits. This
            project's exports keep their encoding; the code in an export is not read.
        allow_pickle: whether weights may be pickles, which are loaded without running their code.
        base_model: the model's name on the Hub, for model cards.
        vocab_multiple: pad the vocabulary to a multiple of this.
    """
    source = Path(model)
    refuse_existing(output, fix="choose another output, or move it away")
    if not source.is_dir():
        raise FileError(
            source,
            "is not a directory",
            "download the model into a directory: hf download OWNER/NAME --local-dir DIR",
        )

    path = source / "config.json"
    settings = read_settings(path)
    with errors_of_settings(path):
        if position_encoding is None and settings.get("model_type") != ENCODED:
            position_encoding = "tape"
        config = model_settings(settings, path, position_encoding, vocab_multiple)

    # A model of one of these types has been exported by this project.
    is_export = settings["model_type"] in ("tape", ENCODED)
    card = source_card(source, base_model, is_export)
    name = card.get("base_model") or source.resolve().name
    origin = f"the {settings['model_type']} model {name}"
    tokenizer = find_tokenizer(source, config.unpadded_vocab_size)
    weights = open_model(source, config, allow_pickle)
    # An export of a TAPE model already contains TAPE's parameters.
    if config.position_encoding == "tape" and not is_export:
        weights = with_new_tape(weights, config, seed)
    write_imported(output, config, weights, origin, tokenizer, card=card)
    advise(output, config)  # prints the commands that train the imported model
