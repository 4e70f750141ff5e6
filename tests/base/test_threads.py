"""Work that threads do ahead of who waits for it."""

import threading

from headroom.base.threads import map_in_order


def threads() -> set[str]:
    return {t.name for t in threading.enumerate() if t.name.startswith("in-order")}


def test_the_thread_is_one_batch_ahead_and_no_further() -> None:
    asked: list[int] = []

    def work():
        for number in range(6):
            asked.append(number)
            yield number

    results = map_in_order(lambda number: number, work(), threads=1)
    for number in range(4):
        assert next(results) == number
        assert asked[-1] == number + 1
    assert threads()
    results.close()
    assert not threads() and asked[-1] == 4
