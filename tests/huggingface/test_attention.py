"""All attention implementations of exported models give the averages of eager attention."""

from types import SimpleNamespace

import pytest
import torch
from small_models import SMALL, build, tokens
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from megatron_tape.huggingface.modeling import attention_tape
from megatron_tape.huggingface.modeling.attention_tape import (
    attend_by_blocks,
    eager_attention_forward,
)


def causal(S, T):
    """Return the mask of the last S of T tokens."""
    return torch.ones(S, T, dtype=torch.bool).tril(T - S)[None, None]


def inputs(B=2, S=37, T=37, H=6, G=2, D=8, dtype=torch.float64):
    """Return queries, keys and values of twice their size, with the model's axes."""
    shapes = ((S, H, D), (T, G, D), (T, G, 2 * D))
    return [torch.randn(B, *shape, dtype=dtype).transpose(1, 2) for shape in shapes]


def padded(mask, *lengths):
    """Hide the first keys of each sequence from all queries."""
    return torch.cat([mask & (torch.arange(mask.shape[-1]) >= length) for length in lengths])


MASKS = {
    "chunk_of_a_prompt": (19, 37, causal(19, 37)),
    "left_padding": (37, 37, padded(causal(37, 37), 9, 0)),
    "static_cache": (
        19,
        50,
        torch.nn.functional.pad(
            causal(19, 19),
            (0, 31),
        ),
    ),
    "keys": (61, 61, (torch.arange(61) >= torch.tensor([[30], [0]]))[:, None, None]),
    "any": (
        21,
        37,
        torch.rand(
            2,
            1,
            21,
            37,
            generator=torch.Generator().manual_seed(1),
        )
        < 0.3,
    ),
}


@pytest.mark.parametrize(
    "sizes",
    [
        (192, 2**21, 2**19),
        (24, 2**21, 1),
        (192, 300, 2000),
    ],
)
@pytest.mark.parametrize("kind", ["causal", "empty_static_cache", *MASKS])
def test_attention_by_blocks_equals_eager(kind, sizes, monkeypatch, unwritten_memory_is_nan):
    for name, size in zip(("BLOCK_ROWS", "BLOCK_SCORES", "THREAD_SCORES"), sizes):
        monkeypatch.setattr(attention_tape, name, size)
    S, T, mask = MASKS.get(
        kind,
        (37, 50 if kind == "empty_static_cache" else 37, None),
    )
    query, key, value = inputs(S=S, T=T)
    seen = torch.ones(1, 1, S, T, dtype=torch.bool).tril()
    if mask is not None:
        seen = mask.expand(-1, -1, S, T)
    module = SimpleNamespace(training=False)
    expected, _ = eager_attention_forward(module, query, key, value, seen, 0.3)
    masks = [mask]
    if mask is not None:
        for hidden in (torch.finfo(query.dtype).min, -torch.inf):
            masks.append(
                torch.zeros(mask.shape, dtype=query.dtype).masked_fill(
                    ~mask,
                    hidden,
                )
            )
    # Queries without visible keys are padding; their results are unused, but must not be NaN.
    some = seen.any(-1).expand(2, 1, -1)[:, 0]
    assert some.sum() > 8
    for given in masks:
        output = torch.cat(attend_by_blocks(query, key, value, given, 0.3), dim=-1)
        assert output.isfinite().all()
        torch.testing.assert_close(output[some], expected[some], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_error_of_blocks_in_half_precision_is_at_most_that_of_eager(dtype):
    query, key, value = (x.to(dtype) for x in inputs(S=130, T=130, D=32))
    module = SimpleNamespace(training=False)
    mask = causal(130, 130)
    wide = [x.double() for x in (query, key, value)]
    exact, _ = eager_attention_forward(module, *wide, mask, 0.2)
    eager, _ = eager_attention_forward(module, query, key, value, mask, 0.2)
    output = torch.cat(attend_by_blocks(query, key, value, None, 0.2), dim=-1)
    assert output.dtype == dtype
    assert (output - exact).abs().mean() <= (eager - exact).abs().mean()


def count(monkeypatch, name="sdpa"):
    """Record the sizes of values in calls of one of transformers' attention functions."""
    widths = []
    inner = AttentionInterface()[name]

    def counted(module, query, key, value, *arguments, **kwargs):
        widths.append(value.shape[-1])
        return inner(module, query, key, value, *arguments, **kwargs)

    monkeypatch.setitem(AttentionInterface._global_mapping, name, counted)
    return widths


def test_prompts_use_one_pass_over_values_and_state(monkeypatch):
    model = build()
    widths = count(monkeypatch)
    input_ids = tokens(2, 40)
    with torch.no_grad():
        cache = model(input_ids[:, :30]).past_key_values
        model(input_ids[:, 30:], past_key_values=cache)
        assert widths == [8] * 2, "only the last layer, which averages no state, uses sdpa"
        model(input_ids, is_causal=False)
    # Gradients, dropout, other attention patterns and graphs need sdpa.
    model(input_ids)
    with torch.no_grad():
        model.train()(input_ids)
    assert widths[2:] == [8] * 15


def test_flex_attention_uses_one_pass_and_equals_eager(monkeypatch):
    model = build(attn_implementation="eager", head_dim=16)
    llama = LlamaForCausalLM(LlamaConfig(**SMALL, head_dim=16, attn_implementation="eager")).eval()
    input_ids = tokens(2, 33)
    mask = torch.ones_like(input_ids)
    mask[0, :7] = 0
    widths = count(monkeypatch, "flex_attention")
    errors = {}
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        for name, each in (("llama", llama), ("tape", model)):
            expected = each(input_ids, attention_mask=mask).logits
            each.set_attn_implementation("flex_attention")
            errors[name] = (
                (each(input_ids, attention_mask=mask).logits - expected)[mask.bool()].abs().max()
            )
    assert widths == [16] * 3 + [32, 32, 16]
    assert errors["tape"] < 1e-4
    assert errors["llama"] < 1e-4


def test_attention_functions_with_their_own_cache_are_refused_before_a_call(monkeypatch):
    """As vLLM's attention, whose cache per layer cannot store z: results would be silently
    wrong.
    """
    called = []

    def attention(module, query, key, value, attention_mask, **kwargs):
        called.append(module.layer_idx)
        return torch.zeros_like(query).transpose(1, 2), None

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "vllm", attention)
    model = build()
    model.config._attn_implementation = "vllm"
    with pytest.raises(NotImplementedError, match="no position state"):
        model(tokens(), use_cache=False)
    assert not called
