"""Load and call models of transformers, whichever of its supported versions is installed."""

import fcntl
import inspect
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from megatron_tape.errors import FileError, one_line


def load_pretrained(directory: Path, dtype: torch.dtype | str, trust_remote_code: bool) -> Any:
    """Return the causal language model in a directory, on the CPU, from safetensors files.

    `dtype` may be `auto`, that of the files. Code in the directory runs only with
    `trust_remote_code`. Raises FileError if transformers cannot load the model, or if a weight is
    missing, which transformers would initialize.
    """
    import transformers

    transformers.utils.logging.disable_progress_bar()
    try:
        if trust_remote_code:
            _copy_code(directory)
        model, found = transformers.AutoModelForCausalLM.from_pretrained(
            directory,
            dtype=dtype,
            trust_remote_code=trust_remote_code,
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
        )
    except Exception as error:  # the libraries raise errors of any type, often with many lines
        raise cannot_load(directory, error) from None
    if found["missing_keys"]:
        name = min(found["missing_keys"])
        raise FileError(
            directory,
            f"lacks the weight {name:.100}, which its config.json requires",
            "give the config.json that belongs to the weights, or export or download them again",
        )
    return model


def cannot_load(directory: Path, error: Exception) -> FileError:
    """Return the error that transformers cannot load a directory, with its reason in one line."""
    return FileError(directory, f"cannot be loaded: {one_line(error)}")


def _copy_code(directory: Path) -> None:
    """Copy a model's code to the module cache of transformers under a lock.

    Without the lock, a process could read a file that another process is still writing. Existing
    files are not copied.
    """
    from transformers import PreTrainedConfig
    from transformers.dynamic_module_utils import get_class_from_dynamic_module
    from transformers.utils import HF_MODULES_CACHE

    settings, _ = PreTrainedConfig.get_config_dict(str(directory), local_files_only=True)
    classes = settings.get("auto_map")
    if not isinstance(classes, dict):
        return
    Path(HF_MODULES_CACHE).mkdir(parents=True, exist_ok=True)
    with open(Path(HF_MODULES_CACHE) / ".lock", "w") as lock:
        with suppress(OSError):  # some network file systems have no locks
            fcntl.flock(lock, fcntl.LOCK_EX)
        for name in classes.values():
            # A class in another repository is named `REPOSITORY--FILE.CLASS`.
            if isinstance(name, str) and "--" not in name:
                get_class_from_dynamic_module(name, str(directory), local_files_only=True)


def cache_keyword(model: Any) -> str:
    """Return the name of the argument of the model's `forward` that takes a cache."""
    # transformers 5.24 renamed past_key_values.
    if "cache" in inspect.signature(model.forward).parameters:
        return "cache"
    return "past_key_values"
