"""muP, the maximal update parametrization (Yang et al. 2022, arXiv 2203.03466), without multipliers: their Table 3.

With it, a learning rate, an initial standard deviation and a weight decay that were tuned with a narrow model, the
base, also fit wider ones. A matrix with r times as many inputs as in the base begins with the base's standard deviation
times r^-0.5, and the output layer with that times r^-1; AdamW's learning rate is divided by r, and weight decay, which
is proportional to the learning rate, is multiplied by it. The input embedding, norms, biases and other vectors are as
in the base. What computes the model does not change, nor do exports. Imports no torch.
"""

import dataclasses
from collections.abc import Mapping

from megatron_tape.config.schema import ModelConfig, RunConfig
from megatron_tape.config.values import clashes
from megatron_tape.errors import ConfigError, refuse
from megatron_tape.model.names import kind_of, part_of
from megatron_tape.model.settings import validate_model
from megatron_tape.model.shapes import ParameterShape, cut_shapes

KEY = "optimizer.mup_base"
WIDTHS = ("hidden_size", "num_attention_heads", "num_query_groups", "kv_channels", "ffn_hidden_size")
"""The settings of a model that `optimizer.mup_base` may have."""


def base_model(model: ModelConfig, mup_base: Mapping[str, int]) -> ModelConfig:
    """Return the model whose learning rate, standard deviation and weight decay are the ones that are given."""
    return dataclasses.replace(model, **mup_base)


def width_ratios(model: ModelConfig, mup_base: Mapping[str, int] | None) -> dict[str, float]:
    """Return how many times as many inputs as in the base each matrix has, by its `GPTModel` name.

    The last axis is that of the inputs. What is not among them, such as vectors, the input embedding, LoRA layers and
    tables whose last axis is one of heads, is as in the base; without a base, everything is.
    """
    if mup_base is None:
        return {}
    of_base = cut_shapes(base_model(model, mup_base))
    return {
        name: shape.whole[-1] / of_base[name].whole[-1]
        for name, shape in cut_shapes(model).items()
        if _has_inputs(name, shape)
    }


def _has_inputs(name: str, shape: ParameterShape) -> bool:
    last = len(shape.whole) - 1
    is_table = part_of(name) == "embeddings" or (kind_of(name) == "position" and shape.cut in (last, -1))
    return last > 0 and not is_table


def initial_scale(name: str, ratio: float) -> float:
    """Return the factor of the base's initial standard deviation for a matrix with `ratio` times as many inputs."""
    return ratio ** (-1.0 if part_of(name) == "output" else -0.5)


def check_base(config: RunConfig) -> None:
    """Raise `ConfigError` if `optimizer.mup_base`, which is given, does not fit the run's other settings."""
    model, given = config.model, config.optimizer.mup_base
    for name in given:
        refuse(name not in WIDTHS, f"{KEY}.{name}", "is an unknown key", f"choose from {', '.join(WIDTHS)}")
    why = "whose updates do not depend on width as AdamW's do"
    clashes(config, config.optimizer.kind == "muon", f"{KEY} optimizer.kind", "set it to null, or kind to adamw", why)
    why = "though the input and the output embedding need different rates"
    fix = "set it to null, or tie_embeddings to false"
    clashes(config, model.tie_embeddings, f"{KEY} model.tie_embeddings", fix, why)
    base = base_model(model, given)
    try:
        validate_model(base)
    except ConfigError as error:
        problem = f"gives a model in which {error.subject} {error.problem}"
        raise ConfigError((KEY, *error.subjects), problem, error.fix) from None
    refuse(
        base.head_dim != model.head_dim,
        (KEY, "model.hidden_size", "model.num_attention_heads", "model.kv_channels"),
        f"gives a model whose heads are {base.head_dim} wide, but this model's are {model.head_dim}",
        "change num_attention_heads with hidden_size, so that both have heads of one width",
    )
