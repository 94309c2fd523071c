"""PaTH (Yang et al., 2025): positions as products of content-dependent, Householder-like
transformations.
"""

from dataclasses import dataclass
from typing import Annotated

from megatron_tape.ops.backends import REFLECTIONS
from megatron_tape.position.encoding import (
    Bounds,
    Costs,
    Count,
    EncodingSettings,
    Parameter,
    PositionEncoding,
    PositionInputs,
)

_EPSILON = 1e-6
"""Added to |w|^2 when w is normalized, as in the authors' code."""


@dataclass(frozen=True, kw_only=True)
class PathSettings(EncodingSettings):
    """Settings of the projections that produce the vectors w of the transformations H."""

    path_rank: Count = 32
    """path: rank of the low-rank projection from hidden states to the vectors w of the
    transformations.
    """
    path_conv_size: Annotated[int, Bounds(ge=0)] = 3
    """path: kernel size in tokens of the causal convolution of the vectors w, which SiLU follows. 0
    disables both.
    """


class PathPosition(PositionEncoding):
    """The score of query s and key t is q_s^T H_s H_(s-1) ... H_(t+1) k_t / sqrt(D), H_l = I -
    beta_l w_l w_l^T.

    w is a unit vector for each token and key/value group. `w_down` (rank, C) and `w_up` (G D, rank)
    project the layer's normalized input x; `conv` (G, D, width) convolves the result over the token
    and preceding ones of its document; SiLU and normalization follow. beta is 2 sigmoid(W x + b),
    where W is `beta_weight` (G, C) and b `beta_bias` (G,).
    """

    name = "path"
    Settings = PathSettings
    needs = frozenset({REFLECTIONS})
    restarts_in_documents = True

    def parameters(self, layer):
        """Return the parameters. As in the authors' code, weights start normally distributed and
        the bias at zero.
        """
        model = self.model
        groups = model.query_groups
        dim = model.head_dim
        hidden = model.hidden_size
        rank = self.settings.path_rank
        size = self.settings.path_conv_size
        std = model.init_std
        parameters = {
            "w_down": Parameter((rank, hidden), std=std),
            "w_up": Parameter((groups * dim, rank), std=std),
            "beta_weight": Parameter((groups, hidden), std=std),
            "beta_bias": Parameter((groups,)),
        }
        if size > 0:
            parameters["conv"] = Parameter((groups, dim, size), std=std, partition_dim=0)
        return parameters

    def costs(self, layer, batch):
        """Return the costs: projections, convolution, each block's closed form, and the loop over
        blocks of keys.

        The inputs of w and beta, and the three results of the closed form for each block of keys,
        are saved for the backward pass. The state is a token's position, from which the convolution
        finds the start of the document.
        """
        from megatron_tape.ops.householder import BLOCK

        model = self.model
        rank = self.settings.path_rank
        groups = model.query_groups
        heads = model.num_attention_heads
        dim = model.head_dim
        hidden = model.hidden_size
        # The triangular solve has a right side with a column for each key and each element of w.
        wide = BLOCK + dim

        # Multiply-adds per token.
        w = rank * (hidden + groups * dim) + groups * dim * self.settings.path_conv_size
        beta = groups * hidden
        # Per key: the products of w with w and with keys, the triangular solve (half of its matrix
        # is zero), and the product of w with its result.
        keys = groups * (2 * BLOCK * dim + BLOCK * wide // 2 + dim * wide)
        # Per query: its own block, and all blocks with keys that it attends to.
        other_blocks = int(dim * dim * model.keys_per_query(layer) / BLOCK)
        queries = heads * (BLOCK * dim + BLOCK * wide + other_blocks)

        # Bytes. The results of the closed form for a block of keys are [K; W], U and
        # [K^T | I] - W^T U. The last two have (BLOCK + D)^2 elements together.
        local_groups = batch.groups_per_rank(groups)
        sequences = batch.tokens // model.seq_length
        blocks = sequences * -(-model.seq_length // BLOCK) * local_groups
        narrow = batch.local_tokens * rank * batch.width
        inputs = 4 * batch.tokens * local_groups * (dim + 1)
        closed_forms = 4 * blocks * (2 * BLOCK * dim + wide * wide)
        sent = batch.local_tokens * batch.groups_in_all_to_all(groups) * (dim + 1) * batch.width
        return Costs(
            multiply_adds=w + beta + keys + queries,
            saved=narrow + inputs + closed_forms,
            sent_forward=sent,
            sent_backward=sent,
            state=1,
            state_width=4,
            reads_hidden_states=True,
        )

    def initial_state(self, positions_SB, dtype):
        """Return the positions (S, B or 1) in float32, which represents them exactly."""
        return positions_SB.float()

    def position_inputs(self, layer, parameters, state, hidden_states_sBC, cache):
        """Return the function that rescores, with its tensors for this rank's groups and all
        tokens whose keys attention receives.
        """
        from torch.nn.functional import linear

        from megatron_tape.ops.householder import through_reflections

        # The convolution of a token reads this number of tokens before it.
        before = max(self.settings.path_conv_size - 1, 0)
        # Cached before `w_up` is applied, so that the cache has only `path_rank` numbers per token.
        narrow = cache.append("narrow", linear(hidden_states_sBC, parameters["w_down"]), before)
        w_sBGD = linear(narrow, parameters["w_up"]).unflatten(2, (self.model.query_groups, -1))
        betas_sBG = linear(hidden_states_sBC, parameters["beta_weight"], parameters["beta_bias"])
        betas_TBG = self.token_layout.to_heads(cache.append("betas", betas_sBG))
        positions = cache.append("positions", state, before)
        tensors = (self.token_layout.to_heads(w_sBGD), betas_TBG, positions)
        if "conv" in parameters:
            tensors = (*tensors, parameters["conv"])
        return PositionInputs(rescore=through_reflections(_unit_w_and_beta, tensors))


def _unit_w_and_beta(w_TBGD, betas_TBG, positions_TB, conv_GDK=None):
    """Return the unit vectors w (T, B, G, D) and beta (T, B, G), given the outputs of their
    projections. w and positions may also have tokens before these T, for the convolution.
    """
    from torch.nn.functional import silu

    if conv_GDK is not None:
        w_TBGD = silu(short_convolution(w_TBGD, positions_TB, conv_GDK))[-len(betas_TBG) :]
    squares = w_TBGD.square().sum(-1, keepdim=True)
    return w_TBGD * (squares + _EPSILON).rsqrt(), 2 * betas_TBG.sigmoid()


def short_convolution(x_TBGD, positions_TB, weight_GDK):
    """Return a causal depthwise convolution of `x_TBGD` over tokens, (T, B, G, D).

    `weight_GDK` has K weights per channel; the last one applies to the token itself. If a token's
    position is less than n, the token n before it belongs to another document and is ignored.
    """
    from torch.nn.functional import pad

    total = x_TBGD * weight_GDK[..., -1]
    count = len(x_TBGD)
    for back in range(1, weight_GDK.shape[-1]):
        # Shift all tokens by `back`, so that `earlier[t]` is token t - back, or 0 if there is none.
        # Tokens are the first axis, which is the last pair in `pad`.
        earlier = pad(x_TBGD, (0, 0, 0, 0, 0, 0, back, 0))[:count]
        same_document = (positions_TB >= back)[:, :, None, None]
        total = total + earlier * weight_GDK[..., -1 - back] * same_document
    return total
