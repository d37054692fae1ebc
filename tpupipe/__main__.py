"""``python -m tpupipe``: the command line, where the console script is not on the path."""

from __future__ import annotations

from tpupipe.cli import app

if __name__ == "__main__":
    app(prog_name="tpupipe")
