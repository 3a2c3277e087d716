"""Every operation on sparse samples has an implementation for NumPy and one for torch, and they agree."""

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from scipy import sparse

from dbo.tasks.kernels import bag_of_words, interface, sparse_matrix

torch = pytest.importorskip("torch")
torch_bag_of_words = pytest.importorskip("dbo.tasks.kernels.torch_bag_of_words")

OPERATIONS = [name for name in vars(interface.DocumentKernels) if not name.startswith("_")]
DOCUMENTS, WORDS, CLASSES = 11, 17, 4


def make_arguments(name: str) -> list[Any]:
    """Return the arguments of an operation by the names of its parameters; a word and a document are empty."""
    rng = np.random.default_rng(7)

    def csr(rows: int, columns: int) -> Any:
        dense = rng.standard_normal((rows, columns))
        dense[np.abs(dense) < 1] = 0
        dense[3] = dense[:, 5] = 0
        return sparse.csr_array(dense)

    is_product = name == "scores"
    first, second = (csr(DOCUMENTS, WORDS), None) if is_product else (csr(WORDS, DOCUMENTS), csr(WORDS, DOCUMENTS))
    known: dict[str, Any] = {
        "labels": rng.integers(0, CLASSES, DOCUMENTS), "weight": 0.37,
        "s": 30 * rng.standard_normal((DOCUMENTS, CLASSES)), "ridge": rng.random(WORDS), "factor": rng.random(WORDS),
        "r": rng.standard_normal((DOCUMENTS, CLASSES)), "r2": rng.standard_normal((DOCUMENTS, CLASSES)),
        "w": rng.standard_normal((WORDS, CLASSES)),
        "v": rng.standard_normal((DOCUMENTS if name == "curvature_in_place" else WORDS, CLASSES)),
        "out": np.full({"scores": (DOCUMENTS, CLASSES), "row_products": (WORDS,)}.get(name, (WORDS, CLASSES)), np.nan),
    }
    for matrix, end in ((first, ""), (second, "2")):
        if matrix is not None:
            for part in ("indptr", "indices", "data"):
                known[part + end] = getattr(matrix, part)
    return [known[parameter] for parameter in parameters(name)]


def parameters(name: str) -> list[str]:
    """Return the parameters that the interface names; an operation without arguments here fails with a KeyError."""
    return [key for key in inspect.signature(getattr(interface.DocumentKernels, name)).parameters if key != "self"]


def to_torch(value: Any) -> Any:
    return torch.asarray(value.copy()) if isinstance(value, np.ndarray) else value


def find_twin(name: str) -> Callable[..., Any]:
    twin = getattr(torch_bag_of_words, name, None)
    assert twin is not None, f"{name} has no implementation in torch_bag_of_words"
    assert list(inspect.signature(twin).parameters) == parameters(name)
    return twin  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", OPERATIONS)
def test_twins_agree(name: str) -> None:
    """Results, and every argument that an operation writes into, agree to 1e-10."""
    ours = [value.copy() if isinstance(value, np.ndarray) else value for value in make_arguments(name)]
    theirs = [to_torch(value) for value in make_arguments(name)]
    returned = getattr(bag_of_words, name)(*ours), find_twin(name)(*theirs)
    before = make_arguments(name)
    written = [k for k, value in enumerate(before) if isinstance(value, np.ndarray) and not np.array_equal(
        value, ours[k], equal_nan=value.dtype.kind == "f")]
    assert written or returned[0] is not None
    scratch = name == "curvature_in_place"      # its scores are overwritten with anything
    for k in written:
        if not (scratch and parameters(name)[k] == "s"):
            np.testing.assert_allclose(theirs[k].numpy(), ours[k], rtol=1e-10, atol=1e-13)
    if returned[0] is not None:
        np.testing.assert_allclose(returned[1].numpy(), returned[0], rtol=1e-10)


def test_every_loop_is_an_operation() -> None:
    """A compiled loop that is added without a name in the interface, and so without a twin, is found."""
    loops = {name for name, value in vars(bag_of_words).items() if hasattr(value, "py_func")}
    assert {name for name in loops if not name.startswith("_")} == set(OPERATIONS)


def test_a_missing_twin_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: without its twin an operation fails."""
    monkeypatch.delattr(torch_bag_of_words, "gradient")
    with pytest.raises(AssertionError, match="gradient has no implementation in torch_bag_of_words"):
        test_twins_agree("gradient")


def test_the_type_of_an_array_decides() -> None:
    assert interface.documents_of(np.zeros(2)) is bag_of_words
    assert interface.documents_of(torch.zeros(2)) is torch_bag_of_words


@pytest.mark.parametrize("name", ["take_rows", "transpose"])
def test_matrices_have_twins(name: str) -> None:
    """The other functions of the package choose by type; they give the same matrix."""
    dense = np.random.default_rng(0).standard_normal((6, 9))
    dense[np.abs(dense) < 1] = 0
    a, more = sparse.csr_array(dense), (np.array([4, 0, 4]),) if name == "take_rows" else ()
    ours = getattr(sparse_matrix, name)(a, *more)
    theirs = getattr(sparse_matrix, name)(sparse_matrix.to_device(a, torch.asarray), *more)
    eye = np.eye(ours.shape[1])
    np.testing.assert_array_equal((theirs @ torch.asarray(eye)).numpy(), ours @ eye)
