"""The engine transformers of a verification, compared with plain forward passes."""

import gc
import shutil
from contextlib import contextmanager
from itertools import pairwise

import pytest
import torch
from environments import ROOT, run_in
from exported_models import OWN_CLASSES, PLAIN_ROPE, make
from models import YARN
from safetensors.torch import load_file
from torch.testing import assert_close
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, Phi3Config, Phi3ForCausalLM

from megatron_tape.command_line import Progress
from megatron_tape.errors import FileError
from megatron_tape.huggingface.verification.sequences import (
    Sequence,
    before_gaps,
    chunks,
    default_positions,
    every_token,
    groups_of_tokens,
)
from megatron_tape.huggingface.verification.transformers_engine import TransformersEngine

LENGTH = 32
"""Trained length. Sequences are four times as long."""
POSITIONS = default_positions(LENGTH)
WINDOW = 5
MIXED = {"sliding_window": WINDOW, "full_attention_every": 2, "num_layers": 4}
LLAMA3 = dict(rope_scaling_type="llama3", rope_scaling_factor=8.0, rope_original_seq_length=32)
LINEAR = dict(rope_scaling_type="linear", rope_scaling_factor=2.0)
SWAN = MIXED | {"layers_without_positions": 2}
TEMPERATURE = {"temperature_scale": 0.5, "temperature_floor_scale": 3}
EXPORTS = {
    "llama": (PLAIN_ROPE, {}),
    "llama_linear": (PLAIN_ROPE, LINEAR),
    "llama_yarn": (PLAIN_ROPE, YARN),
    "mistral": (PLAIN_ROPE, {"sliding_window": WINDOW, **LLAMA3}),
    "qwen2": (PLAIN_ROPE, {"qkv_bias": True}),
    "qwen2_windows": (PLAIN_ROPE, {"qkv_bias": True, **MIXED}),
    "qwen3": (PLAIN_ROPE, {"qk_norm": True, **YARN}),
    "qwen3_windows": (PLAIN_ROPE, {"qk_norm": True, **MIXED}),
    "smollm3": (PLAIN_ROPE, {"layers_without_positions": 2}),
    "smollm3_windows": (PLAIN_ROPE, SWAN | LLAMA3),
    "tape": (OWN_CLASSES, {}),
    "tape_yarn": (OWN_CLASSES, YARN),
    "encoded_rope": ("rope", {}),
    "encoded_rope_windows": ("rope", SWAN | TEMPERATURE),
    "encoded_tape": ("tape", {}),
    "encoded_tape_windows": ("tape", MIXED | YARN),
}
"""By model type and, after an underscore, what is special."""
SIZES = dict(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=LENGTH,
    initializer_range=0.2,
    pad_token_id=0,
)
WITH_GAPS = (*EXPORTS, "llama_biases", "phi3", "phi3_window")
WITHOUT_GAPS = (
    "alibi",
    "sincos",
    "fire",
    "cope",
    "path_fox",
    "selective_rope_fox",
    "wall",
    "rope_learned",
    "tape_learned",
)
"""Encodings that need all tokens up to a position."""
GROUPS = groups_of_tokens(POSITIONS, SIZES["vocab_size"])
DENSE = every_token(POSITIONS, SIZES["vocab_size"])
CLOSE = dict(atol=1e-5, rtol=1e-5)


def other(name):
    """Return a random model of transformers that this project cannot export."""
    torch.manual_seed(0)
    if name == "llama_biases":
        model = LlamaForCausalLM(LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True))
        biases = [weight for key, weight in model.named_parameters() if key.endswith("bias")]
        assert len(biases) == 7 * SIZES["num_hidden_layers"]
        for bias in biases:
            torch.nn.init.normal_(bias)
        return model
    changes = {"partial_rotary_factor": 0.5}
    if name == "phi3_window":
        changes = {"sliding_window": WINDOW}
    return Phi3ForCausalLM(Phi3Config(**SIZES, **changes))


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    """Return the directory of a model, made once."""
    folder = tmp_path_factory.mktemp("engine")

    def of(name):
        directory = folder / name
        if directory.exists():
            return directory
        if name in EXPORTS or name in (*WITHOUT_GAPS, "randpe"):
            encoding, changes = EXPORTS.get(name, (name, {}))
            make(folder, encoding, label=name, seq_length=LENGTH, **changes)
        else:
            other(name).save_pretrained(directory)
        return directory

    return of


@pytest.fixture(scope="module")
def engines(directories):
    """Return the engine with a model, loaded once."""
    loaded = {}

    def of(name):
        if name not in loaded:
            trust = name.startswith(("tape", "encoded")) or name in (*WITHOUT_GAPS, "randpe")
            loaded[name] = TransformersEngine.load(
                directories(name), torch.float64, trust_remote_code=trust
            )
        return loaded[name]

    return of


@torch.no_grad()
def plain_pass(model, sequence, mask=None):
    """Return the logits and all hidden states of the compared tokens, the last ones normed, from a
    pass with eager attention.
    """
    if mask is None:
        mask = torch.ones_like(sequence.ids)
    model.set_attn_implementation("eager")
    output = model(
        sequence.ids[None],
        attention_mask=mask[None],
        position_ids=sequence.positions[None],
        use_cache=False,
        output_hidden_states=True,
    )
    model.set_attn_implementation("sdpa")
    compared = list(sequence.compared)
    states = torch.stack(output.hidden_states)[1:, 0, compared]
    return output.logits[0, compared], states


def check(model, outputs, logits, states):
    """Check outputs against those of `plain_pass`."""
    assert_close(outputs.logits, logits, **CLOSE)
    assert_close(outputs.hidden_states[:-1], states[:-1], **CLOSE)
    assert_close(model.base_model.norm(outputs.hidden_states[-1]), states[-1], **CLOSE)


@torch.no_grad()
@pytest.mark.parametrize("name", (*WITH_GAPS, *WITHOUT_GAPS))
def test_all_ways_of_reading_agree_with_a_plain_pass(engines, name):
    engine = engines(name)
    if name in EXPORTS and not name.startswith("encoded"):
        assert engine.model.config.model_type == name.partition("_")[0]
    sequences = [DENSE]
    if name in WITH_GAPS:
        sequences.append(GROUPS)
    for sequence in sequences:
        expected = plain_pass(engine.model, sequence)
        for way in (engine.one_pass, engine.in_chunks, engine.left_padded):
            check(engine.model, way(sequence), *expected)


@torch.no_grad()
@pytest.mark.parametrize(
    "name", [name for name in WITH_GAPS if "window" not in name and name != "mistral"]
)
def test_a_gap_is_the_same_as_masked_tokens(engines, name):
    """Without windows, which count tokens, groups equal a long sequence whose other tokens are
    masked. In particular, a gap does not begin another document.
    """
    engine = engines(name)
    mask = torch.zeros_like(DENSE.ids)
    mask[GROUPS.positions] = 1
    ids = torch.zeros_like(DENSE.ids)
    ids[GROUPS.positions] = GROUPS.ids
    with_others = Sequence(ids, DENSE.positions, DENSE.compared)
    expected = plain_pass(engine.model, with_others, mask)
    check(engine.model, engine.one_pass(GROUPS), *expected)


@pytest.mark.parametrize("name", ("mistral", "smollm3_windows", "encoded_tape_windows"))
def test_chunks_drop_keys_outside_of_windows(engines, name, monkeypatch):
    created = []
    initialize = DynamicCache.__init__

    def record(self, *args, **kwargs):
        created.append(self)
        initialize(self, *args, **kwargs)

    monkeypatch.setattr(DynamicCache, "__init__", record)
    engine = engines(name)
    outputs = engine.in_chunks(DENSE)

    (cache,) = created
    kept = [layer.keys.shape[-2] for layer in cache.layers]
    S = len(DENSE.ids)
    if name == "mistral":
        assert kept == [WINDOW - 1] * 3
    else:
        assert kept == [WINDOW - 1, S, WINDOW - 1, S]
    assert_close(outputs.logits, engine.one_pass(DENSE).logits, **CLOSE)


@pytest.mark.parametrize("name", ("llama", "qwen3_windows", "tape"))
def test_wrong_positions_with_a_cache_show(engines, name, monkeypatch):
    engine = engines(name)
    right = engine.in_chunks(DENSE).logits
    length = DynamicCache.get_seq_length

    # New tokens get the position of the token before them.
    monkeypatch.setattr(
        DynamicCache,
        "get_seq_length",
        lambda self, *args, **kwargs: max(length(self, *args, **kwargs) - 1, 0),
    )
    wrong = engine.in_chunks(DENSE).logits
    assert_close(engine.one_pass(DENSE).logits, right, **CLOSE)
    assert_close(wrong[0], right[0])
    assert all((wrong[1:] - right[1:]).abs().amax(-1) > 1e-3)


@contextmanager
def forward_inputs(model, change=None):
    """Yield a list that collects the inputs of the model's passes, after `change` of them."""
    passed = []

    def before(module, args, inputs):
        assert not args
        if change is not None:
            inputs = inputs | change(inputs)
        passed.append(inputs)
        return args, inputs

    handle = model.register_forward_pre_hook(before, with_kwargs=True)
    yield passed
    handle.remove()


def test_padding_that_is_attended_shows(engines):
    engine = engines("llama")
    right = engine.left_padded(GROUPS).logits

    def attend_to_all(inputs):
        return {"attention_mask": torch.ones_like(inputs["input_ids"])}

    with forward_inputs(engine.model, attend_to_all):
        wrong = engine.left_padded(GROUPS).logits
    assert all((wrong - right).abs().amax(-1) > 1e-3)


def test_positions_are_passed_only_if_they_have_gaps(engines):
    engine = engines("llama")
    S = len(GROUPS.ids)
    with forward_inputs(engine.model) as passed:
        engine.one_pass(GROUPS)
        engine.in_chunks(GROUPS)
        engine.left_padded(GROUPS)
    whole, *parts, padded = passed
    assert whole["position_ids"].tolist() == [GROUPS.positions.tolist()]
    assert whole["attention_mask"].tolist() == [[1] * S]
    assert chunks(GROUPS)[1].stop <= before_gaps(GROUPS)
    for part, inputs in zip(chunks(GROUPS), parts, strict=True):
        if part.stop <= before_gaps(GROUPS):
            assert not {"position_ids", "attention_mask"} & inputs.keys()
            continue
        assert inputs["position_ids"].tolist() == [GROUPS.positions[part].tolist()]
        assert inputs["attention_mask"].tolist() == [[1] * part.stop]
    assert padded["position_ids"][0].tolist() == [0] * 7 + GROUPS.positions.tolist()
    assert padded["position_ids"][1].tolist() == list(range(S + 7))
    assert padded["attention_mask"].tolist() == [[0] * 7 + [1] * S, [1] * (S + 7)]

    with forward_inputs(engine.model) as passed:
        engine.one_pass(DENSE)
        engine.in_chunks(DENSE)
        engine.left_padded(DENSE)
    *without_mask, padded = passed
    assert not any("attention_mask" in inputs for inputs in without_mask)
    assert not any("position_ids" in inputs for inputs in passed)
    assert padded["attention_mask"].sum(-1).tolist() == [129, 136]


@pytest.mark.parametrize("name", (*WITH_GAPS, *WITHOUT_GAPS))
def test_the_outputs_of_a_layer_are_the_inputs_of_the_next(engines, name):
    engine = engines(name)
    sequence = GROUPS if name in WITH_GAPS else DENSE
    compared = list(sequence.compared)
    calls = []

    def compare(index, inputs, outputs):
        # The states of later layers are not computed yet.
        assert index == len(calls)
        calls.append((inputs, outputs))

    found = engine.layer_by_layer(sequence, compare)
    expected = engine.one_pass(sequence)
    assert torch.equal(found.logits, expected.logits)
    assert torch.equal(found.hidden_states, expected.hidden_states)
    embedded = engine.model.base_model.embed_tokens(sequence.ids)
    if name != "sincos":  # it adds positions to the embeddings
        assert torch.equal(calls[0][0].hidden_states, embedded)
    for (_, outputs), (inputs, _) in pairwise(calls):
        assert inputs.hidden_states.shape == embedded.shape
        assert torch.equal(inputs.hidden_states[compared], outputs.hidden_states)
        if inputs.position_state is not None:
            assert len(inputs.position_state) == len(sequence.ids)
            assert torch.equal(inputs.position_state[compared], outputs.position_state)
    for (_, outputs), recorded in zip(calls, found.hidden_states, strict=True):
        assert torch.equal(outputs.hidden_states, recorded)

    has_states = calls[1][0].position_state is not None
    assert has_states == name.startswith(
        ("tape", "encoded", "fire", "path", "rope", "selective_rope")
    )


def test_position_states_are_those_of_tape(engines):
    """Both formats of a TAPE model have the same states, since their weights are the same."""
    states = {}
    for name in ("tape", "encoded_tape"):
        states[name] = entering = []

        def compare(index, inputs, outputs, entering=entering):
            entering.append(inputs.position_state)

        engines(name).layer_by_layer(GROUPS, compare)
    for own, encoded in zip(states["tape"], states["encoded_tape"], strict=True):
        assert own.shape == (len(GROUPS.ids), 2, 8)
        assert_close(encoded.expand_as(own), own, **CLOSE)
    changes = [(after - before).abs().max() for before, after in pairwise(states["tape"])]
    assert all(change > 1e-2 for change in changes)


def test_layers_are_compared_during_the_pass(engines):
    engine = engines("llama")
    events = []
    handles = [
        layer.register_forward_pre_hook(lambda *_, i=i: events.append(("enters", i)))
        for i, layer in enumerate(engine.model.base_model.layers)
    ]
    engine.layer_by_layer(GROUPS, lambda index, *_: events.append(("compared", index)))
    for handle in handles:
        handle.remove()
    assert events == [(event, i) for i in range(3) for event in ("enters", "compared")]


def test_only_the_states_of_one_layer_are_in_memory(tmp_path):
    changes = dict(hidden_size=128, intermediate_size=320, num_hidden_layers=12)
    LlamaForCausalLM(LlamaConfig(**SIZES | changes)).save_pretrained(tmp_path)
    engine = TransformersEngine.load(tmp_path, torch.float32)
    assert engine.model.num_parameters() > 2e6
    sequence = every_token([2047], SIZES["vocab_size"])

    def live_states(kept):
        """Return the number of tensors of all tokens' states after each layer."""
        numbers = []

        def compare(index, inputs, outputs):
            if kept is not None:
                kept.append(inputs.hidden_states)
            tensors = [x for x in gc.get_objects() if type(x) is torch.Tensor]
            states = {x.untyped_storage().data_ptr() for x in tensors if is_state(x)}
            numbers.append(len(states))

        def is_state(x):
            return x.untyped_storage().nbytes() == 4 * 2048 * 128

        engine.layer_by_layer(sequence, compare)
        return numbers

    # The embeddings, the layer's inputs and its outputs.
    assert live_states(kept=None) == [2] + 11 * [3]
    assert live_states(kept=[]) == [2, *range(3, 14)]


def test_logits_are_computed_only_for_compared_tokens(engines):
    engine = engines("llama")
    tokens = []
    handle = engine.model.lm_head.register_forward_hook(
        lambda head, args, output: tokens.append(args[0].shape[1])
    )
    for way in (engine.one_pass, engine.in_chunks, engine.left_padded):
        tokens.clear()
        way(DENSE)
        assert sum(tokens) == len(POSITIONS)
    handle.remove()


def test_nothing_is_left_in_the_model_after_an_error(engines):
    engine = engines("tape")
    weights = {name: value.clone() for name, value in engine.model.state_dict().items()}

    def fails(index, inputs, outputs):
        if index == 1:
            raise KeyError("during the pass")

    with pytest.raises(KeyError, match="during the pass"):
        engine.layer_by_layer(GROUPS, fails)
    for way in (engine.one_pass, engine.in_chunks, engine.left_padded):
        way(GROUPS)
    for module in engine.model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
    assert not engine.model.training
    for name, value in engine.model.state_dict().items():
        assert torch.equal(value, weights[name])
    assert torch.is_grad_enabled()


def test_an_encoding_without_a_cache_is_an_error(engines):
    with pytest.raises(NotImplementedError, match="randpe cannot use a cache"):
        engines("randpe").in_chunks(DENSE)


def test_outputs_have_the_dtype_of_the_model(directories):
    engine = TransformersEngine.load(directories("tape"), torch.bfloat16, trust_remote_code=True)
    outputs = engine.in_chunks(GROUPS)
    assert outputs.logits.dtype == outputs.hidden_states.dtype == torch.bfloat16
    assert outputs.logits.shape == (len(POSITIONS), SIZES["vocab_size"])
    assert outputs.hidden_states.shape == (3, len(POSITIONS), SIZES["hidden_size"])


@pytest.mark.parametrize("way", ("one_pass", "in_chunks", "left_padded"))
def test_progress_ends_at_its_total(engines, way, monkeypatch):
    updates = []
    monkeypatch.setattr(
        Progress,
        "update",
        lambda self, done, message: updates.append((done, self._total, message(0.0))),
    )
    getattr(engines("llama"), way)(DENSE)
    tokens = 136 if way == "left_padded" else 129
    done = [update[0] for update in updates]
    assert done == sorted(set(done))
    assert updates[-1] == (
        3 * tokens,
        3 * tokens,
        f"transformers reads {tokens} of {tokens} tokens: layer 3 of 3",
    )


def test_a_model_that_cannot_be_loaded_is_one_sentence(directories, tmp_path):
    with pytest.raises(FileError, match=f"{tmp_path} cannot be loaded: ") as caught:
        TransformersEngine.load(tmp_path, torch.float32)
    assert "\n" not in str(caught.value)
    # The code of an export runs only on request.
    with pytest.raises(FileError, match="contains custom code"):
        TransformersEngine.load(directories("encoded_tape"), torch.float32)

    pickled = tmp_path / "pickled"
    shutil.copytree(directories("llama"), pickled)
    torch.save(load_file(pickled / "model.safetensors"), pickled / "pytorch_model.bin")
    (pickled / "model.safetensors").unlink()
    with pytest.raises(FileError, match="safetensors"):
        TransformersEngine.load(pickled, torch.float32)


SCRIPT = """
import sys
from pathlib import Path

import torch
import transformers
from megatron_tape.huggingface.verification.sequences import Sequence
from megatron_tape.huggingface.verification.transformers_engine import TransformersEngine

assert transformers.__version__ == "5.0.0"
torch.set_num_threads(1)
found = {}
for name, directory, *sequences in torch.load("models.pt"):
    engine = TransformersEngine.load(
        Path(directory), torch.float64, trust_remote_code=True
    )
    for i, fields in enumerate(sequences):
        sequence = Sequence(*fields)
        states = []
        compare = lambda index, inputs, outputs: states.append(inputs.hidden_states)
        outputs = [
            engine.one_pass(sequence),
            engine.in_chunks(sequence),
            engine.left_padded(sequence),
            engine.layer_by_layer(sequence, compare),
        ]
        found[name, i] = [(x.logits, x.hidden_states) for x in outputs], torch.stack(states)
torch.save(found, "found.pt")
"""


def test_the_oldest_transformers_computes_the_same(engines, directories, tmp_path):
    """The engine needs only torch and transformers there; megatron_tape is read from this
    repository, without its dependencies.
    """
    names = (*WITH_GAPS, *WITHOUT_GAPS)
    fields = [(x.ids, x.positions, x.compared) for x in (DENSE, GROUPS)]
    models = []
    for name in names:
        sequences = fields if name in WITH_GAPS else fields[:1]
        models.append((name, str(directories(name)), *sequences))
    torch.save(models, tmp_path / "models.pt")
    done = run_in("transformers", tmp_path, "-c", SCRIPT, PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.stderr[-3000:]

    found = torch.load(tmp_path / "found.pt")
    for name, _, *sequences in models:
        for i, sequence in enumerate((DENSE, GROUPS)[: len(sequences)]):
            expected = engines(name).one_pass(sequence)
            outputs, entering = found[name, i]
            for logits, hidden_states in outputs:
                assert_close(logits, expected.logits, **CLOSE)
                assert_close(hidden_states, expected.hidden_states, **CLOSE)
            at_compared = entering[1:, list(sequence.compared)]
            assert_close(at_compared, expected.hidden_states[:-1], **CLOSE)
