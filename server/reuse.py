"""What one prompt reused of the prefix cache, by tier, and why not more of it.

Filled by `cache.py` as it learns it; read by usage, log line and explanation. Knows nothing about pages.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from hicache.look import Reason

# Why nothing is reused where there is no cache; the other reasons are the planner's.
OFF: Final = "off"
# The rank could not load what was planned, so it computed it.
FAILED: Final = "failed"


@dataclass(slots=True)
class Reuse:
    """Tokens of one prompt that were not computed. Zero until the rank has told."""

    why: str = OFF  # the reason why no more of the prompt was cached
    device_tokens: int = 0  # found on the rank's device
    host_tokens: int = 0  # copied from the host pool
    deferred: bool = False  # the rank let it wait for device blocks
    waited_s: float = 0.0  # seconds that it waited for another request to store the same pages
    error: str = ""  # why loading failed

    @property
    def cached_tokens(self) -> int:
        """Of both tiers."""
        return self.device_tokens + self.host_tokens

    @property
    def told(self) -> str:
        """The reason as its caller may know it: not that another caller has sent the same."""
        return str(Reason.NEVER_STORED) if self.why == Reason.OTHER_NAMESPACE else self.why
