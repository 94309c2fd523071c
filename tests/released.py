"""Read tests/reference_data: results of the TAPE authors' code on small random models."""

import json
from pathlib import Path

from safetensors import safe_open

FOLDER = Path(__file__).parent / "reference_data"


def load(name):
    """Return (config, weights, gradients, other tensors)."""
    with safe_open(FOLDER / f"{name}.safetensors", "pt") as file:
        config = json.loads(file.metadata()["config"])
        tensors = {key: file.get_tensor(key) for key in file.keys()}

    def part(prefix):
        return {
            key.removeprefix(prefix): value
            for key, value in tensors.items()
            if key.startswith(prefix)
        }

    rest = {
        key: value for key, value in tensors.items() if not key.startswith(("weight.", "grad."))
    }
    return config, part("weight."), part("grad."), rest
