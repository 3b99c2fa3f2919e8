"""What became of recent requests: `GET /deepinfer/requests/{id}`, above all what they reused and why not more.

Keeps the accounts of the newest prompts, running ones too, under their caller and request id: nobody sees another
caller's. Knows nothing about HTTP.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, Final

from server.account import Account
from server.errors import UnknownRequestError

# Prompts remembered, some hundred bytes each: the last minutes of a busy server.
MAX_PROMPTS: Final = 4096


class Recent:
    """Accounts of the newest requests, oldest first."""

    def __init__(self, limit: int = MAX_PROMPTS) -> None:
        self._limit = limit
        self._prompts = 0
        self._requests: OrderedDict[tuple[str, str], list[Account]] = OrderedDict()

    def add(self, account: Account) -> None:
        """Remember one prompt of a request. An id that a client uses again names the newer request."""
        call = account.call
        key = call.caller, call.request_id
        found = self._requests.get(key)
        if found is not None and found[0].call is not call:
            self._prompts -= len(self._requests.pop(key))
            found = None
        if found is None:
            found = self._requests[key] = []
        found.append(account)
        self._prompts += 1
        while self._prompts > self._limit and len(self._requests) > 1:
            self._prompts -= len(self._requests.popitem(last=False)[1])

    def find(self, caller: str, request_id: str) -> dict[str, Any]:
        """The request as JSON. Raises UnknownRequestError."""
        accounts = self._requests.get((caller, request_id))
        if accounts is None:
            raise UnknownRequestError(f"request {request_id!r} is not, or no longer, remembered")
        return {
            "id": request_id,
            "endpoint": accounts[0].call.endpoint,
            "prompts": [account.as_json() for account in accounts],
        }
