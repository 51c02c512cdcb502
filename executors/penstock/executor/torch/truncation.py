"""Settings of top-k, top-p and min-p for many rows: the input of both threshold searches
(`inverse_cdf` and `threshold_search`).
"""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Truncation:
    """Settings per row [m]: `top_k` int64, 0 for off; `top_p` float64, 1 for off; `min_p` float64,
    0 for off.
    """

    top_k: Tensor
    top_p: Tensor
    min_p: Tensor

    def take(self, rows: Tensor) -> "Truncation":
        """Return the settings of the rows with the indices `rows`."""
        return Truncation(top_k=self.top_k[rows], top_p=self.top_p[rows], min_p=self.min_p[rows])
