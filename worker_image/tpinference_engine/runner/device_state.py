"""What a rank keeps on its device between steps, and the two things a step does to it.

Everything here runs in the device queue. It trusts its arrays: slots.py has checked the message.
Letters as in llama.py and attention.py; S slots, E block appends.
"""

from __future__ import annotations

import torch

from tpinference_engine.model.llama import Llama
from tpinference_engine.runner.attention import PagedAttention
from tpinference_engine.runner.batch import FROM_SLOT, ForwardArrays
from tpinference_engine.runner.cache import PagedCache
from tpinference_engine.runner.sampler import sample, unpack_sample


class DeviceState:
    def __init__(
        self, model: Llama, cache: PagedCache, *, num_slots: int, device: torch.device
    ) -> None:
        self._model = model
        self._cache = cache
        self._last_token_S = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self._logits_RV: torch.Tensor | None = None

    def sample(
        self, columns_7R: torch.Tensor, random_R: torch.Tensor, limited: bool
    ) -> torch.Tensor:
        """SAMPLE: a token for each column, also kept as its slot's last."""
        logits_RV, self._logits_RV = self._logits_RV, None
        if logits_RV is None or not columns_7R.shape[1]:
            return columns_7R.new_empty(0)
        rows = unpack_sample(columns_7R)
        tokens_R = sample(logits_RV[rows.logits_rows_R], rows, random_R, limited)
        self._last_token_S[rows.slots_R] = tokens_R
        return tokens_R

    def append(self, appends_3E: torch.Tensor) -> None:
        """STATE: nothing but block tables is on the device."""
        if appends_3E.shape[1]:
            self._cache.append(appends_3E)

    def forward(
        self, arrays: ForwardArrays, tokens_3T: torch.Tensor, logits_columns_R: torch.Tensor
    ) -> None:
        """FORWARD: leaves the wanted logits for the next SAMPLE."""
        if not tokens_3T.shape[1]:
            return
        sent_T, slots_T, positions_T = tokens_3T
        ids_T = torch.where(sent_T == FROM_SLOT, self._last_token_S[slots_T], sent_T)
        attention = PagedAttention(
            self._cache, arrays, slots_T, positions_T, self._model.group_size
        )
        x_TD = self._model.forward(ids_T, positions_T, attention)
        if len(logits_columns_R):
            self._logits_RV = self._model.logits(x_TD[logits_columns_R])
