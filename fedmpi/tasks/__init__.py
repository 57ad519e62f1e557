"""Tasks: the loss that clients minimise, and the metrics by which a model is evaluated."""

from fedmpi.common.registry import PluginKind

registry: dict[str, str] = {
    "classification": "fedmpi.tasks.classification:Classification",
    "multi_label": "fedmpi.tasks.classification:MultiLabel",
    "regression": "fedmpi.tasks.regression:Regression",
    "survival": "fedmpi.tasks.survival:Survival",
    "language_model": "fedmpi.tasks.per_position:NextSymbol",
    "next_symbol": "fedmpi.tasks.per_position:NextSymbol",
    "segmentation": "fedmpi.tasks.per_position:Segmentation",
}

KIND = PluginKind("task", registry, "task", ("classes",))
