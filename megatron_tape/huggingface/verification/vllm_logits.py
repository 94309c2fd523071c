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

# vLLM reads these variables when it is imported. Those that are set already remain.
os.environ |= {
    # Errors of an engine in this process are raised here.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # vLLM for CPUs binds threads to cores otherwise, even if it gets a part of the cores only.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    # See `compute`.
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",
} | os.environ

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


def cache_bytes(config: Any, tokens: int) -> int:
    """Return a size of the cache in which `tokens` tokens fit. `config` is vLLM's ModelConfig.

    Without it, vLLM takes most of the memory.
    """
    keys_and_values = 2 * config.get_total_num_kv_heads() * config.get_head_size()
    bytes_per_token = config.get_total_num_hidden_layers() * keys_and_values * config.dtype.itemsize
    # Heads of TAPE models are twice as large in vLLM's cache. Each kind of layer rounds up to
    # blocks, and has some for itself.
    return 2 * bytes_per_token * (tokens + 8 * BLOCK)


def compute(config: Any, prompts: list[list[int]], together: bool) -> tuple[np.ndarray, list[int]]:
    """Return the logits (P, V) of the last token of each prompt, and how many tokens of each
    prompt were read from the prefix cache.

    With `together`, all prompts are in one batch, with a prefix cache and prefill in chunks.
    Otherwise each prompt is alone. `config` is vLLM's ModelConfig.
    """
    # vLLM counts the token that it generates as part of the context, but computes nothing at its
    # position. A prompt that fills the context is therefore exact, but vLLM takes it only with a
    # larger `max_model_len`, and this only with VLLM_ALLOW_LONG_MAX_MODEL_LEN.
    longest = max(map(len, prompts)) + 1
    llm = vllm.LLM(
        config.model,
        dtype=config.dtype,
        max_model_len=longest,
        kv_cache_memory_bytes=cache_bytes(config, longest),
        block_size=BLOCK,
        enable_prefix_caching=together,
        enable_chunked_prefill=True,
        max_num_batched_tokens=CHUNK if together else max(longest, REQUESTS),
        max_num_seqs=REQUESTS,
        enforce_eager=True,
        # Prompts are token ids.
        skip_tokenizer_init=True,
        logprobs_mode="raw_logits",
        max_logprobs=-1,
    )
    sampling = vllm.SamplingParams(
        temperature=0, max_tokens=1, logprobs=-1, flat_logprobs=True, detokenize=False
    )
    requests = [{"prompt_token_ids": prompt} for prompt in prompts]
    batches = [requests] if together else [[request] for request in requests]
    answers = []
    for batch in batches:
        answers += llm.generate(batch, sampling, use_tqdm=False)

    vocab_size = config.get_vocab_size()
    logits = np.full((len(prompts), vocab_size), np.nan, dtype=np.float32)
    for row, prompt, answer in zip(logits, prompts, answers, strict=True):
        found = answer.outputs[0].logprobs
        row[found.token_ids] = found.logprobs
        if np.isnan(row).any():
            problem = "NaN" if len(set(found.token_ids)) == vocab_size else "only some logits"
            raise RuntimeError(f"vLLM returned {problem} at position {len(prompt) - 1}")
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
        # Of pydantic's errors, leave out the long value, and an address.
        problem = str(error).partition(" [type=")[0]
        return f"{type(error).__name__}: {' '.join(problem.split())}"
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
        options = EngineArgs(arguments.model, dtype=arguments.dtype, skip_tokenizer_init=True)
        config = options.create_model_config()
        # Beyond this context, vLLM reads memory behind its tables of sines and cosines.
        context = min(config.max_model_len, arguments.max_model_len or config.max_model_len)
        positions = positions[positions < context]
        if not len(positions):
            raise ValueError(f"no prompt fits into the {context} tokens that vLLM serves")
        prompts = [tokens[: position + 1].tolist() for position in positions]
        alone, _ = compute(config, prompts, together=False)
        together, cached_tokens = compute(config, prompts, together=True)
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
