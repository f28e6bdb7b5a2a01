"""What a run records about its environment, and compares when it is resumed.

    name, use, args, version   as the recipe names it; the version of an installed package
    source     hash of the file that defines the environment; empty for installed packages
    modules    hash of each module beside that file which it imports, directly or through others
    problems   hash of the ids, prompts and answers, by split
    scripts    hash of each script that the environment starts as a program, and of its modules
    made_from  hash of each part of an environment that was given as a Python object

All values are plain JSON. Objects count with their class and with the public attributes that are
plain data; functions count with their name, their defaults and what they enclose, and their source
is among the files. State that an object builds up while it is used belongs in private attributes.
"""

from __future__ import annotations

import ast
import enum
import functools
import hashlib
import inspect
import json
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from types import CodeType, FunctionType, MethodType
from typing import Any, Protocol, runtime_checkable

import rstar2
from rstar2.config import EnvironmentConfig
from rstar2.environments.base import EnvironmentProtocol
from rstar2.environments.load import known_environments
from rstar2.types import Problem, Split

MAX_DEPTH = 8
"""Objects within objects that are looked at."""
PACKAGE = Path(rstar2.__file__).resolve().parent
STDLIB = Path(sysconfig.get_path("stdlib")).resolve()
SITES = {"site-packages", "dist-packages"}


@runtime_checkable
class Described(Protocol):
    """An environment that says what it was made from; of others the public attributes count."""

    @property
    def made_from(self) -> Mapping[str, Any]: ...


@runtime_checkable
class StartsScripts(Protocol):
    """A part of an environment that starts files as programs, such as endpoint.program.Command."""

    @property
    def scripts(self) -> Sequence[Path]: ...


def identify(
    config: EnvironmentConfig,
    environment: EnvironmentProtocol,
    problems: Mapping[Split, Sequence[Problem]],
) -> dict[str, Any]:
    """What a run records about an environment that was loaded by name."""
    entry = known_environments().get(config.use)
    version = source = ""
    modules: dict[str, str] = {}
    if entry is None:
        name = config.use.partition(":")[0]
        module = sys.modules.get(name)
        if module is not None and module.__file__ is not None:
            source, modules = _sources([Path(module.__file__)], module=name)
    else:
        version = rstar2.__version__ if entry.origin == "built in" else entry.origin
    return {
        "name": environment.name,
        "use": config.use,
        "version": version,
        "args": dict(config.args),
        "source": source,
        "modules": modules,
        "scripts": _scripts(environment),
        "problems": _problems(problems),
    }


def identify_object(
    environment: EnvironmentProtocol, problems: Mapping[Split, Sequence[Problem]]
) -> dict[str, Any]:
    """What a run records about an environment that is a Python object."""
    parts: Mapping[str, Any] = _public(environment)
    main: Any = type(environment)
    if isinstance(environment, Described):
        parts = environment.made_from
        main = parts.get("reward")
    made_from: dict[str, str] = {}
    files: dict[Path, None] = {}
    for name, value in [("", main), *parts.items()]:
        state = _State()
        content = _text(state.plain(value))
        files |= dict.fromkeys(state.files)
        if name:
            made_from[name] = _hash(content.encode())
    own = [file for file in files if not file.is_relative_to(PACKAGE)]
    source, modules = _sources(own)
    return {
        "name": environment.name,
        "use": environment.name,
        "version": "",
        "args": {},
        "source": source,
        "modules": modules,
        "scripts": _scripts(environment),
        "problems": _problems(problems),
        "made_from": made_from,
    }


def _scripts(environment: EnvironmentProtocol) -> dict[str, str]:
    """Hashes by path of the scripts that the parts of an environment start."""
    parts = environment.made_from.values() if isinstance(environment, Described) else ()
    hashes: dict[str, str] = {}
    for part in parts:
        for script in part.scripts if isinstance(part, StartsScripts) else ():
            source, modules = _sources([script])
            hashes |= {script.name: source, **modules}
    return hashes


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def _problems(problems: Mapping[Split, Sequence[Problem]]) -> dict[str, str]:
    return {
        split: _hash(json.dumps([[p.id, p.prompt, p.answer] for p in given]).encode())
        for split, given in problems.items()
    }


# --------------------------------------------------------------------------- files


def _sources(files: Sequence[Path], module: str = "") -> tuple[str, dict[str, str]]:
    """The hash of the first file, and hashes by name of the others and of all they import."""
    if not files:
        return "", {}
    first = files[0].resolve()
    levels = module.count(".") + (first.name == "__init__.py") if module else 0
    root = first.parents[levels]
    package = module.partition(".")[0] if _installed(first) else ""
    modules: dict[str, str] = {}
    todo = [first, *(file.resolve() for file in files[1:])]
    known = set(todo)
    while todo:
        file = todo.pop()
        if file != first:
            name = file.relative_to(root) if file.is_relative_to(root) else file
            modules[name.as_posix()] = _hash(file.read_bytes())
        if _installed(file) and not package:
            continue
        for imported in _imported_files(file, root, package):
            if imported not in known:
                known.add(imported)
                todo.append(imported)
    return _hash(first.read_bytes()), dict(sorted(modules.items()))


def _installed(file: Path) -> bool:
    """Whether a file belongs to Python or to an installed package."""
    return file.is_relative_to(STDLIB) or bool(SITES & set(file.parts))


def _imported_files(file: Path, root: Path, package: str) -> Iterator[Path]:
    """The files under `root` that a file imports; only those of `package`, if one is given."""
    for name in _imported_names(file, root):
        parts = name.split(".")
        if package and parts[0] != package:
            continue
        for count in range(1, len(parts) + 1):
            place = root.joinpath(*parts[:count])
            for candidate in (place.with_suffix(".py"), place / "__init__.py"):
                if candidate.is_file():
                    yield candidate.resolve()


def _imported_names(file: Path, root: Path) -> Iterator[str]:
    """The modules that a file imports, at the top or within functions."""
    if not file.is_relative_to(root):
        return
    package = file.relative_to(root).parts[:-1]
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):  # it cannot be imported either; its hash is recorded
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*start, *([node.module] if node.module else [])])
            yield from (f"{module}.{alias.name}".lstrip(".") for alias in node.names)


# --------------------------------------------------------------------------- objects


def _public(thing: object) -> dict[str, Any]:
    """The public attributes of an object; none if it keeps them elsewhere."""
    if is_dataclass(thing):
        attributes = {one.name: getattr(thing, one.name) for one in fields(thing)}
    else:
        try:
            attributes = vars(thing)
        except TypeError:
            return {}
    return {name: value for name, value in attributes.items() if not name.startswith("_")}


def _own(kind: type) -> bool:
    """Whether a class is of rstar2 or of the user, not of an installed package."""
    if kind.__module__.partition(".")[0] == "rstar2":
        return True
    module = sys.modules.get(kind.__module__)
    if module is None or kind.__module__ == "builtins":
        return False
    file = vars(module).get("__file__")
    return file is None or not _installed(Path(file).resolve())


@dataclass(slots=True)
class _State:
    """Turns values into plain data, and collects the files of functions and classes."""

    files: list[Path] = field(default_factory=list)
    inside: list[int] = field(default_factory=list)
    """Ids of the objects that are being looked at: cycles end there."""

    def plain(self, value: Any) -> Any:
        """The value as JSON that is equal in every process."""
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, Path):
            return str(value)
        if isinstance(value, bytes | bytearray):
            return {"bytes": _hash(bytes(value))}
        if id(value) in self.inside or len(self.inside) >= MAX_DEPTH:
            return {"class": type(value).__qualname__}
        self.inside.append(id(value))
        try:
            return self._content(value)
        finally:
            self.inside.pop()

    def _content(self, value: Any) -> Any:
        if isinstance(value, Mapping):  # as pairs: keys of a dict may be of any type
            pairs = [[self.plain(key), self.plain(one)] for key, one in value.items()]
            return {"items": sorted(pairs, key=_text)}
        if isinstance(value, list | tuple):
            return [self.plain(one) for one in value]
        if isinstance(value, Set):
            return sorted((self.plain(one) for one in value), key=_text)
        if isinstance(value, enum.Enum):
            return {"class": type(value).__qualname__, "member": value.name}
        if isinstance(value, FunctionType):
            return self._function(value)
        if isinstance(value, MethodType):
            return [self.plain(value.__func__), self.plain(value.__self__)]
        if isinstance(value, functools.partial):
            return [self.plain(value.func), self.plain(value.args), self.plain(value.keywords)]
        kind = value if isinstance(value, type) else type(value)
        name = f"{kind.__module__}.{kind.__qualname__}"
        if not _own(kind):
            return {"class": name}
        self._file(kind)
        if isinstance(value, type):
            return {"type": name}
        state = {key: self.plain(one) for key, one in _public(value).items()}
        return {"class": name, "state": state}

    def _function(self, function: FunctionType) -> dict[str, Any]:
        code: str | None = None
        if not self._file(function):  # typed in an interpreter: there is no file to compare
            code = _hash(_text(_code(function.__code__)).encode())
        cells = [cell.cell_contents for cell in function.__closure__ or () if _filled(cell)]
        return {
            "function": f"{function.__module__}.{function.__qualname__}",
            "defaults": self.plain([function.__defaults__, function.__kwdefaults__]),
            "encloses": self.plain(cells),
            "code": code,
        }

    def _file(self, thing: FunctionType | type) -> bool:
        """Remember the file that defines a function or class; False if there is none."""
        try:
            name = inspect.getsourcefile(thing)
        except (TypeError, OSError):  # built in, or typed in an interpreter
            return False
        if name is None or not Path(name).is_file():
            return False
        file = Path(name).resolve()
        if not _installed(file) and file not in self.files:
            self.files.append(file)
        return True


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def _filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:  # a variable without a value yet
        return False
    return True


def _code(code: CodeType) -> list[Any]:
    """The instructions and constants of a function and of those inside it."""
    constants = [
        _code(one) if isinstance(one, CodeType) else _State().plain(one) for one in code.co_consts
    ]
    return [code.co_code.hex(), list(code.co_names), constants]
