"""The block manager against an obvious one: who holds what, what is found, and what is reused first."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.blocks import BlockManager, Int32
from engine.prefix import split
from hicache.keys import KEY_BYTES, PAGE_TOKENS, extend

TOTAL = 7
ROOTS = (b"one root".ljust(KEY_BYTES), b"another".ljust(KEY_BYTES))

Chain = tuple[int, ...]  # a root's number, then each page by the one id that fills it

chains = st.builds(lambda root, pages: (root, *pages), st.integers(0, 1), st.lists(st.integers(0, 1), max_size=4))


def ids_of(chain: Chain) -> Int32:
    return np.repeat(np.array(chain[1:], np.int32), PAGE_TOKENS)


def keys_of(chain: Chain) -> list[bytes]:
    return split(extend(ROOTS[chain[0]], ids_of(chain)))


@dataclass(eq=False)
class Page:
    """A known page of the oracle."""

    chain: Chain
    block: int
    before: Page | None


class Blocks(RuleBasedStateMachine):
    """Sequences that take, share, make known and let go, beside a model with plain lists."""

    def __init__(self) -> None:
        super().__init__()
        self.cleared: list[int] = []
        self.manager = BlockManager(TOTAL, self.cleared.extend)
        self.held: list[list[int]] = []  # one list a sequence
        self.pages: dict[Chain, Page] = {}
        self.idle: list[int] = []  # known blocks without holders, oldest first
        self.spoiled: set[int] = set()

    def holders(self, block: int) -> int:
        return sum(block in blocks for blocks in self.held)

    def free(self) -> set[int]:
        return {block for block in range(TOTAL) if not self.holders(block)}

    def reachable(self, chain: Chain) -> list[Page]:
        found: list[Page] = []
        for length in range(2, len(chain) + 1):
            page = self.pages.get(chain[:length])
            if page is None or page.before is not (found[-1] if found else None):
                break
            found.append(page)
        return found

    def drop(self, page: Page) -> None:
        del self.pages[page.chain]

    @precondition(lambda self: self.free())
    @rule()
    def take(self) -> None:
        blank = self.free() - set(self.idle)
        block = self.manager.take()
        if blank:
            assert block in blank
        else:
            assert block == self.idle.pop(0)
            self.drop(next(page for page in self.pages.values() if page.block == block))
        self.held.append([block])

    @precondition(lambda self: not self.free())
    @rule()
    def take_from_empty(self) -> None:
        with pytest.raises(AssertionError, match="no free block"):
            self.manager.take()

    @rule(chain=chains)
    def find_and_share(self, chain: Chain) -> None:
        found = self.manager.find(ROOTS[chain[0]], keys_of(chain), ids_of(chain))
        assert found == [page.block for page in self.reachable(chain)]
        assert self.manager.idle(found) == sum(block in self.idle for block in found)
        self.manager.share(found)
        self.idle = [block for block in self.idle if block not in found]
        self.held.append(found)

    @precondition(lambda self: self.held)
    @rule(chain=chains, data=st.data())
    def know(self, chain: Chain, data: st.DataObject) -> None:
        """A sequence shared what it could, filled blocks of its own and tells what it has."""
        shared = self.reachable(chain)
        number = data.draw(st.integers(0, len(self.held) - 1))
        known = {page.block for page in self.pages.values()}
        own = [block for block in self.held[number] if block not in known]
        blocks = [page.block for page in shared] + own
        chain = chain[: 1 + len(blocks)]
        blocks = blocks[: len(chain) - 1]
        self.manager.know(ROOTS[chain[0]], keys_of(chain), blocks, ids_of(chain))
        before: Page | None = None
        for length, block in enumerate(blocks, 2):
            page = self.pages.get(chain[:length])
            if page is None or page.before is not before:
                if block in self.spoiled:
                    return
                if page is not None:
                    self.idle = [idle for idle in self.idle if idle != page.block]
                page = self.pages[chain[:length]] = Page(chain[:length], block, before)
            before = page

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        blocks = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.cleared.clear()
        self.manager.give_back(blocks)
        let_go = [block for block in reversed(blocks) if not self.holders(block)]
        assert self.cleared == [block for block in let_go if block in self.spoiled]
        self.spoiled -= set(let_go)
        known = {page.block for page in self.pages.values()}
        self.idle += [block for block in let_go if block in known]

    @precondition(lambda self: self.free())
    @rule(data=st.data())
    def give_back_twice(self, data: st.DataObject) -> None:
        free = data.draw(st.sampled_from(sorted(self.free())))
        with pytest.raises(AssertionError, match=f"block {free} was given back twice"):
            self.manager.give_back([free])

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def spoil(self, data: st.DataObject) -> None:
        blocks = self.held[data.draw(st.integers(0, len(self.held) - 1))]
        self.manager.spoil(blocks)
        self.spoiled |= set(blocks)
        for page in [page for page in self.pages.values() if page.block in blocks]:
            self.drop(page)

    @rule()
    def forget(self) -> None:
        self.manager.forget()
        self.pages.clear()
        self.idle.clear()

    @invariant()
    def counts(self) -> None:
        free = self.free()
        assert (self.manager.free, self.manager.used) == (len(free), TOTAL - len(free))
        assert self.manager.cached == len(self.idle)
        assert set(self.idle) <= free
        assert len({page.block for page in self.pages.values()}) == len(self.pages)

    @invariant()
    def what_is_known_is_found(self) -> None:
        for chain in self.pages:
            found = self.manager.find(ROOTS[chain[0]], keys_of(chain), ids_of(chain))
            assert found == [page.block for page in self.reachable(chain)]


Blocks.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestBlocks = Blocks.TestCase


def filled(manager: BlockManager, chain: Chain, keys: list[bytes]) -> list[int]:
    """Blocks of a sequence that computed these pages."""
    blocks = [manager.take() for _ in keys]
    manager.know(ROOTS[chain[0]], keys, blocks, ids_of(chain))
    return blocks


def test_released_blocks_are_reused_first() -> None:
    manager = BlockManager(1000)
    first = [manager.take() for _ in range(3)]
    manager.give_back(first)
    assert {manager.take() for _ in range(3)} == set(first)


def test_the_end_of_a_known_prompt_is_reused_before_its_beginning() -> None:
    manager = BlockManager(3)
    chain = (0, 5, 6, 7)
    blocks = filled(manager, chain, keys_of(chain))
    manager.give_back(blocks)
    for left in (2, 1, 0):
        manager.take()
        assert manager.find(ROOTS[0], keys_of(chain), ids_of(chain)) == blocks[:left]


@given(a=chains, b=chains, weak=st.sampled_from([0, 1, 2]))
def test_keys_that_collide_are_a_miss(a: Chain, b: Chain, weak: int) -> None:
    """With keys that tell next to nothing, what is found still has the tokens asked for, and all before them."""

    def weak_keys(chain: Chain) -> list[bytes]:
        return [bytes([length * weak // 2]) * KEY_BYTES for length in range(1, len(chain))]

    manager = BlockManager(20)
    held = [(chain, filled(manager, chain, weak_keys(chain))) for chain in (a, b)]
    for chain in (a, b):
        for number, block in enumerate(manager.find(ROOTS[chain[0]], weak_keys(chain), ids_of(chain)), 1):
            owners = [other for other, blocks in held if block in blocks]
            assert any(other[: number + 1] == chain[: number + 1] for other in owners)


def test_two_pages_of_one_prompt_with_the_same_key_can_both_be_given_up() -> None:
    manager = BlockManager(3)
    blocks = filled(manager, (0, 1, 2, 3), [b"same" * 4, b"same" * 4, b"same" * 4])
    manager.give_back(blocks)
    assert sorted(manager.take() for _ in range(3)) == [0, 1, 2]
    assert manager.cached == 0


def test_pages_are_followed_from_anywhere_but_only_one_behind_the_other() -> None:
    manager = BlockManager(8)
    chain = (0, 1, 2, 3, 4)
    keys, blocks = keys_of(chain), filled(manager, chain, keys_of(chain))
    assert manager.follow(keys[1:3]) == blocks[1:3]
    assert manager.follow([keys[1], keys[3]]) == blocks[1:2]
    assert manager.follow([b"?" * KEY_BYTES, *keys]) == []
    assert manager.follow([]) == []
    manager.spoil(blocks[2:3])
    assert manager.follow(keys[1:]) == blocks[1:2]
