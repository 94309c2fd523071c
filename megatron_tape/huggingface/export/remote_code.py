"""Collect the Python files of an exported model, which transformers loads with `trust_remote_code`.

A TAPE model has the files of huggingface/modeling without "encoded" in their names. A model with
another positional encoding has all files of that directory, the encoding's file, and the modules of
this package that it imports. Each module becomes a flat file (`position.fire` becomes
`position_fire_tape.py`) with relative imports, because transformers copies only the files of one
directory.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import inspect
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from megatron_tape.errors import FileError, UserError
from megatron_tape.position import PositionEncoding

_ENCODED = "modeling_encoded_tape.py"
_CONFIGURATION = "configuration_encoded_tape.py"


AUTO_MAP = {
    "AutoConfig": "configuration_tape.TapeConfig",
    "AutoModel": "modeling_tape.TapeModel",
    "AutoModelForCausalLM": "modeling_tape.TapeForCausalLM",
    "AutoModelForSequenceClassification": "modeling_tape.TapeForSequenceClassification",
}
ENCODED_AUTO_MAP = {
    "AutoConfig": "configuration_encoded_tape.EncodedConfig",
    "AutoModel": "modeling_encoded_tape.EncodedModel",
    "AutoModelForCausalLM": "modeling_encoded_tape.EncodedForCausalLM",
    "AutoModelForSequenceClassification": (
        "modeling_encoded_tape.EncodedForSequenceClassification"
    ),
}
_MODELING = Path(__file__).parents[1] / "modeling"
_COMMENT = "# Some versions of transformers copy only what this file imports directly.\n"
_IMPORT = "from .encoding_tape import Encoding, TokenCache, in_some_layers\n"
_PACKAGE = __name__.partition(".")[0]
_ROOT = Path(__file__).parents[2]
_AVAILABLE = {*sys.stdlib_module_names, "torch", "transformers", "numpy"}
"""Modules that are installed wherever transformers loads a model."""
_TYPES_ONLY = ("TYPE_CHECKING", "typing.TYPE_CHECKING")
_KERNELS = f"{_PACKAGE}.ops.kernels"
"""The package of GPU kernels, which are not exported: an exported encoding uses plain torch."""
_ENTRY = '''"""The positional encoding {name}, under the names that modeling_encoded_tape uses."""

from .{interface} import TokenCache
from .{module} import {encoding} as Encoding
from .{some_layers} import in_some_layers

__all__ = ["Encoding", "TokenCache", "in_some_layers"]
'''


def code_files(encoding: type[PositionEncoding] | None = None) -> dict[str, bytes]:
    """Return the contents of an export's Python files by file name, for TAPE by default or for
    another encoding.

    Raises UserError if the encoding's file cannot be exported.
    """
    files = {path.name: path.read_bytes() for path in sorted(_MODELING.glob("*_tape.py"))}
    if encoding is None:
        return {name: content for name, content in files.items() if "encoded" not in name}

    added = {name: text.encode() for name, text in encoding_files(encoding).items()}
    assert not files.keys() & added.keys(), "names of files clash"
    # If two directories have the same name, transformers distinguishes their configuration files
    # only by the text. It finds a model's class by its configuration's class. So this text must
    # differ between encodings.
    digest = hashlib.sha256(b"".join(added[name] for name in sorted(added))).hexdigest()[:16]
    files[_CONFIGURATION] += f"# For the positional encoding {encoding.name}, {digest}.\n".encode()
    files |= added

    # Some versions of transformers copy only files that this one imports directly.
    modules = sorted(name.removesuffix(".py") for name in files)
    imports = "".join(
        f"from .{name} import __name__ as _\n"
        for name in modules
        if f"{name}.py" not in (_ENCODED, "encoding_tape.py")
    )
    text = files[_ENCODED].decode()
    assert text.count(_IMPORT) == 1
    files[_ENCODED] = text.replace(_IMPORT, f"{_IMPORT}{_COMMENT}{imports}").encode()
    return files


def write_code(directory: Path, encoding: type[PositionEncoding] | None = None) -> None:
    """Write the Python files of an export to `directory`."""
    for name, content in code_files(encoding).items():
        (directory / name).write_bytes(content)


def is_own_code(directory: Path, encoding: type[PositionEncoding] | None = None) -> bool:
    """Return whether the Python files of `directory` equal those of `code_files`, byte for byte.

    Returns False if there is a directory `custom_generate`, because transformers also runs its
    `generate.py`.
    """
    if (directory / "custom_generate").exists():
        return False
    try:
        expected = code_files(encoding)
    except UserError:
        return False
    names = {file.name for file in directory.glob("*.py")}
    return names == set(expected) and all(
        (directory / name).read_bytes() == expected[name] for name in expected
    )


@dataclass(frozen=True)
class _Module:
    name: str
    """Dotted name in this package; for a user's module, the name of its file."""
    path: Path
    flat: str
    """The module's name in an export: the name of its file without .py."""


def encoding_files(encoding: type[PositionEncoding]) -> dict[str, str]:
    """Return the text of an encoding's files by name, including `encoding_tape.py`, which imports
    the class.

    Raises UserError for an import that cannot be exported.
    """
    own = _module_of(encoding)
    interface = _of_package(f"{_PACKAGE}.position.encoding")
    some_layers = _of_package(f"{_PACKAGE}.position.some_layers")
    assert interface is not None and some_layers is not None
    texts = {}
    pending = [own, interface, some_layers]
    while pending:
        module = pending.pop()
        if f"{module.flat}.py" not in texts:
            texts[f"{module.flat}.py"], imported = _flattened(module)
            pending += imported
    entry = _ENTRY.format(
        name=encoding.name,
        encoding=encoding.__qualname__,
        interface=interface.flat,
        some_layers=some_layers.flat,
        module=own.flat,
    )
    return {"encoding_tape.py": entry} | dict(sorted(texts.items()))


def _module_of(encoding: type[PositionEncoding]) -> _Module:
    module = _of_package(encoding.__module__)
    if module is not None:
        return module
    try:
        path = Path(inspect.getfile(encoding))
    except (OSError, TypeError):
        path = Path()
    if not path.is_file() or encoding.__qualname__ != encoding.__name__:
        raise UserError(
            f"the positional encoding {encoding.name}",
            f"cannot be exported: its class {encoding.__qualname__} is not at the top level of a"
            " file",
            "define the class there",
        )
    name = re.sub(r"[^A-Za-z0-9_]", "_", path.stem)
    return _Module(path.stem, path, f"own_{name}_tape")


def _of_package(name: str) -> _Module | None:
    """Return the module of this package with this dotted name, or None."""
    first, *rest = name.split(".")
    if first != _PACKAGE or not rest:
        return None
    folder = _ROOT.joinpath(*rest)
    for path in (folder.with_suffix(".py"), folder / "__init__.py"):
        if path.is_file():
            return _Module(name, path, f"{'_'.join(rest)}_tape")
    return None


def _flattened(module: _Module) -> tuple[str, list[_Module]]:
    """Return the text of a module as a flat file, and the modules that it imports."""
    text = module.path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    blocks = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) in _TYPES_ONLY
    ]
    omitted = {node for block in blocks for statement in block.body for node in ast.walk(statement)}
    needed = []
    # The first and the last statement of each range to replace, and the new text.
    changes: list[tuple[ast.stmt, ast.stmt, str]] = [
        (block.body[0], block.body[-1], "pass") for block in blocks
    ]
    for node in ast.walk(tree):
        if node in omitted or not isinstance(node, (ast.Import, ast.ImportFrom)):
            continue
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif node.level:
            names = ["."]
        elif f"{node.module}".startswith(f"{_PACKAGE}."):
            changes.append((node, node, _relative(module, node, needed)))
            continue
        else:
            names = [str(node.module)]
        for name in names:
            if name.partition(".")[0] not in _AVAILABLE:
                raise _not_exportable(module, node, f"imports {name}")

    lines = text.split("\n")
    for first, last, new in sorted(changes, key=lambda change: -change[0].lineno):
        before = lines[first.lineno - 1][: first.col_offset]
        after = lines[last.end_lineno - 1][last.end_col_offset :]  # type: ignore[operator]
        lines[first.lineno - 1 : last.end_lineno] = [before + new + after]
    return "\n".join(lines), needed


def _relative(module: _Module, node: ast.ImportFrom, needed: list[_Module]) -> str:
    """Return the relative imports that replace an import, and add the imported modules to
    `needed`.
    """
    if f"{node.module}.".startswith(f"{_KERNELS}."):
        if node.col_offset == 0:
            raise _not_exportable(module, node, "loads GPU kernels outside of a function")
        return 'raise NotImplementedError("an exported model has no GPU kernels of its own")'
    by_module = {}
    for alias in node.names:
        target = _defining(str(node.module), alias.name)
        if target is None:
            raise _not_exportable(
                module,
                node,
                f"imports {alias.name}, which is no function, class or constant of a module",
            )
        by_module.setdefault(target, []).append(ast.unparse(alias))
    needed += by_module
    return "; ".join(
        f"from .{target.flat} import {', '.join(names)}" for target, names in by_module.items()
    )


def _defining(module_name: str, name: str) -> _Module | None:
    """Return the module of this package that defines a name imported from `module_name`, or
    None.
    """
    value = getattr(importlib.import_module(module_name), name, None)
    if value is None or inspect.ismodule(value):
        return None
    if inspect.isclass(value) or inspect.isfunction(value):
        module_name = value.__module__
    return _of_package(module_name)


def _not_exportable(module: _Module, node: ast.stmt, why: str) -> FileError:
    return FileError(
        "this import",
        f"cannot be exported with the encoding: it {why}",
        "import only the standard library, torch, transformers, numpy, and names of this project by"
        f" from {_PACKAGE}.MODULE import NAME",
        f"{module.path}, line {node.lineno}",
    )
