"""Exported models of both families, compared with the trained models."""

import copy
import inspect

import pytest
import torch
from exported_models import NAMES, OWN_CLASSES, make
from models import random_tokens
from torch.testing import assert_close
from transformers import AutoModelForSequenceClassification, DynamicCache, StaticCache

from megatron_tape.position import PositionInputs

ALL = (*NAMES, OWN_CLASSES)
GREEDY = dict(max_new_tokens=6, min_new_tokens=6, do_sample=False, pad_token_id=0)


def in_parts(model, ids, sizes, cache=None, **more):
    """Return the logits of tokens given a few at a time, and the cache."""
    parts = []
    for part in ids.split(sizes, 1):
        output = model(part, past_key_values=cache, use_cache=True, **more)
        cache = output.past_key_values
        parts.append(output.logits)
    return torch.cat(parts, 1), cache


@pytest.mark.parametrize("name", ALL)
def test_logits_and_gradients_equal_the_training_model(exported, name):
    made = exported(name)
    ids = random_tokens()
    assert_close(
        made.loaded(ids).logits,
        made.built(ids),
        atol=1e-5,
        rtol=1e-5,
    )
    loss = made.loaded(ids, labels=ids, use_cache=False).loss
    loss.backward()
    labels = torch.cat([ids[:, 1:], ids[:, :1]], 1)
    weights = torch.ones(ids.shape)
    weights[:, -1] = 0
    made.built(ids, labels, weights / weights.sum()).backward()
    theirs = dict(made.built.named_parameters())
    pairs = {"model.embed_tokens.weight": "embedding.weight"}
    for key in theirs:
        if ".position." in key:
            pairs[f"model.{key}.weight"] = key
    for ours, key in pairs.items():
        found = made.loaded.get_parameter(ours).grad
        expected = theirs[key].grad
        assert (found - expected).norm() <= 1e-4 * expected.norm(), key
    # A threshold beyond the sequence does not affect the result.
    assert sum(not theirs[key].grad.any() for key in pairs.values()) <= 1
    for model in (made.built, made.loaded):
        model.zero_grad()


@torch.no_grad()
@pytest.mark.parametrize("name", ALL)
def test_a_cache_changes_nothing(exported, name):
    model = exported(name).loaded
    ids = random_tokens()
    whole = model(ids, use_cache=False).logits
    for implementation in ("eager", "sdpa"):
        model.set_attn_implementation(implementation)
        assert_close(
            in_parts(model, ids, [5, 1, 7, 3])[0],
            whole,
            atol=1e-5,
            rtol=1e-5,
        )
    # Training may follow inference.
    with torch.inference_mode():
        model(ids)
    with torch.enable_grad():
        model(ids, use_cache=False).logits.sum().backward()
    model.zero_grad()
    # Copies of its layers are independent.
    close = dict(atol=1e-5, rtol=1e-5)
    _, cache = in_parts(model, ids[:, :9], [4, 5])
    other = copy.copy(cache)
    other.layers = [copy.copy(layer) for layer in cache.layers]
    in_parts(model, ids[:, 9:10], [1], cache)
    in_parts(model, ids[:, :1], [1], other)
    assert_close(
        in_parts(model, ids[:, 10:], [6], cache)[0],
        whole[:, 10:],
        **close,
    )
    # A copy is independent, also after its sequences were reordered.
    _, cache = in_parts(model, ids[:, :9], [4, 5])
    copied = copy.deepcopy(cache)
    cache.reorder_cache(torch.tensor([1, 0]))
    assert_close(
        in_parts(model, ids[:, 9:], [1, 6], copied)[0],
        whole[:, 9:],
        **close,
    )
    swapped = ids.flip(0)
    assert_close(
        in_parts(model, swapped[:, 9:], [7], cache)[0],
        whole.flip(0)[:, 9:],
        **close,
    )
    cache.reset()
    cache.batch_select_indices(torch.tensor([0]))
    assert_close(
        in_parts(model, ids[:1], [3, 13], cache)[0],
        whole[:1],
        **close,
    )
    cache.batch_repeat_interleave(2)
    more = random_tokens(2, 1)
    expected = model(torch.cat([ids[[0, 0], :15], more], 1), use_cache=False).logits[:, 15:]
    cache.crop(-1)
    assert_close(model(more, past_key_values=cache).logits, expected, **close)


@torch.no_grad()
@pytest.mark.parametrize("name", ["fire", OWN_CLASSES])
@pytest.mark.parametrize("argument", ["cache", "past_key_values"])
def test_the_cache_has_its_name_before_and_since_transformers_5_24(exported, name, argument):
    model = exported(name).loaded
    ids = random_tokens()
    cache = DynamicCache(config=model.config)
    model(ids[:, :9], **{argument: cache})
    found = model(ids[:, 9:], **{argument: cache}).logits
    assert_close(
        found,
        model(ids, use_cache=False).logits[:, 9:],
        atol=1e-5,
        rtol=1e-5,
    )


@torch.no_grad()
@pytest.mark.parametrize("name", ALL)
def test_packs_and_masks(exported, name):
    made = exported(name)
    ids = random_tokens()
    model = made.loaded
    documents = torch.tensor([[0] * 5 + [1] * 11, [0] * 16])
    restarting = torch.stack([torch.cat([torch.arange(5), torch.arange(11)]), torch.arange(16)])
    packed = made.built(ids, documents=documents)
    assert_close(
        model(ids, position_ids=restarting, use_cache=False).logits, packed, atol=1e-5, rtol=1e-5
    )
    seen = (documents[:, :, None] == documents[:, None]).tril()[:, None]
    masked = model(ids, attention_mask=seen, position_ids=restarting, use_cache=False)
    assert_close(masked.logits, packed, atol=1e-5, rtol=1e-5)
    assert_close(
        model(ids, logits_to_keep=2).logits,
        model(ids).logits[:, -2:],
    )
    for contradiction in (
        {"output_attentions": True},
        {"inputs_embeds": model.get_input_embeddings()(ids)},
    ):
        with pytest.raises(ValueError):
            model(ids, **contradiction)


@torch.no_grad()
@pytest.mark.parametrize("name", ALL)
def test_left_padding_does_not_change_generated_tokens(exported, name):
    model = exported(name).loaded
    ids = random_tokens(2, 8)
    mask = torch.ones(2, 8, dtype=torch.int64)
    mask[0, :3] = 0
    found = model.generate(ids, attention_mask=mask, **GREEDY)[:, -6:]
    for row, start in enumerate((3, 0)):
        prompt = ids[row : row + 1, start:]
        alone = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), use_cache=False, **GREEDY
        )
        assert torch.equal(found[row], alone[0, -6:])


@pytest.mark.parametrize("name", ALL)
def test_autocast_changes_little(exported, name):
    """As with `bf16=True` in transformers' Trainer."""
    model = copy.deepcopy(exported(name).loaded)
    ids = random_tokens()
    found = []
    for enabled in (False, True):
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            loss = model(ids, labels=ids, use_cache=False).loss
        loss.backward()
        found.append(
            (
                loss.item(),
                torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]),
            )
        )
    (exact, of_exact), (rounded, of_rounded) = found
    assert rounded == pytest.approx(exact, rel=0.01)
    # RePo computes positions from rounded hidden states, and angles are large multiples of
    # positions.
    assert (of_rounded - of_exact).norm() < (0.9 if name == "repo" else 0.1) * of_exact.norm()
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        cached, _ = in_parts(model.eval(), ids, 5)
        assert_close(cached, model(ids, use_cache=False).logits, atol=0.1, rtol=0.1)


@torch.no_grad()
def test_blocks_of_queries_equal_whole_rows(exported):
    """Beyond the 128 queries of a block, with and without gradients."""
    for name in ("fire", "fox"):
        made = exported(name)
        ids = random_tokens(1, 300)
        expected = made.built(ids)
        assert_close(made.loaded(ids).logits, expected, atol=2e-5, rtol=1e-4)
        assert_close(
            in_parts(made.loaded, ids, [140, 160])[0],
            expected,
            atol=2e-5,
            rtol=1e-4,
        )
        with torch.enable_grad():
            assert_close(
                made.loaded(ids, use_cache=False).logits,
                expected,
                atol=2e-5,
                rtol=1e-4,
            )


@torch.no_grad()
def test_gates_keep_differences_between_neighbors_in_long_sequences(exported):
    attend = inspect.getmodule(type(exported("fox").loaded)).attend_with_scores
    generator = torch.Generator().manual_seed(7)
    q, k, v = (
        torch.randn(1, 2, length, 8, generator=generator) for length in (130, 30_000, 30_000)
    )
    gates = torch.nn.functional.logsigmoid(torch.randn(30_000, 1, 2, generator=generator))
    found, exact = (
        attend(
            *(x.to(dtype) for x in (q, k, v)),
            None,
            PositionInputs(log_gate_TBH=gates.to(dtype)),
            dropout=0.0,
            with_weights=False,
        )[0]
        for dtype in (torch.float32, torch.float64)
    )
    assert_close(found.double(), exact, atol=2e-5, rtol=0)


def test_a_model_with_biases_norms_a_gate_and_tied_embeddings_can_be_reimported(tmp_path):
    options = dict(qkv_bias=True, qk_norm=True, attention_output_gate=True, tie_embeddings=True)
    made = make(tmp_path, "fire", max_shard_size=20_000, **options)
    ids = random_tokens()
    assert len(list(made.directory.glob("*.safetensors"))) > 1
    assert_close(
        made.loaded(ids).logits,
        made.built(ids),
        atol=1e-5,
        rtol=1e-5,
    )
    made.loaded.save_pretrained(tmp_path / "saved")
    auto = AutoModelForSequenceClassification.from_pretrained
    again = auto(tmp_path / "saved", trust_remote_code=True, num_labels=3, pad_token_id=0)
    assert again(ids).logits.shape == (2, 3)
    half = make(tmp_path, "fire", label="half", dtype="bf16", **options)
    stored = half.loaded.to(torch.float32)
    assert_close(stored(ids).logits, made.built(ids), atol=0.15, rtol=0.05)


@torch.no_grad()
def test_randpe_beyond_the_trained_length_needs_generation_without_a_cache(exported):
    made = exported("randpe")
    ids = random_tokens(2, 24)
    expected = made.built(ids)
    assert_close(made.loaded(ids).logits, expected, atol=1e-5, rtol=1e-5)
    with pytest.raises(NotImplementedError, match="generate without a cache"):
        in_parts(made.loaded, ids, [12, 12])
    assert made.loaded.generate(ids, use_cache=False, **GREEDY).shape == (2, 30)
    # Positions of a short sequence do not depend on a longer one in the batch.
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    padded = made.loaded(ids, attention_mask=mask, use_cache=False).logits
    alone = made.loaded(ids[:1, 4:]).logits
    assert_close(padded[0, 4:], alone[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["fire", OWN_CLASSES])
def test_continuous_batching_is_refused(exported, name):
    model = exported(name).loaded
    with pytest.raises(NotImplementedError, match="continuous batching"):
        model.generate_batch([[5, 6, 7]], max_new_tokens=2)
    with pytest.raises(NotImplementedError, match="continuous batching"):
        model.generate(
            torch.tensor([[5, 6, 7]]),
            cache_implementation="paged",
            max_new_tokens=2,
        )


def test_new_models_start_as_declared(exported):
    loaded = exported("fire").loaded
    torch.manual_seed(0)
    position = type(loaded)(loaded.config).model.layers[1].position
    assert torch.equal(position.threshold_scale.weight, torch.ones(1))
    assert 0.05 < position.down_weight.weight.std() < 0.2


@pytest.mark.parametrize("name", ["wall", "selective_rope_fox", "fox", "alibi"])
def test_generation_with_a_static_cache_is_refused(exported, name):
    model = exported(name).loaded
    with pytest.raises(NotImplementedError, match="StaticCache.*use a DynamicCache"):
        model.generate(torch.tensor([[5, 6, 7]]), cache_implementation="static", **GREEDY)


def test_generation_from_embeddings_equals_that_from_tokens(exported):
    model = exported("fox").loaded
    ids = torch.tensor([[5, 6, 7]])
    embedded = model.get_input_embeddings()(ids).detach()
    expected = model.generate(ids, **GREEDY)[:, 3:]
    assert torch.equal(model.generate(inputs_embeds=embedded, **GREEDY), expected)


def test_unsupported_features_are_refused_by_name(exported):
    made = exported("fire")
    ids = random_tokens()
    model = made.loaded
    with pytest.raises(NotImplementedError, match="StaticCache"):
        model(ids, past_key_values=StaticCache(config=model.config, max_cache_len=16))
    foreign = DynamicCache(config=model.config)
    foreign.update(
        torch.zeros(2, 2, 3, 8),
        torch.zeros(2, 2, 3, 8),
        0,
    )
    with pytest.raises(NotImplementedError, match="start with an empty DynamicCache"):
        model(ids, past_key_values=foreign)
    for implementation in ("flash_attention_2", "flex_attention"):
        with pytest.raises((ValueError, ImportError), match="does not support"):
            type(model).from_pretrained(made.directory, attn_implementation=implementation)
    config = copy.deepcopy(model.config)
    config.position_settings = {"fire_width": 3}
    with pytest.raises(TypeError, match="fire_width"):
        type(model)(config)
    config.position_encoding = "t5"
    with pytest.raises(ValueError, match="implements fire"):
        type(model)(config)


@pytest.mark.parametrize("name", ["t5", OWN_CLASSES])
def test_attention_of_servers_is_refused(exported, name):
    model = exported(name).loaded
    config = copy.deepcopy(model.config)
    config._attn_implementation = "vllm"
    with pytest.raises(NotImplementedError, match="no position state"):
        type(model.model)(config)
