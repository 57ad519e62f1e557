"""Options against their declarations: fields of dataclasses, parameters of functions."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import pytest
from pydantic import Field

from fedmpi.common.errors import UserError
from fedmpi.common.options import check, option


@dataclass(frozen=True)
class Prox:
    mu: float = option(0.01, "weight of the proximal term", ge=0)
    keep: float = option(0.8, "share of the variance", gt=0, le=1)
    kind: str = option("kl", "divergence", choices=("kl", "ce"))
    layers: tuple[int, ...] = option((1, 2), "widths")
    cap: float | None = option(None, "bound on the norm", gt=0)
    paper = "not a field, so not an option"


def source(root: Path, *, site: str | None = None, size: Annotated[int, Field(gt=0)] = 8, noise: float = 0.0): ...


def message(target, given, **more):
    with pytest.raises(UserError) as caught:
        check(target, given, "method", **more)
    return str(caught.value)


def test_values_are_converted_but_never_guessed():
    checked = check(Prox, {"mu": 1, "layers": [3, 4], "cap": None}, "method")
    assert checked == {"mu": 1.0, "layers": (3, 4), "cap": None}  # what is given and nothing else
    assert type(checked["mu"]) is float
    assert "'0.1' is not allowed; must be a number" in message(Prox, {"mu": "0.1"})
    assert "True is not allowed; must be a number" in message(Prox, {"mu": True})


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"mu": -1}, "method.mu: -1 is not allowed; must be >= 0"),
        ({"keep": 0}, "method.keep: 0 is not allowed; must be > 0"),
        ({"keep": 1.5}, "method.keep: 1.5 is not allowed; must be <= 1"),
        ({"kind": "klx"}, "method.kind: 'klx' is not allowed; must be 'kl' or 'ce'"),
        ({"cap": -2}, "method.cap: -2 is not allowed; must be > 0"),
        ({"layers": 3}, "method.layers: 3 is not allowed; must be a list"),
        ({"layers": [3, "x"]}, "method.layers: [3, 'x'] is not allowed; must be a whole number"),
        ({"kep": 1}, "method.kep: unknown key; did you mean 'keep'? allowed: cap, keep, kind, layers, mu"),
        ({"paper": "x"}, "method.paper: unknown key"),
    ],
)
def test_a_message_names_the_option_and_what_is_allowed(given, text):
    assert message(Prox, given).startswith(text)


@dataclass(frozen=True)
class Bounded:
    low: float = option(0.0, "finite", ge=0)
    plain: float = option(1.0, "finite, though it has no bounds")
    loose = 0.5  # its author forgot the type


@pytest.mark.parametrize(("key", "value"), [("low", float("inf")), ("plain", float("nan")), ("plain", float("-inf"))])
def test_numbers_are_finite(key, value):
    assert f"method.{key}: {value} is not allowed; must be a finite number" in message(Bounded, {key: value})


def test_an_option_without_a_type_is_told():
    assert "method.loose: unknown key" in message(Bounded, {"loose": 1})
    with pytest.raises(TypeError, match="'mu' is a field but has no type annotation"):
        dataclass(type("Untyped", (), {"mu": option(0.1, "weight")}))


def test_what_has_no_options_says_so():
    def bare(root): ...

    said = message(
        bare, {"width": 1, "learning_rate": 2}, supplied=("root",), named="model bare", reserved_keys=("name",)
    )
    assert said.splitlines() == [
        "method.width: unknown key; model bare has no options; allowed: name",
        "method.learning_rate: unknown key; model bare has no options; allowed: name",
    ]


def test_every_mistake_has_a_line_with_its_origin():
    lines = message(Prox, {"mu": "a", "kep": 1}, origins={"mu": "a.yaml:3", "kep": "b.yaml:4"}).splitlines()
    assert [line.split(" ")[:2] for line in lines] == [["a.yaml:3:", "method.mu:"], ["b.yaml:4:", "method.kep:"]]


def test_options_of_a_function_or_a_class_are_its_parameters():
    """Those that fedmpi passes itself are none, by whatever names the user's function calls them."""

    def deal(y, n, rng, alpha, beta=1.0): ...

    def free(root, **options): ...

    class Net:
        def __init__(self, input_shape, classes, width: int = 3): ...

    supplied = ("root", "site")
    assert check(source, {"size": 4}, "data", supplied) == {"size": 4}
    assert "method.size: 0 is not allowed; must be > 0" in message(source, {"size": 0})
    assert "method.site: unknown key; did you mean 'size'? allowed: noise, size" in message(
        source, {"site": "x"}, supplied=supplied
    )
    supplied = ("labels", "clients", "rng")
    assert check(deal, {"alpha": 1}, "partition", supplied) == {"alpha": 1}
    assert "method.alpha: missing; it must be given for deal" in message(deal, {"beta": 1.0}, supplied=supplied)
    assert "allowed: alpha, beta" in message(deal, {"n": 3, "alpha": 1, "gamma": 2}, supplied=("labels", "n", "rng"))
    assert check(free, {"anything": [1]}, "data", ("root",)) == {"anything": [1]}
    assert check(Net, {"width": 5}, "model", ("input_shape", "classes")) == {"width": 5}
    assert "must be a whole number" in message(Net, {"width": 5.5}, supplied=("input_shape", "classes"))


def test_null_is_answered_with_leaving_the_key_out():
    assert "must be a number, or left out for its default" in message(Prox, {"mu": None})
