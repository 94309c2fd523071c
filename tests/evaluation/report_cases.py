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


def task(scores, **changes):
    return {
        "settings": {"lengths": [256, 512]},
        "data": {"text.jsonl": "0" * 64},
        "seconds": 12.5,
        "processes": 1,
        "scores": list(scores),
        "details": {},
        "notes": [],
        "examples": {},
        "dtype": "fp32",
        "hardware": "a CPU of 2 cores",
        "versions": {"torch": "2.13.0", "megatron_tape": "0.1.0"},
        **changes,
    }


def results(label="rope", tasks=None, config=CONFIG):
    model = {
        "path": f"models/{label}",
        "digest": label,
        "parameters": 4_200_000,
        "trained_length": 256,
        "config": config,
        "run": None,
    }
    if tasks is None:
        tasks = {"shiny": task([score()])}
    return {"format": 1, "label": label, "created": 1.0, "model": model, "tasks": tasks}


def write_results(directory, content):
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "results.json"
    path.write_text(json.dumps(content))
    return path


def write_run(directory, *, steps=300, offset=0.0, interval=10, evaluation=None, **model):
    """Write a run whose loss falls from 8 to about 3, with a validation every 50 steps."""
    directory.mkdir(parents=True, exist_ok=True)
    settings = {
        "model": {"position_encoding": "rope", "seq_length": 256, **model},
        "train": {"steps": 300},
        "evaluation": evaluation or {},
    }
    (directory / "config.yaml").write_text(json.dumps(settings))  # JSON is YAML
    rows = []
    for step in range(interval, steps + 1, interval):
        loss = 3 + offset + 5 * math.exp(-step / (steps / 6)) + 0.05 * math.sin(step)
        row = {
            "step": step,
            "time": float(step),
            "train/tokens": step * 2048,
            "train/loss": loss,
            "train/learning_rate": 0.002 * (1 - step / steps) + 1e-4,
            "throughput/tokens_per_second": 1000.0 + step,
            "throughput/tflops_per_second": 0.025,
        }
        if step % 50 == 0:
            row["validation/loss"] = loss + 0.1
        rows.append(row)
    write_rows(directory, rows)
    return directory


def write_rows(directory, rows):
    lines = [json.dumps(row) + "\n" for row in rows]
    (directory / "metrics.jsonl").write_text("".join(lines))
