"""Bytes of many nodes in a line of nodes.jsonl."""

import base64
import json
import zlib
from pathlib import Path

import numpy as np
import pytest

from dbo.platform.runs.node_lines import MAX_PLAIN, pack_line, read_sent
from dbo.platform.runs.run_folder import RunFolder, read_metrics


@pytest.mark.parametrize("nodes", [1, MAX_PLAIN, MAX_PLAIN + 1, 10_000])
def test_packed_bytes_are_read_back(tmp_path: Path, nodes: int) -> None:
    """Exactly, through the file; few nodes stay readable numbers."""
    sent = np.random.default_rng(0).integers(0, 2**50, nodes).tolist()
    folder = RunFolder(tmp_path)
    folder.append({"round": 0}, {"round": 0, "bytes": sent, "accuracy": [0.5]})
    folder.release()
    line = read_metrics(folder.nodes)[0]
    assert isinstance(line["bytes"], list) == (nodes <= MAX_PLAIN)
    assert line["accuracy"] == [0.5]
    found = read_sent(line)
    assert found is not None
    assert found.astype(np.int64).tolist() == sent


def test_packets_are_packed_like_bytes() -> None:
    """On a graph they are the same for all nodes, and take next to nothing; few nodes stay readable."""
    packed = pack_line({"bytes": [7] * 10_000, "packets": [40_000] * 10_000})
    assert len(packed["packets"]) < 200
    found = read_sent(packed, "packets")
    assert found is not None
    assert found.tolist() == [40_000] * 10_000
    assert pack_line({"packets": [3, 4]}) == {"packets": [3, 4]}
    assert read_sent({"bytes": [1]}, "packets") is None
    with pytest.raises(ValueError, match="packets must be a number per node"):
        read_sent({"bytes": [1], "packets": "no base64!"}, "packets")


def test_10_000_nodes_take_a_third_of_the_space() -> None:
    """Counts of a run differ in their low bytes alone; control: the list of numbers."""
    sent = (2_000_000_000 + np.random.default_rng(0).integers(-3000, 3000, 10_000)).tolist()
    packed, plain = (len(json.dumps(line)) for line in (pack_line({"bytes": sent}), {"bytes": sent}))
    assert packed < 3 * len(sent)
    assert plain > 3 * packed


def test_a_line_without_bytes_has_none() -> None:
    assert read_sent({"round": 0}) is None
    assert pack_line({"round": 0}) == {"round": 0}


@pytest.mark.parametrize("damaged", [
    "no base64!", base64.b64encode(b"no zlib").decode(), base64.b64encode(zlib.compress(b"123")).decode(),
    base64.b64encode(zlib.compress(bytes(80))[:-4]).decode(),
    base64.b64encode(zlib.compress(bytes(9_000_000))).decode(),
    ["text"], [[1, 2]], 7, [float("nan")], {"a": 1},
])
def test_damage_is_refused(damaged: object) -> None:
    """Also a text that would unpack to more nodes than any network has."""
    with pytest.raises(ValueError, match="bytes must be a number per node"):
        read_sent({"bytes": damaged})
