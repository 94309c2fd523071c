"""RULER samples from lm-evaluation-harness's own functions, with their faults fixed.

As the harness calls them, these functions

- draw from the global random generator, so that samples depend on the order of tasks;
- put all lengths into one data set, so that a limit selects only the first length;
- load the tokenizer again, including any code that comes with it;
- never end if the smallest sample is too long (vt, cwe);
- count neither the beginning of the answer (niah) nor the generated tokens (fwe), so that prompts are truncated.

Here, samples are made for one task and length at a time, with their own seed, and checked.
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
"""Samples per task and length that the harness makes by default."""
_ENDLESS = ("sys_vartrack_w_noise_random", "sys_word_pair_random")
"""Functions that make the samples of vt and cwe. They never end if the smallest sample is too long."""
_GENERATORS = ("generate_samples", "sys_kwext", *_ENDLESS)
"""Functions of the harness that make samples."""
_DRAWS = 5
_SAME_TEXT = 50
_ROUNDS = 8


class TooShort(Exception):
    """A task has no valid samples of this length."""


@dataclass(frozen=True)
class Sources:
    """Local files instead of data from the hub, or None."""

    haystack: str | None = None
    squad: str | None = None
    hotpotqa: str | None = None


@dataclass(frozen=True)
class Samples:
    """Samples of one task and length."""

    tasks: dict[str, Any]
    """The tasks for `harness.run`."""
    rows: list[dict[str, Any]]
    tokens: list[int]
    """Lengths of the prompts, including the beginning of the answer."""


def make_samples(
    task: str, length: int, count: int, tokenizer: Callable[..., Any], seed: int, sources: Sources
) -> Samples:
    """Return `count` samples whose prompts and generated tokens fit into `length` tokens.

    The first samples do not depend on `count`. Raises TooShort if the task has no such samples, and ConfigError if its
    data is missing.
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
        # Includes the beginning of the answer, `gen_prefix`, which base models need.
        prompts = [
            harness_task.fewshot_context(row, num_fewshot=0, gen_prefix=harness_task.doc_to_prefix(row)) for row in rows
        ]
        tokens = [len(tokenizer(prompt, verbose=False)["input_ids"]) for prompt in prompts]
        over = max(tokens) + generated - length
        if over <= 0:
            if 2 * min(tokens) < length - generated:
                raise TooShort("its text grows in steps so large that more than half of the length is empty")
            return Samples(tasks, rows, tokens)
        reserve += over
    raise TooShort("its prompts do not fit")


class _Measure:
    """A replacement for the tokenizer in the harness that counts `reserve` additional tokens."""

    def __init__(self, tokenizer: Callable[..., Any], reserve: int):
        self._tokenizer, self._reserve = tokenizer, reserve
        self._last, self._times = "", 0
        self._interruption: BaseException | None = None

    def __call__(self, text: str) -> SimpleNamespace:
        # fwe measures the same text forever if it has no words left and is still too long.
        self._times = self._times + 1 if text == self._last else 0
        self._last = text
        if self._times == _SAME_TEXT:
            raise TooShort("its smallest sample does not fit")
        try:
            return SimpleNamespace(input_ids=range(self.count(text)))
        except BaseException as error:  # Ctrl-C or the end of a job, which vt and cwe would suppress
            self._interruption = error
            raise

    def count(self, text: str) -> int:
        return len(self._tokenizer(text, verbose=False)["input_ids"]) + self._reserve

    def each(self, samples: Iterable[Any], **_: Any) -> Iterator[Any]:
        """Replace `tqdm`: yield the samples, and end the loop after an interruption."""
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
    """Return the samples of a function of the harness, with names in its module patched."""
    module, measure = function.__globals__, _Measure(tokenizer, reserve)
    replaced: dict[str, Any] = {"get_tokenizer": lambda *_, **__: measure, "tqdm": measure.each}
    for name in _GENERATORS:
        if name in module:
            replaced[name] = _limited(module[name], count, measure)
    if "RNG" in module:  # the module's own random generator, whose state persists between calls
        replaced["RNG"] = random.Random(random.getrandbits(64))
    if "get_haystack" in module:
        replaced["get_haystack"] = _haystack(module["get_haystack"], sources.haystack, length)
    if "download_json" in module:
        replaced["download_json"] = _questions(module["download_json"], sources)
        for name in ("read_squad", "read_hotpotqa"):  # bypasses their caches
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
    """Wrap a function of the harness to make at most `count` samples, and to raise TooShort instead of never ending."""

    def limited(*arguments: Any, **options: Any) -> Any:
        options["num_samples"] = min(options.get("num_samples", _MOST), count)
        if function.__name__ in _ENDLESS:
            _refuse_endless(function, options, measure)
        return function(*arguments, **options)

    return limited


def _refuse_endless(function: Callable[..., Any], options: dict[str, Any], measure: _Measure) -> None:
    """Raise TooShort if the smallest samples of vt or cwe do not fit.

    A sample that is too long is drawn again with fewer words, down to `incremental` words, and then forever, in a
    `while True` with a bare `except`.
    """
    defaults = {name: parameter.default for name, parameter in inspect.signature(function).parameters.items()}
    given = {**defaults, **options}
    module, size, length = function.__globals__, given["incremental"], given["max_seq_length"]
    draw = module["generate_input_output"]
    example, room = given.get("icl_example"), length - given["tokens_to_generate"]
    if example is not None:
        room -= measure.count(f"{example['input']} {' '.join(example['outputs'])}\n\n")
    # Samples must not depend on these draws.
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
    """Raise TooShort unless there are enough samples, and their prompts contain the answers."""
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
    """Return a replacement of `get_haystack` that returns words of a file instead of the essays."""

    def given(type_haystack: str) -> Any:
        if type_haystack != "essay":
            return original(type_haystack)
        if file is not None:
            words = Path(file).read_text(encoding="utf-8").split()
            # A word has at least one token. As in RULER, a short haystack is repeated.
            return words * -(-length // len(words))
        try:
            return original(type_haystack)
        except Exception as error:
            problem = f"is null, and RULER's essays cannot be loaded from the hub ({_reason(error)})"
            raise ConfigError("ruler.haystack", problem, "give a long text of your own, FILE.txt") from error

    return given


def _questions(original: Callable[[str], Any], sources: Sources) -> Callable[[str], Any]:
    """Return a replacement of `download_json` that reads questions from a file."""

    def given(url: str) -> Any:
        name = "squad" if "SQuAD" in url else "hotpotqa"
        file = getattr(sources, name)
        if file is not None:
            return json.loads(Path(file).read_bytes())
        try:
            return original(url)
        except Exception as error:
            problem = f"is null, and {url} cannot be loaded ({_reason(error)})"
            raise ConfigError(f"ruler.{name}", problem, "copy the file here and give its path") from error

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
