"""The baseline that `benchmarks.train_step` compares with: transformers' Llama.

It is a RoPE model of the same sizes as this project's, with torch's SDPA. torch's fused AdamW
trains fp32 weights with gradients clipped to a norm of 1; with bf16, the forward and backward pass
use a bf16 copy of the weights. Optionally, torch.compile compiles its layers and its loss.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.measured_model import MeasuredModel, dtype_of, random_batches
from megatron_tape.config.schema import ModelConfig, RunConfig
from megatron_tape.parallel.layout import ParallelLayout, seed_everything
from megatron_tape.training.engine import StepResult

BASELINE = "transformers"
COMPILED = "transformers compiled"
"""The name of the baseline with torch.compile."""


class Llama(nn.Module):
    """transformers' Llama. `forward` takes tokens (B, S) and labels (B, S), and returns the mean
    loss.
    """

    def __init__(self, model: ModelConfig, dtype: torch.dtype, device: torch.device):
        # Only here, since transformers is optional.
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
        with device:  # initializing on the CPU takes long
            self.llama = LlamaForCausalLM(config).to(dtype)
        self.loss = self._loss
        """`_loss`, or its compiled version."""

    def compile_parts(self) -> None:
        """Compile the layers, and the output layer together with the loss, with torch.compile."""
        backend = "inductor"
        # On a CPU, where only tests compile the model, inductor would need a minute.
        if self.llama.device.type != "cuda":
            backend = "aot_eager"
        # All layers share one compilation.
        for layer in self.llama.model.layers:
            layer.compile(backend=backend)
        self.loss = torch.compile(self._loss, backend=backend)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        hidden_states = self.llama.model(tokens).last_hidden_state
        return self.loss(hidden_states, labels)

    def _loss(self, hidden_states: Tensor, labels: Tensor) -> Tensor:
        """Return the mean loss, in fp32 as in training, given the last hidden states (B, S, C) and
        the labels (B, S).
        """
        logits = self.llama.lm_head(hidden_states).float()
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class PlainEngine:
    """An optimizer in plain torch, with the method `train_step` of `training.engine.Engine`.

    `model` has weights in `dtype`, bf16 or fp32; its `forward` returns the loss of a batch.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype):
        self.model = model.train()
        self.fp32_weights = list(model.parameters())
        # Pairs of an fp32 weight, which is trained, and its bf16 copy in the model. There are none
        # with fp32, where the weights of the model itself are trained.
        self.copies: list[tuple[nn.Parameter, nn.Parameter]] = []
        if dtype is torch.bfloat16:
            bf16_weights = self.fp32_weights
            self.fp32_weights = [nn.Parameter(weight.detach().float()) for weight in bf16_weights]
            self.copies = list(zip(self.fp32_weights, bf16_weights))
        self.adam = torch.optim.AdamW(self.fp32_weights, weight_decay=0.01, fused=True)

    def train_step(self, batches: list[dict[str, Tensor]], lr: float) -> StepResult:
        """Take one optimizer step on the mean gradient of all batches. Return their mean loss and
        the gradient's norm before clipping.
        """
        self.adam.param_groups[0]["lr"] = lr
        mean_loss = 0.0
        for batch in batches:
            loss = self.model(**batch) / len(batches)
            loss.backward()
            mean_loss += loss.detach()

        # Gradients are clipped and applied in fp32.
        for fp32_weight, bf16_copy in self.copies:
            fp32_weight.grad = bf16_copy.grad.float()
            bf16_copy.grad = None
        gradient_norm = nn.utils.clip_grad_norm_(self.fp32_weights, 1.0)
        self.adam.step()
        self.adam.zero_grad()
        for fp32_weight, bf16_copy in self.copies:
            bf16_copy.data.copy_(fp32_weight)
        return StepResult(mean_loss.item(), gradient_norm.item(), skipped=False)


class Baseline(MeasuredModel):
    """The baseline with its optimizer, measured like this project's models. `config` is that of the
    RoPE model with the same sizes; `compiled` is whether torch.compile compiles the model.
    """

    def __init__(self, config: RunConfig, layout: ParallelLayout, compiled: bool = False):
        # Not `super()`, which would build a model of this project.
        self.name = BASELINE
        if compiled:
            self.name = COMPILED
        self.config = config
        self.layout = layout
        seed_everything(config.train.seed)
        dtype = dtype_of(config)
        self.model = Llama(config.model, dtype, layout.device)
        if compiled:
            self.model.compile_parts()
        self.batches = random_batches(config, layout)
        self.engine = PlainEngine(self.model, dtype)

    def description(self) -> dict[str, str]:
        """Return no implementations, which are transformers' own."""
        return {}

    def memory(self) -> dict[str, int]:
        """Return the measured peaks in bytes (see `peaks`), without an estimate."""
        # Weights, gradients and Adam's two moments, all in fp32.
        state_bytes = sum(4 * weight.nbytes for weight in self.engine.fp32_weights)
        copied_bytes = sum(weight.nbytes for _, weight in self.engine.copies)
        return self.peaks(state_bytes + copied_bytes)

    def release(self) -> None:
        """Free the memory of the model and its optimizer, which cannot be used afterwards."""
        self.engine = self.model = self.batches = None
