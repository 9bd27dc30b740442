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

from proof.mutations import results
from proof.mutations.mutation import ROOT, Mutation, chosen
from proof.mutations.results import Result
from proof.mutations.trial import Trial, Workshop

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
    if options.render:
        results.write()
        return CAUGHT
    if options.missing:
        mutations = [one for one in mutations if one.name not in results.load(mutations)]
    with Workshop(ROOT) as workshop:
        red = {} if options.no_baseline else _baseline(workshop, mutations)
        if options.baseline:
            return NOT_CAUGHT if red else CAUGHT
        until_s = time.monotonic() + options.seconds if options.seconds else math.inf
        found = dict[str, Trial]()
        for one, tried in _tried(workshop, [one for one in mutations if not red.keys() & _tests(one)], until_s):
            found[one.name] = tried
            if options.write and tried.verdict != "no verdict":
                results.write([Result.from_trial(one, tried)])
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
    parser.add_argument("--missing", action="store_true", help="only those that results.json lacks")
    parser.add_argument("--write", action="store_true", help="record each result, and write docs/mutations.md")
    parser.add_argument("--render", action="store_true", help="try nothing; write docs/mutations.md from results.json")
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--baseline", action="store_true", help="only run the tests without any mutation")
    only.add_argument("--no-baseline", action="store_true", help="do not run the tests without any mutation first")
    return parser


def _tests(mutation: Mutation) -> set[tuple[str, str]]:
    """The tests of a mutation, each with its suite."""
    return {(mutation.suite, test) for test in mutation.tests}


def _baseline(workshop: Workshop, mutations: Sequence[Mutation]) -> dict[tuple[str, str], str]:
    """Run each test once without any mutation; returns those that are red, and why."""
    red: dict[tuple[str, str], str] = {}
    wanted = {test for mutation in mutations for test in _tests(mutation)}
    for suite in sorted({suite for suite, _ in wanted}):
        tests = sorted(test for of, test in wanted if of == suite)
        print(f"without a mutation: {len(tests)} tests of {suite}", flush=True)  # noqa: T201
        for test, why in workshop.baseline(suite, tests).items():
            red[suite, test] = why
            print(f"red without a mutation: {test}: {why}", flush=True)  # noqa: T201
    return red


def _tried(workshop: Workshop, mutations: Sequence[Mutation], until_s: float) -> Iterator[tuple[Mutation, Trial]]:
    """Try mutations one after another; each with what its tests have shown."""
    for number, mutation in enumerate(mutations, start=1):
        if time.monotonic() > until_s:
            return
        try:
            found = workshop.attempt(mutation)
        except RuntimeError as error:
            found = Trial("no verdict", str(error), 0)
        print(  # noqa: T201
            f"{number} of {len(mutations)}: {mutation.name}: {found.verdict} in {found.seconds:.0f} s, {found.why}",
            flush=True,
        )
        yield mutation, found


if __name__ == "__main__":
    sys.exit(main())
