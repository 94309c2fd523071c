"""Tokenizers and models whose answers are known, for tasks that run through
lm-evaluation-harness.
"""

import re
import sys
import sysconfig
from pathlib import Path

import torch
from lm_eval.api.model import LM
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from megatron_tape.data.tokenizer import load_tokenizer
from megatron_tape.evaluation.task import ModelInfo
from megatron_tape.evaluation.tasks.passkey import FILLER, QUESTION, TASK
from megatron_tape.evaluation.transformers_model import HFModel
from megatron_tape.huggingface.tokenizer_files import write_tokenizer

ROOT = Path(__file__).resolve().parents[2]


def sentencepiece_tokenizer(folder, rows=600):
    """A SentencePiece tokenizer trained on source code and on the filler of pass keys."""
    sys.path.insert(0, str(ROOT / "tools"))
    from train_tokenizer import train

    text = (Path(sysconfig.get_path("stdlib")) / "heapq.py").read_text(encoding="utf-8")
    (folder / "tokenizer.model").write_bytes(
        train([text, " ".join([TASK, QUESTION, *[FILLER] * 9])], rows)
    )
    (folder / "exported").mkdir()
    write_tokenizer(
        load_tokenizer(folder / "tokenizer.model"), folder / "exported", 512, "tokenizer.model"
    )
    return AutoTokenizer.from_pretrained(folder / "exported")


BYTES = 258
"""Rows of a tokenizer of single bytes."""


def bpe_tokenizer(bos, rows=900):
    """A byte-level BPE tokenizer, with or without `<s>` before each text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<s>", "</s>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=rows, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    text = (Path(sysconfig.get_path("stdlib")) / "heapq.py").read_text(encoding="utf-8")
    tokenizer.train_from_iterator([text, " ".join([TASK, QUESTION, *[FILLER] * 9])], trainer)
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 0)]
        )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


def random_llama(tokenizer, length, label="random"):
    """A model of random weights that transformers runs."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=length,
        initializer_range=0.3,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return HFModel(info(length, label), LlamaForCausalLM(config), tokenizer)


def info(length=512, label="stand-in"):
    return ModelInfo(
        label=label, vocab_size=1000, trained_length=length, config={}, has_tokenizer=True
    )


class Answering:
    """A model whose answer is a function of the prompt, in place of one that transformers runs."""

    def __init__(self, tokenizer, answer, length=512, label="stand-in"):
        self.info = info(length, label)
        self.tokenizer = tokenizer
        self.answer = answer
        self.prompts = []
        self.max_lengths = []

    def harness(self, batch_size=1, max_length=None):
        self.max_lengths.append(max_length)
        return _Harness(self)


class _Harness(LM):
    """A model class of the harness, so that all other code is the same as for real models."""

    def __init__(self, owner):
        super().__init__()
        self.owner = owner

    def generate_until(self, requests, disable_tqdm=False):
        self.owner.prompts += [request.args[0] for request in requests]
        return [self.owner.answer(request.args[0]) for request in requests]

    def loglikelihood(self, requests, disable_tqdm=False):
        raise NotImplementedError

    def loglikelihood_rolling(self, requests, disable_tqdm=False):
        raise NotImplementedError


def finds_the_key(prompt):
    return " " + re.search(r"The pass key is (\d+)\. Remember", prompt).group(1) + ". The grass"


def word_tokenizer():
    """A tokenizer with one token per word or punctuation mark, and a small vocabulary."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {
        word: index
        for index, word in enumerate(
            ["<s>", "</s>", "<unk>", *"the a is of . : , ? 1 2 3 4".split()]
        )
    }
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
