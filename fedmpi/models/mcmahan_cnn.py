"""The small convolutional network of the paper that named FedAvg.

McMahan, Moore, Ramage, Hampson, Agüera y Arcas: Communication-Efficient Learning of Deep Networks from Decentralized
Data, AISTATS 2017, https://arxiv.org/abs/1602.05629
"""

from torch import Tensor, nn

from fedmpi.models.shapes import image


class McMahanCNN(nn.Module):
    """conv 5x5 (32), max pool 2, ReLU; conv 5x5 (64), max pool 2, ReLU; linear 512, ReLU; linear `classes`.

    The paper's ReLU comes before the pool: the same to the bit, gradients included, over four times the entries.
    """

    def __init__(self, channels: int, height: int, width: int, classes: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
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
        self.head = nn.Linear(512, classes)

    def features(self, x: Tensor) -> Tensor:
        return self.body(x)  # (B, 512)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))  # (B, C)


def mcmahan_cnn(input_shape: tuple[int, ...], classes: int) -> McMahanCNN:
    """CNN of the FedAvg paper (McMahan 2017): two 5x5 convolutions, one hidden layer of 512; images from 4 x 4 pixels.

    1 x 28 x 28 images of 10 classes: 1,663,370 parameters.
    """
    return McMahanCNN(*image("mcmahan_cnn", input_shape, least=4), classes)
