"""The server of Prefect that all tests share."""

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session")
def prefect_api() -> Iterator[str]:
    """A real server for the flows that run in this process."""
    from prefect.settings import (
        PREFECT_API_URL,
        PREFECT_FLOWS_HEARTBEAT_FREQUENCY,
        PREFECT_LOGGING_TO_API_ENABLED,
        temporary_settings,
    )

    from headroom.prefect import local_prefect, run_task

    run_task.fix_prefect_after_fork()
    with local_prefect.share_server(local_prefect.find_prefect_home()) as url:
        settings = {
            PREFECT_API_URL: url,
            PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None,
            PREFECT_LOGGING_TO_API_ENABLED: False,
        }
        with temporary_settings(settings):
            yield url
