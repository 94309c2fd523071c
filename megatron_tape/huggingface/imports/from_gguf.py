"""Read a model from a GGUF file, the format of llama.cpp, with transformers' loader.

transformers ignores settings and tensors that it does not know. For a file with such contents, this
module raises an error before it reads weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_tape import command_line
from megatron_tape.data.tokenizer import TOKENIZER_JSON
from megatron_tape.errors import FileError, UserError
from megatron_tape.huggingface.tokenizer_files import set_spaces

if TYPE_CHECKING:
    from torch import Tensor

SUFFIX = ".gguf"
_ARCHITECTURES = ("llama", "qwen2", "qwen3")
_NEEDED = (
    "block_count embedding_length feed_forward_length context_length attention.head_count".split()
)
_NEEDED += ["attention.head_count_kv", "attention.layer_norm_rms_epsilon"]
_WITHOUT_EFFECT = (
    "vocab_size",
    "tensor_data_layout",
    "rope.scaling.finetuned",
    "rope.scaling.original_context_length",
)
_SUPPORTED = {
    "rope.scaling.type": "none",
    "rope.scaling.factor": 1.0,
    "rope.scaling.attn_factor": 1.0,
    "attention.causal": True,
    "attention.sliding_window": 0,
    "expert_count": 0,
    "expert_used_count": 0,
}
"""Settings that a file may have, with the only value that transformers' loader supports."""
_FIX = "import the model from its safetensors files"


class GgufFile:
    """A GGUF file. Raises FileError if it cannot be imported, or if a required package is missing.

    transformers reads it through a link in the empty `directory`, so that other files in its
    directory are ignored.
    """

    def __init__(self, path: Path, directory: Path):
        try:
            import accelerate  # noqa: F401
            import gguf
            import transformers  # noqa: F401
        except ImportError as error:
            problem = f"requires the package {error.name}, which is not installed"
            raise FileError(
                str(path), problem, "run: pip install transformers accelerate gguf"
            ) from None
        self.path = path
        (directory / f"model{SUFFIX}").symlink_to(path.resolve())
        self._from_pretrained = {
            "pretrained_model_name_or_path": directory,
            "gguf_file": f"model{SUFFIX}",
        }
        with self._readable():
            reader = gguf.GGUFReader(path)  # maps the file, and fails if a tensor is incomplete
            self._fields = {name: field.contents() for name, field in reader.fields.items()}
            self._tensors = {tensor.name for tensor in reader.tensors}
            kinds = {tensor.tensor_type.name for tensor in reader.tensors if len(tensor.shape) > 1}
        self.quantization = ", ".join(sorted(kinds))
        """The dtypes of the matrices, such as `Q4_K, Q6_K`."""
        self._architecture = self._fields.get("general.architecture")
        if self._architecture not in _ARCHITECTURES:
            problem = f"has the architecture {self._architecture!r:.100}, which cannot be imported"
            raise FileError(str(path), problem, f"supported: {', '.join(_ARCHITECTURES)}")

    def settings(self) -> dict[str, Any]:
        """Return the contents of a `config.json` for the model in the file.

        Raises UserError or KeyError if the file has settings or tensors that transformers does not
        read.
        """
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        prefix = f"{self._architecture}."
        given = {
            name.removeprefix(prefix): x
            for name, x in self._fields.items()
            if name.startswith(prefix)
        }
        head_dim = given["embedding_length"] // given["attention.head_count"]
        head_dim = given.get("attention.key_length", given.get("rope.dimension_count", head_dim))
        supported = _SUPPORTED | {
            "attention.key_length": head_dim,
            "attention.value_length": head_dim,
        }
        supported["rope.dimension_count"] = head_dim
        for name, value in ({key: given[key] for key in _NEEDED} | given).items():
            known = name in (*_NEEDED, *_WITHOUT_EFFECT, "rope.freq_base")
            if not known and (name not in supported or value != supported[name]):
                problem = f"is {value!r:.100} in {self.path}, which cannot be imported"
                raise UserError(f"{prefix}{name:.100}", problem, _FIX)
        with self._readable():
            config = AutoConfig.from_pretrained(**self._from_pretrained)
            if (layers := config.num_hidden_layers) > len(self._tensors):
                raise FileError(
                    str(self.path),
                    f"contains only {len(self._tensors)} tensors for {layers} layers",
                    _FIX,
                )
            with torch.device("meta"):
                parameters = dict(AutoModelForCausalLM.from_config(config).named_parameters())
        if "rope_freqs.weight" in self._tensors or len(self._tensors) > len(parameters):
            problem = (
                f"contains {len(self._tensors)} tensors, but transformers reads only"
                f" {len(parameters)}"
            )
            raise FileError(
                str(self.path), f"{problem}; the others, such as rope_freqs, would be lost", _FIX
            )
        return config.to_dict()

    def weights(self) -> dict[str, Tensor]:
        """Return all weights in fp32 by Hugging Face's names."""
        import torch
        from transformers import AutoModelForCausalLM

        with self._readable():
            model, found = AutoModelForCausalLM.from_pretrained(
                **self._from_pretrained, dtype=torch.float32, output_loading_info=True
            )
        if missing := sorted(found["missing_keys"]):
            raise FileError(str(self.path), f"lacks the parameter {missing[0]}", _FIX)
        return model.state_dict()

    def write_tokenizer(self, directory: Path) -> bool:
        """Convert the tokenizer with transformers, write it to `directory`, and return True.

        If transformers would drop the tokenizer's rules for splitting text, which would change
        tokens, print a message and return False.
        """
        from transformers import AutoTokenizer
        from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

        kind, split = (self._fields.get(f"tokenizer.ggml.{name}") for name in ("model", "pre"))
        if not (
            kind == "llama" or (kind == "gpt2" and split in (*GGUF_PRE_TOKENIZER_SPLITS, "gpt-2"))
        ):
            command_line.log(
                f"the tokenizer in {self.path} is not imported: transformers would change tokens of"
                f" a {kind!s:.100} tokenizer with the pre-tokenizer {split!s:.100}; put the model's"
                f" {TOKENIZER_JSON} next to this file"
            )
            return False
        with self._readable("the tokenizer"):
            tokenizer = AutoTokenizer.from_pretrained(**self._from_pretrained)
            if kind == "llama":
                prefix = self._fields.get("tokenizer.ggml.add_space_prefix", True)
                set_spaces(tokenizer.backend_tokenizer, prefix)
            tokenizer.save_pretrained(directory)
        return True

    @contextmanager
    def _readable(self, part: str = "") -> Iterator[None]:
        """Within the context, convert any exception to a FileError; `part` is what is read, for the
        message.
        """
        try:
            yield
        except UserError:
            raise
        except Exception as error:  # damaged files cause wrong indices, types and sizes
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            problem = f"{f'contains {part}, which ' if part else ''}cannot be read ({reason})"
            raise FileError(
                str(self.path), problem, "download the GGUF file again, or give another"
            ) from None
