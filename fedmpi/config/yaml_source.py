"""Read the YAML of configs, record the file and line of each key, and reject duplicate keys.

Differences from YAML 1.1: `1e-3` is a number (1.1 requires `1.0e-3`); dates are strings, so that `name: 2024-05-01` is
a name; 010 and 1:30, which 1.1 reads as 8 and 90, are strings as well; only the types of JSON are allowed, so that no
tag can create an object. A value may refer to environment variables; within {...} and [...] it must be quoted:

    seed=${env:SLURM_ARRAY_TASK_ID}        name: digits-${env:USER}        root: ${env:DATA:-data}
"""

import difflib
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from fedmpi.common.errors import UserError
from fedmpi.common.text import find_control_character, locate_key, shorten_repr
from fedmpi.common.type_descriptions import shorten_value

MAX_VALUES = 50_000  # in one text with aliases expanded, because eight lines of aliases can stand for 10^8 values
REFERENCE_START = "${env:"
_ENV_REFERENCE = re.compile(r"\$\{env:([A-Za-z_]\w*)(:-[^{}\n]*)?\}", re.ASCII)

_TAG = "tag:yaml.org,2002:"
_TYPES = {_TAG + kind for kind in ("map", "seq", "null", "bool", "int", "float", "str")}
_NUMBERS = {
    "int": r"[-+]?(?:0|[1-9][0-9_]*|0x[0-9a-fA-F_]+|0b[01_]+)",
    "float": r"[-+]?(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*|\.(?:inf|Inf|INF))|\.(?:nan|NaN|NAN)"
    r"|[-+]?(?:[0-9][0-9_]*\.?[0-9_]*|\.[0-9]+)[eE][-+]?[0-9]+",
}


@dataclass
class ConfigLayer:
    """The settings from one source: a file or an override.

    Attributes:
        data: The values.
        origins: Dotted key -> where it was set ("run.yaml:7").
        problems: Messages about mistakes, which are reported together.
        old_names: Messages about names of earlier versions, which are reported together before all other mistakes.
    """

    data: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    old_names: list[str] = field(default_factory=list)


def read_yaml_file(
    path: Path, needs: str = "a config needs at least data, model and method", included_by: str = ""
) -> ConfigLayer:
    """Read a YAML file that contains a mapping. Duplicate and invalid keys are added to `problems` of the result.

    Args:
        path: The file.
        needs: What the file must contain, for the message if the file is empty.
        included_by: The config that names the file under `base`, or an empty string.

    Raises:
        UserError: The file cannot be read, is not valid YAML, is empty, or does not contain a mapping.
    """
    document = ConfigLayer()
    value = parse_value(read_config_text(path, included_by), str(path), "", document, has_lines=True)
    if value is None:
        raise UserError(f"{path} is empty; {needs}")
    if not isinstance(value, dict):
        raise UserError(f"{path} must contain `key: value` lines, not {shorten_value(value)}")
    document.data = value
    return document


def read_config_text(path: Path, included_by: str = "") -> str:
    """Return the text of a config file.

    Raises:
        UserError: The file does not exist (the message suggests a similar name), or is not readable UTF-8 text.
    """
    try:
        return path.read_text(encoding="utf-8-sig")
    except (FileNotFoundError, NotADirectoryError) as error:
        others = [each.name for each in path.parent.glob("*.y*ml") if os.path.abspath(each) != included_by]
        close = difflib.get_close_matches(path.name, others, n=1)
        meant = f"; did you mean {path.parent / close[0]}?" if close else "; correct the path"
        raise UserError(f"{path}: there is no such config file{meant}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path} cannot be read as text: {error}; save it as UTF-8") from error
    except OSError as error:
        raise UserError(
            f"{path} cannot be read: {error.strerror or error}; correct the path or its permissions"
        ) from error


class _Loader(yaml.SafeLoader):
    """Loads YAML 1.1, but reads dates and numbers in base 60 or 8 as strings; numbers must match `_NUMBERS`."""

    yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag[len(_TAG) :] not in ("timestamp", "int", "float")]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


class _Dumper(yaml.SafeDumper):
    """Writes YAML with quotes around strings that `_Loader` would read as numbers, such as "1e-3"."""

    yaml_implicit_resolvers = {key: list(each) for key, each in yaml.SafeDumper.yaml_implicit_resolvers.items()}


for _kind, _pattern in _NUMBERS.items():
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(_TAG + _kind, re.compile(f"^(?:{_pattern})$"), list("-+.0123456789"))


def to_yaml(tree: dict[str, Any]) -> str:
    """Format a mapping of plain values as YAML, from which `read_yaml_file` returns the same values."""
    return yaml.dump(tree, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def parse_value(text: str, source: str, path: str, document: ConfigLayer, has_lines: bool = False) -> Any:
    """Parse the YAML text of one value; return None for an empty text.

    Args:
        text: The YAML text.
        source: The file, or the `key=value` override, for messages.
        path: The dotted key of the value; "" for an entire file.
        document: The layer to which the origin of each key, and problems, are added.
        has_lines: Whether origins contain line numbers.

    Raises:
        UserError: The text is not valid YAML, or contains values that are not allowed in a config.
    """
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        _NodePreparer(loader, source, document, has_lines).visit(node, path)
        return loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{source}:{mark.line + 1}:{mark.column + 1}" if mark and has_lines else source
        raise UserError(f"{place}: not valid YAML: {_explain_syntax_error(error, has_lines)}") from error
    except (yaml.YAMLError, ValueError, KeyError) as error:  # characters that YAML does not allow, or `!!int x`
        raise UserError(f"{source}: not valid YAML: {' '.join(str(error).split())}") from error
    except RecursionError as error:
        raise UserError(
            f"{source}: nesting is too deep, or an alias (*) refers to the anchor that contains it; remove the "
            "alias, or flatten the nesting"
        ) from error


def _explain_syntax_error(error: yaml.MarkedYAMLError, is_file: bool) -> str:
    """Return a description of the syntax error in a YAML text, for a message.

    is_file: whether the text comes from a file. If so, the description may include a remedy; for an override, the
    caller adds it.
    """
    problem, context = str(error.problem), str(error.context or "")
    if "flow" in context and ("<stream end>" in problem or "expected ',' or" in problem):
        return "a bracket [ or { is not closed, or a comma between two values is missing"
    if alias := re.fullmatch(r"found undefined alias '(.*)'", problem):
        return f"the alias *{alias[1]} refers to an anchor &{alias[1]} that is not defined before it"
    if "'\\t'" in problem:
        return "a line is indented with a tab; use spaces"
    if problem == "mapping values are not allowed here":
        return (
            "unexpected colon; the line may be indented too far, the line above may lack a colon, or a text that "
            "contains ': ' may need quotes"
        )
    if "quoted scalar" in context and "end of stream" in problem:
        return "a quotation mark is not closed"
    if "expected <block end>" in problem:
        return "this line does not have the indentation of the lines above; correct the indentation"
    if character := re.fullmatch(r"found character '(.)' that cannot start any token", problem):
        return f"a text that begins with {character[1]} must be in quotes"
    if "for merging" in problem:
        return "<< must be followed by a reference to a mapping, such as <<: *name"
    described = ", ".join(part for part in (context, problem) if part)
    return f"{described}; correct the syntax, or put the text in quotes" if is_file else described


@dataclass
class _NodePreparer:
    """Checks and prepares the nodes of a parsed YAML text before they are converted to values.

    The origins of keys are recorded, duplicate and invalid keys are removed and reported, and references to environment
    variables are replaced by their values.
    """

    loader: _Loader
    source: str
    document: ConfigLayer
    has_lines: bool
    values: int = 0

    def visit(self, node: yaml.Node, path: str) -> None:
        """Check a node with the dotted key `path`, and all nodes below it."""
        where = self._where(node)
        self.values += 1
        if self.values > MAX_VALUES:
            raise UserError(
                f"{where}: the config expands to more than {MAX_VALUES:,} values once aliases (*) are resolved; use "
                "fewer aliases"
            )
        if node.tag not in _TYPES:
            tag = node.tag.replace(_TAG, "!!")
            raise UserError(f"{locate_key(where, path)}: the YAML tag {tag} is not allowed; remove the tag")
        if isinstance(node, yaml.SequenceNode):
            for index, item in enumerate(node.value):
                self.visit(item, f"{path}.{index}")
        elif isinstance(node, yaml.MappingNode):
            self._check_mapping(node, path)
        elif isinstance(node, yaml.ScalarNode):
            self._expand_and_check_scalar(node, locate_key(where, path))

    def _where(self, node: yaml.Node) -> str:
        """Return the source of a node, with the line number if `has_lines` is true."""
        return f"{self.source}:{node.start_mark.line + 1}" if self.has_lines else self.source

    def _check_mapping(self, node: yaml.MappingNode, path: str) -> None:
        """Check the keys and values of a mapping."""
        lines: dict[str, str] = {}  # key -> where it was written
        for pair in list(node.value):
            key, value = pair
            text, where = str(key.value), self._where(key)
            dotted = f"{path}.{text}" if path else text
            if key.tag == _TAG + "merge":
                for other in value.value if isinstance(value, yaml.SequenceNode) else [value]:
                    self.visit(other, path)
            elif text in lines:
                self.document.problems.append(f"{where}: {dotted}: duplicate key; it is already set in {lines[text]}")
                node.value.remove(pair)
            elif key.tag not in (_TAG + "str", _TAG + "int") or find_control_character(text) or REFERENCE_START in text:
                self.document.problems.append(f"{where}: {_describe_invalid_key(key)}")
                node.value.remove(pair)
            else:
                key.tag = _TAG + "str"
                lines[text] = self.document.origins[dotted] = where
                self.visit(value, dotted)

    def _expand_and_check_scalar(self, node: yaml.ScalarNode, where: str) -> None:
        """Replace references to environment variables in a scalar; raise UserError if its text is not allowed."""
        text = _ENV_REFERENCE.sub(lambda reference: _expand_variable(reference, where), node.value)
        if "${" in text:
            raise UserError(
                f"{where}: {shorten_repr(text)} is not allowed; write ${{env:NAME}} or ${{env:NAME:-text}} for a "
                "variable"
            )
        if text != node.value and node.style is None:  # without quotes, the new text may be a number
            node.tag = self.loader.resolve(yaml.ScalarNode, text, (True, False))
        node.value = text
        if find_control_character(text):
            escape = (
                ", or use single quotes, in which a backslash is an ordinary character" if node.style == '"' else ""
            )
            raise UserError(
                f"{where}: {shorten_repr(text)} contains {find_control_character(text)}; remove this character{escape}"
            )


def _describe_invalid_key(key: yaml.Node) -> str:
    """Return why a node cannot be a key of a config, and the remedy."""
    if not isinstance(key, yaml.ScalarNode):
        return "a key must be a string, not a list or a mapping; if it begins with a bracket, put it in quotes"
    shown = shorten_repr(key.value)
    if character := find_control_character(key.value):
        return f"the key {shown} contains {character}; remove this character"
    if REFERENCE_START in key.value:
        return f"the key {shown} contains {REFERENCE_START}...}}; only values can refer to environment variables"
    kind = {"bool": "a boolean", "null": "null", "float": "a number"}.get(key.tag.removeprefix(_TAG), "another type")
    return f"YAML reads the key {shown.strip(shown[0])} as {kind}, not as a string; put it in quotes: {shown}"


def _expand_variable(reference: re.Match[str], where: str) -> str:
    """Return the value of the environment variable in a reference, or the reference's default if it is not set.

    Raises:
        UserError: the variable is not set, and the reference has no default.
    """
    name, default = reference.groups()
    value = os.environ.get(name, default[2:] if default else None)
    if value is None:
        raise UserError(
            f"{where}: the environment variable {name} is not set; set it, or write ${{env:{name}:-default}} with a "
            "default value"
        )
    return value
