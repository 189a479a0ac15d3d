"""``rabbitdlq dlq``: look at dead letters, send them back, delete them."""

import typer

from rabbitdlq.cli import changing, looking

__all__ = ["app"]

app = typer.Typer(help="Look at dead letters, send them back, delete them.", no_args_is_help=True)

app.command()(looking.summary)
app.command()(looking.groups)
app.command("list")(looking.list_letters)
app.command()(looking.show)
app.command()(changing.replay)
app.command()(changing.drop)
app.command()(changing.purge)
app.command()(changing.move)
app.command()(changing.restore)
app.command()(changing.runs)
