"""Control groups, by which Linux limits the processor time and the memory of a container."""

from __future__ import annotations

from pathlib import Path


def folders(controller: str) -> list[Path]:
    """Return the folders of the groups that limit this process, from the innermost to the root."""
    found = []
    for line in (text_of(Path("/proc/self/cgroup")) or "").splitlines():
        _, controllers, own = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = Path("/sys/fs/cgroup", controller if controllers else "")
        place = root / own.lstrip("/")
        # In a container, the path may be that of the host, and only the root exists.
        found += [each for each in (place, *place.parents) if each.is_relative_to(root)]
    return found


def processors() -> float | None:
    """Return how many cores' time this process's groups may take; None if it is not limited."""
    quotas = []
    for folder in folders("cpu"):
        quota, _, period = (text_of(folder / "cpu.max") or "").partition(" ")  # version 2
        quota = quota or text_of(folder / "cpu.cfs_quota_us") or ""
        period = period or text_of(folder / "cpu.cfs_period_us") or ""
        if quota.isdecimal() and period.isdecimal():
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def text_of(file: Path) -> str | None:
    """Return the text of a file without space around it; None if it cannot be read."""
    try:
        return file.read_text().strip()
    except OSError:
        return None
