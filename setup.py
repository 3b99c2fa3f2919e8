"""The native extensions; everything else about the project is in setup.cfg.

Environment switches for developers, usable together:
DEEPINFER_DEBUG=1                                no optimisation, assertions, warnings are errors
DEEPINFER_SANITIZE=address|thread|undefined      build with that sanitizer
DEEPINFER_COVERAGE=1                             count executed lines (gcov)
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from setuptools import Extension, setup

SANITIZERS = ("address", "thread", "undefined")
KERNEL_HEADERS = (
    "attention", "attention_kernel", "attention_plan", "linear", "linear_kernel", "norm", "norm_kernel", "team",
    "vectors",
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
    return [
        Extension(
            "ipc._ring",
            sources=["csrc/ring_module.cpp"],
            depends=["csrc/ring.hpp", "csrc/block.hpp", "csrc/handle.hpp"],
            language="c++",
            extra_compile_args=compile_flags,
            extra_link_args=link_flags,
        ),
        Extension(
            "server._events",
            sources=["csrc/events_module.cpp"],
            language="c++",
            extra_compile_args=compile_flags,
            extra_link_args=link_flags,
        ),
        Extension(
            "hicache._keys",
            sources=["csrc/keys_module.cpp"],
            depends=["csrc/page_keys.hpp"],
            language="c++",
            extra_compile_args=compile_flags,
            extra_link_args=link_flags,
        ),
        Extension(
            "hicache._walks",
            sources=["csrc/walks_module.cpp"],
            depends=["csrc/page_walks.hpp"],
            language="c++",
            extra_compile_args=compile_flags,
            extra_link_args=link_flags,
        ),
        Extension(
            "hicache._copy",
            sources=["csrc/page_copy.cpp"],
            depends=["csrc/page_copy.hpp", "csrc/page_stream.hpp", "csrc/page_sum.hpp", "csrc/team.hpp"],
            language="c++",
            extra_compile_args=["-O3" if flag == "-O2" else flag for flag in compile_flags],
            extra_link_args=link_flags,
        ),
        Extension(
            "engine.native._kernels",
            sources=[f"csrc/{source}.cpp" for source in KERNEL_SOURCES],
            depends=[f"csrc/{header}.hpp" for header in KERNEL_HEADERS],
            language="c++",
            extra_compile_args=["-O3" if flag == "-O2" else flag for flag in compile_flags],
            extra_link_args=link_flags,
        ),
    ]


if __name__ == "__main__":
    setup(ext_modules=extensions(os.environ))
