"""Replace secrets in options with a placeholder wherever options are written or shown.

    fedmpi run c.yaml data.token=abc    ->    config.yaml contains  token: <redacted>

Whether a value is a secret is judged by the words of its key (`api_key`, `dbPassword`). null, true and false are never
secrets. For a number, the words `key` and `token` count only at the end of its key: `key_dim: 64` is a size.
"""

import re
from typing import Any

MARK = "<redacted>"
_WORDS = {"auth", "authorization", "authtoken", "apikey", "key", "token"}
_PARTS = ("password", "passwd", "passphrase", "secret", "credential")  # in words: `mypassword`, `credentials`


def looks_secret(key: str, value: Any = "") -> bool:
    """Return whether the value of an option may be a secret, judged by the words of its key.

    >>> looks_secret("api_key"), looks_secret("monkey"), looks_secret("key_dim", 64), looks_secret("token", None)
    (True, False, False, False)
    """
    words = [word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", key)]
    secret_words = {word for word in words if word in _WORDS or any(part in word for part in _PARTS)}
    if not secret_words or value is None or isinstance(value, bool):
        return False
    size = isinstance(value, (int, float)) and secret_words <= {"token", "key"} and words[-1] not in secret_words
    return not size


def redact(tree: Any) -> Any:
    """Return a copy of settings with each value that may be a secret replaced by MARK."""
    if isinstance(tree, dict):
        return {key: MARK if looks_secret(str(key), value) else redact(value) for key, value in tree.items()}
    return [redact(each) for each in tree] if isinstance(tree, (list, tuple)) else tree
