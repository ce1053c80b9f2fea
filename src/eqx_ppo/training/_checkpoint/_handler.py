"""How Orbax writes a checkpoint: as the files that it is made of.

Imported when something is saved, because Orbax takes a while to import.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import final

import orbax.checkpoint as ocp


@final
class FilesHandler(ocp.handlers.CheckpointHandler):
    """Writes files of given names and contents; reading them takes no handler."""

    def save(self, directory: Path, args: "FilesSave") -> None:
        """Writes into a folder that is there."""
        for name, content in args.files.items():
            (Path(directory) / name).write_bytes(content)

    def restore(self, directory: Path, args: "FilesRestore | None" = None) -> None:
        """Does nothing: files are read where they are."""


@final
@ocp.args.register_with_handler(FilesHandler, for_save=True)
@dataclasses.dataclass
class FilesSave(ocp.args.CheckpointArgs):
    """What to write: contents by file name."""

    files: Mapping[str, bytes | memoryview]


@final
@ocp.args.register_with_handler(FilesHandler, for_restore=True)
@dataclasses.dataclass
class FilesRestore(ocp.args.CheckpointArgs):
    """Nothing: Orbax wants a class for every handler."""
