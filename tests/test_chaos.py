"""Twenty of each of what `make chaos` does by the hundred."""

import pytest

from tests.chaos import FEW, Chaos


@pytest.fixture(scope="module")
def chaos(tmp_path_factory: pytest.TempPathFactory) -> Chaos:
    """One for all kinds: what an undisturbed training gives is the same."""
    return Chaos(tmp_path_factory.mktemp("chaos"), seed=7)


@pytest.mark.parametrize("kind", [kind for kind, count in FEW.items() if count])
def test_it_comes_out_as_if_nothing_had_happened(chaos: Chaos, kind: str) -> None:
    chaos.run({kind: FEW[kind]})
    assert chaos.done[kind] >= FEW[kind]
