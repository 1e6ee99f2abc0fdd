"""All private names of TensorFlow that the strategy uses.

``tests/bridge/test_private.py`` guards each of them, for every TensorFlow that
tfscale supports.
"""

from tensorflow.python.autograph.impl.api import autograph_artifact
from tensorflow.python.data.ops.dataset_ops import _VariantDataset as VariantDataset
from tensorflow.python.distribute.collective_all_reduce_strategy import (
    CollectiveAllReduceExtended,
)
from tensorflow.python.distribute.collective_util import (
    CommunicationImplementation,
    Options,
)
from tensorflow.python.distribute.cross_device_ops import CollectiveAllReduce
from tensorflow.python.distribute.distribute_utils import regroup
from tensorflow.python.distribute.input_lib import (
    DistributedDataset,
    DistributedDatasetsFromFunction,
    DistributedIterator,
    DistributedIteratorSpec,
)
from tensorflow.python.distribute.input_lib import (
    _calculate_replicas_with_values as COUNTS_BATCHES,
)
from tensorflow.python.distribute.input_lib import (
    _replace_per_replica_spec as split_by_replica,
)
from tensorflow.python.distribute.input_lib import (
    _SingleWorkerDatasetIteratorSpec as WorkerIteratorSpec,
)
from tensorflow.python.distribute.input_lib import (
    _SingleWorkerOwnedDatasetIterator as WorkerIterator,
)
from tensorflow.python.distribute.values import (
    DistributedValues,
    DistributedVariable,
    Mirrored,
    MirroredVariable,
    PerReplica,
    SyncOnReadVariable,
)
from tensorflow.python.distribute.values_util import assign_on_device, mark_as_unsaveable
from tensorflow.python.eager.context import context, eager_mode
from tensorflow.python.eager.imperative_grad import imperative_grad
from tensorflow.python.eager.polymorphic_function.polymorphic_function import Function
from tensorflow.python.eager.polymorphic_function.tf_method_target import TfMethodTarget
from tensorflow.python.eager.record import could_possibly_record
from tensorflow.python.ops.control_flow_v2_func_graphs import (
    WhileBodyFuncGraph,
    WhileCondFuncGraph,
)
from tensorflow.python.ops.gradients_util import _GradientsHelper as gradients_in_graph
from tensorflow.python.training.saving.saveable_object import SaveableObject, SaveSpec
from tensorflow.python.util._pywrap_util_port import IsMklEnabled as uses_onednn

__all__ = [
    "COUNTS_BATCHES",
    "CollectiveAllReduce",
    "CollectiveAllReduceExtended",
    "CommunicationImplementation",
    "DistributedDataset",
    "DistributedDatasetsFromFunction",
    "DistributedIterator",
    "DistributedIteratorSpec",
    "DistributedValues",
    "DistributedVariable",
    "Function",
    "Mirrored",
    "MirroredVariable",
    "Options",
    "PerReplica",
    "SaveSpec",
    "SaveableObject",
    "SyncOnReadVariable",
    "TfMethodTarget",
    "VariantDataset",
    "WhileBodyFuncGraph",
    "WhileCondFuncGraph",
    "WorkerIterator",
    "WorkerIteratorSpec",
    "assign_on_device",
    "autograph_artifact",
    "context",
    "could_possibly_record",
    "eager_mode",
    "gradients_in_graph",
    "imperative_grad",
    "mark_as_unsaveable",
    "regroup",
    "split_by_replica",
    "uses_onednn",
]
