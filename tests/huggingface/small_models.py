"""Small random TAPE models far from RoPE, and prompts for them."""

import torch

from megatron_tape.huggingface.modeling.configuration_tape import TapeConfig
from megatron_tape.huggingface.modeling.modeling_tape import TapeForCausalLM

SMALL = dict(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
    initializer_range=0.15,
    rms_norm_eps=1e-5,
)


def randomize(model):
    """Move TAPE's matrices away from zero."""
    for name, parameter in model.named_parameters():
        if ".position." in name:
            torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    return model


def build(dtype=torch.float32, **changes):
    config = TapeConfig(
        **({"position_mlp_size": 6, "attn_implementation": "sdpa"} | SMALL | changes)
    )
    return randomize(TapeForCausalLM(config)).to(dtype).eval()


def tokens(batch=2, length=17):
    return torch.randint(
        1, SMALL["vocab_size"], (batch, length), generator=torch.Generator().manual_seed(3)
    )
