"""Continue texts with a model: a run, a checkpoint, or an exported model.

    python tools/generate.py --model runs/demo/tape --prompt "def main("

The prompt and its continuation, and nothing else, go to stdout. With several prompts, a line `==>
prompt 1 of 3 <==` precedes each of them. The continuation of a prompt does not depend on the other
prompts.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_tape import command_line
from megatron_tape.errors import FileError, UserError
from megatron_tape.evaluation.model_source import ModelSource, find_model
from megatron_tape.extension.rope_scaling import read_options
from megatron_tape.huggingface.tokenizer_files import SPECIAL_IDS, read_tokenizer
from megatron_tape.io.records import read_small

_PROMPT_BYTES = 64 << 20
"""Maximum size of a file of prompts."""


def main() -> None:
    """Parse the command line, generate continuations, and print each after its prompt."""
    arguments = parser().parse_args()
    scaling = read_options(arguments.rope_scaling, arguments.rope_scaling_factor)
    source = find_model(arguments.model, average=arguments.average, scaling=scaling)
    source.check_code(arguments.trust_remote_code)
    _check_numbers(arguments)
    if not source.info.has_tokenizer:
        raise FileError(
            arguments.model,
            "does not contain a tokenizer",
            "export the model with a tokenizer: tools/convert_checkpoint.py to-hf --tokenizer T",
        )
    if reason := source.tokenizer_problem():
        raise FileError(
            arguments.model, f"needs a tokenizer that transformers can read, but its own {reason}"
        )
    prompts = read_prompts(arguments.prompt, arguments.prompts_file)

    with source.in_transformers_format() as directory:
        texts = continuations(arguments, prompts, source, directory)
        for number, (prompt, text) in enumerate(zip(prompts, texts), 1):
            if len(prompts) > 1:
                print(f"==> prompt {number} of {len(prompts)} <==")
            print(prompt + text, flush=True)


def _check_numbers(arguments: argparse.Namespace) -> None:
    """Raise UserError if an option with a number is out of bounds."""
    if not arguments.temperature >= 0:  # also true for NaN
        raise UserError("--temperature", f"is {arguments.temperature}", "give at least 0")
    if not 0 < arguments.top_p <= 1:
        raise UserError("--top-p", f"is {arguments.top_p}", "give a number above 0 and at most 1")
    if arguments.top_p < 1 and arguments.temperature == 0:
        raise UserError(
            "--top-p",
            f"is {arguments.top_p}, but --temperature 0 always chooses the most likely token",
            "set --temperature above 0, or omit --top-p",
        )
    if not 0 <= arguments.seed < 2**32:  # NumPy's limit
        raise UserError("--seed", f"is {arguments.seed}", "give a whole number from 0 to 2**32 - 1")


def read_prompts(texts: list[str], file: Path | None) -> list[str]:
    """Return the prompts `texts`, then the lines of `file`.

    Raises UserError if there are none, or if one is empty.
    """
    prompts = list(texts)
    if file is not None:
        try:
            content = read_small(file, _PROMPT_BYTES).decode("utf-8-sig")
        except (OSError, ValueError) as error:
            raise FileError(
                file,
                f"cannot be read: {error}",
                "give a text file in UTF-8 with one prompt per line",
            ) from None
        # Not `splitlines`, which would also split at form feeds and separators of Unicode.
        prompts += content.replace("\r\n", "\n").removesuffix("\n").split("\n")
    if not prompts:
        raise UserError("--prompt", "is missing", "give --prompt TEXT or --prompts-file FILE")
    if "" in prompts:
        number = prompts.index("") + 1
        raise UserError(f"prompt {number}", "is empty", "give some text to continue")
    return prompts


def continuations(
    arguments: argparse.Namespace, prompts: list[str], source: ModelSource, directory: Path
) -> Iterator[str]:
    """Yield the text that the model in `directory` adds to each prompt.

    `arguments` are those of the command line. Checks all prompts before it loads weights. Raises
    FileError if the model cannot be loaded, or has other positions than in its training, and
    UserError for a prompt that is too long, also for the positional encoding.
    """
    import transformers

    from megatron_tape.huggingface.pretrained import cannot_load, load_pretrained
    from megatron_tape.huggingface.verification.phases import check_loaded
    from megatron_tape.huggingface.verification.position_record import check_config

    check_config(directory)
    try:
        tokenizer = read_tokenizer(str(directory), trust_remote_code=source.needs_trust)
    except Exception as error:  # any error of the libraries below, often with many lines
        raise cannot_load(directory, error) from None
    context = arguments.context_length or source.info.trained_length
    requests = []
    for number, prompt in enumerate(prompts, 1):
        inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
        length = inputs["input_ids"].shape[1]
        new_tokens = _count_new_tokens(number, length, arguments.max_new_tokens, context)
        requests.append((inputs, new_tokens))

    with command_line.step(f"loading {arguments.model}"):
        model = load_pretrained(directory, "auto", source.needs_trust)
        check_loaded(model, directory)
    # Of the model's own settings, only the ids of special tokens are kept.
    model.generation_config = transformers.GenerationConfig(
        **_sampling(arguments),
        **{name: getattr(model.generation_config, name) for name in SPECIAL_IDS},
    )

    # One prompt at a time: a batch needs padding, with which a model computes slightly different
    # logits, and which some encodings count as positions.
    for number, (inputs, new_tokens) in enumerate(requests, 1):
        # The seed is set for each prompt, so that its continuation does not depend on the others.
        transformers.set_seed(arguments.seed)
        with command_line.step(f"continuing prompt {number}"):
            try:
                output = model.generate(**inputs, max_new_tokens=new_tokens)
            except NotImplementedError as error:
                # Some encodings cannot continue texts of more tokens than in training.
                raise UserError(
                    f"prompt {number}", f"cannot be continued: {error}", "shorten it"
                ) from None
        # With some tokenizers, decoding only the new tokens would drop the space before the first
        # word.
        length = inputs["input_ids"].shape[1]
        prompt_text = tokenizer.decode(output[0, :length], skip_special_tokens=True)
        whole = tokenizer.decode(output[0], skip_special_tokens=True)
        yield whole.removeprefix(prompt_text)


def _sampling(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the settings of transformers that choose each next token.

    They replace those of the model, which may suppress or penalize tokens.
    """
    if not arguments.temperature:
        return {"do_sample": False}
    return {
        "do_sample": True,
        "temperature": arguments.temperature,
        "top_k": 0,  # no limit; transformers' default is 50
        "top_p": arguments.top_p,
    }


def _count_new_tokens(number: int, length: int, maximum: int, context: int | None) -> int:
    """Return how many tokens to add to prompt `number`, which has `length` tokens.

    That is `maximum`, or fewer if they exceed the context. `context` is its length in tokens, or
    None if it is unknown. Raises UserError if the prompt is empty or fills the context.
    """
    if length == 0:
        raise UserError(
            f"prompt {number}",
            "encodes to no tokens with the model's tokenizer",
            "give some text to continue",
        )
    if context is None or length + maximum <= context:
        return maximum
    room = context - length
    if room <= 0:
        raise UserError(
            f"prompt {number}",
            f"has {length} tokens, but the model's context has {context}",
            "shorten it, or give --context-length if the model can read longer texts than in"
            " training",
        )
    command_line.log(
        f"prompt {number}: the context of {context} tokens leaves room for {room} new tokens"
    )
    return room


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
    add(
        "--average",
        action="store_true",
        help="use the averaged weights of a run with train.average",
    )
    command_line.add_rope_scaling(add)
    add(
        "--context-length",
        type=command_line.whole_number,
        metavar="N",
        help="maximum number of tokens of a prompt and its continuation, for models that can read"
        " longer texts than in training, such as those with sliding windows (default: the number in"
        " training, multiplied by --rope-scaling-factor)",
    )
    add(
        "--prompt",
        type=str,
        action="append",
        default=[],
        metavar="TEXT",
        help="the text to continue; may be given several times",
    )
    add(
        "--prompts-file",
        type=command_line.path,
        metavar="FILE",
        help="a text file with one prompt per line (UTF-8)",
    )
    add(
        "--max-new-tokens",
        type=command_line.whole_number,
        default=64,
        metavar="N",
        help="maximum of tokens to add (default: %(default)s)",
    )
    add(
        "--temperature",
        type=float,
        default=0.0,
        help="0 chooses the most likely token; above 0, tokens are sampled at this temperature"
        " (default: 0)",
    )
    add(
        "--top-p",
        type=float,
        default=1.0,
        metavar="P",
        help="sample only from the most likely tokens whose probabilities add up to P (default: 1,"
        " all tokens)",
    )
    add(
        "--seed",
        type=int,
        default=1234,
        help="seed of sampling, the same for each prompt (default: %(default)s)",
    )
    add(
        "--trust-remote-code",
        action="store_true",
        help="run Python files in MODEL that are not this project's",
    )
    return result


if __name__ == "__main__":
    command_line.run(main)
