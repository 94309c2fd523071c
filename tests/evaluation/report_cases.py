"""Made-up runs and results, from which reports are made in tests."""

import json
import math

CONFIG = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
}


def score(metric="perplexity", value=10.0, better="lower", **others):
    return {"metric": metric, "value": value, "better": better, **others}


def task(scores, *, settings=None, data=None, details=None, notes=(), **others):
    return {
        "settings": settings or {"lengths": [256, 512]},
        "data": {"text.jsonl": "0" * 64} if data is None else data,
        "seconds": 12.5,
        "processes": 1,
        "scores": list(scores),
        "details": details or {},
        "notes": list(notes),
        "examples": {},
        "dtype": "fp32",
        "hardware": "a CPU of 2 cores",
        "versions": {"torch": "2.13.0", "megatron_tape": "0.1.0"},
        **others,
    }


def results(
    label="rope",
    tasks=None,
    *,
    digest=None,
    run=None,
    config=CONFIG,
    created=1.0,
    trained_length=256,
    **others,
):
    return {
        "format": 1,
        "label": label,
        "created": created,
        "model": {
            "path": f"models/{label}",
            "digest": digest or label,
            "parameters": 4_200_000,
            "trained_length": trained_length,
            "config": config,
            "run": run,
        },
        "tasks": {"shiny": task([score()])} if tasks is None else tasks,
        **others,
    }


def write_results(directory, content):
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "results.json"
    path.write_text(json.dumps(content))
    return path


def settings(**changes):
    """Return the settings of a run; `train__steps=5` changes train.steps."""
    found = {
        "model": {"position_encoding": "rope", "seq_length": 256, "hidden_size": 64},
        "train": {"steps": 300, "global_batch_size": 8, "precision": "fp32"},
        "optimizer": {"lr": 0.002},
        "logging": {"directory": "runs/x"},
    }
    for key, value in changes.items():
        section, _, name = key.partition("__")
        found.setdefault(section, {})[name] = value
    return found


def write_run(directory, *, steps=300, offset=0.0, config=None, interval=10):
    """Write a run whose loss falls from 8 to about 3, with a validation every 50 steps."""
    directory.mkdir(parents=True, exist_ok=True)
    # JSON is YAML.
    (directory / "config.yaml").write_text(json.dumps(settings() if config is None else config))
    rows = []
    for step in range(interval, steps + 1, interval):
        loss = 3 + offset + 5 * math.exp(-step / (steps / 6)) + 0.05 * math.sin(step)
        rate = 0.002 * (1 - step / steps) + 1e-4
        row = {
            "step": step,
            "time": float(step),
            "train/tokens": step * 2048,
            "train/loss": loss,
            "train/learning_rate": rate,
        }
        row |= {
            "train/grad_norm": 1.0,
            "throughput/tokens_per_second": 1000.0 + step,
            "throughput/tflops_per_second": 0.025,
        }
        if step % 50 == 0:
            row |= {"validation/loss": loss + 0.1, "validation/perplexity": math.exp(loss + 0.1)}
        rows.append(json.dumps(row))
    (directory / "metrics.jsonl").write_text("\n".join(rows) + "\n")
    return directory
