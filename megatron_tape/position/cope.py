"""CoPE: contextual position encoding (Golovneva et al., 2024)."""

from dataclasses import dataclass

from megatron_tape.ops.backends import SCORES
from megatron_tape.position.encoding import (
    Costs,
    Count,
    EncodingSettings,
    Parameter,
    PositionEncoding,
    PositionInputs,
)


@dataclass(frozen=True, kw_only=True)
class CopeSettings(EncodingSettings):
    """The number of CoPE's position embeddings."""

    cope_max_position: Count = 64
    """cope: largest position (p_max in the paper). Larger positions are clipped to this value. Each
    integer position from 0 to this value has an embedding."""


class CopePosition(PositionEncoding):
    """Adds q_s . e[p] to the score of query s and key t, where p is the sum of the gates of keys t
    to s.

    The gate of key k is sigmoid(q_s . k / sqrt(D)). Positions p are fractional, so q_s . e is
    interpolated between the two nearest integers. `table` (cope_max_position + 1, D) holds the
    embeddings e, which all heads of a layer share. It starts at zero. As in the paper's code, q_s
    in q_s . e is not divided by sqrt(D).
    """

    name = "cope"
    Settings = CopeSettings
    needs = frozenset({SCORES})

    def parameters(self, layer):
        """Return the table of embeddings, which starts at zero."""
        return {"table": Parameter((self.settings.cope_max_position + 1, self.model.head_dim))}

    def costs(self, layer, batch):
        """Return the costs: the products of queries and embeddings, and two operations per visible
        key.

        In bf16 or fp16, an fp32 copy of the embeddings is saved for the backward pass.
        """
        elements = (self.settings.cope_max_position + 1) * self.model.head_dim
        per_key = 2 * self.model.num_attention_heads
        products = self.model.num_attention_heads * elements
        products += int(per_key * self.model.keys_per_query(layer))
        saved = 0
        if batch.width < 4:
            saved = 4 * elements
        return Costs(multiply_adds=products, saved=saved)

    def position_inputs(self, layer, parameters, state, hidden_states_sBC, cache):
        """Return the function that rescores. Masked keys do not count, so packed documents need no
        special handling.
        """
        from megatron_tape.ops.rescore import Rescore

        return PositionInputs(rescore=Rescore(_rescored, (parameters["table"],)))


def _rescored(scores_BHrt, q_BHrD, k, seen, tokens, table):
    """Return each score plus the product of the query and the embedding of the key's position,
    (B, H, r, t).

    `scores_BHrt` are the products of queries and keys, divided by sqrt(D). `seen` (B or 1, 1, r, t)
    is True where a query may attend to a key. `table` (p, D) holds the embeddings. `k` and `tokens`
    are arguments of every such function (see `Rescore`), which CoPE does not use.
    """
    from megatron_tape.ops.contextual import add_contextual_positions

    products_BHrp = q_BHrD.to(table.dtype) @ table.T
    return add_contextual_positions(scores_BHrt.to(table.dtype), products_BHrp, seen)
