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
    """An `HFLM` (lm-evaluation-harness's wrapper of transformers models) that records truncated requests."""

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self.truncated: set[tuple[str, ...]] = set()
        """Texts of requests that were truncated on the left: (prompt,) or (context, continuation)."""

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        for request in requests:
            prompt, options = request.args
            generated = normalize_gen_kwargs(options, self.max_gen_toks)["max_gen_toks"]
            if generated >= self.max_length:
                limit = f"but the model reads at most {self.max_length:,}, including the prompt"
                problem = f"has {request.task_name}, which generates up to {generated:,} tokens, {limit}"
                raise ConfigError("lm_eval.tasks", problem, "remove it")
            if len(self.tok_encode(prompt)) > self.max_length - generated:
                self.truncated.add((prompt,))
        return super().generate_until(requests, disable_tqdm)

    def _loglikelihood_tokens(self, requests: list[Any], *arguments: Any, **options: Any) -> list[tuple[float, bool]]:
        for texts, context, continuation in requests:
            if len(continuation) > self.max_length:
                problem = (
                    f"has an answer of {len(continuation):,} tokens, but the model reads at most {self.max_length:,}"
                )
                raise ConfigError("lm_eval.tasks", problem, "remove its task")
            # The last token is predicted, but the model does not read it.
            if texts and len(context) + len(continuation) > self.max_length + 1:
                self.truncated.add(tuple(texts))
        return super()._loglikelihood_tokens(requests, *arguments, **options)


def harness_model(model: Any, batch_size: int = 1, max_length: int | None = None) -> HarnessModel:
    """Return a `HuggingFaceModel` as a model of the harness, which truncates prompts to `max_length` tokens."""
    if model.tokenizer.eos_token_id is None:
        problem = f"of {model.info.label} has no end-of-text token, which lm_eval requires"
        raise ConfigError("the tokenizer", problem, "set eos_token in its tokenizer_config.json")
    # A copy, since the harness sets a padding token, which would affect other tasks.
    tokenizer = copy.deepcopy(model.tokenizer)
    with quiet():
        return HarnessModel(pretrained=model.model, tokenizer=tokenizer, batch_size=batch_size, max_length=max_length)
