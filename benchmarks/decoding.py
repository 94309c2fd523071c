"""Generation with a model as it is exported, a token at a time and in turn with another model."""

import json
import tempfile
import time
from pathlib import Path

import torch
import transformers
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from megatron_tape.config.schema import ModelConfig
from megatron_tape.errors import ConfigError
from megatron_tape.huggingface.export.remote_code import write_code
from megatron_tape.huggingface.export.to_transformers import huggingface_config
from megatron_tape.position import encoding_of

CLOSE = 1e-3
"""Largest difference of logits with and without a cache, relative to their spread, in fp32; ten times as much else."""


class Decoder:
    """An exported model with random weights. Raises ConfigError if a cache changes what it computes."""

    def __init__(self, model: ModelConfig, dtype: torch.dtype, device: torch.device):
        self.model = random_model(model).to(device, dtype).eval()
        self.text = torch.randint(model.vocab_size, (1, model.seq_length), device=device)
        self._check()

    @torch.inference_mode()
    def _check(self) -> None:
        text = self.text[:, :24]
        whole = self.model(text, use_cache=False).logits.float()
        cache = DynamicCache(config=self.model.config)
        parts = [self.model(part, past_key_values=cache).logits.float() for part in text.split([12, 3, *[1] * 9], 1)]
        difference = ((torch.cat(parts, 1) - whole).abs().max() / whole.std()).item()
        allowed = CLOSE if self.model.dtype is torch.float32 else 10 * CLOSE
        if not difference <= allowed:
            raise ConfigError(f"logits with a cache differ by {difference:.2g} of their spread from those without")

    @torch.inference_mode()
    def beside(self, other: "Decoder", context: int, tokens: int) -> list[tuple[float, float]]:
        """Return the seconds of both for each of `tokens` tokens, with a cache that ends with `context` tokens."""
        prompt = self.text[:, : context - tokens - 1]
        caches = [DynamicCache(config=one.model.config) for one in (self, other)]
        for one, cache in zip((self, other), caches):
            one.model(prompt, past_key_values=cache, logits_to_keep=1)
        taken = []
        for i in range(1 + tokens):
            token = self.text[:, i, None]
            taken.append(tuple(_seconds(one.model, token, cache) for one, cache in zip((self, other), caches)))
        return taken[1:]


def random_model(model: ModelConfig) -> PreTrainedModel:
    """Return the transformers model of an export, with random weights that do not depend on the encoding."""
    encoding = encoding_of(model)
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        (directory / "config.json").write_text(json.dumps(huggingface_config(model, model.vocab_size, "fp32")))
        if encoding.exports_to != "plain":
            write_code(directory, None if encoding.exports_to == "tape" else type(encoding))
        config = transformers.AutoConfig.from_pretrained(directory, trust_remote_code=True)
        torch.manual_seed(0)
        made = transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=True)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if ".position." in name:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.02)
    return made


def _seconds(model: PreTrainedModel, token: Tensor, cache: DynamicCache) -> float:
    if token.is_cuda:
        torch.cuda.synchronize()
    started = time.perf_counter()
    model(token, past_key_values=cache)
    if token.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - started
