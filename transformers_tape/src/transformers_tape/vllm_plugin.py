"""TAPE language models in vLLM: `register` is the plug-in's entry point, which vLLM calls in each
of its processes.

TAPE's layers average the position state z with the values. vLLM's attention averages one value per
token, so the value of a TAPE model is [value | z], of size 2 D for heads of dimension D. Queries
and keys are padded with zeros to the same size, which does not change scores. Therefore any
attention backend of vLLM can be used.
"""

import json
from pathlib import Path

ARCHITECTURE = "TapeForCausalLM"
SPECULATIVE_METHODS = ("ngram", "ngram_gpu", "suffix", "draft_model")
"""Supported methods of speculative decoding: those that use no hidden states of the model."""
POSITIONS = "positions.json"
"""A file of exports: settings in config.json, and phases that the training's code has computed."""
_DELETE = f"delete {POSITIONS} if the change is intended"


def register() -> None:
    """Register TAPE models with vLLM. If vLLM's interfaces have changed, issue a RuntimeWarning,
    so that vLLM can still serve other models.
    """
    try:
        from vllm import ModelRegistry
        from vllm.model_executor.models.config import MODELS_CONFIG_MAP, VerifyAndUpdateConfig
    except ImportError as error:
        import warnings

        warnings.warn(
            f"transformers-tape could not add TAPE models to vLLM ({error}); it is tested with vLLM"
            " 0.32.0",
            RuntimeWarning,
            stacklevel=2,
        )
        return

    class TapeModels(VerifyAndUpdateConfig):
        """vLLM calls `verify_and_update_config` before it chooses an attention backend."""

        verify_and_update_config = staticmethod(double_head_size)

    # Registered by name, so that vLLM imports the model only in the processes that run it.
    ModelRegistry.register_model(ARCHITECTURE, f"{__package__}.vllm_model:Vllm{ARCHITECTURE}")
    MODELS_CONFIG_MAP[ARCHITECTURE] = TapeModels


def double_head_size(vllm_config) -> None:
    """Set the head size in `vllm_config` to 2 D, so that vLLM's cache can hold [value | z].

    vLLM chooses an attention backend and allocates its cache by this size. Raises
    NotImplementedError for settings that TAPE models do not support.
    """
    model = vllm_config.model_config
    speculative = vllm_config.speculative_config
    cache_dtype = vllm_config.cache_config.cache_dtype
    if vllm_config.parallel_config.pipeline_parallel_size > 1:
        raise NotImplementedError(
            "TAPE models in vLLM do not support pipeline parallelism, since its stages do not send"
            " the position state; set pipeline_parallel_size to 1; tensor parallelism works"
        )
    if cache_dtype not in ("auto", str(model.dtype).removeprefix("torch.")):
        raise NotImplementedError(
            f"TAPE models in vLLM do not support kv_cache_dtype {cache_dtype} with weights in"
            f" {model.dtype}, since it would round the position state; set kv_cache_dtype to auto"
        )
    if speculative is not None and speculative.method not in SPECULATIVE_METHODS:
        raise NotImplementedError(
            f"TAPE models in vLLM do not support the speculative method {speculative.method}, which"
            " uses hidden states without the position state; choose one of"
            f" {', '.join(SPECULATIVE_METHODS)}"
        )
    # Computed from hf_config, since a second call must not double it again.
    model.model_arch_config.head_size = 2 * model.hf_config.head_dim


def check_positions(directory: str, phases) -> None:
    """Raise ValueError if the model in `directory` has other positions than in its training.

    `phases` is the model's `TapePhases`. Nothing is checked if `directory` is not a local directory
    with the file POSITIONS.
    """
    import torch

    file = Path(directory, POSITIONS)
    if not file.is_file():
        return
    record = json.loads(file.read_text(encoding="utf-8"))
    settings = json.loads(Path(directory, "config.json").read_text(encoding="utf-8"))
    for key, exported in record["config"].items():
        if settings.get(key) != exported:
            raise ValueError(
                f"{directory}/config.json has {key} {settings.get(key)}, but was exported with"
                f" {exported}; export the model again, or {_DELETE}"
            )

    # Only the first layer's phases do not depend on the tokens. vLLM sets a default dtype and
    # device for tensors.
    device = phases.inv_freq.device
    of_training = record["phases"][record["layers"][0]["phases"]]
    expected = torch.tensor(of_training, dtype=torch.float32, device=device)
    positions = torch.tensor(record["positions"], dtype=torch.int64, device=device)
    errors = (phases(positions) - expected).abs().amax(dim=-1)
    # Angles are products of positions and frequencies, which another library may round differently.
    differs = errors > 1e-4 + 4e-7 * positions
    if differs.any():
        first = record["positions"][differs.tolist().index(True)]
        raise ValueError(
            f"{directory} has other positions in vLLM than in the training: queries and keys are"
            f" rotated by other angles from position {first} on; remove hf_overrides that change"
            f" rope_parameters, use another version of transformers, or {_DELETE}"
        )
