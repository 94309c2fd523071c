"""Compare models as transformers loads them: the loss at each position of text held out, and answers in a chat."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron_tape.config.schema import split_shares
from megatron_tape.data.indexed_dataset import IndexedDatasetReader


def held_out_windows(prefix: str | Path, split: str, seq_length: int, count: int) -> np.ndarray:
    """Return the first `seq_length` + 1 tokens (int64) of up to `count` validation documents of so many tokens.

    The documents are spread evenly over those of the validation share of `split`. Raises ValueError if there are none.
    """
    dataset = IndexedDatasetReader(prefix)
    train, validation, _ = split_shares(split)
    lengths = dataset.document_lengths()
    first, stop = (round(share * len(lengths)) for share in (train, train + validation))
    long = first + np.flatnonzero(lengths[first:stop] > seq_length)
    if not len(long):
        raise ValueError(
            f"of the {stop - first:,} documents of {prefix} that are held out, none has more than {seq_length:,} "
            "tokens; use more text"
        )
    chosen = long[np.linspace(0, len(long) - 1, min(count, len(long))).astype(int)]
    return np.stack([dataset.document(index)[: seq_length + 1] for index in chosen]).astype(np.int64)


@dataclass(frozen=True)
class Loaded:
    """A model and its tokenizer."""

    model: Any
    tokenizer: Any


def load(directory: str | Path, own_export: bool) -> Loaded:
    """Load a model in fp32 for evaluation; the code in a directory runs only if this project has exported it."""
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        directory, trust_remote_code=own_export, dtype=torch.float32
    )
    return Loaded(model.eval(), transformers.AutoTokenizer.from_pretrained(directory, trust_remote_code=own_export))


def loss_by_position(model: Any, windows: np.ndarray, done: Callable[[int], None] = lambda count: None) -> np.ndarray:
    """Return the loss in nats (N, L) of every label of `windows` (N, L + 1); `done` is told how many are finished."""
    import torch
    import torch.nn.functional as F

    losses = []
    with torch.inference_mode():
        for window in torch.from_numpy(windows):
            logits = model(window[None, :-1], use_cache=False).logits[0]
            losses.append(F.cross_entropy(logits.float(), window[1:], reduction="none").numpy())
            done(len(losses))
    return np.stack(losses)


def chat(loaded: Loaded, question: str, max_new_tokens: int = 48) -> str:
    """Return the likeliest answer to a question, asked in the form of the tokenizer's chat template."""
    import torch

    messages = [{"role": "user", "content": question}]
    inputs = loaded.tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    length = inputs["input_ids"].shape[1]
    with torch.inference_mode():
        output = loaded.model.generate(
            inputs["input_ids"],
            attention_mask=torch.ones_like(inputs["input_ids"]),
            max_new_tokens=max_new_tokens,
            do_sample=False,
            eos_token_id=loaded.tokenizer.eos_token_id,
            pad_token_id=loaded.tokenizer.eos_token_id,
        )
    return loaded.tokenizer.decode(output[0, length:], skip_special_tokens=True).strip()


def averaged(loss: np.ndarray, parts: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the centres of `parts` equal ranges of positions, and the mean of `loss` (L,) over each."""
    ranges = np.array_split(np.arange(len(loss)), min(parts, len(loss)))
    return np.array([part.mean() for part in ranges]), np.array([loss[part].mean() for part in ranges])


def use_all_cores() -> None:
    """Let torch compute on every core that this process may use."""
    import torch

    torch.set_num_threads(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
