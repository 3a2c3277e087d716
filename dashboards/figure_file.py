"""Write a figure to a file."""

from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dbo.platform.runs.atomic_io import write_atomically

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def save_figure(figure: "Figure", path: Path, **options: Any) -> None:
    """Write a figure in the format of the file's name; a symbolic link in its place is replaced, not followed."""
    buffer = BytesIO()
    figure.savefig(buffer, format=path.suffix[1:], **options)
    write_atomically(path, buffer.getvalue(), "a figure")
