"""A model of transformers for lm-evaluation-harness."""

import copy
from typing import Any
from unittest import mock

from lm_eval.api.instance import Instance
from lm_eval.models import huggingface
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import normalize_gen_kwargs

from megatron_tape.errors import ConfigError
from megatron_tape.evaluation.tasks.harness import quiet


class HarnessModel(HFLM):
    """An `HFLM` (lm-evaluation-harness's wrapper of transformers models) that records truncated
    requests.

    Each text begins with exactly one beginning-of-text token, or with none if the tokenizer adds
    none.
    """

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self.truncated: set[tuple[str, ...]] = set()
        """Texts of requests that were truncated on the left: (prompt,) or (context, continuation).
        """

    def tok_encode(self, *arguments: Any, **options: Any) -> list[int]:
        """Return the token ids of a text, in which `bos_token` has no special meaning."""
        with _no_bos_in_texts():
            return super().tok_encode(*arguments, **options)

    def tok_batch_encode(self, *arguments: Any, **options: Any) -> tuple[Any, Any]:
        """Return the token ids and the attention mask of texts, in which `bos_token` has no special
        meaning.
        """
        with _no_bos_in_texts():
            return super().tok_batch_encode(*arguments, **options)

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Return the log-likelihoods of whole texts."""
        # The harness puts a token before the text, and would score the one that the tokenizer adds
        # as part of the text (https://github.com/EleutherAI/lm-evaluation-harness/issues/3333).
        with mock.patch.object(self, "add_bos_token", False):
            return super().loglikelihood_rolling(requests, disable_tqdm)

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Generate texts, and record the prompts that are truncated for it. Raises ConfigError if
        there is no room for a prompt.
        """
        for request in requests:
            prompt, options = request.args
            most_generated = normalize_gen_kwargs(options, self.max_gen_toks)["max_gen_toks"]
            if most_generated >= self.max_length:
                raise ConfigError(
                    "lm_eval.tasks",
                    f"has {request.task_name}, which generates up to {most_generated:,} tokens, but"
                    f" the model reads at most {self.max_length:,}, including the prompt",
                    "remove it",
                )
            if len(self.tok_encode(prompt)) > self.max_length - most_generated:
                self.truncated.add((prompt,))
        return super().generate_until(requests, disable_tqdm)

    def _loglikelihood_tokens(
        self, requests: list[Any], *arguments: Any, **options: Any
    ) -> list[tuple[float, bool]]:
        """Return log-likelihoods, and record the requests that are truncated for them.

        A request consists of its texts, and the token ids of context and continuation.
        """
        # The harness moves spaces at the end of a context to the continuation. A context of spaces
        # only is then empty, unless the tokenizer adds a token before texts.
        requests = [
            (texts, context or [self.prefix_token_id], answer)
            for texts, context, answer in requests
        ]
        for texts, context, continuation in requests:
            if len(continuation) > self.max_length:
                raise ConfigError(
                    "lm_eval.tasks",
                    f"has an answer of {len(continuation):,} tokens, but the model reads at most"
                    f" {self.max_length:,}",
                    "remove its task",
                )
            # Plus one, since the model does not read the last token, which it only predicts.
            if texts and len(context) + len(continuation) > self.max_length + 1:
                self.truncated.add(tuple(texts))
        return super()._loglikelihood_tokens(requests, *arguments, **options)


def _no_bos_in_texts() -> Any:
    """Return a context in which the characters of `bos_token` at the start of a text are ordinary
    characters, so that the token is added to this text as to any other.

    The harness would take these characters for the token.
    """
    return mock.patch.object(huggingface, "has_bos_prefix", lambda *_: False)


def harness_model(model: Any, batch_size: int, max_length: int | None) -> HarnessModel:
    """Return a `HuggingFaceModel` as a model of the harness, which truncates prompts to
    `max_length` tokens.
    """
    tokenizer = model.tokenizer
    if tokenizer.eos_token_id is None:
        raise ConfigError(
            "the tokenizer",
            f"of {model.info.label} has no end-of-text token, which lm_eval requires",
            "set eos_token in its tokenizer_config.json",
        )
    # The harness encodes prompt and answer separately. If the tokenizer adds a token at the end of
    # each text, such as an end-of-text token, this token would be between prompt and answer.
    last = tokenizer("a", verbose=False)["input_ids"][-1]
    if last != tokenizer("a", add_special_tokens=False, verbose=False)["input_ids"][-1]:
        raise ConfigError(
            "the tokenizer",
            f"of {model.info.label} puts the token {last} after each text, so also between prompt"
            " and answer",
            "remove it from the post_processor in its tokenizer.json",
        )
    with quiet():
        return HarnessModel(
            pretrained=model.model,
            # A copy, since the harness sets a padding token, which would affect other tasks.
            tokenizer=copy.deepcopy(tokenizer),
            batch_size=batch_size,
            max_length=max_length,
        )
