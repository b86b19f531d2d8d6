"""The tree of commands."""

import typer

from vllm_tiered_offload import __version__
from vllm_tiered_offload.cli.fs import fs
from vllm_tiered_offload.cli.p2p import p2p

app = typer.Typer(
    help="Tools of vllm-tiered-offload, the KV-cache offloading connector for vLLM.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(fs, name="fs")
app.add_typer(p2p, name="p2p")


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(__version__)
