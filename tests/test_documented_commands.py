"""Commands and settings in the documentation exist: programs, options, keys of settings, recipes
and make targets.
"""

import re
import shlex
from functools import cache

import pytest
from test_documentation import PAGES, ROOT, hooks

from megatron_tape.config.schema import RunConfig
from megatron_tape.config.sections import settings_of

PYTHON = re.compile(r"(?:\.venv[\w-]*/bin/)?python3?|torchrun")
JOBS = {
    "slurm/pretrain_tape.sh": "pretrain.train",
    "slurm/extend_tape.sh": "pretrain.extend_context",
    "slurm/evaluate_tape.sh": "pretrain.evaluate",
    "slurm/preprocess.sh": "tools.preprocess_data",
}
"""Job scripts that pass their options on to a program."""
SETTINGS = {setting.key for setting in settings_of(RunConfig)}
SCRIPTS = {command: module for module, command in hooks.installed_commands().items()}
LISTED = {module for group in hooks.PROGRAMS.values() for module in group}
SECTIONS = "|".join(sorted({key.partition(".")[0] for key in SETTINGS}))


def blocks(text):
    """Yield the code blocks that are not Python, and the code within sentences."""
    without = re.sub(r"^```python\n.*?^```", "", text, flags=re.M | re.S)
    prose = re.sub(r"^```.*?^```", "", without, flags=re.M | re.S)
    yield from re.findall(r"^```\w*\n(.*?)^```", without, re.M | re.S)
    yield from re.findall(r"(?:^    .*\n)+", prose, re.M)
    yield from (" ".join(span.split()) for span in spans(prose))


def spans(text):
    prose = re.sub(r"^    .*$", "", text, flags=re.M)
    return re.findall(r"`([^`]+)`", prose)


def commands(text):
    """Yield each command of a page as a list of words."""
    start = re.compile(r"\S*(python|torchrun|sbatch|make |tape-|slurm/\w)|export |[A-Z_]+=")
    for block in blocks(text):
        lines = [line.strip() for line in re.sub(r"\\\n\s*", " ", block).splitlines()]
        while lines:
            line = lines.pop(0)
            if start.match(line):
                yield from simple_commands(shell_words(line, lines))


def shell_words(line, lines):
    """Return the words of a line, and of those that follow in `lines` while a quoted text
    continues.
    """
    try:
        return shlex.split(line, comments=True)
    except ValueError:
        return shell_words(f"{line}\n{lines.pop(0)}", lines)


def simple_commands(words):
    """Yield the commands of a line that are joined by operators, without the variables that they
    set.
    """
    command = []
    for word in [*words, ";"]:
        if word in ("&&", "|", ";", ">", "&"):
            if command:
                yield command
            command = []
        elif command or not re.match(r"[A-Z_]+=", word):
            command.append(word)


def program_of(words):
    """Return the module that a command starts and the rest of its words, or None for programs of
    others.
    """
    first, *rest = words
    if PYTHON.fullmatch(first):
        for i, word in enumerate(rest):
            if re.match(r"(pretrain|tools|benchmarks)[./]", word):
                return word.removesuffix(".py").replace("/", "."), rest[i + 1 :]
    if first == "sbatch":
        for i, word in enumerate(rest):
            if word in JOBS:
                return JOBS[word], rest[i + 1 :]
    if first.startswith("tape-"):
        return SCRIPTS[first], rest
    return None


@cache
def options_of(module):
    parser = hooks.parser_of(module)
    options = set()
    for _, subparser in hooks.subparsers_of(parser):
        for action in subparser._actions:
            options.update(action.option_strings)
    if re.search(r"--(section\.)?key value", parser.usage or ""):
        options.update(f"--{key}" for key in (*SETTINGS, "config", "print_config"))
    return options


def problems(words):
    """Yield what of a command does not exist."""
    if words[0] == "make":
        makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
        for target in words[1:]:
            if re.fullmatch(r"[a-z][a-z0-9-]*", target):
                if not re.search(rf"^{target}:", makefile, re.M):
                    yield f"make {target}"
    for word in words:
        if re.fullmatch(r"(pretrain/recipes|slurm)/[\w/.]+", word) and not exists(word):
            yield word

    module, arguments = program_of(words) or (None, [])
    if module is None:
        return
    if not (ROOT / module.replace(".", "/")).with_suffix(".py").exists():
        yield module
    elif module.startswith("pretrain.") or module in LISTED:
        options = {
            re.split(r"[\]=]", x.strip("["))[0] for x in arguments if re.match(r"\[?--[a-z]", x)
        }
        unknown = options - options_of(module) - {"--help", "--section.key"}
        yield from (f"{module} {option}" for option in sorted(unknown))


def exists(path):
    """Return whether a path exists, or is made by the documentation's reader."""
    return (ROOT / path).exists() or path in (
        "slurm/site.env",
        "pretrain/recipes/encodings/kerple.yaml",
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_and_their_options_exist(page):
    found = list(commands(page.read_text(encoding="utf-8")))
    assert [problem for words in found for problem in problems(words)] == []


def test_every_program_is_in_the_reference():
    assert set(SCRIPTS.values()) <= LISTED
    assert {f"tools.{path.stem}" for path in (ROOT / "tools").glob("[a-z]*.py")} <= LISTED


def test_there_are_commands():
    found = [words for page in PAGES for words in commands(page.read_text(encoding="utf-8"))]
    assert sum(program_of(words) is not None for words in found) > 60
    assert list(problems("python -m pretrain.train --config X.yaml --train.stepz 4".split())) != []
    assert list(problems("python tools/generate.py --modell X".split())) != []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_settings_in_sentences_exist(page):
    text = re.sub(
        r"^```.*?^```",
        "",
        page.read_text(encoding="utf-8"),
        flags=re.M | re.S,
    )
    # The page on encodings of one's own adds settings.
    key = re.compile(rf"(?:--)?((?:{SECTIONS})(?:\.[a-z_0-9]+)+)(?![\w*.(])(?<!kerple_start)")
    named = {found[1] for span in spans(text) if (found := key.match(span))}
    files = (".py", ".yaml", ".html", ".json", ".md", ".png", ".sh")
    assert sorted(key for key in named if key not in SETTINGS and not key.endswith(files)) == []
