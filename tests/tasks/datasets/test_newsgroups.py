"""20 Newsgroups: splits, scaling and sources, on generated messages and, if available, on the real ones."""

import pickle
import zlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import sparse
from sklearn.feature_extraction.text import TfidfTransformer
from sklearn.preprocessing import MaxAbsScaler
from sklearn.utils import Bunch

from dbo.platform.config.experiment import Experiment
from dbo.platform.errors import InputError
from dbo.platform.runs.runner import prepare, run
from dbo.tasks.api import Split
from dbo.tasks.datasets import newsgroups
from dbo.tasks.datasets.newsgroups import Newsgroups

Rows = Callable[..., Counter[tuple[int, bytes, bytes]]]
MESSAGES = "20news-bydate_py3.pkz"
WORDS = 90


def write_messages(data_dir: Path, seed: int = 0) -> None:
    """Write generated messages, 20 + 12 of each of 20 groups, to the file that scikit-learn leaves after a download."""
    rng = np.random.default_rng(seed)

    def subset(each: int) -> Bunch:
        target = np.repeat(np.arange(20), each)
        texts = []
        for label in target:
            words = [f"common{w:02d}" for w in rng.integers(WORDS - 20, size=25)] + [f"topic{label:02d}"] * 3
            texts.append("From: somebody\nSubject: header words\n\n" + " ".join(words))
        names = [f"group.{c:02d}" for c in range(20)]
        files = np.array([f"{names[c]}/{i}" for i, c in enumerate(target)])
        return Bunch(data=texts, target=target, target_names=names, filenames=files, DESCR="generated")

    (data_dir / "scikit_learn_data").mkdir(parents=True, exist_ok=True)
    content = pickle.dumps({"train": subset(20), "test": subset(12)})
    (data_dir / "scikit_learn_data" / MESSAGES).write_bytes(zlib.compress(content))


@pytest.fixture
def generated(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return a data_dir with generated messages."""
    monkeypatch.setattr(newsgroups, "FEATURES", WORDS)
    write_messages(tmp_path / "data")
    return str(tmp_path / "data")


def equal(a: Split, b: Split) -> bool:
    return bool(a.describe()["data_sha256"] == b.describe()["data_sha256"])


# ---- generated messages ----------------------------------------------------------------------------------------------


def test_random_split_is_stratified_and_loses_nothing(generated: str, count_rows: Rows) -> None:
    """A fifth of every group is for testing, the rest is halved; the parts contain every official message once."""
    samples = Newsgroups(scaling="none").load(0, generated)
    early, late = newsgroups._load_messages(generated)
    assert count_rows(*samples.parts) == count_rows(early, late)
    train, val, test = (np.bincount(part.labels, minlength=20) for part in samples.parts)
    assert np.all(test == 6)    # of 32
    assert np.all(train == 13)
    assert np.all(val == 13)
    for part in samples.parts:
        assert isinstance(part.features, sparse.csr_array)
        assert part.features.dtype == np.float32
        assert part.features.has_sorted_indices
        np.testing.assert_allclose(part.features.multiply(part.features).sum(axis=1), 1.0, rtol=1e-5)


def test_split_by_date_tests_on_the_later_messages(generated: str, count_rows: Rows) -> None:
    """The test part is the official one, whatever the seed; the other messages are split by val_fraction."""
    early, late = newsgroups._load_messages(generated)
    for seed in (0, 1):
        samples = Newsgroups(split="bydate", scaling="none", val_fraction=0.25).load(seed, generated)
        assert count_rows(samples.test) == count_rows(late)
        assert count_rows(samples.train, samples.val) == count_rows(early)
        assert np.all(np.bincount(samples.val.labels) == 5)


@pytest.mark.parametrize("split", ["random", "bydate"])
@pytest.mark.parametrize("scaling", ["maxabs", "tfidf"])
def test_scaling_is_that_of_scikit_learn_fitted_without_the_test_part(generated: str, split: Any, scaling: Any) -> None:
    """Weights come from the messages of both levels and are applied unchanged to the test part."""
    plain = Newsgroups(split=split, scaling="none").load(0, generated)
    scaled = Newsgroups(split=split, scaling=scaling).load(0, generated)
    model = MaxAbsScaler() if scaling == "maxabs" else TfidfTransformer()
    model.fit(sparse.vstack([plain.train.features, plain.val.features]))
    for before, after in zip(plain.parts, scaled.parts, strict=True):
        assert after.features.dtype == np.float32
        np.testing.assert_allclose(
            sparse.csr_array(after.features).toarray(), model.transform(before.features).toarray(), rtol=1e-5
        )


def test_words_that_occur_only_in_the_test_part_keep_their_weight() -> None:
    """A column without entries on both levels is not divided by zero."""
    features = [sparse.csr_array(np.array([row], dtype=np.float32)) for row in ([0.5, 0], [0.25, 0], [1, 0.3])]
    parts = [newsgroups.Part(a, np.zeros(1, dtype=np.int64)) for a in features]
    scaled = newsgroups.scale_words(Split(*parts, 1), "maxabs")    # type: ignore[call-arg,arg-type]
    np.testing.assert_allclose(sparse.csr_array(scaled.test.features).toarray(), [[2, 0.3]])
    np.testing.assert_allclose(sparse.csr_array(scaled.val.features).toarray(), [[0.5, 0]])


@pytest.mark.parametrize("split", ["random", "bydate"])
def test_fewer_documents_keep_the_shares_of_the_groups(generated: str, split: Any) -> None:
    """`documents` limits all parts together; groups stay balanced and the vocabulary whole."""
    samples = Newsgroups(split=split, documents=320).load(0, generated)
    assert sum(len(part) for part in samples.parts) == 320
    assert np.all(np.bincount(np.concatenate([part.labels for part in samples.parts])) == 16)
    assert samples.train.features.shape[1] == WORDS


def test_a_second_start_reads_the_cache(generated: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loader is not called again, not even for another seed or scaling; the samples are the same."""
    fresh = Newsgroups().load(0, generated)
    monkeypatch.setattr("sklearn.datasets.fetch_20newsgroups_vectorized", None)
    assert equal(Newsgroups().load(0, generated), fresh)
    assert not equal(Newsgroups().load(1, generated), fresh)
    Newsgroups(scaling="tfidf", split="bydate").load(0, generated)
    assert len(list(cache.iterdir())) == 1


def test_damaged_cache_is_rebuilt(generated: str, cache: Path) -> None:
    """A truncated file is ignored."""
    fresh = Newsgroups().load(0, generated)
    (file,) = cache.iterdir()
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    assert equal(Newsgroups().load(0, generated), fresh)


def test_other_messages_are_detected(generated: str) -> None:
    """New files in the same folder replace the cached arrays of the old ones."""
    first = Newsgroups().load(0, generated)
    write_messages(Path(generated), seed=1)
    assert not equal(Newsgroups().load(0, generated), first)


def test_data_dir_is_only_read_and_nothing_is_downloaded(generated: str, attempts: list[str]) -> None:
    """No file is added or changed, no connection is tried."""
    before = {file: file.read_bytes() for file in Path(generated).rglob("*") if file.is_file()}
    Newsgroups().load(0, generated)
    assert {file: file.read_bytes() for file in Path(generated).rglob("*") if file.is_file()} == before
    assert attempts == []


def test_missing_messages_are_a_one_line_error(tmp_path: Path, cache: Path, attempts: list[str]) -> None:
    """For a data_dir without the file, an input error names the fix, without using the network."""
    task = {"name": "coefficient_tuning", "dataset": "newsgroups"}
    with pytest.raises(InputError, match=rf"^data_dir: {tmp_path} has no scikit_learn_data/{MESSAGES}; .*$"):
        prepare(Experiment(task=task, data_dir=str(tmp_path)))
    assert attempts == []


def test_unreadable_messages_are_a_one_line_error(
    generated: str, attempts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """A damaged file in data_dir is an error, not a reason to download, and the loader's own output is not shown."""
    (Path(generated) / "scikit_learn_data" / MESSAGES).write_bytes(b"not a pickle")
    with pytest.raises(ValueError, match=rf"^data_dir: scikit-learn cannot read its {MESSAGES}: .*$"):
        Newsgroups().load(0, generated)
    assert attempts == []
    assert capsys.readouterr().out == ""


def test_missing_network_is_a_one_line_error(
    tmp_path: Path, cache: Path, attempts: list[str],
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:
    """Without files and network, a one-line error names both remedies, after a notice about the download."""
    monkeypatch.setenv("SCIKIT_LEARN_DATA", str(tmp_path / "own"))
    with pytest.raises(ValueError, match=r"^task\.dataset: newsgroups is not in .* go online, or set data_dir=.*$"):
        Newsgroups().load(0, None)
    assert attempts
    assert "downloading 20 Newsgroups (14 MB)" in capsys.readouterr().err


def test_sklearn_folder_is_used_without_data_dir(
    generated: str, attempts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An existing download is found in scikit-learn's folder."""
    monkeypatch.setenv("SCIKIT_LEARN_DATA", str(Path(generated) / "scikit_learn_data"))
    own = Newsgroups().load(0, None)
    assert equal(own, Newsgroups().load(0, generated))
    assert attempts == []


def test_another_vocabulary_is_refused(generated: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of features is part of the data set's definition."""
    monkeypatch.setattr(newsgroups, "FEATURES", 101_631)
    with pytest.raises(ValueError, match=rf"newsgroups has 101,631 features, but the files in .* give {WORDS}"):
        Newsgroups().load(0, generated)


# ---- real messages ---------------------------------------------------------------------------------------------------


@pytest.fixture
def real(require: Callable[[str, bool], None], shared_data: Path, module_cache: Path) -> str:
    require("data", (shared_data / "scikit_learn_data" / MESSAGES).exists())
    return str(shared_data)


def test_real_messages(real: str, attempts: list[str], count_rows: Rows) -> None:
    """11,314 + 7,532 messages, 101,631 words, 20 groups; each message in one part; cached arrays are bit-identical."""
    early, late = newsgroups._load_messages(real)
    for fresh, cached in zip((early, late), newsgroups._load_messages(real), strict=True):
        for a, b in zip(fresh.arrays(), cached.arrays(), strict=True):
            np.testing.assert_array_equal(a, b)
    assert early.features.shape == (11_314, 101_631)
    assert late.features.shape == (7_532, 101_631)
    samples = Newsgroups(scaling="none").load(0, real)
    assert count_rows(*samples.parts) == count_rows(early, late)
    every = np.bincount(np.concatenate([early.labels, late.labels]))
    assert len(every) == 20
    assert (every.min(), every.max()) == (628, 999)
    train, val, test = (np.bincount(part.labels) for part in samples.parts)
    assert np.all(np.abs(test - 0.2 * every) <= 0.5)
    assert np.all(np.abs(train - val) <= 1)
    assert len(Newsgroups(split="bydate").load(0, real).test) == 7_532
    assert attempts == []


def test_real_messages_are_learnt(real: str, tmp_path: Path) -> None:
    """A few rounds on a slice of the messages lower the loss and are better than chance (one in twenty)."""
    result = run(Experiment(
        nodes=2, rounds=2, data_dir=real, engine={"name": "local"},
        task={"name": "coefficient_tuning", "dataset": "newsgroups", "documents": 600},
        algorithm={"name": "c2dfb", "inner_steps": 2},
    ), tmp_path / "run")
    assert result.status == "finished"
    history = result.history
    assert history["upper_loss"].iloc[-1] < history["upper_loss"].iloc[0]
    assert history["test_accuracy"].iloc[-1] > 0.1, history
    assert result.state["x"].shape == (2, 101_631)
