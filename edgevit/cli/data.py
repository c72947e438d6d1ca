"""`edgevit data`: list the data sets known by name, or fetch one."""

from __future__ import annotations

import json

import click


@click.group("data")
def command() -> None:
    """List data sets, or fetch one.

    A data set is named in `--data`: one of those listed here, or a folder of your own, with one folder of pictures
    per class (train/ and test/ inside it are used as they are; else a fifth is held out) or with IDX files.

    \b
    edgevit data list
    edgevit data get fashion-mnist
    edgevit train mobilevit_xxs --data fashion-mnist --sizes 32,64,96 --out runs/fashion
    edgevit train mobilevit_xxs --data ~/pictures/birds --sizes 160,192,256 --out runs/birds

    Fetched sets are kept under $EDGEVIT_DATA (default: ~/.cache/edgevit).
    """


@command.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def list_command(as_json: bool) -> None:
    """Each data set: name, content, pictures, licence, source.

    Pictures are counted as train + test; the last column says whether the set is on this machine.

    \b
    edgevit data list
    edgevit data list --json
    """
    from edgevit.data.catalogue import DATA_SETS, is_cached

    rows = [
        {
            "name": item.name,
            "what": item.what,
            "pictures": item.train_and_test,
            "licence": item.licence,
            "source": item.source,
            "here": "installed" if item.embedded else "cached" if is_cached(item) else "no",
        }
        for item in DATA_SETS
    ]
    if as_json:
        click.echo(json.dumps(rows, indent=2))
        return
    from rich.console import Console
    from rich.table import Table

    console = Console()
    if not console.is_terminal:
        for row in rows:
            click.echo("\t".join(row.values()))
        return
    table = Table(*rows[0])
    for row in rows:
        table.add_row(*row.values())
    console.print(table)


@command.command("get")
@click.argument("name")
@click.option(
    "--via",
    type=click.Choice(("auto", "apt", "torchvision")),
    default="auto",
    show_default=True,
    help="What fetches it: Debian's apt-get download (installs nothing), torchvision's downloader, or what works.",
)
def get_command(name: str, via: str) -> None:
    """Fetch data set NAME and check its SHA-256.

    It is kept under $EDGEVIT_DATA; nothing happens when it is there already.

    \b
    edgevit data get fashion-mnist
    edgevit data get fashion-mnist --via torchvision
    """
    from edgevit.data.catalogue import find, get

    folder = get(name, via, progress=click.echo)
    data_set = find(name)
    click.echo(f"{name}: {folder}" if folder else f"{name}: nothing to fetch, it comes with {data_set.source}")
    click.echo(f"licence: {data_set.licence}; {data_set.source}")
