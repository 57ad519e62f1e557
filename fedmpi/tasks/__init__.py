"""What is learned: the loss that clients descend and the figures by which a model is judged."""

from fedmpi.common.registry import PluginKind

registry: dict[str, str] = {
    "classification": "fedmpi.tasks.classification:Classification",
    "multi_label": "fedmpi.tasks.classification:MultiLabel",
    "regression": "fedmpi.tasks.regression:Regression",
    "survival": "fedmpi.tasks.survival:Survival",
    "next_symbol": "fedmpi.tasks.places:NextSymbol",
    "segmentation": "fedmpi.tasks.places:Segmentation",
}

KIND = PluginKind("task", registry, "task", ("classes",))
