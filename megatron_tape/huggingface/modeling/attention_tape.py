"""Attention of TAPE models, which also averages the position state.

Axes: B batch, S new tokens, T all tokens, C hidden size, H query heads, G key/value heads, D head
dimension, E size of the values.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils.import_utils import is_tracing

from .configuration_tape import TapeConfig

BLOCK_ROWS = 192
"""Maximum rows of scores in a block of `attend_by_blocks`: queries times query heads per key/value
head.
"""
BLOCK_SCORES = 2**21
"""Maximum scores of one key/value head in a block."""
THREAD_SCORES = 2**19
"""Maximum scores that a thread computes at a time."""
SERVERS = ("vllm", "sglang")
"""Attention functions of servers, which store one key and one value per token, but no position
state.
"""


class TapeAttention(nn.Module):
    """Attention that rotates queries and keys by the position state, and averages the state with
    the values.
    """

    def __init__(self, config: TapeConfig, layer_idx: int):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.head_dim = config.head_dim
        # transformers' attention functions read these attributes.
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling = config.head_dim**-0.5
        self.is_causal = True

        C = config.hidden_size
        D = config.head_dim
        bias = config.attention_bias
        self.q_proj = nn.Linear(C, config.num_attention_heads * D, bias=bias)
        self.k_proj = nn.Linear(C, config.num_key_value_heads * D, bias=bias)
        self.v_proj = nn.Linear(C, config.num_key_value_heads * D, bias=bias)
        self.o_proj = nn.Linear(config.num_attention_heads * D, C, bias=False)
        if config.qk_norm:
            self.q_norm = nn.RMSNorm(D, eps=config.rms_norm_eps)
            self.k_norm = nn.RMSNorm(D, eps=config.rms_norm_eps)

    def forward(
        self,
        hidden_states,
        state,
        attention_mask=None,
        cache=None,
        average_state=True,
        cache_position=None,
        **kwargs,
    ):
        """Return the output (B, S, C), the averaged state (B, S, H, D) or None, and the attention
        weights (B, H, S, T) or None.

        hidden_states (B, S, C), state (B, S, G, D). The mask is the one that transformers'
        `create_causal_mask` returns for the attention implementation. `cache` is a Cache of
        transformers, and cache_position (S,) has the indices of the new tokens in it. The state is
        averaged if `average_state` is set.
        """
        query, key, value = self.project(hidden_states, state, average_state)
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        if cache is not None:
            key, value = cache.update(
                key, value, self.layer_idx, {"cache_position": cache_position}
            )

        kwargs["dropout"] = self.config.attention_dropout if self.training else 0.0
        kwargs["scaling"] = self.scaling
        averages, weights = attend(self, query, key, value, attention_mask, **kwargs)
        output = self.o_proj(averages[0].flatten(2))
        averaged_state = None
        if average_state:
            # `project` has concatenated the state to the values. The second average is the state's.
            averaged_state = averages[1]
        return output, averaged_state, weights

    def project(
        self, hidden_states: Tensor, state: Tensor | None, average_state: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries (B, S, H, D), keys (B, S, G, D) and values (B, S, G, D), given hidden
        states (B, S, C).

        Queries and keys are rotated by the state (B or 1, S, G, D), if there is one. With
        `average_state`, the state is concatenated to the values, (B, S, G, 2 D).
        """
        B, S, _ = hidden_states.shape
        D = self.head_dim
        G = self.config.num_key_value_heads
        query = self.q_proj(hidden_states).view(B, S, -1, D)
        key = self.k_proj(hidden_states).view(B, S, -1, D)
        value = self.v_proj(hidden_states).view(B, S, -1, D)
        if self.config.qk_norm:
            query = self.q_norm(query)
            key = self.k_norm(key)
        if state is not None:
            # In a half-precision model, the state may be in fp32. Here a copy of it is rounded to
            # the dtype of the queries, keys and values. The layer's own state stays in fp32.
            state = state.to(query.dtype)
            grouped_query = query.view(B, S, G, -1, D)
            query = rotate(grouped_query, state.unsqueeze(3)).flatten(2, 3)
            key = rotate(key, state)
            if average_state:
                value = torch.cat([value, state.expand_as(value)], dim=-1)
        return query, key, value


def rotate(x: Tensor, z: Tensor) -> Tensor:
    """Multiply x (..., D) by z (..., D) as complex numbers, both stored as [real | imaginary]."""
    x_re, x_im = x.chunk(2, dim=-1)
    z_re, z_im = z.chunk(2, dim=-1)
    real = torch.addcmul(x_re * z_re, x_im, z_im, value=-1)
    imaginary = torch.addcmul(x_re * z_im, x_im, z_re)
    return torch.cat([real, imaginary], dim=-1)


def eager_attention_forward(
    module, query, key, value, attention_mask, scaling, dropout=0.0, **kwargs
):
    """Return the averages (B, S, H, E) and the attention weights (B, H, S, T), in plain torch.

    query (B, H, S, D), key (B, G, T, D), value (B, G, T, E). The mask (B or 1, 1, S, T) is boolean
    (True: attend) or additive. Has the name and signature of the functions in transformers' models,
    but does not repeat keys and values for the query heads of a group.
    """
    B, H, S, D = query.shape
    G = key.shape[1]
    grouped_query = query.reshape(B, G, -1, D) * scaling
    scores = torch.matmul(grouped_query, key.transpose(2, 3)).view(B, H, S, -1)
    if attention_mask is None:
        pass
    elif attention_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attention_mask, torch.finfo(scores.dtype).min)
    else:
        scores = scores + attention_mask

    # The softmax of half-precision scores needs float32.
    dtype = torch.promote_types(scores.dtype, torch.float32)
    weights = scores.softmax(-1, dtype=dtype).to(value.dtype)
    weights = F.dropout(weights, dropout, training=module.training)
    grouped_weights = weights.view(B, G, -1, weights.shape[-1])
    averages = torch.matmul(grouped_weights, value).view(B, H, S, -1)
    return averages.transpose(1, 2), weights


def refuse_servers(implementation: str | None) -> None:
    """Raise NotImplementedError for a server's attention function, which would give wrong
    results.
    """
    if implementation in SERVERS:
        raise NotImplementedError(
            f"{implementation}'s attention for models of transformers stores one key and one value"
            " per token, but no position state; use transformers serve or model.generate, or serve"
            " a model of the type tape with vLLM and its plug-in, the package transformers_tape"
        )


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs,
) -> tuple[list[Tensor], Tensor | None]:
    """Return a list of averages (B, S, H, D), and the attention weights (B, H, S, T) or None.

    query (B, H, S, D), key (B, G, T, D). The value is (B, G, T, D) or, with the position state,
    [value | z] of size 2 D. The list has one average for each part of size D. The mask is the one
    that transformers' `create_causal_mask` returns for the attention implementation in
    `module.config`. Without a mask, query i attends to the first i + 1 keys. kwargs are passed to
    the attention function, and must include `scaling`. Raises NotImplementedError for a server's
    attention function.
    """
    implementation = module.config._attn_implementation
    D = query.shape[-1]
    refuse_servers(implementation)
    # For a single query, as in decoding, `eager_attention_forward` makes one pass over the keys,
    # which is faster than any kernel.
    if implementation == "eager" or (implementation == "sdpa" and query.shape[2] == 1):
        averages, weights = eager_attention_forward(
            module, query, key, value, attention_mask, **kwargs
        )
        return averages.split(D, dim=-1), weights

    # On a CPU, SDPA would run once for the values and once for the state. attend_by_blocks runs
    # once, but needs a mask that is the same for all heads.
    has_state = value.shape[-1] > D
    has_plain_mask = attention_mask is not None and attention_mask.shape[1] == 1
    is_causal = attention_mask is None and kwargs.get("is_causal") is not False
    if (
        implementation == "sdpa"
        and query.device.type == "cpu"
        and has_state
        and (has_plain_mask or is_causal)
        and _is_inference(module, query, key, value, **kwargs)
    ):
        return attend_by_blocks(query, key, value, attention_mask, kwargs["scaling"]), None

    attention = ALL_ATTENTION_FUNCTIONS[implementation]
    if implementation == "flex_attention":
        # It accepts values of another size than keys.
        averages, *_ = attention(module, query, key, value, attention_mask, **kwargs)
        return averages.split(D, dim=-1), None
    # Other kernels require values of the same size as keys, so they run once for the values and
    # once for the state. Each returns the average first, and weights that are not used.
    parts = value.split(D, dim=-1)
    return [
        attention(module, query, key, part, attention_mask, **kwargs)[0] for part in parts
    ], None


def _is_inference(module: nn.Module, *tensors: Tensor, dropout: float = 0.0, **kwargs) -> bool:
    """Return whether attention with these `tensors` runs without gradients, dropout and tracing.

    The other keyword arguments of an attention function do not matter.
    """
    # In training, gradient checkpointing runs a layer first without gradients, then with them. Both
    # runs must use the same function, so `module.training` counts as needing gradients.
    needs_gradient = module.training or any(x.requires_grad for x in tensors)
    return not (needs_gradient or dropout or is_tracing(tensors[0]))


def attend_by_blocks(
    query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, scaling: float
) -> list[Tensor]:
    """Compute attention on a CPU, one block of queries at a time. Return a list with one average
    (B, S, H, D) for each part of size D of the value.

    query (B, H, S, D), key (B, G, T, D), value (B, G, T, D or 2 D). The mask (B or 1, 1, S or 1, T)
    is boolean (True: attend) or additive; None: causal. Computes whole rows of scores, except for
    keys that no query of the block attends to. Uses float32 for half-precision inputs. Does not
    support gradients.
    """
    B, H, S, D = query.shape
    G, T = key.shape[1:3]
    E = value.shape[-1]
    R = H // G  # query heads per key/value head
    # At least float32, for precision. On many CPUs, products in fp16 are also slow.
    dtype = torch.promote_types(query.dtype, torch.float32)
    scaled_query = query.to(dtype).mul(scaling)
    # The first axis has the B G key/value heads of all sequences.
    queries = scaled_query.unflatten(1, (G, R)).flatten(0, 1)
    keys = key.flatten(0, 1).to(dtype)
    values = value.flatten(0, 1).to(dtype)

    output = query.new_empty(B, S, H, E)
    # At least 16 queries per block, even if the block then exceeds BLOCK_ROWS or BLOCK_SCORES.
    block_queries = min(S, max(16, min(BLOCK_ROWS, BLOCK_SCORES // T) // R))
    # The number of key/value heads that are computed together: as many as have at most
    # THREAD_SCORES scores per thread, but at least one.
    heads_at_once = min(
        B * G, max(1, THREAD_SCORES * torch.get_num_threads() // (R * block_queries * T))
    )
    # All blocks share this memory. Allocating it for every block would take longer than the
    # computation.
    scores_memory, weights_memory = queries.new_empty(2, heads_at_once * R * block_queries * T)
    # For queries (rows) and keys (columns) of the same tokens: whether the key is later.
    is_later = torch.ones(block_queries, block_queries, dtype=torch.bool).triu(1)

    for start in range(0, S, block_queries):
        stop = min(start + block_queries, S)
        num_queries = stop - start
        # Without a mask, attention is causal, so the block attends to no key after its last query.
        mask = None
        first_key = 0
        end_key = stop
        if attention_mask is not None:
            mask = attention_mask.expand(-1, -1, S, T)[:, :, start:stop]
            first_key, end_key = _attended_keys(mask)

        averages = queries.new_zeros(B * G, R * num_queries, E)
        for first_head in range(0, B * G, heads_at_once):
            # Without any attended key, all queries of the block are padding. Their averages remain
            # zero.
            if first_key == end_key:
                break
            heads = slice(first_head, min(first_head + heads_at_once, B * G))
            shape = (heads.stop - first_head, R * num_queries, end_key - first_key)
            size = math.prod(shape)
            scores = scores_memory[:size].view(shape)
            weights = weights_memory[:size].view(shape)

            query_rows = queries[heads, :, start:stop].flatten(1, 2)
            torch.bmm(query_rows, keys[heads, first_key:end_key].mT, out=scores)
            head_scores = scores.unflatten(1, (R, num_queries))
            if mask is None:
                # Keys before `start` are visible to all queries of the block.
                head_scores[..., start:].masked_fill_(
                    is_later[:num_queries, :num_queries], float("-inf")
                )
            elif len(mask) == 1:
                # All sequences have this mask.
                _apply_mask(head_scores, mask[..., first_key:end_key])
            else:
                # Each of the G heads of a sequence has the sequence's mask.
                sequences = torch.arange(first_head, heads.stop) // G
                _apply_mask(head_scores, mask[sequences, ..., first_key:end_key])

            torch.softmax(scores, -1, out=weights)
            torch.bmm(weights, values[heads, first_key:end_key], out=averages[heads])
        output[:, start:stop] = averages.view(B, H, num_queries, E).transpose(1, 2)
    return list(output.split(D, dim=-1))


def _attended_keys(mask: Tensor) -> tuple[int, int]:
    """Return the first key and the end of the range of keys that any query of a mask (B or 1, 1,
    queries, T) attends to.

    An additive mask gives all T keys.
    """
    if mask.dtype != torch.bool:
        return 0, mask.shape[-1]
    attended = mask.flatten(0, 2).any(0).nonzero()
    if len(attended) == 0:
        return 0, 0
    return int(attended[0]), int(attended[-1]) + 1


def _apply_mask(scores: Tensor, mask: Tensor) -> None:
    """Apply a boolean or additive mask to scores in place.

    Scores stay finite, since a row of -inf, of a query at padding, would give NaN.
    """
    if mask.dtype == torch.bool:
        scores.masked_fill_(~mask, torch.finfo(scores.dtype).min)
    else:
        scores.add_(mask).clamp_(min=torch.finfo(scores.dtype).min)
