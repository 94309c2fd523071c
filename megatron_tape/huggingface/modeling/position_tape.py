"""The position state of TAPE models: its initial phases and the update of each layer.

Axes: B batch, S new tokens, C hidden size, H query heads, G key/value heads, D head dimension, P
position MLP width.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.utils import logging

from .configuration_tape import TapeConfig

logger = logging.get_logger(__name__)


class TapePhases(nn.Module):
    """RoPE's phases, the initial position state."""

    def __init__(self, config: TapeConfig):
        super().__init__()
        self.config = config
        frequencies, self.attention_factor = self.frequencies()
        self.register_buffer("inv_freq", frequencies, persistent=False)

    def frequencies(self) -> tuple[Tensor, float]:
        """Return the D/2 frequencies (float32), and the attention factor, which is 1 except with
        yarn.
        """
        rope = self.config.rope_parameters
        # transformers 5 has no function for this type.
        if rope["rope_type"] == "default":
            D = self.config.head_dim
            exponents = torch.arange(0, D, 2).float() / D
            return 1.0 / rope["rope_theta"] ** exponents, 1.0
        return ROPE_INIT_FUNCTIONS[rope["rope_type"]](self.config)

    def _apply(self, fn, recurse=True):
        """Apply `fn` as `nn.Module` does, but let it change only the device of the frequencies."""
        # Long contexts need angles in float32, even if the model is converted to bfloat16.
        original = self.inv_freq
        super()._apply(fn, recurse)
        # A meta tensor has no data to restore.
        if not original.is_meta:
            self.inv_freq = original.to(self.inv_freq.device)
        return self

    def forward(self, position_ids: Tensor) -> Tensor:
        """Return exp(i s theta_f) times the attention factor (B, S, D), float32, for integer
        positions s (B, S).
        """
        angles = position_ids[..., None].float() * self.inv_freq
        return torch.cat([angles.cos(), angles.sin()], dim=-1) * self.attention_factor


def effective_weight(linear: nn.Module, columns: int, like: Tensor) -> Tensor:
    """Return the weight (rows, columns) of a linear module, including changes by other libraries.

    LoRA layers, quantization, offloading and hooks take effect only when the module is called.
    Such a module is applied to the identity matrix, with the dtype and device of `like`.
    """
    # accelerate replaces `forward` on the instance to load offloaded weights.
    is_hooked = linear._forward_pre_hooks or linear._forward_hooks or "forward" in vars(linear)
    # The weight of a quantized linear layer is of another class than these two.
    if type(linear) is nn.Linear and type(linear.weight) in (nn.Parameter, Tensor):
        if not is_hooked:
            return linear.weight
    # (1, columns, columns): if a batch has `adapter_names`, peft accepts only an input with as many
    # sequences, which is possible here only for a batch of one.
    identity = torch.eye(columns, dtype=like.dtype, device=like.device)[None]
    return linear(identity)[0].T


class TapePosition(nn.Module):
    """The update of the position state: token mixing, then a gated linear map across the G heads of
    each token.
    """

    def __init__(self, config: TapeConfig):
        super().__init__()
        H = config.num_attention_heads
        G = config.num_key_value_heads
        P = config.position_mlp_size
        self.num_heads = H
        self.token_mixing = nn.Linear(H, G, bias=False)
        self.x_proj = nn.Linear(config.hidden_size, P, bias=False)
        self.up_proj = nn.Linear(G, P, bias=False)
        self.down_proj = nn.Linear(P, G, bias=False)
        # `TapePreTrainedModel._init_weights` initializes a matrix with its `initial_std`.
        # transformers calls it for the matrices, not for this module, which owns no parameters.
        self.token_mixing.initial_std = 0.0
        self.down_proj.initial_std = 0.0
        self.up_proj.initial_std = G**-0.5
        # For a TapePosition outside of transformers' models, which does not get `_init_weights`:
        # with these two matrices at zero, the update changes nothing, so the state stays RoPE's.
        nn.init.zeros_(self.token_mixing.weight)
        nn.init.zeros_(self.down_proj.weight)

    def forward(self, state: Tensor, averaged: Tensor, gate_input: Tensor) -> Tensor:
        """Return the next layer's state (B, S, G, D): z'' = z' + M z' with z' = z + A u.

        `state` z (B, S, G, D); `averaged` u, its averages by the attention weights (B, S, H, D);
        `gate_input` (B, S, C). A is the weight of token_mixing, and M = W_down diag(gate) W_up.
        """
        B, S, G, D = state.shape
        N = B * S
        state = state.reshape(N, G, D)
        averaged = averaged.reshape(N, -1, D)
        # An fp32 state remains fp32 in half-precision models. It is rounded only as a factor of
        # matrix products.
        state_is_wider = state.dtype != averaged.dtype
        if averaged.shape[1] == self.num_heads:
            mixing = effective_weight(self.token_mixing, self.num_heads, averaged).expand(N, -1, -1)
            if state_is_wider:
                mixed = state + torch.bmm(mixing, averaged)
            else:
                mixed = torch.baddbmm(state, mixing, averaged)
        else:
            # In vLLM with tensor parallelism, `averaged` has only the heads of this process. There,
            # token_mixing multiplies them by its columns of A, and sums over processes.
            by_head = averaged.transpose(1, 2).contiguous()
            mixed = state + self.token_mixing(by_head).transpose(1, 2)

        gate = F.silu(self.x_proj(gate_input)).view(N, -1)
        # M = sum over p of gate_p (column p of W_down) (row p of W_up). One product of the gates
        # (N, P) with these outer products (P, G G) computes it for all tokens.
        up_weight = effective_weight(self.up_proj, G, gate)
        down_weight = effective_weight(self.down_proj, gate.shape[-1], gate)
        outer = (down_weight.T.unsqueeze(2) * up_weight.unsqueeze(1)).flatten(1)
        M = (gate @ outer).view(N, G, G)

        if state_is_wider:
            new_state = mixed + torch.bmm(M, mixed.to(M.dtype))
        else:
            new_state = torch.baddbmm(mixed, M, mixed)
        return new_state.view(B, S, G, D)


def warn_if_frozen(model: nn.Module) -> None:
    """Warn if TAPE's matrices are zero and frozen, so that the model stays RoPE."""
    weights = {name: weight for name, weight in model.named_parameters() if ".position." in name}
    for weight in weights.values():
        # A weight that is trained can leave zero. The values of offloaded (meta) and sharded
        # (empty) weights are not known here.
        if weight.requires_grad or weight.is_meta or not weight.numel():
            return
    # If these are zero, the update of the state is zero.
    output_weights = [
        weight
        for name, weight in weights.items()
        if ".token_mixing." in name or ".down_proj." in name
    ]
    if output_weights and not any(weight.any() for weight in output_weights):
        logger.warning(
            "TAPE's matrices are all zero and frozen, so the model remains plain RoPE in this"
            ' training; to train them with peft, use target_modules="all-linear", or add'
            ' modules_to_save=["position"] to the LoraConfig'
        )
