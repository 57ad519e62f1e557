"""The small network of NIID-Bench, and of Flower's baselines after it.

Li, Diao, Chen, He: Federated Learning on Non-IID Data Silos, ICDE 2022, https://arxiv.org/abs/2102.02079, section V,
after LeCun, Bottou, Bengio, Haffner: Gradient-Based Learning Applied to Document Recognition, 1998, with ReLU and max
pools, and no padding.
"""

from collections import OrderedDict

from torch import nn

from fedmpi.models.shapes import image


def lenet5(input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """LeNet-5 with ReLU and max pools, the `simple-cnn` of NIID-Bench (Li 2022); images from 16 x 16 pixels.

    1 x 28 x 28 images of 10 classes: 44,426 parameters; 3 x 32 x 32: 62,006. The paper has ReLU before the pool: the
    same to the bit, gradients included, over four times the entries.
    """
    channels, height, width = image("lenet5", input_shape, least=16)
    height, width = (((side - 4) // 2 - 4) // 2 for side in (height, width))
    body = nn.Sequential(
        nn.Conv2d(channels, 6, 5),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Conv2d(6, 16, 5),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16 * height * width, 120),
        nn.ReLU(),
        nn.Linear(120, 84),
        nn.ReLU(),
    )
    return nn.Sequential(OrderedDict(body=body, head=nn.Linear(84, classes)))
