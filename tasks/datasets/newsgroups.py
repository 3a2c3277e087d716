"""20 Newsgroups: messages of 20 discussion groups as word counts, read by scikit-learn's loader.

Headers, footers and quotes are removed, which leaves 101,631 words; the vocabulary is that of the official training
messages. Every row of counts is divided by its length. `scaling` then weighs the words by what the messages of the two
levels, and not those for testing, show of them. By the lower level's alone, words that are rare there reach a thousand
times the usual size on the upper level.
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
from typing import Annotated, Literal

import numpy as np
from annotated_types import Ge, Gt, Le, Lt
from scipy import sparse
from typing_extensions import Doc

from dbo.tasks.api import Array, Part, Samples, generator
from dbo.tasks.datasets.cache import cached, say
from dbo.tasks.datasets.splits import stratified, three_ways, with_test

FEATURES = 101_631
CLASSES = 20
TEST_FRACTION = 0.2

_PREPARATION = "1"    # to be changed with whatever changes the cached arrays
_REMOVE = ("headers", "footers", "quotes")
_MESSAGES = "20news-bydate_py3.pkz"
_COUNTS = "20newsgroup_vectorizedremove-headers-footers-quotes_py3.pkl"    # scikit-learn makes it if it is missing


@dataclass(frozen=True, slots=True, kw_only=True)
class Newsgroups:
    """18,846 messages of 20 newsgroups, 101,631 word counts each, without headers, footers and quotes."""

    split: Annotated[
        Literal["random", "bydate"], Doc("test part: a random fifth of every group, or the official later messages")
    ] = "random"
    scaling: Annotated[
        Literal["maxabs", "none", "tfidf"], Doc("weights of the words, fitted on all messages but those for testing")
    ] = "maxabs"
    val_fraction: Annotated[float, Gt(0), Lt(1), Doc("share of what is not for testing for the upper level")] = 0.5
    documents: Annotated[
        int, Ge(200), Le(18_846), Doc("use at most this many messages, the same share of every group")
    ] = 18_846

    def load(self, seed: int, data_dir: str | None) -> Samples:
        early, late = _messages(data_dir)
        share = self.documents / (len(early) + len(late))
        if self.split == "bydate":
            early, late = (_some(part, share, seed, name) for part, name in ((early, "early"), (late, "late")))
            samples = with_test(early, late, CLASSES, self.val_fraction, seed)
        else:
            everything = _some(_joined(early, late), share, seed, "all")
            samples = three_ways(everything, CLASSES, TEST_FRACTION, self.val_fraction, seed)
        return scaled(samples, self.scaling)


def _joined(first: Part, second: Part) -> Part:
    features = sparse.vstack([sparse.csr_array(first.features), sparse.csr_array(second.features)], format="csr")
    return Part(sparse.csr_array(features), np.concatenate([first.labels, second.labels]))


def _some(part: Part, share: float, seed: int, name: str) -> Part:
    if share >= 1:
        return part
    _, taken = stratified(part.labels, share, generator(seed, f"newsgroups.{name}"))
    return part.take(taken)


# ---- scaling ---------------------------------------------------------------------------------------------------------
# By hand, although scikit-learn has both: importing it takes longer than all the rest of a start from the cache.


def scaled(samples: Samples, scaling: str) -> Samples:
    """Words weighed by what the messages of both levels show of them; a word that is not in these keeps its weight."""
    if scaling == "none":
        return samples
    seen = sparse.csr_array(_joined(samples.train, samples.val).features)
    if scaling == "maxabs":
        largest = np.zeros(seen.shape[1], dtype=seen.dtype)
        np.maximum.at(largest, seen.indices, np.abs(seen.data))
        weights = 1 / np.where(largest > 0, largest, 1)
    else:
        occurs_in = np.bincount(seen.indices, minlength=seen.shape[1])
        weights = (np.log((1 + seen.shape[0]) / (1 + occurs_in)) + 1).astype(seen.dtype)
    unit_rows = scaling == "tfidf"
    return Samples(
        _weighted(samples.train, weights, unit_rows), _weighted(samples.val, weights, unit_rows),
        _weighted(samples.test, weights, unit_rows), samples.classes,
    )


def _weighted(part: Part, weights: Array, unit_rows: bool) -> Part:
    a = sparse.csr_array(part.features)
    data = a.data * weights[a.indices]
    if unit_rows:
        rows = np.repeat(np.arange(a.shape[0]), np.diff(a.indptr))
        data = data / np.sqrt(np.bincount(rows, data.astype(np.float64) ** 2, minlength=a.shape[0]))[rows]
    return Part(sparse.csr_array((data.astype(a.dtype), a.indices, a.indptr), shape=a.shape), part.labels)


# ---- where the messages come from ------------------------------------------------------------------------------------


def _messages(data_dir: str | None) -> tuple[Part, Part]:
    """The official training messages and the later ones, rows of unit length in float32."""
    home = Path(os.path.expanduser(data_dir)) / "scikit_learn_data" if data_dir is not None else _own_home()
    if data_dir is not None and not (home / _MESSAGES).is_file():
        raise ValueError(
            f"data_dir: {data_dir} has no scikit_learn_data/{_MESSAGES}; name a folder that has it, or leave data_dir "
            f"out to download it"
        )
    arrays = cached(
        "newsgroups", f"{_PREPARATION} scikit-learn {version('scikit-learn')}",
        sources=lambda: [file for name in (_MESSAGES, _COUNTS) if (file := home / name).is_file()],
        make=lambda: _fetched(home, data_dir),
    )
    return _part(arrays, "early"), _part(arrays, "late")


def _own_home() -> Path:
    """Where scikit-learn keeps its data, without importing it."""
    return Path(os.environ.get("SCIKIT_LEARN_DATA", "~/scikit_learn_data")).expanduser()


def _fetched(home: Path, data_dir: str | None) -> dict[str, Array]:
    if data_dir is None:
        if not (home / _MESSAGES).is_file():
            say(f"downloading 20 Newsgroups (14 MB) with scikit-learn to {home}")
        return _checked(_read(home, download=True), home)
    say("preparing 20 Newsgroups; the next start is quick")
    # scikit-learn writes beside what it reads, but what was given may be read-only, and is not ours to change.
    with tempfile.TemporaryDirectory(prefix="dbo-") as scratch:
        for name in (_MESSAGES, _COUNTS):
            if (home / name).is_file():
                (Path(scratch) / name).symlink_to((home / name).resolve())
        return _checked(_read(Path(scratch), download=False), home)


def _read(home: Path, download: bool) -> dict[str, Array]:
    from sklearn.datasets import fetch_20newsgroups_vectorized  # slow to import, and not needed with a cache

    arrays: dict[str, Array] = {}
    for name, subset in (("early", "train"), ("late", "test")):
        try:
            # It warns of each retry and prints of unreadable files; what comes of either is told below, in one line.
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


def _checked(arrays: dict[str, Array], home: Path) -> dict[str, Array]:
    features = int(arrays["early.shape"][1])
    if features != FEATURES:
        raise ValueError(
            f"task.dataset: newsgroups has {FEATURES:,} features, but the files in {home} give {features:,}; they are "
            f"of another version of the corpus or of another vocabulary"
        )
    return arrays


def _part(arrays: Mapping[str, Array], name: str) -> Part:
    data, indices, indptr, shape, labels = (
        arrays[f"{name}.{key}"] for key in ("data", "indices", "indptr", "shape", "labels")
    )
    rows, columns = (int(n) for n in shape)
    return Part(sparse.csr_array((data, indices, indptr), shape=(rows, columns)), labels)
