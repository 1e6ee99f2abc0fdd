"""The folder of a MACH: a manifest, and the weights and a record of each trained model.

The manifest says how classes are hashed. Each record repeats that, so that no model answers for
classes that it was not trained for, and has the digest of its file of weights. A file of weights
is complete before the record names it, and the old one is deleted after that.

Classes that are added later leave the buckets of the others as they are. So the manifest also lists
the earlier numbers of classes, and a record of a model that was trained with one of them is valid.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tfscale.support import records
from tfscale.support.files import replacing
from tfscale.support.records import Record, RecordError

MANIFEST, CLASSES = "mach.json", "classes.json"
EARLIER = "earlier"  # field of the manifest
_ENDING = ".weights.h5"


class Folder:
    """The files of one MACH.

    Args:
        path: the folder; ``open`` makes it.
        settings: fields of the manifest: how classes are hashed, and the number of models.
        names: the names of classes, or None.
        earlier: earlier numbers of classes, before others were added.
    """

    def __init__(
        self, path: str | Path, settings: dict[str, Any], names: Any = None,
        earlier: Sequence[int] = (),
    ) -> None:  # fmt: skip
        self.path, self._earlier = Path(path), list(earlier)
        self._names = None if names is None else list(names)
        counts = [*self._earlier, settings["classes"]]
        self._valid = [self._with_classes(settings, count) for count in counts]
        self._settings = self._valid[-1]

    def _with_classes(self, settings: dict[str, Any], count: int) -> dict[str, Any]:
        """Return the settings with the first ``count`` classes only."""
        names = {} if self._names is None else {"names": _digest_of_names(self._names[:count])}
        return {**settings, "classes": count, **names}

    def open(self) -> None:
        """Write the manifest, or check the one that is there.

        Raises:
            ValueError: if the folder holds another MACH.
        """
        manifest = self.path / MANIFEST
        if manifest.exists():
            record = Record.read(manifest)
            self._check(record)
            if _difference(record, self._settings) is None:
                return
        if self._names is not None:
            self.path.mkdir(parents=True, exist_ok=True)
            with replacing(self.path / CLASSES) as fresh:
                fresh.write_text(json.dumps(self._names))
        records.write(manifest, {**self._settings, EARLIER: self._earlier})

    def _check(self, record: Record) -> None:
        """Raise if a record is of another MACH."""
        if any(_difference(record, valid) is None for valid in self._valid):
            return
        key = _difference(record, self._settings) or ""
        raise record.wrong(
            key,
            f"{self._settings[key]!r}, as this MACH has; take another folder, or make the MACH as "
            "it was",
        )

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
        check_built(model)
        optimizer = getattr(model, "optimizer", None)
        if optimizer is not None and not optimizer.built:
            optimizer.build(model.trainable_variables)
        try:
            model.load_weights(weights)
        except ValueError as error:
            raise RecordError(
                f"{weights}: these weights do not fit the model that build returns; pass the build "
                f"that {name} was trained with"
            ) from error
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
        self._check(record)
        return record


def check_built(model: Any) -> None:
    """Raise if a model has no weights yet, into which those of a file could be read."""
    if not model.built:
        raise ValueError(
            f"the {type(model).__name__} that build returned is not built, and files of a MACH "
            "need models that are: begin them with keras.Input, or call model.build in build"
        )


def read_settings(path: str | Path) -> tuple[Record, list[str] | None]:
    """Return the manifest of a folder, and the names of its classes if they have any."""
    manifest = Path(path) / MANIFEST
    if not manifest.exists():
        raise FileNotFoundError(f"{path} is no folder of a MACH: it has no {MANIFEST}")
    record = Record.read(manifest)
    if "names" not in record:
        return record, None
    # A process that ended while it added classes has left more names than the manifest says.
    names = list(json.loads((manifest.parent / CLASSES).read_text()))[: record.integer("classes")]
    if _digest_of_names(names) != record.text("names"):
        raise RecordError(f"{manifest.parent / CLASSES}: these are not the names of {manifest}")
    return record, names


def _difference(record: Record, settings: dict[str, Any]) -> str | None:
    """Return the first field in which a record differs from settings; None if it does not."""
    for key, value in settings.items():
        if (record.text if isinstance(value, str) else record.integer)(key) != value:
            return key
    return None


def _digest_of_names(names: Sequence[str]) -> str:
    return _digest(json.dumps(list(names)).encode())


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()
