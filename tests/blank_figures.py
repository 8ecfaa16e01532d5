# SPDX-License-Identifier: Apache-2.0
"""The figures of runs are composed but not drawn, unless a test looks at them: drawing one takes as long as the rest of
a short run whose programs are compiled.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from matplotlib.figure import Figure

_draw = Figure.savefig


@contextlib.contextmanager
def blank() -> Iterator[None]:
    """In the block a figure is saved as an empty file."""
    with mock.patch.object(Figure, "savefig", lambda figure, path, **options: Path(path).write_bytes(b"")):
        yield


@contextlib.contextmanager
def drawn() -> Iterator[None]:
    """In the block a figure is drawn after all."""
    with mock.patch.object(Figure, "savefig", _draw):
        yield
