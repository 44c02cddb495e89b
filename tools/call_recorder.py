"""Records which modules of penstock a process calls.

`trace_insert` installs it as `sitecustomize`, so every Python process has it.

At import, each function of penstock gets a first statement that reports the module. This costs nothing
elsewhere, unlike a profile function, under which Spark's Python workers start too late. The first byte of a
shared file switches the recording on for all processes. Each appends one line for each thread and module at
the first call: time, process, thread, module.
"""

from __future__ import annotations

import ast
import builtins
import mmap
import os
import sys
import threading
import time
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType

DIRECTORY = "PENSTOCK_TRACE"
"""The environment variable with the directory of the switch and the records."""
SWITCH = "switch"
REPORT = "__penstock_called__"
"""A builtin, so that functions which Spark pickles do not carry it along."""


class CallRecorder:
    """Called by all threads of a process, and by the processes that it forks."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        with (directory / SWITCH).open("r+b") as file:
            self._switch = mmap.mmap(file.fileno(), 1)
        self._seen: set[tuple[int, int, str]] = set()

    def __call__(self, module: str) -> None:
        if not self._switch[0]:
            return
        key = (os.getpid(), threading.get_ident(), module)
        if key not in self._seen:
            self._seen.add(key)
            line = f"{time.monotonic_ns()}\t{os.getpid()}\t{threading.current_thread().name}\t{module}\n"
            with (self._directory / f"{os.getpid()}.calls").open("a", encoding="utf-8") as file:
                file.write(line)


class _ReportCalls(ast.NodeTransformer):
    def __init__(self, module: str) -> None:
        self._module = module

    def _call(self) -> ast.Call:
        return ast.Call(ast.Name(REPORT, ast.Load()), [ast.Constant(self._module)], [])

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        self.generic_visit(node)
        has_docstring = ast.get_docstring(node, clean=False) is not None
        node.body.insert(1 if has_docstring else 0, ast.Expr(self._call()))
        return node

    def visit_Lambda(self, node: ast.Lambda) -> ast.AST:
        self.generic_visit(node)
        both = ast.Tuple([self._call(), node.body], ast.Load())
        node.body = ast.Subscript(both, ast.Constant(1), ast.Load())
        return node


class _ReportingLoader(SourceFileLoader):
    """Compiles from the source, never from or into the cache of compiled modules."""

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        tree = _ReportCalls(fullname).visit(ast.parse(self.get_data(path), path))
        code: CodeType = compile(ast.fix_missing_locations(tree), path, "exec", dont_inherit=True)
        return code


class _PenstockFinder:
    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name.partition(".")[0] not in ("penstock", "pyspark_penstock"):
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _ReportingLoader(spec.loader.name, spec.loader.path)
        return spec


def install() -> None:
    """Record the calls of this process if the environment asks for it."""
    directory = os.environ.get(DIRECTORY)
    if directory:
        setattr(builtins, REPORT, CallRecorder(Path(directory)))
        sys.meta_path.insert(0, _PenstockFinder)


if __name__ == "sitecustomize":
    install()
