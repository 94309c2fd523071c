"""Compare generation with TAPE and with a plain Llama of the same size: tokens per second with and without a cache.

    python -m benchmarks.generate [--record]

Both models take turns token by token in one process, and ratios are medians over pairs of neighbouring tokens, so that
other load on the machine affects both alike. No figure appears unless TAPE with its initial zero matrices gives Llama's
logits and, after TAPE's matrices are moved away from zero, both models generate the same tokens with either cache as
without one. Without a cache every token costs a pass over the whole context, so only `--uncached-tokens` are timed.
"""

import argparse
import copy
import statistics
import sys
import time

import torch
import transformers
from transformers import Cache, DynamicCache, LlamaConfig, LlamaForCausalLM, PreTrainedModel, StaticCache

from benchmarks.environment import record
from megatron_tape.huggingface.configuration_tape import TapeConfig
from megatron_tape.huggingface.modeling_tape import TapeForCausalLM

CACHES = ("dynamic", "static")


def build(arguments: argparse.Namespace) -> dict[str, PreTrainedModel]:
    """Return a Llama and a TAPE model with the same weights; TAPE's matrices are zero."""
    settings = dict(
        vocab_size=arguments.vocab_size,
        hidden_size=arguments.heads * arguments.head_dim,
        intermediate_size=4 * arguments.heads * arguments.head_dim,
        num_hidden_layers=arguments.layers,
        num_attention_heads=arguments.heads,
        num_key_value_heads=arguments.groups or arguments.heads,
        max_position_embeddings=2 * max(*arguments.lengths, arguments.steps),
        rms_norm_eps=1e-5,
        attn_implementation="sdpa",
    )
    torch.manual_seed(0)
    models = {"llama": LlamaForCausalLM(LlamaConfig(**settings)), "tape": TapeForCausalLM(TapeConfig(**settings))}
    models["tape"].load_state_dict(models["llama"].state_dict(), strict=False)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[arguments.precision]
    for model in models.values():
        for parameter in model.parameters():  # but not the buffers: phases need float32
            parameter.data = parameter.data.to(dtype)
    return {name: model.to(arguments.device).eval() for name, model in models.items()}


def randomize(model: PreTrainedModel) -> None:
    """Move TAPE's matrices away from zero."""
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if ".position." in name:
            parameter.add_((torch.randn(parameter.shape, generator=generator) * 0.05).to(parameter))


def check_parity(models: dict[str, PreTrainedModel], prompt: torch.Tensor) -> None:
    """Move TAPE's matrices away from zero; exit if the models do not agree as the module's docstring says."""
    # In float64, so that no two tokens lie within rounding of each other.
    llama, tape = (copy.deepcopy(models[name]).double() for name in ("llama", "tape"))
    difference = (tape(prompt).logits - llama(prompt).logits).abs().max().item()
    if difference > 1e-5:
        sys.exit(f"error: with TAPE's matrices at zero the logits differ by {difference:.1e}, so no figure is given")
    randomize(tape)
    randomize(models["tape"])
    for name, model in (("llama", llama), ("tape", tape)):

        def tokens(model: PreTrainedModel = model, **options) -> torch.Tensor:
            torch.manual_seed(2)
            return model.generate(prompt, max_new_tokens=32, do_sample=True, top_k=0, pad_token_id=0, **options)

        uncached = tokens(use_cache=False)
        for kind in CACHES:
            if not torch.equal(tokens(cache_implementation=kind), uncached):
                sys.exit(f"error: {name} generates different tokens with a {kind} cache, so no figure is given")


def new_cache(kind: str, model: PreTrainedModel, length: int) -> Cache:
    """Return an empty transformers cache with room for `length` tokens."""
    return DynamicCache(config=model.config) if kind == "dynamic" else StaticCache(model.config, max_cache_len=length)


def seconds(call, device: torch.device) -> float:
    """Return how long `call` takes."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    started = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started


def cached_seconds(models: dict[str, PreTrainedModel], kind: str, prompt: torch.Tensor, steps: int) -> dict:
    """Return each model's seconds for each of `steps` tokens after `prompt` (1, S); the models take turns."""
    caches = {name: new_cache(kind, model, prompt.shape[1] + steps) for name, model in models.items()}
    for name, model in models.items():
        model(prompt, past_key_values=caches[name], use_cache=True, logits_to_keep=1)
    taken = {name: [] for name in models}
    for step in range(steps):
        token = prompt[:, step % prompt.shape[1], None]
        for name, model in models.items():
            call = lambda: model(token, past_key_values=caches[name], use_cache=True)  # noqa: B023, E731
            taken[name].append(seconds(call, prompt.device))
    return taken


def uncached_seconds(models: dict[str, PreTrainedModel], prompt: torch.Tensor, steps: int) -> dict:
    """Return each model's seconds for a token computed from the whole context `prompt` (1, S), `steps` times."""
    taken = {name: [] for name in models}
    for _ in range(steps):
        for name, model in models.items():
            call = lambda: model(prompt, use_cache=False, logits_to_keep=1)  # noqa: B023, E731
            taken[name].append(seconds(call, prompt.device))
    return taken


def summarize(taken: dict[str, list[float]], skip: int = 0) -> dict:
    """Return medians and the ratio of TAPE's time to Llama's, without the first `skip` tokens."""
    taken = {name: values[skip:] for name, values in taken.items()}
    ratio = statistics.median(t / p for t, p in zip(taken["tape"], taken["llama"]))
    median = {name: statistics.median(values) for name, values in taken.items()}
    return {"seconds_per_token": median, "tape_over_llama": ratio, "tokens_timed": len(taken["tape"])}


def measure(arguments: argparse.Namespace) -> dict:
    """Measure at every length, then the cost per token during one long generation; print results as they come."""
    models = build(arguments)
    text = torch.randint(1, arguments.vocab_size, (1, max(arguments.lengths)), device=arguments.device)
    check_parity(models, text[:, :48])
    print("parity: TAPE with zero matrices equals Llama; tokens with a cache equal those without")
    result: dict = {"lengths": {}, "along": {}}
    for length in arguments.lengths:
        prompt = text[:, :length]
        at = {kind: summarize(cached_seconds(models, kind, prompt, arguments.cached_tokens), 4) for kind in CACHES}
        at["none"] = summarize(uncached_seconds(models, prompt, arguments.uncached_tokens))
        result["lengths"][length] = at
        for kind, row in at.items():
            rates = ", ".join(f"{name} {1 / value:.2f}" for name, value in row["seconds_per_token"].items())
            print(f"{length} tokens, cache {kind}: {rates} tokens/s; TAPE / Llama time {row['tape_over_llama']:.3f}")
        speedup = {
            kind: at["none"]["seconds_per_token"]["tape"] / at[kind]["seconds_per_token"]["tape"] for kind in CACHES
        }
        at["speedup"] = speedup
        print(
            f"{length} tokens: TAPE with a cache is {speedup['dynamic']:.0f} (static {speedup['static']:.0f}) x faster"
        )
    for kind in CACHES:
        taken = cached_seconds(models, kind, text[:, :8], arguments.steps)
        window = max(1, arguments.steps // 20)
        growth = {
            name: statistics.median(values[-window:]) / statistics.median(values[1 : window + 1])
            for name, values in taken.items()
        }
        whole = summarize(taken, 1)
        result["along"][kind] = {"last_over_first": growth, **whole}
        print(
            f"{arguments.steps} tokens in a row, {kind} cache: the last tokens cost "
            + ", ".join(f"{value:.3f} ({name})" for name, value in growth.items())
            + f" times as much as the first; TAPE / Llama time {whole['tape_over_llama']:.3f}"
        )
    return result


def main() -> None:
    """Print rates and ratios; `--record` also writes them to benchmarks/results/."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--groups", type=int, help="key/value heads, if fewer than heads")
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--vocab-size", type=int, default=32000)
    parser.add_argument("--lengths", type=int, nargs="+", default=[256, 1024, 4096])
    parser.add_argument("--cached-tokens", type=int, default=24, help="tokens per length; the first 4 are not counted")
    parser.add_argument("--uncached-tokens", type=int, default=3, help="tokens timed at each length")
    parser.add_argument("--steps", type=int, default=1000, help="tokens of one long generation")
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    parser.add_argument("--threads", type=int, help="CPU threads (default: torch's own choice)")
    parser.add_argument("--record", action="store_true", help="write benchmarks/results/generate-*.json")
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    with torch.no_grad():
        result = measure(arguments)
    if arguments.record:
        settings = vars(arguments) | {"device": str(arguments.device), "threads": torch.get_num_threads()}
        record("generate", {"arguments": settings, "transformers": transformers.__version__, **result})


if __name__ == "__main__":
    main()
