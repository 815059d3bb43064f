"""Random networks against second differences of their loss, for as long as you like: `make fuzz SECONDS=3600`.

Networks are compared in a child process, one at a time, so that an interpreter that dies is a finding too. Each
finding is shrunk to a small network that still fails, and written to the folder of findings as JSON; once its cause is
fixed, move the file to tests/counterexamples, where the tests replay it.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import datetime
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

PATIENCE = 120.0  # processor seconds that one network may take; ten times as many by the clock
SHRINKING = 90.0  # seconds to make a counterexample smaller


# ---------------------------------------------------------------- the child


def serve() -> None:
    """Compare the programs that arrive on standard input, one line of JSON each, and report what was found."""
    import torch
    from comparisons import compare

    torch.set_num_threads(1)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # so that nothing printed disturbs the answers

    def say(kind: str, content: Any) -> None:
        answers.write(json.dumps([kind, content]) + "\n")
        answers.flush()

    for line in sys.stdin:
        program, ways = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, PATIENCE)  # which ends the process
        try:
            outcome = dataclasses.asdict(compare(program, ways, lambda way: say("way", way)))
        except Exception as error:  # not a valid program: a shrunk one may not run
            say("unusable", f"{type(error).__name__}: {error}")
        else:
            say("outcome", outcome)


class Child:
    """A process that compares networks, and a spare that takes its place when it dies or takes too long."""

    def __init__(self) -> None:
        self.lines: dict[subprocess.Popen[str], queue.Queue[str]] = {}
        self.process, self.spare = self._new(), self._new()

    def _new(self) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-W", "ignore", __file__, "--child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            bufsize=1,
            cwd=ROOT,
        )
        self.lines[process] = queue.Queue()
        threading.Thread(target=_listen, args=(process, self.lines[process]), daemon=True).start()
        return process

    def replace(self) -> int:
        """End the process and continue with the spare; returns its exit code."""
        code = _end(self.process)
        del self.lines[self.process]
        self.process, self.spare = self.spare, self._new()
        return code

    def stop(self) -> None:
        _end(self.process), _end(self.spare)

    def compare(self, program: dict[str, Any], ways: list[str] | None = None) -> dict[str, Any] | None:
        """The outcome; `None` for a program that cannot be run."""
        process = self.process
        assert process.stdin is not None
        process.stdin.write(json.dumps([program, ways]) + "\n")
        process.stdin.flush()
        way, deadline = "the start", time.monotonic() + 10 * PATIENCE
        while True:
            try:
                line = self.lines[process].get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                self.replace()
                return _only(way, "hangs", f"no answer after {10 * PATIENCE:.0f} s")
            if not line:
                process.wait()
                code = self.replace()
                if code == -signal.SIGPROF:
                    return _only(way, "hangs", f"no answer after {PATIENCE:.0f} processor seconds")
                return _only(way, "died", f"the interpreter ended with code {code}")
            kind, content = json.loads(line)
            if kind == "way":
                way = content
            else:
                return None if kind == "unusable" else content


def _listen(process: subprocess.Popen[str], lines: queue.Queue[str]) -> None:
    """Pass on what a process says, and an empty line when it ends."""
    assert process.stdout is not None
    with process.stdout as said:
        for line in said:
            lines.put(line)
    lines.put("")


def _end(process: subprocess.Popen[str]) -> int:
    if process.poll() is None:
        process.kill()
    assert process.stdin is not None
    with contextlib.suppress(OSError):
        process.stdin.close()
    return process.wait()


def _only(way: str, kind: str, said: str) -> dict[str, Any]:
    finding = {"way": way, "kind": kind, "said": said, "truth": ""}
    return {"compared": 0, "exact": 0, "estimates": [], "refusals": [], "unknown": [], "findings": [finding]}


# ---------------------------------------------------------------- shrinking


def way_of(finding: dict[str, Any]) -> str:
    """The way to measure, without the detail that follows."""
    from comparisons import WAYS

    return max((name for name in WAYS if finding["way"].startswith(name)), key=len, default=finding["way"])


def alike(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two findings are of the same kind and, for errors, say the same."""
    from comparisons import reason

    if (one["kind"], way_of(one)) != (other["kind"], way_of(other)):
        return False
    return one["kind"] != "raised" or reason(one["said"]) == reason(other["said"])


def shrink(
    program: dict[str, Any], finding: dict[str, Any], compare: Callable[..., dict[str, Any] | None], seconds: float
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The smallest program found in the given time that fails in the same way, and how it fails."""
    from random_networks import simpler

    deadline, tried = time.monotonic() + seconds, set[str]()

    def fails(candidate: dict[str, Any]) -> dict[str, Any] | None:
        outcome = compare(candidate, [way_of(finding)])
        return next((f for f in (outcome or {"findings": []})["findings"] if alike(f, finding)), None)

    smaller = True
    while smaller:
        smaller = False
        for candidate in simpler(program):
            key = json.dumps(candidate, sort_keys=True)
            if time.monotonic() > deadline:
                return program, finding
            if key in tried:
                continue
            tried.add(key)
            found = fails(candidate)
            if found is not None:
                program, finding, smaller = candidate, found, True
                break
    return program, finding


# ---------------------------------------------------------------- the run


class Run:
    """Counts, and the findings so far."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.seed = folder, seed
        self.networks = self.compared = self.exact = self.seen = 0
        self.estimates: list[float] = []
        self.refusals: collections.Counter[str] = collections.Counter()
        self.unknown: collections.Counter[str] = collections.Counter()
        self.kept: list[dict[str, Any]] = []
        self.child = Child()
        folder.mkdir(parents=True, exist_ok=True)

    def one(self, index: int) -> None:
        from comparisons import reason
        from random_networks import draw

        program = draw(self.seed, index)
        outcome = self.child.compare(program)
        if outcome is None:
            self.unknown["the program does not run"] += 1
            return
        self.networks += 1
        self.compared += outcome["compared"]
        self.exact += outcome["exact"]
        self.estimates += outcome["estimates"]
        self.refusals.update(map(reason, outcome["refusals"]))
        self.unknown.update(outcome["unknown"])
        for finding in _distinct(outcome["findings"]):
            self.report(program, finding, index)

    def report(self, program: dict[str, Any], finding: dict[str, Any], index: int) -> None:
        self.seen += 1
        for known in self.kept:
            if _explains(known, program, finding):
                known["times"] += 1
                return
        small, found = shrink(program, finding, self.child.compare, SHRINKING)
        loss_matters = small["loss"] not in ("cross_entropy", "squared_error of numbers")
        kept = {**found, "program": small, "times": 1, "loss_matters": loss_matters, "drawn": [self.seed, index]}
        for known in self.kept:
            if known["program"] == small and known["kind"] == found["kind"]:
                known["times"] += 1
                return
        self.kept.append(kept)
        name = f"{self.seed}-{index}-{way_of(found).replace(' ', '-')}.json"
        (self.folder / name).write_text(case_text(kept), encoding="utf-8")
        print(f"\n  {describe(kept)}\n  -> {self.folder / name}", flush=True)

    def progress(self, left: float) -> str:
        return (
            f"{self.networks:,} networks, {self.compared:,} comparisons ({self.exact:,} exact), "
            f"{sum(self.refusals.values()):,} refusals, {len(self.kept)} distinct findings; {left:.0f} s left"
        )

    def summary(self) -> str:
        wide = sum(z > 2 for z in self.estimates)
        lines = [
            f"{self.networks:,} networks; {self.compared:,} comparisons, {self.exact:,} of them of exact answers.",
            f"{len(self.estimates):,} estimates, {wide:,} ({wide / max(1, len(self.estimates)):.1%}) of them more than "
            "2 standard errors off (a normal distribution has 4.6%, Student's t with 15 degrees of freedom 6.6%).",
            f"{sum(self.unknown.values()):,} comparisons with no truth to compare with:",
            *(f"  {count:6,}  {text}" for text, count in self.unknown.most_common(12)),
            f"{sum(self.refusals.values()):,} refusals:",
            *(f"  {count:6,}  {text}" for text, count in self.refusals.most_common(60)),
            f"{self.seen:,} findings, {len(self.kept)} of them distinct:",
            *(f"  {describe(kept)} (seen {kept['times']} times)" for kept in self.kept),
        ]
        return "\n".join(lines)


def _explains(known: dict[str, Any], program: dict[str, Any], finding: dict[str, Any]) -> bool:
    """Whether a finding is probably a known one again: the same error, or the same steps among others."""
    from random_networks import words

    if known["kind"] != finding["kind"]:
        return False
    if finding["kind"] == "raised":
        return alike(known, finding)
    same_loss = not known["loss_matters"] or known["program"]["loss"] == program["loss"]
    return same_loss and set(words(known["program"])) <= set(words(program))


def _distinct(findings: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The first finding of each kind: several ways that share a mistake are one finding."""
    seen = set[str]()
    for finding in findings:
        key = finding["kind"] + (finding["said"] if finding["kind"] == "raised" else "")
        if key not in seen:
            seen.add(key)
            yield finding


def describe(kept: dict[str, Any]) -> str:
    from random_networks import words

    program = kept["program"]
    network = "; ".join(words(program)) or "no step"
    truth = f", truth {kept['truth']}" if kept["truth"] else ""
    more = f"{program['loss']}, {program['dtype']}, head {program['head']}"
    return f"[{network}] ({more}) {kept['way']}: {kept['kind']}, said {kept['said']}{truth}"


def case_text(kept: dict[str, Any]) -> str:
    """A counterexample as it is kept: what was said, what is true, and the program that shows it."""
    shown = {key: kept[key] for key in ("way", "kind", "said", "truth", "program", "drawn")}
    return json.dumps(shown, indent=1) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    today = int(datetime.date.today().strftime("%Y%m%d"))
    parser.add_argument("--seconds", type=float, default=600, help="how long to run")
    parser.add_argument("--seed", type=int, default=today, help="which networks to draw (default: today's date)")
    parser.add_argument("--start", type=int, default=0, help="number of the first network, to resume after a stop")
    parser.add_argument("--out", type=Path, default=Path("build/fuzz"), help="folder for the findings")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        serve()
        return 0
    import torch

    torch.set_num_threads(1)
    run, index = Run(options.out, options.seed), options.start
    end = time.monotonic() + options.seconds
    spoken = time.monotonic()
    try:
        while time.monotonic() < end:
            run.one(index)
            index += 1
            if time.monotonic() - spoken > 10:
                print(run.progress(end - time.monotonic()), flush=True)
                spoken = time.monotonic()
    except KeyboardInterrupt:
        print("stopped", flush=True)
    finally:
        run.child.stop()
    text = run.summary()
    print(f"{text}\nTo resume: --seed {options.seed} --start {index}")
    (options.out / f"summary-{options.seed}-{options.start}.txt").write_text(text + "\n", encoding="utf-8")
    return 1 if run.kept else 0


if __name__ == "__main__":
    raise SystemExit(main())
