"""A user's own samples in files: .npz, CSV and LIBSVM, and the one-line errors of files that are not as expected."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import sparse

from dbo.platform.config.experiment import Experiment
from dbo.platform.errors import InputError
from dbo.platform.runs.preparation import prepare
from dbo.platform.runs.runner import run
from dbo.tasks.datasets.arrays import Arrays
from dbo.tasks.datasets.csv import Csv
from dbo.tasks.datasets.libsvm import Libsvm

RNG = np.random.default_rng(0)
INPUTS = RNG.standard_normal((60, 4))
LABELS = np.arange(60) % 3


def write_npz(folder: Path, **arrays: Any) -> str:
    file = folder / "data.npz"
    np.savez(file, **arrays)
    return str(file)


def write_csv(folder: Path, text: str, name: str = "data.csv") -> str:
    (folder / name).write_text(text, encoding="utf-8")
    return str(folder / name)


def table(labels: Any = LABELS, inputs: Any = INPUTS, header: str = "a,b,c,d,kind\n", separator: str = ",") -> str:
    rows = zip(inputs, labels, strict=True)
    return header + "".join(separator.join([*map(repr, map(float, row)), str(label)]) + "\n" for row, label in rows)


def libsvm_text(labels: Any = LABELS, inputs: Any = INPUTS) -> str:
    return "".join(
        f"{label} " + " ".join(f"{k + 1}:{value!r}" for k, value in enumerate(map(float, row)) if value) + "\n"
        for row, label in zip(inputs, labels, strict=True)
    )


# ---- arrays ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("names", [("inputs", "labels"), ("features", "targets"), ("X", "y"), ("x", "y")])
def test_one_pair_of_arrays_is_split_three_ways(tmp_path: Path, names: tuple[str, str]) -> None:
    """Every sample is in one part, with its label; shares are those of every class."""
    file = write_npz(tmp_path, **dict(zip(names, (INPUTS, LABELS), strict=True)))
    split = Arrays(file=file, test_fraction=0.2, val_fraction=0.25).load(0, None)
    assert [len(part) for part in split.parts] == [36, 12, 12]
    assert split.classes == 3
    rows = np.concatenate([np.c_[part.features, part.labels] for part in split.parts])
    np.testing.assert_array_equal(rows[np.lexsort(rows.T)], (t := np.c_[INPUTS, LABELS])[np.lexsort(t.T)])


@pytest.mark.parametrize("spelling", ["{part}_{name}", "{name}_{part}"])
def test_given_parts_are_kept(tmp_path: Path, spelling: str) -> None:
    """train, val and test arrays are the three parts; without val a share of train becomes it."""
    cuts = {"train": slice(0, 30), "val": slice(30, 45), "test": slice(45, 60)}
    arrays = {
        spelling.format(part=part, name=name): array[cut]
        for part, cut in cuts.items() for name, array in (("inputs", INPUTS), ("labels", LABELS))
    }
    split = Arrays(file=write_npz(tmp_path, **arrays)).load(0, None)
    for part, cut in zip(split.parts, cuts.values(), strict=True):
        np.testing.assert_array_equal(part.features, INPUTS[cut])
        np.testing.assert_array_equal(part.labels, LABELS[cut])
    without = {name: array for name, array in arrays.items() if "val" not in name}
    split = Arrays(file=write_npz(tmp_path, **without), val_fraction=0.2).load(0, None)
    assert [len(part) for part in split.parts] == [24, 6, 15]


def test_images_become_rows(tmp_path: Path) -> None:
    """(samples, 2, 2) bytes are rows of four floats."""
    images = RNG.integers(256, size=(60, 2, 2)).astype(np.uint8)
    split = Arrays(file=write_npz(tmp_path, inputs=images, labels=LABELS)).load(0, None)
    assert split.train.features.shape[1:] == (4,)
    assert split.train.features.dtype == np.float64


def test_standard_scaling_is_fitted_on_train_and_val(tmp_path: Path) -> None:
    """Mean 0 and deviation 1 there; a constant feature becomes 0; the test part is not used."""
    inputs = np.c_[5 + 3 * INPUTS, np.full(60, 7.0)]
    split = Arrays(file=write_npz(tmp_path, inputs=inputs, labels=LABELS), scaling="standard").load(0, None)
    known = np.concatenate([split.train.features, split.val.features])
    np.testing.assert_allclose(known.mean(axis=0), 0, atol=1e-12)
    np.testing.assert_allclose(known.std(axis=0), [1, 1, 1, 1, 0], atol=1e-12)
    assert abs(split.test.features[:, 0].mean()) > 1e-6


BAD_ARRAYS: dict[str, tuple[dict[str, Any], str]] = {
    "no labels": ({"inputs": INPUTS}, "has inputs, but no labels"),
    "no arrays": ({"a": INPUTS}, "has a; must have the arrays inputs and labels"),
    "no test part": ({"train_x": INPUTS, "train_y": LABELS, "val_x": INPUTS, "val_y": LABELS}, "but no test_inputs"),
    "only a test part": ({"test_x": INPUTS, "test_y": LABELS}, "but no train_inputs"),
    "NaN": ({"inputs": np.full((60, 4), np.nan), "labels": LABELS}, "inputs contains NaN or inf"),
    "NaN label": ({"inputs": INPUTS, "labels": np.full(60, np.nan)}, "a label that is NaN"),
    "one class": ({"inputs": INPUTS, "labels": np.ones(60)}, "only the class 1.0; must have at least two"),
    "no class": ({"inputs": INPUTS, "labels": INPUTS[:, 0]}, "must be a class"),
    "other counts": ({"inputs": INPUTS, "labels": LABELS[:50]}, "must be as many"),
    "one-hot labels": ({"inputs": INPUTS, "labels": np.eye(3)[LABELS]}, r"labels of shape \(60, 3\)"),
    "flat": ({"inputs": INPUTS[:, 0], "labels": LABELS}, r"has shape \(60,\); must be \(samples, features\)"),
    "texts": ({"inputs": INPUTS.astype(str), "labels": LABELS}, "must be numbers"),
    "other widths": (
        {"train_x": INPUTS, "train_y": LABELS, "test_x": INPUTS[:, :2], "test_y": LABELS}, "features; must be as many"),
    "objects": ({"inputs": INPUTS, "labels": np.array([None] * 60)}, "not a NumPy archive without objects"),
}


@pytest.mark.parametrize("case", BAD_ARRAYS)
def test_wrong_arrays_are_a_one_line_error(tmp_path: Path, case: str) -> None:
    """The message starts with the key and names the mistake."""
    arrays, message = BAD_ARRAYS[case]
    with pytest.raises(ValueError, match=rf"^task\.file: [^\n]*{message}[^\n]*$"):
        Arrays(file=write_npz(tmp_path, **arrays)).load(0, None)


def single_array() -> bytes:
    """Return what np.save writes."""
    stream = io.BytesIO()
    np.save(stream, INPUTS)
    return stream.getvalue()


@pytest.mark.parametrize("content", [b"", b"hunter2", b"PK\x03\x04damaged", single_array()])
def test_a_file_that_is_no_archive_is_refused(tmp_path: Path, content: bytes) -> None:
    """Without a traceback, whatever it contains."""
    (tmp_path / "data.npz").write_bytes(content)
    with pytest.raises(ValueError, match=r"^task\.file: [^\n]*not a NumPy archive[^\n]*$"):
        Arrays(file=str(tmp_path / "data.npz")).load(0, None)


# ---- csv -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("separator", [",", ";", "\t"])
@pytest.mark.parametrize("label", ["kind", -1, 4])
def test_csv_with_header(tmp_path: Path, separator: str, label: str | int) -> None:
    """The label column is found by name or number, the others are the features."""
    file = write_csv(tmp_path, table(header=separator.join("abcd") + f"{separator}kind\n", separator=separator))
    split = Csv(file=file, label=label).load(0, None)
    expected = Arrays(file=write_npz(tmp_path, inputs=INPUTS, labels=LABELS)).load(0, None)
    assert split.describe()["data_sha256"] == expected.describe()["data_sha256"]


def test_csv_without_header(tmp_path: Path) -> None:
    """A first line with a number is a sample; columns are known by their numbers."""
    file = write_csv(tmp_path, table(header="", labels=[f"kind {label}" for label in LABELS]))
    split = Csv(file=file).load(0, None)
    assert sum(len(part) for part in split.parts) == 60
    assert split.classes == 3
    reordered = write_csv(tmp_path, table(header="", labels=INPUTS[:, 3], inputs=np.c_[LABELS, INPUTS[:, :3]]))
    np.testing.assert_array_equal(Csv(file=reordered, label=0).load(0, None).train.labels, split.train.labels)


def test_numeric_labels_are_ordered_as_numbers(tmp_path: Path) -> None:
    """10 follows 9, where texts would put it before."""
    labels = np.where(LABELS == 2, 10, 8 + LABELS)
    split = Csv(file=write_csv(tmp_path, table(labels))).load(0, None)
    expected = Csv(file=write_csv(tmp_path, table())).load(0, None)
    np.testing.assert_array_equal(split.test.labels, expected.test.labels)


def test_a_test_file_is_the_test_part(tmp_path: Path) -> None:
    """All of it, and nothing of the other file."""
    test = write_csv(tmp_path, table(LABELS[:9], INPUTS[:9]), "test.csv")
    split = Csv(file=write_csv(tmp_path, table()), test_file=test).load(0, None)
    np.testing.assert_array_equal(split.test.features, INPUTS[:9])
    assert len(split.train) + len(split.val) == 60


BAD_TABLES = {
    "empty": ("", "is empty"),
    "only a header": ("a,b,kind\n", "a header and no samples"),
    "text": ("a,b,kind\n1,2,0\n1,red,1\n", "line 3, column b: 'red' is not a number"),
    "empty cell": ("a,b,kind\n1,2,0\n1,,1\n", "line 3, column b: an empty cell is not a number"),
    "NaN": ("a,b,kind\n1,2,0\n1,nan,1\n", "line 3, column b: nan is not allowed; must be finite"),
    "empty label": ("a,b,kind\n1,2,0\n1,2,\n", "line 3: the label is empty"),
    "short line": ("a,b,kind\n1,2,0\n1,1\n", "line 3: 2 columns; must be 3"),
    "one column": ("kind\n0\n1\n", "has a single column"),
    "a label that is no class": ("a,kind\n1,4\n2,6\n3,7\n4,8\n", "4 classes in 4 samples; is it the right label"),
    "one class": ("a,b,kind\n1,2,0\n1,2,0\n", "only the class 0"),
    "real label": ("a,b,kind\n1,2,0.5\n1,2,0\n", "has the label 0.5; must be a class"),
}


@pytest.mark.parametrize("case", BAD_TABLES)
def test_wrong_tables_are_a_one_line_error(tmp_path: Path, case: str) -> None:
    """The message names the line and the column."""
    text, message = BAD_TABLES[case]
    with pytest.raises(ValueError, match=rf"^task\.file: [^\n]*{message}[^\n]*$"):
        Csv(file=write_csv(tmp_path, text)).load(0, None)


def test_a_wrong_column_is_a_one_line_error(tmp_path: Path) -> None:
    """The columns that there are, by name and by number."""
    file = write_csv(tmp_path, table())
    for label in ("sort", 5, -6):
        with pytest.raises(ValueError, match=r"^task\.label: .* is not a column of .*; columns: a, b, c, d, kind, or"):
            Csv(file=file, label=label).load(0, None)
    narrow = write_csv(tmp_path, "a,kind\n1,0\n2,1\n", "test.csv")
    with pytest.raises(ValueError, match=r"^task\.test_file: .* has 1 features, .* has 4$"):
        Csv(file=file, label="kind", test_file=narrow).load(0, None)


def test_a_binary_file_is_no_table(tmp_path: Path) -> None:
    """Bytes that are no text are refused, not quoted."""
    (tmp_path / "data.csv").write_bytes(b"\xff\xfehunter2\x00")
    with pytest.raises(ValueError, match=r"^task\.file: [^\n]*is not a text table") as error:
        Csv(file=str(tmp_path / "data.csv")).load(0, None)
    assert "hunter2" not in str(error.value)


# ---- libsvm ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("labels", [LABELS, LABELS * 5 - 7, np.where(LABELS > 0, 1, -1), np.minimum(LABELS, 1)])
def test_libsvm_labels_are_numbered(tmp_path: Path, labels: Any) -> None:
    """0/1, −1/+1 and any whole numbers become 0 … C−1, in their order."""
    inputs = INPUTS * (RNG.random(INPUTS.shape) < 0.5)
    file = write_csv(tmp_path, libsvm_text(labels, inputs), "data.txt")
    split = Libsvm(file=file).load(0, None)
    expected = Arrays(file=write_npz(tmp_path, inputs=inputs, labels=labels)).load(0, None)
    assert split.classes == len(np.unique(labels))
    for part, other in zip(split.parts, expected.parts, strict=True):
        assert isinstance(part.features, sparse.csr_array)
        np.testing.assert_array_equal(part.features.toarray(), other.features)
        np.testing.assert_array_equal(part.labels, other.labels)
    np.testing.assert_array_equal(Libsvm(file=file, dense=True).load(0, None).val.features, expected.val.features)


def test_libsvm_test_file_has_the_same_features(tmp_path: Path) -> None:
    """Although its last feature is 0 everywhere."""
    inputs = INPUTS.copy()
    inputs[:9, 3] = 0
    test = write_csv(tmp_path, libsvm_text(LABELS[:9], inputs[:9]), "test.txt")
    split = Libsvm(file=write_csv(tmp_path, libsvm_text(), "data.txt"), test_file=test, dense=True).load(0, None)
    np.testing.assert_array_equal(split.test.features, inputs[:9])


@pytest.mark.parametrize(
    "text", ["hunter2\n", "1 a:b\n", "1 1:nan\n0 1:2\n", "0 1:1\n0 1:2\n", "", "1 999999999:1\n0 1:1\n"]
)
def test_wrong_libsvm_files_are_a_one_line_error(tmp_path: Path, text: str) -> None:
    """Not the format, NaN, one class, no sample, an index that is too large."""
    with pytest.raises(ValueError, match=r"^task\.file: [^\n]*must [^\n]*$"):
        Libsvm(file=write_csv(tmp_path, text, "data.txt")).load(0, None)


# ---- in experiments --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Arrays, Csv, Libsvm])
def test_a_missing_file_is_a_one_line_error(tmp_path: Path, kind: Any) -> None:
    """A file that does not exist, and a folder."""
    with pytest.raises(ValueError, match=r"^task\.file: .*/missing does not exist; must be a file$"):
        kind(file=str(tmp_path / "missing")).load(0, None)
    with pytest.raises(ValueError, match=r"^task\.file: .* is a folder; must be a file$"):
        kind(file=str(tmp_path)).load(0, None)


def test_files_are_relative_to_the_experiment_and_part_of_the_run_key(tmp_path: Path) -> None:
    """Beside the YAML file, wherever the command runs; another content is another run, another path is not."""
    write_csv(tmp_path, table())
    (tmp_path / "e.yaml").write_text(
        "task: {name: coefficient_tuning, dataset: {name: csv, file: data.csv, label: kind}}\n")
    experiment = Experiment.read(tmp_path / "e.yaml", ["nodes=3"])
    assert experiment.task["file"] == str(tmp_path / "data.csv")
    assert prepare(experiment).problem.dim_x == 4
    key = experiment.run_key
    (tmp_path / "elsewhere").mkdir()
    other = write_csv(tmp_path / "elsewhere", table())
    assert Experiment.read(tmp_path / "e.yaml", ["nodes=3", f"task.dataset.file={other}"]).run_key == key
    write_csv(tmp_path, table(1 - np.minimum(LABELS, 1)))
    assert Experiment.read(tmp_path / "e.yaml", ["nodes=3"]).run_key != key


def test_a_run_on_own_data_learns(tmp_path: Path) -> None:
    """The labels are a function of the inputs: the accuracy is far above chance."""
    inputs = RNG.standard_normal((400, 4))
    write_npz(tmp_path, inputs=inputs, labels=(inputs[:, 0] + inputs[:, 1] > 0).astype(int))
    result = run(Experiment(
        nodes=3, rounds=10, engine={"name": "local"}, partition={"name": "iid"}, tracking={"uri": "off"},
        task={"name": "coefficient_tuning", "dataset": "arrays", "file": str(tmp_path / "data.npz")},
    ), tmp_path / "run")
    assert result.history["test_accuracy"].iloc[-1] > 0.85


def test_a_task_that_needs_dense_features_names_the_parameter(tmp_path: Path) -> None:
    """Sparse LIBSVM features are refused by hyper_representation, `dense: true` is accepted."""
    file = write_csv(tmp_path, libsvm_text(), "data.txt")
    task = {"name": "hyper_representation", "dataset": "libsvm", "file": file}
    with pytest.raises(InputError, match=r"^task\.dataset: .*needs dense features.*dense: true$"):
        prepare(Experiment(nodes=3, task=task))
    assert prepare(Experiment(nodes=3, task={**task, "dense": True})).problem.nodes == 3


@pytest.mark.parametrize("content", ["hunter2\n", "hunter2 1:1\n", "1 hunter2:1\n", "1 1:hunter2\n"])
def test_a_token_named_by_mistake_is_not_quoted(tmp_path: Path, content: str) -> None:
    """`task.file` that names a secret: the error has the file's name, not its content."""
    file = write_csv(tmp_path, content, "token")
    for kind in (Csv(file=file, label="kind"), Libsvm(file=file)):
        with pytest.raises(ValueError, match="token") as error:
            kind.load(0, None)
        assert "hunter2" not in str(error.value)
