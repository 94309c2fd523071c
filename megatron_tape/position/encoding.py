"""The interface of positional encodings. Each encoding is one class in one file, with declarations
and computations.

Declarations need no torch. They are the settings and their checks, each layer's parameters, the
capabilities that the attention backend must have, the costs, and the export format. They are read
when a run is configured, estimated, saved and exported. Computations use torch. They produce the
position state of the tokens, and each layer's inputs to attention. An encoding may update the state
in each layer.

Files of this folder import torch, and modules that import it, only inside the functions that need
them. Overriding methods do not repeat the base class's type annotations.

Axes: S all tokens of a sequence, s this rank's tokens, B batch, H query heads, h this rank's query
heads, G key/value groups, g this rank's groups, D head dimension, C hidden size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from megatron_tape.ops.backends import AVERAGE
from megatron_tape.ops.position_inputs import PositionInputs

if TYPE_CHECKING:
    import numpy as np
    import torch
    from torch import Tensor

    from megatron_tape.config.schema import ModelConfig
    from megatron_tape.parallel.token_layout import TokenLayout


class Bounds:
    """Bounds of a setting, such as `ge=1`, which pydantic checks.

    Exports contain this class, but do not need pydantic.
    """

    def __init__(self, **bounds: float):
        self.bounds = bounds

    def __get_pydantic_core_schema__(self, kind: Any, handler: Callable[[Any], dict]) -> dict:
        """Return pydantic's schema of the type `kind` with the bounds; pydantic calls this."""
        return handler(kind) | self.bounds


Count = Annotated[int, Bounds(ge=1)]
Positive = Annotated[float, Bounds(gt=0)]


@dataclass(frozen=True)
class Parameter:
    """A parameter of one layer."""

    shape: tuple[int, ...]
    """Shape of the whole parameter, before tensor parallelism shards it."""
    std: float = 0.0
    """Standard deviation of the initial normal distribution; 0 initializes the parameter with
    `value`.
    """
    value: float | tuple = 0.0
    """Initial value: one number for all elements, or nested tuples of the parameter's shape."""
    partition_dim: int | None = None
    """Axis of heads or groups that tensor parallelism shards; with None, every rank holds the whole
    parameter.
    """
    decay: bool | None = None
    """Whether weight decay applies; None applies it if the parameter has two or more axes."""
    diagonal: bool = False
    """Whether this is the diagonal of a square matrix; Hugging Face weights then store the whole
    matrix.
    """


@dataclass(frozen=True)
class MicroBatchSizes:
    """The part of a micro-batch that one GPU computes."""

    tokens: int
    """Tokens inside attention: all tokens of the sequences."""
    local_tokens: int
    """Tokens outside attention: this rank's shard under sequence and context parallelism, otherwise
    all tokens.
    """
    width: int
    """Bytes per element in the precision of the run."""
    tensor_size: int
    """Number of tensor-parallel ranks, which shard the model's matrices."""
    context_size: int = 1
    """Number of context-parallel ranks, which shard the tokens of a sequence."""

    @property
    def head_shards(self) -> int:
        """Number of ranks that shard the heads inside attention and exchange tokens and heads by an
        all-to-all.
        """
        return self.tensor_size * self.context_size

    def groups_per_rank(self, query_groups: int) -> int:
        """Return the number of key/value groups that one rank holds inside attention, for a model
        with `query_groups` groups.

        If the context-parallel ranks cannot divide a tensor-parallel rank's groups evenly, several
        hold the same group.
        """
        # Groups are copied until the context-parallel ranks can divide them evenly.
        return math.lcm(query_groups // self.tensor_size, self.context_size) // self.context_size

    def groups_in_all_to_all(self, query_groups: int) -> int:
        """Return the number of key/value groups that a rank sends per token in an all-to-all: those
        of all `head_shards` ranks.

        A group counts once for each rank that holds it.
        """
        return self.groups_per_rank(query_groups) * self.head_shards


@dataclass(frozen=True, kw_only=True)
class Costs:
    """The costs of an encoding in one layer, for estimates.

    Bytes are those of one GPU for one micro-batch. `MicroBatchSizes.groups_per_rank` counts the
    key/value groups that a rank holds inside attention, for bytes saved there.
    `MicroBatchSizes.groups_in_all_to_all` counts those that a rank sends per token, for bytes sent.
    """

    multiply_adds: int = 0
    """Multiply-adds per token in the forward pass of a full sequence, in addition to those of the
    layer itself.
    """
    saved: int = 0
    """Bytes saved for the backward pass, outside attention."""
    sent_forward: int = 0
    """Bytes that this rank passes to all-to-alls in the forward pass, under sequence or context
    parallelism.
    """
    sent_backward: int = 0
    """Bytes that this rank passes to all-to-alls in the backward pass."""
    state: int = 0
    """Elements per token in the state that enters the layer."""
    state_width: int | None = None
    """Bytes per element of the state; default: those of the run's precision."""
    window_phases: int = 0
    """Bytes per token of the result of `PositionEncoding.window_phases` if this layer uses it. The
    layers share it."""
    learns_rotation: bool = False
    """Whether the rotation of queries and keys depends on parameters of this layer, and so needs a
    gradient.
    """
    reads_hidden_states: bool = False
    """Whether parameters multiply the layer's input, which is then saved even if the layer's
    matrices are frozen.
    """

    def state_bytes(self, width: int) -> int:
        """Return the bytes of one token's state in a run whose precision has `width` bytes per
        element.
        """
        return self.state * (self.state_width or width)


@dataclass(frozen=True, kw_only=True)
class EncodingSettings:
    """Base class of encodings' settings. Encodings without settings use it directly."""


class TokenCache:
    """One layer's cache, during generation, of an encoding's tensors for earlier tokens.

    This base class caches nothing. It serves models that receive all tokens of a sequence at once,
    as in training.
    """

    def append(self, name: str, new: Tensor, before: int = 0) -> Tensor:
        """Append `new` to the cached tensor `name` along the first axis (tokens), and return this
        tensor for the tokens whose keys attention receives: all tokens or, in a layer with a window
        of W tokens, the new ones and at most W - 1 before them.

        The returned tensor begins `before` tokens earlier, or with the first token of the sequence.
        """
        return new

    def cumsum(self, name: str, new: Tensor) -> Tensor:
        """Return the sums over all tokens up to each new one, float64 (S, ...), given the summands
        of the S new tokens. `name` is the cached tensor of summands, to which `append` must not
        add.
        """
        import torch

        return new.cumsum(0, dtype=torch.float64)


class SingleProcess:
    """The layout of tokens and heads over processes (see `TokenLayout`) for one process, without
    torch.distributed.
    """

    model_group = None
    sequence_shards = 1

    def local_heads(self, x: Tensor, dim: int = 0) -> Tensor:
        """Return x unchanged, since this process has all heads and tokens."""
        return x

    # In a layout of several processes, these move or select tokens and heads.
    local_tokens = to_heads = to_tokens = local_heads


NO_CACHE = TokenCache()
FROM_POSITIONS = ("embedding", "initial_state", "token_positions")
"""Methods that return or receive absolute positions. A class that overrides one of them must set
`restarts_in_documents`.
"""


class PositionEncoding:
    """Base class of positional encodings. It encodes nothing itself. Each model has one instance.

    The position state is a tensor whose first two axes are tokens and sequences; an encoding
    chooses which tokens and groups a rank holds. Fixed phases have all S tokens, since every rank
    can compute them. A state that layers update has this rank's s tokens and all G groups, and
    enters attention by `TokenLayout.to_heads`. `next_state` may also return an object that contains
    this tensor and others. `state_tensor` then returns the tensor, and all methods accept either.

    Code outside this package must not depend on which encoding is in use. The exception is
    `huggingface/`, since models with TAPE and RoPE have export formats of their own.
    """

    name: ClassVar[str]
    """Value of `model.position_encoding` that selects this encoding."""
    Settings: ClassVar[type] = EncodingSettings
    """Class of the settings in the section `model.position`: a frozen dataclass whose fields all
    have defaults.
    """
    needs: ClassVar[frozenset[str]] = frozenset()
    """Capabilities that the attention backend must have, as defined in `ops.backends`."""
    starts_as: ClassVar[str | None] = None
    """Name of an encoding that this one equals at initialization, so that an extension may replace
    it with this one.
    """
    replaces: ClassVar[frozenset[str]] = frozenset()
    """Names of encodings that an extension may replace with this one although the model's outputs
    change.
    """
    exports_to: ClassVar[str | None] = "code"
    """Export format: `plain`, an architecture of transformers; `tape`, the TAPE architecture;
    `code`, an architecture that runs this encoding's file; None, no export.

    A subclass may define a property instead if the format depends on the settings.
    """
    extended_by: ClassVar[frozenset[str]] = frozenset()
    """Names of the settings that an extension of the context may change."""
    restarts_in_documents: ClassVar[bool] = False
    """Whether positions restart at 0 in each packed document: true if the encoding depends on
    absolute positions, false if it depends only on distances. A class that overrides a method of
    `FROM_POSITIONS` must set it."""

    sums_over_tokens: ClassVar[bool] = False
    """Whether the rotation of a token depends on all tokens before it, as running sums do, and not
    only on its own position and content. A subclass may define a property instead."""

    def __init__(
        self,
        model: ModelConfig,
        token_layout: TokenLayout | None = None,
        fused: bool = False,
    ):
        """Create the encoding of `model`.

        Args:
            model: settings of the model.
            token_layout: layout of tokens and heads over ranks; required for computations, but not
                for declarations.
            fused: use Triton kernels, if the encoding has any.
        """
        self.model = model
        self.settings = model.position
        self.token_layout = token_layout
        self.fused = fused
        self.joins_values = False
        """Whether attention's kernel takes values and state as one tensor [v | z]. The encoding may
        then provide memory that contains z already (`PositionInputs.joined_TBGE`). The model sets
        this."""
        self._constants: dict[str, Tensor] = {}
        """The results of `constant` by name."""

    # Helpers for encodings and the model; not to be overridden.

    def sends_state(self, layer: int) -> bool:
        """Return whether the state that enters layer `layer` (from 0) depends on parameters of
        earlier layers.

        If so, a pipeline stage that begins with this layer receives the state from the previous
        stage. If not, the stage recomputes the state from the positions.
        """
        return any(
            self.updates(earlier) or self.learns_on_entry(earlier) for earlier in range(layer)
        )

    def state_is_learned(self, layer: int) -> bool:
        """Return whether the state used in layer `layer` (from 0) depends on parameters, and so
        needs a gradient.
        """
        return self.sends_state(layer) or self.learns_on_entry(layer)

    def averages_state(self, layer: int) -> bool:
        """Return whether attention in layer `layer` (from 0) also averages the state."""
        return AVERAGE in self.needs and self.updates(layer)

    def constant(
        self,
        name: str,
        make: Callable[[], Tensor],
        device: torch.device,
    ) -> Tensor:
        """Return `make()` on `device`, cached by `name`, since copying it in every layer would
        block the host.
        """
        import torch

        constant = self._constants.get(name)
        if constant is None or constant.device != device:
            # Created outside inference mode, since training may follow: autograd cannot use tensors
            # that were created in it.
            with torch.inference_mode(False):
                constant = make().to(device)
            # Tensors created during torch.export are invalid afterwards. Older versions of torch
            # lack `is_exporting`.
            if not getattr(torch.compiler, "is_exporting", torch.compiler.is_compiling)():
                self._constants[name] = constant
        return constant

    # Declarations.

    def check(self) -> None:
        """Raise `ConfigError` if the model's settings are invalid for this encoding."""

    def needs_in(self, layer: int) -> frozenset[str]:
        """Return the capabilities in `needs` that attention uses in layer `layer` (from 0)."""
        return self.needs

    def parameters(self, layer: int) -> Mapping[str, Parameter]:
        """Return the parameters of layer `layer` (from 0) by name."""
        return {}

    def updates(self, layer: int) -> bool:
        """Return whether layer `layer` (from 0) updates the state for the next layer."""
        return False

    def learns_on_entry(self, layer: int) -> bool:
        """Return whether `enter` replaces the state of layer `layer` (from 0) by one that depends
        on parameters.
        """
        return False

    def costs(self, layer: int, batch: MicroBatchSizes) -> Costs:
        """Return the costs of this encoding in layer `layer` (from 0), which are used only for
        estimates.
        """
        return Costs()

    @property
    def update_kernel_shape(self) -> Mapping[str, Any]:
        """Values by name of the fields of `ops.parity.Shapes` for which the kernel of the position
        update is compiled; empty without such a kernel.
        """
        return {}

    # Computation.

    def window_phases(self, positions_SB: Tensor, dtype: torch.dtype) -> Tensor | None:
        """Return what the state needs in layers with a window, (S, B or 1, 1, D), if they have
        frequencies of their own; otherwise None.

        RoPE returns the phases of these layers, TAPE their ratio to those of the other layers.
        `positions_SB` is as in `initial_state`.
        """
        return None

    def inputs_in_window(self, inputs: PositionInputs, phases: Tensor) -> PositionInputs:
        """Return `inputs`, the result of `position_inputs`, for a layer with a window, whose
        frequencies differ. `phases` is the result of `window_phases`.
        """
        return inputs

    def average_from_window(self, averaged_SBhD: Tensor, phases: Tensor) -> Tensor:
        """Return the average of the state, converted from the frequencies of a layer with a window,
        in which attention computed it, to those of the state.

        `phases` is the result of `window_phases`.
        """
        return averaged_SBhD

    def token_positions(self, length: int, random: np.random.Generator | None) -> np.ndarray | None:
        """Return ascending positions of a sequence of S = `length` tokens, int64 (S,); None means
        0, 1, ...

        In training, `random` is seeded only by the step and `train.seed`, so that all ranks and
        micro-batches of a step draw the same numbers. Outside training it is None.
        """
        return None

    def check_cached(self, length: int) -> None:
        """Raise NotImplementedError if generation with a cache cannot extend a sequence to `length`
        tokens.
        """

    def embedding(self, positions_sB: Tensor, dtype: torch.dtype) -> Tensor | None:
        """Return a tensor (s, B or 1, C) to add to this rank's embedded tokens at these positions,
        or None.
        """
        return None

    def initial_state(self, positions_SB: Tensor, dtype: torch.dtype) -> Tensor | None:
        """Return the state that enters the first layer, or None if the encoding has none.

        `positions_SB` is (S, B), or (S, 1) if all sequences have the same positions.
        """
        return None

    def sent_state(
        self,
        layer: int,
        tokens: int,
        batch: int,
        dtype: torch.dtype,
    ) -> tuple[tuple[int, ...], torch.dtype]:
        """Return the shape (T, B, ...) and dtype of the state that enters layer `layer`. Requires
        `sends_state(layer)`.

        Outside attention, this rank holds `tokens` tokens of each of `batch` sequences; T is a
        multiple of `tokens`.
        """
        raise NotImplementedError(
            f"{type(self).__name__} must define sent_state to support pipeline parallelism"
        )

    def enter(
        self,
        layer: int,
        parameters: Mapping[str, Tensor],
        state: Tensor | None,
        hidden_states_sBC: Tensor,
        cache: TokenCache,
    ) -> Tensor | None:
        """Return the position state that layer `layer` (from 0) uses; by default, `state` itself.

        `state` is that of the previous layer, or the result of `initial_state`. An encoding that
        learns its state in this layer (`learns_on_entry`) computes it here, from the layer's
        `parameters` and its normalized input `hidden_states_sBC`. During generation, the input has
        only the new tokens; `cache` keeps what they need from earlier tokens.
        """
        return state

    def position_inputs(
        self,
        layer: int,
        parameters: Mapping[str, Tensor],
        state: Tensor | None,
        hidden_states_sBC: Tensor,
        cache: TokenCache,
    ) -> PositionInputs:
        """Return the inputs to attention in layer `layer`, given its parameters, state and
        normalized input.

        With a cache, `state` and `hidden_states_sBC` cover only the new tokens; add to `cache` what
        later tokens need. The returned state and factors then also cover only the new tokens, but
        bias, gates and `rescore` cover all tokens that `cache.append` returns.
        """
        return PositionInputs(state, average_state=self.averages_state(layer))

    def next_state(
        self,
        layer: int,
        parameters: Mapping[str, Tensor],
        state: Tensor | None,
        inputs: PositionInputs,
        averaged_SBhD: Tensor | None,
        attention_output_sBC: Tensor,
        mlp_output_sBC: Tensor,
    ) -> Any:
        """Return the next layer's state. The model calls this if `updates(layer)`.

        `inputs` is the result of `position_inputs`, and `averaged_SBhD` the average of the
        state under the attention weights. `attention_output_sBC` and `mlp_output_sBC` exclude the
        residual stream.
        """
        return state

    def state_tensor(self, state: Any) -> Tensor | None:
        """Return the tensor of a state, for activation checkpointing and pipeline stages."""
        return state
