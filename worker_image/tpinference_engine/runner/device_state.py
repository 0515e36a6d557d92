"""What a rank keeps on its device between steps, and the two things a step does to it.

Everything here runs in the device queue. It trusts its arrays: slots.py has checked the message.
Letters as in llama.py and attention.py; S slots, E block appends.
"""

from __future__ import annotations

import torch

from tpinference_engine.model.llama import Llama
from tpinference_engine.model.rope import Rotation
from tpinference_engine.runner.batch import FROM_SLOT, ForwardArrays, all_single
from tpinference_engine.runner.cache import PagedCache
from tpinference_engine.runner.compute import Compute, ForwardTensors, SampleTensors
from tpinference_engine.runner.graphs import DecodeGraphs, graph_sizes


class DeviceState:
    def __init__(
        self, model: Llama, rotation: Rotation, cache: PagedCache, compute: Compute
    ) -> None:
        self._model = model
        self._rotation = rotation
        self._cache = cache
        self._compute = compute
        self._graphs = DecodeGraphs()
        self._last_token_S = torch.zeros(cache.num_slots, dtype=torch.int64, device=cache.device)
        self._logits_RV: torch.Tensor | None = None

    def capture(self) -> None:
        """Graphs of all steps that are decodes alone."""
        self._graphs.capture(
            self.forward_decodes, graph_sizes(self._cache.num_slots), self._cache.device
        )

    def fit(self, arrays: ForwardArrays, bucket: int) -> ForwardArrays:
        """Padded to a graph's size if one can run it. On the host."""
        size = self._graphs.size_for(bucket) if arrays.only_decodes else 0
        return arrays.padded(size) if size else arrays

    def sample(self, wanted: SampleTensors) -> torch.Tensor:
        """SAMPLE: a token for each column, also kept as its slot's last."""
        logits_RV, self._logits_RV = self._logits_RV, None
        if logits_RV is None or not wanted.columns_7R.shape[1]:
            return wanted.columns_7R.new_empty(0)
        return self._compute.sample(logits_RV, wanted, self._last_token_S)

    def append(self, appends_3E: torch.Tensor) -> None:
        """STATE: nothing but block tables is on the device."""
        if appends_3E.shape[1]:
            self._cache.append(appends_3E)

    def forward(self, arrays: ForwardArrays, tensors: ForwardTensors) -> None:
        """FORWARD: leaves the wanted logits for the next SAMPLE."""
        if not tensors.tokens_3T.shape[1]:
            return
        if arrays.is_padded:
            self._logits_RV = self._graphs.replay(tensors.tokens_3T)
            return
        x_TD = self._hidden(arrays, tensors)
        if len(tensors.logits_columns_R):
            self._logits_RV = self._model.logits(x_TD[tensors.logits_columns_R])

    def forward_decodes(self, tokens_3T: torch.Tensor) -> torch.Tensor:
        """Logits of a step of decodes alone: what a graph holds."""
        arrays = all_single(tokens_3T.shape[1])
        nothing = tokens_3T.new_empty((4, 0))
        return self._model.logits(self._hidden(arrays, ForwardTensors(tokens_3T, nothing, nothing)))

    def _hidden(self, arrays: ForwardArrays, tensors: ForwardTensors) -> torch.Tensor:
        sent_T, slots_T, _ = tensors.tokens_3T
        ids_T = torch.where(sent_T == FROM_SLOT, self._last_token_S[slots_T], sent_T)
        attend = self._compute.attention(self._cache, self._rotation, arrays, tensors)
        return self._model.forward(ids_T, attend)
