"""Scale the positions of a trained model for longer texts, without training: the options
--rope-scaling and --rope-scaling-factor. Imports no torch.
"""

from dataclasses import dataclass, replace
from pathlib import Path

from megatron_tape.config.schema import ModelConfig
from megatron_tape.config.sections import keys_of
from megatron_tape.errors import ConfigError, UserError
from megatron_tape.extension.base_model import Base, with_base_settings
from megatron_tape.huggingface.imports.config_json import PHI3, errors_of_settings, model_settings
from megatron_tape.model.validation import validate_model
from megatron_tape.position import ENCODINGS, encoding_of, model_config

OPTION = "--rope-scaling"
_FACTOR_OPTION = "--rope-scaling-factor"
_OMIT = f"omit {OPTION} and {_FACTOR_OPTION}"
_LARGEST_FACTOR = 1e6


@dataclass(frozen=True)
class RopeScaling:
    """A scaling of positions, as given by the options."""

    kind: str
    """The type of the scaling, a value of `model.position.rope_scaling_type`."""
    factor: float
    """New context length divided by the model's own."""

    @property
    def name(self) -> str:
        """The name in results, such as `yarn-x4`. Different scalings have different names."""
        factor = repr(self.factor).removesuffix(".0")
        return f"{self.kind}-x{factor}"

    def scaled(self, model: ModelConfig, path: Path) -> ModelConfig:
        """Return the settings of `model`, which is at `path`, with this scaling and a longer
        context.

        They are those of an extension with `extension.context_factor`: a scaling that the model has
        already is multiplied. Raises ConfigError if the model cannot have the scaling.
        """
        _check_has_scaling(model, path)
        given = {
            "model": {"position": {"rope_scaling_type": self.kind}},
            "extension": {"context_factor": self.factor},
        }
        try:
            values = with_base_settings(given, Base(path, model, state=None))
            result = model_config(values["model"])
            validate_model(result)
        except ConfigError as error:
            raise self._error_about_options(error, model, path) from None
        if result.rotated_length <= model.rotated_length:
            raise ConfigError(
                OPTION,
                f"has no effect on {path}: also in contexts of {result.seq_length} tokens, its"
                f" layers with positions attend to at most {result.rotated_length} tokens",
                _OMIT,
            )
        # An extension chooses its own backend.
        return replace(result, attention_backend=model.attention_backend)

    def scaled_transformers_model(self, settings: dict, path: Path) -> ModelConfig:
        """Return the settings of a model in transformers format with this scaling.

        `settings` are the contents of the `config.json` in the directory `path`. Raises ConfigError
        if the model cannot have the scaling.
        """
        file = path / "config.json"
        try:
            with errors_of_settings(file):
                model = model_settings(settings, file)
        except UserError as error:
            raise ConfigError(
                OPTION,
                f"cannot be applied to {path}: {error.subject} {error.problem}",
                f"{_OMIT}, or set rope_parameters in a copy of its config.json",
            ) from None
        if settings["model_type"] == PHI3:
            raise ConfigError(
                OPTION,
                f"cannot be applied to {path}: transformers does not scale models of the type"
                f" {PHI3} in this way",
                "import the model with tools/convert_checkpoint.py from-hf --position-encoding"
                " rope, and give the checkpoint",
            )

        scaled = self.scaled(model, path)
        # In transformers, rotation of a share is a `rope_type` of its own, which has a factor.
        if encoding_of(scaled).exports_to != encoding_of(model).exports_to:
            raise ConfigError(
                OPTION,
                f"is {self.kind}, but in {path} only a share of the frequencies rotates, and"
                " transformers then supports only linear scaling",
                f"give {OPTION} linear",
            )
        return scaled

    def _error_about_options(
        self, error: ConfigError, model: ModelConfig, path: Path
    ) -> ConfigError:
        """Return an error of an extension as one about the options."""
        if error.key == "model.position.rope_scaling_type":
            own = model.position.rope_scaling_type
            return ConfigError(
                OPTION,
                f"is {self.kind}, but {path} has the scaling {own}, which can only be multiplied",
                f"give {OPTION} {own}",
            )
        if error.key == "model.position.rope_attention_factor":
            return ConfigError(
                OPTION,
                f"cannot multiply the scaling of {path}: its attention factor"
                f" {model.position.rope_attention_factor} is not yarn's default, so the value for"
                " longer contexts is unknown",
                "set factor and attention_factor in the config.json of an export, and delete its"
                " positions.json",
            )
        return ConfigError(
            OPTION,
            f"cannot be applied to {path}: {error.subject} {error.problem}",
            f"{_OMIT}, or give other values",
        )


def read_options(kind: str | None, factor: float | None) -> RopeScaling | None:
    """Return the scaling that the values of the options give; None without the options.

    Raises ConfigError if one of them is missing, or the factor is out of bounds.
    """
    if kind is None and factor is None:
        return None
    if kind is None:
        raise ConfigError(
            OPTION, f"is missing, but {_FACTOR_OPTION} is given", f"add it, such as {OPTION} yarn"
        )
    if factor is None:
        raise ConfigError(
            _FACTOR_OPTION,
            f"is missing, but {OPTION} is given",
            f"add it, such as {_FACTOR_OPTION} 4 for contexts four times as long",
        )
    # Also true for NaN.
    if not 1 < factor <= _LARGEST_FACTOR:
        raise ConfigError(
            _FACTOR_OPTION,
            f"is {factor:g}",
            f"give a number above 1 and at most {_LARGEST_FACTOR:,.0f}: the new context length"
            " divided by the model's own",
        )
    return RopeScaling(kind, factor)


def _check_has_scaling(model: ModelConfig, path: Path) -> None:
    """Raise ConfigError if the positions of a model's encoding cannot be scaled."""
    scalable = [
        name
        for name, encoding in ENCODINGS.items()
        if "rope_scaling_type" in keys_of(encoding.Settings)
    ]
    if model.position_encoding not in scalable:
        raise ConfigError(
            OPTION,
            f"cannot be applied to {path}: its positional encoding {model.position_encoding} has no"
            " scaling",
            f"{_OMIT}; models with these encodings can be scaled: {', '.join(scalable)}",
        )
