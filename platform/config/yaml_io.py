"""Read and write YAML: 1e-3 is a number, a repeated key is an error, and only plain data is ever built."""

import re
from pathlib import Path
from typing import Any

import yaml

from dbo.platform.errors import InputError


class _Loader(yaml.SafeLoader):
    pass


class _Dumper(yaml.SafeDumper):
    pass


# YAML 1.1 reads 1e-3 (without a dot) as text, YAML 1.2 as a number. The dumper needs the rule too: it puts a text that
# looks like such a number in quotes.
_SCIENTIFIC = re.compile(r"^[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+$")
for _side in (_Loader, _Dumper):
    _side.add_implicit_resolver("tag:yaml.org,2002:float", _SCIENTIFIC, list("-+.0123456789"))


def _mapping(loader: yaml.SafeLoader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: set[str] = set()
    for key_node, _ in node.value:
        if key_node.tag == "tag:yaml.org,2002:merge":
            continue
        key = loader.construct_object(key_node)
        if isinstance(key, str) and key in seen:
            raise yaml.constructor.ConstructorError(None, None, f"the key {key!r} is given twice", key_node.start_mark)
        if isinstance(key, str):
            seen.add(key)
    return loader.construct_mapping(node, deep=True)


_Loader.add_constructor("tag:yaml.org,2002:map", _mapping)
_MAX_LENGTH = 200_000    # characters: the parser takes seconds for more
_MAX_DEPTH = 200         # brackets: the parser takes seconds for thousands
_MAX_VALUES = 100_000    # aliases of aliases can expand to more than any memory holds


def parse(text: str, where: str) -> Any:
    """Return the data in `text`; `where` names its source in an error."""
    if len(text) > _MAX_LENGTH:
        raise InputError(f"{where}: {len(text):,} characters are not allowed; must be at most {_MAX_LENGTH:,}")
    if _depth(text) > _MAX_DEPTH:
        raise InputError(f"{where}: not valid YAML: nested too deeply; at most {_MAX_DEPTH} levels are allowed")
    try:
        data = yaml.load(text, Loader=_Loader)      # a SafeLoader
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f" line {mark.line + 1}" if mark is not None and "\n" in text.strip() else ""
        problem = getattr(error, "problem", None) or str(error).replace("\n", " ")
        raise InputError(f"{where}:{line} not valid YAML: {problem}") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where}: not valid YAML: {str(error) or 'nested too deeply'}") from None
    if not _is_small(data):
        raise InputError(f"{where}: too large with its aliases expanded; at most {_MAX_VALUES:,} values are allowed")
    return data


def _depth(text: str) -> int:
    """Return the deepest nesting of brackets; those in quotes count too, no experiment has hundreds of them."""
    depth = deepest = 0
    for bracket in re.findall(r"[\[\]{}]", text):
        depth += 1 if bracket in "[{" else -1
        deepest = max(deepest, depth)
    return deepest


def _is_small(data: Any) -> bool:
    """Decide whether the data, with every alias expanded, has at most _MAX_VALUES values."""
    left, count = [data], 0
    while left and count <= _MAX_VALUES:
        value = left.pop()
        count += 1
        if isinstance(value, dict):
            left += value.values()
        elif isinstance(value, (list, set, tuple)):
            left += value
    return not left


def read(path: Path) -> dict[str, Any]:
    """Return the mapping in a YAML file."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except (OSError, ValueError) as error:      # ValueError: a file name with a null character
        raise InputError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    data = parse(text, str(path))
    if data is None:
        return {}
    if not isinstance(data, dict) or not all(isinstance(key, str) for key in data):
        raise InputError(f"{path}: must be a mapping of keys to values, not a {type(data).__name__}")
    return data


def dump(data: Any) -> str:
    """Return YAML text with the keys in their order; innermost mappings stay on one line."""
    return yaml.dump(
        data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, default_flow_style=None, width=110
    )
