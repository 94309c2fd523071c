"""Compare generation with TAPE and with a Llama of the same size: prefill time and decode time per
token.

    python -m benchmarks.generate [--output FILE.json]

Both models run in one process and alternate, pass by pass and token by token, so that other load on
the machine affects both alike. Ratios are medians over consecutive pairs. The device is
synchronized after every token, so on a GPU the time to launch kernels counts.

A parity check comes first, with models of the same widths but at most `PARITY_LAYERS` layers; no
figure appears if it fails. With TAPE's matrices at zero, TAPE and Llama must have the same logits.
With random matrices, sdpa and eager attention must have the same logits. Both models must generate
the same tokens with each type of cache as without one.
"""

import argparse
import functools
import statistics
import sys

import torch
from transformers import (
    Cache,
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    StaticCache,
)

from benchmarks.environment import Record
from benchmarks.timing import (
    DTYPES,
    add_time_arguments,
    device_here,
    median_ratio,
    seconds_per_call,
)
from megatron_tape import command_line
from megatron_tape.command_line import whole_number
from megatron_tape.huggingface.modeling.configuration_tape import TapeConfig
from megatron_tape.huggingface.modeling.modeling_tape import TapeForCausalLM

Models = dict[str, PreTrainedModel]
CACHES = ("dynamic", "static")
# Sizes of the parity check.
PARITY_LAYERS = 4
PARITY_TOKENS = 300
TOY = {
    "layers": 2,
    "heads": 4,
    "groups": 2,
    "head_dim": 16,
    "ffn": 64,
    "vocab_size": 128,
    "lengths": [64],
    "cached_tokens": 8,
}
"""The options of --toy."""


def build_models(arguments: argparse.Namespace, layers: int, dtype: torch.dtype) -> Models:
    """Return a `llama` and a `tape` model of `layers` layers with the same weights, which have the
    same logits.

    The widths are those of `arguments`. TAPE's matrices are at their initial values.
    """
    width = arguments.heads * arguments.head_dim
    settings = dict(
        vocab_size=arguments.vocab_size,
        hidden_size=width,
        intermediate_size=arguments.ffn or 4 * width,
        num_hidden_layers=layers,
        num_attention_heads=arguments.heads,
        num_key_value_heads=arguments.groups or arguments.heads,
        max_position_embeddings=2 * max(*arguments.lengths, PARITY_TOKENS),
        rms_norm_eps=1e-5,
        attn_implementation="sdpa",
    )
    torch.manual_seed(0)
    with device_here():  # initializing on the CPU takes long
        models = {
            "llama": LlamaForCausalLM(LlamaConfig(**settings)),
            "tape": TapeForCausalLM(TapeConfig(**settings)),
        }
    # Not strict, since the Llama has no TAPE matrices.
    models["tape"].load_state_dict(models["llama"].state_dict(), strict=False)
    for model in models.values():
        for parameter in model.parameters():  # not buffers: phases must stay in float32
            parameter.data = parameter.data.to(dtype)
        model.eval()
    return models


def randomize(model: PreTrainedModel) -> None:
    """Add noise to TAPE's matrices, since zeros would hide errors."""
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if ".position." in name:
            parameter.add_((torch.randn(parameter.shape, generator=generator) * 0.05).to(parameter))


def check_parity(arguments: argparse.Namespace) -> None:
    """Run the parity check described at the top of this file, and exit with a message if it
    fails.
    """
    # In float64, where rounding does not change which token is sampled.
    models = build_models(arguments, min(arguments.layers, PARITY_LAYERS), torch.float64)
    # `double` also converts buffers, which `build_models` leaves in float32.
    llama, tape = (models[name].double() for name in ("llama", "tape"))
    prompt = torch.randint(1, arguments.vocab_size, (1, PARITY_TOKENS), device=device_here())

    # First with TAPE's matrices at zero, then with random ones.
    zero_logits = tape(prompt).logits
    randomize(tape)
    logits = tape(prompt).logits
    tape.set_attn_implementation("eager")
    eager_difference = (logits - tape(prompt).logits).abs().max().item()
    llama_difference = (zero_logits - llama(prompt).logits).abs().max().item()
    # Both models compute phases in float32, hence 1e-5. Not `>`, which is false for NaN.
    if not (llama_difference <= 1e-5 and eager_difference <= 1e-9):
        sys.exit(
            f"error: logits of TAPE with zero matrices differ by {llama_difference:.1e} from"
            f" Llama's, those of sdpa by {eager_difference:.1e} from eager attention's, so nothing"
            " is measured"
        )

    tape.set_attn_implementation("sdpa")
    for name, model in models.items():
        uncached = sampled_tokens(model, prompt, use_cache=False)
        for kind in CACHES:
            tokens = sampled_tokens(model, prompt, cache_implementation=kind)
            if not torch.equal(tokens, uncached):
                sys.exit(
                    f"error: {name} generates other tokens with a {kind} cache than without;"
                    " nothing is measured"
                )


def sampled_tokens(model: PreTrainedModel, prompt: torch.Tensor, **options) -> torch.Tensor:
    """Return the first 48 tokens of the prompt (1, S) and 32 sampled tokens, (1, 80).

    `options` are further arguments of `generate`. Every call draws the same random numbers.
    """
    torch.manual_seed(2)
    return model.generate(
        prompt[:, :48],
        max_new_tokens=32,
        do_sample=True,
        top_k=0,
        pad_token_id=0,
        # transformers would otherwise compile the model for a static cache on a GPU.
        disable_compile=True,
        **options,
    )


def new_cache(kind: str, model: PreTrainedModel, length: int) -> Cache:
    """Return an empty `dynamic` or `static` cache; a static one has room for `length` tokens."""
    if kind == "dynamic":
        return DynamicCache(config=model.config)
    return StaticCache(model.config, max_cache_len=length)


def decode_seconds(
    models: Models, kind: str, prompt: torch.Tensor, steps: int
) -> dict[str, list[float]]:
    """Return each model's seconds for each of `steps` tokens after `prompt` (1, S), with a cache of
    this `kind`. The models alternate by token.
    """
    length = prompt.shape[1]
    caches = {name: new_cache(kind, model, length + steps) for name, model in models.items()}
    # Fill the caches with the prompt, without timing.
    for name, model in models.items():
        model(prompt, cache=caches[name], use_cache=True, logits_to_keep=1)

    seconds_by_model = {name: [] for name in models}
    for step in range(steps):
        # One token (1, 1). Any will do: the time does not depend on it.
        token = prompt[:, step % length, None]
        for name, model in models.items():
            call = functools.partial(model, token, cache=caches[name], use_cache=True)
            seconds_by_model[name].append(seconds_per_call(call, prompt.device))
    return seconds_by_model


def prefill_seconds(models: Models, prompt: torch.Tensor, passes: int) -> dict[str, list[float]]:
    """Return each model's seconds for each of `passes` prefills of an empty cache with `prompt` (1,
    S).
    """
    seconds_by_model = {name: [] for name in models}
    for _ in range(passes):
        for name, model in models.items():
            cache = new_cache("dynamic", model, prompt.shape[1])
            call = functools.partial(model, prompt, cache=cache, use_cache=True, logits_to_keep=1)
            seconds_by_model[name].append(seconds_per_call(call, prompt.device))
    return seconds_by_model


def summarize(label: str, seconds_by_model: dict[str, list[float]], warmup: int) -> dict:
    """Return and print the medians and the ratio of TAPE's time to Llama's.

    The first `warmup` times are left out. `label` begins the printed line.
    """
    llama = seconds_by_model["llama"][warmup:]
    tape = seconds_by_model["tape"][warmup:]
    medians = {"llama": statistics.median(llama), "tape": statistics.median(tape)}
    ratio = median_ratio(tape, llama)
    times = ", ".join(f"{name} {value:.4f} s" for name, value in medians.items())
    print(f"{label}: {times}; TAPE / Llama {ratio:.3f}", flush=True)
    return {"seconds": medians, "tape_over_llama": ratio, "timed": len(tape)}


def measure(arguments: argparse.Namespace, record: Record) -> None:
    """Check parity, then measure prefill and decoding at every length. Print each result, and
    record those of a length together.
    """
    check_parity(arguments)
    print("parity checked: logits equal Llama's, and a cache changes no token", flush=True)
    models = build_models(arguments, arguments.layers, DTYPES[arguments.precision])
    randomize(models["tape"])
    rows: dict[int, dict] = {}
    parameters = {name: model.num_parameters() for name, model in models.items()}
    text = torch.randint(1, arguments.vocab_size, (1, max(arguments.lengths)), device=device_here())
    for length in arguments.lengths:
        prompt = text[:, :length]
        row = rows[length] = {}
        for kind in CACHES:
            seconds_by_model = decode_seconds(models, kind, prompt, arguments.cached_tokens)
            row[kind] = summarize(
                f"a token after {length}, {kind} cache", seconds_by_model, warmup=4
            )
        seconds_by_model = prefill_seconds(models, prompt, 1 + arguments.passes)
        row["prompt"] = summarize(f"prompt of {length} tokens", seconds_by_model, warmup=1)
        record.write({"parameters": parameters, "lengths": rows})


def main() -> None:
    """Measure, print times and ratios, and write the record to the file that --output names."""
    # The default sizes, larger on a GPU.
    sizes: dict = {"layers": 8, "heads": 12, "head_dim": 64, "lengths": [256, 1024, 4096]}
    if torch.cuda.is_available():
        sizes = {
            "layers": 24,
            "heads": 16,
            "head_dim": 128,
            "ffn": 5504,
            "lengths": [1024, 4096, 8192],
        }
    default = "default: %(default)s"
    parser = command_line.Parser(description=__doc__)
    add = parser.add_argument
    add("--layers", type=whole_number)
    add("--heads", type=whole_number)
    add("--groups", type=whole_number, help="key/value heads, if fewer than heads")
    add("--head-dim", type=whole_number)
    add("--ffn", type=whole_number, help=default)
    add("--vocab-size", type=whole_number, default=32000, help=default)
    add("--lengths", type=whole_number, nargs="+", help=default)
    decoded = "tokens to decode; the first 4 are warm-up"
    add("--cached-tokens", type=whole_number, default=24, help=decoded)
    add("--passes", type=whole_number, default=5, help=f"prefills per length ({default})")
    add("--threads", type=whole_number, help="CPU threads (default: torch's)")
    parser.set_defaults(**sizes)
    add_time_arguments(parser)
    arguments = parser.parse_args()
    if arguments.toy:
        vars(arguments).update(TOY)
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    with torch.no_grad():
        measure(arguments, Record(arguments))


if __name__ == "__main__":
    command_line.run(main)
