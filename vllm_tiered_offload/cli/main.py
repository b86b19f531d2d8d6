"""Entry point of the command: mistakes of the user and trouble of the system end as one line, not as a traceback."""

import sys
from collections.abc import Sequence

from vllm_tiered_offload.cli.errors import INCOMPLETE, USAGE, UserError


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit with its code."""
    try:
        from vllm_tiered_offload.cli.app import app
    except ImportError as error:
        sys.exit(f"error: {error.name} is missing: pip install typer rich (vLLM brings both)")
    try:
        app(None if arguments is None else list(arguments))
    except UserError as error:
        _end(f"error: {error}", USAGE)
    except OSError as error:
        _end(f"error: {error.filename or ''}: {error.strerror or error}", INCOMPLETE)


def _end(line: str, code: int) -> None:
    print(line, file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
