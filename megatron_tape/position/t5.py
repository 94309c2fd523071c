"""T5's relative bias (Raffel et al., 2020), with a separate table in each layer, as in the TAPE
authors' training.
"""

import math
from dataclasses import dataclass
from typing import Annotated

from megatron_tape.errors import ConfigError
from megatron_tape.ops.backends import POINTWISE
from megatron_tape.position.encoding import (
    Bounds,
    Costs,
    EncodingSettings,
    Parameter,
    PositionEncoding,
    PositionInputs,
)


@dataclass(frozen=True, kw_only=True)
class T5Settings(EncodingSettings):
    """The buckets of distances between query and key."""

    t5_num_buckets: Annotated[int, Bounds(ge=2)] = 32
    """t5: number of distance buckets, each with a learned bias per head. Half of them hold one
    distance each.
    """
    t5_max_distance: int = 128
    """t5: distances of at least this many tokens share the last bucket."""


class T5Position(PositionEncoding):
    """Adds a learned bias to each score, depending on the head and the bucket of the distance:
    `table` (buckets, H).
    """

    name = "t5"
    Settings = T5Settings
    needs = frozenset({POINTWISE})

    def check(self):
        """Raise ConfigError if no distances are left for the logarithmic buckets."""
        buckets = self.settings.t5_num_buckets
        distance = self.settings.t5_max_distance
        if distance <= buckets // 2:
            raise ConfigError(
                ("model.position.t5_max_distance", "model.position.t5_num_buckets"),
                f"{distance} must exceed half of model.position.t5_num_buckets {buckets}, because"
                " half of the buckets hold one distance each",
                "raise model.position.t5_max_distance",
            )

    def parameters(self, layer):
        """Return the table, sharded by heads under tensor parallelism."""
        shape = (self.settings.t5_num_buckets, self.model.num_attention_heads)
        return {"table": Parameter(shape, std=self.model.init_std, partition_dim=1)}

    def costs(self, layer, batch):
        """Return the costs: one addition per head and key that a query attends to."""
        heads = self.model.num_attention_heads
        return Costs(multiply_adds=int(heads * self.model.keys_per_query(layer)))

    def position_inputs(self, layer, parameters, state, hidden_states_sBC, cache):
        """Return the bias. It depends only on distances, so packed documents need no special
        handling.
        """
        import torch

        from megatron_tape.ops.bias import Bias

        def tile(rows, columns, table):
            """Return the bias of a tile, (1, h, rows, columns)."""
            # A tile has few distinct distances: look up each once, from the largest to the
            # smallest, then unfold. Keys after a query have negative distances; they are masked,
            # and only need some bucket.
            nearest = rows.start - columns.stop + 1
            farthest = rows.stop - 1 - columns.start
            distances = torch.arange(farthest, nearest - 1, -1, device=table.device).clamp(min=0)
            by_distance = table[self.buckets(distances)].T.contiguous()
            # A window is a query's row of keys; the first window is that of the last query.
            return by_distance.unfold(1, columns.stop - columns.start, 1).flip(1)[None]

        def score(batch, head, query, key, table):
            """Return the bias of one pair of query and key."""
            return table[self.buckets((query - key).clamp(min=0)), head]

        return PositionInputs(bias=Bias(tile, (parameters["table"],), score))

    def buckets(self, distances):
        """Return the bucket of each distance >= 0: the distance itself in the lower half,
        logarithmic in the upper.
        """
        import torch

        buckets = self.settings.t5_num_buckets
        # Distances below `exact` have a bucket each.
        exact = buckets // 2
        # Computed in T5's order of operations: at the boundary of two buckets, rounding decides
        # which of them a distance belongs to.
        logarithms = torch.log(distances.clamp(min=1).float() / exact)
        scaled = logarithms / math.log(self.settings.t5_max_distance / exact)
        logarithmic = exact + (scaled * (buckets - exact)).long()
        return torch.where(distances < exact, distances, logarithmic.clamp(max=buckets - 1))
