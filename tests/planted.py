"""A package of kernels that is installed for a test: a module and its entry points in a folder of the module path."""

from pathlib import Path


def planted(folder: Path, name: str, source: str, ops: list[str]) -> None:
    """Put a module `name` into `folder`, offering `KERNEL` for each of `ops` as the backend `name`."""
    (folder / f"{name}.py").write_text(source)
    info = folder / f"{name}-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
    lines = [f"{op}.{name} = {name}:KERNEL" for op in ops]
    (info / "entry_points.txt").write_text("\n".join(["[mxref.kernels]", *lines, ""]))
