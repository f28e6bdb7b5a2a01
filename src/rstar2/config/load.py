"""Load a checked Recipe from a YAML file and `--set` overrides, with the origin of each value.
Every error names the setting, the file and line, and the fix.

Order of precedence: schema defaults < the recipe a file `extends` < the file < `--set`.
Mappings are merged key by key; lists (such as rl.stages) are replaced. `--set` addresses a list
item by index or by its name (`rl.stages.stage1.steps=5`).
"""

from __future__ import annotations

import dataclasses
import difflib
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

import rstar2
from rstar2.config.check import check
from rstar2.config.codeenv import CodeEnvConfig
from rstar2.config.schema import Recipe
from rstar2.config.walk import annotation_at, options, section, settings, suggestion, unknown
from rstar2.errors import RecipeError

COMMAND_LINE = "--set"
COLUMN = 48
"""Where `render_recipe` puts the origin of a value."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a value was set."""

    source: str = "default"
    line: int = 0

    def __str__(self) -> str:
        return f"{self.source}:{self.line}" if self.line else self.source


DEFAULT = Origin()


@dataclass(slots=True)
class RecipeLayer:
    """Plain values and, by dotted path, the origin of each key that is set explicitly."""

    values: dict[str, Any]
    origins: dict[str, Origin] = field(default_factory=dict)

    def put(self, path: str, value: Any, origin: Origin) -> None:
        """Set the origin of the value at `path` and of everything below it."""
        self.origins[path] = origin
        for key, inner in _children(value):
            self.put(f"{path}.{key}", inner, origin)

    def forget(self, path: str) -> None:
        """Drop the origins at and below `path`, because its value is replaced."""
        for known in [p for p in self.origins if p == path or p.startswith(path + ".")]:
            del self.origins[known]


@dataclass(frozen=True, slots=True)
class LoadedRecipe:
    """A recipe that passed all checks, with the origin of each value."""

    recipe: Recipe
    source: Path
    origins: Mapping[str, Origin]

    def origin(self, path: str) -> Origin:
        """The origin of the value at a dotted path."""
        return self.origins.get(path, DEFAULT)


def load_recipe(
    name: str | Path, overrides: Sequence[str] = (), *, seed: int | None = None
) -> LoadedRecipe:
    """Load a recipe by path or shipped name, with `a.b=c` overrides; raises RecipeError."""
    path = find_recipe(name)
    layer = _read(path, ())
    for text in overrides:
        _override(layer, text)
    if seed is not None:
        layer.values["seed"] = seed
        layer.put("seed", seed, Origin("--seed"))
    complaints = [
        f"{_at(layer, where)}{where} is not a setting: {hint}"
        for where, hint in unknown(layer.values)
    ]
    if complaints:
        raise _refusal(path, complaints)
    try:
        recipe = Recipe.model_validate(_with_limit_defaults(layer.values))
        if ":" in recipe.environment.use and recipe.environment.folder is None:
            folder = {"folder": str(path.absolute().parent)}
            environment = recipe.environment.model_copy(update=folder)
            recipe = recipe.model_copy(update={"environment": environment})
    except ValidationError as error:
        raise _refusal(path, [_explain(layer, dict(e)) for e in error.errors()]) from None
    loaded = LoadedRecipe(recipe, path, layer.origins)
    if faults := check(recipe):
        raise _refusal(path, [f.render(lambda p: str(loaded.origin(p))) for f in faults])
    return loaded


# --------------------------------------------------------------------------- printing


def render_recipe(loaded: LoadedRecipe) -> str:
    """The complete recipe as YAML, each line with the origin of its value; secrets are left out.

    The output is itself a recipe that loads to the same values.
    """
    values = loaded.recipe.model_dump(mode="json")
    values["codeenv"]["token"] = None
    lines = []
    for text, path in _lines(values, "", 0):
        origin = f"# {loaded.origin(path)}" if path else ""
        lines.append(f"{text:<{COLUMN}} {origin}".rstrip())
    return "\n".join(lines) + "\n"


def _lines(values: dict[str, Any], prefix: str, depth: int) -> Iterator[tuple[str, str]]:
    """(line of YAML, path of the value on it or "" for a heading)."""
    indent = "  " * depth
    for key, value in values.items():
        path = f"{prefix}{key}"
        if isinstance(value, dict) and value:
            yield f"{indent}{key}:", ""
            yield from _lines(value, f"{path}.", depth + 1)
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            yield f"{indent}{key}:", ""
            for index, entry in enumerate(value):
                for n, (text, where) in enumerate(_lines(entry, f"{path}.{index}.", depth + 2)):
                    yield (f"{indent}  - {text.lstrip()}" if n == 0 else text), where
        else:
            yield f"{indent}{key}: {_scalar(value)}", path


def _scalar(value: Any) -> str:
    """A plain value or a list of them on one line of YAML."""
    if isinstance(value, list):
        return f"[{', '.join(_scalar(v) for v in value)}]"
    text = yaml.safe_dump(value, default_flow_style=True, width=10_000)
    return text.removesuffix("\n...\n").strip()


# --------------------------------------------------------------------------- finding


def recipe_folders() -> list[Path]:
    """The folders of shipped recipes: in an installed package, or at the root of a checkout."""
    package = Path(rstar2.__file__).resolve().parent
    candidates = [package / "recipes", package.parents[1] / "recipes"]
    return [folder for folder in candidates if folder.is_dir()]


def shipped_recipes() -> dict[str, Path]:
    """Every shipped recipe by name (`tiny`, `evidence/base`)."""
    return {
        str(path.relative_to(folder).with_suffix("")): path
        for folder in reversed(recipe_folders())
        for path in sorted(folder.rglob("*.yaml"))
    }


def find_recipe(name: str | Path) -> Path:
    """The file behind a path or a shipped name."""
    path = Path(name)
    if path.is_file():
        return path
    shipped = shipped_recipes()
    if str(name) in shipped:
        return shipped[str(name)]
    near = difflib.get_close_matches(str(name), [*shipped], n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    raise RecipeError(
        f"no recipe {str(name)!r}: {hint}It is neither a file nor shipped with rstar2 "
        f"({', '.join(shipped)})"
    )


# --------------------------------------------------------------------------- reading


def _read(path: Path, parents: tuple[Path, ...]) -> RecipeLayer:
    """A file merged over what it extends."""
    if path.resolve() in parents:
        chain = " -> ".join(str(p) for p in (*parents, path))
        raise RecipeError(f"recipes extend each other in a circle: {chain}")
    layer = _parse(path)
    base = layer.values.pop("extends", None)
    if base is None:
        return layer
    where = layer.origins.pop("extends")
    if not isinstance(base, str):
        raise RecipeError(f"{where}: extends takes the name or path of one recipe, not {base!r}")
    sibling = path.parent / base
    below = _read(sibling if sibling.is_file() else find_recipe(base), (*parents, path.resolve()))
    _merge(below, layer, below.values, layer.values, "")
    return below


def _parse(path: Path) -> RecipeLayer:
    """One file as a layer; YAML errors name file and line."""
    shown = _display(path)
    try:
        loader = yaml.SafeLoader(io.StringIO(path.read_text(encoding="utf-8")))
        node = loader.get_single_node()
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 0
        raise RecipeError(f"{Origin(shown, line)}: not valid YAML: {error.problem}") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise RecipeError(f"{shown} cannot be read: {error}") from None
    layer = RecipeLayer({})
    if node is None:
        return layer
    values = _construct(loader, node, "", layer, shown, ())
    if not isinstance(values, dict):
        raise RecipeError(f"{shown}: a recipe is a mapping of settings, not {values!r}")
    layer.values = values
    return layer


def _construct(
    loader: yaml.SafeLoader,
    node: yaml.Node,
    path: str,
    layer: RecipeLayer,
    shown: str,
    within: tuple[int, ...],
) -> Any:
    """The plain values of a node; records the line of each key."""
    line = node.start_mark.line + 1
    if id(node) in within:
        raise RecipeError(f"{shown}:{line}: {path} contains itself")
    within = (*within, id(node))
    prefix = f"{path}." if path else ""
    if isinstance(node, yaml.MappingNode):
        loader.flatten_mapping(node)
        mapping: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key, at = str(key_node.value), Origin(shown, key_node.start_mark.line + 1)
            if key in mapping and layer.origins[prefix + key].line != at.line:
                raise RecipeError(
                    f"{at}: {prefix}{key} is set twice (first in {layer.origins[prefix + key]})"
                )
            layer.origins[prefix + key] = at
            mapping[key] = _construct(loader, value_node, prefix + key, layer, shown, within)
        return mapping
    if isinstance(node, yaml.SequenceNode):
        items = []
        for index, child in enumerate(node.value):
            layer.origins[f"{prefix}{index}"] = Origin(shown, child.start_mark.line + 1)
            items.append(_construct(loader, child, f"{prefix}{index}", layer, shown, within))
        return items
    try:
        return loader.construct_object(node)
    except yaml.YAMLError as error:
        raise RecipeError(f"{shown}:{line}: {path}: {error}") from None


def _merge(
    below: RecipeLayer, above: RecipeLayer, base: dict[str, Any], over: dict[str, Any], prefix: str
) -> None:
    """Merge `above` over `below`, in place."""
    for key, value in over.items():
        path = prefix + key
        if isinstance(value, dict) and isinstance(base.get(key), dict):
            below.origins[path] = above.origins[path]
            _merge(below, above, base[key], value, f"{path}.")
            continue
        base[key] = value
        below.forget(path)
        for known, origin in above.origins.items():
            if known == path or known.startswith(path + "."):
                below.origins[known] = origin


# --------------------------------------------------------------------------- overriding


def _override(layer: RecipeLayer, text: str) -> None:
    """Apply one `a.b=c`; the schema decides how the value is parsed."""
    path, equals, raw = text.partition("=")
    parts = path.strip().split(".")
    if not equals or not all(parts):
        raise RecipeError(f"--set {text!r}: write it as setting=value, such as rl.roc.drawn=16")
    here: Any = layer.values
    done: list[str] = []
    for part in parts[:-1]:
        key = _key(here, part, done, text)
        if isinstance(here, dict) and not isinstance(here.get(key), dict | list):
            here[key] = {}
        here = here[key]
        done.append(str(key))
    last = _key(here, parts[-1], done, text)
    done.append(str(last))
    resolved = ".".join(done)
    for depth, part in enumerate(done):
        if annotation_at(done[: depth + 1]) is None:
            inner = section(annotation_at(done[:depth]))
            hint = suggestion(
                part, "".join(f"{p}." for p in done[:depth]), list(settings(inner)) if inner else []
            )
            wrong = ".".join(done[: depth + 1])
            raise RecipeError(f"--set {text!r}: {wrong} is not a setting: {hint}")
    value = _value(raw, annotation_at(done), text)
    here[last] = value
    layer.forget(resolved)
    layer.put(resolved, value, Origin(COMMAND_LINE))


def _key(here: Any, part: str, done: list[str], text: str) -> Any:
    """The key for one part of a path: a name, or in a list an index or an item's name."""
    if isinstance(here, dict):
        return part
    if isinstance(here, list):
        names = [str(i.get("name")) if isinstance(i, dict) else "" for i in here]
        if part in names:
            return names.index(part)
        if part.isdigit() and int(part) < len(here):
            return int(part)
        known = ", ".join(f"{n or i}" for i, n in enumerate(names)) or "nothing"
        raise RecipeError(f"--set {text!r}: {'.'.join(done)} has no {part!r} (it has {known})")
    raise RecipeError(f"--set {text!r}: {'.'.join(done)} is a plain value")


def _value(raw: str, annotation: Any, text: str) -> Any:
    """The value of an override: text where the schema wants text, YAML elsewhere."""
    kinds = options(annotation)
    if str in kinds and not (type(None) in kinds and raw in ("null", "~", "")):
        return raw
    try:
        return yaml.safe_load(raw)
    except yaml.YAMLError:
        raise RecipeError(f"--set {text!r}: {raw!r} is not valid YAML") from None


# --------------------------------------------------------------------------- errors


def _with_limit_defaults(values: dict[str, Any]) -> dict[str, Any]:
    """Fill partial limits with their defaults; a missing one would mean "no limit"."""
    codeenv = values.get("codeenv")
    if not isinstance(codeenv, dict):
        return values
    filled = dict(codeenv)
    defaults = CodeEnvConfig()
    for key, limits in (("default", defaults.default), ("cap", defaults.cap)):
        if isinstance(filled.get(key), dict):
            filled[key] = dataclasses.asdict(limits) | filled[key]
    return values | {"codeenv": filled}


def _explain(layer: RecipeLayer, error: dict[str, Any]) -> str:
    """One validation error as a sentence with its origin."""
    path = ".".join(str(part) for part in error["loc"])
    if error["type"] == "missing":
        return f"{_at(layer, path.rpartition('.')[0])}{path} is missing"
    message = error["msg"].removeprefix("Input ")
    return f"{_at(layer, path)}{path} = {error['input']!r} {message}"


def _at(layer: RecipeLayer, path: str) -> str:
    """The origin of the nearest explicit key on the way to `path`."""
    while path:
        if path in layer.origins:
            return f"{layer.origins[path]}: "
        path = path.rpartition(".")[0]
    return ""


def _refusal(path: Path, complaints: list[str]) -> RecipeError:
    return RecipeError(f"recipe {_display(path)} cannot work\n  " + "\n  ".join(complaints))


def _display(path: Path) -> str:
    """A path relative to the recipe folders, for messages."""
    for folder in recipe_folders():
        if path.is_relative_to(folder):
            return str(path.relative_to(folder))
    return str(path)


def _children(value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, dict):
        return [(str(key), inner) for key, inner in value.items()]
    if isinstance(value, list):
        return [(str(index), inner) for index, inner in enumerate(value)]
    return []
