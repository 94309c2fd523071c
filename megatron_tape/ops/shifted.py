"""Shifted sparse attention, for training: heads attend within segments, half of the heads within
shifted ones.

The shift is half a segment ("LongLoRA: Efficient Fine-tuning of Long-Context Large Language
Models", ICLR 2024). The authors' code rolls the tokens of the shifted heads, so that the first half
segment follows the last one. Except with flash-attn, its causal mask then lets the first tokens
attend to the last ones. Here segments are bounds like those of packed documents: nothing is rolled,
and the half segments at both ends are separate segments. Axes: T tokens, which are both queries and
keys, B batch, H query heads, G key/value groups, D head dimension.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_tape.ops.attention import attend
from megatron_tape.ops.attention_inputs import AttentionInputs
from megatron_tape.ops.packing import Packing

SEGMENTS = 4
"""Segments per sequence."""


@dataclass(frozen=True)
class ShiftedSegments:
    """The segments of a batch, computed once and used by every layer."""

    plain: Packing
    """The segments of the key/value groups that are not shifted."""
    shifted: Packing
    """The segments of the shifted key/value groups."""
    unshifted_groups: int
    """Number of this rank's key/value groups that are not shifted; they come first."""

    @classmethod
    def of(
        cls, tokens_BT: Tensor, packing: Packing | None, unshifted_groups: int
    ) -> "ShiftedSegments":
        """Return the segments of a batch of token ids; segments also end where a document of
        `packing` ends.

        Raises ValueError if the sequences cannot be divided into half segments.
        """
        B, T = tokens_BT.shape
        if T % (2 * SEGMENTS):
            halves = 2 * SEGMENTS
            raise ValueError(
                f"{T} tokens cannot be divided into {halves} half segments; use a multiple of"
                f" {halves}"
            )
        length = T // SEGMENTS
        tokens = torch.arange(T, device=tokens_BT.device)
        starts, ends = (0, T) if packing is None else packing.bounds_2BT

        def cut(shift: int) -> Packing:
            first = (tokens + shift) // length * length - shift
            bounds = first.clamp(min=starts), (first + length).clamp(max=ends)
            return Packing(torch.stack([x.expand(B, T) for x in bounds]).int())

        return cls(cut(0), cut(length // 2), unshifted_groups)


def unshifted_groups(query_groups: int, own_groups: list[int] | None = None) -> int:
    """Return the number of a rank's key/value groups that are not shifted.

    Among all `query_groups`, the first half (rounded down) is not shifted. `own_groups` are the
    indices of the rank's groups; None means all of them. Query heads that share keys are shifted
    together.
    """
    return sum(
        group < query_groups // 2
        for group in (range(query_groups) if own_groups is None else own_groups)
    )


def attend_in_segments(
    x: AttentionInputs, segments: ShiftedSegments, backend: str = "torch"
) -> tuple[Tensor, Tensor | None]:
    """Return o and u of `ops.attention.attend`, with each head restricted to its segments. Requires
    S = T.

    Raises ValueError as `attend` does, and if `x.rescore` is set, which computes the scores of all
    heads together.
    """
    if x.rescore is not None:
        raise ValueError(
            "shifted segments cannot be combined with scores computed from whole rows; set"
            " rescore=None"
        )
    G = x.k_TBGD.shape[2]
    count = segments.unshifted_groups
    per_group = x.q_SBHD.shape[2] // G
    outputs = []
    for packing, groups in ((segments.plain, slice(0, count)), (segments.shifted, slice(count, G))):
        if groups.start == groups.stop:
            continue
        heads = slice(groups.start * per_group, groups.stop * per_group)
        inputs = replace(
            x,
            q_SBHD=x.q_SBHD[:, :, heads],
            k_TBGD=x.k_TBGD[:, :, groups],
            v_TBGD=x.v_TBGD[:, :, groups],
            z_TBGD=(
                x.z_TBGD if x.z_TBGD is None or x.z_TBGD.shape[2] == 1 else x.z_TBGD[:, :, groups]
            ),
            packing=packing,
            bias=None if x.bias is None else x.bias.of_heads(heads),
            log_gate_TBH=None if x.log_gate_TBH is None else x.log_gate_TBH[:, :, heads],
        )
        outputs.append(attend(inputs, backend))
    o, u = (None if parts[0] is None else torch.cat(parts, dim=2) for parts in zip(*outputs))
    return o, u
