"""tuned: describe the problem here: what x and y are, and what both levels minimise.

    dbo run plugins=tuned.py task=tuned engine=local rounds=20 algorithm.eta_in=0.1 algorithm.eta_out=0.1
    dbo verify --plugin tuned.py --task tuned
"""

import torch
from torch.nn.functional import cross_entropy

import dbo


@dbo.task("tuned")
class Task(dbo.TorchTask):
    """tuned: linear classifier (lower level) whose per-feature regularisation is tuned (upper level)."""

    strongly_convex = True      # g in y
    # Other metrics than test_accuracy and test_loss: directions = {"my_metric": "min"}, which values are better.

    samples: int = dbo.param(600, ge=30, help="samples in all")
    features: int = dbo.param(8, ge=1, help="entries of a sample")

    def data(self, seed):
        """Return train (lower level), val (upper level) and test: replace this by your own arrays or data sets."""
        generator = torch.Generator().manual_seed(seed)
        inputs = torch.randn(self.samples, self.features, generator=generator)
        truth = torch.randn(self.features, 3, generator=generator)
        labels = (inputs @ truth).argmax(1)
        return dbo.Split(*((inputs[part::3], labels[part::3]) for part in range(3)), classes=3)

    def init(self, generator):
        """Return the start of x and of y: tensors, modules, or dictionaries of them."""
        return {"log_weight": torch.full((self.features,), -3.0)}, {"head": torch.zeros(self.features, 3)}

    def lower(self, x, y, batch):
        """Return g_i, a scalar."""
        ridge = (x["log_weight"].exp()[:, None] * y["head"].square()).sum()
        return cross_entropy(batch.inputs @ y["head"], batch.labels) + ridge

    def upper(self, x, y, batch):
        """Return f_i, a scalar."""
        return cross_entropy(batch.inputs @ y["head"], batch.labels)

    def metrics(self, x, y, test):
        """Return the metrics of one model."""
        scores = test.inputs @ y["head"]
        return {"test_accuracy": (scores.argmax(1) == test.labels).float().mean(),
                "test_loss": cross_entropy(scores, test.labels)}
