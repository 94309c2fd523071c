"""All ways to compute the attention of exported models: each gives eager's averages, and each can be switched to."""

import sys
from types import SimpleNamespace

import pytest
import torch
from small_models import SMALL, build, tokens
from transformers import AttentionInterface, DynamicCache, LlamaConfig, LlamaForCausalLM
from transformers import modeling_flash_attention_utils as flash
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from megatron_tape.huggingface.modeling import attention_tape
from megatron_tape.huggingface.modeling.attention_tape import attend_by_blocks, attend_fused, eager_attention_forward


def causal(S, T):
    """The mask of the last S of T tokens."""
    return torch.ones(S, T, dtype=torch.bool).tril(T - S)[None, None]


def inputs(B=2, S=37, T=37, H=6, G=2, D=8, dtype=torch.float64):
    """Queries, keys and values twice as wide, with the axes that the model makes."""
    shapes = ((S, H, D), (T, G, D), (T, G, 2 * D))
    return [torch.randn(B, *shape, dtype=dtype).transpose(1, 2) for shape in shapes]


def padded(mask, *lengths):
    """Hide the first keys of each sequence from all queries."""
    return torch.cat([mask & (torch.arange(mask.shape[-1]) >= length) for length in lengths])


MASKS = {
    "chunk_of_a_prompt": (19, 37, causal(19, 37)),
    "left_padding": (37, 37, padded(causal(37, 37), 9, 0)),
    "padded_chunk": (5, 37, padded(causal(5, 37), 20, 3)),
    "static_cache": (19, 50, torch.nn.functional.pad(causal(19, 19), (0, 31))),
    "documents": (37, 37, causal(37, 37) & (torch.arange(37) // 11 == torch.arange(37)[:, None] // 11)),
    "keys": (61, 61, (torch.arange(61) >= torch.tensor([[30], [0]]))[:, None, None]),
    "any": (21, 37, torch.rand(2, 1, 21, 37, generator=torch.Generator().manual_seed(1)) < 0.3),
}


@pytest.mark.parametrize("sizes", [(192, 2**21, 2**19), (24, 2**21, 1), (48, 2**21, 1200), (192, 300, 2000)])
@pytest.mark.parametrize("kind", ["causal", "empty_static_cache", *MASKS])
def test_attention_by_blocks_equals_eager(kind, sizes, monkeypatch, unwritten_memory_is_nan):
    for name, size in zip(("ROWS", "LONGEST", "SCORES"), sizes):
        monkeypatch.setattr(attention_tape, name, size)
    S, T, mask = MASKS.get(kind, (37, 50 if kind == "empty_static_cache" else 37, None))
    query, key, value = inputs(S=S, T=T)
    seen = torch.ones(1, 1, S, T, dtype=torch.bool).tril() if mask is None else mask.expand(-1, -1, S, T)
    expected, _ = eager_attention_forward(SimpleNamespace(training=False), query, key, value, seen, 0.3)
    output = torch.cat(attend_by_blocks(query, key, value, mask, 0.3), dim=-1)
    # Queries that see nothing are padding; what they average matters to nobody, but may not be NaN.
    some = seen.any(-1).expand(2, 1, -1)[:, 0]
    assert output.isfinite().all() and some.sum() > 8
    torch.testing.assert_close(output[some], expected[some], rtol=1e-12, atol=1e-12)
    if mask is not None:
        for hidden in (torch.finfo(query.dtype).min, -torch.inf):
            additive = torch.zeros(mask.shape, dtype=query.dtype).masked_fill(~mask, hidden)
            output = torch.cat(attend_by_blocks(query, key, value, additive, 0.3), dim=-1)
            assert output.isfinite().all()
            torch.testing.assert_close(output[some], expected[some], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("heads", [(4, 4, 16), (6, 1, 8), (9, 3, 64)])
def test_long_prompts_in_blocks_equal_eager(heads):
    H, G, D = heads
    query, key, value = inputs(B=1, S=450, T=450, H=H, G=G, D=D)
    expected, _ = eager_attention_forward(SimpleNamespace(training=False), query, key, value, causal(450, 450), 0.2)
    output = torch.cat(attend_by_blocks(query, key, value, None, 0.2), dim=-1)
    torch.testing.assert_close(output, expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_blocks_of_half_precision_err_at_most_as_much_as_eager(dtype):
    query, key, value = (x.to(dtype) for x in inputs(S=130, T=130, D=32))
    module, mask = SimpleNamespace(training=False), causal(130, 130)
    wide = [x.double() for x in (query, key, value)]
    exact, _ = eager_attention_forward(module, *wide, mask, 0.2)
    eager, _ = eager_attention_forward(module, query, key, value, mask, 0.2)
    output = torch.cat(attend_by_blocks(query, key, value, None, 0.2), dim=-1)
    assert output.dtype == dtype
    assert (output - exact).abs().mean() <= (eager - exact).abs().mean()


def count(monkeypatch, name="sdpa"):
    """Count the calls of one of transformers' attention functions: the widths of the values that it sees."""
    widths, inner = [], AttentionInterface()[name]

    def counted(module, query, key, value, *arguments, **kwargs):
        widths.append(value.shape[-1])
        return inner(module, query, key, value, *arguments, **kwargs)

    monkeypatch.setitem(AttentionInterface._global_mapping, name, counted)
    return widths


def test_prompts_take_one_pass_over_values_and_state(monkeypatch):
    model, widths = build(), count(monkeypatch)
    input_ids = tokens(2, 40)
    with torch.no_grad():
        cache = model(input_ids[:, :30]).past_key_values
        model(input_ids[:, 30:], past_key_values=cache)
        model(input_ids, attention_mask=torch.ones_like(input_ids).tril(-1).flip(1)[:, :40])
        assert widths == [8] * 3, "only the last layer, which averages no state, leaves its attention to sdpa"
    # With gradients, dropout, other attention patterns or in a graph, what sdpa offers is needed.
    for setting in (torch.enable_grad(), torch.no_grad()):
        with setting:
            widths.clear()
            (model if torch.is_grad_enabled() else model.train())(input_ids)
            assert widths == [8] * 5
    widths.clear()
    with torch.no_grad():
        model.eval()(input_ids, is_causal=False)
        assert widths == [8] * 5


def test_prompts_can_be_mapped_by_vmap_and_differentiated_forward():
    model, input_ids = build(torch.float64), tokens(3, 9)
    with torch.no_grad():
        expected = model(input_ids).logits
        mapped = torch.func.vmap(lambda row: model(row[None], use_cache=False).logits[0])(input_ids)
        torch.testing.assert_close(mapped, expected, rtol=1e-10, atol=1e-10)
    embeddings = model.get_input_embeddings()(input_ids).detach()
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):  # the others have no forward derivative
        _, found = torch.func.jvp(
            lambda x: model(inputs_embeds=x, use_cache=False).logits, (embeddings,), (torch.ones_like(embeddings),)
        )
    with torch.no_grad():
        ahead, behind = (model(inputs_embeds=embeddings + h, use_cache=False).logits for h in (1e-6, -1e-6))
    torch.testing.assert_close(found, (ahead - behind) / 2e-6, rtol=1e-5, atol=1e-5)


def test_flex_attention_makes_one_pass_and_agrees(monkeypatch):
    model = build(attn_implementation="eager", head_dim=16)
    llama = LlamaForCausalLM(LlamaConfig(**SMALL, head_dim=16, attn_implementation="eager")).eval()
    input_ids = tokens(2, 33)
    mask = torch.ones_like(input_ids)
    mask[0, :7] = 0
    widths, errors = count(monkeypatch, "flex_attention"), {}
    # A row of ecosystem.py compiles it.
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        for name, each in (("llama", llama), ("tape", model)):
            expected = each(input_ids, attention_mask=mask).logits
            each.set_attn_implementation("flex_attention")
            errors[name] = (each(input_ids, attention_mask=mask).logits - expected)[mask.bool()].abs().max()
    assert widths == [16] * 3 + [32, 32, 16]
    assert errors["tape"] < 1e-4 and errors["llama"] < 1e-4


class FlashStandIn:
    """What the package flash-attn offers, computed by torch; it counts its calls."""

    def __init__(self):
        self.dense, self.varlen = [], []

    def flash_attn_func(self, q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1)):
        assert q.shape[-1] == k.shape[-1] == v.shape[-1]
        self.dense.append(q.shape[1])
        S, T, R = q.shape[1], k.shape[1], q.shape[2] // k.shape[2]
        q, k, v = (x.transpose(1, 2) for x in (q, k.repeat_interleave(R, 2), v.repeat_interleave(R, 2)))
        seen = torch.ones(S, T, dtype=torch.bool).tril(T - S) if causal else None
        attention = torch.nn.functional.scaled_dot_product_attention
        return attention(q, k, v, attn_mask=seen, scale=softmax_scale).transpose(1, 2)

    def flash_attn_varlen_func(
        self, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
        dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1),
    ):  # fmt: skip
        self.varlen.append(cu_seqlens_q.tolist())
        bounds = [list(zip(x[:-1], x[1:])) for x in (cu_seqlens_q.tolist(), cu_seqlens_k.tolist())]
        each = [(q[None, a:b], k[None, c:d], v[None, c:d]) for (a, b), (c, d) in zip(*bounds)]
        done = torch.cat([self.flash_attn_func(*x, 0.0, softmax_scale, causal)[0] for x in each])
        self.dense.clear()
        return done


@pytest.fixture
def stand_in(monkeypatch):
    """Let transformers find `FlashStandIn` where it looks for the package."""
    found = FlashStandIn()
    functions = (found.flash_attn_func, found.flash_attn_varlen_func, None, flash._pad_input, flash._unpad_input)
    monkeypatch.setattr(flash, "_lazy_imports", lambda *arguments, **kwargs: functions)
    monkeypatch.setattr(flash, "_loaded_implementation", None)
    return found


def with_flash(**changes):
    model = build(**changes)
    # Nothing else is asked of the machine and its packages.
    type(model)._flash_attn_can_dispatch, kept = lambda *arguments, **kwargs: True, type(model)._flash_attn_can_dispatch
    try:
        model.set_attn_implementation("flash_attention_2")
    finally:
        type(model)._flash_attn_can_dispatch = kept
    return model


def test_flash_attention_is_dispatched_once_for_each_part(stand_in):
    model, input_ids = with_flash(), tokens(2, 20)
    expected = build()
    expected.load_state_dict(model.state_dict())
    close = dict(rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        logits = expected(input_ids).logits
        torch.testing.assert_close(model(input_ids).logits, logits, **close)
        assert stand_in.dense == [20] * 5 and not stand_in.varlen

        cache = DynamicCache(config=model.config)
        model(input_ids[:, :12], past_key_values=cache)
        torch.testing.assert_close(model(input_ids[:, 12:], past_key_values=cache).logits, logits[:, 12:], **close)

        mask = torch.ones_like(input_ids)
        mask[0, :6] = 0
        padded = model(input_ids, attention_mask=mask).logits[mask.bool()]
        torch.testing.assert_close(padded, expected(input_ids, attention_mask=mask).logits[mask.bool()], **close)
        assert stand_in.varlen == [[0, 14, 34]] * 5


def test_flash_attention_keeps_packed_documents_apart(stand_in):
    model, input_ids = with_flash(), tokens(1, 20)
    documents = input_ids.split([8, 12], dim=1)
    positions = torch.cat([torch.arange(x.shape[1]) for x in documents])[None]
    bounds = torch.tensor([0, 8, 20], dtype=torch.int32)
    given = dict(cu_seq_lens_q=bounds, cu_seq_lens_k=bounds, max_length_q=12, max_length_k=12)
    with torch.no_grad():
        expected = torch.cat([model(x).logits for x in documents], dim=1)
        for options in ({}, given):
            stand_in.varlen.clear()
            logits = model(input_ids, position_ids=positions, use_cache=False, **options).logits
            torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)
            assert stand_in.varlen == [[0, 8, 20]] * 5


@pytest.mark.parametrize("T", [21, 40])
def test_the_fused_kernel_is_given_what_it_expects(T):
    from megatron_tape.ops.attention import attention, unsupported

    query, key, value = inputs(B=2, S=21, T=T, H=4, G=2, D=32, dtype=torch.float32)
    assert unsupported("triton", query.device, query.dtype, 32) is None, "the kernel is interpreted on the CPU"
    fused = attention_tape.fused_attention(query.device, query.dtype, 32)
    expected = attend_by_blocks(query, key, value, None, 32**-0.5)
    for part, right in zip(attend_fused(fused, query, key, value), expected, strict=True):
        torch.testing.assert_close(part, right, rtol=1e-5, atol=1e-5)
    assert fused.func is attention and attention_tape.fused_attention(query.device, torch.float64, 32) is None


def test_without_the_main_package_there_is_no_fused_kernel(monkeypatch):
    monkeypatch.setitem(sys.modules, "megatron_tape.ops.attention", None)
    assert attention_tape.fused_attention.__wrapped__(torch.device("cuda"), torch.bfloat16, 64) is None


def test_an_attention_that_keeps_its_own_cache_is_refused_before_it_is_called(monkeypatch):
    """As vLLM's, which calls one cache for each layer and has no room for z: the answer would be wrong, not refused."""
    called = []

    def attention(module, query, key, value, attention_mask, **kwargs):
        called.append(module.layer_idx)
        return torch.zeros_like(query).transpose(1, 2), None

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "vllm", attention)
    model = build()
    model.config._attn_implementation = "vllm"
    refusal = "vllm's attention .* no position state; for vLLM, install the package transformers_tape"
    with pytest.raises(NotImplementedError, match=refusal):
        model(tokens(), use_cache=False)
    assert not called
    with pytest.raises(NotImplementedError, match=refusal):
        type(model)(model.config)
