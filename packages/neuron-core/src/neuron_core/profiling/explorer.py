# SPDX-License-Identifier: Apache-2.0
"""The vendor's own profiles: variables that make the runtime record, and the tool that profiles one graph.

Interface: AWS Neuron SDK, tools/neuron-explorer (``environment-variables``, ``get-started``). Not run on hardware.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from neuron_core.errors import ConfigError, DeviceError

__all__ = ["EXECUTABLE", "Explorer", "inspection_variables"]

EXECUTABLE = "neuron-explorer"
_LAST_LINES = 5


def inspection_variables(folder: Path) -> Mapping[str, str]:
    """What makes the Neuron runtime write its system and device traces into ``folder``.

    The runtime reads them when it starts, so that they cover a process's whole life. They exclude torch's profiler.
    """
    return {
        "NEURON_RT_INSPECT_ENABLE": "1",
        "NEURON_RT_INSPECT_SYSTEM_PROFILE": "1",
        "NEURON_RT_INSPECT_DEVICE_PROFILE": "1",
        "NEURON_RT_INSPECT_OUTPUT_DIR": str(folder),
    }


@dataclass(frozen=True)
class Explorer:
    """``neuron-explorer`` on this machine."""

    path: str

    @classmethod
    def find(cls, executable: str = EXECUTABLE) -> Explorer:
        """Look it up on PATH; raises ``DeviceError`` if it is not there."""
        path = shutil.which(executable)
        if path is None:
            hint = "install aws-neuronx-tools and put the SDK's bin folder on PATH"
            raise DeviceError(f"{executable} is not on PATH; {hint}")
        return cls(path)

    def capture(self, neff: Path, ntff: Path, timeout_s: float) -> Path:
        """Run the graph in ``neff`` once on a core and write its profile, which ``ntff`` names.

        Raises ``ConfigError`` if there is no such graph, and ``DeviceError`` with the tool's last lines if it fails,
        takes longer than ``timeout_s`` seconds, or writes nothing.
        """
        if not neff.is_file():
            raise ConfigError("NEFF", str(neff), "is no file; name a compiled graph, such as graph.neff")
        command = [self.path, "capture", "-n", str(neff), "-s", str(ntff)]
        try:
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=timeout_s,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise DeviceError(f"{' '.join(command)} had not ended after {timeout_s:g} s") from error
        except OSError as error:
            raise DeviceError(f"{' '.join(command)} does not run ({error})") from error
        said = " | ".join(done.stdout.strip().splitlines()[-_LAST_LINES:]) or "nothing"
        if done.returncode != 0:
            raise DeviceError(f"{' '.join(command)} failed with exit status {done.returncode}: {said}")
        if not ntff.is_file():
            raise DeviceError(f"{' '.join(command)} ended well and wrote no {ntff.name}: {said}")
        return ntff
