"""`vllm-tiered-offload p2p`: keys for the peer tier, and looking at engines that have one."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

from vllm_tiered_offload.cli import peer_views
from vllm_tiered_offload.cli.errors import NOT_THERE, UserError
from vllm_tiered_offload.cli.output import print_json, print_lines, print_table
from vllm_tiered_offload.cli.scraping import ScrapeError, scrape

p2p = typer.Typer(
    help="Make keys for the peer tier, and look at engines that have one. All of it is safe while engines run.\n\n"
    "Exit codes: 0 fine; 1 an engine does not answer; 2 a mistake in what was asked; 3 a file could not be read or "
    "written.",
    no_args_is_help=True,
)

KeyFile = Annotated[str, typer.Argument(metavar="FILE", help="The `key_file` of an engine.", show_default=False)]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead.")]


@contextmanager
def _with_sockets() -> Iterator[None]:
    """What needs the peer tier's dependencies, and tells its mistakes."""
    try:
        yield
    except ImportError as error:
        raise UserError(f"{error.name} is missing: pip install 'vllm-tiered-offload[p2p]'") from error
    except ValueError as error:
        raise UserError(str(error)) from error


@p2p.command()
def keygen(file: KeyFile, as_json: Json = False) -> None:
    """Make a key pair. The secret half goes into FILE, which only you can read; the public half is printed.

    FILE is the `key_file` of one engine. Its public half goes into the `peers` of the engines that pull from it, and
    into the `allowed_keys` of those that it pulls from.
    """
    with _with_sockets():
        from vllm_tiered_offload.tiers.p2p.keys import new_keys, write_key_file

        keys = new_keys()
        try:
            write_key_file(file, keys)
        except FileExistsError as error:
            raise UserError(f"{file} is there already: name a new file, or `p2p public-key` it") from error
        _tell_key(file, keys.public, as_json)


@p2p.command(name="public-key")
def public_key(file: KeyFile, as_json: Json = False) -> None:
    """Print the public half of the key whose secret half is in FILE."""
    with _with_sockets():
        from vllm_tiered_offload.tiers.p2p.keys import read_key_file

        _tell_key(file, read_key_file(file).public, as_json)


def _tell_key(file: str, public: bytes, as_json: bool) -> None:
    if as_json:
        print_json({"key_file": file, "public_key": public.decode("ascii")})
    else:
        print_lines([public.decode("ascii")])


@p2p.command()
def ping(
    address: Annotated[str, typer.Argument(metavar="HOST:PORT", help="Where the engine's peer tier listens.")],
    key_file: Annotated[
        str | None, typer.Option(metavar="FILE", help="Our `key_file`, where the engine has one.", show_default=False)
    ] = None,
    public_key: Annotated[
        str | None, typer.Option(metavar="KEY", help="The engine's public key, along with it.", show_default=False)
    ] = None,
    count: Annotated[int, typer.Option(min=1, max=1000, help="How often.")] = 3,
    timeout: Annotated[float, typer.Option(min=0.01, max=60, help="Seconds to wait for each answer.")] = 2.0,
    as_json: Json = False,
) -> None:
    """Ask whether the thread that serves an engine's rows is alive, and how long a round trip takes.

    With keys this also shows that the engine lets our key in. We do not greet it, so it counts each ping as a refused
    stranger; nothing else comes of it.
    """
    with _with_sockets():
        from vllm_tiered_offload.cli.pinging import NoAnswer, pinging

        try:
            with pinging(address, key_file, public_key) as connection:
                milliseconds = [connection.round_trip(number + 1, timeout) * 1000 for number in range(count)]
        except NoAnswer as error:
            if as_json:
                print_json({"address": address, "alive": False, "error": str(error)})
            else:
                print_lines([f"{address}: {error}"])
            raise typer.Exit(NOT_THERE) from None
    if as_json:
        print_json({"address": address, "alive": True, "round_trips_ms": milliseconds})
    else:
        print_lines(f"{address}: alive, {number:.2f} ms" for number in milliseconds)


@p2p.command()
def status(
    url: Annotated[str, typer.Argument(metavar="URL", help="Where the engine answers, such as http://127.0.0.1:8000.")],
    as_json: Json = False,
) -> None:
    """Say what an engine pulls from whom, and what it serves. Reads its /metrics; nothing else is asked."""
    try:
        engines = peer_views.peer_status(scrape(url))
    except ScrapeError as error:
        print_lines([str(error)])
        raise typer.Exit(NOT_THERE) from None
    if not engines:
        raise UserError(f"{url} tells nothing of a peer tier: it has none, or has not seen a request yet")
    if as_json:
        print_json(peer_views.status_json(engines))
    else:
        print_table(peer_views.PEER_COLUMNS, peer_views.peer_rows(engines))
        print_lines(peer_views.serving_lines(engines))
