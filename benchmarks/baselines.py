"""Baselines: models of other libraries that `benchmarks.train_step` compares with, Llama and
GPTModel.

transformers' Llama uses torch's SDPA, Megatron-core's GPTModel uses Megatron's local layers. Both
are RoPE models of the same sizes as this project's. torch's fused AdamW trains fp32 weights with
gradients clipped to a norm of 1; with bf16, the forward and backward pass use a bf16 copy of the
weights.
"""

import importlib.util

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.measured_model import MeasuredModel, dtype_of, random_batches
from megatron_tape.config.schema import ModelConfig, RunConfig
from megatron_tape.parallel.layout import ParallelLayout, seed_everything
from megatron_tape.training.engine import StepResult


class Llama(nn.Module):
    """transformers' Llama. `forward` takes tokens (B, S) and labels (B, S) and returns the mean
    loss.
    """

    def __init__(self, model: ModelConfig, dtype: torch.dtype, layout: ParallelLayout):
        from transformers import LlamaConfig, LlamaForCausalLM

        super().__init__()
        config = LlamaConfig(
            hidden_size=model.hidden_size,
            intermediate_size=model.ffn_hidden_size,
            num_hidden_layers=model.num_layers,
            num_attention_heads=model.num_attention_heads,
            vocab_size=model.vocab_size,
            max_position_embeddings=model.seq_length,
            tie_word_embeddings=False,
            use_cache=False,
            attn_implementation="sdpa",
        )
        with layout.device:  # initializing on the CPU takes long
            self.llama = LlamaForCausalLM(config).to(dtype)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.llama(tokens).logits.float().flatten(0, 1), labels.flatten())


class Megatron(nn.Module):
    """Megatron-core's GPTModel with local layers. `forward` has the arguments and the result of
    `Llama.forward`.
    """

    def __init__(self, model: ModelConfig, dtype: torch.dtype, layout: ParallelLayout):
        from megatron.core.models.gpt import GPTModel, gpt_layer_specs
        from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
        from megatron.core.transformer import TransformerConfig

        super().__init__()
        on_gpu = layout.device.type == "cuda"
        S = model.seq_length
        config = TransformerConfig(
            num_layers=model.num_layers,
            hidden_size=model.hidden_size,
            num_attention_heads=model.num_attention_heads,
            ffn_hidden_size=model.ffn_hidden_size,
            activation_func=F.silu,
            gated_linear_unit=True,
            add_bias_linear=False,
            normalization="RMSNorm",
            hidden_dropout=0.0,
            attention_dropout=0.0,
            params_dtype=dtype,
            pipeline_dtype=dtype,
            bf16=dtype is torch.bfloat16,
            use_cpu_initialization=not on_gpu,
            bias_dropout_fusion=on_gpu,
            masked_softmax_fusion=importlib.util.find_spec(
                "scaled_upper_triang_masked_softmax_cuda"
            )
            is not None,
            gradient_accumulation_fusion=False,
        )
        # GPTModel draws initial weights and dropout from this stream.
        state = torch.cuda.get_rng_state() if on_gpu else torch.get_rng_state()
        get_cuda_rng_tracker().set_states({"model-parallel-rng": state})
        self.gpt = GPTModel(
            config=config,
            transformer_layer_spec=gpt_layer_specs.get_gpt_layer_local_spec(
                normalization="RMSNorm"
            ),
            vocab_size=model.vocab_size,
            max_sequence_length=S,
            position_embedding_type="rope",
            share_embeddings_and_output_weights=False,
            pg_collection=layout.groups,
        ).to(layout.device)
        self.positions = torch.arange(S, device=layout.device)[None]
        self.mask = torch.ones(S, S, dtype=torch.bool, device=layout.device).triu(1)[None, None]

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        return self.gpt(tokens, self.positions.expand_as(tokens), self.mask, labels=labels).mean()


BASELINES = {"transformers": Llama, "megatron": Megatron}


class PlainEngine:
    """An optimizer in plain torch, with the method `train_step` of `training.engine.Engine`."""

    def __init__(self, model: nn.Module):
        self.model, self.weights = model.train(), list(model.parameters())
        self.in_bf16 = self.weights[0].dtype is torch.bfloat16
        if self.in_bf16:
            self.fp32 = [nn.Parameter(w.detach().float()) for w in self.weights]
        else:
            self.fp32 = self.weights
        self.adam = torch.optim.AdamW(self.fp32, weight_decay=0.01, fused=True)

    def train_step(self, batches: list[dict[str, Tensor]], lr: float) -> StepResult:
        """Take one optimizer step on the mean gradient of all batches."""
        self.adam.param_groups[0]["lr"] = lr
        total = 0.0
        for batch in batches:
            loss = self.model(**batch) / len(batches)
            loss.backward()
            total += loss.detach()
        if self.in_bf16:
            for master, weight in zip(self.fp32, self.weights):
                master.grad = weight.grad.float()
                weight.grad = None
        norm = nn.utils.clip_grad_norm_(self.fp32, 1.0)
        self.adam.step()
        self.adam.zero_grad()
        if self.in_bf16:
            for master, weight in zip(self.fp32, self.weights):
                weight.data.copy_(master)
        return StepResult(total.item(), norm.item(), skipped=False)


class Baseline(MeasuredModel):
    """A baseline with its optimizer, measured like this project's models. `config` is the RoPE
    model's.
    """

    def __init__(self, name: str, config: RunConfig, layout: ParallelLayout):
        self.name = name
        self.config = config
        self.layout = layout
        seed_everything(config.train.seed)
        self.model = BASELINES[name](config.model, dtype_of(config), layout)
        self.batches = random_batches(config, layout)
        self.engine = PlainEngine(self.model)

    def description(self) -> dict[str, str]:
        return {}

    def memory(self) -> dict[str, int]:
        """Return the measured peaks in bytes (see `peaks`), without an estimate."""
        state = sum(4 * weight.nbytes for weight in self.engine.fp32)
        if self.engine.in_bf16:
            copy = sum(weight.nbytes for weight in self.engine.weights)
        else:
            copy = 0
        return self.peaks(state + copy)

    def release(self) -> None:
        self.engine = self.model = self.batches = None
