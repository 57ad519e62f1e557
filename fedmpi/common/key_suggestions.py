"""Suggest the key that a user of other programs meant by an unknown one."""

from collections.abc import Iterable

from fedmpi.common.text import nearest

SYNONYMS = {
    "learning_rate": "train.lr",
    "local_epochs": "train.epochs",
    "num_epochs": "train.epochs",
    "local_steps": "train.steps",
    "optimizer": "train.optim",
    "wd": "train.weight_decay",
    "max_grad_norm": "train.clip_norm",
    "lr_scheduler": "train.schedule",
    "num_rounds": "rounds",
    "output_dir": "output",
    "dataset": "data.source",
    "num_clients": "data.partition.clients",
    "arch": "model.name",
    "algorithm": "method.name",
    "aggregator": "server.rule",
    "loss": "task.name",
    "clients_per_round": "cohort.size",
    "participation": "cohort.fraction",
    "eval_every": "evaluate.every",
    "gpus": "compute.device",
    "amp": "compute.precision",
    "sweep": "over",
    "grid": "over",
    "grid_search": "over",
    "skip": "leave_out",
}


def suggest_key(key: str, where: str, known: Iterable[str], homes: Iterable[str] = ()) -> str:
    """Return the advice on an unknown key: `did you mean 'epochs'? allowed: batch_size, epochs, lr`.

    Args:
        key: the unknown word.
        where: the section it stands in, "train"; "" for the outermost.
        known: the keys that the section has.
        homes: the dotted keys of other sections that end in this word.
    """
    known = sorted(known)
    allowed = f"allowed: {', '.join(known)}"
    meant = SYNONYMS.get(key.casefold().replace("-", "_"), "")
    section, _, last = meant.rpartition(".")
    if last in known and section == where:
        return f"did you mean '{last}'? {allowed}"
    if others := dict.fromkeys([*([meant] if meant else []), *homes]):
        return f"did you mean {' or '.join(others)}? {allowed}"
    if "." in key:
        return f"in a file write the section, then the key within it; {allowed}"
    return nearest(key, known)
