"""Architectures: functions `f(input_shape, classes, **options) -> nn.Module`; `net.Net` is how the engine sees one."""

registry: dict[str, str] = {
    "mcmahan_cnn": "fedmpi.models.mcmahan_cnn:mcmahan_cnn",
    "logistic": "fedmpi.models.logistic:logistic",
    "mlp": "fedmpi.models.mlp:mlp",
    "resnet18": "fedmpi.models.resnet:resnet18",
    "resnet50": "fedmpi.models.resnet:resnet50",
}
