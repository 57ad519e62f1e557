"""A YAML reader for configs: it records file and line of every key, refuses duplicate keys, and reads 1e-3 as a number.

Differences from plain YAML 1.1: `1e-3` is a number (1.1 asks for `1.0e-3`); dates stay text, so that `name: 2024-05-01`
is a name, and so do 010 and 1:30, which 1.1 reads as 8 and as 90; only the types of JSON are read, so no tag can build
an object; values may refer to environment variables (references.py). What a text may cost is bounded: its size, its
depth, and what its aliases unfold to.
"""

import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from fedmpi.common.errors import UserError
from fedmpi.common.text import LARGEST, control, show
from fedmpi.config import references
from fedmpi.config.text_file import text_of

_TAG = "tag:yaml.org,2002:"
_SCALARS = {_TAG + kind for kind in ("null", "bool", "int", "float", "str")}

_KEYS = (_TAG + "str", _TAG + "int")
MAX_DEPTH = 100  # mappings and lists within each other
MAX_WRITTEN = 20_000  # keys, values, mappings and lists in one text; reading so many takes a second or two
MAX_UNFOLDED = 10_000  # values and keys that aliases and `<<` add to those written


class _Loader(yaml.SafeLoader):
    """The resolvers of YAML 1.1 but for dates, base 60 and octal numbers, and with exponents that need no point."""

    yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag[len(_TAG) :] not in ("timestamp", "int", "float")]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    written = 0  # nodes
    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.depth > MAX_DEPTH:
            raise yaml.MarkedYAMLError(problem=f"nested deeper than {MAX_DEPTH} levels", problem_mark=self.peek_mark())
        if self.written >= MAX_WRITTEN:
            raise yaml.MarkedYAMLError(problem=f"more than {MAX_WRITTEN} values", problem_mark=self.peek_mark())
        self.written += 1
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def peek_mark(self) -> yaml.Mark:
        return self.peek_event().start_mark


_NUMBERS = {
    "int": r"[-+]?(?:0|[1-9][0-9_]*|0x[0-9a-fA-F_]+|0b[01_]+)",
    "float": r"[-+]?(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*|\.(?:inf|Inf|INF))|\.(?:nan|NaN|NAN)"
    r"|[-+]?(?:[0-9][0-9_]*\.?[0-9_]*|\.[0-9]+)[eE][-+]?[0-9]+",
}
for _kind, _pattern in _NUMBERS.items():
    _Loader.add_implicit_resolver(_TAG + _kind, re.compile(f"^(?:{_pattern})$"), list("-+.0123456789"))


class _Dumper(yaml.SafeDumper):
    """Puts text in quotes that yaml itself would not, but that `_Loader` reads as a number: 1e-3."""


_Dumper.yaml_implicit_resolvers = {key: list(each) for key, each in yaml.SafeDumper.yaml_implicit_resolvers.items()}
for _kind, _pattern in _NUMBERS.items():
    _Dumper.add_implicit_resolver(_TAG + _kind, re.compile(f"^(?:{_pattern})$"), list("-+.0123456789"))


def text_for(tree: dict[str, Any]) -> str:
    """The YAML text of plain values, in which `read` finds the same values."""
    return yaml.dump(tree, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


@dataclass
class Document:
    """What one source says: the values, where each dotted key was written, and what is wrong with it."""

    data: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    # `file.py:Name` whose file is not there -> the problem that it is, unless another layer replaces the name.
    missing: dict[str, str] = field(default_factory=dict)


def read(path: Path, needs: str = "a config needs at least data, model and method") -> Document:
    """The mapping in a file. A file that cannot be read at all raises; duplicate or odd keys are listed as problems.
    needs: what is said of an empty one.

    Raises:
        UserError: no readable file of text (text_file.py), not YAML (line, column), empty, or not a mapping.
    """
    document = Document()
    value = _Builder(document, str(path), has_lines=True).parse(text_of(path), "")
    if value is None:
        raise UserError(f"{path}: is empty; {needs}")
    if not isinstance(value, dict):
        raise UserError(f"{path}: must hold `key: value` lines, not {show(value)}")
    document.data = value
    return document


def read_value(text: str, origin: str, key: str, document: Document) -> Any:
    """The value of a `key=value` override; all keys inside it are entered into `document` with the same origin."""
    return _Builder(document, origin, has_lines=False).parse(text, key)


@dataclass
class _Builder:
    """Walks the nodes of one YAML text; `yaml` itself would lose the lines and keep the last of two equal keys."""

    document: Document
    source: str
    has_lines: bool
    flattened: set[int] = field(default_factory=set)
    unfolded: int = 0  # nodes built and pairs merged so far; those written come once in this count, aliases add to it

    def parse(self, text: str, path: str) -> Any:
        try:
            self.loader = _Loader(references.hide(text))
            node = self.loader.get_single_node()
            return None if node is None else self.build(node, path, ())
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            said = ", ".join(part for part in (error.context, error.problem) if part)
            place = f"{self.source}:{mark.line + 1}:{mark.column + 1}" if mark and self.has_lines else self.source
            raise UserError(f"{place}: not valid YAML: {said}") from error
        except yaml.YAMLError as error:  # characters that YAML does not know
            raise UserError(f"{self.source}: not valid YAML: {' '.join(str(error).split())}") from error

    def where(self, node: yaml.Node) -> str:
        return f"{self.source}:{node.start_mark.line + 1}" if self.has_lines else self.source

    def build(self, node: yaml.Node, path: str, around: tuple[yaml.Node, ...]) -> Any:
        if any(node is outer for outer in around):
            raise UserError(f"{self.where(node)}: {path}: contains itself (an alias within its own anchor)")
        self.count(1, node, path, len(around))
        if isinstance(node, yaml.MappingNode) and node.tag == _TAG + "map":
            return self.mapping(node, path, (*around, node))
        if isinstance(node, yaml.SequenceNode) and node.tag == _TAG + "seq":
            return [self.build(item, f"{path}.{index}", (*around, node)) for index, item in enumerate(node.value)]
        if node.tag not in _SCALARS:
            tag = node.tag.replace(_TAG, "!!")
            raise UserError(f"{self.where(node)}: {path}: the YAML tag {tag} is not read here; write plain values")
        return self.scalar(node, path)

    def count(self, nodes: int, node: yaml.Node, path: str, depth: int) -> None:
        """A text of eight lines can unfold to 10^8 values."""
        self.unfolded += nodes
        if self.unfolded > self.loader.written + MAX_UNFOLDED or depth > MAX_DEPTH:
            raise UserError(
                f"{self.where(node)}: {path}: the aliases (*) unfold to more than {MAX_UNFOLDED} values or "
                f"{MAX_DEPTH} levels; write fewer"
            )

    def scalar(self, node: yaml.Node, path: str) -> Any:
        said = references.resolved(node.value, f"{self.where(node)}: {path}")
        if said != node.value:
            quoted = isinstance(node, yaml.ScalarNode) and node.style is not None  # then it stays text
            plain = not quoted and node.tag == _TAG + "str"
            tag = self.loader.resolve(yaml.ScalarNode, said, (True, False)) if plain else node.tag
            node = yaml.ScalarNode(tag if tag in _SCALARS else _TAG + "str", said, node.start_mark)
        try:
            value = self.loader.construct_object(node)
        except (ValueError, KeyError, yaml.YAMLError) as error:  # `!!int x`, `!!bool x`, 5,000 digits
            kind = node.tag.replace(_TAG, "!!")
            raise UserError(f"{self.where(node)}: {path}: {show(node.value)} cannot be read as {kind}") from error
        problem = ""
        if isinstance(value, str) and control(value):
            problem = f"{show(value)} holds {control(value)}; write text without it"
        elif isinstance(value, int) and abs(value) > LARGEST:
            problem = f"{show(node.value)} is not allowed; whole numbers reach to 2^53 = {LARGEST}"
        elif isinstance(value, float) and math.isinf(value) and any(c.isdigit() for c in node.value):
            problem = f"{show(node.value)} is not allowed; numbers reach to 1.8e308"
        if problem:
            raise UserError(f"{self.where(node)}: {path}: {problem}")
        return value

    def mapping(self, node: yaml.MappingNode, path: str, around: tuple[yaml.Node, ...]) -> dict[str, Any]:
        self.flatten(node, path, len(around))
        values = {}
        for key, value in node.value:
            if key.tag in _KEYS:
                dotted = _join(path, key.value)
                self.document.origins[dotted] = self.where(key)
                values[key.value] = self.build(value, dotted, around)
        return values

    def flatten(self, node: yaml.MappingNode, path: str, depth: int) -> None:
        """`<<: *other`, once for each node: the pairs of the others are put first, so that the mapping's own win."""
        if id(node) in self.flattened:  # an alias brings the same node again
            return
        self.flattened.add(id(node))
        self.check_keys(node, path)
        inherited: list[tuple[yaml.Node, yaml.Node]] = []
        own = [pair for pair in node.value if pair[0].tag != _TAG + "merge"]
        for key, value in node.value:
            if key.tag != _TAG + "merge":
                continue
            others = value.value if isinstance(value, yaml.SequenceNode) else [value]
            for other in reversed(others):  # of several the first wins
                if not isinstance(other, yaml.MappingNode):
                    raise UserError(f"{self.where(key)}: {_join(path, '<<')}: takes a mapping, or a list of mappings")
                self.flatten(other, path, depth + 1)
                self.count(len(other.value), key, path, depth)
                inherited += other.value
        node.value = inherited + own

    def check_keys(self, node: yaml.MappingNode, path: str) -> None:
        first: dict[str, yaml.Node] = {}
        for key, _ in node.value:
            if key.tag not in (*_KEYS, _TAG + "merge"):
                text = show(key.value) if isinstance(key, yaml.ScalarNode) else "here"
                self.complain(key, path, f"the key {text} is not text; put it in quotes")
            elif key.value in first:
                earlier = self.where(first[key.value])
                self.complain(key, _join(path, key.value), f"duplicate key; it already stands at {earlier}")
            elif references.BEGIN in key.value:
                name = show(references.written(key.value))
                raise UserError(f"{self.where(key)}: the key {name} holds a reference; they stand in values only")
            elif control(key.value):
                self.complain(key, path, f"the key {show(key.value)} holds {control(key.value)}")
            else:
                first[key.value] = key

    def complain(self, node: yaml.Node, path: str, text: str) -> None:
        self.document.problems.append(f"{self.where(node)}: {path + ': ' if path else ''}{text}")


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key
