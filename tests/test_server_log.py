"""Log lines for machines: whatever the values, one line that reads back to the same pairs."""

from __future__ import annotations

import ast
import re

from hypothesis import given
from hypothesis import strategies as st

from server.log import line

_PAIR = re.compile(r"(\w+)=('(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"|[^ ]+)(?: |$)")


def read_back(text: str) -> dict[str, str]:
    found = _PAIR.findall(text)
    assert "".join(f"{name}={value} " for name, value in found).rstrip(" ") == text
    return {name: ast.literal_eval(value) if value[0] in "'\"" else value for name, value in found}


@given(st.dictionaries(st.sampled_from(["id", "outcome", "total_s"]), st.text(), min_size=1))
def test_any_values_read_back(pairs: dict[str, str]) -> None:
    text = line(**pairs)
    assert text.isprintable()
    assert read_back(text) == pairs


def test_plain_values_stay_plain() -> None:
    assert line(id="a-1", n=5, s="0.1000") == "id=a-1 n=5 s=0.1000"
    assert line(id="", words="two words", esc="\x1b[31m") == r"id='' words='two words' esc='\x1b[31m'"
