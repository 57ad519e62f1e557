"""Replace secrets among a user's options by a mark wherever options are written or shown.

    fedmpi run c.yaml data.token=abc    ->    config.yaml holds  token: <redacted>
A key names a secret by one of its words (`api_key`, `dbPassword`). null, true and false are no secrets, nor is a number
unless `key` or `token` is the last word: `key_dim: 64` is a size.
"""

import re
from typing import Any

MARK = "<redacted>"
_WORDS = {"auth", "authorization", "authtoken", "apikey", "key", "token"}
_PARTS = ("password", "passwd", "passphrase", "secret", "credential")  # of words: `mypassword`, `credentials`


def looks_secret(key: str, value: Any = "") -> bool:
    """Return whether `key: value` may be a secret. The key may be dotted.

    >>> looks_secret("api_key"), looks_secret("monkey"), looks_secret("key_dim", 64), looks_secret("token", None)
    (True, False, False, False)
    """
    words = [word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", key)]
    secret_words = {word for word in words if word in _WORDS or any(part in word for part in _PARTS)}
    if not secret_words or value is None or isinstance(value, bool):
        return False
    size = isinstance(value, (int, float)) and secret_words <= {"token", "key"} and words[-1] not in secret_words
    return not size


def redacted(tree: Any) -> Any:
    """Return a copy of settings with the mark in place of all that may be a secret."""
    if isinstance(tree, dict):
        return {key: MARK if looks_secret(str(key), value) else redacted(value) for key, value in tree.items()}
    return [redacted(each) for each in tree] if isinstance(tree, (list, tuple)) else tree
