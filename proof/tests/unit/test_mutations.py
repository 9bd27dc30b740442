"""The mutations in proof/mutations fit the code, and a trial of one says what its tests have shown."""

from __future__ import annotations

import ast
import json
import py_compile
import re
import subprocess
import tomllib
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import msgspec
import pytest

from proof.mutations import results
from proof.mutations.mutation import ROOT, Mutation, chosen, every
from proof.mutations.results import Result
from proof.mutations.trial import Ran, Trial, Workshop, verdict

# Each promise that the template makes is broken by one of these.
PROMISED = {
    "dedup off",
    "dedup in another transaction",
    "outbox row in another transaction",
    "offsets committed before the sink",
    "no row lock",
    "no lock order",
    "read_uncommitted",
    "random Kafka key",
    "slot recreated without a snapshot",
    "check-then-insert instead of ON CONFLICT",
    "retention shorter than replay",
    "version guard removed",
    "dead letter in another transaction",
    "publication missing",
    "ids generated twice",
    "prune that trusts the slot",
    "fence epoch not checked",
    "position gap not checked",
    "expired idempotency keys ignored",
    "a stopped batch that Spark commits",
}
PARSERS: dict[str, Callable[[str], object]] = {".py": ast.parse, ".json": json.loads, ".toml": tomllib.loads}
MUTATIONS = every()

GREEN = "def test_it() -> None:\n    import counting\n    assert counting.count() == 1, __file__\n"
BROKEN_FIXTURE = "import pytest\n@pytest.fixture\ndef one(): raise OSError('no server')\ndef test_it(one): pass\n"
SKIPPED = "import pytest\n@pytest.mark.skip(reason='no server')\ndef test_it(): pass\n"
USES_STACK = "def test_it(stack_home):\n    (stack_home / 'started').touch(exist_ok=False)\n"
OWN_STACK = """import pytest
@pytest.fixture(scope='session')
def stack_home(tmp_path_factory):
    return tmp_path_factory.mktemp('own')
"""
TEST = "tests/test_counting.py::test_it"


def test_each_has_a_name_of_its_own() -> None:
    assert [name for name, times in Counter(one.name for one in MUTATIONS).items() if times > 1] == []


def test_every_promise_has_one() -> None:
    assert {one.name for one in MUTATIONS} >= PROMISED


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda one: one.name)
def test_it_fits_its_file_and_its_tests_exist(mutation: Mutation) -> None:
    mutated = mutation.of((ROOT / mutation.file).read_text())
    parse = PARSERS.get(Path(mutation.file).suffix)
    if parse is not None:
        parse(mutated)
    assert mutation.tests
    for test in mutation.tests:
        file, *names = test.split("::")
        assert names, f"{test} is a whole file"
        found = statements_of(ROOT / mutation.suite / file)
        for name in names:
            [one] = [each for each in found if getattr(each, "name", None) == name]
            found = getattr(one, "body", [])


@cache
def statements_of(file: Path) -> list[ast.stmt]:
    return ast.parse(file.read_text()).body


@pytest.mark.parametrize("text", ["", "a = 2", "a = 1; a = 1"])
def test_a_text_that_is_not_there_once_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match="not once"):
        mutation("a = 1", "a = 2").of(text)


def test_names_choose_exactly_or_by_a_part() -> None:
    assert [one.name for one in chosen(["position gap not checked"])] == ["position gap not checked"]
    assert {one.name for one in chosen(["position gap"])} == {
        "position gap not checked",
        "lakehouse: position gap not checked",
    }
    assert chosen([]) == MUTATIONS
    with pytest.raises(ValueError, match="no mutation"):
        chosen(["nothing is called so"])


# A trial -----------------------------------------------------------------------------------------------------------


def mutation(old: str, new: str) -> Mutation:
    """One of a small repository."""
    return Mutation("of a test", "machinery/src/counting.py", old, new, [TEST])


@pytest.fixture
def bare_pytest(monkeypatch: pytest.MonkeyPatch) -> None:
    """The small repository needs no plugin, and most of the time of its runs would be their imports."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")


def repository(folder: Path, test: str) -> Path:
    """A small repository with one module and one test."""
    for name, text in {
        "src/counting.py": "def count() -> int:\n    return 1\n\n\nUNUSED = 1\n",
        "tests/test_counting.py": test,
    }.items():
        file = folder / "machinery" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    subprocess.run(["git", "init", "-q", folder], check=True)
    return folder


def test_python_compiles_a_mutation_and_the_code_after_it(tmp_path: Path) -> None:
    root = repository(tmp_path, GREEN)
    file = root / "machinery" / "src" / "counting.py"
    with mutation("return 1", "return 2").applied(root):
        compiled = Path(py_compile.compile(str(file), doraise=True) or "")
        assert compiled.exists()
    assert not compiled.exists()
    py_compile.compile(str(file), doraise=True)
    with mutation("return 1", "return 2").applied(root):
        assert not compiled.exists()
    assert "return 1" in file.read_text()


@pytest.mark.parametrize(
    ("ran", "is_caught"),
    [
        ([Ran("passed")], "not caught"),
        ([Ran("passed"), Ran("failed", "assert 1 == 2")], "caught"),
        ([Ran("error", "no server"), Ran("failed", "assert 1 == 2")], "caught"),
        ([Ran("passed"), Ran("error", "no server")], "no verdict"),
        ([Ran("skipped", "no server")], "no verdict"),
        ([Ran("failed", "ImportError: counting")], "no verdict"),
        ([Ran("failed", "Failed: Timeout >600.0s")], "no verdict"),
        ([], "no verdict"),
    ],
)
def test_only_a_failed_test_has_caught_it(ran: list[Ran], is_caught: str) -> None:
    assert verdict({str(number): one for number, one in enumerate(ran)})[0] == is_caught


@pytest.mark.usefixtures("bare_pytest")
def test_a_trial_finds_the_stack_of_an_earlier_one(tmp_path: Path) -> None:
    small = repository(tmp_path, USES_STACK)
    (small / "machinery" / "conftest.py").write_text("pytest_plugins = ['own_stack']\n")
    (small / "machinery" / "src" / "own_stack.py").write_text(OWN_STACK)
    unused = mutation("UNUSED = 1", "UNUSED = 2")
    with Workshop(small) as workshop:
        assert [workshop.attempt(unused).verdict for _ in range(2)] == ["not caught", "caught"]


@pytest.mark.usefixtures("bare_pytest")
def test_a_test_that_is_red_anyway_shows_nothing(tmp_path: Path) -> None:
    small = repository(tmp_path, GREEN)
    tests = {"red": GREEN.replace("== 1", "== 2"), "error": BROKEN_FIXTURE, "skipped": SKIPPED}
    for name, test in tests.items():
        (small / "machinery" / "tests" / f"test_{name}.py").write_text(test)
    others = [f"tests/test_{name}.py::test_it" for name in tests]
    with Workshop(small) as workshop:
        tried = workshop.attempt(mutation("return 1", "return 2"))
        assert tried.verdict == "caught"
        assert tried.why.startswith(f"{TEST}: AssertionError: …/"), "a record names no folder of this machine"
        assert workshop.baseline("machinery", [TEST, *others]).keys() == {*others}, "the mutation is gone"
    assert "return 1" in (small / "machinery/src/counting.py").read_text()  # the copy was mutated


# What is recorded ----------------------------------------------------------------------------------------------------


def test_the_document_has_the_recorded_results() -> None:
    assert results.document(MUTATIONS, results.load()) == results.DOCUMENT.read_text()


def test_no_mutation_that_was_tried_has_survived() -> None:
    assert {name: one.verdict for name, one in results.load().items() if one.verdict != "caught"} == {}


@pytest.mark.parametrize("file", [*(ROOT / "proof").rglob("results.json")], ids=lambda file: file.parent.name)
def test_no_record_names_a_folder_of_a_machine(file: Path) -> None:
    assert re.findall(r"/(?:home|root|tmp|Users)/\S*", file.read_text()) == []


def test_a_result_is_of_one_mistake_and_its_tests(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    one = mutation("return 1", "return 2")
    recorded = Result.from_trial(one, Trial("caught", f"{TEST}: assert 2 == 1", 3.4))
    monkeypatch.setattr(results, "FILE", tmp_path / "results.json")
    results.FILE.write_bytes(msgspec.json.encode([recorded]))
    assert results.load([one]) == {one.name: recorded}
    assert results.load([replace(one, old="    return 1")]) == {one.name: recorded}
    assert results.load([replace(one, new="return 3")]) == results.load([replace(one, tests=["another"])]) == {}


def test_a_mutation_without_a_result_was_not_tried() -> None:
    one, another = mutation("return 1", "return 2"), replace(mutation("return 1", "return 3"), name="another")
    found = {one.name: Result.from_trial(one, Trial("caught", f"{TEST}: assert 2 == 1", 3.4))}
    lines = list(results.render([one, another], found))
    assert lines[0].startswith("2 mutations: 1 were tried, 1 were caught, on ")
    assert lines[-3:-1] == [f"| of a test | caught | 3 | `machinery/{TEST}` |", "| another | not tried | | |"]
