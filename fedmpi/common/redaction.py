"""Secrets among a user's options: what is written down or shown has a mark in their place.

    fedmpi run c.yaml data.token=abc    ->    config.yaml holds  token: <redacted>
A key smells of a secret by one of its words (`api_key`, `dbPassword`). null, true and false are none, and where `key`
or `token` is not the last word, a number is none either: `key_dim: 64` is a size.
"""

import json
import re
from typing import Any

MARK = "<redacted>"
_WORDS = {"auth", "authorization", "authtoken", "apikey", "key", "token"}
_PARTS = ("password", "passwd", "passphrase", "secret", "credential")  # of words: `mypassword`, `credentials`


def looks_secret(key: str, value: Any = "") -> bool:
    """Whether `key: value` may be a secret. key: dotted or not.

    >>> looks_secret("api_key"), looks_secret("monkey"), looks_secret("key_dim", 64), looks_secret("token", None)
    (True, False, False, False)
    """
    words = [word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", key)]
    found = {word for word in words if word in _WORDS or any(part in word for part in _PARTS)}
    if not found or value is None or isinstance(value, bool):
        return False
    size = isinstance(value, (int, float)) and found <= {"token", "key"} and words[-1] not in found
    return not size


def redacted(tree: Any) -> Any:
    """A copy of settings with the mark in place of all that smells of a secret."""
    if isinstance(tree, dict):
        return {key: MARK if looks_secret(str(key), value) else redacted(value) for key, value in tree.items()}
    return [redacted(each) for each in tree] if isinstance(tree, (list, tuple)) else tree


def to_one_line(value: Any) -> str:
    """A value on one line, near enough to YAML to be read.

    >>> to_one_line({"source": "web", "token": MARK, "sizes": [1, 2]})
    '{source: web, token: <redacted>, sizes: [1, 2]}'
    """
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {to_one_line(each)}" for key, each in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(to_one_line, value)) + "]"
    return value if isinstance(value, str) else json.dumps(value)
