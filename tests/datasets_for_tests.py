"""Create indexed datasets and a tokenizer for tests in milliseconds."""

import sysconfig
from pathlib import Path

import numpy as np
import torch

from megatron_tape.data.indexed_dataset import IndexedDatasetWriter

EOD = 63


def source_code(module):
    """Return the source of a standard library module."""
    return (Path(sysconfig.get_path("stdlib")) / f"{module}.py").read_text(encoding="utf-8")


def write_dataset(prefix, documents=120, seed=0, vocabulary=63):
    """Write documents that a tiny model can learn: each counts upward and ends in EOD."""
    generator = torch.Generator().manual_seed(seed)
    written = []
    for _ in range(documents):
        length, start, stride = (
            int(torch.randint(a, b, (1,), generator=generator))
            for a, b in ((8, 40), (0, 60), (1, 5))
        )
        written.append([(start + stride * i) % vocabulary for i in range(length)] + [EOD])
    write_documents(prefix, written, overwrite=True)


def write_documents(prefix, documents, dtype="<u2", **options):
    """Write documents, given as ids, with this project's writer."""
    with IndexedDatasetWriter(prefix, np.dtype(dtype), **options) as writer:
        for document in documents:
            writer.add(
                np.array(document, dtype).tobytes(),
                np.array([len(document)]),
            )
        writer.finish()


def write_tokenizer(path):
    """Write a tokenizer.json of 64 words; the last word ends documents."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {f"w{i}": i for i in range(EOD)} | {"<|endoftext|>": EOD}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.save(str(path))


def bpe_tokenizer(texts, size, special=("<|endoftext|>", "<s>")):
    """Train a tokenizer of bytes, such as GPT-2's."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=list(special), initial_alphabet=alphabet
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def write_all(folder):
    write_dataset(folder / "a", seed=0)
    write_dataset(folder / "b", seed=1)
    write_tokenizer(folder / "tokenizer.json")
    return folder
