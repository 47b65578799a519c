# SPDX-License-Identifier: Apache-2.0
"""The vLLM release this plugin is written against, and what it says to another one."""

from __future__ import annotations

from neuron_core.errors import ConfigError

__all__ = ["SUPPORTED_VLLM", "check_vllm_version", "version_problem"]

SUPPORTED_VLLM = "0.32"
"""Release series whose interfaces the drift test records."""


def version_problem(version: str) -> str | None:
    """Why this plugin cannot run on vLLM ``version``, or None when it can."""
    if version.split("+")[0].split(".")[:2] == SUPPORTED_VLLM.split("."):
        return None
    return (
        f"this plugin overrides internal interfaces of vLLM {SUPPORTED_VLLM}.x and is tested with no other; "
        f"install vllm=={SUPPORTED_VLLM}.0, or the plugin release made for your vLLM"
    )


def check_vllm_version(version: str) -> None:
    """Raise ``ConfigError`` naming both versions unless this plugin supports vLLM ``version``."""
    if (problem := version_problem(version)) is not None:
        raise ConfigError("vllm.__version__", version, problem)
