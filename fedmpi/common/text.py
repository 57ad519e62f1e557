"""Helpers for the texts of messages, tables and pages."""

import difflib
import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

MAX_INTEGER = (
    2**53
)  # largest allowed integer, since floats and many JSON readers cannot represent all larger ones exactly

_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")

_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")


def suggest_name(word: str, known: Iterable[str]) -> str:
    """Return advice on a misspelled name, for a message: `did you mean 'epochs'? allowed: batch_size, epochs, lr`."""
    allowed = sorted(known)
    folded = {key.casefold(): key for key in allowed}
    close = difflib.get_close_matches(word.casefold(), list(folded), n=1, cutoff=0.5)
    guess = f"did you mean '{folded[close[0]]}'? " if close else ""
    return f"{guess}allowed: {', '.join(allowed) or 'none'}"


def suggest_key(key: str, known: Iterable[str], homes: Iterable[str] = ()) -> str:
    """Return advice on an unknown key of a config, for a message.

    Args:
        key: the unknown key.
        known: the keys that are allowed there.
        homes: dotted keys of other sections that end in `key`; if there are any, they are suggested.
    """
    if homes := list(homes):
        return f"did you mean {' or '.join(homes)}? allowed: {', '.join(sorted(known))}"
    if "." in key:
        section, *rest = key.split(".")
        nested = f"{': {'.join(rest)}: ...{'}' * len(rest)}"
        return f"in a config file, write {section}: {{{nested}; allowed: {', '.join(sorted(known))}"
    return suggest_name(key, known)


def locate_key(origin: str, key: str) -> str:
    """Return the beginning of a message about a key: where the key was set, and the key itself.

    If the key was set by an override, the value of the override is left out.

    >>> locate_key("run.yaml:7", "seed"), locate_key("command line: seed=x", "seed"), locate_key("", "seed")
    ('run.yaml:7: seed', 'command line: seed', 'seed')
    """
    if origin.startswith(f"command line: {key}="):
        return f"command line: {key}"
    return ": ".join(part for part in (origin, key) if part)


def sort_naturally(names: Iterable[str]) -> list[str]:
    """Sort names of classes or sites, and remove duplicates.

    Numbers are sorted by value, even if they are parts of names.

    >>> sort_naturally(["10", "2", "grade 10", "grade 9", "-1", "2"])
    ['-1', '2', '10', 'grade 9', 'grade 10']
    """
    return sorted(set(names), key=_make_sort_key)


def _make_sort_key(name: str) -> tuple[Any, ...]:
    number = float(name) if _NUMBER.fullmatch(name.strip()) else math.nan
    if math.isfinite(number):
        return (0, number, name)
    runs = re.split("([0-9]+)", name)  # words and numbers alternate; numbers are compared by length, and then as text
    return (1, [(len(run.lstrip("0")) if run.isdigit() else 0, run) for run in runs], name)


_FRACTION = re.compile(r"(^|_)(auroc|auprc|auc|c_?index|concordance|r2|f1|dice|iou|kappa|mcc|ece)(_|$)", re.IGNORECASE)
_PERCENT = re.compile(r"accuracy|(^|_)(top\d+|exact)(_|$)")


def format_metric(name: str, value: float, digits: int = 3) -> str:
    """Format the value of a metric with a precision that depends on its name.

    Percentages and values from 10 to 10^6 have two decimals, metrics between 0 and 1 (such as AUROC) four, and all
    others `digits` significant digits.

    >>> format_metric("accuracy", 9.876), format_metric("personal_auroc_std", 0.5), format_metric("loss", 0.0797123)
    ('9.88', '0.5000', '0.0797')
    """
    if _FRACTION.search(name):
        return f"{value:.4f}"
    return f"{value:.2f}" if _PERCENT.search(name) or 10 <= abs(value) < 1e6 else f"{value:.{digits}g}"


# Metrics whose names contain one of these words, such as train_loss or personal_accuracy_std, are better if lower.
LOWER_IS_BETTER = ("loss", "mse", "rmse", "mae", "ece", "perplexity", "std")


def is_lower_better(name: str, more: Iterable[str] = ()) -> bool:
    """Return whether a lower value of a metric is better, judged by its name.

    Args:
        name: the metric, such as train_loss; a suffix `@SITE` is ignored.
        more: words in a name, in addition to LOWER_IS_BETTER, that mark metrics for which lower is better.

    >>> is_lower_better("validation_loss"), is_lower_better("accuracy"), is_lower_better("best_error", ["error"])
    (True, False, True)
    """
    name = name.partition("@")[0]  # without the name of a site
    return any(f"_{lower}_" in f"_{name}_" for lower in (*LOWER_IS_BETTER, *more))


def choose_main_metric(names: Iterable[str]) -> str | None:
    """Return the metric by which runs are compared: the first that is not a loss, or the first if all are losses.

    >>> choose_main_metric(["train_loss", "loss_std", "c_index"]), choose_main_metric(["personal_loss"])
    ('c_index', 'personal_loss')
    """
    names = list(names)
    return next((name for name in names if "_loss_" not in f"_{name.partition('@')[0]}_"), next(iter(names), None))


def pluralize(number: int, thing: str) -> str:
    """Format a number with its noun in the singular or plural.

    >>> pluralize(1, "client"), pluralize(4, "client")
    ('1 client', '4 clients')
    """
    return f"{number} {thing}{'' if number == 1 else 's'}"


def list_things(names: Sequence[str], thing: str) -> str:
    """List the names of one or more things for a message.

    >>> list_things(["age"], "column"), list_things(["age", "id"], "column")
    ("column 'age'", "each of 2 columns ('age', 'id')")
    """
    shown = shorten(", ".join(map(repr, names)), 100)
    return f"{thing} {shown}" if len(names) == 1 else f"each of {pluralize(len(names), thing)} ({shown})"


def shorten_repr(value: Any) -> str:
    """Return the repr of a value, shortened to 60 characters, for a message."""
    return shorten(repr(value))


def shorten(text: str, length: int = 60) -> str:
    """Shorten a string to at most `length` characters; a shortened string ends in "..."."""
    return text if len(text) <= length else f"{text[: length - 3]}..."


def escape_unprintable(value: object) -> str:
    r"""Replace unprintable characters, except line feed and tab, with escape sequences, as XML requires.

    >>> escape_unprintable("a\x00b"), escape_unprintable(3)
    ('a\\x00b', '3')
    """
    text = str(value)
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


def format_metric_title(name: str) -> str:
    """Format the name of a metric as a title, with spaces and its unit.

    >>> format_metric_title("personal_accuracy"), format_metric_title("loss")
    ('personal accuracy (%)', 'loss')
    """
    return name.replace("_", " ") + (" (%)" if "accuracy" in name else "")


def find_control_character(text: str) -> str:
    """Describe the first control character in a string, except line feed and tab, for a message; "" if none."""
    odd = _CONTROL.search(text)
    return f"the control character {odd[0]!r}" if odd else ""
