"""The language model: embedding, layers, final norm and output layer, or a part of them in a
pipeline stage.

`LanguageModel.forward` is the loop over the layers, which pass on the hidden states and the
position state.

Axes: B batch, S all tokens of a sequence, s this rank's tokens, C hidden size, V vocabulary.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import checkpoint
from megatron.core.tensor_parallel.layers import VocabParallelEmbedding
from megatron.core.transformer import TransformerConfig
from megatron.core.utils import init_method_normal, scaled_init_method_normal
from torch import Tensor

from megatron_tape.config.schema import ModelConfig
from megatron_tape.model.backend import FusedKernels, chosen_backend
from megatron_tape.model.layers import (
    LayerEncoding,
    PositionTransformerLayer,
    RMSNorm,
    SharedInputs,
)
from megatron_tape.model.output_layer import OutputLayer
from megatron_tape.ops.activation_checkpointing import AttentionRecorder
from megatron_tape.ops.backends.choice import averages_one_value
from megatron_tape.ops.shifted import ShiftedSegments, unshifted_groups
from megatron_tape.ops.stage_boundary import pack, packed_width, unpack
from megatron_tape.ops.visibility import Visibility
from megatron_tape.parallel.token_layout import TokenLayout
from megatron_tape.position import encoding_of
from megatron_tape.position.some_layers import temperature


def transformer_config(
    model_config: ModelConfig,
    tensor_model_parallel_size: int = 1,
    sequence_parallel: bool = False,
    dtype: torch.dtype = torch.float32,
) -> TransformerConfig:
    """Convert `ModelConfig` to Megatron-core's `TransformerConfig`, which its modules read.

    `dtype` is that of the parameters.
    """
    return TransformerConfig(
        num_layers=model_config.num_layers,
        hidden_size=model_config.hidden_size,
        ffn_hidden_size=model_config.ffn_hidden_size,
        num_attention_heads=model_config.num_attention_heads,
        num_query_groups=model_config.query_groups,
        kv_channels=model_config.head_dim,
        gated_linear_unit=True,
        activation_func=F.silu,
        use_te_activation_func=True,  # use the module in `MLPSubmodules.activation_func`
        add_bias_linear=False,
        add_qkv_bias=model_config.qkv_bias,
        qk_layernorm=model_config.qk_norm,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        normalization="RMSNorm",
        layernorm_epsilon=model_config.norm_epsilon,
        init_method=init_method_normal(model_config.init_std),
        output_layer_init_method=scaled_init_method_normal(
            model_config.init_std, model_config.num_layers
        ),
        use_cpu_initialization=True,  # otherwise Megatron asks for a GPU
        params_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        pipeline_dtype=dtype,
        tensor_model_parallel_size=tensor_model_parallel_size,
        sequence_parallel=sequence_parallel,
    )


class LanguageModel(torch.nn.Module):
    """A decoder that returns logits or, given labels, the next-token loss.

    Parameters are created on torch's meta device. `parallel.partitions.allocate` gives them memory,
    and `model.initialization.initialize_weights` or a checkpoint fills it. Their names are
    `embedding.weight`, `layers.N.*`, `norm.weight` and `output.weight`.

    Args:
        config: the settings of `model` for Megatron, from `transformer_config`.
        groups: the process groups of Megatron's layout.
        device: the device that the model will run on, for the choice of the attention backend.
        shifted_sparse: use shifted sparse attention (`ops.shifted`) in training mode.
        recompute: `train.recompute`: none, selective (recompute everything except attention) or
            full.
        fused: the Triton kernels to use apart from attention. Default: the position update's kernel
            if the attention backend is triton, otherwise none.
        layers: indices of the layers of this model chunk. Default: all layers, which are the whole
            model. Only the first chunk has the embedding, only the last one the final norm and the
            output layer. Other chunks take the output of the previous chunk from
            `set_input_tensor`, and return the input (s, B, `sent_width`) of the next one.
        z_loss: coefficient of the z-loss, the mean of log(sum(exp(logits)))^2. The gradient of the
            z-loss is added to that of the loss.
    """

    def __init__(
        self,
        model_config: ModelConfig,
        config: TransformerConfig,
        groups: ProcessGroupCollection,
        device: torch.device | str = "cpu",
        shifted_sparse: bool = False,
        recompute: str = "none",
        fused: FusedKernels | None = None,
        layers: range | None = None,
        z_loss: float = 0.0,
    ):
        super().__init__()
        self.model_config = model_config
        self.dtype = config.params_dtype
        self.shifted_sparse = shifted_sparse
        self.recompute = recompute
        self.attention_backend = chosen_backend(
            model_config, self.dtype, torch.device(device), shifted_sparse
        )
        """The attention backend for `device`, where the caller must place the parameters."""
        # By default, use the position update's Triton kernel only where Triton is known to work:
        # where it is the chosen attention backend.
        self.fused = fused or FusedKernels(position_update=self.attention_backend == "triton")
        self.token_layout = TokenLayout.of(groups, config.sequence_parallel)
        self.encoding = encoding_of(model_config, self.token_layout, self.fused.position_update)
        self._joins_values = False
        """Whether attention averages values and position state as one tensor, except within
        documents or segments, and the state reaches it without a copy.
        """
        # A layer's update may write the state into the next layer's [v | z], but only if attention
        # reads that very memory. Activation checkpointing passes on only the state, and an
        # all-to-all copies it.
        if self.recompute == "none" and self.token_layout.sequence_shards == 1:
            self._joins_values = averages_one_value(
                self.attention_backend,
                torch.device(device),
                model_config.head_dim,
                grouped=model_config.query_groups < model_config.num_attention_heads,
            )

        if layers is None:
            layers = range(model_config.num_layers)
        self._first_layer = layers.start
        self.is_first = layers.start == 0
        """Whether this model chunk begins with the embedding."""
        self.is_last = layers.stop == model_config.num_layers
        """Whether this model chunk ends with the output layer."""
        # `sends_state` tells whether the state that enters a layer depends on parameters. If it
        # does not, the chunk that begins with the layer computes it again from the positions.
        self._receives_state = self.encoding.sends_state(layers.start)
        """Whether this model chunk's input contains the position state."""
        self._sends_state = not self.is_last and self.encoding.sends_state(layers.stop)
        """Whether this model chunk's output contains the position state."""

        # The meta device takes no memory: under ZeRO 3 a rank cannot hold all parameters.
        with torch.device("meta"):
            if self.is_first:
                self.embedding = VocabParallelEmbedding(
                    model_config.vocab_size,
                    model_config.hidden_size,
                    init_method=config.init_method,
                    reduce_scatter_embeddings=config.sequence_parallel,
                    config=config,
                    tp_group=groups.tp,
                )
            # A dict instead of a list: its keys are indices in the whole model, so that parameters
            # have the same names in a model chunk.
            self.layers = torch.nn.ModuleDict()
            for index in layers:
                self.layers[str(index)] = PositionTransformerLayer(
                    model_config,
                    config,
                    groups,
                    self.encoding,
                    index,
                    self.attention_backend,
                    self.fused.swiglu,
                )
            if self.is_last:
                self.norm = RMSNorm(config, model_config.hidden_size, model_config.norm_epsilon)
                self.output = OutputLayer(
                    model_config, config, groups, fused=self.fused.loss, z_loss=z_loss
                )

        self.received_embedding: Tensor | None = None
        """The copy of a tied embedding's weight in a chunk that has the output layer, but not the
        embedding. `pipeline.TiedWeight` sets it."""
        self._received: Tensor | None = None
        """The input (s, B, `sent_width`) of a chunk that is not the first, from `set_input_tensor`
        to `forward`.
        """

        # `local_heads` selects this rank's part of a tensor with one element for each group. From
        # the indices of all groups it selects those of this rank's groups.
        groups_of_model = torch.arange(model_config.query_groups, device="cpu")
        own_groups = self.token_layout.local_heads(groups_of_model).tolist()
        self._unshifted_groups = unshifted_groups(model_config.query_groups, own_groups)
        """Number of this rank's key/value groups that shifted sparse attention does not shift."""

    def forward(
        self,
        tokens: Tensor,
        labels: Tensor | None = None,
        loss_weights: Tensor | None = None,
        documents: Tensor | None = None,
        positions: Tensor | None = None,
        by_token: bool = False,
    ) -> Tensor:
        """Return logits (B, S, V) for token ids (B, S) or, with `labels` (B, S), the scalar loss.

        The loss is the mean over the tokens or, with `loss_weights` (B, S), their weighted sum.
        With context parallelism it covers only this rank's tokens; average it over the
        context-parallel ranks. `by_token` returns the loss of each token (B, S) instead, in float32
        and without a gradient. A model chunk that is not the last returns the input of the next
        one.

        Every rank passes whole sequences; S must be a multiple of `token_layout.sequence_shards`.
        Tokens attend only to tokens with the same number in `documents` (B, S). `positions` (S,)
        are the positions of the tokens in a sequence. Default: those that the encoding uses outside
        training. These are 0, 1, ... unless the encoding defines others
        (`PositionEncoding.token_positions`).
        """
        if positions is None:
            positions = self.token_positions(tokens)
        in_documents = None if documents is None else Visibility.of(documents)
        positions_SB = self._in_documents(positions, in_documents)
        visibility: Visibility | ShiftedSegments | None = in_documents
        if self.shifted_sparse and self.training:
            visibility = ShiftedSegments.of(tokens, in_documents, self._unshifted_groups)
        window_visibility = self._with_window(visibility, tokens)
        # Within documents, segments and windows, backends average values and state in two calls.
        # Memory for both would only be kept longer.
        self.encoding.joins_values = self._joins_values and window_visibility is None

        recomputes = self.recompute != "none" and self.training
        # The recorder keeps each layer's attention from the forward pass, and returns it when the
        # backward pass runs the layer again. Without a backward pass, nothing would use it.
        recorder = None
        if recomputes and self.recompute == "selective" and torch.is_grad_enabled():
            recorder = AttentionRecorder()
        shared = SharedInputs(
            visibility,
            window_visibility,
            self.encoding.window_phases(positions_SB, self.dtype),
            self._temperature(tokens, in_documents),
            recorder,
        )

        if self.is_first:
            hidden_states = self._embedded(tokens, positions_SB)
            state = self.encoding.initial_state(positions_SB, self.dtype)
        else:
            hidden_states, state = self._from_previous_chunk(positions_SB)
        if recomputes:
            # The embedding may be frozen, and a checkpointed layer computes gradients only if an
            # input requires them.
            hidden_states.requires_grad_()

        for layer in self.layers.values():
            run_layer = partial(layer, shared=shared)
            if recomputes:
                hidden_states, state = self._checkpointed(run_layer, hidden_states, state)
            else:
                hidden_states, state = run_layer(hidden_states, state)

        if not self.is_last:
            if self._sends_state:
                return pack(hidden_states, self.encoding.state_tensor(state))
            return hidden_states
        return self._logits_or_loss(self.norm(hidden_states), labels, loss_weights, by_token)

    def _checkpointed(
        self,
        run_layer: Callable[..., tuple[Tensor, Any]],
        hidden_states: Tensor,
        state: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the hidden states and the tensor of the position state that `run_layer` computes,
        with activation checkpointing.
        """

        def run(hidden_states: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
            """Run the layer. Megatron's checkpointing requires results that are tensors."""
            hidden_states, new_state = run_layer(hidden_states, state)
            return hidden_states, self.encoding.state_tensor(new_state)

        # False, for `distribute_saved_activations`: every tensor-parallel rank keeps the whole
        # input of the layer.
        return checkpoint(run, False, hidden_states, state)

    def _with_window(
        self, visibility: Visibility | ShiftedSegments | None, tokens: Tensor
    ) -> Visibility | ShiftedSegments | None:
        """Return which tokens attend to which in layers with a window, given the same without it,
        for token ids (B, S).
        """
        window = self.model_config.sliding_window
        if window is None or window >= tokens.shape[1]:
            # The window hides nothing, so kernels need not know it.
            return visibility
        if visibility is None:
            visibility = Visibility.of_whole(tokens)
        return visibility.with_window(window)

    def _temperature(self, tokens: Tensor, documents: Visibility | None) -> Tensor | None:
        """Return the factor (S, B or 1, 1, 1) of the queries in layers without positions, or None,
        for token ids (B, S).
        """
        if not self.model_config.temperature_scale:
            return None
        positions_SB = torch.arange(tokens.shape[1], device=tokens.device)[:, None]
        if documents is not None:
            positions_SB = positions_SB - documents.documents_2BT[0].T
        return temperature(
            positions_SB,
            self.model_config.temperature_scale,
            self.model_config.temperature_floor_scale,
        )[..., None, None]

    def _in_documents(self, positions: Tensor, documents: Visibility | None) -> Tensor:
        """Return the positions (S, B or 1) of tokens, which restart in each packed document if the
        encoding needs it.

        `positions` (S,) are those of a sequence without documents.
        """
        if documents is None or not self.encoding.restarts_in_documents:
            return positions[:, None]

        # The i-th token of a document has the position of the i-th token of a sequence.
        starts_SB = documents.documents_2BT[0].T.long()
        index_S = torch.arange(len(positions), device=positions.device)
        return positions[index_S[:, None] - starts_SB]

    def _embedded(self, tokens: Tensor, positions_SB: Tensor) -> Tensor:
        """Return the input of the first layer (s, B, C), for token ids (B, S)."""
        hidden_states = self.embedding(self.token_layout.context_tokens(tokens))
        if not self.token_layout.sequence_parallel:
            # With sequence parallelism, the embedding's reduce-scatter returns the tokens first.
            hidden_states = hidden_states.transpose(0, 1).contiguous()

        added = self.encoding.embedding(self.token_layout.local_tokens(positions_SB), self.dtype)
        if added is not None:
            hidden_states = hidden_states + added
        return hidden_states

    def set_input_tensor(self, tensors: list[Tensor | None]) -> None:
        """Set this model chunk's input: a list with the previous chunk's output. Megatron's
        schedules call this.
        """
        (self._received,) = tensors

    def _from_previous_chunk(self, positions_SB: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the hidden states (s, B, C) and the position state that enter the first layer of
        this chunk.
        """
        received = self._received
        self._received = None  # so that it can be freed
        if not self._receives_state:
            return received, self.encoding.initial_state(positions_SB, self.dtype)

        # Only one tensor is sent. Its numbers of tokens and sequences determine the shape of the
        # state in it.
        tokens, batch, _ = received.shape
        shape, dtype = self.encoding.sent_state(self._first_layer, tokens, batch, self.dtype)
        return unpack(received, self.model_config.hidden_size, shape, dtype)

    def sent_width(self, layer: int) -> int:
        """Return the elements per token in the input of a model chunk that begins with layer
        `layer` (from 0).

        These are the hidden states and, if the encoding sends it, the position state.
        """
        width = self.model_config.hidden_size
        if self.encoding.sends_state(layer):
            # The shape of the state of one token of one sequence.
            shape, dtype = self.encoding.sent_state(layer, tokens=1, batch=1, dtype=self.dtype)
            width += packed_width(shape, dtype, tokens=1, dtype=self.dtype)
        return width

    def _logits_or_loss(
        self,
        hidden_states: Tensor,
        labels: Tensor | None,
        loss_weights: Tensor | None,
        by_token: bool,
    ) -> Tensor:
        """Return the result of `forward` for the normalized output (s, B, C) of the last layer."""
        # In a pipeline, the last stage uses a copy of the first stage's embedding weight.
        tied_weight = None
        if self.model_config.tie_embeddings:
            if self.is_first:
                tied_weight = self.embedding.weight
            else:
                tied_weight = self.received_embedding

        if labels is None:
            return self.token_layout.gather_context(self.output(hidden_states, tied_weight))

        labels = self.token_layout.context_tokens(labels)
        if loss_weights is not None:
            loss_weights = self.token_layout.context_tokens(loss_weights)
            # ZeRO averages gradients over the context-parallel ranks. With this factor, the average
            # is the gradient of the weighted sum over whole sequences.
            loss_weights = loss_weights * self.token_layout.context_shards
        loss, losses_BS = self.output(hidden_states, tied_weight, labels, loss_weights)
        if by_token:
            return self.token_layout.gather_context(losses_BS)
        return loss

    def take_z_loss(self) -> Tensor | float:
        """Return the sum of the z-losses of all training forward passes since the last call.

        The sum is 0 if the z-loss is disabled, and in all model chunks except the last.
        """
        if self.is_last:
            return self.output.take_z_loss()
        return 0.0

    def token_positions(self, tokens: Tensor, random: np.random.Generator | None = None) -> Tensor:
        """Return the positions (S,) of token ids (B, S), on the same device.

        `random` is the generator of a training step, for encodings that draw random positions; None
        outside training.
        """
        positions = self.encoding.token_positions(tokens.shape[1], random)
        if positions is None:
            return torch.arange(tokens.shape[1], device=tokens.device)

        host = torch.from_numpy(positions)
        if tokens.is_cuda:
            # A copy from pageable memory would block the host until the GPU is done.
            host = host.pin_memory()
        return host.to(tokens.device, non_blocking=True)

    def updating_encodings(self) -> list[LayerEncoding]:
        """Return the modules that update the position state, in layer order; empty for encodings
        that update none.
        """
        return [layer.position for layer in self.layers.values() if layer.position.updates]
