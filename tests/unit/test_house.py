"""Rules for the code that ruff, mypy and import-linter cannot check."""

from __future__ import annotations

import ast
import re
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock import errors

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src"
MAX_LINES = 500
MIN_LINES = 40
MAX_MODULES = 20
SMALL_MODULES = {
    "pyspark_penstock.py": "Spark finds data sources by importing modules with this prefix",
    "penstock/location.py": "a value that every layer uses, below all of them",
    "penstock/retry.py": "the one backoff, below all layers",
    "penstock/sinks/repair_files.py": "column names for executors, which must not load Spark",
    "penstock/spark/control.py": "the data source that only triggers epochs",
    "penstock/spark/query.py": "the driver loads it without the data source",
    "penstock/testing/rules.py": "shared by the contract suites",
    "penstock/worker.py": "runs in Spark's Python workers, which must load little",
}
"""Modules below MIN_LINES, with the reason."""

VAGUE_NAMES = frozenset({"utils", "util", "common", "helpers", "helper", "core", "manager", "misc"})
PINNED = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*==[A-Za-z0-9.+!]+")

FILE_FUNCTIONS: dict[str, frozenset[str] | None] = {
    "os": frozenset(
        re.findall(
            r"\w+",
            """access chmod chown fchmod fdatasync fdopen fstat fsync ftruncate link listdir lstat makedirs
            mkdir open pread pwrite readlink remove removedirs rename renames replace rmdir scandir stat
            statvfs symlink sync truncate unlink utime walk""",
        )
    ),
    "shutil": frozenset({"chown", "copy", "copy2", "copyfile", "copytree", "disk_usage", "move", "rmtree"}),
    "pa": frozenset({"OSFile", "memory_map"}),
    "fcntl": None,
    "mmap": None,
    "tempfile": None,
}
"""Functions that access files, by module; None stands for all of them."""
PATH_METHODS = frozenset(
    re.findall(
        r"\w+",
        """chmod exists glob hardlink_to is_dir is_file is_symlink iterdir lstat mkdir read_bytes read_text
        rename rglob rmdir samefile stat symlink_to touch unlink write_bytes write_text""",
    )
)
FILE_ACCESS = {
    "penstock/storage/": "the package for file access",
    "penstock/testing/": "servers and downloads for tests and the demo; nothing of a pipeline's data",
    "penstock/postgres/queries.py": "SQL files of the package itself, by importlib.resources",
}
"""Where files may be accessed directly, with the reason."""
BANNED = re.compile(
    r"(?<![a-z])(?:who(?:m|se)?ever|(?:no|some|every)body|anew|meanwhile|by[ _]then|all[ _]the[ "
    r"_]while|of[ _](?:ours|theirs|its[ _]own)"
    r"|put[ _]aside|comes?[ _]to[ _](?:the[ _]same|nothing|what)|looked[ _]at|is[ _]told|are[ "
    r"_]told)(?![a-z])",
    re.IGNORECASE,
)
BANNED_COUNTS = {"src": 24, "tests": 28, "docs": 0}
"""Banned words that are left in each area. The numbers may only fall."""
UNCHECKED = frozenset({"docs/glossary.md", "tests/unit/test_house.py", "tests/unit/test_idiom.py"})
"""The glossary lists former terms, and these modules banned words."""

SUBJECT = re.compile(
    r"(?:build|chore|ci|docs|feat|fix|perf|refactor|revert|style|test)(?:\([a-z0-9, /_-]+\))?!?: \S.*"
)
MAX_SUBJECT = 72
SUBJECTS_SINCE = "7047cc48798286b9b23d7c8659ff53c7199fe9d7"
"""Older commits had no rule."""


def modules() -> Iterator[Path]:
    yield from sorted(SOURCE.rglob("*.py"))


def test_modules_are_not_too_long() -> None:
    lengths = {
        path.relative_to(ROOT): _line_count(path)
        for area in ("src", "tests", "tools")
        for path in (ROOT / area).rglob("*.py")
    }
    assert {str(path): count for path, count in lengths.items() if count > MAX_LINES} == {}


def test_modules_are_not_too_short_without_a_reason() -> None:
    short = {
        str(path.relative_to(SOURCE))
        for path in modules()
        if path.name != "__init__.py" and _line_count(path) < MIN_LINES
    }
    assert short - set(SMALL_MODULES) == set(), (
        "merge the module into its neighbour, or give a reason in SMALL_MODULES"
    )
    assert [name for name in SMALL_MODULES if not (SOURCE / name).exists()] == [], (
        "remove the module from SMALL_MODULES"
    )


def test_packages_have_at_most_twenty_modules() -> None:
    counts = Counter(str(path.parent.relative_to(SOURCE)) for path in modules() if path.name != "__init__.py")
    assert {package: count for package, count in counts.items() if count > MAX_MODULES} == {}


def test_module_names_are_not_vague() -> None:
    assert [
        path for path in modules() if VAGUE_NAMES & {*path.parent.relative_to(SOURCE).parts, path.stem}
    ] == []


def test_test_modules_do_not_import_each_other() -> None:
    imports = {
        f"{path.relative_to(ROOT)} imports {name}"
        for path in (ROOT / "tests").rglob("*.py")
        for name in _imported_modules(ast.parse(path.read_text(encoding="utf-8")))
        if name.startswith("tests.") and re.search(r"\.(?:test_\w+|conftest)(?:\.|$)", name)
    }
    assert imports == set(), "move the shared helper to tests/support"


@pytest.mark.parametrize(
    "line",
    [
        "from tests.unit.test_house import ROOT",
        "import tests.unit.test_house",
        "from tests.unit import test_house",
        "import tests.conftest",
    ],
)
def test_imports_of_test_modules_are_found(line: str) -> None:
    assert {"tests.unit.test_house", "tests.conftest"} & _imported_modules(ast.parse(line))


@pytest.mark.parametrize("area", BANNED_COUNTS)
def test_banned_words_become_fewer(area: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}: {word}"
        for path in sorted((ROOT / area).rglob("*"))
        if path.suffix in {".py", ".md", ".sql"} and path.relative_to(ROOT).as_posix() not in UNCHECKED
        for word in BANNED.findall(path.read_text(encoding="utf-8"))
    ]
    assert len(found) <= BANNED_COUNTS[area], found[:20]


@pytest.mark.parametrize(
    "text",
    [
        "Whoever asks",
        "test_nobody_waits",
        "copied anew",
        "by then",
        "a task of its own",
        "is told",
        "ALL THE WHILE",
    ],
)
def test_banned_words_are_found(text: str) -> None:
    assert BANNED.search(text)


@pytest.mark.parametrize("text", ["renewed", "a fuller", "anewline", "by the node", "foretold"])
def test_similar_words_are_not_banned(text: str) -> None:
    assert not BANNED.search(text)


def test_commit_subjects_have_a_type_and_at_most_72_characters() -> None:
    wrong = [subject for subject in _commit_subjects() if not _is_subject(subject)]
    assert wrong == [], "type(scope): imperative subject"


@pytest.mark.parametrize(
    "subject",
    [
        "Merge branch 'main'",
        "fix:",
        "fix(sinks) say",
        "Fix(sinks): say",
        "fix(sinks): " + "x" * 61,
        "wip: all",
    ],
)
def test_wrong_commit_subjects_are_found(subject: str) -> None:
    assert not _is_subject(subject)


@pytest.mark.parametrize(
    "subject", ["docs: name the limit", "fix(spool, sinks)!: say", "refactor(sinks/delta): " + "x" * 49]
)
def test_right_commit_subjects_are_accepted(subject: str) -> None:
    assert _is_subject(subject)


def test_every_package_has_an_init_and_is_typed() -> None:
    packages = {path.parent for path in modules() if path.parent != SOURCE}
    assert {folder for folder in packages if not (folder / "__init__.py").exists()} == set()
    assert (SOURCE / "penstock" / "py.typed").exists()


def test_the_whole_error_tree_is_in_one_module() -> None:
    tree = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, errors.PenstockError)
    }
    strays = [
        f"{path.relative_to(SOURCE)}: {node.name}"
        for path in modules()
        if path.name != "errors.py"
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef)
        and tree & {base.id for base in node.bases if isinstance(base, ast.Name)}
    ]
    assert strays == []


def test_only_the_storage_package_accesses_files() -> None:
    strays = [
        f"{name}:{line}: {what}"
        for path in modules()
        if not (name := str(path.relative_to(SOURCE))).startswith(tuple(FILE_ACCESS))
        for line, what in _file_accesses(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert strays == [], "use penstock.storage"


@pytest.mark.parametrize("place", FILE_ACCESS)
def test_every_exception_for_file_access_is_needed(place: str) -> None:
    paths = [path for path in modules() if str(path.relative_to(SOURCE)).startswith(place)]
    assert any(next(_file_accesses(ast.parse(path.read_text(encoding="utf-8"))), None) for path in paths)


@pytest.mark.parametrize(
    "code",
    [
        "open(path)",
        "path.open('rb')",
        "path.open(encoding='utf-8')",
        "path.read_bytes()",
        "Path(place, 'a').unlink(missing_ok=True)",
        "temporary.replace(path)",
        "weakref.finalize(self, shutil.rmtree, directory)",
        "os.fsync(file.fileno())",
        "from os import link",
        "import tempfile",
        "pa.OSFile(path, mode='wb')",
    ],
)
def test_direct_file_access_is_noticed(code: str) -> None:
    assert list(_file_accesses(ast.parse(code)))


@pytest.mark.parametrize(
    "code",
    [
        "storage.rename(one, other)",
        "text.replace('a', 'b')",
        "connector.open(config)",
        "os.getpid()",
        "shutil.which('java')",
    ],
)
def test_other_calls_are_not_taken_for_file_access(code: str) -> None:
    assert list(_file_accesses(ast.parse(code))) == []


@pytest.mark.parametrize("name", ["constraints.txt", "constraints-spark42.txt"])
def test_constraints_are_exact_and_name_no_package_twice(name: str) -> None:
    lines = [
        line
        for line in (ROOT / name).read_text(encoding="utf-8").splitlines()
        if line and not line.startswith("#")
    ]
    assert [line for line in lines if not PINNED.fullmatch(line)] == []
    packages = [line.partition("==")[0].lower().replace("_", "-") for line in lines]
    assert len(packages) == len(set(packages))


def _line_count(path: Path) -> int:
    return sum(1 for line in path.read_text(encoding="utf-8").splitlines() if line.strip())


def _file_accesses(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and _is_file_function(node.value.id, node.attr)
        ):
            yield node.lineno, f"{node.value.id}.{node.attr}"
        elif isinstance(node, ast.Import):
            yield from (
                (node.lineno, each.name) for each in node.names if FILE_FUNCTIONS.get(each.name, ()) is None
            )
        elif isinstance(node, ast.ImportFrom):
            yield from (
                (node.lineno, each.name)
                for each in node.names
                if _is_file_function(node.module or "", each.name)
            )
        elif isinstance(node, ast.Call) and _is_file_call(node):
            yield node.lineno, ast.unparse(node.func)


def _is_file_function(module: str, name: str) -> bool:
    names = FILE_FUNCTIONS.get(module, frozenset())
    return names is None or name in names


def _is_file_call(call: ast.Call) -> bool:
    """Methods are told by their names, since the type of their object is not known here; `open` and `replace`
    also by their arguments.
    """
    if isinstance(call.func, ast.Name):
        return call.func.id == "open"
    if not isinstance(call.func, ast.Attribute) or ast.unparse(call.func.value) == "storage":
        return False
    name, keywords = call.func.attr, {each.arg for each in call.keywords}
    if name == "open":
        has_mode = (
            bool(call.args) and isinstance(call.args[0], ast.Constant) and isinstance(call.args[0].value, str)
        )
        return has_mode or bool(keywords & {"mode", "encoding"})
    if name == "replace":
        return len(call.args) == 1 and not keywords
    return name in PATH_METHODS


def _imported_modules(tree: ast.Module) -> set[str]:
    """Names of imported modules. `from a import b` may import the module `a.b`."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.update([node.module, *(f"{node.module}.{alias.name}" for alias in node.names)])
    return names


def _is_subject(subject: str) -> bool:
    return len(subject) <= MAX_SUBJECT and SUBJECT.fullmatch(subject) is not None


def _commit_subjects() -> list[str]:
    """Subjects since the rule began, without merges. None in a source distribution or a shallow clone."""
    command = ["git", "log", "--no-merges", "--format=%s", f"{SUBJECTS_SINCE}..HEAD"]
    try:
        outcome = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return []
    return outcome.stdout.splitlines() if outcome.returncode == 0 else []
