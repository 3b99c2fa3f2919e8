"""What holds for every test: property tests have no deadline, and code of ours never blocks an event loop."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import pytest
from blockbuster import blockbuster_ctx
from hypothesis import settings

# How long an example takes says nothing on cores shared with other work; a hang is caught by the per-test timeout.
settings.register_profile("project", deadline=None)
settings.load_profile("project")

# A blocking call fails an async test when one of these packages made it; tests themselves may read files.
LOOP_PACKAGES = ["server", "ipc"]


@pytest.fixture(autouse=True)
def unblocked_loop(request: pytest.FixtureRequest) -> Iterator[None]:
    if not inspect.iscoroutinefunction(getattr(request, "function", None)):
        yield
        return
    with blockbuster_ctx(scanned_modules=LOOP_PACKAGES):
        yield
