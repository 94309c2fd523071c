"""Small training runs of TAPE and RoPE, on a GPU and, for comparison, on the CPU; see
test_training_on_gpu.py.

    python tests/gpu/training_runs.py FOLDER NAME...        computes the named results on the CPU

The results are files in FOLDER, for which the process of the tests waits. It trains on the GPU with
the fused kernels or, without a GPU, on the CPU, where Triton interprets them.
"""

import contextlib
import dataclasses
import hashlib
import io
import json
import os
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from megatron_tape.position import model_config

ROOT = Path(__file__).resolve().parents[2]
# Not whether this process sees a GPU: the CPU's process sees none, but must use the same sizes.
ON_GPU = os.environ.get("TESTS_ON") == "gpu"
BACKEND = "triton"
TIMEOUT = 240.0
"""Seconds to wait for another process's result."""


@dataclasses.dataclass(frozen=True)
class Size:
    """Sizes of a small model that the fused kernels support, and of its training."""

    layers: int
    heads: int
    head_dim: int
    seq_length: int
    batch: int
    micro_batch: int
    steps: int
    text_bytes: int
    document: int
    """Characters of a document; a training sequence contains several documents."""
    vocab_size: int = 1024


SIZE = Size(
    2, 2, 32, seq_length=16, batch=2, micro_batch=2, steps=2, text_bytes=100_000, document=20
)
if ON_GPU:
    SIZE = Size(
        4,
        4,
        64,
        seq_length=256,
        batch=8,
        micro_batch=4,
        steps=20,
        text_bytes=1_000_000,
        document=300,
    )

MODELS = {
    "tape": "position_encoding: tape",
    "rope": "position_encoding: rope",
    # A window of a third of the sequence; every second layer attends to all tokens.
    "tape_window": (
        f"position_encoding: tape, sliding_window: {SIZE.seq_length // 3}, full_attention_every: 2"
    ),
}
"""The settings of the models that are trained, by name."""

SAME = {"train/loss": 1e-5, "train/grad_norm": 2e-4, "validation/loss": 1e-5}
"""Maximum relative difference at any step between fp32 runs with different orders of summation. On
a CPU, with plain torch, the tiled backend and recomputation under ZeRO 3, it was 3e-7, 4e-6 and
5e-7."""
NEAR = {"train/loss": 0.005, "train/grad_norm": 0.05, "validation/loss": 0.005}
"""Maximum relative difference between bf16 and fp32; on a CPU it was 7e-4, 9e-3 and 6e-4."""


class Run(NamedTuple):
    """A run on the device, and the name of the CPU run that it must equal within a tolerance."""

    expected: str
    tolerance: dict[str, float]
    options: tuple[str, ...]

    @property
    def model(self):
        """The model of both runs, a key of `MODELS`."""
        return self.expected.split()[0]


ZERO = "--deepspeed.zero_stage={}".format
BF16 = "--train.precision=bf16"
PACKED = "--data.reset_attention_mask=true"
RECOMPUTED = "--train.recompute=full"

RUNS = {
    "tape fp32": Run("tape fp32", SAME, (ZERO(1),)),
    "tape bf16 ZeRO 2": Run("tape fp32", NEAR, (ZERO(2), BF16)),
    "rope fp32": Run("rope fp32", SAME, (ZERO(1),)),
    "tape packed fp32": Run("tape packed fp32", SAME, (ZERO(1), PACKED)),
    "tape_window fp32": Run("tape_window fp32", SAME, (ZERO(1),)),
    "tape bf16 ZeRO 3": Run("tape fp32", NEAR, (ZERO(3), BF16)),
    "rope bf16 ZeRO 2": Run("rope fp32", NEAR, (ZERO(2), BF16)),
    "tape packed bf16 recomputed": Run(
        "tape packed fp32", NEAR, (ZERO(2), BF16, PACKED, RECOMPUTED)
    ),
    "tape_window bf16 ZeRO 2": Run("tape_window fp32", NEAR, (ZERO(2), BF16)),
}
"""The runs, the most important first."""
GRADIENTS = (
    "gradients of tape",
    "gradients of rope",
    "gradients of tape packed",
    "gradients of tape_window",
    "gradients of tape_window packed",
)


class Side:
    """The runs on the CPU or on the device."""

    def __init__(self, folder: Path, name: str):
        self.folder = folder
        self.on_device = name == "device"
        self.results = folder / name

    def result(self, name: str, program: subprocess.Popen) -> object:
        """Wait for the result of `name` that the process `program` computes, and return it."""
        path = self.results / f"{name}.pt"
        deadline = time.monotonic() + TIMEOUT
        while not path.exists():
            assert program.poll() in (None, 0), f"{name}: the process that computes it has failed"
            assert time.monotonic() < deadline, f"{name}: no result within {TIMEOUT:.0f} s"
            time.sleep(0.1)
        return torch.load(path, weights_only=True)

    def compute(self, name: str) -> None:
        """Compute the result of `name` and write it to its file."""
        if name in GRADIENTS:
            found = self.gradients(name, torch.float64, "naive")
        else:
            found = self.train(name)
        path = self.results / f"{name}.pt"
        torch.save(found, path.with_suffix(".partial"))
        os.rename(path.with_suffix(".partial"), path)

    def directory(self, name: str) -> Path:
        """Return the directory of a run."""
        return self.results / name.replace(" ", "-")

    def backend(self, model: str, precision: str) -> str:
        """Return the attention backend; TAPE's on the device is named, so that `auto` cannot choose
        another.
        """
        interpretable = ON_GPU or precision == "fp32"
        if self.on_device and model != "rope" and interpretable:
            return BACKEND
        return "auto"

    def train(self, name: str) -> list[dict]:
        """Run the training command, which resumes an interrupted run; return the rows of its
        metrics.
        """
        from pretrain import train

        run = RUNS[name]
        backend = self.backend(run.model, "bf16" if BF16 in run.options else "fp32")
        arguments = ["--config", str(self.folder / f"{run.model}.yaml"), *run.options]
        arguments += [
            f"--logging.directory={self.directory(name)}",
            f"--model.attention_backend={backend}",
        ]
        status = train.main(arguments)
        assert status == 0, f"{name} ended with status {status}"
        rows = (self.directory(name) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        return [json.loads(row) for row in rows]

    def build(self, name: str, dtype: torch.dtype, backend: str, weights: dict):
        """Return the model `name` on this side's device with `weights`, whole tensors by Hugging
        Face names.
        """
        from megatron_tape.checks.arguments import parse_run_config
        from megatron_tape.model.language_model import LanguageModel, transformer_config
        from megatron_tape.model.weights import load_weights
        from megatron_tape.parallel.layout import initialize_distributed
        from megatron_tape.parallel.partitions import allocate

        config = parse_run_config(["--config", str(self.folder / f"{name}.yaml")])
        settings = dataclasses.replace(config.model, attention_backend=backend)
        layout = initialize_distributed()
        model = LanguageModel(
            settings, transformer_config(settings, dtype=dtype), layout.groups, layout.device
        )
        allocate(model, layout.device)
        load_weights(model, weights, settings, 0, 1)
        return model

    def gradients(self, name: str, dtype: torch.dtype, backend: str) -> dict[str, torch.Tensor]:
        """Return the loss of the first step and its gradients by parameter, as float64 tensors on
        the CPU.
        """
        from megatron_tape.data.batches import documents_from_tokens
        from megatron_tape.data.indexed_dataset import IndexedDatasetReader
        from megatron_tape.data.tokenizer import load_tokenizer

        model_name = name.split()[2]
        packed = name.endswith("packed")
        weights = torch.load(self.folder / f"start-{model_name}.pt", weights_only=True)
        model = self.build(model_name, dtype, backend, weights)
        B = SIZE.batch
        S = SIZE.seq_length
        ids = IndexedDatasetReader(self.folder / "data").tokens[: B * (S + 1)].astype("int64")
        whole = torch.from_numpy(ids).view(B, S + 1)
        tokens = whole[:, :-1].contiguous()
        labels = whole[:, 1:].contiguous()
        eod = load_tokenizer(str(self.folder / "tokenizer.model")).eod
        if packed:
            tokens[:, S // 3], tokens[1::2, S // 2] = eod, eod
        documents = documents_from_tokens(tokens, eod) if packed else None
        device = next(model.parameters()).device
        tokens, labels, documents = (
            x if x is None else x.to(device) for x in (tokens, labels, documents)
        )
        if dtype is torch.float64:  # Megatron's own loss is in fp32
            loss = F.cross_entropy(
                model(tokens, documents=documents).flatten(0, 1), labels.flatten()
            )
        else:
            loss = model(tokens, labels, documents=documents)
        loss.backward()
        found = {name: parameter.grad for name, parameter in model.named_parameters()}
        return {name: x.detach().double().cpu() for name, x in (found | {"loss": loss}).items()}


def start(folder: Path, names: list[str]) -> subprocess.Popen:
    """Start a process that computes the named results on the CPU."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    threads = max(1, (os.cpu_count() or 1) // 2) if ON_GPU else 1
    variables = os.environ | {
        "PYTHONPATH": os.pathsep.join(paths),
        "CUDA_VISIBLE_DEVICES": "",
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": str(threads),
    }
    command = [sys.executable, __file__, str(folder), *names]
    return subprocess.Popen(command, env=variables, cwd=folder)


def recipe(folder: Path, name: str) -> str:
    """Return the recipe that all runs of the model `name` share."""
    width = SIZE.heads * SIZE.head_dim
    # The learning rate changes TAPE's matrices at every step. AdamW's usual eps of 1e-8 would turn
    # gradients that are only rounding errors into full steps, and equal runs would diverge.
    return f"""
model: {{{MODELS[name]}, num_layers: {SIZE.layers}, hidden_size: {width},
        ffn_hidden_size: {3 * width}, num_attention_heads: {SIZE.heads},
        seq_length: {SIZE.seq_length}, vocab_size: {SIZE.vocab_size},
        unpadded_vocab_size: {SIZE.vocab_size}}}
data: {{prefix: '{folder}/data', split: '900,100,0', tokenizer: '{folder}/tokenizer.model',
       cache_directory: '{folder}/index'}}
optimizer: {{lr: 0.001, weight_decay: 0.1, clip_grad: 1.0, eps: 0.000001}}
schedule: {{kind: constant}}
train: {{steps: {SIZE.steps}, global_batch_size: {SIZE.batch},
        micro_batch_size: {SIZE.micro_batch}, precision: fp32, eval_interval: {SIZE.steps},
        eval_steps: 1, hang_timeout: 300}}
checkpoint: {{interval: 1000, resume: '{folder}/start-{name}'}}
logging: {{interval: 1, sample_tokens: 1, tensorboard: false}}
"""


def prepare(folder: Path, run_tool) -> None:
    """Write the inputs of all runs into `folder`: tokenized real text, weights and recipes."""
    corpus = folder / "corpus.jsonl"
    tokenizer = folder / "tokenizer.model"
    with open(corpus, "w", encoding="utf-8") as file:
        written = 0
        for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
            text = path.read_text(encoding="utf-8", errors="replace")[: SIZE.text_bytes - written]
            for begin in range(0, len(text), SIZE.document):
                file.write(json.dumps({"text": text[begin : begin + SIZE.document]}) + "\n")
            written += len(text)
    run_tool(
        "train_tokenizer", "--input", corpus, "--vocab-size", SIZE.vocab_size, "--output", tokenizer
    )
    options = ["--tokenizer", tokenizer, "--output-prefix", folder / "data"]
    run_tool("preprocess_data", "--input", corpus, *options)
    for side in ("cpu", "device"):
        (folder / side).mkdir()
    for name in MODELS:
        write_start(folder, name)


def write_start(folder: Path, model_name: str) -> None:
    """Write a recipe and an initial checkpoint with non-zero weights that bf16 represents exactly.

    TAPE's matrices are usually zero at initialization, which makes it RoPE and would hide errors.
    Apart from those matrices, all models start with the same weights.
    """
    from megatron_tape.huggingface.imports.new_checkpoint import write_imported
    from megatron_tape.io.records import read_yaml
    from megatron_tape.model.names import POSITION
    from megatron_tape.model.shapes import hugging_face_shapes

    path = folder / f"{model_name}.yaml"
    path.write_text(recipe(folder, model_name), encoding="utf-8")
    model = model_config(read_yaml(path, dict[str, dict[str, Any]])["model"])
    weights = {}
    for name, shape in hugging_face_shapes(model).items():
        seed = int.from_bytes(
            hashlib.sha256(name.encode()).digest()[:4],
            "little",
        )
        weight = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        if POSITION in name:
            weight *= 0.5 * shape[-1] ** -0.5
        else:
            weight = weight * 0.05 if len(shape) > 1 else 1 + weight * 0.1
        weights[name] = weight.bfloat16().float()
    with contextlib.redirect_stderr(io.StringIO()):  # hides the printed advice
        write_imported(folder / f"start-{model_name}", model, weights, "weights drawn at random")
    torch.save(weights, folder / f"start-{model_name}.pt")


def main() -> None:
    """Compute the results that the command line names."""
    folder, *names = sys.argv[1:]
    side = Side(Path(folder), "cpu")
    for name in names:
        side.compute(name)


if __name__ == "__main__":
    main()
