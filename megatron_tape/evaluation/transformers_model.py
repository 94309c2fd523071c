"""Load models of transformers for evaluation tasks."""

import dataclasses
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_tape.data.tokenizer import TOKENIZER_JSON, Tokenizer
from megatron_tape.errors import ConfigError
from megatron_tape.evaluation.task import ModelInfo
from megatron_tape.huggingface.imports.config_json import read_settings
from megatron_tape.huggingface.pretrained import cache_keyword, cannot_load, load_pretrained
from megatron_tape.huggingface.tokenizer_files import read_tokenizer
from megatron_tape.huggingface.verification.phases import check_loaded
from megatron_tape.huggingface.verification.position_record import check_config
from megatron_tape.parallel.launcher import local_rank
from megatron_tape.text import counted

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
CHUNK = 2048
"""Tokens per forward pass. Longer texts are split into chunks, if the model supports a cache."""
_LOGIT_TOKENS = 1024
"""Maximum number of tokens whose float32 logits are in memory at once."""


class HFModel:
    """A causal language model of transformers; implements `evaluation.task.HuggingFaceModel`."""

    def __init__(
        self,
        info: ModelInfo,
        model: Any,
        tokenizer: Any,
        chunk: int = CHUNK,
        saved_tokenizer: Tokenizer | None = None,
    ):
        """Wrap a `PreTrainedModel` and its tokenizer, which may be None.

        `chunk` is the number of tokens per forward pass. `saved_tokenizer` is the tokenizer of the
        training. If given, it encodes and decodes texts, since `tokenizer` may split some texts
        differently.
        """
        self.info = info
        self.model = model.eval()
        self.tokenizer = tokenizer
        self.chunk = chunk
        self._saved_tokenizer = saved_tokenizer

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self.model.device

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, without beginning-of-text and end-of-text tokens."""
        if self._saved_tokenizer is not None:
            return self._saved_tokenizer.encode(text)
        return self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    def decode(self, tokens: list[int]) -> str:
        """Return the text of token ids, including special tokens and all spaces."""
        if self._saved_tokenizer is not None:
            return self._saved_tokenizer.decode(tokens)
        return self.tokenizer.decode(
            tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )

    @cached_property
    def bos(self) -> list[int]:
        """The beginning-of-text token that the tokenizer adds, as a list, or an empty list."""
        if self._saved_tokenizer is not None:
            return self._saved_tokenizer.prefix_ids
        if self.tokenizer is None:
            return []
        # Some tokenizers have a beginning-of-text token but do not add it.
        first = self.tokenizer("a", verbose=False)["input_ids"][:1]
        if first == [self.tokenizer.bos_token_id]:
            return first
        return []

    @cached_property
    def supports_chunks(self) -> bool:
        """Whether forward passes over chunks of a text with a cache are equivalent to one pass over
        the whole text.

        False for recurrent models, since many models of transformers continue from a recurrent
        state only one token at a time. Also False for RoPE with frequencies that depend on the
        length, since the cached keys of earlier chunks would have other frequencies.
        """
        return not (self.model._is_stateful or self._rope_types & {"dynamic", "longrope"})

    @cached_property
    def _rope_types(self) -> set[str]:
        """The kinds of RoPE scaling that the model's layers have, such as `dynamic`."""
        config = self.model.config.get_text_config(decoder=True)
        parameters = getattr(config, "rope_parameters", None) or {}
        # Some models have parameters for each type of layer.
        by_layer_type = [value for value in parameters.values() if isinstance(value, dict)]
        return {value.get("rope_type", "default") for value in (parameters, *by_layer_type)}

    def _supports_cache(self, length: int) -> bool:
        """Return whether the positional encoding supports a cache for a text of `length` tokens."""
        # Only models that this project exports have this function. It raises NotImplementedError if
        # a cache is not possible.
        check_cached = getattr(self.model.base_model, "check_cached", None)
        try:
            if check_cached is not None:
                check_cached(length)
        except NotImplementedError:
            return False
        return True

    @torch.inference_mode()
    def reset_rope_frequencies(self) -> None:
        """Reset the frequencies of dynamic RoPE, so that results do not depend on earlier texts.

        transformers keeps the frequencies of a long text until it reads a text shorter than the
        trained length.
        """
        if "dynamic" in self._rope_types:
            self.model(torch.zeros(1, 1, dtype=torch.int64, device=self.device), use_cache=False)

    @torch.inference_mode()
    def losses(self, tokens: np.ndarray, first: int) -> np.ndarray:
        """Return the losses (N - first,), float64, of `tokens[first:]` for tokens (N,)."""
        self.reset_rope_frequencies()
        # Datasets store ids in several types.
        ids = torch.from_numpy(np.asarray(tokens, dtype=np.int64)).to(self.device)
        length = len(tokens) - 1  # the last token is only a label
        if length > self.chunk and self.supports_chunks and self._supports_cache(length):
            losses = self._losses_by_chunk(ids, first)
            if losses is not None:
                return losses
            # The model ignores the cache, as models with their own code may do. Later texts do not
            # try it again.
            self.supports_chunks = False
        # If no token is scored, `logits_to_keep` would be 0, which means all logits.
        if first == len(tokens):
            return np.empty(0)
        scored = len(tokens) - first
        output = self.model(ids[None, :-1], use_cache=False, logits_to_keep=scored)
        # Models that ignore `logits_to_keep` return all logits.
        return _cross_entropy(output.logits[0, -scored:], ids[first:]).cpu().numpy()

    def _losses_by_chunk(self, ids: Tensor, first: int) -> np.ndarray | None:
        """Return the losses (N - first,) of token ids (N,), from forward passes with a cache; None
        if the model does not use the cache.
        """
        from transformers import DynamicCache

        cache = DynamicCache(config=self.model.config)
        cache_name = cache_keyword(self.model)

        # `torch.cat` needs at least one tensor, even if no token is scored.
        losses = [torch.empty(0, dtype=torch.float64, device=self.device)]
        input_chunks = ids[:-1].split(self.chunk)
        label_chunks = ids[1:].split(self.chunk)
        for inputs, labels in zip(input_chunks, label_chunks):
            start = cache.get_seq_length()
            # The logits at position i predict token i + 1, so those from position first - 1 on are
            # scored. `scored` is their number in this chunk.
            scored = max(0, len(inputs) - max(0, first - 1 - start))
            output = self.model(
                inputs[None],
                use_cache=True,
                logits_to_keep=max(1, scored),  # 0 would mean all logits
                **{cache_name: cache},
            )
            if cache.get_seq_length() != start + len(inputs):
                return None  # the model ignored the cache
            if scored:
                losses.append(_cross_entropy(output.logits[0, -scored:], labels[-scored:]))
        return torch.cat(losses).cpu().numpy()

    @torch.inference_mode()
    def logits(self, tokens: Tensor) -> Tensor:
        """Return the logits (B, S, V) of tokens (B, S), in float32 on the CPU."""
        self.reset_rope_frequencies()
        return self.model(tokens.to(self.device), use_cache=False).logits.float().cpu()

    @torch.inference_mode()
    def answer(self, prompt: Sequence[int], count: int) -> tuple[str, bool]:
        """Generate at most `count` tokens greedily; return the text, and whether an end came."""
        from transformers import GenerationConfig

        # transformers allows an id, a list of ids or None.
        end_ids = self.model.generation_config.eos_token_id
        if not isinstance(end_ids, list):
            end_ids = [end_ids]
        ends = sorted({*end_ids, self.tokenizer.eos_token_id} - {None})
        settings = GenerationConfig(
            max_new_tokens=count,
            do_sample=False,
            num_beams=1,
            repetition_penalty=1.0,
            eos_token_id=ends or None,
            # A single prompt needs no padding, but transformers would warn about None.
            pad_token_id=next(iter(ends), 0),
        )
        self.reset_rope_frequencies()
        ids = torch.tensor([prompt], device=self.device)
        output = self.model.generate(
            ids, attention_mask=torch.ones_like(ids), generation_config=settings
        )
        generated = output[0, len(prompt) :].tolist()
        # Without an end token, generation stopped after `count` tokens.
        ended = bool(generated) and generated[-1] in ends
        if ended:
            generated.pop()
        return self.tokenizer.decode(generated, skip_special_tokens=True).strip(), ended

    def harness(self, batch_size: int = 1, max_length: int | None = None) -> Any:
        """Return this model as an `HFLM` of lm-evaluation-harness."""
        from megatron_tape.evaluation.tasks.harness_model import harness_model

        self.reset_rope_frequencies()
        return harness_model(self, batch_size, max_length)


def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the losses (N,), float64, of logits (N, V) for labels (N,). Converts few logits to
    float32 at once.
    """
    losses = [
        F.cross_entropy(part.float(), label, reduction="none")
        for part, label in zip(logits.split(_LOGIT_TOKENS), labels.split(_LOGIT_TOKENS))
    ]
    return torch.cat(losses).double()


def load_model(
    info: ModelInfo,
    directory: Path,
    dtype: str,
    device: str,
    trust_remote_code: bool = False,
    saved_tokenizer: Tokenizer | None = None,
) -> HFModel:
    """Load a model in transformers format from safetensors files. Raises FileError if transformers
    cannot load it, or computes other positions than its training (see `verification.phases`).

    `saved_tokenizer` is the tokenizer of the training. If given, it encodes and decodes texts, and
    the directory needs no tokenizer.
    """
    import transformers

    check_config(directory)
    model = load_pretrained(directory, DTYPES[dtype], trust_remote_code)
    # Texts are generated greedily, without the model's settings for sampling or repetition.
    model.generation_config = transformers.GenerationConfig(
        bos_token_id=model.generation_config.bos_token_id,
        eos_token_id=model.generation_config.eos_token_id,
        pad_token_id=model.generation_config.pad_token_id,
    )
    tokenizer = None
    # A checkpoint with a tokenizer that transformers lacks is exported without it.
    in_directory = saved_tokenizer is None or (directory / TOKENIZER_JSON).is_file()
    if info.has_tokenizer and in_directory:
        try:
            tokenizer = read_tokenizer(
                directory, trust_remote_code=trust_remote_code, local_files_only=True
            )
        except Exception as error:  # of any type
            raise cannot_load(directory, error) from None
        # Avoids a warning for each long text; tasks truncate texts themselves.
        tokenizer.model_max_length = int(1e30)
        # As in training, no text encodes to a special token.
        tokenizer.split_special_tokens = True

    info = dataclasses.replace(
        info,
        config=read_settings(directory / "config.json"),
        has_tokenizer=saved_tokenizer is not None or tokenizer is not None,
    )
    loaded = HFModel(info, model.to(device), tokenizer, saved_tokenizer=saved_tokenizer)
    check_loaded(loaded.model, directory)
    return loaded


def choose_device(name: str) -> str:
    """Return the device for --device `auto`, `cpu` or `cuda`. Raises ConfigError if this rank needs
    a missing GPU.
    """
    count = torch.cuda.device_count()
    rank = local_rank()
    if name == "cpu" or (name == "auto" and count == 0):
        return "cpu"
    if rank >= count:
        raise ConfigError(
            "--device",
            f"selects cuda, but this machine has {counted(count, 'GPU')}, none of them for local"
            f" rank {rank}",
            "start one process per GPU, or set --device cpu",
        )
    return f"cuda:{rank}"
