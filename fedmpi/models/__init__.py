"""Model architectures: functions `f(input_shape, classes, **options) -> nn.Module`.

A function with a parameter `task` gets the name of the task; one with a parameter `weights` gets the pretrained weights
(`pretrained.PretrainedWeights`, or None) and loads them itself.

The engine divides each model into features and head with `net.FeaturesAndHead`.
"""

from fedmpi.common.registry import PluginKind

registry: dict[str, str] = {
    "alexnet_s": "fedmpi.models.cnns:alexnet_s",
    "char_lstm": "fedmpi.models.recurrent:char_lstm",
    "lenet5": "fedmpi.models.cnns:lenet5",
    "mcmahan_cnn": "fedmpi.models.cnns:mcmahan_cnn",
    "logistic": "fedmpi.models.mlp:logistic",
    "mlp": "fedmpi.models.mlp:mlp",
    "resnet18": "fedmpi.models.resnet:resnet18",
    "resnet50": "fedmpi.models.resnet:resnet50",
    "sl_vit": "fedmpi.models.sl_vit:sl_vit",
    "small_cnn": "fedmpi.models.cnns:small_cnn",
    "unet": "fedmpi.models.unet:unet",
    "vgg11": "fedmpi.models.cnns:vgg11",
}

LIBRARIES: dict[str, str] = {
    "hf": "fedmpi.models.hugging_face:hf_model",
    "monai": "fedmpi.models.libraries:monai_model",
    "timm": "fedmpi.models.libraries:timm_model",
    "torchvision": "fedmpi.models.libraries:torchvision_model",
}

KIND = PluginKind("model", registry, "model", ("input_shape", "classes"), ("task", "weights"), LIBRARIES)
