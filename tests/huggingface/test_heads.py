"""Classification and question answering: transformers' own heads on the decoder, against Llama's."""

import pytest
import small_models
import torch
import transformers
from transformers import LlamaConfig

from megatron_tape.huggingface.modeling import modeling_tape
from megatron_tape.huggingface.modeling.configuration_tape import TapeConfig

HEADS = ("ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")
SMALL = small_models.SMALL | dict(pad_token_id=0, num_labels=5, attn_implementation="sdpa")


def padded(side):
    """Rows of 4, 9 and 13 tokens, and what shows where they are."""
    rows = torch.randint(1, 64, (3, 13), generator=torch.Generator().manual_seed(3))
    mask = torch.arange(13)[None] < torch.tensor([4, 9, 13])[:, None]
    mask = mask.flip(1) if side == "left" else mask
    return rows * mask, mask


def build(head, family, **changes):
    module, config = (modeling_tape, TapeConfig) if family == "Tape" else (transformers, LlamaConfig)
    return getattr(module, family + head)(config(**SMALL | changes)).eval()


def inputs_of(head, side="right"):
    ids, mask = padded(side)
    labels = {
        "ForSequenceClassification": dict(labels=torch.tensor([0, 4, 2])),
        "ForTokenClassification": dict(labels=torch.where(mask, ids % 5, -100)),
        "ForQuestionAnswering": dict(start_positions=torch.tensor([1, 2, 3]), end_positions=torch.tensor([3, 5, 9])),
    }
    return dict(input_ids=ids, attention_mask=mask.long(), **labels[head])


def outputs_of(output, mask=None):
    """The logits, of tokens that are not padding where there is one for each token."""
    logits = [output.start_logits, output.end_logits] if "start_logits" in output else [output.logits]
    return [part[mask] if mask is not None and part.shape[:2] == mask.shape else part for part in logits]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("head", HEADS)
def test_the_zero_start_equals_llama_in_logits_loss_and_gradients(head, side):
    theirs, ours = build(head, "Llama"), build(head, "Tape")
    # Llama alone calls the decoder of its question answering `transformer`.
    weights = {name.replace("transformer.", "model."): tensor for name, tensor in theirs.state_dict().items()}
    missing, unexpected = ours.load_state_dict(weights, strict=False)
    assert not unexpected and missing and all(".position." in name for name in missing)
    inputs = inputs_of(head, side)
    mask = inputs["attention_mask"].bool()
    expected, found = theirs(**inputs), ours(**inputs)
    for a, b in zip(outputs_of(found, mask), outputs_of(expected, mask), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.loss, expected.loss, rtol=1e-5, atol=1e-5)
    expected.loss.backward()
    found.loss.backward()
    for name, parameter in theirs.named_parameters():
        name = name.replace("transformer.", "model.")
        torch.testing.assert_close(ours.get_parameter(name).grad, parameter.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("head", HEADS)
def test_a_padded_batch_gives_the_logits_of_each_row_alone(head, side):
    model = small_models.randomize(build(head, "Tape")).double()
    ids, mask = padded(side)
    with torch.no_grad():
        together = outputs_of(model(ids, attention_mask=mask.long()))
        for i in range(3):
            for part, alone in zip(together, outputs_of(model(ids[i][mask[i]][None])), strict=True):
                row = part[i] if part.shape[:2] != mask.shape else part[i][mask[i]]
                # Padding on the left shifts all positions, whose phases are rounded to float32.
                torch.testing.assert_close(row, alone[0], rtol=1e-6, atol=1e-6)


def test_a_classifier_has_the_classes_of_its_configuration():
    assert TapeConfig(num_labels=5, classifier_dropout=0.3).classifier_dropout == 0.3
    assert build("ForTokenClassification", "Tape", classifier_dropout=0.3).dropout.p == 0.3
    assert build("ForTokenClassification", "Tape").dropout.p == 0.1
