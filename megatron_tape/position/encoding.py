"""What a positional encoding is: one class in one file, which declares without torch and computes with it.

It declares the settings and what is rejected, the parameters of each layer, what attention must be able to do, the
arithmetic and memory it takes, and the export; these are read when a run is configured, estimated, saved and exported.
It computes the state that tokens carry, what attention gets in each layer, and the next layer's state. Files of this
folder import torch, and modules that compute, only inside the functions that need them. The types of what they compute
with are those of the base class, which overriding methods do not repeat.

Axes: S all tokens of a sequence, s those of this rank, B batch, H query heads, h those of this rank, G groups, g those
of this rank, D head dimension, C hidden size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from megatron_tape.ops.backends import AVERAGE
from megatron_tape.ops.positions import Positions

if TYPE_CHECKING:
    import numpy as np
    import torch
    from torch import Tensor

    from megatron_tape.config.schema import ModelConfig
    from megatron_tape.parallel.token_layout import TokenLayout


@dataclass(frozen=True)
class Parameter:
    """A parameter of one layer."""

    shape: tuple[int, ...]
    """Shape of the whole parameter, before tensor parallelism cuts it."""
    std: float = 0.0
    """Standard deviation of the normal distribution that it is drawn from; with 0 it starts as `value`."""
    value: float | tuple = 0.0
    """Initial value: one number for all elements, or nested tuples of its shape."""
    head_axis: int | None = None
    """The axis of heads or groups that tensor parallelism cuts; None: every rank holds the whole parameter."""
    decay: bool | None = None
    """Whether weight decay applies to it; None: if it has two or more axes."""
    diagonal: bool = False
    """Whether it is the diagonal of a square matrix, which whole weights, as of transformers, hold in its place."""


@dataclass(frozen=True)
class MicroBatch:
    """The part of a micro-batch that one GPU computes."""

    tokens: int
    """Tokens inside attention: all tokens of the sequences."""
    local_tokens: int
    """Tokens outside attention: this rank's share under sequence and context parallelism, otherwise all."""
    width: int
    """Bytes per number in the precision of the run."""
    tensor_size: int
    """Tensor-parallel ranks, which share the model's matrices."""
    context_size: int = 1
    """Context-parallel ranks, which share the tokens of a sequence."""

    @property
    def head_shards(self) -> int:
        """Over how many ranks the heads are distributed inside attention, and an exchange distributes the tokens."""
        return self.tensor_size * self.context_size

    def groups(self, query_groups: int) -> int:
        """Return how many of all key/value groups this rank has inside attention.

        Context ranks that cannot divide a tensor-parallel rank's groups among themselves hold some of them together.
        """
        return math.lcm(query_groups // self.tensor_size, self.context_size) // self.context_size

    def sent_groups(self, query_groups: int) -> int:
        """Return of how many groups an exchange sends something for each token: all, or more where ranks share some."""
        return self.groups(query_groups) * self.head_shards


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What an encoding takes in one layer, for estimates; bytes are those of a GPU's part of a micro-batch."""

    multiply_adds: int = 0
    """Per token, in addition to a layer's forward pass of a full sequence."""
    saved: int = 0
    """Bytes kept for the backward pass, outside attention."""
    sent_forward: int = 0
    """Bytes of this rank's tensors in all-to-alls of the forward pass under sequence or context parallelism."""
    sent_backward: int = 0
    state: int = 0
    """How many numbers one token's state has when it enters the layer."""
    state_width: int | None = None
    """Bytes of each of these numbers; None: as many as those of the precision of the run."""
    learns_rotation: bool = False
    """Whether what rotates queries and keys depends on parameters of this layer, and needs a gradient."""
    reads_hidden_states: bool = False
    """Whether parameters multiply the layer's input, which is then kept even where the layer's matrices are frozen."""

    def state_bytes(self, width: int) -> int:
        """Return the bytes of one token's state in a run whose numbers have `width` bytes."""
        return self.state * (self.state_width or width)


@dataclass(frozen=True, kw_only=True)
class EncodingSettings:
    """The settings of an encoding that has none; base class of those of others."""


class TokenCache:
    """What one layer keeps of earlier tokens where the tokens of a sequence come a few at a time, as in generation.

    Models that get all tokens of a sequence at once, as in training, keep nothing; this class is for them.
    """

    def append(self, name: str, new: Tensor) -> Tensor:
        """Return what was kept as `name`, followed by `new`, along the first axis, that of tokens; and keep both."""
        return new


NO_CACHE = TokenCache()


class PositionEncoding:
    """Base class, which encodes nothing; encodings override its methods. Each model has one object.

    Nothing outside this package asks which encoding it is, but `huggingface/`, where TAPE's and RoPE's models have
    formats of their own.
    """

    name: ClassVar[str]
    """Its value in `model.position_encoding`."""
    Settings: ClassVar[type] = EncodingSettings
    """Its own settings, a frozen dataclass whose fields all have defaults: the section `model.position`."""
    needs: ClassVar[frozenset[str]] = frozenset()
    """What attention must be able to do, as named in `ops.backends`."""
    starts_as: ClassVar[str | None] = None
    """The encoding that it equals until it is trained; models with that encoding can be extended with this one."""
    replaces: ClassVar[frozenset[str]] = frozenset()
    """Encodings in whose place an extension may put this one although it differs from them, so that the model has to
    adapt."""
    exports_to: ClassVar[str | None] = "code"
    """`plain`: an architecture of transformers; `tape`: TAPE's own; `code`: one that runs this encoding's own file;
    None: cannot be exported.

    Where it depends on the settings, it is a property.
    """
    extended_by: ClassVar[frozenset[str]] = frozenset()
    """Its own settings that an extension of the context may change."""
    restarts_in_documents: ClassVar[bool] = False
    """Whether more than differences of a sequence's indices enters, so that each document of a pack has the positions
    of a sequence that begins with it."""

    def __init__(self, model: ModelConfig, tokens: TokenLayout | None = None, fused: bool = False):
        """`tokens` is needed only for computing; `fused` requests Triton kernels, if the encoding has any."""
        self.model = model
        self.settings = model.position
        self.tokens = tokens
        self.fused = fused
        self._constants: dict[str, Tensor] = {}

    # Derived from the rest; encodings call these.

    def sends_state(self, layer: int) -> bool:
        """Return whether the state that enters layer `layer` depends on parameters of earlier layers.

        A pipeline stage that begins with this layer is then sent the state. Otherwise it follows from the positions,
        and the stage makes it again.
        """
        return any(self.updates(earlier) or self.learns_on_entry(earlier) for earlier in range(layer))

    def state_is_learned(self, layer: int) -> bool:
        """Return whether the state with which layer `layer` works depends on parameters, and so needs a gradient."""
        return self.sends_state(layer) or self.learns_on_entry(layer)

    def constant(self, name: str, make: Callable[[], Tensor], device: torch.device) -> Tensor:
        """Return what `make` returns on `device`; copied there once, as a copy in every layer would stall it."""
        import torch

        found = self._constants.get(name)
        if found is None or found.device != device:
            with torch.inference_mode(False):  # training may follow, which can use no tensor of inference
                found = make().to(device)
            # torch.export has tensors of its own, which are none afterwards.
            if not getattr(torch.compiler, "is_exporting", torch.compiler.is_compiling)():
                self._constants[name] = found
        return found

    # Declared.

    def check(self) -> None:
        """Raise `ConfigError` if the model's settings do not fit this encoding."""

    def needs_in(self, layer: int) -> frozenset[str]:
        """Return what of `needs` attention must do in layer `layer` (from 0)."""
        return self.needs

    def parameters(self, layer: int) -> Mapping[str, Parameter]:
        """Return the parameters of layer `layer` (from 0) by name."""
        return {}

    def updates(self, layer: int) -> bool:
        """Return whether layer `layer` (from 0) rewrites the state."""
        return False

    def learns_on_entry(self, layer: int) -> bool:
        """Return whether `enter` gives layer `layer` (from 0) another state, which depends on parameters."""
        return False

    def costs(self, layer: int, batch: MicroBatch) -> Costs:
        """Return what layer `layer` (from 0) takes; nothing is computed from it but estimates."""
        return Costs()

    @property
    def fused_update(self) -> Mapping[str, Any]:
        """What decides which kernel of the position update is compiled, by fields of `ops.parity.Shapes`."""
        return {}

    # Computed.

    def token_positions(self, length: int, random: np.random.Generator | None) -> np.ndarray | None:
        """Return the positions of a sequence of `length` tokens, int64 (S,), in ascending order; None means 0, 1, ...

        In a training step, `random` is a stream that depends on the step and `train.seed` alone: all ranks and
        micro-batches of a step get the same numbers. Outside training it is None.
        """
        return None

    def check_cached(self, length: int) -> None:
        """Raise NotImplementedError if a sequence that is computed a few tokens at a time cannot grow to `length`."""

    def embedding(self, positions_sB: Tensor, dtype: torch.dtype) -> Tensor | None:
        """Return what is added to the embedded tokens of this rank, (s, B or 1, C), or None, given their positions."""
        return None

    def initial_state(self, positions_SB: Tensor, dtype: torch.dtype) -> Tensor | None:
        """Return the first layer's state for integer positions (S, B), or (S, 1) when all sequences share them."""
        return None

    def sent_state(
        self, layer: int, tokens: int, batch: int, dtype: torch.dtype
    ) -> tuple[tuple[int, ...], torch.dtype]:
        """Return shape (T, B, ...) and dtype of the state that enters layer `layer`; called if `sends_state(layer)`.

        The rank has `tokens` tokens of `batch` sequences outside attention, and T is a multiple of them.
        """
        raise NotImplementedError(f"{type(self).__name__} does not say what a pipeline stage is sent of its state")

    def enter(
        self,
        layer: int,
        parameters: Mapping[str, Tensor],
        state: Tensor | None,
        hidden_states_sBC: Tensor,
        cache: TokenCache,
    ) -> Tensor | None:
        """Return the state with which layer `layer` works, given the one it was handed and its normalised input."""
        return state

    def positions(
        self,
        layer: int,
        parameters: Mapping[str, Tensor],
        state: Tensor | None,
        hidden_states_sBC: Tensor,
        cache: TokenCache,
    ) -> Positions:
        """Return what attention gets in layer `layer`, given its parameters, the state and its normalised input.

        State and input are those of the new tokens; what later tokens will need of them must be added to `cache`.
        States, factors and averages are of the new tokens, too; biases, gates and rows of scores of all tokens.
        """
        return Positions(state, average_state=AVERAGE in self.needs and self.updates(layer))

    def next_state(
        self,
        layer: int,
        parameters: Mapping[str, Tensor],
        state: Tensor | None,
        positions: Positions,
        averaged_SBhD: Tensor | None,
        attention_output_sBC: Tensor,
        mlp_output_sBC: Tensor,
    ) -> Tensor | None:
        """Return the next layer's state; called if `updates(layer)`, with what `positions` returned.

        The outputs do not include their residuals.
        """
        return state
