"""Make exports and adapters look as they did when TAPE's matrices were parameters rather than modules."""

import re
import shutil

from safetensors.torch import load_file, save_file


def former(name):
    return re.sub(r"(\.position\.(?:token_mixing|x_proj|up_proj|down_proj))\.weight$", r"\1", name)


def with_former_names(source, target):
    """Copy a directory of transformers or peft, with TAPE's matrices under their former names."""
    shutil.copytree(source, target)
    (file,) = target.glob("*.safetensors")
    weights = load_file(file)
    renamed = {former(name): tensor for name, tensor in weights.items()}
    assert renamed.keys() != weights.keys()
    save_file(renamed, file, metadata={"format": "pt"})
    return target
