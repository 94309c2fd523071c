"""Continuous batching: the tokens are those of `generate`, and what cannot be right is refused before it starts."""

import pytest
import torch
from small_models import build, tokens
from transformers import ContinuousBatchingConfig, ContinuousBatchingManager, DynamicCache, GenerationConfig
from transformers.generation.continuous_batching import PagedAttentionCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

PAGE = 8
GREEDY = dict(eos_token_id=-1, do_sample=False)


def prompts(*lengths):
    return [row[:length].tolist() for row, length in zip(tokens(len(lengths), max(lengths)), lengths)]


def settings(**changes):
    # Few tokens at a time, so that prompts are read in chunks, and few pages, so that requests wait for others to end.
    return ContinuousBatchingConfig(**(dict(page_size=PAGE, num_blocks=24, max_batch_tokens=16) | changes))


def alone(model, prompt, count):
    """Return what `generate` continues the prompt with."""
    options = dict(max_new_tokens=count, do_sample=False, pad_token_id=0)
    return model.generate(torch.tensor([prompt]), **options)[0, len(prompt) :].tolist()


def continuations(model, requests, count, **options):
    results = model.generate_batch(requests, GenerationConfig(**GREEDY), max_new_tokens=count, **options)
    assert not any(result.error for result in results.values())
    return [result.generated_tokens for result in results.values()]


@pytest.mark.parametrize("attention, groups", [("sdpa", 2), ("eager", 1)])
def test_requests_of_mixed_lengths_get_the_tokens_of_generate(attention, groups):
    torch.manual_seed(0)
    model = build(torch.float64, attn_implementation=attention, num_key_value_heads=groups)
    requests = prompts(5, 17, 40, 1, 33, 9, 16)
    expected = [alone(model, prompt, 8) for prompt in requests]
    assert len({token for row in expected for token in row}) > 8
    assert continuations(model, requests, 8, continuous_batching_config=settings()) == expected
    assert model.config._attn_implementation == attention
    assert alone(model, requests[0], 8) == expected[0]


def test_short_requests_are_not_called_a_long_context(caplog):
    model = build(max_position_embeddings=27)
    continuations(model, prompts(12, 12, 12), 3, continuous_batching_config=settings(max_batch_tokens=64))
    assert "max_position_embeddings" not in caplog.text
    model(tokens(1, 28))
    assert "more tokens than the 27 of max_position_embeddings" in caplog.text


def test_requests_come_and_go(model):
    first, second, third = prompts(20, 3, 11)
    with model.continuous_batching_context_manager(
        GenerationConfig(**GREEDY), continuous_batching_config=settings()
    ) as manager:
        long = manager.add_request(first, max_new_tokens=30, streaming=True)
        while len(manager.get_result(long, timeout=30).generated_tokens) < 4:
            pass
        short, cancelled = manager.add_request(second, max_new_tokens=6), manager.add_request(third, max_new_tokens=80)
        manager.cancel_request(cancelled)
        found = {}
        while {long, short} - found.keys():
            result = manager.get_result(timeout=30)
            if result.is_finished():
                found[result.request_id] = result.generated_tokens
        assert found[long] == alone(model, first, 30) and found[short] == alone(model, second, 6)
        late = manager.add_request(third, max_new_tokens=9)
        assert manager.get_result(late, timeout=30).generated_tokens == alone(model, third, 9)


def test_a_shared_prefix_is_read_from_the_cache(model, monkeypatch):
    matched, search = [], PagedAttentionCache.search_prefix_match

    def spy(*arguments, **options):
        matched.append(search(*arguments, **options))
        return matched[-1]

    monkeypatch.setattr(PagedAttentionCache, "search_prefix_match", spy)
    (first,) = prompts(30)
    second = first[: 2 * PAGE + 3] + [5, 6, 7]
    with model.continuous_batching_context_manager(
        GenerationConfig(**GREEDY), continuous_batching_config=settings()
    ) as manager:
        for request, expected_match in ((first, 0), (second, 2 * PAGE), (first, 3 * PAGE)):
            manager.add_request(request, max_new_tokens=7)
            assert manager.get_result(timeout=30).generated_tokens == alone(model, request, 7)
            assert matched[-1] == expected_match


def test_a_request_forks_into_several_sequences(model):
    requests = prompts(13, 21)
    results = model.generate_batch(
        requests,
        GenerationConfig(eos_token_id=-1, do_sample=True, top_k=1, num_return_sequences=3),
        max_new_tokens=9,
        continuous_batching_config=settings(num_blocks=48),
    )
    expected = [alone(model, prompt, 9) for prompt in requests for _ in range(3)]
    assert [result.generated_tokens for result in results.values()] == expected


def test_a_manager_that_is_kept_serves_again(model):
    options = dict(continuous_batching_config=settings(), persistent_manager=True)
    try:
        for lengths in ((9, 14), (25, 2)):
            requests = prompts(*lengths)
            expected = [alone(model, prompt, 5) for prompt in requests]
            assert continuations(model, requests, 5, **options) == expected
    finally:
        model.destroy_cached_continuous_batching_manager()


def test_flash_attention_gets_the_lengths_of_the_requests(model, monkeypatch):
    """Flash attention itself needs a GPU; the stand-in reads the same arguments."""

    def varlen(module, query, key, value, attention_mask, scaling, cu_seq_lens_q, cu_seq_lens_k, is_causal, **rest):
        assert attention_mask is None and is_causal and value.shape == key.shape and rest.get("block_table") is None
        outputs = []
        for q0, q1, k0, k1 in zip(cu_seq_lens_q, cu_seq_lens_q[1:], cu_seq_lens_k, cu_seq_lens_k[1:]):
            q, k, v = query[:, :, q0:q1], key[:, :, k0:k1], value[:, :, k0:k1]
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
            seen = torch.ones(q1 - q0, k1 - k0, dtype=torch.bool).tril(int((k1 - k0) - (q1 - q0)))
            scores = (q @ k.transpose(2, 3) * scaling).masked_fill(~seen, float("-inf"))
            outputs.append(scores.softmax(-1) @ v)
        return torch.cat(outputs, dim=2).transpose(1, 2), None

    requests = prompts(5, 30, 1, 12)
    expected = [alone(model, prompt, 8) for prompt in requests]
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "flash_attention_2", varlen)
    model.config._attn_implementation = "flash_attention_2"
    try:
        # Without an explicit number, transformers would use block tables wherever flash attention offers them.
        config = settings(max_blocks_per_request=4)
        assert continuations(model, requests, 8, continuous_batching_config=config) == expected
    finally:
        model.set_attn_implementation("sdpa")


def test_a_paged_cache_without_room_for_the_position_state_is_refused(model):
    manager = ContinuousBatchingManager(model, GenerationConfig(**GREEDY), settings())
    manager.start()
    manager.add_request(prompts(5)[0], max_new_tokens=4)
    result = manager.get_result(timeout=60)
    manager.stop(block=True)
    manager.destroy()
    assert "make the manager of continuous batching by model.init_continuous_batching()" in result.error
    assert not result.generated_tokens


def test_paged_arguments_that_do_not_fit_are_refused(model):
    class Other(PagedAttentionCache):
        pass

    manager = model.init_continuous_batching(GenerationConfig(**GREEDY), settings())
    cache = manager._create_batch_processor().cache
    with pytest.raises(NotImplementedError, match="max_blocks_per_request to 0"):
        model(tokens(), cache=cache, block_table=torch.zeros(1, 1))
    cache.__class__ = Other
    for unknown in (cache, DynamicCache()):
        with pytest.raises(NotImplementedError, match=f"this {type(unknown).__name__} cannot hold"):
            model(tokens(), cache=unknown)
    with pytest.raises(NotImplementedError, match="gives the model no paged cache"):
        model(tokens(), write_index=[])
    model.set_attn_implementation("paged|eager")
    try:
        with pytest.raises(NotImplementedError, match=r"call model.set_attn_implementation\('eager'\)"):
            model(tokens())
    finally:
        model.set_attn_implementation("sdpa")


def test_an_unknown_paged_cache_of_transformers_is_refused_before_anything_runs(model, monkeypatch):
    def update(self, key_states, value_states, layer_idx, blocks):
        raise AssertionError("never called")

    monkeypatch.setattr(PagedAttentionCache, "update", update)
    calls = (
        lambda: model.init_continuous_batching(),
        lambda: model.generate_batch(prompts(5), max_new_tokens=4),
        lambda: model.generate(tokens(), max_new_tokens=4, cache_implementation="paged"),
    )
    for call in calls:
        with pytest.raises(NotImplementedError, match="is not supported with transformers .*; use generate"):
            call()
