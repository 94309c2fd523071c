"""Tests of LoRA layers in one process; parallel/test_two_processes.py compares two processes with
one.
"""

import pytest
import torch
from models import build, load_whole, random_tokens, small_model, whole_weights

from megatron_tape.config.schema import ExtensionConfig
from megatron_tape.model.names import kind_of

LORA = ExtensionConfig(trains=["lora"], lora_rank=3, lora_alpha=7.5)
VARIANTS = {
    "grouped": ({}, {}),
    "biased": ({"qkv_bias": True, "qk_norm": True, "num_query_groups": 4}, {}),
    "rope": ({"position_encoding": "rope", "kv_channels": 12}, {}),
    "k_and_o": ({}, {"lora_targets": ["o", "k"]}),
    "only_o": ({}, {"lora_targets": ["o"]}),
}


def lora(**changes):
    return ExtensionConfig(**(vars(LORA) | changes))


def named(built, kind):
    return {
        name: parameter for name, parameter in built.named_parameters() if kind_of(name) == kind
    }


@pytest.mark.parametrize("variant", VARIANTS)
def test_lora_equals_the_merged_matrix(variant):
    model = small_model(**VARIANTS[variant][0])
    extension = lora(**VARIANTS[variant][1])
    built, _ = build(model, lora=extension)
    weights = whole_weights(built, model)
    factors = {name: weights.pop(name) for name in list(weights) if "lora_" in name}
    assert len(factors) == 2 * len(extension.lora_targets) * model.num_layers
    for name in factors:
        if name.endswith("lora_A.weight"):
            product = factors[name.replace("lora_A", "lora_B")] @ factors[name]
            matrix = name.replace("lora_A.weight", "weight")
            weights[matrix] = weights[matrix] + extension.lora_alpha / extension.lora_rank * product
    merged, layout = build(model)
    load_whole(merged, weights, model, layout)
    ids = random_tokens()
    with torch.no_grad():
        before = build(model)[0](ids)
        expected = merged(ids)
        logits = built(ids)
    assert (expected - before).abs().max() > 0.05
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)


def test_new_lora_layers_change_no_logit():
    plain, built = (build(small_model(), randomize=False, lora=lora)[0] for lora in (None, LORA))
    assert torch.equal(plain(random_tokens()), built(random_tokens()))
