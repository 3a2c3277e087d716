"""Draws of mini-batches: keyed, unbiased, without repetition."""

from zlib import crc32

import numpy as np
import pytest

from dbo.tasks.sampling import Batches

IDS, SIZES = np.arange(4), np.array([6, 7, 9, 12])


def draw(batches: Batches, round_: int = 0, step: int = 0, ids: np.ndarray = IDS, seed: int = 0) -> np.ndarray:
    numbers = batches.draw("lower", seed, ids, SIZES[ids], round_, step)
    assert numbers is not None
    return numbers


def test_full_batches_draw_nothing() -> None:
    assert Batches().is_full
    assert Batches(upper=2).draw("lower", 0, IDS, SIZES, 0, 0) is None


@pytest.mark.parametrize("order", ["independent", "epoch"])
def test_draws_do_not_depend_on_the_packing(order: str) -> None:
    """Each node draws the same samples alone and among others."""
    batches = Batches(lower=3, upper=2, order=order, per_round=5)      # type: ignore[arg-type]
    together = draw(batches, 4, 2)
    for node in IDS:
        np.testing.assert_array_equal(draw(batches, 4, 2, ids=np.array([node]))[0], together[node])


def test_a_batch_has_no_sample_twice() -> None:
    for step in range(20):
        numbers = draw(Batches(lower=6), step=step)
        assert all(len(set(row)) == 6 for row in numbers)
        assert (numbers < SIZES[:, None]).all()


def test_draws_differ_by_seed_round_step_level_and_node() -> None:
    batches = Batches(lower=5, upper=5)
    first = draw(batches)
    others = [draw(batches, 1), draw(batches, 0, 1), draw(batches, seed=1)]
    assert all((first != other).any() for other in others)
    assert (first != batches.draw("upper", 0, IDS, SIZES, 0, 0)).any()


def test_a_batch_per_round_ignores_the_step() -> None:
    batches = Batches(lower=3, per="round")
    np.testing.assert_array_equal(draw(batches, 2, 0), draw(batches, 2, 5))
    assert (draw(batches, 2) != draw(batches, 3)).any()


def test_an_epoch_uses_every_sample_once() -> None:
    """Three batches a round, of 3 samples each: an epoch of node 3 (12 samples) is four batches."""
    batches = Batches(lower=3, order="epoch", per_round=3)
    numbers = [draw(batches, n // 3, n % 3)[3] for n in range(8)]
    for epoch in (numbers[:4], numbers[4:]):
        assert sorted(np.concatenate(epoch)) == list(range(12))
    assert (np.concatenate(numbers[:4]) != np.concatenate(numbers[4:])).any()


def test_independent_batches_repeat_samples_within_an_epoch() -> None:
    """The negative control: without `order: epoch` four batches of 3 do not cover 12 samples."""
    numbers = [draw(Batches(lower=3), n)[3] for n in range(4)]
    assert sorted(np.concatenate(numbers)) != list(range(12))


@pytest.mark.property
def test_every_sample_is_equally_likely() -> None:
    """3,000 batches of 3 of 6 samples: each sample is in half of them, to five standard deviations."""
    counts = np.zeros(6)
    for step in range(3000):
        counts[draw(Batches(lower=3), step=step)[0]] += 1
    assert (abs(counts / 3000 - 0.5) < 5 * 0.5 / np.sqrt(3000)).all()


def test_a_batch_larger_than_a_node_is_one_line() -> None:
    with pytest.raises(ValueError, match=r"batch_size.lower: 8 is not allowed; node 0 has 6 samples; must be ≤ 6"):
        Batches(lower=8).check(SIZES.tolist(), SIZES.tolist())
    Batches(lower=6, upper=6).check(SIZES.tolist(), SIZES.tolist())


def test_a_task_without_samples_is_one_line() -> None:
    with pytest.raises(ValueError, match="this task has no samples"):
        Batches(upper=1).check([0, 0], [0, 0])


@pytest.mark.parametrize("seed", [3, 1 << 40])
def test_draws_are_the_first_different_numbers_of_the_nodes_generator(seed: int) -> None:
    """The definition, row by row: what draws all rows at once must not change the samples of a run."""
    sizes, size = np.array([30, 9, 4000, 24]), 6
    for step in range(30):
        numbers = Batches(lower=size).draw("lower", seed, IDS, sizes, 2, step)
        assert numbers is not None
        for node, have in enumerate(sizes.tolist()):
            generator = np.random.default_rng([seed, crc32(b"batch lower"), node, 2, step])
            samples = generator.permutation(have) if 4 * size > have else generator.integers(have, size=2 * size)
            while len(found := list(dict.fromkeys(samples.tolist()))) < size:
                samples = np.concatenate([samples, generator.integers(have, size=size)])
            assert numbers[node].tolist() == found[:size]


@pytest.mark.parametrize("order", ["independent", "epoch"])
@pytest.mark.parametrize("per", ["step", "round"])
def test_steps_drawn_together_are_those_drawn_alone(order: str, per: str) -> None:
    """Several steps are drawn at once. Each has the samples of its own key, in whichever order they are asked for."""
    sizes = np.array([4000, 40, 26, 700])
    batches = Batches(lower=6, order=order, per=per, per_round=5)      # type: ignore[arg-type]
    asked = [(round_, step) for round_ in (0, 1, 70, 71) for step in range(5)]
    together = {at: batches.draw("lower", 3, IDS, sizes, *at) for at in [*asked, *asked[::-1]]}
    for (round_, step), numbers in together.items():
        count = round_ if per == "round" else 5 * round_ + step
        for node, have in enumerate(sizes.tolist()):
            if order == "epoch":
                epoch, number = divmod(count, have // 6)
                shuffled = np.random.default_rng([3, crc32(b"epoch lower"), node, epoch]).permutation(have)
                expected = shuffled[6 * number : 6 * number + 6].tolist()
            else:
                at = (round_, 0) if per == "round" else (round_, step)
                alone = Batches(lower=6).draw("lower", 3, IDS[node:][:1], sizes[node:][:1], *at)
                assert alone is not None
                expected = alone[0].tolist()
            assert numbers is not None
            assert numbers[node].tolist() == expected


def test_a_draw_cannot_be_changed() -> None:
    """Later calls share the numbers."""
    with pytest.raises(ValueError, match="read-only"):
        draw(Batches(lower=3))[0, 0] = 1
