"""TAPE language models in vLLM: `register` is its entry point, which vLLM calls in each of its processes.

vLLM's attention averages one value of each token. TAPE's layers average [value | z] of width 2 D; zeros make queries
and keys as wide, and change no score, so that any attention backend of vLLM does both in one call.
"""

ARCHITECTURE = "TapeForCausalLM"
SPECULATIVE_METHODS = ("ngram", "ngram_gpu", "suffix", "draft_model")
"""Those that look at tokens alone."""


def register() -> None:
    """Let vLLM serve TAPE models; a vLLM that has changed serves its other models as before."""
    try:
        from vllm import ModelRegistry
        from vllm.model_executor.models.config import MODELS_CONFIG_MAP, VerifyAndUpdateConfig
    except ImportError as error:
        import warnings

        warnings.warn(
            f"transformers-tape could not add TAPE models to vLLM ({error}); it is tested with vLLM 0.32.0",
            RuntimeWarning,
            stacklevel=2,
        )
        return

    class TapeModels(VerifyAndUpdateConfig):
        verify_and_update_config = staticmethod(prepare)

    # By its name, so that vLLM imports the model only where it runs.
    ModelRegistry.register_model(ARCHITECTURE, f"{__package__}.vllm_model:{ARCHITECTURE}")
    MODELS_CONFIG_MAP[ARCHITECTURE] = TapeModels


def prepare(vllm_config) -> None:
    """Double the width of heads, by which vLLM chooses an attention backend and sizes its memory.

    Raises NotImplementedError for settings with which a TAPE model cannot be served.
    """
    model, speculative = vllm_config.model_config, vllm_config.speculative_config
    problem = fix = None
    if vllm_config.parallel_config.pipeline_parallel_size > 1:
        problem = "pipeline parallelism, whose stages pass on hidden states without the position state"
        fix = "set pipeline_parallel_size to 1; tensor parallelism works"
    elif (kind := vllm_config.cache_config.cache_dtype) not in ("auto", str(model.dtype).removeprefix("torch.")):
        problem = (
            f"a cache of {kind} for a model of {model.dtype}, which would round the position state with the values"
        )
        fix = "leave kv_cache_dtype at auto"
    elif speculative is not None and speculative.method not in SPECULATIVE_METHODS:
        problem = f"the speculative method {speculative.method}, which reads hidden states but no position state"
        fix = f"choose one of {', '.join(SPECULATIVE_METHODS)}"
    if problem:
        raise NotImplementedError(f"TAPE models in vLLM do not support {problem}; {fix}")
    model.model_arch_config.head_size = 2 * model.hf_config.head_dim
