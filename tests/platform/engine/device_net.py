"""A plugin: layers as a module (upper level), a head (lower level), nodes with different numbers of samples."""

import numpy as np
import torch
from torch.nn.functional import cross_entropy

import dbo


@dbo.task("device_net")
class DeviceNet(dbo.TorchTask):
    """A small convolution, and a linear head on top."""

    def data(self, seed):
        rng = np.random.default_rng(seed)
        parts = [(rng.standard_normal((count, 1, 6, 6)), rng.integers(0, 3, count)) for count in (50, 42, 20)]
        return dbo.Split(*parts, classes=3)

    def init(self, generator):
        layers = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3), torch.nn.Tanh(), torch.nn.Flatten())
        return layers, {"head": 0.1 * torch.randn(32, 3, generator=generator)}

    def representation(self, x, inputs):
        return x(inputs)

    def lower(self, x, y, batch):
        return cross_entropy(batch.representation @ y["head"], batch.labels) + 0.1 * y["head"].square().sum()

    def upper(self, x, y, batch):
        return cross_entropy(batch.representation @ y["head"], batch.labels)

    def metrics(self, x, y, test):
        return {"test_accuracy": (test.representation @ y["head"]).argmax(1).eq(test.labels).double().mean()}
