"""Exported models with sliding windows: equal to the trained models, with caches that keep only
what later tokens attend to.
"""

import copy

import pytest
import torch
from exported_models import NAMES, make
from models import WINDOWS, random_tokens
from test_exported_models import GREEDY, in_parts
from torch.testing import assert_close
from toy_encodings import registered
from transformers import AutoModelForCausalLM, DynamicCache

CLOSE = dict(atol=1e-5, rtol=1e-5)
# Sums of many gates are rounded differently.
CLOSE_GATES = dict(atol=2e-5, rtol=1e-4)
SOME = {"sliding_window": 5, "full_attention_every": 2}
# By label: the encoding or a variant of exported_models, and other settings.
CASES = {name: (name, SOME) for name in NAMES}
for label, settings in WINDOWS.items():
    other = {key: value for key, value in settings.items() if key != "position_encoding"}
    CASES[label] = (settings.get("position_encoding", "tape"), other)
VARIANTS = (
    "rope",
    "tape",
    "fox",
    "t5",
    "cope",
    "path",
    "wall",
    "tape_learned",
    "selective_rope_fox",
)
for encoding in VARIANTS:
    CASES[f"{encoding}_one"] = (encoding, {"sliding_window": 1, "full_attention_every": 3})
    CASES[f"{encoding}_all"] = (encoding, {"sliding_window": 5})


@pytest.fixture(scope="module")
def windowed(tmp_path_factory):
    """Return the export of a case, made once. The models were trained on 16 tokens."""
    made = {}

    def of(label):
        if label not in made:
            name, settings = CASES[label]
            folder = tmp_path_factory.mktemp("windows")
            made[label] = make(folder, name, label=label, **settings)
        return made[label]

    with registered():
        yield of


def close(label):
    """Return the tolerances of a case."""
    return CLOSE_GATES if "fox" in label else CLOSE


def longest(label):
    """Return the number of tokens that generation with a cache supports, up to four times the
    trained length.
    """
    return 16 if label == "randpe" else 64


def window_layers(made, cache):
    """Return the layers of a cache that belong to layers with a window."""
    return [layer for i, layer in enumerate(cache.layers) if made.model.window_of(i) is not None]


@pytest.mark.parametrize("label", CASES)
def test_logits_and_gradients_equal_the_training_model(windowed, label):
    made = windowed(label)
    ids = random_tokens(2, 64)
    expected = made.built(ids)
    for implementation in ("eager", "sdpa"):
        made.loaded.set_attn_implementation(implementation)
        assert_close(made.loaded(ids, use_cache=False).logits, expected, **close(label))
        # Some attention functions are only used without gradients.
        with torch.no_grad():
            assert_close(made.loaded(ids, use_cache=False).logits, expected, **close(label))

    made.loaded(ids, labels=ids, use_cache=False).loss.backward()
    labels = torch.cat([ids[:, 1:], ids[:, :1]], 1)
    weights = torch.ones(ids.shape)
    weights[:, -1] = 0
    made.built(ids, labels, weights / weights.sum()).backward()
    for found, expected in (
        (made.loaded.model.embed_tokens.weight, made.built.embedding.weight),
        *(
            (made.loaded.get_parameter(f"model.{key}.weight"), parameter)
            for key, parameter in made.built.named_parameters()
            if ".position." in key
        ),
    ):
        assert (found.grad - expected.grad).norm() <= 2e-4 * expected.grad.norm() + 1e-8
    for model in (made.built, made.loaded):
        model.zero_grad()


@torch.no_grad()
@pytest.mark.parametrize("label", CASES)
def test_a_cache_changes_nothing_and_keeps_only_the_window(windowed, label):
    made = windowed(label)
    model = made.loaded
    length = longest(label)
    ids = random_tokens(2, length)
    whole = made.built(ids)
    W = made.model.sliding_window
    for sizes in ([1] * length, [7, 1, 1, 3, length - 12], [2] * (length // 2), [length - 1, 1]):
        for implementation in ("eager", "sdpa"):
            model.set_attn_implementation(implementation)
            logits, cache = in_parts(model, ids, sizes, DynamicCache(config=model.config))
            assert_close(logits, whole, **close(label))
            assert cache.get_seq_length() == length
            for layer in window_layers(made, cache):
                assert layer.get_seq_length() == length
                assert layer.keys.shape[2] == layer.values.shape[2] == W - 1
                for tensor in layer.encoding_tensors.values():
                    assert tensor.kept.shape[1] == W - 1 + tensor.before
                assert layer.get_mask_sizes(3) == (W + 2, length - W + 1)


@torch.no_grad()
@pytest.mark.parametrize("label", CASES)
def test_left_padding_changes_nothing(windowed, label):
    """Also the temperature counts no padding."""
    made = windowed(label)
    model = made.loaded
    length = longest(label) - 6
    ids = random_tokens(2, length)
    mask = torch.ones_like(ids)
    mask[0, :7] = 0
    padded = model(ids, attention_mask=mask).logits
    assert_close(padded[0, 7:], made.built(ids[:1, 7:])[0], **close(label))
    assert_close(padded[1], made.built(ids[1:])[0], **close(label))

    options = dict(attention_mask=mask, **GREEDY)
    found = model.generate(ids, **options)[:, -6:]
    assert torch.equal(model.generate(ids, use_cache=False, **options)[:, -6:], found)
    assert torch.equal(model.generate(ids, prefill_chunk_size=4, **options)[:, -6:], found)
    for row, start in enumerate((7, 0)):
        prompt = ids[row : row + 1, start:]
        alone = model.generate(prompt, attention_mask=torch.ones_like(prompt), **GREEDY)
        assert torch.equal(found[row], alone[0, -6:])


@torch.no_grad()
@pytest.mark.parametrize("label", CASES)
def test_packs_and_masks(windowed, label):
    made = windowed(label)
    model = made.loaded
    ids = random_tokens()
    documents = torch.tensor([[0] * 7 + [1] * 9, [0] * 16])
    restarting = torch.stack([torch.cat([torch.arange(7), torch.arange(9)]), torch.arange(16)])
    packed = made.built(ids, documents=documents)
    found = model(ids, position_ids=restarting, use_cache=False).logits
    assert_close(found, packed, **close(label))
    seen = (documents[:, :, None] == documents[:, None]).tril()[:, None]
    found = model(ids, attention_mask=seen, position_ids=restarting, use_cache=False).logits
    assert_close(found, packed, **close(label))
    # With a cache, a mask has columns for all tokens, also for those that were dropped.
    cache = DynamicCache(config=model.config)
    logits = [
        model(
            ids[:, part],
            attention_mask=seen[:, :, part, : part.stop],
            position_ids=restarting[:, part],
            past_key_values=cache,
        ).logits
        for part in (slice(0, 11), slice(11, 12), slice(12, 16))
    ]
    assert_close(torch.cat(logits, 1), packed, **close(label))


@torch.no_grad()
@pytest.mark.parametrize(
    "label",
    [
        "fox",
        "tape",
        "tape_one",
        "tape_learned_all",
        "t5",
        "swan",
        "path",
        "wall",
        "selective_rope_fox_all",
    ],
)
def test_a_cache_can_be_copied_reordered_selected_repeated_and_emptied(windowed, label):
    made = windowed(label)
    model = made.loaded
    ids = random_tokens(2, 24)
    whole = made.built(ids)
    _, cache = in_parts(model, ids[:, :12], [9, 1, 2])
    copied = copy.deepcopy(cache)
    shallow = copy.copy(cache)
    shallow.layers = [copy.copy(layer) for layer in cache.layers]
    in_parts(model, ids[:, :2], [1, 1], shallow)
    cache.reorder_cache(torch.tensor([1, 0]))
    found, _ = in_parts(model, ids.flip(0)[:, 12:], [1, 1, 10], cache)
    assert_close(found, whole.flip(0)[:, 12:], **close(label))
    found, _ = in_parts(model, ids[:, 12:], [1, 11], copied)
    assert_close(found, whole[:, 12:], **close(label))

    cache.reset()
    assert cache.get_seq_length() == 0
    _, cache = in_parts(model, ids[:, :12], [11, 1], cache)
    cache.batch_select_indices(torch.tensor([1]))
    cache.batch_repeat_interleave(2)
    found, _ = in_parts(model, ids[[1, 1], 12:], [1, 11], cache)
    assert_close(found, whole[[1, 1], 12:], **close(label))


@torch.no_grad()
@pytest.mark.parametrize(
    "label",
    [
        "fox",
        "rope",
        "tape",
        "tape_one",
        "tape_learned_all",
        "rope_all",
        "path",
        "path_one",
        "wall",
        "fire",
        "selective_rope_fox_all",
    ],
)
def test_tokens_can_be_removed_while_those_before_them_are_kept(windowed, label):
    made = windowed(label)
    model = made.loaded
    W = made.model.sliding_window
    ids = random_tokens(2, 24)
    whole = made.built(ids)
    wrong = random_tokens(2, 6, seed=9)

    if W > 1:
        # No token was dropped yet.
        _, cache = in_parts(model, torch.cat([ids[:, :1], wrong[:, :2]], 1), [3])
        cache.crop(-2)
        found, _ = in_parts(model, ids[:, 1:], [1, 22], cache)
        assert_close(found, whole[:, 1:], **close(label))

    _, cache = in_parts(model, ids[:, :12], [12])
    if W > 1:
        with pytest.raises(RuntimeError, match="1 tokens cannot be removed.*start with an empty"):
            cache.crop(-1)
        if label == "fox":
            # The first layer has a window, so this layer was not cropped.
            cache.layers[1].crop(-1)
            with pytest.raises(RuntimeError, match="different numbers of tokens, 11 to 12"):
                model(ids[:, :1], past_key_values=cache)
        _, cache = in_parts(model, ids[:, :12], [12])

    cache.activate_past_recording()
    in_parts(model, wrong, [1, 5], cache)
    cache.crop(-6)
    for layer in window_layers(made, cache):
        assert layer.keys.shape[2] == W - 1
        for tensor in layer.encoding_tensors.values():
            assert tensor.kept.shape[1] == W - 1 + tensor.before
    found, _ = in_parts(model, ids[:, 12:], [5, 1, 6], cache)
    assert_close(found, whole[:, 12:], **close(label))
    cache.crop(0)
    for layer in window_layers(made, cache):
        assert layer.keys.shape[2] == W - 1
        for tensor in layer.encoding_tensors.values():
            assert tensor.kept.shape[1] == W - 1 + tensor.before


@torch.no_grad()
@pytest.mark.parametrize("label", ["fox", "path", "selective_rope", "wall"])
def test_a_pass_that_failed_before_attention_can_be_repeated(windowed, label):
    made = windowed(label)
    model = made.loaded
    ids = random_tokens(2, 24)
    _, cache = in_parts(model, ids[:, :12], [11, 1])

    def fail(module, arguments):
        raise RuntimeError("no memory")

    # The encoding has appended its tensors of these tokens, but attention has not.
    hook = model.model.layers[0].self_attn.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="no memory"):
        model(ids[:, 12:15], past_key_values=cache)
    hook.remove()
    found, _ = in_parts(model, ids[:, 12:], [3, 9], cache)
    assert_close(found, made.built(ids)[:, 12:], **close(label))


@torch.no_grad()
@pytest.mark.parametrize("label", ["fox", "tape", "tape_one", "rope_all", "path"])
def test_a_cache_without_the_configuration_keeps_all_tokens(windowed, label):
    """transformers does not call `activate_past_recording` of layers that do not exist yet."""
    made = windowed(label)
    model = made.loaded
    ids = random_tokens(2, 24)
    whole = made.built(ids)
    _, cache = in_parts(model, ids[:, :20], [13, 1, 6], DynamicCache())
    assert [layer.keys.shape[2] for layer in cache.layers] == [20] * len(cache.layers)
    cache.crop(-9)
    found, _ = in_parts(model, ids[:, 11:], [1, 12], cache)
    assert_close(found, whole[:, 11:], **close(label))

    ids = random_tokens(1, 12)
    options = dict(attention_mask=torch.ones_like(ids), **(GREEDY | {"max_new_tokens": 12}))
    greedy = model.generate(ids, use_cache=False, **options)
    options |= dict(prompt_lookup_num_tokens=3, past_key_values=DynamicCache())
    assert torch.equal(model.generate(ids, **options), greedy)


@torch.no_grad()
@pytest.mark.parametrize("label", ["fox", "tape", "swan", "rope_all"])
def test_an_early_exit_with_a_cache_equals_one_without(windowed, label):
    """Also if all layers before the exit have a window, and the cache was created for all layers,
    as some versions of transformers do.
    """
    model = copy.deepcopy(windowed(label).loaded)
    ids = random_tokens(2, 24)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    for depth in (1, 2):
        cache = DynamicCache(config=model.config)
        model.config.num_hidden_layers = depth
        expected = model(ids, attention_mask=mask, use_cache=False).logits
        logits = [
            model(ids[:, part], attention_mask=mask[:, : part.stop], past_key_values=cache).logits
            for part in (slice(0, 4), slice(4, 11), slice(11, 12), slice(12, 24))
        ]
        assert_close(torch.cat(logits, 1)[:, 3:], expected[:, 3:], **close(label))
        model.config.num_hidden_layers = len(model.model.layers)


@torch.no_grad()
@pytest.mark.parametrize("label", ["fox", "tape_local_theta", "path"])
def test_the_window_of_a_loaded_model_can_be_changed(windowed, label):
    model = copy.deepcopy(windowed(label).loaded)
    ids = random_tokens(2, 24)
    before = model(ids, use_cache=False).logits
    model.config.sliding_window = 9
    expected = model(ids, use_cache=False).logits
    assert not torch.allclose(expected, before)
    for layer in window_layers(windowed(label), model(ids).past_key_values):
        assert layer.keys.shape[2] == 8
    assert_close(in_parts(model, ids, [3, 17, 1, 3])[0], expected, **close(label))


@torch.no_grad()
@pytest.mark.parametrize("settings", [{}, {"sliding_window": 5}])
def test_a_model_with_fewer_layers_can_be_saved(settings, tmp_path):
    """transformers compares the number of layers with `layer_types`."""
    made = make(tmp_path, "alibi", **settings)
    options = {"trust_remote_code": True, "num_hidden_layers": 2}
    model = AutoModelForCausalLM.from_pretrained(made.directory, **options).eval()
    model.save_pretrained(tmp_path / "saved")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", trust_remote_code=True)
    ids = random_tokens()
    assert torch.equal(loaded.eval()(ids).logits, model(ids).logits)


@torch.no_grad()
@pytest.mark.parametrize("label", ["fox", "tape", "tape_one", "tape_all", "path", "swan"])
def test_beam_search_and_assisted_generation_equal_generation_without_a_cache(windowed, label):
    model = windowed(label).loaded
    ids = random_tokens(1, 20)
    options = dict(attention_mask=torch.ones_like(ids), **(GREEDY | {"max_new_tokens": 12}))
    greedy = model.generate(ids, use_cache=False, **options)
    assert torch.equal(model.generate(ids, prompt_lookup_num_tokens=3, **options), greedy)
    draft = copy.deepcopy(model)
    torch.nn.init.normal_(draft.model.layers[0].mlp.down_proj.weight, std=0.02)
    draft.generation_config.num_assistant_tokens = 3
    assert torch.equal(model.generate(ids, assistant_model=draft, **options), greedy)
    beams = model.generate(ids, num_beams=3, use_cache=False, **options)
    assert torch.equal(model.generate(ids, num_beams=3, **options), beams)


@torch.no_grad()
@pytest.mark.parametrize(
    "label", ["rope", "tape", "tape_all", "fox", "path", "wall", "selective_rope"]
)
def test_the_memory_of_a_window_does_not_grow(windowed, label):
    """Counted as storage, since a view keeps the memory of the whole tensor."""
    made = windowed(label)
    W = made.model.sliding_window
    ids = random_tokens(2, 300)
    cache = DynamicCache(config=made.loaded.config)
    for part in ids.split([200] + [1] * 100, 1):
        made.loaded(part, past_key_values=cache)
        for layer in window_layers(made, cache):
            tensors = [(layer.keys, 2), (layer.values, 2)]
            tensors += [(tensor.kept, 1) for tensor in layer.encoding_tensors.values()]
            for tensor, axis_of_tokens in tensors:
                kept = tensor.shape[axis_of_tokens]
                per_token = tensor.numel() // kept * tensor.element_size()
                room = max(32, W // 8)
                assert tensor.untyped_storage().nbytes() <= (W + room) * per_token


@torch.no_grad()
def test_a_window_of_all_tokens_gives_the_bits_of_no_window(windowed):
    for label in ("rope", "tape", "fox"):
        model = copy.deepcopy(windowed(label).loaded)
        ids = random_tokens(2, 20)
        found = {}
        for window in (None, 20, 19):
            model.config.sliding_window = window
            found[window] = model(ids, use_cache=False).logits
        assert torch.equal(found[20], found[None])
        assert not torch.equal(found[19], found[None])


def test_configurations_are_checked(windowed):
    config = windowed("swan").loaded.config
    assert config.layer_types == ["sliding_attention", "full_attention"] * 2
    assert config.sliding_window == 3
    assert [config.window_of(i) for i in range(4)] == [3, None, 3, None]
    assert [config.has_positions(i) for i in range(4)] == [True, False, True, False]
    kind = type(config)
    sizes = {"num_hidden_layers": 2}
    assert kind(**sizes).window_of(1) is None
    assert kind(sliding_window=4, **sizes).window_of(1) == 4
    with pytest.raises(ValueError, match="sliding_window is 0; give at least 1"):
        kind(sliding_window=0, **sizes)
    for types in (["sliding_attention"], ["sliding_attention", "chunked_attention"]):
        with pytest.raises(ValueError, match="layer_types"):
            kind(sliding_window=4, layer_types=types, **sizes)
    with pytest.raises(ValueError, match="sliding_window is None"):
        kind(layer_types=["sliding_attention"] * 2, **sizes)


def test_training_with_padding_and_gradient_checkpointing_equals_training_without(windowed):
    """In a window, queries at padding on the right attend to no token."""
    for label in ("swan", "tape_local_theta", "fox_all"):
        model = copy.deepcopy(windowed(label).loaded).train()
        ids = random_tokens(2, 30)
        mask = torch.ones_like(ids)
        mask[0, 12:] = 0
        labels = ids.masked_fill(mask == 0, -100)
        gradients = []
        for inputs in ({"attention_mask": mask, "labels": labels}, {"labels": labels}):
            for checkpointing in (False, True):
                if checkpointing:
                    model.gradient_checkpointing_enable()
                else:
                    model.gradient_checkpointing_disable()
                model(ids, use_cache=False, **inputs).loss.backward()
                gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
                model.zero_grad()
        for found in gradients[1:]:
            assert (found - gradients[0]).norm() < 1e-5 * gradients[0].norm()


def test_attention_of_servers_is_refused(windowed):
    model = windowed("swan").loaded
    config = copy.deepcopy(model.config)
    config._attn_implementation = "vllm"
    with pytest.raises(NotImplementedError, match="serve a model of the type tape with vLLM"):
        type(model.model)(config)
