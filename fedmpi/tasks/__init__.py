"""What is learned: the loss that clients descend and the figures by which a model is judged, a file a task."""

from fedmpi.common.registry import PluginKind

registry: dict[str, str] = {
    "classification": "fedmpi.tasks.classification:Classification",
    "multi_label": "fedmpi.tasks.multi_label:MultiLabel",
    "regression": "fedmpi.tasks.regression:Regression",
    "survival": "fedmpi.tasks.survival:Survival",
    "next_symbol": "fedmpi.tasks.next_symbol:NextSymbol",
    "segmentation": "fedmpi.tasks.segmentation:Segmentation",
}

KIND = PluginKind("task", registry, "task", ("classes",))
