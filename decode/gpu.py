"""Where the kernels of `headtrain_kernels` take over. They are imported only there: a CPU never loads triton."""

from torch import Tensor


def runs_kernels(tensor: Tensor) -> bool:
    """One place to ask, so that a test can send CPU tensors through the same branch."""
    return tensor.is_cuda
