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
        if not (isinstance(child, ast.If) and getattr(child.test, "id", "") == "TYPE_CHECKING"):
            yield child
            yield from run_time_nodes(child)


def imported_names(tree, package):
    """Yield the line and dotted name of everything that a module of `package` may import."""
    for node in run_time_nodes(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                above = package.split(".")[: len(package.split(".")) + 1 - node.level]
            else:
                above = []
            base = ".".join([*above, *filter(None, [node.module])])
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)
        elif (
            isinstance(node, ast.Constant) and isinstance(node.value, str) and " " not in node.value
        ):
            yield node.lineno, node.value.replace(":", ".")


def imports_of(*packages):
    """Map every module of `packages` to the modules of these that it imports, each with the line of
    the import.
    """
    files = {}
    for path in (path for package in packages for path in sorted((ROOT / package).rglob("*.py"))):
        parts = path.relative_to(ROOT).with_suffix("").parts
        files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    found = {}
    for module, path in files.items():
        if path.name == "__init__.py":
            package = module
        else:
            package = module.rpartition(".")[0]
        found[module] = edges = {}
        for line, name in imported_names(ast.parse(path.read_text(encoding="utf-8")), package):
            # `from package import name` imports a module of that name, or else the package that
            # defines the name.
            target = name if name in files else name.rpartition(".")[0]
            if target in files and target != module:
                edges.setdefault(target, line)
    return found


def row(module):
    """Return the row of ORDER that the module belongs to, or None."""
    rows = {
        f"megatron_tape.{prefix}": number
        for number, prefixes in enumerate(ORDER)
        for prefix in prefixes
    }
    named = [prefix for prefix in rows if f"{module}.".startswith(f"{prefix}.")]
    if named:
        return rows[max(named, key=len)]
    return None


def faults():
    """Yield a sentence for every import that points upward and for a circle of modules."""
    found = imports_of("megatron_tape", "pretrain", "tools", "benchmarks")
    for module in (module for module in found if module.startswith("megatron_tape.")):
        here = row(module)
        if here is None:
            yield f"{module} has no place in the order"
            continue
        for target, line in found[module].items():
            if not target.startswith("megatron_tape"):
                yield f"{module}, line {line}, imports {target}, which is not part of the library"
            elif (there := row(target)) is not None and there > here:
                yield f"{module}, line {line}, imports {target}, which is above it"
    try:
        TopologicalSorter(found).prepare()
    except CycleError as error:
        yield f"circle: {' <- '.join(error.args[1])}"


def test_imports_follow_the_order_and_form_no_cycle():
    found = list(faults())
    assert not found, "\n".join(found)


WITHOUT_TORCH = "errors io command_line synthetic config planning.search data.inputs checkpoint.directories".split()
WITHOUT_TORCH += (
    "checkpoint.saved_settings checkpoint.locate huggingface.imports.config_json".split()
)
WITHOUT_TORCH += "extension.base evaluation.task evaluation.results evaluation.statistics".split()
WITHOUT_TORCH += ["evaluation.during_training", "model.shapes"]
WITHOUT_TORCH += [
    "evaluation.comparison_file",
    "data.examples",
    "data.preprocessing",
    "checks",
    "model.settings",
    "text",
]


def test_modules_that_read_settings_and_files_do_not_import_torch():
    named = [f"megatron_tape.{name}." for name in WITHOUT_TORCH]
    modules = [
        module for module in imports_of("megatron_tape") if f"{module}.".startswith(tuple(named))
    ]
    assert len(modules) >= len(named)
    code = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]:\n"
        "    importlib.import_module(name)\n"
        "    assert 'torch' not in sys.modules, name\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", code, *modules], check=True, env=environment)
