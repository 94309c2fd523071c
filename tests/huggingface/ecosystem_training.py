"""Rows of training, adapters, heads and placement; see ecosystem.py."""

import torch
from ecosystem import Subject, equal_logits, equal_tokens, row
from transformers import AutoModelForSequenceClassification

STEPS = 3


def train(model, ids: torch.Tensor, steps: int = STEPS, lr: float = 1e-2) -> list[float]:
    """Take AdamW steps on the trainable parameters, and return the losses before each step and at
    the end.
    """
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=lr, weight_decay=0.0
    )
    losses = []
    for _ in range(steps):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    with torch.no_grad():
        return [*losses, model(input_ids=ids, labels=ids).loss.item()]


@row("gradient checkpointing: the gradients without it")
def gradient_checkpointing(subject: Subject):
    gradients = []
    for checkpointed in (False, True):
        model = subject.load().train()
        if checkpointed:
            model.gradient_checkpointing_enable()
        model(subject.ids(24), labels=subject.ids(24), use_cache=False).loss.backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    assert all(gradient is not None for gradient in gradients[0].values())
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient)


def run_trainer(runner, moving: str = "") -> None:
    """Train; AssertionError unless the loss falls and all parameters with `moving` in their names
    have changed.
    """
    before = {
        name: p.detach().clone() for name, p in runner.model.named_parameters() if moving in name
    }
    runner.train()
    losses = [entry["loss"] for entry in runner.state.log_history if "loss" in entry]
    assert len(losses) == runner.args.max_steps and losses[-1] < losses[0], (
        f"the loss does not fall: {losses}"
    )
    still = [
        name
        for name, p in runner.model.named_parameters()
        if moving in name and torch.equal(p, before[name])
    ]
    assert not still, f"training did not move {', '.join(still)}"


@row(
    "Trainer, gradient checkpointing on: the loss falls, and every parameter has moved",
    needs=("accelerate",),
)
def trainer(subject: Subject):
    from transformers import Trainer, TrainingArguments

    rows = [{"input_ids": subject.ids(24)[0], "labels": subject.ids(24)[0]}] * 8
    arguments = TrainingArguments(
        output_dir=str(subject.work / "trainer"),
        max_steps=4,
        per_device_train_batch_size=2,
        gradient_checkpointing=True,
        learning_rate=5e-3 if subject.is_small else 1e-4,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        save_strategy="no",
        weight_decay=0.0,
    )
    run_trainer(Trainer(model=subject.load(), args=arguments, train_dataset=rows))


@row(
    "peft, LoRA on all-linear, positions whole: save, load and merge give equal logits",
    needs=("peft",),
)
def lora_and_positions(subject: Subject):
    from peft import LoraConfig, PeftModel, get_peft_model

    if hasattr(subject.model.model.layers[0], "position"):
        settings = {"modules_to_save": ["position"]}
    else:
        settings = {}
    config = LoraConfig(r=4, task_type="CAUSAL_LM", target_modules="all-linear", **settings)
    model = get_peft_model(subject.load(), config).train()
    losses = train(model, subject.ids(24), lr=1e-2 if subject.is_small else 2e-4)
    assert losses[-1] < losses[0], f"the loss does not fall: {losses}"
    expected = subject.logits(model.eval())
    model.save_pretrained(subject.work / "adapter")
    again = PeftModel.from_pretrained(subject.load(), str(subject.work / "adapter")).eval()
    equal_logits(subject.logits(again), expected)
    merged = again.merge_and_unload()
    equal_logits(subject.logits(merged), expected)
    before = dict(subject.model.named_parameters())
    still = [
        key
        for key, p in merged.named_parameters()
        if ".position." in key and torch.equal(p, before[key])
    ]
    assert not still, f"training did not move {', '.join(still)}"


@row("AutoModelForSequenceClassification, padded: trains, saves, and gives each text's own score")
def sequence_classification(subject: Subject):
    model = subject.load(
        AutoModelForSequenceClassification,
        num_labels=3,
        pad_token_id=subject.tokenizer.pad_token_id,
    )
    torch.nn.init.normal_(
        model.score.weight
    )  # as large as those of a trained head, so that the base's output matters
    prompts = [subject.ids(24), subject.ids(9, 30)]
    inputs = subject.tokenizer.pad(
        {"input_ids": [ids[0].tolist() for ids in prompts]}, return_tensors="pt"
    )
    loss = model(**inputs, labels=torch.tensor([0, 2])).loss
    loss.backward()
    assert loss.isfinite()
    assert model.score.weight.grad.abs().max() > 0
    with torch.no_grad():
        states = [subject.model.model(ids).last_hidden_state[:, -1] for ids in prompts]
        expected = model.score(torch.cat(states))
    model.save_pretrained(subject.work / "classifier")
    for each in (
        model,
        subject.load(AutoModelForSequenceClassification, directory=subject.work / "classifier"),
    ):
        equal_logits(
            subject.logits(each, inputs["input_ids"], attention_mask=inputs["attention_mask"]),
            expected,
        )


@row("resize_token_embeddings: the old tokens keep their logits")
def resize_embeddings(subject: Subject):
    model, rows = subject.load(), subject.model.config.vocab_size
    model.resize_token_embeddings(rows + 8, mean_resizing=False)
    found = subject.logits(model)
    assert found.shape[-1] == rows + 8
    equal_logits(found[..., :rows], subject.logits())


@row("device_map: layers offloaded to disk give equal logits and tokens", needs=("accelerate",))
def offloaded_weights(subject: Subject):
    places = {
        f"model.{name}": "cpu"
        for name, _ in subject.model.model.named_children()
        if name != "layers"
    }
    layers = len(subject.model.model.layers)
    places |= {
        f"model.layers.{index}": "cpu" if index == 0 else "disk" for index in range(layers)
    } | {"lm_head": "cpu"}
    model = subject.load(device_map=places, offload_folder=str(subject.work / "offloaded"))
    assert next(model.model.layers[-1].parameters()).device.type == "meta"
    equal_logits(subject.logits(model), subject.logits())
    equal_tokens(subject.generate(subject.ids(24), model), subject.greedy)
