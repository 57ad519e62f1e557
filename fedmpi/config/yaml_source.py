"""Read YAML for configs: with file and line of every key, without duplicate keys, and with 1e-3 as a number.

Differences from plain YAML 1.1: `1e-3` is a number (1.1 asks for `1.0e-3`); dates stay text, so that `name: 2024-05-01`
is a name, and so do 010 and 1:30, which 1.1 reads as 8 and as 90; only the types of JSON are read, so no tag can build
an object. A value may refer to environment variables:

    seed=${env:SLURM_ARRAY_TASK_ID}        name: digits-${env:USER}        root: ${env:DATA:-data}
"""

import difflib
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from fedmpi.common.errors import UserError
from fedmpi.common.text import control_character, shorten, show

MAX_BYTES = 1_000_000
MAX_DEPTH = 100  # mappings and lists within each other
MAX_VALUES = 50_000  # in one text, with its aliases written out: eight lines of aliases can stand for 10^8 values

# YAML takes braces within {...} and [...] for its own, so as many other characters stand there while it reads.
OPEN, CLOSE, BEGIN, END = "${env:", "}", "\ue000" * 6, "\ue001"
_REFERENCE = re.compile(r"\$\{env:([^{}\n]*)\}")
_HIDDEN = re.compile(f"{BEGIN}([^{END}]*){END}")
_OTHER_REFERENCE = re.compile(r"\$\{(?!env:)[\w.:-]*\}")
_VARIABLE = re.compile(r"([A-Za-z_]\w*)(?::-(.*))?", re.ASCII)

_TAG = "tag:yaml.org,2002:"
_SCALARS = {_TAG + kind for kind in ("null", "bool", "int", "float", "str")}
_KEYS = (_TAG + "str", _TAG + "int")
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
    # `file.py:Name` whose file is not there -> the problem that it is, unless another layer replaces the name.
    missing: dict[str, str] = field(default_factory=dict)


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
    """Return the text of a config file.

    Raises:
        UserError: no such file (with the nearest name), a directory or a device, unreadable, too large, not UTF-8.
    """
    try:
        kind = os.stat(path).st_mode
        if stat.S_ISDIR(kind):
            raise UserError(f"{path}: is a directory; name a YAML file in it")
        if not stat.S_ISREG(kind):  # opening a pipe would wait for its writer, and a device never ends
            raise UserError(f"{path}: is a device, pipe or socket; a config is a regular file")
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except (FileNotFoundError, NotADirectoryError) as error:
        others = {str(other): other.stem for other in path.parent.glob("*.y*ml")}
        close = difflib.get_close_matches(path.stem, others.values(), n=1)
        meant = next((f"; did you mean {other}?" for other, stem in others.items() if stem in close), "")
        raise UserError(f"{path}: there is no such config file{meant}") from error
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise UserError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
    if len(content) > MAX_BYTES:
        raise UserError(f"{path}: is larger than {MAX_BYTES // 10**6} MB; a config is a short YAML file")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise UserError(f"{path}:{line}: cannot be read as text: {error}; save it as UTF-8") from error


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

    def build(self, node: yaml.Node, path: str, depth: int) -> Any:
        self.values += 1
        where = f"{self.where(node)}: {path}"
        if depth > MAX_DEPTH:
            where = f"{self.where(node)}: {shorten(path)}"
            raise UserError(f"{where}: nested deeper than {MAX_DEPTH} levels, or an alias (*) within its own anchor")
        if self.values > MAX_VALUES:
            raise UserError(f"{where}: more than {MAX_VALUES} values, with the aliases (*) written out; write fewer")
        if isinstance(node, yaml.MappingNode) and node.tag == _TAG + "map":
            values: dict[str, Any] = {}
            for key, inside, value in self.entries(node, path):
                if key is None:
                    values |= self.build(value, path, depth + 1)
                else:
                    values[key] = self.build(value, inside, depth + 1)
            return values
        if isinstance(node, yaml.SequenceNode) and node.tag == _TAG + "seq":
            return [self.build(item, f"{path}.{index}", depth + 1) for index, item in enumerate(node.value)]
        if node.tag not in _SCALARS:
            tag = node.tag.replace(_TAG, "!!")
            raise UserError(f"{where}: the YAML tag {tag} is not read here; write plain values")
        if "$" in node.value or BEGIN in node.value:
            node = self.resolve_references(node, where)
        try:
            value = self.construct_object(node)
        except (ValueError, KeyError, yaml.YAMLError) as error:  # `!!int x`, `!!bool x`, 5,000 digits
            kind = node.tag.replace(_TAG, "!!")
            raise UserError(f"{where}: {show(node.value)} cannot be read as {kind}") from error
        if isinstance(value, str) and control_character(value):
            raise UserError(f"{where}: {show(value)} holds {control_character(value)}; write text without it")
        return value

    def entries(self, node: yaml.MappingNode, path: str) -> Iterator[tuple[str | None, str, yaml.Node]]:
        """Yield (key, dotted key, value) of a mapping; the key is None for a mapping behind `<<`.

        Keys that cannot be read are left out, and noted in the document.
        """
        lines: dict[str, str] = {}  # key -> where it stands
        # The mappings behind `<<` come first, so that the mapping's own keys win.
        for key, value in sorted(node.value, key=lambda pair: pair[0].tag != _TAG + "merge"):
            text, where = str(key.value), self.where(key)
            inside = f"{path}.{text}" if path else text
            problem = ""
            if key.tag not in (*_KEYS, _TAG + "merge"):
                shown = show(text) if isinstance(key, yaml.ScalarNode) else "here"
                problem = f"{path + ': ' if path else ''}the key {shown} is not text; put it in quotes"
            elif text in lines:
                problem = f"{inside}: duplicate key; it already stands at {lines[text]}"
            elif BEGIN in text:
                written = _HIDDEN.sub(rf"{OPEN}\1{CLOSE}", text)
                raise UserError(f"{where}: the key {show(written)} holds a reference; they stand in values only")
            elif control_character(text):
                problem = f"{path + ': ' if path else ''}the key {show(text)} holds {control_character(text)}"
            if problem:
                self.document.problems.append(f"{where}: {problem}")
                continue
            lines[text] = where
            if key.tag == _TAG + "merge":
                others = value.value if isinstance(value, yaml.SequenceNode) else [value]
                for other in reversed(others):  # of several the first wins
                    if not isinstance(other, yaml.MappingNode):
                        raise UserError(f"{where}: {inside}: takes a mapping, or a list of mappings")
                    yield None, path, other
            else:
                self.document.origins[inside] = where
                yield text, inside, value

    def resolve_references(self, node: yaml.Node, where: str) -> yaml.Node:
        """Replace what refers to environment variables by their texts; a plain scalar is then a number if it reads so.

        Raises:
            UserError: an unset variable, what is no name of one, a variable that refers to others.
        """
        if other := _OTHER_REFERENCE.search(node.value):
            raise UserError(f"{where}: {show(other[0])} is no reference here; write ${{env:NAME}} for a variable")
        text, _, rest = node.value.partition(BEGIN)
        while rest:
            reference, _, rest = rest.partition(END)
            parts = _VARIABLE.fullmatch(reference)
            if parts is None:
                shown = show(f"{OPEN}{reference}{CLOSE}")
                raise UserError(f"{where}: {shown}: write ${{env:NAME}} or ${{env:NAME:-text}}")
            value = os.environ.get(parts[1], parts[2])
            if value is None:
                raise UserError(
                    f"{where}: the environment variable {parts[1]} is not set; set it, or write "
                    f"${{env:{parts[1]}:-text}} with what is to stand in its place"
                )
            if OPEN in value:
                raise UserError(
                    f"{where}: the environment variable {parts[1]} holds a reference itself; write out its value"
                )
            between, _, rest = rest.partition(BEGIN)
            text += value + between
        if OPEN in text:
            raise UserError(f"{where}: {show(text)}: '{OPEN}' without its '{CLOSE}'")
        if text == node.value:
            return node
        plain = isinstance(node, yaml.ScalarNode) and node.style is None and node.tag == _TAG + "str"
        tag = self.resolve(yaml.ScalarNode, text, (True, False)) if plain else node.tag
        return yaml.ScalarNode(tag if tag in _SCALARS else _TAG + "str", text, node.start_mark)


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
        return None if node is None else reader.build(node, path, 0)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        problem = ", ".join(part for part in (error.context, error.problem) if part)
        place = f"{source}:{mark.line + 1}:{mark.column + 1}" if mark and has_lines else source
        raise UserError(f"{place}: not valid YAML: {problem}") from error
    except yaml.YAMLError as error:  # characters that YAML does not know
        raise UserError(f"{source}: not valid YAML: {' '.join(str(error).split())}") from error
    except RecursionError as error:
        raise UserError(f"{source}: nested deeper than {MAX_DEPTH} levels") from error


class _Dumper(yaml.SafeDumper):
    """Quotes texts that `_Reader` would read as a number although yaml would not, such as 1e-3."""

    yaml_implicit_resolvers = {key: list(each) for key, each in yaml.SafeDumper.yaml_implicit_resolvers.items()}


for _kind, _pattern in _NUMBERS.items():
    for _class in (_Reader, _Dumper):
        _class.add_implicit_resolver(_TAG + _kind, re.compile(f"^(?:{_pattern})$"), list("-+.0123456789"))


def text_for(tree: dict[str, Any]) -> str:
    """Return plain values as YAML text, from which `read` returns the same values."""
    return yaml.dump(tree, Dumper=_Dumper, sort_keys=False, allow_unicode=True)
