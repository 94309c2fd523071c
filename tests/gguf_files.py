"""Models of transformers as GGUF files, as llama.cpp's converter writes them."""

import json

import gguf
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
        writer.add_rope_dimension_count(more.pop("rope__dimension_count", dim))
    for key, value in more.items():
        add = {str: writer.add_string, bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
        add[type(value)](f"{arch}.{key.replace('__', '.')}", value)
    names, tensors = gguf.get_tensor_name_map(gguf.MODEL_ARCH[arch.upper()], layers), {}
    for name, tensor in load_file(source / "model.safetensors").items():
        base, suffix = name.rsplit(".", 1)
        weights = tensor.float().numpy()
        if arch == "llama" and ("q_proj" in name or "k_proj" in name):
            weights = permuted(weights, heads if "q_proj" in name else groups)
        tensors[f"{names.get_name(base)}.{suffix}"] = weights
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
