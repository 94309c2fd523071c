"""The inference engine transformers, which reads sequences in one pass, with a cache, and in a
padded batch.

It computes positions and masks itself; only passes after a gap are given their positions. Models
need decoder layers in `base_model.layers`, as the Llama family and this project's exports have.
Works with all supported versions of transformers, and imports only torch until a model is loaded.

Axes: S tokens of a sequence, N tokens of a layer's inputs or outputs, P compared tokens, V
vocabulary, C hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_tape.command_line import Progress, step
from megatron_tape.huggingface.pretrained import cache_keyword, load_pretrained
from megatron_tape.huggingface.verification.sequences import (
    Outputs,
    Sequence,
    before_gaps,
    chunks,
)

PADDING = 7
"""Padding tokens before the sequence in `left_padded`."""


@dataclass(frozen=True)
class LayerStates:
    """What enters or leaves a decoder layer, on the CPU."""

    hidden_states: Tensor
    """(N, C)."""
    position_state: Tensor | None
    """The state of the positional encoding (N, ...), such as (N, key/value heads or 1, head
    dimension) in TAPE. None if layers pass no state to each other.
    """


CompareLayer = Callable[[int, LayerStates, LayerStates], None]
"""A function of the index of a decoder layer, of what enters the layer (N = S), and of what leaves
it at the compared tokens (N = P).
"""


class TransformersEngine:
    """A causal language model of transformers.

    All methods return the outputs of the compared tokens, in the dtype of the model. They leave the
    model unchanged.
    """

    def __init__(self, model: Any):
        """Wrap a `PreTrainedModel`."""
        self.model = model.eval()

    @classmethod
    def load(
        cls,
        directory: Path,
        dtype: torch.dtype,
        device: str = "cpu",
        trust_remote_code: bool = False,
    ) -> TransformersEngine:
        """Load a model from safetensors files. Raises FileError if transformers cannot load it."""
        with step(f"loading {directory} with transformers"):
            model = load_pretrained(directory, dtype, trust_remote_code)
            return cls(model.to(device))

    def one_pass(self, sequence: Sequence) -> Outputs:
        """Return the outputs of one pass over all tokens, without a cache."""
        return self._read(sequence, [_whole(sequence)], {"use_cache": False})

    def layer_by_layer(self, sequence: Sequence, compare: CompareLayer) -> Outputs:
        """Return the outputs of one pass, and call `compare` after each layer during the pass.

        Only one layer's states of all tokens are in memory at a time.
        """
        return self._read(sequence, [_whole(sequence)], {"use_cache": False}, compare)

    def in_chunks(self, sequence: Sequence) -> Outputs:
        """Return the outputs of `chunks(sequence)`, read one after the other with a cache.

        Raises NotImplementedError if the model's positional encoding does not support a cache for
        sequences of this length.
        """
        # Only here, since importing transformers takes seconds.
        from transformers import DynamicCache

        cache = DynamicCache(config=self.model.config)
        options = {"use_cache": True, cache_keyword(self.model): cache}
        return self._read(sequence, chunks(sequence), options)

    def left_padded(self, sequence: Sequence) -> Outputs:
        """Return the outputs of the first row of a batch of two, which has `PADDING` tokens of
        padding on the left. The second row has as many tokens and no padding.
        """
        S = len(sequence.ids)
        padding = torch.zeros(PADDING, dtype=torch.int64)
        # The second row repeats the sequence's tokens, beginning with the first.
        indices = torch.arange(PADDING + S)
        first_row = torch.cat([padding, sequence.ids])
        second_row = sequence.ids[indices % S]
        ids = torch.stack([first_row, second_row])
        mask = torch.ones_like(ids)
        mask[0, :PADDING] = 0
        inputs = {"input_ids": ids, "attention_mask": mask, "use_cache": False}
        if sequence.has_gaps:
            # As in `generate`, padding has position 0, and a row without padding has 0, 1, ...
            positions = torch.cat([padding, sequence.positions])
            inputs["position_ids"] = torch.stack([positions, indices])

        compared = [PADDING + index for index in sequence.compared]
        with _recording(self.model, PADDING + S) as recorder:
            recorder.read(inputs, compared)
        return recorder.outputs()

    def _read(
        self,
        sequence: Sequence,
        parts: list[slice],
        options: dict[str, Any],
        compare: CompareLayer | None = None,
    ) -> Outputs:
        """Return the outputs of passes over these parts of a sequence. `options` are further
        arguments of `forward`.
        """
        with _recording(self.model, len(sequence.ids), compare) as recorder:
            for part in parts:
                inputs = _inputs_of(sequence, part)
                compared = [
                    index - part.start
                    for index in sequence.compared
                    if part.start <= index < part.stop
                ]
                recorder.read(inputs | options, compared)
        return recorder.outputs()


def _whole(sequence: Sequence) -> slice:
    """Return the part of a sequence that has all its tokens."""
    return slice(0, len(sequence.ids))


def _inputs_of(sequence: Sequence, part: slice) -> dict[str, Any]:
    """Return the arguments of `forward` that give it a part of a sequence."""
    inputs = {"input_ids": sequence.ids[None, part]}
    # Without a gap, also the model's own positions after a cache are compared.
    if part.stop > before_gaps(sequence):
        inputs["position_ids"] = sequence.positions[None, part]
        # Without a mask, transformers takes a gap for the start of another document.
        inputs["attention_mask"] = torch.ones(1, part.stop, dtype=torch.int64)
    return inputs


class _Recorder:
    """Records the compared tokens of passes over the parts of a sequence, and shows progress."""

    def __init__(self, model: Any, tokens: int, compare: CompareLayer | None):
        """Record nothing yet. All passes together will read `tokens` tokens."""
        self.model = model
        self.compare = compare
        self.tokens = tokens
        self.num_layers = len(model.base_model.layers)
        self.progress = Progress(tokens * self.num_layers)

        self._tokens_before = 0
        """Tokens of the passes before the current one."""
        self._compared = torch.empty(0, dtype=torch.int64)
        """Indices of the current pass's compared tokens."""
        self._logits: list[Tensor] = []
        """Of each pass, (p, V) for p compared tokens."""
        self._hidden_states: list[list[Tensor]] = [[] for _ in range(self.num_layers)]
        """Of each layer, those of each pass, (p, C)."""

    def read(self, inputs: dict[str, Any], compared: list[int]) -> None:
        """Run the model, and record the tokens of the first row at the indices `compared`."""
        device = self.model.device
        on_device = dict(inputs)
        for name, value in inputs.items():
            # Others are options, such as a cache.
            if isinstance(value, Tensor):
                on_device[name] = value.to(device)
        self._compared = torch.tensor(compared, dtype=torch.int64, device=device)

        # The logits of all tokens may need more memory than the model.
        output = self.model(logits_to_keep=self._compared, **on_device)
        self._logits.append(output.logits[0].cpu())
        self._tokens_before += inputs["input_ids"].shape[1]

    def after_layer(self, index: int, layer: Any, arguments: tuple, output: Any) -> None:
        """Record the compared tokens after a decoder layer, as its forward hook."""
        # Only this project's layers return more than the hidden states.
        outputs = output
        if isinstance(output, Tensor):
            outputs = (output,)
        hidden_states = outputs[0]
        compared = hidden_states[0, self._compared]
        self._hidden_states[index].append(compared.cpu())

        if self.compare is not None:
            entering = _layer_states(layer, slice(None), *arguments)
            # As many outputs enter the next layer.
            returned = outputs[: len(arguments)]
            leaving = _layer_states(layer, self._compared, *returned)
            self.compare(index, entering, leaving)
        self._show_progress(index, hidden_states.shape[1])

    def _show_progress(self, layer: int, pass_tokens: int) -> None:
        """Show that a layer has read the `pass_tokens` tokens of the current pass."""
        earlier_passes = self._tokens_before * self.num_layers
        current_pass = pass_tokens * (layer + 1)
        last = self._tokens_before + pass_tokens
        line = (
            f"transformers reads {last:,} of {self.tokens:,} tokens: layer {layer + 1} of"
            f" {self.num_layers}"
        )
        self.progress.update(earlier_passes + current_pass, lambda seconds: line)

    def outputs(self) -> Outputs:
        """Return what all passes have recorded."""
        logits = torch.cat(self._logits)
        by_layer = [torch.cat(parts) for parts in self._hidden_states]
        return Outputs(logits, torch.stack(by_layer))


@contextmanager
def _recording(model: Any, tokens: int, compare: CompareLayer | None = None) -> Iterator[_Recorder]:
    """Yield a recorder for passes in the context, which together read `tokens` tokens."""
    recorder = _Recorder(model, tokens, compare)
    handles = []
    try:
        for index, layer in enumerate(model.base_model.layers):
            hook = partial(recorder.after_layer, index)
            handle = layer.register_forward_hook(hook)
            handles.append(handle)
        with torch.inference_mode():
            yield recorder
    finally:
        for handle in handles:
            handle.remove()
        recorder.progress.end()


def _layer_states(
    layer: Any,
    tokens: slice | Tensor,
    hidden_states: Tensor,
    position_state: Tensor | None = None,
) -> LayerStates:
    """Return the states of the first row's `tokens`.

    The last two arguments are what a decoder layer takes as positional arguments and returns.
    """
    if position_state is not None:
        # Models with any encoding have tokens as the state's first axis, and sequences as the
        # second.
        if hasattr(layer, "encoding"):
            position_state = position_state.transpose(0, 1)
        position_state = position_state[0, tokens].cpu()
    hidden_states = hidden_states[0, tokens].cpu()
    return LayerStates(hidden_states, position_state)
