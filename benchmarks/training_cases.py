"""Real training for `check_training`, in a process of its own: runs of `pretrain.train`, gradients, and an export.

    python -m benchmarks.training_cases FOLDER reference|device SKIPPED CASE...

`reference` is plain torch on the CPU; `device` is the GPU with the fused kernels or, on a machine without one, again
the CPU with interpreted kernels. It reports as `programs` describes.
"""

import json
import math
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from benchmarks.programs import Check, report
from benchmarks.training_inputs import Size

ROWS = ("step", "loss", "grad_norm", "validation_loss")
RESUMED_AT = 2
"""The run that is continued is interrupted after its steps divided by this."""
PATIENCE = 240.0
"""Seconds to wait for the CPU's gradients."""

ZERO = "--deepspeed.zero_stage={}".format
BF16 = "--train.precision=bf16"
PACKED = "--data.reset_attention_mask=true"
RECOMPUTED = "--train.recompute=full"

RUNS = {
    "tape fp32": ("tape", ZERO(1)),
    "rope fp32": ("rope", ZERO(1)),
    "tape packed fp32": ("tape", ZERO(1), PACKED),
    "tape bf16 ZeRO 1": ("tape", ZERO(1), BF16),
    "tape bf16 ZeRO 2": ("tape", ZERO(2), BF16),
    "tape bf16 ZeRO 3": ("tape", ZERO(3), BF16),
    "tape bf16 ZeRO 2 overlapping": ("tape", ZERO(2), BF16, "--deepspeed.overlap_comm=true"),
    "tape packed bf16 recomputed": ("tape", ZERO(2), BF16, PACKED, RECOMPUTED),
    "rope bf16 ZeRO 2": ("rope", ZERO(2), BF16),
    "tape recomputed fp32": ("tape", ZERO(1), RECOMPUTED, "--logging.tensorboard=true"),
    "tape fp32 data parallel": ("tape", ZERO(2)),
    "tape fp32 tensor parallel": ("tape", ZERO(1), "--parallel.tensor_model_parallel_size=2"),
}
GRADIENTS = ("gradients of tape", "gradients of tape packed", "gradients of rope")
DETERMINISTIC, RESUMED, EXPORT = "tape deterministic", "tape resumed", "export to Hugging Face"


class Side:
    """One side of the comparison, in this process."""

    def __init__(self, folder: Path, on_device: bool):
        import torch

        self.folder, self.on_device = folder, on_device
        self.size = Size(**json.loads((folder / "size.json").read_text(encoding="utf-8")))
        self.on_gpu = torch.cuda.is_available()
        self.rank, self.processes = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        if on_device and not self.on_gpu:
            from megatron_tape.ops import parity

            parity.LENGTH = 17  # interpreted, the check of the kernels before a run would take minutes

    def backend(self, encoding: str, precision: str) -> str:
        """Return the attention backend: on the device, TAPE's is named, so that no other one can step in."""
        interpretable = self.on_gpu or precision == "fp32"
        return "triton" if self.on_device and encoding == "tape" and interpretable else "auto"

    def cases(self, names: list[str]) -> Iterator[tuple[str, Callable[[], Check]]]:
        """Yield cases by name, with what runs each."""
        others = {DETERMINISTIC: self.deterministic, RESUMED: self.resumed, EXPORT: self.export}
        others |= {name: partial(self.gradients, name) for name in GRADIENTS}
        for name in names:
            yield name, others[name] if name in others else partial(self.train, name, *RUNS[name])

    def train(self, name: str, encoding: str, *options: str, afresh: bool = True) -> Check:
        """Run the training command; return the logged rows and what they were computed with."""
        from pretrain import train

        directory = self.folder / ("device" if self.on_device else "reference") / name.replace(" ", "-")
        if afresh and self.rank == 0:
            shutil.rmtree(directory, ignore_errors=True)
        self._meet()
        backend = self.backend(encoding, "bf16" if BF16 in options else "fp32")
        arguments = ["--config", str(self.folder / f"{encoding}.yaml"), "--logging.directory", str(directory)]
        arguments += [f"--model.attention_backend={backend}", *options]
        if self.processes > 1:
            share = 2 if "--parallel.tensor_model_parallel_size=2" in options else 1
            arguments += [f"--train.micro_batch_size={max(1, self.size.batch * share // self.processes)}"]
        status = train.main(arguments)
        if status:
            raise RuntimeError(f"the run ended with status {status}")
        rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
        kept = [{key: value for key, value in row.items() if key in ROWS or "update_norm" in key} for row in rows]
        speed = statistics.median(row["tokens_per_second"] for row in rows)
        return {"rows": kept, "backend": backend, "tokens_per_second": round(speed), "settings": list(options)}

    def _meet(self) -> None:
        import torch.distributed as dist

        if dist.is_initialized():
            dist.barrier()

    def _deterministic(self, afresh: bool) -> Check:
        half = max(1, self.size.steps // RESUMED_AT)
        options = ["--train.deterministic=true", f"--checkpoint.interval={half}", "--checkpoint.keep=5"]
        precision = [BF16] if self.on_gpu else []
        return self.train(DETERMINISTIC, "tape", ZERO(2), *precision, *options, afresh=afresh)

    def deterministic(self) -> Check:
        """Train without interruption, with checkpoints on the way."""
        return self._deterministic(True) | {"tensors": self._checksums()}

    def resumed(self) -> Check:
        """Continue the deterministic run, in another process, as if it had ended after its first checkpoint."""
        from megatron_tape.checkpoint.directories import list_checkpoints

        half = max(1, self.size.steps // RESUMED_AT)
        for step, path in list_checkpoints(self._checkpoints(DETERMINISTIC)):
            if step > half:
                shutil.rmtree(path)
        return self._deterministic(False) | {"tensors": self._checksums(), "resumed_at": half}

    def _checkpoints(self, name: str) -> Path:
        return self.folder / "device" / name.replace(" ", "-") / "checkpoints"

    def _checksums(self) -> dict[str, str]:
        from megatron_tape.checkpoint.directories import read_manifest

        files = read_manifest(self._checkpoints(DETERMINISTIC) / f"step-{self.size.steps:08d}")["files"]
        return {name: entry["sha256"] for name, entry in files.items() if name.startswith("tensors")}

    def build(self, encoding: str, dtype, backend: str, weights: dict | None):
        """Return a model on this side's device, with whole weights by Hugging Face's names, or undefined ones."""
        import dataclasses

        from megatron_tape.config.parse import parse_run_config
        from megatron_tape.model.language_model import LanguageModel, transformer_config
        from megatron_tape.model.weights import load_weights
        from megatron_tape.parallel.layout import initialize_distributed
        from megatron_tape.parallel.partitions import allocate

        config = parse_run_config(["--config", str(self.folder / f"{encoding}.yaml")])
        settings = dataclasses.replace(config.model, attention_backend=backend)
        layout = initialize_distributed()
        model = LanguageModel(settings, transformer_config(settings, dtype=dtype), layout.groups, layout.device)
        allocate(model, layout.device)
        if weights is not None:
            load_weights(model.gpt, weights, settings, 0, 1)
        return model

    def gradients(self, name: str) -> Check:
        """Compare every gradient of the first step with float64's on the CPU."""
        import torch

        encoding, packed = name.split()[2], name.endswith("packed")
        path = self.folder / f"{name.replace(' ', '-')}.pt"
        if not self.on_device:
            torch.save(self._gradients(encoding, packed, torch.float64, "naive"), path.with_suffix(".partial"))
            os.rename(path.with_suffix(".partial"), path)
            return {}
        deadline = time.monotonic() + PATIENCE
        while not path.exists():
            if time.monotonic() > deadline:
                raise RuntimeError(f"the CPU's gradients did not come within {PATIENCE:.0f} s")
            time.sleep(0.2)
        truth, result, why = torch.load(path, weights_only=True), {}, []
        for dtype in (torch.float32, torch.bfloat16)[: 1 + self.on_gpu]:
            precision = str(dtype).removeprefix("torch.")
            backends = ("torch", "triton")
            plain, fused = (errors(self._gradients(encoding, packed, dtype, backend), truth) for backend in backends)
            result[precision] = {key: {"triton": fused[key], "torch": plain[key]} for key in truth}
            why += [f"{precision}: {problem}" for problem in judged(fused, plain, dtype)]
        return {"gradients": result, "passed": not why} | ({"why": "; ".join(why)} if why else {})

    def _gradients(self, encoding: str, packed: bool, dtype, backend: str) -> dict:
        """Return loss and gradients by name, in float64 on the CPU."""
        import numpy as np
        import torch
        import torch.nn.functional as F

        from megatron_tape.data.batches import documents_from_tokens
        from megatron_tape.data.tokenizer import load_tokenizer

        weights = torch.load(self.folder / f"start-{encoding}.pt", weights_only=True)
        model = self.build(encoding, dtype, backend, weights)
        B, S = self.size.batch, self.size.seq_length
        ids = np.fromfile(self.folder / "data.bin", np.uint16)[: B * (S + 1)].astype(np.int64)
        whole = torch.from_numpy(ids).view(B, S + 1)
        tokens, labels = whole[:, :-1].contiguous(), whole[:, 1:].contiguous()
        eod = load_tokenizer(str(self.folder / "tokenizer.model")).eod
        if packed:
            tokens[:, S // 3], tokens[1::2, S // 2] = eod, eod
        documents = documents_from_tokens(tokens, eod) if packed else None
        device = next(model.parameters()).device
        tokens, labels, documents = (x if x is None else x.to(device) for x in (tokens, labels, documents))
        if dtype is torch.float64:  # Megatron's own loss is in fp32
            loss = F.cross_entropy(model(tokens, documents=documents).flatten(0, 1), labels.flatten())
        else:
            loss = model(tokens, labels, documents=documents)
        loss.backward()
        found = {name: parameter.grad for name, parameter in model.named_parameters()}
        return {name: x.detach().double().cpu() for name, x in (found | {"loss": loss}).items()}

    def export(self) -> Check:
        """Export a trained model to Hugging Face and compare the logits, both on this side's device in fp32."""
        import torch
        from safetensors.torch import load_file
        from transformers import AutoModelForCausalLM

        from megatron_tape.huggingface.export.to_transformers import export

        run = self._checkpoints("tape fp32").parent
        exported = self.folder / "exported"
        shutil.rmtree(exported, ignore_errors=True)
        export(run, exported)
        (last,) = (run / "checkpoints").glob(f"step-*{self.size.steps}")
        (file,) = last.glob("tensors-*.safetensors")
        model = self.build("tape", torch.float32, self.backend("tape", "fp32"), None)
        saved = {name.removeprefix("weight/"): x for name, x in load_file(file).items() if name.startswith("weight/")}
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(saved[name])
            device = next(model.parameters()).device
            theirs = AutoModelForCausalLM.from_pretrained(exported, trust_remote_code=True, dtype=torch.float32)
            tokens = torch.arange(2 * self.size.seq_length, device=device).view(2, -1) % self.size.vocab_size
            ours, other = model(tokens), theirs.to(device)(tokens).logits
        error = float((ours - other).abs().max() / ours.abs().max())
        result = {"error": error, "allowed": 1e-4, "passed": error <= 1e-4}
        return result if result["passed"] else result | {"why": f"the logits differ by {error:.1e} of the largest"}


FLOOR = {"torch.float32": 1e-6, "torch.bfloat16": 1e-3}
"""Relative error that is always allowed, as in `ops.parity`."""
DEVICE_TOLERANCE = {"torch.float32": 1e-4, "torch.bfloat16": 0.2}
"""Relative error of plain torch on the device: far above rounding, far below what a wrong gradient shows."""


def errors(found: dict, truth: dict) -> dict[str, float]:
    """Return the relative error of every tensor."""
    result = {name: float((found[name] - x).norm() / x.norm()) for name, x in truth.items()}
    return {name: error if math.isfinite(error) else math.inf for name, error in result.items()}


def judged(fused: dict[str, float], plain: dict[str, float], dtype) -> list[str]:
    """Return which gradients are wrong: more than twice as far off as plain torch's on the same device.

    The rounding of a small tensor may be small by chance, so it counts as at least the median of all.
    """
    floor, limit, typical = FLOOR[str(dtype)], DEVICE_TOLERANCE[str(dtype)], statistics.median(plain.values())
    wrong = {name: error for name, error in fused.items() if not error <= 2 * max(plain[name], typical) + floor}
    strange = {name: error for name, error in plain.items() if not error <= limit}
    problems = [f"{name} is off by {error:.1e}, plain torch by {plain[name]:.1e}" for name, error in wrong.items()]
    return problems + [f"{name} in plain torch is off by {error:.1e} from the CPU" for name, error in strange.items()]


def main() -> int:
    """Run the cases; return the exit status."""
    folder, side, skipped, *names = sys.argv[1:]
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("HF_MODULES_CACHE", str(Path(folder) / "modules"))
    here = Side(Path(folder), side == "device")
    return report(here.cases(names), int(skipped), speaks=here.rank == 0)


if __name__ == "__main__":
    sys.exit(main())
