"""Sources of samples other than indexed datasets: the tokens that enter the loss."""

import dataclasses

import pytest
import torch
from configurations import make
from models import build, small_model

from megatron_tape.data.batches import build_batches
from megatron_tape.data.samples import sample_source
from megatron_tape.parallel.layout import initialize_distributed
from megatron_tape.synthetic import Addition, sample_random


def settings(**changes):
    data = {
        "data__prefix": None,
        "data__tokenizer": None,
        "data__generator": {"task": "addition", "digits": 4},
    }
    train = {"train__global_batch_size": 8, "train__eval_interval": 1, "train__eval_steps": 2}
    return make(small_model(), **data | train | changes)


def test_samples_are_those_of_the_generator_and_validation_has_others():
    config = settings()
    source = sample_source(config, validation=False)
    tokens, answers = Addition(digits=4).sequence(sample_random(config.train.seed, 0, 5))
    sample = source[5]
    assert sample["tokens"][: len(tokens)].tolist() == tokens.tolist()
    assert sample["labels"][sample["loss_mask"]].tolist() == tokens[answers].tolist()
    everything = sample_source(settings(data__loss_on="all"), validation=False)[5]
    assert everything["labels"][everything["loss_mask"]].tolist() == tokens[1:].tolist()
    assert sample_source(config, validation=True)[5]["tokens"].tolist() != sample["tokens"].tolist()


def test_the_loss_is_the_mean_over_the_tokens_in_the_masks_of_the_global_batch():
    model, layout = build(small_model())
    built = build_batches(settings(), layout)
    source = sample_source(settings(), validation=False)
    loader = dataclasses.replace(built, samples=range(8, 24)).training()  # from the second step on
    losses = []
    tokens = []
    for _ in range(4):
        batch = next(loader)
        tokens += batch["tokens"].tolist()
        losses.append(model(**batch))
    samples = [source[i] for i in range(8, 16)]
    assert tokens == [sample["tokens"].tolist() for sample in samples]
    together = {key: torch.stack([sample[key] for sample in samples]) for key in samples[0]}
    assert len(set(together["loss_mask"].sum(1).tolist())) > 1
    logits = model(together["tokens"])
    expected = torch.nn.functional.cross_entropy(
        logits[together["loss_mask"]], together["labels"][together["loss_mask"]]
    )
    torch.testing.assert_close(torch.stack(losses).mean(), expected)


def test_validation_is_the_mean_over_all_its_tokens_and_the_same_every_time():
    batches = build_batches(settings(), initialize_distributed(1))
    first, again = ([batch["loss_weights"] for batch in batches.evaluation()] for _ in range(2))
    assert len(first) == 8
    assert all(map(torch.equal, first, again))
    weights = torch.cat(first)
    assert weights.sum() / len(first) == pytest.approx(1)
    assert len(weights[weights > 0].unique()) == 1
