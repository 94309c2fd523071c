"""Write the logits that vLLM computes for given tokens.

    python vllm_logits.py MODEL tokens.npz logits.npz --dtype float32

Runs in an environment with vLLM, and does not need this project. `tokens.npz` has the arrays
`tokens` (S,) and `positions` (P,). The output also has `logits` and `logits_together`, (P, V) in
float32, those of the next token after each prompt `tokens[: position + 1]`:

- `logits`: each prompt alone, in one step, without a prefix cache;
- `logits_together`: all prompts in one batch, with a prefix cache and prefill in chunks.

Prompts that are longer than vLLM serves are left out; `positions` names the others. The array
`cached_tokens` (P,) has the number of tokens that were read from the prefix cache.
"""

import argparse
import gc
import json
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

DEFAULTS = {
    # Errors of an engine in this process are raised here.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # GiB for keys and values on a CPU.
    "VLLM_CPU_KVCACHE_SPACE": "4",
    # Otherwise vLLM binds threads to cores, which fails in some containers.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    # See `served_context`.
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",
}
"""Environment variables, unless they are set. vLLM reads them when it is imported."""
for variable, value in DEFAULTS.items():
    os.environ.setdefault(variable, value)

import numpy as np
import torch
import vllm
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform

CHUNK = 64
"""Tokens of a step, of all requests together, when prompts are read in chunks."""
BLOCK = 32
"""Tokens of a block of the cache. Prefixes are shared in whole blocks."""
REQUESTS = 16
"""Largest number of requests in a step; vLLM wants a step to have at least as many tokens."""


def served_context(model: str) -> int:
    """Return the number of tokens for which vLLM has positions.

    vLLM counts the token that it generates as part of the context, but computes no position for
    it. Therefore a prompt may be as long as this if `max_model_len` is larger by one, which vLLM
    allows only with VLLM_ALLOW_LONG_MAX_MODEL_LEN. Beyond, it reads memory behind its table of
    sines and cosines.
    """
    options = EngineArgs(model=model, skip_tokenizer_init=True)
    return options.create_model_config().max_model_len


def compute(
    model: str, prompts: list[list[int]], at_once: bool, **options: Any
) -> tuple[np.ndarray, list[int]]:
    """Return the logits (P, V) of the last token of each prompt, and how many tokens of each
    prompt were read from the prefix cache.

    With `at_once`, all prompts are in one batch, otherwise each is alone. `options` are those of
    `vllm.LLM`.
    """
    llm = vllm.LLM(
        model,
        max_model_len=max(map(len, prompts)) + 1,
        max_num_seqs=REQUESTS,
        block_size=BLOCK,
        enforce_eager=True,
        # Prompts are token ids.
        skip_tokenizer_init=True,
        logprobs_mode="raw_logits",
        max_logprobs=-1,
        **options,
    )
    sampling = vllm.SamplingParams(
        temperature=0, max_tokens=1, logprobs=-1, flat_logprobs=True, detokenize=False
    )
    requests = [{"prompt_token_ids": prompt} for prompt in prompts]
    batches = [requests] if at_once else [[request] for request in requests]
    answers = []
    for batch in batches:
        answers += llm.generate(batch, sampling, use_tqdm=False)

    vocab_size = llm.llm_engine.model_config.get_vocab_size()
    logits = np.full((len(prompts), vocab_size), np.nan, dtype=np.float32)
    for row, answer in zip(logits, answers, strict=True):
        found = answer.outputs[0].logprobs
        row[found.token_ids] = found.logprobs
    if np.isnan(logits).any():
        raise RuntimeError("vLLM returned NaN, or no logit for some tokens")
    cached_tokens = [answer.num_cached_tokens or 0 for answer in answers]

    # Free the memory for the next engine.
    del llm
    gc.collect()
    cleanup_dist_env_and_memory()
    # On a CPU, vLLM replaces its kernels for each engine. The second time, this would fail because
    # of modules that were imported since.
    type(current_platform).register_triton_kernel_overrides = classmethod(lambda cls: None)
    return logits, cached_tokens


def unknown_architectures(model: str) -> list[str]:
    """Return the model's architectures that this vLLM does not have."""
    with suppress(OSError, ValueError):
        config = json.loads(Path(model, "config.json").read_text(encoding="utf-8"))
        known = vllm.ModelRegistry.get_supported_archs()
        return [name for name in config.get("architectures") or [] if name not in known]
    return []


def explanation(model: str, error: Exception) -> str:
    """Return one line about an error of vLLM."""
    unknown = unknown_architectures(model)
    if not unknown:
        return f"{type(error).__name__}: {' '.join(str(error).split())}"
    sentence = f"vLLM {vllm.__version__} does not know the architecture {unknown[0]}"
    if unknown[0] == "TapeForCausalLM":
        sentence += f"; install its plug-in: {sys.executable} -m pip install ./transformers_tape"
    return sentence


def main() -> None:
    """Compute and write the logits. Exits with a line that begins with `error:` if that fails."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="directory of the model")
    parser.add_argument("tokens", help="file with the tokens")
    parser.add_argument("output", help="file to write")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument(
        "--max-model-len", type=int, metavar="N", help="leave out prompts of more than N tokens"
    )
    arguments = parser.parse_args()

    with np.load(arguments.tokens, allow_pickle=False) as archive:
        tokens = archive["tokens"]
        positions = archive["positions"]
    try:
        context = served_context(arguments.model)
        context = min(context, arguments.max_model_len or context)
        positions = positions[positions < context]
        if not len(positions):
            raise ValueError(f"no prompt fits into the {context} tokens that vLLM serves")
        prompts = [tokens[: position + 1].tolist() for position in positions]
        longest = max(map(len, prompts))
        alone, _ = compute(
            arguments.model,
            prompts,
            at_once=False,
            dtype=arguments.dtype,
            enable_prefix_caching=False,
            max_num_batched_tokens=max(longest + 1, REQUESTS),
        )
        together, cached_tokens = compute(
            arguments.model,
            prompts,
            at_once=True,
            dtype=arguments.dtype,
            enable_prefix_caching=True,
            enable_chunked_prefill=True,
            max_num_batched_tokens=CHUNK,
        )
    except Exception as error:
        sys.exit(f"error: {explanation(arguments.model, error)}")

    np.savez(
        arguments.output,
        tokens=tokens,
        positions=positions,
        logits=alone,
        logits_together=together,
        cached_tokens=cached_tokens,
    )
    print(f"vLLM {vllm.__version__}, torch {torch.__version__}, {arguments.dtype}")


if __name__ == "__main__":
    main()
