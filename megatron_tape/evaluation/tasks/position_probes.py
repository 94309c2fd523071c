"""Read the position states of a TAPE model of transformers, or replace them by RoPE's phases, with
hooks on its layers.

Layer l, counted from 0, reads the state z_l and returns z_(l+1); z_0 are RoPE's phases. A state (B,
S, G, D) has D/2 complex numbers per head group, stored as [real | imaginary]. The hooks do not
change the model permanently.

Axes: B batch, S or N tokens, G head groups, H query heads, D head dimension.
"""

from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

LOSS_ROWS = 512
"""Maximum number of tokens whose logits are in memory at once."""


def layers_of(model: Any) -> nn.ModuleList:
    """Return the decoder layers of a `TapeForCausalLM`."""
    return model.model.layers


def state_norms(state: Tensor) -> Tensor:
    """Return the norms (N, G) of states (N, G, D)."""
    return state.float().norm(dim=-1)


def relative_distance(state: Tensor, phases: Tensor) -> np.ndarray:
    """Return |z - z_0| / |z_0| (N, G), float32, for states z and RoPE's phases z_0, both (N, G,
    D).
    """
    distance = state_norms(state.float() - phases.float()) / state_norms(phases)
    return distance.cpu().numpy()


def similarity(state: Tensor, distances: Collection[int]) -> list[float]:
    """Return for each distance d >= 1 the mean similarity of states (N, G, D) of tokens that are d
    positions apart.

    The similarity of tokens s and t is |<z_s, z_t>| / (|z_s| |z_t|), where <,> is the complex inner
    product over the D/2 frequencies of a group. The mean is over all pairs of tokens and all
    groups. Shifting all positions does not change the result.
    """
    normalized = state.float() / state_norms(state).unsqueeze(-1)
    # The halves of the head dimension.
    real, imaginary = normalized.chunk(2, dim=-1)
    z = torch.complex(real, imaginary)
    means = []
    for distance in distances:
        # (N - distance, G): the inner products of all pairs.
        products = (z[:-distance].conj() * z[distance:]).sum(-1)
        means.append(products.abs().mean().item())
    return means


@torch.no_grad()
def losses(model: Any, tokens: Tensor) -> np.ndarray:
    """Return the losses (N - 1,), float64, in nats of all `tokens` (1, N) but the first."""
    hidden_states = model.model(input_ids=tokens, use_cache=False).last_hidden_state[0, :-1]
    labels = tokens[0, 1:]
    # Logits of a whole text would take too much memory.
    parts = []
    for states, targets in zip(hidden_states.split(LOSS_ROWS), labels.split(LOSS_ROWS)):
        logits = model.lm_head(states).float()
        parts.append(F.cross_entropy(logits, targets, reduction="none"))
    return torch.cat(parts).double().cpu().numpy()


@contextmanager
def watching(model: Any, on_state: Callable[[int, Tensor, Tensor], None]) -> Iterator[None]:
    """Within the context, call on_state(l, z_l, z_0) when layer l runs, with states (N, G, D) of
    the first sequence.
    """
    phases = None  # RoPE's phases, which layer 0 reads

    def hook(index: int, _: nn.Module, arguments: tuple) -> None:
        """Read the arguments of a layer: hidden states, position state, and others."""
        nonlocal phases
        state = arguments[1][0]  # the position state of the first sequence
        if index == 0:
            phases = state
        on_state(index, state, phases)

    with ExitStack() as stack:
        for index, layer in enumerate(layers_of(model)):
            stack.enter_context(layer.register_forward_pre_hook(partial(hook, index)))
        yield


@contextmanager
def with_phases(
    model: Any,
    layer_indices: Collection[int],
    on_maps: Callable[[int, Tensor | None, Tensor | None], None] | None = None,
) -> Iterator[None]:
    """Within the context, make some layers read RoPE's phases instead of their position states.

    These layers compute hidden states with the phases. They still compute their output position
    state from the real one, so that later layers are not affected directly. With `on_maps`, outputs
    do not change: the function on_maps(l, map, map_with_phases) only receives the attention maps
    (B, H, N, N) with the real state and with the phases. Both are None if the attention
    implementation returns no maps.
    """
    layers = layers_of(model)
    phases = None  # RoPE's phases (B, S, G, D), set by `keep_phases`

    def keep_phases(_: nn.Module, arguments: tuple) -> None:
        """Remember the state that enters layer 0."""
        nonlocal phases
        phases = arguments[1]

    def hook(
        index: int,
        layer: nn.Module,
        arguments: tuple,
        keywords: dict,
        output: tuple,
    ) -> tuple | None:
        """Replace the output of a layer (hidden states, position state, attention map), unless
        `on_maps` only receives the maps.
        """
        # The layer runs again, with the phases as its position state. `forward`, unlike a call of
        # the layer, does not run this hook again.
        hidden_states, _, weights = layer.forward(arguments[0], phases, *arguments[2:], **keywords)
        if on_maps is not None:
            on_maps(index, output[2], weights)
            return None
        return (hidden_states, *output[1:])

    with ExitStack() as stack:
        stack.enter_context(layers[0].register_forward_pre_hook(keep_phases))
        for index in layer_indices:
            stack.enter_context(
                layers[index].register_forward_hook(partial(hook, index), with_kwargs=True)
            )
        yield


def attention_changes(model: Any, tokens: Tensor) -> list[list[float]]:
    """Return for each layer and head the fraction of attention that moves to other keys if RoPE's
    phases replace the position state, for tokens (1, N).

    The hidden states of a layer are the same in both cases.
    """
    changes = []

    def on_maps(_: int, state_map: Tensor, phases_map: Tensor) -> None:
        """Compare the attention maps (B, H, N, N) of a layer."""
        difference = (state_map[0].float() - phases_map[0].float()).abs()
        # Half of the sum of differences is the fraction that moves (the total variation distance).
        # It is averaged over queries.
        changes.append((difference.sum(-1).mean(-1) / 2).tolist())

    implementation = model.config._attn_implementation
    # Other implementations return no attention maps.
    model.set_attn_implementation("eager")
    try:
        with with_phases(model, range(len(layers_of(model))), on_maps), torch.no_grad():
            model.model(input_ids=tokens, use_cache=False)
    finally:
        model.set_attn_implementation(implementation)
    return changes
