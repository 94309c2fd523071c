"""Look at the position state inside a TAPE model of transformers, and put it back to RoPE's, by hooks on its layers.

A layer l, counted from 0, reads the state z_l (B, S, G, D), D/2 complex numbers per head group stored as [real |
imaginary], and passes z_(l+1) on. z_0 are RoPE's phases. The model itself stays as it is: hooks see what its layers get
and return. Axes: L layers, N tokens, G head groups, H query heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

LOSS_ROWS = 512
"""Tokens whose logits are held at once."""


def layers_of(model: Any) -> nn.ModuleList:
    """Return the decoder layers of a `TapeForCausalLM`."""
    return model.model.layers


def state_norms(state: Tensor) -> Tensor:
    """Return the norms (N, G) of states (N, G, D)."""
    return state.float().norm(dim=-1)


def moved(state: Tensor, phases: Tensor) -> np.ndarray:
    """Return |z - z_0| / |z_0| (N, G), float32, of states and RoPE's phases (N, G, D)."""
    distance = state_norms(state.float() - phases.float()) / state_norms(phases)
    return distance.cpu().numpy()


def similarity(state: Tensor, distances: Collection[int]) -> list[float]:
    """Return, for every distance d >= 1, the mean over s and groups of |<z_s, z_(s+d)>| / (|z_s| |z_(s+d)|).

    <,> is the complex inner product over the frequencies of a group, so that a shift of all positions changes nothing.
    """
    real, imaginary = (state.float() / state_norms(state).unsqueeze(-1)).chunk(2, dim=-1)
    z = torch.complex(real.contiguous(), imaginary.contiguous())
    means = []
    for distance in distances:
        inner = (z[:-distance].conj() * z[distance:]).sum(-1)
        means.append(inner.abs().mean().item())
    return means


@torch.no_grad()
def losses(model: Any, tokens: Tensor) -> np.ndarray:
    """Return the loss in nats (N - 1,), float64, of every token (1, N) but the first."""
    hidden_states = model.model(input_ids=tokens, use_cache=False).last_hidden_state[0, :-1]
    labels = tokens[0, 1:]
    parts = [
        F.cross_entropy(model.lm_head(rows).float(), wanted, reduction="none").double().cpu()
        for rows, wanted in zip(hidden_states.split(LOSS_ROWS), labels.split(LOSS_ROWS))
    ]
    return torch.cat(parts).numpy()


@contextmanager
def watching(model: Any, see: Callable[[int, Tensor, Tensor], None]) -> Iterator[None]:
    """Call see(l, z_l, z_0) with states (N, G, D) of the first sequence whenever a layer l reads its state."""
    phases = None

    def hook(index: int, _: nn.Module, arguments: tuple) -> None:
        nonlocal phases
        state = arguments[1][0]
        phases = state if index == 0 else phases
        see(index, state, phases)

    with ExitStack() as stack:
        for index, layer in enumerate(layers_of(model)):
            stack.enter_context(layer.register_forward_pre_hook(partial(hook, index)))
        yield


@contextmanager
def with_phases(
    model: Any, chosen: Collection[int], see: Callable[[int, Tensor | None, Tensor | None], None] | None = None
) -> Iterator[None]:
    """Let the layers `chosen` read RoPE's phases in place of their state.

    Their hidden states are those that follow from the phases; the state that they pass on is the one they make of the
    real state, so that no other layer is touched directly. With `see`, hidden states stay as they are, too, and
    see(l, map, map_with_phases) gets the attention maps (B, H, N, N) of both, or None where the attention
    implementation has none.
    """
    layers, phases = layers_of(model), None

    def keep(_: nn.Module, arguments: tuple) -> None:
        nonlocal phases
        phases = arguments[1]

    def hook(index: int, layer: nn.Module, arguments: tuple, keywords: dict, output: tuple) -> tuple | None:
        hidden_states, _, weights = layer.forward(arguments[0], phases, *arguments[2:], **keywords)
        if see is not None:
            see(index, output[2], weights)
            return None
        return (hidden_states, *output[1:])

    with ExitStack() as stack:
        stack.enter_context(layers[0].register_forward_pre_hook(keep))
        for index in chosen:
            stack.enter_context(layers[index].register_forward_hook(partial(hook, index), with_kwargs=True))
        yield


def attention_maps(model: Any, tokens: Tensor, see: Callable[[int, Tensor, Tensor], None]) -> None:
    """Call see(l, map, map_with_phases) for every layer l with its attention maps (H, N, N) of tokens (1, N), float32.

    Both are made of the same queries and keys: the hidden states are those of the model as it is.
    """
    implementation = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        with with_phases(
            model, range(len(layers_of(model))), lambda index, *maps: see(index, *(map[0].float() for map in maps))
        ):
            with torch.no_grad():
                model.model(input_ids=tokens, use_cache=False)
    finally:
        model.set_attn_implementation(implementation)
