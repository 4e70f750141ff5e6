"""What to say where forward was called with other things than it takes: a batch of several entries
for a forward of one, a name that it does not know, a dict where a tensor is needed.
"""

from __future__ import annotations

import re

from tasks.engine.diagnosis.failure import Scene, listed, named

_THING = re.compile(r"must be Tensor, not (\w+)")


def call_mistakes(scene: Scene) -> list[str]:
    """One line: what forward takes and what it was given."""
    layer = scene.layer
    if layer is None:
        return []
    given = listed([f"{named(one)} {one.size}" for one in layer.inputs]) or "no tensor"
    batch = f"; the batch: {scene.batch('size')}{scene.quoted}"
    thing = _THING.search(scene.text)
    if thing is not None:
        return [
            f"{scene.setting}: a tensor is needed in {scene.place}, and it was given a {thing[1]} "
            f"({given}); take the tensor out of it in forward, as x['name'] or x[0]{batch}"
        ]
    return [
        f"{scene.setting}: forward of {layer.words} takes ({', '.join(layer.takes)}) and was given "
        f"{given}, in {scene.line or 'the step'}; give forward one parameter for each entry of the "
        f"inputs, of the same name where they are a dict{batch}"
    ]
