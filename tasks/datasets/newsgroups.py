"""Load 20 Newsgroups, messages of 20 discussion groups as word counts, with scikit-learn.

Headers, footers and quotes are removed, which leaves 101,631 words; the vocabulary is that of the official training
messages. Every row of counts has unit length. `scaling` then weights the words by statistics of the messages of both
levels, never of the test messages. With statistics of the lower level alone, words that are rare there would have
values a thousand times larger on the upper level.
"""

import io
import os
import tempfile
import warnings
from collections.abc import Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
from scipy import sparse

from dbo.tasks.api import Array, DataSize, Part, Split, dataset, param
from dbo.tasks.datasets.cache import load_or_build
from dbo.tasks.datasets.splits import split_three_ways, split_two_ways, subsample
from dbo.tasks.notices import print_notice

FEATURES = 101_631
CLASSES = 20
TEST_FRACTION = 0.2

_PREPARATION = "1"    # increase it with every change of the cached arrays
_REMOVE = ("headers", "footers", "quotes")
_MESSAGES = "20news-bydate_py3.pkz"
_COUNTS = "20newsgroup_vectorizedremove-headers-footers-quotes_py3.pkl"    # scikit-learn writes it if it is missing


@dataset("newsgroups")
@dataclass(frozen=True, slots=True, kw_only=True)
class Newsgroups:
    """18,846 messages of 20 newsgroups, 101,631 word counts each, without headers, footers and quotes."""

    sparse_features: ClassVar[bool] = True

    split: Literal["random", "bydate"] = param(
        "random", help="test part: a random fifth of every group, or the official later messages"
    )
    scaling: Literal["maxabs", "none", "tfidf"] = param(
        "maxabs", help="weights of the words, fitted on all messages but those for testing"
    )
    val_fraction: float = param(0.5, gt=0, lt=1, help="share of the messages outside the test part for the upper level")
    documents: int = param(
        18_846, ge=200, le=18_846, help="use at most this many messages, the same share of every group"
    )

    def size(self) -> DataSize:
        return DataSize(self.documents, 101_631, CLASSES, nonzeros=100)

    def load(self, seed: int, data_dir: str | None) -> Split:
        early, late = _load_messages(data_dir)
        share = self.documents / (len(early) + len(late))
        if self.split == "bydate":
            early = subsample(early, share, seed, "newsgroups.early")
            late = subsample(late, share, seed, "newsgroups.late")
            samples = split_two_ways(early, late, CLASSES, self.val_fraction, seed)
        else:
            messages = subsample(_concatenate(early, late), share, seed, "newsgroups.all")
            samples = split_three_ways(messages, CLASSES, TEST_FRACTION, self.val_fraction, seed)
        return scale_words(samples, self.scaling)


def _concatenate(first: Part, second: Part) -> Part:
    features = sparse.vstack([sparse.csr_array(first.features), sparse.csr_array(second.features)], format="csr")
    return Part(sparse.csr_array(features), np.concatenate([first.labels, second.labels]))


# ---- scaling ---------------------------------------------------------------------------------------------------------
# Not by scikit-learn, which has both scalings: importing it takes longer than a whole start from the cache.


def scale_words(samples: Split, scaling: str) -> Split:
    """Weight words by statistics of both levels' messages; a word that occurs in none of these keeps its weight."""
    if scaling == "none":
        return samples
    fitted = sparse.csr_array(_concatenate(samples.train, samples.val).features)
    if scaling == "maxabs":
        largest = np.zeros(fitted.shape[1], dtype=fitted.dtype)
        np.maximum.at(largest, fitted.indices, np.abs(fitted.data))
        weights = 1 / np.where(largest > 0, largest, 1)
    else:
        document_counts = np.bincount(fitted.indices, minlength=fitted.shape[1])
        weights = (np.log((1 + fitted.shape[0]) / (1 + document_counts)) + 1).astype(fitted.dtype)
    train, val, test = (_apply_weights(part, weights, unit_rows=scaling == "tfidf") for part in samples.parts)
    return Split(train, val, test, samples.classes)


def _apply_weights(part: Part, weights: Array, unit_rows: bool) -> Part:
    a = sparse.csr_array(part.features)
    data = a.data * weights[a.indices]
    if unit_rows:
        rows = np.repeat(np.arange(a.shape[0]), np.diff(a.indptr))
        data = data / np.sqrt(np.bincount(rows, data.astype(np.float64) ** 2, minlength=a.shape[0]))[rows]
    return Part(sparse.csr_array((data.astype(a.dtype), a.indices, a.indptr), shape=a.shape), part.labels)


# ---- files -----------------------------------------------------------------------------------------------------------


def _load_messages(data_dir: str | None) -> tuple[Part, Part]:
    """Return the official training messages and the later ones, rows of unit length in float32."""
    home = Path(os.path.expanduser(data_dir)) / "scikit_learn_data" if data_dir is not None else _find_sklearn_home()
    if data_dir is not None and not (home / _MESSAGES).is_file():
        raise ValueError(
            f"data_dir: {data_dir} has no scikit_learn_data/{_MESSAGES}; name a folder that has it, or omit data_dir "
            f"to download it"
        )
    arrays = load_or_build(
        "newsgroups", f"{_PREPARATION} scikit-learn {version('scikit-learn')}",
        sources=lambda: [file for name in (_MESSAGES, _COUNTS) if (file := home / name).is_file()],
        build=lambda: _fetch(home, data_dir),
    )
    return _part(arrays, "early"), _part(arrays, "late")


def _find_sklearn_home() -> Path:
    """Return scikit-learn's data folder without importing scikit-learn."""
    return Path(os.environ.get("SCIKIT_LEARN_DATA", "~/scikit_learn_data")).expanduser()


def _fetch(home: Path, data_dir: str | None) -> dict[str, Array]:
    if data_dir is None:
        if not (home / _MESSAGES).is_file():
            print_notice(f"downloading 20 Newsgroups (14 MB) with scikit-learn to {home}")
        arrays = _read(home, download=True)
    else:
        print_notice("preparing 20 Newsgroups; the next start is quick")
        # scikit-learn writes next to what it reads, but data_dir may be read-only and must not change.
        with tempfile.TemporaryDirectory(prefix="dbo-") as scratch:
            for name in (_MESSAGES, _COUNTS):
                if (home / name).is_file():
                    (Path(scratch) / name).symlink_to((home / name).resolve())
            arrays = _read(Path(scratch), download=False)
    features = int(arrays["early.shape"][1])
    if features != FEATURES:
        raise ValueError(
            f"task.dataset: newsgroups has {FEATURES:,} features, but the files in {home} give {features:,}; they are "
            f"of another version of the corpus or of another vocabulary"
        )
    return arrays


def _read(home: Path, download: bool) -> dict[str, Array]:
    from sklearn.datasets import fetch_20newsgroups_vectorized  # slow to import, and not needed with a cache

    arrays: dict[str, Array] = {}
    for name, subset in (("early", "train"), ("late", "test")):
        try:
            # It warns about each retry and prints about unreadable files; the error below reports either in one line.
            with warnings.catch_warnings(), redirect_stdout(io.StringIO()):
                warnings.simplefilter("ignore", UserWarning)
                counts, labels = fetch_20newsgroups_vectorized(
                    subset=subset, remove=_REMOVE, data_home=str(home), download_if_missing=download, return_X_y=True,
                )
        except OSError as error:
            if not download:
                raise ValueError(f"data_dir: scikit-learn cannot read its {_MESSAGES}: {error}") from error
            raise ValueError(
                f"task.dataset: newsgroups is not in {home} and cannot be downloaded ({error}); go online, or set "
                f"data_dir=... to a folder with scikit_learn_data/{_MESSAGES}"
            ) from error
        matrix = sparse.csr_array(counts, dtype=np.float32)
        matrix.sort_indices()
        arrays |= {
            f"{name}.data": matrix.data, f"{name}.indices": matrix.indices, f"{name}.indptr": matrix.indptr,
            f"{name}.shape": np.array(matrix.shape), f"{name}.labels": labels.astype(np.int64),
        }
    return arrays


def _part(arrays: Mapping[str, Array], name: str) -> Part:
    data, indices, indptr, shape, labels = (
        arrays[f"{name}.{key}"] for key in ("data", "indices", "indptr", "shape", "labels")
    )
    rows, columns = (int(n) for n in shape)
    return Part(sparse.csr_array((data, indices, indptr), shape=(rows, columns)), labels)
