"""Options are checked against their declarations: fields of dataclasses, and parameters of functions."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import pytest
from pydantic import Field

from fedmpi.common.errors import UserError
from fedmpi.common.options import check_options, option


@dataclass(frozen=True)
class Prox:
    mu: float = option(0.01, "weight of the proximal term", ge=0)
    keep: float = option(0.8, "share of the variance", gt=0, le=1)
    kind: str = option("kl", "divergence", choices=("kl", "ce"))
    layers: tuple[int, ...] = option((1, 2), "widths")
    cap: float | None = option(None, "bound on the norm", gt=0)
    plain: float = option(1.0, "finite, though it has no bounds")
    paper = "not a field, so not an option"


def source(root: Path, *, site: str | None = None, size: Annotated[int, Field(gt=0)] = 8, noise: float = 0.0): ...


def deal(y, n, rng, alpha, beta=1.0): ...


def bare(root): ...


class Net:
    def __init__(self, input_shape, classes, width: int = 3): ...


def message(target, given, **more):
    with pytest.raises(UserError) as caught:
        check_options(target, given, "method", **more)
    return str(caught.value)


def test_values_are_converted_to_declared_types():
    checked = check_options(Prox, {"mu": 1, "layers": [3, 4], "cap": None}, "method")
    assert checked == {"mu": 1.0, "layers": (3, 4), "cap": None}  # what is given and nothing else
    assert type(checked["mu"]) is float


ROOT, SHAPE, LABELS = ("root", "site"), ("input_shape", "classes"), ("labels", "clients", "rng")


@pytest.mark.parametrize(
    ("target", "engine_arguments", "given", "text"),
    [
        (Prox, (), {"mu": "0.1"}, "method.mu: '0.1' is not allowed; must be a number"),
        (Prox, (), {"mu": True}, "method.mu: true is not allowed; must be a number"),
        (Prox, (), {"mu": None}, "method.mu: null is not allowed; must be a number >= 0, or omitted for the default"),
        (Prox, (), {"mu": -1}, "method.mu: -1 is not allowed; must be a number >= 0"),
        (Prox, (), {"mu": float("inf")}, "method.mu: inf is not allowed; must be a finite number"),
        (Prox, (), {"plain": float("nan")}, "method.plain: nan is not allowed; must be a finite number"),
        (Prox, (), {"keep": 0}, "method.keep: 0 is not allowed; must be a number > 0 and <= 1"),
        (Prox, (), {"keep": 1.5}, "method.keep: 1.5 is not allowed; must be a number > 0 and <= 1"),
        (Prox, (), {"kind": "klx"}, "method.kind: 'klx' is not allowed; must be kl or ce"),
        (Prox, (), {"cap": -2}, "method.cap: -2 is not allowed; must be a number > 0 or null"),
        (Prox, (), {"layers": 3}, "method.layers: 3 is not allowed; must be a list of"),
        (Prox, (), {"layers": [3, "x"]}, "method.layers: [3, x] is not allowed; must be a list of whole numbers"),
        (Prox, (), {"kep": 1}, "method.kep: unknown key; did you mean 'keep'? allowed: cap, keep, kind,"),
        (Prox, (), {"paper": "x"}, "method.paper: unknown key"),
        (source, ROOT, {"size": 0}, "method.size: 0 is not allowed; must be a whole number > 0"),
        (source, ROOT, {"site": "x"}, "method.site: unknown key; did you mean 'size'? allowed: noise, size"),
        (deal, LABELS, {"beta": 1.0}, "method.alpha: missing; deal requires it"),
        (deal, LABELS, {"alpha": 1, "gamma": 2}, "method.gamma: unknown key; allowed: alpha, beta"),
        (Net, SHAPE, {"width": 5.5}, "method.width: 5.5 is not allowed; must be a whole number"),
        (bare, ROOT, {"width": 1}, "method.width: unknown key; bare has no options of its own; allowed: none"),
    ],
)
def test_a_message_names_the_option_and_what_is_allowed(target, engine_arguments, given, text):
    assert message(target, given, engine_arguments=engine_arguments).startswith(text)


def test_an_option_without_a_type_annotation_is_an_error():
    with pytest.raises(TypeError, match="'mu' is a field but has no type annotation"):
        dataclass(type("Untyped", (), {"mu": option(0.1, "weight")}))


def test_each_mistake_has_a_line_with_its_origin():
    lines = message(Prox, {"mu": "a", "kep": 1}, origins={"mu": "a.yaml:3", "kep": "b.yaml:4"}).splitlines()
    assert [line.split(" ")[:2] for line in lines] == [["a.yaml:3:", "method.mu:"], ["b.yaml:4:", "method.kep:"]]


def test_options_of_a_function_or_a_class_are_its_parameters():
    """Parameters that fedmpi passes itself are not options, whatever the user's function calls them."""

    def free(root, **options): ...

    assert check_options(source, {"size": 4}, "data", ROOT) == {"size": 4}
    assert check_options(deal, {"alpha": 1}, "partition", LABELS) == {"alpha": 1}
    assert check_options(free, {"anything": [1]}, "data", ("root",)) == {"anything": [1]}
    assert check_options(Net, {"width": 5}, "model", SHAPE) == {"width": 5}
