"""Draw the terminal session of the README: run real commands on the embedded model, save an SVG.

  python benchmarks/terminal_session.py            # writes docs/assets/session.svg
  python benchmarks/terminal_session.py --out /tmp/session.svg --text

The commands of SESSION run one after another in an empty folder, in a pseudo terminal of 100
columns, so that they print colours and tables as they do for a person. Progress bars go to stderr
and are left out. A command that fails ends the script. The fonts are those of the reader: nothing
is fetched. About half a minute on two cores.
"""

import argparse
import os
import pty
import re
import shutil
import struct
import subprocess
import sys
import tempfile
from fcntl import ioctl
from pathlib import Path
from termios import TIOCSWINSZ

from rich.console import Console
from rich.terminal_theme import DIMMED_MONOKAI
from rich.text import Text

from surgery.demo import MODEL

ROOT = Path(__file__).resolve().parent.parent
COLUMNS, ROWS = 100, 200
SESSION = (
    "surgery demo",
    "surgery relufy model --bypass full --out model-relu",
)
FONTS = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"


def in_terminal(command: str, folder: Path) -> str:
    """Return what `command` prints in a pseudo terminal, escape sequences included."""
    ours, theirs = pty.openpty()
    ioctl(theirs, TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    _, *arguments = command.split()
    environment = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES", "NO_COLOR")}
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    process = subprocess.Popen(
        [sys.executable, "-m", "surgery", *arguments],
        cwd=folder,
        env=environment | {"TERM": "xterm-256color", "PYTHONPATH": path},
        stdin=subprocess.DEVNULL,
        stdout=theirs,
        stderr=subprocess.PIPE,
    )
    os.close(theirs)
    printed = bytearray()
    while piece := read(ours):
        printed += piece
    _, errors = process.communicate()
    os.close(ours)
    if process.returncode:
        sys.exit(f"{command} failed:\n{errors.decode()}")
    return printed.decode().replace("\r\n", "\n")


def read(terminal: int) -> bytes:
    """Return some bytes of a pseudo terminal, none at its end."""
    try:
        return os.read(terminal, 65536)
    except OSError:  # EIO: on Linux the last writer has closed it
        return b""


def draw(session: str, out: Path) -> None:
    """Save the session as an SVG that needs no font of its own."""
    with Path(os.devnull).open("w") as nowhere:
        console = Console(record=True, width=COLUMNS, file=nowhere)
        console.print(Text.from_ansi(session.rstrip("\n")))
    svg = console.export_svg(title="surgery", theme=DIMMED_MONOKAI)
    svg = re.sub(r"\s*@font-face \{.*?\}", "", svg, flags=re.DOTALL)  # rich fetches Fira Code
    svg = re.sub(r"font-family: [^;]*;", f"font-family: {FONTS};", svg)
    svg = re.sub(r"\s*<!-- .*? -->", "", svg)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(svg)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=ROOT / "docs/assets/session.svg")
    parser.add_argument("--text", action="store_true", help="Print the session, too.")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        shutil.copytree(MODEL, Path(work) / "model")
        session = "\n".join(f"$ {c}\n{in_terminal(c, Path(work))}" for c in SESSION)
        for local in (work, str(ROOT), str(Path.home())):
            if local != "/" and local in session:
                sys.exit(f"the session shows a path of this machine: {local}")
    draw(session, arguments.out)
    if arguments.text:
        print(session)
    print(f"wrote {arguments.out}")


if __name__ == "__main__":
    main()
