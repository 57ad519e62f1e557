"""The small network of NIID-Bench, and of Flower's baselines after it.

Li, Diao, Chen, He: Federated Learning on Non-IID Data Silos, ICDE 2022, https://arxiv.org/abs/2102.02079, section V,
after LeCun, Bottou, Bengio, Haffner: Gradient-Based Learning Applied to Document Recognition, 1998, with ReLU and max
pools, and no padding.
"""

from torch import Tensor, nn

from fedmpi.models.shapes import image


class LeNet5(nn.Module):
    """conv 5x5 (6), max pool 2, ReLU; conv 5x5 (16), max pool 2, ReLU; linear 120, ReLU; linear 84, ReLU; `classes`.

    The paper's ReLU comes before the pool: the same to the bit, gradients included, over four times the entries.
    """

    def __init__(self, channels: int, height: int, width: int, classes: int) -> None:
        super().__init__()
        height, width = (((side - 4) // 2 - 4) // 2 for side in (height, width))
        self.body = nn.Sequential(
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
        self.head = nn.Linear(84, classes)

    def features(self, x: Tensor) -> Tensor:
        return self.body(x)  # (B, 84)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))  # (B, C)


def lenet5(input_shape: tuple[int, ...], classes: int) -> LeNet5:
    """LeNet-5 with ReLU and max pools, the `simple-cnn` of NIID-Bench (Li 2022); images from 16 x 16 pixels.

    1 x 28 x 28 images of 10 classes: 44,426 parameters; 3 x 32 x 32: 62,006.
    """
    return LeNet5(*image("lenet5", input_shape, least=16), classes)
