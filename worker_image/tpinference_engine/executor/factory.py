"""The executor that a config asks for.

Backends are imported when they are chosen: one rank in this process needs no Ray.
"""

from __future__ import annotations

import os

from tpinference_engine.config import EngineConfig
from tpinference_engine.executor.base import Executor
from tpinference_engine.runner.base import RunnerFactory


def make_executor(
    config: EngineConfig, max_model_len: int, runner_factory: RunnerFactory | None = None
) -> Executor:
    """Nothing is started yet. `runner_factory` None = the model."""
    if config.distributed_executor_backend == "uni":
        from tpinference_engine.executor.uni import UniExecutor

        return UniExecutor(config, max_model_len, runner_factory)
    if config.distributed_executor_backend == "mp":
        from tpinference_engine.executor.multiprocess import MultiprocessExecutor

        return MultiprocessExecutor(config, max_model_len, runner_factory)
    from tpinference_engine.executor.ray_environment import prepare_ray_environment

    prepare_ray_environment(os.environ)
    from tpinference_engine.executor.ray import RayExecutor

    return RayExecutor(config, max_model_len, runner_factory)
