"""Whether the list of names has what a run has recorded."""

from collections.abc import Iterable

from headroom.base import names


def list_unknown_metrics(metrics: Iterable[str]) -> list[str]:
    """Those that no row of the list is of."""
    return [name for name in metrics if names.find_metric(name) is None]


def list_unknown_tags(tags: Iterable[str]) -> list[str]:
    return [name for name in tags if names.find_tag(name) is None]
