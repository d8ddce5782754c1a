"""Builds the native CPU kernels while the package is installed, when there is a compiler.

An install never fails for want of one: the reason is left beside where the library would be, and
the kernels' Python side reports it.
"""

import importlib.util
import sysconfig
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

NATIVE = Path("pallas_kernels", "native")


class NativeKernels(BuildHookInterface):
    """Compiles the shared library in place, and adds it to a wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build for wheels and editable installs; a source archive holds sources only."""
        del version
        if self.target_name != "wheel":
            return
        folder = Path(self.root) / NATIVE
        build = _build_module(folder / "build.py")
        note = folder / build.FAILURE_NAME
        try:
            library = build.build()
        except (build.BuildError, OSError) as error:
            note.write_text(f"{error}\n", encoding="utf-8")
            self.app.display_warning(f"The native CPU kernels were not built: {error}")
            build_data["artifacts"].append(note.relative_to(self.root).as_posix())
            return
        note.unlink(missing_ok=True)
        build_data["artifacts"].append(library.relative_to(self.root).as_posix())
        build_data["pure_python"] = False
        # The library knows nothing of Python: one wheel serves every version of it.
        system = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["tag"] = f"py3-none-{system}"


def _build_module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("_pallas_kernels_build", path)
    if spec is None or spec.loader is None:
        raise FileNotFoundError(path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
