"""Models of transformers as GGUF files, as llama.cpp's converter writes them."""

import json

import gguf
import numpy as np
from safetensors.torch import load_file

F32 = gguf.GGMLQuantizationType.F32


def permuted(weights, heads):
    """llama.cpp's order of the rows of queries and keys, as its own converter writes them."""
    return weights.reshape(heads, 2, -1, weights.shape[-1]).swapaxes(1, 2).reshape(weights.shape)


def write_gguf(path, source, kind=F32, change=None, tokenizer=None, **more):
    """Write the model of transformers in `source` as llama.cpp's converter does.

    `change` may change the tensors, a dictionary by name; `more` are further settings of the architecture.
    """
    config = json.loads((source / "config.json").read_text())
    arch = {"mistral": "llama"}.get(config["model_type"], config["model_type"])
    heads, groups, layers = (config[f"num_{x}"] for x in ("attention_heads", "key_value_heads", "hidden_layers"))
    rope = config["rope_parameters"]
    writer = gguf.GGUFWriter(path, arch)
    writer.add_name("a model")
    writer.add_block_count(layers)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(groups)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(rope["rope_theta"])
    if (dim := config.get("head_dim")) is not None:
        writer.add_key_length(dim)
        writer.add_value_length(dim)
    for key, value in more.items():
        add = {str: writer.add_string, bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
        add[type(value)](f"{arch}.{key.replace('__', '.')}", value)
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    names, tensors = gguf.get_tensor_name_map(gguf.MODEL_ARCH[arch.upper()], layers), {}
    for name, tensor in load_file(source / "model.safetensors").items():
        base, suffix = name.rsplit(".", 1)
        weights = tensor.float().numpy()
        if arch == "llama" and ("q_proj" in name or "k_proj" in name):
            weights = permuted(weights, heads if "q_proj" in name else groups)
        tensors[f"{names.get_name(base)}.{suffix}"] = weights
    if rope["rope_type"] == "llama3":
        tensors["rope_freqs.weight"] = llama3_factors(rope, dim or config["hidden_size"] // heads)
    if change is not None:
        change(tensors)
    for name, weights in tensors.items():
        blocks = kind if weights.ndim == 2 and weights.shape[-1] % 32 == 0 else F32
        writer.add_tensor(name, gguf.quantize(weights, blocks), raw_dtype=blocks)
    if tokenizer is not None:
        tokenizer(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def llama3_factors(rope, dim):
    """The divisors of the frequencies, by the loop in llama.cpp's converter."""
    factors, original = [], rope["original_max_position_embeddings"]
    for index in range(0, dim, 2):
        wavelength = 2 * np.pi * rope["rope_theta"] ** (index / dim)
        if wavelength < original / rope["high_freq_factor"]:
            factors.append(1.0)
        elif wavelength > original / rope["low_freq_factor"]:
            factors.append(rope["factor"])
        else:
            width = rope["high_freq_factor"] - rope["low_freq_factor"]
            smooth = (original / wavelength - rope["low_freq_factor"]) / width
            factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(factors, dtype=np.float32)
