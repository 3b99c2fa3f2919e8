"""Walks through the columns of the page index: native (`csrc/page_walks.hpp`), or their twin."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicache.native import load

if TYPE_CHECKING:
    from hicache._walks import agreeing, climb, find, link, path, unlink

__all__ = ["agreeing", "climb", "find", "link", "path", "unlink"]

if not TYPE_CHECKING:
    _walks = load("hicache._walks", "hicache.walks_py")
    agreeing, climb, find = _walks.agreeing, _walks.climb, _walks.find
    link, path, unlink = _walks.link, _walks.path, _walks.unlink
