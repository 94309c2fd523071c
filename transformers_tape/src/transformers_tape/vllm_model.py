"""TAPE language models for vLLM, built from vLLM's layers and the position update of exported
models.

Axes: N tokens of all requests, H query heads and G key/value heads of this process, K key/value
heads of all processes, D head dimension, C hidden size.
"""

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from vllm.compilation.decorators import support_torch_compile
from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import QKVParallelLinear, RowParallelLinear
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)
from vllm.model_executor.models.llama import LlamaMLP
from vllm.model_executor.models.utils import AutoWeightsLoader, WeightsMapper, maybe_prefix
from vllm.sequence import IntermediateTensors

from .attention_tape import rotate
from .configuration_tape import TapeConfig
from .position_tape import TapePhases, TapePosition
from .vllm_plugin import check_positions, double_head_size


class VllmTapeAttention(nn.Module):
    """Attention that rotates queries and keys by the position state, and averages the state with
    the values.
    """

    def __init__(self, config: TapeConfig, vllm_config: VllmConfig, prefix: str):
        super().__init__()
        C = config.hidden_size
        D = config.head_dim
        heads = config.num_attention_heads
        groups = config.num_key_value_heads
        quant_config = vllm_config.quant_config
        self.qkv_proj = QKVParallelLinear(
            C,
            D,
            heads,
            groups,
            config.attention_bias,
            quant_config=quant_config,
            prefix=f"{prefix}.qkv_proj",
        )
        self.o_proj = RowParallelLinear(
            heads * D, C, bias=False, quant_config=quant_config, prefix=f"{prefix}.o_proj"
        )

        self.q_norm = nn.Identity()
        self.k_norm = nn.Identity()
        if config.qk_norm:
            self.q_norm = RMSNorm(D, eps=config.rms_norm_eps)
            self.k_norm = RMSNorm(D, eps=config.rms_norm_eps)

        # Heads of this process.
        H = self.qkv_proj.num_heads
        G = self.qkv_proj.num_kv_heads
        self.local_sizes = H, G, D
        # Index, among those of all processes, of the key/value head of this process's first query
        # head. Several processes have the same one if there are more processes than such heads.
        first_local_head = get_tensor_model_parallel_rank() * H
        self.first_local_group = first_local_head // (heads // groups)
        # vLLM's heads have size 2 D, since values are [value | z]. Queries and keys are padded with
        # zeros from size D, so the scale remains that of D.
        self.attn = Attention(
            H,
            2 * D,
            D**-0.5,
            num_kv_heads=G,
            cache_config=vllm_config.cache_config,
            quant_config=quant_config,
            prefix=f"{prefix}.attn",
        )

    def forward(self, hidden_states: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return the output (N, C) and the averaged state (N, H, D).

        hidden_states (N, C), state (N, K, D).
        """
        H, G, D = self.local_sizes
        N = hidden_states.shape[0]
        qkv, _ = self.qkv_proj(hidden_states)
        query, key, value = qkv.view(N, H + 2 * G, D).split([H, G, G], dim=1)
        query = self.q_norm(query)
        key = self.k_norm(key)

        # Every process holds the state of all K key/value heads, but rotates only its own.
        first = self.first_local_group
        z = state[:, first : first + G].to(query.dtype)
        # The query heads of a group, (N, G, H / G, D), are multiplied by the group's z.
        query = rotate(query.unflatten(1, (G, -1)), z.unsqueeze(2)).flatten(1, 2)
        key = rotate(key, z)

        # Zeros do not change scores; vLLM's kernels need keys of the size of values.
        query, key = (F.pad(x, (0, D)).flatten(1) for x in (query, key))
        value = torch.cat([value, z], dim=-1).flatten(1)

        # [average of the values | average of the states].
        averages = self.attn(query, key, value).view(N, H, 2 * D)
        output, _ = self.o_proj(averages[..., :D].flatten(1))
        return output, averages[..., D:]


class VllmTapeDecoderLayer(nn.Module):
    """One decoder layer, which computes the hidden states and the position state of the next
    layer.
    """

    def __init__(self, config: TapeConfig, vllm_config: VllmConfig, prefix: str, is_last: bool):
        super().__init__()
        self.gate_by_mlp = config.gate_input == "mlp"
        self.self_attn = VllmTapeAttention(config, vllm_config, f"{prefix}.self_attn")
        self.mlp = LlamaMLP(
            config.hidden_size,
            config.intermediate_size,
            config.hidden_act,
            quant_config=vllm_config.quant_config,
            prefix=f"{prefix}.mlp",
        )
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

        # No layer reads the state after the last layer.
        self.position = None if is_last else TapePosition(config)
        if self.position is not None and get_tensor_model_parallel_world_size() > 1:
            # Each process multiplies its H heads by H columns of the matrix. RowParallelLinear sums
            # the products over processes.
            self.position.token_mixing = RowParallelLinear(
                config.num_attention_heads,
                config.num_key_value_heads,
                bias=False,
                return_bias=False,
            )

    def forward(
        self, hidden_states: Tensor, residual: Tensor | None, state: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return this layer's MLP output (N, C), the residual (N, C) and the next state (N, K, D).

        The arguments are the three results of the previous layer. The first layer gets the embedded
        tokens, None and RoPE's phases. As in vLLM's Llama, the next layer's norm adds the MLP
        output to the residual.
        """
        if residual is None:
            hidden_states, residual = self.input_layernorm(hidden_states), hidden_states
        else:
            hidden_states, residual = self.input_layernorm(hidden_states, residual)

        attention_output, averaged_state = self.self_attn(hidden_states, state)

        gate_input = None
        if not self.gate_by_mlp:
            gate_input = attention_output.clone()  # the fused norm may overwrite its input
        hidden_states, residual = self.post_attention_layernorm(attention_output, residual)
        mlp_output = self.mlp(hidden_states)
        if self.position is not None:
            if self.gate_by_mlp:
                gate_input = mlp_output
            # TapePosition expects a batch axis.
            state = self.position(state[None], averaged_state[None], gate_input[None])[0]
        return mlp_output, residual, state


@support_torch_compile
class VllmTapeModel(nn.Module):
    """The decoder without its language-model head."""

    # vLLM creates models with these arguments; `prefix` is the module's name within the model.
    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        super().__init__()
        config: TapeConfig = vllm_config.model_config.hf_config
        self.config = config
        self.embed_tokens = VocabParallelEmbedding(
            config.vocab_size,
            config.hidden_size,
            quant_config=vllm_config.quant_config,
            prefix=f"{prefix}.embed_tokens",
        )
        self.phases = TapePhases(config)
        check_positions(vllm_config.model_config.model, self.phases)
        last = config.num_hidden_layers - 1
        self.layers = nn.ModuleList(
            [
                VllmTapeDecoderLayer(config, vllm_config, f"{prefix}.layers.{i}", is_last=i == last)
                for i in range(last + 1)
            ]
        )
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the hidden states (N, C) of token ids (N,) or of embeddings (N, C).

        `positions` (N,) are those of the tokens within their requests. `intermediate_tensors` is
        unused, since pipeline parallelism is not supported.
        """
        hidden_states = inputs_embeds
        if hidden_states is None:
            hidden_states = self.embed_tokens(input_ids)
        state = self.phases(positions)
        if self.config.position_state_precision != "fp32":
            state = state.to(hidden_states.dtype)
        state = state.unsqueeze(1).expand(-1, self.config.num_key_value_heads, -1)
        residual = None
        for layer in self.layers:
            hidden_states, residual, state = layer(hidden_states, residual, state)
        hidden_states, _ = self.norm(hidden_states, residual)
        return hidden_states


class VllmTapeForCausalLM(nn.Module):
    """The decoder with its language-model head."""

    # By a part of an exported weight's name: the name of vLLM's fused weight, and which part of it
    # the exported weight becomes.
    hf_to_vllm_mapper = WeightsMapper(
        orig_to_new_stacked={
            ".self_attn.q_proj": (".self_attn.qkv_proj", "q"),
            ".self_attn.k_proj": (".self_attn.qkv_proj", "k"),
            ".self_attn.v_proj": (".self_attn.qkv_proj", "v"),
            ".mlp.gate_proj": (".mlp.gate_up_proj", 0),
            ".mlp.up_proj": (".mlp.gate_up_proj", 1),
        }
    )
    packed_modules_mapping = {
        "qkv_proj": ["q_proj", "k_proj", "v_proj"],
        "gate_up_proj": ["gate_proj", "up_proj"],
    }

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        super().__init__()
        # vLLM has already called this as `verify_and_update_config` when it created `vllm_config`.
        # The second call is for versions of vLLM without that hook.
        double_head_size(vllm_config)
        config: TapeConfig = vllm_config.model_config.hf_config
        self.config = config
        self.model = VllmTapeModel(vllm_config=vllm_config, prefix=maybe_prefix(prefix, "model"))
        self.lm_head = ParallelLMHead(
            config.vocab_size,
            config.hidden_size,
            quant_config=vllm_config.quant_config,
            prefix=maybe_prefix(prefix, "lm_head"),
        )
        if config.tie_word_embeddings:
            self.lm_head = self.lm_head.tie_weights(self.model.embed_tokens)
        self.logits_processor = LogitsProcessor(config.vocab_size)

    # The methods below are the interface that vLLM calls.

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Return the embeddings (N, C) of token ids (N,)."""
        return self.model.embed_tokens(input_ids)

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return hidden states (N, C); see `VllmTapeModel.forward`."""
        return self.model(input_ids, positions, intermediate_tensors, inputs_embeds)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        """Return logits (N, vocabulary) of hidden states (N, C).

        With tensor parallelism, processes to which vLLM does not gather logits get None.
        """
        return self.logits_processor(self.lm_head, hidden_states)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load pairs of an exported weight's name and tensor; return the names of the loaded
        parameters.
        """
        return AutoWeightsLoader(self).load_weights(weights, mapper=self.hf_to_vllm_mapper)
