"""ModuleSpecs: the modules that Megatron-core's `TransformerBlock` is built from."""

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules

from megatron_tape.config.schema import ModelConfig
from megatron_tape.model.layers import CoreAttention, PositionSelfAttention, PositionTransformerLayer, RMSNorm, SwiGLU
from megatron_tape.position import PositionEncoding


def layer_spec(
    model: ModelConfig, encoding: PositionEncoding, backend: str = "torch", first: int = 0, packs: bool = False
) -> ModuleSpec:
    """Return the spec of one decoder layer: Llama's, with `encoding` in its attention and after its MLP.

    `backend` is one of `ops.backends.BACKENDS`; see `PositionTransformerLayer` for `first` and `packs`.
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
    model: ModelConfig, encoding: PositionEncoding, backend: str = "torch", layers: range | None = None
) -> TransformerBlockSubmodules:
    """Return the spec of the decoder's layers, or of a stretch of them, and of the final norm."""
    layers = range(model.num_layers) if layers is None else layers
    packs = layers.stop < model.num_layers and encoding.carries(layers.stop)
    specs = [layer_spec(model, encoding, backend, layers.start, packs and layer == layers[-1]) for layer in layers]
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=RMSNorm)
