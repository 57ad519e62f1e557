"""Write docs/configuration.md from the sources.   python docs/make_configuration.py > docs/configuration.md

`fedmpi show KEY` and `fedmpi list NAME` show the same for one key or one component.
"""

import sys

from fedmpi.config.reference import list_keys
from fedmpi.runtime.introspection import KIND_MODULES, describe_component, list_summaries

HEAD = """# Config keys

This page is generated from the sources by `python docs/make_configuration.py > docs/configuration.md`.
`fedmpi show train.schedule` explains one key, `fedmpi list dirichlet` the options of one component.

A section that names a component, such as `model: {name: mlp, hidden: [64]}`, also accepts the options of that
component, which are listed by kind below."""

SECTIONS = {
    "methods": "Options belong to the section `method`; formulas and costs are in [methods.md](methods.md).",
    "models": "Options belong to the section `model`.",
    "datasets": "Options belong to the section `data`; layouts of files are in [data.md](data.md).",
    "partitions": "Options belong to the section `data.partition`.",
    "augmentations": "Items of the list `data.augment`: `[{random_crop: {padding: 4}}, horizontal_flip]`.",
    "tasks": "Options belong to the section `task`; see [tasks.md](tasks.md).",
    "rules": "Options belong to the section `server.rule`.",
    "loggers": "Items of the list `loggers`: `[tensorboard, {wandb: {project: p}}]`; see [campaigns.md](campaigns.md).",
}


def row(*cells):
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def code(text):
    return f"`{text}`" if text else ""


def config():
    lines = ["", "## All keys", "", "| key | type, bounds | default | meaning |", "| --- | --- | --- | --- |"]
    top = [key for key in list_keys() if "." not in key.name]
    lines += [row(code(key.name), key.kind, code(key.default), key.meaning) for key in top]
    for section in (key for key in top if key.section):
        lines += [
            "",
            f"## {section.name}",
            "",
            "| key | type, bounds | default | meaning |",
            "| --- | --- | --- | --- |",
        ]
        inside = (key for key in list_keys((section.name,)))
        lines += [row(code(key.name), key.kind, code(key.default), key.meaning) for key in inside]
    return lines


def things(kind):
    lines = ["", f"## Options of {kind}", "", SECTIONS[kind], ""]
    lines += ["| name | option | type, bounds | default | meaning |", "| --- | --- | --- | --- | --- |"]
    for name, summary in list_summaries(kind).items():
        lines.append(row(f"**{name}**", "", "", "", summary))
        options = describe_component(kind, name).options
        lines += [row("", code(each.name), each.type, code(each.default), each.meaning) for each in options]
    return lines


def main():
    lines = [HEAD, *config(), *(line for kind in KIND_MODULES for line in things(kind))]
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
