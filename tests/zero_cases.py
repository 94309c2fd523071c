import torch
from models import small_model
from megatron_tape.config import *
from megatron_tape.engine import Engine
from megatron_tape.model import LanguageModel, transformer_config
from megatron_tape.parallel import initialize_distributed, seed_everything


def run_config(model, tp=1, stage=1, precision="fp32", micro=1, batch=4, **deepspeed):
    return RunConfig(
        model=model,
        data=DataConfig(prefix="unused"),
        optimizer=OptimizerConfig(lr=1e-2, weight_decay=0.1, clip_grad=0.5),
        parallel=ParallelConfig(tensor_model_parallel_size=tp),
        deepspeed=DeepSpeedConfig(zero_stage=stage, **deepspeed),
        train=TrainConfig(steps=10, micro_batch_size=micro, global_batch_size=batch, precision=precision, seed=5),
    )


def engine(config):
    tp = config.parallel.tensor_model_parallel_size
    layout = initialize_distributed(tp)
    seed_everything(config.train.seed, layout)
    dtype = torch.bfloat16 if config.train.precision == "bf16" else torch.float32
    model = LanguageModel(config.model, transformer_config(config.model, tp, config.parallel.uses_sequence_parallel, dtype, config.train.recompute), layout.groups)
    return Engine(model, config, layout), layout


def batch_of(step, config, layout):
    t = config.train
    g = torch.Generator().manual_seed(1000 + step)
    whole = torch.randint(config.model.vocab_size, (t.global_batch_size, config.model.seq_length + 1), generator=g)
    per = t.micro_batch_size
    n = t.global_batch_size // (per * layout.data_parallel_size)
    for m in range(n):
        start = (m * layout.data_parallel_size + layout.data_parallel_rank) * per
        part = whole[start : start + per]
        yield {"tokens": part[:, :-1], "labels": part[:, 1:]}


def train(config, steps=10):
    e, layout = engine(config)
    out = []
    for s in range(steps):
        r = e.train_step(batch_of(s, config, layout), 1e-2 * (s + 1) / 10)
        out.append((r.loss, r.grad_norm))
    return out


def main(folder):
    import torch.distributed as dist
    res = {}
    res["w"] = dist.get_world_size() if dist.is_initialized() else 1
    for tp in (1, 2):
        for stage in (0, 1, 2, 3):
            try:
                res[(tp, stage)] = train(run_config(small_model(), tp, stage))
            except Exception:
                import traceback
                traceback.print_exc()
                res[(tp,stage)] = None
    return res
