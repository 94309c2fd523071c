"""The order of the packages, defined only here: all imports of a module, even lazy ones, are in its row or above."""

import ast
import os
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
# Modules of one row may import each other, but not in a circle; the more specific of two matching names counts.
ORDER = (
    ("errors", "io", "command_line"),
    ("config",),
    ("ops",),
    ("parallel",),
    ("position",),
    ("synthetic",),
    ("planning", "model.names", "model.shapes", "model.settings", "evaluation.results"),
    ("checkpoint.directories", "checkpoint.settings"),
    ("data",),
    ("model",),
    ("checkpoint",),
    ("run",),
    ("training",),
    ("planning.rehearsal",),
    ("huggingface.modeling", "huggingface.tensor_files", "huggingface.tokenizer_files"),
    ("huggingface.imports",),
    ("huggingface.export",),
    ("extension",),
    ("evaluation",),
    ("checks",),
)
WITHOUT_TORCH = "errors io command_line synthetic config planning.search data.inputs checkpoint.directories".split()
WITHOUT_TORCH += "checkpoint.saved_settings checkpoint.locate huggingface.imports.config_json".split()
WITHOUT_TORCH += "extension.base evaluation.base evaluation.results evaluation.statistics".split()
WITHOUT_TORCH += ["evaluation.during_training", "model.shapes"]
WITHOUT_TORCH += ["evaluation.comparison", "data.examples", "checks", "model.settings", "training.evaluations"]


def imported_names(tree, package):
    """Yield the line and dotted name of every import in a module of `package`, except those under TYPE_CHECKING."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            for other in node.orelse:
                yield from imported_names(other, package)
            continue
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) + 1 - node.level] if node.level else []
            base = ".".join([*above, *filter(None, [node.module])])
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module") and node.args:
            if isinstance(node.args[0], ast.Constant):
                yield node.lineno, str(node.args[0].value)
        yield from imported_names(node, package)


def imports_of(root, *packages):
    """Map every module of `packages` to the modules of these that it imports, each with the line of the import."""
    files = {}
    for path in (path for package in packages for path in sorted((root / package).rglob("*.py"))):
        parts = path.relative_to(root).with_suffix("").parts
        files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    found = {}
    for module, path in files.items():
        package = module if path.name == "__init__.py" else module.rpartition(".")[0]
        found[module] = edges = {}
        for line, name in imported_names(ast.parse(path.read_text(encoding="utf-8")), package):
            # `from package import name` imports a module of that name, or else the package that defines the name.
            target = name if name in files else name.rpartition(".")[0]
            if target in files and target != module:
                edges.setdefault(target, line)
    return found


def rank(module, order):
    """Return the row of `order` that the module belongs to, or None."""
    rows = {f"megatron_tape.{prefix}": row for row, prefixes in enumerate(order) for prefix in prefixes}
    named = [prefix for prefix in rows if f"{module}.".startswith(f"{prefix}.")]
    return rows[max(named, key=len)] if named else None


def faults(root, order):
    """Yield a sentence for every import that points upward and for a circle of modules."""
    found = imports_of(root, "megatron_tape", "pretrain", "tools", "benchmarks")
    library = [module for module in found if module.startswith("megatron_tape.")]
    for module in library:
        here = rank(module, order)
        is_bare_package = not found[module] and any(other.startswith(f"{module}.") for other in library)
        if here is None and not is_bare_package:
            yield f"{module} has no place in the order"
        for target, line in found[module].items():
            if not target.startswith("megatron_tape"):
                yield f"{module}, line {line}, imports {target}, which is not part of the library"
            elif here is not None and (there := rank(target, order)) is not None and there > here:
                yield f"{module}, line {line}, imports {target}, which is above it"
    try:
        TopologicalSorter(found).prepare()
    except CycleError as error:
        yield f"circle: {' <- '.join(error.args[1])}"


def test_imports_point_downward_and_form_no_circle():
    found = list(faults(ROOT, ORDER))
    assert not found, "\n".join(found)


GOOD = {
    "lower/one.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from megatron_tape.upper import three",
    "upper/two.py": "import megatron_tape.lower.one\ndef f():\n    from . import three",
    "upper/three.py": "from megatron_tape.lower.one import name",
    "../pretrain/train.py": "",
}


@pytest.mark.parametrize(
    "changed, source, fault",
    [
        ("upper/three.py", "", None),
        ("lower/two.py", "def f():\n    from megatron_tape.upper import two", "lower.two, line 2, imports"),
        ("lower/two.py", "import megatron_tape.upper.two as two", "megatron_tape.upper.two, which is above it"),
        ("lower/two.py", "from ..upper.two import name", "megatron_tape.upper.two, which is above it"),
        ("lower/two.py", "import_module('megatron_tape.upper.two')", "megatron_tape.upper.two, which is above it"),
        ("lower/two.py", "from pretrain import train", "imports pretrain.train, which is not part of the library"),
        ("upper/three.py", "from megatron_tape.upper import two", "circle: megatron_tape.upper"),
        ("new/one.py", "", "megatron_tape.new.one has no place in the order"),
    ],
)
def test_an_import_that_points_upward_is_found(tmp_path, changed, source, fault):
    for path, text in {**GOOD, changed: source}.items():
        (tmp_path / "megatron_tape" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "megatron_tape" / path).write_text(text)
    found = list(faults(tmp_path, (("lower",), ("upper",))))
    assert len(found) == (fault is not None) and all(fault in sentence for sentence in found), found


def test_what_reads_settings_and_files_imports_no_torch():
    named = [f"megatron_tape.{name}." for name in WITHOUT_TORCH]
    modules = [module for module in imports_of(ROOT, "megatron_tape") if f"{module}.".startswith(tuple(named))]
    assert len(modules) >= len(named)
    code = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]:\n"
        "    importlib.import_module(name)\n"
        "    assert 'torch' not in sys.modules, name\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", code, *modules], check=True, env=environment)
