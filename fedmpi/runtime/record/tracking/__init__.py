"""Who hears of each round as it closes: trackers, which others' programs show, and a user's own classes.

track: [tensorboard, {wandb: {project: mine}}]        `fedmpi list trackers`
callbacks: [mine.py:Watch, {mine.py:Watch: {every: 5}}]
"""

from fedmpi.common.registry import PluginKind

registry: dict[str, str] = {
    "mlflow": "fedmpi.runtime.record.tracking.adapters:MLflow",
    "tensorboard": "fedmpi.runtime.record.tracking.adapters:TensorBoard",
    "trackio": "fedmpi.runtime.record.tracking.adapters:Trackio",
    "wandb": "fedmpi.runtime.record.tracking.adapters:WandB",
}

KIND = PluginKind("tracker", registry, "track")
