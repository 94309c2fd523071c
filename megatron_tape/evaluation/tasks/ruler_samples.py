"""The samples of lm-evaluation-harness's RULER, made by its own functions, without their faults.

As called by the harness, they draw from the one global generator, so that samples depend on the order of tasks; they
take lengths to be samples of one data set, of which a limit takes the first length only; they load the tokenizer anew,
with whatever code comes with it; they never end where the smallest sample is too long (vt, cwe); and they count neither
the beginning of the answer (niah) nor what is generated (fwe), so that the model would lose the beginning of a prompt.
Here one task of one length is made at a time, with seeds of its own, and checked.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import json
import random
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import datasets

from megatron_tape.errors import ConfigError
from megatron_tape.evaluation.tasks.harness import builtin_configuration, own_task, quiet, seeded, without_bars

_MOST = 500
"""Samples per task and length that the harness's functions make unless they are stopped."""
_ENDLESS = ("sys_vartrack_w_noise_random", "sys_word_pair_random")
"""What makes the samples of vt and cwe, and never ends where the smallest one is too long."""
_GENERATORS = ("generate_samples", "sys_kwext", *_ENDLESS)
"""What makes the samples in the harness's modules."""
_DRAWS = 5
_SAME_TEXT = 50
_ROUNDS = 8


class TooShort(Exception):
    """A task has no proper samples of so few tokens."""


@dataclass(frozen=True)
class Sources:
    """What tasks read that else comes from the hub: files, or None."""

    haystack: str | None = None
    squad: str | None = None
    hotpotqa: str | None = None


@dataclass(frozen=True)
class Samples:
    """The samples of one task of one length."""

    tasks: dict[str, Any]
    """As `harness.run` takes them."""
    rows: list[dict[str, Any]]
    tokens: list[int]
    """Of the prompts, each with the beginning of its answer."""


def make_samples(
    task: str, length: int, count: int, tokenizer: Callable[..., Any], seed: int, sources: Sources
) -> Samples:
    """Return `count` samples whose prompts fit into `length` tokens together with what the task generates.

    The first ones are the same whatever `count` is. Raises TooShort if the task has no such samples, and ConfigError if
    its data cannot be had.
    """
    config = builtin_configuration("ruler", task)
    generated, reserve = config["generation_kwargs"]["max_gen_toks"], 0
    for _ in range(_ROUNDS):
        with seeded(f"{seed} {task} {length}"):
            rows = _generate(task, config["custom_dataset"], length, count, tokenizer, reserve, sources)
        _check(task, rows, count)
        data = datasets.Dataset.from_list(rows)
        tasks = own_task({**config, "custom_dataset": lambda data=data, **_: {"test": data}})
        (harness_task,) = tasks["tasks"].values()
        # Among them the beginning of the answer, `gen_prefix`, without which a model that only continues texts fails.
        prompts = [
            harness_task.fewshot_context(row, num_fewshot=0, gen_prefix=harness_task.doc_to_prefix(row)) for row in rows
        ]
        tokens = [len(tokenizer(prompt, verbose=False)["input_ids"]) for prompt in prompts]
        over = max(tokens) + generated - length
        if over <= 0:
            if 2 * min(tokens) < length - generated:
                raise TooShort("its text grows in steps so large that more than half of the length stays empty")
            return Samples(tasks, rows, tokens)
        reserve += over
    raise TooShort("its prompts do not fit")


class _Measure:
    """Stands in for the tokenizer where the harness measures texts: counts `reserve` tokens more than there are."""

    def __init__(self, tokenizer: Callable[..., Any], reserve: int):
        self._tokenizer, self._reserve = tokenizer, reserve
        self._last, self._times = "", 0
        self._interruption: BaseException | None = None

    def __call__(self, text: str) -> SimpleNamespace:
        # fwe measures the same text for ever if its words are used up and it is still too long.
        self._times = self._times + 1 if text == self._last else 0
        self._last = text
        if self._times == _SAME_TEXT:
            raise TooShort("its smallest sample does not fit")
        try:
            return SimpleNamespace(input_ids=range(self.count(text)))
        except BaseException as error:  # Ctrl-C or the end of a job, which vt and cwe would swallow
            self._interruption = error
            raise

    def count(self, text: str) -> int:
        return len(self._tokenizer(text, verbose=False)["input_ids"]) + self._reserve

    def each(self, samples: Iterable[Any], **_: Any) -> Iterator[Any]:
        """Stand in for `tqdm`: yield the samples' numbers, and end the loop over them after an interruption."""
        for sample in samples:
            if self._interruption is not None:
                raise self._interruption
            yield sample
        if self._interruption is not None:
            raise self._interruption


def _generate(
    task: str,
    function: Callable[..., Any],
    length: int,
    count: int,
    tokenizer: Callable[..., Any],
    reserve: int,
    sources: Sources,
) -> list[dict[str, Any]]:
    """Return what one of the harness's functions makes, with its module's names replaced meanwhile."""
    module, measure = function.__globals__, _Measure(tokenizer, reserve)
    replaced: dict[str, Any] = {"get_tokenizer": lambda *_, **__: measure, "tqdm": measure.each}
    for name in _GENERATORS:
        if name in module:
            replaced[name] = _limited(module[name], count, measure)
    if "RNG" in module:  # a generator of the module's own, which goes on from call to call
        replaced["RNG"] = random.Random(random.getrandbits(64))
    if "get_haystack" in module:
        replaced["get_haystack"] = _haystack(module["get_haystack"], sources.haystack, length)
    if "download_json" in module:
        replaced["download_json"] = _questions(module["download_json"], sources)
        for name in ("read_squad", "read_hotpotqa"):  # past their caches
            replaced[name] = module[name].__wrapped__
    splitting: dict[str, Any] = {} if has_punkt() else {"cached_sent_tokenize": _sentences}
    makers = module["generate_samples"].__globals__ if "generate_samples" in module else module
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(makers, splitting))
        stack.enter_context(mock.patch.dict(module, replaced))
        stack.enter_context(quiet())
        stack.enter_context(without_bars())
        stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        try:
            return function(max_seq_lengths=[length], tokenizer="given")["test"].to_list()
        except ConfigError:
            raise
        except ValueError as error:
            raise TooShort(str(error).split("\n")[0]) from error
        except IndexError:
            problem = f"is {count}, and there are fewer questions for {task}"
            raise ConfigError("ruler.samples", problem, "set it lower") from None
        except KeyError as error:
            if "download_json" not in module:
                raise
            key, fix = "ruler.squad and ruler.hotpotqa", "give dev-v2.0.json and hotpot_dev_distractor_v1.json"
            raise ConfigError(key, f"need files of other contents: {task} finds no {error}", fix) from None


def _limited(function: Callable[..., Any], count: int, measure: _Measure) -> Callable[..., Any]:
    """Return a function of the harness that makes no more than `count` samples; TooShort where it would never end."""

    def limited(*arguments: Any, **options: Any) -> Any:
        options["num_samples"] = min(options.get("num_samples", _MOST), count)
        if function.__name__ in _ENDLESS:
            _refuse_endless(function, options, measure)
        return function(*arguments, **options)

    return limited


def _refuse_endless(function: Callable[..., Any], options: dict[str, Any], measure: _Measure) -> None:
    """Raise TooShort if the smallest samples of vt or cwe do not fit.

    They draw a sample that is too long again, with fewer words until there are `incremental` of them, and then for
    ever, in a `while True` whose bare `except` catches everything.
    """
    defaults = {name: parameter.default for name, parameter in inspect.signature(function).parameters.items()}
    given = {**defaults, **options}
    module, size, length = function.__globals__, given["incremental"], given["max_seq_length"]
    draw = module["generate_input_output"]
    example, room = given.get("icl_example"), length - given["tokens_to_generate"]
    if example is not None:
        room -= measure.count(f"{example['input']} {' '.join(example['outputs'])}\n\n")
    # The samples themselves must not depend on these draws.
    own = {"RNG": random.Random(0)} if "RNG" in module else {}
    with seeded("the smallest samples"), mock.patch.dict(module, own):
        for _ in range(_DRAWS):
            if "num_chains" in given:  # vt
                text, _ = draw(size, given["num_chains"], given["num_hops"], is_icl=example is None)
            else:
                _, text, _ = draw(size, length)
            if measure.count(text) > room:
                raise TooShort("its smallest sample does not fit")


def _check(task: str, rows: list[dict[str, Any]], count: int) -> None:
    """Raise TooShort unless there are enough samples, and all their answers can be found."""
    if len(rows) < count:
        raise TooShort("not all of its samples fit")
    for row in rows:
        answers, text = row["outputs"], row["input"]
        if not answers or (not task.startswith("qa_") and not all(answer in text for answer in answers)):
            raise TooShort("its samples lack their answers")
        if task == "fwe":
            ranks = Counter(word for word in re.findall(r"\b[a-z]{6}\b", text.partition("coded words. ")[2]))
            first = ranks.most_common(4)
            if len(first) < 4 or {word for word, _ in first[:3]} != set(answers) or first[2][1] == first[3][1]:
                raise TooShort("no three of its words are the most frequent ones")


def _haystack(original: Callable[[str], Any], file: str | None, length: int) -> Callable[[str], Any]:
    """Return what gives the text that needles are hidden in: words of the file instead of those of the essays."""

    def given(type_haystack: str) -> Any:
        if type_haystack != "essay":
            return original(type_haystack)
        if file is not None:
            words = Path(file).read_text(encoding="utf-8").split()
            # A word has a token at least. As in RULER itself, a haystack that is too short is repeated.
            return words * -(-length // len(words))
        try:
            return original(type_haystack)
        except Exception as error:
            problem = f"is null, and RULER's essays cannot be loaded from the hub ({_reason(error)})"
            raise ConfigError("ruler.haystack", problem, "give a long text of your own, FILE.txt") from error

    return given


def _questions(original: Callable[[str], Any], sources: Sources) -> Callable[[str], Any]:
    """Return what gives the questions: from a file instead of from the network."""

    def given(url: str) -> Any:
        name = "squad" if "SQuAD" in url else "hotpotqa"
        file = getattr(sources, name)
        if file is not None:
            return json.loads(Path(file).read_bytes())
        try:
            return original(url)
        except Exception as error:
            problem = f"is null, and {url} cannot be loaded ({_reason(error)})"
            raise ConfigError(f"ruler.{name}", problem, "bring the file here and give it") from error

    return given


def _reason(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).split("\n")[0][:200]


@lru_cache(maxsize=1)
def has_punkt() -> bool:
    """Return whether nltk's data for splitting English sentences is installed."""
    import nltk

    try:
        nltk.data.find("tokenizers/punkt_tab")
    except LookupError:
        return False
    return True


@lru_cache(maxsize=64)
def _sentences(text: str) -> list[str]:
    """Split a text into sentences by nltk's rules, without its list of abbreviations."""
    from nltk.tokenize.punkt import PunktSentenceTokenizer

    return PunktSentenceTokenizer().tokenize(text)
