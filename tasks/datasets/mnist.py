"""Load MNIST, 28 × 28 grey images of handwritten digits, as rows of 784."""

from dataclasses import dataclass

from dbo.tasks.api import DataSize, Split, dataset, param
from dbo.tasks.datasets.torchvision_images import describe_idx

FILES = describe_idx("mnist", "MNIST", "12 MB", mean=0.1307, deviation=0.3081)


@dataset("mnist")
@dataclass(frozen=True, slots=True, kw_only=True)
class Mnist:
    """70,000 handwritten digits of 28 × 28 pixels, 10,000 of them the official test images."""

    val_fraction: float = param(0.5, gt=0, lt=1, help="share of the training images for the upper level")
    images: int = param(
        60_000, ge=100, le=60_000, help="use at most this many training images, the same share of every digit"
    )

    def size(self) -> DataSize:
        return DataSize(self.images + 10_000, 784, 10)

    def load(self, seed: int, data_dir: str | None) -> Split:
        return FILES.load(seed, data_dir, self.images, self.val_fraction)
