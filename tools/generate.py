"""Continue a text with a model: a run, a checkpoint, or an exported model.

    python tools/generate.py --model runs/demo/tape --prompt "def main("

The prompt and its continuation, and nothing else, go to stdout.
"""

import argparse
import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

from megatron_tape import command_line
from megatron_tape.errors import FileError, UserError
from megatron_tape.evaluation.model_source import Source, find_model
from megatron_tape.huggingface.tokenizer_files import read_tokenizer


def main() -> None:
    """Parse the command line, generate a continuation, and print it after the prompt."""
    arguments = parser().parse_args()
    source = find_model(arguments.model, average=arguments.average)
    source.check_code(arguments.trust_remote_code)
    if arguments.max_new_tokens < 1:
        raise UserError("--max-new-tokens", f"is {arguments.max_new_tokens}", "give at least 1")
    if not arguments.temperature >= 0:
        raise UserError("--temperature", f"is {arguments.temperature}", "give a number of at least 0")
    if not source.info.has_tokenizer:
        fix = "export the model with a tokenizer: tools/convert_checkpoint.py to-hf --tokenizer T"
        raise FileError(arguments.model, "does not contain a tokenizer", fix)
    if problem := source.tokenizer_problem():
        raise FileError(arguments.model, f"needs a tokenizer that transformers can read, but its own {problem}")
    if not 0 <= arguments.seed < 2**32:
        raise UserError("--seed", f"is {arguments.seed}", "give a whole number from 0 to 2**32 - 1")
    if not arguments.prompt:
        raise UserError("--prompt", "is empty", "give some text to continue")
    with _in_transformers_format(source) as directory:
        print(arguments.prompt + continuation(arguments, source, directory))


@contextlib.contextmanager
def _in_transformers_format(source: Source) -> Iterator[Path]:
    """Yield the model's directory in transformers' format; a checkpoint is exported to a temporary directory."""
    if not source.is_checkpoint:
        yield source.path
        return
    with tempfile.TemporaryDirectory(prefix="exported-") as directory:
        source.export(Path(directory, "model"), "fp32")
        yield Path(directory, "model")


def continuation(arguments: argparse.Namespace, source: Source, directory: Path) -> str:
    """Return the text that the model in `directory` adds to the prompt."""
    import transformers

    context = source.info.trained_length

    def load(read):
        try:
            return read(str(directory), trust_remote_code=source.needs_trust)
        except Exception as error:  # any error of the libraries below, often with many lines
            reason = str(error).strip().split("\n")[0]
            raise FileError(arguments.model, f"cannot be loaded: {reason or type(error).__name__}") from None

    tokenizer = load(read_tokenizer)
    ids = tokenizer(arguments.prompt, return_tensors="pt", return_token_type_ids=False)
    length, count = ids["input_ids"].shape[1], arguments.max_new_tokens
    if length == 0:
        raise UserError("--prompt", "encodes to no tokens with the model's tokenizer", "give some text to continue")
    if context is not None and length >= context:
        problem = f"has {length} tokens, but the model was trained on contexts of {context}"
        raise UserError("--prompt", problem, "shorten it")
    if context is not None and length + count > context:
        count = context - length
        command_line.log(f"the model's context of {context} tokens leaves room for {count} new tokens")
    with command_line.step(f"loading {arguments.model}"):
        model = load(transformers.AutoModelForCausalLM.from_pretrained)
    transformers.set_seed(arguments.seed)
    # The model's generation settings, and transformers' defaults, may suppress or penalize tokens.
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    ids_only = {name: getattr(model.generation_config, name) for name in names}
    model.generation_config = transformers.GenerationConfig(**ids_only)
    sampling = {"do_sample": True, "temperature": arguments.temperature, "top_k": 0} if arguments.temperature else {}
    with command_line.step("generating"):
        output = model.generate(**ids, max_new_tokens=count, **({"do_sample": False} | sampling))
    # Decoding only the new tokens would drop the space before the first word with some tokenizers.
    before, whole = (tokenizer.decode(output[0, :end], skip_special_tokens=True) for end in (length, None))
    return whole.removeprefix(before)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    result = command_line.Parser(description=__doc__)
    add = result.add_argument
    add(
        "--model",
        required=True,
        metavar="MODEL",
        help="a run, a checkpoint, or an exported model with its tokenizer",
    )
    add("--average", action="store_true", help="use the averaged weights of a run with train.average")
    add("--prompt", type=str, required=True, metavar="TEXT", help="the text to continue")
    add("--max-new-tokens", type=int, default=64, metavar="N", help="maximum of tokens to add (default: %(default)s)")
    add(
        "--temperature",
        type=float,
        default=0.0,
        help="0 chooses the most likely token; above 0, tokens are sampled at this temperature (default: 0)",
    )
    add("--seed", type=int, default=1234, help="seed of sampling (default: %(default)s)")
    add("--trust-remote-code", action="store_true", help="run Python files in MODEL that are not this project's")
    return result


if __name__ == "__main__":
    command_line.run(main)
