"""Read a model in a GGUF file, as llama.cpp uses them; quantized weights become the numbers that they stand for.

The package gguf reads the file. Its settings are translated into those of a `config.json`, and one that has no
counterpart there is refused by name. transformers, which ignores such settings, converts the tokenizer alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_tape import command_line
from megatron_tape.data.tokenizer import TOKENIZER_JSON
from megatron_tape.errors import FileError, UserError
from megatron_tape.huggingface.imports.source_card import CardFacts, licence_and_languages
from megatron_tape.huggingface.imports.weight_files import LazyTensors

if TYPE_CHECKING:
    from torch import Tensor

SUFFIX = ".gguf"
_ARCHITECTURES = ("llama", "qwen2", "qwen3")
_LLAMA3_FACTORS = "rope_freqs.weight"
_LAYER = (
    *(f"self_attn.{name}_proj" for name in "qkvo"),
    *(f"self_attn.{name}_norm" for name in "qk"),
    *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
    "input_layernorm",
    "post_attention_layernorm",
)
_READ = "block_count embedding_length feed_forward_length context_length rope.freq_base rope.dimension_count".split()
_READ += [f"attention.{name}" for name in ("head_count", "head_count_kv", "key_length", "value_length")]
_READ += ["attention.layer_norm_rms_epsilon", "rope.scaling.type", "rope.scaling.factor"]
_WITHOUT_EFFECT = ("vocab_size", "tensor_data_layout", "rope.scaling.finetuned", "rope.scaling.original_context_length")
# What else a file may say of itself, and the only values that a model here can have.
_ONLY = {
    "rope.scaling.attn_factor": 1.0,
    "attention.causal": True,
    "attention.sliding_window": 0,
    "expert_count": 0,
    "expert_used_count": 0,
}
# The parameters with which every Llama 3 was scaled, but for the factor.
_LOW_TURNS, _HIGH_TURNS, _ORIGINAL_LENGTH = 1.0, 4.0, 8192


def find_gguf(source: Path) -> Path | None:
    """Return the GGUF file that `source` is, or that a directory without other weights holds; None without one.

    Raises FileError if there are several.
    """
    if source.is_file():
        return source if source.suffix == SUFFIX else None
    found = sorted(source.glob(f"*{SUFFIX}")) if source.is_dir() else []
    if not found or any(source.glob("*.safetensors")) or any(source.glob("pytorch_model*")):
        return None
    if len(found) > 1:
        raise FileError(str(source), "holds several GGUF files", f"give one of them, such as --model {found[0]}")
    return found[0]


class GgufFile(LazyTensors):
    """The weights of a GGUF file by Hugging Face's names, each read and dequantized when it is accessed.

    Raises FileError if the package gguf is missing, or the file is not one that can be imported.
    """

    def __init__(self, path: Path):
        try:
            import gguf
        except ImportError:
            problem = "needs the package gguf, which is not installed"
            raise FileError(str(path), problem, "run: pip install gguf") from None
        self.path = path
        with self._readable():
            reader = gguf.GGUFReader(path)
            self._fields = {name: field.contents() for name, field in reader.fields.items()}
            self._file_tensors = {tensor.name: tensor for tensor in reader.tensors}
        self.architecture = self._fields.get("general.architecture")
        if self.architecture not in _ARCHITECTURES:
            problem = f"has the architecture {self.architecture!r:.100}, which cannot be imported"
            raise FileError(str(path), problem, f"{', '.join(_ARCHITECTURES)} can")
        if self._fields.get("split.count", 0) > 1:
            problem = "is a part of a model"
            raise FileError(str(path), problem, "join the parts first: llama-gguf-split --merge PART OUTPUT")
        names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[self.architecture.upper()], self._key("block_count"))
        ours = ["model.embed_tokens", "model.norm", "lm_head"]
        ours += [f"model.layers.{layer}.{name}" for layer in range(self._key("block_count")) for name in _LAYER]
        renamed = {f"{names.get_name(name)}.{kind}": f"{name}.{kind}" for name in ours for kind in ("weight", "bias")}
        self._tensors = {
            renamed.get(name, name): tensor for name, tensor in self._file_tensors.items() if name != _LLAMA3_FACTORS
        }
        super().__init__(self._tensors, self._dequantized)

    def _dequantized(self, name: str) -> Tensor:
        import gguf
        import torch

        tensor = self._tensors[name]
        with self._readable(f"{tensor.name:.100} ({tensor.tensor_type.name})"):
            weights = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy())
        heads = {"q_proj": "attention.head_count", "k_proj": "attention.head_count_kv"}
        if self.architecture == "llama" and (projection := name.split(".")[-2]) in heads:
            # llama.cpp rotates neighbours, transformers the two halves of a head.
            H = self._key(heads[projection], self._key("attention.head_count"))
            weights = weights.unflatten(0, (H, -1, 2)).transpose(1, 2).flatten(0, 2)
        return weights

    @property
    def quantization(self) -> str:
        """The dtypes of the matrices, such as `Q4_K, Q6_K`."""
        kinds = {tensor.tensor_type.name for tensor in self._file_tensors.values() if len(tensor.shape) > 1}
        return ", ".join(sorted(kinds))

    def settings(self) -> dict[str, Any]:
        """Return what the file says of its model as the contents of a `config.json`; UserError, KeyError if it cannot.

        transformers' own defaults count for nothing here: what the file leaves out is what llama.cpp takes it to be.
        """
        embeddings = self._file_tensors.get("token_embd.weight")
        if embeddings is None:
            problem = "lacks token_embd.weight, so it holds no language model"
            raise FileError(str(self.path), problem, "give another file")
        hidden, heads = self._key("embedding_length"), self._key("attention.head_count")
        settings = {
            "model_type": self.architecture,
            "num_hidden_layers": self._key("block_count"),
            "hidden_size": hidden,
            "intermediate_size": self._key("feed_forward_length"),
            "num_attention_heads": heads,
            "num_key_value_heads": self._key("attention.head_count_kv", heads),
            "head_dim": self._key("attention.key_length", hidden // heads),
            "max_position_embeddings": self._key("context_length"),
            "rms_norm_eps": _shortest(self._key("attention.layer_norm_rms_epsilon")),
            "vocab_size": int(embeddings.shape[1]),
            "tie_word_embeddings": "output.weight" not in self._file_tensors,
        }
        for key in ("attention.value_length", "rope.dimension_count"):
            self._require(key, settings["head_dim"])
        settings["rope_parameters"] = self._rope(settings["head_dim"])
        for key, value in _ONLY.items():
            self._require(key, value)
        prefix, known = f"{self.architecture}.", (*_READ, *_ONLY, *_WITHOUT_EFFECT)
        of_model = (name for name in self._fields if name.startswith(prefix))
        if unknown := [name for name in of_model if name.removeprefix(prefix) not in known]:
            problem = f"is {self._fields[unknown[0]]!r:.100} in {self.path}, which cannot be imported"
            raise UserError(unknown[0][:100], problem)
        return settings

    def _rope(self, head_dim: int) -> dict[str, Any]:
        import numpy as np

        theta = _shortest(self._key("rope.freq_base", 10000.0))
        stored = self._file_tensors.get(_LLAMA3_FACTORS)
        # What llama.cpp takes a factor without a type to be.
        kind = self._key("rope.scaling.type", "linear" if stored is None else "none")
        factor = _shortest(self._key("rope.scaling.factor", 1.0))
        if kind not in ("none", "linear"):
            problem = f"is {kind!r:.100} in {self.path}, which cannot be imported"
            raise UserError("rope.scaling.type", problem, "none, linear can")
        if stored is None:
            linear = kind == "linear" and factor != 1.0
            return {"rope_theta": theta, **({"rope_type": "linear", "factor": factor} if linear else {})}
        factors = np.asarray(stored.data, dtype=np.float64).reshape(-1)
        factor = float(factors.max(initial=1.0))
        frequencies = theta ** -(np.arange(0, head_dim, 2) / head_dim)
        turns = _ORIGINAL_LENGTH * frequencies / (2 * np.pi)
        kept = np.clip((turns - _LOW_TURNS) / (_HIGH_TURNS - _LOW_TURNS), 0, 1)
        expected = 1 / ((1 - kept) / factor + kept)
        if factors.shape != expected.shape or not np.allclose(factors, expected, rtol=1e-4) or kind != "none":
            problem = f"scales positions by {_LLAMA3_FACTORS} in a way that is not Llama 3's, which cannot be imported"
            raise FileError(str(self.path), problem, "import the model from its safetensors files")
        return {
            "rope_type": "llama3",
            "rope_theta": theta,
            "factor": _shortest(factor),
            "low_freq_factor": _LOW_TURNS,
            "high_freq_factor": _HIGH_TURNS,
            "original_max_position_embeddings": _ORIGINAL_LENGTH,
        }

    def _key(self, name: str, *default: Any) -> Any:
        """Return a setting of the architecture; KeyError if the file lacks it and there is no default."""
        full = f"{self.architecture}.{name}"
        return self._fields.get(full, *default) if default else self._fields[full]

    def _require(self, name: str, value: Any) -> None:
        if self._key(name, value) != value:
            raise UserError(
                name, f"is {self._key(name)!r:.100} in {self.path}, which cannot be imported", f"{value!r} can"
            )

    def card(self) -> CardFacts:
        names = {"license": "license", "license_name": "license.name", "license_link": "license.link"}
        names["language"] = "languages"
        return licence_and_languages({key: self._fields.get(f"general.{name}") for key, name in names.items()})

    def write_tokenizer(self, directory: Path) -> bool:
        """Write the file's tokenizer into `directory` as transformers converts it; False, with a message, if it cannot.

        transformers drops how some tokenizers split text, which would change their tokens; these are not converted.
        """
        kind, split = (self._fields.get(f"tokenizer.ggml.{name}") for name in ("model", "pre"))
        try:
            from tokenizers import decoders, normalizers
            from transformers import AutoTokenizer
            from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS
        except ImportError:
            reason = "this takes a recent transformers"
        else:
            if kind == "llama" or (kind == "gpt2" and split in (*GGUF_PRE_TOKENIZER_SPLITS, "gpt-2")):
                with self._readable("the tokenizer"):
                    tokenizer = AutoTokenizer.from_pretrained(self.path.parent, gguf_file=self.path.name)
                    if kind == "llama":
                        # transformers has a prefix before all texts without a space at the beginning, SentencePiece
                        # before every text or, if the file says so, before none.
                        steps = [normalizers.Replace(" ", "\u2581")]
                        back = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
                        if self._fields.get("tokenizer.ggml.add_space_prefix", True):
                            steps.insert(0, normalizers.Prepend("\u2581"))
                            back.append(decoders.Strip(" ", 1, 0))
                        tokenizer.backend_tokenizer.normalizer = normalizers.Sequence(steps)
                        tokenizer.backend_tokenizer.pre_tokenizer = None
                        tokenizer.backend_tokenizer.decoder = decoders.Sequence(back)
                    tokenizer.save_pretrained(directory)
                return True
            reason = (
                f"of the kind {kind!s:.100}, {split!s:.100}, which transformers cannot convert without changing tokens"
            )
        command_line.say(
            f"the tokenizer in {self.path} is not imported ({reason}); put the model's {TOKENIZER_JSON} next to the "
            "file, and give the directory"
        )
        return False

    @contextmanager
    def _readable(self, part: str = "") -> Iterator[None]:
        """Turn whatever the package gguf raises for a damaged file into a FileError."""
        try:
            yield
        except OSError:
            raise
        except Exception as error:  # damaged files lead it to wrong indices, types and sizes
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            problem = f"{f'holds {part}, which ' if part else ''}cannot be read ({reason})"
            raise FileError(str(self.path), problem, "download the GGUF file again, or give another") from None


def _shortest(number: float) -> float:
    """Return the shortest decimal number that is the same in fp32, in which GGUF files hold numbers."""
    import numpy as np

    return float(str(np.float32(number)))
