"""A model of transformers for lm-evaluation-harness."""

from __future__ import annotations

import copy
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import normalize_gen_kwargs

from megatron_tape.errors import ConfigError
from megatron_tape.evaluation.tasks.harness import quiet


class HarnessModel(HFLM):
    """An `HFLM` that records truncated requests."""

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self.truncated: set[tuple[str, ...]] = set()
        """Texts of requests that were truncated on the left: (prompt,) or (context, continuation)."""

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        for request in requests:
            prompt, options = request.args
            generated = normalize_gen_kwargs(options, self.max_gen_toks)["max_gen_toks"]
            if generated >= self.max_length:
                takes = f"but the model takes only {self.max_length:,} with the prompt"
                problem = f"has {request.task_name}, which generates up to {generated:,} tokens, {takes}"
                raise ConfigError("lm_eval.tasks", problem, "leave it out")
            if len(self.tok_encode(prompt)) > self.max_length - generated:
                self.truncated.add((prompt,))
        return super().generate_until(requests, disable_tqdm)

    def _loglikelihood_tokens(self, requests: list[Any], *arguments: Any, **options: Any) -> list[tuple[float, bool]]:
        for texts, context, continuation in requests:
            if len(continuation) > self.max_length:
                problem = (
                    f"has a text to score of {len(continuation):,} tokens, but the model takes {self.max_length:,}"
                )
                raise ConfigError("lm_eval.tasks", problem, "leave that task out")
            # The last token is predicted, but not an input.
            if texts and len(context) + len(continuation) > self.max_length + 1:
                self.truncated.add(tuple(texts))
        return super()._loglikelihood_tokens(requests, *arguments, **options)


def harness_model(model: Any, batch_size: int = 1, max_length: int | None = None) -> HarnessModel:
    """Return a `HuggingFaceModel` as a model of the harness that truncates to `max_length` tokens."""
    if model.tokenizer.eos_token_id is None:
        problem = f"of {model.info.label} has no token that ends a text, which lm_eval needs"
        raise ConfigError("the tokenizer", problem, "set eos_token in its tokenizer_config.json")
    # The harness sets a padding token; other tasks must not see it.
    tokenizer = copy.deepcopy(model.tokenizer)
    with quiet():
        return HarnessModel(pretrained=model.model, tokenizer=tokenizer, batch_size=batch_size, max_length=max_length)
