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
from typing import Any

import torch
from torch import Tensor

from megatron_tape.ops.attention import attend
from megatron_tape.ops.attention_inputs import AttentionInputs
from megatron_tape.ops.visibility import Visibility

SEGMENTS = 4
"""Segments per sequence."""


@dataclass(frozen=True)
class ShiftedSegments:
    """The segments of a batch, computed once and used by every layer."""

    plain: Visibility
    """The segments of the key/value groups that are not shifted."""
    shifted: Visibility
    """The segments of the shifted key/value groups."""
    unshifted_groups: int
    """Number of this rank's key/value groups that are not shifted; they come first."""

    @classmethod
    def of(
        cls,
        tokens_BT: Tensor,
        documents: Visibility | None,
        unshifted_groups: int,
    ) -> "ShiftedSegments":
        """Return the segments of a batch of token ids (B, T). They also end where one of the
        `documents` ends.

        Raises ValueError if the sequences cannot be divided into half segments.
        """
        B, T = tokens_BT.shape
        if T % (2 * SEGMENTS):
            raise ValueError(
                f"{T} tokens cannot be divided into {2 * SEGMENTS} half segments; use a multiple"
            )
        length = T // SEGMENTS
        tokens = torch.arange(T, device=tokens_BT.device)
        # The bounds of each token's document. They are tensors (B, T) if there are documents;
        # otherwise each sequence is one document.
        document_starts, document_ends = 0, T
        if documents is not None:
            document_starts, document_ends = documents.documents_2BT

        def shifted_by(shift: int) -> Visibility:
            """Return the segments whose bounds are `shift` tokens before multiples of `length`."""
            starts = (tokens + shift) // length * length - shift
            ends = starts + length
            bounds = starts.clamp(min=document_starts), ends.clamp(max=document_ends)
            return Visibility.within(torch.stack([x.expand(B, T) for x in bounds]).int())

        return cls(
            plain=shifted_by(0),
            shifted=shifted_by(length // 2),
            unshifted_groups=unshifted_groups,
        )

    def with_window(self, window: int) -> "ShiftedSegments":
        """Return the same segments, in which tokens attend only to the last `window` tokens."""
        return replace(
            self,
            plain=self.plain.with_window(window),
            shifted=self.shifted.with_window(window),
        )


def unshifted_groups(query_groups: int, own_groups: list[int] | None = None) -> int:
    """Return the number of a rank's key/value groups that are not shifted.

    Among all `query_groups`, the first half (rounded down) is not shifted. `own_groups` are the
    indices of the rank's groups; None means all of them. Query heads that share keys are shifted
    together.
    """
    if own_groups is None:
        return query_groups // 2
    return sum(group < query_groups // 2 for group in own_groups)


def attend_in_segments(
    x: AttentionInputs,
    segments: ShiftedSegments,
    backend: str,
) -> tuple[Tensor, Tensor | None]:
    """Return the averages o of the values and u of the position state, (S, B, H, D) each, where
    each head attends only within its segments.

    u is None unless `x.average_state`. Requires S = T. Raises ValueError for inputs that
    `ops.attention.attend` refuses, and if `x.rescore` is set, which computes the scores of all
    heads together.
    """
    if x.rescore is not None:
        raise ValueError(
            "shifted segments cannot be combined with scores of whole rows; set rescore=None"
        )
    unshifted = segments.unshifted_groups
    G = x.k_TBGD.shape[2]
    # Under tensor parallelism, all groups of a rank may be shifted, or none of them.
    if unshifted == 0:
        return attend(replace(x, visibility=segments.shifted), backend)
    if unshifted == G:
        return attend(replace(x, visibility=segments.plain), backend)

    plain = replace(_of_groups(x, slice(0, unshifted)), visibility=segments.plain)
    shifted = replace(_of_groups(x, slice(unshifted, G)), visibility=segments.shifted)
    plain_o, plain_u = attend(plain, backend)
    shifted_o, shifted_u = attend(shifted, backend)
    o = torch.cat([plain_o, shifted_o], dim=2)
    if plain_u is None:
        return o, None
    return o, torch.cat([plain_u, shifted_u], dim=2)


def _of_groups(x: AttentionInputs, groups: slice) -> AttentionInputs:
    """Return the inputs of the key/value groups in a slice, and of their query heads."""
    per_group = x.q_SBHD.shape[2] // x.k_TBGD.shape[2]
    heads = slice(groups.start * per_group, groups.stop * per_group)
    fields: dict[str, Any] = {
        "q_SBHD": x.q_SBHD[:, :, heads],
        "k_TBGD": x.k_TBGD[:, :, groups],
        "v_TBGD": x.v_TBGD[:, :, groups],
        # This memory is for the values of all groups, so attention cannot use it here.
        "joined_TBGE": None,
    }
    # A state of one group is broadcast to all groups.
    if x.z_TBGD is not None and x.z_TBGD.shape[2] > 1:
        fields["z_TBGD"] = x.z_TBGD[:, :, groups]
    if x.bias is not None:
        fields["bias"] = x.bias.of_heads(heads)
    if x.log_gate_TBH is not None:
        fields["log_gate_TBH"] = x.log_gate_TBH[:, :, heads]
    return replace(x, **fields)
