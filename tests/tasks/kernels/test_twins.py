"""Every operation on samples has an implementation for NumPy and one for torch, and they agree."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import sparse

from dbo.tasks.kernels import bag_of_words, gathered_products, interface, sparse_matrix

torch = pytest.importorskip("torch")
torch_bag_of_words = pytest.importorskip("dbo.tasks.kernels.torch_bag_of_words")
torch_gathered_products = pytest.importorskip("dbo.tasks.kernels.torch_gathered_products")

FAMILIES: dict[Any, tuple[Any, Any]] = {
    interface.DocumentKernels: (bag_of_words, torch_bag_of_words),
    interface.ProductKernels: (gathered_products, torch_gathered_products),
}
OPERATIONS = [(family, name) for family in FAMILIES for name in vars(family) if not name.startswith("_")]
DOCUMENTS, WORDS, CLASSES = 11, 17, 4
NODES, SIZE, SAMPLES, WIDTH, FIRST = 3, 5, 20, 8, 2      # 8 numbers in float64 fill a register
every_operation = pytest.mark.parametrize(("family", "name"), OPERATIONS, ids=[name for _, name in OPERATIONS])


def make_arguments(family: Any, name: str) -> list[Any]:
    """Return the arguments of an operation by the names of its parameters, which the interface has.

    An operation without arguments here fails with a KeyError.
    """
    known = make_layer(name) if family is interface.ProductKernels else make_documents(name)
    return [known[parameter] for parameter in parameters(family, name)]


def make_layer(name: str) -> dict[str, Any]:
    """Return batches of three nodes, of which the last two are asked for, and a layer of as many inputs as outputs."""
    rng = np.random.default_rng(7)
    is_back = name == "multiply_back"
    at = np.arange(NODES * SIZE)[::-1].reshape(NODES, SIZE)
    d = rng.standard_normal((NODES * SIZE, WIDTH))
    return {
        "rows": rng.standard_normal((SAMPLES, WIDTH)),
        "at": at.copy() if is_back else rng.integers(0, SAMPLES, at.shape),
        "x": rng.standard_normal((NODES, FIRST + (WIDTH + 1) * WIDTH)), "first": FIRST, "least": 0.0, "to": at.copy(),
        "d": d, "activations": rng.standard_normal(d.shape), "start": 1, "stop": NODES,
        "out": np.full((NODES, FIRST + (WIDTH + 1) * WIDTH) if name == "multiply_transposed" else d.shape, np.nan),
    }


def make_documents(name: str) -> dict[str, Any]:
    """Return sparse matrices and what is multiplied with them; a word and a document are empty."""
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
    return known


def parameters(family: Any, name: str) -> list[str]:
    return [key for key in inspect.signature(getattr(family, name)).parameters if key != "self"]


def to_torch(value: Any) -> Any:
    return torch.asarray(value.copy()) if isinstance(value, np.ndarray) else value


def find_twin(family: Any, name: str) -> Callable[..., Any]:
    module = FAMILIES[family][1]
    twin = getattr(module, name, None)
    assert twin is not None, f"{name} has no implementation in {module.__name__.rpartition('.')[2]}"
    assert list(inspect.signature(twin).parameters) == parameters(family, name)
    return twin  # type: ignore[no-any-return]


@every_operation
def test_twins_agree(family: Any, name: str) -> None:
    """Results, and every argument that an operation writes into, agree to 1e-10."""
    if family is interface.ProductKernels and not gathered_products.suits((WIDTH,), np.dtype(float)):
        pytest.skip("needs AVX-512")
    ours = [value.copy() if isinstance(value, np.ndarray) else value for value in make_arguments(family, name)]
    theirs = [to_torch(value) for value in make_arguments(family, name)]
    returned = getattr(FAMILIES[family][0], name)(*ours), find_twin(family, name)(*theirs)
    before = make_arguments(family, name)
    written = [k for k, value in enumerate(before) if isinstance(value, np.ndarray) and not np.array_equal(
        value, ours[k], equal_nan=value.dtype.kind == "f")]
    assert written or returned[0] is not None
    scratch = name == "curvature_in_place"      # its scores are overwritten with anything
    for k in written:
        if not (scratch and parameters(family, name)[k] == "s"):
            np.testing.assert_allclose(theirs[k].numpy(), ours[k], rtol=1e-10, atol=1e-13)
    if returned[0] is not None:
        np.testing.assert_allclose(returned[1].numpy(), returned[0], rtol=1e-10)


def test_every_loop_is_an_operation() -> None:
    """A compiled loop that is added without a name in the interface, and so without a twin, is found."""
    for family, (module, _) in FAMILIES.items():
        loops = {name for name, value in vars(module).items() if hasattr(value, "py_func")}
        assert {name for name in loops if not name.startswith("_")} == {name for of, name in OPERATIONS if of is family}


def test_every_module_with_loops_is_a_family() -> None:
    """A module of compiled loops that no family has is found."""
    folder = Path(interface.__file__).parent
    with_loops = {file.stem for file in folder.glob("*.py") if "\n@compiled\n" in file.read_text(encoding="utf-8")}
    assert with_loops == {module.__name__.rpartition(".")[2] for module, _ in FAMILIES.values()}


def test_a_missing_twin_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: without its twin an operation fails."""
    monkeypatch.delattr(torch_bag_of_words, "gradient")
    with pytest.raises(AssertionError, match="gradient has no implementation in torch_bag_of_words"):
        test_twins_agree(interface.DocumentKernels, "gradient")


def test_the_type_of_an_array_decides() -> None:
    assert interface.documents_of(np.zeros(2)) is bag_of_words
    assert interface.documents_of(torch.zeros(2)) is torch_bag_of_words
    assert interface.products_of(np.zeros(2)) is gathered_products
    assert interface.products_of(torch.zeros(2)) is torch_gathered_products


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
