"""`spiritlevel claims`: the papers' statements, run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from spiritlevel.cli.base import Outcome, ProgressBar, Seeded, check_writable, tell
from spiritlevel.cli.parsing import optional
from spiritlevel.errors import counted


@dataclass(frozen=True, kw_only=True)
class Claims(Seeded):
    """Run the formulas, theorems and counts of the three papers and say which hold; exit code 1 if one is undecided.

    For example: spiritlevel claims --paper B --json claims.json

    One claim in full: spiritlevel claims --id C-eq14
    """

    NAME = "claims"

    paper: Annotated[str | None, optional("A|B|C")] = None
    """Only the claims of this paper."""
    id: Annotated[str | None, optional("ID")] = None
    """Only this claim, in full."""
    html: Annotated[Path | None, optional("FILE")] = None
    """Also write a page to FILE."""

    def run(self) -> Outcome:
        """Run the checks, show the verdicts."""
        if self.html is not None:
            check_writable(self.html, "--html")
        from rich import box
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        from spiritlevel.papers import claims
        from spiritlevel.papers.claims import show
        from spiritlevel.results import write_atomically

        with ProgressBar() as progress:
            rulings = claims.run(paper=self.paper, id=self.id, seed=self.seed, progress=progress)
        records = [ruling.record() for ruling in rulings]
        if self.id is not None:
            Console().print(Text("\n".join(show.story(record) for record in records)))
        else:
            table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
            table.add_column("claim", no_wrap=True)
            table.add_column("verdict", width=12)
            table.add_column("evidence", overflow="fold")
            for record in records:
                evidence = "; ".join([record["text"].rstrip("."), *show.numbers(record)[:2]])
                table.add_row(*(Text(cell) for cell in (record["id"], record["verdict"], evidence)))
            Console().print(table)
            print(f"{counted(len(records), 'claim')}, seed {self.seed}: {show.counts(records)}.")
        if self.html is not None:
            write_atomically(self.html, show.to_html(records, self.seed))
            tell(f"The page: {self.html}")
        return Outcome({"verdicts": claims.tally(rulings), "claims": records}, passed=claims.decided(rulings))
