"""Rows that need packages of their own or compile for long; see ecosystem.py."""

import os
import re
import subprocess
import sys

import torch
from ecosystem import Subject, equal_logits, equal_tokens, row
from ecosystem_generation import Logits, check_attention
from ecosystem_training import run_trainer, texts


@row(
    "attn_implementation flex_attention, at load and switched to: eager's logits; in two parts over a cache", heavy=True
)
def flex_attention(subject: Subject):
    check_attention(subject, "flex_attention", padded=False)


@row("torch.compile with inductor: equal logits", heavy=True)
def compiled_by_inductor(subject: Subject):
    equal_logits(subject.logits(torch.compile(subject.load(), fullgraph=True), use_cache=False), subject.logits())


@row("transformers_tape installed: loads without trust_remote_code", needs=("transformers_tape",), heavy=True)
def package(subject: Subject):
    torch.save(subject.logits(), subject.work / "expected.pt")
    script = f"""
import sys, torch
{"import transformers_tape" if subject.is_tape else ""}
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
assert type(model) is getattr(transformers, model.config.architectures[0]), type(model)
assert "transformers_modules" not in sys.modules
ids = torch.tensor({subject.ids(24).tolist()})
torch.testing.assert_close(model(ids).logits, torch.load(sys.argv[2]), atol=1e-4, rtol=1e-5)
assert pipeline("text-generation", model=sys.argv[1])("import", max_new_tokens=2)
"""
    run_python(script, subject.directory, subject.work / "expected.pt")


def run_python(script: str, *arguments, module: tuple[str, ...] = (), timeout: int = 300) -> str:
    """Run a script in a new process and return what it prints; raise RuntimeError with its own error."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    command = [sys.executable, *module, *(() if module else ("-c",)), script, *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout)
    if done.returncode:
        messages = re.findall(r"\w+(?:Error|Exception): .*", done.stderr)
        raise RuntimeError(messages[0] if messages else done.stderr[-300:])
    return done.stdout


TENSOR_PARALLEL = """
import sys, torch, torch.distributed as dist
from transformers import AutoModelForCausalLM
torch.set_num_threads(1)
dist.init_process_group("gloo")
expected = torch.load(sys.argv[2])
options = {"trust_remote_code": True} if sys.argv[3] == "trust" else {}
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32, tp_plan="auto", **options).eval()
with torch.no_grad():
    logits = model(expected["ids"]).logits
local = sum((p.to_local() if hasattr(p, "to_local") else p).numel() for p in model.parameters())
assert local < 0.8 * expected["parameters"], f"each process holds {local} of {expected['parameters']} parameters"
logits = logits.full_tensor() if hasattr(logits, "full_tensor") else logits
torch.testing.assert_close(logits, expected["logits"], atol=1e-4, rtol=1e-4)
tokens = model.generate(expected["ids"], attention_mask=torch.ones_like(expected["ids"]), do_sample=False,
    max_new_tokens=expected["tokens"].shape[1], min_new_tokens=expected["tokens"].shape[1], pad_token_id=0)
assert torch.equal(tokens[:, expected["ids"].shape[1]:], expected["tokens"]), tokens
dist.destroy_process_group()
"""


@row("tensor parallelism (tp_plan auto) on two processes: one process's logits and tokens", heavy=True)
def tensor_parallel(subject: Subject):
    expected = {
        "ids": subject.ids(24),
        "logits": subject.logits(),
        "tokens": subject.greedy,
        "parameters": sum(p.numel() for p in subject.model.parameters()),
    }
    torch.save(expected, subject.work / "expected.pt")
    script = subject.work / "tensor_parallel.py"
    script.write_text(TENSOR_PARALLEL)
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    trust = "trust" if subject.trust else "no"
    run_python(str(script), subject.directory, subject.work / "expected.pt", trust, module=launcher)


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
    quantized = [name for name, p in model.named_parameters() if "Int8" in type(p.data).__name__ + type(p).__name__]
    assert len(quantized) >= 6 * model.config.num_hidden_layers, quantized
    found, expected = subject.logits(model), subject.logits()
    assert (found - expected).abs().max() > 0
    assert (found - expected).pow(2).mean().sqrt() < 0.05 * expected.std()
    cached, plain = (subject.generate(subject.ids(24), model, use_cache=cached) for cached in (True, False))
    equal_tokens(cached, plain)


def _trl(subject: Subject, trainer_class, config_class, rows, **options):
    from datasets import Dataset

    subject.tokenizer.padding_side = "right"
    arguments = config_class(
        output_dir=str(subject.work / trainer_class.__name__),
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
    runner = trainer_class(
        model=subject.load(),
        args=arguments,
        train_dataset=Dataset.from_list(rows),
        processing_class=subject.tokenizer,
        **options,
    )
    run_trainer(runner, ".position.")


@row("trl's SFTTrainer: the loss falls, and the positions have moved", needs=("trl", "datasets"), heavy=True)
def sft(subject: Subject):
    from trl import SFTConfig, SFTTrainer

    # Every step sees the same text; the losses of different texts say little about each other.
    _trl(subject, SFTTrainer, SFTConfig, [{"text": texts(subject)[0]}] * 6)


@row(
    "trl's DPOTrainer, ref_model given: the loss falls, and the positions have moved",
    needs=("trl", "datasets"),
    heavy=True,
)
def dpo(subject: Subject):
    from trl import DPOConfig, DPOTrainer

    first, *others = texts(subject)
    rows = [{"prompt": first, "chosen": others[0], "rejected": others[1]}] * 6
    # Without ref_model, trl loads the model a second time, and not with trust_remote_code.
    _trl(subject, DPOTrainer, DPOConfig, rows, ref_model=subject.load())


@row("lm_eval's HFLM: log-likelihoods of the model's own logits", needs=("lm_eval", "accelerate"))
def lm_eval(subject: Subject):
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    harness = HFLM(str(subject.directory), batch_size=2, device="cpu", dtype="float32", **subject.trust)
    context, continuation = "def compare(left, right):\n", "    return left == right"
    requests = [Instance("loglikelihood", {}, (context * repeated, continuation), 0) for repeated in (1, 2, 1)]
    found = harness.loglikelihood(requests, disable_tqdm=True)
    for request, (score, greedy) in zip(requests, found):
        start, rest = harness._encode_pair(*request.args)
        logits = subject.logits(ids=torch.tensor([start + rest]))[0, len(start) - 1 : -1].log_softmax(-1)
        expected = logits.gather(-1, torch.tensor(rest)[:, None]).sum().item()
        assert abs(score - expected) < 1e-3 * abs(expected), (score, expected)
        assert greedy == (logits.argmax(-1).tolist() == rest)
    assert found[0] == found[2]
