"""Train a SentencePiece tokenizer that reproduces every text exactly, including source code.

    python tools/train_tokenizer.py --input data/stdlib.jsonl --vocab-size 4096 \\
        --output data/tokenizer.model

Characters in no piece are encoded as bytes. Ids: 0 <pad>, 1 <unk>, 2 <s>, 3 </s>, then bytes and
pieces. The only character that is not reproduced is U+2581, which SentencePiece uses for the space.
The same input and options give the same tokenizer.
"""

import argparse
import contextlib
import heapq
import io
import itertools
import random
import re
import signal
from collections.abc import Iterable, Iterator

from megatron_tape import command_line
from megatron_tape.data import hub
from megatron_tape.data.documents import FORMATS, add_text_options, find_inputs, read_texts
from megatron_tape.errors import ConfigError
from megatron_tape.io.files import atomic_output
from megatron_tape.text import counted

_SENTENCE_CHARACTERS = 1000
"""Maximum length of the pieces into which texts are split: SentencePiece drops long sentences."""


def main() -> None:
    """Parse the command line, train a tokenizer and write its model."""
    arguments = parser().parse_args()
    paths = find_inputs(arguments.input, arguments)
    # Opened first, so that an existing output is refused before anything is downloaded.
    with atomic_output(arguments.output, overwrite=arguments.overwrite) as file:
        if not arguments.streaming:
            hub.download(paths)
        documents = read_texts(
            paths, arguments.text_key, document_bytes=arguments.max_document_bytes
        )
        documents = itertools.islice(documents, arguments.max_documents)
        texts = sample_texts(documents, arguments.max_bytes, arguments.seed)
        if not texts:
            raise ConfigError("--input", "has no documents", "check the paths")
        size = sum(len(text.encode("utf-8")) for text in texts)
        command_line.log(f"training on {counted(len(texts), 'document')}, {size / 1e6:,.1f} MB")
        with (
            command_line.step(f"training {arguments.vocab_size:,} {arguments.model_type} pieces"),
            # Python's handlers would run only after the library's C++ code has returned.
            default_signal_handlers(),
        ):
            file.write(train(texts, arguments.vocab_size, arguments.model_type))
    command_line.log(f"wrote {arguments.output}")


def sample_texts(documents: Iterable[tuple[str, int]], max_bytes: int, seed: int) -> list[str]:
    """Return a random sample of the documents, in order, of at most `max_bytes` UTF-8 bytes.

    `documents` yields texts and the number of input bytes read so far, for the progress. Each
    document is given a random number, and those with the smallest numbers are kept. This takes one
    pass over the input, and memory for `max_bytes`. Only the beginning of a document of more than
    `max_bytes` is used.
    """
    draw = random.Random(seed)
    progress = command_line.Progress(total=None)  # shows no percentage
    # A heap with the largest number first: `heapq` pops the smallest, so numbers are negative.
    sample = []
    size = 0  # UTF-8 bytes of the sample
    # A document whose number exceeds that of one already dropped cannot be among the smallest.
    limit = 1.0
    for order, (text, bytes_read) in enumerate(documents):
        length = len(text.encode("utf-8"))
        if length > max_bytes:
            text = text[: max_bytes // 4]  # a character has at most 4 bytes
            length = len(text.encode("utf-8"))
        # Drawn even for a document that is dropped, so that numbers depend only on the order.
        number = draw.random()
        if number < limit:
            heapq.heappush(sample, (-number, order, length, text))
            size += length
        while size > max_bytes:
            negative_number, _, dropped_length, _ = heapq.heappop(sample)
            limit = -negative_number
            size -= dropped_length
        # The argument of the message, the seconds so far, is unused.
        progress.update(bytes_read, lambda _: f"reading: {bytes_read / 1e6:,.1f} MB")  # noqa: B023
    progress.end()
    return [text for _, _, _, text in sorted(sample, key=lambda entry: entry[1])]


def sentences(texts: list[str]) -> Iterator[str]:
    """Split texts into pieces of at most `_SENTENCE_CHARACTERS`, after a newline if possible."""
    # Matches up to the last newline that fits, or as many characters as fit if there is none.
    pattern = re.compile(
        rf"(?s:.{{1,{_SENTENCE_CHARACTERS}}}(?<=\n)|.{{1,{_SENTENCE_CHARACTERS}}})"
    )
    for text in texts:
        yield from pattern.findall(text)


def train(texts: list[str], vocab_size: int, model_type: str = "bpe") -> bytes:
    """Return a SentencePiece model of `vocab_size` pieces as bytes.

    Raises ConfigError if SentencePiece refuses.
    """
    import sentencepiece

    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=sentences(texts),
            model_writer=model,
            model_type=model_type,
            vocab_size=vocab_size,
            max_sentence_length=4 * _SENTENCE_CHARACTERS,  # in bytes, 4 per character at most
            # Rare characters become bytes instead of pieces.
            byte_fallback=True,
            character_coverage=0.9995,
            # By default, SentencePiece changes characters and spaces, and adds a space.
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
            # Pieces of several spaces, for indented source code.
            allow_whitespace_only_pieces=True,
            pad_id=0,
            unk_id=1,
            bos_id=2,
            eos_id=3,
            minloglevel=2,  # errors only
        )
    # A ValueError is raised for numbers that SentencePiece cannot hold.
    except (RuntimeError, OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        # If the text is too small for so many pieces, the message names the maximum.
        maximum = re.search("set it to a value <= ([0-9]+)", reason)
        problem = f"is {vocab_size}, which SentencePiece refuses: {reason}"
        fix = "choose another size"
        if maximum:
            problem = f"is {vocab_size}, too many for this text"
            fix = f"choose at most {maximum[1]}, or give more text"
        raise ConfigError("--vocab-size", problem, fix) from error
    return model.getvalue()


@contextlib.contextmanager
def default_signal_handlers() -> Iterator[None]:
    """Within the context, SIGINT and SIGTERM end the process at once.

    A Python handler runs only when a call of C++ code has returned, and SentencePiece returns only
    after training.
    """
    numbers = (signal.SIGINT, signal.SIGTERM)
    handlers = {number: signal.signal(number, signal.SIG_DFL) for number in numbers}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    result = command_line.Parser(description=__doc__, epilog=FORMATS)
    add_text_options(result)
    add = result.add_argument
    add(
        "--vocab-size",
        type=command_line.whole_number,
        default=4096,
        help="number of ids (default: %(default)s)",
    )
    add("--output", required=True, metavar="F.model", help="the model to write")
    add(
        "--model-type",
        choices=("bpe", "unigram"),
        default="bpe",
        help="default: %(default)s; unigram trains slower",
    )
    add(
        "--max-bytes",
        type=command_line.whole_number,
        default=10_000_000,
        help="train on a random sample of documents of this size (default: %(default)s)",
    )
    add(
        "--seed", type=int, default=0, help="seed for choosing the documents (default: %(default)s)"
    )
    add("--overwrite", action="store_true", help="replace an existing output")
    return result


if __name__ == "__main__":
    command_line.run(main)
