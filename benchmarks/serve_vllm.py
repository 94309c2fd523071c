"""Compare the tokens per second of a TAPE model and a Llama of the same shape in vLLM on a CPU.

    make .venv-vllm && .venv-vllm/bin/pip install ./transformers_tape
    .venv-vllm/bin/python -m benchmarks.serve_vllm [--output FILE.json]

Each model is served in its own process, and the two alternate, answer by answer, so that other load
on the machine affects both alike. Ratios are medians over consecutive pairs. All requests arrive at
once, with different prompts. The time of the prompts is that of generating one token. If TAPE with
its matrices at zero does not generate the same tokens as Llama, no figure is reported.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

# A small cache (in GiB), since two engines run at the same time.
os.environ |= {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}

import torch
from transformers import LlamaConfig, LlamaForCausalLM, TapeConfig, TapeForCausalLM
from vllm import LLM, SamplingParams

from benchmarks.environment import Record, add_record_arguments
from megatron_tape import command_line
from megatron_tape.command_line import whole_number


def write_models(arguments: argparse.Namespace, folder: Path) -> dict[str, Path]:
    """Write a Llama and two TAPE models with the same weights; return their directories.

    The matrices that only TAPE has are zero in `zero` and random in `tape`.
    """
    width = arguments.heads * arguments.head_dim
    settings = dict(
        vocab_size=arguments.vocab_size,
        hidden_size=width,
        intermediate_size=arguments.ffn,
        num_hidden_layers=arguments.layers,
        num_attention_heads=arguments.heads,
        num_key_value_heads=arguments.groups,
        max_position_embeddings=arguments.prompt + arguments.tokens,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        initializer_range=0.1,  # so that no two tokens are almost equally likely
    )
    torch.manual_seed(0)
    llama = LlamaForCausalLM(LlamaConfig(**settings))
    tape = TapeForCausalLM(TapeConfig(**settings))
    tape.load_state_dict(llama.state_dict(), strict=False)
    paths = {name: folder / name for name in ("llama", "zero", "tape")}
    llama.save_pretrained(paths["llama"])
    tape.save_pretrained(paths["zero"])
    with torch.no_grad():
        for name, parameter in tape.named_parameters():
            if ".position." in name:
                parameter.normal_(std=0.05)
    tape.save_pretrained(paths["tape"])
    return paths


def start(path: Path, arguments: argparse.Namespace) -> LLM:
    """Return a vLLM engine of one model, in fp32 and without a tokenizer."""
    options = dict(
        dtype="float32", enforce_eager=not arguments.compiled, max_num_seqs=max(arguments.requests)
    )
    options |= dict(max_model_len=arguments.prompt + arguments.tokens, enable_prefix_caching=False)
    return LLM(str(path), skip_tokenizer_init=True, **options)


def answer(
    engine: LLM, requests: int, tokens: int, arguments: argparse.Namespace
) -> tuple[float, list]:
    """Generate `tokens` tokens for each of `requests` prompts; return the seconds and the token
    IDs.
    """
    ids = torch.randint(
        1,
        arguments.vocab_size,
        (requests, arguments.prompt),
        generator=torch.Generator().manual_seed(1),
    )
    sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    prompts = [{"prompt_token_ids": row} for row in ids.tolist()]
    began = time.perf_counter()
    outputs = engine.generate(prompts, sampling, use_tqdm=False)
    return time.perf_counter() - began, [output.outputs[0].token_ids for output in outputs]


def compare(engines: dict[str, LLM], requests: int, arguments: argparse.Namespace) -> dict:
    """Return each model's tokens per second, and the ratios of TAPE's time to Llama's for prompts
    and later tokens.
    """
    prompts: dict[str, list[float]] = {name: [] for name in engines}
    later: dict[str, list[float]] = {name: [] for name in engines}
    for turn in range(1 + arguments.passes):
        for name, engine in engines.items():
            first, _ = answer(engine, requests, 1, arguments)
            total, _ = answer(engine, requests, arguments.tokens, arguments)
            if turn:  # the first is a warm-up
                prompts[name].append(first)
                later[name].append(total - first)
    produced = requests * (arguments.tokens - 1)
    rates = {name: produced / statistics.median(seconds) for name, seconds in later.items()}
    return {
        "tokens_per_second": rates,
        "tape_over_llama": {"prompts": _ratio(prompts), "tokens": _ratio(later)},
    }


def _ratio(seconds: dict[str, list[float]]) -> float:
    return statistics.median(t / p for t, p in zip(seconds["tape"], seconds["llama"]))


def main() -> None:
    """Measure, print rates and ratios, and write the record to the file that --output names."""
    parser = command_line.Parser(description=__doc__)
    parser.add_argument("--layers", type=whole_number, default=30)
    parser.add_argument("--heads", type=whole_number, default=9)
    parser.add_argument("--groups", type=whole_number, default=3, help="key/value heads")
    parser.add_argument("--head-dim", type=whole_number, default=64)
    parser.add_argument("--ffn", type=whole_number, default=1536)
    parser.add_argument("--vocab-size", type=whole_number, default=49152)
    parser.add_argument(
        "--requests", type=whole_number, nargs="+", default=[1, 8, 32], help="default: %(default)s"
    )
    parser.add_argument(
        "--prompt",
        type=whole_number,
        default=128,
        help="tokens of each prompt (default: %(default)s)",
    )
    parser.add_argument(
        "--tokens",
        type=whole_number,
        default=64,
        help="tokens of each answer (default: %(default)s)",
    )
    parser.add_argument(
        "--passes", type=whole_number, default=5, help="repetitions (default: %(default)s)"
    )
    parser.add_argument(
        "--compiled", action="store_true", help="compile the models, as vLLM does by default"
    )
    add_record_arguments(parser)
    arguments = parser.parse_args()
    record = Record(arguments)
    with tempfile.TemporaryDirectory() as work:
        paths = write_models(arguments, Path(work))
        engines = {"llama": start(paths["llama"], arguments)}
        zero = start(paths["zero"], arguments)
        answers = [answer(engine, 4, 16, arguments)[1] for engine in (engines["llama"], zero)]
        if answers[0] != answers[1]:
            sys.exit(
                "error: TAPE with its matrices at zero generates other tokens than Llama, so"
                " nothing is measured"
            )
        del zero
        engines["tape"] = start(paths["tape"], arguments)
        result = {}
        for requests in arguments.requests:
            result[requests] = row = compare(engines, requests, arguments)
            rates = ", ".join(
                f"{name} {rate:.1f}" for name, rate in row["tokens_per_second"].items()
            )
            ratios = ", ".join(
                f"{what} {ratio:.3f}" for what, ratio in row["tape_over_llama"].items()
            )
            print(f"{requests} requests: {rates} tokens/s; TAPE / Llama time: {ratios}", flush=True)
            record.write({"requests": result})


if __name__ == "__main__":
    command_line.run(main)
