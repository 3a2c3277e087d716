"""Plugin of test 1: an actor that loads it kills itself once, in the phase and round that `trigger.json` names."""

import json
import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zlib import crc32

from dbo.platform.engine import block, shard_wrappers
from dbo.platform.network.topology import Ring, topology

TRIGGER = Path(__file__).with_name("trigger.json")
_current = {"round": 0}



@topology(f"unused_{crc32(str(TRIGGER).encode())}")
@dataclass(frozen=True, kw_only=True)
class Unused(Ring):
    """A cycle that nobody uses: a plugin must register something."""


def _kill_if_due(phase: str) -> None:
    try:
        wanted = json.loads(TRIGGER.read_text())
        if wanted == {"phase": phase, "round": _current["round"]}:
            TRIGGER.rename(TRIGGER.with_name(f"killed-{os.getpid()}.json"))     # only one process can rename it
            os.kill(os.getpid(), signal.SIGKILL)
    except (OSError, ValueError):
        return


def _patch(owner: Any, name: str, phase: str) -> None:
    """Kill the process, if it is due, before this function."""
    original = getattr(owner, name)
    if getattr(original, "is_patched", False):
        return

    def wrapped(*arguments: Any, **named: Any) -> Any:
        if name == "begin":
            _current["round"] = arguments[1]
        _kill_if_due(phase)
        return original(*arguments, **named)

    wrapped.is_patched = True       # type: ignore[attr-defined]
    setattr(owner, name, wrapped)


_patch(block.Block, "begin", "begin")
_patch(shard_wrappers.CountingShard, "g_y", "compute")
_patch(block.Block, "_send", "compress")
_patch(block, "encode", "send")
_patch(block, "decode", "receive")
_patch(block.Block, "_mix", "mix")
_patch(block.Block, "snapshot", "checkpoint")
