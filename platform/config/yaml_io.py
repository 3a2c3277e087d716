"""Read and write YAML 1.2 (core schema, with merge keys): only plain data, no repeated key, a bounded size.

Text of the file appears in an error only as the name of a repeated key: whoever names a wrong file must not find its
content in a log.
"""

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from dbo.platform.errors import InputError

_TAG = "tag:yaml.org,2002:"
_MERGE = f"{_TAG}merge"
_MAX_LENGTH = 200_000    # characters: the parser takes seconds for more
_MAX_DEPTH = 200         # brackets: the parser takes seconds for thousands
_MAX_VALUES = 100_000    # aliases and merges of each other can expand to more than any memory holds


class _TooLargeError(Exception):
    """The text expands to more than _MAX_VALUES values."""


class _RepeatedKeyError(yaml.constructor.ConstructorError):
    """A mapping has the same key twice."""


class _Loader(yaml.SafeLoader):
    """Loader of the core schema: `1:30`, `yes`, `1_000` and dates are text, and `017` is 17."""

    def get_single_node(self) -> Any:
        """Return the parsed document, in which an alias is still a reference, if it is small and has no double key."""
        node = super().get_single_node()
        if node is not None:
            _check_node(node, {})
        return node


_Loader.yaml_implicit_resolvers = {}        # none of YAML 1.1
_Loader.yaml_constructors = {None: yaml.SafeLoader.construct_undefined}


class _Dumper(yaml.SafeDumper):
    """Dumper that puts a text in quotes if YAML 1.1 or 1.2 would read it as something else."""


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    """Escape the line breaks that only YAML 1.1 has: a reader would replace them."""
    return dumper.represent_scalar(f"{_TAG}str", text, style='"' if set(text) & set("\x85\u2028\u2029") else None)


_Dumper.add_representer(str, _represent_text)


def _check_node(node: yaml.Node, sizes: dict[yaml.Node, int]) -> int:
    """Return the number of values in a node with aliases and merges expanded; visits every node once.

    `sizes` holds the nodes that are complete. One that is being visited counts as too large: it contains itself.
    """
    if node in sizes:
        return sizes[node]
    sizes[node] = _MAX_VALUES + 1
    size = 1
    if isinstance(node, yaml.MappingNode):
        keys: set[tuple[str, str]] = set()
        for key, value in node.value:
            size += _check_node(value, sizes)
            if not isinstance(key, yaml.ScalarNode):
                size += _check_node(key, sizes)
            elif key.tag != _MERGE and (key.tag, key.value) in keys:
                problem = f"the key {key.value[:60]!r} is given twice"
                raise _RepeatedKeyError(None, None, problem, key.start_mark)
            else:
                keys.add((key.tag, key.value))
    elif isinstance(node, yaml.SequenceNode):
        size += sum(_check_node(value, sizes) for value in node.value)
    if size > _MAX_VALUES:
        raise _TooLargeError
    sizes[node] = size
    return size


# ---- values ----------------------------------------------------------------------------------------------------------


def _parse_int(text: str) -> int:
    return int(text[2:], 8) if text.startswith("0o") else int(text, 16) if text.startswith("0x") else int(text)


def _parse_float(text: str) -> float:
    plain = text.lower()
    if plain.endswith(".inf"):
        return -math.inf if plain.startswith("-") else math.inf
    return math.nan if plain == ".nan" else float(plain)


# Name of a scalar type: (its text, the characters that it starts with, its value). `null` comes first and `int` before
# `float`, because the first match counts.
_SCALARS: dict[str, tuple[str, str, Callable[[str], Any]]] = {
    "null": (r"(?:~|null|Null|NULL|)\Z", "~nN", lambda text: None),
    "bool": (r"(?:true|True|TRUE|false|False|FALSE)\Z", "tTfF", lambda text: text.lower() == "true"),
    "int": (r"(?:[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)\Z", "-+0123456789", _parse_int),
    "float": (
        r"(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))\Z",
        "-+.0123456789", _parse_float,
    ),
}


def _make_constructor(name: str) -> Callable[[yaml.SafeLoader, yaml.ScalarNode], Any]:
    pattern, _, parse_text = _SCALARS[name]

    def construct(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> Any:
        text = loader.construct_scalar(node)
        if not re.match(pattern, text):         # only with a tag: `!!int x`
            raise yaml.constructor.ConstructorError(None, None, f"a value is not of type {name}", node.start_mark)
        return parse_text(text)

    return construct


def _construct_text(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> Any:
    return loader.construct_scalar(node)


def _construct_sequence(loader: yaml.SafeLoader, node: yaml.SequenceNode) -> list[Any]:
    return loader.construct_sequence(node, deep=True)


def _construct_mapping(loader: yaml.SafeLoader, node: yaml.MappingNode) -> dict[Any, Any]:
    return loader.construct_mapping(node, deep=True)


for _name, (_pattern, _first, _) in _SCALARS.items():
    _starts = [*_first, ""] if _name == "null" else list(_first)
    for _side in (_Loader, _Dumper):            # the dumper has the rules of YAML 1.1 already
        _side.add_implicit_resolver(f"{_TAG}{_name}", re.compile(_pattern), _starts)
    _Loader.add_constructor(f"{_TAG}{_name}", _make_constructor(_name))
_Loader.add_implicit_resolver(_MERGE, re.compile(r"<<\Z"), ["<"])
_Loader.add_constructor(f"{_TAG}str", _construct_text)
_Loader.add_constructor(_MERGE, _construct_text)          # `<<` that is not a key
_Loader.add_constructor(f"{_TAG}seq", _construct_sequence)
_Loader.add_constructor(f"{_TAG}map", _construct_mapping)


# ---- text and files --------------------------------------------------------------------------------------------------


def parse(text: str, where: str) -> Any:
    """Return the data in `text`; `where` names its source in an error."""
    if len(text) > _MAX_LENGTH:
        raise InputError(f"{where}: {len(text):,} characters are not allowed; must be at most {_MAX_LENGTH:,}")
    if _depth(text) > _MAX_DEPTH:
        raise InputError(f"{where}: not valid YAML: nested too deeply; at most {_MAX_DEPTH} levels are allowed")
    try:
        return yaml.load(text, Loader=_Loader)      # a SafeLoader
    except _TooLargeError:
        limit = f"at most {_MAX_VALUES:,} values are allowed"
        raise InputError(f"{where}: too large with its aliases and merges expanded; {limit}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f" line {mark.line + 1}" if mark is not None and "\n" in text.strip() else ""
        raise InputError(f"{where}:{line} not valid YAML: {_describe(error)}") from None
    except ValueError:          # of the constructors, only int() raises it
        raise InputError(f"{where}: not valid YAML: a number has too many digits") from None
    except RecursionError:
        raise InputError(f"{where}: not valid YAML: nested too deeply") from None


def _depth(text: str) -> int:
    """Return the deepest nesting of brackets; those in quotes count too, no experiment has hundreds of them."""
    depth = deepest = 0
    for bracket in re.findall(r"[\[\]{}]", text):
        depth += 1 if bracket in "[{" else -1
        deepest = max(deepest, depth)
    return deepest


_LITERAL = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\"""")       # as repr() writes a text
_SYNTAX = re.compile(r"'(?:[,\]}]|<[a-z ]+>)'")                            # ',' and '<block end>': not from the text
# How PyYAML's message begins: ours, where its own is not a sentence or could quote the text in another way.
_PROBLEMS = {
    "second occurrence": "an anchor is given twice",
    "but found another document": "more than one document",
    "could not determine a constructor": "a tag is not allowed",
    "'utf-8' codec": "a tag is not allowed",
}


def _describe(error: yaml.YAMLError) -> str:
    """Return what is wrong, without the quotations of the text in PyYAML's messages."""
    problem = getattr(error, "problem", None)
    if problem is None:         # a ReaderError
        return "a character is not allowed"
    if isinstance(error, _RepeatedKeyError):
        return str(problem)
    for start, ours in _PROBLEMS.items():
        if problem.startswith(start):
            return ours
    kept = _LITERAL.sub(lambda found: found[0] if _SYNTAX.fullmatch(found[0]) else "", problem)
    return " ".join(re.sub(r",? but (?:found|got) *$", "", kept).split())


def read(path: Path, opener: Callable[[str, int], int] | None = None) -> dict[str, Any]:
    """Return the mapping in a YAML file; `opener` may refuse pipes, which a shell passes as `<(command)`."""
    try:
        with open(path, encoding="utf-8", opener=opener) as file:
            text = file.read(_MAX_LENGTH + 1)        # a device may never end
        if len(text) > _MAX_LENGTH:
            raise InputError(f"{path}: more than {_MAX_LENGTH:,} characters are not allowed")
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except UnicodeDecodeError:
        raise InputError(f"{path}: cannot be read: not a UTF-8 text") from None
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
