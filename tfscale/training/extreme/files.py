"""The folder of a MACH: a manifest, and the weights and a record of each trained model.

The manifest says how classes are hashed. Each record repeats that, so that no model answers for
classes that it was not trained for, and has the digest of its file of weights. A file of weights
is complete before the record names it, and the old one is deleted after that.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import shutil
from pathlib import Path
from typing import Any

from tfscale.support import records
from tfscale.support.files import replacing
from tfscale.support.records import Record, RecordError

MANIFEST, CLASSES = "mach.json", "classes.json"
_ENDING = ".weights.h5"


class Folder:
    """The files of one MACH.

    Args:
        path: the folder; ``open`` makes it.
        settings: fields of the manifest: how classes are hashed, and the number of models.
        names: the names of classes, or None.
    """

    def __init__(self, path: str | Path, settings: dict[str, Any], names: Any = None) -> None:
        self.path, self._settings = Path(path), settings
        self._text = None if names is None else json.dumps(list(names))
        if self._text is not None:
            self._settings = {**settings, "names": _digest(self._text.encode())}

    def open(self) -> None:
        """Write the manifest, or check the one that is there.

        Raises:
            ValueError: if the folder holds another MACH.
        """
        manifest = self.path / MANIFEST
        if manifest.exists():
            _compare(Record.read(manifest), self._settings)
            return
        if self._text is not None:
            self.path.mkdir(parents=True, exist_ok=True)
            with replacing(self.path / CLASSES) as fresh:
                fresh.write_text(self._text)
        records.write(manifest, self._settings)

    def epochs(self, name: str) -> int:
        """Return how many epochs a model was trained; 0 if it has no files."""
        record = self._record(name)
        return 0 if record is None else record.integer("epochs")

    def write(self, name: str, model: Any, epochs: int) -> None:
        """Write a model's weights and its optimizer, and then its record."""
        before = self._record(name)
        target = self.path / f"{name}-{secrets.token_hex(4)}{_ENDING}"
        with replacing(target) as fresh:
            model.save_weights(fresh)
        digest = _digest(target.read_bytes())
        fields = {**self._settings, "epochs": epochs, "weights": target.name, "digest": digest}
        records.write(self.path / f"{name}.json", fields)
        if before is not None:
            (self.path / before.text("weights")).unlink(missing_ok=True)

    def read(self, name: str, model: Any) -> bool:
        """Load a model's weights; return False if it has no files.

        Raises:
            RecordError: if the files are of another MACH, or damaged.
        """
        record = self._record(name)
        if record is None:
            return False
        weights = self.path / record.text("weights")
        if not weights.exists():
            raise RecordError(
                f"{record.path}: weights: {weights} does not exist; train {name} again"
            )
        if _digest(weights.read_bytes()) != record.text("digest"):
            raise RecordError(
                f"{weights}: the file is damaged or was replaced: its digest differs from the one "
                f"in {record.path.name}; delete both and train {name} again"
            )
        optimizer = getattr(model, "optimizer", None)
        if optimizer is not None and not optimizer.built:
            optimizer.build(model.trainable_variables)
        model.load_weights(weights)
        return True

    def backup(self, name: str) -> Path:
        """Return the folder for the unfinished training of a model."""
        return self.path / f"{name}.backup"

    def forget_backup(self, name: str) -> None:
        """Delete what an unfinished training has left."""
        shutil.rmtree(self.backup(name), ignore_errors=True)

    def _record(self, name: str) -> Record | None:
        path = self.path / f"{name}.json"
        if not path.exists():
            return None
        record = Record.read(path)
        _compare(record, self._settings)
        return record


def read_settings(path: str | Path) -> tuple[Record, list[str] | None]:
    """Return the manifest of a folder, and the names of its classes if they have any."""
    manifest = Path(path) / MANIFEST
    if not manifest.exists():
        raise FileNotFoundError(f"{path} is no folder of a MACH: it has no {MANIFEST}")
    record = Record.read(manifest)
    if "names" not in record:
        return record, None
    text = (manifest.parent / CLASSES).read_text()
    if _digest(text.encode()) != record.text("names"):
        raise RecordError(f"{manifest.parent / CLASSES}: these are not the names of {manifest}")
    return record, list(json.loads(text))


def _compare(record: Record, settings: dict[str, Any]) -> None:
    for key, value in settings.items():
        read = record.text if isinstance(value, str) else record.integer
        if read(key) != value:
            raise record.wrong(
                key, f"{value!r}, as this MACH has; take another folder, or make the MACH as it was"
            )


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()
