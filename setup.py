"""The native extensions; everything else about the project is in setup.cfg.

Environment switches for developers, usable together:
DEEPINFER_DEBUG=1                                no optimisation, assertions, warnings are errors
DEEPINFER_SANITIZE=address|thread|undefined      build with that sanitizer
DEEPINFER_COVERAGE=1                             count executed lines (gcov)
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from setuptools import Extension, setup

SANITIZERS = ("address", "thread", "undefined")
KERNEL_HEADERS = (
    "attention", "attention_kernel", "attention_plan", "linear", "linear_kernel", "norm", "norm_kernel",
    "product_kernel", "team", "vectors",
)  # fmt: skip
KERNEL_SOURCES = ("kernels_module", "isa_portable", "isa_avx2", "isa_avx512")


def build_flags(environ: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """Compiler and linker flags that the switches in `environ` ask for. Raises SystemExit on an unknown sanitizer."""
    compile_flags = ["-std=c++17", "-Wall", "-Wextra", "-fvisibility=hidden", "-O2"]
    link_flags: list[str] = []
    if environ.get("DEEPINFER_DEBUG") == "1":
        compile_flags += ["-O0", "-g3", "-UNDEBUG", "-D_GLIBCXX_ASSERTIONS", "-Werror"]
    if sanitizer := environ.get("DEEPINFER_SANITIZE", ""):
        if sanitizer not in SANITIZERS:
            raise SystemExit(f"DEEPINFER_SANITIZE={sanitizer} is none of {', '.join(SANITIZERS)}")
        # The thread sanitizer models no stand-alone fences and says so for each; the bell needs them.
        compile_flags += [f"-fsanitize={sanitizer}", "-fno-omit-frame-pointer", "-g", "-O1", "-Wno-tsan"]
        link_flags += [f"-fsanitize={sanitizer}"]
    if environ.get("DEEPINFER_COVERAGE") == "1":
        compile_flags += ["--coverage", "-O0"]
        link_flags += ["--coverage"]
    return compile_flags, link_flags


def extensions(environ: Mapping[str, str]) -> list[Extension]:
    """All native modules of the project."""
    compile_flags, link_flags = build_flags(environ)
    fast_flags = ["-O3" if flag == "-O2" else flag for flag in compile_flags]

    def extension(name: str, sources: Sequence[str], headers: Sequence[str], flags: list[str]) -> Extension:
        return Extension(
            name,
            sources=[f"csrc/{source}.cpp" for source in sources],
            depends=[f"csrc/{header}.hpp" for header in headers],
            language="c++",
            extra_compile_args=flags,
            extra_link_args=link_flags,
        )

    return [
        extension("ipc._ring", ["ring_module"], ["ring", "block", "handle"], compile_flags),
        extension("server._events", ["events_module"], [], compile_flags),
        extension("hicache._keys", ["keys_module"], ["page_keys"], compile_flags),
        extension("hicache._walks", ["walks_module"], ["page_walks"], compile_flags),
        extension("hicache._copy", ["page_copy"], ["page_copy", "page_stream", "page_sum", "team"], fast_flags),
        extension("engine.native._kernels", KERNEL_SOURCES, KERNEL_HEADERS, fast_flags),
    ]


if __name__ == "__main__":
    setup(ext_modules=extensions(os.environ))
