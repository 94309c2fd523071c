"""PaTH (Yang et al., 2025): positions as products of Householder-like transformations that depend on the content."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_tape.errors import refuse
from megatron_tape.ops.backends import REFLECTIONS
from megatron_tape.position.encoding import Costs, EncodingSettings, Parameter, PositionEncoding, Positions

if TYPE_CHECKING:
    from torch import Tensor

_EPSILON = 1e-6
"""Added to the squared length of w before it is normalised, as in the authors' code."""


@dataclass(frozen=True, kw_only=True)
class PathSettings(EncodingSettings):
    """Where the transformations come from."""

    path_rank: int = 32
    """path: inner width of the two matrices that map hidden states to the directions of the transformations."""
    path_conv_size: int = 3
    """path: tokens over which a causal convolution, with SiLU, averages these directions; 0 for no convolution."""


class PathPosition(PositionEncoding):
    """The score of query s and key t is q_s^T H_s H_(s-1) ... H_(t+1) k_t / sqrt(D), H_l = I - beta_l w_l w_l^T.

    w is a unit vector for each token and key/value group: `w_down` (rank, C) and `w_up` (G D, rank) map the layer's
    normalised input to it, `conv` (G, D, width; the last number is the token's own) averages it over the last tokens of
    the document, followed by SiLU. beta is 2 sigmoid of `beta_weight` (G, C) and `beta_bias` (G,).
    """

    name = "path"
    Settings = PathSettings
    needs = frozenset({REFLECTIONS})
    restarts_in_documents = True

    def check(self) -> None:
        rank, size = self.settings.path_rank, self.settings.path_conv_size
        refuse(rank < 1, "model.position.path_rank", f"is {rank}", "set it to at least 1, such as 32")
        refuse(size < 0, "model.position.path_conv_size", f"is {size}", "set it to 3, or to 0 for no convolution")

    def parameters(self, layer: int) -> Mapping[str, Parameter]:
        """Return the parameters of w and beta; as in the authors' code, all weights are drawn and the bias is zero."""
        model = self.model
        groups, dim, hidden, std = model.query_groups, model.head_dim, model.hidden_size, model.init_std
        parameters = {
            "w_down": Parameter((self.settings.path_rank, hidden), std=std),
            "w_up": Parameter((groups * dim, self.settings.path_rank), std=std),
            "beta_weight": Parameter((groups, hidden), std=std),
            "beta_bias": Parameter((groups,)),
        }
        if self.settings.path_conv_size:
            parameters["conv"] = Parameter((groups, dim, self.settings.path_conv_size), std=std, head_axis=0)
        return parameters

    def costs(self, layer, batch) -> Costs:
        """Count the projections, the convolution, the blocks' closed forms and the walk over blocks of keys.

        Kept are the inputs of w and beta, and for each block of keys the three results of the closed form. The state is
        a token's position, from which the convolution knows where its document starts.
        """
        from megatron_tape.ops.householder import BLOCK

        model, rank = self.model, self.settings.path_rank
        groups, heads, dim, hidden = model.query_groups, model.num_attention_heads, model.head_dim, model.hidden_size
        wide = BLOCK + dim
        projections = rank * (hidden + groups * dim) + groups * (hidden + dim * self.settings.path_conv_size)
        # The products of w with w and with keys, the triangular solution (half of its matrix is zero), and its product
        # with w; then each query within its block, and over the mean of all blocks before it.
        of_keys = groups * (2 * BLOCK * dim + BLOCK * wide // 2 + dim * wide)
        of_queries = heads * (BLOCK * dim + BLOCK * wide + dim * dim * model.seq_length // (2 * BLOCK))
        held = batch.groups(groups)
        blocks = batch.tokens // model.seq_length * -(-model.seq_length // BLOCK) * held
        inputs = batch.tokens * held * (dim + 1)
        sent = batch.local_tokens * batch.sent_groups(groups) * (dim + 1) * batch.width
        return Costs(
            multiply_adds=projections + of_keys + of_queries,
            saved=batch.local_tokens * rank * batch.width + 4 * (inputs + blocks * (2 * BLOCK * dim + wide * wide)),
            sent_forward=sent,
            sent_backward=sent,
            state=1,
            state_width=4,
            reads_hidden_states=True,
        )

    def initial_state(self, positions_SB, dtype) -> "Tensor":
        """Return the positions themselves, (S, B or 1), in float32, which holds them exactly."""
        return positions_SB.float()

    def positions(self, layer, parameters, state, hidden_states_sBC, cache) -> Positions:
        from torch.nn.functional import linear

        from megatron_tape.ops.householder import through_reflections

        narrow = cache.append("narrow", linear(hidden_states_sBC, parameters["w_down"]))
        w_sBGD = linear(narrow, parameters["w_up"]).unflatten(2, (self.model.query_groups, -1))
        betas_sBG = linear(hidden_states_sBC, parameters["beta_weight"], parameters["beta_bias"])
        betas_TBG = self.tokens.to_heads(cache.append("betas", betas_sBG))
        tensors = (self.tokens.to_heads(w_sBGD), betas_TBG, cache.append("positions", state))
        if "conv" in parameters:
            tensors = (*tensors, parameters["conv"])
        return Positions(rescore=through_reflections(_unit_w_and_beta, tensors))


def _unit_w_and_beta(w_TBGD: "Tensor", betas_TBG: "Tensor", positions_TB: "Tensor", *conv_GDK: "Tensor"):
    if conv_GDK:
        w_TBGD = short_convolution(w_TBGD, positions_TB, *conv_GDK)
    return w_TBGD * (w_TBGD.square().sum(-1, keepdim=True) + _EPSILON).rsqrt(), 2 * betas_TBG.sigmoid()


def short_convolution(x_TBGD: "Tensor", positions_TB: "Tensor", weight_GDK: "Tensor") -> "Tensor":
    """Return SiLU of the sum of each number's K last values, weighted, the token's own by the last weight.

    Tokens with a position below n do not see the token n before them, which belongs to another document.
    """
    from torch.nn.functional import pad, silu

    own, count = x_TBGD * weight_GDK[..., -1], len(x_TBGD)
    for back in range(1, weight_GDK.shape[-1]):
        earlier = pad(x_TBGD, (0, 0, 0, 0, 0, 0, back, 0))[:count]
        same_document = (positions_TB >= back)[:, :, None, None]
        own = own + earlier * weight_GDK[..., -1 - back] * same_document
    return silu(own)
