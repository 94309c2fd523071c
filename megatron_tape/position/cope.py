"""CoPE: contextual position encoding (Golovneva et al., 2024)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_tape.errors import refuse
from megatron_tape.ops.backends import SCORES
from megatron_tape.position.encoding import Costs, EncodingSettings, Parameter, PositionEncoding, Positions

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class CopeSettings(EncodingSettings):
    """The positions that have an embedding."""

    cope_max_position: int = 64
    """cope: largest position, p_max in the paper, at which all greater ones are capped; 0 to it have embeddings."""


class CopePosition(PositionEncoding):
    """Query s counts the tokens from key t to itself by gates, and adds q_s . e[count] to the score of t.

    The gate of a pair is the sigmoid of its score q.k / sqrt(D). Counts are fractional, so the products with the
    embeddings of the integers beside a count are interpolated. `table` (cope_max_position + 1, D) holds the embeddings
    e of a layer, which its heads share; it starts at zero, as in the paper's code, where queries are not divided by
    sqrt(D) here.
    """

    name = "cope"
    Settings = CopeSettings
    needs = frozenset({SCORES})

    def check(self) -> None:
        largest = self.settings.cope_max_position
        refuse(largest < 1, "model.position.cope_max_position", f"is {largest}", "set it to at least 1, such as 64")

    def parameters(self, layer: int) -> Mapping[str, Parameter]:
        return {"table": Parameter((self.settings.cope_max_position + 1, self.model.head_dim))}

    def costs(self, layer, batch) -> Costs:
        """Count the embeddings in fp32 as kept, if those of the run are narrower."""
        numbers = (self.settings.cope_max_position + 1) * self.model.head_dim
        products = self.model.num_attention_heads * (numbers + self.model.seq_length)
        return Costs(multiply_adds=products, saved=4 * numbers if batch.width < 4 else 0)

    def positions(self, layer, parameters, state, hidden_states_sBC, cache) -> Positions:
        """Return the scores of rows; keys before a document are not counted, so packs need nothing more."""
        from megatron_tape.ops.rescore import Rescore

        return Positions(rescore=Rescore(_rows, (parameters["table"],)))


def _rows(
    scores_BHrt: "Tensor", q_BHrD: "Tensor", k: "Tensor", seen: "Tensor", tokens: slice, table: "Tensor"
) -> "Tensor":
    """Add to each score the query's product with the embedding of the key's position."""
    from megatron_tape.ops.contextual import add_contextual_positions

    return add_contextual_positions(scores_BHrt.to(table.dtype), q_BHrD.to(table.dtype) @ table.T, seen)
