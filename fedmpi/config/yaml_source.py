"""Read YAML for configs: with file and line of every key, without duplicate keys, and with 1e-3 as a number.

Differences from plain YAML 1.1: `1e-3` is a number (1.1 asks for `1.0e-3`); dates stay text, so that `name: 2024-05-01`
is a name, and so do 010 and 1:30, which 1.1 reads as 8 and as 90; only the types of JSON are read, so no tag can build
an object. A value may refer to environment variables:

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
from fedmpi.common.text import control_character, show

MAX_VALUES = 50_000  # in one text, with its aliases written out: eight lines of aliases can stand for 10^8 values

# YAML takes braces within {...} and [...] for its own, so other characters stand there while it reads.
OPEN, BEGIN, END = "${env:", "\ue000" * 6, "\ue001"
_REFERENCE = re.compile(r"\$\{env:([A-Za-z_]\w*(?::-[^{}\n]*)?)\}", re.ASCII)
_HIDDEN = re.compile(f"{BEGIN}([^{END}]*){END}")

_TAG = "tag:yaml.org,2002:"
_SCALARS = {_TAG + kind for kind in ("null", "bool", "int", "float", "str")}
_NUMBERS = {
    "int": r"[-+]?(?:0|[1-9][0-9_]*|0x[0-9a-fA-F_]+|0b[01_]+)",
    "float": r"[-+]?(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*|\.(?:inf|Inf|INF))|\.(?:nan|NaN|NAN)"
    r"|[-+]?(?:[0-9][0-9_]*\.?[0-9_]*|\.[0-9]+)[eE][-+]?[0-9]+",
}


@dataclass
class Document:
    """The content of one source: values, where each dotted key was written, and problems."""

    data: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def read(path: Path, needs: str = "a config needs at least data, model and method") -> Document:
    """Return the mapping in a file. Duplicate and odd keys become `problems` of the document.

    Args:
        needs: what the message on an empty file says.

    Raises:
        UserError: no readable file of text, not YAML (line, column), empty, or not a mapping.
    """
    document = Document()
    value = read_value(read_text(path), str(path), "", document, has_lines=True)
    if value is None:
        raise UserError(f"{path}: is empty; {needs}")
    if not isinstance(value, dict):
        raise UserError(f"{path}: must hold `key: value` lines, not {show(value)}")
    document.data = value
    return document


def read_text(path: Path) -> str:
    """Return the text of a config file. Raises UserError if there is none (with the nearest name), or it is no text."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except (FileNotFoundError, NotADirectoryError) as error:
        close = difflib.get_close_matches(path.name, [other.name for other in path.parent.glob("*.y*ml")], n=1)
        meant = f"; did you mean {path.parent / close[0]}?" if close else ""
        raise UserError(f"{path}: there is no such config file{meant}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: cannot be read as text: {error}; save it as UTF-8") from error
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from error


class _Reader(yaml.SafeLoader):
    """Turns one YAML text into values. PyYAML's constructor would lose line numbers, and accept duplicate keys."""

    # The resolvers of YAML 1.1 but for dates, base 60 and octal numbers; the numbers are added below.
    yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag[len(_TAG) :] not in ("timestamp", "int", "float")]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    document: Document
    source: str
    has_lines: bool
    values = 0  # built so far

    def where(self, node: yaml.Node) -> str:
        return f"{self.source}:{node.start_mark.line + 1}" if self.has_lines else self.source

    def build(self, node: yaml.Node, path: str) -> Any:
        """Return the value of a node under the dotted key `path`."""
        self.values += 1
        if self.values > MAX_VALUES:
            raise UserError(f"{self.where(node)}: more than {MAX_VALUES} values, with the aliases (*) written out")
        if isinstance(node, yaml.MappingNode) and node.tag == _TAG + "map":
            return self.mapping(node, path)
        if isinstance(node, yaml.SequenceNode) and node.tag == _TAG + "seq":
            return [self.build(item, f"{path}.{index}") for index, item in enumerate(node.value)]
        return self.scalar(node, f"{self.where(node)}: {path}")

    def mapping(self, node: yaml.MappingNode, path: str) -> dict[str, Any]:
        """Return a mapping. Keys that cannot be read are left out, and noted in the document."""
        values: dict[str, Any] = {}
        lines: dict[str, str] = {}  # key -> where it stands
        # The mappings behind `<<` come first, so that the mapping's own keys win; of several the first wins.
        for key, value in sorted(node.value, key=lambda pair: pair[0].tag != _TAG + "merge"):
            text, where = str(key.value), self.where(key)
            inside = f"{path}.{text}" if path else text
            if text in lines:
                problem = f"{inside}: duplicate key; it already stands at {lines[text]}"
                self.document.problems.append(f"{where}: {problem}")
            elif key.tag == _TAG + "merge":
                for other in reversed(value.value if isinstance(value, yaml.SequenceNode) else [value]):
                    if not isinstance(other, yaml.MappingNode):
                        raise UserError(f"{where}: {inside}: takes a mapping, or a list of mappings")
                    values |= self.build(other, path)
            elif key.tag not in (_TAG + "str", _TAG + "int") or control_character(text) or BEGIN in text:
                shown = show(_HIDDEN.sub(r"${env:\1}", text)) if isinstance(key, yaml.ScalarNode) else "here"
                self.document.problems.append(f"{where}: the key {shown} is not plain text; put it in quotes")
            else:
                lines[text] = self.document.origins[inside] = where
                values[text] = self.build(value, inside)
        return values

    def scalar(self, node: yaml.Node, where: str) -> Any:
        """Return a text, number, truth value or null."""
        if node.tag not in _SCALARS:
            raise UserError(
                f"{where}: the YAML tag {node.tag.replace(_TAG, '!!')} is not read here; write plain values"
            )
        text = resolve_references(node.value, where)
        if text != node.value:  # a plain scalar may be a number now
            is_plain = isinstance(node, yaml.ScalarNode) and node.style is None
            tag = self.resolve(yaml.ScalarNode, text, (True, False)) if is_plain else node.tag
            node = yaml.ScalarNode(tag if tag in _SCALARS else _TAG + "str", text, node.start_mark)
        try:
            value = self.construct_object(node)
        except (ValueError, KeyError, yaml.YAMLError) as error:  # `!!int x`, `!!bool x`, 5,000 digits
            raise UserError(f"{where}: {show(text)} cannot be read as {node.tag.replace(_TAG, '!!')}") from error
        if control_character(text):
            raise UserError(f"{where}: {show(text)} holds {control_character(text)}; write text without it")
        return value


def resolve_references(text: str, where: str) -> str:
    """Replace what refers to environment variables by their texts. Raises UserError for an unset variable, or what is
    no such reference."""

    def value_of(reference: re.Match[str]) -> str:
        name, has_default, default = reference[1].partition(":-")
        value = os.environ.get(name, default if has_default else None)
        if value is None:
            raise UserError(
                f"{where}: the environment variable {name} is not set; set it, or write ${{env:{name}:-text}} with "
                "what is to stand in its place"
            )
        return value

    resolved = _HIDDEN.sub(value_of, text)
    if "${" in resolved:
        raise UserError(f"{where}: {show(resolved)}: write ${{env:NAME}} or ${{env:NAME:-text}} for a variable")
    return resolved


def read_value(text: str, source: str, path: str, document: Document, has_lines: bool = False) -> Any:
    """Return the value of a text, which stands under the dotted key `path`; None of an empty text.

    Args:
        source: the file, or the `key=value` override.
        document: takes the place of each key, and problems.
        has_lines: whether places are named by their line.
    """
    try:
        reader = _Reader(_REFERENCE.sub(f"{BEGIN}\\1{END}", text))  # lines and columns stay as they are
        reader.document, reader.source, reader.has_lines = document, source, has_lines
        node = reader.get_single_node()
        return None if node is None else reader.build(node, path)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        problem = ", ".join(part for part in (error.context, error.problem) if part)
        place = f"{source}:{mark.line + 1}:{mark.column + 1}" if mark and has_lines else source
        raise UserError(f"{place}: not valid YAML: {problem}") from error
    except yaml.YAMLError as error:  # characters that YAML does not know
        raise UserError(f"{source}: not valid YAML: {' '.join(str(error).split())}") from error
    except RecursionError as error:
        raise UserError(f"{source}: nested too deep, or an alias (*) within its own anchor") from error


class _Dumper(yaml.SafeDumper):
    """Quotes texts that `_Reader` would read as a number although yaml would not, such as 1e-3."""

    yaml_implicit_resolvers = {key: list(each) for key, each in yaml.SafeDumper.yaml_implicit_resolvers.items()}


for _kind, _pattern in _NUMBERS.items():
    for _class in (_Reader, _Dumper):
        _class.add_implicit_resolver(_TAG + _kind, re.compile(f"^(?:{_pattern})$"), list("-+.0123456789"))


def text_for(tree: dict[str, Any]) -> str:
    """Return plain values as YAML text, from which `read` returns the same values."""
    return yaml.dump(tree, Dumper=_Dumper, sort_keys=False, allow_unicode=True)
