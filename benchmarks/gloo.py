"""Run C²DFB or D-SOBA with torch.distributed: a process per node, a message per quantity and neighbour.

The processes communicate over gloo on loopback. Each quantity is sent separately, as soon as the algorithm has computed
it: dense x and s, then in every inner step the residuals of the iterate and of the tracker, as (positions, values),
first for all of the y loop and then for all of the z loop. D-SOBA sends x, y and v, once per round. The processes stay
alive between measurements and wait for commands, so that other variants can be timed in between.
"""

import multiprocessing
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Share:
    """The data of one node."""

    weights: dict[int, float]                      # w_ij of itself and its neighbours
    train: tuple[Array, Array]                     # features and labels
    val: tuple[Array, Array]
    classes: int
    scale: float                                   # of the regulariser
    steps: dict[str, float]
    ratio: float


def split(problem: Any, network: Any, steps: dict[str, float], ratio: float, dtype: str) -> list[Share]:
    """Split a coefficient-tuning problem among its nodes."""

    def select(part: Any, index: Array) -> tuple[Array, Array]:
        return part.features[index].astype(dtype), part.labels[index]

    dense = network.weights.toarray()
    return [
        Share(
            weights={j: float(dense[i, j]) for j in (i, *network.neighbours[i])},
            train=select(problem.samples.train, problem.train[i]), val=select(problem.samples.val, problem.val[i]),
            classes=problem.samples.classes, scale=problem.scale, steps=steps, ratio=ratio,
        )
        for i in range(problem.nodes)
    ]


class Node:
    """The data of one node, and the exchange of dense vectors."""

    def __init__(self, rank: int, share: Share) -> None:
        import torch
        import torch.distributed as dist

        self.torch: Any = torch
        self.dist: Any = dist
        self.rank, self.share, self.steps = rank, share, share.steps
        self.neighbours = [j for j in share.weights if j != rank]
        self.levels = [tuple(map(torch.from_numpy, level)) for level in (share.train, share.val)]
        features = self.levels[0][0]
        self.x = torch.zeros(features.shape[1], dtype=features.dtype)
        self.start_y = torch.zeros(features.shape[1] * share.classes, dtype=features.dtype)

    def round(self) -> None:
        raise NotImplementedError

    def cross_entropy(self, level: Any, w: Any) -> Any:
        features, labels = level
        p = self.torch.softmax(features @ w.view(-1, self.share.classes), dim=1)
        p[self.torch.arange(len(labels)), labels] -= 1
        return (features.T @ p / len(labels)).reshape(-1)

    def g_y(self, w: Any) -> Any:
        ridge = (2 * self.share.scale * self.torch.exp(self.x))[:, None] * w.view(-1, self.share.classes)
        return self.cross_entropy(self.levels[0], w) + ridge.reshape(-1)

    def mix(self, v: Any) -> Any:
        """Return Σ_j w_ij v_j of a dense vector."""
        received = {j: self.torch.empty_like(v) for j in self.neighbours}
        work = [self.dist.isend(v, j) for j in self.neighbours]
        work += [self.dist.irecv(received[j], j) for j in self.neighbours]
        for request in work:
            request.wait()
        mixed = self.share.weights[self.rank] * v
        for j in self.neighbours:
            mixed += self.share.weights[j] * received[j]
        return mixed


class C2dfbNode(Node):
    """The state of one node of C²DFB, and its rounds."""

    def __init__(self, rank: int, share: Share) -> None:
        super().__init__(rank, share)
        torch, d = self.torch, self.start_y
        self.k = max(1, int(share.ratio * len(d)))
        self.loops: list[list[Any]] = []
        for gradient in (self.h_y, self.g_y):
            grad = gradient(d)
            self.loops.append([gradient, d.clone(), grad.clone(), grad, *(torch.zeros_like(d) for _ in range(4))])
        self.u = self.upper()
        self.s = self.u.clone()

    def h_y(self, w: Any) -> Any:
        return self.cross_entropy(self.levels[1], w) / self.steps["lam"] + self.g_y(w)

    def upper(self) -> Any:
        y, z = (loop[1].view(-1, self.share.classes).square().sum(dim=1) for loop in self.loops)
        return self.steps["lam"] * self.share.scale * self.torch.exp(self.x) * (y - z)

    def send_residual(self, v: Any, hat: Any, w_hat: Any) -> None:
        """Send the largest entries of v − v̂; add all messages to v̂ and Σ_j w_ij v̂_j."""
        difference = v - hat
        at = self.torch.topk(difference.abs(), self.k, sorted=False).indices.to(self.torch.int32)
        values = difference[at]
        received = {j: (self.torch.empty_like(at), self.torch.empty_like(values)) for j in self.neighbours}
        work = [self.dist.isend(part, j) for j in self.neighbours for part in (at, values)]
        work += [self.dist.irecv(part, j) for j in self.neighbours for part in received[j]]
        for request in work:
            request.wait()
        hat.index_add_(0, at, values)
        w_hat.index_add_(0, at, values, alpha=self.share.weights[self.rank])
        for j, (positions, entries) in received.items():
            w_hat.index_add_(0, positions, entries, alpha=self.share.weights[j])

    def round(self) -> None:
        steps = self.steps
        wx, ws = self.mix(self.x), self.mix(self.s)
        self.x = self.x + steps["gamma_out"] * (wx - self.x) - steps["eta_out"] * self.s
        for loop in self.loops:
            gradient, d, tracker, grad, d_hat, s_hat, wd_hat, ws_hat = loop
            new = gradient(d)
            tracker += new - grad
            grad = new
            for _ in range(int(steps["inner_steps"])):
                d += steps["gamma_in"] * (wd_hat - d_hat) - steps["eta_in"] * tracker
                self.send_residual(d, d_hat, wd_hat)
                new = gradient(d)
                tracker += steps["gamma_in"] * (ws_hat - s_hat) + new - grad
                grad = new
                self.send_residual(tracker, s_hat, ws_hat)
            loop[3] = grad
        new = self.upper()
        self.s = self.s + steps["gamma_out"] * (ws - self.s) + new - self.u
        self.u = new


class DSobaNode(Node):
    """The state of one node of D-SOBA, and its rounds."""

    def __init__(self, rank: int, share: Share) -> None:
        super().__init__(rank, share)
        self.y, self.v, self.h = self.start_y, self.torch.zeros_like(self.start_y), self.torch.zeros_like(self.x)

    def round(self) -> None:
        torch, steps, classes = self.torch, self.steps, self.share.classes
        features, _ = self.levels[0]
        y, v = self.y.view(-1, classes), self.v.view(-1, classes)
        scale = 2 * self.share.scale * torch.exp(self.x)
        p, u = torch.softmax(features @ y, dim=1), features @ v
        curvature = p * u - p * (p * u).sum(dim=1, keepdim=True)
        product = features.T @ curvature / len(features) + scale[:, None] * v
        d_x = -scale * (y * v).sum(dim=1)
        d_v = product.reshape(-1) - self.cross_entropy(self.levels[1], self.y)
        d_y = self.g_y(self.y)
        self.x = self.mix(self.x - steps["eta_x"] * self.h)
        self.y = self.mix(self.y - steps["eta_y"] * d_y)
        self.v = self.mix(self.v - steps["eta_v"] * d_v)
        self.h = (1 - steps["theta"]) * self.h + steps["theta"] * d_x


def serve(rank: int, nodes: int, rendezvous: str, share: Share, commands: Connection) -> None:
    """Run the process of one node: receive numbers of rounds and run them, until the number is 0."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=nodes)
    node = DSobaNode(rank, share) if "theta" in share.steps else C2dfbNode(rank, share)
    while rounds := commands.recv():
        dist.barrier()
        start = time.perf_counter()
        for _ in range(rounds):
            node.round()
        commands.send(((time.perf_counter() - start) / rounds, node.x.numpy()))
    dist.destroy_process_group()


class Network:
    """The processes of all nodes."""

    def __init__(self, connections: list[Connection]) -> None:
        self._connections = connections

    def advance(self, rounds: int) -> tuple[float, Array]:
        """Run rounds; return the seconds per round of the slowest node, and all rows of x."""
        for connection in self._connections:
            connection.send(rounds)
        seconds, rows = zip(*(connection.recv() for connection in self._connections), strict=True)
        return max(seconds), np.stack(rows)


@contextmanager
def network(nodes: list[Share]) -> Iterator[Network]:
    """Start a process per node, and end all of them afterwards."""
    context: Any = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed"])    # ten imports of torch cost more than the rest
    processes: list[BaseProcess] = []
    connections: list[Connection] = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            for rank, share in enumerate(nodes):
                here, there = context.Pipe()
                process = context.Process(
                    target=serve, args=(rank, len(nodes), str(Path(folder) / "rendezvous"), share, there), daemon=True
                )
                process.start()
                there.close()
                processes.append(process)
                connections.append(here)
            yield Network(connections)
            for connection in connections:
                connection.send(0)
            for process in processes:
                process.join(timeout=20)
        finally:
            for process in processes:
                if process.is_alive():
                    process.terminate()
                process.join(timeout=5)
