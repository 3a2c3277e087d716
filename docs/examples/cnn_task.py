"""A whole task in one file: a CNN (upper level) feeds a linear head (lower level) on MNIST. Try it with

    dbo run plugins=docs/examples/cnn_task.py task=cnn_representation batch_size=64 algorithm.eta_in=0.1

Without mini-batches, leave out batch_size; with files of your own, add data_dir=/path/to/data."""
import torch
from torch.nn.functional import cross_entropy

import dbo


@dbo.task("cnn_representation")
class CnnRepresentation(dbo.TorchTask):
    """Linear head (lower level) on the features of a small CNN that is learned on the upper level."""

    datasets = ("mnist", "fashion_mnist")       # where the samples come from; or write data(self, seed)
    strongly_convex = True                      # g in y: the ridge makes it so
    ridge: float = dbo.param(0.01, gt=0, help="ridge on the head")      # a key of `task:` in an experiment

    def init(self, generator):                  # the start of x and of y: modules, tensors, or trees of them
        return torch.nn.Sequential(
            torch.nn.Unflatten(1, (1, 28, 28)), torch.nn.Conv2d(1, 8, 5, stride=2), torch.nn.ReLU(),
            torch.nn.Conv2d(8, 16, 3, stride=2), torch.nn.ReLU(), torch.nn.Flatten(),
            torch.nn.Linear(400, 32), torch.nn.Tanh()), {"head": torch.zeros(32, 10)}

    def representation(self, x, inputs):        # optional: what depends on x alone, computed once per x and batch
        return x(inputs)

    def lower(self, x, y, batch):               # g_i: a scalar
        loss = cross_entropy(batch.representation @ y["head"], batch.labels)
        return loss + 0.5 * self.ridge * y["head"].square().sum()

    def upper(self, x, y, batch):               # f_i: a scalar
        return cross_entropy(batch.representation @ y["head"], batch.labels)

    def metrics(self, x, y, test):              # of one model on the test samples
        scores = test.representation @ y["head"]
        return {"test_accuracy": (scores.argmax(1) == test.labels).float().mean(),
                "test_loss": cross_entropy(scores, test.labels)}
