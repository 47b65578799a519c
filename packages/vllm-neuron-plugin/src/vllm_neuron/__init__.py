# SPDX-License-Identifier: Apache-2.0
"""vLLM platform plugin: language models as static-shape graphs compiled ahead of time, for Neuron and CPU."""

from __future__ import annotations

__all__ = ["__version__", "register", "register_general"]

__version__ = "0.1.0"


def register() -> str:
    """Entry point ``vllm.platform_plugins``: the platform's class path.

    vLLM swallows what a platform plugin raises here, so nothing is refused at this point: an unsupported vLLM
    version is logged now and refused by the platform when the engine's configuration is built.
    """
    import vllm
    from vllm.logger import init_logger

    from vllm_neuron.exposition import share_metrics
    from vllm_neuron.forking import give_threads_back_before_fork
    from vllm_neuron.patches import pin_model_runner
    from vllm_neuron.versions import version_problem

    if (problem := version_problem(vllm.__version__)) is not None:
        init_logger(f"vllm.{__name__}").error("vLLM %s: %s", vllm.__version__, problem)
    pin_model_runner()
    share_metrics()
    give_threads_back_before_fork()
    return "vllm_neuron.platform.NeuronPlatform"


def register_general() -> None:
    """Entry point ``vllm.general_plugins``: runs in every process, before a model's configuration is read.

    Registers the model architectures and applies the patches of vLLM, unless another platform is in use, in
    which case one line says why this one is not.
    """
    from vllm_neuron.startup import prepare_process

    prepare_process()
