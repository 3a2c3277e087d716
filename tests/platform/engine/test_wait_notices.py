"""The user sees what the program waits for, and is not bothered with waits that are usual."""

from dbo.platform.engine.wait_notices import WaitNotices


def count_notices(notices: WaitNotices, shown: list[str], seconds: int, kind: str = "round") -> int:
    before = len(shown)
    notices.begin(kind)
    for waited in range(seconds + 1):
        notices.report("waiting for 2 of 10 actors, round 3", float(waited), 600.0)
    notices.end(kind, float(seconds))
    return len(shown) - before


def test_long_wait_is_reported_with_its_limit() -> None:
    """After five seconds, and then at double the time."""
    shown: list[str] = []
    assert count_notices(WaitNotices(shown.append), shown, 45) == 4
    assert shown[0] == "waiting for 2 of 10 actors, round 3: 5 s so far, 600 s at most"
    assert [text.split(": ")[1].split()[0] for text in shown] == ["5", "10", "20", "40"]


def test_usual_wait_is_not_reported_again() -> None:
    """Rounds of 20 s are reported once; three times that long is unusual again, as is another kind of wait."""
    shown: list[str] = []
    notices = WaitNotices(shown.append)
    assert count_notices(notices, shown, 20) > 0
    assert count_notices(notices, shown, 25) == 0
    assert count_notices(notices, shown, 80) > 0
    assert count_notices(notices, shown, 25, kind="evaluation") > 0


def test_short_wait_is_not_reported() -> None:
    shown: list[str] = []
    assert count_notices(WaitNotices(shown.append), shown, 4) == 0
