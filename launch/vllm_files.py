"""vLLM's weight transfer from safetensors files: its four phases, with a folder that both machines see as transport.

    init_weight_transfer_engine ─► start_weight_update ─► update_weights {"file": PATH}, … ─► finish_weight_update

`launch/vllm.sh` names `Extension` to vLLM as --worker-extension-cls, so that every worker imports this file before it
makes its weight transfer; written after vllm/distributed/weight_transfer/{base,nccl_engine}.py of vLLM 0.32.
NCCL and CUDA IPC, which vLLM has itself, want a trainer in torch; IPC over HTTP wants pickles too.
"""

from dataclasses import dataclass

from safetensors.torch import load_file
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload


@dataclass
class Nothing(WeightTransferInitInfo):
    """A folder needs no preparation."""


@dataclass
class File(WeightTransferUpdateInfo):
    """A safetensors file of Hugging Face's names and layout, by its path on the server."""

    file: str


class FileTransfer(WeightTransferEngine[Nothing, File]):
    """A transfer that reads files into the model, shard by shard, in each worker."""

    init_info_cls, update_info_cls = Nothing, File

    def init_transfer_engine(self, init_info: Nothing) -> None:
        """Do nothing."""

    def start_weight_update(self) -> None:
        """Let layers take weights in the checkpoint's form again."""
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, str]) -> None:
        """Read one file."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: File) -> None:
        """Read one file into the model. Raises OSError or SafetensorError for one that is none."""
        self.model.load_weights(load_file(update_info.file).items())

    def finish_weight_update(self) -> None:
        """Bring the weights into the form that layers compute with."""
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """Do nothing."""


WeightTransferEngineFactory.register_engine("files", FileTransfer)


class Extension:
    """Adds nothing to a worker: naming it makes the worker import this file."""
