"""Twenty of each of what `make chaos` does by the hundred."""

from pathlib import Path

import pytest

from tests.chaos import FEW, Chaos


@pytest.mark.parametrize("kind", [kind for kind, count in FEW.items() if count])
def test_it_comes_out_as_if_nothing_had_happened(tmp_path: Path, kind: str) -> None:
    chaos = Chaos(tmp_path, seed=len(kind))
    chaos.run({kind: FEW[kind]})
    assert chaos.done[kind] >= FEW[kind]
