"""`python -m tests.fuzz`: the long run. It prints the number of a failing case, minimises and saves it;
`--case` repeats it.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import sys
import time
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict
from itertools import count
from multiprocessing import get_context
from pathlib import Path

from tests.fuzz.cases import LOT_CASES
from tests.fuzz.findings import judge_any
from tests.fuzz.lots import LOTS, Tally, place_of, run_lot


def main() -> int:
    arguments = _parse_arguments()
    if arguments.case is not None:
        subject, number, index = arguments.case.split(":")
        print("decoded" if judge_any(LOTS[subject](int(number)).case(int(index))) else "refused")
        return 0
    print(
        f"{arguments.cases:,} cases of {arguments.subject} in {arguments.processes} processes, from lot "
        f"{arguments.seed}",
        flush=True,
    )
    tally = _run(arguments)
    return 1 if tally.findings else 0


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz", description="Damaged streams for the decoder and the oracle."
    )
    parser.add_argument("--subject", choices=LOTS, default="streams")
    parser.add_argument("--cases", type=int, default=1_000_000)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument(
        "--seed", type=int, default=int(time.time()), help="the number of the first lot (default: the time)"
    )
    parser.add_argument("--progress", type=Path, help="a file that always holds the counts so far")
    parser.add_argument("--case", metavar="SUBJECT:LOT:NUMBER", help="repeat this one case")
    return parser.parse_args()


def _run(arguments: argparse.Namespace) -> Tally:
    tally = Tally()
    start = time.monotonic()
    lots = count(arguments.seed)
    waiting = arguments.cases
    running: dict[Future[Tally], int] = {}
    with ProcessPoolExecutor(
        arguments.processes, get_context("spawn"), initializer=faulthandler.enable
    ) as pool:
        while waiting > 0 or running:
            while waiting > 0 and len(running) < arguments.processes:
                number, size = next(lots), min(waiting, LOT_CASES)
                running[pool.submit(run_lot, arguments.subject, number, size, os.getpid())] = number
                waiting -= size
            done, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                tally.add(_result(future, running.pop(future)))
            _tell(tally, time.monotonic() - start, arguments.progress)
    return tally


def _result(future: Future[Tally], number: int) -> Tally:
    try:
        return future.result()
    except BrokenProcessPool:
        place = place_of(number)
        sys.exit(
            f"a process died, in case {number}:{place.read_text(encoding='ascii')}"
            if place.exists()
            else "a process died at its start"
        )


def _tell(tally: Tally, seconds: float, progress: Path | None) -> None:
    rate = tally.cases / seconds
    print(
        f"{tally.cases:,} cases, {tally.decoded:,} decoded, {tally.refused:,} refused, {rate:,.0f}/s",
        flush=True,
    )
    if progress is not None:
        progress.write_text(
            json.dumps(asdict(tally) | {"seconds": round(seconds), "cases_per_second": round(rate)}) + "\n",
            encoding="ascii",
        )


if __name__ == "__main__":
    sys.exit(main())
