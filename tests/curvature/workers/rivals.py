"""Results of PyHessian and curvlinops for a perceptron; for an interpreter that has PyTorch.

``rivals.py FILE``: an npz file with x, y, and the kernels and biases k0, b0, k1, ...
"""

from __future__ import annotations

import itertools
import json
import sys

import numpy as np
import pyhessian
import torch
from curvlinops import HessianLinearOperator
from scipy.sparse.linalg import eigsh

TOP = 5


def perceptron(held: np.lib.npyio.NpzFile) -> torch.nn.Module:
    """Dense layers with tanh between them."""
    layers: list[torch.nn.Module] = []
    for i in itertools.takewhile(lambda i: f"k{i}" in held, itertools.count()):
        rows, columns = held[f"k{i}"].shape
        layer = torch.nn.Linear(rows, columns)
        with torch.no_grad():
            layer.weight.copy_(torch.tensor(held[f"k{i}"].T))
            layer.bias.copy_(torch.tensor(held[f"b{i}"]))
        layers += [layer, torch.nn.Tanh()]
    return torch.nn.Sequential(*layers[:-1])


if __name__ == "__main__":
    torch.manual_seed(0)
    given = np.load(sys.argv[1])
    net, loss = perceptron(given), torch.nn.CrossEntropyLoss()
    data = torch.tensor(given["x"]), torch.tensor(given["y"])
    of_pyhessian = pyhessian.hessian(net, loss, data=data, cuda=False)
    operator = HessianLinearOperator(net, loss, list(net.parameters()), [data])
    of_curvlinops = eigsh(operator.to_scipy(), TOP, which="LA", return_eigenvectors=False)
    found = {
        "pyhessian": of_pyhessian.eigenvalues(maxIter=2000, tol=1e-7, top_n=TOP)[0],
        "curvlinops": sorted(map(float, of_curvlinops), reverse=True),
        "trace": np.trace(operator.to_scipy() @ np.eye(operator.shape[0], dtype=np.float32)).item(),
    }
    print("FOUND", json.dumps(found), flush=True)
