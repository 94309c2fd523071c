"""The language model: Megatron-core's `GPTModel` with a positional encoding in its layers.

Axes: B batch, S all tokens of a sequence, s this rank's tokens, C hidden size, V vocabulary.
"""

from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules
from megatron.core.utils import init_method_normal, scaled_init_method_normal
from torch import Tensor

from megatron_tape.config.schema import ModelConfig
from megatron_tape.model.backend import FusedKernels, chosen_backend
from megatron_tape.model.decoder import Decoder
from megatron_tape.model.layers import (
    CoreAttention,
    LayerPosition,
    PositionSelfAttention,
    PositionTransformerLayer,
    RMSNorm,
    Shared,
    SwiGLU,
)
from megatron_tape.ops.activation_checkpointing import AttentionRecorder
from megatron_tape.ops.packing import Packing
from megatron_tape.ops.shifted import ShiftedSegments, unshifted_groups
from megatron_tape.ops.stage_boundary import packed_width, unpack
from megatron_tape.parallel.token_layout import TokenLayout
from megatron_tape.position import PositionEncoding, encoding_of


def transformer_config(
    model: ModelConfig,
    tensor_model_parallel_size: int = 1,
    sequence_parallel: bool = False,
    dtype: torch.dtype = torch.float32,
    recompute: str = "none",
) -> TransformerConfig:
    """Convert `ModelConfig` to Megatron-core's `TransformerConfig`; `recompute` is `train.recompute`."""
    return TransformerConfig(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        ffn_hidden_size=model.ffn_hidden_size,
        num_attention_heads=model.num_attention_heads,
        num_query_groups=model.query_groups,
        kv_channels=model.head_dim,
        gated_linear_unit=True,
        activation_func=F.silu,
        use_te_activation_func=True,  # take the MLP's activation module from `layer_spec`
        add_bias_linear=False,
        add_qkv_bias=model.qkv_bias,
        qk_layernorm=model.qk_norm,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        normalization="RMSNorm",
        layernorm_epsilon=model.norm_epsilon,
        init_method=init_method_normal(model.init_std),
        output_layer_init_method=scaled_init_method_normal(model.init_std, model.num_layers),
        use_cpu_initialization=True,
        params_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        pipeline_dtype=dtype,
        tensor_model_parallel_size=tensor_model_parallel_size,
        sequence_parallel=sequence_parallel,
        # Megatron's "selective" recomputes only attention; ours recomputes everything except attention.
        recompute_granularity=None if recompute == "none" else "full",
        recompute_method=None if recompute == "none" else "uniform",
        recompute_num_layers=None if recompute == "none" else 1,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
    )


def layer_spec(model: ModelConfig, encoding: PositionEncoding, backend: str, first: int, packs: bool) -> ModuleSpec:
    """Return the spec of one decoder layer: a Llama layer whose attention uses `encoding`.

    `backend` is one of `ops.backends.BACKENDS`. See `PositionTransformerLayer` for `first` and `packs`.
    """
    norm = RMSNorm if model.qk_norm else None
    return ModuleSpec(
        module=PositionTransformerLayer,
        params={"encoding": encoding, "first": first, "packs": packs},
        submodules=TransformerLayerSubmodules(
            input_layernorm=RMSNorm,
            self_attention=ModuleSpec(
                module=PositionSelfAttention,
                params={"attn_mask_type": AttnMaskType.causal, "output_gate": model.attention_output_gate},
                submodules=SelfAttentionSubmodules(
                    linear_qkv=ColumnParallelLinear,
                    core_attention=ModuleSpec(module=CoreAttention, params={"backend": backend}),
                    linear_proj=RowParallelLinear,
                    q_layernorm=norm,
                    k_layernorm=norm,
                ),
            ),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=RMSNorm,
            mlp=ModuleSpec(
                module=MLP,
                submodules=MLPSubmodules(
                    linear_fc1=ColumnParallelLinear, activation_func=SwiGLU, linear_fc2=RowParallelLinear
                ),
            ),
            mlp_bda=get_bias_dropout_add,
        ),
    )


def block_spec(
    model: ModelConfig, encoding: PositionEncoding, backend: str, layers: range
) -> TransformerBlockSubmodules:
    """Return the spec of a model chunk: the decoder layers with the indices `layers`, and the final norm."""
    packs = layers.stop < model.num_layers and encoding.sends_state(layers.stop)
    specs = [layer_spec(model, encoding, backend, layers.start, packs and layer == layers[-1]) for layer in layers]
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=RMSNorm)


class LanguageModel(torch.nn.Module):
    """A decoder that returns logits or, given labels, the next-token loss.

    Parameters are created on torch's meta device. `parallel.partitions.allocate` gives them memory, and
    `model.initialization.initialize_weights` or a checkpoint fills it.

    Args:
        config: the settings of `model` for Megatron, from `transformer_config`.
        device: the device that the model will run on, for the choice of the attention backend.
        shifted_sparse: use shifted sparse attention (`ops.shifted`) in training mode.
        selective_recompute: keep attention's outputs, so that layers are recomputed without attention.
        fused: the Triton kernels to use apart from attention. Default: the position update's kernel if the attention
            backend is triton, otherwise none.
        layers: indices of the layers of this model chunk. Default: all layers, which are the whole model. A chunk takes
            the output of the previous chunk from `set_input_tensor`, and returns the input (s, B, `sent_width`) of the
            next one.
        z_loss: coefficient of the z-loss, the mean of log(sum(exp(logits)))^2. The gradient of the z-loss is added to
            that of the loss.
    """

    def __init__(
        self,
        model: ModelConfig,
        config: TransformerConfig,
        groups: ProcessGroupCollection,
        device: torch.device | str = "cpu",
        shifted_sparse: bool = False,
        selective_recompute: bool = False,
        fused: FusedKernels | None = None,
        layers: range | None = None,
        z_loss: float = 0.0,
    ):
        super().__init__()
        self.layers = range(model.num_layers) if layers is None else layers
        self.model = model
        self.attention_backend = chosen_backend(model, config.params_dtype, torch.device(device), shifted_sparse)
        """The attention backend for `device`, where the caller must place the parameters."""
        self.tokens = TokenLayout.of(groups, config.sequence_parallel)
        self.fused = fused or FusedKernels(position_update=self.attention_backend == "triton")
        self.encoding = encoding_of(model, self.tokens, self.fused.position_update)
        with torch.device("meta"):
            self.gpt = Decoder(
                config,
                self.layers,
                transformer_layer_spec=block_spec(model, self.encoding, self.attention_backend, self.layers),
                vocab_size=model.vocab_size,
                max_sequence_length=model.seq_length,
                share_embeddings_and_output_weights=model.tie_embeddings,
                position_embedding_type="none",
                pg_collection=groups,
            )
        if self.is_last:
            self.gpt.output_layer.fused, self.gpt.output_layer.z_loss = self.fused.loss, z_loss
        for module in self.gpt.modules():
            if isinstance(module, SwiGLU):
                module.fused = self.fused.swiglu
        self.dtype = config.params_dtype
        self.shifted_sparse = shifted_sparse
        self.selective_recompute = selective_recompute
        own_groups = self.tokens.local_heads(torch.arange(model.query_groups, device="cpu")).tolist()
        self._unshifted_groups = unshifted_groups(model.query_groups, own_groups)
        self._received: Tensor | None = None

    @property
    def is_first(self) -> bool:
        """Whether this model chunk begins with the embedding."""
        return self.layers.start == 0

    @property
    def is_last(self) -> bool:
        """Whether this model chunk ends with the output layer."""
        return self.layers.stop == self.model.num_layers

    @property
    def embedding(self) -> torch.nn.Module | None:
        """The token embedding; None if this model chunk is not the first."""
        return self.gpt.embedding if self.is_first else None

    def take_z_loss(self) -> Tensor | float:
        """Return the sum of the z-losses of all training forward passes since the last call.

        The sum is 0 if the z-loss is disabled, and in all model chunks except the last.
        """
        if not self.is_last:
            return 0.0
        total, self.gpt.output_layer.z_losses = self.gpt.output_layer.z_losses, 0.0
        return total

    def sent_width(self, layer: int) -> int:
        """Return the elements per token in the input of a model chunk that begins with layer `layer` (from 0).

        These are the hidden states and, if the encoding sends it, the position state.
        """
        width = self.model.hidden_size
        if self.encoding.sends_state(layer):
            shape, dtype = self.encoding.sent_state(layer, 1, 1, self.dtype)
            width += packed_width(shape, dtype, 1, self.dtype)
        return width

    def set_input_tensor(self, tensors: list[Tensor | None]) -> None:
        """Set this model chunk's input: a list with the previous chunk's output. Megatron's schedules call this."""
        (self._received,) = tensors

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

        The loss is the mean over the tokens or, with `loss_weights` (B, S), their weighted sum. With context
        parallelism it covers only this rank's tokens; average it over the context-parallel ranks. `by_token` returns
        the loss of each token (B, S) instead, in float32 and without a gradient. A model chunk that is not the last
        returns the input of the next one.

        Every rank passes whole sequences; S must be a multiple of `self.tokens.sequence_shards`. Tokens attend only to
        tokens with the same number in `documents` (B, S). `positions` (S,) default to those of the encoding outside
        training, usually 0, 1, ...
        """
        if positions is None:
            positions = self.token_positions(tokens)
        packing = None if documents is None else Packing.of(documents)
        positions_SB = positions[:, None]
        if packing is not None and self.encoding.restarts_in_documents:
            starts_SB = packing.bounds_2BT[0].T.long()
            positions_SB = positions[torch.arange(len(positions), device=positions.device)[:, None] - starts_SB]
        if self.shifted_sparse and self.training:
            packing = ShiftedSegments.of(tokens, packing, self._unshifted_groups)
        records = self.selective_recompute and self.training and torch.is_grad_enabled()
        tokens, labels, loss_weights = (
            None if x is None else self.tokens.context_tokens(x) for x in (tokens, labels, loss_weights)
        )
        embedded, state = self._inputs_of_first_layer(tokens, positions_SB)
        forward = partial(
            self.gpt,
            tokens,
            None,
            None,
            decoder_input=embedded,
            packed_seq_params=Shared(packing, AttentionRecorder() if records else None),
            extra_block_kwargs={"context": state},
        )
        if not self.is_last:
            return forward()
        if labels is None:
            return self.tokens.gather_context(forward(runtime_gather_output=True))
        loss, losses = forward(labels=labels, loss_mask=self.tokens.loss_weights(loss_weights))
        return self.tokens.gather_context(losses) if by_token else loss

    def _inputs_of_first_layer(self, tokens: Tensor, positions_SB: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Return the input of this chunk's first layer (s, B, C) and its position state.

        The input is None if `self.gpt` computes it: from the tokens, or from `set_input_tensor`.
        """
        if self.is_first:
            added = self.encoding.embedding(self.tokens.local_tokens(positions_SB), self.dtype)
            embedded = None if added is None else self.gpt.embedding(tokens, None) + added
            return embedded, self.encoding.initial_state(positions_SB, self.dtype)
        hidden_sBC, first = self._received, self.layers.start
        if self.encoding.sends_state(first):
            received = self.encoding.sent_state(first, len(hidden_sBC), hidden_sBC.shape[1], self.dtype)
            hidden_sBC, state = unpack(hidden_sBC, self.model.hidden_size, *received)
        else:
            state = self.encoding.initial_state(positions_SB, self.dtype)
        self.gpt.set_input_tensor(hidden_sBC)
        self._received = None
        return None, state

    def token_positions(self, tokens: Tensor, random: np.random.Generator | None = None) -> Tensor:
        """Return the positions (S,) of token ids (B, S), on the same device.

        `random` is the generator of a training step, for encodings that draw random positions; None outside training.
        """
        positions = self.encoding.token_positions(tokens.shape[1], random)
        if positions is None:
            return torch.arange(tokens.shape[1], device=tokens.device)
        host = torch.from_numpy(positions)
        # A copy from pageable memory would block the host until the GPU is done.
        return (host.pin_memory() if tokens.is_cuda else host).to(tokens.device, non_blocking=True)

    def position_updates(self) -> list[LayerPosition]:
        """Return the modules that update the position state, in layer order; empty for encodings that update none."""
        return [layer.position for layer in self.gpt.decoder.layers if layer.position.updates]
