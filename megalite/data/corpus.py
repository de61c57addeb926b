"""The embedded demo corpus: the English text that every CPython carries, so that a first run needs no download."""

from __future__ import annotations

import ast
import builtins
import contextlib
import hashlib
import importlib
import inspect
import platform
import re
import sysconfig
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import sentencepiece

from megalite.data.cache import build_once, default_directory, key_of
from megalite.data.indexed import IndexedWriter, token_dtype
from megalite.data.preprocess import tokenizer_record
from megalite.data.tokenizer import load_tokenizer, train_sentencepiece

DEMO_VOCAB_SIZE = 4093
"""Odd, so that no tensor-parallel size divides it."""
RECIPE = 1
"""Part of the cache key: raise it when the corpus or the tokenizer settings change."""
_MIN_DOCUMENT, _MIN_CORPUS = 200, 200_000
_SKIPPED_FOLDERS = {"test", "tests", "idlelib", "turtledemo", "lib2to3", "pydoc_data", "site-packages", "dist-packages"}
# Modules written in C whose members nobody replaces (test runners and debuggers replace some of sys and io).
_BUILTIN_MODULES = ("math", "cmath", "itertools", "time", "_operator", "array", "select", "zlib", "_struct", "_socket")
# Grid tables, simple tables, and rows of columns.
_TABLE_LINE = re.compile(r"^\s*(\+[-=+]+\+|\|.*\||[=-]{3,}(\s+[=-]{3,})+)\s*$", re.MULTILINE)
_RULE_LINE = re.compile(r"^\s*([=*~^#-])\1{3,}\s*$\n?", re.MULTILINE)


def demo_documents() -> list[str]:
    """The documents of the corpus: language reference, module docstrings, built-in types; tables left out.

    The same Python gives the same list. The order is that of their hashes: shuffled, whatever the source order.
    Raises RuntimeError when this Python was built without its documentation.
    """
    raw = [*_topics(), *_module_docstrings(Path(sysconfig.get_path("stdlib"))), *_builtin_docs()]
    documents = {text for text in map(_clean, raw) if len(text) >= _MIN_DOCUMENT}
    size = sum(map(len, documents))
    if size < _MIN_CORPUS:
        raise RuntimeError(
            f"this Python carries only {size} characters of documentation (its docstrings were stripped);"
            " give your own text as data.paths"
        )
    return sorted(documents, key=lambda text: hashlib.sha256(text.encode()).digest())


def _topics() -> Iterator[str]:
    try:
        module = importlib.import_module("pydoc_data.topics")
    except ImportError:
        return
    yield from module.topics.values()


def _module_docstrings(folder: Path) -> Iterator[str]:
    """One document per standard-library module: its docstrings in source order. Nothing is imported."""
    for path in sorted(folder.rglob("*.py")):
        if _SKIPPED_FOLDERS.isdisjoint(path.relative_to(folder).parts):
            try:
                tree = ast.parse(path.read_bytes())
            except (SyntaxError, ValueError, OSError):
                continue
            yield "\n\n".join(_docstrings(tree))


def _docstrings(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        text = ast.get_docstring(node)
        if text:
            yield text
        for child in node.body:
            yield from _docstrings(child)


def _builtin_docs() -> Iterator[str]:
    """One document per built-in type and per module written in C."""
    for _, value in sorted(vars(builtins).items()):
        if inspect.isclass(value) and value.__module__ == "builtins":
            yield _member_docs(value)
    for name in _BUILTIN_MODULES:
        with contextlib.suppress(ImportError):
            module = importlib.import_module(name)
            types_in_it = [v for _, v in sorted(vars(module).items()) if inspect.isclass(v) and v.__module__ == name]
            yield "\n\n".join(map(_member_docs, (module, *types_in_it)))


def _member_docs(owner: type | types.ModuleType) -> str:
    """The docs of a type or module and of its functions."""
    members = [value for name, value in sorted(vars(owner).items()) if not name.startswith("_")]
    texts = [inspect.getdoc(value) for value in (owner, *filter(inspect.isroutine, members))]
    return "\n\n".join(dict.fromkeys(text for text in texts if text))


def _clean(text: str) -> str:
    """Paragraphs without tables and ruled lines; ASCII art would be most of what a small model learns."""
    blocks = re.split(r"\n\s*\n", text.replace("\r\n", "\n"))
    kept = (_RULE_LINE.sub("", block).rstrip() for block in blocks if not _TABLE_LINE.search(block))
    return "\n\n".join(block for block in kept if block.strip()).strip()


@dataclass(frozen=True, kw_only=True)
class DemoFiles:
    """Where the tokenised demo corpus lies."""

    prefix: Path
    """PREFIX.bin, PREFIX.idx, PREFIX.json."""
    tokenizer: str
    """A name for load_tokenizer."""


def prepare_demo(directory: Path | None = None, *, vocab_size: int = DEMO_VOCAB_SIZE, tokenizer: str = "") -> DemoFiles:
    """Makes the demo corpus and its tokenizer below `directory` (default: the user's cache) unless they are there.

    A sentencepiece tokenizer of `vocab_size` ids is trained, unless another `tokenizer` is named. The result is a
    function of the Python version and the arguments; it appears as a whole, and any number of processes may ask
    for it at once. Raises what `demo_documents` and `train_sentencepiece` raise.
    """
    own = load_tokenizer(tokenizer).fingerprint if tokenizer else f"sentencepiece {sentencepiece.__version__}"
    settings = {"recipe": RECIPE, "python": platform.python_version(), "tokenizer": own, "vocab_size": vocab_size}
    target = (directory or default_directory()) / f"demo-{key_of(settings)}"
    named = tokenizer or str(target / "tokenizer.model")

    def build(scratch: Path) -> None:
        documents = demo_documents()
        if not tokenizer:
            train_sentencepiece(documents, scratch / "tokenizer.model", vocab_size)
        write_documents(documents, scratch / "corpus", tokenizer or str(scratch / "tokenizer.model"), named)

    build_once(target, build)
    return DemoFiles(prefix=target / "corpus", tokenizer=named)


def write_documents(documents: Iterable[str], prefix: Path, tokenizer_name: str, recorded_name: str) -> None:
    """Tokenises `documents` to PREFIX.bin/.idx, each with its end-of-document id."""
    tokenizer = load_tokenizer(tokenizer_name)
    size = tokenizer.vocab_size
    writer = IndexedWriter(prefix, dtype=token_dtype(size), vocab_size=size)
    try:
        for text in documents:
            writer.add_document([*tokenizer.encode(text), tokenizer.eod])
        writer.finish(tokenizer=tokenizer_record(tokenizer, recorded_name))
    finally:
        writer.abort()
