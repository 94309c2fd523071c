"""Tokenizers and models for tasks that generate text or run through lm-evaluation-harness."""

import sysconfig
from pathlib import Path

import torch
from lm_eval.api.model import LM
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from megatron_tape.evaluation.task import ModelInfo
from megatron_tape.evaluation.tasks.passkey import FILLER, QUESTION, TASK
from megatron_tape.evaluation.transformers_model import HFModel

BYTES = 258
"""Rows of a tokenizer of single bytes."""


def training_texts():
    """Texts to train tokenizers on: source code, and the texts of passkey prompts."""
    code = (Path(sysconfig.get_path("stdlib")) / "heapq.py").read_text(encoding="utf-8")
    return [code, " ".join([TASK, QUESTION, *[FILLER] * 9])]


def bpe_tokenizer(bos, rows=900):
    """A byte-level BPE tokenizer, with or without `<s>` before each text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=rows,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(training_texts(), trainer)
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 0)]
        )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


def word_tokenizer():
    """A tokenizer with one token per word or punctuation mark, all of them unknown."""
    special = {"<s>": 0, "</s>": 1, "<unk>": 2}
    tokenizer = Tokenizer(models.WordLevel(special, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def random_llama(tokenizer, length):
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
    return HFModel(info(length), LlamaForCausalLM(config), tokenizer)


def info(length):
    return ModelInfo("model", 1000, trained_length=length, config={}, has_tokenizer=True)


class Answering:
    """A model for the harness whose answer is a function of the prompt."""

    def __init__(self, tokenizer, answer):
        self.info = info(1024)
        self.tokenizer = tokenizer
        self.answer = answer
        self.prompts = []
        self.max_lengths = []

    def harness(self, batch_size=1, max_length=None):
        self.max_lengths.append(max_length)
        return _Harness(self)


class _Harness(LM):
    """A model class of the harness, so that all other code is the same as for real models."""

    loglikelihood = loglikelihood_rolling = None

    def __init__(self, owner):
        super().__init__()
        self.owner = owner

    def generate_until(self, requests, disable_tqdm=False):
        prompts = [request.args[0] for request in requests]
        self.owner.prompts += prompts
        return [self.owner.answer(prompt) for prompt in prompts]
