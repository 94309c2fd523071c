"""Continue a text with an exported model, as transformers loads it.

    python tools/generate.py --model exported/tape_demo --prompt "def main(" --trust-remote-code

The prompt and its continuation, and nothing else, go to stdout.
"""

import argparse
from pathlib import Path

from megatron_tape import command_line
from megatron_tape.errors import FileError, UserError
from megatron_tape.huggingface.imports.config_json import read_settings
from megatron_tape.huggingface.tokenizer_files import read_tokenizer


def main() -> None:
    """Parse the command line, generate and print."""
    arguments = parser().parse_args()
    directory = Path(arguments.model)
    if not (directory / "config.json").is_file():
        raise FileError(str(directory), "is not a directory with a config.json", "give one that to-hf has written")
    settings = read_settings(directory / "config.json")
    if "auto_map" in settings and not arguments.trust_remote_code:
        raise FileError(arguments.model, "includes Python code to run", "read it, and pass --trust-remote-code")
    if arguments.max_new_tokens < 1 or not arguments.temperature >= 0:
        raise UserError("--max-new-tokens", "must be at least 1, and --temperature must not be negative")
    if not any((directory / name).is_file() for name in ("tokenizer.json", "tokenizer.model")):
        raise FileError(str(directory), "does not contain a tokenizer", "export it again with --tokenizer")
    if not 0 <= arguments.seed < 2**32:
        raise UserError("--seed", f"is {arguments.seed}", "give a whole number from 0 below 2**32")
    if not arguments.prompt:
        raise UserError("--prompt", "is empty", "give some text to continue")
    print(arguments.prompt + continuation(arguments, settings.get("max_position_embeddings")))


def continuation(arguments: argparse.Namespace, context: int | None) -> str:
    """Return the text that the model, trained on `context` tokens at once, adds to the prompt."""
    try:
        import transformers
    except ImportError:
        raise UserError("transformers", "is not installed", "pip install transformers") from None

    def load(read):
        try:
            return read(arguments.model, trust_remote_code=arguments.trust_remote_code)
        except Exception as error:  # any error of the libraries below, often with many lines
            reason = str(error).strip().split("\n")[0]
            raise FileError(arguments.model, f"cannot be loaded: {reason or type(error).__name__}") from None

    tokenizer = load(read_tokenizer)
    ids = tokenizer(arguments.prompt, return_tensors="pt", return_token_type_ids=False)
    length, count = ids["input_ids"].shape[1], arguments.max_new_tokens
    if length == 0:
        raise UserError("--prompt", "has no tokens with this tokenizer", "give some text to continue")
    if context is not None and length >= context:
        problem = f"has {length} tokens, and the model was trained on contexts of {context}"
        raise UserError("--prompt", problem, "shorten it")
    if context is not None and length + count > context:
        count = context - length
        command_line.say(f"the model's context of {context} tokens leaves room for {count}")
    with command_line.step(f"loading {arguments.model}"):
        model = load(transformers.AutoModelForCausalLM.from_pretrained)
    transformers.set_seed(arguments.seed)
    # A model's own settings may leave tokens out or penalize them, and transformers' do so where it has none.
    own = model.generation_config
    ids_only = {name: getattr(own, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    model.generation_config = transformers.GenerationConfig(**ids_only)
    sampling = {"do_sample": True, "temperature": arguments.temperature, "top_k": 0} if arguments.temperature else {}
    with command_line.step("generating"):
        output = model.generate(**ids, max_new_tokens=count, **({"do_sample": False} | sampling))
    # Not the new tokens alone, of which some tokenizers leave out the space before the first word.
    before, whole = (tokenizer.decode(output[0, :end], skip_special_tokens=True) for end in (length, None))
    return whole.removeprefix(before)


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    result = command_line.Parser(description=__doc__)
    add = result.add_argument
    add("--model", required=True, metavar="DIR", help="a Hugging Face model with its tokenizer")
    add("--prompt", type=str, required=True, metavar="TEXT", help="what to continue")
    add("--max-new-tokens", type=int, default=64, metavar="N", help="at most this many tokens (default: %(default)s)")
    add(
        "--temperature",
        type=float,
        default=0.0,
        help="0 always takes the likeliest token; above 0, tokens are sampled (default: 0)",
    )
    add("--seed", type=int, default=1234, help="of sampling (default: %(default)s)")
    add("--trust-remote-code", action="store_true", help="run the Python files in DIR, as TAPE models need")
    return result


if __name__ == "__main__":
    command_line.run(main)
