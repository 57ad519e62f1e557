"""Write docs/hooks.md from fedmpi/method.   python docs/make_hooks.py > docs/hooks.md

Descriptions come from docstrings and from the comments beside declarations, and signatures and defaults from the code.
"""

import ast
import inspect
import io
import re
import sys
import textwrap
import tokenize

from fedmpi import method
from fedmpi.method import base, context, slots
from fedmpi.method.base import DECLARATIONS, HOOKS

PUBLIC = {name for name, value in vars(method).items() if name[0] != "_" and not inspect.ismodule(value)}
WIDTH = 150
HEAD = """This page is generated from the sources by `python docs/make_hooks.py > docs/hooks.md`.

A method is a frozen dataclass with declarations and hooks. A method that overrides no hook is FedAvg. All names on this
page are in `fedmpi.method`; [write_a_method.md](write_a_method.md) shows how to write three example methods.

This page describes what a class may declare, its hooks in the order in which a round calls them, the arguments of hooks
(`client`, `server`, `updates`), and slots. The last sections describe the limits of what a method can do, and how to
read a checkpoint. The section [Slots](#slots) defines the symbols in shapes; for example, (d,) is a vector with one
entry per parameter.

The arguments of hooks belong to the engine. Hooks read their arguments and return new tensors. If a hook writes to an
argument, the run ends with an error that names the hook. There are two exceptions: `correct_gradient` may write to its
argument g, and hooks of a client may write to `client.accumulators`."""
ROUND = (
    ("when", "where", "hooks, in this order", "round", "state that they see"),
    ("the run starts", "every rank", "`prepare_model`, `shared_parts`", "", ""),
    (
        "round t is broadcast",
        "rank 0",
        "`download`, for each client of the cohort",
        "`server.round` = t",
        "`server.state`, `server.w` before round t",
    ),
    (
        "a client trains",
        "its rank",
        "`initial_weights`; `train`, and in each step of `client.fit` `loss` (or `step`), `regularizer`, "
        "`correct_gradient`; `upload`",
        "`client.round` = t",
        "`client.downloads` before round t, `client.state` of its previous round",
    ),
    (
        "uploads have arrived",
        "rank 0",
        "`aggregate`",
        "`server.round` = t",
        "`server.state`, `server.w` before round t",
    ),
    (
        "evaluation after round t",
        "rank 0",
        "`download`, for every client",
        "`server.round` = t",
        "`server.state`, `server.w` AFTER round t",
    ),
    (
        "",
        "the client's rank",
        "`personal_weights`, `personal_buffers`, `finetune`, `predict`",
        "`client.round` = t",
        "`client.downloads`, `client.received`, `client.state` AFTER round t",
    ),
)
AROUND = """If a client was not in the cohort of round t, its `client.state` in the evaluation is the state after the
last round in which the client took part. With `rounds: 0`, hooks of the evaluation see round t = 0 and the initial
state.

Autograd is enabled in every hook, including those on the server. The arguments of a hook do not require gradients. To
train a tensor x of the server state, write `x = server.state.x.clone().requires_grad_()` in `aggregate`, and compute
its gradient with `torch.autograd.grad`. The engine detaches whatever a hook returns. `client.reference_forward`,
`client.mean_loss`, `client.forward_batches` and the function returned by `predict` run without gradient tracking. In
`loss` and `regularizer`, client.w is a leaf that requires gradients, so terms that depend on the weights contribute to
the gradient.

If `compute.clients_per_pass` is set, the engine may call client hooks under `torch.vmap` for several clients at once
([packing.md](packing.md))."""
ORDER = {
    "Once": ("prepare_model", "shared_parts"),
    "The server sends": ("download",),
    "A client trains": ("initial_weights", "train", "loss", "step", "regularizer", "correct_gradient", "upload"),
    "The server's step": ("aggregate",),
    "Evaluation": ("personal_weights", "personal_buffers", "finetune", "predict"),
}
FILES = (
    ("file of a run directory", "holds"),
    (
        "`checkpoints/000012.safetensors`",
        "after round 12: `w` (d,), float buffers `b`, `optimizer`, and `state`, one flat vector: the slots of "
        "server_state in the order of their declaration",
    ),
    (
        "`state/000003.000012.safetensors`",
        "`row` of client 3 after round 12, flat: the parts of w and b that are not sent, if there are any; then the "
        "slots of client_state in the order of their declaration; then the state of `train.persist_optimizer`",
    ),
    (
        "`partition.npz`",
        "`indices` of all clients in order, and `offsets`: client k trains on the rows "
        "`indices[offsets[k]:offsets[k + 1]]` of the training set; "
        "`validation_indices` and `validation_offsets` have the same structure",
    ),
)
CHECKPOINT = """A client that has not trained yet has no file in `state/`. A slot of shape (n, d) is stored as n
consecutive rows of length d. By default a run keeps the last two checkpoints (`checkpoint: {every: 1, keep: 2}`).

`Slots.to_packing(sizes)` returns an object that finds the slots in the flat vector by their names. The following
program uses it to read the server state of the third example in
[write_a_method.md](write_a_method.md#third-example-server-state-and-downloads-for-single-clients):"""
CODE = """```python
# read_state.py
import sys
from pathlib import Path

import numpy as np
from hyper import Hyper
from safetensors.torch import load_file

run = Path(sys.argv[1])
server = load_file(max((run / "checkpoints").glob("*.safetensors")))  # the newest
offsets = np.load(run / "partition.npz")["offsets"]
sizes = {"d": len(server["w"]), "N": len(offsets) - 1, "rank": Hyper.rank}
state = Hyper.server_state.to_packing(sizes).views(server["state"])
print("samples of each client:", np.diff(offsets))
print("basis:", tuple(state.basis.shape), "coefficients:", state.e)
```

```sh
fedmpi run configs/quickstart.yaml name=hyper 'method={name: "hyper.py:Hyper"}'
python read_state.py runs/hyper
```"""


def row(*cells):
    return "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |"


def wrapped(text, indent=""):
    """One paragraph, or one item of a list, as lines of the page."""
    text = re.sub(r"`[^`]+`", lambda code: code[0].replace(" ", "\0"), text)  # which stays in one line
    lines = textwrap.wrap(text, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    return "\n".join(lines).replace("\0", " ")


def reflowed(text):
    """Paragraphs."""
    return [line for part in text.split("\n\n") for line in (wrapped(" ".join(part.split())), "")]


def table(rows):
    return [row(*rows[0]), row(*["---"] * len(rows[0])), *(row(*cells) for cells in rows[1:]), ""]


def declared(owner):
    """{name: (default, comment)} of a class's annotations or a module's assignments, as the source has them.

    The comment is what stands behind, and in whole lines right above.
    """
    source = textwrap.dedent(inspect.getsource(owner))
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = {t.start[0]: t.string.lstrip("# ") for t in tokens if t.type == tokenize.COMMENT}
    alone = {n for n in comments if source.splitlines()[n - 1].lstrip().startswith("#")}
    found, tree = {}, ast.parse(source)
    for node in tree.body[0].body if inspect.isclass(owner) else tree.body:
        if not isinstance(node, ast.Assign | ast.AnnAssign):
            continue
        above = node.lineno
        while above - 1 in alone:
            above -= 1
        said = [comments[n] for n in range(above, node.end_lineno + 1) if n in comments]
        name = ast.unparse(node.target if isinstance(node, ast.AnnAssign) else node.targets[0])
        found[name] = ast.unparse(node.value) if node.value else "", " ".join(said)
    return found


def paragraphs(doc):
    """A docstring as Markdown: (text, items of Args)."""
    found, items = [], []
    for part in inspect.cleandoc(doc or "").split("\n\n"):
        first, _, rest = part.partition("\n")
        if first == "Args:":
            for line in textwrap.dedent(rest).splitlines():
                if line.startswith(" "):
                    items[-1] += f" {line.strip()}"
                else:
                    name, _, meaning = line.partition(": ")
                    items.append(f"`{name}`: {meaning}")
        elif not part.startswith(">>>"):
            found.append(re.sub(r"\s+", " ", part))
    return found, items


def signature(function, skip=1):
    names = [*inspect.signature(function).parameters.values()][skip:]
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in names]
    return str(inspect.Signature(bare))


def hooks():
    assert sorted(HOOKS) == sorted(name for names in ORDER.values() for name in names)
    lines = ["## Hooks", ""]
    for when, names in ORDER.items():
        lines += [f"### {when}", ""]
        for name in names:
            hook = getattr(base.Method, name)
            doc = inspect.cleandoc(hook.__doc__)
            first, _, more = doc.partition("\n")
            said, _, shapes = first.partition("   ")
            texts, items = paragraphs(f"{said}\n{more}")
            code = f"`{name}{signature(hook)}`" + (f", `{shapes.strip()}`" if shapes else "")
            texts.sort(key=lambda text: text.startswith("Returns:"))
            parts = [wrapped(re.sub("^Called ", f"The hook `{name}` is called ", text)) for text in texts]
            parts.insert(
                len(parts) - texts[-1].startswith("Returns:"), "\n".join(wrapped(f"- {item}", "  ") for item in items)
            )
            lines += [f"**{code}**", "", *(line for part in parts for line in (part, ""))]
    return lines


def members(title, owner, letter, more=()):
    """What a hook sees of `owner` as `letter`."""
    lines = [f"## {title}", "", *more, *([""] if more else []), "| member | meaning |", "| --- | --- |"]
    lines += [row(f"`{letter}.{name}`", said) for name, (_, said) in declared(owner).items() if name[0] != "_"]
    lines.append("")
    for name, value in vars(owner).items():
        if name.startswith("_"):
            continue
        function = value.fget if isinstance(value, property) else value
        if inspect.isfunction(function):
            texts, items = paragraphs(function.__doc__)
            called = "" if isinstance(value, property) else signature(function)
            lines.append(wrapped(f"- `{letter}.{name}{called}`: {' '.join(texts)}", "  "))
            lines += [wrapped(f"  - {item}", "    ") for item in items]
    return [*lines, ""]


def text_block(doc):
    return ["```text", inspect.cleandoc(doc), "```", ""]


def declarations():
    found = declared(base.Method)
    lines = [
        "## What a class declares",
        "",
        "A declaration is an assignment without a type annotation, for example `client_state = Slots(c=FLAT)`.",
        "",
    ]
    lines += ["| name | meaning | default |", "| --- | --- | --- |"]
    lines += [row(f"`{name}`", found[name][1], f"`{found[name][0]}`") for name in DECLARATIONS]
    lines += ["", "`needs` is a set of the following requirements:", "", "| name | requirement |", "| --- | --- |"]
    for name, (_, said) in declared(base).items():
        if name in PUBLIC and isinstance(getattr(base, name), str):
            lines.append(row(f"`{name}`", getattr(base, name) + (f"; {said}" if said else "")))
    lines += [
        "",
        "The options of a method are fields of the dataclass, for example "
        '`mu: float = option(0.1, "meaning", ge=0)`. The following helpers are available:',
        "",
    ]
    for helper in (method.option, base.declared_property, base.delegates_to, base.overrides):
        called = "" if inspect.isclass(helper) else signature(helper, 0)
        lines.append(wrapped(f"- `{helper.__name__}{called}`: {' '.join(paragraphs(helper.__doc__)[0])}", "  "))
    return [*lines, ""]


def slot_section():
    lines = ["## Slots", "", *text_block(slots.__doc__), "| name | definition | meaning |", "| --- | --- | --- |"]
    for name, (value, said) in declared(slots).items():
        if name in PUBLIC:
            lines.append(row(f"`{name}`", f"`{value}`", said))
    lines.append("")
    for owner in (
        slots.Slot,
        slots.Slots,
        slots.SharedParts,
        context.SlotValues,
        context.State,
        context.Quadratic,
        context.FitResult,
    ):
        names = [each for each in declared(owner) if owner in (slots.Slot, slots.SharedParts, context.Quadratic)]
        fields = ", ".join(f"{name}={declared(owner)[name][0]}".removesuffix("=") for name in names)
        texts = paragraphs(owner.__doc__)[0]
        of_fields = [text for text in texts if text.partition(": ")[0] in names]
        texts = [text for text in texts if text not in of_fields]
        lines.append(wrapped(f"- `{owner.__name__}{f'({fields})' if fields else ''}`: {' '.join(texts)}", "  "))
        for text in of_fields:
            name, _, meaning = text.replace("at the top of this module", "above").partition(": ")
            lines.append(wrapped(f"  - `{name}`: {meaning}", "    "))
        for name in ("with_leading_dim", "to_packing"):
            if name in vars(owner):
                function = vars(owner)[name]
                lines.append(
                    wrapped(f"  - `.{name}{signature(function)}`: {paragraphs(function.__doc__)[0][0]}", "    ")
                )
        if owner is context.FitResult:
            lines += [wrapped(f"  - `.{name}`: {said}", "    ") for name, (_, said) in declared(owner).items()]
    taken = ", ".join(f"`{name}`" for name in sorted(slots.RESERVED))
    return [
        *lines,
        "",
        wrapped(f"The name of a slot must not begin with `_`, and must not be one of the following: {taken}."),
        "",
    ]


def main():
    shapes = inspect.cleandoc(context.__doc__).partition("\n\n")[2]
    _, head, cannot = inspect.cleandoc(method.__doc__).partition("A method cannot\n\n")
    assert head
    uploads = [" ".join(paragraphs(context.Uploads.__doc__)[0])]
    sections = [
        ["# Hook reference", "", *reflowed(HEAD), "## A round", "", *table(ROUND), *reflowed(AROUND)],
        declarations(),
        hooks(),
        members("Hooks of a client: the argument `client`", context.Client, "client", text_block(shapes)[:-1]),
        members("Hooks of the server: the argument `server`", context.Server, "server"),
        members("Uploads: the argument `updates`", context.Uploads, "updates", uploads),
        slot_section(),
        ["## What a method cannot do", "", "A method cannot", cannot, ""],
        ["## Reading a checkpoint", "", *table(FILES), *reflowed(CHECKPOINT), CODE],
    ]
    sys.stdout.write("\n".join(line for section in sections for line in section) + "\n")


if __name__ == "__main__":
    main()
