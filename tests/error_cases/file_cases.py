"""What is wrong with a config file itself: (what stands behind CONFIG in the file, beside it, what is said)."""


def _bomb(levels: int = 8) -> str:
    """Ten aliases of ten aliases of ...: 10^8 values."""
    lines = [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, levels)]
    return "\n".join(["a0: &a0 [x, x, x, x, x, x, x, x, x, x]", *lines, ""])


def _put(name, text):
    return lambda folder: (folder / name).write_bytes(text.encode() if isinstance(text, str) else text)


FILES = {
    "anchor bomb": (_bomb(), None, r"more than 50,000 values once aliases \(\*\)"),
    "alias in itself": ("x: &a [*a]\n", None, r"nesting is too deep, or an alias \(\*\) refers to"),
    "no such anchor": ("x: *a\n", None, r"the alias \*a refers to an anchor &a that is not defined"),
    "merge of a scalar": (
        "x: {<<: 3}\n",
        None,
        r"not valid YAML: << must be followed by a reference to a mapping",
    ),
    "duplicate key": ("rounds: 2\n", None, r"run\.yaml:11: rounds: duplicate key; it is already set in .*run\.yaml:1"),
    "tag": ("seed: !!python/name:os.system\n", None, r"the YAML tag !!python/name:os\.system is not allowed"),
    "odd key": ("yes: 1\n", None, r"YAML reads the key yes as a boolean, not as a string; put it in quotes: 'yes'"),
    "half a pair": ('name: "\\ud800"\n', None, r"contains the control character"),
    "dots in a file": ("train.epochs: 3\n", None, "in a config file, write train: {epochs: ...}"),
    "base is a text": ("base: a.yaml\n", None, r"base: 'a\.yaml' is not allowed; must be a list of file names"),
    "base is not there": ("base: [none.yaml]\n", None, r"none\.yaml: there is no such config file"),
    "base is a link to itself": (
        "base: [l]\n",
        lambda folder: (folder / "l").symlink_to("l"),
        r"cannot be read: Too many",
    ),
    "base is the file": (
        "base: [run.yaml]\n",
        None,
        r"run\.yaml includes itself; remove this base entry",
    ),
    "base is Latin-1": (
        "base: [l.yaml]\n",
        _put("l.yaml", b"name: \xe9\n"),
        r"l\.yaml cannot be read as text: .*UTF-8",
    ),
    "a mistake in a base": (
        "base: [b.yaml]\n",
        _put("b.yaml", "train: {epochs: x}\n"),
        r"b\.yaml:1: train\.epochs: 'x'",
    ),
}
