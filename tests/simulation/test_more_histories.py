"""The other half of the histories, and the defects that are planted in the record's code."""

import pytest

from tests.simulation.__main__ import explain, hunt, play_seeds
from tests.simulation.histories import stage
from tests.simulation.mutants import MUTANTS, Mutant, make_source
from tests.simulation.test_histories import HALF, PORTION


@pytest.mark.parametrize("first", range(HALF, 2 * HALF, PORTION))
def test_nothing_is_lost_doubled_falsely_ended_or_stuck(first: int) -> None:
    with stage():
        played = play_seeds(range(first, first + PORTION))
        assert played.seed is None, explain(played.seed, played.failure)
    assert played.histories == PORTION


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_planted_defect_is_one_of_what_is_there(mutant: Mutant) -> None:
    compile(make_source(mutant), mutant.where, "exec")


QUICK = ("points get the time", "a resume tells again", "who died is told", "an end that was told")


@pytest.mark.parametrize("name", QUICK)
def test_a_planted_defect_is_found(name: str) -> None:
    (mutant,) = (one for one in MUTANTS if one.name.startswith(name))
    hunted = hunt(mutant, first=0, most=600)
    assert hunted.count
    assert not hunted.skipped
