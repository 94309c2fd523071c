"""Exported models of both families, beside the models that were trained: what must hold for all of them."""

import copy
import inspect

import pytest
import torch
from exported_models import NAMES, OWN_CLASSES, make
from models import random_tokens
from torch.testing import assert_close
from transformers import (
    AutoModelForCausalLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    DynamicCache,
    StaticCache,
)

from megatron_tape.evaluation.base import ModelInfo
from megatron_tape.evaluation.transformers_model import HFModel
from megatron_tape.position import Positions

ALL = (*NAMES, OWN_CLASSES)
GREEDY = dict(max_new_tokens=6, min_new_tokens=6, do_sample=False, pad_token_id=0)


def in_parts(model, ids, sizes, cache=None, **more):
    """The logits of tokens that come a few at a time, and the cache."""
    parts = []
    for part in ids.split(sizes, 1):
        output = model(part, past_key_values=cache, use_cache=True, **more)
        cache = output.past_key_values
        parts.append(output.logits)
    return torch.cat(parts, 1), cache


def seeded(function, *arguments, **options):
    torch.manual_seed(11)
    return function(*arguments, **options)


@pytest.mark.parametrize("name", ALL)
def test_logits_and_gradients_are_those_of_the_training_model(exported, name):
    made, ids = exported(name), random_tokens()
    assert_close(made.loaded(ids).logits, made.built(ids), atol=1e-5, rtol=1e-5)
    loss = made.loaded(ids, labels=ids, use_cache=False).loss
    loss.backward()
    labels = torch.cat([ids[:, 1:], ids[:, :1]], 1)
    weights = torch.ones(ids.shape)
    weights[:, -1] = 0
    made.built(ids, labels, weights / weights.sum()).backward()
    theirs = dict(made.built.gpt.named_parameters())
    pairs = {"model.embed_tokens.weight": "embedding.word_embeddings.weight"}
    for key in theirs:
        if ".position." in key:
            pairs[f"model.{key.removeprefix('decoder.')}.weight"] = key
    for ours, key in pairs.items():
        found, expected = made.loaded.get_parameter(ours).grad, theirs[key].grad
        assert (found - expected).norm() <= 1e-4 * expected.norm(), key
    # A threshold that lies beyond the sequence is no part of what is computed.
    assert sum(not theirs[key].grad.any() for key in pairs.values()) <= 1
    for model in (made.built, made.loaded):
        model.zero_grad()


@torch.no_grad()
@pytest.mark.parametrize("name", ALL)
def test_a_cache_changes_nothing(exported, name):
    model, ids = exported(name).loaded, random_tokens()
    whole = model(ids, use_cache=False).logits
    for implementation in ("eager", "sdpa"):
        model.set_attn_implementation(implementation)
        assert_close(in_parts(model, ids, [5, 1, 7, 3])[0], whole, atol=1e-5, rtol=1e-5)
    # A copy goes on by itself, and so does one whose sequences have changed places.
    _, cache = in_parts(model, ids[:, :9], [4, 5])
    copied = copy.deepcopy(cache)
    cache.reorder_cache(torch.tensor([1, 0]))
    assert_close(in_parts(model, ids[:, 9:], [1, 6], copied)[0], whole[:, 9:], atol=1e-5, rtol=1e-5)
    assert_close(in_parts(model, ids[[1, 0], 9:], [7], cache)[0], whole[[1, 0], 9:], atol=1e-5, rtol=1e-5)
    cache.reset()
    cache.batch_select_indices(torch.tensor([0]))
    assert_close(in_parts(model, ids[:1], [3, 13], cache)[0], whole[:1], atol=1e-5, rtol=1e-5)
    cache.batch_repeat_interleave(2)
    more = random_tokens(2, 1)
    expected = model(torch.cat([ids[[0, 0], :15], more], 1), use_cache=False).logits[:, 15:]
    cache.crop(-1)
    assert_close(model(more, past_key_values=cache).logits, expected, atol=1e-5, rtol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("name", ALL)
def test_generation_with_a_cache_equals_generation_without(exported, name):
    model, ids = exported(name).loaded, random_tokens(2, 8)
    ids[0, :3] = 0
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    for more in ({}, {"num_beams": 3}, {"do_sample": True, "top_k": 20, "temperature": 1.5}):
        given = dict(attention_mask=mask, **GREEDY | more)
        expected = seeded(model.generate, ids, use_cache=False, **given)
        for cache in ("dynamic", "static")[: 1 + (name == OWN_CLASSES)]:
            assert torch.equal(seeded(model.generate, ids, cache_implementation=cache, **given), expected), cache
        if "do_sample" not in more:  # padding before a prompt changes nothing
            alone = model.generate(ids[:1, 3:], attention_mask=mask[:1, 3:], **GREEDY | more)
            assert torch.equal(alone[0, 5:], expected[0, 8:])
    # The next turn of a conversation continues from the cache of the one before: several tokens at once.
    first = model.generate(ids[1:, :4], return_dict_in_generate=True, **GREEDY)
    turn, options = (
        torch.cat([first.sequences, random_tokens(1, 3)], 1),
        GREEDY | dict(max_new_tokens=3, min_new_tokens=3),
    )
    second = model.generate(turn, past_key_values=first.past_key_values, **options)
    assert torch.equal(second, model.generate(turn, use_cache=False, **options))
    one = dict(attention_mask=mask[1:], **GREEDY)
    looked_up = model.generate(ids[1:], prompt_lookup_num_tokens=2, **one)
    assert torch.equal(looked_up, model.generate(ids[1:], **one))
    padded = model(ids, attention_mask=mask, use_cache=False).logits
    assert_close(padded[0, 3:], model(ids[:1, 3:], use_cache=False).logits[0], atol=1e-5, rtol=1e-5)
    assert padded.isfinite().all()


@torch.no_grad()
@pytest.mark.parametrize("name", ALL)
def test_packs_maps_and_masks(exported, name):
    made, ids = exported(name), random_tokens()
    model, documents = made.loaded, torch.tensor([[0] * 5 + [1] * 11, [0] * 16])
    restarting = torch.stack([torch.cat([torch.arange(5), torch.arange(11)]), torch.arange(16)])
    packed = made.built(ids, documents=documents)
    assert_close(model(ids, position_ids=restarting, use_cache=False).logits, packed, atol=1e-5, rtol=1e-5)
    seen = (documents[:, :, None] == documents[:, None]).tril()[:, None]
    masked = model(ids, attention_mask=seen, position_ids=restarting, use_cache=False)
    assert_close(masked.logits, packed, atol=1e-5, rtol=1e-5)
    model.set_attn_implementation("eager")
    output = model(ids, position_ids=restarting, use_cache=False, output_attentions=True, output_hidden_states=True)
    model.set_attn_implementation("sdpa")
    assert_close(output.logits, packed, atol=1e-5, rtol=1e-5)
    assert [state.shape for state in output.hidden_states] == [(2, 16, 32)] * (model.config.num_hidden_layers + 1)
    assert_close(model.lm_head(output.hidden_states[-1]), output.logits)
    for weights in output.attentions:
        assert_close(weights.sum(-1), torch.ones(2, 4, 16), atol=1e-5, rtol=0)
        assert not weights[~seen.expand_as(weights)].any()
    with pytest.raises(ValueError, match="eager"):
        model(ids, output_attentions=True)


@torch.no_grad()
@pytest.mark.parametrize("name", ["toy_gate", OWN_CLASSES])
def test_embeddings_kept_logits_and_saved_models(exported, tmp_path, name):
    model, ids = exported(name).loaded, random_tokens()
    logits, embeddings = model(ids).logits, model.get_input_embeddings()(ids)
    assert_close(model(inputs_embeds=embeddings).logits, logits)
    assert_close(model(ids, logits_to_keep=2).logits, logits[:, -2:])
    with pytest.raises(ValueError, match="either input_ids or inputs_embeds"):
        model(ids, inputs_embeds=embeddings)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, trust_remote_code=True)
    assert all(torch.equal(value, again.state_dict()[key]) for key, value in model.state_dict().items())
    assert torch.equal(again(ids).logits, logits)


@torch.no_grad()
@pytest.mark.parametrize("name", ALL)
def test_in_bf16_a_cache_still_changes_little(exported, name):
    model, ids = exported(name).loaded, random_tokens()
    exact, model = model(ids).logits, copy.deepcopy(model).bfloat16()
    whole, found = model(ids, use_cache=False).logits, in_parts(model, ids, [5, 1, 7, 3])[0]
    assert whole.dtype == found.dtype == torch.bfloat16
    error = (whole - exact).abs().mean()
    assert 0 < error < 0.1 * exact.abs().mean() and (found - exact).abs().mean() < 1.5 * error


@pytest.mark.parametrize("name", ALL)
def test_autocast_changes_little(exported, name):
    """As transformers' Trainer trains with `bf16=True`."""
    model, ids = copy.deepcopy(exported(name).loaded), random_tokens()
    found = []
    for enabled in (False, True):
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            loss = model(ids, labels=ids, use_cache=False).loss
        loss.backward()
        found.append((loss.item(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])))
    (exact, of_exact), (rounded, of_rounded) = found
    assert rounded == pytest.approx(exact, rel=0.01)
    # RePo's positions follow from rounded hidden states, and angles are large multiples of them.
    assert (of_rounded - of_exact).norm() < (0.9 if name == "repo" else 0.1) * of_exact.norm()
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        cached, _ = in_parts(model.eval(), ids, 5)
        assert_close(cached, model(ids, use_cache=False).logits, atol=0.1, rtol=0.1)


@torch.no_grad()
def test_blocks_of_queries_equal_whole_rows(exported):
    """Beyond the 128 queries of a block, with and without gradients."""
    for name in ("fire", "toy_gate"):
        made, ids = exported(name), random_tokens(1, 300)
        expected = made.built(ids)
        assert_close(made.loaded(ids).logits, expected, atol=2e-5, rtol=1e-4)
        assert_close(in_parts(made.loaded, ids, [140, 160])[0], expected, atol=2e-5, rtol=1e-4)
        with torch.enable_grad():
            assert_close(made.loaded(ids, use_cache=False).logits, expected, atol=2e-5, rtol=1e-4)


@torch.no_grad()
def test_gates_keep_the_differences_of_neighbours_in_long_sequences(exported):
    attend = inspect.getmodule(type(exported("toy_gate").loaded)).attend_with_scores
    generator = torch.Generator().manual_seed(7)
    q, k, v = (torch.randn(1, 2, length, 8, generator=generator) for length in (130, 30_000, 30_000))
    gates = torch.nn.functional.logsigmoid(torch.randn(30_000, 1, 2, generator=generator))
    found, exact = (
        attend(*(x.to(dtype) for x in (q, k, v)), None, Positions(log_gate_TBH=gates.to(dtype)), 8**-0.5)[0]
        for dtype in (torch.float32, torch.float64)
    )
    assert_close(found.double(), exact, atol=2e-5, rtol=0)


def test_a_model_with_biases_norms_a_gate_ties_and_several_files_comes_back(tmp_path):
    options = dict(qkv_bias=True, qk_norm=True, attention_output_gate=True, tie_embeddings=True)
    made, ids = make(tmp_path, "fire", max_shard_size=20_000, **options), random_tokens()
    assert len(list(made.directory.glob("*.safetensors"))) > 1
    assert_close(made.loaded(ids).logits, made.built(ids), atol=1e-5, rtol=1e-5)
    made.loaded.save_pretrained(tmp_path / "saved")
    auto = AutoModelForSequenceClassification.from_pretrained
    again = auto(tmp_path / "saved", trust_remote_code=True, num_labels=3, pad_token_id=0)
    assert again(ids).logits.shape == (2, 3)
    half = make(tmp_path, "fire", label="half", dtype="bf16", **options)
    stored = half.loaded.to(torch.float32)
    assert_close(stored(ids).logits, made.built(ids), atol=0.15, rtol=0.05)


@pytest.mark.parametrize("name, matrix", [("toy_gate", "gate"), (OWN_CLASSES, "token_mixing")])
def test_heads_train_with_gradient_checkpointing(exported, name, matrix):
    directory, ids = exported(name).directory, random_tokens()
    for auto in (AutoModelForSequenceClassification, AutoModelForTokenClassification, AutoModelForQuestionAnswering):
        model = auto.from_pretrained(directory, trust_remote_code=True, pad_token_id=0)
        model.eval()
        gradients = []
        for checkpointed in (None, True, False):
            model.zero_grad()
            if checkpointed is not None:
                model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": checkpointed})
                model.train()
                for module in model.modules():
                    if isinstance(module, torch.nn.Dropout):
                        module.p = 0.0
            output = model(ids, use_cache=False)
            logits = output.start_logits + output.end_logits if "start_logits" in output else output.logits
            logits.square().sum().backward()
            gradients.append(getattr(model.model.layers[0].position, matrix).weight.grad)
        assert gradients[0].norm() > 0
        for each in gradients[1:]:
            assert_close(each, gradients[0], rtol=1e-5, atol=1e-6)


@torch.no_grad()
def test_drawn_positions_beyond_the_trained_length_need_a_pass_without_a_cache(exported):
    made, ids = exported("randpe"), random_tokens(2, 24)
    expected = made.built(ids)
    assert_close(made.loaded(ids).logits, expected, atol=1e-5, rtol=1e-5)
    with pytest.raises(NotImplementedError, match="generate without a cache"):
        in_parts(made.loaded, ids, [12, 12])
    assert made.loaded.generate(ids, use_cache=False, **GREEDY).shape == (2, 30)
    # Where a shorter sequence has its tokens does not depend on the longer one beside it.
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    padded, alone = made.loaded(ids, attention_mask=mask, use_cache=False).logits, made.loaded(ids[:1, 4:]).logits
    assert_close(padded[0, 4:], alone[0], atol=1e-5, rtol=1e-5)
    # The evaluation does not cut such texts into parts.
    info = ModelInfo("model", 64, 16, {}, None, False)
    model = HFModel(info, made.loaded, None, chunk=5)
    for length in (24, 16):
        losses = torch.from_numpy(model.losses(ids[0, :length].numpy(), 1)).float()
        logits = made.built(ids[:1, : length - 1])[0]
        assert_close(losses, torch.nn.functional.cross_entropy(logits, ids[0, 1:length], reduction="none"))


def test_peft_trains_an_encoding_whole(exported, tmp_path):
    from peft import LoraConfig, PeftModel, get_peft_model

    made, ids = exported("fire"), random_tokens()
    expected = made.loaded(ids).logits
    config = LoraConfig(target_modules=["q_proj"], modules_to_save=["position"], task_type="CAUSAL_LM")
    model = get_peft_model(copy.deepcopy(made.loaded), config)
    assert_close(model(ids).logits, expected)
    model(ids, labels=ids, use_cache=False).loss.backward()
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad and ".position." in name}
    assert len(trained) == 15 and all(".modules_to_save." in name for name in trained)
    with torch.no_grad():
        for name, parameter in trained.items():
            assert parameter.grad.any() or "threshold_scale" in name, name
            parameter.add_(0.5)
    changed = model(ids).logits
    assert (changed - expected).abs().max() > 0.01
    model.save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(copy.deepcopy(made.loaded), tmp_path)
    assert_close(again(ids).logits, changed)
    assert_close(again.merge_and_unload()(ids).logits, changed, atol=1e-5, rtol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("name, parameter", [("fire", "up_bias"), (OWN_CLASSES, "up_proj")])
def test_offloaded_weights_change_no_logit(exported, name, parameter, tmp_path):
    from accelerate import cpu_offload

    made, ids = exported(name), random_tokens()
    others = ["model.embed_tokens", "model.norm", "lm_head"] + ["model.phases"] * (name == OWN_CLASSES)
    places = {f"model.layers.{i}": "disk" for i in range(3)} | dict.fromkeys(others, "cpu")
    for model in (
        cpu_offload(copy.deepcopy(made.loaded), execution_device=torch.device("cpu")),
        AutoModelForCausalLM.from_pretrained(
            made.directory, trust_remote_code=True, device_map=places, offload_folder=tmp_path
        ),
    ):
        assert getattr(model.model.layers[1].position, parameter).weight.is_meta
        assert_close(model(ids).logits, made.loaded(ids).logits, rtol=0, atol=1e-6)


def test_new_models_start_as_declared(exported):
    loaded = exported("toy_gate").loaded
    torch.manual_seed(0)
    position = type(loaded)(loaded.config).model.layers[1].position
    assert torch.equal(position.start.weight, torch.ones(4))
    assert 0.05 < position.gate.weight.std() < 0.2


def test_what_these_models_cannot_do_is_refused_by_name(exported):
    made, ids = exported("fire"), random_tokens()
    model = made.loaded
    with pytest.raises(NotImplementedError, match="does not support StaticCache, .*; use a DynamicCache"):
        model(ids, past_key_values=StaticCache(config=model.config, max_cache_len=16))
    with pytest.raises(NotImplementedError, match="does not support StaticCache"):
        model.generate(ids[:, :8], cache_implementation="static", **GREEDY)
    foreign = DynamicCache(config=model.config)
    foreign.update(torch.zeros(2, 2, 3, 8), torch.zeros(2, 2, 3, 8), 0)
    with pytest.raises(NotImplementedError, match="filled without what the positional encoding remembers"):
        model(ids, past_key_values=foreign)
    with pytest.raises(NotImplementedError, match="fire do not support continuous batching"):
        model.generate_batch([[5, 6, 7]], max_new_tokens=2)
    load = type(model).from_pretrained
    with pytest.raises(NotImplementedError, match="fire do not support transformers' tensor"):
        load(made.directory, tp_plan="auto")
    with pytest.raises(NotImplementedError, match="use device_map to spread layers"):
        load(made.directory, distributed_config={"pp_size": 2})
    for implementation in ("flash_attention_2", "flex_attention"):
        with pytest.raises((ValueError, ImportError), match="does not support"):
            load(made.directory, attn_implementation=implementation)
    config = copy.deepcopy(model.config)
    config.position_settings = {"fire_width": 3}
    with pytest.raises(ValueError, match="position_settings are not those of fire: .*fire_width"):
        type(model)(config)
    config.position_encoding = "t5"
    with pytest.raises(ValueError, match="position_encoding is 't5', but the code beside this model is that of fire"):
        type(model)(config)
