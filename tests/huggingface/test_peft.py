"""Adapters of exported and imported models with peft: TAPE's matrices are found, trained, saved,
loaded and merged.
"""

import logging

import pytest
import small_models
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from small_models import tokens
from torch import nn
from torch.nn.utils import parametrize
from transformers import LlamaConfig, LlamaForCausalLM

from megatron_tape.huggingface.modeling.configuration_tape import TapeConfig
from megatron_tape.huggingface.modeling.modeling_tape import TapeForCausalLM
from megatron_tape.huggingface.modeling.position_tape import effective_weight

SMALL = small_models.SMALL | dict(position_mlp_size=6)
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
# DoRA divides by the norm of each row, so zero matrices must be trained fully.
RECIPES = {
    "all-linear": dict(target_modules="all-linear"),
    "dora_saved": dict(target_modules="all-linear", use_dora=True, modules_to_save=["position"]),
    "saved": dict(target_modules=ATTENTION, modules_to_save=["position"]),
}


def zero_start():
    """An imported model, which still equals Llama, as TAPE's matrices are zero."""
    theirs = LlamaForCausalLM(LlamaConfig(**small_models.SMALL)).eval()
    model = TapeForCausalLM(TapeConfig(**SMALL)).eval()
    model.load_state_dict(theirs.state_dict(), strict=False)
    return model


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """Save models with TAPE's matrices at zero, and far from zero."""
    folder = tmp_path_factory.mktemp("bases")
    torch.manual_seed(1)
    model = zero_start()
    model.save_pretrained(folder / "imported")
    small_models.randomize(model).save_pretrained(folder / "trained")
    return folder


def train(model, steps=3):
    model.train()
    chosen = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(chosen, lr=2e-2)
    for _ in range(steps):
        loss = model(input_ids=tokens(), labels=tokens()).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


def logits(model):
    with torch.no_grad():
        return model(input_ids=tokens()).logits


@pytest.mark.parametrize("start", ["imported", "trained"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_an_adapter_trains_positions_and_is_saved_loaded_and_merged(bases, recipe, start, tmp_path):
    base = TapeForCausalLM.from_pretrained(bases / start)
    before = {
        name: matrix.clone() for name, matrix in base.state_dict().items() if ".position." in name
    }
    untuned = logits(base)
    model = train(
        get_peft_model(
            base,
            LoraConfig(r=4, task_type="CAUSAL_LM", **RECIPES[recipe]),
        )
    )
    tuned = logits(model)
    assert (tuned - untuned).abs().max() > 0.1

    model.save_pretrained(tmp_path / "adapter")
    loaded = PeftModel.from_pretrained(
        TapeForCausalLM.from_pretrained(bases / start), tmp_path / "adapter"
    ).eval()
    assert torch.equal(logits(loaded), tuned)
    # One token at a time, through the cache, with the adapter in place.
    options = dict(max_new_tokens=8, do_sample=False, pad_token_id=0)
    generated = loaded.double().generate(tokens(), **options)
    assert torch.equal(generated, loaded.generate(tokens(), use_cache=False, **options))

    merged = loaded.float().merge_and_unload()
    torch.testing.assert_close(logits(merged), tuned, rtol=1e-4, atol=1e-4)
    merged.save_pretrained(tmp_path / "merged")
    again = TapeForCausalLM.from_pretrained(tmp_path / "merged")
    assert torch.equal(logits(again), logits(merged))
    for name, matrix in again.state_dict().items():
        if name in before:
            assert (matrix - before[name]).abs().max() > 1e-3, f"{name} did not move"


@pytest.mark.parametrize(
    "changes, warns",
    [({}, 1), ({"modules_to_save": ["position"]}, 0)],
)
def test_training_with_positions_frozen_at_zero_warns_once(changes, warns, caplog):
    adapter = LoraConfig(r=4, task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"], **changes)
    with caplog.at_level(logging.WARNING):
        train(get_peft_model(zero_start(), adapter))
    assert caplog.text.count('modules_to_save=["position"]') == warns


class Doubled(nn.Module):
    def forward(self, weight):
        return 2 * weight


def hook(linear):
    linear.register_forward_hook(lambda _module, _inputs, output: 2 * output)


def parametrize_weight(linear):
    parametrize.register_parametrization(linear, "weight", Doubled())


@pytest.mark.parametrize("change", [hook, parametrize_weight])
def test_the_matrix_of_a_module_is_its_effective_weight(change):
    linear = nn.Linear(5, 3, bias=False)
    assert effective_weight(linear, 5, torch.ones(1)) is linear.weight
    expected = 2 * linear.weight.detach()
    change(linear)
    assert torch.equal(effective_weight(linear, 5, torch.ones(1)), expected)
