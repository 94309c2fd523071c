"""TAPE language models in vLLM: `register` is the plug-in's entry point, which vLLM calls in each
of its processes.

TAPE's layers average the position state z with the values. vLLM's attention averages one value per
token, so the value of a TAPE model is [value | z], of size 2 D for heads of dimension D. Queries
and keys are padded with zeros to the same size, which does not change scores. Therefore any
attention backend of vLLM can be used.
"""

ARCHITECTURE = "TapeForCausalLM"
SPECULATIVE_METHODS = ("ngram", "ngram_gpu", "suffix", "draft_model")
"""Supported methods of speculative decoding: those that use no hidden states of the model."""


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
