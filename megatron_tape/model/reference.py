"""TAPE in plain torch on one page: the reference that all other implementations are tested against.

It is written for readability, not for speed. Paper: "Rethinking Addressing in Language Models via
Contextualized Equivariant Positional Encoding" (ICML 2025).

Axes: B batch, S/T query/key token, C hidden size, H query heads, G key/value groups, D head
dimension, E dimension of the averaged vectors, F = D/2 rotary frequencies, P inner width of the
position MLP, V vocabulary. For each token and group, a position state z_BSGD stores F complex
numbers, first all real parts, then all imaginary parts.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class ReferenceConfig:
    """Settings that cannot be inferred from the weights: those of `model` with the same or similar
    names.
    """

    num_attention_heads: int
    num_query_groups: int
    rope_theta: float = 10000.0
    rope_share: float = 1.0
    rope_scaling_type: str = "linear"
    rope_scaling_factor: float = 1.0
    rope_low_freq_factor: float = 1.0
    rope_high_freq_factor: float = 4.0
    rope_original_seq_length: int = 8192
    rope_beta_slow: float = 1.0
    rope_beta_fast: float = 32.0
    rope_truncate: bool = True
    rope_attention_factor: float | None = None
    rope_scaling_layers: str = "all"
    rope_local_theta: float | None = None
    layers_without_positions: int | None = None
    temperature_scale: float = 0.0
    temperature_floor_scale: int = 8192
    sliding_window: int | None = None
    full_attention_every: int | None = None
    norm_epsilon: float = 1e-5
    gate_input: str = "mlp"
    """Input of the position MLP's gate: the output of the `mlp` (released code) or of `attention`
    (paper).
    """
    state_norm: str = "none"
    """`unit` resets the modulus of each complex number of the position state to its initial value
    after each update.
    """
    increments: str = "fixed"
    """How learned increments of positions are computed, if the weights contain any (see `forward`):
    `signed` for the linear form, any other value for the sigmoid."""

    def with_window_frequencies(self) -> "ReferenceConfig":
        """Return the settings with the frequencies of layers with a window."""
        changes: dict[str, Any] = {}
        if self.rope_local_theta is not None:
            changes["rope_theta"] = self.rope_local_theta
        if self.rope_scaling_layers == "full":
            changes |= {"rope_scaling_type": "linear", "rope_scaling_factor": 1.0}
        return replace(self, **changes)


def rope_frequencies(config: ReferenceConfig, head_dim: int) -> Tensor:
    """Return RoPE's frequencies theta_f, in radians per position, float32 (F,), scaled by
    `config.rope_scaling_type`.

    `linear` divides all frequencies by `rope_scaling_factor`. `llama3` and `yarn` divide only those
    with few turns within the original context, and keep those with many. In between they
    interpolate, linearly in the number of turns (`llama3`) or in f (`yarn`). Only the fraction
    `rope_share` of the frequencies, the highest, is not 0.
    """
    f = torch.arange(head_dim // 2)
    rotates = f < int(config.rope_share * head_dim // 2)
    # Frequencies that do not rotate are 0.
    frequencies = rotates / config.rope_theta ** (2 * f.float() / head_dim)
    scaled = frequencies / config.rope_scaling_factor
    if config.rope_scaling_type == "linear":
        return scaled

    # `unscaled` is the weight of the unscaled frequency, from 0 to 1.
    turns = config.rope_original_seq_length * frequencies / (2 * torch.pi)
    if config.rope_scaling_type == "llama3":
        low = config.rope_low_freq_factor
        high = config.rope_high_freq_factor
        unscaled = ((turns - low) / (high - low)).clamp(0, 1)
    else:
        # Solve turns = turns[0] * theta^(-2f/D) for f, where turns is beta_fast or beta_slow.
        first, last = (
            (turns[0] / beta).log() / math.log(config.rope_theta) * head_dim / 2
            for beta in (config.rope_beta_fast, config.rope_beta_slow)
        )
        if config.rope_truncate:
            first = first.floor()
            last = last.ceil()
        first = first.clamp(min=0)
        last = last.clamp(max=head_dim - 1)
        unscaled = 1 - ((f - first) / (last - first)).clamp(0, 1)
    return (1 - unscaled) * scaled + unscaled * frequencies


def attention_factor(config: ReferenceConfig) -> float:
    """Return the factor that multiplies rotated queries and keys: 1, except with `yarn`."""
    if config.rope_scaling_type != "yarn":
        return 1.0
    return config.rope_attention_factor or 0.1 * math.log(max(config.rope_scaling_factor, 1)) + 1


def rope_phases(positions: Tensor, frequencies: Tensor) -> Tensor:
    """Return exp(i p theta_f) for positions p (...) as (..., D): F cosines, then F sines.

    The result has the dtype of floating-point positions, and is float32 for integers.
    """
    if not positions.is_floating_point():
        positions = positions.float()
    angles = positions[..., None] * frequencies.to(positions.device)
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


def rotate(x: Tensor, z: Tensor) -> Tensor:
    """Multiply x (..., D) by the position state z (..., D); elements j and j + F of each are one
    complex number.
    """
    x_re, x_im = x.chunk(2, dim=-1)
    z_re, z_im = z.chunk(2, dim=-1)
    return torch.cat([x_re * z_re - x_im * z_im, x_re * z_im + x_im * z_re], dim=-1)


def conjugate(z: Tensor) -> Tensor:
    """Return the complex conjugate of z (..., D)."""
    z_re, z_im = z.chunk(2, dim=-1)
    return torch.cat([z_re, -z_im], dim=-1)


def attend(
    q_BSHD: Tensor,
    k_BTGD: Tensor,
    v_BTGE: Tensor,
    documents_BT: Tensor | None = None,
    window: int | None = None,
) -> Tensor:
    """Compute causal softmax attention (B, S, H, E). The queries belong to the last S of T tokens.

    Tokens attend only to tokens with the same number in `documents_BT`, for packed documents, and
    only to the last `window` tokens, including their own.
    """
    B, S, H, D = q_BSHD.shape
    T = k_BTGD.shape[1]
    # Adjacent heads share the keys and values of a group.
    k_BTHD, v_BTHE = (x.repeat_interleave(H // x.shape[2], dim=2) for x in (k_BTGD, v_BTGE))
    scores_BHST = torch.einsum("bshd,bthd->bhst", q_BSHD, k_BTHD) / D**0.5
    visible = torch.ones(T, T, dtype=torch.bool, device=q_BSHD.device).tril().expand(B, 1, T, T)
    if documents_BT is not None:
        visible = visible & (documents_BT[:, None, :, None] == documents_BT[:, None, None, :])
    if window is not None:
        visible = visible & torch.ones_like(visible).triu(1 - window)
    hidden = ~visible[:, :, T - S :]
    weights_BHST = scores_BHST.masked_fill(hidden, float("-inf")).softmax(-1)
    return torch.einsum("bhst,bthe->bshe", weights_BHST, v_BTHE)


def forward(
    weights: dict[str, Tensor],
    input_ids: Tensor,
    config: ReferenceConfig,
    positions: Tensor | None = None,
    documents: Tensor | None = None,
) -> dict[str, Tensor | list[Tensor]]:
    """Run the decoder on token ids (B, S).

    `weights` has the names of Hugging Face's Llama. A layer N that updates the position state also
    has the matrices `model.layers.N.position.token_mixing.weight` A (G, H), `.x_proj.weight` W_x
    (P, C), `.up_proj.weight` W_up (P, G) and `.down_proj.weight` W_down (G, P). A model without
    them in any layer is RoPE. Biases of q, k and v (`self_attn.q_proj.bias`), norms of each head's
    q and k (`self_attn.q_norm.weight`) and a gate of attention's output
    (`self_attn.gate_proj.weight`) are applied if present.

    If the weights contain `model.layers.0.position.increments.weight` w (G, C), or (1, C) for all
    groups, positions are learned and `positions` is ignored. Each token then adds an increment to
    the position: 2 sigmoid(w_g . y), or 1 + w_g . y if they are signed, where y is the first
    layer's normalized input.

    `positions` (S,) or (B, S) default to 0, 1, ...; see `attend` for `documents` (B, S).

    Returns `logits` (B, S, V) and, for each layer, the `hidden_states` (B, S, C) and
    `position_states` (B, S, G, D) that it passes to the next layer.
    """
    B, S = input_ids.shape
    H = config.num_attention_heads
    G = config.num_query_groups
    x = weights["model.embed_tokens.weight"][input_ids]
    D = weights["model.layers.0.self_attn.q_proj.weight"].shape[0] // H
    if positions is None:
        positions = torch.arange(S, device=x.device)
    frequencies = rope_frequencies(config, D)
    factor = attention_factor(config)
    phases = factor * rope_phases(positions, frequencies)
    z = phases.to(x.dtype)[..., None, :].expand(B, S, G, D)
    # Layers with a window may have other frequencies. There, the state is multiplied by the ratio
    # of their phases to those of the other layers.
    window_config = config.with_window_frequencies()
    window_factor = attention_factor(window_config)
    window_phases = window_factor * rope_phases(positions, rope_frequencies(window_config, D))
    window_ratio = rotate(window_phases, conjugate(phases)) / factor**2
    window_ratio = window_ratio.to(x.dtype)[..., None, :].expand(B, S, G, D)
    # In layers without positions, the temperature grows with the position in the document.
    index = torch.arange(S, device=x.device).expand(B, S)
    if documents is not None:
        index = index - torch.searchsorted(documents, documents)
    steps = (index + 1) // config.temperature_floor_scale
    temperature = 1 + config.temperature_scale * torch.log(steps + 1.0)
    hidden_states = []
    position_states = []

    # Layers are numbered from 0; the first number without weights ends the loop.
    layer = 0
    while (prefix := f"model.layers.{layer}.") + "input_layernorm.weight" in weights:
        w = {
            name.removeprefix(prefix): weight
            for name, weight in weights.items()
            if name.startswith(prefix)
        }

        # Attention.
        y = F.rms_norm(
            x,
            x.shape[-1:],
            w["input_layernorm.weight"],
            config.norm_epsilon,
        )
        if "position.increments.weight" in w:
            # Positions are summed in float64, since float32 rounds the fractions of large ones.
            logits_BSG = (y @ w["position.increments.weight"].T).double()
            increments_BSG = 2 * logits_BSG.sigmoid()
            if config.increments == "signed":
                increments_BSG = 1 + logits_BSG
            z = factor * rope_phases(increments_BSG.cumsum(1), frequencies)
            z = z.to(x.dtype).expand(B, S, G, D)
        q, k, v = (
            F.linear(y, w[f"self_attn.{p}_proj.weight"], w.get(f"self_attn.{p}_proj.bias"))
            for p in "qkv"
        )
        q = q.view(B, S, H, D)
        k = k.view(B, S, G, D)
        v = v.view(B, S, G, D)
        if "self_attn.q_norm.weight" in w:
            q = F.rms_norm(q, (D,), w["self_attn.q_norm.weight"], config.norm_epsilon)
            k = F.rms_norm(k, (D,), w["self_attn.k_norm.weight"], config.norm_epsilon)
        # Every n-th layer, counted from 1, attends to all tokens.
        window = config.sliding_window
        if config.full_attention_every and (layer + 1) % config.full_attention_every == 0:
            window = None
        has_own_frequencies = window is not None and window_config != config
        state = z
        if has_own_frequencies:
            state = rotate(z, window_ratio)
        # Every n-th layer, counted from 1, does not rotate.
        every = config.layers_without_positions
        if not every or (layer + 1) % every:
            q = rotate(q, state.repeat_interleave(H // G, dim=2))
            k = rotate(k, state)
        else:
            q = q * temperature[..., None, None].to(q.dtype)
        # The same weights average the values and the position states.
        o, u = attend(
            q,
            k,
            torch.cat([v, state], dim=-1),
            documents,
            window,
        ).split(D, dim=-1)
        if has_own_frequencies:
            # Divide by the ratio.
            squared_modulus = (window_factor / factor) ** 2
            inverse_ratio = conjugate(window_ratio) / squared_modulus
            u = rotate(u, inverse_ratio.repeat_interleave(H // G, dim=2))
        o = o.reshape(B, S, H * D)
        if "self_attn.gate_proj.weight" in w:
            o = o * torch.sigmoid(y @ w["self_attn.gate_proj.weight"].T)
        attention_output = o @ w["self_attn.o_proj.weight"].T
        x = x + attention_output

        # MLP.
        y = F.rms_norm(
            x,
            x.shape[-1:],
            w["post_attention_layernorm.weight"],
            config.norm_epsilon,
        )
        gated = F.silu(y @ w["mlp.gate_proj.weight"].T) * (y @ w["mlp.up_proj.weight"].T)
        m = gated @ w["mlp.down_proj.weight"].T
        x = x + m

        # Update of the position state: token mixing, then position contextualization.
        if "position.token_mixing.weight" in w:
            z = z + torch.einsum("gh,bshd->bsgd", w["position.token_mixing.weight"], u)
            gate_input = m if config.gate_input == "mlp" else attention_output
            gate = F.silu(gate_input @ w["position.x_proj.weight"].T)
            up = torch.einsum("pg,bsgd->bspd", w["position.up_proj.weight"], z)
            z = z + torch.einsum(
                "gp,bspd->bsgd", w["position.down_proj.weight"], gate[..., None] * up
            )
            if config.state_norm == "unit":
                moduli = torch.linalg.vector_norm(z.unflatten(-1, (2, -1)), dim=-2)
                # The same modulus for real and imaginary parts. Short numbers are only scaled.
                z = factor * z / moduli.repeat(1, 1, 1, 2).clamp(min=1e-3)

        hidden_states.append(x)
        position_states.append(z)
        layer += 1

    x = F.rms_norm(
        x,
        x.shape[-1:],
        weights["model.norm.weight"],
        config.norm_epsilon,
    )
    logits = x @ weights.get("lm_head.weight", weights["model.embed_tokens.weight"]).T
    return {"logits": logits, "hidden_states": hidden_states, "position_states": position_states}


# Names of FIRE's parameters in the TAPE authors' released code, and here.
_RELEASED_FIRE = {
    "c": "log_scale",
    "L_multiplier": "threshold_scale",
    "mlp.0.weight": "up_weight",
    "mlp.0.bias": "up_bias",
    "mlp.2.weight": "down_weight",
}


def from_released(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Convert weights of the TAPE authors' released code to the names of `forward`.

    The released code applies `post_attention_linear` W as `einsum('bqnd,qe->bqnd')`. This scales
    each head by the sum of its row of W, exactly as A = diag(W 1) does. Two parameters of FIRE are
    dropped: `init_L`, which is a setting here, and the output bias of its MLP, which has no effect
    after softmax.
    """
    renamed = {}
    for name, value in weights.items():
        if name.endswith(("rotary_emb.inv_freq", "rotary_emb.init_L", "rotary_emb.mlp.2.bias")):
            continue
        if name.endswith("post_attention_linear.weight"):
            name = name.replace("post_attention_linear", "position.token_mixing")
            renamed[name] = value.sum(1).diag()
        elif ".pe." in name:
            renamed[name.replace(".pe.", ".position.")] = value
        elif ".rotary_emb." in name:  # FIRE, whose scalars and vectors have further axes there
            prefix, fire_name = name.split("self_attn.rotary_emb.")
            if fire_name != "mlp.2.weight":
                value = value.reshape(-1)
            renamed[f"{prefix}position.{_RELEASED_FIRE[fire_name]}.weight"] = value
        else:
            renamed[name.replace("self_attn.relative_attention_bias.", "position.table.")] = value
    return renamed
