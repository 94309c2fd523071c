"""Find and run tasks of lm-evaluation-harness. Imports no torch until a task runs.

This module replaces the harness's `simple_evaluate`, which contacts the hub for the model, returns
results on one process only, and seeds random generators once, so that samples depend on earlier
tasks. Here, each call of `run` seeds them, and counts truncated documents.
"""

import contextlib
import io
import logging
import math
import os
import random
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any
from unittest import mock

import lm_eval.tasks
import numpy as np
import tqdm
from lm_eval.api.task import ConfigurableTask
from lm_eval.evaluator import evaluate
from lm_eval.tasks import TaskManager
from lm_eval.tasks._yaml_loader import load_yaml

from megatron_tape.errors import ConfigError, one_line

FEWSHOT_SEED = 1234
"""Seed of few-shot examples; the default of the harness."""
_RESAMPLINGS = 1000
"""Number of bootstrap samples for standard errors."""


def find_tasks(names: Sequence[str], include: Sequence[str]) -> TaskManager:
    """Return an index of tasks that contains all `names`, which are tasks, groups, tags or paths of
    YAML files.

    `include` are directories of task files. The harness's own 14,000 task files are slow to read,
    so they are read only if these directories lack a name. Raises ConfigError for an unknown name.
    """
    # The first index has no tasks of the harness itself (`defaults`), the second has them.
    for defaults in (False, True):
        manager = task_index(tuple(include), defaults)
        known = set(manager.all_tasks)
        if not defaults:
            # Groups in `include` may contain tasks of the harness, and then need the full index.
            known -= set(manager.all_groups)
        missing = [
            name for name in names if name not in known and not name.endswith((".yaml", ".yml"))
        ]
        if not missing:
            return manager
    raise ConfigError(
        "lm_eval.tasks",
        f"has {missing[0]}, which is not a task of lm_eval",
        "list all with lm_eval ls tasks",
    )


@lru_cache(maxsize=4)
def task_index(include: tuple[str, ...], defaults: bool) -> TaskManager:
    """Return the index of the tasks in the directories `include` and, if `defaults`, of the
    harness's own tasks.
    """
    try:
        with quiet():
            return TaskManager(include_path=list(include), include_defaults=defaults)
    except Exception as error:  # the harness does not validate task files
        if not include:  # the harness itself is broken
            raise
        raise ConfigError(
            "lm_eval.include_path",
            f"is {include[0]}, but tasks in it cannot be read ({one_line(error)})",
            "correct the YAML files",
        ) from error


def load_tasks(manager: TaskManager, name: str, fewshot: int | None) -> dict:
    """Load the tasks and groups of a name, and their data, as input of `run`. Raises ConfigError if
    they cannot be loaded.

    `fewshot` is the number of examples in each prompt; None keeps that of each task.
    """
    try:
        with quiet(), seeded(name):
            loaded = manager.load([name])
    except Exception as error:  # from the harness, datasets, the network, or code of the task
        raise ConfigError(
            "lm_eval.tasks",
            f"has {name}, which cannot be loaded: {one_line(error)}",
            "if its data is on the hub, allow this machine to access it, or copy it to the cache of"
            " datasets",
        ) from error

    for task in loaded["tasks"].values():
        # As in the harness's command, a task that sets num_fewshot to 0 gets no examples, whatever
        # `fewshot` is.
        examples = task.get_config("num_fewshot")
        if fewshot is not None and examples != 0:
            examples = fewshot
        task.set_config(key="num_fewshot", value=examples or 0)
        task.set_fewshot_seed(seed=FEWSHOT_SEED)
    return loaded


def own_task(config: dict) -> dict:
    """Make a task from a configuration in the harness's format; return it as input of `run`."""
    with quiet():
        task = ConfigurableTask(config={"num_fewshot": 0, **config})
    task.set_fewshot_seed(seed=FEWSHOT_SEED)
    return {"tasks": {config["task"]: task}, "groups": {}}


def builtin_configuration(folder: str, name: str) -> dict:
    """Load the configuration `name`.yaml in a folder of the harness's tasks, with the functions
    that it names.
    """
    # Importing RULER's functions would download data of nltk that only few of them use.
    with (
        quiet(),
        mock.patch("nltk.download", lambda *_, **__: False),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        config = load_yaml(Path(lm_eval.tasks.__file__).parent / folder / f"{name}.yaml")
    # The task is run by itself, not as a part of the harness's groups.
    for key in ("tag", "group"):
        config.pop(key, None)
    return config


def run(model: Any, tasks: dict, seed: str, limit: int | None = None) -> list[dict]:
    """Run tasks from `load_tasks` or `own_task` on a model of the harness; return an outcome for
    each task and group.

    `seed` is any text. Samples and few-shot examples depend on it, but not on earlier calls.
    `limit` is the maximum number of documents of each task. An outcome is a dictionary with

    - `name`, `version`, and `fewshot`, the number of examples in each prompt;
    - `metrics` by `metric,filter`: `value`, `error` (the standard error or None), and
      `higher_is_better`;
    - `documents`: digests of the documents in order; empty for a group;
    - `values` by `metric,filter`: the value of each document;
    - `responses` to the first request of each document: a text, or a log-likelihood and whether
      greedy decoding would generate the text;
    - `truncated`: the number of truncated documents.
    """
    with (
        quiet(),
        seeded(seed),
        without_bars(),
        contextlib.redirect_stdout(io.StringIO()),
        # Without this variable, the harness forks this process, including the model, once per core
        # to compute standard errors.
        mock.patch.dict(os.environ, DISABLE_MULTIPROC="1"),
    ):
        results = evaluate(
            model,
            tasks,
            limit=limit,
            bootstrap_iters=_RESAMPLINGS,
            log_samples=True,
        )

    # Only a `HarnessModel` records truncated requests. Other models of the harness have no such
    # set.
    truncated = getattr(model, "truncated", set())
    return [
        {
            "name": name,
            "version": str(results["versions"].get(name, "")),
            "metrics": _metrics(values, results["higher_is_better"].get(name) or {}),
            "fewshot": results["n-shot"].get(name),
            **_documents(results["samples"].get(name, []), truncated),
        }
        for name, values in results["results"].items()
    ]


def _metrics(values: dict, higher_is_better: dict) -> dict:
    """Return the field `metrics` of an outcome (see `run`), given the harness's results of a task
    or group, and whether higher values are better, by metric.
    """
    metrics = {}
    for key, value in values.items():
        # Metrics have keys such as `acc,none` and `acc_stderr,none`. Other keys, such as `alias`,
        # have no comma.
        metric, _, filter_name = key.partition(",")
        is_metric = filter_name and not metric.endswith("_stderr")
        if is_metric and isinstance(value, (int, float)):
            error = values.get(f"{metric}_stderr,{filter_name}")
            # The harness gives N/A for metrics without a standard error.
            if not isinstance(error, (int, float)) or not math.isfinite(error):
                error = None
            metrics[key] = {
                "value": float(value),
                "error": error,
                # If the harness does not say it for a metric, higher values count as better.
                "higher_is_better": higher_is_better.get(metric) is not False,
            }
    return metrics


def _documents(samples: list[dict], truncated: set[tuple[str, ...]]) -> dict:
    """Return the fields `documents`, `responses`, `values` and `truncated` of an outcome (see
    `run`).

    `samples` are the harness's records of a task, one for each document and filter. `truncated` has
    the texts of the truncated requests: (prompt,) or (context, continuation).
    """
    # By the number of the document: its record for the first filter. The fields that are read from
    # it are the same for all filters.
    documents = {}
    # Values by `metric,filter`, and by the number of the document.
    values = {}
    for record in samples:
        number = record["doc_id"]
        documents.setdefault(number, record)
        for metric in record["metrics"]:
            by_number = values.setdefault(f"{metric},{record['filter']}", {})
            by_number[number] = record[metric]

    def is_truncated(record: dict) -> bool:
        """Return whether one of the requests of a document was truncated."""
        # Only the texts are compared: a request to generate text also has a dictionary of options.
        requests = [
            tuple(part for part in request if isinstance(part, str))
            for request in record["arguments"]
        ]
        return not truncated.isdisjoint(requests)

    numbers = sorted(documents)
    records = [documents[number] for number in numbers]
    return {
        "documents": [record["doc_hash"][:16] for record in records],
        # The first response to the first request.
        "responses": [record["resps"][0][0] for record in records],
        "values": {
            key: [by_number.get(number) for number in numbers] for key, by_number in values.items()
        },
        "truncated": sum(map(is_truncated, records)),
    }


@contextlib.contextmanager
def seeded(seed: str) -> Iterator[None]:
    """Within the context, seed the random generators of Python, NumPy and torch with a text. Their
    states are restored afterwards.
    """
    import torch

    python_state = random.getstate()
    numpy_state = np.random.get_state()
    torch_state = torch.get_rng_state()
    # `Random` hashes a text in the same way in every process, unlike `hash`.
    seeds = random.Random(seed)
    random.seed(seeds.getrandbits(64))
    np.random.seed(seeds.getrandbits(32))
    torch.manual_seed(seeds.getrandbits(63))
    try:
        yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        torch.set_rng_state(torch_state)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Within the context, log only errors: the harness warns of each truncated request."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


@contextlib.contextmanager
def without_bars() -> Iterator[None]:
    """Within the context, hide progress bars of the harness; the evaluation shows its own."""
    original = tqdm.tqdm.__init__

    def hidden(self: Any, *arguments: Any, **options: Any) -> None:
        """Initialize a progress bar that shows nothing."""
        original(self, *arguments, **options | {"disable": True})

    with mock.patch.object(tqdm.tqdm, "__init__", hidden):
        yield
