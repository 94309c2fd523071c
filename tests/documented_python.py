"""Stands in for `python` and `torchrun` when tests run the commands of the documentation: few
steps and small models; two processes in the demo and for tensor parallelism, otherwise one.
"""

import os
import re
import sys
from pathlib import Path

SMALL = {
    "model.num_layers": 2,
    "model.hidden_size": 32,
    "model.num_attention_heads": 2,
    "model.ffn_hidden_size": 48,
}
FEW = {
    "train.steps": 2,
    "schedule.warmup_steps": 0,
    "train.global_batch_size": 2,
    "train.micro_batch_size": 1,
    "train.precision": "fp32",
    "train.eval_interval": 2,
    "train.eval_steps": 1,
    "checkpoint.interval": 2,
}
SAMPLES = {
    "perplexity.documents": 2,
    "context_gain.documents": 2,
    "passkey.samples": 1,
    "passkey.depths": 2,
    "passkey.lengths": "[256]",
    "ruler.samples": 1,
    "ruler.lengths": "[1024]",
    "ruler.tasks": "[niah_single_1]",
    "addition.step": 40,
    "addition.samples": 2,
    "selective_copy.samples": 2,
    "grid_navigation.samples": 2,
    "recall.samples": 2,
    "positions.documents": 1,
    "scrolls.examples": 2,
}


def shortened(arguments):
    """Return the arguments of python with those of a program replaced by ones that make it
    short.
    """
    program = next((word for word in arguments if re.match(r"(pretrain|tools)[./]\w", word)), None)
    changes: dict[str, object] = {}
    if program in ("pretrain.train", "pretrain.extend_context", "tools/build_index.py"):
        new = program != "pretrain.extend_context" and "--checkpoint.resume" not in arguments
        if "--data.prefix" in arguments:
            split = {"data.split": "90,10,0"}
        else:
            split = {}
        if "--train.profile.steps" in arguments:
            profile = {"train.profile.steps": "[1, 2]"}
        else:
            profile = {}
        changes = FEW | split | profile | (SMALL if new else {})
    elif program == "pretrain.compare" and ("ONLY_CHECK" in os.environ or "--ladder" in arguments):
        # A ladder sets the number of steps itself; tests/pretrain/test_ladder.py runs one.
        arguments.append("--check")
    elif program == "pretrain.compare":
        changes = {"seeds": 1, **FEW, "evaluation.every": 2}
    elif program == "pretrain.evaluate":
        words = " ".join(arguments)
        for recipe in re.findall(r"--config (\S+)", words):
            words += " " + Path(recipe).read_text(encoding="utf-8").replace(":", " ")
        changes = {
            key: value for key, value in SAMPLES.items() if key.partition(".")[0] in words.split()
        }
        if "arc_easy" in words:  # its data needs a network
            arguments += [
                "--lm_eval.tasks",
                "[next_word]",
                "--lm_eval.include_path",
                "mytasks",
                "--trust-remote-code",
            ]
    return arguments + [word for key, value in changes.items() for word in (f"--{key}", str(value))]


if __name__ == "__main__":
    name = os.path.basename(sys.argv[0])
    arguments = sys.argv[1:]
    if "ONLY_CHECK" in os.environ and "pretrain.compare" not in arguments:
        sys.exit()
    if {"vllm.entrypoints.openai.api_server", "--logging.wandb.project"} & set(arguments):
        sys.exit()  # the package is not installed here
    if name == "torchrun":
        # The demo's script, and tensor parallelism.
        with_two = {"--standalone", "--parallel.tensor_model_parallel_size"}
        place = arguments.index("--nproc-per-node")
        arguments = [
            "-m",
            "torch.distributed.run",
            "--nproc-per-node",
            "2" if with_two & set(arguments) else "1",
            *arguments[:place],
            *arguments[place + 2 :],
        ]
    os.execv(sys.executable, [sys.executable, *shortened(arguments)])
