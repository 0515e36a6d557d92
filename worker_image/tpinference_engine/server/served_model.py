"""Reads what the server needs of the model directory: tokenizer, template, advice, limits.

No weights. Read before the engine starts, so that a directory that can't be served is refused
within seconds.
"""

from __future__ import annotations

import time

from tpinference_engine.config import EngineConfig
from tpinference_engine.model.config import read_model_config
from tpinference_engine.server.chat_template import load_chat_template
from tpinference_engine.server.plan import ServedModel
from tpinference_engine.server.tokenizer import load_tokenizer


def load_served_model(config: EngineConfig) -> ServedModel:
    model = read_model_config(config.model)
    return ServedModel(
        names=config.served_model_name,
        tokenizer=load_tokenizer(config.model),
        chat_template=load_chat_template(config.model),
        max_model_len=model.limit_model_len(config.max_model_len),
        vocab_size=model.vocab_size,
        defaults=model.generation,
        created=int(time.time()),
    )
