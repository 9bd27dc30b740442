"""Try the mutations: ``python -m proof.mutations [NAME…]``. Status 0 if a test has caught each of them.

First the tests run without any mutation, each once. A test that is red anyway cannot show anything, so its mutations
are not tried.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Iterator, Sequence

from proof.mutations import trial
from proof.mutations.mutation import ROOT, Mutation, chosen
from proof.mutations.trial import Trial

CAUGHT, NOT_CAUGHT, WRONG_USAGE = 0, 1, 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Try the mutations that the arguments name, or all."""
    options = _parser().parse_args(arguments)
    try:
        mutations = chosen(options.names)
        for mutation in mutations:
            mutation.of((ROOT / mutation.file).read_text())
    except ValueError as error:
        print(f"mutations: {error}", file=sys.stderr)  # noqa: T201
        return WRONG_USAGE
    if options.list:
        for mutation in mutations:
            print(f"{mutation.name}\n    in {mutation.file}\n    for {', '.join(mutation.tests)}")  # noqa: T201
        return CAUGHT
    red = {} if options.no_baseline else _baseline(mutations)
    if options.baseline:
        return NOT_CAUGHT if red else CAUGHT
    until_s = time.monotonic() + options.seconds if options.seconds else math.inf
    found = dict(_tried([one for one in mutations if not red.keys() & _tests(one)], until_s))
    others = {one.name: found[one.name].verdict if one.name in found else "not tried" for one in mutations}
    others = {name: verdict for name, verdict in others.items() if verdict != "caught"}
    print(f"{len(mutations) - len(others)} of {len(mutations)} mutations were caught")  # noqa: T201
    for name, verdict in others.items():
        print(f"{verdict}: {name}")  # noqa: T201
    return NOT_CAUGHT if others else CAUGHT


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m proof.mutations", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="a part of the names of mutations; all without any")
    parser.add_argument("--list", action="store_true", help="list the mutations, with their files and tests")
    parser.add_argument("--seconds", type=float, metavar="N", help="begin no other mutation after N seconds")
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--baseline", action="store_true", help="only run the tests without any mutation")
    only.add_argument("--no-baseline", action="store_true", help="do not run the tests without any mutation first")
    return parser


def _tests(mutation: Mutation) -> set[tuple[str, str]]:
    """The tests of a mutation, each with its suite."""
    return {(mutation.suite, test) for test in mutation.tests}


def _baseline(mutations: Sequence[Mutation]) -> dict[tuple[str, str], str]:
    """Run each test once without any mutation; returns those that are red, and why."""
    red: dict[tuple[str, str], str] = {}
    wanted = {test for mutation in mutations for test in _tests(mutation)}
    for suite in sorted({suite for suite, _ in wanted}):
        tests = sorted(test for of, test in wanted if of == suite)
        print(f"without a mutation: {len(tests)} tests of {suite}", flush=True)  # noqa: T201
        for test, why in trial.baseline(ROOT, suite, tests).items():
            red[suite, test] = why
            print(f"red without a mutation: {test}: {why}", flush=True)  # noqa: T201
    return red


def _tried(mutations: Sequence[Mutation], until_s: float) -> Iterator[tuple[str, Trial]]:
    """Try mutations one after another; by name, what their tests have shown."""
    for number, mutation in enumerate(mutations, start=1):
        if time.monotonic() > until_s:
            return
        try:
            found = trial.attempt(ROOT, mutation)
        except RuntimeError as error:
            found = Trial("no verdict", str(error), 0)
        print(  # noqa: T201
            f"{number} of {len(mutations)}: {mutation.name}: {found.verdict} in {found.seconds:.0f} s, {found.why}",
            flush=True,
        )
        yield mutation.name, found


if __name__ == "__main__":
    sys.exit(main())
