"""TAPE as plain torch modules, for notebooks and your own models; `docs/python.md` has examples.

The modules need neither Megatron nor DeepSpeed nor a process group. They compute the same as
`model.reference.forward` and use the fast kernels of `megatron_tape.ops` on GPUs. Their parameters
have the same names as in exported models.

Axes: B batch, S tokens, C hidden size, H query heads, G key/value groups, D head dimension, P inner
width of the position MLP, V vocabulary. For each token and group, a position state (B, S, G, D)
stores D/2 complex numbers, first all real parts, then all imaginary parts. Attention is causal, so
padding after a sequence needs no mask.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_tape.model.reference import rope_phases
from megatron_tape.ops.attention import attention
from megatron_tape.ops.backends import AVERAGE, ROTATION
from megatron_tape.ops.backends.choice import choose_backend, unsupported
from megatron_tape.ops.position_update import compact_update, fits_fused, fused_update

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def _check_shape(name: str, x: Tensor, *expected: int | str, broadcasts: bool = False) -> None:
    """Raise ValueError unless `x` has the expected sizes; letters match any, and `broadcasts`
    allows a batch of 1.
    """
    if broadcasts and x.shape[:1] == (1,):
        expected = (1, *expected[1:])
    matches = (isinstance(size, str) or size == given for size, given in zip(expected, x.shape))
    if x.dim() != len(expected) or not all(matches):
        raise ValueError(
            f"{name} has the shape {tuple(x.shape)}; expected ({', '.join(map(str, expected))})"
        )


def initial_position_state(
    positions: Tensor, num_query_groups: int, head_dim: int, rope_theta: float = 1e4
) -> Tensor:
    """Return the first layer's position state: RoPE's phases exp(i p theta_f) of positions p (B, S)
    or (S,).

    The result is float32 (B or 1, S, G, D), the same for all groups. Adding a number to all
    positions does not change the output of a model, since only their differences matter.
    """
    frequencies = rope_theta ** (
        -torch.arange(0, head_dim, 2, device=positions.device).float() / head_dim
    )
    phases = rope_phases(positions.view(-1, positions.shape[-1]), frequencies)
    return phases.unsqueeze(2).expand(-1, -1, num_query_groups, -1)


class TapeAttention(nn.Module):
    """Causal attention that rotates queries and keys by the position state, and also averages the
    state like values.

    `backend` is one of `megatron_tape.ops.backends.BACKENDS`, or "auto" for the fastest that runs
    on the inputs' device. Raises ValueError if the head dimension is not a whole even number, or
    the groups do not divide the heads.
    """

    def __init__(
        self,
        hidden_size: int,
        num_attention_heads: int,
        num_query_groups: int | None = None,
        backend: str = "auto",
    ):
        super().__init__()
        if num_query_groups is None:
            groups = num_attention_heads
        else:
            groups = num_query_groups
        if hidden_size % (2 * num_attention_heads) or num_attention_heads % groups:
            sizes = (
                f"hidden_size {hidden_size}, num_attention_heads {num_attention_heads},"
                f" num_query_groups {groups}"
            )
            raise ValueError(
                f"{sizes}: hidden_size must be a multiple of 2 * num_attention_heads, and"
                " num_attention_heads a multiple of num_query_groups"
            )
        self.num_query_groups = groups
        self.head_dim = hidden_size // num_attention_heads
        self.backend = backend
        self.q_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        self.k_proj = nn.Linear(hidden_size, groups * self.head_dim, bias=False)
        self.v_proj = nn.Linear(hidden_size, groups * self.head_dim, bias=False)
        self.o_proj = nn.Linear(hidden_size, hidden_size, bias=False)

    def forward(self, hidden_states: Tensor, position_state: Tensor) -> tuple[Tensor, Tensor]:
        """Return the attention output (B, S, C) and the position states (B, S, H, D) averaged with
        attention's weights.

        `hidden_states` (B, S, C) must be normalized; `position_state` is (B or 1, S, G, D).
        """
        _check_shape("hidden_states", hidden_states, "B", "S", self.q_proj.in_features)
        expected = *hidden_states.shape[:2], self.num_query_groups, self.head_dim
        _check_shape("position_state", position_state, *expected, broadcasts=True)
        # In `ops`, the sequence axis comes first.
        q, k, v = (
            project(hidden_states).unflatten(-1, (-1, self.head_dim)).transpose(0, 1)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        z = position_state.to(v.dtype).transpose(0, 1)
        grouped = k.shape[2] < q.shape[2]
        choice = choose_backend(
            self.backend, q.device, q.dtype, self.head_dim, {ROTATION, AVERAGE}, grouped=grouped
        )
        with torch.autocast(q.device.type, enabled=False):
            output, averaged = attention(q, k, v, z, average_state=True, backend=choice.backend)
        return self.o_proj(output.transpose(0, 1).flatten(2)), averaged.transpose(0, 1)


class PositionUpdate(nn.Module):
    """The update z' = z + A u, z'' = z' + W_down diag(silu(W_x m)) W_up z' of the position state z
    (docs/tape.md).

    u is the averaged state and m the gate input. A (`token_mixing`) and W_down (`down_proj`) start
    at zero, so an untrained model is RoPE. `position_mlp_size` (P) defaults to 4 H.
    """

    def __init__(
        self,
        hidden_size: int,
        num_attention_heads: int,
        num_query_groups: int | None = None,
        position_mlp_size: int | None = None,
    ):
        super().__init__()
        if num_query_groups is None:
            groups = num_attention_heads
        else:
            groups = num_query_groups
        if position_mlp_size is None:
            inner = 4 * num_attention_heads
        else:
            inner = position_mlp_size
        self.token_mixing = nn.Linear(num_attention_heads, groups, bias=False)
        self.x_proj = nn.Linear(hidden_size, inner, bias=False)
        self.up_proj = nn.Linear(groups, inner, bias=False)
        self.down_proj = nn.Linear(inner, groups, bias=False)
        nn.init.zeros_(self.token_mixing.weight)
        nn.init.normal_(self.x_proj.weight, std=0.02)
        nn.init.normal_(self.up_proj.weight, std=groups**-0.5)
        nn.init.zeros_(self.down_proj.weight)

    def forward(self, position_state: Tensor, averaged: Tensor, gate_input: Tensor) -> Tensor:
        """Return the next position state (B, S, G, D), in the dtype of `position_state` (best
        float32).

        `position_state` (B or 1, S, G, D) is the state that attention used, and `averaged` (B, S,
        H, D) its average from `TapeAttention`. `gate_input` (B, S, C) is the output of the layer's
        MLP or attention, without the residual stream.
        """
        _check_shape("averaged", averaged, "B", "S", self.token_mixing.in_features, "D")
        B, S, _, D = averaged.shape
        _check_shape(
            "position_state",
            position_state,
            B,
            S,
            self.token_mixing.out_features,
            D,
            broadcasts=True,
        )
        _check_shape("gate_input", gate_input, B, S, self.x_proj.in_features)
        gate = self.x_proj(gate_input).flatten(0, 1)
        position_state = position_state.expand(len(averaged), -1, -1, -1)
        z = position_state.flatten(0, 1)
        u = averaged.flatten(0, 1).to(gate.dtype)
        matrices = [
            linear.weight.to(gate.dtype)
            for linear in (self.token_mixing, self.up_proj, self.down_proj)
        ]
        fused = (
            z.is_cuda
            and fits_fused(z.shape[1], u.shape[1])
            and not unsupported("triton", z.device, u.dtype, D)
        )
        update = fused_update if fused else compact_update
        with torch.autocast(z.device.type, enabled=False):
            return update(z, u, gate, *matrices).view_as(position_state)


class SwiGLU(nn.Module):
    """Llama's gated MLP, down(silu(gate(x)) * up(x)), from (..., C) to (..., C)."""

    def __init__(self, hidden_size: int, ffn_hidden_size: int):
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, ffn_hidden_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, ffn_hidden_size, bias=False)
        self.down_proj = nn.Linear(ffn_hidden_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class TapeLayer(nn.Module):
    """A Llama layer with TAPE: attention rotated by the position state, the MLP, and the update of
    the state.

    `gate_input` selects the gate input m of `PositionUpdate`: the MLP's output, or attention's
    output as in the paper. With `updates_positions=False`, as in a model's last layer, the layer
    returns the position state unchanged.
    """

    def __init__(
        self,
        hidden_size: int,
        num_attention_heads: int,
        num_query_groups: int | None = None,
        ffn_hidden_size: int | None = None,
        position_mlp_size: int | None = None,
        gate_input: Literal["mlp", "attention"] = "mlp",
        norm_epsilon: float = 1e-5,
        backend: str = "auto",
        updates_positions: bool = True,
    ):
        super().__init__()
        if gate_input not in ("mlp", "attention"):
            raise ValueError(f"gate_input is {gate_input!r}; choose 'mlp' or 'attention'")
        self.gate_input = gate_input
        self.input_layernorm = nn.RMSNorm(hidden_size, eps=norm_epsilon)
        self.self_attn = TapeAttention(hidden_size, num_attention_heads, num_query_groups, backend)
        self.post_attention_layernorm = nn.RMSNorm(hidden_size, eps=norm_epsilon)
        self.mlp = SwiGLU(
            hidden_size, 4 * hidden_size if ffn_hidden_size is None else ffn_hidden_size
        )
        sizes = hidden_size, num_attention_heads, num_query_groups, position_mlp_size
        self.position = PositionUpdate(*sizes) if updates_positions else None

    def forward(self, hidden_states: Tensor, position_state: Tensor) -> tuple[Tensor, Tensor]:
        """Return the next hidden states (B, S, C) and the next position state (B, S, G, D)."""
        attention_output, averaged = self.self_attn(
            self.input_layernorm(hidden_states), position_state
        )
        hidden_states = hidden_states + attention_output
        mlp_output = self.mlp(self.post_attention_layernorm(hidden_states))
        if self.position is not None:
            if self.gate_input == "mlp":
                gate_input = mlp_output
            else:
                gate_input = attention_output
            position_state = self.position(position_state, averaged, gate_input)
        return hidden_states + mlp_output, position_state


class TapeOutput(NamedTuple):
    """The outputs of `TapeModel`."""

    logits: Tensor
    """(B, S, V)."""
    hidden_states: tuple[Tensor, ...]
    """The token embeddings, then the hidden states after each layer, (B, S, C)."""
    position_states: tuple[Tensor, ...]
    """The position state that each layer uses, (B, S, G, D). The first layer uses RoPE's phases."""


class TapeModel(nn.Module):
    """A Llama-like language model with TAPE. `layer_options` are further arguments of `TapeLayer`.

    The last layer does not update the position state, since no layer follows it.
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        num_layers: int,
        num_attention_heads: int,
        num_query_groups: int | None = None,
        *,
        rope_theta: float = 1e4,
        norm_epsilon: float = 1e-5,
        **layer_options,
    ):
        super().__init__()
        self.rope_theta = rope_theta
        sizes = hidden_size, num_attention_heads, num_query_groups
        layers = (
            TapeLayer(
                *sizes,
                norm_epsilon=norm_epsilon,
                updates_positions=index < num_layers - 1,
                **layer_options,
            )
            for index in range(num_layers)
        )
        self.model = nn.ModuleDict({"embed_tokens": nn.Embedding(vocab_size, hidden_size)})
        self.model["layers"] = nn.ModuleList(layers)
        self.model["norm"] = nn.RMSNorm(hidden_size, eps=norm_epsilon)
        self.lm_head = nn.Linear(hidden_size, vocab_size, bias=False)
        for name, weight in self.named_parameters():
            if weight.dim() == 2 and ".position." not in name:
                nn.init.normal_(weight, std=0.02)

    def forward(self, input_ids: Tensor, positions: Tensor | None = None) -> TapeOutput:
        """Run the model on token ids (B, S). `positions` (B, S) or (S,) default to 0, 1, ..."""
        _check_shape("input_ids", input_ids, "B", "S")
        B, S = input_ids.shape
        if input_ids.dtype not in (torch.int64, torch.int32):
            raise ValueError(
                f"input_ids has the dtype {input_ids.dtype}; expected torch.int64 or torch.int32"
            )
        if positions is None:
            positions = torch.arange(S, device=input_ids.device)
        _check_shape(
            "positions",
            positions,
            *([S] if positions.dim() == 1 else [B, S]),
            broadcasts=positions.dim() > 1,
        )
        try:
            hidden_states = [self.model["embed_tokens"](input_ids)]
        except IndexError:  # only on CPUs
            expected = (
                f"expected ids of at least 0 and below vocab_size {self.lm_head.out_features}"
            )
            raise ValueError(
                f"input_ids are from {input_ids.min()} to {input_ids.max()}; {expected}"
            ) from None
        attention = self.model["layers"][0].self_attn
        z = initial_position_state(
            positions, attention.num_query_groups, attention.head_dim, self.rope_theta
        )
        position_states = [z.expand(len(input_ids), -1, -1, -1)]
        for layer in self.model["layers"]:
            x, z = layer(hidden_states[-1], position_states[-1])
            hidden_states.append(x)
            position_states.append(z)
        logits = self.lm_head(self.model["norm"](hidden_states[-1]))
        return TapeOutput(logits, tuple(hidden_states), tuple(position_states[:-1]))


def plot_position_states(
    position_states: Sequence[Tensor], tokens: Sequence[str] | None = None
) -> "Figure":
    """Draw how far each layer's position state z is from RoPE's z_0, |z - z_0| / |z_0|, as a heat
    map.

    `position_states` (B, S, G, D) are those of `TapeOutput`, z_0 first; only the first sequence is
    drawn. The heat map has a row for each layer after the first, and a column for each token,
    labelled by `tokens`. Raises ValueError if there is only one state, as in a model with one
    layer.
    """
    if len(position_states) < 2:
        raise ValueError(
            f"position_states must contain at least two states, not {len(position_states)}; use a"
            " model with at least two layers"
        )
    import matplotlib.pyplot as plt

    first, *later = (state[0].detach().float().flatten(1) for state in position_states)
    distances = (
        torch.stack([(state - first).norm(dim=1) / first.norm(dim=1) for state in later])
        .cpu()
        .numpy()
    )
    rows, columns = distances.shape
    figure, axes = plt.subplots(
        figsize=(min(12.0, 3 + 0.2 * columns), 1.6 + 0.25 * rows), layout="constrained"
    )
    image = axes.imshow(distances, aspect="auto", vmin=0, interpolation="none")
    axes.set_xlabel("token")
    axes.set_ylabel("layer")
    axes.set_yticks(range(rows), range(1, rows + 1))
    if tokens is not None:
        axes.set_xticks(range(columns), tokens, rotation=0 if max(map(len, tokens)) == 1 else 90)
    figure.colorbar(image, ax=axes, label="distance from RoPE")
    return figure
