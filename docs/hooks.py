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
sys.path[:0] = [str(ROOT)] if str(ROOT) not in sys.path else []

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
    "Models": ("tools.convert_checkpoint", "tools.generate"),
    "Development": ("benchmarks.gpu_trial",),
}
"""Modules of the programs that the reference describes, by heading."""
PYTHON = {
    "Models and modules": ("megatron_tape.model.modules", "megatron_tape.model.reference"),
    "Positional encodings": ("megatron_tape.position.encoding", "megatron_tape.position.registry"),
    "Attention": ("megatron_tape.ops.attention", "megatron_tape.ops.position_inputs"),
    "Evaluation": ("megatron_tape.evaluation.task", "megatron_tape.evaluation.results"),
    "Hooks of a training run": ("megatron_tape.training.hooks",),
}
"""Modules whose docstrings the Python reference shows, by heading."""


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

    main = importlib.import_module(module).main
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
    """Map the modules of programs to the commands that `pip install` provides, such as
    pretrain.train to tape-train.
    """
    text = (ROOT / "pretrain" / "console_scripts.py").read_text(encoding="utf-8")
    scripts = re.findall(r'_script\("([\w-]+)", "([\w.]+)"\)', text)
    return {
        module.removeprefix("pretrain.") if ".tools." in module else module: name
        for name, module in scripts
    }


def _cell(text: str) -> str:
    """Escape text for a cell of a Markdown table, and turn paths of pages in docs/ into links."""
    escaped = (
        html.escape(" ".join(text.split()), quote=False).replace("|", "&#124;").replace("*", "\\*")
    )
    return re.sub(r"docs/([\w/-]+\.md)", r"[\1](../\1)", escaped)


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (head, ("---",) * len(head), *rows)]


def _anchored(key: str) -> str:
    return f'<a id="{key}" href="#{key}">`{key}`</a>'


def _setting_row(setting: Setting) -> tuple[str, ...]:
    if setting.default is MISSING:
        default = "required"
    else:
        default = f"default `{format_value(setting.default)}`"
    kind = f"{describe(setting.schema)}; {default}"
    if setting.sections:
        kind = f"section; {'default `null`' if setting.default is None else 'always present'}"
    meaning = setting.schema.get("description", "") + _encodings_note(setting)
    return f"{_anchored(setting.key)}<br>{_cell(kind)}", _cell(meaning)


def _setting_tables(settings: Iterable[Setting], level: int) -> Iterator[str]:
    """Yield the lines of a table per section; every table but the first has a heading of this
    level.
    """
    grouped: dict[str, dict[str, Setting]] = {}
    for setting in settings:
        grouped.setdefault(setting.key.rpartition(".")[0], {}).setdefault(setting.key, setting)
    for number, (section, of_section) in enumerate(grouped.items()):
        if number:
            yield from (f"{'#' * level} {section}", "")
        yield from _table(("setting", "meaning"), map(_setting_row, of_section.values()))
        yield ""


def _encodings_note(setting: Setting) -> str:
    """Return a sentence that lists the encodings with this setting; "" if it is not in
    `model.position`.
    """
    if not setting.key.startswith("model.position."):
        return ""
    field = setting.key.rpartition(".")[2]
    names = [name for name, one in ENCODINGS.items() if field in one.Settings.__dataclass_fields__]
    return f" Encodings: {', '.join(names)}."


def settings_page() -> str:
    """Return the page with all settings of a run and of the tasks of pretrain.evaluate."""
    lines = [
        "# Settings",
        "",
        (
            "All settings, generated from the code. Give a setting in a recipe (`--config"
            " RECIPE.yaml`) or as `--section.key value`; later values override earlier ones."
            " `model.position_encoding` determines the settings of `model.position`, and"
            " `data.generator.task` those of `data.generator`."
        ),
        "",
    ]
    for name, group in itertools.groupby(
        settings_of(RunConfig), lambda setting: setting.key.partition(".")[0]
    ):
        section, *settings = group
        lines.extend([f"## {name}", "", inspect.getdoc(section.sections[0]) or "", ""])
        lines.extend(_setting_tables(settings, 3))
    lines.extend(
        [
            "## Tasks of pretrain.evaluate",
            "",
            (
                "`pretrain.evaluate TASK --TASK.setting value`. Tasks of the section"
                " [evaluation](#evaluation) have the same settings there."
            ),
            "",
        ]
    )
    for name, task in TASKS.items():
        lines.extend([f"### {name}", "", inspect.getdoc(task.Settings) or "", ""])
        lines.extend(_setting_tables(settings_of(task.Settings, name), 4))
    return "\n".join(lines)


def programs_page() -> str:
    """Return the page with the options of every program."""
    lines = [
        "# Programs",
        "",
        (
            "Generated from `--help`. Programs that take settings accept every key of [the"
            " settings](settings.md) as `--section.key value`. `pip install` provides most programs"
            " as commands, shown in brackets."
        ),
        "",
    ]
    for heading, modules in PROGRAMS.items():
        lines.extend([f"## {heading}", ""])
        for module in modules:
            lines.extend(_program(module))
    return "\n".join(lines)


def _program(module: str) -> Iterator[str]:
    parser = parser_of(module)
    parser.prog = command_of(module)
    description, _, example = (parser.description or "").partition("\n")
    installed = installed_commands().get(module)
    in_brackets = f" (`{installed}`)" if installed else ""
    name = module.rpartition(".")[2]
    yield from (f"### {name}{in_brackets} {{#{name}}}", "", description, "")
    yield from (
        "```text",
        *parser.format_usage().removeprefix("usage: ").rstrip().splitlines(),
        *example.splitlines(),
    )
    yield from ("```", "")
    for title, one in subparsers_of(parser):
        if title:
            yield from (f"#### {name} {title}", "", one.description or "", "")
        rows = [_option_row(action) for action in one._actions if _is_option(action)]
        if rows:
            yield from (*_table(("option", "meaning"), rows), "")


def subparsers_of(parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Yield the pair ("", parser), and then a pair of name and parser for each of its
    subcommands.
    """
    yield "", parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            yield from action.choices.items()


def _is_option(action: argparse.Action) -> bool:
    is_setting = any("." in name for name in action.option_strings)
    return (
        not isinstance(action, argparse._HelpAction | argparse._SubParsersAction) and not is_setting
    )


def _option_row(action: argparse.Action) -> tuple[str, str]:
    metavar = action.metavar or (action.dest.upper() if action.option_strings else action.dest)
    if action.choices:
        metavar = "{" + ",".join(map(str, action.choices)) + "}"
    metavar = " ".join(metavar) if isinstance(metavar, tuple) else metavar
    names = ", ".join(action.option_strings)
    if action.option_strings and action.nargs != 0:
        name = f"{names} {metavar}"
    else:
        name = names or metavar
    meaning = (action.help or "") % vars(action)
    if action.required and action.option_strings:
        required = " (required)"
    else:
        required = ""
    return f"`{name}`".replace("|", "\\|"), _cell(meaning + required)


def python_page() -> str:
    """Return the page of the Python API; mkdocstrings replaces each `:::` line by the docstrings of
    a module.
    """
    lines = [
        "# Python API",
        "",
        "Modules, classes and functions to import, with their docstrings.",
        "",
    ]
    for heading, modules in PYTHON.items():
        lines.extend([f"## {heading}", ""])
        for module in modules:
            lines.extend(
                [f"::: {module}", ""] if (ROOT / f"{module.replace('.', '/')}.py").exists() else []
            )
    return "\n".join(lines)


GENERATED = {
    "reference/settings.md": settings_page,
    "reference/programs.md": programs_page,
    "reference/python.md": python_page,
}
"""Functions that return the pages that exist only in the site, by the path of the page in docs/."""


def anchors_of_settings() -> set[str]:
    """Return the anchors of the settings page: the key of every setting."""
    return set(re.findall(r'<a id="([^"]+)"', settings_page()))


def on_files(files: Any, config: Any) -> Any:
    """Add the pages in GENERATED and COPIED. mkdocs calls this hook with its list of files."""
    from mkdocs.structure.files import File

    copies = {path: (ROOT / source).read_text(encoding="utf-8") for source, path in COPIED.items()}
    for path, content in {**{path: page() for path, page in GENERATED.items()}, **copies}.items():
        files.append(File.generated(config, path, content=content))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrite links between files of the repository so that they work in the site. mkdocs calls
    this hook per page.
    """
    path = page.file.src_uri
    sources = {copy: source for source, copy in COPIED.items()}
    folder = Path(sources.get(path, f"docs/{path}")).parent

    def site_link(link: re.Match) -> str:
        image, text, target, anchor = link.groups("")
        source = os.path.normpath(folder / target)
        if source.startswith("docs/"):
            page_path = source.removeprefix("docs/")
        elif source in COPIED:
            page_path = COPIED[source]
        else:
            return text  # such as a link to LICENSE, which has no page
        return f"{image}[{text}]({os.path.relpath(page_path, Path(path).parent)}{anchor})"

    # GitHub needs a backslash before a bar in a table's code; Python-Markdown would show the
    # backslash.
    code_in_table = re.compile(r"(?<=`)[^`\n]*\\\|[^`\n]*(?=`)")
    lines = markdown.split("\n")
    lines = [
        code_in_table.sub(lambda code: code[0].replace("\\|", "|"), x) if x.startswith("|") else x
        for x in lines
    ]
    markdown = "\n".join(lines)
    return re.sub(r"(!?)\[([^]]*)\]\(([^)#:\s]+)(#[^)]*)?\)", site_link, markdown)
