"""`spiritlevel samples`: which samples of a recorded training to look at."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from spiritlevel.cli.base import Command, Outcome, check_writable, say, tell
from spiritlevel.cli.parsing import optional
from spiritlevel.errors import InputError


@dataclass(frozen=True, kw_only=True)
class Samples(Command):
    """List the samples of a recorded training whose labels are the most likely to be wrong.

    For example: spiritlevel samples run/ --html samples.html --data mnist

    With nothing but what is built in: run the first block of docs/guides/suspicious-samples.md, which trains for a
    second and saves its record, then spiritlevel samples record --count 5
    """

    NAME = "samples"

    run_: Annotated[Positional[Path], arg(name="run", metavar="RUN")]
    """What `sl.Recorder(...).save(RUN)` wrote: its folder, or the file in it."""
    by: Annotated[str, arg(metavar="SCORE")] = "aum"
    """aum, cumulative_loss, loss, margin, entropy, forgetting, first_learned, variability or confidence."""
    count: int = 20
    """How many to list."""
    html: Annotated[Path | None, optional("FILE")] = None
    """Also write a page of them."""
    data: Annotated[str | None, optional("DATA")] = None
    """The training data, in the order of the ids, to show the samples themselves on the page."""

    def run(self) -> Outcome:
        """Read the record, show the list, write the page."""
        if self.html is not None:
            check_writable(self.html, "--html")
        from spiritlevel.answers.recorder import Recorder
        from spiritlevel.loading import load_samples
        from spiritlevel.loading.tables import KINDS as TABLES

        recorder = Recorder.load(self.run_)
        if self.data is not None and Path(self.data).suffix in TABLES:
            raise InputError(
                f"--data {self.data} is a table, whose rows cannot be shown; name images, or file.py:function that "
                "returns texts, in the order of the ids."
            )
        shown = None if self.data is None else load_samples(self.data).data
        found = recorder.suspects(self.count, by=self.by, data=shown)
        tell(str(found))
        if shown is not None and found.pictures is None and not found.texts:
            say(f"{self.data} holds neither images of one size nor texts, so none of its samples are shown.")
        if self.html is not None:
            found.to_html(self.html)
            tell(f"The page: {self.html}")
        return Outcome({"samples": found.to_dict()})
