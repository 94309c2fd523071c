"""mkdocs hooks: generate the pages of the reference, and add Markdown files from outside docs/ to
the site.

This module imports neither torch nor mkdocs at its top, since tests import it as well.
"""

import argparse
import html
import importlib
import inspect
import itertools
import os
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import MISSING
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from megatron_tape.command_line import Parser  # noqa: E402
from megatron_tape.config.parse import describe  # noqa: E402
from megatron_tape.config.schema import RunConfig  # noqa: E402
from megatron_tape.config.sections import Setting, settings_of  # noqa: E402
from megatron_tape.config.values import format_value  # noqa: E402
from megatron_tape.evaluation.tasks import TASKS  # noqa: E402
from megatron_tape.position import ENCODINGS  # noqa: E402

COPIED = {
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "README.md": "index.md",
    "SECURITY.md": "security.md",
    "benchmarks/LOG.md": "benchmarks.md",
    "transformers_tape/README.md": "transformers_tape.md",
}
"""Files outside docs/ that become pages of the site, and the names of these pages."""
PROGRAMS = {
    "Training": ("pretrain.train", "pretrain.extend_context"),
    "Before a run": ("pretrain.estimate", "pretrain.rehearse", "pretrain.preflight"),
    "During and after a run": (
        "pretrain.status",
        "pretrain.evaluate",
        "pretrain.compare",
        "pretrain.report",
    ),
    "Data": (
        "tools.make_corpus",
        "tools.train_tokenizer",
        "tools.preprocess_data",
        "tools.merge_datasets",
        "tools.inspect_dataset",
        "tools.build_index",
    ),
    "Models": ("tools.convert_checkpoint", "tools.verify", "tools.generate"),
    "Development": ("benchmarks.gpu_trial",),
}
"""Modules of the programs that the reference describes, by heading."""


class _ParserFound(BaseException):
    """Carries a program's parser out of its `main`. A BaseException, so that the program does not
    catch it.
    """


def parser_of(module: str) -> argparse.ArgumentParser:
    """Return the parser of a program's command line, such as that of `pretrain.train`, without
    running the program.
    """

    def raise_parser(parser: argparse.ArgumentParser, *_: Any) -> None:
        raise _ParserFound(parser)

    # Only `main` builds the parser, so it is called, and interrupted when it parses arguments.
    main = importlib.import_module(module).main
    # Some programs' `main` takes the command line as an argument.
    arguments = ([],) if inspect.signature(main).parameters else ()
    with mock.patch.object(Parser, "parse_known_args", raise_parser):
        try:
            main(*arguments)
        except _ParserFound as error:
            return error.args[0]
    raise ValueError(f"{module}.main has parsed no command line")


def command_of(module: str) -> str:
    """Return the command that starts a program in a clone of the repository."""
    if module.startswith("tools."):
        return f"python {module.replace('.', '/')}.py"
    return f"python -m {module}"


def installed_commands() -> dict[str, str]:
    """Return the commands that `pip install` provides, by the module of the program.

    For example, tape-train by pretrain.train. They are read from the file without running it.
    """
    # A line is, for example, `compare = _script("tape-compare", "pretrain.compare")`. Modules of
    # tools/ are pretrain.tools.NAME in an installation, but tools.NAME in PROGRAMS.
    text = (ROOT / "pretrain" / "console_scripts.py").read_text(encoding="utf-8")
    scripts = re.findall(r'_script\("([\w-]+)", "(?:pretrain\.(?=tools))?([\w.]+)"\)', text)
    return {module: command for command, module in scripts}


def _cell(text: str) -> str:
    """Escape text for a cell of a Markdown table, and turn paths of pages in docs/ into links."""
    escaped = html.escape(" ".join(text.split()), quote=False)
    escaped = escaped.replace("|", "&#124;").replace("*", "\\*")
    return re.sub(r"docs/([\w/-]+\.md)", r"[\1](../\1)", escaped)


def _table(rows: Iterable[tuple[str, str]], name: str) -> str:
    """Return a Markdown table with the columns `name` and "meaning"."""
    lines = [f"| {name} | meaning |", "| --- | --- |"]
    return "\n".join([*lines, *(f"| {first} | {meaning} |" for first, meaning in rows), ""])


def _setting_row(setting: Setting) -> tuple[str, str]:
    """Return the row of a setting: its name, type and default in one cell, and its meaning."""
    default = "required"
    if setting.default is not MISSING:
        default = f"default `{format_value(setting.default)}`"
    kind = describe(setting.schema)
    if setting.sections:
        kind = "section"
        if setting.default is not None:
            default = "always present"

    section, _, name = setting.key.rpartition(".")
    meaning = setting.schema.get("description", "")
    # Each encoding has its own settings in this section, so name the encodings that have this one.
    if section == "model.position":
        owners = [
            encoding
            for encoding, cls in ENCODINGS.items()
            if name in cls.Settings.__dataclass_fields__
        ]
        meaning += f" Encodings: {', '.join(owners)}."
    # The anchor lets other pages link to the setting.
    anchor = f'<a id="{setting.key}" href="#{setting.key}">`{setting.key}`</a>'
    return f"{anchor}<br>{_cell(f'{kind}; {default}')}", _cell(meaning)


def _setting_tables(settings: Iterable[Setting], heading: str) -> Iterator[str]:
    """Yield a table per section; every table but the first has a heading, such as `###`."""
    # Encodings may share a setting, which is shown once.
    grouped: dict[str, dict[str, Setting]] = {}
    for setting in settings:
        section = setting.key.rpartition(".")[0]
        grouped.setdefault(section, {}).setdefault(setting.key, setting)
    for number, (section, by_key) in enumerate(grouped.items()):
        if number:
            yield f"{heading} {section}\n"
        yield _table(map(_setting_row, by_key.values()), "setting")


def settings_page() -> str:
    """Return the page with all settings of a run and of the tasks of pretrain.evaluate."""
    parts = [
        "# Settings\n",
        "All settings, generated from the code. Give a setting in a recipe (`--config"
        " RECIPE.yaml`) or as `--section.key value`; later values override earlier ones."
        " `model.position_encoding` determines the settings of `model.position`, and"
        " `data.generator.task` those of `data.generator`.\n",
    ]
    all_settings = settings_of(RunConfig)
    for name, group in itertools.groupby(all_settings, lambda item: item.key.partition(".")[0]):
        # The first item of a group is the section itself.
        section, *settings = group
        parts += [f"## {name}\n", f"{inspect.getdoc(section.sections[0]) or ''}\n"]
        parts += _setting_tables(settings, "###")
    parts += [
        "## Tasks of pretrain.evaluate\n",
        "`pretrain.evaluate TASK --TASK.setting value`. Tasks of the section"
        " [evaluation](#evaluation) have the same settings there.\n",
    ]
    for name, task in TASKS.items():
        parts += [f"### {name}\n", f"{inspect.getdoc(task.Settings) or ''}\n"]
        parts += _setting_tables(settings_of(task.Settings, name), "####")
    return "\n".join(parts)


def programs_page() -> str:
    """Return the page with the options of every program."""
    parts = [
        "# Programs\n",
        "Generated from `--help`. Programs that take settings accept every key of [the"
        " settings](settings.md) as `--section.key value`. `pip install` provides most programs"
        " as commands, shown in brackets.\n",
    ]
    for heading, modules in PROGRAMS.items():
        parts.append(f"## {heading}\n")
        for module in modules:
            parts += _program(module)
    return "\n".join(parts)


def _program(module: str) -> Iterator[str]:
    """Yield the parts of the page about one program: description, usage and tables of options."""
    parser = parser_of(module)
    parser.prog = command_of(module)
    # The first line of the description is a sentence; the rest has examples, shown as code.
    description, _, example = (parser.description or "").partition("\n")
    name = title = module.rpartition(".")[2]
    installed = installed_commands().get(module)
    if installed:
        title += f" (`{installed}`)"
    usage = parser.format_usage().removeprefix("usage: ") + example
    yield f"### {title} {{#{name}}}\n\n{description}\n\n```text\n{usage.rstrip()}\n```\n"
    for subcommand, subparser in subparsers_of(parser):
        if subcommand:
            yield f"#### {name} {subcommand}\n\n{subparser.description or ''}\n"
        rows = [_option_row(action) for action in subparser._actions if _is_option(action)]
        if rows:
            yield _table(rows, "option")


def subparsers_of(parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Yield ("", parser), and then the name and the parser of each of its subcommands."""
    yield "", parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            yield from action.choices.items()


def _is_option(action: argparse.Action) -> bool:
    """Return whether an argument is an option of the program: not --help, and not a setting."""
    if isinstance(action, argparse._HelpAction | argparse._SubParsersAction):
        return False
    return not any("." in name for name in action.option_strings)  # a setting has a dot


def _option_row(action: argparse.Action) -> tuple[str, str]:
    """Return the row of an option: its names with its value, and its meaning."""
    # Values are named as in argparse's --help.
    metavar = action.metavar or action.dest
    if action.choices:
        metavar = "{" + ",".join(map(str, action.choices)) + "}"
    elif isinstance(metavar, tuple):
        metavar = " ".join(metavar)
    elif action.option_strings and not action.metavar:
        metavar = metavar.upper()

    name = ", ".join(action.option_strings) or metavar
    meaning = (action.help or "") % vars(action)  # fills in %(default)s
    if action.option_strings and action.nargs != 0:  # 0: a switch, which takes no value
        name += f" {metavar}"
    if action.option_strings and action.required:
        meaning += " (required)"
    return f"`{name}`".replace("|", "\\|"), _cell(meaning)


GENERATED = {"reference/settings.md": settings_page, "reference/programs.md": programs_page}
"""Functions that return the pages that exist only in the site, by the path of the page in docs/."""


def on_files(files: Any, config: Any) -> Any:
    """Add the pages in GENERATED and COPIED to mkdocs' list of files, and return it.

    mkdocs calls this hook.
    """
    from mkdocs.structure.files import File

    for path, page in GENERATED.items():
        files.append(File.generated(config, path, content=page()))
    for source, path in COPIED.items():
        content = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, path, content=content))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Return a page's Markdown with links that work in the site. mkdocs calls this hook per page.

    In the repository, links are relative paths between files.
    """
    path = page.file.src_uri
    # The file of the repository that the page is a copy of.
    sources = {copy: source for source, copy in COPIED.items()}
    folder = Path(sources.get(path, f"docs/{path}")).parent

    def site_link(link: re.Match) -> str:
        image, text, target, anchor = link.groups("")  # `image` is "!" or ""
        source = os.path.normpath(folder / target)
        if source in COPIED:
            page_path = COPIED[source]
        elif source.startswith("docs/"):
            page_path = source.removeprefix("docs/")
        else:
            return text  # such as a link to LICENSE, which has no page
        return f"{image}[{text}]({os.path.relpath(page_path, Path(path).parent)}{anchor})"

    def without_backslash(row: re.Match) -> str:
        return re.sub(r"`[^`\n]*`", lambda code: code[0].replace("\\|", "|"), row[0])

    # In a table's code, GitHub needs a backslash before a bar, but Python-Markdown would show it.
    # The second pattern matches links to files, such as `[text](data.md#chats)`, but not URLs.
    markdown = re.sub(r"^\|.*$", without_backslash, markdown, flags=re.MULTILINE)
    return re.sub(r"(!?)\[([^]]*)\]\(([^)#:\s]+)(#[^)]*)?\)", site_link, markdown)
