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

_ENCODED_MODELING = "modeling_encoded_tape.py"
_ENCODED_CONFIGURATION = "configuration_encoded_tape.py"

# The values of auto_map in config.json: by auto class, the file and the class in it.
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
# The folder of the files that all exports share.
_MODELING = Path(__file__).parents[1] / "modeling"
# In an export's _ENCODED_MODELING, the line _ENCODING_IMPORT is followed by this comment and by
# further imports.
_IMPORTS_COMMENT = "# Some versions of transformers copy only what this file imports directly.\n"
_ENCODING_IMPORT = """from .encoding_tape import (
    Encoding,
    SingleProcess,
    TokenCache,
    in_some_layers,
    temperature,
)
"""
_PACKAGE = __name__.partition(".")[0]
_ROOT = Path(__file__).parents[2]
_IMPORTABLE = {*sys.stdlib_module_names, "torch", "transformers", "numpy"}
"""Modules that are installed wherever transformers loads a model."""
# The conditions of blocks that only type checkers read.
_TYPES_ONLY = ("TYPE_CHECKING", "typing.TYPE_CHECKING")
_KERNELS = f"{_PACKAGE}.ops.kernels"
"""The package of GPU kernels, which are not exported: an exported encoding uses plain torch."""
# The text of encoding_tape.py, by which the shared files import the encoding.
_ENTRY = '''"""The positional encoding {name}, under the names that modeling_encoded_tape uses."""

from .{interface} import SingleProcess, TokenCache
from .{module} import {encoding} as Encoding
from .{some_layers} import in_some_layers, temperature

__all__ = [
    "Encoding",
    "SingleProcess",
    "TokenCache",
    "in_some_layers",
    "temperature",
]
'''


def code_files(encoding: type[PositionEncoding] | None) -> dict[str, bytes]:
    """Return the contents of an export's Python files by file name, for TAPE by default or for
    another encoding.

    Raises UserError if the encoding's file cannot be exported.
    """
    files = {path.name: path.read_bytes() for path in sorted(_MODELING.glob("*_tape.py"))}
    if encoding is None:
        return {name: content for name, content in files.items() if "encoded" not in name}

    encoding_texts = {name: text.encode() for name, text in encoding_files(encoding).items()}
    assert not files.keys() & encoding_texts.keys(), "names of files clash"
    # transformers finds a model's class by its configuration's class. If two directories have the
    # same name, it distinguishes their configuration files only by the text. So this text must
    # differ between encodings.
    digest = hashlib.sha256(
        b"".join(encoding_texts[name] for name in sorted(encoding_texts))
    ).hexdigest()[:16]
    files[_ENCODED_CONFIGURATION] += (
        f"# For the positional encoding {encoding.name}, {digest}.\n".encode()
    )
    files |= encoding_texts

    # Some versions of transformers copy only files that the modeling file imports directly. So it
    # imports something from each file: `__name__`, which every module has.
    imports = "".join(
        f"from .{name.removesuffix('.py')} import __name__ as _\n"
        for name in sorted(files)
        if name not in (_ENCODED_MODELING, "encoding_tape.py")
    )
    text = files[_ENCODED_MODELING].decode()
    assert text.count(_ENCODING_IMPORT) == 1
    with_imports = f"{_ENCODING_IMPORT}{_IMPORTS_COMMENT}{imports}"
    files[_ENCODED_MODELING] = text.replace(_ENCODING_IMPORT, with_imports).encode()
    return files


def write_code(directory: Path, encoding: type[PositionEncoding] | None = None) -> None:
    """Write the Python files of an export to `directory`; see `code_files`."""
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
    """A module to export: of this package, or the file of a user's encoding."""

    name: str
    """Dotted name in this package; for a user's module, the name of its file."""
    path: Path
    flat_name: str
    """The module's name in an export: the name of its file without .py."""


def encoding_files(encoding: type[PositionEncoding]) -> dict[str, str]:
    """Return the text of an encoding's files by name, including `encoding_tape.py`, which imports
    the class.

    Raises UserError for an import that cannot be exported.
    """
    encoding_module = _module_of_encoding(encoding)
    # `_ENTRY` imports from these two, even if the encoding does not.
    interface = _package_module(f"{_PACKAGE}.position.encoding")
    some_layers = _package_module(f"{_PACKAGE}.position.some_layers")
    assert interface is not None and some_layers is not None
    texts = {}
    # The encoding's module, and all that it imports, directly or not.
    pending_modules = [encoding_module, interface, some_layers]
    while pending_modules:
        module = pending_modules.pop()
        if f"{module.flat_name}.py" not in texts:
            texts[f"{module.flat_name}.py"], imported = _flatten(module)
            pending_modules += imported

    entry = _ENTRY.format(
        name=encoding.name,
        encoding=encoding.__qualname__,
        interface=interface.flat_name,
        some_layers=some_layers.flat_name,
        module=encoding_module.flat_name,
    )
    return {"encoding_tape.py": entry} | dict(sorted(texts.items()))


def _module_of_encoding(encoding: type[PositionEncoding]) -> _Module:
    """Return the module that defines an encoding, of this package or of the user.

    Raises UserError unless the class is at the top level of a file.
    """
    module = _package_module(encoding.__module__)
    if module is not None:
        return module
    try:
        path = Path(inspect.getfile(encoding))
    except (OSError, TypeError):  # such as in an interactive session
        path = Path()
    if not path.is_file() or encoding.__qualname__ != encoding.__name__:
        raise UserError(
            f"the positional encoding {encoding.name}",
            f"cannot be exported: its class {encoding.__qualname__} is not at the top level of a"
            " file",
            "define the class there",
        )
    # The prefix `own` keeps names apart from those of this package's modules.
    name = re.sub(r"[^A-Za-z0-9_]", "_", path.stem)
    return _Module(path.stem, path, f"own_{name}_tape")


def _package_module(name: str) -> _Module | None:
    """Return the module of this package with the dotted name `name`, or None if there is none."""
    first, *rest = name.split(".")
    if first != _PACKAGE or not rest:
        return None
    folder = _ROOT.joinpath(*rest)
    for path in (folder.with_suffix(".py"), folder / "__init__.py"):
        if path.is_file():
            return _Module(name, path, f"{'_'.join(rest)}_tape")
    return None


def _flatten(module: _Module) -> tuple[str, list[_Module]]:
    """Return the text of a module as a flat file, and the modules of this package that it imports.

    Imports from this package become relative. Imports for type checkers are removed, since they
    need not be installed. Raises FileError for an import that cannot be exported.
    """
    text = module.path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    type_checking_blocks = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) in _TYPES_ONLY
    ]
    # All nodes in these blocks; their imports are not exported.
    omitted = {
        node
        for block in type_checking_blocks
        for statement in block.body
        for node in ast.walk(statement)
    }
    imported_modules = []
    # The first and the last statement of each range to replace, and the new text.
    changes: list[tuple[ast.stmt, ast.stmt, str]] = [
        (block.body[0], block.body[-1], "pass") for block in type_checking_blocks
    ]
    for node in ast.walk(tree):
        if node in omitted or not isinstance(node, (ast.Import, ast.ImportFrom)):
            continue
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif node.level:
            names = ["."]  # relative, which is never importable
        elif f"{node.module}".startswith(f"{_PACKAGE}."):
            changes.append((node, node, _relative_imports(module, node, imported_modules)))
            continue
        else:
            names = [str(node.module)]
        for name in names:
            if name.partition(".")[0] not in _IMPORTABLE:
                raise _not_exportable(module, node, f"imports {name}")

    # From the last to the first, so that line numbers remain valid.
    lines = text.split("\n")
    for first, last, new in sorted(changes, key=lambda change: -change[0].lineno):
        # The rest of the first and the last line, which may hold other statements.
        before = lines[first.lineno - 1][: first.col_offset]
        after = lines[last.end_lineno - 1][last.end_col_offset :]  # type: ignore[operator]
        lines[first.lineno - 1 : last.end_lineno] = [before + new + after]
    return "\n".join(lines), imported_modules


def _relative_imports(
    module: _Module, node: ast.ImportFrom, imported_modules: list[_Module]
) -> str:
    """Return the relative imports, separated by semicolons, that replace an import of this package,
    and add the imported modules to `imported_modules`.

    An import of kernels is replaced by an error. Raises FileError for an import that cannot be
    exported.
    """
    # The dots exclude a module whose name only begins like that of the kernels.
    if f"{node.module}.".startswith(f"{_KERNELS}."):
        # At the top level of a file, the error below would be raised when the export is loaded.
        if node.col_offset == 0:
            raise _not_exportable(module, node, "loads GPU kernels outside of a function")
        return 'raise NotImplementedError("an exported model has no GPU kernels of its own")'
    names_by_module = {}
    for alias in node.names:
        target = _defining_module(str(node.module), alias.name)
        if target is None:
            raise _not_exportable(
                module,
                node,
                f"imports {alias.name}, which is no function, class or constant of a module",
            )
        names_by_module.setdefault(target, []).append(ast.unparse(alias))
    imported_modules += names_by_module  # the keys
    return "; ".join(
        f"from .{target.flat_name} import {', '.join(names)}"
        for target, names in names_by_module.items()
    )


def _defining_module(module_name: str, name: str) -> _Module | None:
    """Return the module of this package that defines `name`, which can be imported from
    `module_name`.

    Returns None if `name` is a module, or not defined in this package.
    """
    value = getattr(importlib.import_module(module_name), name, None)
    if value is None or inspect.ismodule(value):
        return None
    # `module_name` may only pass on the name. Constants do not know their module.
    if inspect.isclass(value) or inspect.isfunction(value):
        module_name = value.__module__
    return _package_module(module_name)


def _not_exportable(module: _Module, node: ast.stmt, why: str) -> FileError:
    """Return the error about the import `node` of a module; `why` continues "it ..."."""
    return FileError(
        "this import",
        f"cannot be exported with the encoding: it {why}",
        "import only the standard library, torch, transformers, numpy, and names of this project by"
        f" from {_PACKAGE}.MODULE import NAME",
        f"{module.path}, line {node.lineno}",
    )
