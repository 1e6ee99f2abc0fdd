"""Private names of TensorFlow that the strategy uses.

``tests/bridge/test_private.py`` guards each of them, for every TensorFlow that
tfscale supports.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.autograph.core.ag_ctx import ControlStatusCtx, Status
from tensorflow.python.autograph.impl.api import autograph_artifact, tf_convert
from tensorflow.python.checkpoint.restore import CheckpointPosition
from tensorflow.python.data.ops.dataset_ops import _VariantDataset as VariantDataset
from tensorflow.python.distribute import distribute_utils
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
    DistributedDatasetsFromFunctionSpec,
    DistributedDatasetSpec,
    DistributedIterator,
    DistributedIteratorSpec,
    _calculate_replicas_with_values as COUNTS_BATCHES,
    _replace_per_replica_spec as split_by_replica,
    _SingleWorkerDatasetIteratorSpec as WorkerIteratorSpec,
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
from tensorflow.python.distribute.values_util import (
    assign_on_device,
    is_saving_non_distributed,
    mark_as_unsaveable,
)
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
from tensorflow.python.ops.op_selector import UnliftableError as CannotInitialize
from tensorflow.python.training.saving.saveable_object import SaveableObject, SaveSpec
from tensorflow.python.util._pywrap_util_port import IsMklEnabled as uses_onednn

from tfscale.bridge.hooks import VARIABLE_CLASSES


class ExtendedOfWorkers(CollectiveAllReduceExtended):
    """TensorFlow's class behind a strategy of several workers, with names for its numbers."""

    @property
    def number_of_replicas(self) -> int:
        """Number of replicas of all workers."""
        return int(self._num_replicas_in_sync)

    @property
    def number_of_workers(self) -> int:
        """Number of workers; 1 without a cluster."""
        return int(self._num_workers)

    @property
    def worker(self) -> int:
        """Index of this worker."""
        return int(self._id_in_cluster)

    @property
    def devices(self) -> Sequence[str]:
        """Names of this worker's devices, one for each of its replicas."""
        return self._devices  # type: ignore[no-any-return]

    @property
    def cluster_resolver(self) -> Any:
        """Object that lists the workers."""
        return self._cluster_resolver


def converted(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function as ``tf.function`` traces it: with its loops and branches in the graph.

    A ``tf.function`` converts its code also where its caller's code is not converted, as in Keras.
    """
    enabled = ControlStatusCtx(status=Status.ENABLED)
    return tf_convert(function, enabled, user_requested=True)  # type: ignore[no-any-return]


def sum_without_gradient(value: Any) -> Any:
    """Return the sum over replicas of what this one gives; a gradient is the caller's business."""
    return tf.distribute.get_strategy().extended._replica_ctx_all_reduce("SUM", value)


def replica_id(replica: Any = None) -> int:
    """Return the index, among those of its process, of a replica: by default, of the caller."""
    found = tf.distribute.get_replica_context() if replica is None else replica
    return int(found._replica_id)


def own_copy(variable: Any) -> Any:
    """Return this replica's copy of a variable; outside of replicas, the first one."""
    return variable._get_on_device_or_primary()


def read_from_outside(variable: Any) -> tf.Tensor:
    """Return what a variable with a copy on each replica reads as outside of replicas."""
    return variable._get_cross_replica()


def first_copy(variable: Any) -> Any:
    """Return the first replica's copy of a variable."""
    return variable._primary


def become(variable: Any, kind: type) -> Any:
    """Give a variable that TensorFlow has just made another class; return the variable."""
    variable.__class__ = kind
    return variable


# Chooses by TensorFlow's class, the aggregation and the type of the numbers.
ClassOf = Callable[[type, Any, tf.DType], tuple[type, Any]]


def variables_of(choose: ClassOf) -> contextlib.AbstractContextManager[None]:
    """Make replicated variables of chosen classes in a block, and in this thread.

    TensorFlow makes its variables from a fixed table of classes.

    Args:
        choose: gets TensorFlow's class, the aggregation and the type of the numbers; returns the
            class and the aggregation that the variable gets.
    """

    def create(
        original: Callable[..., Any], strategy: Any, creator: Any, classes: Any, *args: Any,
        **keywords: Any,
    ) -> Any:  # fmt: skip
        table = {
            key: lambda strategy, values, aggregation, kind=kind: _made(
                choose, kind, strategy, values, aggregation
            )
            for key, kind in classes.items()
        }
        return original(strategy, creator, table, *args, **keywords)

    return VARIABLE_CLASSES.on(distribute_utils, create, in_thread=True)


def _made(choose: ClassOf, kind: type, strategy: Any, values: Any, aggregation: Any) -> Any:
    kind, aggregation = choose(kind, aggregation, values[0].dtype)
    return kind(strategy, values, aggregation)
