"""The tables of a page in a terminal."""

from __future__ import annotations

from benchmarks.reporting.page import Page


def show(page: Page) -> None:
    """Print all tables; what came from records is text there, never markup."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    for table in (table for section in page.sections for table in section.tables):
        shown = Table(box=box.SIMPLE_HEAD, title=Text(table.title), title_justify="left", caption=table.note or None)
        for name, left in zip(table.columns, table.left, strict=True):
            shown.add_column(name, justify="left" if left else "right")
        for row in table.rows:
            shown.add_row(*map(Text, row))
        console.print(shown)
