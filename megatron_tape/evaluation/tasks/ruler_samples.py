"""Make samples of RULER's tasks with the functions of lm-evaluation-harness, without their defects.

When the harness calls these functions, they

- draw from the global random generator, so that samples depend on the order of tasks;
- put all lengths into one dataset, so that a limit on the number of samples keeps only the first
  length;
- load the tokenizer again, including any code that comes with it;
- never return if the smallest sample is too long (tasks vt and cwe);
- ignore the tokens of the beginning of the answer (niah tasks) or of the generated answer (fwe), so
  that prompts are truncated.

Here, samples are made for one task and length at a time, with a seed of their own, and checked.
"""

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

from megatron_tape.config.evaluation import RulerSettings
from megatron_tape.errors import ConfigError, one_line
from megatron_tape.evaluation.tasks.harness import (
    builtin_configuration,
    own_task,
    quiet,
    seeded,
    without_bars,
)

_DEFAULT_COUNT = 500
"""Number of samples per task and length that the harness makes by default."""
_ENDLESS = ("sys_vartrack_w_noise_random", "sys_word_pair_random")
"""Functions of the harness that make samples of vt and cwe. They never return if the smallest
sample is too long.
"""
_GENERATORS = ("generate_samples", "sys_kwext", *_ENDLESS)
"""Functions of the harness that make samples."""
_DRAWS = 5
"""Number of smallest samples that are drawn to find out whether they fit."""
_SAME_TEXT = 50
"""Number of times that a text is tokenized in a row before it counts as an endless loop."""
_ROUNDS = 8
"""Maximum number of attempts to make samples short enough."""


class TooShort(Exception):
    """A task has no valid samples of this length."""


@dataclass(frozen=True)
class Samples:
    """Samples of one task and length."""

    tasks: dict[str, Any]
    """The tasks for `harness.run`."""
    rows: list[dict[str, Any]]
    """The samples as the harness represents them, such as with the expected answers in `outputs`.
    """
    tokens: list[int]
    """Number of tokens of each prompt, including the beginning of the answer."""


def make_samples(
    task: str,
    length: int,
    count: int,
    tokenizer: Callable[..., Any],
    settings: RulerSettings,
) -> Samples:
    """Return `count` samples whose prompts and generated tokens fit into `length` tokens.

    The first samples do not depend on `count`. `settings` has the seed, and files to read instead
    of downloading data. Raises TooShort if the task has no samples that fit, and ConfigError if its
    data is missing.
    """
    config = builtin_configuration("ruler", task)
    available = length - config["generation_kwargs"]["max_gen_toks"]  # tokens for the prompt
    reserve = 0  # tokens that each text is counted as longer than it is
    for _ in range(_ROUNDS):
        counter = _TokenCounter(tokenizer, reserve)
        # Each round draws the same samples, as far as they fit.
        with seeded(f"{settings.seed} {task} {length}"):
            rows = _generate(task, config["custom_dataset"], length, count, counter, settings)
        _check_samples(task, rows, count)

        data = datasets.Dataset.from_list(rows)
        # The default `data=data` binds the samples of this round, not those of a later one.
        tasks = own_task({**config, "custom_dataset": lambda data=data, **_: {"test": data}})
        (harness_task,) = tasks["tasks"].values()
        # Includes the beginning of the answer, `gen_prefix`, which base models need.
        prompts = [
            harness_task.fewshot_context(row, 0, gen_prefix=harness_task.doc_to_prefix(row))
            for row in rows
        ]
        tokens = [len(tokenizer(prompt, verbose=False)["input_ids"]) for prompt in prompts]
        if max(tokens) <= available:
            if 2 * min(tokens) < available:
                raise TooShort(
                    "its text grows in steps so large that half of the length stays unused"
                )
            return Samples(tasks, rows, tokens)
        # The harness did not count some tokens of these prompts. In the next round, it counts
        # `reserve` more tokens for each text, and so makes shorter prompts.
        reserve += max(tokens) - available
    raise TooShort("its prompts do not fit")


class _TokenCounter:
    """Replaces the harness's tokenizer: adds `reserve` to the number of tokens, and detects endless
    loops.
    """

    def __init__(self, tokenizer: Callable[..., Any], reserve: int):
        self._tokenizer = tokenizer
        self._reserve = reserve
        self._last = ""
        """The text that was tokenized last."""
        self._times = 0
        """Number of times that this text was tokenized in a row."""
        self._interruption: BaseException | None = None
        """The first error or interruption while a text was tokenized."""

    def __call__(self, text: str) -> SimpleNamespace:
        # fwe tokenizes the same text forever if it has no words left and is still too long.
        if text != self._last:
            self._times = 0
        self._last = text
        self._times += 1
        if self._times > _SAME_TEXT:
            raise TooShort("its smallest sample does not fit")
        try:
            # The harness uses only the length of `input_ids`.
            return SimpleNamespace(input_ids=range(self.count(text)))
        except BaseException as error:  # such as from Ctrl-C, which vt and cwe would suppress
            self._interruption = error
            raise

    def count(self, text: str) -> int:
        """Return the number of tokens of a text, plus `reserve`."""
        return len(self._tokenizer(text, verbose=False)["input_ids"]) + self._reserve

    def each(self, samples: Iterable[Any], **_: Any) -> Iterator[Any]:
        """Replace `tqdm`: yield the samples, and end the loop after an interruption."""
        for sample in samples:
            yield sample
            if self._interruption is not None:
                raise self._interruption


def _generate(
    task: str,
    function: Callable[..., Any],
    length: int,
    count: int,
    counter: _TokenCounter,
    settings: RulerSettings,
) -> list[dict]:
    """Call a function of the harness that makes samples, with parts of its module replaced; return
    the samples.
    """
    module = function.__globals__
    replaced: dict[str, Any] = {"get_tokenizer": lambda *_, **__: counter, "tqdm": counter.each}
    for name in _GENERATORS:
        if name in module:
            replaced[name] = _limited(module[name], count, counter)
    if "RNG" in module:  # a random generator of the module, whose state would persist between calls
        replaced["RNG"] = random.Random(random.getrandbits(64))
    if "get_haystack" in module:
        replaced["get_haystack"] = _haystack(module["get_haystack"], settings.haystack, length)
    if "download_json" in module:
        replaced["download_json"] = _questions(module["download_json"], settings)
        for name in ("read_squad", "read_hotpotqa"):  # without their caches
            replaced[name] = module[name].__wrapped__

    # Niah tasks import `generate_samples` from another module. Sentences are split there, so the
    # function that splits them is replaced there.
    splitting = {}
    if not has_punkt():
        splitting["cached_sent_tokenize"] = _sentences
    splitting_module = module
    if "generate_samples" in module:
        splitting_module = module["generate_samples"].__globals__

    with (
        mock.patch.dict(splitting_module, splitting),
        mock.patch.dict(module, replaced),
        quiet(),
        without_bars(),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        try:
            # The name of a tokenizer is required, but `get_tokenizer` is replaced.
            return function(max_seq_lengths=[length], tokenizer="given")["test"].to_list()
        except ConfigError:  # a ValueError too, of `_haystack` or `_questions`
            raise
        except ValueError as error:  # such as of random.sample, without room for all needles
            raise TooShort(one_line(error)) from error
        except IndexError:  # of a list of questions
            raise ConfigError(
                "ruler.samples",
                f"is {count}, but the data of {task} has fewer questions",
                "set it lower",
            ) from None
        except KeyError as error:
            if "download_json" not in module:
                raise
            raise ConfigError(
                "ruler.squad and ruler.hotpotqa",
                f"have other contents than expected: {task} finds no {error} in them",
                "give dev-v2.0.json and hotpot_dev_distractor_v1.json",
            ) from None


def _limited(
    function: Callable[..., Any], count: int, counter: _TokenCounter
) -> Callable[..., Any]:
    """Return a function of the harness that makes at most `count` samples, and raises TooShort
    instead of looping forever.
    """

    def limited(*arguments: Any, **options: Any) -> Any:
        """Call the function with at most `count` as its number of samples."""
        # Making fewer samples does not change them: the first ones do not depend on the number.
        options["num_samples"] = min(options.get("num_samples", _DEFAULT_COUNT), count)
        if function.__name__ in _ENDLESS:
            _refuse_endless(function, options, counter)
        return function(*arguments, **options)

    return limited


def _refuse_endless(function: Callable[..., Any], options: dict, counter: _TokenCounter) -> None:
    """Raise TooShort if the smallest samples of vt or cwe do not fit.

    If a sample is too long, the harness draws it again with fewer words; at `incremental` words, it
    does so forever.
    """
    parameters = inspect.signature(function).parameters
    arguments = {name: parameter.default for name, parameter in parameters.items()} | options
    # Samples grow in steps of so many words, so this is also the smallest size.
    size = arguments["incremental"]
    length = arguments["max_seq_length"]
    available = length - arguments["tokens_to_generate"]
    # Samples of vt begin with an example, which takes some of the tokens. When the harness makes
    # the example itself, there is none.
    example = arguments.get("icl_example")
    if example is not None:
        available -= counter.count(f"{example['input']} {' '.join(example['outputs'])}\n\n")

    module = function.__globals__
    draw = module["generate_input_output"]
    # The draws below must not change the state of the module's generator: samples depend on it.
    replaced = {"RNG": random.Random(0)} if "RNG" in module else {}
    with seeded("the smallest samples"), mock.patch.dict(module, replaced):
        for _ in range(_DRAWS):
            if "num_chains" in arguments:  # vt
                chains = (arguments["num_chains"], arguments["num_hops"])
                text, _ = draw(size, *chains, is_icl=example is None)
            else:
                _, text, _ = draw(size, length)
            if counter.count(text) > available:
                raise TooShort("its smallest sample does not fit")


def _check_samples(task: str, rows: list[dict], count: int) -> None:
    """Raise TooShort if there are too few samples, or if prompts lack their answers (except for qa
    tasks).
    """
    if len(rows) < count:
        raise TooShort("not all of its samples fit")
    for row in rows:
        answers = row["outputs"]
        # In qa tasks, the text need not contain the answers word for word.
        is_question = task.startswith("qa_")
        if not answers or not (is_question or all(answer in row["input"] for answer in answers)):
            raise TooShort("its samples lack their answers")
        if task == "fwe":
            # The text follows the instruction, which ends with these words. fwe asks for its three
            # most frequent words, so the fourth must be less frequent than the third.
            text = row["input"].partition("coded words. ")[2]
            ranks = Counter(re.findall(r"\b[a-z]{6}\b", text)).most_common(4)
            unique = len(ranks) == 4 and ranks[2][1] > ranks[3][1]
            if not unique or {word for word, _ in ranks[:3]} != set(answers):
                raise TooShort("it has no unique set of three most frequent words")


def _haystack(
    original: Callable[[str], Any], file: str | None, length: int
) -> Callable[[str], Any]:
    """Return a replacement of `get_haystack` that returns the words of a file, if given, instead of
    the essays.
    """

    def get_haystack(type_haystack: str) -> Any:
        """Return the text in which needles are hidden, for a type such as `essay`."""
        # Other types are repeated sentences or needles, which need no file.
        if type_haystack != "essay":
            return original(type_haystack)
        if file is not None:
            words = Path(file).read_text(encoding="utf-8").split()
            # As in RULER, a short haystack is repeated. `length` words are enough, since a word has
            # at least one token.
            return words * -(-length // len(words))
        try:
            return original(type_haystack)
        except Exception as error:  # of the network or the hub
            raise ConfigError(
                "ruler.haystack",
                f"is null, and RULER's essays cannot be loaded from the hub ({one_line(error)})",
                "set it to the path of a long text",
            ) from error

    return get_haystack


def _questions(original: Callable[[str], Any], settings: RulerSettings) -> Callable[[str], Any]:
    """Return a replacement of `download_json` that reads questions from a file, if given."""

    def download_json(url: str) -> Any:
        """Return the content of the file, or of the URL."""
        name = "squad" if "SQuAD" in url else "hotpotqa"
        file = getattr(settings, name)
        if file is not None:
            return json.loads(Path(file).read_bytes())
        try:
            return original(url)
        except Exception as error:  # of the network
            raise ConfigError(
                f"ruler.{name}",
                f"is null, and {url} cannot be loaded ({one_line(error)})",
                "download the file, and set this to its path",
            ) from error

    return download_json


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
    """Split a text into sentences with nltk's rules, but without its list of English
    abbreviations.
    """
    from nltk.tokenize.punkt import PunktSentenceTokenizer

    return PunktSentenceTokenizer().tokenize(text)
