"""Write docs/configuration.md from the sources.   python docs/make_configuration.py > docs/configuration.md

`fedmpi show KEY` and `fedmpi list NAME` show the same for one key or one component.
"""

import sys

from fedmpi.config.reference import list_keys
from fedmpi.runtime.introspection import KIND_MODULES, describe_component, list_library_summaries, list_summaries

HEAD = """# Config keys

This page is generated from the sources by `python docs/make_configuration.py > docs/configuration.md`.
On the command line, `fedmpi show train.schedule` explains one key, and `fedmpi list dirichlet` the options of one
component (here of a partition).

Some sections name a component, such as a model or a method. Such a section also accepts the options of the component,
for example `hidden` in `model: {name: mlp, hidden: [64]}`. The tables at the end of this page list these options."""

SECTIONS = {
    "methods": "These options belong to the section `method`. [methods.md](methods.md) has formulas and costs.",
    "models": "These options belong to the section `model`. [models.md](models.md): models of other libraries.",
    "datasets": "These options belong to the section `data`. [data.md](data.md) describes the layouts of files.",
    "partitions": "These options belong to the section `data.partition`.",
    "augmentations": "Augmentations are items of the list `data.augment`, for example "
    "`[{random_crop: {padding: 4}}, horizontal_flip]`.",
    "tasks": "These options belong to the section `task`. [tasks.md](tasks.md) describes the tasks.",
    "rules": "These options belong to the section `server.rule`.",
    "loggers": "Loggers are items of the list `loggers`, for example `[tensorboard, {wandb: {project: p}}]`. "
    "[campaigns.md](campaigns.md) describes them.",
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
    lines += [row(f"**{name}**", "", "", "", text) for name, text in list_library_summaries(kind).items()]
    return lines


def main():
    lines = [HEAD, *config(), *(line for kind in KIND_MODULES for line in things(kind))]
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
