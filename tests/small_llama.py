"""A small model of the Llama family, for tests of programs that import one."""

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast


def write_llama(folder, texts):
    """Write a small Llama of four layers (extend/swa needs as many), whose tokenizer has a chat
    template.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokenizer.train_from_iterator(
        texts[:4], trainers.BpeTrainer(vocab_size=400, special_tokens=special)
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=special[1], eos_token=special[2]
    )
    fast.chat_template = (
        "{% for message in messages %}{{ '<|im_start|>' + message['content'] + '<|im_end|>' }}{%"
        " endfor %}"
    )
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=4)
    heads = dict(num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=2048)
    config = LlamaConfig(
        vocab_size=len(fast),
        **sizes,
        **heads,
        bos_token_id=1,
        eos_token_id=2,
        initializer_range=0.2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
