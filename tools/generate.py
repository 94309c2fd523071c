"""Continue a text with an exported model: transformers alone, no training code.

    python tools/generate.py --model exported/tape_demo --prompt "def main(" --trust-remote-code

The continuation, and nothing else, goes to stdout.
"""

import argparse
import json
from pathlib import Path

from megatron_tape import command_line


def main() -> None:
    """Parse the command line, generate and print."""
    arguments = parser().parse_args()
    path = Path(arguments.model) / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{arguments.model} holds no config.json; give a model that to-hf has written")
    if "auto_map" in json.loads(path.read_text(encoding="utf-8")) and not arguments.trust_remote_code:
        raise ValueError(f"{arguments.model} brings Python code to run; read it, and pass --trust-remote-code")
    if arguments.max_new_tokens < 1 or not arguments.temperature >= 0:
        raise ValueError("--max-new-tokens has to be at least 1, and --temperature not negative")
    if not arguments.prompt:
        raise ValueError("--prompt is empty; give some text to continue")
    print(arguments.prompt + continuation(arguments))


def continuation(arguments: argparse.Namespace) -> str:
    """Return the text that the model adds to the prompt."""
    try:
        import transformers
    except ImportError:
        raise ValueError("transformers is not installed; pip install transformers") from None
    with command_line.step(f"loading {arguments.model}"):
        code = {"trust_remote_code": arguments.trust_remote_code}
        try:
            tokenizer = transformers.AutoTokenizer.from_pretrained(arguments.model, **code)
            model = transformers.AutoModelForCausalLM.from_pretrained(arguments.model, **code)
        except Exception as error:  # whatever the libraries below raise, often over many lines
            reason = str(error).strip().split("\n")[0]
            raise ValueError(f"{arguments.model} cannot be loaded: {reason or type(error).__name__}") from None
    ids = tokenizer(arguments.prompt, return_tensors="pt", return_token_type_ids=False)
    if ids["input_ids"].shape[1] == 0:
        raise ValueError("--prompt has no token for this tokenizer; give some text to continue")
    transformers.set_seed(arguments.seed)
    sampling = {"do_sample": True, "temperature": arguments.temperature} if arguments.temperature else {}
    with command_line.step("generating"):
        output = model.generate(**ids, max_new_tokens=arguments.max_new_tokens, **({"do_sample": False} | sampling))
    return tokenizer.decode(output[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    result = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = result.add_argument
    add("--model", required=True, metavar="DIR", help="a Hugging Face model with its tokenizer")
    add("--prompt", required=True, metavar="TEXT", help="what to continue")
    add("--max-new-tokens", type=int, default=64, metavar="N", help="at most this many tokens (default: %(default)s)")
    add("--temperature", type=float, default=0.0, help="0 takes the likeliest token; above it, sample (default: 0)")
    add("--seed", type=int, default=1234, help="of sampling (default: %(default)s)")
    add("--trust-remote-code", action="store_true", help="run the Python files in DIR, as TAPE models need")
    return result


if __name__ == "__main__":
    command_line.run(main)
