"""Which parameters a run trains, and how many these are."""

from collections import Counter
from collections.abc import Callable

import torch

from megatron_tape.config.schema import ExtensionConfig
from megatron_tape.model.language_model import LanguageModel
from megatron_tape.model.names import kind_of
from megatron_tape.model.pipeline import TIED, Pipeline
from megatron_tape.parallel.layout import ParallelLayout

Trains = Callable[[str, torch.nn.Parameter], bool]
"""Whether the parameter of this name is trained."""


def trained_by(extension: ExtensionConfig) -> Trains:
    """Return what `extension.trains` chooses."""
    return lambda name, parameter: "all" in extension.trains or kind_of(name) in extension.trains


def select_trained(model: LanguageModel | Pipeline, trains: Trains, recomputes: bool) -> None:
    """Freeze the parameters for which `trains` is false.

    Raises ValueError if no parameter is left to train; a pipeline stage may have none.

    If layers are recomputed, gradients flow only if a layer's input requires them, so the output of a frozen embedding
    is made to require them.
    """
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trains(name, parameter))
    if isinstance(model, LanguageModel) and not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError("no parameter of the model is trained")
    if isinstance(model, Pipeline) and model.tied is not None:
        # Only the first stage has the parameter, and all must know.
        model.tied.trained = trains(TIED, torch.nn.Parameter(torch.empty(model.tied.shape, device="meta")))
    if not recomputes or model.embedding is None:
        return
    if not any(parameter.requires_grad for parameter in model.embedding.parameters()):
        model.embedding.register_forward_hook(lambda _module, _input, output: output.requires_grad_())


def parameter_table(model: LanguageModel | Pipeline, layout: ParallelLayout) -> str:
    """Return a table of the trained and the total parameters of the whole model by kind, and their sums.

    The model must not be partitioned by ZeRO yet.
    """
    trained: Counter[str] = Counter()
    total: Counter[str] = Counter()
    for name, parameter in model.named_parameters():
        cut = getattr(parameter, "tensor_model_parallel", False)
        for kind in (kind_of(name), "together"):
            whole = parameter.numel() * (layout.tensor_parallel_size if cut else 1)
            total[kind] += whole
            trained[kind] += whole * parameter.requires_grad
    none: Counter[str] = Counter()
    trained, total = (sum(layout.gather_stages(counted), none) for counted in (trained, total))
    total["together"] = total.pop("together")  # to the end
    width = max(len(f"{number:,}") for number in total.values())
    lines = [f"{'parameters':<12}{'trained':>{width}}  {'of':>{width}}"]
    lines += [f"{kind:<12}{trained[kind]:>{width},}  {total[kind]:>{width},}" for kind in total]
    return "\n".join(lines)
