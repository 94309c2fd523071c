"""Rows that need additional packages or long compilation; see ecosystem.py."""

import torch
from ecosystem import Subject, equal_logits, equal_tokens, row
from ecosystem_generation import Logits
from ecosystem_training import run_trainer


@row(
    "ONNX (torch.onnx.export), run by onnxruntime: equal logits",
    needs=("onnx", "onnxscript", "onnxruntime"),
    heavy=True,
)
def onnx(subject: Subject):
    import onnxruntime

    path = subject.work / "model.onnx"
    length = torch.export.Dim("length", min=2, max=64)
    torch.onnx.export(
        Logits(subject.load()),
        (subject.ids(24),),
        path,
        dynamo=True,
        dynamic_shapes={"ids": {1: length}},
        verbose=False,
    )
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    for count in (24, 33):
        found = torch.from_numpy(session.run(None, {name: subject.ids(count).numpy()})[0])
        equal_logits(found, subject.logits(ids=subject.ids(count)), 1e-4)


@row(
    "int8 weights (torchao): logits within 5% of fp32's spread; cached tokens are those without",
    needs=("torchao",),
    heavy=True,
)
def int8(subject: Subject):
    from torchao.quantization import Int8WeightOnlyConfig
    from transformers import TorchAoConfig

    model = subject.load(quantization_config=TorchAoConfig(Int8WeightOnlyConfig()))
    quantized = [
        name
        for name, p in model.named_parameters()
        if "Int8" in type(p.data).__name__ + type(p).__name__
    ]
    assert len(quantized) >= 6 * model.config.num_hidden_layers, quantized
    found = subject.logits(model)
    expected = subject.logits()
    assert (found - expected).abs().max() > 0
    assert (found - expected).pow(2).mean().sqrt() < 0.05 * expected.std()
    cached, plain = (
        subject.generate(subject.ids(24), model, use_cache=cached) for cached in (True, False)
    )
    equal_tokens(cached, plain)


@row(
    "trl's SFTTrainer: the loss falls, and the positions have moved",
    needs=("trl", "datasets"),
    heavy=True,
)
def sft(subject: Subject):
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    subject.tokenizer.padding_side = "right"
    arguments = SFTConfig(
        output_dir=str(subject.work / "sft"),
        max_steps=3,
        per_device_train_batch_size=2,
        learning_rate=3e-3 if subject.is_small else 1e-4,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        bf16=False,
        disable_tqdm=True,
        save_strategy="no",
        max_length=64,
    )
    # Every step trains on the same text, since losses of different texts are not comparable.
    runner = SFTTrainer(
        model=subject.load(),
        args=arguments,
        train_dataset=Dataset.from_list(
            [{"text": subject.tokenizer.decode(subject.ids(20)[0])}] * 6
        ),
        processing_class=subject.tokenizer,
    )
    run_trainer(runner, ".position.")


@row("lm_eval's HFLM: log-likelihoods of the model's own logits", needs=("lm_eval", "accelerate"))
def lm_eval(subject: Subject):
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    harness = HFLM(
        str(subject.directory), batch_size=2, device="cpu", dtype="float32", **subject.trust
    )
    context = "def compare(left, right):\n"
    continuation = "    return left == right"
    requests = [
        Instance("loglikelihood", {}, (context * repeated, continuation), 0)
        for repeated in (1, 2, 1)
    ]
    found = harness.loglikelihood(requests, disable_tqdm=True)
    for request, (score, greedy) in zip(requests, found):
        start, rest = harness._encode_pair(*request.args)
        logits = subject.logits(ids=torch.tensor([start + rest]))[
            0, len(start) - 1 : -1
        ].log_softmax(-1)
        expected = logits.gather(-1, torch.tensor(rest)[:, None]).sum().item()
        assert abs(score - expected) < 1e-3 * abs(expected), (score, expected)
        assert greedy == (logits.argmax(-1).tolist() == rest)
    assert found[0] == found[2]
