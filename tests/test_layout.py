"""The shape of the tree: walls between packages, sizes, and the one folder that must not be a package.

Read from the source, so that a wall holds also in code no test runs; imports are tried in child processes.
"""

from __future__ import annotations

import ast
import configparser
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from http import HTTPStatus
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("server", "tokenize", "ipc", "engine", "hicache", "bench")
# Past these a file or a function does two jobs and is split.
MAX_MODULE_LINES = 350
MAX_FUNCTION_LINES = 60

# package -> what it never imports.
WALLS = {
    "server": {"torch", "engine"},
    "tokenize": {"torch", "aiohttp", "engine", "hicache", "ipc"},
    "ipc": {"torch", "aiohttp", "server", "engine", "hicache", "bench"},
    "engine": {"aiohttp", "server", "bench"},
    "hicache": {"aiohttp", "server", "engine", "bench"},
}
SHARED_MEMORY = {"mmap", "memfd_create", "eventfd", "shared_memory"}
UNFINISHED = re.compile("|".join(("TO" + "DO", "FIX" + "ME", "XX" + "X")))
MACHINE_PATH = re.compile(r"(?<![\w.])/(root|home|work)/")
ERROR_CODES = {int(status) for status in HTTPStatus if status >= HTTPStatus.BAD_REQUEST}
TEXT_SUFFIXES = {".py", ".pyi", ".cpp", ".hpp", ".cfg", ".txt", ".md", ".sh", ".toml", ""}

# Forks for each module, so that every one is the first of ours in its process while heavy libraries are loaded once.
IMPORT_ALONE = """
import importlib, os, sys, traceback
heavy, *modules = sys.argv[1:]
for name in filter(None, heavy.split(",")):
    importlib.import_module(name)
for module in modules:
    child = os.fork()
    if not child:
        try:
            importlib.import_module(module)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        print(module)
"""


def _files(package: str) -> list[Path]:
    return sorted(path for path in (ROOT / package).rglob("*.py") if "tokenizer" not in path.parts)


SOURCES = [path for package in PACKAGES for path in _files(package)]
TESTS = sorted((ROOT / "tests").rglob("*.py"))


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _where(path: Path, node: ast.AST) -> str:
    return f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}"


def _module(path: Path) -> str:
    """The name a file is imported by."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    if parts[0] == "tokenize":
        parts = ("server", "tokenizer", *parts[1:])
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imports(path: Path) -> Iterator[tuple[ast.stmt, str]]:
    """All imports, also those inside functions; `from a import b` counts as `a.b`."""
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.Import):
            yield from ((node, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{_where(path, node)}: relative import"
            yield from ((node, f"{node.module}.{alias.name}") for alias in node.names)


@pytest.mark.parametrize("package", WALLS)
def test_package_imports_nothing_beyond_its_wall(package: str) -> None:
    crossed = [
        f"{_where(path, node)} imports {name}"
        for path in _files(package)
        for node, name in _imports(path)
        if name.split(".")[0] in WALLS[package]
    ]
    assert crossed == []


def test_only_ipc_touches_shared_memory() -> None:
    touched = []
    for path in SOURCES:
        if path.is_relative_to(ROOT / "ipc"):
            continue
        touched += [_where(path, node) for node, name in _imports(path) if SHARED_MEMORY.intersection(name.split("."))]
        attributes = (node for node in ast.walk(_tree(path)) if isinstance(node, ast.Attribute))
        touched += [_where(path, node) for node in attributes if node.attr in SHARED_MEMORY]
    assert touched == []


def test_only_errors_knows_status_codes() -> None:
    """Outside it: no number of an HTTP error, no `status=<number>`, no HTTP exception but the base that is caught."""
    found = []
    for path in _files("server"):
        if path.name != "errors.py":
            found += [f"{_where(path, node)}: {ast.unparse(node)}" for node in _status_codes(_tree(path))]
    assert found == []


def _status_codes(tree: ast.Module) -> Iterator[ast.AST]:
    for node in ast.walk(tree):
        match node:
            case ast.Constant(value=int(number)) if number in ERROR_CODES:
                yield node
            case ast.keyword(arg="status", value=ast.Constant()):
                yield node.value
            case ast.Attribute(attr=name) if name.startswith("HTTP") and name != "HTTPException":
                yield node


def test_no_module_is_named_like_one_of_the_standard_library() -> None:
    """A script run by its path puts its own folder first, so any such file could shadow."""
    names = {path: path.stem for path in [*SOURCES, *TESTS] if not path.stem.startswith("__")}
    assert [str(path) for path, name in names.items() if name in sys.stdlib_module_names] == []
    top = [path.parent.name for path in ROOT.glob("*/__init__.py")] + [path.stem for path in ROOT.glob("*.py")]
    assert set(top) & set(sys.stdlib_module_names) == set()


def test_tokenize_is_no_package_and_the_standard_module_is_found() -> None:
    assert not (ROOT / "tokenize" / "__init__.py").exists()
    assert (ROOT / "server" / "tokenizer").readlink() == Path("../tokenize")
    command = [sys.executable, "-c", "import tokenize, inspect, linecache; tokenize.open"]
    subprocess.run(command, cwd=ROOT, check=True, timeout=60)


def test_modules_say_what_they_are_and_stay_small() -> None:
    for path in [*SOURCES, *TESTS]:
        assert ast.get_docstring(_tree(path)), f"{path}: no docstring"
    for path in SOURCES:
        lines = len(path.read_text(encoding="utf-8").splitlines())
        assert lines <= MAX_MODULE_LINES, f"{path}: {lines} lines"


def test_functions_stay_small() -> None:
    functions = [
        (path, node)
        for path in [*SOURCES, *TESTS]
        for node in ast.walk(_tree(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    long = [
        _where(path, node) for path, node in functions if (node.end_lineno or 0) - node.lineno >= MAX_FUNCTION_LINES
    ]
    assert long == []


def test_server_and_engine_packages_import_nothing_at_birth() -> None:
    for package in ("server", "engine", "ipc"):
        assert list(_imports(ROOT / package / "__init__.py")) == []


def test_nothing_is_left_unfinished_and_no_path_of_a_machine_is_named() -> None:
    for path in _project_files():
        text = path.read_text(encoding="utf-8")
        for pattern in (UNFINISHED, MACHINE_PATH):
            found = pattern.search(text)
            assert not found or path == Path(__file__).resolve(), f"{path}: {found[0]}"


def _project_files() -> Iterator[Path]:
    for folder in (*PACKAGES, "csrc", "doc", "tests", ".ci"):
        yield from (path for path in (ROOT / folder).rglob("*") if path.is_file() and path.suffix in TEXT_SUFFIXES)
    yield from (path for path in ROOT.glob("[!.]*") if path.is_file() and path.suffix in TEXT_SUFFIXES)


def test_map_in_readme_names_every_module_and_nothing_else() -> None:
    mapped = _mapped_files()
    assert [str(path.relative_to(ROOT)) for path in sorted(mapped) if not path.exists()] == []
    folders = {path.parent for path in mapped}
    modules = {path for path in SOURCES if path.parent in folders and path.name != "__init__.py"}
    assert [str(path.relative_to(ROOT)) for path in sorted(modules - mapped)] == []


def _mapped_files() -> set[Path]:
    """Of the map: a line that starts with a folder, then indented lines that start with a file."""
    lines = (ROOT / "README.md").read_text(encoding="utf-8").partition("## The files")[2].splitlines()
    found, folder = set(), ROOT
    for name in (line[: line.index(" ", 2)] for line in lines if " " in line[2:]):
        if name.startswith("  "):
            found.add(folder / name.strip())
        else:
            folder = ROOT / name
    return found


def test_setup_names_every_package() -> None:
    config = configparser.ConfigParser(interpolation=None)
    config.read(ROOT / "setup.cfg")
    found = {_module(path) for path in SOURCES if path.name == "__init__.py"} | {"server.tokenizer"}
    assert set(config["options"]["packages"].split()) == found


def test_setup_builds_every_native_module() -> None:
    setup = runpy.run_path(str(ROOT / "setup.py"))
    built = {source for extension in setup["extensions"]({}) for source in extension.sources}
    assert {f"csrc/{path.name}" for path in (ROOT / "csrc").glob("*_module.cpp")} <= built


@pytest.mark.parametrize(
    ("package", "heavy"),
    [
        ("server", "aiohttp.web,asyncio,jinja2,msgspec,numpy,prometheus_client,uvloop"),
        ("tokenize", "numpy,tokenizers,transformers"),
        ("ipc", "msgspec,numpy"),
        ("engine", "numpy,msgspec,torch,transformers.modeling_utils,transformers.models.auto.modeling_auto"),
        ("bench", "numpy"),
    ],
)
def test_every_module_imports_alone(package: str, heavy: str) -> None:
    modules = [_module(path) for path in _files(package)]
    command = [sys.executable, "-c", IMPORT_ALONE, heavy, *modules]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=110)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def test_the_whole_server_loads_no_torch() -> None:
    modules = [_module(path) for package in ("server", "tokenize", "ipc") for path in _files(package)]
    program = (
        f"import importlib, sys\nfor name in {modules}: importlib.import_module(name)\nprint('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout == "False\n"
