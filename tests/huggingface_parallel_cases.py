"""Loads an exported model on every process of a group, cut by transformers, and compares it with the whole one."""

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig
from transformers.distributed import DistributedConfig

WAYS = {
    "greedy": dict(),
    "beams": dict(num_beams=3),
    "static": dict(cache_implementation="static"),
    "uncached": dict(use_cache=False),
}


def prompts():
    """A row of 9 tokens behind padding, and one of 13."""
    ids = torch.randint(3, 60, (2, 13), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    return dict(input_ids=ids * mask, attention_mask=mask)


def load(path, **options):
    return AutoModelForCausalLM.from_pretrained(path, trust_remote_code=True, **options).eval()


def main(folder, directory, too_few_groups):
    whole, cut = load(directory), load(directory, distributed_config=DistributedConfig(tp_size=2))
    cut.save_pretrained(f"{folder}/saved")
    models = (cut, whole)
    kept = {"logits": [model(**prompts()).logits.detach() for model in models]}
    kept["tp_plan"] = [load(directory, tp_plan="auto")(**prompts()).logits.detach(), kept["logits"][1]]
    options = dict(max_new_tokens=12, do_sample=False, pad_token_id=0)
    for name, way in WAYS.items():
        kept[name] = [model.generate(**prompts(), **options, disable_compile=True, **way) for model in models]
    rows = [row[mask.bool()].tolist() for row, mask in zip(*prompts().values())]
    batched = cut.generate_batch(
        rows,
        GenerationConfig(**options, eos_token_id=-1),
        continuous_batching_config=ContinuousBatchingConfig(num_blocks=24, max_batch_tokens=16),
    )
    tokens = torch.tensor([batched[key].generated_tokens for key in sorted(batched)])
    kept["batched"] = [tokens, kept["greedy"][1][:, 13:]]

    for model in models:
        model.train()
        model(**prompts(), labels=prompts()["input_ids"]).loss.backward()
    parameters = dict(cut.named_parameters())
    for name, parameter in whole.named_parameters():
        found = parameters[name].grad
        found = found.full_tensor() if hasattr(found, "full_tensor") else found
        # What every process holds must have the same gradient on each of them.
        others = [torch.empty_like(found) for _ in range(2)]
        dist.all_gather(others, found.contiguous())
        assert torch.equal(*others), name
        kept[f"gradient of {name}"] = [found, parameter.grad]
    local = {name: tuple(p.to_local().shape) for name, p in parameters.items() if hasattr(p, "to_local")}
    try:
        load(too_few_groups, distributed_config=DistributedConfig(tp_size=2))(**prompts())
        refused = None
    except ValueError as error:
        refused = str(error)
    dist.barrier()
    saved = load_file(f"{folder}/saved/model.safetensors")
    return {"kept": kept, "local": local, "refused": refused, "saved": saved}
