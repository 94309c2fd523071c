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


def _auto_map(family: str, files: str) -> dict[str, str]:
    heads = ("CausalLM", "SequenceClassification")
    modeling = f"modeling_{files}.{family}"
    names = {"AutoConfig": f"configuration_{files}.{family}Config", "AutoModel": f"{modeling}Model"}
    return names | {f"AutoModelFor{head}": f"{modeling}For{head}" for head in heads}


AUTO_MAP = _auto_map("Tape", "tape")
ENCODED_AUTO_MAP = _auto_map("Encoded", "encoded_tape")
_MODELING = Path(__file__).parents[1] / "modeling"
_IMPORT = "from .encoding_tape import Encoding, TokenCache, in_some_layers\n"
_PACKAGE = __name__.partition(".")[0]
_ROOT = Path(__file__).parents[2]
_AVAILABLE = {*sys.stdlib_module_names, "torch", "transformers", "numpy"}
"""Modules that are installed wherever transformers loads a model."""
_TYPES_ONLY = ("TYPE_CHECKING", "typing.TYPE_CHECKING")
_KERNELS = f"{_PACKAGE}.ops.kernels"
"""The package of GPU kernels, which are not exported: an exported encoding uses plain torch."""
_ENTRY = '''"""The positional encoding {name}, under the names that modeling_encoded_tape imports."""

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
    paths = sorted(_MODELING.glob("*_tape.py"))
    files = {
        path.name: path.read_bytes()
        for path in paths
        if encoding is not None or "encoded" not in path.name
    }
    if encoding is None:
        return files
    added = {name: text.encode() for name, text in encoding_files(encoding).items()}
    assert not files.keys() & added.keys(), (
        "the names of an encoding's files clash with the shared files"
    )
    every = {**files, **added}
    modules = sorted(
        name.removesuffix(".py") for name in every if name not in (_ENCODED, "encoding_tape.py")
    )
    text = files[_ENCODED].decode()
    assert text.count(_IMPORT) == 1
    imports = "".join(f"from .{name} import __name__ as _\n" for name in modules)
    # If two directories have the same name, transformers distinguishes their configuration files
    # only by the text. It finds a model's class by its configuration's class. So this text must
    # differ between encodings.
    digest = hashlib.sha256(b"".join(content for _, content in sorted(added.items()))).hexdigest()[
        :16
    ]
    files[_CONFIGURATION] += f"# For the positional encoding {encoding.name}, {digest}.\n".encode()
    comment = "# Some versions of transformers copy only files that this one imports directly.\n"
    return files | added | {_ENCODED: text.replace(_IMPORT, _IMPORT + comment + imports).encode()}


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
    found = {file.name for file in directory.glob("*.py")}
    return found == set(expected) and all(
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
    module_of_encoding = _module_of(encoding)
    interface, some_layers = (
        _of_package(f"{_PACKAGE}.position.{name}") for name in ("encoding", "some_layers")
    )
    assert interface is not None and some_layers is not None
    texts: dict[str, str] = {}
    pending = [module_of_encoding, interface, some_layers]
    while pending:
        module = pending.pop()
        if f"{module.flat}.py" not in texts:
            texts[f"{module.flat}.py"], imported = _flattened(module)
            pending += imported
    names = {
        "interface": interface.flat,
        "some_layers": some_layers.flat,
        "module": module_of_encoding.flat,
    }
    entry = _ENTRY.format(name=encoding.name, encoding=encoding.__qualname__, **names)
    return {"encoding_tape.py": entry} | dict(sorted(texts.items()))


def _module_of(encoding: type[PositionEncoding]) -> _Module:
    if (module := _of_package(encoding.__module__)) is not None:
        return module
    try:
        path = Path(inspect.getfile(encoding))
    except (OSError, TypeError):
        path = None
    if path is None or not path.is_file() or encoding.__qualname__ != encoding.__name__:
        problem = (
            f"cannot be exported: its class {encoding.__qualname__} is not at the top level of a"
            " file"
        )
        raise UserError(
            f"the positional encoding {encoding.name}", problem, "define the class there"
        )
    return _Module(path.stem, path, f"own_{re.sub(r'[^A-Za-z0-9_]', '_', path.stem)}_tape")


def _of_package(name: str) -> _Module | None:
    """Return the module of this package with this dotted name, or None."""
    first, *rest = name.split(".")
    if first != _PACKAGE or not rest:
        return None
    whole = _ROOT.joinpath(*rest)
    path = next(
        (path for path in (whole.with_suffix(".py"), whole / "__init__.py") if path.is_file()), None
    )
    if path is None:
        return None
    return _Module(name, path, f"{'_'.join(rest)}_tape")


def _flattened(module: _Module) -> tuple[str, list[_Module]]:
    """Return the text of a module as a flat file, and the modules that it imports."""
    text = module.path.read_text(encoding="utf-8")
    lines = text.split("\n")
    needed = []
    tree = ast.parse(text)
    blocks = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) in _TYPES_ONLY
    ]
    omitted = {node for block in blocks for statement in block.body for node in ast.walk(statement)}
    imports = [
        x
        for x in ast.walk(tree)
        if isinstance(x, (ast.Import, ast.ImportFrom)) and x not in omitted
    ]
    for node in sorted([*blocks, *imports], key=lambda node: -node.lineno):
        if isinstance(node, ast.If):
            first = node.body[0]
            last = node.body[-1]
            lines[first.lineno - 1 : last.end_lineno] = [
                f"{lines[first.lineno - 1][: first.col_offset]}pass"
            ]
        elif isinstance(node, ast.ImportFrom) and (
            node.level or str(node.module).startswith(f"{_PACKAGE}.")
        ):
            indent = lines[node.lineno - 1][: node.col_offset]
            end = lines[node.end_lineno - 1][node.end_col_offset :]
            if indent.strip() or end.partition("#")[0].strip():
                raise _not_exportable(
                    module, node, "shares its line with other statements", "put it on its own line"
                )
            new = _relative(module, node, needed)
            lines[node.lineno - 1 : node.end_lineno] = [indent + line for line in new]
        else:
            for name in (
                [alias.name for alias in node.names]
                if isinstance(node, ast.Import)
                else [str(node.module)]
            ):
                if name.partition(".")[0] not in _AVAILABLE:
                    allowed = (
                        "the standard library, torch, transformers, numpy and names of this"
                        " package's modules"
                    )
                    raise _not_exportable(
                        module, node, f"imports {name}, but an export can import only {allowed}"
                    )
    return "\n".join(lines), needed


def _relative(module: _Module, node: ast.ImportFrom, needed: list[_Module]) -> list[str]:
    """Return the relative imports that replace the import `node`, and add the imported modules to
    `needed`.
    """
    if node.level:
        raise _not_exportable(
            module, node, "is relative", f"write it as from {_PACKAGE}.MODULE import NAME"
        )
    if f"{node.module}.".startswith(f"{_KERNELS}."):
        if node.col_offset == 0:
            raise _not_exportable(
                module, node, "loads GPU kernels, which are not exported", "move it into a function"
            )
        return ['raise NotImplementedError("an exported model has no GPU kernels of its own")']
    by_module: dict[_Module, list[str]] = {}
    for alias in node.names:
        target = _defining(str(node.module), alias.name)
        if target is None:
            fix = (
                f"write it as from {_PACKAGE}.MODULE import NAME, with the module that defines the"
                " name"
            )
            raise _not_exportable(
                module, node, "does not import a function, class or constant of a module", fix
            )
        by_module.setdefault(target, []).append(ast.unparse(alias))
    needed += by_module
    return [f"from .{target.flat} import {', '.join(names)}" for target, names in by_module.items()]


def _defining(module_name: str, name: str) -> _Module | None:
    """Return the module of this package that defines a name imported from `module_name`, or
    None.
    """
    value = getattr(importlib.import_module(module_name), name, None)
    if value is None or inspect.ismodule(value):
        return None
    defined = inspect.isclass(value) or inspect.isfunction(value)
    return _of_package(value.__module__ if defined else module_name)


def _not_exportable(module: _Module, node: ast.stmt, why: str, fix: str = "") -> FileError:
    place = f"{module.path}, line {node.lineno}"
    problem = "cannot be exported with the encoding: it"
    return FileError("this import", f"{problem} {why}", fix, place)
