"""The order of the packages, defined only here: everything that a module imports is in its own row
or above.

Imports inside functions and strings that name a module count like any other; imports for type
checkers do not count.
"""

import ast
import os
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Modules of one row may import each other, but not in a circle; the more specific of two matching
# names counts.
ORDER = (
    ("errors", "text", "home", "io"),
    ("command_line",),
    ("synthetic",),
    ("config",),
    ("parallel",),
    ("ops",),
    ("position",),
    ("model",),
    ("planning",),
    ("data",),
    ("checkpoint",),
    ("run",),
    ("training",),
    ("planning.rehearsal",),
    ("evaluation.results",),
    ("huggingface",),
    ("extension",),
    ("evaluation",),
    ("checks",),
)


def run_time_nodes(node):
    """Yield the nodes below `node`, except those of `if TYPE_CHECKING`."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and getattr(child.test, "id", "") == "TYPE_CHECKING":
            continue
        yield child
        yield from run_time_nodes(child)


def imported_names(tree):
    """Yield the line and dotted name of everything that a module may import."""
    for node in run_time_nodes(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value.replace(":", ".")


def imports_of(*packages):
    """Map every module of `packages` to the modules of these that it imports, each with the line of
    the import.
    """
    files = {}
    for package in packages:
        for path in sorted((ROOT / package).rglob("*.py")):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            files[name.removesuffix(".__init__")] = path
    imports = {}
    for module, path in files.items():
        imports[module] = edges = {}
        for line, name in imported_names(ast.parse(path.read_text(encoding="utf-8"))):
            # `from package import name` imports a module of that name, or else the package that
            # defines the name.
            target = name if name in files else name.rpartition(".")[0]
            if target in files and target != module:
                edges.setdefault(target, line)
    return imports


def row(module):
    """Return the row of ORDER that the module belongs to, or None."""
    rows = {
        f"megatron_tape.{prefix}": number
        for number, prefixes in enumerate(ORDER)
        for prefix in prefixes
    }
    named = [prefix for prefix in rows if f"{module}.".startswith(f"{prefix}.")]
    return rows.get(max(named, key=len, default=None))


def faults():
    """Yield a sentence for every import that points upward and for a circle of modules."""
    imports = imports_of("megatron_tape", "pretrain", "tools", "benchmarks")
    for module, edges in imports.items():
        if not module.startswith("megatron_tape."):
            continue
        here = row(module)
        if here is None:
            yield f"{module} has no place in the order"
            continue
        for target, line in edges.items():
            if not target.startswith("megatron_tape"):
                yield f"{module}, line {line}, imports {target}, which is not part of the library"
            elif target != "megatron_tape" and row(target) > here:
                yield f"{module}, line {line}, imports {target}, which is above it"
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        yield f"circle: {' <- '.join(error.args[1])}"


def test_imports_follow_the_order_and_form_no_cycle():
    found = list(faults())
    assert not found, "\n".join(found)


WITHOUT_TORCH = (
    "errors text io command_line synthetic config model.shapes planning.search data.inputs"
    " data.examples data.preprocessing checkpoint.directories checkpoint.saved_settings"
    " checkpoint.locate huggingface.imports.config_json extension.base_checks"
    " evaluation.task evaluation.results evaluation.statistics evaluation.during_training"
    " evaluation.comparison_file checks"
)


def test_modules_that_read_settings_and_files_do_not_import_torch():
    modules = []
    for name in WITHOUT_TORCH.split():
        prefix = f"megatron_tape.{name}."
        matching = [x for x in imports_of("megatron_tape") if f"{x}.".startswith(prefix)]
        assert matching, name
        modules += matching
    code = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]:\n"
        "    importlib.import_module(name)\n"
        "    assert 'torch' not in sys.modules, name\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run(
        [sys.executable, "-c", code, *modules],
        check=True,
        env=environment,
    )
