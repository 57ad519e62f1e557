"""The small convolutional network of the paper that named FedAvg.

McMahan, Moore, Ramage, Hampson, Agüera y Arcas: Communication-Efficient Learning of Deep Networks from Decentralized
Data, AISTATS 2017, https://arxiv.org/abs/1602.05629
"""

from collections import OrderedDict

from torch import nn

from fedmpi.models.shapes import image


def mcmahan_cnn(input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """CNN of the FedAvg paper (McMahan 2017): two 5x5 convolutions, one hidden layer of 512; images from 4 x 4 pixels.

    1 x 28 x 28 images of 10 classes: 1,663,370 parameters. The paper's ReLU comes before the pool: the same to the bit,
    gradients included, over four times the entries.
    """
    channels, height, width = image("mcmahan_cnn", input_shape, least=4)
    body = nn.Sequential(
        nn.Conv2d(channels, 32, 5, padding=2),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Conv2d(32, 64, 5, padding=2),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64 * (height // 4) * (width // 4), 512),
        nn.ReLU(),
    )
    return nn.Sequential(OrderedDict(body=body, head=nn.Linear(512, classes)))
